//! bpf(2), as far as a cgroup's rules for devices go.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use super::{check, owned};

const PROG_LOAD: libc::c_int = 5;
const PROG_ATTACH: libc::c_int = 8;
const CGROUP_DEVICE_PROGRAM: u32 = 15;
const CGROUP_DEVICE: u32 = 6;
/// Programs of the cgroups above and below hold as well: a device is denied when any of them denies it.
const ALLOW_MULTI: u32 = 2;
/// The program calls no function of the kernel's that would ask for another.
const LICENSE: &CStr = c"Apache-2.0";

/// The beginning of `union bpf_attr` for BPF_PROG_LOAD; what the kernel knows more of is zero.
#[repr(C)]
struct Load {
    kind: u32,
    count: u32,
    instructions: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log: u64,
    kernel_version: u32,
    flags: u32,
}

/// The same for BPF_PROG_ATTACH.
#[repr(C)]
struct Attach {
    target: u32,
    program: u32,
    kind: u32,
    flags: u32,
}

/// Loads a program that decides on the use of devices. `T` is `struct bpf_insn`.
pub(crate) fn load_device_program<T: Copy>(program: &[T]) -> io::Result<OwnedFd> {
    const { assert!(size_of::<T>() == 8) };
    let load = Load {
        kind: CGROUP_DEVICE_PROGRAM,
        count: u32::try_from(program.len()).map_err(io::Error::other)?,
        instructions: program.as_ptr() as u64,
        license: LICENSE.as_ptr() as u64,
        log_level: 0,
        log_size: 0,
        log: 0,
        kernel_version: 0,
        flags: 0,
    };
    // SAFETY: the size is that of `load`, which names as many instructions as `program` has; all of it outlives the
    // call, which copies them and judges them itself.
    owned(unsafe { libc::syscall(libc::SYS_bpf, PROG_LOAD, &raw const load, size_of::<Load>()) })
}

/// Has the kernel ask the program about every device that a process of the cgroup, which that directory is, uses.
/// It stays as long as the cgroup.
pub(crate) fn attach_device_program(cgroup: &OwnedFd, program: &OwnedFd) -> io::Result<()> {
    let number = |fd: &OwnedFd| u32::try_from(fd.as_raw_fd()).map_err(io::Error::other);
    let attach = Attach {
        target: number(cgroup)?,
        program: number(program)?,
        kind: CGROUP_DEVICE,
        flags: ALLOW_MULTI,
    };
    // SAFETY: the size is that of `attach`, which outlives the call and holds two open descriptors.
    check(unsafe { libc::syscall(libc::SYS_bpf, PROG_ATTACH, &raw const attach, size_of::<Attach>()) })
        .map(drop)
}

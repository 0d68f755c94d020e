//! bpf(2) for the device rules of cgroup v2.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use super::{check, owned};

const PROG_LOAD: libc::c_int = 5;
const PROG_ATTACH: libc::c_int = 8;
const CGROUP_DEVICE_PROGRAM: u32 = 15;
const CGROUP_DEVICE: u32 = 6;
/// `BPF_F_ALLOW_MULTI`: programs of parent and child cgroups apply too. A device is denied if one of these programs
/// denies it.
const ALLOW_MULTI: u32 = 2;
/// The program calls no kernel helper that requires the GPL.
const LICENSE: &CStr = c"Apache-2.0";

/// The first fields of `union bpf_attr` for BPF_PROG_LOAD. The kernel treats later fields as zero.
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

/// The first fields of `union bpf_attr` for BPF_PROG_ATTACH.
#[repr(C)]
struct Attach {
    target: u32,
    program: u32,
    kind: u32,
    flags: u32,
}

/// Loads a cgroup device program. `T` is `struct bpf_insn`.
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
    // SAFETY: the size is that of `load`, which refers to as many instructions as `program` has. All of it
    // outlives the call, in which the kernel copies and verifies the program.
    owned(unsafe { libc::syscall(libc::SYS_bpf, PROG_LOAD, &raw const load, size_of::<Load>()) })
}

/// Attaches a program to a cgroup, whose directory is `cgroup`. The program decides on every device access of the
/// cgroup's processes. It stays attached as long as the cgroup exists.
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

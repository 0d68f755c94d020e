//! System calls that are newer than libseccomp or than the profile.
//!
//! A C library tries the newest call first and falls back to an older call on `ENOSYS`. On a profile's `EPERM` the
//! library assumes that the call is forbidden, and fails. So calls newer than all calls of the profile get `ENOSYS`, as
//! in runc. Calls that the profile has but libseccomp does not support are decided here. So are refusals of single
//! `ioctl` requests. The result is a prefix of libseccomp's program, which decides all other calls.

use libseccomp::{ScmpAction, ScmpSyscall};
use oci_spec::runtime::{Arch, LinuxSeccomp, LinuxSeccompAction};

use super::architecture::architecture;

/// Bytes of an instruction (`struct sock_filter`).
pub(super) const INSTRUCTION: usize = 8;

/// System calls of Linux 5.15 to 6.17. Their numbers are the same on all architectures (`scripts/syscall.tbl` of the
/// kernel).
const NEW_SYSTEM_CALLS: [(&str, u32); 22] = [
    ("process_mrelease", 448),
    ("futex_waitv", 449),
    ("set_mempolicy_home_node", 450),
    ("cachestat", 451),
    ("fchmodat2", 452),
    ("map_shadow_stack", 453),
    ("futex_wake", 454),
    ("futex_wait", 455),
    ("futex_requeue", 456),
    ("statmount", 457),
    ("listmount", 458),
    ("lsm_get_self_attr", 459),
    ("lsm_set_self_attr", 460),
    ("lsm_list_modules", 461),
    ("mseal", 462),
    ("setxattrat", 463),
    ("getxattrat", 464),
    ("listxattrat", 465),
    ("removexattrat", 466),
    ("open_tree_attr", 467),
    ("file_getattr", 468),
    ("file_setattr", 469),
];

/// First number of x32 calls. That architecture has its own numbers.
const X32: u32 = 0x4000_0000;
/// Number of `ioctl` on x32.
const X32_IOCTL: u32 = X32 + 514;
/// First number of the system calls that only 32-bit ARM has (`__ARM_NR_BASE`). New system calls have lower numbers.
const ARM: u32 = 0x000f_0000;

// Offsets in `struct seccomp_data`, and return values of a filter (linux/seccomp.h).
const OFFSET_NUMBER: u32 = 0;
const OFFSET_ARCHITECTURE: u32 = 4;
/// Offset of the lower half of the second argument. All supported machines store the lower half first.
const OFFSET_SECOND_ARGUMENT: u32 = 24;
const RET_KILL_PROCESS: u32 = 0x8000_0000;
const RET_KILL_THREAD: u32 = 0;
const RET_TRAP: u32 = 0x0003_0000;
const RET_ERRNO: u32 = 0x0005_0000;
const RET_NOTIFY: u32 = 0x7fc0_0000;
const RET_TRACE: u32 = 0x7ff0_0000;
const RET_LOG: u32 = 0x7ffc_0000;
const RET_ALLOW: u32 = 0x7fff_0000;

// BPF instructions (linux/bpf_common.h).
const LOAD: u16 = 0x20;
const JUMP: u16 = 0x05;
const IF_EQUAL: u16 = 0x15;
const IF_GREATER: u16 = 0x25;
const IF_AT_LEAST: u16 = 0x35;
const RETURN: u16 = 0x06;

/// A BPF instruction (`struct sock_filter` of linux/filter.h).
#[derive(Clone, Copy)]
struct Instruction {
    code: u16,
    /// Number of instructions to skip if the comparison holds.
    jump_true: u8,
    /// Number of instructions to skip if the comparison does not hold.
    jump_false: u8,
    value: u32,
}

/// The action for one value: the number of a system call, or a request of `ioctl`.
#[derive(Clone, Copy)]
pub(super) struct Decision {
    pub(super) value: u32,
    pub(super) action: ScmpAction,
}

/// An instruction without a comparison (`BPF_STMT`).
const fn statement(code: u16, value: u32) -> Instruction {
    Instruction { code, jump_true: 0, jump_false: 0, value }
}

/// A comparison with a value (`BPF_JUMP`).
const fn compare(code: u16, value: u32, jump_true: u8, jump_false: u8) -> Instruction {
    Instruction { code, jump_true, jump_false, value }
}

/// Maximum refused requests of `ioctl`: the length of a jump over their checks has one byte.
pub(super) const MAX_REQUESTS: usize = 100;

/// The number of a call that is newer than libseccomp. `None` for other calls.
pub(super) fn number(name: &str) -> Option<u32> {
    NEW_SYSTEM_CALLS.iter().find(|(known, _)| *known == name).map(|(_, number)| *number)
}

/// The prefix for libseccomp's program. Empty if the prefix has no decisions.
pub(super) fn prefix(
    profile: &LinuxSeccomp,
    architectures: &[Arch],
    calls: &[Decision],
    requests: &[Decision],
) -> Vec<u8> {
    let absent = needs_enosys(profile);
    if calls.is_empty() && requests.is_empty() && !absent {
        return Vec::new();
    }
    let mut blocks: Vec<(u32, Vec<Instruction>)> = Vec::new();
    for of in with_native(architectures) {
        let Some(token) = token(of) else { continue };
        let newest = absent.then(|| newest(profile, of)).flatten();
        let mut checks = request_checks(of, requests);
        checks.extend(block(calls, newest, own(of)));
        blocks.push((token, checks));
    }
    let mut program = vec![statement(LOAD, OFFSET_ARCHITECTURE)];
    for (token, block) in blocks {
        // On another architecture the program jumps over the following jump and the block.
        program.push(compare(IF_EQUAL, token, 1, 0));
        program.push(statement(JUMP, length(&block)));
        program.extend(block);
    }
    // A block that decides no call jumps to the end of the prefix.
    let end = program.len();
    for (at, instruction) in program.iter_mut().enumerate() {
        if instruction.code == JUMP && instruction.value == PREFIX_END {
            instruction.value = u32::try_from(end - at - 1).unwrap_or_default();
        }
    }
    program.iter().flat_map(|instruction| encode(*instruction)).collect()
}

/// Placeholder for the distance to the end of the prefix.
const PREFIX_END: u32 = u32::MAX;

/// Refusals of requests of `ioctl`, on one architecture.
fn request_checks(of: Arch, requests: &[Decision]) -> Vec<Instruction> {
    if requests.is_empty() {
        return Vec::new();
    }
    let mut refusals = vec![statement(LOAD, OFFSET_SECOND_ARGUMENT)];
    for request in requests {
        refusals.push(compare(IF_EQUAL, request.value, 0, 1));
        refusals.push(statement(RETURN, answer(request.action)));
    }
    refusals.push(statement(JUMP, PREFIX_END));
    let over = u8::try_from(refusals.len()).unwrap_or(u8::MAX);
    let native = ScmpSyscall::from_name_by_arch("ioctl", architecture(of)).ok();
    let native = native.map(|number| i32::from(number).cast_unsigned());
    // The kernel reports x32 calls as calls of x86-64.
    let x32 = (of == Arch::ScmpArchX86_64).then_some(X32_IOCTL);
    let mut checks = vec![statement(LOAD, OFFSET_NUMBER)];
    for number in native.into_iter().chain(x32) {
        checks.push(compare(IF_EQUAL, number, 0, over));
        checks.extend(refusals.iter().copied());
    }
    checks
}

/// The decisions for one architecture. Ends with a jump to the end of the prefix.
fn block(calls: &[Decision], newest: Option<u32>, own: u32) -> Vec<Instruction> {
    let mut block =
        vec![statement(LOAD, OFFSET_NUMBER), compare(IF_AT_LEAST, own, 0, 1), statement(JUMP, PREFIX_END)];
    for call in calls {
        block.push(compare(IF_EQUAL, call.value, 0, 1));
        block.push(statement(RETURN, answer(call.action)));
    }
    if let Some(newest) = newest {
        block.push(compare(IF_GREATER, newest, 0, 1));
        block.push(statement(RETURN, RET_ERRNO | libc::ENOSYS.cast_unsigned()));
    }
    block.push(statement(JUMP, PREFIX_END));
    block
}

fn length(block: &[Instruction]) -> u32 {
    u32::try_from(block.len()).unwrap_or_default()
}

/// Whether the prefix must refuse calls newer than the profile with `ENOSYS`: the profile refuses unknown calls with
/// another result.
fn needs_enosys(profile: &LinuxSeccomp) -> bool {
    let permissive = matches!(
        profile.default_action(),
        LinuxSeccompAction::ScmpActAllow
            | LinuxSeccompAction::ScmpActLog
            | LinuxSeccompAction::ScmpActTrace
            | LinuxSeccompAction::ScmpActNotify
    );
    !permissive && profile.default_errno_ret() != Some(libc::ENOSYS.cast_unsigned())
}

/// The highest number of the profile's calls on an architecture.
fn newest(profile: &LinuxSeccomp, of: Arch) -> Option<u32> {
    let names = profile.syscalls().iter().flatten().flat_map(|call| call.names());
    let numbers = names.filter_map(|name| match ScmpSyscall::from_name_by_arch(name, architecture(of)) {
        // Negative numbers are libseccomp's own, for calls of other architectures.
        Ok(known) => u32::try_from(i32::from(known)).ok(),
        Err(_unknown) => number(name),
    });
    numbers.filter(|number| *number < own(of)).max()
}

/// First system call number that the prefix leaves to libseccomp's program.
fn own(of: Arch) -> u32 {
    if of == Arch::ScmpArchArm { ARM } else { X32 }
}

/// The native architecture, which libseccomp always includes, then the profile's architectures.
fn with_native(architectures: &[Arch]) -> Vec<Arch> {
    let native = if cfg!(target_arch = "x86_64") {
        Some(Arch::ScmpArchX86_64)
    } else if cfg!(target_arch = "aarch64") {
        Some(Arch::ScmpArchAarch64)
    } else if cfg!(target_arch = "riscv64") {
        Some(Arch::ScmpArchRiscv64)
    } else if cfg!(target_arch = "arm") {
        Some(Arch::ScmpArchArm)
    } else {
        None
    };
    let others = architectures.iter().copied().filter(|of| Some(*of) != native);
    native.into_iter().chain(others).collect()
}

/// The kernel's number of an architecture (`AUDIT_ARCH_*` of linux/audit.h). For other architectures libseccomp's
/// program decides everything.
fn token(of: Arch) -> Option<u32> {
    match of {
        Arch::ScmpArchX86_64 => Some(0xc000_003e),
        Arch::ScmpArchX86 => Some(0x4000_0003),
        Arch::ScmpArchAarch64 => Some(0xc000_00b7),
        Arch::ScmpArchArm => Some(0x4000_0028),
        Arch::ScmpArchRiscv64 => Some(0xc000_00f3),
        _ => None,
    }
}

fn answer(action: ScmpAction) -> u32 {
    match action {
        ScmpAction::KillThread => RET_KILL_THREAD,
        ScmpAction::Trap => RET_TRAP,
        ScmpAction::Notify => RET_NOTIFY,
        ScmpAction::Errno(errno) => RET_ERRNO | (errno.cast_unsigned() & 0xffff),
        ScmpAction::Trace(message) => RET_TRACE | u32::from(message),
        ScmpAction::Log => RET_LOG,
        ScmpAction::Allow => RET_ALLOW,
        // Unknown actions of later libseccomp versions also kill the process.
        ScmpAction::KillProcess | _ => RET_KILL_PROCESS,
    }
}

fn encode(instruction: Instruction) -> [u8; INSTRUCTION] {
    let Instruction { code, jump_true, jump_false, value } = instruction;
    let (code, value) = (code.to_ne_bytes(), value.to_ne_bytes());
    [code[0], code[1], jump_true, jump_false, value[0], value[1], value[2], value[3]]
}

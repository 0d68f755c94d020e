//! System calls that are newer than the seccomp library, or than the profile.
//!
//! A C library tries the newest call first and falls back on an older one when the answer is `ENOSYS`; with a
//! profile's `EPERM` it takes the call for forbidden and fails. So what is newer than everything that the profile
//! names is "not there", as runc has it too; and calls that the profile names but the library does not know yet are
//! decided here. It is a prefix of the library's program: what it does not decide goes on there.

use libseccomp::{ScmpAction, ScmpSyscall};
use oci_spec::runtime::{Arch, LinuxSeccomp, LinuxSeccompAction};

use super::architecture;

/// Bytes of an instruction (`struct sock_filter`).
pub(super) const INSTRUCTION: usize = 8;

/// The calls of Linux 5.15 to 6.17, with numbers that all architectures have in common
/// (`scripts/syscall.tbl` of the kernel).
const NEWER: [(&str, u32); 22] = [
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

/// Calls of x32 begin here; that architecture has numbers of its own.
const X32: u32 = 0x4000_0000;

// Where `struct seccomp_data` has what a filter looks at, and what a filter may answer (linux/seccomp.h).
const OFFSET_NUMBER: u32 = 0;
const OFFSET_ARCHITECTURE: u32 = 4;
const RET_KILL_PROCESS: u32 = 0x8000_0000;
const RET_KILL_THREAD: u32 = 0;
const RET_TRAP: u32 = 0x0003_0000;
const RET_ERRNO: u32 = 0x0005_0000;
const RET_NOTIFY: u32 = 0x7fc0_0000;
const RET_TRACE: u32 = 0x7ff0_0000;
const RET_LOG: u32 = 0x7ffc_0000;
const RET_ALLOW: u32 = 0x7fff_0000;

// The instructions in use (linux/bpf_common.h).
const LOAD: u16 = 0x20;
const JUMP: u16 = 0x05;
const IF_EQUAL: u16 = 0x15;
const IF_GREATER: u16 = 0x25;
const IF_AT_LEAST: u16 = 0x35;
const RETURN: u16 = 0x06;

/// One instruction: what, two distances to jump, a value.
type Instruction = (u16, u8, u8, u32);

/// The number of a call that the library does not know.
pub(super) fn number(name: &str) -> Option<u32> {
    NEWER.iter().find(|(known, _)| *known == name).map(|(_, number)| *number)
}

/// What comes before the library's program; nothing where there is nothing to say.
pub(super) fn prefix(
    profile: &LinuxSeccomp,
    architectures: &[Arch],
    decided: &[(u32, ScmpAction)],
) -> Vec<u8> {
    let absent = says_absent(profile);
    if decided.is_empty() && !absent {
        return Vec::new();
    }
    let mut blocks: Vec<(u32, Vec<Instruction>)> = Vec::new();
    for of in with_native(architectures) {
        let Some(token) = token(of) else { continue };
        let newest = absent.then(|| newest(profile, of)).flatten();
        blocks.push((token, block(decided, newest)));
    }
    let mut program = vec![(LOAD, 0, 0, OFFSET_ARCHITECTURE)];
    for (token, block) in blocks {
        // Not this architecture: past the jump, the block and its own last jump.
        program.push((IF_EQUAL, 1, 0, token));
        program.push((JUMP, 0, 0, length(&block)));
        program.extend(block);
    }
    // Each block that decides nothing leaves to what follows the last one.
    let end = program.len();
    for (at, instruction) in program.iter_mut().enumerate() {
        if instruction.0 == JUMP && instruction.3 == LEAVE {
            instruction.3 = u32::try_from(end - at - 1).unwrap_or_default();
        }
    }
    program.iter().flat_map(|instruction| encode(*instruction)).collect()
}

/// Stands for the distance to the prefix's end, until that is known.
const LEAVE: u32 = u32::MAX;

/// What is decided for one architecture. Ends by leaving.
fn block(decided: &[(u32, ScmpAction)], newest: Option<u32>) -> Vec<Instruction> {
    let mut block = vec![(LOAD, 0, 0, OFFSET_NUMBER), (IF_AT_LEAST, 0, 1, X32), (JUMP, 0, 0, LEAVE)];
    for (number, action) in decided {
        block.push((IF_EQUAL, 0, 1, *number));
        block.push((RETURN, 0, 0, answer(*action)));
    }
    if let Some(newest) = newest {
        block.push((IF_GREATER, 0, 1, newest));
        block.push((RETURN, 0, 0, RET_ERRNO | libc::ENOSYS.cast_unsigned()));
    }
    block.push((JUMP, 0, 0, LEAVE));
    block
}

fn length(block: &[Instruction]) -> u32 {
    u32::try_from(block.len()).unwrap_or_default()
}

/// Whether unnamed calls are refused, and by something else than "not there" already.
fn says_absent(profile: &LinuxSeccomp) -> bool {
    let permissive = matches!(
        profile.default_action(),
        LinuxSeccompAction::ScmpActAllow
            | LinuxSeccompAction::ScmpActLog
            | LinuxSeccompAction::ScmpActTrace
            | LinuxSeccompAction::ScmpActNotify
    );
    !permissive && profile.default_errno_ret() != Some(libc::ENOSYS.cast_unsigned())
}

/// The largest number that the profile names on an architecture.
fn newest(profile: &LinuxSeccomp, of: Arch) -> Option<u32> {
    let names = profile.syscalls().iter().flatten().flat_map(|call| call.names());
    let numbers = names.filter_map(|name| match ScmpSyscall::from_name_by_arch(name, architecture(of)) {
        // Negative ones are the library's own, for calls that others have.
        Ok(known) => u32::try_from(i32::from(known)).ok(),
        Err(_unknown) => number(name),
    });
    numbers.max()
}

/// The architecture that the library's program always has, before those that the profile names.
fn with_native(architectures: &[Arch]) -> Vec<Arch> {
    let native = if cfg!(target_arch = "x86_64") {
        Some(Arch::ScmpArchX86_64)
    } else if cfg!(target_arch = "aarch64") {
        Some(Arch::ScmpArchAarch64)
    } else if cfg!(target_arch = "riscv64") {
        Some(Arch::ScmpArchRiscv64)
    } else {
        None
    };
    let others = architectures.iter().copied().filter(|of| Some(*of) != native);
    native.into_iter().chain(others).collect()
}

/// How the kernel names an architecture to a filter (`AUDIT_ARCH_*` of linux/audit.h). Of the others the library's
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
        // And what the library may learn to say one day.
        ScmpAction::KillProcess | _ => RET_KILL_PROCESS,
    }
}

fn encode((code, then, otherwise, value): Instruction) -> [u8; INSTRUCTION] {
    let (code, value) = (code.to_ne_bytes(), value.to_ne_bytes());
    [code[0], code[1], then, otherwise, value[0], value[1], value[2], value[3]]
}

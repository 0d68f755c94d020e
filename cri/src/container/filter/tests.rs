//! Tests of compiled profiles, by executing them.

use serde_json::json;

use super::*;
use crate::security_profile::seccomp::default_profile;

const X86_64: u32 = 0xc000_003e;
const I386: u32 = 0x4000_0003;
const ALLOW: u32 = 0x7fff_0000;
const KILL: u32 = 0;

fn errno(number: i32) -> u32 {
    0x0005_0000 | number.cast_unsigned()
}

/// Executes a program for one call, as the kernel does.
fn decide(program: &[u8], architecture: u32, number: u32, first_argument: u64) -> u32 {
    decide_two(program, architecture, number, [first_argument, 0])
}

fn decide_two(program: &[u8], architecture: u32, number: u32, arguments: [u64; 2]) -> u32 {
    let mut data = [number, architecture, 0, 0].map(u32::to_le_bytes).concat();
    data.extend(arguments.map(u64::to_le_bytes).concat());
    data.extend([0; 32]);
    let (mut at, mut a) = (0, 0);
    loop {
        let code = u16::from_ne_bytes([program[at * 8], program[at * 8 + 1]]);
        let jumps = (usize::from(program[at * 8 + 2]), usize::from(program[at * 8 + 3]));
        let value = u32::from_ne_bytes(program[at * 8 + 4..at * 8 + 8].try_into().unwrap());
        let branch = |taken: bool| 1 + if taken { jumps.0 } else { jumps.1 };
        let offset = value as usize;
        at += match code {
            0x20 => {
                a = u32::from_le_bytes(data[offset..offset + 4].try_into().unwrap());
                1
            }
            0x54 => {
                a &= value;
                1
            }
            0x05 => 1 + offset,
            0x15 => branch(a == value),
            0x25 => branch(a > value),
            0x35 => branch(a >= value),
            0x45 => branch(a & value != 0),
            0x06 => return value,
            other => panic!("instruction {other:#x}"),
        };
    }
}

fn program(profile: serde_json::Value) -> Vec<u8> {
    compile(&serde_json::from_value(profile).unwrap()).unwrap()
}

fn default_program() -> Vec<u8> {
    compile(&default_profile(&[]).unwrap()).unwrap()
}

#[test]
#[cfg(target_arch = "x86_64")]
fn the_default_allows_its_calls_and_refuses_others() {
    let program = default_program();
    for (name, number, answer) in [
        ("read", 0, ALLOW),
        ("execve", 59, ALLOW),
        ("mount", 165, errno(libc::EPERM)),
        ("keyctl", 250, errno(libc::EPERM)),
        ("clone3", 435, errno(libc::ENOSYS)),
        ("open_tree", 428, errno(libc::EPERM)),
    ] {
        assert_eq!(decide(&program, X86_64, number, 0), answer, "{name}");
    }
    assert_eq!(decide(&program, I386, 3, 0), ALLOW, "read of 32 bits");
    assert_eq!(decide(&program, I386, 21, 0), errno(libc::EPERM), "mount of 32 bits");
    assert_eq!(decide(&program, X86_64, 0x4000_0000, 0), ALLOW, "read of x32");
    assert_eq!(decide(&program, 0x1234, 0, 0), KILL, "an unknown architecture");
}

#[test]
#[cfg(target_arch = "x86_64")]
fn conditions_on_arguments_hold() {
    let program = default_program();
    let (socket, clone) = (41, 56);
    assert_eq!(decide(&program, X86_64, socket, 1), ALLOW, "a unix socket");
    assert_eq!(decide(&program, X86_64, clone, 0x0001_0000), ALLOW, "a thread");
    assert_eq!(decide(&program, X86_64, clone, 0x1000_0000), errno(1), "a user namespace");
    assert_eq!(
        decide(&program, X86_64, clone, 1 << 32 | 0x1000_0000),
        errno(1),
        "the kernel ignores the upper half"
    );
}

#[test]
#[cfg(target_arch = "x86_64")]
fn the_upper_half_of_a_personality_is_ignored_as_by_the_kernel() {
    let program = default_program();
    for (architecture, personality) in [(X86_64, 135), (I386, 136), (X86_64, 0x4000_0000 + 135)] {
        for value in [0, 8, 0x2_0000, 0x2_0008, 0xffff_ffff, u64::MAX] {
            assert_eq!(decide(&program, architecture, personality, value), ALLOW, "{value:#x}");
        }
        // READ_IMPLIES_EXEC and ADDR_NO_RANDOMIZE weaken the protection of memory.
        for value in [0x0040_0000, 0x0004_0000, 0x0004_0000 | 1 << 32] {
            assert_eq!(decide(&program, architecture, personality, value), errno(libc::EPERM), "{value:#x}");
        }
    }
}

/// Each condition of the default profile compares only bits that the kernel uses.
#[test]
fn the_default_compares_lower_halves_only() {
    for capabilities in [Vec::new(), vec!["CAP_SYS_ADMIN".to_owned()]] {
        let profile = default_profile(&capabilities).unwrap();
        let conditions = profile.syscalls().iter().flatten().flat_map(|call| call.args().iter().flatten());
        for condition in conditions {
            assert_eq!(condition.op(), LinuxSeccompOperator::ScmpCmpMaskedEq, "{condition:?}");
            assert!(condition.value() <= u64::from(u32::MAX), "{condition:?}");
        }
    }
}

#[test]
#[cfg(target_arch = "x86_64")]
fn cve_2026_31431_the_default_refuses_sockets_of_the_crypto_api_and_of_virtual_machines() {
    let program = default_program();
    for (architecture, socket) in [(X86_64, 41), (I386, 359), (X86_64, 0x4000_0000 + 41)] {
        for family in 0..64 {
            let answer = if matches!(family, 38 | 40) { errno(libc::EPERM) } else { ALLOW };
            // The kernel ignores the upper half.
            for family in [family, family | 1 << 32, family | 0xffff_ffff << 32] {
                assert_eq!(
                    decide(&program, architecture, socket, family),
                    answer,
                    "socket of family {family:#x}"
                );
            }
        }
    }
}

#[test]
#[cfg(target_arch = "x86_64")]
fn the_default_refuses_to_change_the_project_of_a_file() {
    let admin = compile(&default_profile(&["CAP_SYS_ADMIN".to_owned()]).unwrap()).unwrap();
    let program = default_program();
    for (architecture, ioctl) in [(X86_64, 16), (I386, 54), (X86_64, 0x4000_0000 + 514)] {
        for request in [0x401c_5820, 0x4008_6602, 0x4004_6602] {
            // The kernel ignores the upper half.
            for request in [request, request | 1 << 32, request | 0xffff_ffff << 32] {
                assert_eq!(
                    decide_two(&program, architecture, ioctl, [3, request]),
                    errno(libc::ENOTTY),
                    "{request:#x}"
                );
            }
            assert_eq!(decide_two(&admin, architecture, ioctl, [3, request]), ALLOW);
        }
        // These requests read the size of a terminal and the attributes of a file.
        for request in [0x5413, 0x801c_581f, 0x8008_6601] {
            assert_eq!(decide_two(&program, architecture, ioctl, [3, request]), ALLOW, "{request:#x}");
        }
    }
    // Only `ioctl` has refused requests.
    assert_eq!(decide_two(&program, X86_64, 1, [3, 0x401c_5820]), ALLOW, "write");
}

#[test]
fn calls_newer_than_the_library_are_decided_by_the_profile() {
    let program = default_program();
    for architecture in [X86_64, I386] {
        for (name, number) in [("fchmodat2", 452), ("statmount", 457), ("mseal", 462), ("removexattrat", 466)]
        {
            assert_eq!(decide(&program, architecture, number, 0), ALLOW, "{name}");
        }
        // The result is ENOSYS, not EPERM, so that a C library falls back to an older call.
        for number in [467, 999, 0x3fff_ffff] {
            assert_eq!(decide(&program, architecture, number, 0), errno(libc::ENOSYS), "{number}");
        }
    }
    // A call between the profile's calls is refused.
    assert_eq!(decide(&program, X86_64, 450, 0), errno(libc::EPERM), "set_mempolicy_home_node");
}

#[test]
fn calls_that_only_arm_has_are_not_taken_for_newer_calls() {
    const ARM: u32 = 0x4000_0028;
    const SET_TLS: u32 = 0x000f_0005;
    let profile = |names: &[&str]| {
        program(json!({
            "defaultAction": "SCMP_ACT_ERRNO", "architectures": ["SCMP_ARCH_ARM"],
            "syscalls": [{"names": names, "action": "SCMP_ACT_ALLOW"}],
        }))
    };
    let with = profile(&["read", "set_tls"]);
    assert_eq!(decide(&with, ARM, SET_TLS, 0), ALLOW);
    assert_eq!(decide(&with, ARM, 999, 0), errno(libc::ENOSYS), "newer than all calls of the profile");
    assert_eq!(decide(&profile(&["read"]), ARM, SET_TLS, 0), errno(libc::EPERM));
}

#[test]
fn permissive_profiles_have_no_absent_calls() {
    let permissive = program(json!({
        "defaultAction": "SCMP_ACT_ALLOW",
        "syscalls": [{"names": ["mkdir", "mseal"], "action": "SCMP_ACT_ERRNO", "errnoRet": 5}],
    }));
    assert_eq!(decide(&permissive, X86_64, 999, 0), ALLOW);
    assert_eq!(decide(&permissive, X86_64, 462, 0), errno(5));
    assert_eq!(decide(&permissive, X86_64, 83, 0), errno(5));
    let absent = program(json!({"defaultAction": "SCMP_ACT_ERRNO", "defaultErrnoRet": 38,
        "syscalls": [{"names": ["read"], "action": "SCMP_ACT_ALLOW"}]}));
    assert_eq!(decide(&absent, X86_64, 999, 0), errno(libc::ENOSYS));
    assert_eq!(decide(&absent, X86_64, 1, 0), errno(libc::ENOSYS));
}

#[test]
fn two_conditions_on_one_argument_are_two_rules() {
    let either = program(json!({
        "defaultAction": "SCMP_ACT_ERRNO",
        "syscalls": [{"names": ["personality", "no_such_call"], "action": "SCMP_ACT_ALLOW", "args": [
            {"index": 0, "value": 0, "op": "SCMP_CMP_EQ"}, {"index": 0, "value": 8, "op": "SCMP_CMP_EQ"}]}],
    }));
    for (value, answer) in [(0, ALLOW), (8, ALLOW), (9, errno(libc::EPERM))] {
        assert_eq!(decide(&either, X86_64, 135, value), answer, "{value}");
    }
}

#[test]
fn an_invalid_profile_is_refused() {
    for (bad, why) in [
        (json!({"defaultAction": "SCMP_ACT_ERRNO", "defaultErrnoRet": 70000}), "errno 70000"),
        (
            json!({"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [{"names": ["read"],
                "action": "SCMP_ACT_ERRNO", "args": [{"index": 9, "value": 0, "op": "SCMP_CMP_EQ"}]}]}),
            "cannot be parsed",
        ),
    ] {
        let error = compile(&serde_json::from_value(bad).unwrap()).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    }
}

#[tokio::test]
async fn a_profile_is_compiled_once() {
    let filters = Filters::default();
    let profile = default_profile(&[]).unwrap();
    let first = filters.program(&profile).await.unwrap();
    assert!(Arc::ptr_eq(&first, &filters.program(&profile).await.unwrap()));
    for number in 0..CACHE_CAPACITY {
        let other = json!({"defaultAction": "SCMP_ACT_ERRNO", "defaultErrnoRet": number + 1});
        filters.program(&serde_json::from_value(other).unwrap()).await.unwrap();
    }
    assert!(!Arc::ptr_eq(&first, &filters.program(&profile).await.unwrap()), "the oldest entry is dropped");
}

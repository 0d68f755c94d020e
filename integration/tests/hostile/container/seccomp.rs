//! System calls that the default seccomp profile refuses, with arguments whose upper halves the kernel ignores.

use std::collections::BTreeMap;
use std::fs;

use coracle_integration::skip_part;
use serde_json::json;

use super::one_call::{Call, Entry};
use super::{Attacker, Pids, on_a_runtime};

/// Families and types of sockets (socket(2)).
const UNIX: u64 = 1;
const INET: u64 = 2;
const NETLINK: u64 = 16;
const ALG: u64 = 38;
const VSOCK: u64 = 40;
const STREAM: u64 = 1;
const DATAGRAM: u64 = 2;
const SEQUENCED: u64 = 5;
/// Execution domains that weaken the protection of memory (personality(2)).
const ADDR_NO_RANDOMIZE: u64 = 0x4_0000;
const READ_IMPLIES_EXEC: u64 = 0x40_0000;
/// The error of a refused call.
const EPERM: i32 = 1;
/// A bit of an argument that the kernel ignores.
const UPPER: u64 = 1 << 32;
/// A bit in the numbers of system calls of x32 programs.
const X32: u32 = 0x4000_0000;
/// The profile types of the CRI.
const RUNTIME_DEFAULT: u8 = 0;
const UNCONFINED: u8 = 1;
/// Runs the programs, and prints the name and the exit code of each.
const RUN: &str = "for call in /calls/*; do $call; echo ${call##*/} $?; done";

/// A way to make system calls, with the numbers of `socket` and `personality`.
struct Table {
    name: &'static str,
    entry: Entry,
    socket: u32,
    personality: u32,
}

const TABLES: [Table; 3] = [
    Table { name: "64", entry: Entry::Syscall, socket: 41, personality: 135 },
    Table { name: "x32", entry: Entry::Syscall, socket: X32 + 41, personality: X32 + 135 },
    Table { name: "32", entry: Entry::Interrupt, socket: 359, personality: 136 },
];

/// The call `getpid` of 32-bit programs. It fails if the kernel does not run them.
const PROBE: Call = Call { entry: Entry::Interrupt, number: 20, arguments: [0, 0] };

/// The calls by name, each with whether the profile refuses it.
fn calls() -> BTreeMap<String, (Call, bool)> {
    let mut calls = BTreeMap::new();
    for Table { name: table, entry, socket, personality } in TABLES {
        let mut add = |name: &str, number: u32, arguments: [u64; 2], is_refused: bool| {
            calls.insert(format!("{table}-{name}"), (Call { entry, number, arguments }, is_refused));
        };
        for (name, family, kind, is_refused) in [
            ("alg", ALG, SEQUENCED, true),
            ("vsock", VSOCK, STREAM, true),
            ("unix", UNIX, STREAM, false),
            ("inet", INET, DATAGRAM, false),
            ("netlink", NETLINK, DATAGRAM, false),
        ] {
            add(name, socket, [family, kind], is_refused);
            add(&format!("{name}-upper"), socket, [UPPER | family, kind], is_refused);
        }
        for (name, value, is_refused) in [
            ("persona-randomize", ADDR_NO_RANDOMIZE, true),
            ("persona-exec", READ_IMPLIES_EXEC, true),
            ("persona-linux", 0, false),
        ] {
            add(name, personality, [value, 0], is_refused);
            add(&format!("{name}-upper"), personality, [UPPER | value, 0], is_refused);
        }
        // A program may pass the query as -1 of 64 bits.
        add("persona-query", personality, [u64::MAX, 0], false);
    }
    calls
}

/// The profile compared whole arguments, and the kernel uses the lower halves. So AF_ALG (CVE-2026-31431) was allowed with
/// a bit in the upper half. The same programs run without a profile, to show that the profile refuses the calls.
#[test]
fn the_default_seccomp_profile_refuses_calls_with_bits_that_the_kernel_ignores() {
    on_a_runtime(|machine, cri| {
        let (calls, directory) = (calls(), machine.path("calls"));
        fs::create_dir(&directory).unwrap();
        calls.iter().for_each(|(name, (call, _))| call.write(&directory.join(name)));
        PROBE.write(&directory.join("probe"));
        let [confined, free] = [RUNTIME_DEFAULT, UNCONFINED].map(|profile| {
            let attacker = Attacker::new(machine, cri, Pids::Container, |config| {
                config["mounts"] = json!([{ "container_path": "/calls", "host_path": directory }]);
                config["linux"]["security_context"]["seccomp"] = json!({ "profile_type": profile });
            });
            let output = attacker.sh(RUN);
            cri.crictl(&["rmp", "-f", &attacker.pod]);
            let codes = output.lines().filter_map(|line| {
                let (name, code) = line.split_once(' ')?;
                Some((name.to_owned(), code.parse::<i32>().ok()?))
            });
            codes.collect::<BTreeMap<_, _>>()
        });
        let runs_32_bits = free["probe"] == 0;
        if !runs_32_bits {
            skip_part!("the kernel runs no 32-bit programs");
        }
        for (name, (call, is_refused)) in calls {
            let (confined, free) = (confined[&name], free[&name]);
            if matches!(call.entry, Entry::Interrupt) && !runs_32_bits {
                continue;
            }
            if is_refused {
                assert_eq!(confined, EPERM, "{name}");
                // The kernel may lack the family, and AppArmor refuses AF_ALG with another error.
                assert_ne!(free, EPERM, "{name} without a profile");
            } else {
                // A kernel without x32 has no such call.
                assert_eq!(confined, free, "{name}");
            }
            assert!(is_refused || !name.starts_with("64-") || confined == 0, "{name}: {confined}");
        }
    });
}

//! Compiles a container's device rules to a BPF program (BPF_PROG_TYPE_CGROUP_DEVICE). Cgroup v2 has no list of device
//! rules: the kernel calls the program for each access. No I/O.
//!
//! The program gets a device and the requested accesses, and returns 1 (allow) or 0 (deny). It checks the rules from
//! last to first. A matching deny rule ends the program with 0. A matching allow rule removes its accesses from the
//! requested accesses. If no requested access is left, the result is 1. The default decision applies to accesses that
//! no rule matches.

use super::access::{self, Kind, Rule};

/// One BPF instruction (`struct bpf_insn` in linux/bpf.h).
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Instruction {
    code: u8,
    /// Destination register in the lower 4 bits, source register in the upper 4 bits.
    registers: u8,
    offset: i16,
    value: i32,
}

/// Register of the result.
const RESULT: u8 = 0;
/// Register of the context: `struct bpf_cgroup_dev_ctx`.
const CONTEXT: u8 = 1;
/// Register of the accesses that are not decided yet.
const PENDING: u8 = 2;
const KIND: u8 = 3;
const MAJOR: u8 = 4;
const MINOR: u8 = 5;

/// `BPF_LDX | BPF_MEM | BPF_W`
const LOAD: u8 = 0x61;
/// `BPF_ALU | BPF_MOV | BPF_X`, `BPF_ALU | BPF_MOV | BPF_K`
const COPY: u8 = 0xbc;
const SET: u8 = 0xb4;
/// `BPF_ALU | BPF_AND | BPF_K`, `BPF_ALU | BPF_RSH | BPF_K`
const AND: u8 = 0x54;
const SHIFT_RIGHT: u8 = 0x74;
/// `BPF_JMP | BPF_JEQ | BPF_K`, `BPF_JMP | BPF_JNE | BPF_K`
const JUMP_IF: u8 = 0x15;
const JUMP_UNLESS: u8 = 0x55;
/// `BPF_JMP | BPF_EXIT`
const EXIT: u8 = 0x95;

/// `BPF_DEVCG_DEV_BLOCK`, `BPF_DEVCG_DEV_CHAR`
const BLOCK: i32 = 1;
const CHARACTER: i32 = 2;

/// Compiles the rules. `None` if the rules deny no access.
pub(super) fn program(rules: &[Rule]) -> Option<Vec<Instruction>> {
    if access::allow_everything(rules) {
        return None;
    }
    let (default, rules) = access::split(rules);
    // The lower 16 bits of the first word are the device type, the upper 16 bits the accesses.
    let mut program = vec![
        Instruction::load(PENDING, 0),
        Instruction::copy(KIND, PENDING),
        Instruction::with(AND, KIND, 0xffff),
        Instruction::with(SHIFT_RIGHT, PENDING, 16),
        Instruction::load(MAJOR, 4),
        Instruction::load(MINOR, 8),
    ];
    rules.iter().rev().for_each(|rule| program.extend(block(rule)));
    program.extend(decision(default));
    Some(program)
}

/// The instructions of one rule. If the rule does not match or does not decide, control reaches the block's
/// end.
fn block(rule: &Rule) -> Vec<Instruction> {
    let kind = match rule.kind {
        Kind::Any => None,
        Kind::Block => Some(BLOCK),
        Kind::Character => Some(CHARACTER),
    };
    let number = |number: Option<u32>| number.map(u32::cast_signed);
    let conditions = [(KIND, kind), (MAJOR, number(rule.major)), (MINOR, number(rule.minor))];
    let conditions = conditions.into_iter().filter_map(|(register, wanted)| Some((register, wanted?)));
    let accesses = i32::from(rule.access.bits());
    let mut block: Vec<Instruction> =
        conditions.map(|(register, wanted)| Instruction::with(JUMP_UNLESS, register, wanted)).collect();
    if rule.allow {
        block.push(Instruction::with(AND, PENDING, !accesses));
        block.push(Instruction::with(JUMP_UNLESS, PENDING, 0));
    } else {
        block.push(Instruction::copy(RESULT, PENDING));
        block.push(Instruction::with(AND, RESULT, accesses));
        block.push(Instruction::with(JUMP_IF, RESULT, 0));
    }
    block.extend(decision(rule.allow));
    let len = block.len();
    let jumps = block.iter_mut().enumerate().filter(|(_, one)| matches!(one.code, JUMP_IF | JUMP_UNLESS));
    for (at, jump) in jumps {
        // Offsets count from the next instruction. A block has at most ten instructions, so the offset fits.
        jump.offset = i16::try_from(len - at - 1).unwrap_or_default();
    }
    block
}

fn decision(allow: bool) -> [Instruction; 2] {
    [Instruction::with(SET, RESULT, i32::from(allow)), Instruction::with(EXIT, 0, 0)]
}

// === impl Instruction ===

impl Instruction {
    fn with(code: u8, register: u8, value: i32) -> Self {
        Self { code, registers: register, offset: 0, value }
    }

    fn copy(to: u8, from: u8) -> Self {
        Self { code: COPY, registers: from << 4 | to, offset: 0, value: 0 }
    }

    /// Loads a word of the context.
    fn load(to: u8, offset: i16) -> Self {
        Self { code: LOAD, registers: CONTEXT << 4 | to, offset, value: 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::super::access::Access;
    use super::super::access::tests::of;
    use super::*;
    use serde_json::json;

    /// Interprets the program as the kernel does.
    fn run(program: &[Instruction], context: [u32; 3]) -> u32 {
        let (mut registers, mut at) = ([0_u32; 6], 0);
        loop {
            let one = program[at];
            at += 1;
            let (to, from) = (usize::from(one.registers & 15), usize::from(one.registers >> 4));
            let value = one.value.cast_unsigned();
            let jump = match one.code {
                JUMP_IF => registers[to] == value,
                JUMP_UNLESS => registers[to] != value,
                _ => false,
            };
            match one.code {
                LOAD => registers[to] = context[usize::try_from(one.offset).unwrap() / 4],
                COPY => registers[to] = registers[from],
                SET => registers[to] = value,
                AND => registers[to] &= value,
                SHIFT_RIGHT => registers[to] >>= value,
                JUMP_IF | JUMP_UNLESS => {}
                EXIT => return registers[0],
                other => panic!("no such instruction: {other:#x}"),
            }
            if jump {
                at += usize::try_from(one.offset).unwrap();
            }
        }
    }

    fn may(devices: &serde_json::Value, device: &str, access: &[Access]) -> bool {
        let Some(program) = program(&of(devices.clone())) else { return true };
        let (kind, numbers) = device.split_at(1);
        let (major, minor) = numbers.trim().split_once(':').unwrap();
        let kind: u32 = if kind == "b" { 1 } else { 2 };
        let access = access.iter().fold(0, |bits, one| bits | u32::from(one.bits()));
        let answer = run(&program, [access << 16 | kind, major.parse().unwrap(), minor.parse().unwrap()]);
        assert!(answer <= 1);
        answer == 1
    }

    const MAKE: &[Access] = &[Access::MAKE];
    const READ: &[Access] = &[Access::READ];
    const WRITE: &[Access] = &[Access::WRITE];
    const BOTH: &[Access] = &[Access::READ, Access::WRITE];

    #[test]
    fn an_ordinary_container_uses_its_default_devices_and_makes_any_node() {
        let rules = json!([{ "allow": false, "access": "rwm" }]);
        for own in ["c 1:3", "c 1:5", "c 1:7", "c 1:8", "c 1:9", "c 5:0", "c 5:1", "c 5:2", "c 136:7"] {
            assert!(may(&rules, own, BOTH) && may(&rules, own, MAKE), "{own}");
        }
        for foreign in ["b 8:0", "b 253:0", "c 1:1", "c 1:11", "c 10:7", "b 1:3"] {
            assert!(may(&rules, foreign, MAKE), "{foreign}");
            for access in [READ, WRITE, BOTH, &[Access::MAKE, Access::READ]] {
                assert!(!may(&rules, foreign, access), "{foreign} {access:?}");
            }
        }
        // The result is the same for a spec without rules.
        assert!(!may(&json!([]), "b 8:0", READ) && may(&json!([]), "c 1:3", BOTH));
    }

    #[test]
    fn a_device_is_usable_with_the_accesses_of_its_rule() {
        let rules = json!([
            { "allow": false, "access": "rwm" },
            { "allow": true, "type": "b", "major": 8, "minor": 0, "access": "r" },
            { "allow": true, "type": "c", "major": 10, "access": "rw" },
        ]);
        assert!(may(&rules, "b 8:0", READ) && !may(&rules, "b 8:0", WRITE) && !may(&rules, "b 8:0", BOTH));
        assert!(!may(&rules, "b 8:1", READ) && !may(&rules, "c 8:0", READ));
        assert!(may(&rules, "c 10:99", BOTH) && !may(&rules, "b 10:99", READ));
    }

    #[test]
    fn the_last_matching_rule_decides() {
        let all = json!({ "allow": true, "access": "rwm" });
        let none = json!({ "allow": false, "type": "a", "access": "rwm" });
        let disk =
            |allow: bool, access: &str| json!({ "allow": allow, "type": "b", "major": 8, "access": access });
        let rules = json!([all, disk(false, "w")]);
        assert!(may(&rules, "b 8:0", READ) && !may(&rules, "b 8:0", WRITE) && !may(&rules, "b 8:0", BOTH));
        assert!(may(&rules, "b 9:0", BOTH) && may(&rules, "c 99:0", BOTH));
        assert!(!may(&json!([disk(true, "rw"), none]), "b 8:0", READ));
        assert!(may(&json!([none, all]), "b 8:0", BOTH));
        assert!(!may(&json!([none, disk(true, "rw"), disk(false, "r")]), "b 8:0", READ));
        assert!(may(&json!([none, disk(false, "r"), disk(true, "rw")]), "b 8:0", BOTH));
        // Two rules, one for each access, together allow both accesses.
        assert!(may(&json!([none, disk(true, "r"), disk(true, "w")]), "b 8:0", BOTH));
    }

    #[test]
    fn rules_that_deny_no_device_need_no_program() {
        assert_eq!(program(&of(json!([{ "allow": true, "access": "rwm" }]))), None);
    }

    #[test]
    fn every_jump_stays_in_the_program_and_every_instruction_is_reachable() {
        let whole = json!({ "allow": false, "access": "rwm" });
        let program = program(&of(json!([whole, { "allow": true, "type": "b" }, whole]))).unwrap();
        let mut reached = vec![false; program.len()];
        let mut todo = vec![0];
        while let Some(at) = todo.pop() {
            if std::mem::replace(&mut reached[at], true) {
                continue;
            }
            match program[at].code {
                EXIT => {}
                JUMP_IF | JUMP_UNLESS => {
                    todo.extend([at + 1, at + 1 + usize::try_from(program[at].offset).unwrap()]);
                }
                _ => todo.push(at + 1),
            }
        }
        assert!(reached.iter().all(|reached| *reached));
    }
}

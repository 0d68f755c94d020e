//! The program of process 1: an ELF file of one page that waits for the end of its standard input.
//!
//! The program is separate from the shim's program. A container with CAP_SYS_PTRACE in the same pid namespace can read
//! the memory of process 1 and open its executable. Neither contains data of the node.
#![allow(unsafe_code, reason = "the assembler's labels are foreign items")]

use std::arch::global_asm;

/// Load address: above every `vm.mmap_min_addr` and a multiple of every page size.
const BASE: u64 = 0x40_0000;
/// Largest page size of the supported machines (arm64).
const PAGE: u64 = 0x1_0000;
/// Bytes of the ELF header and of one program header.
const HEADER: u16 = 64;
const SEGMENT: u16 = 56;
const SEGMENTS: u16 = 2;

// Steps:
// 1. `ppoll` with timeout 0, to check that the seccomp profile allows it;
// 2. `write` of a plus sign to descriptor 2;
// 3. `ppoll` of descriptor 0 without a timeout, repeated after EINTR;
// 4. `exit_group`. Every failure leads to this step.
// Stack: `struct pollfd` at 0 (descriptor 0, no events: hang-up is always reported), `struct timespec` at 8,
// the plus sign at 24.
#[cfg(target_arch = "x86_64")]
global_asm!(
    ".pushsection .rodata.coracle_init,\"a\"",
    "coracle_init_begin:",
    "sub rsp, 64",
    "mov qword ptr [rsp], 0",
    "mov qword ptr [rsp + 8], 0",
    "mov qword ptr [rsp + 16], 0",
    "mov byte ptr [rsp + 24], 43",
    "mov rdi, rsp",
    "mov esi, 1",
    "lea rdx, [rsp + 8]",
    "xor r10d, r10d",
    "mov r8d, 8",
    "mov eax, 271",
    "syscall",
    "test rax, rax",
    "jnz 3f",
    "mov edi, 2",
    "lea rsi, [rsp + 24]",
    "mov edx, 1",
    "mov eax, 1",
    "syscall",
    "cmp rax, 1",
    "jne 3f",
    "2:",
    "mov rdi, rsp",
    "mov esi, 1",
    "xor edx, edx",
    "xor r10d, r10d",
    "mov r8d, 8",
    "mov eax, 271",
    "syscall",
    "cmp rax, -4",
    "je 2b",
    "3:",
    "xor edi, edi",
    "mov eax, 231",
    "syscall",
    "hlt",
    "coracle_init_end:",
    ".popsection",
);

#[cfg(target_arch = "aarch64")]
global_asm!(
    ".pushsection .rodata.coracle_init,\"a\"",
    ".balign 4",
    "coracle_init_begin:",
    "sub sp, sp, #64",
    "str xzr, [sp]",
    "str xzr, [sp, #8]",
    "str xzr, [sp, #16]",
    "mov w9, #43",
    "strb w9, [sp, #24]",
    "mov x0, sp",
    "mov x1, #1",
    "add x2, sp, #8",
    "mov x3, xzr",
    "mov x4, #8",
    "mov x8, #73",
    "svc #0",
    "cbnz x0, 3f",
    "mov x0, #2",
    "add x1, sp, #24",
    "mov x2, #1",
    "mov x8, #64",
    "svc #0",
    "cmp x0, #1",
    "b.ne 3f",
    "2:",
    "mov x0, sp",
    "mov x1, #1",
    "mov x2, xzr",
    "mov x3, xzr",
    "mov x4, #8",
    "mov x8, #73",
    "svc #0",
    "cmn x0, #4",
    "b.eq 2b",
    "3:",
    "mov x0, xzr",
    "mov x8, #94",
    "svc #0",
    "brk #0",
    "coracle_init_end:",
    ".popsection",
);

#[cfg(target_arch = "riscv64")]
global_asm!(
    ".pushsection .rodata.coracle_init,\"a\"",
    ".balign 4",
    "coracle_init_begin:",
    "addi sp, sp, -64",
    "sd zero, 0(sp)",
    "sd zero, 8(sp)",
    "sd zero, 16(sp)",
    "li t0, 43",
    "sb t0, 24(sp)",
    "mv a0, sp",
    "li a1, 1",
    "addi a2, sp, 8",
    "li a3, 0",
    "li a4, 8",
    "li a7, 73",
    "ecall",
    "bnez a0, 3f",
    "li a0, 2",
    "addi a1, sp, 24",
    "li a2, 1",
    "li a7, 64",
    "ecall",
    "li t0, 1",
    "bne a0, t0, 3f",
    "2:",
    "mv a0, sp",
    "li a1, 1",
    "li a2, 0",
    "li a3, 0",
    "li a4, 8",
    "li a7, 73",
    "ecall",
    "li t0, -4",
    "beq a0, t0, 2b",
    "3:",
    "li a0, 0",
    "li a7, 94",
    "ecall",
    "ebreak",
    "coracle_init_end:",
    ".popsection",
);

// `ppoll` with `struct timespec` of 32 bits.
#[cfg(target_arch = "arm")]
global_asm!(
    ".pushsection .rodata.coracle_init,\"a\"",
    ".arm",
    ".balign 4",
    "coracle_init_begin:",
    "sub sp, sp, #64",
    "mov r0, #0",
    "str r0, [sp]",
    "str r0, [sp, #4]",
    "str r0, [sp, #8]",
    "str r0, [sp, #12]",
    "mov r0, #43",
    "strb r0, [sp, #24]",
    "mov r0, sp",
    "mov r1, #1",
    "add r2, sp, #8",
    "mov r3, #0",
    "mov r4, #8",
    "movw r7, #336",
    "svc #0",
    "cmp r0, #0",
    "bne 3f",
    "mov r0, #2",
    "add r1, sp, #24",
    "mov r2, #1",
    "mov r7, #4",
    "svc #0",
    "cmp r0, #1",
    "bne 3f",
    "2:",
    "mov r0, sp",
    "mov r1, #1",
    "mov r2, #0",
    "mov r3, #0",
    "mov r4, #8",
    "movw r7, #336",
    "svc #0",
    "cmn r0, #4",
    "beq 2b",
    "3:",
    "mov r0, #0",
    "mov r7, #248",
    "svc #0",
    "udf #0",
    "coracle_init_end:",
    ".popsection",
);

unsafe extern "C" {
    static coracle_init_begin: u8;
    static coracle_init_end: u8;
}

/// Numbers of the processor in the file: `e_machine` and `e_flags` of elf(5).
const MACHINE: (u16, u32) = if cfg!(target_arch = "aarch64") {
    (183, 0)
} else if cfg!(target_arch = "riscv64") {
    // `EF_RISCV_RVC` and `EF_RISCV_FLOAT_ABI_DOUBLE`, as in all Linux distributions.
    (243, 5)
} else if cfg!(target_arch = "arm") {
    // EABI version 5.
    (40, 0x0500_0000)
} else {
    (62, 0)
};

/// The content of the executable file.
pub(super) fn file() -> Vec<u8> {
    let code = code();
    let mut file =
        if cfg!(target_pointer_width = "64") { headers64(code.len()) } else { headers32(code.len()) };
    file.extend(code);
    file
}

/// The ELF header and the program headers in the 64-bit layout.
fn headers64(code: usize) -> Vec<u8> {
    let headers = u64::from(HEADER + SEGMENT * SEGMENTS);
    let len = headers + code as u64;
    let mut file = Vec::with_capacity(4096);
    // struct Elf64_Ehdr: 64 bits, little endian, version 1, System V.
    file.extend(b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0");
    // ET_EXEC; machine; version.
    file.extend([2, MACHINE.0].into_iter().flat_map(u16::to_le_bytes));
    file.extend(1_u32.to_le_bytes());
    // Entry, offset of the program headers, of the section headers.
    file.extend([BASE + headers, u64::from(HEADER), 0].into_iter().flat_map(u64::to_le_bytes));
    file.extend(MACHINE.1.to_le_bytes());
    file.extend([HEADER, SEGMENT, SEGMENTS, 0, 0, 0].into_iter().flat_map(u16::to_le_bytes));
    // PT_LOAD, readable and executable: the whole file.
    file.extend([1, 5].into_iter().flat_map(u32::to_le_bytes));
    file.extend([0, BASE, BASE, len, len, PAGE].into_iter().flat_map(u64::to_le_bytes));
    // PT_GNU_STACK, readable and writable.
    file.extend([0x6474_e551, 6].into_iter().flat_map(u32::to_le_bytes));
    file.extend([0, 0, 0, 0, 0, 16].into_iter().flat_map(u64::to_le_bytes));
    file
}

/// The ELF header and the program headers in the 32-bit layout.
fn headers32(code: usize) -> Vec<u8> {
    const HEADER: u16 = 52;
    const SEGMENT: u16 = 32;
    let [base, page] = [BASE, PAGE].map(|number| u32::try_from(number).unwrap_or_default());
    let headers = u32::from(HEADER + SEGMENT * SEGMENTS);
    let len = headers + u32::try_from(code).unwrap_or_default();
    let mut file = Vec::with_capacity(4096);
    file.extend(b"\x7fELF\x01\x01\x01\0\0\0\0\0\0\0\0\0");
    file.extend([2, MACHINE.0].into_iter().flat_map(u16::to_le_bytes));
    file.extend([1, base + headers, u32::from(HEADER), 0, MACHINE.1].into_iter().flat_map(u32::to_le_bytes));
    file.extend([HEADER, SEGMENT, SEGMENTS, 0, 0, 0].into_iter().flat_map(u16::to_le_bytes));
    // The flags follow the sizes.
    file.extend([1, 0, base, base, len, len, 5, page].into_iter().flat_map(u32::to_le_bytes));
    file.extend([0x6474_e551, 0, 0, 0, 0, 0, 6, 16].into_iter().flat_map(u32::to_le_bytes));
    file
}

/// The machine code between the two labels.
fn code() -> &'static [u8] {
    let begin = &raw const coracle_init_begin;
    let len = (&raw const coracle_init_end).addr() - begin.addr();
    // SAFETY: both labels are in one section, the second one behind the code that begins at the first.
    unsafe { std::slice::from_raw_parts(begin, len) }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::os::unix::fs::PermissionsExt as _;
    use std::process::{Command, Stdio};

    use super::*;

    /// Runs a program. A test under qemu's user emulation cannot execute a program of the emulated architecture
    /// directly. So it starts the emulator with the program as its argument.
    fn command(path: &std::path::Path) -> Command {
        let Some(emulator) = std::env::var_os("TEST_EMULATOR") else { return Command::new(path) };
        let mut command = Command::new(emulator);
        command.arg(path);
        command
    }

    #[test]
    fn the_program_reports_that_it_waits_and_ends_with_its_input() {
        let path = std::env::temp_dir().join(format!("coracle-init-{}", std::process::id()));
        std::fs::write(&path, file()).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o555)).unwrap();
        let mut init = loop {
            // A fork of another test may still have the file open for writing.
            match command(&path).stdin(Stdio::piped()).stderr(Stdio::piped()).spawn() {
                Err(error) if error.kind() == std::io::ErrorKind::ExecutableFileBusy => {}
                started => break started.unwrap(),
            }
        };
        let mut word = [0; 2];
        assert_eq!(init.stderr.as_mut().unwrap().read(&mut word).unwrap(), 1);
        std::fs::remove_file(&path).unwrap();
        assert_eq!(word[0], b'+');
        assert!(init.try_wait().unwrap().is_none());
        drop(init.stdin.take());
        assert!(init.wait().unwrap().success());
        assert!(file().len() < 4096);
    }
}

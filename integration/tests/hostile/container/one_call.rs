//! Programs that make one system call with any arguments, as static executables (elf(5)) for x86-64. The shell of an image
//! cannot make such calls.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

/// Address of the program in memory.
const BASE: u64 = 0x40_0000;
/// Bytes of the file before the first instruction: the header, and one program header.
const HEADERS: u64 = 64 + 56;

/// How a program enters the kernel.
#[derive(Clone, Copy, Debug)]
pub(super) enum Entry {
    /// The instruction `syscall`.
    Syscall,
    /// The interrupt 0x80, with the numbers of 32-bit programs. From a 64-bit program, seccomp gets registers of 64 bits.
    Interrupt,
}

/// A system call.
#[derive(Clone, Copy, Debug)]
pub(super) struct Call {
    pub(super) entry: Entry,
    pub(super) number: u32,
    /// The first two arguments. The third one is 0.
    pub(super) arguments: [u64; 2],
}

// === impl Call ===

impl Call {
    /// Writes the program. Its exit code is the error number of the call, or 0.
    pub(super) fn write(self, file: &Path) {
        fs::write(file, elf(&self.code())).unwrap();
        fs::set_permissions(file, Permissions::from_mode(0o755)).unwrap();
    }

    fn code(self) -> Vec<u8> {
        let [first, second] = self.arguments.map(u64::to_le_bytes);
        // mov rdi, first; mov rsi, second; syscall. Or: mov rbx, first; mov rcx, second; int 0x80.
        let (to_first, to_second, enter): ([u8; 2], [u8; 2], [u8; 2]) = match self.entry {
            Entry::Syscall => ([0x48, 0xbf], [0x48, 0xbe], [0x0f, 0x05]),
            Entry::Interrupt => ([0x48, 0xbb], [0x48, 0xb9], [0xcd, 0x80]),
        };
        // xor edx, edx; mov eax, number
        let number = [&[0x31_u8, 0xd2, 0xb8][..], &self.number.to_le_bytes()].concat();
        // xor ecx, ecx; mov rdi, rax; neg rdi; cmovs rdi, rcx: the error number, or 0 after a success.
        let code = [0x31_u8, 0xc9, 0x48, 0x89, 0xc7, 0x48, 0xf7, 0xdf, 0x48, 0x0f, 0x48, 0xf9];
        // mov eax, 60 (exit); syscall
        let exit = [0xb8_u8, 60, 0, 0, 0, 0x0f, 0x05];
        [&to_first[..], &first, &to_second, &second, &number, &enter, &code, &exit].concat()
    }
}

/// An executable of one segment.
fn elf(code: &[u8]) -> Vec<u8> {
    let size = HEADERS + u64::try_from(code.len()).unwrap();
    let words = |words: &[u16]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>();
    let longs = |longs: &[u64]| longs.iter().flat_map(|long| long.to_le_bytes()).collect::<Vec<u8>>();
    [
        // 64 bits, little-endian, version 1.
        b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0".to_vec(),
        // An executable for x86-64, version 1.
        words(&[2, 62, 1, 0]),
        // The first instruction, and the offset of the program headers. There are no sections.
        longs(&[BASE + HEADERS, 64, 0]),
        // Flags; sizes of the header and of a program header; one program header.
        words(&[0, 0, 64, 56, 1, 0, 0, 0]),
        // A segment that is read and executed.
        words(&[1, 0, 5, 0]),
        longs(&[0, BASE, BASE, size, size, 4096]),
        code.to_vec(),
    ]
    .concat()
}

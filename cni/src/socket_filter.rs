//! Socket filters (classic BPF): programs in the kernel that select the messages which a socket receives.
#![allow(unsafe_code, reason = "a filter is given to a socket by a pointer")]

use std::io;
use std::os::fd::AsRawFd;

/// Loads a word of the message.
pub(crate) const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
/// Loads a half word of the message.
pub(crate) const LOAD_HALF: u16 = (libc::BPF_LD | libc::BPF_H | libc::BPF_ABS) as u16;
/// Jumps if the loaded value equals `k`.
pub(crate) const EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
/// Ends the program. The socket receives the first `k` bytes of the message. If `k` is 0, the message is dropped.
pub(crate) const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;

/// Attaches a program to a socket, instead of the previous program.
pub(crate) fn attach(socket: &impl AsRawFd, program: &[libc::sock_filter]) -> io::Result<()> {
    let mut steps = program.to_vec();
    let length = u16::try_from(steps.len()).unwrap_or(u16::MAX);
    let program = libc::sock_fprog { len: length, filter: steps.as_mut_ptr() };
    let size = u32::try_from(size_of_val(&program)).unwrap_or_default();
    // SAFETY: the program and its steps live until the call returns, and the kernel copies both.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_ATTACH_FILTER,
            (&raw const program).cast(),
            size,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

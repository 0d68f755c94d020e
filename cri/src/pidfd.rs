//! A process by a descriptor: no other can come to be meant, and the kernel tells of its end.
#![allow(unsafe_code, reason = "pidfd_open and pidfd_send_signal have no safe wrapper here")]

use std::io;
use std::os::fd::{AsRawFd as _, FromRawFd, OwnedFd};

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Opens a process; `NotFound` when there is none of that pid.
pub(crate) fn open(pid: i32) -> io::Result<OwnedFd> {
    // SAFETY: pidfd_open takes two integers and no memory.
    let raw = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    let Some(raw) = i32::try_from(raw).ok().filter(|fd| *fd >= 0) else {
        let error = io::Error::last_os_error();
        let gone = error.raw_os_error() == Some(libc::ESRCH);
        return Err(if gone { io::ErrorKind::NotFound.into() } else { error });
    };
    // SAFETY: the kernel has just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(raw) })
}

/// Sends a signal to the process that was opened. An error when it has ended.
pub(crate) fn send(process: &OwnedFd, signal: i32) -> io::Result<()> {
    let none = std::ptr::null::<libc::siginfo_t>();
    // SAFETY: the descriptor is open, and no siginfo is passed.
    match unsafe { libc::syscall(libc::SYS_pidfd_send_signal, process.as_raw_fd(), signal, none, 0) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Registers a process's descriptor, which becomes readable at the end of the process, and stays so.
pub(crate) fn watch(pidfd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: the `AsyncFd` owns the descriptor and nothing else closes it.
    let registered = unsafe { AsyncFd::register_with_interest(pidfd, Interest::READABLE) };
    registered.map_err(|error| io::Error::other(error.to_string()))
}

//! Notifications of the kernel that tasks wait for memory (pressure stall information,
//! `Documentation/accounting/psi.rst`).
//!
//! A pod can take the free memory of the machine within a renewal interval of the lease. Then tasks begin to wait, and
//! a notification starts a round at once. The kernel does no work for this while no task waits for memory.
#![allow(unsafe_code, reason = "tokio requires the promise that a descriptor which it polls stays open")]

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::time::Duration;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::time::Instant;

/// Stalls of all tasks of the machine.
const FILE: &str = "/proc/pressure/memory";
/// The triggers, the preferred one first: tasks have waited for 100 ms within one second or two. Without the capability
/// `CAP_SYS_RESOURCE`, which a container may lack, the kernel accepts only multiples of two seconds. The kernel
/// requires the zero byte.
const TRIGGERS: [&[u8]; 2] = [b"some 100000 1000000\0", b"some 100000 2000000\0"];
/// Minimum time between two notifications. The kernel has the same minimum for the first trigger.
const MIN_INTERVAL: Duration = Duration::from_secs(1);

/// The notifications.
pub(super) struct MemoryStalls {
    /// None if the kernel has no notifications, or the node needs none.
    descriptor: Option<AsyncFd<OwnedFd>>,
    /// No notification is delivered before this time.
    not_before: Instant,
}

// === impl MemoryStalls ===

impl MemoryStalls {
    /// Requests the notifications. A kernel without notifications is logged.
    pub(super) fn open() -> Self {
        let descriptor = request().and_then(registered);
        if let Err(error) = &descriptor {
            tracing::info!(%error, file = FILE, "the kernel does not notify of stalls for lack of memory");
        }
        Self { descriptor: descriptor.ok(), not_before: Instant::now() }
    }

    /// No notifications, for a node whose memory is never short.
    pub(super) fn none() -> Self {
        Self { descriptor: None, not_before: Instant::now() }
    }

    /// Waits for the next notification. Cancel-safe: a notification is taken when the function returns.
    pub(super) async fn next(&mut self) {
        let Some(descriptor) = &self.descriptor else { return std::future::pending().await };
        tokio::time::sleep_until(self.not_before).await;
        match descriptor.ready(Interest::PRIORITY).await {
            Ok(mut ready) => ready.clear_ready(),
            // The runtime is ending.
            Err(_closed) => return std::future::pending().await,
        }
        self.not_before = Instant::now() + MIN_INTERVAL;
    }
}

/// Opens the file and writes the first trigger that the kernel accepts. The trigger is active while the file is open.
fn request() -> io::Result<OwnedFd> {
    let [preferred, other] = TRIGGERS;
    with_trigger(preferred).or_else(|_refused| with_trigger(other))
}

fn with_trigger(trigger: &[u8]) -> io::Result<OwnedFd> {
    let mut file = OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(FILE)?;
    file.write_all(trigger)?;
    Ok(file.into())
}

fn registered(descriptor: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: the `AsyncFd` owns the descriptor, and nothing else closes it.
    let registered = unsafe { AsyncFd::register_with_interest(descriptor, Interest::PRIORITY) };
    registered.map_err(|error| io::Error::other(error.to_string()))
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsRawFd;

    use futures::FutureExt;
    use nix::sys::socket::{MsgFlags, send};

    use super::*;

    /// The test sends urgent data of TCP, because poll(2) reports it with the same event as a notification.
    #[tokio::test]
    async fn a_notification_is_delivered_once() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let sender = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (receiver, _) = listener.accept().unwrap();
        receiver.set_nonblocking(true).unwrap();
        let descriptor = Some(registered(receiver.into()).unwrap());
        let mut stalls = MemoryStalls { descriptor, not_before: Instant::now() };
        send(sender.as_raw_fd(), b"x", MsgFlags::MSG_OOB).unwrap();
        let begin = Instant::now();
        stalls.next().await;
        assert!(stalls.not_before >= begin + MIN_INTERVAL, "the next notification is delayed");
        let descriptor = stalls.descriptor.as_ref().unwrap();
        assert!(descriptor.ready(Interest::PRIORITY).now_or_never().is_none(), "it was taken");
    }

    /// The kernel accepts a trigger even in a container without `CAP_SYS_RESOURCE`. With `psi=0` the file does not
    /// exist.
    #[test]
    fn a_kernel_that_measures_stalls_accepts_a_trigger() {
        assert_eq!(request().is_ok(), std::path::Path::new(FILE).exists());
    }

    #[tokio::test]
    async fn without_notifications_there_is_none() {
        let mut stalls = MemoryStalls::none();
        assert!(stalls.next().now_or_never().is_none());
    }
}

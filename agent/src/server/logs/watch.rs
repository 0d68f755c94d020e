//! An inotify watch on a directory.
#![allow(unsafe_code, reason = "tokio wants it promised that a descriptor which it polls stays open")]

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::path::Path;

use nix::errno::Errno;
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Notifies of created, written and renamed files in one directory.
pub(super) struct Watch {
    inotify: AsyncFd<Queue>,
}

/// The inotify descriptor. The field is private and never replaced.
struct Queue(OwnedFd);

impl AsRawFd for Queue {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

impl Watch {
    pub(super) fn on(directory: &Path) -> io::Result<Watch> {
        let inotify = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK)?;
        inotify.add_watch(
            directory,
            AddWatchFlags::IN_MODIFY | AddWatchFlags::IN_CREATE | AddWatchFlags::IN_MOVED_TO,
        )?;
        let queue = Queue(inotify.into());
        // SAFETY: the queue owns its descriptor, always names the same one, and closes it only when it is
        // dropped, which AsyncFd does after it has stopped polling.
        let inotify = unsafe { AsyncFd::register_with_interest(queue, Interest::READABLE) }?;
        Ok(Watch { inotify })
    }

    /// Wakes after a change. The reader examines the files itself.
    pub(super) async fn changed(&self) {
        let mut events = [0; 4096];
        loop {
            let Ok(mut ready) = self.inotify.readable().await else { return std::future::pending().await };
            match nix::unistd::read(&self.inotify.get_ref().0, &mut events) {
                Ok(_) => return,
                Err(Errno::EAGAIN) => ready.clear_ready(),
                Err(Errno::EINTR) => {}
                Err(_) => return std::future::pending().await,
            }
        }
    }
}

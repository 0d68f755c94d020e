//! Notifications of changes in the configuration directory, also when it is created or removed.
#![allow(unsafe_code, reason = "tokio wants it promised that a descriptor which it polls stays open")]

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Watches one directory, or its nearest existing parent.
pub struct Watch {
    dir: PathBuf,
    queue: AsyncFd<Queue>,
}

/// The kernel's queue of events. The field is private and never replaced.
struct Queue(OwnedFd);

impl AsRawFd for Queue {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

// === impl Watch ===

impl Watch {
    /// Watches a directory. It may be absent.
    ///
    /// # Errors
    /// As inotify_init(2) and inotify_add_watch(2).
    pub fn on(dir: &Path) -> io::Result<Self> {
        Ok(Self { dir: dir.to_owned(), queue: queue(dir)? })
    }

    /// Waits for a change. The caller reads the directory to find out what changed.
    ///
    /// # Errors
    /// As [`Watch::on`] and read(2).
    pub async fn changed(&mut self) -> io::Result<()> {
        let mut events = [0; 4096];
        loop {
            let mut ready = self.queue.readable().await?;
            match nix::unistd::read(&self.queue.get_ref().0, &mut events) {
                Ok(_) => break,
                Err(Errno::EAGAIN) => ready.clear_ready(),
                Err(Errno::EINTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        // The directory may have been created or removed: watch the nearest existing one.
        self.queue = queue(&self.dir)?;
        Ok(())
    }
}

fn queue(dir: &Path) -> io::Result<AsyncFd<Queue>> {
    let inotify = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK)?;
    let within = AddWatchFlags::IN_CLOSE_WRITE | AddWatchFlags::IN_CREATE | AddWatchFlags::IN_DELETE;
    let moved = AddWatchFlags::IN_MOVED_TO | AddWatchFlags::IN_MOVED_FROM;
    let itself = AddWatchFlags::IN_DELETE_SELF | AddWatchFlags::IN_MOVE_SELF;
    for nearest in dir.ancestors() {
        match inotify.add_watch(nearest, within | moved | itself) {
            Ok(_) => break,
            Err(Errno::ENOENT | Errno::ENOTDIR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    let queue = Queue(inotify.into());
    // SAFETY: the queue owns its descriptor, which does not change and is closed only when the queue is dropped.
    // AsyncFd stops polling before that.
    let queue = unsafe { AsyncFd::register_with_interest(queue, Interest::READABLE) };
    Ok(queue?)
}

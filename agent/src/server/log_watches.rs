//! Watches on directories of logs. All followers share one inotify instance.
//!
//! The kernel limits the instances of a user, to 128 by default. Root in a container without a user namespace is the
//! same user as the node. If each follower had an instance, a few followers would use up the limit. The agent opens the
//! only instance at its start.
#![allow(unsafe_code, reason = "tokio requires the promise that a descriptor which it polls stays open")]

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nix::errno::Errno;
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, InotifyEvent, WatchDescriptor};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;

/// The watches of all followers.
pub struct LogWatches {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// None if the kernel refused an instance. The next follower tries again.
    queue: Option<Queue>,
    /// Delivers the events, from the first follower on.
    task: Option<AbortOnDropHandle<()>>,
    directories: HashMap<WatchDescriptor, Directory>,
}

struct Directory {
    changes: watch::Sender<()>,
    followers: usize,
}

/// The inotify instance. The field is private and never replaced, so the descriptor never changes.
#[derive(Clone)]
struct Queue(Arc<Inotify>);

/// Notifies of created, written and renamed files in one directory.
pub(super) struct Watch {
    watches: Arc<LogWatches>,
    descriptor: WatchDescriptor,
    changes: watch::Receiver<()>,
}

impl AsRawFd for Queue {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}

// === impl Queue ===

impl Queue {
    fn open() -> io::Result<Queue> {
        Ok(Queue(Arc::new(Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK)?)))
    }

    /// Waits for the next events.
    async fn events(queue: &AsyncFd<Queue>) -> io::Result<Vec<InotifyEvent>> {
        loop {
            let mut ready = queue.readable().await?;
            match queue.get_ref().0.read_events() {
                Ok(events) => return Ok(events),
                Err(Errno::EAGAIN) => ready.clear_ready(),
                Err(Errno::EINTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

// === impl LogWatches ===

impl LogWatches {
    /// Opens the inotify instance.
    #[must_use]
    pub fn open() -> Arc<LogWatches> {
        let queue = Queue::open();
        if let Err(error) = &queue {
            tracing::warn!(%error, "cannot watch the logs of containers yet");
        }
        let state = State { queue: queue.ok(), ..State::default() };
        Arc::new(LogWatches { state: Mutex::new(state) })
    }

    /// Watches a directory until the result is dropped.
    pub(super) fn on(self: &Arc<LogWatches>, directory: &Path) -> io::Result<Watch> {
        let mut state = self.state();
        let queue = match &state.queue {
            Some(queue) => queue.clone(),
            None => state.queue.insert(Queue::open()?).clone(),
        };
        if state.task.as_ref().is_none_or(|task| task.is_finished()) {
            // SAFETY: the queue owns its descriptor, always returns the same descriptor, and closes it only when the
            // queue is dropped. AsyncFd drops the queue after it has stopped polling.
            let polled = unsafe { AsyncFd::register_with_interest(queue.clone(), Interest::READABLE) }?;
            let delivering = coracle_threads::spawn(deliver(Arc::downgrade(self), polled));
            state.task = Some(AbortOnDropHandle::new(delivering));
        }
        let events = AddWatchFlags::IN_MODIFY | AddWatchFlags::IN_CREATE | AddWatchFlags::IN_MOVED_TO;
        // For a directory that is already watched, the kernel returns the same watch descriptor.
        let descriptor = queue.0.add_watch(directory, events)?;
        let new = || Directory { changes: watch::channel(()).0, followers: 0 };
        let entry = state.directories.entry(descriptor).or_insert_with(new);
        entry.followers += 1;
        let changes = entry.changes.subscribe();
        Ok(Watch { watches: Arc::clone(self), descriptor, changes })
    }

    /// Wakes the followers of the changed directories.
    fn notify(&self, events: &[InotifyEvent]) {
        let state = self.state();
        if events.iter().any(|event| event.mask.contains(AddWatchFlags::IN_Q_OVERFLOW)) {
            // Events were lost, so every follower is woken.
            for directory in state.directories.values() {
                directory.changes.send_replace(());
            }
        }
        for event in events {
            if let Some(directory) = state.directories.get(&event.wd) {
                directory.changes.send_replace(());
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Delivers the events as long as the watches exist.
async fn deliver(watches: std::sync::Weak<LogWatches>, queue: AsyncFd<Queue>) {
    loop {
        let events = Queue::events(&queue).await;
        let Some(watches) = watches.upgrade() else { return };
        match events {
            Ok(events) => watches.notify(&events),
            Err(error) => {
                tracing::warn!(%error, "cannot read the changes of containers' logs");
                return;
            }
        }
    }
}

// === impl Watch ===

impl Watch {
    /// Wakes after a change. The reader examines the files itself.
    pub(super) async fn changed(&mut self) {
        if self.changes.changed().await.is_err() {
            std::future::pending().await
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let mut state = self.watches.state();
        let Some(directory) = state.directories.get_mut(&self.descriptor) else { return };
        directory.followers -= 1;
        if directory.followers > 0 {
            return;
        }
        state.directories.remove(&self.descriptor);
        if let Some(queue) = &state.queue {
            // The kernel has removed the watch already if the directory is gone.
            let _absent = queue.0.rm_watch(self.descriptor);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn many_followers_share_one_instance_and_wake_by_their_directory_only() {
        let watches = LogWatches::open();
        let [one, two] = [(); 2].map(|()| tempfile::tempdir().expect("directory"));
        // More followers than the number of instances that a user can have by default.
        let mut all: Vec<Watch> = (0..300)
            .map(|number| watches.on(if number % 2 == 0 { one.path() } else { two.path() }).expect("watch"))
            .collect();
        assert_eq!(watches.state().directories.len(), 2);
        std::fs::write(one.path().join("0.log"), "x").expect("write");
        for watch in all.iter_mut().step_by(2) {
            watch.changed().await;
        }
        assert!(!all[1].changes.has_changed().expect("open"), "nothing was written in its directory");
        all.truncate(2);
        assert_eq!(watches.state().directories.len(), 2);
        all.clear();
        assert!(watches.state().directories.is_empty());
        let mut again = watches.on(one.path()).expect("watch");
        std::fs::write(one.path().join("0.log"), "y").expect("write");
        again.changed().await;
    }
}

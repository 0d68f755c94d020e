//! Notifications of changes in the configuration directory, and of its creation and removal.
#![allow(unsafe_code, reason = "tokio requires the promise that a polled descriptor stays open")]

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, WatchDescriptor};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Watches one directory, or its nearest existing parent. Keeps its inotify instance until it is dropped, because other
/// processes may use up the instances of this user. Root in a container without a user namespace is the same user.
pub struct Watch {
    dir: PathBuf,
    queue: AsyncFd<Queue>,
    watched: WatchDescriptor,
    /// Further watched directories.
    others: HashMap<PathBuf, WatchDescriptor>,
}

/// The kernel's queue of events. The field is private and never replaced.
struct Queue(Inotify);

impl AsRawFd for Queue {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}

// === impl Watch ===

impl Watch {
    /// Watches a directory. It may be absent.
    ///
    /// # Errors
    /// As inotify_init(2) and inotify_add_watch(2).
    pub fn on(dir: &Path) -> io::Result<Self> {
        let inotify = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK)?;
        let watched = watch_nearest(&inotify, dir)?;
        // SAFETY: the queue owns its descriptor, which does not change and is closed only when the queue is dropped.
        // AsyncFd stops polling before that.
        let queue = unsafe { AsyncFd::register_with_interest(Queue(inotify), Interest::READABLE) }?;
        Ok(Self { dir: dir.to_owned(), queue, watched, others: HashMap::new() })
    }

    /// Watches these additional directories, instead of the directories of the previous call. Symbolic links and absent
    /// directories are left out. Returns whether a directory is new. A new directory may have changed before it was
    /// watched.
    pub fn watch_also(&mut self, dirs: &BTreeSet<PathBuf>) -> bool {
        let inotify = &self.queue.get_ref().0;
        for (_, unlisted) in self.others.extract_if(|dir, _| !dirs.contains(dir)) {
            // Fails if the directory was removed, because the kernel has then removed the watch.
            let _absent = inotify.rm_watch(unlisted);
        }
        let only = AddWatchFlags::IN_ONLYDIR | AddWatchFlags::IN_DONT_FOLLOW;
        let mut is_new = false;
        for dir in dirs {
            // For a directory that is already watched, the kernel returns the same descriptor.
            if let Ok(watched) = inotify.add_watch(dir, events() | only) {
                is_new |= self.others.insert(dir.clone(), watched) != Some(watched);
            }
        }
        is_new
    }

    /// Waits for a change. The caller reads the directory to find the change.
    ///
    /// # Errors
    /// See [`Watch::on`] and read(2).
    pub async fn changed(&mut self) -> io::Result<()> {
        loop {
            let mut ready = self.queue.readable().await?;
            match self.queue.get_ref().0.read_events() {
                Ok(_) => break,
                Err(Errno::EAGAIN) => ready.clear_ready(),
                Err(Errno::EINTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        // The directory may have been created or removed: watch the directory or its nearest existing parent.
        let inotify = &self.queue.get_ref().0;
        let watched = watch_nearest(inotify, &self.dir)?;
        let before = std::mem::replace(&mut self.watched, watched);
        if before != watched {
            // Fails if the directory was removed, because the kernel has then removed the watch.
            let _absent = inotify.rm_watch(before);
        }
        Ok(())
    }
}

/// The events of a watched directory that count as changes.
fn events() -> AddWatchFlags {
    let within = AddWatchFlags::IN_CLOSE_WRITE | AddWatchFlags::IN_CREATE | AddWatchFlags::IN_DELETE;
    let moved = AddWatchFlags::IN_MOVED_TO | AddWatchFlags::IN_MOVED_FROM;
    within | moved | AddWatchFlags::IN_DELETE_SELF | AddWatchFlags::IN_MOVE_SELF
}

fn watch_nearest(inotify: &Inotify, dir: &Path) -> io::Result<WatchDescriptor> {
    let mut below: Option<&Path> = None;
    let mut ancestors = dir.ancestors();
    while let Some(nearest) = ancestors.next() {
        match inotify.add_watch(nearest, events()) {
            // The directory may have been created before its parent was watched.
            Ok(parent) if below.is_some_and(Path::is_dir) => {
                // An error means that the parent has been removed meanwhile.
                let _ = inotify.rm_watch(parent);
                (below, ancestors) = (None, dir.ancestors());
            }
            Ok(watched) => return Ok(watched),
            Err(Errno::ENOENT | Errno::ENOTDIR) => below = Some(nearest),
            Err(error) => return Err(error.into()),
        }
    }
    Err(io::ErrorKind::NotFound.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_directory_is_watched_by_one_instance_when_it_is_created_and_removed() {
        let parent = tempfile::tempdir().unwrap();
        let dir = parent.path().join("a/b");
        let mut watch = Watch::on(&dir).unwrap();
        let descriptor = watch.queue.get_ref().as_raw_fd();
        std::fs::create_dir(parent.path().join("a")).unwrap();
        watch.changed().await.unwrap();
        std::fs::create_dir(&dir).unwrap();
        watch.changed().await.unwrap();
        std::fs::write(dir.join("file"), "").unwrap();
        watch.changed().await.unwrap();
        let inside = watch.watched;
        std::fs::remove_dir_all(parent.path().join("a")).unwrap();
        while watch.watched == inside {
            watch.changed().await.unwrap();
        }
        std::fs::create_dir_all(&dir).unwrap();
        watch.changed().await.unwrap();
        assert_eq!(watch.queue.get_ref().as_raw_fd(), descriptor);
    }

    #[tokio::test]
    async fn further_directories_are_watched_until_they_are_not_listed() {
        let dir = tempfile::tempdir().unwrap();
        let (below, absent) = (dir.path().join("below"), dir.path().join("absent"));
        std::fs::create_dir(&below).unwrap();
        std::os::unix::fs::symlink(&below, dir.path().join("link")).unwrap();
        let mut watch = Watch::on(dir.path()).unwrap();
        let listed = BTreeSet::from([below.clone(), absent, dir.path().join("link")]);
        assert!(watch.watch_also(&listed));
        assert!(!watch.watch_also(&listed), "the directory is watched already");
        assert_eq!(watch.others.len(), 1);
        std::fs::write(below.join("file"), "").unwrap();
        watch.changed().await.unwrap();
        assert!(!watch.watch_also(&BTreeSet::new()) && watch.others.is_empty());
    }
}

//! Watches the content of a configuration file.

use std::{
    fs::File,
    io::{self, Read as _},
    os::{fd::AsFd as _, unix::fs::OpenOptionsExt as _},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use coracle_backoff::Backoff;
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use sha2::{Digest as _, Sha256};
use tokio::net::unix::pipe;
use tokio_util::sync::CancellationToken;

/// Maximum bytes of a file. A larger file is logged and ignored.
const MAX_SIZE: u64 = 16 << 20;
/// First back-off after a failed watch. It doubles up to [`MAX_BACKOFF`].
const FIRST_BACKOFF: Duration = Duration::from_secs(1);
const MAX_BACKOFF: Duration = Duration::from_secs(60);

/// Calls `changed` at the start and after each change of the file's content, until `shutdown` is cancelled. `changed`
/// may block: it runs on a blocking thread. `changed` reads the file itself, and returns whether it could use the
/// content. After false, the next event in the directory causes another call, even with the same content: a writer may
/// have truncated the file before `changed` read it. A watch that fails is logged and restarted after a delay.
///
/// The function watches the directory of `path`, because programs replace the file, or a symbolic link, by a rename.
pub async fn follow_file(
    path: PathBuf,
    shutdown: CancellationToken,
    changed: impl Fn() -> bool + Send + Sync + 'static,
) {
    let mut followed = FollowedFile::new(path, Arc::new(changed));
    loop {
        let error = tokio::select! {
            error = followed.follow() => error,
            () = shutdown.cancelled() => return,
        };
        let (path, delay) = (followed.path.display(), followed.backoff.next_delay());
        tracing::warn!(%path, %error, retry = ?delay, "cannot watch a configuration file");
        tokio::select! {
            () = tokio::time::sleep(delay) => {}
            () = shutdown.cancelled() => return,
        }
    }
}

/// A watched file.
struct FollowedFile<C> {
    path: PathBuf,
    changed: Arc<C>,
    /// Digest of the content that `changed` used last.
    known: Option<[u8; 32]>,
    backoff: Backoff,
}

/// A watch of a directory.
struct DirectoryWatch {
    events: Inotify,
    /// A duplicate of the descriptor, on which tokio waits for readiness. Events are read from `events`.
    ready: pipe::Receiver,
}

// === impl FollowedFile ===

impl<C: Fn() -> bool + Send + Sync + 'static> FollowedFile<C> {
    fn new(path: PathBuf, changed: Arc<C>) -> Self {
        Self { path, changed, known: None, backoff: Backoff::new(FIRST_BACKOFF, MAX_BACKOFF) }
    }

    /// Follows the file until the watch fails. Cancel-safe: a change that is not reported yet is found again.
    async fn follow(&mut self) -> io::Error {
        let watch = DirectoryWatch::start(&self.path);
        // Each attempt compares the file, even if the watch could not start.
        self.compare().await;
        let watch = match watch {
            Ok(watch) => watch,
            Err(error) => return error,
        };
        loop {
            if let Err(error) = watch.wait().await {
                return error;
            }
            self.backoff.reset();
            self.compare().await;
        }
    }

    /// Calls `changed` if the content has changed. A missing file is skipped: its creation causes an event.
    async fn compare(&mut self) {
        let (path, changed, known) = (self.path.clone(), self.changed.clone(), self.known);
        let compared = tokio::task::spawn_blocking(move || match digest(&path) {
            Ok(now) => (known == Some(now) || changed()).then_some(now),
            Err(error) => {
                if error.kind() != io::ErrorKind::NotFound {
                    tracing::warn!(path = %path.display(), %error, "cannot read a configuration file");
                }
                known
            }
        });
        match compared.await {
            Ok(now) => self.known = now,
            Err(error) => {
                tracing::error!(path = %self.path.display(), %error, "cannot apply a configuration file");
            }
        }
    }
}

// === impl DirectoryWatch ===

impl DirectoryWatch {
    /// Watches the directory of a file.
    fn start(path: &Path) -> io::Result<Self> {
        let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
        let events = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK)?;
        events.add_watch(
            directory.unwrap_or(Path::new(".")),
            AddWatchFlags::IN_CLOSE_WRITE
                | AddWatchFlags::IN_MOVED_TO
                | AddWatchFlags::IN_CREATE
                | AddWatchFlags::IN_MOVE_SELF
                | AddWatchFlags::IN_DELETE_SELF
                | AddWatchFlags::IN_ONLYDIR,
        )?;
        let ready = pipe::Receiver::from_owned_fd_unchecked(events.as_fd().try_clone_to_owned()?)?;
        Ok(Self { events, ready })
    }

    /// Waits for events in the directory.
    ///
    /// # Errors
    /// A system call failed, or the directory was moved or removed.
    async fn wait(&self) -> io::Result<()> {
        const GONE: [AddWatchFlags; 4] = [
            AddWatchFlags::IN_MOVE_SELF,
            AddWatchFlags::IN_DELETE_SELF,
            AddWatchFlags::IN_IGNORED,
            AddWatchFlags::IN_UNMOUNT,
        ];
        let is_gone = |mask: AddWatchFlags| GONE.iter().any(|gone| mask.contains(*gone));
        loop {
            self.ready.readable().await?;
            match self.ready.try_io(|| Ok(self.events.read_events()?)) {
                Ok(events) if events.iter().any(|event| is_gone(event.mask)) => {
                    return Err(io::Error::new(
                        io::ErrorKind::NotFound,
                        "its directory was moved or removed",
                    ));
                }
                Ok(_) => return Ok(()),
                Err(error) if is_transient(&error) => {}
                Err(error) => return Err(error),
            }
        }
    }
}

fn is_transient(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

/// Digest of the content of a regular file.
fn digest(path: &Path) -> io::Result<[u8; 32]> {
    // Without `O_NONBLOCK`, opening a named pipe would wait for a writer.
    let file = File::options().read(true).custom_flags(nix::libc::O_NONBLOCK).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file"));
    }
    let (mut hash, mut buffer, mut read) = (Sha256::new(), [0; 8192], 0);
    let mut file = file.take(MAX_SIZE + 1);
    loop {
        let count = match file.read(&mut buffer) {
            Ok(0) => return Ok(hash.finalize().into()),
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        read += count as u64;
        if read > MAX_SIZE {
            let reason = format!("it is larger than {MAX_SIZE} bytes");
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, reason));
        }
        hash.update(&buffer[..count]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn changes_by_write_rename_and_link_are_seen_once() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("config");
        std::fs::write(&path, "a").unwrap();
        let (sender, mut seen) = tokio::sync::mpsc::unbounded_channel();
        let shutdown = CancellationToken::new();
        let of_file = path.clone();
        let read = move || sender.send(std::fs::read_to_string(&of_file).unwrap()).is_ok();
        let following = tokio::spawn(follow_file(path.clone(), shutdown.clone(), read));
        tokio::task::yield_now().await;
        let replace = |name: &str, text: &str| {
            let other = directory.path().join(name);
            std::fs::write(&other, text).unwrap();
            std::fs::rename(&other, &path).unwrap();
        };
        // The watch starts some time after the task.
        let mut number = 0;
        let first = loop {
            number += 1;
            replace("new", &format!("b{number}"));
            let soon = std::time::Duration::from_millis(20);
            if let Ok(Some(first)) = tokio::time::timeout(soon, seen.recv()).await
                && first != "a"
            {
                break first;
            }
        };
        assert!(first.starts_with('b'));
        std::fs::write(directory.path().join("target"), "last").unwrap();
        std::os::unix::fs::symlink("target", directory.path().join("link")).unwrap();
        std::fs::rename(directory.path().join("link"), &path).unwrap();
        while seen.recv().await.unwrap() != "last" {}
        shutdown.cancel();
        following.await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_watch_that_cannot_go_on_is_started_again() {
        let directory = tempfile::tempdir().unwrap();
        let inner = directory.path().join("inner");
        let path = inner.join("config");
        let (sender, mut seen) = tokio::sync::mpsc::unbounded_channel();
        let shutdown = CancellationToken::new();
        let of_file = path.clone();
        let read = move || {
            let text = std::fs::read_to_string(&of_file).unwrap();
            sender.send(text.clone()).unwrap();
            assert_ne!(text, "panics");
            true
        };
        // At first the directory does not exist. Later the test removes it, and creates it again.
        let following = tokio::spawn(follow_file(path.clone(), shutdown.clone(), read));
        for text in ["a", "panics", "b"] {
            tokio::time::sleep(Duration::from_secs(5)).await;
            std::fs::create_dir(&inner).unwrap();
            std::fs::write(&path, text).unwrap();
            while seen.recv().await.unwrap() != text {}
            std::fs::remove_dir_all(&inner).unwrap();
        }
        shutdown.cancel();
        following.await.unwrap();
    }

    #[tokio::test]
    async fn content_that_could_not_be_used_is_tried_again() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("config");
        let calls = Arc::new(std::sync::atomic::AtomicUsize::new(0));
        let counted = calls.clone();
        let changed = Arc::new(move || counted.fetch_add(1, std::sync::atomic::Ordering::Relaxed) > 0);
        let mut followed = FollowedFile::new(path.clone(), changed);
        std::fs::write(&path, "a").unwrap();
        for known in [false, true, true] {
            followed.compare().await;
            assert_eq!(followed.known.is_some(), known);
        }
        assert_eq!(calls.load(std::sync::atomic::Ordering::Relaxed), 2);
    }

    #[test]
    fn only_regular_files_of_a_limited_size_are_read() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        let file = File::create(&path).unwrap();
        file.set_len(MAX_SIZE).unwrap();
        assert!(digest(&path).is_ok());
        file.set_len(MAX_SIZE + 1).unwrap();
        assert_eq!(digest(&path).unwrap_err().kind(), io::ErrorKind::FileTooLarge);
        let pipe = directory.path().join("pipe");
        nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert_eq!(digest(&pipe).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        assert_eq!(digest(&directory.path().join("none")).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}

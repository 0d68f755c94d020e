//! Network namespaces by path: opening one, and doing a thing inside it.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::path::{Path, PathBuf};

use nix::sched::{CloneFlags, setns};
use nix::sys::statfs::{NSFS_MAGIC, fstatfs};

use crate::error::Error;

/// An open network namespace: it lives at least as long as this value.
pub(crate) struct Netns {
    file: File,
    path: PathBuf,
}

impl Netns {
    /// What is no namespace is as good as none: a file that one was mounted on outlives it.
    pub(crate) fn open(path: &Path) -> Result<Self, Error> {
        let open = || -> io::Result<File> {
            let file = File::open(path)?;
            match fstatfs(&file)?.filesystem_type() {
                NSFS_MAGIC => Ok(file),
                _ => Err(io::Error::other("it is no namespace")),
            }
        };
        let file = open().map_err(|source| Error::Namespace { path: path.to_owned(), source })?;
        Ok(Self { file, path: path.to_owned() })
    }

    /// The descriptor that a netlink message names the namespace by.
    pub(crate) fn fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    /// Takes the calling thread into the namespace, for good: a thread that ends with what it does there.
    pub(crate) fn enter(&self) -> io::Result<()> {
        Ok(setns(&self.file, CloneFlags::CLONE_NEWNET)?)
    }

    /// Runs `work` inside the namespace, on a thread that is thrown away afterwards: a pool's thread
    /// that could not return to its own namespace would poison whatever runs on it next. The error is that of entering
    /// alone: a runtime may take it for word that the sandbox is gone, and that there is nothing to take back.
    pub(crate) fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T, Error> {
        let failed = |source| Error::Namespace { path: self.path.clone(), source };
        std::thread::scope(|scope| {
            let inside = scope.spawn(|| self.enter().map(|()| work()));
            inside.join().unwrap_or_else(|_| Err(io::Error::other("the thread inside panicked")))
        })
        .map_err(failed)
    }

    /// Runs `work` inside as [`run`](Self::run) does, without keeping the caller's thread meanwhile. Who does not wait
    /// for its end has it done all the same.
    pub(crate) async fn visit<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Error> {
        let visited = async {
            let inside = Self { file: self.file.try_clone()?, path: PathBuf::new() };
            let (tell, told) = tokio::sync::oneshot::channel();
            std::thread::Builder::new().name("netns".to_owned()).spawn(move || {
                // Nobody waits any more for what cannot be told.
                drop(tell.send(inside.enter().map(|()| work())));
            })?;
            told.await.unwrap_or_else(|_| Err(io::Error::other("the thread inside panicked")))
        };
        visited.await.map_err(|source| Error::Namespace { path: self.path.clone(), source })
    }
}

/// Whether the path leads to the namespace that this thread is in.
pub(crate) fn is_own(path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let at = |path: &Path| std::fs::metadata(path).ok().map(|meta| (meta.dev(), meta.ino()));
    at(path).is_some_and(|there| at("/proc/thread-self/ns/net".as_ref()) == Some(there))
}

/// What the path leads to: a number that no other namespace has while this one lives.
pub(crate) fn id(path: &Path) -> Option<u64> {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata(path).ok().map(|meta| meta.ino())
}

//! Network namespaces by path: opening a namespace, and running code inside it.

use std::fs::File;
use std::io;
use std::ops::ControlFlow;
use std::os::fd::{AsRawFd, RawFd};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use coracle_threads::Threads;
use nix::sched::{CloneFlags, setns};
use nix::sys::statfs::{NSFS_MAGIC, fstatfs};

use crate::error::Error;

/// Threads that run the work of [`Netns::visit`].
static VISIT_THREADS: Threads = Threads::new("netns");

/// An open network namespace. It exists at least as long as this value.
pub(crate) struct Netns {
    file: File,
    path: PathBuf,
}

impl Netns {
    /// Opens the namespace. A path to anything else counts as absent: after an unmount, the mount point is a plain
    /// file.
    pub(crate) fn open(path: &Path) -> Result<Self, Error> {
        let open = || -> io::Result<File> {
            let file = File::open(path)?;
            match fstatfs(&file)?.filesystem_type() {
                NSFS_MAGIC => Ok(file),
                _ => Err(io::Error::other("it is not a network namespace")),
            }
        };
        let file = open().map_err(|source| Error::Namespace { path: path.to_owned(), source })?;
        Ok(Self { file, path: path.to_owned() })
    }

    /// The namespace's inode, which is unique as long as the namespace exists.
    pub(crate) fn id(&self) -> Option<u64> {
        use std::os::unix::fs::MetadataExt;
        self.file.metadata().ok().map(|meta| meta.ino())
    }

    /// The descriptor that identifies the namespace in netlink messages.
    pub(crate) fn fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    /// Moves the calling thread into the namespace, permanently. The thread must end after its work there.
    pub(crate) fn enter(&self) -> io::Result<()> {
        Ok(setns(&self.file, CloneFlags::CLONE_NEWNET)?)
    }

    /// Runs `work` inside the namespace, on a new thread: a thread of a pool that cannot return to its own namespace
    /// would break later work. The only error is that the namespace cannot be entered. A runtime may conclude from
    /// this error that the sandbox is gone and no object has to be removed.
    pub(crate) fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T, Error> {
        let failed = |source| Error::Namespace { path: self.path.clone(), source };
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("netns".to_owned());
            let inside = thread.spawn_scoped(scope, || self.enter().map(|()| work()))?;
            inside.join().unwrap_or_else(|_| Err(io::Error::other("the thread inside panicked")))
        })
        .map_err(failed)
    }

    /// Runs `work` inside like [`run`](Self::run), without blocking the caller's thread. If the caller is dropped, the
    /// work continues. The thread serves only this function, and enters the namespace before each work.
    pub(crate) async fn visit<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Error> {
        let visited = async {
            let inside = Self { file: self.file.try_clone()?, path: PathBuf::new() };
            let (send, result) = tokio::sync::oneshot::channel();
            VISIT_THREADS.run(move || {
                let done = inside.enter().map(|()| work());
                drop(inside);
                let then = leave();
                // The caller was dropped and needs no result.
                drop(send.send(done));
                then
            })?;
            result.await.unwrap_or_else(|_| Err(io::Error::other("the thread inside panicked")))
        };
        visited.await.map_err(|source| Error::Namespace { path: self.path.clone(), source })
    }
}

/// Moves the calling thread to the namespace of the process. Otherwise the thread would keep the visited namespace
/// alive while it waits for work. `Break` if it cannot be moved: then the thread must end.
fn leave() -> ControlFlow<()> {
    static OWN: OnceLock<File> = OnceLock::new();
    let return_to_own = || -> io::Result<()> {
        let own = match OWN.get() {
            Some(own) => own,
            None => {
                let opened = File::open("/proc/self/ns/net")?;
                OWN.get_or_init(|| opened)
            }
        };
        Ok(setns(own, CloneFlags::CLONE_NEWNET)?)
    };
    match return_to_own() {
        Ok(()) => ControlFlow::Continue(()),
        Err(error) => {
            tracing::debug!(%error, "a thread cannot leave a network namespace and ends");
            ControlFlow::Break(())
        }
    }
}

/// Whether the path leads to the namespace of this thread.
pub(crate) fn is_current(path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let at = |path: &Path| std::fs::metadata(path).ok().map(|meta| (meta.dev(), meta.ino()));
    at(path).is_some_and(|there| at("/proc/thread-self/ns/net".as_ref()) == Some(there))
}

/// Inode of the namespace: unique as long as the namespace exists.
pub(crate) fn id(path: &Path) -> Option<u64> {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata(path).ok().map(|meta| meta.ino())
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use nix::sys::resource::{Resource, setrlimit};
    use nix::unistd::{Uid, setuid};

    use super::*;

    #[tokio::test]
    async fn a_thread_that_waits_is_in_the_namespace_of_the_process() {
        let (netns, own) = coracle_testing::in_new_namespace(|| {
            let path = Path::new("/proc/thread-self/ns/net");
            (Netns::open(path).expect("a namespace"), id(path))
        });
        // The first visit starts a thread. Later visits may use it again.
        for _ in 0..3 {
            let visited = netns.visit(|| id(Path::new("/proc/thread-self/ns/net"))).await;
            assert_eq!(visited.expect("visited"), own);
        }
        let (send, left) = std::sync::mpsc::channel();
        let started = VISIT_THREADS.run(move || {
            let _test_gone = send.send(id(Path::new("/proc/thread-self/ns/net")));
            ControlFlow::Continue(())
        });
        started.expect("a thread");
        assert_eq!(left.recv().expect("the thread's namespace"), id(Path::new("/proc/self/ns/net")));
    }

    /// Above a limit of processes the kernel refuses new threads. The node must survive that.
    #[test]
    fn a_refused_thread_is_an_error() {
        const IS_CHILD: &str = "CORACLE_TEST_REFUSED_THREAD";
        if std::env::var_os(IS_CHILD).is_none() {
            // The test runs in a separate process, because the test gives up its rights.
            let mut child = Command::new(std::env::current_exe().expect("this program"));
            child.args(["--exact", "netns::tests::a_refused_thread_is_an_error"]).env(IS_CHILD, "1");
            let output = child.output().expect("the child");
            let text = String::from_utf8_lossy(&output.stdout);
            assert!(output.status.success() && text.contains("1 passed"), "{text}");
            return;
        }
        let netns = Netns::open(Path::new("/proc/self/ns/net")).expect("a namespace");
        setrlimit(Resource::RLIMIT_NPROC, 0, 0).expect("limit");
        // The limit does not apply to root.
        setuid(Uid::from_raw(65534)).expect("this test needs root");
        let Err(Error::Namespace { source, .. }) = netns.run(|| ()) else { panic!("a thread started") };
        assert_eq!(source.raw_os_error(), Some(libc::EAGAIN));
    }
}

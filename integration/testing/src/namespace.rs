//! Network namespaces of tests. The kernel deletes a namespace after its last thread, process and socket.

use std::path::{Path, PathBuf};
use std::sync::mpsc::{Sender, channel};

use nix::sched::{CloneFlags, unshare};

type Job = Box<dyn FnOnce() + Send>;

/// A thread in a new network namespace that runs jobs one after the other. Dropping the value ends the thread.
pub struct NamespaceThread {
    netns: PathBuf,
    jobs: Sender<Job>,
}

/// Runs a test on a new thread in a new network namespace, and returns its result. Threads and processes that the test
/// starts are in the namespace too. The loopback interface is down at first.
///
/// # Panics
/// When the test panics, or without root privileges.
pub fn in_new_namespace<T: Send + 'static>(test: impl FnOnce() -> T + Send + 'static) -> T {
    let thread = std::thread::spawn(move || {
        enter_new_namespace();
        test()
    });
    match thread.join() {
        Ok(result) => result,
        Err(panic) => std::panic::resume_unwind(panic),
    }
}

/// Like [`in_new_namespace`], for an asynchronous test. Its tasks run on one thread.
///
/// # Panics
/// When the test panics, or without root privileges.
#[expect(clippy::expect_used, reason = "a test panics")]
pub fn in_new_namespace_async<T: Send + 'static>(test: impl AsyncFnOnce() -> T + Send + 'static) -> T {
    in_new_namespace(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.expect("a runtime can be made").block_on(test())
    })
}

#[expect(clippy::expect_used, reason = "a test panics")]
fn enter_new_namespace() {
    unshare(CloneFlags::CLONE_NEWNET).expect("this test needs root");
}

// === impl NamespaceThread ===

#[expect(clippy::expect_used, reason = "a test panics")]
impl NamespaceThread {
    /// Starts the thread.
    ///
    /// # Panics
    /// Without root privileges.
    #[must_use]
    pub fn start() -> Self {
        let (sender, receiver) = channel::<PathBuf>();
        let (jobs, todo) = channel::<Job>();
        std::thread::spawn(move || {
            enter_new_namespace();
            let (process, thread) = (std::process::id(), nix::unistd::gettid());
            sender.send(format!("/proc/{process}/task/{thread}/ns/net").into()).ok();
            todo.into_iter().for_each(|job| job());
        });
        Self { netns: receiver.recv().expect("the thread is in a new namespace"), jobs }
    }

    /// The file of the namespace, below `/proc`. It exists as long as the thread runs.
    #[must_use]
    pub fn netns(&self) -> &Path {
        &self.netns
    }

    /// Runs a job in the namespace and returns its result. Threads that the job starts stay there.
    ///
    /// # Panics
    /// When the job panics.
    pub fn within<T: Send + 'static>(&self, job: impl FnOnce() -> T + Send + 'static) -> T {
        let (sender, receiver) = channel();
        self.jobs.send(Box::new(move || drop(sender.send(job())))).expect("the thread waits for jobs");
        receiver.recv().expect("the job returns without a panic")
    }
}

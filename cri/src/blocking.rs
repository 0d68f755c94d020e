//! Work on files whose server may never respond, such as files of an NFS volume. The kernel blocks the thread until the
//! server responds, and no signal interrupts it.
//!
//! An async worker must not block, and the blocking threads of the async runtime are limited. So such work has a
//! timeout and its own thread.

use std::collections::BTreeSet;
use std::io;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use coracle_threads::Threads;
use tokio::sync::{Semaphore, oneshot};

use crate::fair_permits::FairPermits;

static THREADS: Threads = Threads::new("files");

/// Maximum wait for the work.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Paths with work in progress.
static IN_PROGRESS: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

/// The reason for a missing result.
#[derive(Debug, thiserror::Error)]
pub enum Blocked {
    /// The file system did not respond in time.
    #[error("a file system did not respond in {} seconds", .0.as_secs())]
    Timeout(Duration),
    /// The file system still blocks an earlier attempt.
    #[error("a file system has not responded to an earlier attempt yet")]
    Earlier,
    /// No thread can be started.
    #[error("cannot start a thread")]
    Thread(#[source] io::Error),
    /// The work panicked.
    #[error("the work on a file system panicked")]
    Panicked,
}

/// Whether the caller has stopped waiting for the result. Then the work must leave nothing behind.
#[derive(Clone, Debug, Default)]
pub struct Abandoned(Arc<AtomicBool>);

impl Abandoned {
    /// Whether the caller has stopped waiting.
    #[must_use]
    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }

    /// The flag of a caller that has stopped waiting.
    #[cfg(test)]
    pub(crate) fn without_caller() -> Self {
        Self(Arc::new(AtomicBool::new(true)))
    }
}

/// Sets the flag when the caller stops waiting.
struct Waiting(Abandoned);

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.0.store(true, Ordering::SeqCst);
    }
}

/// Ends the work of a path when dropped.
struct InProgress(PathBuf);

impl InProgress {
    fn begin(path: &Path) -> Option<Self> {
        let is_first = IN_PROGRESS.lock().unwrap_or_else(PoisonError::into_inner).insert(path.to_owned());
        is_first.then(|| Self(path.to_owned()))
    }
}

impl Drop for InProgress {
    fn drop(&mut self) {
        IN_PROGRESS.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.0);
    }
}

/// Runs work that may block, on a thread that does no other work meanwhile. At most one attempt per path runs at a time,
/// so that repeated attempts leave at most one blocked thread.
///
/// # Errors
/// If the work takes longer than 30 seconds or panics, an earlier attempt still runs, or no thread can be started.
pub async fn run<T: Send + 'static>(
    path: &Path,
    work: impl FnOnce(&Abandoned) -> T + Send + 'static,
) -> Result<T, Blocked> {
    run_within(TIMEOUT, path, Box::new(work)).await
}

/// Work with a result. It is boxed, so that the code that runs it is compiled once per type of the result.
type Work<T> = Box<dyn FnOnce(&Abandoned) -> T + Send>;

async fn run_within<T: Send + 'static>(limit: Duration, path: &Path, work: Work<T>) -> Result<T, Blocked> {
    let in_progress = InProgress::begin(path).ok_or(Blocked::Earlier)?;
    let abandoned = Abandoned::default();
    let _waiting = Waiting(abandoned.clone());
    let (done, result) = oneshot::channel();
    let on_thread = move || {
        let result = work(&abandoned);
        drop(in_progress);
        let _receiver_gone = done.send(result);
        ControlFlow::Continue(())
    };
    THREADS.run(on_thread).map_err(Blocked::Thread)?;
    match tokio::time::timeout(limit, result).await {
        Ok(Ok(result)) => Ok(result),
        Ok(Err(_panicked)) => Err(Blocked::Panicked),
        Err(_elapsed) => Err(Blocked::Timeout(limit)),
    }
}

/// Work whose duration depends on the number of files that containers have made. It runs on threads that do no other
/// work meanwhile. All other work of the node shares the few blocking threads of the async runtime.
#[derive(Debug)]
pub struct FileWork {
    permits: Semaphore,
}

impl FileWork {
    /// `most` is the maximum number of concurrent calls. Further calls wait.
    #[must_use]
    pub const fn new(most: usize) -> Self {
        Self { permits: Semaphore::const_new(most) }
    }

    /// Runs work to its end. Work that has begun continues if the caller stops waiting.
    ///
    /// # Errors
    /// If no thread can be started, or the work panics.
    pub async fn run<T: Send + 'static>(
        &'static self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<T> {
        let permit = self.permits.acquire().await.map_err(io::Error::other)?;
        let (done, result) = oneshot::channel();
        let on_thread = move || {
            let result = work();
            drop(permit);
            let _receiver_gone = done.send(result);
            ControlFlow::Continue(())
        };
        THREADS.run(on_thread)?;
        result.await.map_err(|_panicked| io::Error::other("the thread panicked"))
    }
}

/// Like [`FileWork`], for work that can end early. Owners share the permits, so that the files of a few namespaces
/// do not delay the pods of others.
#[derive(Debug)]
pub struct FairWork {
    permits: FairPermits,
}

impl FairWork {
    /// `most` is the maximum number of concurrent calls, and `each` is the maximum for one owner. All owners together
    /// can have `each` calls in addition to the first call of each owner. Further calls wait.
    #[must_use]
    pub const fn new(most: usize, each: usize) -> Self {
        Self { permits: FairPermits::with_further(most, each, each) }
    }

    /// Runs work. If the caller stops waiting, work that has begun must end soon; it keeps its permit until then.
    ///
    /// # Errors
    /// If no thread can be started, or the work panics.
    pub async fn run<T: Send + 'static>(
        &'static self,
        owner: &str,
        work: impl FnOnce(&Abandoned) -> T + Send + 'static,
    ) -> io::Result<T> {
        let permit = self.permits.take(owner).await;
        let abandoned = Abandoned::default();
        let _waiting = Waiting(abandoned.clone());
        let (done, result) = oneshot::channel();
        let on_thread = move || {
            let result = work(&abandoned);
            drop(permit);
            let _receiver_gone = done.send(result);
            ControlFlow::Continue(())
        };
        THREADS.run(on_thread)?;
        result.await.map_err(|_panicked| io::Error::other("the thread panicked"))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use futures::FutureExt as _;

    use super::*;

    #[test]
    fn work_on_many_files_leaves_the_runtimes_blocking_threads_free() {
        static WORK: FileWork = FileWork::new(2);
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().max_blocking_threads(1).build();
        runtime.expect("runtime").block_on(async {
            let releases = [(); 3].map(|()| {
                let (release, released) = mpsc::channel::<()>();
                let work = tokio::spawn(WORK.run(move || released.recv().is_err()));
                (release, work)
            });
            assert_eq!(tokio::task::spawn_blocking(|| 7).await.expect("a free thread"), 7);
            let all_held = || WORK.permits.available_permits() == 0;
            coracle_testing::until_yielding("all permits are held", 10, all_held).await;
            let works = releases.map(|(release, work)| {
                drop(release);
                work
            });
            for work in works {
                assert!(work.await.expect("task").expect("thread"));
            }
            assert_eq!(WORK.permits.available_permits(), 2);
        });
    }

    #[tokio::test]
    async fn shared_work_ends_when_its_caller_stops_waiting() {
        static WORK: FairWork = FairWork::new(2, 1);
        let (begun, begin) = oneshot::channel();
        let (ended, end) = mpsc::channel();
        let work = tokio::spawn(WORK.run("a", move |abandoned| {
            let _test_gone = begun.send(());
            let is_set = coracle_testing::within(10, || abandoned.is_set()).is_some();
            let _test_gone = ended.send(is_set);
        }));
        begin.await.expect("the work begins");
        assert_eq!(WORK.run("b", |_| 7).await.expect("a permit of another owner"), 7);
        work.abort();
        assert_eq!(WORK.run("a", |_| 7).await.expect("the permit of the ended work"), 7);
        assert_eq!(end.recv(), Ok(true), "the work can see that its caller stopped waiting");
    }

    #[test]
    fn two_owners_with_much_work_leave_a_permit_for_a_third() {
        static WORK: FairWork = FairWork::new(6, 3);
        let take = |owner: &'static str| WORK.permits.take(owner).now_or_never();
        let held: Vec<_> = ["a", "a", "a", "b", "b", "b"].into_iter().filter_map(take).collect();
        assert_eq!(held.len(), 5, "two first permits and three further ones");
        assert!(take("c").is_some());
    }

    #[tokio::test]
    async fn work_that_panics_gives_its_permit_back() {
        static WORK: FileWork = FileWork::new(1);
        assert!(WORK.run(|| assert_eq!(1, 2)).await.is_err());
        assert_eq!(WORK.run(|| 7).await.expect("a permit"), 7);
    }

    #[tokio::test]
    async fn a_panic_of_the_work_is_not_reported_as_a_failed_start() {
        let result = run(Path::new("/panic"), |_| assert_eq!(1, 2)).await;
        assert!(matches!(result, Err(Blocked::Panicked)), "{result:?}");
    }

    #[tokio::test]
    async fn blocked_work_ends_the_wait_and_leaves_one_thread() {
        let path = Path::new("/blocked/place");
        let short = Duration::from_millis(20);
        let (release, released) = mpsc::channel::<()>();
        let (ended, end) = mpsc::channel();
        let work = move |abandoned: &Abandoned| {
            let _dropped = released.recv();
            let _test_gone = ended.send(abandoned.is_set());
        };
        let blocked = run_within(short, path, Box::new(work));
        assert!(matches!(blocked.await, Err(Blocked::Timeout(_))));
        assert!(matches!(run(path, |_| ()).await, Err(Blocked::Earlier)));
        assert_eq!(run(Path::new("/another/place"), |_| 7).await.expect("not blocked"), 7);
        drop(release);
        assert_eq!(end.recv(), Ok(true), "the work can see that its caller stopped waiting");
        let is_free = async || !matches!(run(path, |_| ()).await, Err(Blocked::Earlier));
        coracle_testing::eventually_async("the end of the blocked work", 10, is_free).await;
        assert!(!run(path, Abandoned::is_set).await.expect("free again"));
    }
}

//! Threads for work that may block. A thread that has done its work waits a few seconds for more work, because the
//! start of a thread costs more than most work.
//!
//! Work never waits behind other work. It goes to a thread that waits, or to a new thread.
//!
//! [`off_worker`] runs long work of an async task on the task's own thread. [`spawn`] starts an async task.

mod async_worker;
mod task;

use std::cell::Cell;
use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::ops::ControlFlow;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::oneshot;

pub use async_worker::off_worker;
pub use task::{spawn, spawn_blocking};

/// Time for which an idle thread waits for more work. Then it ends.
const IDLE_TIMEOUT: Duration = Duration::from_secs(3);
/// Maximum number of threads of a group that wait. Further threads end after their work.
const WAITING_MAX: usize = 8;

type Work = Box<dyn FnOnce() -> ControlFlow<()> + Send>;

thread_local! {
    static HAS_OWN_NAMESPACES: Cell<bool> = const { Cell::new(false) };
}

/// Declares that the current thread has entered namespaces that the other threads of the process are not in. From now
/// on, all work that this thread submits runs on a new thread, which ends after the work. A new thread inherits the
/// namespaces of this thread, but a waiting thread is not in them.
pub fn declare_own_namespaces() {
    HAS_OWN_NAMESPACES.set(true);
}

/// A group of threads with one name and one kind of work.
pub struct Threads {
    name: &'static str,
    idle_timeout: Duration,
    state: Mutex<State>,
    new_work: Condvar,
}

struct State {
    /// Number of waiting threads. Threads that are woken up for handed-over work count until they take it.
    waiting: usize,
    /// Work that is handed over and not taken yet. It has at most `waiting` entries.
    handed_over: VecDeque<Work>,
}

// === impl Threads ===

impl Threads {
    /// A group without threads. All its threads get this name.
    #[must_use]
    pub const fn new(name: &'static str) -> Self {
        Self::with_idle_timeout(name, IDLE_TIMEOUT)
    }

    const fn with_idle_timeout(name: &'static str, idle_timeout: Duration) -> Self {
        let state = State { waiting: 0, handed_over: VecDeque::new() };
        Self { name, idle_timeout, state: Mutex::new(state), new_work: Condvar::new() }
    }

    /// Runs work on a thread that waits, or on a new thread. After `Break` or a panic of the work, its thread ends and does
    /// no other work.
    ///
    /// # Errors
    /// If the kernel starts no thread. The work is dropped.
    pub fn run(&'static self, work: impl FnOnce() -> ControlFlow<()> + Send + 'static) -> io::Result<()> {
        self.run_boxed(Box::new(work))
    }

    /// Runs work as [`Threads::run`] does, and returns its result. The work runs to its end even if the caller stops
    /// waiting.
    ///
    /// # Errors
    /// If the kernel starts no thread, or if the work panics.
    pub async fn result<T: Send + 'static>(
        &'static self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<T> {
        let (done, result) = oneshot::channel();
        self.run(move || {
            let _receiver_gone = done.send(work());
            ControlFlow::Continue(())
        })?;
        result.await.map_err(|_panicked| io::Error::other("the work on a thread panicked"))
    }

    /// Does the work of [`Threads::run`], compiled once for all kinds of work.
    fn run_boxed(&'static self, work: Work) -> io::Result<()> {
        let thread = std::thread::Builder::new().name(self.name.to_owned());
        if HAS_OWN_NAMESPACES.get() {
            return thread.spawn(|| _ = work()).map(drop);
        }
        let mut state = self.state();
        if state.waiting > state.handed_over.len() {
            state.handed_over.push_back(work);
            drop(state);
            self.new_work.notify_one();
            return Ok(());
        }
        drop(state);
        let started = thread.spawn(move || {
            let mut then = work();
            while then.is_continue() {
                let Some(work) = self.next_work() else { return };
                then = work();
            }
        });
        started.map(drop)
    }

    /// Waits for work. `None` if the thread is to end.
    fn next_work(&self) -> Option<Work> {
        let mut state = self.state();
        if state.waiting >= WAITING_MAX {
            return None;
        }
        state.waiting += 1;
        let woken =
            self.new_work.wait_timeout_while(state, self.idle_timeout, |state| state.handed_over.is_empty());
        let (mut state, _timeout) = woken.unwrap_or_else(PoisonError::into_inner);
        state.waiting -= 1;
        state.handed_over.pop_front()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Threads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Threads").field("name", &self.name).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::sync::mpsc;
    use std::thread::{self, ThreadId};

    use super::*;

    const AGAIN: ControlFlow<()> = ControlFlow::Continue(());

    /// A group whose threads wait for longer than any test takes.
    const fn long() -> Threads {
        Threads::with_idle_timeout("test", Duration::from_secs(3600))
    }

    /// Runs work and returns its thread.
    fn thread_of_work(threads: &'static Threads, then: ControlFlow<()>) -> ThreadId {
        let (sender, receiver) = mpsc::channel();
        let started = threads.run(move || {
            sender.send(thread::current().id()).expect("the test waits");
            then
        });
        started.expect("thread");
        receiver.recv().expect("the work is done")
    }

    #[tokio::test]
    async fn the_result_of_work_or_its_panic_reaches_the_caller() {
        static THREADS: Threads = Threads::new("test");
        assert_eq!(THREADS.result(|| 7).await.expect("no panic"), 7);
        let panicked = THREADS.result(|| panic!("a test")).await;
        assert!(panicked.map(|()| 0).is_err());
    }

    /// Runs work that ends when the returned sender is dropped.
    fn held_work(threads: &'static Threads, at_end: mpsc::Sender<()>) -> mpsc::Sender<()> {
        let (release, released) = mpsc::channel::<()>();
        let started = threads.run(move || {
            send_at_end(at_end);
            let _released = released.recv();
            AGAIN
        });
        started.expect("thread");
        release
    }

    /// Returns when this number of threads waits.
    fn until_waiting(threads: &Threads, number: usize) {
        coracle_testing::eventually("waiting threads", 10, || match threads.state().waiting {
            waiting if waiting == number => Ok(()),
            waiting => Err(format!("{waiting} wait, not {number}")),
        });
    }

    #[test]
    fn work_of_a_thread_with_own_namespaces_gets_a_new_thread() {
        static THREADS: Threads = long();
        let waiting = thread_of_work(&THREADS, AGAIN);
        until_waiting(&THREADS, 1);
        let apart = thread::spawn(|| {
            declare_own_namespaces();
            thread_of_work(&THREADS, AGAIN)
        });
        assert_ne!(apart.join().expect("the thread"), waiting);
        assert_eq!(THREADS.state().waiting, 1, "it waits for no other work");
        assert_eq!(thread_of_work(&THREADS, AGAIN), waiting);
    }

    #[test]
    fn a_thread_that_waits_takes_the_next_work() {
        static THREADS: Threads = long();
        let first = thread_of_work(&THREADS, AGAIN);
        for _ in 0..3 {
            until_waiting(&THREADS, 1);
            assert_eq!(thread_of_work(&THREADS, AGAIN), first);
        }
    }

    #[test]
    fn a_thread_that_must_end_takes_no_other_work() {
        static THREADS: Threads = long();
        let first = thread_of_work(&THREADS, ControlFlow::Break(()));
        assert_ne!(thread_of_work(&THREADS, AGAIN), first);
        until_waiting(&THREADS, 1);
    }

    #[test]
    fn work_that_blocks_delays_no_other_work() {
        static THREADS: Threads = long();
        let (ended, _end) = mpsc::channel();
        thread_of_work(&THREADS, AGAIN);
        until_waiting(&THREADS, 1);
        let mut held = Vec::new();
        for _ in 0..20 {
            held.push(held_work(&THREADS, ended.clone()));
            // This work does not wait behind the work that blocks.
            thread_of_work(&THREADS, AGAIN);
        }
        drop(held);
    }

    #[test]
    fn threads_above_the_limit_end() {
        static THREADS: Threads = long();
        let (ended, end) = mpsc::channel();
        let held: Vec<_> = (0..WAITING_MAX + 2).map(|_| held_work(&THREADS, ended.clone())).collect();
        drop(held);
        until_waiting(&THREADS, WAITING_MAX);
        assert!(end.recv().is_ok() && end.recv().is_ok(), "two threads end");
        assert_eq!(THREADS.state().waiting, WAITING_MAX);
    }

    #[test]
    fn a_thread_without_work_ends() {
        static THREADS: Threads = Threads::with_idle_timeout("test", Duration::ZERO);
        let (ended, end) = mpsc::channel();
        drop(held_work(&THREADS, ended));
        end.recv().expect("the thread ends");
        assert_eq!(THREADS.state().waiting, 0);
    }

    #[test]
    fn a_panic_ends_only_its_thread() {
        static THREADS: Threads = long();
        let first = thread_of_work(&THREADS, AGAIN);
        until_waiting(&THREADS, 1);
        let (ended, end) = mpsc::channel::<()>();
        let started = THREADS.run(move || {
            let _dropped_by_the_panic = ended;
            panic!("a panic of a test")
        });
        started.expect("thread");
        assert!(end.recv().is_err());
        assert_ne!(thread_of_work(&THREADS, AGAIN), first);
    }

    /// Sends when the current thread ends.
    fn send_at_end(ended: mpsc::Sender<()>) {
        struct AtEnd(mpsc::Sender<()>);
        impl Drop for AtEnd {
            fn drop(&mut self) {
                let _test_gone = self.0.send(());
            }
        }
        thread_local!(static AT_END: RefCell<Option<AtEnd>> = const { RefCell::new(None) });
        AT_END.with(|at_end| *at_end.borrow_mut() = Some(AtEnd(ended)));
    }
}

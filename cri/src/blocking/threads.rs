//! Threads for work that may block. A thread that has done its work waits for more for a few seconds: the start of a
//! thread costs more than most work.
//!
//! Work never waits behind other work. It goes to a thread that waits, or to a new thread.

use std::collections::VecDeque;
use std::io;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Time for which a thread waits for more work.
const KEEP: Duration = Duration::from_secs(3);
/// Maximum number of threads that wait. A thread that would be one more ends.
const WAITING_MAX: usize = 8;

/// The threads of this process.
pub(super) static THREADS: Threads = Threads::new(KEEP);

type Work = Box<dyn FnOnce() + Send>;

/// Threads that wait for work.
pub(super) struct Threads {
    keep: Duration,
    state: Mutex<State>,
    new_work: Condvar,
}

struct State {
    /// Threads that wait, including those that are woken up for work that is handed over.
    waiting: usize,
    /// Work that is handed over and not taken yet. It is never more than the threads that wait.
    handed_over: VecDeque<Work>,
}

// === impl Threads ===

impl Threads {
    const fn new(keep: Duration) -> Self {
        let state = State { waiting: 0, handed_over: VecDeque::new() };
        Self { keep, state: Mutex::new(state), new_work: Condvar::new() }
    }

    /// Runs work on a thread that waits, or on a new thread. A panic of the work ends the thread.
    ///
    /// # Errors
    /// If the kernel starts no thread. The work is dropped.
    pub(super) fn run(&'static self, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
        let mut state = self.state();
        if state.waiting > state.handed_over.len() {
            state.handed_over.push_back(Box::new(work));
            drop(state);
            self.new_work.notify_one();
            return Ok(());
        }
        drop(state);
        let thread = std::thread::Builder::new().name("files".to_owned());
        let thread = thread.spawn(move || {
            work();
            while let Some(work) = self.next_work() {
                work();
            }
        });
        thread.map(drop)
    }

    /// Waits for work. None if the thread is to end.
    fn next_work(&self) -> Option<Work> {
        let mut state = self.state();
        if state.waiting >= WAITING_MAX {
            return None;
        }
        state.waiting += 1;
        let woken = self.new_work.wait_timeout_while(state, self.keep, |state| state.handed_over.is_empty());
        let (mut state, _timeout) = woken.unwrap_or_else(PoisonError::into_inner);
        state.waiting -= 1;
        state.handed_over.pop_front()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::sync::mpsc;
    use std::thread::{self, ThreadId};

    use super::*;

    /// Longer than any test.
    const LONG: Duration = Duration::from_secs(3600);

    /// Runs work and returns its thread.
    fn thread_of_work(threads: &'static Threads) -> ThreadId {
        let (sender, receiver) = mpsc::channel();
        threads.run(move || sender.send(thread::current().id()).expect("the test waits")).expect("thread");
        receiver.recv().expect("the work is done")
    }

    /// Returns when this number of threads waits.
    fn until_waiting(threads: &Threads, number: usize) {
        while threads.state().waiting != number {
            thread::yield_now();
        }
    }

    #[test]
    fn a_thread_that_waits_takes_the_next_work() {
        static THREADS: Threads = Threads::new(LONG);
        let first = thread_of_work(&THREADS);
        for _ in 0..3 {
            until_waiting(&THREADS, 1);
            assert_eq!(thread_of_work(&THREADS), first);
        }
    }

    #[test]
    fn work_that_blocks_delays_no_other_work() {
        static THREADS: Threads = Threads::new(LONG);
        thread_of_work(&THREADS);
        until_waiting(&THREADS, 1);
        let mut held = Vec::new();
        for _ in 0..20 {
            let (release, released) = mpsc::channel::<()>();
            THREADS
                .run(move || {
                    let _released = released.recv();
                })
                .expect("thread");
            held.push(release);
            // It does not wait behind the work that blocks.
            thread_of_work(&THREADS);
        }
        drop(held);
    }

    #[test]
    fn threads_above_the_limit_end() {
        static THREADS: Threads = Threads::new(LONG);
        let (ended, end) = mpsc::channel();
        let mut held = Vec::new();
        for _ in 0..WAITING_MAX + 2 {
            let (release, released) = mpsc::channel::<()>();
            let ended = ended.clone();
            THREADS
                .run(move || {
                    send_at_end(ended);
                    let _released = released.recv();
                })
                .expect("thread");
            held.push(release);
        }
        drop(held);
        until_waiting(&THREADS, WAITING_MAX);
        assert!(end.recv().is_ok() && end.recv().is_ok(), "two threads end");
        assert_eq!(THREADS.state().waiting, WAITING_MAX);
    }

    #[test]
    fn a_thread_without_work_ends() {
        static THREADS: Threads = Threads::new(Duration::ZERO);
        let (ended, end) = mpsc::channel();
        THREADS.run(move || send_at_end(ended)).expect("thread");
        end.recv().expect("the thread ends");
        assert_eq!(THREADS.state().waiting, 0);
    }

    #[test]
    fn a_panic_ends_only_its_thread() {
        static THREADS: Threads = Threads::new(LONG);
        let first = thread_of_work(&THREADS);
        until_waiting(&THREADS, 1);
        let (ended, end) = mpsc::channel::<()>();
        let started = THREADS.run(move || {
            let _dropped_by_the_panic = ended;
            panic!("a panic of a test");
        });
        started.expect("thread");
        assert!(end.recv().is_err());
        assert_ne!(thread_of_work(&THREADS), first);
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

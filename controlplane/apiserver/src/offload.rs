//! CPU-heavy work on untrusted bytes, off the async workers and with bounded concurrency.
//!
//! Parsing a request of three megabytes takes tens of milliseconds and many times its size in memory. It runs outside
//! the async workers, and at most [`CONCURRENCY`] such requests are parsed at a time.

use std::cell::Cell;
use std::sync::{Condvar, Mutex, PoisonError};

use tokio::runtime::{Handle, RuntimeFlavor};

/// Minimum bytes of a body, or of a stored object, that is offloaded.
pub(crate) const LARGE: usize = 32 << 10;
/// Maximum number of concurrent offloaded functions.
const CONCURRENCY: usize = 2;

thread_local!(static IS_OFFLOADED: Cell<bool> = const { Cell::new(false) });

static GATE: Gate = Gate { running: Mutex::new(0), freed: Condvar::new() };

struct Gate {
    running: Mutex<usize>,
    freed: Condvar,
}

/// The permit of one offloaded function.
struct Turn;

/// Runs a CPU-heavy function. Within another one it runs at once, in the same turn.
pub(crate) fn run<T>(is_heavy: bool, work: impl FnOnce() -> T) -> T {
    let threaded = || Handle::try_current().is_ok_and(|h| h.runtime_flavor() == RuntimeFlavor::MultiThread);
    if !is_heavy || IS_OFFLOADED.get() || !threaded() {
        return work();
    }
    tokio::task::block_in_place(|| {
        let _turn = GATE.wait();
        work()
    })
}

impl Gate {
    fn wait(&self) -> Turn {
        let running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        let mut running = self
            .freed
            .wait_while(running, |running| *running >= CONCURRENCY)
            .unwrap_or_else(PoisonError::into_inner);
        *running += 1;
        IS_OFFLOADED.set(true);
        Turn
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        IS_OFFLOADED.set(false);
        *GATE.running.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        GATE.freed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn nested_work_does_not_wait_for_itself() {
        let nested = |_| async { tokio::spawn(async { run(true, || run(true, || run(true, || 1))) }).await };
        let done = futures::future::join_all((0..16).map(nested)).await;
        assert_eq!(done.into_iter().map(|one| one.unwrap()).sum::<i32>(), 16);
        assert!(!IS_OFFLOADED.get());
    }
}

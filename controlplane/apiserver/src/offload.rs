//! CPU-heavy work on untrusted bytes, off the async workers and with bounded concurrency.
//!
//! Parsing a request of three megabytes takes tens of milliseconds and many times its size in memory. It runs outside
//! the async workers, and at most [`CONCURRENCY`] such requests are parsed at a time.

use std::sync::{Condvar, Mutex, PoisonError};

use tokio::runtime::{Handle, RuntimeFlavor};

/// Minimum bytes of a body that is offloaded.
pub(crate) const LARGE: usize = 32 << 10;
/// Maximum number of concurrent offloaded functions.
const CONCURRENCY: usize = 2;

static GATE: Gate = Gate { running: Mutex::new(0), freed: Condvar::new() };

struct Gate {
    running: Mutex<usize>,
    freed: Condvar,
}

/// The permit of one offloaded function.
struct Turn;

/// Runs a CPU-heavy function. Must not be nested.
pub(crate) fn run<T>(is_heavy: bool, work: impl FnOnce() -> T) -> T {
    let threaded = Handle::try_current().is_ok_and(|h| h.runtime_flavor() == RuntimeFlavor::MultiThread);
    if !is_heavy || !threaded {
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
        Turn
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        *GATE.running.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        GATE.freed.notify_one();
    }
}

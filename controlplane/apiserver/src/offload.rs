//! Runs CPU-heavy work on untrusted bytes outside of the async workers, with bounded concurrency.
//!
//! Parsing a request of three megabytes takes tens of milliseconds and many times its size in memory. At most
//! [`CONCURRENCY`] such functions run at a time.

use std::cell::Cell;
use std::sync::{Condvar, Mutex, PoisonError};

use serde_json::Value;
use tokio::runtime::{Handle, RuntimeFlavor};

/// Minimum bytes of a body, or of a stored object, that is offloaded.
pub(crate) const MIN_OFFLOADED_BYTES: usize = 32 << 10;
/// Maximum number of concurrent offloaded functions.
const CONCURRENCY: usize = 2;

thread_local!(static IS_OFFLOADED: Cell<bool> = const { Cell::new(false) });

static GATE: Gate = Gate { running: Mutex::new(0), freed: Condvar::new() };

struct Gate {
    running: Mutex<usize>,
    freed: Condvar,
}

/// The permit of one offloaded function.
struct OffloadPermit;

/// Runs a function; a heavy one waits for a permit. A nested call uses the permit of the outer call.
pub(crate) fn run<T>(is_heavy: bool, work: impl FnOnce() -> T) -> T {
    let threaded = || Handle::try_current().is_ok_and(|h| h.runtime_flavor() == RuntimeFlavor::MultiThread);
    if !is_heavy || IS_OFFLOADED.get() || !threaded() {
        return work();
    }
    tokio::task::block_in_place(|| {
        let _permit = GATE.wait();
        work()
    })
}

/// Whether the JSON text of a tree has approximately `bytes` bytes or more. The traversal stops at that size.
pub(crate) fn is_longer(value: &Value, bytes: usize) -> bool {
    remaining_bytes(value, bytes).is_none()
}

/// Subtracts the length of a value's text from `bytes`. `None` if the text is longer.
fn remaining_bytes(value: &Value, bytes: usize) -> Option<usize> {
    match value {
        Value::Null | Value::Bool(_) | Value::Number(_) => bytes.checked_sub(4),
        Value::String(text) => bytes.checked_sub(text.len() + 3),
        Value::Array(list) => {
            list.iter().try_fold(bytes.checked_sub(2)?, |bytes, one| remaining_bytes(one, bytes))
        }
        Value::Object(fields) => fields.iter().try_fold(bytes.checked_sub(2)?, |bytes, (key, one)| {
            remaining_bytes(one, bytes.checked_sub(key.len() + 4)?)
        }),
    }
}

impl Gate {
    fn wait(&self) -> OffloadPermit {
        let running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        let mut running = self
            .freed
            .wait_while(running, |running| *running >= CONCURRENCY)
            .unwrap_or_else(PoisonError::into_inner);
        *running += 1;
        IS_OFFLOADED.set(true);
        OffloadPermit
    }
}

impl Drop for OffloadPermit {
    fn drop(&mut self) {
        IS_OFFLOADED.set(false);
        *GATE.running.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        GATE.freed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_length_of_a_tree_equals_the_length_of_its_text() {
        let tree = serde_json::json!({"key": ["text", 1234, true, {}], "other": "x".repeat(100)});
        let length = tree.to_string().len();
        assert!(is_longer(&tree, length - 10));
        assert!(!is_longer(&tree, length + 10));
        assert!(is_longer(&vec![Value::Null; 1000].into(), 3000));
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn nested_work_does_not_wait_for_itself() {
        let nested = |_| async { tokio::spawn(async { run(true, || run(true, || run(true, || 1))) }).await };
        let done = futures::future::join_all((0..16).map(nested)).await;
        assert_eq!(done.into_iter().map(|one| one.unwrap()).sum::<i32>(), 16);
        assert!(!IS_OFFLOADED.get());
    }
}

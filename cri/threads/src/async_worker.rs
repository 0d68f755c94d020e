//! Runs long work of async tasks.

use tokio::runtime::{Handle, RuntimeFlavor};

/// Runs long or blocking work of an async task. Meanwhile the other tasks of the async worker run on another thread.
/// Without a multi-threaded runtime there is no other thread, and the work delays the other tasks.
pub fn off_worker<T>(work: impl FnOnce() -> T) -> T {
    let is_worker = Handle::try_current().is_ok_and(|own| own.runtime_flavor() == RuntimeFlavor::MultiThread);
    if is_worker { tokio::task::block_in_place(work) } else { work() }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    #[tokio::test(flavor = "multi_thread", worker_threads = 1)]
    async fn other_tasks_of_the_worker_run_during_long_work() {
        let (sender, receiver) = mpsc::channel();
        let long = tokio::spawn(async move {
            tokio::spawn(async move { sender.send(7) });
            off_worker(|| receiver.recv_timeout(Duration::from_secs(60)))
        });
        assert_eq!(long.await.expect("no panic"), Ok(7));
    }

    #[tokio::test]
    async fn work_runs_in_a_runtime_with_one_thread() {
        assert_eq!(off_worker(|| 7), 7);
    }

    #[test]
    fn work_runs_outside_of_a_runtime() {
        assert_eq!(off_worker(|| 7), 7);
    }
}

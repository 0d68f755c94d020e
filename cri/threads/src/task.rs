//! Starts async tasks.

use std::pin::Pin;

use tokio::task::JoinHandle;

/// Starts an async task, like `tokio::spawn`. The future is boxed, so that the runtime's code for tasks is compiled once.
/// `tokio::spawn` adds about 4 kB of code for each type of future.
///
/// # Panics
/// Outside of an async runtime.
pub fn spawn(task: impl Future<Output = ()> + Send + 'static) -> JoinHandle<()> {
    let task: Pin<Box<dyn Future<Output = ()> + Send>> = Box::pin(task);
    tokio::spawn(task)
}

/// Runs blocking work on a thread of the async runtime, like `tokio::task::spawn_blocking`. The work is boxed, so that the
/// runtime's code is compiled once per type of the result.
///
/// # Panics
/// Outside of an async runtime.
pub fn spawn_blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> JoinHandle<T> {
    let work: Box<dyn FnOnce() -> T + Send> = Box::new(work);
    tokio::task::spawn_blocking(work)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_task_runs_beside_its_caller() {
        let (sender, receiver) = tokio::sync::oneshot::channel();
        let task = spawn(async move { _ = sender.send(7) });
        assert_eq!(receiver.await, Ok(7));
        task.await.expect("no panic");
    }

    #[tokio::test]
    async fn blocking_work_returns_its_result() {
        assert_eq!(spawn_blocking(|| 7).await.expect("no panic"), 7);
    }
}

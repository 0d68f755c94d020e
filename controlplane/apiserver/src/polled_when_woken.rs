//! A future beside the main work of a task, for example a time limit. A task polls all of its futures at each wake-up.
//! Polling a timer or a cancellation token takes locks that other tasks use. A connection with a watch wakes up for
//! each event. Without this type, a change that reaches a thousand watches would poll thousands of unchanged time
//! limits.

use std::{
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, Wake, Waker},
};

/// A future that is polled only after its own wake-up, and not at each wake-up of its task.
pub(crate) struct PolledWhenWoken<F> {
    future: F,
    wakeup: Arc<Wakeup>,
    /// The waker of `wakeup`.
    waker: Waker,
    /// A copy of [`Wakeup::task`], which is compared without its lock.
    task: Option<Waker>,
}

/// The wake-up of the future.
struct Wakeup {
    /// Whether the future must be polled.
    is_due: AtomicBool,
    /// The task that has polled last. A wake-up does not remove this waker, because the next poll may not set it again.
    task: Mutex<Option<Waker>>,
}

// === impl PolledWhenWoken ===

impl<F: Future + Unpin> PolledWhenWoken<F> {
    /// A future that is polled at first, and then after each of its wake-ups.
    pub(crate) fn new(future: F) -> Self {
        let wakeup = Arc::new(Wakeup { is_due: AtomicBool::new(true), task: Mutex::new(None) });
        Self { future, waker: wakeup.clone().into(), wakeup, task: None }
    }
}

impl<F: Future + Unpin> Future for PolledWhenWoken<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let this = &mut *self;
        if this.task.as_ref().is_none_or(|task| !task.will_wake(cx.waker())) {
            // The task is set before the flag is read. So a wake-up that sets the flag after this read finds the new
            // task.
            *this.wakeup.task() = Some(cx.waker().clone());
            this.task = Some(cx.waker().clone());
        }
        // Usually the future is not due. A wake-up after this load wakes the task again.
        let is_due = &this.wakeup.is_due;
        if !is_due.load(Ordering::Acquire) || !is_due.swap(false, Ordering::AcqRel) {
            return Poll::Pending;
        }
        Pin::new(&mut this.future).poll(&mut Context::from_waker(&this.waker))
    }
}

// === impl Wakeup ===

impl Wakeup {
    fn task(&self) -> MutexGuard<'_, Option<Waker>> {
        self.task.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Wake for Wakeup {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.is_due.store(true, Ordering::Release);
        let task = self.task().clone();
        if let Some(task) = task {
            task.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{future::poll_fn, sync::atomic::AtomicUsize};

    use futures::FutureExt as _;
    use tokio::sync::{mpsc, oneshot};

    use super::*;

    /// A future that counts its polls, and the sender that ends it.
    fn counted() -> (impl Future<Output = u32> + Unpin + Send, oneshot::Sender<u32>, Arc<AtomicUsize>) {
        let ((sender, mut receiver), polls) = (oneshot::channel(), Arc::<AtomicUsize>::default());
        let counter = polls.clone();
        let future = poll_fn(move |cx| {
            counter.fetch_add(1, Ordering::Relaxed);
            receiver.poll_unpin(cx).map(Result::unwrap)
        });
        (future, sender, polls)
    }

    #[test]
    fn a_future_is_polled_only_after_its_own_wake_up() {
        let (future, sender, polls) = counted();
        let mut future = PolledWhenWoken::new(future);
        let mut poll = || future.poll_unpin(&mut Context::from_waker(Waker::noop()));
        for _ in 0..10 {
            assert_eq!(poll(), Poll::Pending);
        }
        assert_eq!(polls.load(Ordering::Relaxed), 1);
        sender.send(7).unwrap();
        assert_eq!((poll(), polls.load(Ordering::Relaxed)), (Poll::Ready(7), 2));
    }

    #[tokio::test]
    async fn a_wake_up_reaches_the_task_that_has_polled_last() {
        let (future, sender, _polls) = counted();
        let mut future = PolledWhenWoken::new(future);
        assert_eq!(future.poll_unpin(&mut Context::from_waker(Waker::noop())), Poll::Pending);
        let waiting = tokio::spawn(future);
        tokio::task::yield_now().await;
        sender.send(7).unwrap();
        assert_eq!(waiting.await.unwrap(), 7);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn no_wake_up_by_another_thread_is_missed() {
        let (sender, mut receiver) = mpsc::channel(1);
        let received = PolledWhenWoken::new(Box::pin(async move {
            let mut count = 0;
            while receiver.recv().await.is_some() {
                count += 1;
            }
            count
        }));
        let receiving = tokio::spawn(received);
        for _ in 0..10_000 {
            sender.send(()).await.unwrap();
        }
        drop(sender);
        assert_eq!(receiving.await.unwrap(), 10_000);
    }

    #[tokio::test]
    async fn a_future_that_yields_is_polled_again() {
        let yields = Box::pin(async {
            for _ in 0..3 {
                tokio::task::yield_now().await;
            }
            7
        });
        assert_eq!(PolledWhenWoken::new(yields).await, 7);
    }
}

//! A queue of a client's data, bounded by messages and by bytes. The command or port that should read the data may
//! never read it.
//!
//! Each client has a small memory of its own ([`OWN_MEMORY`]), and more from a budget that all clients of the process
//! share ([`SHARED_MEMORY`]). If the budget is used up, new clients have only their own memory: their streams are slower,
//! but no stream waits for another.

use std::sync::{Arc, LazyLock};

use bytes::Bytes;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};

/// Maximum messages of a queue.
const MESSAGES: usize = 16;
/// Own memory of each client in bytes, for one piece of a message.
const OWN_MEMORY: u32 = 16 << 10;
/// Bytes that the queues of all clients share, in addition to the own memory of each client.
const SHARED_MEMORY: usize = 32 << 20;

/// The part of [`SHARED_MEMORY`] that is free.
static BUDGET: LazyLock<Arc<Semaphore>> = LazyLock::new(|| Arc::new(Semaphore::new(SHARED_MEMORY)));

/// Memory in bytes that one or more queues of a client share.
#[derive(Clone, Debug)]
pub(super) struct QueueMemory {
    bytes: u32,
    free: Arc<Semaphore>,
    /// The part that comes from the budget of all clients.
    _shared: Option<Arc<OwnedSemaphorePermit>>,
}

/// The sending end of a queue.
#[derive(Debug)]
pub(super) struct QueueSender<T> {
    memory: QueueMemory,
    sender: mpsc::Sender<Queued<T>>,
}

/// The receiving end of a queue.
#[derive(Debug)]
pub(super) struct QueueReceiver<T> {
    receiver: mpsc::Receiver<Queued<T>>,
    /// Memory of the last received message, until the next call of `recv`.
    handled: Option<OwnedSemaphorePermit>,
}

/// A queued message. Its memory is released when the next message is awaited, or when this message is dropped.
#[derive(Debug)]
struct Queued<T> {
    message: T,
    memory: OwnedSemaphorePermit,
}

/// Messages that a queue counts by their bytes.
pub(super) trait Size {
    /// Bytes that the message holds.
    fn bytes(&self) -> usize;
}

/// Makes a queue whose messages take this memory.
pub(super) fn queue<T>(memory: &QueueMemory) -> (QueueSender<T>, QueueReceiver<T>) {
    let (sender, receiver) = mpsc::channel(MESSAGES);
    (QueueSender { memory: memory.clone(), sender }, QueueReceiver { receiver, handled: None })
}

impl Size for Bytes {
    fn bytes(&self) -> usize {
        self.len()
    }
}

// === impl QueueMemory ===

impl QueueMemory {
    /// Memory of that many bytes, or less if the budget of all clients is used up.
    pub(super) fn new(bytes: u32) -> Self {
        Self::within(&BUDGET, bytes)
    }

    fn within(budget: &Arc<Semaphore>, wanted: u32) -> Self {
        let more = wanted.saturating_sub(OWN_MEMORY);
        let shared = budget.clone().try_acquire_many_owned(more).ok();
        let bytes = if shared.is_some() { wanted } else { OWN_MEMORY };
        Self { bytes, free: Arc::new(Semaphore::new(bytes as usize)), _shared: shared.map(Arc::new) }
    }

    /// Waits until the memory has room for that many bytes. A message that is larger than the memory takes all of the
    /// memory.
    async fn take(&self, bytes: usize) -> Option<OwnedSemaphorePermit> {
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX).clamp(1, self.bytes);
        self.free.clone().acquire_many_owned(bytes).await.ok()
    }
}

// === impl QueueSender ===

impl<T: Size> QueueSender<T> {
    /// Queues a message, and waits while the queue or its memory is full. Returns false if the receiver is gone.
    pub(super) async fn send(&self, message: T) -> bool {
        let memory = tokio::select! {
            // Cancel safe: an incomplete acquisition holds no permits.
            () = self.sender.closed() => return false,
            memory = self.memory.take(message.bytes()) => memory,
        };
        let Some(memory) = memory else { return false };
        self.sender.send(Queued { message, memory }).await.is_ok()
    }

    pub(super) fn is_closed(&self) -> bool {
        self.sender.is_closed()
    }
}

// === impl QueueReceiver ===

impl<T> QueueReceiver<T> {
    /// The next message. `None` after the last message, when the sender is gone. Cancel safe. The memory of the
    /// previous message is released.
    pub(super) async fn recv(&mut self) -> Option<T> {
        self.handled = None;
        let Queued { message, memory } = self.receiver.recv().await?;
        self.handled = Some(memory);
        Some(message)
    }

    /// Whether the sender is gone. Messages may be left.
    pub(super) fn is_closed(&self) -> bool {
        self.receiver.is_closed()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::timeout;

    use super::*;

    impl Size for Vec<u8> {
        fn bytes(&self) -> usize {
            self.len()
        }
    }

    async fn is_full(sender: &QueueSender<Vec<u8>>, bytes: usize) -> bool {
        timeout(Duration::from_secs(1), sender.send(vec![0; bytes])).await.is_err()
    }

    #[tokio::test(start_paused = true)]
    async fn queues_of_a_client_share_a_bounded_memory() {
        let memory = QueueMemory::new(100);
        let ((first, mut received), (second, other)) = (queue(&memory), queue(&memory));
        assert!(!is_full(&first, 60).await && !is_full(&second, 40).await);
        assert!(is_full(&first, 1).await && is_full(&second, 0).await, "an empty message needs memory, too");
        assert_eq!(received.recv().await.map(|message| message.len()), Some(60));
        assert!(is_full(&second, 1).await, "the received message keeps its memory until the next message");
        assert!(timeout(Duration::from_secs(1), received.recv()).await.is_err());
        assert!(!is_full(&second, 60).await);
        // Dropped messages release their memory, and a closed queue does not wait for memory.
        drop(other);
        assert!(!second.send(vec![0; 100]).await);
        assert!(!is_full(&first, 1_000).await, "a larger message waits for all of the memory");
        assert!(is_full(&first, 1).await);
    }

    #[tokio::test(start_paused = true)]
    async fn the_number_of_messages_is_bounded_and_the_end_follows_the_last_message() {
        let (sender, mut receiver) = queue(&QueueMemory::new(1 << 20));
        for _ in 0..MESSAGES {
            assert!(!is_full(&sender, 1).await);
        }
        assert!(is_full(&sender, 1).await && !receiver.is_closed());
        drop(sender);
        assert!(receiver.is_closed() && receiver.recv().await.is_some());
        while receiver.recv().await.is_some() {}
    }

    #[tokio::test(start_paused = true)]
    async fn without_a_budget_each_client_still_has_some_memory() {
        let budget = Arc::new(Semaphore::new(100_000));
        let wanted = OWN_MEMORY + 60_000;
        let (first, second) = (QueueMemory::within(&budget, wanted), QueueMemory::within(&budget, wanted));
        assert_eq!((first.bytes, second.bytes), (wanted, OWN_MEMORY));
        let (sender, _receiver) = queue(&second);
        assert!(!is_full(&sender, OWN_MEMORY as usize).await && is_full(&sender, 1).await);
        // The queues of a client keep its part of the budget until the last queue is dropped.
        let (sender, receiver) = queue::<Vec<u8>>(&first);
        drop(first);
        assert_eq!(budget.available_permits(), 40_000);
        drop((sender, receiver));
        assert_eq!(budget.available_permits(), 100_000);
    }
}

//! Permit for work with large messages: to decode, build and encode them.
//!
//! A client chooses the names that it queries, and so the sizes of their answers: a query of 50 bytes can cause the decoding
//! and the encoding of thousands of records. One permit bounds the processor time of this work to one core of the node.
//! Small messages need no permit.

use tokio::sync::Semaphore;

/// Maximum records of a message that is decoded or encoded without the permit.
pub(crate) const SMALL_RECORDS: usize = 100;
/// Maximum bytes of a message that is decoded without the permit.
const SMALL_BYTES: usize = 4096;

/// The permit for large messages. Tasks get it in the order of their requests.
#[derive(Debug)]
pub(crate) struct LargeMessages {
    permit: Semaphore,
}

// === impl LargeMessages ===

impl LargeMessages {
    pub(crate) fn new() -> Self {
        Self { permit: Semaphore::new(1) }
    }

    /// Runs `work`, with the permit if the message has more than 100 records.
    pub(crate) async fn with_records<T>(&self, records: usize, work: impl FnOnce() -> T) -> T {
        self.run(records > SMALL_RECORDS, work).await
    }

    /// Runs `work`, with the permit if the message has more than 4 KiB.
    pub(crate) async fn with_bytes<T>(&self, bytes: usize, work: impl FnOnce() -> T) -> T {
        self.run(bytes > SMALL_BYTES, work).await
    }

    async fn run<T>(&self, is_large: bool, work: impl FnOnce() -> T) -> T {
        if !is_large {
            return work();
        }
        // An error would mean that the semaphore is closed, but it is never closed.
        let _permit = self.permit.acquire().await.ok();
        work()
    }

    /// Takes the permit.
    #[cfg(test)]
    pub(crate) async fn hold(&self) -> tokio::sync::SemaphorePermit<'_> {
        self.permit.acquire().await.unwrap()
    }
}

//! The time limit of the first events of a watch.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

/// Additional microseconds for each byte of the first events that the client reads. This is 16.8 s for each MiB, so
/// half a megabit per second is fast enough. A client that stops reading gets no more time.
const MICROS_PER_BYTE: u64 = 16;

/// The first events of a watch. Until they are sent, the watch keeps all of their objects in memory, even objects that
/// have changed since.
#[derive(Clone, Default)]
pub(crate) struct FirstEvents {
    /// Cancelled when the first events are sent.
    sent: CancellationToken,
    /// Additional microseconds for the client. [`FirstEvents::are_sent_within`] uses this time and resets it to 0.
    additional: Arc<AtomicU64>,
}

// === impl FirstEvents ===

impl FirstEvents {
    /// Records that the events are sent.
    pub(crate) fn sent(&self) {
        self.sent.cancel();
    }

    /// Adds the time of a conversion. The client does not have to read faster than a webhook converts the objects.
    pub(crate) fn add_conversion(&self, time: Duration) {
        self.add_micros(u64::try_from(time.as_micros()).unwrap_or(u64::MAX));
    }

    /// Adds the time to read the next event of this length. A client on a slow link needs more than the limit for all
    /// events.
    pub(crate) fn add_reading(&self, bytes: usize) {
        self.add_micros((bytes as u64).saturating_mul(MICROS_PER_BYTE));
    }

    fn add_micros(&self, micros: u64) {
        self.additional.fetch_add(micros, Ordering::Relaxed);
    }

    /// Waits until the events are sent. Returns false if they are not sent within `limit` plus the additional time for
    /// their conversion and length.
    pub(crate) async fn are_sent_within(&self, limit: Duration) -> bool {
        let mut left = limit;
        while !left.is_zero() {
            if timeout(left, self.sent.cancelled()).await.is_ok() {
                return true;
            }
            left = Duration::from_micros(self.additional.swap(0, Ordering::Relaxed));
        }
        false
    }
}

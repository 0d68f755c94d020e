//! Turns of the retries of writes to one object.
//!
//! Without turns, all writes that wait for the commit of another write to the same object would retry at the same time.
//! All but one of them would conflict again. With turns, `n` concurrent writes need about `2 n` attempts, not `n * n /
//! 2`.
//!
//! Only the writes of one owner take turns. So a user who makes its writes slow on purpose does not delay the writes of
//! nodes, controllers and other users to the same object.

use std::time::Duration;

use crate::{
    large_requests::{LargeRequestPermit, LargeRequests},
    request_owner, waits,
};

/// Maximum wait for a turn. Then the write continues without a turn. The write that has the turn may wait for a webhook
/// that is slow, or that itself writes to the object.
const MAX_WAIT: Duration = Duration::from_secs(2);

/// The retries of writes, by their owners and the keys of their objects.
pub(crate) struct WriteTurns(LargeRequests);

/// The turn of a write, until it is dropped.
pub(crate) struct Turn {
    _permit: LargeRequestPermit,
}

// === impl WriteTurns ===

impl WriteTurns {
    /// Waits for the turn of a write to the object with this key among the writes of its owner, in the order of calls.
    /// `None` after [`MAX_WAIT`]. A request that waits for a long time gives its seats back.
    ///
    /// The caller must hold nothing for which the write with the turn may wait, such as a slot or a lock of quotas.
    pub(crate) async fn enter(&self, key: &str) -> Option<Turn> {
        // A key contains no blanks.
        let queue = format!("{} {key}", request_owner::current());
        let turn = tokio::time::timeout(MAX_WAIT, self.0.enter_units(&queue, 1));
        let permit = waits::without_seats(turn).await.ok()?;
        Some(Turn { _permit: permit })
    }
}

impl Default for WriteTurns {
    /// One turn at a time for each pair of owner and object. The number of pairs has no limit.
    fn default() -> Self {
        Self(LargeRequests::with_budget(u32::MAX, 1))
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn writes_of_one_owner_take_turns_and_do_not_wait_without_end() {
        let turns = WriteTurns::default();
        let first = turns.enter("/pods/a").await.expect("the first turn");
        assert!(turns.enter("/pods/b").now_or_never().flatten().is_some(), "another object");
        let other = request_owner::scope("bob".into(), turns.enter("/pods/a"));
        assert!(other.now_or_never().flatten().is_some(), "another owner");
        let mut second = Box::pin(turns.enter("/pods/a"));
        assert!((&mut second).now_or_never().is_none(), "two writes have the turn");
        let mut third = Box::pin(turns.enter("/pods/a"));
        assert!((&mut third).now_or_never().is_none());
        drop(first);
        let second = second.await.expect("the turn after the first write");
        assert!(third.await.is_none(), "the wait has a limit");
        drop(second);
        assert!(turns.enter("/pods/a").now_or_never().flatten().is_some());
    }
}

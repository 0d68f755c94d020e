//! Turns for work with large messages: to decode, build and encode them.
//!
//! A client chooses the names that it queries, and so the sizes of their answers. A query of 50 bytes can cause the
//! decoding and encoding of thousands of records. One task at a time does this work, so it uses at most one core of the
//! node. Clients take turns: one client with many large messages delays another client by one message. Small messages
//! need no turn.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

use crate::fair_queue::FairQueue;
use crate::limit::{Limit, Permit};

/// Maximum records of a message that is decoded or encoded without a turn.
pub(crate) const SMALL_RECORDS: usize = 100;
/// Maximum bytes of a message that is decoded without a turn.
pub(crate) const SMALL_BYTES: usize = 4096;
/// Placeholder for the client of a query for which no client waits, such as a renewal of a cached answer.
pub(crate) const NO_CLIENT: IpAddr = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
/// Maximum bytes of the answers that are being received by TCP.
const RECEIVED_BYTES: usize = 8 << 20;
/// Maximum bytes of the answers that are being received by TCP for each client.
const RECEIVED_BYTES_OF_CLIENT: usize = 1 << 20;

/// The turns for large messages, and the memory for large answers that are being received.
pub(crate) struct LargeMessages {
    turns: Arc<Mutex<Turns>>,
    received: Limit,
}

struct Turns {
    is_taken: bool,
    waiting: FairQueue<oneshot::Sender<Turn>>,
}

/// The permission to work on one large message. When it is dropped, a task of the next client gets the turn.
pub(crate) struct Turn {
    turns: Arc<Mutex<Turns>>,
}

// === impl LargeMessages ===

impl LargeMessages {
    pub(crate) fn new() -> Self {
        let turns = Turns { is_taken: false, waiting: FairQueue::new() };
        let received = Limit::new(RECEIVED_BYTES, RECEIVED_BYTES_OF_CLIENT);
        Self { turns: Arc::new(Mutex::new(turns)), received }
    }

    /// Reserves memory for an answer that is being received. The caller drops the permit when the answer is complete.
    /// `None` if a limit is reached.
    pub(crate) fn reserve(&self, client: IpAddr, bytes: usize) -> Option<Permit> {
        self.received.take_units(client, bytes)
    }

    /// Runs `work`, in the client's turn if the message has more than 100 records. `None` if too many tasks wait.
    pub(crate) async fn with_records<T>(
        &self,
        client: IpAddr,
        records: usize,
        work: impl FnOnce() -> T,
    ) -> Option<T> {
        if records <= SMALL_RECORDS {
            return Some(work());
        }
        let _turn = self.turn(client).await?;
        Some(work())
    }

    async fn turn(&self, client: IpAddr) -> Option<Turn> {
        let waiting = match self.take_or_wait(client) {
            Ok(turn) => return Some(turn),
            Err(waiting) => waiting,
        };
        // The queue drops the sender if it has no room. Then `await` returns an error.
        waiting.await.ok()
    }

    /// Takes the turn if it is free. Otherwise returns a channel that delivers the client's next turn.
    fn take_or_wait(&self, client: IpAddr) -> Result<Turn, oneshot::Receiver<Turn>> {
        let mut turns = lock(&self.turns);
        if !turns.is_taken {
            turns.is_taken = true;
            return Ok(Turn { turns: Arc::clone(&self.turns) });
        }
        let (sender, receiver) = oneshot::channel();
        turns.waiting.push(client, sender);
        Err(receiver)
    }

    /// Takes the turn.
    #[cfg(test)]
    pub(crate) async fn hold(&self) -> Turn {
        self.turn(NO_CLIENT).await.unwrap()
    }
}

// === impl Turn ===

impl Drop for Turn {
    fn drop(&mut self) {
        let next = {
            let mut turns = lock(&self.turns);
            // Skip tasks that have ended in a loop. Otherwise `send` would return the turn, and its drop would call
            // this function recursively.
            let next = std::iter::from_fn(|| turns.waiting.pop()).find(|next| !next.is_closed());
            turns.is_taken = next.is_some();
            next
        };
        // If the task ends at this moment, `send` returns the turn. Its drop passes the turn to the next task.
        if let Some(next) = next {
            drop(next.send(Turn { turns: Arc::clone(&self.turns) }));
        }
    }
}

fn lock(turns: &Mutex<Turns>) -> MutexGuard<'_, Turns> {
    turns.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn client(number: u8) -> IpAddr {
        [10, 0, 0, number].into()
    }

    /// The channel of a client that waits.
    fn wait(large: &LargeMessages, client: IpAddr) -> oneshot::Receiver<Turn> {
        large.take_or_wait(client).err().unwrap()
    }

    #[tokio::test]
    async fn a_client_with_many_large_messages_delays_another_by_one_message() {
        let large = LargeMessages::new();
        let held = large.hold().await;
        let mut flood: Vec<_> = (0..50).map(|_| wait(&large, client(1))).collect();
        let mut other = wait(&large, client(2));
        drop(held);
        let first = flood[0].try_recv().unwrap();
        assert!(flood[1..].iter_mut().all(|waiting| waiting.try_recv().is_err()), "one at a time");
        assert!(other.try_recv().is_err());
        drop(first);
        let turn = other.try_recv().unwrap();
        assert!(flood[1].try_recv().is_err());
        drop(turn);
        assert!(flood[1].try_recv().is_ok());
    }

    #[tokio::test]
    async fn a_task_that_has_ended_passes_its_turn_on() {
        let large = LargeMessages::new();
        let held = large.hold().await;
        let (ended, ends) = (wait(&large, client(1)), wait(&large, client(2)));
        drop(ended);
        drop(held);
        // The turn is in the channel, and the task ends before it has read the channel.
        drop(ends);
        drop(large.hold().await);
        assert_eq!(large.with_records(client(3), SMALL_RECORDS + 1, || 7).await, Some(7));
    }

    #[tokio::test]
    async fn many_tasks_that_have_ended_are_skipped() {
        let large = LargeMessages::new();
        let held = large.hold().await;
        for number in 0..1000u16 {
            let [high, low] = number.to_be_bytes();
            drop(wait(&large, [10, 1, high, low].into()));
        }
        let mut last = wait(&large, client(1));
        drop(held);
        assert!(last.try_recv().is_ok());
    }

    #[tokio::test]
    async fn waiting_tasks_and_their_memory_are_limited() {
        let large = LargeMessages::new();
        let held = large.hold().await;
        let waiting: Vec<_> = (0..128).map(|_| wait(&large, client(1))).collect();
        assert_eq!(large.with_records(client(1), SMALL_RECORDS + 1, || 7).await, None);
        assert_eq!(large.with_records(client(1), SMALL_RECORDS, || 7).await, Some(7), "no turn is needed");
        drop((held, waiting));
        let whole = usize::from(u16::MAX);
        let of_one: Vec<_> = std::iter::from_fn(|| large.reserve(client(1), whole)).collect();
        assert_eq!(of_one.len(), RECEIVED_BYTES_OF_CLIENT / whole);
        let of_all: Vec<_> = (2..100).filter_map(|number| large.reserve(client(number), whole)).collect();
        assert!((of_one.len() + of_all.len()) * whole <= RECEIVED_BYTES);
        assert!(large.reserve(client(1), whole).is_none());
        drop(of_one);
        assert!(large.reserve(client(1), whole).is_some());
    }
}

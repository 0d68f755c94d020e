//! Queue of the waiting work of clients, such as queries. Clients are served in round-robin order: a flood of one
//! client delays no other client.

use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;

/// Maximum waiting queries of all clients.
const MAX_WAITING: usize = 1024;
/// Maximum waiting queries of one client.
const MAX_WAITING_OF_CLIENT: usize = 128;

/// The waiting queries of all clients.
#[derive(Debug)]
pub(crate) struct FairQueue<T> {
    clients: HashMap<IpAddr, VecDeque<T>>,
    /// The clients with waiting queries, in round-robin order.
    order: VecDeque<IpAddr>,
    total: usize,
}

// === impl FairQueue ===

impl<T> FairQueue<T> {
    pub(crate) fn new() -> Self {
        Self { clients: HashMap::new(), order: VecDeque::new(), total: 0 }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.total == 0
    }

    /// Queues a query, or drops it at the limits. As the queues fill up, each client may have fewer queries, so that
    /// there is room for other clients.
    pub(crate) fn push(&mut self, client: IpAddr, query: T) {
        let own = self.clients.get(&client).map_or(0, VecDeque::len);
        if own >= MAX_WAITING_OF_CLIENT.min(MAX_WAITING - self.total) {
            return;
        }
        if own == 0 {
            self.order.push_back(client);
        }
        self.clients.entry(client).or_default().push_back(query);
        self.total += 1;
    }

    /// Removes and returns the next query of the next client.
    pub(crate) fn pop(&mut self) -> Option<T> {
        let client = self.order.pop_front()?;
        let queue = self.clients.get_mut(&client)?;
        let query = queue.pop_front()?;
        self.total -= 1;
        if queue.is_empty() {
            self.clients.remove(&client);
        } else {
            self.order.push_back(client);
        }
        Some(query)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn client(number: u16) -> IpAddr {
        let [high, low] = number.to_be_bytes();
        [10, 0, high, low].into()
    }

    #[test]
    fn clients_take_turns() {
        let mut queue = FairQueue::new();
        for number in 0..3 {
            queue.push(client(1), (1, number));
        }
        queue.push(client(2), (2, 0));
        let all: Vec<_> = std::iter::from_fn(|| queue.pop()).collect();
        assert_eq!(all, [(1, 0), (2, 0), (1, 1), (1, 2)]);
        assert!(queue.is_empty() && queue.clients.is_empty() && queue.order.is_empty());
    }

    #[test]
    fn floods_of_many_clients_leave_room_for_others() {
        let mut queue = FairQueue::new();
        for _ in 0..MAX_WAITING {
            (0..20).for_each(|number| queue.push(client(number), ()));
        }
        assert!(queue.total < MAX_WAITING);
        let before = queue.total;
        queue.push(client(999), ());
        assert_eq!(queue.total, before + 1);
    }
}

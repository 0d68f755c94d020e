//! Limits of concurrent work: in total, and for each client.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};

/// Limits of one kind of work.
#[derive(Clone)]
pub(crate) struct Limit {
    /// Maximum units of all clients.
    total: usize,
    /// Maximum units of each client.
    each: usize,
    /// Units in use: in total, and by client.
    counts: Arc<Mutex<(usize, HashMap<IpAddr, usize>)>>,
}

/// A permit for one or more units of work. The holder drops it when the work ends.
pub(crate) struct Permit {
    limit: Limit,
    client: IpAddr,
    units: usize,
}

// === impl Limit ===

impl Limit {
    pub(crate) fn new(total: usize, each: usize) -> Self {
        Self { total, each, counts: Arc::default() }
    }

    /// A permit for one unit of the client's work, unless a limit is reached.
    pub(crate) fn take(&self, client: IpAddr) -> Option<Permit> {
        self.take_units(client, 1)
    }

    /// A permit for this number of units, unless a limit is reached. The more units are in use in total, the fewer each
    /// client may have, so that some remain for other clients.
    pub(crate) fn take_units(&self, client: IpAddr, units: usize) -> Option<Permit> {
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        let (total, clients) = &mut *counts;
        let own = clients.get(&client).copied().unwrap_or_default();
        if own.saturating_add(units) > self.each.min(self.total.saturating_sub(*total)) {
            return None;
        }
        *total += units;
        clients.insert(client, own + units);
        drop(counts);
        Some(Permit { limit: self.clone(), client, units })
    }
}

// === impl Permit ===

impl Permit {
    pub(crate) fn client(&self) -> IpAddr {
        self.client
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut counts = self.limit.counts.lock().unwrap_or_else(PoisonError::into_inner);
        let (total, clients) = &mut *counts;
        *total = total.saturating_sub(self.units);
        if let Some(own) = clients.get_mut(&self.client) {
            *own = own.saturating_sub(self.units);
            if *own == 0 {
                clients.remove(&self.client);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_cannot_take_the_share_of_others() {
        let limit = Limit::new(3, 2);
        let (one, two) = ([10, 0, 0, 1].into(), [10, 0, 0, 2].into());
        let held = [limit.take(one), limit.take(one)];
        assert!(held.iter().all(Option::is_some) && limit.take(one).is_none());
        let other = limit.take(two);
        assert!(other.is_some() && limit.take(two).is_none(), "the total is reached");
        drop(held);
        assert!(limit.take(one).is_some());
        drop(other);
        assert!(limit.counts.lock().unwrap().1.is_empty());
    }

    #[test]
    fn many_clients_leave_permits_for_others() {
        let limit = Limit::new(1024, 128);
        let client = |number: u8| IpAddr::from([10, 0, 0, number]);
        let mut held = Vec::new();
        for _ in 0..128 {
            held.extend((0..50).filter_map(|number| limit.take(client(number))));
        }
        assert!(limit.take(client(0)).is_none());
        assert!(limit.take(client(99)).is_some());
    }
}

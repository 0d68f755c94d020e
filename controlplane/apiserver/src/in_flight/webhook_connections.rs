//! Connections to webhooks: a maximum for all hosts, and a fair part for each.
//!
//! A call above the limits waits for a connection, first come, first served. If the call were refused at once, a user
//! with many parallel requests could evade a webhook whose failure policy is `Ignore`. A host that has used its part
//! does not delay the calls of other hosts.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use coracle_connections::Share;
use tokio::sync::oneshot;

use super::PER_FREE_BYTE;

/// Maximum number of calls that wait for a connection. The calls of one user are limited by its requests in flight.
const MAX_WAITING: usize = 8192;

/// The connections to webhooks in use, and the calls that wait for one.
pub(crate) struct WebhookConnections {
    places: Arc<Mutex<Places>>,
}

/// A connection, or a place in the queue. Dropping it releases either.
pub(crate) struct WebhookPermit {
    places: Arc<Mutex<Places>>,
    host: String,
    number: u64,
}

/// Reports that a waiting call has got a connection.
type Granted = oneshot::Receiver<()>;

/// Invariant: a call waits only while the limits do not permit a connection for it.
struct Places {
    /// Maximum number of connections.
    max_used: usize,
    /// Maximum number of waiting calls.
    max_waiting: usize,
    used: usize,
    waiting: usize,
    /// Hosts with connections or waiting calls, by name.
    hosts: HashMap<String, Host>,
    /// Number of the next call.
    next: u64,
}

/// The calls of one host.
#[derive(Default)]
struct Host {
    used: usize,
    /// Waiting calls, by number. The call with the lowest number is the oldest.
    waiting: BTreeMap<u64, oneshot::Sender<()>>,
}

/// Whether an owner of `own` places may have one more. An owner gets at most three times as many places as are still
/// free.
fn is_free(most: usize, used: usize, own: usize) -> bool {
    most.checked_sub(used + 1).is_some_and(|free| own < free.saturating_mul(PER_FREE_BYTE))
}

fn lock(places: &Mutex<Places>) -> MutexGuard<'_, Places> {
    places.lock().unwrap_or_else(PoisonError::into_inner)
}

// === impl WebhookConnections ===

impl WebhookConnections {
    /// As many connections as the limit of descriptors permits.
    pub(super) fn new() -> Self {
        Self::with_limits(Share::Webhooks.count(), MAX_WAITING)
    }

    /// Sets the maximum number of connections and of waiting calls.
    pub(crate) fn with_limits(max_used: usize, max_waiting: usize) -> Self {
        let (hosts, next) = (HashMap::new(), 0);
        let places = Places { max_used, max_waiting, used: 0, waiting: 0, hosts, next };
        Self { places: Arc::new(Mutex::new(places)) }
    }

    /// Waits for a connection to a host. `None` if too many calls wait. If the future is dropped, the call no longer
    /// waits.
    pub(crate) async fn acquire(&self, host: &str) -> Option<WebhookPermit> {
        let (number, granted) = lock(&self.places).enter(host)?;
        let permit = WebhookPermit { places: self.places.clone(), host: host.to_owned(), number };
        if let Some(granted) = granted {
            granted.await.ok()?;
        }
        Some(permit)
    }
}

// === impl WebhookPermit ===

impl Drop for WebhookPermit {
    fn drop(&mut self) {
        lock(&self.places).leave(&self.host, self.number);
    }
}

// === impl Places ===

impl Places {
    /// Adds a call. Returns its number, and a receiver if the call must wait. `None` if too many calls wait.
    fn enter(&mut self, name: &str) -> Option<(u64, Option<Granted>)> {
        let (used, waiting) = self.hosts.get(name).map_or((0, 0), |host| (host.used, host.waiting.len()));
        let must_wait = !is_free(self.max_used, self.used, used);
        if must_wait && !is_free(self.max_waiting, self.waiting, waiting) {
            return None;
        }
        let number = self.next;
        self.next += 1;
        let host = self.hosts.entry(name.to_owned()).or_default();
        if !must_wait {
            host.used += 1;
            self.used += 1;
            return Some((number, None));
        }
        let (sender, granted) = oneshot::channel();
        host.waiting.insert(number, sender);
        self.waiting += 1;
        Some((number, Some(granted)))
    }

    /// Removes a call from the queue, or releases its connection and gives it to waiting calls.
    fn leave(&mut self, name: &str, number: u64) {
        let Some(host) = self.hosts.get_mut(name) else { return };
        let has_waited = host.waiting.remove(&number).is_some();
        if has_waited {
            self.waiting -= 1;
        } else {
            host.used -= 1;
            self.used -= 1;
        }
        if host.used == 0 && host.waiting.is_empty() {
            self.hosts.remove(name);
        }
        if !has_waited {
            while self.grant() {}
        }
    }

    /// Gives a connection to the first waiting call that may have one. Returns false if there is none.
    fn grant(&mut self) -> bool {
        let (most, used) = (self.max_used, self.used);
        let may = self.hosts.values_mut().filter(|host| is_free(most, used, host.used));
        let first = may.filter(|host| !host.waiting.is_empty()).min_by_key(|host| host.first());
        let Some((host, (_number, sender))) =
            first.and_then(|host| host.waiting.pop_first().map(|call| (host, call)))
        else {
            return false;
        };
        host.used += 1;
        self.used += 1;
        self.waiting -= 1;
        // A call that no longer waits releases the connection when its permit is dropped.
        let _ = sender.send(());
        true
    }
}

// === impl Host ===

impl Host {
    /// The number of the first waiting call.
    fn first(&self) -> u64 {
        self.waiting.first_key_value().map_or(u64::MAX, |(number, _sender)| *number)
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    /// Takes a connection if one is free now. A call that would wait leaves the queue.
    fn free(connections: &WebhookConnections, host: &str) -> Option<WebhookPermit> {
        connections.acquire(host).now_or_never().flatten()
    }

    fn all_free(connections: &WebhookConnections, host: &str) -> Vec<WebhookPermit> {
        std::iter::from_fn(|| free(connections, host)).collect()
    }

    #[test]
    fn connections_to_webhooks_are_limited_and_shared_by_hosts() {
        let connections = WebhookConnections::with_limits(8, 100);
        let mut of_slow = all_free(&connections, "slow");
        assert_eq!(of_slow.len(), 6, "one host leaves a part for others");
        let other = free(&connections, "other");
        assert!(other.is_some());
        drop(other);
        of_slow.pop();
        assert!(free(&connections, "slow").is_some());
        drop(of_slow);
        let places = lock(&connections.places);
        assert!(places.hosts.is_empty() && (places.used, places.waiting) == (0, 0));
    }

    #[test]
    fn calls_wait_for_a_connection_in_the_order_of_their_arrival() {
        let connections = WebhookConnections::with_limits(8, 100);
        let mut held = all_free(&connections, "slow");
        let mut calls: Vec<_> = (0..3).map(|_| Box::pin(connections.acquire("slow"))).collect();
        assert!(calls.iter_mut().all(|call| call.now_or_never().is_none()));
        assert!(free(&connections, "other").is_some(), "a host at its part does not delay others");
        held.pop();
        let first = calls[0].as_mut().now_or_never().flatten();
        assert!(first.is_some() && calls[1].as_mut().now_or_never().is_none());
        assert!(free(&connections, "slow").is_none(), "a later call does not overtake");
        // The second call ends its wait.
        drop(calls.remove(1));
        drop(first);
        assert!(calls[1].as_mut().now_or_never().flatten().is_some());
    }

    #[test]
    fn a_connection_goes_to_the_first_host_that_may_have_it() {
        let connections = WebhookConnections::with_limits(8, 100);
        let slow = all_free(&connections, "slow");
        let mut others = all_free(&connections, "a");
        assert_eq!((slow.len(), others.len()), (6, 1));
        let [mut of_slow, mut of_b, mut of_c] =
            ["slow", "b", "c"].map(|host| Box::pin(connections.acquire(host)));
        let is_waiting = |call: Option<Option<WebhookPermit>>| call.is_none();
        assert!(is_waiting(of_slow.as_mut().now_or_never()));
        assert!(is_waiting(of_b.as_mut().now_or_never()) && is_waiting(of_c.as_mut().now_or_never()));
        others.pop();
        let granted = of_b.as_mut().now_or_never().flatten();
        assert!(granted.is_some(), "the first call is of a host at its part");
        assert!(is_waiting(of_slow.as_mut().now_or_never()) && is_waiting(of_c.as_mut().now_or_never()));
    }

    #[test]
    fn a_granted_call_that_no_longer_waits_passes_the_connection_on() {
        let connections = WebhookConnections::with_limits(8, 100);
        let mut held = all_free(&connections, "slow");
        let [mut first, mut second] = ["slow"; 2].map(|host| Box::pin(connections.acquire(host)));
        assert!(first.as_mut().now_or_never().is_none() && second.as_mut().now_or_never().is_none());
        held.pop();
        drop(first);
        assert!(second.as_mut().now_or_never().flatten().is_some());
    }

    #[test]
    fn calls_that_wait_for_a_connection_are_limited_and_shared_by_hosts() {
        let connections = WebhookConnections::with_limits(8, 8);
        let _held = (all_free(&connections, "slow"), all_free(&connections, "other"));
        let wait = |host: &'static str| Box::pin(connections.acquire(host));
        let mut of_slow: Vec<_> = (0..6).map(|_| wait("slow")).collect();
        assert!(of_slow.iter_mut().all(|call| call.now_or_never().is_none()));
        assert!(matches!(wait("slow").now_or_never(), Some(None)), "too many calls wait");
        assert!(wait("third").now_or_never().is_none(), "other hosts have a part of the queue");
        drop(of_slow.pop());
        assert!(wait("slow").now_or_never().is_none());
    }
}

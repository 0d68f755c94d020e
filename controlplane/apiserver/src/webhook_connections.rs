//! Connections to webhooks: a maximum for all hosts, and a fair part for each. The users that call the same host share
//! its part.
//!
//! A call above the limits waits for a connection. If the call were refused at once, a user with many parallel requests
//! could evade a webhook whose failure policy is `Ignore`. A host that has used its part does not delay the calls of
//! other hosts. A connection goes to the user with the fewest connections to its host, then to the oldest call. So a
//! user with many parallel requests to a slow webhook does not use up the connections, and delays mostly its own calls.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use coracle_connections::Share;
use tokio::sync::oneshot;

/// Maximum slots of one host, as a multiple of the free slots. So a host gets at most three quarters of all slots. A
/// slot is a connection or a waiting call.
const PER_FREE: usize = 3;
/// Maximum number of calls that wait for a connection.
const MAX_WAITING: usize = 8192;
/// The waiting calls of one user to a host, as a divisor of the maximum for that host. A request can wait for several
/// validating webhooks at the same time.
const WAITING_PART: usize = 4;

/// The connections to webhooks in use, and the calls that wait for one.
pub(crate) struct WebhookConnections {
    slots: Arc<Mutex<Slots>>,
}

/// A connection, or a slot in the queue. Dropping the permit releases it.
pub(crate) struct WebhookPermit {
    slots: Arc<Mutex<Slots>>,
    caller: Caller,
    number: u64,
}

/// The host that is called, and the owner of the request. An empty owner has no limits of its own.
struct Caller {
    host: String,
    owner: Arc<str>,
}

/// Reports that a waiting call has got a connection.
type Granted = oneshot::Receiver<()>;

/// Invariant: a call waits only while the limits do not permit a connection for it.
struct Slots {
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
    waiting: usize,
    /// Owners with connections or waiting calls, by name.
    owners: HashMap<Arc<str>, Owner>,
}

/// The calls of one owner to a host.
#[derive(Default)]
struct Owner {
    used: usize,
    /// Waiting calls, by number. The call with the lowest number is the oldest.
    waiting: BTreeMap<u64, oneshot::Sender<()>>,
}

/// The first waiting call of an owner that may have a connection.
struct Candidate<'a> {
    owner: &'a Arc<str>,
    used: usize,
    number: u64,
}

/// Whether a host with `own` slots may have one more slot. A host gets at most three times as many slots as are still
/// free.
fn is_free(most: usize, used: usize, own: usize) -> bool {
    most.checked_sub(used + 1).is_some_and(|free| own < free.saturating_mul(PER_FREE))
}

/// Maximum slots of one host, by [`is_free`].
fn part_of_host(most: usize) -> usize {
    most.saturating_mul(PER_FREE) / (PER_FREE + 1)
}

/// Whether an owner with `own` connections to a host may have one more. An owner gets at most as many connections as
/// are still free for the host.
fn is_in_share(most: usize, used_of_host: usize, own: usize) -> bool {
    own < part_of_host(most).saturating_sub(used_of_host)
}

fn lock(slots: &Mutex<Slots>) -> MutexGuard<'_, Slots> {
    slots.lock().unwrap_or_else(PoisonError::into_inner)
}

// === impl WebhookConnections ===

impl WebhookConnections {
    /// The maximum number of connections follows from the limit on file descriptors.
    pub(crate) fn new() -> Self {
        Self::with_limits(Share::Webhooks.count(), MAX_WAITING)
    }

    /// Sets the maximum number of connections and of waiting calls.
    pub(crate) fn with_limits(max_used: usize, max_waiting: usize) -> Self {
        let (hosts, next) = (HashMap::new(), 0);
        let slots = Slots { max_used, max_waiting, used: 0, waiting: 0, hosts, next };
        Self { slots: Arc::new(Mutex::new(slots)) }
    }

    /// At most `max_used` connections to a single host, and at most `max_waiting` waiting calls. The name of the host
    /// is arbitrary.
    pub(crate) fn of_one_host(max_used: usize, max_waiting: usize) -> Self {
        let of_all = |of_host: usize| (of_host * (PER_FREE + 1)).div_ceil(PER_FREE);
        Self::with_limits(of_all(max_used), of_all(max_waiting))
    }

    /// Waits for a connection to a host, for a request of an owner. `None` if too many calls wait. If the future is
    /// dropped, the call no longer waits.
    pub(crate) async fn acquire(&self, host: &str, owner: Arc<str>) -> Option<WebhookPermit> {
        let caller = Caller { host: host.to_owned(), owner };
        let (number, granted) = lock(&self.slots).enter(&caller)?;
        let permit = WebhookPermit { slots: self.slots.clone(), caller, number };
        if let Some(granted) = granted {
            granted.await.ok()?;
        }
        Some(permit)
    }
}

// === impl WebhookPermit ===

impl Drop for WebhookPermit {
    fn drop(&mut self) {
        lock(&self.slots).leave(&self.caller, self.number);
    }
}

// === impl Slots ===

impl Slots {
    /// Adds a call. Returns its number, and a receiver if the call must wait. `None` if too many calls wait.
    fn enter(&mut self, caller: &Caller) -> Option<(u64, Option<Granted>)> {
        let (used, waiting) = self.hosts.get(&caller.host).map_or((0, 0), |host| (host.used, host.waiting));
        let must_wait = !is_free(self.max_used, self.used, used) || !self.has_connection(caller);
        let can_wait = is_free(self.max_waiting, self.waiting, waiting) && self.has_waiting_slot(caller);
        if must_wait && !can_wait {
            return None;
        }
        let number = self.next;
        self.next += 1;
        let host = self.hosts.entry(caller.host.clone()).or_default();
        let own = host.owners.entry(caller.owner.clone()).or_default();
        if !must_wait {
            own.used += 1;
            host.used += 1;
            self.used += 1;
            return Some((number, None));
        }
        let (sender, granted) = oneshot::channel();
        own.waiting.insert(number, sender);
        host.waiting += 1;
        self.waiting += 1;
        Some((number, Some(granted)))
    }

    /// Whether the owner's share of the host's connections permits one more.
    fn has_connection(&self, caller: &Caller) -> bool {
        let host = self.hosts.get(&caller.host);
        caller.owner.is_empty()
            || is_in_share(self.max_used, host.map_or(0, |host| host.used), self.own(caller, |own| own.used))
    }

    /// Whether the owner's share of the host's waiting calls permits one more.
    fn has_waiting_slot(&self, caller: &Caller) -> bool {
        let most = (part_of_host(self.max_waiting) / WAITING_PART).max(1);
        caller.owner.is_empty() || self.own(caller, |own| own.waiting.len()) < most
    }

    fn own(&self, caller: &Caller, count: impl Fn(&Owner) -> usize) -> usize {
        let host = self.hosts.get(&caller.host);
        host.and_then(|host| host.owners.get(&caller.owner)).map_or(0, count)
    }

    /// Removes a call from the queue, or releases its connection and gives it to waiting calls.
    fn leave(&mut self, caller: &Caller, number: u64) {
        let Some(host) = self.hosts.get_mut(&caller.host) else { return };
        let Some(own) = host.owners.get_mut(&caller.owner) else { return };
        let has_waited = own.waiting.remove(&number).is_some();
        if has_waited {
            host.waiting -= 1;
            self.waiting -= 1;
        } else {
            own.used -= 1;
            host.used -= 1;
            self.used -= 1;
        }
        if own.used == 0 && own.waiting.is_empty() {
            host.owners.remove(&caller.owner);
        }
        if host.owners.is_empty() {
            self.hosts.remove(&caller.host);
        }
        if !has_waited {
            while self.grant() {}
        }
    }

    /// Gives a connection to the first waiting call that may have one. Returns false if there is no such call.
    fn grant(&mut self) -> bool {
        let (most, used) = (self.max_used, self.used);
        let next = self
            .hosts
            .iter()
            .filter(|(_name, host)| is_free(most, used, host.used))
            .filter_map(|(name, host)| Some((name, host.next(most)?)))
            .min_by_key(|(_name, call)| (call.used, call.number))
            .map(|(name, call)| Caller { host: name.clone(), owner: call.owner.clone() });
        let Some(caller) = next else { return false };
        let Some(host) = self.hosts.get_mut(&caller.host) else { return false };
        let Some(own) = host.owners.get_mut(&caller.owner) else { return false };
        let Some((_number, sender)) = own.waiting.pop_first() else { return false };
        own.used += 1;
        host.used += 1;
        host.waiting -= 1;
        self.used += 1;
        self.waiting -= 1;
        // A call that no longer waits releases the connection when its permit is dropped.
        let _ = sender.send(());
        true
    }
}

// === impl Host ===

impl Host {
    /// The next call to this host: the oldest call of the owner with the fewest connections. If several owners have
    /// equally few, the oldest of their calls. `most` is the maximum number of connections to all hosts.
    fn next(&self, most: usize) -> Option<Candidate<'_>> {
        let waiting = self.owners.iter().filter_map(|(owner, own)| {
            let (number, _sender) = own.waiting.first_key_value()?;
            let may = owner.is_empty() || is_in_share(most, self.used, own.used);
            may.then_some(Candidate { owner, used: own.used, number: *number })
        });
        waiting.min_by_key(|call| (call.used, call.number))
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    /// Takes a connection if one is free now. A call that would wait leaves the queue.
    fn free(connections: &WebhookConnections, host: &str) -> Option<WebhookPermit> {
        connections.acquire(host, "".into()).now_or_never().flatten()
    }

    /// All connections to the host `slow` that an owner gets now.
    fn all_free_of(connections: &WebhookConnections, owner: &str) -> Vec<WebhookPermit> {
        let next = || connections.acquire("slow", owner.into()).now_or_never().flatten();
        std::iter::from_fn(next).collect()
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
        let slots = lock(&connections.slots);
        assert!(slots.hosts.is_empty() && (slots.used, slots.waiting) == (0, 0));
    }

    #[test]
    fn calls_wait_for_a_connection_in_the_order_of_their_arrival() {
        let connections = WebhookConnections::with_limits(8, 100);
        let mut held = all_free(&connections, "slow");
        let mut calls: Vec<_> = (0..3).map(|_| Box::pin(connections.acquire("slow", "".into()))).collect();
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
            ["slow", "b", "c"].map(|host| Box::pin(connections.acquire(host, "".into())));
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
        let [mut first, mut second] = ["slow"; 2].map(|host| Box::pin(connections.acquire(host, "".into())));
        assert!(first.as_mut().now_or_never().is_none() && second.as_mut().now_or_never().is_none());
        held.pop();
        drop(first);
        assert!(second.as_mut().now_or_never().flatten().is_some());
    }

    #[test]
    fn calls_that_wait_for_a_connection_are_limited_and_shared_by_hosts() {
        let connections = WebhookConnections::with_limits(8, 8);
        let _held = (all_free(&connections, "slow"), all_free(&connections, "other"));
        let wait = |host: &'static str| Box::pin(connections.acquire(host, "".into()));
        let mut of_slow: Vec<_> = (0..6).map(|_| wait("slow")).collect();
        assert!(of_slow.iter_mut().all(|call| call.now_or_never().is_none()));
        assert!(matches!(wait("slow").now_or_never(), Some(None)), "too many calls wait");
        assert!(wait("third").now_or_never().is_none(), "other hosts have a part of the queue");
        drop(of_slow.pop());
        assert!(wait("slow").now_or_never().is_none());
    }

    #[test]
    fn one_owner_leaves_connections_to_a_host_for_other_owners() {
        let connections = WebhookConnections::with_limits(8, 100);
        let of = |owner: &str| all_free_of(&connections, owner);
        let (eve, bob, ann) = (of("eve"), of("bob"), of("ann"));
        assert_eq!((eve.len(), bob.len(), ann.len()), (3, 2, 1));
        assert!(free(&connections, "other").is_some());
        drop((eve, bob, ann));
        let slots = lock(&connections.slots);
        assert!(slots.hosts.is_empty() && (slots.used, slots.waiting) == (0, 0));
    }

    #[test]
    fn a_single_host_gets_all_connections() {
        for most in [1, 2, 3, 100] {
            let connections = WebhookConnections::of_one_host(most, most);
            let held = all_free(&connections, "slow");
            let wait = || Box::pin(connections.acquire("slow", "".into()));
            let mut waiting: Vec<_> = (0..most).map(|_| wait()).collect();
            assert!(waiting.iter_mut().all(|call| call.now_or_never().is_none()), "{most}");
            let is_refused = matches!(wait().now_or_never(), Some(None));
            assert_eq!((held.len(), is_refused), (most, true));
        }
    }

    #[test]
    fn a_connection_goes_to_the_owner_with_the_fewest_connections() {
        let connections = WebhookConnections::with_limits(8, 100);
        let held: Vec<_> = (0..6).map(|_| free(&connections, "slow").unwrap()).collect();
        let wait = |owner: &str| Box::pin(connections.acquire("slow", owner.into()));
        let [mut first, mut second, mut other] = ["eve", "eve", "bob"].map(wait);
        let mut calls = [&mut first, &mut second, &mut other];
        assert!(calls.iter_mut().all(|call| call.now_or_never().is_none()));
        let mut held = held.into_iter();
        drop((held.next(), held.next()));
        let granted = first.as_mut().now_or_never().flatten();
        assert!(granted.is_some() && second.as_mut().now_or_never().is_none(), "the second call overtakes");
        assert!(other.as_mut().now_or_never().flatten().is_some());
    }

    #[test]
    fn the_waiting_calls_of_an_owner_are_a_quarter_of_those_of_a_host() {
        let connections = WebhookConnections::with_limits(2, 32);
        let _held = free(&connections, "slow").unwrap();
        let wait = |owner: &str| Box::pin(connections.acquire("slow", owner.into()));
        let mut of_eve: Vec<_> = (0..6).map(|_| wait("eve")).collect();
        assert!(of_eve.iter_mut().all(|call| call.now_or_never().is_none()));
        assert!(matches!(wait("eve").now_or_never(), Some(None)), "too many calls of eve wait");
        assert!(wait("bob").now_or_never().is_none() && wait("").now_or_never().is_none());
        drop(of_eve.pop());
        assert!(wait("eve").now_or_never().is_none());
    }
}

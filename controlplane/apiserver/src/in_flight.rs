//! Limits on the requests of one user, separate for reads and writes, and on the bytes of all bodies. Other limits
//! apply to connections: to each kubelet, to other servers of the cluster, and to webhooks. Requests that are not
//! authenticated yet have a limit on their memory.
//!
//! Watches have a limit of their own. Other long-running requests (logs and streams), health checks and members of
//! `system:masters` are exempt. One user, or all service accounts of a namespace, get at most half of the server's
//! requests on all priority levels together. `flow_control` limits the total.

mod capacity;
mod connections;
mod memory;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use coracle_connections::{Share, Source};

use crate::{
    authn::User,
    error::{ApiError, Result},
    request::{BACKUP_PATH, RequestInfo, is_probe},
    unread_bytes::{Reader, UnreadBytes},
    webhook_connections::{WebhookConnections, WebhookPermit},
};
use capacity::{PER_FREE_BYTE, SharedCapacity};
pub(crate) use memory::BodyMemory;
use memory::reserved;

/// Default maximum duration of a request that is not long-running, and of the sending of its response, as upstream.
pub const REQUEST_TIMEOUT: Duration = Duration::from_secs(60);
/// Default maximum read-only and mutating requests in flight, as upstream.
pub const MAX_IN_FLIGHT: [usize; 2] = [400, 200];
/// Index of the read-only requests in a pair of limits such as [`MAX_IN_FLIGHT`].
const READ: usize = 0;
/// Index of the mutating requests.
const WRITE: usize = 1;
/// Maximum watches of one user, or of all service accounts of a namespace. A watch takes about 25 kB over HTTP/2. Each
/// unread event of its collection takes some additional bytes.
const MAX_WATCHES: usize = 10_000;
/// Maximum watches of one user, or of all service accounts of a namespace, for each node. The higher of the two limits
/// applies, because the pods of a DaemonSet use one service account.
const MAX_WATCHES_PER_NODE: u64 = 20;
/// Maximum bytes of all request bodies that are held in memory.
const MAX_BODIES_BYTES: usize = 64 << 20;
/// Maximum memory of the selectors of all watches. Each event is compared with them, so this also limits the work.
const MAX_SELECTORS_BYTES: usize = 64 << 20;
/// Memory of selectors that each owner always gets: a few users must not prevent the watches of all others.
const GRANTED_SELECTORS_BYTES: usize = 64 << 10;
/// The selectors of a watch do not count if their text has at most this many bytes. The components of a cluster use
/// short selectors.
const SHORT_SELECTORS: usize = 256;
/// Maximum memory of a selector for each byte of its text: in a long list, an empty value takes one byte of the text.
const PER_SELECTOR_BYTE: usize = 48;
/// Maximum bytes of all requests that are not authenticated yet. A webhook may delay the authentication for seconds.
const MAX_UNAUTHENTICATED_BYTES: usize = 64 << 20;
/// Maximum bytes of all requests of unknown clients (anonymous, or refused by authentication) whose response is not
/// sent yet. Clients that do not read could otherwise use up the memory of requests with valid credentials.
const MAX_UNKNOWN_BYTES: usize = 32 << 20;
/// Bytes that each source always gets under [`MAX_UNAUTHENTICATED_BYTES`] and under [`MAX_UNKNOWN_BYTES`], even if
/// other sources have used up the memory. A source needs no credentials to use memory. There are at most as many
/// sources as connections.
pub(crate) const GRANTED_WITHOUT_CREDENTIALS: usize = 128 << 10;
/// Maximum bytes of all responses of webhooks that are held in memory.
const MAX_RESPONSES_BYTES: usize = 64 << 20;
/// Maximum bytes of all copies of objects in another version, for lists.
const MAX_COPIES_BYTES: usize = 64 << 20;
/// The copies of a list count as at most this many bytes, the maximum for one owner. A larger list is served only while
/// no other list has copies.
const MAX_LIST_COPIES_BYTES: usize = MAX_COPIES_BYTES / (PER_FREE_BYTE + 1) * PER_FREE_BYTE;
/// The copies of a list do not count if they have at most this many bytes.
const SMALL_COPIES_BYTES: usize = 256 << 10;

/// The requests in flight.
pub(crate) struct InFlight {
    /// Maximum read-only and mutating requests of one user, or of all service accounts of a namespace.
    of_user: [usize; 2],
    /// Maximum read-only and mutating requests of all users. If priority levels are in use, they have these limits
    /// instead.
    of_all: [usize; 2],
    counts: Arc<Mutex<Counts>>,
    /// The number of watches by owner.
    watches: Arc<Mutex<HashMap<String, usize>>>,
    unread: Arc<UnreadBytes>,
    bodies: SharedCapacity,
    responses: SharedCapacity,
    copies: SharedCapacity,
    selectors: SharedCapacity,
    /// The memory of requests that are not authenticated yet, by source.
    unauthenticated: SharedCapacity,
    /// The memory of requests that are anonymous or that authentication has refused, by source.
    unknown: SharedCapacity,
    /// The connections in use: to each kubelet, and to other servers of the cluster.
    streams: Arc<Mutex<HashMap<String, SharedCapacity>>>,
    max_proxied: usize,
    max_kubelet_clients: usize,
    webhooks: WebhookConnections,
}

#[derive(Default)]
struct Counts {
    total: [usize; 2],
    users: HashMap<String, [usize; 2]>,
}

/// A request in flight. Dropping it ends the count.
pub(crate) struct Permit {
    counts: Arc<Mutex<Counts>>,
    owner: String,
    kind: usize,
}

/// The permit of a watch. The count ends when all clones are dropped.
#[derive(Clone)]
pub(crate) struct WatchPermit {
    _counted: Arc<CountedWatch>,
    reader: Arc<Reader>,
}

struct CountedWatch {
    watches: Arc<Mutex<HashMap<String, usize>>>,
    owner: String,
    _selectors: BodyMemory,
}

/// Whether a request is long-running, by verb and subresource as upstream: a watch, a log or a stream. A backup counts
/// as long-running, too.
pub(crate) fn is_long_running(info: &RequestInfo) -> bool {
    let stream = |sub: &str| matches!(sub, "attach" | "exec" | "proxy" | "log" | "portforward");
    info.verb == "watch"
        || info.path == BACKUP_PATH
        || info.resource.as_ref().is_some_and(|resource| stream(&resource.subresource))
}

// === impl InFlight ===

impl InFlight {
    /// `max` is the server's maximum of read-only and mutating requests.
    pub(crate) fn new(max: [usize; 2]) -> Self {
        let of_user = max.map(|max| (max / 2).max(1));
        let [bodies, responses, copies] =
            [MAX_BODIES_BYTES, MAX_RESPONSES_BYTES, MAX_COPIES_BYTES].map(SharedCapacity::new);
        let selectors = SharedCapacity::granting(MAX_SELECTORS_BYTES, GRANTED_SELECTORS_BYTES);
        let [unauthenticated, unknown] = [MAX_UNAUTHENTICATED_BYTES, MAX_UNKNOWN_BYTES]
            .map(|max| SharedCapacity::granting(max, GRANTED_WITHOUT_CREDENTIALS));
        Self {
            of_user,
            of_all: [usize::MAX; 2],
            counts: Arc::default(),
            watches: Arc::default(),
            unread: Arc::default(),
            bodies,
            responses,
            copies,
            selectors,
            unauthenticated,
            unknown,
            streams: Arc::default(),
            max_proxied: Share::ProxiedRequests.count(),
            max_kubelet_clients: Share::KubeletClients.count(),
            webhooks: WebhookConnections::new(),
        }
    }

    /// Counts a request, or refuses it if its user has too many requests. `None` for exempt requests.
    pub(crate) fn enter(&self, user: &User, info: &RequestInfo) -> Result<Option<Permit>> {
        // Probes have no credentials. If they counted, an anonymous client could use up the limit of anonymous
        // requests.
        let is_health_check = info.resource.is_none() && is_probe(&info.path);
        if user.is_in("system:masters") || is_long_running(info) || is_health_check {
            return Ok(None);
        }
        let kind = if matches!(info.verb, "get" | "list" | "head" | "options") { READ } else { WRITE };
        let owner = requester(&user.name);
        let mut counts = lock(&self.counts);
        let of_user = counts.users.get(owner).map_or(0, |counts| counts[kind]);
        if of_user >= self.of_user[kind] || counts.total[kind] >= self.of_all[kind] {
            return Err(ApiError::too_many_requests());
        }
        counts.total[kind] += 1;
        counts.users.entry(owner.to_owned()).or_default()[kind] += 1;
        drop(counts);
        Ok(Some(Permit { counts: self.counts.clone(), owner: owner.to_owned(), kind }))
    }

    /// Counts a watch. Refuses it if its user has too many watches for `nodes` nodes, or if too little memory is free
    /// for its selectors. `selectors` is the length of their text in bytes. `None` for users without a limit.
    pub(crate) fn watch(&self, user: &User, nodes: u64, selectors: usize) -> Result<Option<WatchPermit>> {
        if user.is_in("system:masters") {
            return Ok(None);
        }
        let owner = requester(&user.name);
        let selectors = if selectors <= SHORT_SELECTORS { 0 } else { selectors * PER_SELECTOR_BYTE };
        let selectors = reserved(&self.selectors, owner, selectors)?;
        let mut watches = self.watches.lock().unwrap_or_else(PoisonError::into_inner);
        let count = watches.entry(owner.to_owned()).or_default();
        let of_nodes = usize::try_from(nodes.saturating_mul(MAX_WATCHES_PER_NODE)).unwrap_or(usize::MAX);
        if *count >= MAX_WATCHES.max(of_nodes) {
            return Err(ApiError::too_many_requests());
        }
        *count += 1;
        drop(watches);
        let counted =
            CountedWatch { watches: self.watches.clone(), owner: owner.to_owned(), _selectors: selectors };
        Ok(Some(WatchPermit { _counted: Arc::new(counted), reader: self.unread.reader(owner) }))
    }

    /// The reader of a response to a user.
    pub(crate) fn reader(&self, user: &User) -> Arc<Reader> {
        let owner = requester(&user.name);
        match user.is_in("system:masters") {
            true => self.unread.reader_of_masters(owner),
            false => self.unread.reader(owner),
        }
    }

    /// Limits the read-only and mutating requests of all users together.
    pub(crate) fn with_total(self, of_all: [usize; 2]) -> Self {
        Self { of_all, ..self }
    }

    /// Numbers of read-only and mutating requests in flight.
    pub(crate) fn total(&self) -> [usize; 2] {
        lock(&self.counts).total
    }

    /// Memory for a body that a user sends.
    pub(crate) fn body(&self, user: &str) -> BodyMemory {
        BodyMemory::of(&self.bodies, owner(user))
    }

    /// Reserves memory for a request of `bytes` bytes until it is authenticated, or refuses the request.
    pub(crate) fn unauthenticated(&self, source: Source, bytes: usize) -> Result<BodyMemory> {
        reserved(&self.unauthenticated, &source.to_string(), bytes)
    }

    /// Memory for a request that authentication has refused, or that is anonymous. It replaces `memory`, which the
    /// request had before. `None` if too little memory is free.
    pub(crate) fn unknown(&self, memory: &BodyMemory) -> Option<BodyMemory> {
        let Some(source) = memory.owner() else { return Some(BodyMemory::default()) };
        reserved(&self.unknown, source, memory.bytes()).ok()
    }

    /// Bytes of the requests of unknown clients.
    #[cfg(test)]
    pub(crate) fn unknown_bytes(&self) -> usize {
        self.unknown.lock().total
    }

    /// Waits for a connection to a webhook on a host, for a request of an owner. `None` if too many calls wait.
    pub(crate) async fn webhook(&self, host: &str, owner: Arc<str>) -> Option<WebhookPermit> {
        self.webhooks.acquire(host, owner).await
    }

    /// Limits the connections to webhooks and the calls that wait for one.
    #[cfg(test)]
    pub(crate) fn with_webhooks(self, max_used: usize, max_waiting: usize) -> Self {
        Self { webhooks: WebhookConnections::with_limits(max_used, max_waiting), ..self }
    }

    /// Reserves memory for the copies of a list's objects in another version, or refuses the list.
    pub(crate) fn copies(&self, user: &str, bytes: usize) -> Result<BodyMemory> {
        if bytes <= SMALL_COPIES_BYTES {
            return Ok(BodyMemory::default());
        }
        let mut memory = BodyMemory::of(&self.copies, owner(user));
        memory.grow(bytes.min(MAX_LIST_COPIES_BYTES))?;
        Ok(memory)
    }

    /// Memory for the response of a webhook. The limit is separate, so webhooks cannot use up the memory of clients.
    pub(crate) fn response(&self, host: &str) -> BodyMemory {
        BodyMemory::of(&self.responses, host)
    }
}

/// The owner of a user's reservations. All service accounts of a namespace are one owner, because a user who can create
/// one service account can create many.
pub(crate) fn owner(user: &str) -> &str {
    let of_account = user.starts_with("system:serviceaccount:").then(|| user.rsplit_once(':')).flatten();
    of_account.map_or(user, |(namespace, _name)| namespace)
}

/// The owner of a user's requests in flight. Service accounts of `kube-system` have limits of their own: components of
/// the cluster use them, and tenants cannot create them.
pub(crate) fn requester(user: &str) -> &str {
    if user.starts_with("system:serviceaccount:kube-system:") { user } else { owner(user) }
}

/// The owner of a user's requests in shared queues. Empty for members of `system:masters`.
pub(crate) fn queued_owner(user: &User) -> &str {
    if user.is_in("system:masters") { "" } else { requester(&user.name) }
}

fn lock(counts: &Mutex<Counts>) -> MutexGuard<'_, Counts> {
    counts.lock().unwrap_or_else(PoisonError::into_inner)
}

// === impl Permit ===

impl Drop for Permit {
    fn drop(&mut self) {
        let mut counts = lock(&self.counts);
        counts.total[self.kind] -= 1;
        if let Some(of_user) = counts.users.get_mut(&self.owner) {
            of_user[self.kind] -= 1;
            if *of_user == [0, 0] {
                counts.users.remove(&self.owner);
            }
        }
    }
}

// === impl WatchPermit ===

impl WatchPermit {
    /// The reader of the watch.
    pub(crate) fn reader(&self) -> &Arc<Reader> {
        &self.reader
    }
}

// === impl CountedWatch ===

impl Drop for CountedWatch {
    fn drop(&mut self) {
        let mut watches = self.watches.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = watches.get_mut(&self.owner) {
            *count -= 1;
            if *count == 0 {
                watches.remove(&self.owner);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use http::Method;

    use super::connections::MAX_STREAMS_OF_NODE;
    use super::connections::StreamPermit;
    use super::*;

    fn info(method: Method, uri: &str) -> RequestInfo {
        RequestInfo::parse(&method, &uri.parse().unwrap())
    }

    #[test]
    fn without_priority_levels_all_users_share_a_limit() {
        let limits = InFlight::new([2, 2]).with_total([2, 2]);
        let (read, write) = (info(Method::GET, "/api/v1/pods"), info(Method::POST, "/api/v1/namespaces"));
        let [eve, bob, ann] = ["eve", "bob", "ann"].map(|name| User::new(name, &[]));
        let held = [limits.enter(&eve, &read).unwrap(), limits.enter(&bob, &read).unwrap()];
        assert!(limits.enter(&ann, &read).is_err());
        assert!(limits.enter(&ann, &write).is_ok());
        assert!(limits.enter(&User::new("root", &["system:masters"]), &read).unwrap().is_none());
        drop(held);
        assert!(limits.enter(&ann, &read).is_ok());
    }

    #[test]
    fn reads_and_writes_of_a_user_are_limited_apart() {
        let (limits, read, write) = (
            InFlight::new(MAX_IN_FLIGHT),
            info(Method::GET, "/api/v1/pods"),
            info(Method::POST, "/api/v1/namespaces"),
        );
        let (eve, bob) = (User::new("eve", &[]), User::new("bob", &[]));
        let mut held: Vec<Permit> = (0..200).map(|_| limits.enter(&eve, &read).unwrap().unwrap()).collect();
        let refused = limits.enter(&eve, &read).err().unwrap();
        assert_eq!((refused.code, refused.details["retryAfterSeconds"].as_u64()), (429, Some(1)));
        assert!(limits.enter(&eve, &write).is_ok());
        held.extend((0..200).map(|_| limits.enter(&bob, &read).unwrap().unwrap()));
        assert!(limits.enter(&bob, &read).is_err());
        for exempt in [
            limits.enter(&User::new("root", &["system:masters"]), &read),
            limits.enter(&eve, &info(Method::GET, "/api/v1/pods?watch=1")),
            limits.enter(&eve, &info(Method::GET, "/healthz")),
            limits.enter(&eve, &info(Method::GET, "/readyz/ping")),
        ] {
            assert!(exempt.unwrap().is_none());
        }
        drop(held);
        assert!(limits.counts.lock().unwrap().users.is_empty());
    }

    #[test]
    fn responses_to_masters_and_components_are_protected() {
        let limits = InFlight::new(MAX_IN_FLIGHT);
        let is_protected =
            |name: &str, groups: &[&str]| limits.reader(&User::new(name, groups)).is_protected();
        assert!(is_protected("root", &["system:masters"]));
        assert!(is_protected("system:serviceaccount:kube-system:dns", &[]));
        assert!(!is_protected("system:serviceaccount:ns:dns", &[]) && !is_protected("eve", &[]));
    }

    #[test]
    fn many_sources_do_not_take_the_memory_for_the_authentication_of_another() {
        let limits = InFlight::new(MAX_IN_FLIGHT);
        let sizes = [1 << 20, 64 << 10, 8 << 10];
        let next = |source| sizes.into_iter().find_map(|bytes| limits.unauthenticated(source, bytes).ok());
        let held: Vec<Vec<BodyMemory>> =
            (1..=20).map(|source| std::iter::from_fn(|| next(source)).collect()).collect();
        let bytes: usize = held.iter().flatten().map(|memory| memory.bytes()).sum();
        assert!(bytes <= MAX_UNAUTHENTICATED_BYTES + held.len() * GRANTED_WITHOUT_CREDENTIALS, "{bytes}");
        assert!(limits.unauthenticated(1, 100).is_err());
        let granted = limits.unauthenticated(21, GRANTED_WITHOUT_CREDENTIALS);
        assert!(granted.is_ok() && limits.unauthenticated(21, 100).is_err());
        drop((held, granted));
        assert!(limits.unauthenticated(1, 16 << 20).is_ok());
    }

    #[test]
    fn the_accounts_of_a_namespace_have_the_requests_of_one_user() {
        let (limits, read) = (InFlight::new([4, 4]), info(Method::GET, "/api/v1/pods"));
        let enter =
            |account: &str| limits.enter(&User::new(&format!("system:serviceaccount:{account}"), &[]), &read);
        let held = [enter("ns:a").unwrap(), enter("ns:b").unwrap()];
        assert!(enter("ns:a").is_err() && enter("ns:c").is_err());
        let others = ["other:a", "kube-system:a", "kube-system:a", "kube-system:b"];
        let others = others.map(|account| enter(account).unwrap());
        assert!(enter("kube-system:a").is_err());
        drop((held, others));
        assert!(limits.counts.lock().unwrap().users.is_empty());
    }

    #[test]
    fn the_watches_of_a_user_are_limited() {
        let limits = InFlight::new(MAX_IN_FLIGHT);
        let account = |name: &str| User::new(&format!("system:serviceaccount:ns:{name}"), &[]);
        let held: Vec<_> = (0..MAX_WATCHES).map(|_| limits.watch(&account("a"), 3, 0).unwrap()).collect();
        assert_eq!(limits.watch(&account("b"), 3, 0).err().unwrap().code, 429);
        assert!(limits.watch(&account("b"), 1000, 0).is_ok(), "the accounts of a DaemonSet on many nodes");
        let clone = limits.watch(&User::new("eve", &[]), 3, 0).unwrap().clone();
        assert!(limits.watch(&User::new("root", &["system:masters"]), 3, 0).unwrap().is_none());
        drop(held);
        drop(limits.watch(&account("b"), 3, 0).unwrap());
        assert_eq!(limits.watches.lock().unwrap().len(), 1, "a clone of a permit counts");
        drop(clone);
        assert!(limits.watches.lock().unwrap().is_empty());
    }

    #[test]
    fn the_selectors_of_a_users_watches_share_a_bounded_memory() {
        let limits = InFlight::new(MAX_IN_FLIGHT);
        let [eve, bob] = ["eve", "bob"].map(|name| User::new(name, &[]));
        let long = 60 << 10;
        let mut held: Vec<_> = std::iter::from_fn(|| limits.watch(&eve, 3, long).ok()).collect();
        assert!((10..20).contains(&held.len()), "{}", held.len());
        assert_eq!(limits.watch(&eve, 3, long).err().map(|error| error.code), Some(429));
        assert_eq!(limits.watches.lock().unwrap()["eve"], held.len(), "a refused watch does not count");
        assert!(limits.watch(&eve, 3, SHORT_SELECTORS).is_ok() && limits.watch(&bob, 3, long).is_ok());
        assert!(limits.watch(&User::new("root", &["system:masters"]), 3, usize::MAX).unwrap().is_none());
        held.pop();
        assert!(limits.watch(&eve, 3, long).is_ok());
        drop(held);
        assert!(limits.selectors.lock().owners.is_empty());
    }

    #[test]
    fn many_users_do_not_take_the_memory_for_the_selectors_of_another() {
        let limits = InFlight::new(MAX_IN_FLIGHT);
        let user = |number: usize| User::new(&format!("user-{number}"), &[]);
        let fill = |number: usize| -> Vec<Option<WatchPermit>> {
            let sizes = [60 << 10, 4 << 10, 300];
            let next = || sizes.into_iter().find_map(|size| limits.watch(&user(number), 3, size).ok());
            std::iter::from_fn(next).collect()
        };
        let held: Vec<_> = (0..20).map(fill).collect();
        assert!(held.iter().all(|of_user| !of_user.is_empty()));
        assert!(limits.watch(&user(20), 3, 1 << 10).is_ok(), "the granted memory");
        assert!(limits.watch(&user(20), 3, 4 << 10).is_err());
    }

    #[test]
    fn one_user_does_not_get_all_connections_to_a_kubelet() {
        let limits = InFlight { max_kubelet_clients: 8 << 10, ..InFlight::new(MAX_IN_FLIGHT) };
        let (eve, bob, root) =
            (User::new("eve", &[]), User::new("bob", &[]), User::new("root", &["system:masters"]));
        let of = |user: &User| -> Vec<StreamPermit> {
            std::iter::from_fn(|| limits.stream(user, "n1").ok()).collect()
        };
        let held = of(&eve);
        assert_eq!(held.len(), MAX_STREAMS_OF_NODE / 4 * 3);
        assert!(limits.stream(&eve, "n2").is_ok(), "another node");
        let of_bob = of(&bob);
        assert!(of_bob.len() > MAX_STREAMS_OF_NODE / 8, "{}", of_bob.len());
        let account = |name: &str| User::new(&format!("system:serviceaccount:ns:{name}"), &[]);
        let of_account = of(&account("a"));
        assert!(!of_account.is_empty() && limits.stream(&account("b"), "n1").is_err());
        assert!(limits.stream(&root, "n1").is_ok());
        drop((held, of_bob, of_account));
        assert!(limits.streams.lock().unwrap().is_empty());
    }

    #[test]
    fn connections_to_all_kubelets_are_limited() {
        let limits = InFlight { max_kubelet_clients: 16, ..InFlight::new(MAX_IN_FLIGHT) };
        let of = |user: &str| -> Vec<StreamPermit> {
            let user = User::new(user, &[]);
            (0..16).filter_map(|number| limits.stream(&user, &format!("n{number}")).ok()).collect()
        };
        let (eve, bob) = (of("eve"), of("bob"));
        assert_eq!((eve.len(), bob.len()), (12, 3));
        assert!(limits.stream(&User::new("root", &["system:masters"]), "n1").is_ok());
        drop((eve, bob));
        assert!(limits.streams.lock().unwrap().is_empty());
    }

    #[test]
    fn one_user_does_not_get_all_connections_through_proxies() {
        let limits = InFlight { max_proxied: 16, ..InFlight::new(MAX_IN_FLIGHT) };
        let of = |user: &str| -> Vec<StreamPermit> {
            let user = User::new(user, &[]);
            std::iter::from_fn(|| limits.proxied(&user).ok()).collect()
        };
        let (eve, bob) = (of("eve"), of("bob"));
        assert_eq!((eve.len(), bob.len()), (12, 3));
        assert!(limits.stream(&User::new("eve", &[]), "n1").is_ok(), "connections to kubelets are apart");
        assert!(limits.proxied(&User::new("root", &["system:masters"])).is_ok());
        drop((eve, bob));
        assert!(limits.streams.lock().unwrap().is_empty());
    }

    #[test]
    fn copies_of_one_owner_leave_memory_for_others_and_a_larger_list_is_served_alone() {
        let limits = InFlight::new(MAX_IN_FLIGHT);
        let fill = |user: &str| -> Vec<BodyMemory> {
            std::iter::from_fn(|| limits.copies(user, 4 << 20).ok()).collect()
        };
        let account = |name: &str| format!("system:serviceaccount:ns:{name}");
        let of_first = fill(&account("a"));
        assert_eq!((of_first.len(), fill(&account("b")).len()), (12, 0));
        let of_bob = fill("bob");
        assert_eq!(of_bob.len(), 3);
        assert_eq!(limits.copies("bob", 1 << 30).err().map(|error| error.code), Some(429));
        assert!(limits.copies("bob", SMALL_COPIES_BYTES).is_ok());
        drop((of_first, of_bob));
        let alone = limits.copies("bob", 1 << 30).unwrap();
        assert!(limits.copies("eve", 1 << 30).is_err());
        assert!(limits.copies("eve", 4 << 20).is_ok());
        drop(alone);
        assert!(limits.copies.lock().owners.is_empty());
    }

    #[test]
    fn bodies_share_a_bounded_memory() {
        let limits = InFlight::new(MAX_IN_FLIGHT);
        let fill = |user: &str| {
            let mut held = Vec::new();
            loop {
                let mut memory = limits.body(user);
                match (1..=3).try_for_each(|megabytes| memory.grow(megabytes << 20)) {
                    Ok(()) => held.push(memory),
                    Err(error) => break (held, error),
                }
            }
        };
        let (eve, refused) = fill("eve");
        assert_eq!((refused.code, eve.len()), (429, 16));
        assert!(limits.body("eve").grow(1000).is_ok());
        drop(eve);
        let account = |name: &str| fill(&format!("system:serviceaccount:eve:{name}")).0;
        let (first, second) = (account("a"), account("b"));
        assert_eq!(
            (first.len(), second.len()),
            (16, 0),
            "accounts of one namespace have the memory of one user"
        );
        drop(first);
        let (eve, _) = fill("eve");
        // Many users together cannot take all of the memory either.
        let others: Vec<_> = (0..5).map(|number| fill(&format!("eve-{number}")).0).collect();
        assert!(others.iter().flatten().count() > 2);
        assert!(limits.body("bob").grow(256 << 10).is_ok());
        // Responses have memory of their own.
        let mut response = limits.response("a.example");
        assert!(response.grow(48 << 20).is_ok());
        assert_eq!(limits.response("a.example").grow(1 << 20).unwrap_err().code, 429);
        assert!(limits.response("b.example").grow(3 << 20).is_ok());
        drop((eve, others));
        let taken = limits.bodies.lock();
        assert!(taken.total == 0 && taken.owners.is_empty());
    }
}

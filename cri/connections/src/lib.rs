//! Limits on the connections of a listening port: in total, per source address, and before authentication.
//!
//! - The limits are shares of the process's descriptor limit ([`Share`]), so that clients cannot use up the node's own
//!   descriptors.
//! - A connection counts as unauthenticated until its client has authenticated. Unauthenticated connections have a
//!   smaller limit and a maximum lifetime. At the limit, the oldest connection of the source with the most unauthenticated
//!   connections is evicted. So a client that authenticates within milliseconds is served while other clients hold silent
//!   connections.
//! - If the port is full and a source with fewer connections tries to connect, the newest connection of the source with
//!   the most connections is evicted. A later attempt then succeeds.

mod abandoned;
mod log_limit;
mod observed;
mod permit_stream;
mod shares;

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nix::sys::socket::{setsockopt, sockopt};
use tokio::net::TcpStream;
use tokio_util::sync::CancellationToken;

pub use abandoned::{Abandonment, ReadObserver, ReadWatch, watch_reads};
pub use log_limit::LogLimit;
pub use observed::{Observe, Observed};
pub use permit_stream::{HeldPermit, PermitStream};
pub use shares::Share;

/// Maximum lifetime of a connection whose client has not authenticated.
pub const UNAUTHENTICATED_LIFETIME: Duration = Duration::from_secs(60);
/// Maximum duration of a TLS handshake.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// Maximum bytes of an HTTP/1.1 request header of a client without a certificate. Bearer tokens and the arguments of
/// commands fit. The limit is needed, because any client can make the server keep a header until the request is
/// authenticated.
pub const UNCERTIFIED_HEADER: usize = 64 << 10;
/// Delay after a failed accept, for example because no descriptor is free.
pub const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);

/// Limits of one port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// All connections.
    pub total: usize,
    /// Connections of one source: an IPv4 address or an IPv6 /64.
    pub per_source: usize,
    /// Connections whose client has not authenticated.
    pub unauthenticated: usize,
    /// Unauthenticated connections of one source.
    pub unauthenticated_per_source: usize,
}

/// Reason why a connection is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The limit of the port is reached.
    Total,
    /// The limit of the source is reached.
    Source,
}

/// The connections of one port.
#[derive(Clone, Debug)]
pub struct Connections {
    inner: Arc<Inner>,
}

/// The permit of one connection. Dropping it releases the connection's share of the limits.
#[derive(Debug)]
pub struct ConnectionPermit {
    inner: Arc<Inner>,
    number: u64,
    source: Source,
    evicted: CancellationToken,
    socket: abandoned::Socket,
}

#[derive(Debug)]
struct Inner {
    limits: Limits,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    next: u64,
    total: usize,
    /// Ordered by number, so the oldest is first.
    unauthenticated: BTreeMap<u64, (Source, CancellationToken)>,
    authenticated: BTreeMap<u64, (Source, CancellationToken)>,
    sources: HashMap<Source, Count>,
}

#[derive(Debug, Default)]
struct Count {
    all: usize,
    unauthenticated: usize,
}

/// An IPv4 address or an IPv6 /64: the smallest range that one client usually has.
pub type Source = u128;

/// The source that an address belongs to.
#[must_use]
pub fn source(address: IpAddr) -> Source {
    match address.to_canonical() {
        IpAddr::V4(address) => Source::from(address.to_bits()),
        IpAddr::V6(address) => address.to_bits() & !Source::from(u64::MAX),
    }
}

// === impl Limits ===

impl Limits {
    /// The limits of a port with `total` connections. One source gets a half. Unauthenticated connections get a
    /// quarter, and those of one source an eighth.
    #[must_use]
    pub fn of_total(total: usize) -> Self {
        Self {
            total,
            per_source: (total / 2).max(4),
            unauthenticated: (total / 4).max(4),
            unauthenticated_per_source: (total / 8).max(2),
        }
    }
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Refusal::Total => "the port has as many connections as its share of descriptors allows",
            Refusal::Source => "the source address has as many connections as one source may have",
        })
    }
}

// === impl Connections ===

impl Connections {
    /// A port with these limits and no connections.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        Self { inner: Arc::new(Inner { limits, state: Mutex::default() }) }
    }

    /// Admits an accepted connection, which is unauthenticated.
    ///
    /// # Errors
    /// [`Refusal`] when the limit of the port or of the source is reached.
    pub fn admit(&self, address: IpAddr) -> Result<ConnectionPermit, Refusal> {
        let source = source(address);
        let limits = self.inner.limits;
        let mut state = self.inner.state();
        let (all, unauthenticated) =
            state.sources.get(&source).map_or((0, 0), |count| (count.all, count.unauthenticated));
        if unauthenticated >= limits.unauthenticated_per_source {
            state.evict(Some(source));
        } else if state.unauthenticated.len() >= limits.unauthenticated || state.total >= limits.total {
            state.evict(None);
        }
        // An evicted connection counts until it is closed, so only the client's next attempt succeeds.
        if state.total >= limits.total {
            state.evict_authenticated(all);
            return Err(Refusal::Total);
        }
        if all >= limits.per_source {
            return Err(Refusal::Source);
        }
        let (number, evicted) = (state.next, CancellationToken::new());
        state.next += 1;
        state.total += 1;
        state.unauthenticated.insert(number, (source, evicted.clone()));
        let count = state.sources.entry(source).or_default();
        count.all += 1;
        count.unauthenticated += 1;
        drop(state);
        Ok(ConnectionPermit {
            inner: self.inner.clone(),
            number,
            source,
            evicted,
            socket: abandoned::Socket::default(),
        })
    }
}

// === impl Inner ===

impl Inner {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl State ===

impl State {
    /// Closes the oldest unauthenticated connection of a source. Without `source`, it takes the source with the most
    /// unauthenticated connections.
    fn evict(&mut self, source: Option<Source>) {
        let most =
            || self.sources.iter().max_by_key(|(_, count)| count.unauthenticated).map(|(source, _)| *source);
        let Some(source) = source.or_else(most) else { return };
        let oldest = self.unauthenticated.iter().find(|(_, (owner, _))| *owner == source);
        let Some((number, evicted)) = oldest.map(|(number, (_, evicted))| (*number, evicted.clone())) else {
            return;
        };
        evicted.cancel();
        self.remove_unauthenticated(number);
    }

    /// Closes the newest authenticated connection of the source with the most connections, if the source of the new
    /// connection has fewer.
    fn evict_authenticated(&mut self, connections_of_source: usize) {
        let most = self.sources.iter().max_by_key(|(_, count)| count.all);
        let most = most.filter(|(_, count)| count.all > connections_of_source + 1).map(|(source, _)| *source);
        let newest = self.authenticated.iter().rev().find(|(_, (owner, _))| Some(*owner) == most);
        if let Some(number) = newest.map(|(number, _)| *number)
            && let Some((_, evicted)) = self.authenticated.remove(&number)
        {
            evicted.cancel();
        }
    }

    fn remove_unauthenticated(&mut self, number: u64) -> Option<(Source, CancellationToken)> {
        let connection = self.unauthenticated.remove(&number)?;
        if let Some(count) = self.sources.get_mut(&connection.0) {
            count.unauthenticated -= 1;
        }
        Some(connection)
    }
}

// === impl ConnectionPermit ===

impl ConnectionPermit {
    /// Records that the client has authenticated.
    pub fn set_authenticated(&self) {
        let mut state = self.inner.state();
        if let Some(connection) = state.remove_unauthenticated(self.number) {
            state.authenticated.insert(self.number, connection);
        }
    }

    /// Whether the client has authenticated.
    #[must_use]
    pub fn is_authenticated(&self) -> bool {
        self.inner.state().authenticated.contains_key(&self.number)
    }

    /// The source of the connection.
    #[must_use]
    pub fn source(&self) -> Source {
        self.source
    }

    /// Closes the connection, as an eviction does.
    pub fn close(&self) {
        self.evicted.cancel();
    }

    /// Returns when the connection is evicted. After an upgrade, the connection's task has to close it.
    pub async fn evicted(&self) {
        self.evicted.cancelled().await;
    }

    /// Returns when the connection must be closed: evicted, or unauthenticated for its maximum lifetime.
    pub async fn expired(&self) {
        tokio::select! {
            // Cancel-safe: both arms only wait.
            () = self.evicted.cancelled() => return,
            () = tokio::time::sleep(UNAUTHENTICATED_LIFETIME) => {}
        }
        let is_unauthenticated = self.inner.state().unauthenticated.contains_key(&self.number);
        if !is_unauthenticated {
            self.evicted.cancelled().await;
        }
    }
}

impl Drop for ConnectionPermit {
    fn drop(&mut self) {
        let mut state = self.inner.state();
        state.remove_unauthenticated(self.number);
        state.authenticated.remove(&self.number);
        state.total -= 1;
        if let Some(count) = state.sources.get_mut(&self.source) {
            count.all -= 1;
            if count.all == 0 {
                state.sources.remove(&self.source);
            }
        }
    }
}

/// Waits for a TLS handshake, for ten seconds at most. `None` after that.
pub async fn handshake<T>(accepting: impl Future<Output = T>) -> Option<T> {
    tokio::time::timeout(HANDSHAKE, accepting).await.ok()
}

/// Settings of keepalive: idle seconds before the first probe, seconds between probes, and unanswered probes before the
/// connection ends.
const KEEPALIVE_IDLE: u32 = 60;
const PROBE_INTERVAL: u32 = 15;
const PROBES: u32 = 4;

/// Enables keepalive: within minutes the kernel ends a connection if its peer has disappeared without closing it. There
/// is no limit for unread data: a user can read a long output page by page for hours.
pub fn keep_alive(connection: &TcpStream) {
    // If keepalive cannot be enabled, the connection is served without it.
    let _set = setsockopt(connection, sockopt::TcpKeepIdle, &KEEPALIVE_IDLE);
    let _set = setsockopt(connection, sockopt::TcpKeepInterval, &PROBE_INTERVAL);
    let _set = setsockopt(connection, sockopt::TcpKeepCount, &PROBES);
    let _set = setsockopt(connection, sockopt::KeepAlive, &true);
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits =
        Limits { total: 8, per_source: 5, unauthenticated: 4, unauthenticated_per_source: 2 };

    fn from(address: &str) -> IpAddr {
        address.parse().expect("an address")
    }

    #[test]
    fn the_oldest_unauthenticated_connection_of_a_source_is_evicted() {
        let port = Connections::new(LIMITS);
        let permits: Vec<ConnectionPermit> =
            (0..3).map(|_| port.admit(from("10.0.0.1")).expect("a permit")).collect();
        let evicted: Vec<bool> = permits.iter().map(|permit| permit.evicted.is_cancelled()).collect();
        assert_eq!(evicted, [true, false, false]);
        drop(permits);
        assert!(port.inner.state().sources.is_empty() && port.inner.state().total == 0);
    }

    #[test]
    fn authenticated_connections_are_limited_per_source_and_not_evicted() {
        let port = Connections::new(LIMITS);
        let authenticated: Vec<ConnectionPermit> = (0..5)
            .map(|_| {
                let permit = port.admit(from("10.0.0.1")).expect("a permit");
                permit.set_authenticated();
                permit
            })
            .collect();
        assert_eq!(port.admit(from("10.0.0.1")).map(|_| ()), Err(Refusal::Source));
        let _other = port.admit(from("10.0.0.2")).expect("another source");
        assert!(authenticated.iter().all(|permit| !permit.evicted.is_cancelled()));
    }

    #[test]
    fn many_addresses_of_one_ipv6_network_are_one_source() {
        let port = Connections::new(LIMITS);
        let permits: Vec<ConnectionPermit> = (1..=3)
            .map(|host| port.admit(from(&format!("2001:db8:0:1::{host}"))).expect("a permit"))
            .collect();
        assert!(permits[0].evicted.is_cancelled());
        assert_eq!(source(from("::ffff:10.0.0.1")), source(from("10.0.0.1")));
    }

    #[test]
    fn a_full_port_evicts_a_connection_of_the_source_with_the_most() {
        let port = Connections::new(LIMITS);
        let many: Vec<ConnectionPermit> =
            (0..2).map(|_| port.admit(from("10.0.0.1")).expect("a permit")).collect();
        let few: Vec<ConnectionPermit> =
            (2..5).map(|host| port.admit(from(&format!("10.0.0.{host}"))).expect("a permit")).collect();
        assert!(many[0].evicted.is_cancelled());
        assert!(few.iter().all(|permit| !permit.evicted.is_cancelled()));
    }

    #[test]
    fn a_port_full_of_authenticated_connections_makes_room_for_other_sources() {
        let port = Connections::new(LIMITS);
        let authenticated = |address: &str, count: usize| -> Vec<ConnectionPermit> {
            let permits = (0..count).map(|_| port.admit(from(address)).expect("a permit"));
            permits.inspect(ConnectionPermit::set_authenticated).collect()
        };
        let (mut many, few) = (authenticated("10.0.0.1", 5), authenticated("10.0.0.2", 3));
        assert_eq!(port.admit(from("10.0.0.3")).map(|_| ()), Err(Refusal::Total));
        assert!(many[4].evicted.is_cancelled() && !many[3].evicted.is_cancelled());
        many.pop();
        let _new = port.admit(from("10.0.0.3")).expect("a permit");
        assert!(few.iter().all(|permit| !permit.evicted.is_cancelled()));
    }

    #[tokio::test(start_paused = true)]
    async fn an_unauthenticated_connection_ends() {
        let port = Connections::new(LIMITS);
        let (silent, authenticated) =
            (port.admit(from("::1")).expect("a permit"), port.admit(from("::1")).expect("a permit"));
        authenticated.set_authenticated();
        silent.expired().await;
        assert!(tokio::time::timeout(UNAUTHENTICATED_LIFETIME * 10, authenticated.expired()).await.is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn a_handshake_that_does_not_end_is_given_up() {
        assert_eq!(handshake(async { 7 }).await, Some(7));
        let silent =
            tokio::time::timeout(UNAUTHENTICATED_LIFETIME / 2, handshake(std::future::pending::<()>()));
        assert_eq!(silent.await.expect("before the connection ends"), None);
    }
}

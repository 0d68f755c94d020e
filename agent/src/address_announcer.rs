//! Announces the load balancer addresses that the control plane assigned to this node.
//!
//! Addresses have a lifetime. The kernel removes an address that the agent does not renew, because another node takes
//! over the services of a node that is not ready. While the API server is unreachable, the agent renews its addresses.
//!
//! Another node that takes over an address announces it. A node that receives such an announcement reads the service
//! from the API server. If the API server does not confirm that the node has the address, the node removes the address.
//! It adds the address again when the API server confirms it.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use coracle_cni::ConflictMonitor;
use coracle_error_chain::chain;
use coracle_values::object::Key;
use ipnetwork::IpNetwork;
use k8s_openapi::api::core::v1::{Node, Service};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::deadline::until;
use crate::service_cache::ServiceCache;

/// Class of the services.
const CLASS: &str = "coracle.dev/address-pool";
/// Type of the condition of a service that names the announcing node in its message. The controller of the address pool
/// writes the condition.
const ANNOUNCED: &str = "coracle.dev/Announced";
/// Reason of the condition [`ANNOUNCED`] if its message is the name of a node.
const CHOSEN: &str = "NodeChosen";
/// Lifetime of an address in the kernel. A renewal extends it.
const LIFETIME: Duration = Duration::from_secs(60);
/// Interval of the renewals of an address.
const RENEWAL: Duration = Duration::from_secs(20);
/// Minimum time between two checks of announcements of other machines (`DEFEND_INTERVAL` in RFC 5227).
const MIN_CHECK_INTERVAL: Duration = Duration::from_secs(10);
/// Maximum addresses of one node.
const ADDRESSES_MAX: usize = 1024;

/// The task that holds the addresses.
pub(crate) struct AddressAnnouncer {
    node_name: String,
    /// Ranges of addresses that services may take. If empty, all addresses are permitted.
    ranges: Vec<IpNetwork>,
    services: ServiceCache,
    assigned: BTreeMap<Key, BTreeSet<IpAddr>>,
    held: BTreeSet<IpAddr>,
    /// Assigned addresses that another machine announced, and that the API server did not confirm.
    yielded: BTreeSet<IpAddr>,
    /// Receives announcements of the held addresses.
    conflicts: Option<ConflictMonitor>,
    /// Time from which announcements are checked.
    next_check: Instant,
}

// === impl AddressAnnouncer ===

impl AddressAnnouncer {
    /// `ranges` contain the addresses that services may take. Without a range, services may take all addresses.
    pub(crate) fn new(node_name: &str, ranges: &[IpNetwork], services: ServiceCache) -> Self {
        Self {
            node_name: node_name.to_owned(),
            ranges: ranges.to_vec(),
            services,
            assigned: BTreeMap::new(),
            held: BTreeSet::new(),
            yielded: BTreeSet::new(),
            conflicts: None,
            next_check: Instant::now(),
        }
    }

    /// Runs until dropped. Without an address only changes of services wake the task. `renewals` changes when the API
    /// server has renewed the node's lease.
    pub(crate) async fn run(
        mut self,
        node: watch::Receiver<Option<Arc<Node>>>,
        mut renewals: watch::Receiver<()>,
    ) {
        let changes = self.services.subscribe();
        let mut progress = self.services.changes();
        if progress.wait_for(|progress| progress.listed).await.is_err() {
            return;
        }
        changes.take();
        self.read_services(self.services.keys());
        loop {
            let own = node.borrow().as_deref().and_then(node_address);
            self.hold(own).await;
            let renewal = (!self.held.is_empty()).then(|| Instant::now() + RENEWAL);
            // After a change of another service, the loop must neither visit all addresses nor delay the renewal.
            loop {
                // Cancel-safe: changed keys stay in the subscription until they are returned.
                let is_changed = tokio::select! {
                    changed = changes.next() => self.read_services(changed),
                    () = until(renewal) => true,
                    announced = next_conflicts(&mut self.conflicts, self.next_check) => {
                        renewals.mark_unchanged();
                        self.check(announced).await
                    }
                    Ok(()) = renewals.changed(), if !self.yielded.is_empty() => {
                        let yielded = self.yielded.clone();
                        self.confirm(&yielded).await;
                        true
                    }
                };
                if is_changed {
                    break;
                }
            }
        }
    }

    /// The addresses of a service that this node announces.
    fn announced(&self, service: &Service) -> BTreeSet<IpAddr> {
        let mut addresses = assigned(service, &self.node_name);
        let ranges = &self.ranges;
        addresses.retain(|ip| ranges.is_empty() || ranges.iter().any(|range| range.contains(*ip)));
        addresses
    }

    /// Reads services again. Returns whether addresses of this node changed.
    fn read_services(&mut self, changed: impl IntoIterator<Item = Key>) -> bool {
        let mut is_changed = false;
        for key in changed {
            let state = self.services.state(&key);
            let addresses = state.map(|state| self.announced(&state.service)).unwrap_or_default();
            is_changed |= assign(&mut self.assigned, key, addresses);
        }
        is_changed
    }

    /// Adds or renews the assigned addresses, and removes the other addresses.
    async fn hold(&mut self, node: Option<IpAddr>) {
        let assigned = wanted(&self.assigned);
        self.yielded.retain(|address| assigned.contains(address));
        let wanted = &assigned - &self.yielded;
        for address in self.held.difference(&wanted) {
            if let Err(error) = coracle_cni::withdraw_address(*address).await {
                tracing::warn!(%address, error = chain(&error), "cannot remove a load balancer address");
            }
            coracle_fault::point("pool-address.withdrawn");
        }
        for address in &wanted {
            if let Err(error) = coracle_cni::announce_address(*address, node, LIFETIME).await {
                tracing::warn!(%address, error = chain(&error), "cannot announce a load balancer address");
            }
            coracle_fault::point("pool-address.announced");
        }
        if self.held != wanted || self.conflicts.is_none() {
            self.held = wanted;
            self.monitor().await;
        }
    }

    /// Receives announcements of the held addresses from now on.
    async fn monitor(&mut self) {
        let monitor = match self.held.is_empty() {
            true => None,
            false => ConflictMonitor::open(&self.held)
                .await
                .inspect_err(|error| {
                    tracing::warn!(error = chain(error), "cannot monitor load balancer addresses, retrying");
                })
                .ok(),
        };
        close(std::mem::replace(&mut self.conflicts, monitor));
    }

    /// Checks addresses that another machine announced. Returns whether the caller must call [`hold`](Self::hold)
    /// again.
    async fn check(&mut self, announced: io::Result<BTreeSet<IpAddr>>) -> bool {
        let announced = match announced {
            Ok(announced) => announced,
            Err(error) => {
                tracing::debug!(%error, "the monitor of load balancer addresses failed");
                // The next renewal opens the monitor again.
                close(self.conflicts.take());
                return false;
            }
        };
        self.confirm(&announced).await;
        for address in announced.difference(&self.yielded) {
            tracing::warn!(%address, "another machine announces a load balancer address of this node");
            if let Err(error) = coracle_cni::repeat_announcement(*address).await {
                tracing::warn!(%address, error = chain(&error), "cannot announce a load balancer address");
            }
        }
        self.next_check = Instant::now() + MIN_CHECK_INTERVAL;
        true
    }

    /// Reads the services of these addresses from the API server. The node yields the addresses that the API server
    /// does not confirm. Confirmed addresses are no longer yielded.
    async fn confirm(&mut self, addresses: &BTreeSet<IpAddr>) {
        let of_service = |(key, own): (&Key, &BTreeSet<IpAddr>)| (key.clone(), own & addresses);
        let concerned: Vec<_> = self.assigned.iter().map(of_service).collect();
        let mut is_reachable = true;
        for (key, addresses) in concerned.into_iter().filter(|(_, addresses)| !addresses.is_empty()) {
            // After one failed request, no further service is requested: each request could end by a timeout.
            let service = if is_reachable { self.services.fetch(&key).await.ok() } else { None };
            is_reachable = service.is_some();
            let confirmed = service.flatten().map(|service| self.announced(&service));
            let confirmed = confirmed.unwrap_or_default();
            for address in &addresses - &confirmed {
                if self.yielded.insert(address) {
                    tracing::warn!(
                        %address,
                        is_reachable,
                        "another machine announces a load balancer address, which the API server does not confirm for this node"
                    );
                }
            }
            self.yielded.retain(|address| !confirmed.contains(address));
        }
    }
}

/// Closes a monitor on a thread that may block: the kernel waits for an RCU grace period.
fn close(monitor: Option<ConflictMonitor>) {
    if let Some(monitor) = monitor {
        let _closing = coracle_threads::spawn_blocking(move || drop(monitor));
    }
}

/// Waits until the time, and then for announcements. Without a monitor, the function never returns. Cancel safe.
async fn next_conflicts(
    monitor: &mut Option<ConflictMonitor>,
    from: Instant,
) -> io::Result<BTreeSet<IpAddr>> {
    let Some(monitor) = monitor else { return std::future::pending().await };
    tokio::time::sleep_until(from).await;
    monitor.next().await
}

/// The addresses that the node holds: at most [`ADDRESSES_MAX`] of the addresses that are assigned to it. Namespaces
/// take turns, so the services of one namespace do not displace the services of other namespaces.
fn wanted(assigned: &BTreeMap<Key, BTreeSet<IpAddr>>) -> BTreeSet<IpAddr> {
    let mut turns: HashMap<&str, usize> = HashMap::new();
    let mut all: Vec<(usize, IpAddr)> = Vec::new();
    for (key, addresses) in assigned {
        let turn = turns.entry(&key.namespace).or_default();
        for address in addresses {
            all.push((*turn, *address));
            *turn += 1;
        }
    }
    all.sort_unstable();
    let mut held = BTreeSet::new();
    for (_, address) in all {
        if held.len() >= ADDRESSES_MAX {
            break;
        }
        // Services can share an address.
        held.insert(address);
    }
    held
}

/// Sets the addresses of a service. Returns whether they changed.
fn assign(all: &mut BTreeMap<Key, BTreeSet<IpAddr>>, key: Key, addresses: BTreeSet<IpAddr>) -> bool {
    let has_some = !addresses.is_empty();
    let is_changed = all.get(&key).map_or(has_some, |before| *before != addresses);
    match has_some {
        true => drop(all.insert(key, addresses)),
        false => drop(all.remove(&key)),
    }
    is_changed
}

/// The addresses of a service that the control plane assigned to this node.
fn assigned(service: &Service, node_name: &str) -> BTreeSet<IpAddr> {
    let spec = service.spec.as_ref();
    let is_ours = spec.is_some_and(|spec| {
        spec.type_.as_deref() == Some("LoadBalancer") && spec.load_balancer_class.as_deref() == Some(CLASS)
    });
    let status = service.status.as_ref().filter(|_| is_ours);
    let mut conditions = status.and_then(|status| status.conditions.as_ref()).into_iter().flatten();
    let is_chosen =
        conditions.any(|one| one.type_ == ANNOUNCED && one.reason == CHOSEN && one.message == node_name);
    let balancer = status.filter(|_| is_chosen).and_then(|status| status.load_balancer.as_ref());
    let entries = balancer.and_then(|balancer| balancer.ingress.as_ref()).into_iter().flatten();
    entries.filter_map(|entry| entry.ip.as_deref()?.parse().ok()).filter(may_be_announced).collect()
}

/// Whether the address can be used in the nodes' network.
fn may_be_announced(address: &IpAddr) -> bool {
    let is_special = match address {
        IpAddr::V4(ip) => ip.is_link_local() || ip.is_broadcast(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    };
    !is_special && !address.is_loopback() && !address.is_unspecified() && !address.is_multicast()
}

/// The first internal address of the node.
fn node_address(node: &Node) -> Option<IpAddr> {
    let all = node.status.as_ref()?.addresses.as_ref()?;
    all.iter()
        .filter(|address| address.type_ == "InternalIP")
        .find_map(|address| address.address.parse().ok())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use coracle_testing::{in_new_namespace, ip};
    use kube::Client;
    use serde_json::{Value, json};

    use super::*;
    use crate::api_health::ApiHealth;
    use crate::checkpoint::Checkpoint;

    fn service(class: &str, node: &str, ip: &str) -> Value {
        let condition = json!({"type": ANNOUNCED, "status": "True", "reason": CHOSEN, "message": node,
            "lastTransitionTime": "2026-01-01T00:00:00Z"});
        json!({"metadata": {}, "spec": {"type": "LoadBalancer", "loadBalancerClass": class},
            "status": {"loadBalancer": {"ingress": [{"ip": ip, "ipMode": "VIP"}]}, "conditions": [condition]}})
    }

    /// A cache whose API server answers every request with this object. Without an object it never answers.
    fn cache(dir: &Path, answer: Option<Value>) -> ServiceCache {
        let serve = move |_request: http::Request<kube::client::Body>| {
            let answer = answer.clone();
            async move {
                let Some(answer) = answer else { return std::future::pending().await };
                let body = kube::client::Body::from(answer.to_string().into_bytes());
                Ok::<_, std::convert::Infallible>(http::Response::new(body))
            }
        };
        let client = Client::new(tower::service_fn(serve), "default");
        let checkpoint = Checkpoint::open(&dir.join("agent"), &dir.join("sealing.key")).unwrap();
        ServiceCache::new(client, checkpoint, ApiHealth::default())
    }

    async fn yield_and_take_again() {
        let [silent, other, own] = [(); 3].map(|()| tempfile::tempdir().unwrap());
        let address: IpAddr = "192.0.2.77".parse().unwrap();
        let announced = BTreeSet::from([address]);
        let mut announcer = AddressAnnouncer::new("here", &[], cache(silent.path(), None));
        assign(&mut announcer.assigned, Key::new("n", "s"), announced.clone());
        let is_held = || ip("addr show dev uplink0").contains("192.0.2.77/32");
        announcer.hold(None).await;
        assert!(is_held() && announcer.conflicts.is_some());

        assert!(announcer.check(Ok(announced.clone())).await, "the API server does not answer");
        announcer.hold(None).await;
        assert!(!is_held() && announcer.conflicts.is_none());

        announcer.services = cache(other.path(), Some(service(CLASS, "there", "192.0.2.77")));
        announcer.confirm(&announced).await;
        announcer.hold(None).await;
        assert!(!is_held(), "the API server names the other node");

        announcer.services = cache(own.path(), Some(service(CLASS, "here", "192.0.2.77")));
        announcer.confirm(&announced).await;
        announcer.hold(None).await;
        assert!(is_held() && announcer.yielded.is_empty());

        assert!(announcer.check(Ok(announced)).await, "another machine has no right to it");
        announcer.hold(None).await;
        assert!(is_held());
    }

    #[test]
    fn an_address_that_another_machine_announces_needs_a_confirmation_of_the_api_server() {
        in_new_namespace(|| {
            ip("link add name uplink0 type veth peer name uplink1");
            ip("link set uplink1 up");
            ip("link set uplink0 up");
            ip("addr add 192.0.2.1/24 dev uplink0");
            // The runtime's threads are in the network namespace of this thread.
            let mut runtime = tokio::runtime::Builder::new_current_thread();
            let runtime = runtime.enable_all().start_paused(true).build().unwrap();
            runtime.block_on(yield_and_take_again());
        });
    }

    /// Holds each of these lists of addresses in turn.
    fn hold_in_turn(dir: &Path, turns: &[&[&str]]) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let mut announcer = AddressAnnouncer::new("here", &[], cache(dir, None));
            for turn in turns {
                let addresses = turn.iter().map(|address| address.parse().unwrap()).collect();
                assign(&mut announcer.assigned, Key::new("n", "s"), addresses);
                announcer.hold(None).await;
            }
        });
    }

    #[test]
    fn an_address_of_a_killed_agent_expires_unless_the_next_one_renews_it() {
        const TEST: &str =
            "address_announcer::tests::an_address_of_a_killed_agent_expires_unless_the_next_one_renews_it";
        if let Some(dir) = coracle_testing::killed_dir() {
            return hold_in_turn(&dir, &[&["192.0.2.77", "192.0.2.78"], &["192.0.2.78"]]);
        }
        for (point, left) in [
            ("pool-address.announced:1", [true, false]),
            ("pool-address.announced:2", [true, true]),
            ("pool-address.withdrawn", [false, true]),
        ] {
            in_new_namespace(move || {
                ip("link add name uplink0 type veth peer name uplink1");
                ip("link set uplink1 up");
                ip("link set uplink0 up");
                ip("addr add 192.0.2.1/24 dev uplink0");
                let dir = tempfile::tempdir().unwrap();
                let shown = || {
                    ["192.0.2.77", "192.0.2.78"]
                        .map(|address| ip(&format!("-4 addr show dev uplink0 to {address}/32")))
                };
                let is_held = || shown().map(|text| text.contains("inet "));
                coracle_testing::run_until_killed_in(TEST, point, dir.path());
                assert_eq!(is_held(), left, "{point}");
                hold_in_turn(dir.path(), &[&["192.0.2.78"]]);
                assert_eq!(is_held(), [left[0], true], "{point}");
                assert!(!shown().concat().contains("forever"), "addresses have a lifetime: {:?}", shown());
            });
        }
    }

    #[test]
    fn a_node_announces_the_addresses_that_it_was_chosen_for() {
        let of = |class: &str, node: &str, ip: &str| {
            assigned(&serde_json::from_value(service(class, node, ip)).unwrap(), "here").len()
        };
        assert_eq!(of(CLASS, "here", "192.0.2.1"), 1);
        assert_eq!(of(CLASS, "there", "192.0.2.1"), 0);
        assert_eq!(of("example.com/other", "here", "192.0.2.1"), 0);
        assert_eq!(of(CLASS, "here", "127.0.0.1"), 0);
    }

    #[tokio::test]
    async fn a_node_announces_only_addresses_of_the_permitted_ranges() {
        let dir = tempfile::tempdir().unwrap();
        let service: Service = serde_json::from_value(service(CLASS, "here", "192.0.2.1")).unwrap();
        for (ranges, expected) in
            [(vec![], 1), (vec!["192.0.2.0/24"], 1), (vec!["198.51.100.0/24", "2001:db8::/32"], 0)]
        {
            let ranges: Vec<IpNetwork> = ranges.iter().map(|range| range.parse().unwrap()).collect();
            let announcer = AddressAnnouncer::new("here", &ranges, cache(dir.path(), None));
            assert_eq!(announcer.announced(&service).len(), expected, "{ranges:?}");
        }
    }

    #[test]
    fn only_a_change_of_its_own_addresses_concerns_the_node() {
        let (mut all, key) = (BTreeMap::new(), Key::new("n", "s"));
        let some = BTreeSet::from(["192.0.2.1".parse().unwrap()]);
        assert!(!assign(&mut all, key.clone(), BTreeSet::new()), "another service");
        assert!(assign(&mut all, key.clone(), some.clone()));
        assert!(!assign(&mut all, key.clone(), some));
        assert!(assign(&mut all, key, BTreeSet::new()) && all.is_empty());
    }

    #[test]
    fn a_node_holds_a_limited_number_of_addresses() {
        let address = |number: u32| IpAddr::from(std::net::Ipv4Addr::from(0x0a00_0000 + number));
        let service = |first: u32| (first..first + 600).map(address).collect::<BTreeSet<_>>();
        let mut all = BTreeMap::from([(Key::new("n", "a"), service(0))]);
        assert_eq!(wanted(&all).len(), 600);
        assign(&mut all, Key::new("n", "b"), service(600));
        assert_eq!(wanted(&all).len(), 1024);
    }

    #[test]
    fn the_addresses_of_one_namespace_leave_room_for_those_of_others() {
        let address = |number: u32| IpAddr::from(std::net::Ipv4Addr::from(0x0a00_0000 + number));
        let mut all = BTreeMap::new();
        for number in 0..2000 {
            let key = Key::new("a", &format!("{number:04}"));
            assign(&mut all, key, BTreeSet::from([address(number)]));
        }
        for number in 3000..3010 {
            let key = Key::new("b", &number.to_string());
            assign(&mut all, key, BTreeSet::from([address(number)]));
        }
        let held = wanted(&all);
        assert_eq!(held.len(), 1024);
        // Services that share an address count once.
        for number in 0..100 {
            let key = Key::new("c", &number.to_string());
            assign(&mut all, key, BTreeSet::from([address(3000)]));
        }
        assert_eq!(wanted(&all), held);
        assert!((3000..3010).all(|number| held.contains(&address(number))));
    }
}

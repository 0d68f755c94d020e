//! The task that runs the overlay.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

use coracle_backoff::Backoff;
use coracle_cni::{Local, Network, Overlay, OverlayError, Peer};
use coracle_error_chain::chain;
use coracle_watch::{Config, Event};
use futures::StreamExt;
use ipnetwork::IpNetwork;
use k8s_openapi::api::core::v1::Node;
use kube::{Api, ResourceExt};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::retest::Rounds;
use super::test_results::{TestResults, TestedPath};
use super::{State, annotation, one_of_each};
use crate::deadline::until;
use crate::own_address;

/// First back-off after the overlay could not be applied. It doubles up to [`MAX_BACKOFF`].
const FIRST_BACKOFF: Duration = Duration::from_millis(200);
const MAX_BACKOFF: Duration = Duration::from_secs(30);
/// Delay before a new peer is tested: the peer receives the event of this node at the same time, and must apply it
/// first.
const TEST_DELAY: Duration = Duration::from_millis(300);
/// Spacing of the nodes' tests of one peer. All nodes receive the event of a new node at the same time. A test needs
/// two answers that a port is closed. By default a kernel sends at most 1000 of these a second (icmp_msgs_per_sec).
const TEST_SPACING: Duration = Duration::from_millis(4);

/// The overlay with its inputs and outputs.
pub(crate) struct OverlayAgent {
    pub(crate) name: String,
    pub(crate) client: kube::Client,
    pub(crate) overlay: Overlay,
    pub(crate) network: Network,
    /// The node's addresses. The task updates them unless they were configured.
    pub(crate) ips: watch::Sender<Vec<IpAddr>>,
    pub(crate) ips_are_set: bool,
    /// The node's own pod ranges. Empty until they are assigned.
    pub(crate) ranges: watch::Receiver<Vec<IpNetwork>>,
    pub(crate) state: watch::Sender<State>,
    /// Changes once in each renewal interval of the lease.
    pub(crate) heartbeats: watch::Receiver<()>,
    /// Pod ranges of other nodes, in the order of the nodes. Packets to them are not masqueraded. `None` before the
    /// first call.
    pub(crate) unmasqueraded: Option<Vec<IpNetwork>>,
}

/// The other nodes, from the API.
#[derive(Default)]
struct Nodes {
    /// False until all nodes were listed once.
    complete: bool,
    known: Announced,
    listed: BTreeMap<String, Result<Peer, String>>,
    /// Peers that were added or changed, and have not been tested since.
    changed: BTreeSet<String>,
}

/// Parsed announcements of nodes.
#[derive(Default)]
struct Announced {
    peers: BTreeMap<String, Peer>,
    /// Reasons why nodes cannot be peers, by node name.
    invalid: BTreeMap<String, String>,
}

/// Tests of the paths to peers: the peers that wait, the start time, and the running test.
struct PathTests {
    results: TestResults,
    waiting: BTreeSet<String>,
    at: Option<Instant>,
    running: Option<JoinHandle<Vec<TestedPath>>>,
    /// Whether the overlay was applied once.
    begun: bool,
    rounds: Rounds,
}

/// Time of the next attempt after a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Retry {
    at: Instant,
    /// The back-off after another failure.
    backoff: Backoff,
}

/// Events of the task.
enum TaskEvent {
    Node(Box<Result<Event<Node>, coracle_watch::Error>>),
    /// The node's ranges or the kernel's tables changed, or a retry is due.
    Apply,
    Test,
    /// A renewal interval of the lease has begun: some peers are tested again.
    LeaseInterval,
    Tested(Vec<TestedPath>),
    End,
}

impl OverlayAgent {
    /// Keeps pods of other nodes reachable until dropped.
    pub(crate) async fn run(mut self) {
        let mut events = coracle_watch::watch(Api::<Node>::all(self.client.clone()), Config::default());
        let (mut nodes, mut tests, mut retry) = (Nodes::default(), PathTests::of(&self.name), None::<Retry>);
        self.refresh_addresses();
        loop {
            let event = tokio::select! {
                // Cancel-safe: the stream and the receivers keep their position, and the overlay keeps its pending
                // notification.
                event = events.next() => event.map_or(TaskEvent::End, |event| TaskEvent::Node(Box::new(event))),
                changed = self.ranges.changed() => changed.map_or(TaskEvent::End, |()| TaskEvent::Apply),
                () = self.overlay.foreign_change() => {
                    self.refresh_addresses();
                    TaskEvent::Apply
                }
                // The retry waits until a point in time. The events of many nodes restart this select so often that a
                // duration would never elapse.
                () = until(retry.map(|retry| retry.at)) => TaskEvent::Apply,
                () = until(tests.at) => TaskEvent::Test,
                changed = self.heartbeats.changed() => changed.map_or(TaskEvent::End, |()| TaskEvent::LeaseInterval),
                results = ended(&mut tests.running) => TaskEvent::Tested(results),
            };
            let apply = match event {
                TaskEvent::Node(event) => nodes.apply_event(&self.name, *event),
                TaskEvent::Apply => true,
                TaskEvent::Test => {
                    tests.start(&self.overlay);
                    false
                }
                TaskEvent::LeaseInterval => {
                    tests.retest_some(&nodes.known.peers);
                    false
                }
                TaskEvent::Tested(results) => self.store(&mut tests, results),
                TaskEvent::End => return,
            };
            if apply && nodes.complete {
                retry = self.apply_or_retry(&mut nodes, &mut tests, retry).await;
            }
        }
    }

    /// Applies the peers. Returns the time of the next attempt after a failure.
    async fn apply_or_retry(
        &mut self,
        nodes: &mut Nodes,
        tests: &mut PathTests,
        retry: Option<Retry>,
    ) -> Option<Retry> {
        let Err(error) = self.apply(nodes, tests).await else { return None };
        if retry.is_none() {
            tracing::warn!(
                error = chain(&error),
                "cannot set up the overlay: pods of other nodes may be unreachable"
            );
        }
        self.update_state(|state| state.reached = Some(Err(chain(&error))));
        Some(Retry::after(retry, Instant::now()))
    }

    async fn apply(&mut self, nodes: &mut Nodes, tests: &mut PathTests) -> Result<(), OverlayError> {
        let cidrs = self.ranges.borrow_and_update().clone();
        if cidrs.is_empty() {
            return Ok(());
        }
        let addresses = one_of_each(&self.ips.borrow());
        let Announced { peers, invalid } = &nodes.known;
        let applied = self.overlay.apply(&Local { cidrs, addresses }, peers, &tests.results.narrow())?;
        if applied.changes > 0 {
            tracing::debug!(changes = applied.changes, peers = peers.len(), "updated the overlay");
        }
        if applied.moved {
            self.reset_tests(tests);
            tests.add(peers.keys().cloned(), test_delay(&self.name, peers.len()));
        }
        let changed = std::mem::take(&mut nodes.changed);
        changed.iter().for_each(|name| tests.results.remove_peer(name));
        tests.add(changed.into_iter(), test_delay(&self.name, peers.len()));
        if let Err(error) = self.network.set_mtu(applied.mtu).await {
            tracing::warn!(error = chain(&error), "cannot set the MTU of all pods");
        }
        self.unmasquerade(peers).await;
        let refused = applied.refused.iter().map(|(name, why)| (name, why));
        let mut impaired: Vec<String> =
            invalid.iter().chain(refused).map(|(name, why)| format!("{name}: {why}")).collect();
        impaired.extend(tests.results.fault_messages());
        impaired.sort();
        impaired.dedup();
        self.update_state(|state| (state.reached, state.impaired) = (Some(Ok(())), impaired));
        Ok(())
    }

    /// Drops the test results after a change of the paths. The checksum offload results of an earlier agent
    /// are kept.
    fn reset_tests(&self, tests: &mut PathTests) {
        if !std::mem::replace(&mut tests.begun, true) {
            match self.overlay.offload() {
                Ok(found) => tests.results = TestResults::begin(found),
                Err(error) => tracing::debug!(error = chain(&error), "cannot read the checksum offload"),
            }
        } else if tests.results.reset() {
            self.set_offload(true);
        }
    }

    /// Excludes packets to pods of other nodes from masquerading.
    async fn unmasquerade(&mut self, peers: &BTreeMap<String, Peer>) {
        let ranges = peers.values().flat_map(|peer| peer.cidrs.iter().copied());
        if self.unmasqueraded.as_ref().is_some_and(|known| ranges.clone().eq(known.iter().copied())) {
            return;
        }
        match self.network.set_unmasqueraded(coracle_cni::merged(ranges.clone())).await {
            Ok(()) => self.unmasqueraded = Some(ranges.collect()),
            Err(error) => {
                tracing::warn!(error = chain(&error), "cannot exclude pods of other nodes from masquerading");
            }
        }
    }

    /// Stores test results. Returns whether the tables or the reported state must be updated.
    fn store(&self, tests: &mut PathTests, results: Vec<TestedPath>) -> bool {
        let before = (tests.results.narrow(), tests.results.fault_messages());
        let tested = results.iter().map(|tested| tested.path.peer.clone()).collect();
        if let Some(on) = tests.results.store(results, &self.overlay.paths(&tested)) {
            self.set_offload(on);
        }
        if let Some((peers, backoff)) = tests.results.to_retest() {
            tests.waiting.extend(peers);
            let due = Instant::now() + backoff;
            tests.at = Some(tests.at.map_or(due, |at| at.min(due)));
        }
        before != (tests.results.narrow(), tests.results.fault_messages())
    }

    fn set_offload(&self, on: bool) {
        tracing::warn!(on, "switching the overlay's checksum offload");
        if let Err(error) = self.overlay.set_offload(on) {
            tracing::warn!(error = chain(&error), "cannot switch the overlay's checksum offload");
        }
    }

    /// Reads the node's addresses again.
    fn refresh_addresses(&mut self) {
        if !self.ips_are_set {
            own_address::find_again(&self.ips);
        }
        let announced = self.overlay.announced(&one_of_each(&self.ips.borrow()));
        self.update_state(|state| state.announced = Some(announced));
    }

    fn update_state(&self, change: impl FnOnce(&mut State)) {
        self.state.send_if_modified(|state| {
            let before = state.clone();
            change(state);
            *state != before
        });
    }
}

// === impl Retry ===

impl Retry {
    /// The retry after a failure that occurs now. `before` is the previous retry.
    fn after(before: Option<Self>, now: Instant) -> Self {
        let unused = Backoff::new(FIRST_BACKOFF, MAX_BACKOFF);
        let mut backoff = before.map_or(unused, |before| before.backoff);
        Self { at: now + backoff.next_delay(), backoff }
    }
}

/// Delay of this node's test when `nodes` nodes test a peer at the same time. The delay is derived from the node's
/// name, so that delays are evenly spread and constant.
fn test_delay(name: &str, nodes: usize) -> Duration {
    // FNV-1a (64 bits) with a final mix: names often differ in the last character only.
    let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    let mixed = (hash ^ (hash >> 32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let window = TEST_SPACING.saturating_mul(u32::try_from(nodes).unwrap_or(u32::MAX));
    window.mul_f64(f64::from(u32::try_from(mixed >> 32).unwrap_or_default()) / f64::from(u32::MAX))
}

/// The results of the running test, once. Cancel-safe: the handle is removed only after its end.
async fn ended(running: &mut Option<JoinHandle<Vec<TestedPath>>>) -> Vec<TestedPath> {
    let Some(test) = running else { return std::future::pending().await };
    let results = test.await;
    *running = None;
    results.unwrap_or_default()
}

// === impl PathTests ===

impl PathTests {
    /// Tests of the node with this name. No peer is due.
    fn of(own: &str) -> Self {
        Self {
            results: TestResults::default(),
            waiting: BTreeSet::new(),
            at: None,
            running: None,
            begun: false,
            rounds: Rounds::after(own),
        }
    }

    /// Adds these peers to the next test, which starts after this node's delay.
    fn add(&mut self, peers: impl Iterator<Item = String>, delay: Duration) {
        let before = self.waiting.len();
        self.waiting.extend(peers);
        if self.waiting.len() > before {
            self.at = Some(Instant::now() + TEST_DELAY + delay);
        }
    }

    /// Adds the peers that are due in this period. Peers are tested periodically, because no notification reports that
    /// the MTU of a path has become smaller.
    fn retest_some(&mut self, peers: &BTreeMap<String, Peer>) {
        let next = self.rounds.next(peers);
        if self.begun && !next.is_empty() {
            self.waiting.extend(next);
            self.at.get_or_insert_with(Instant::now);
        }
    }

    /// Starts the test of the waiting peers, unless a test runs.
    fn start(&mut self, overlay: &Overlay) {
        self.at = None;
        if self.running.is_some() {
            self.at = Some(Instant::now() + TEST_DELAY);
            return;
        }
        let paths = overlay.paths(&std::mem::take(&mut self.waiting));
        if paths.is_empty() {
            return;
        }
        self.running = Some(coracle_threads::spawn_blocking(move || {
            let passes = coracle_cni::examine(&paths);
            let passes =
                passes.inspect_err(|error| tracing::debug!(%error, "cannot test the paths to other nodes"));
            let tested = paths.into_iter().zip(passes.unwrap_or_default());
            tested.map(|(path, result)| TestedPath { path, result }).collect()
        }));
    }
}

// === impl Nodes ===

impl Nodes {
    /// Applies an event. Returns whether the peers changed.
    fn apply_event(&mut self, own: &str, event: Result<Event<Node>, coracle_watch::Error>) -> bool {
        let of = |node: &Node| annotation::peer(node).filter(|_| node.name_any() != own);
        match event {
            Ok(Event::Init) => self.listed.clear(),
            Ok(Event::InitApply(node)) => {
                self.listed.extend(of(&node).map(|peer| (node.name_any(), peer)));
            }
            Ok(Event::InitDone) => {
                let listed = std::mem::take(&mut self.listed);
                let known = self.known.peers.keys().chain(self.known.invalid.keys());
                let gone: Vec<String> = known.filter(|name| !listed.contains_key(*name)).cloned().collect();
                let present = listed.into_iter().map(|(name, peer)| (name, Some(peer)));
                let mut changed = !std::mem::replace(&mut self.complete, true);
                for (name, announced) in gone.into_iter().map(|name| (name, None)).chain(present) {
                    changed |= self.set(name, announced);
                }
                return changed;
            }
            Ok(Event::Apply(node)) => return self.set(node.name_any(), of(&node)),
            Ok(Event::Delete(node)) => return self.set(node.name_any(), None),
            Err(error) => tracing::debug!(error = chain(&error), "the watch of nodes failed"),
        }
        false
    }

    fn set(&mut self, name: String, announced: Option<Result<Peer, String>>) -> bool {
        let changed = self.known.set(&name, announced);
        if changed {
            self.changed.insert(name);
        }
        changed
    }
}

// === impl Announced ===

impl Announced {
    /// Stores the announcement of a node, or its absence. Returns whether it changed.
    fn set(&mut self, name: &str, announced: Option<Result<Peer, String>>) -> bool {
        let (peer, invalid) = announced.map_or((None, None), |announced| match announced {
            Ok(peer) => (Some(peer), None),
            Err(reason) => (None, Some(reason)),
        });
        put(&mut self.peers, name, peer) | put(&mut self.invalid, name, invalid)
    }
}

/// Sets or removes a value. Returns whether it changed.
fn put<T: PartialEq>(map: &mut BTreeMap<String, T>, name: &str, value: Option<T>) -> bool {
    let differs = map.get(name) != value.as_ref();
    match value {
        Some(value) if differs => drop(map.insert(name.to_owned(), value)),
        None if differs => drop(map.remove(name)),
        _ => {}
    }
    differs
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Number of nodes that a peer's kernel does not answer, with Linux' default limits: 1000 answers a second, 50 in a
    /// burst. Each node needs two answers and tries three times, as the test does.
    fn unanswered(mut times: Vec<Duration>) -> usize {
        let (mut credit, mut before) = (50.0_f64, Duration::ZERO);
        for _ in 0..3 {
            times.sort();
            times.retain_mut(|time| {
                credit = (credit + (time.saturating_sub(before)).as_secs_f64() * 1000.0).min(50.0);
                before = before.max(*time);
                let answers = [(); 2].map(|()| {
                    let allowed = credit >= 1.0;
                    credit -= f64::from(u8::from(allowed));
                    allowed
                });
                *time += Duration::from_millis(250);
                answers == [false; 2]
            });
        }
        times.len()
    }

    #[test]
    fn a_thousand_nodes_test_a_new_one_within_its_kernels_limits() {
        for names in ["node-", "ip-10-0-3-", "worker.example.org-"] {
            let delays: Vec<_> =
                (0..1000).map(|number| test_delay(&format!("{names}{number}"), 1000)).collect();
            assert!(delays.iter().all(|delay| *delay <= TEST_SPACING * 1000));
            assert_eq!(unanswered(delays), 0, "{names}");
        }
        assert!(unanswered(vec![Duration::ZERO; 1000]) > 0, "tests at the same time exceed the limits");
        assert!(test_delay("node-1", 3) <= Duration::from_millis(12), "the delay is short with three nodes");
    }

    #[test]
    fn retries_back_off_up_to_half_a_minute() {
        let mut now = Instant::now();
        let mut retry = Retry::after(None, now);
        let mut delay = FIRST_BACKOFF;
        assert_eq!(retry.at, now + delay);
        for _ in 0..20 {
            now = retry.at;
            retry = Retry::after(Some(retry), now);
            delay = (delay * 2).min(MAX_BACKOFF);
            assert_eq!(retry.at, now + delay);
        }
        assert_eq!(delay, MAX_BACKOFF);
    }
}

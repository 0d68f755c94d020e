//! The task that owns the overlay.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

use coracle_cni::{Local, Network, Overlay, OverlayError, Passes, Peer, Way};
use coracle_error_chain::chain;
use futures::StreamExt;
use ipnetwork::IpNetwork;
use k8s_openapi::api::core::v1::Node;
use kube::runtime::watcher::{self, Event};
use kube::runtime::{WatchStreamExt, watcher as watch_all};
use kube::{Api, ResourceExt};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::rounds::Rounds;
use super::verdict::Verdicts;
use super::{State, annotation, one_of_each};
use crate::node::find_addresses_again;

const FIRST_RETRY: Duration = Duration::from_millis(200);
const LAST_RETRY: Duration = Duration::from_secs(30);
/// A peer that came learns of us at the same time.
const BEFORE_TEST: Duration = Duration::from_millis(300);
/// All nodes learn of a new one at once and test it. By default a kernel says no more than a thousand times a second
/// that a port is closed (icmp_msgs_per_sec), and a test asks for two such answers: each node has a time of its own.
const FOR_EACH: Duration = Duration::from_millis(4);

/// The overlay with all that it follows from.
pub(crate) struct OverlayAgent {
    pub(crate) name: String,
    pub(crate) client: kube::Client,
    pub(crate) overlay: Overlay,
    pub(crate) network: Network,
    /// The node's addresses; kept true here unless they were set.
    pub(crate) ips: watch::Sender<Vec<IpAddr>>,
    pub(crate) ips_are_set: bool,
    /// The node's own ranges, empty until it has some.
    pub(crate) ranges: watch::Receiver<Vec<IpNetwork>>,
    pub(crate) state: watch::Sender<State>,
    /// Changes at each turn of the lease's timer.
    pub(crate) pulse: watch::Receiver<()>,
    /// Others' ranges that the network was told of, in the order of the nodes; none before it was told.
    pub(crate) unmasqueraded: Option<Vec<IpNetwork>>,
}

/// The other nodes as the API tells them.
#[derive(Default)]
struct Nodes {
    /// False until all were listed once.
    complete: bool,
    known: Told,
    listed: BTreeMap<String, Result<Peer, String>>,
    /// Peers that came or changed and were not tested since.
    changed: BTreeSet<String>,
}

/// What nodes tell of themselves.
#[derive(Default)]
struct Told {
    peers: BTreeMap<String, Peer>,
    /// Of those that cannot be peers, why not.
    wrong: BTreeMap<String, String>,
}

/// The overlay's test of itself: which peers wait for one, from when on, and the one that runs.
struct Tests {
    verdicts: Verdicts,
    waiting: BTreeSet<String>,
    at: Option<Instant>,
    running: Option<JoinHandle<Vec<(Way, Passes)>>>,
    /// Whether the overlay was applied once.
    begun: bool,
    rounds: Rounds,
}

/// When what failed is tried again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Retry {
    pause: Duration,
    at: Instant,
}

/// What wakes the task.
enum Wake {
    Node(Box<Result<Event<Node>, watcher::Error>>),
    /// Our ranges, or the kernel's tables, or it is time to try again.
    Apply,
    Test,
    /// The lease's timer, by which some peers are tested again.
    Pulse,
    Tested(Vec<(Way, Passes)>),
    End,
}

impl OverlayAgent {
    /// Keeps pods of other nodes reachable, for ever.
    pub(crate) async fn run(mut self) {
        let events = watch_all(Api::<Node>::all(self.client.clone()), watcher::Config::default());
        let mut events = events.default_backoff().boxed();
        let (mut nodes, mut tests, mut retry) = (Nodes::default(), Tests::of(&self.name), None::<Retry>);
        self.look_at_addresses();
        loop {
            let wake = tokio::select! {
                // The stream and the receivers keep their place; the overlay remembers that it was told.
                event = events.next() => event.map_or(Wake::End, |event| Wake::Node(Box::new(event))),
                changed = self.ranges.changed() => changed.map_or(Wake::End, |()| Wake::Apply),
                () = self.overlay.foreign_change() => {
                    self.look_at_addresses();
                    Wake::Apply
                }
                // At a time, not after one: something wakes us far more often among many nodes.
                () = until(retry.map(|retry| retry.at)) => Wake::Apply,
                () = until(tests.at) => Wake::Test,
                changed = self.pulse.changed() => changed.map_or(Wake::End, |()| Wake::Pulse),
                results = ended(&mut tests.running) => Wake::Tested(results),
            };
            let apply = match wake {
                Wake::Node(event) => nodes.take(&self.name, *event),
                Wake::Apply => true,
                Wake::Test => {
                    tests.start(&self.overlay);
                    false
                }
                Wake::Pulse => {
                    tests.look_again(&nodes.known.peers);
                    false
                }
                Wake::Tested(results) => self.learn(&mut tests, results),
                Wake::End => return,
            };
            if apply && nodes.complete {
                retry = self.apply_or_tell(&mut nodes, &mut tests, retry).await;
            }
        }
    }

    /// Applies; when to try again if that failed.
    async fn apply_or_tell(
        &mut self,
        nodes: &mut Nodes,
        tests: &mut Tests,
        retry: Option<Retry>,
    ) -> Option<Retry> {
        let Err(error) = self.apply(nodes, tests).await else { return None };
        if retry.is_none() {
            tracing::warn!(error = chain(&error), "pods of other nodes may not be reached");
        }
        self.tell(|state| state.reached = Some(Err(chain(&error))));
        Some(Retry::after(retry, Instant::now()))
    }

    async fn apply(&mut self, nodes: &mut Nodes, tests: &mut Tests) -> Result<(), OverlayError> {
        let cidrs = self.ranges.borrow_and_update().clone();
        if cidrs.is_empty() {
            return Ok(());
        }
        let addresses = one_of_each(&self.ips.borrow());
        let Told { peers, wrong } = &nodes.known;
        let applied = self.overlay.apply(&Local { cidrs, addresses }, peers, &tests.verdicts.narrow())?;
        if applied.changes > 0 {
            tracing::debug!(
                changes = applied.changes,
                peers = peers.len(),
                "the overlay was brought up to date"
            );
        }
        if applied.moved {
            self.begin_anew(tests);
            tests.want(peers.keys().cloned(), turn(&self.name, peers.len()));
        }
        let changed = std::mem::take(&mut nodes.changed);
        changed.iter().for_each(|name| tests.verdicts.forget_peer(name));
        tests.want(changed.into_iter(), turn(&self.name, peers.len()));
        if let Err(error) = self.network.set_mtu(applied.mtu).await {
            tracing::warn!(error = chain(&error), "not every pod has the MTU of the way to other nodes");
        }
        self.unmasquerade(peers).await;
        let refused = applied.refused.iter().map(|(name, why)| (name, why));
        let mut impaired: Vec<String> =
            wrong.iter().chain(refused).map(|(name, why)| format!("{name}: {why}")).collect();
        impaired.extend(tests.verdicts.sentences());
        impaired.sort();
        impaired.dedup();
        self.tell(|state| (state.reached, state.impaired) = (Some(Ok(())), impaired));
        Ok(())
    }

    /// The ways are others than those that were tested; but what an agent before us found of the devices still holds.
    fn begin_anew(&self, tests: &mut Tests) {
        if !std::mem::replace(&mut tests.begun, true) {
            match self.overlay.offload() {
                Ok(found) => tests.verdicts = Verdicts::begin(found),
                Err(error) => tracing::debug!(error = chain(&error), "the checksum offload is not known"),
            }
        } else if tests.verdicts.forget() {
            self.set_offload(true);
        }
    }

    /// Has packets to pods of other nodes keep their source.
    async fn unmasquerade(&mut self, peers: &BTreeMap<String, Peer>) {
        let ranges = peers.values().flat_map(|peer| peer.cidrs.iter().copied());
        if self.unmasqueraded.as_ref().is_some_and(|said| ranges.clone().eq(said.iter().copied())) {
            return;
        }
        match self.network.set_unmasqueraded(coracle_cni::merged(ranges.clone())).await {
            Ok(()) => self.unmasqueraded = Some(ranges.collect()),
            Err(error) => {
                tracing::warn!(error = chain(&error), "packets to pods of other nodes may be masqueraded");
            }
        }
    }

    /// Takes in what a test found; true when the tables, or what is told, must follow.
    fn learn(&self, tests: &mut Tests, results: Vec<(Way, Passes)>) -> bool {
        let before = (tests.verdicts.narrow(), tests.verdicts.sentences());
        let tested = results.iter().map(|(way, _)| way.peer.clone()).collect();
        if let Some(on) = tests.verdicts.learn(results, &self.overlay.ways(&tested)) {
            self.set_offload(on);
        }
        if let Some((peers, pause)) = tests.verdicts.again() {
            tests.waiting.extend(peers);
            tests.at = Some(tests.at.map_or(Instant::now() + pause, |at| at.min(Instant::now() + pause)));
        }
        before != (tests.verdicts.narrow(), tests.verdicts.sentences())
    }

    fn set_offload(&self, on: bool) {
        tracing::warn!(on, "switching the overlay's checksum offload");
        if let Err(error) = self.overlay.set_offload(on) {
            tracing::warn!(error = chain(&error), "the checksum offload stays as it is");
        }
    }

    /// Finds the node's addresses again, and tells others of them.
    fn look_at_addresses(&mut self) {
        if !self.ips_are_set {
            find_addresses_again(&self.ips);
        }
        let announced = self.overlay.announced(&one_of_each(&self.ips.borrow()));
        self.tell(|state| state.announced = Some(announced));
    }

    fn tell(&self, change: impl FnOnce(&mut State)) {
        self.state.send_if_modified(|state| {
            let before = state.clone();
            change(state);
            *state != before
        });
    }
}

// === impl Retry ===

impl Retry {
    /// The one after a failure now; `before` is that after the failure before it.
    fn after(before: Option<Self>, now: Instant) -> Self {
        let pause = before.map_or(FIRST_RETRY, |before| (before.pause * 2).min(LAST_RETRY));
        Self { pause, at: now + pause }
    }
}

/// When a node of this name tests what all of so many nodes test at that moment: names are as good as chance, and the
/// same each time.
fn turn(name: &str, nodes: usize) -> Duration {
    // FNV-1a, 64 bits, and its bits mixed: names often differ in their last letter alone.
    let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    let mixed = (hash ^ (hash >> 32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let window = FOR_EACH.saturating_mul(u32::try_from(nodes).unwrap_or(u32::MAX));
    window.mul_f64(f64::from(u32::try_from(mixed >> 32).unwrap_or_default()) / f64::from(u32::MAX))
}

async fn until(time: Option<Instant>) {
    match time {
        Some(time) => tokio::time::sleep_until(time).await,
        None => std::future::pending().await,
    }
}

/// The results of the test that runs, once. Cancel safe: it is taken away when it has ended.
async fn ended(running: &mut Option<JoinHandle<Vec<(Way, Passes)>>>) -> Vec<(Way, Passes)> {
    let Some(test) = running else { return std::future::pending().await };
    let results = test.await;
    *running = None;
    results.unwrap_or_default()
}

// === impl Tests ===

impl Tests {
    /// Of the node of this name; none is due yet.
    fn of(own: &str) -> Self {
        Self {
            verdicts: Verdicts::default(),
            waiting: BTreeSet::new(),
            at: None,
            running: None,
            begun: false,
            rounds: Rounds::after(own),
        }
    }

    /// Has these peers tested, a moment later, when it is our turn.
    fn want(&mut self, peers: impl Iterator<Item = String>, turn: Duration) {
        let before = self.waiting.len();
        self.waiting.extend(peers);
        if self.waiting.len() > before {
            self.at = Some(Instant::now() + BEFORE_TEST + turn);
        }
    }

    /// Has those peers tested whose turn it is. Nobody tells of a link on the way that lets less pass than before.
    fn look_again(&mut self, peers: &BTreeMap<String, Peer>) {
        let next = self.rounds.next(peers);
        if self.begun && !next.is_empty() {
            self.waiting.extend(next);
            self.at.get_or_insert_with(Instant::now);
        }
    }

    /// Starts the test of the peers that wait for it, unless one runs: then that one's end is waited for.
    fn start(&mut self, overlay: &Overlay) {
        self.at = None;
        if self.running.is_some() {
            self.at = Some(Instant::now() + BEFORE_TEST);
            return;
        }
        let ways = overlay.ways(&std::mem::take(&mut self.waiting));
        if ways.is_empty() {
            return;
        }
        self.running = Some(tokio::task::spawn_blocking(move || {
            let passes = coracle_cni::examine(&ways);
            let passes =
                passes.inspect_err(|error| tracing::debug!(%error, "cannot test the way to other nodes"));
            ways.into_iter().zip(passes.unwrap_or_default()).collect()
        }));
    }
}

// === impl Nodes ===

impl Nodes {
    /// Takes an event in; true when the peers are others now.
    fn take(&mut self, own: &str, event: Result<Event<Node>, watcher::Error>) -> bool {
        let of = |node: &Node| annotation::peer(node).filter(|_| node.name_any() != own);
        match event {
            Ok(Event::Init) => self.listed.clear(),
            Ok(Event::InitApply(node)) => {
                self.listed.extend(of(&node).map(|peer| (node.name_any(), peer)));
            }
            Ok(Event::InitDone) => {
                let listed = std::mem::take(&mut self.listed);
                let known = self.known.peers.keys().chain(self.known.wrong.keys());
                let gone: Vec<String> = known.filter(|name| !listed.contains_key(*name)).cloned().collect();
                let there = listed.into_iter().map(|(name, peer)| (name, Some(peer)));
                let mut changed = !std::mem::replace(&mut self.complete, true);
                for (name, told) in gone.into_iter().map(|name| (name, None)).chain(there) {
                    changed |= self.set(name, told);
                }
                return changed;
            }
            Ok(Event::Apply(node)) => return self.set(node.name_any(), of(&node)),
            Ok(Event::Delete(node)) => return self.set(node.name_any(), None),
            Err(error) => tracing::debug!(error = chain(&error), "the watch on nodes broke"),
        }
        false
    }

    fn set(&mut self, name: String, told: Option<Result<Peer, String>>) -> bool {
        let changed = self.known.set(&name, told);
        if changed {
            self.changed.insert(name);
        }
        changed
    }
}

// === impl Told ===

impl Told {
    /// Takes in what a node tells, if it does; true when that is not what it told before.
    fn set(&mut self, name: &str, told: Option<Result<Peer, String>>) -> bool {
        let (peer, wrong) = told.map_or((None, None), |told| match told {
            Ok(peer) => (Some(peer), None),
            Err(wrong) => (None, Some(wrong)),
        });
        put(&mut self.peers, name, peer) | put(&mut self.wrong, name, wrong)
    }
}

/// Has that name stand for that value or for nothing; true when it did not before.
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

    /// Which of these nodes hear from a kernel that allows what Linux does by default: 1000 answers a second, 50 at
    /// once. Each asks for two, three times if it must, as the test does.
    fn deaf(mut turns: Vec<Duration>) -> usize {
        let (mut credit, mut before) = (50.0_f64, Duration::ZERO);
        for _ in 0..3 {
            turns.sort();
            turns.retain_mut(|turn| {
                credit = (credit + (turn.saturating_sub(before)).as_secs_f64() * 1000.0).min(50.0);
                before = before.max(*turn);
                let answers = [(); 2].map(|()| {
                    let allowed = credit >= 1.0;
                    credit -= f64::from(u8::from(allowed));
                    allowed
                });
                *turn += Duration::from_millis(250);
                answers == [false; 2]
            });
        }
        turns.len()
    }

    #[test]
    fn a_thousand_nodes_test_a_new_one_without_making_its_kernel_silent() {
        for names in ["node-", "ip-10-0-3-", "worker.example.org-"] {
            let turns: Vec<_> = (0..1000).map(|number| turn(&format!("{names}{number}"), 1000)).collect();
            assert!(turns.iter().all(|turn| *turn <= FOR_EACH * 1000));
            assert_eq!(deaf(turns), 0, "{names}");
        }
        assert!(deaf(vec![Duration::ZERO; 1000]) > 0, "at once they would");
        assert!(turn("node-1", 3) <= Duration::from_millis(12), "few need not wait");
    }

    #[test]
    fn what_failed_is_tried_again_ever_later_and_at_last_twice_a_minute() {
        let mut now = Instant::now();
        let mut retry = Retry::after(None, now);
        assert_eq!(retry, Retry { pause: FIRST_RETRY, at: now + FIRST_RETRY });
        for _ in 0..20 {
            now = retry.at;
            let next = Retry::after(Some(retry), now);
            assert_eq!(next.pause, (retry.pause * 2).min(LAST_RETRY));
            retry = next;
        }
        assert_eq!(retry.pause, LAST_RETRY);
    }
}

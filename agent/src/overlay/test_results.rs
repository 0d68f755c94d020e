//! Conclusions from tests of the paths to peers. Pure.

use std::collections::{BTreeMap, HashSet};
use std::time::Duration;

use coracle_cni::{self as cni, ProbePath, ProbeResult};

/// Number of consecutive failed tests that count as a fault. The first test can fail because the peer is not ready yet.
const CONFIRMED: u32 = 2;
/// Back-off after the first failed test of a peer. It doubles with each failure, up to [`MAX_DOUBLINGS`] times.
const FIRST_BACKOFF: Duration = Duration::from_secs(1);
const MAX_DOUBLINGS: u32 = 6;

/// Results of each peer's paths, and the state of checksum offload.
#[derive(Debug, Default)]
pub(super) struct TestResults {
    peers: BTreeMap<String, PeerResult>,
    offload: Offload,
}

/// A path to a peer, with the result of its test.
#[derive(Debug, Clone)]
pub(super) struct TestedPath {
    pub(super) path: ProbePath,
    pub(super) result: ProbeResult,
}

#[derive(Debug, Default)]
struct PeerResult {
    paths: Vec<TestedPath>,
    /// Consecutive tests with a fault.
    wrong: u32,
    /// Consecutive tests in which only packets with checksum and segmentation offload were lost.
    lost_offloaded: u32,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Offload {
    /// The offload is on, as in new devices.
    #[default]
    On,
    /// The offload is off, because packets with offload were lost.
    Off,
    /// The offload is on, because packets without offload were lost, too.
    OnAlthoughLost,
    /// An administrator has switched the offload off. It stays off.
    OffByAdministrator,
}

impl TestResults {
    /// The state before the first test. Checksum offload that an earlier agent's tests switched off stays off.
    pub(super) fn begin(found: cni::Offload) -> Self {
        let offload = match found {
            cni::Offload::On => Offload::On,
            cni::Offload::OffByTest => Offload::Off,
            cni::Offload::OffByOthers => Offload::OffByAdministrator,
        };
        Self { offload, ..Self::default() }
    }

    /// Drops all results after a change of the paths. Returns whether checksum offload must be switched on again.
    pub(super) fn reset(&mut self) -> bool {
        let was = std::mem::take(self).offload;
        self.offload = if was == Offload::OffByAdministrator { was } else { Offload::default() };
        was == Offload::Off
    }

    /// Drops the results of a peer that changed or was removed.
    pub(super) fn remove_peer(&mut self, name: &str) {
        self.peers.remove(name);
    }

    /// Stores a test's results. Results of outdated paths are dropped: their peers were removed or changed during the
    /// test, and nothing would test those paths again. Returns the new state of checksum offload if it must be
    /// switched.
    pub(super) fn store(&mut self, mut results: Vec<TestedPath>, paths: &[ProbePath]) -> Option<bool> {
        let paths: HashSet<&ProbePath> = paths.iter().collect();
        results.retain(|tested| paths.contains(&tested.path));
        let mut by_peer: BTreeMap<String, Vec<TestedPath>> = BTreeMap::new();
        for tested in results {
            by_peer.entry(tested.path.peer.clone()).or_default().push(tested);
        }
        for (name, paths) in by_peer {
            let known = self.peers.entry(name).or_default();
            let is_wrong =
                |TestedPath { path, result }: &TestedPath| result.bytes < path.mtu || !result.offloaded;
            let loses_offloaded =
                |TestedPath { result, .. }: &TestedPath| result.bytes > 0 && !result.offloaded;
            let (wrong, lost_offloaded) = (paths.iter().any(is_wrong), paths.iter().any(loses_offloaded));
            let in_a_row = |again: bool, before: u32| if again { before + 1 } else { 0 };
            let (wrong, lost_offloaded) =
                (in_a_row(wrong, known.wrong), in_a_row(lost_offloaded, known.lost_offloaded));
            *known = PeerResult { paths, wrong, lost_offloaded };
        }
        let is_confirmed = self.peers.values().any(|peer| peer.lost_offloaded >= CONFIRMED);
        let (next, switch) = match (is_confirmed, self.offload) {
            (true, Offload::On) => (Offload::Off, Some(false)),
            (true, Offload::Off) => (Offload::OnAlthoughLost, Some(true)),
            (_, as_it_is) => (as_it_is, None),
        };
        if next != self.offload {
            self.offload = next;
            // A conclusion after the switch needs new faults.
            for peer in self.peers.values_mut() {
                (peer.wrong, peer.lost_offloaded) = (peer.wrong.min(1), peer.lost_offloaded.min(1));
            }
        }
        switch
    }

    /// Peers that do not receive full packets, with the size in bytes that they receive.
    pub(super) fn narrow(&self) -> BTreeMap<String, u32> {
        let mut narrow: BTreeMap<String, u32> = BTreeMap::new();
        let is_narrow = |tested: &&TestedPath| (1..tested.path.mtu).contains(&tested.result.bytes);
        for TestedPath { path, result } in self.confirmed().filter(is_narrow) {
            let least = narrow.entry(path.peer.clone()).or_insert(result.bytes);
            *least = result.bytes.min(*least);
        }
        narrow
    }

    /// Peers with a fault, and the back-off until they are tested again.
    pub(super) fn to_retest(&self) -> Option<(Vec<String>, Duration)> {
        let wrong = || self.peers.iter().filter(|(_, result)| result.wrong > 0);
        let least = wrong().map(|(_, result)| result.wrong).min()?;
        let backoff = FIRST_BACKOFF * 2u32.pow((least - 1).min(MAX_DOUBLINGS));
        Some((wrong().map(|(name, _)| name.clone()).collect(), backoff))
    }

    /// Faults, a sentence each.
    pub(super) fn fault_messages(&self) -> Vec<String> {
        let mut all: Vec<String> = self.confirmed().filter_map(fault_message).collect();
        if self.offload == Offload::Off {
            all.push(
                "checksum offload of the overlay is off: packets with it were lost on the way to other nodes"
                    .to_owned(),
            );
        }
        all
    }

    fn confirmed(&self) -> impl Iterator<Item = &TestedPath> {
        let confirmed = self.peers.values().filter(|result| result.wrong >= CONFIRMED);
        confirmed.flat_map(|result| &result.paths)
    }
}

fn fault_message(tested: &TestedPath) -> Option<String> {
    let ProbePath { peer, to, mtu } = &tested.path;
    match tested.result {
        ProbeResult { bytes: 0, .. } => Some(format!("{peer}: no packets reach {to}")),
        ProbeResult { bytes, .. } if bytes < *mtu => {
            Some(format!("{peer}: packets to {to} pass with up to {bytes} bytes, not with {mtu}"))
        }
        ProbeResult { offloaded: false, .. } => {
            Some(format!("{peer}: packets to {to} with checksum and segmentation offload are lost"))
        }
        ProbeResult { .. } => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn result(peer: &str, bytes: u32, offloaded: bool) -> TestedPath {
        let path = ProbePath { peer: peer.to_owned(), to: "10.42.1.0".parse().unwrap(), mtu: 1450 };
        TestedPath { path, result: ProbeResult { bytes, offloaded } }
    }

    /// Stores results of unchanged paths.
    fn store(known: &mut TestResults, results: Vec<TestedPath>) -> Option<bool> {
        let paths: Vec<ProbePath> = results.iter().map(|tested| tested.path.clone()).collect();
        known.store(results, &paths)
    }

    #[test]
    fn a_peer_that_is_removed_during_a_test_has_no_result() {
        let mut results = TestResults::default();
        let [a, b] = ["a", "b"].map(|name| result(name, 0, false));
        results.store(vec![a.clone(), b], std::slice::from_ref(&a.path));
        assert_eq!(results.to_retest().unwrap().0, ["a"]);
        let other = ProbePath { to: "10.42.9.0".parse().unwrap(), ..a.path.clone() };
        results.remove_peer("a");
        results.store(vec![a], &[other]);
        assert_eq!(results.to_retest(), None, "it is reached by another path now");
    }

    #[test]
    fn offload_that_failed_before_a_restart_stays_off() {
        let mut results = TestResults::begin(cni::Offload::OffByTest);
        assert_eq!(store(&mut results, vec![result("a", 1450, true)]), None);
        assert_eq!(results.fault_messages().len(), 1, "the fault is reported");
        assert!(results.reset(), "until the path changes");
        assert_eq!(TestResults::begin(cni::Offload::On).fault_messages().len(), 0);
    }

    #[test]
    fn offload_that_an_administrator_switched_off_is_not_a_fault_and_stays_off() {
        let mut results = TestResults::begin(cni::Offload::OffByOthers);
        store(&mut results, vec![result("a", 1450, true)]);
        assert!(results.fault_messages().is_empty());
        let bad = || vec![result("a", 1450, false)];
        assert_eq!([(); 4].map(|()| store(&mut results, bad())), [None; 4], "it is off, and stays so");
        assert!(
            results.fault_messages()[0].contains("offload are lost") && results.fault_messages().len() == 1
        );
        assert!(!results.reset(), "also with other paths");
        assert_eq!([(); 4].map(|()| store(&mut results, bad())), [None; 4]);
    }

    #[test]
    fn working_paths_are_not_reported_and_not_tested_again() {
        let mut results = TestResults::default();
        assert_eq!(store(&mut results, vec![result("a", 1450, true)]), None);
        assert_eq!(
            (results.to_retest(), results.fault_messages(), results.narrow().len()),
            (None, vec![], 0)
        );
    }

    #[test]
    fn a_fault_counts_after_two_tests_and_is_dropped_after_a_success() {
        let mut results = TestResults::default();
        store(&mut results, vec![result("a", 1300, true), result("b", 0, false)]);
        assert!(results.fault_messages().is_empty() && results.narrow().is_empty());
        assert_eq!(results.to_retest(), Some((vec!["a".to_owned(), "b".to_owned()], FIRST_BACKOFF)));
        assert_eq!(store(&mut results, vec![result("a", 1300, true), result("b", 0, false)]), None);
        assert_eq!(results.narrow(), BTreeMap::from([("a".to_owned(), 1300)]));
        let text = results.fault_messages().join("; ");
        assert!(
            text.contains("up to 1300 bytes, not with 1450") && text.contains("b: no packets reach"),
            "{text}"
        );
        assert_eq!(results.to_retest().unwrap().1, FIRST_BACKOFF * 2);
        store(&mut results, vec![result("a", 1450, true)]);
        results.remove_peer("b");
        assert_eq!((results.to_retest(), results.fault_messages().len()), (None, 0));
    }

    #[test]
    fn offload_is_disabled_only_if_packets_then_arrive() {
        let mut helps = TestResults::default();
        let bad = || vec![result("a", 1450, false)];
        assert_eq!((store(&mut helps, bad()), store(&mut helps, bad())), (None, Some(false)));
        assert_eq!(store(&mut helps, vec![result("a", 1450, true)]), None);
        assert_eq!(
            (helps.fault_messages().len(), helps.to_retest()),
            (1, None),
            "it is off, and that is reported"
        );
        let mut wide_again = TestResults::default();
        let narrow = || vec![result("a", 1300, true)];
        let learned = [narrow(), narrow(), bad(), vec![result("a", 1450, true)], bad()];
        assert_eq!(
            learned.map(|results| store(&mut wide_again, results)),
            [None; 5],
            "not in consecutive tests"
        );
        let mut innocent = TestResults::default();
        let switched: Vec<_> = (0..8).filter_map(|_| store(&mut innocent, bad())).collect();
        assert_eq!(switched, [false, true]);
        assert!(innocent.fault_messages()[0].contains("offload are lost"));
        assert_eq!((helps.reset(), innocent.reset()), (true, false), "on again where it is off");
    }
}

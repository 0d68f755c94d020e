//! What follows from the overlay's tests of itself. Pure.

use std::collections::{BTreeMap, HashSet};
use std::time::Duration;

use coracle_cni::{self as cni, Passes, Way};

/// What once went wrong may be a peer that was not there yet.
const BELIEVED: u32 = 2;
const FIRST_RETRY: Duration = Duration::from_secs(1);
/// Doublings of it.
const MOST: u32 = 6;

/// What is known of the ways to each peer, and of the checksum offload.
#[derive(Debug, Default)]
pub(super) struct Verdicts {
    peers: BTreeMap<String, Verdict>,
    offload: Offload,
}

#[derive(Debug, Default)]
struct Verdict {
    ways: Vec<(Way, Passes)>,
    /// Tests in a row that found something.
    wrong: u32,
    /// Tests in a row that found packets lost which devices cut and sum up, where others pass.
    unsummed: u32,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Offload {
    /// As the devices come.
    #[default]
    On,
    /// Off, since packets did not pass with it.
    Off,
    /// On, since they did not pass without it either.
    Innocent,
    /// Off, since somebody wants it so: that is theirs to change.
    Theirs,
}

impl Verdicts {
    /// Before the first test, with the checksum offload as it was found: where tests found it guilty before, it is off.
    pub(super) fn begin(found: cni::Offload) -> Self {
        let offload = match found {
            cni::Offload::On => Offload::On,
            cni::Offload::OffByTest => Offload::Off,
            cni::Offload::OffByOthers => Offload::Theirs,
        };
        Self { offload, ..Self::default() }
    }

    /// Forgets everything: the way itself is another. Whether the checksum offload must be switched on again.
    pub(super) fn forget(&mut self) -> bool {
        let was = std::mem::take(self).offload;
        self.offload = if was == Offload::Theirs { was } else { Offload::default() };
        was == Offload::Off
    }

    /// Forgets a peer that changed or went.
    pub(super) fn forget_peer(&mut self, name: &str) {
        self.peers.remove(name);
    }

    /// Takes in a test's results, but of ways that are not what these peers are reached by any more: they left or
    /// changed during the test, and nobody would test them again. Whether the checksum offload must be switched, and
    /// to what.
    pub(super) fn learn(&mut self, mut results: Vec<(Way, Passes)>, ways: &[Way]) -> Option<bool> {
        let ways: HashSet<&Way> = ways.iter().collect();
        results.retain(|(way, _)| ways.contains(way));
        let mut by_peer: BTreeMap<String, Vec<(Way, Passes)>> = BTreeMap::new();
        for (way, passes) in results {
            by_peer.entry(way.peer.clone()).or_default().push((way, passes));
        }
        for (name, ways) in by_peer {
            let known = self.peers.entry(name).or_default();
            let wrong = ways.iter().any(|(way, passes)| passes.bytes < way.mtu || !passes.offloaded);
            let unsummed = ways.iter().any(|(_, passes)| passes.bytes > 0 && !passes.offloaded);
            let in_a_row = |again: bool, before: u32| if again { before + 1 } else { 0 };
            let (wrong, unsummed) = (in_a_row(wrong, known.wrong), in_a_row(unsummed, known.unsummed));
            *known = Verdict { ways, wrong, unsummed };
        }
        let suspect = self.peers.values().any(|peer| peer.unsummed >= BELIEVED);
        let (next, switch) = match (suspect, self.offload) {
            (true, Offload::On) => (Offload::Off, Some(false)),
            (true, Offload::Off) => (Offload::Innocent, Some(true)),
            (_, as_it_is) => (as_it_is, None),
        };
        if next != self.offload {
            self.offload = next;
            // It must be seen again before anything else follows.
            for peer in self.peers.values_mut() {
                (peer.wrong, peer.unsummed) = (peer.wrong.min(1), peer.unsummed.min(1));
            }
        }
        switch
    }

    /// Peers that take less than full packets, and how many bytes.
    pub(super) fn narrow(&self) -> BTreeMap<String, u32> {
        let mut narrow: BTreeMap<String, u32> = BTreeMap::new();
        for (way, passes) in self.believed().filter(|(way, passes)| (1..way.mtu).contains(&passes.bytes)) {
            let least = narrow.entry(way.peer.clone()).or_insert(passes.bytes);
            *least = passes.bytes.min(*least);
        }
        narrow
    }

    /// Peers that something is wrong with, and how long to wait until they are tested again.
    pub(super) fn again(&self) -> Option<(Vec<String>, Duration)> {
        let wrong = || self.peers.iter().filter(|(_, verdict)| verdict.wrong > 0);
        let least = wrong().map(|(_, verdict)| verdict.wrong).min()?;
        let pause = FIRST_RETRY * 2u32.pow((least - 1).min(MOST));
        Some((wrong().map(|(name, _)| name.clone()).collect(), pause))
    }

    /// What does not work, a sentence each.
    pub(super) fn sentences(&self) -> Vec<String> {
        let mut all: Vec<String> =
            self.believed().filter_map(|(way, passes)| sentence(way, passes)).collect();
        if self.offload == Offload::Off {
            all.push(
                "checksum offload of the overlay is off: packets to other nodes did not pass with it"
                    .to_owned(),
            );
        }
        all
    }

    fn believed(&self) -> impl Iterator<Item = (&Way, Passes)> {
        let believed = self.peers.values().filter(|verdict| verdict.wrong >= BELIEVED);
        believed.flat_map(|verdict| verdict.ways.iter().map(|(way, passes)| (way, *passes)))
    }
}

fn sentence(Way { peer, to, mtu }: &Way, passes: Passes) -> Option<String> {
    match passes {
        Passes { bytes: 0, .. } => Some(format!("{peer}: nothing passes to {to}")),
        Passes { bytes, .. } if bytes < *mtu => {
            Some(format!("{peer}: of packets of {mtu} bytes to {to} no more than {bytes} bytes pass"))
        }
        Passes { offloaded: false, .. } => {
            Some(format!("{peer}: packets to {to} that devices are to cut and sum up do not pass"))
        }
        Passes { .. } => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn result(peer: &str, bytes: u32, offloaded: bool) -> (Way, Passes) {
        let way = Way { peer: peer.to_owned(), to: "10.42.1.0".parse().unwrap(), mtu: 1450 };
        (way, Passes { bytes, offloaded })
    }

    /// Learns results of ways that are as they were.
    fn learn(verdicts: &mut Verdicts, results: Vec<(Way, Passes)>) -> Option<bool> {
        let ways: Vec<Way> = results.iter().map(|(way, _)| way.clone()).collect();
        verdicts.learn(results, &ways)
    }

    #[test]
    fn who_leaves_during_a_test_is_not_waited_for() {
        let mut verdicts = Verdicts::default();
        let [a, b] = ["a", "b"].map(|name| result(name, 0, false));
        verdicts.learn(vec![a.clone(), b], std::slice::from_ref(&a.0));
        assert_eq!(verdicts.again().unwrap().0, ["a"]);
        let other = Way { to: "10.42.9.0".parse().unwrap(), ..a.0.clone() };
        verdicts.forget_peer("a");
        verdicts.learn(vec![a], &[other]);
        assert_eq!(verdicts.again(), None, "it is reached by another way now");
    }

    #[test]
    fn offload_that_was_found_guilty_before_a_restart_stays_off() {
        let mut verdicts = Verdicts::begin(cni::Offload::OffByTest);
        assert_eq!(learn(&mut verdicts, vec![result("a", 1450, true)]), None);
        assert_eq!(verdicts.sentences().len(), 1, "and that is told");
        assert!(verdicts.forget(), "until the way is another");
        assert_eq!(Verdicts::begin(cni::Offload::On).sentences().len(), 0);
    }

    #[test]
    fn offload_that_somebody_switched_off_is_no_finding_and_is_left_to_them() {
        let mut verdicts = Verdicts::begin(cni::Offload::OffByOthers);
        learn(&mut verdicts, vec![result("a", 1450, true)]);
        assert!(verdicts.sentences().is_empty());
        let bad = || vec![result("a", 1450, false)];
        assert_eq!([(); 4].map(|()| learn(&mut verdicts, bad())), [None; 4], "it is off, and stays so");
        assert!(verdicts.sentences()[0].contains("do not pass") && verdicts.sentences().len() == 1);
        assert!(!verdicts.forget(), "by whatever way");
        assert_eq!([(); 4].map(|()| learn(&mut verdicts, bad())), [None; 4]);
    }

    #[test]
    fn what_works_needs_no_words_and_no_second_look() {
        let mut verdicts = Verdicts::default();
        assert_eq!(learn(&mut verdicts, vec![result("a", 1450, true)]), None);
        assert_eq!((verdicts.again(), verdicts.sentences(), verdicts.narrow().len()), (None, vec![], 0));
    }

    #[test]
    fn a_fault_is_believed_when_it_is_seen_twice_and_forgotten_when_it_is_gone() {
        let mut verdicts = Verdicts::default();
        learn(&mut verdicts, vec![result("a", 1300, true), result("b", 0, false)]);
        assert!(verdicts.sentences().is_empty() && verdicts.narrow().is_empty());
        assert_eq!(verdicts.again(), Some((vec!["a".to_owned(), "b".to_owned()], FIRST_RETRY)));
        assert_eq!(learn(&mut verdicts, vec![result("a", 1300, true), result("b", 0, false)]), None);
        assert_eq!(verdicts.narrow(), BTreeMap::from([("a".to_owned(), 1300)]));
        let told = verdicts.sentences().join("; ");
        assert!(told.contains("a: of packets of 1450 bytes") && told.contains("b: nothing passes"), "{told}");
        assert_eq!(verdicts.again().unwrap().1, FIRST_RETRY * 2);
        learn(&mut verdicts, vec![result("a", 1450, true)]);
        verdicts.forget_peer("b");
        assert_eq!((verdicts.again(), verdicts.sentences().len()), (None, 0));
    }

    #[test]
    fn offload_is_switched_off_where_that_helps_and_left_where_it_does_not() {
        let mut helps = Verdicts::default();
        let bad = || vec![result("a", 1450, false)];
        assert_eq!((learn(&mut helps, bad()), learn(&mut helps, bad())), (None, Some(false)));
        assert_eq!(learn(&mut helps, vec![result("a", 1450, true)]), None);
        assert_eq!((helps.sentences().len(), helps.again()), (1, None), "it is off, and that is told");
        let mut wide_again = Verdicts::default();
        let narrow = || vec![result("a", 1300, true)];
        let learned = [narrow(), narrow(), bad(), vec![result("a", 1450, true)], bad()];
        assert_eq!(learned.map(|results| learn(&mut wide_again, results)), [None; 5], "never twice in a row");
        let mut innocent = Verdicts::default();
        let switched: Vec<_> = (0..8).filter_map(|_| learn(&mut innocent, bad())).collect();
        assert_eq!(switched, [false, true]);
        assert!(innocent.sentences()[0].contains("do not pass"));
        assert_eq!((helps.forget(), innocent.forget()), (true, false), "on again where it is off");
    }
}

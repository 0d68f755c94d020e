//! Order in which peers are tested again. Pure.
//!
//! The kernel notifies of changes at this node. A smaller MTU on the path or at the peer shows only as the loss of
//! long packets, which only their sender may notice. So each peer is tested from time to time: a few in each
//! renewal interval of the lease. The renewal wakes the node anyway.

use std::collections::BTreeMap;
use std::ops::Bound;

/// Renewal intervals of the lease in which every peer is tested once: five minutes with an interval of ten seconds.
const INTERVALS: usize = 30;

/// An endless walk through the peers.
#[derive(Debug)]
pub(super) struct Rounds {
    /// The peer that was tested last.
    last: String,
    /// Part of a peer that is due, in units of 1/[`INTERVALS`].
    due: usize,
}

// === impl Rounds ===

impl Rounds {
    /// Starts after the node of this name. All nodes walk in the same order. With one common start they would test the
    /// same few peers in each interval, and a kernel limits its ICMP answers.
    pub(super) fn after(own: &str) -> Self {
        Self { last: own.to_owned(), due: 0 }
    }

    /// The peers to test in this interval.
    pub(super) fn next<T>(&mut self, peers: &BTreeMap<String, T>) -> Vec<String> {
        self.due += peers.len();
        let count = (self.due / INTERVALS).min(peers.len());
        self.due %= INTERVALS;
        let after = Bound::Excluded(self.last.as_str());
        let rest = peers.range::<str, _>((after, Bound::Unbounded)).chain(peers);
        let next: Vec<String> = rest.take(count).map(|(name, _)| name.clone()).collect();
        if let Some(last) = next.last() {
            self.last.clone_from(last);
        }
        next
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peers(count: usize) -> BTreeMap<String, ()> {
        (0..count).map(|number| (format!("peer-{number}"), ())).collect()
    }

    #[test]
    fn every_peer_is_tested_once_in_a_round_and_a_few_at_a_time() {
        for count in [1, 2, 29, 30, 31, 1000] {
            let (peers, mut rounds) = (peers(count), Rounds::after("peer"));
            let tests: Vec<Vec<String>> = (0..INTERVALS).map(|_| rounds.next(&peers)).collect();
            assert!(tests.iter().all(|peers| peers.len() <= count.div_ceil(INTERVALS)), "{count}");
            let mut all = tests.concat();
            all.sort();
            assert_eq!(all, peers.into_keys().collect::<Vec<_>>());
        }
        assert!(Rounds::after("peer").next(&peers(0)).is_empty());
    }

    #[test]
    fn nodes_that_start_together_test_different_peers() {
        let mut nodes = peers(1000);
        let names: Vec<String> = nodes.keys().cloned().collect();
        let mut walks: Vec<Rounds> = names.iter().map(|name| Rounds::after(name)).collect();
        for _ in 0..INTERVALS {
            let mut testers: BTreeMap<String, usize> = BTreeMap::new();
            for (name, rounds) in names.iter().zip(&mut walks) {
                nodes.remove(name);
                rounds.next(&nodes).into_iter().for_each(|peer| *testers.entry(peer).or_default() += 1);
                nodes.insert(name.clone(), ());
            }
            assert!(
                testers.values().all(|testers| *testers <= 1000_usize.div_ceil(INTERVALS)),
                "{testers:?}"
            );
        }
    }

    #[test]
    fn peers_may_be_added_and_removed() {
        let mut rounds = Rounds::after("peer");
        let tested: Vec<String> = (0..INTERVALS).flat_map(|_| rounds.next(&peers(60))).collect();
        assert_eq!(tested.len(), 60);
        let fewer = peers(2);
        let tested: Vec<String> = (0..3 * INTERVALS).flat_map(|_| rounds.next(&fewer)).collect();
        assert_eq!(tested.iter().filter(|name| *name == "peer-0").count(), 3);
    }
}

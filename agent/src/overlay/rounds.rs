//! Whose turn it is to be tested again. Pure.
//!
//! The kernel tells of what changes at this node. That a link on the way, or the peer's own, lets less pass than before
//! shows only when something too long is lost, and its sender alone may notice. So each peer is tested now and then, a few
//! at a time, when the lease's timer wakes the node anyway.

use std::collections::BTreeMap;
use std::ops::Bound;

/// Turns of the lease's timer in which every peer is tested once: five minutes, as nodes say a word each ten seconds.
const TURNS: usize = 30;

/// A walk through the peers, again and again.
#[derive(Debug, Default)]
pub(super) struct Rounds {
    /// The last one that was tested.
    last: Option<String>,
    /// In parts of a peer, of which there are as many as turns.
    due: usize,
}

// === impl Rounds ===

impl Rounds {
    /// The peers that are due at this turn.
    pub(super) fn next<T>(&mut self, peers: &BTreeMap<String, T>) -> Vec<String> {
        self.due += peers.len();
        let count = (self.due / TURNS).min(peers.len());
        self.due %= TURNS;
        let after = match &self.last {
            Some(last) => Bound::Excluded(last.as_str()),
            None => Bound::Unbounded,
        };
        let rest = peers.range::<str, _>((after, Bound::Unbounded)).chain(peers);
        let next: Vec<String> = rest.take(count).map(|(name, _)| name.clone()).collect();
        if let Some(last) = next.last() {
            self.last = Some(last.clone());
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
            let (peers, mut rounds) = (peers(count), Rounds::default());
            let turns: Vec<Vec<String>> = (0..TURNS).map(|_| rounds.next(&peers)).collect();
            assert!(turns.iter().all(|turn| turn.len() <= count.div_ceil(TURNS)), "{count}");
            let mut all = turns.concat();
            all.sort();
            assert_eq!(all, peers.into_keys().collect::<Vec<_>>());
        }
        assert!(Rounds::default().next(&peers(0)).is_empty());
    }

    #[test]
    fn peers_may_come_and_go() {
        let mut rounds = Rounds::default();
        let tested: Vec<String> = (0..TURNS).flat_map(|_| rounds.next(&peers(60))).collect();
        assert_eq!(tested.len(), 60);
        let fewer = peers(2);
        let tested: Vec<String> = (0..3 * TURNS).flat_map(|_| rounds.next(&fewer)).collect();
        assert_eq!(tested.iter().filter(|name| *name == "peer-0").count(), 3);
    }
}

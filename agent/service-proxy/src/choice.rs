//! The random choice among the targets of a service port, in the map that all services share. Pure.
//!
//! Each target has a number, its position in the list. A rule chooses a number below a power of two, the slots. If no
//! target has this number, the next rule chooses again. So a new or an ended target changes one or two elements of the
//! map of targets, and usually no jump to a chain. After each new jump, the kernel validates the whole table: with
//! 5,000 services this takes 1 to 2 ms.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::endpoints::Target;

/// Maximum targets of a service port in the map that all services share. A power of two. The kernel compares the name
/// of a new set with the names of all sets of the table. It also does this for a set that belongs to one rule (an
/// anonymous set). With a set for each service, the time to program services would grow with the square of their
/// number.
pub(crate) const SHARED_MAX: usize = 4096;

/// Number of rules that choose among all slots. More than 3/8 of the slots are in use, so at most 2.4 % of the packets
/// reach the last rule. It chooses among numbers that are always in use. So the share of each target differs from the
/// average by at most 2.4 %.
const ATTEMPTS: usize = 8;

/// Targets of a destination. A packet goes to one of them at random.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Choice {
    /// At least the number of targets. A power of two.
    pub(crate) slots: usize,
    /// The targets by their numbers. At most [`SHARED_MAX`].
    pub(crate) targets: Arc<[Target]>,
}

// === impl Choice ===

impl Choice {
    /// The choice among these targets, numbered in their order.
    pub(crate) fn of(targets: &[Target]) -> Self {
        Self { slots: targets.len().next_power_of_two(), targets: targets.into() }
    }

    /// The choice among the same targets, after another choice. Targets keep their former numbers, and new targets get
    /// the numbers of ended ones. The last targets get the numbers that are still free, so that there is no gap.
    pub(crate) fn after(&self, former: &Self) -> Self {
        let current: BTreeSet<&Target> = self.targets.iter().collect();
        let known: BTreeSet<&Target> = former.targets.iter().collect();
        let mut new = self.targets.iter().filter(|target| !known.contains(*target)).copied();
        let mut numbered: Vec<Option<Target>> = Vec::with_capacity(self.targets.len());
        for target in former.targets.iter() {
            numbered.push(if current.contains(target) { Some(*target) } else { new.next() });
        }
        numbered.extend(new.map(Some));
        let mut number = 0;
        while number < numbered.len() {
            if numbered[number].is_some() {
                number += 1;
            } else {
                numbered.swap_remove(number);
            }
        }
        let targets: Arc<[Target]> = numbered.into_iter().flatten().collect();
        // While the number of targets stays in a range, the slots stay the same. So a service that gains and loses a
        // few targets does not get another chain each time.
        let is_kept = targets.len() <= former.slots && 8 * targets.len() > 3 * former.slots;
        let slots = if is_kept { former.slots } else { targets.len().next_power_of_two() };
        Self { slots, targets }
    }
}

/// All numbers of slots.
pub(crate) fn sizes() -> impl Iterator<Item = usize> {
    std::iter::successors(Some(1), |slots| Some(slots * 2)).take_while(|slots| *slots <= SHARED_MAX)
}

/// The number below which each rule of a chain chooses, in the order of the rules.
pub(crate) fn limits(slots: usize) -> impl Iterator<Item = usize> {
    let attempts = if slots > 1 { ATTEMPTS } else { 0 };
    std::iter::repeat_n(slots, attempts).chain([(slots / 4).max(1)])
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use proptest::prelude::*;

    use super::*;

    fn targets(numbers: &BTreeSet<u8>) -> Vec<Target> {
        let target = |number: &u8| Target { address: IpAddr::from([10, 42, 0, *number]), port: 8080 };
        numbers.iter().map(target).collect()
    }

    /// Numbers whose targets differ between two choices.
    fn changed(one: &Choice, other: &Choice) -> usize {
        let all = 0..one.targets.len().max(other.targets.len());
        all.filter(|number| one.targets.get(*number) != other.targets.get(*number)).count()
    }

    fn next(choice: &Choice, numbers: std::ops::Range<u8>) -> Choice {
        Choice::of(&targets(&numbers.collect())).after(choice)
    }

    #[test]
    fn the_slots_change_only_if_too_few_or_too_many_are_in_use() {
        let eight = Choice::of(&targets(&(0..8).collect()));
        assert_eq!(eight.slots, 8);
        let nine = next(&eight, 0..9);
        let slots = [0..8, 0..7, 0..6].map(|numbers| next(&nine, numbers).slots);
        assert_eq!((nine.slots, slots), (16, [16, 16, 8]));
        assert_eq!(next(&nine, 0..17).slots, 32);
        assert_eq!(next(&next(&nine, 0..1), 0..1).slots, 1);
    }

    #[test]
    fn an_ended_target_is_replaced_by_the_last_one_or_by_a_new_one() {
        let before = Choice::of(&targets(&(0..5).collect()));
        let without = Choice::of(&targets(&BTreeSet::from([0, 2, 3, 4]))).after(&before);
        let of = |numbers: [u8; 4]| numbers.map(|number| targets(&BTreeSet::from([number]))[0]);
        assert_eq!(*without.targets, of([0, 4, 2, 3]));
        let exchanged = Choice::of(&targets(&BTreeSet::from([0, 2, 3, 9]))).after(&without);
        assert_eq!(*exchanged.targets, of([0, 9, 2, 3]));
    }

    #[test]
    fn the_last_rule_chooses_among_numbers_that_are_in_use() {
        assert_eq!(limits(1).collect::<Vec<_>>(), [1]);
        for slots in sizes().skip(1) {
            let least = 3 * slots / 8 + 1;
            let last = limits(slots).last().unwrap();
            assert!((1..=least).contains(&last) && limits(slots).all(|limit| limit <= slots));
        }
        assert_eq!(sizes().last(), Some(SHARED_MAX));
    }

    /// The shares of the packets that the targets of a service get, by number.
    fn shares(slots: usize, targets: usize) -> Vec<f64> {
        let real = |number: usize| f64::from(u32::try_from(number).unwrap());
        let (mut shares, mut rest) = (vec![0.0; targets], 1.0);
        for limit in limits(slots) {
            let of_number = rest / real(limit);
            shares.iter_mut().take(limit).for_each(|share| *share += of_number);
            rest -= of_number * real(limit.min(targets));
        }
        shares
    }

    #[test]
    fn all_targets_get_nearly_the_same_share() {
        for slots in sizes() {
            for targets in [3 * slots / 8 + 1, slots / 2 + 1, slots] {
                let shares = shares(slots, targets);
                let sum: f64 = shares.iter().sum();
                assert!((sum - 1.0).abs() < 1e-9, "{slots} slots lose packets: {sum}");
                let average = sum / f64::from(u32::try_from(targets).unwrap());
                for share in shares {
                    let difference = (share / average - 1.0).abs();
                    assert!(difference < 0.024, "{difference} of {targets} targets in {slots} slots");
                }
            }
        }
    }

    proptest! {
        #[test]
        fn targets_keep_their_numbers(
            lists in prop::collection::vec(prop::collection::btree_set(0u8..40, 0..40), 2..6)
        ) {
            let mut before = Choice::of(&targets(&lists[0]));
            for pair in lists.windows(2) {
                let now = Choice::of(&targets(&pair[1])).after(&before);
                let mut sorted = now.targets.to_vec();
                sorted.sort_unstable();
                prop_assert_eq!(sorted, targets(&pair[1]), "each target has one number");
                let (ended, new) = (pair[0].difference(&pair[1]).count(), pair[1].difference(&pair[0]).count());
                prop_assert!(changed(&before, &now) <= new.max((2 * ended).saturating_sub(new)));
                prop_assert!(now.slots.is_power_of_two() && now.targets.len() <= now.slots);
                prop_assert!(now.targets.is_empty() || 8 * now.targets.len() > 3 * now.slots);
                before = now;
            }
        }
    }
}

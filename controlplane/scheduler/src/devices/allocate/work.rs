//! The work of the searches for devices, and its limit.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use coracle_cel::Program;

use super::super::expression;

/// Maximum work of all device searches in one attempt to schedule a pod, on all nodes together. The unit is the cost
/// unit of CEL; the maximum takes a few seconds. A limit is needed, because users write the selectors and constraints
/// of claims.
pub(super) const MAX_WORK: u64 = 100_000_000;
/// Minimum by which each further pod of a gang raises the work limit. The maximum is [`MAX_WORK`].
const WORK_OF_FURTHER_POD: u64 = MAX_WORK / 100;
/// Allowed work of a further pod for each device of each node. It suffices for a simple search: a few selectors, and
/// one try of the device.
const VISIT_WORK: u64 = 500;
/// The work to read the attributes of a device for a selector, or to try a device.
pub(super) const DEVICE_WORK: u64 = 100;
/// The work to check the taints and the capacity of a device.
pub(super) const CHECK_WORK: u64 = 10;
/// The work to compile one byte of a selector.
pub(super) const COMPILATION_WORK: u64 = 10;
/// The work to compare a device with a chosen device for a constraint.
const COMPARISON_WORK: usize = 10;
pub(in crate::devices) const TOO_MUCH_WORK: &str =
    "the search for devices took too long; simplify the selectors and constraints of the claims";

/// The work of the searches for devices in one attempt, on all nodes.
#[derive(Debug)]
pub(in crate::devices) struct Work {
    /// Maximum of `done`.
    limit: u64,
    /// Work until now, in the cost units of CEL.
    done: AtomicU64,
    /// Compiled selectors by their text. All nodes share them.
    programs: Mutex<HashMap<String, Compiled>>,
}

/// A compiled selector, or the reason why it cannot be compiled.
pub(super) type Compiled = Arc<Result<Program, String>>;

// === impl Work ===

impl Default for Work {
    fn default() -> Self {
        Self::of_pods(1, 0)
    }
}

impl Work {
    /// The work of an attempt for this number of pods. `visits` is the number of devices. A device counts once for each
    /// node that can use it.
    pub(in crate::devices) fn of_pods(pods: usize, visits: usize) -> Self {
        let number = |count: usize| u64::try_from(count).unwrap_or(u64::MAX);
        let of_one = number(visits).saturating_mul(VISIT_WORK).clamp(WORK_OF_FURTHER_POD, MAX_WORK);
        let limit = MAX_WORK.saturating_add(number(pods.saturating_sub(1)).saturating_mul(of_one));
        Self { limit, done: AtomicU64::new(0), programs: Mutex::default() }
    }

    pub(in crate::devices) fn add(&self, cost: u64) {
        self.done.fetch_add(cost, Ordering::Relaxed);
    }

    /// Adds the work of one try of a device. The work grows with the numbers of chosen devices and of constraints.
    pub(super) fn add_step(&self, chosen: usize, constraints: usize) {
        let of_chosen = chosen.saturating_mul(constraints.saturating_mul(COMPARISON_WORK).saturating_add(1));
        self.add(DEVICE_WORK.saturating_add(u64::try_from(of_chosen).unwrap_or(u64::MAX)));
    }

    pub(in crate::devices) fn is_too_much(&self) -> bool {
        self.done() > self.limit
    }

    /// The work until now.
    pub(super) fn done(&self) -> u64 {
        self.done.load(Ordering::Relaxed)
    }

    pub(super) fn program(&self, selector: &str) -> Compiled {
        let mut programs = self.programs.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = programs.get(selector) {
            return known.clone();
        }
        let length = u64::try_from(selector.len()).unwrap_or(u64::MAX);
        self.add(length.saturating_mul(COMPILATION_WORK));
        let program = Arc::new(expression::compile(selector));
        programs.insert(selector.to_owned(), program.clone());
        program
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_further_pod_of_a_gang_adds_the_work_of_a_plain_search_to_the_limit() {
        // The case with 56000 visits is a cluster with 56 devices on each of a thousand nodes.
        for (pods, visits, limit) in [
            (0, 0, MAX_WORK),
            (1, 1_000_000, MAX_WORK),
            (101, 0, 2 * MAX_WORK),
            (101, 1, 2 * MAX_WORK),
            (101, 56_000, MAX_WORK + 100 * 28_000_000),
            (101, usize::MAX, 101 * MAX_WORK),
        ] {
            let work = Work::of_pods(pods, visits);
            work.add(limit);
            assert!(!work.is_too_much(), "{pods} {visits}");
            work.add(1);
            assert!(work.is_too_much(), "{pods} {visits}");
        }
    }
}

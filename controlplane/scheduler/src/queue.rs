//! The pods that wait for a place: ready by priority and age, held back for a while, or until something changes.
//!
//! ```text
//!            add                    pop
//!   ──────────────► ready ─────────────────► (tried)
//!                     ▲  ▲                      │ refused
//!         time is up  │  └──── change ─────┐    ▼
//!                  held back ◄── change ── unschedulable
//! ```
//! A change helps a pod whose wait is over at once, another when it is.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use tokio::time::Instant;

use crate::object::Pod;
use coracle_values::object::ObjectExt;

const FIRST_WAIT: Duration = Duration::from_secs(1);
const LONGEST_WAIT: Duration = Duration::from_secs(10);

/// Where a pod stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Ready(Turn),
    HeldBack(Instant, u64),
    Unschedulable,
    /// Popped and not yet refused or bound.
    Tried,
}

/// Higher priority first, then who came first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Turn(std::cmp::Reverse<i32>, u64);

struct Entry {
    pod: Pod,
    place: Place,
    came: u64,
    refusals: u32,
    /// Not to be tried again before this.
    rest_until: Option<Instant>,
    /// Something that may help happened while the pod was tried.
    helped: bool,
}

/// The queue.
#[derive(Default)]
pub(crate) struct Queue {
    entries: HashMap<String, Entry>,
    ready: BTreeMap<Turn, String>,
    held_back: BTreeMap<(Instant, u64), String>,
    serial: u64,
}

impl Queue {
    /// Takes in a pod that waits, or its newer version. A change in what it asks for is a new chance.
    pub(crate) fn add(&mut self, pod: Pod) {
        let uid = pod.uid().to_owned();
        let Some(entry) = self.entries.get_mut(&uid) else {
            self.serial += 1;
            let entry = Entry {
                pod,
                place: Place::Tried,
                came: self.serial,
                refusals: 0,
                rest_until: None,
                helped: false,
            };
            self.entries.insert(uid.clone(), entry);
            return self.put_ready(&uid);
        };
        let same = entry.pod.asks_the_same(&pod);
        entry.pod = pod;
        if !same && entry.place != Place::Tried {
            self.put_ready(&uid);
        } else if !same {
            entry.helped = true;
        }
    }

    /// Forgets a pod; says whether it was known.
    pub(crate) fn remove(&mut self, uid: &str) -> bool {
        self.leave(uid);
        self.entries.remove(uid).is_some()
    }

    /// The pod whose turn it is.
    pub(crate) fn pop(&mut self, now: Instant) -> Option<Pod> {
        while let Some(due) = self.held_back.first_entry().filter(|due| due.key().0 <= now) {
            let uid = due.get().clone();
            self.put_ready(&uid);
        }
        let (_, uid) = self.ready.pop_first()?;
        let entry = self.entries.get_mut(&uid)?;
        entry.place = Place::Tried;
        entry.helped = false;
        Some(entry.pod.clone())
    }

    /// When the next pod that is held back is due, if none is ready; now if one is.
    pub(crate) fn due(&self) -> Option<Instant> {
        if !self.ready.is_empty() {
            return Some(Instant::now());
        }
        self.held_back.keys().next().map(|(due, _)| *due)
    }

    /// No node takes the pod: it waits for a change.
    pub(crate) fn refused(&mut self, uid: &str, now: Instant) {
        let Some(entry) = self.entries.get_mut(uid) else { return };
        entry.refusals += 1;
        entry.rest_until = Some(now + wait(entry.refusals));
        entry.place = Place::Unschedulable;
        if entry.helped {
            self.help(uid, now);
        }
    }

    /// Binding failed: another try after a while, change or not.
    pub(crate) fn failed(&mut self, uid: &str, now: Instant) {
        self.refused(uid, now);
        self.help(uid, now);
    }

    /// Something happened that may help any pod.
    pub(crate) fn change(&mut self, now: Instant) {
        let waiting: Vec<String> = self.entries.keys().cloned().collect();
        for uid in waiting {
            self.help(&uid, now);
        }
    }

    /// The uids of all pods here.
    pub(crate) fn uids(&self) -> Vec<String> {
        self.entries.keys().cloned().collect()
    }

    fn help(&mut self, uid: &str, now: Instant) {
        let Some(entry) = self.entries.get_mut(uid) else { return };
        match (entry.place, entry.rest_until) {
            (Place::Unschedulable, Some(until)) if until > now => {
                entry.place = Place::HeldBack(until, entry.came);
                self.held_back.insert((until, entry.came), uid.to_owned());
            }
            (Place::Unschedulable, _) => self.put_ready(uid),
            (Place::Tried, _) => entry.helped = true,
            (Place::Ready(_) | Place::HeldBack(..), _) => {}
        }
    }

    fn put_ready(&mut self, uid: &str) {
        self.leave(uid);
        let Some(entry) = self.entries.get_mut(uid) else { return };
        let turn = Turn(std::cmp::Reverse(entry.pod.spec.priority.unwrap_or_default()), entry.came);
        entry.place = Place::Ready(turn);
        self.ready.insert(turn, uid.to_owned());
    }

    fn leave(&mut self, uid: &str) {
        match self.entries.get(uid).map(|entry| entry.place) {
            Some(Place::Ready(turn)) => drop(self.ready.remove(&turn)),
            Some(Place::HeldBack(due, came)) => drop(self.held_back.remove(&(due, came))),
            Some(Place::Unschedulable | Place::Tried) | None => {}
        }
    }
}

fn wait(refusals: u32) -> Duration {
    FIRST_WAIT.saturating_mul(2_u32.saturating_pow(refusals.saturating_sub(1))).min(LONGEST_WAIT)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::pod;
    use serde_json::json;

    fn pop(queue: &mut Queue, now: Instant) -> String {
        queue.pop(now).map(|pod| pod.name().to_owned()).unwrap_or_default()
    }

    #[tokio::test]
    async fn the_more_important_pod_goes_first_then_the_older() {
        let (mut queue, now) = (Queue::default(), Instant::now());
        queue.add(pod("old", json!({})));
        queue.add(pod("young", json!({})));
        queue.add(pod("important", json!({"priority": 10})));
        let order = [pop(&mut queue, now), pop(&mut queue, now), pop(&mut queue, now), pop(&mut queue, now)];
        assert_eq!(order, ["important", "old", "young", ""]);
    }

    #[tokio::test]
    async fn a_refused_pod_waits_for_a_change_and_for_its_rest() {
        let (mut queue, now) = (Queue::default(), Instant::now());
        queue.add(pod("p", json!({})));
        assert_eq!(pop(&mut queue, now), "p");
        queue.refused("p", now);
        assert_eq!(queue.due(), None);
        queue.add(pod("p", json!({})));
        assert_eq!(queue.due(), None, "our own status write is no change");
        queue.change(now);
        assert_eq!(pop(&mut queue, now), "");
        assert_eq!(queue.due(), Some(now + Duration::from_secs(1)));
        assert_eq!(pop(&mut queue, now + Duration::from_secs(1)), "p");
        queue.refused("p", now);
        queue.change(now + Duration::from_secs(3));
        assert_eq!(pop(&mut queue, now), "p");
    }

    #[tokio::test]
    async fn a_change_while_the_pod_is_tried_is_not_lost() {
        let (mut queue, now) = (Queue::default(), Instant::now());
        queue.add(pod("p", json!({})));
        assert_eq!(pop(&mut queue, now), "p");
        queue.change(now);
        queue.refused("p", now);
        assert_eq!(pop(&mut queue, now + Duration::from_secs(1)), "p");
    }

    #[tokio::test]
    async fn asking_for_something_else_is_a_new_chance_at_once() {
        let (mut queue, now) = (Queue::default(), Instant::now());
        queue.add(pod("p", json!({"nodeSelector": {"a": "b"}})));
        pop(&mut queue, now);
        queue.refused("p", now);
        queue.add(pod("p", json!({})));
        assert_eq!(pop(&mut queue, now), "p");
        assert!(queue.remove("p"));
        assert!(!queue.remove("p"));
    }
}

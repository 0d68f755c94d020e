//! Pod statuses that wait to be sent to the API server. A status that only shows the progress of a pod's start waits
//! longer than other statuses, because a later status probably replaces it. Pure: the caller passes the time.

use std::collections::{HashMap, HashSet, VecDeque};
use std::time::Duration;

use k8s_openapi::api::core::v1::{ContainerState, ContainerStatus, PodStatus};
use tokio::time::Instant;

use super::Update;

/// Maximum delay of a status that only shows the progress of a start.
const DELAY: Duration = Duration::from_secs(2);
/// Condition that becomes true during a start.
const HAS_SANDBOX: &str = "PodReadyToStartContainers";
/// Waiting reasons of containers that have neither run nor failed.
const STARTING: [&str; 2] = ["ContainerCreating", "PodInitializing"];

/// At most one status of each pod. The cost of an operation does not depend on the number of waiting pods.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    entries: HashMap<String, Entry>,
    /// Uids of statuses that are due.
    due: VecDeque<String>,
    /// Uids of delayed statuses with the times when they are due, in order.
    later: VecDeque<(Instant, String)>,
}

#[derive(Debug)]
struct Entry {
    update: Update,
    is_due: bool,
}

impl Waiting {
    /// Adds a status, in place of the pod's waiting status.
    pub(super) fn put(&mut self, update: Update, now: Instant) {
        let uid = update.uid.clone();
        let older = self.entries.remove(&uid);
        let (was_due, was_waiting) = (older.as_ref().is_some_and(|older| older.is_due), older.is_some());
        // The older status was not sent, so the API still has the status that it was compared with.
        let (known, since) = match older {
            Some(Entry { update: older, .. }) => (older.known, older.since),
            None => (update.known.clone(), update.since),
        };
        let is_due = was_due || update.delete || !is_progress(&known, &update.status);
        if is_due && !was_due {
            self.due.push_back(uid.clone());
        } else if !is_due && !was_waiting {
            self.later.push_back((now + DELAY, uid.clone()));
        }
        self.entries.insert(uid, Entry { update: Update { known, since, ..update }, is_due });
    }

    /// Removes the statuses that are due, except for pods with a write in flight.
    pub(super) fn take_due(&mut self, in_flight: &HashSet<String>, now: Instant) -> Vec<Update> {
        while let Some((_, uid)) = self.later.pop_front_if(|(due, _)| *due <= now) {
            // `later` keeps the uid of a status that was sent early. The uid may end the delay of a newer status early.
            if let Some(entry) = self.entries.get_mut(&uid).filter(|entry| !entry.is_due) {
                entry.is_due = true;
                self.due.push_back(uid);
            }
        }
        let due = std::mem::take(&mut self.due);
        let free = due.into_iter().filter(|uid| !in_flight.contains(uid));
        free.filter_map(|uid| self.entries.remove(&uid)).map(|entry| entry.update).collect()
    }

    /// Called after a write of the pod. A due status that waited for this write can be sent.
    pub(super) fn write_ended(&mut self, uid: &str) {
        if self.entries.get(uid).is_some_and(|entry| entry.is_due) {
            self.due.push_back(uid.to_owned());
        }
    }

    /// Removes the pod's waiting status.
    pub(super) fn remove(&mut self, uid: &str) -> Option<Update> {
        self.entries.remove(uid).map(|entry| entry.update)
    }

    /// Time at which the next delayed status is due.
    pub(super) fn next_due(&self) -> Option<Instant> {
        self.later.front().map(|(due, _)| *due)
    }
}

/// Whether a status only shows the progress of a start. No container has run or failed, and only the condition of the
/// sandbox differs.
fn is_progress(known: &PodStatus, status: &PodStatus) -> bool {
    let pending = |status: &PodStatus| matches!(status.phase.as_deref(), None | Some("Pending"));
    let inits = status.init_container_statuses.iter().flatten();
    let mut containers = inits.chain(status.container_statuses.iter().flatten());
    pending(known)
        && pending(status)
        && status.reason.is_none()
        && status.ephemeral_container_statuses.is_none()
        && containers.all(is_starting)
        && conditions_agree(known, status)
}

fn is_starting(container: &ContainerStatus) -> bool {
    let state = container.state.as_ref();
    let waiting =
        state.and_then(|state| state.waiting.as_ref()).and_then(|waiting| waiting.reason.as_deref());
    waiting.is_some_and(|reason| STARTING.contains(&reason))
        && container.restart_count == 0
        && container.last_state.as_ref().is_none_or(|last| *last == ContainerState::default())
}

/// Whether the conditions that both statuses have are equal, except the condition of the sandbox.
fn conditions_agree(known: &PodStatus, status: &PodStatus) -> bool {
    let known = || known.conditions.iter().flatten();
    status.conditions.iter().flatten().filter(|condition| condition.type_ != HAS_SANDBOX).all(|condition| {
        let old = known().find(|old| old.type_ == condition.type_);
        old.is_none_or(|old| old.status == condition.status && old.reason == condition.reason)
    })
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::{ContainerStateRunning, ContainerStateWaiting, PodCondition};

    use super::*;

    fn container(state: ContainerState) -> ContainerStatus {
        ContainerStatus { state: Some(state), ..ContainerStatus::default() }
    }

    fn waiting(reason: &str) -> ContainerState {
        let waiting = ContainerStateWaiting { reason: Some(reason.to_owned()), message: None };
        ContainerState { waiting: Some(waiting), ..ContainerState::default() }
    }

    fn starting(ip: Option<&str>) -> PodStatus {
        let condition = |type_: &str, status: &str| PodCondition {
            type_: type_.to_owned(),
            status: status.to_owned(),
            ..PodCondition::default()
        };
        let sandbox = if ip.is_some() { "True" } else { "False" };
        PodStatus {
            phase: Some("Pending".to_owned()),
            pod_ip: ip.map(str::to_owned),
            conditions: Some(vec![condition(HAS_SANDBOX, sandbox), condition("Ready", "False")]),
            container_statuses: Some(vec![container(waiting("ContainerCreating"))]),
            ..PodStatus::default()
        }
    }

    fn running() -> PodStatus {
        let state = ContainerState { running: Some(ContainerStateRunning::default()), ..Default::default() };
        PodStatus {
            phase: Some("Running".to_owned()),
            container_statuses: Some(vec![container(state)]),
            ..PodStatus::default()
        }
    }

    fn update(uid: &str, known: PodStatus, status: PodStatus) -> Update {
        let (namespace, name) = ("default".to_owned(), uid.to_owned());
        Update { uid: uid.to_owned(), namespace, name, known, status, delete: false, since: Instant::now() }
    }

    #[test]
    fn a_running_pod_replaces_the_progress_of_its_start() {
        let (mut pending, now, none) = (Waiting::default(), Instant::now(), HashSet::new());
        pending.put(Update { since: now, ..update("a", PodStatus::default(), starting(None)) }, now);
        pending.put(update("a", starting(None), starting(Some("10.42.0.2"))), now);
        assert!(pending.take_due(&none, now).is_empty());
        pending.put(update("a", starting(Some("10.42.0.2")), running()), now);
        let sent = pending.take_due(&none, now);
        assert_eq!(sent.len(), 1);
        assert_eq!(sent[0].since, now, "the time of the first change");
        assert_eq!((&sent[0].known, &sent[0].status), (&PodStatus::default(), &running()));
        assert!(pending.take_due(&none, now + DELAY).is_empty());
        assert_eq!(pending.next_due(), None);
    }

    #[test]
    fn the_progress_of_a_slow_start_is_sent_after_the_delay_of_its_first_status() {
        let (mut pending, now, none) = (Waiting::default(), Instant::now(), HashSet::new());
        pending.put(update("a", PodStatus::default(), starting(None)), now);
        pending.put(update("a", starting(None), starting(Some("10.42.0.2"))), now + DELAY / 2);
        assert_eq!(pending.next_due(), Some(now + DELAY));
        let sent = pending.take_due(&none, now + DELAY);
        assert_eq!(sent.iter().map(|sent| &sent.status).collect::<Vec<_>>(), [&starting(Some("10.42.0.2"))]);
    }

    #[test]
    fn a_due_status_waits_for_the_write_in_flight_and_stays_due() {
        let (mut pending, now) = (Waiting::default(), Instant::now());
        let busy = HashSet::from(["a".to_owned()]);
        pending.put(update("a", starting(None), running()), now);
        assert!(pending.take_due(&busy, now).is_empty());
        pending.put(update("a", running(), starting(None)), now);
        pending.write_ended("a");
        assert_eq!(pending.take_due(&HashSet::new(), now).len(), 1);
    }

    #[test]
    fn failures_and_other_conditions_are_sent_at_once() {
        let failed = PodStatus {
            container_statuses: Some(vec![container(waiting("ErrImagePull"))]),
            ..starting(None)
        };
        assert!(!is_progress(&starting(None), &failed));
        let mut ready = starting(None);
        for condition in ready.conditions.iter_mut().flatten() {
            condition.status = "True".to_owned();
        }
        assert!(!is_progress(&starting(None), &ready));
        let evicted = PodStatus { reason: Some("Evicted".to_owned()), ..starting(None) };
        assert!(!is_progress(&starting(None), &evicted));
        assert!(!is_progress(&running(), &starting(None)));
        assert!(is_progress(&starting(None), &starting(Some("10.42.0.2"))));
        let mut again = starting(None);
        for container in again.container_statuses.iter_mut().flatten() {
            container.restart_count = 1;
        }
        assert!(!is_progress(&starting(None), &again));
    }

    #[test]
    fn a_deletion_is_sent_at_once() {
        let (mut pending, now) = (Waiting::default(), Instant::now());
        let deletion = Update { delete: true, ..update("a", PodStatus::default(), starting(None)) };
        pending.put(deletion, now);
        assert_eq!(pending.take_due(&HashSet::new(), now).len(), 1);
    }
}

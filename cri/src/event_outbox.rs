//! The event outbox: writes each transition of a pod or container into its record, then sends the event.
//!
//! One transition is in progress at a time, so events are sent in the order in which they were recorded. Events that
//! no listener received are replayed by the next start of the runtime.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;

use coracle_proto::cri;
use cri::ContainerEventType::{ContainerDeletedEvent, ContainerStartedEvent};
use cri::{ContainerEventResponse, ContainerEventType, PodSandboxStatus};
use futures::Stream;
use tokio::sync::watch;
use tracing::warn;

use crate::clock::now;
use crate::container::Container;
use crate::error::Error;
use crate::events::{Events, Item, SendGuard, TooSlow};
use crate::records::{Records, Removed, Subject, Transition, remove_record};
use crate::sandbox::{Sandbox, SandboxState};
use crate::tables::Tables;

/// Records transitions and sends their events.
#[derive(Clone)]
pub(crate) struct EventOutbox {
    pub(crate) events: Arc<Events>,
    /// Notified of every event, even if the event has no listener.
    pub(crate) changes: watch::Sender<()>,
    pub(crate) records: Arc<Records>,
    pub(crate) tables: Arc<Tables>,
}

/// Recorded transitions of one object whose events are not yet sent. Transitions of other objects wait meanwhile.
#[must_use = "recorded transitions must be sent"]
pub(crate) struct PendingEvents<'a> {
    outbox: &'a EventOutbox,
    send_guard: SendGuard<'a>,
    transitions: Vec<Transition>,
    removed: Option<PathBuf>,
}

/// A recorded transition that no listener received.
struct Unsent {
    transition: Transition,
    sandbox_id: String,
    /// Id of the sandbox or container.
    object_id: String,
    /// Record of the removed object, for a deletion.
    removed: Option<PathBuf>,
}

/// Collects the transitions with numbers above `delivered`, up to `last`.
struct UnsentTransitions {
    delivered: u64,
    last: u64,
    unsent: Vec<Unsent>,
}

// === impl EventOutbox ===

impl EventOutbox {
    /// A stream of all events from now on. The first caller also gets the events since the start.
    pub(crate) fn listen(&self) -> impl Stream<Item = Result<ContainerEventResponse, TooSlow>> + use<> {
        self.events.listen()
    }

    /// Ends the recovery: listeners can connect.
    pub(crate) fn open_to_listeners(&self) {
        self.events.open_to_listeners();
    }

    /// Ends all current and future streams of events: the server stops.
    pub(crate) fn end_streams(&self) {
        self.events.end();
    }

    /// Waits until no other event is being numbered and sent.
    pub(crate) fn send_guard(&self) -> SendGuard<'_> {
        self.events.send_guard()
    }

    /// Waits until no other transition is in progress.
    pub(crate) fn pending(&self) -> PendingEvents<'_> {
        PendingEvents { outbox: self, send_guard: self.send_guard(), transitions: Vec::new(), removed: None }
    }

    /// Ensures that new events get numbers above these numbers of an earlier start.
    pub(crate) fn skip_numbers(&self, numbers: impl Iterator<Item = u64>) {
        self.send_guard().skip(numbers.max().unwrap_or_default());
    }

    /// Records a transition of a container.
    pub(crate) fn record_transition(
        &self,
        container: &Container,
        what: ContainerEventType,
    ) -> Result<PendingEvents<'_>, Error> {
        let mut pending = self.pending();
        container.note(pending.add(what, now()));
        self.records.write_container(&container.record_now())?;
        Ok(pending)
    }

    /// Records that a container runs. If the record cannot be written (disk full), the event is still sent and the
    /// error is logged. The program runs, and the next start of the runtime gets the state from the shim.
    pub(crate) fn record_running(&self, container: &Container) -> PendingEvents<'_> {
        let mut pending = self.pending();
        container.note(pending.add(ContainerStartedEvent, now()));
        if let Err(error) = self.records.write_container(&container.record_now()) {
            warn!(container = container.id, error = error.chain(), "cannot record that a container runs");
        }
        pending
    }

    /// Removes a container's bundle. Its record is kept until a listener received the deletion.
    pub(crate) fn record_container_removal(&self, container: &Container) -> Result<PendingEvents<'_>, Error> {
        let mut pending = self.pending();
        match pending.add(ContainerDeletedEvent, now()) {
            None => self.records.forget_container(&container.id)?,
            Some(deleted) => {
                pending.keep_record(&Subject::Container(Box::new(container.record_now())), deleted)?;
            }
        }
        Ok(pending)
    }

    /// Removes a sandbox's directory. Its record is kept until a listener received the deletion.
    pub(crate) fn record_sandbox_removal(&self, sandbox: &Sandbox) -> Result<PendingEvents<'_>, Error> {
        let mut pending = self.pending();
        match pending.add(ContainerDeletedEvent, now()) {
            None => self.records.remove_sandbox(&sandbox.id)?,
            Some(deleted) => {
                pending.keep_record(&Subject::Sandbox(Box::new(sandbox.record_now())), deleted)?
            }
        }
        Ok(pending)
    }

    /// Sends the events that earlier starts of the runtime recorded and no listener received, in order, up to number
    /// `last`. Events with higher numbers belong to this start, which sends them itself.
    pub(crate) fn replay_unsent(&self, removed: Vec<Removed>, last: u64) {
        let mut transitions =
            UnsentTransitions { delivered: self.events.last_delivered(), last, unsent: Vec::new() };
        let mut pods = HashMap::new();
        for sandbox in self.tables.sandboxes.all() {
            transitions.add(sandbox.transitions(), &sandbox.id, &sandbox.id);
            pods.insert(sandbox.id.clone(), sandbox.status());
        }
        for container in self.tables.containers.all() {
            transitions.add(container.transitions(), &container.record.sandbox_id, &container.id);
        }
        for removed in removed {
            if removed.number <= transitions.delivered {
                remove_record(&removed.file);
                continue;
            }
            transitions.add_removed(&removed);
            if let Subject::Sandbox(record) = removed.subject {
                let id = record.id.clone();
                pods.insert(id, Sandbox::new(*record, SandboxState::NotReady).status());
            }
        }
        self.events.send_first(self.items(transitions.in_order(), &pods));
    }

    /// The events of unsent transitions.
    fn items(&self, unsent: Vec<Unsent>, pods: &HashMap<String, PodSandboxStatus>) -> Vec<Item> {
        let items = unsent.into_iter().map(|unsent| Item {
            number: unsent.transition.number,
            event: self.event(
                unsent.transition,
                unsent.object_id,
                &unsent.sandbox_id,
                pods.get(&unsent.sandbox_id).cloned(),
            ),
            removed: unsent.removed,
        });
        items.collect()
    }

    /// The CRI event of a transition.
    fn event(
        &self,
        transition: Transition,
        object_id: String,
        sandbox_id: &str,
        pod_sandbox_status: Option<PodSandboxStatus>,
    ) -> ContainerEventResponse {
        let containers = self.tables.containers_of(sandbox_id);
        ContainerEventResponse {
            container_id: object_id,
            container_event_type: transition.what,
            created_at: transition.at,
            pod_sandbox_status,
            containers_statuses: containers
                .iter()
                .filter(|container| container.visible())
                .map(|container| container.status())
                .collect(),
        }
    }
}

// === impl UnsentTransitions ===

impl UnsentTransitions {
    /// Adds the transitions of a live object.
    fn add(&mut self, transitions: Vec<Transition>, sandbox_id: &str, object_id: &str) {
        for transition in transitions {
            self.push(transition, sandbox_id, object_id, None);
        }
    }

    /// Adds the transitions of a removed object, and its deletion.
    fn add_removed(&mut self, removed: &Removed) {
        let (transitions, sandbox_id, object_id) = match &removed.subject {
            Subject::Container(record) => (&record.transitions, &record.sandbox_id, &record.id),
            Subject::Sandbox(record) => (&record.transitions, &record.id, &record.id),
        };
        for transition in transitions {
            self.push(*transition, sandbox_id, object_id, None);
        }
        let deleted =
            Transition { number: removed.number, what: ContainerDeletedEvent.into(), at: removed.at };
        self.push(deleted, sandbox_id, object_id, Some(removed.file.clone()));
    }

    fn push(&mut self, transition: Transition, sandbox_id: &str, object_id: &str, removed: Option<PathBuf>) {
        if transition.number > self.delivered && transition.number <= self.last {
            let (sandbox_id, object_id) = (sandbox_id.to_owned(), object_id.to_owned());
            self.unsent.push(Unsent { transition, sandbox_id, object_id, removed });
        }
    }

    fn in_order(mut self) -> Vec<Unsent> {
        self.unsent.sort_by_key(|unsent| unsent.transition.number);
        self.unsent
    }
}

// === impl PendingEvents ===

impl PendingEvents<'_> {
    /// Adds a transition. Returns `None` without listeners, because then no transition needs to be recorded.
    pub(crate) fn add(&mut self, what: ContainerEventType, at: i64) -> Option<Transition> {
        let number = self.send_guard.number()?;
        let transition = Transition { number, what: what.into(), at };
        self.transitions.push(transition);
        Some(transition)
    }

    fn keep_record(&mut self, subject: &Subject, deleted: Transition) -> Result<(), Error> {
        self.removed = Some(self.outbox.records.move_removed(subject, deleted.number, deleted.at)?);
        Ok(())
    }

    /// Sends the events of a container.
    pub(crate) fn send_for_container(self, container: &Container) {
        match self.outbox.tables.sandboxes.get(&container.record.sandbox_id) {
            Some(sandbox) => self.send(&sandbox, &container.id),
            None => self.outbox.changes.send_replace(()),
        }
    }

    /// Sends the events of a sandbox.
    pub(crate) fn send_for_sandbox(self, sandbox: &Sandbox) {
        self.send(sandbox, &sandbox.id);
    }

    fn send(self, sandbox: &Sandbox, object_id: &str) {
        self.outbox.changes.send_replace(());
        for transition in self.transitions {
            let status = Some(sandbox.status());
            self.send_guard.send(Item {
                number: transition.number,
                event: self.outbox.event(transition, object_id.to_owned(), &sandbox.id, status),
                removed: self.removed.clone(),
            });
        }
    }
}

//! What becomes of pods and containers: written into their records, then told to all listeners, one at a time, so that
//! it is told in the order in which it was written, and by the next life of the runtime if not by this one.

use std::collections::HashMap;
use std::path::PathBuf;

use coracle_proto::cri;
use cri::ContainerEventType::{ContainerDeletedEvent, ContainerStartedEvent};
use cri::{ContainerEventResponse, ContainerEventType, PodSandboxStatus};
use tracing::warn;

use crate::container::Container;
use crate::error::Error;
use crate::events::{Item, Turn};
use crate::records::{Removed, Subject, Transition, forget};
use crate::runtime::Runtime;
use crate::sandbox::{Sandbox, SandboxState};
use crate::server::now;

/// Transitions of one object between their record and their events. Nobody else's are written or told meanwhile.
#[must_use = "what is on record is to be told"]
pub(crate) struct Telling<'a> {
    runtime: &'a Runtime,
    turn: Turn<'a>,
    transitions: Vec<Transition>,
    removed: Option<PathBuf>,
}

// === impl Runtime ===

impl Runtime {
    /// Waits until nobody else's transitions are on their way.
    pub(crate) fn telling(&self) -> Telling<'_> {
        Telling { runtime: self, turn: self.inner.events.turn(), transitions: Vec::new(), removed: None }
    }

    /// Records what became of a container.
    pub(crate) fn container_became(
        &self,
        container: &Container,
        what: ContainerEventType,
    ) -> Result<Telling<'_>, Error> {
        let mut telling = self.telling();
        container.note(telling.next(what, now()));
        self.inner.records.write_container(&container.record_now())?;
        Ok(telling)
    }

    /// Records that a container runs. What cannot be written, on a disk that is full, is told all the same, and no error:
    /// its program runs, its shim knows it, and the next life of the runtime asks that.
    pub(crate) fn container_runs(&self, container: &Container) -> Telling<'_> {
        let mut telling = self.telling();
        container.note(telling.next(ContainerStartedEvent, now()));
        if let Err(error) = self.inner.records.write_container(&container.record_now()) {
            warn!(container = container.id, error = error.chain(), "could not record that a container runs");
        }
        telling
    }

    /// Removes a container's bundle, and its record as soon as somebody was told so.
    pub(crate) fn container_gone(&self, container: &Container) -> Result<Telling<'_>, Error> {
        let mut telling = self.telling();
        match telling.next(ContainerDeletedEvent, now()) {
            None => self.inner.records.forget_container(&container.id)?,
            Some(deleted) => telling.bury(&Subject::Container(Box::new(container.record_now())), deleted)?,
        }
        Ok(telling)
    }

    /// Removes a sandbox's directory, and its record as soon as somebody was told so.
    pub(crate) fn sandbox_gone(&self, sandbox: &Sandbox) -> Result<Telling<'_>, Error> {
        let mut telling = self.telling();
        match telling.next(ContainerDeletedEvent, now()) {
            None => self.inner.records.remove_sandbox(&sandbox.id)?,
            Some(deleted) => telling.bury(&Subject::Sandbox(Box::new(sandbox.record_now())), deleted)?,
        }
        Ok(telling)
    }

    /// Tells what earlier lives left untold, up to a number; what is numbered higher, this one tells itself.
    pub(crate) fn tell_left(&self, removed: Vec<Removed>, last: u64) {
        let told = self.inner.events.told();
        let (left, done): (Vec<_>, Vec<_>) = removed.into_iter().partition(|removed| removed.number > told);
        done.iter().for_each(|removed| forget(&removed.file));
        let mut pods: HashMap<String, PodSandboxStatus> = HashMap::new();
        let mut untold: Vec<(Transition, String, String, Option<PathBuf>)> = Vec::new();
        let mut add = |transitions: Vec<Transition>, (pod, subject): (&str, &str), file: Option<&PathBuf>| {
            let transitions = transitions.into_iter().filter(|transition| transition.number > told);
            untold.extend(transitions.filter(|transition| transition.number <= last).map(|transition| {
                let file = file.filter(|_| transition.what == i32::from(ContainerDeletedEvent));
                (transition, pod.to_owned(), subject.to_owned(), file.cloned())
            }));
        };
        for sandbox in self.inner.sandboxes.all() {
            add(sandbox.transitions(), (&sandbox.id, &sandbox.id), None);
            pods.insert(sandbox.id.clone(), sandbox.status());
        }
        for container in self.inner.containers.all() {
            add(container.transitions(), (&container.record.sandbox_id, &container.id), None);
        }
        for Removed { number, at, subject, file } in left {
            let deleted = [Transition { number, what: ContainerDeletedEvent.into(), at }];
            match subject {
                Subject::Container(record) => {
                    let transitions = [&record.transitions[..], &deleted].concat();
                    add(transitions, (&record.sandbox_id, &record.id), Some(&file));
                }
                Subject::Sandbox(record) => {
                    let transitions = [&record.transitions[..], &deleted].concat();
                    add(transitions, (&record.id, &record.id), Some(&file));
                    let id = record.id.clone();
                    pods.insert(id, Sandbox::new(*record, SandboxState::NotReady).status());
                }
            }
        }
        untold.sort_by_key(|(transition, ..)| transition.number);
        let items = untold.into_iter().map(|(transition, pod, subject, removed)| Item {
            number: transition.number,
            event: self.event(transition, &subject, (&pod, pods.get(&pod).cloned())),
            removed,
        });
        self.inner.events.send_first(items.collect());
    }

    fn event(
        &self,
        transition: Transition,
        subject: &str,
        (pod, pod_sandbox_status): (&str, Option<PodSandboxStatus>),
    ) -> ContainerEventResponse {
        let containers = self.containers_of(pod);
        ContainerEventResponse {
            container_id: subject.to_owned(),
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

// === impl Telling ===

impl Telling<'_> {
    /// What comes next. None when nobody is to be told.
    pub(crate) fn next(&mut self, what: ContainerEventType, at: i64) -> Option<Transition> {
        let number = self.turn.number()?;
        let transition = Transition { number, what: what.into(), at };
        self.transitions.push(transition);
        Some(transition)
    }

    fn bury(&mut self, subject: &Subject, deleted: Transition) -> Result<(), Error> {
        self.removed = Some(self.runtime.inner.records.bury(subject, deleted.number, deleted.at)?);
        Ok(())
    }

    /// Tells it of a container.
    pub(crate) fn tell(self, container: &Container) {
        match self.runtime.inner.sandboxes.get(&container.record.sandbox_id) {
            Some(sandbox) => self.send(&sandbox, &container.id),
            None => self.runtime.inner.changes.send_replace(()),
        }
    }

    /// Tells it of a sandbox.
    pub(crate) fn tell_sandbox(self, sandbox: &Sandbox) {
        self.send(sandbox, &sandbox.id);
    }

    fn send(self, sandbox: &Sandbox, subject: &str) {
        self.runtime.inner.changes.send_replace(());
        for transition in self.transitions {
            self.turn.send(&Item {
                number: transition.number,
                event: self.runtime.event(transition, subject, (&sandbox.id, Some(sandbox.status()))),
                removed: self.removed.clone(),
            });
        }
    }
}

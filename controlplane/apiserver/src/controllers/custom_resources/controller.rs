//! Reconciles the definitions: sets their names and conditions, adds and removes their resources.
//!
//! A change of a definition causes a reconcile of that definition only. If the change releases names, the definitions
//! of the same group that wait for names are also reconciled.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Weak};

use coracle_custom_resources::Definition;
use coracle_custom_resources::conditions::{self, FINALIZER, StatusChange};
use coracle_custom_resources::definition::{Metadata, Names};
use serde_json::Value;
use tokio::sync::mpsc;

use super::cleanup;
use super::retry::Retries;
use super::stored::{edit, kind};
use crate::cache::{Event, Events, Scope, Watcher, prefix_of};
use crate::custom_resources::{ConversionClient, of_definition};
use crate::error::Result;
use crate::registry::RegistryError;
use crate::state::State;
use crate::write;

/// Capacity of the queues of finished cleanups and of due retries.
const QUEUE_CAPACITY: usize = 64;

/// Serves the established definitions, then starts a task that watches all definitions.
pub(crate) async fn start(state: &Arc<State>) {
    let (ended, cleanups) = mpsc::channel(QUEUE_CAPACITY);
    let (due, retries) = mpsc::channel(QUEUE_CAPACITY);
    let mut controller = Controller {
        state: Arc::downgrade(state),
        definitions: HashMap::new(),
        served: HashMap::new(),
        retries: Retries::new(due),
        cleaning: BTreeSet::new(),
        ended,
    };
    let Ok(events) = controller.load(state).await else { return };
    coracle_threads::spawn(controller.run(events, cleanups, retries));
}

/// The reason why a definition is not served.
struct NotServed {
    message: String,
    /// Whether a timer starts the next attempt.
    is_retried: bool,
}

struct Controller {
    state: Weak<State>,
    /// Definitions by name.
    definitions: HashMap<String, Definition>,
    /// The served state of each definition: its specification and accepted names as text, for comparison.
    served: HashMap<String, String>,
    retries: Retries,
    /// Names of terminating definitions whose objects a task deletes.
    cleaning: BTreeSet<String>,
    ended: mpsc::Sender<String>,
}

impl Controller {
    /// Reads all definitions and reconciles each. Returns the later changes.
    async fn load(&mut self, state: &Arc<State>) -> Result<Events> {
        let kind = kind()?;
        let scope = Scope { prefix: prefix_of(&kind, ""), ..Scope::default() };
        let (watcher, events) = Watcher::new(scope, false);
        let objects = state.cache.of(&kind)?.lock().watch_from_now(watcher, state.cache.revision());
        self.definitions.clear();
        for object in objects {
            self.store_definition(object.name(), &object.value());
        }
        let mut names: Vec<String> = self.definitions.keys().cloned().collect();
        names.sort();
        for name in names {
            self.reconcile(state, &name).await;
        }
        Ok(events)
    }

    async fn run(
        mut self,
        mut events: Events,
        mut cleanups: mpsc::Receiver<String>,
        mut retries: mpsc::Receiver<String>,
    ) {
        loop {
            // Cancel-safe: the receivers keep their messages.
            tokio::select! {
                event = events.recv() => {
                    let Some(state) = self.state.upgrade() else { return };
                    match event {
                        Some(event) => self.apply(&state, &event).await,
                        // The watcher was too slow, or the server stops.
                        None => match self.load(&state).await {
                            Ok(again) if !state.shutdown.is_cancelled() => events = again,
                            _ => return,
                        },
                    }
                }
                Some(name) = cleanups.recv() => {
                    self.cleaning.remove(&name);
                    let Some(state) = self.state.upgrade() else { return };
                    self.reconcile(&state, &name).await;
                }
                Some(name) = retries.recv() => {
                    self.retries.end_wait(&name);
                    let Some(state) = self.state.upgrade() else { return };
                    self.reconcile(&state, &name).await;
                }
            }
        }
    }

    async fn apply(&mut self, state: &Arc<State>, event: &Event) {
        match event {
            Event::Added(object) | Event::Modified(object) => {
                let name = object.name().to_owned();
                self.store_definition(&name, &object.value());
                self.reconcile(state, &name).await;
            }
            Event::Deleted(object) => {
                let name = object.name().to_owned();
                self.retries.forget(&name);
                let Some(definition) = self.definitions.remove(&name) else { return };
                self.withdraw(state, &name, &definition).await;
                self.reconcile_waiting(state, &definition.spec.group).await;
            }
            Event::Bookmark(_) | Event::InitialEnd(_) => {}
        }
    }

    fn store_definition(&mut self, name: &str, object: &Value) {
        match Definition::parse(object) {
            Ok(definition) => {
                self.definitions.insert(name.to_owned(), definition);
            }
            Err(error) => {
                tracing::warn!(definition = name, %error, "cannot read a custom resource definition");
            }
        }
    }

    /// Reconciles the definitions of a group that wait for names of another definition.
    async fn reconcile_waiting(&mut self, state: &Arc<State>, group: &str) {
        let waiting = |definition: &&Definition| {
            definition.spec.group == group && !definition.is_condition_true("NamesAccepted")
        };
        let names: Vec<String> = self
            .definitions
            .values()
            .filter(waiting)
            .map(|definition| definition.metadata.name.clone())
            .collect();
        for name in names {
            self.reconcile(state, &name).await;
        }
    }

    async fn reconcile(&mut self, state: &Arc<State>, name: &str) {
        let Some(definition) = self.definitions.get(name) else { return };
        let group = definition.spec.group.clone();
        let built_in = built_in_names(&group);
        let others: Vec<&Definition> = self
            .definitions
            .values()
            .filter(|other| other.spec.group == group && other.metadata.name != name)
            .chain(&built_in)
            .collect();
        let mut change = conditions::plan(definition, &others);
        let status = definition.status.clone();
        let mut settled = definition.clone();
        if let Some(change) = &change {
            settled.status.accepted_names.clone_from(&change.accepted);
            settled.status.conditions.retain(|old| !change.conditions.iter().any(|new| new.kind == old.kind));
            settled.status.conditions.extend(change.conditions.iter().cloned());
        }
        let mut is_retried = false;
        if settled.is_condition_true("Established")
            && let Err(error) = self.serve(state, name, &settled).await
        {
            change = change.and_then(|change| change.not_served(&status, &error.message));
            is_retried = error.is_retried;
        }
        if let Some(change) = change
            && let Err(error) = write_status(state, &settled.metadata, &change).await
        {
            tracing::warn!(
                definition = name,
                error = error.message,
                "cannot write the status of a custom resource definition"
            );
        }
        // If the objects could not be loaded, the cleanup would miss them.
        let finalizing =
            !is_retried && settled.metadata.finalizers.iter().any(|finalizer| finalizer == FINALIZER);
        if settled.is_terminating() && finalizing && self.cleaning.insert(name.to_owned()) {
            let (state, ended, name) = (self.state.clone(), self.ended.clone(), name.to_owned());
            coracle_threads::spawn(async move {
                cleanup::run(&state, &settled).await;
                // A closed channel means that the controller has ended.
                let _ = ended.send(name).await;
            });
        }
    }

    /// Adds the definition's resources, or replaces them if the definition has changed.
    async fn serve(
        &mut self,
        state: &Arc<State>,
        name: &str,
        definition: &Definition,
    ) -> std::result::Result<(), NotServed> {
        let text = format!(
            "{:?} {:?} {}",
            definition.spec,
            definition.status.accepted_names,
            definition.is_terminating()
        );
        if self.served.get(name) == Some(&text) {
            return Ok(());
        }
        if let Some(message) = self.retries.waiting_message(name, &text) {
            return Err(NotServed { message: message.to_owned(), is_retried: true });
        }
        let client =
            ConversionClient { cache: Arc::downgrade(&state.cache), in_flight: state.in_flight.clone() };
        let versions = match of_definition(definition, &client) {
            Ok(versions) => versions,
            Err(error) => {
                tracing::warn!(definition = name, %error, "cannot compile the schema of a custom resource definition");
                return Err(NotServed { message: error.to_string(), is_retried: false });
            }
        };
        if versions.is_empty() {
            self.withdraw(state, name, definition).await;
            return Ok(());
        }
        match state.registry.add(&state.cache, &*state.store, &versions).await {
            Ok(()) => {
                self.served.insert(name.to_owned(), text);
                self.retries.forget(name);
                Ok(())
            }
            Err(error) => {
                let (message, is_retried) = (error.to_string(), matches!(error, RegistryError::Load { .. }));
                tracing::warn!(
                    definition = name,
                    error = &error as &dyn std::error::Error,
                    "cannot serve a custom resource"
                );
                if is_retried {
                    self.retries.fail(name, text, message.clone());
                }
                Err(NotServed { message, is_retried })
            }
        }
    }

    async fn withdraw(&mut self, state: &Arc<State>, name: &str, definition: &Definition) {
        if self.served.remove(name).is_some() {
            let plural = &definition.status.accepted_names.plural;
            state.registry.remove(&state.cache, &definition.spec.group, plural).await;
            state.metrics.forget(&definition.spec.group, plural);
        }
    }
}

/// The names of the built-in resources of a group, in the form of definitions.
fn built_in_names(group: &str) -> Vec<Definition> {
    let resources = coracle_kinds::kind::built_in().iter().filter(|resource| resource.group == group);
    resources
        .map(|resource| {
            let mut definition = Definition::default();
            definition.status.accepted_names = Names {
                plural: resource.plural.clone().into_owned(),
                singular: resource.singular.clone().into_owned(),
                short_names: resource.short_names.iter().map(|name| name.clone().into_owned()).collect(),
                kind: resource.kind.clone().into_owned(),
                list_kind: resource.list_kind.clone().into_owned(),
                categories: Vec::new(),
            };
            definition
        })
        .collect()
}

async fn write_status(state: &Arc<State>, definition: &Metadata, change: &StatusChange) -> Result<()> {
    edit(state, definition, |object| change.apply(object, &write::now())).await
}

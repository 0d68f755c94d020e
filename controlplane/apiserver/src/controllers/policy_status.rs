//! Writes the status of validating admission policies: the observed generation, and warnings about expressions that do
//! not fit the types of the matched kinds. Source: `pkg/controller/validatingadmissionpolicystatus`.
//!
//! A policy is checked when its specification changes. Unlike upstream, it is also checked when a resource that it
//! names appears or changes. One policy is checked at a time.

mod matched;

use std::{
    collections::{BTreeSet, HashMap},
    sync::{Arc, Weak},
    time::Duration,
};

use coracle_admission_policies::{ExpressionWarning, check_types};
use coracle_kinds::{Resource, Resources, kind::by_resource};
use serde_json::{Value, json};
use tokio::sync::watch::Receiver;

use self::matched::{Matched, Names};
use crate::{
    cache::{Event, Events, Object, Scope, Watcher, prefix_of},
    call::Call,
    error::{ApiError, Result},
    field_manager::Writer,
    request::Query,
    state::State,
    write::{self, Part},
};

/// Delay until the next attempt after an error of the store, which causes no event.
const RETRY: Duration = Duration::from_secs(5);

/// Starts the task. Custom resources must be served already, so that the first check finds them.
pub(crate) fn start(state: &Arc<State>) {
    let Some(kind) = by_resource("admissionregistration.k8s.io", "v1", "validatingadmissionpolicies") else {
        return;
    };
    let mut sets = state.registry.subscribe();
    let known = sets.borrow_and_update().clone();
    let controller = Controller {
        state: Arc::downgrade(state),
        kind: kind.clone(),
        known,
        names: HashMap::new(),
        failed: BTreeSet::new(),
    };
    coracle_threads::spawn(controller.run(sets));
}

struct Controller {
    state: Weak<State>,
    /// The kind of policies.
    kind: Arc<Resource>,
    /// The resources with which policies were checked.
    known: Arc<Resources>,
    /// The resources and parameters that each policy names, by policy.
    names: HashMap<String, Names>,
    /// The policies whose status could not be written, by name.
    failed: BTreeSet<String>,
}

// === impl Controller ===

impl Controller {
    async fn run(mut self, mut sets: Receiver<Arc<Resources>>) {
        let Some(shutdown) = self.state.upgrade().map(|state| state.shutdown.clone()) else { return };
        while let Some(mut events) = self.load().await {
            loop {
                // Cancel-safe: a dropped branch loses no event.
                tokio::select! {
                    event = events.recv() => match event {
                        Some(event) => self.apply(event).await,
                        // The watcher was too slow, or the server ends.
                        None => break,
                    },
                    changed = sets.changed() => {
                        if changed.is_err() {
                            return;
                        }
                        let set = sets.borrow_and_update().clone();
                        self.recheck(set).await;
                    }
                    () = tokio::time::sleep(RETRY), if !self.failed.is_empty() => {
                        for name in std::mem::take(&mut self.failed) {
                            self.check(&name).await;
                        }
                    }
                    () = shutdown.cancelled() => return,
                }
            }
        }
    }

    /// Checks all policies with a new generation. Returns the later changes; None when the server ends.
    async fn load(&mut self) -> Option<Events> {
        let state = self.state.upgrade().filter(|state| !state.shutdown.is_cancelled())?;
        let scope = Scope { prefix: prefix_of(&self.kind, ""), ..Scope::default() };
        let (watcher, events) = Watcher::new(scope, false);
        let collection = state.cache.of(&self.kind).ok()?;
        let policies = collection.lock().watch_from_now(watcher, state.cache.revision());
        drop((state, collection));
        self.names.clear();
        for policy in policies {
            self.observe(&policy).await;
        }
        Some(events)
    }

    async fn apply(&mut self, event: Event) {
        match event {
            Event::Added(policy) | Event::Modified(policy) => self.observe(&policy).await,
            Event::Deleted(policy) => {
                self.names.remove(policy.name());
            }
            Event::Bookmark(_) | Event::InitialEnd(_) => {}
        }
    }

    async fn observe(&mut self, policy: &Object) {
        let value = policy.value();
        self.names.insert(policy.name().to_owned(), Names::read(&value["spec"]));
        if !is_observed(&value) {
            self.check(policy.name()).await;
        }
    }

    /// Checks the policies that name a resource which is new or has changed.
    async fn recheck(&mut self, set: Arc<Resources>) {
        let changed = matched::changed(&self.known, &set);
        self.known = set;
        let names = self.names.iter().filter(|(_, names)| names.include_any(&changed));
        let names: Vec<String> = names.map(|(name, _)| name.clone()).collect();
        for name in names {
            self.check(&name).await;
        }
    }

    /// Checks a policy and writes its status. After an error of the store, a later attempt follows.
    async fn check(&mut self, name: &str) {
        let Some(state) = self.state.upgrade() else { return };
        let Err(error) = check(&state, &self.kind, name).await else { return };
        tracing::warn!(policy = name, error = %error, "cannot write the status of a policy");
        if error.code >= 500 {
            self.failed.insert(name.to_owned());
        }
    }
}

/// Whether the status is about the current specification.
fn is_observed(policy: &Value) -> bool {
    policy["metadata"]["generation"] == policy["status"]["observedGeneration"]
}

async fn check(state: &Arc<State>, kind: &Arc<Resource>, name: &str) -> Result<()> {
    let Some(policy) = state.cache.get(kind, "", name).map(|object| object.value()) else { return Ok(()) };
    let generation = policy["metadata"]["generation"].clone();
    let matched = Matched::find(&state.registry.load(), &policy["spec"]);
    // Large schemas and many expressions may take long, so the check is off the async workers.
    let checked = tokio::task::spawn_blocking(move || {
        let (kinds, params) = matched.types();
        check_types(&policy["spec"], kinds, params.as_ref())
    });
    let warnings = checked.await.map_err(ApiError::internal)?;
    let mut call = Call::internal(state, kind.clone(), &Value::Null);
    call.resource.subresource = "status".to_owned();
    call.info.query = Query::parse("fieldManager=validatingadmissionpolicy-status");
    let written = write::update(&call, name, Part::Status, Writer::Update, |old| {
        // The check is for one generation only. A newer generation causes an event and another check.
        let is_current = old["metadata"]["generation"] == generation;
        Ok(if is_current { with_status(old, &generation, &warnings) } else { old.clone() })
    });
    match written.await {
        Ok(_) | Err(ApiError { code: 404 | 409, .. }) => Ok(()),
        Err(error) => Err(error),
    }
}

/// The policy with the result of a check. Conditions stay.
fn with_status(policy: &Value, generation: &Value, warnings: &[ExpressionWarning]) -> Value {
    let entry = |warning: &ExpressionWarning| json!({"fieldRef": warning.field, "warning": warning.warning});
    let mut checking = json!({});
    if !warnings.is_empty() {
        checking["expressionWarnings"] = warnings.iter().map(entry).collect();
    }
    let mut new = policy.clone();
    if !new["status"].is_object() {
        new["status"] = json!({});
    }
    new["status"]["observedGeneration"] = generation.clone();
    new["status"]["typeChecking"] = checking;
    new
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_check_without_warnings_writes_an_empty_object() {
        let policy = json!({"metadata": {"generation": 2}, "status": {"observedGeneration": 1, "conditions": [],
            "typeChecking": {"expressionWarnings": [{"fieldRef": "a", "warning": "b"}]}}});
        assert!(!is_observed(&policy));
        let checked = with_status(&policy, &2.into(), &[]);
        assert_eq!(checked["status"], json!({"observedGeneration": 2, "conditions": [], "typeChecking": {}}));
        assert!(is_observed(&checked));
        let warning = ExpressionWarning { field: "f".to_owned(), warning: "w".to_owned() };
        let warned = with_status(&json!({"metadata": {"generation": 1}}), &1.into(), &[warning]);
        let expect = json!({"expressionWarnings": [{"fieldRef": "f", "warning": "w"}]});
        assert_eq!(warned["status"], json!({"observedGeneration": 1, "typeChecking": expect}));
    }
}

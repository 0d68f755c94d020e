//! Watches the APIServices. A worker for each aggregated server checks that the server responds. The condition
//! `Available` is written when it changes. Source: `kube-aggregator/pkg/controllers/status`.
//!
//! | part | module |
//! |---|---|
//! | watches the service of one APIService, and decides when to check the server | `worker` |
//! | makes one check, and writes the condition | `check` |
//!
//! Changes of Services and EndpointSlices cause work here only if an APIService refers to the Service.

mod check;
mod worker;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Weak},
    time::Duration,
};

use coracle_kinds::{Resource, kind::by_resource};
use serde_json::{Value, json};
use tokio::sync::watch;

use super::api_services;
use crate::{
    aggregation::Remote,
    cache::{Events, Scope, Watcher, prefix_of},
    state::State,
};

/// Delay until the next attempt to write the condition of a local APIService, or to read the stored APIServices.
const RETRY: Duration = Duration::from_secs(5);

/// Starts two tasks: one registers the group versions of this server, the other checks the aggregated servers.
pub(crate) fn start(state: &Arc<State>) {
    let Some(kind) = by_resource("apiregistration.k8s.io", "v1", "apiservices").cloned() else { return };
    coracle_threads::spawn(api_services::run(Arc::downgrade(state), kind.clone()));
    let controller =
        Controller { state: Arc::downgrade(state), kind, workers: BTreeMap::new(), failed: BTreeSet::new() };
    coracle_threads::spawn(controller.run());
}

struct Controller {
    state: Weak<State>,
    /// The kind APIService.
    kind: Arc<Resource>,
    /// Worker of each APIService, by the name of the APIService.
    workers: BTreeMap<String, WorkerHandle>,
    /// Names of the local APIServices whose condition could not be written. The controller retries them.
    failed: BTreeSet<String>,
}

/// The handle of a worker. The worker ends when the handle is dropped.
struct WorkerHandle {
    /// Uid and spec of the APIService. Other changes, such as a new condition, cause no check.
    checked: Value,
    remote: watch::Sender<Arc<Remote>>,
}

// === impl Controller ===

impl Controller {
    async fn run(mut self) {
        let Some(shutdown) = self.state.upgrade().map(|state| state.shutdown.clone()) else { return };
        while let Some(mut events) = self.load().await {
            loop {
                // Cancel-safe: a dropped branch loses no event.
                tokio::select! {
                    event = events.recv() => match event {
                        Some(event) => {
                            if let Some(object) = event.object() {
                                self.reconcile(object.name()).await;
                            }
                        }
                        // The watcher was too slow, or the server ends.
                        None => break,
                    },
                    () = tokio::time::sleep(RETRY), if !self.failed.is_empty() => {
                        for name in std::mem::take(&mut self.failed) {
                            self.reconcile(&name).await;
                        }
                    }
                    () = shutdown.cancelled() => return,
                }
            }
        }
    }

    /// Reconciles all APIServices. Returns a watch of later changes. `None` when the server ends.
    async fn load(&mut self) -> Option<Events> {
        let (objects, events) = loop {
            let state = self.state.upgrade().filter(|state| !state.shutdown.is_cancelled())?;
            let scope = Scope { prefix: prefix_of(&self.kind, ""), ..Scope::default() };
            let (watcher, events) = Watcher::new(scope, false);
            match state.cache.of(&self.kind) {
                Ok(collection) => {
                    let objects = collection.lock().watch_from_now(watcher, state.cache.revision());
                    break (objects, events);
                }
                // The stored APIServices cannot be decrypted yet.
                Err(error) if error.code >= 500 => {}
                Err(_not_served) => return None,
            }
            let shutdown = state.shutdown.clone();
            drop(state);
            // The result is not needed: the next round of the loop first checks whether the server ends.
            let _ = tokio::time::timeout(RETRY, shutdown.cancelled()).await;
        };
        let mut names: BTreeSet<String> = objects.iter().map(|object| object.name().to_owned()).collect();
        // Before the watch began, an APIService may have been deleted.
        names.extend(self.workers.keys().cloned());
        for name in names {
            self.reconcile(&name).await;
        }
        Some(events)
    }

    /// Starts, changes or ends the worker of an APIService. A local APIService is always available.
    async fn reconcile(&mut self, name: &str) {
        let Some(state) = self.state.upgrade() else { return };
        let object = state.cache.get(&self.kind, "", name).map(|object| object.value());
        let Some(object) = object else { return self.end(&state, name) };
        if !object["spec"]["service"].is_null() {
            return self.check(&state, name, &object);
        }
        self.end(&state, name);
        let written = check::write(&state, &self.kind, &object, &check::local()).await;
        if let Err(error) = written {
            tracing::warn!(name, error = %error, "cannot write the status of an APIService");
            if error.code >= 500 {
                self.failed.insert(name.to_owned());
            }
        }
    }

    /// Starts the worker of a new APIService. Sends a changed spec to the running worker. Other changes have no effect.
    fn check(&mut self, state: &Arc<State>, name: &str, object: &Value) {
        let checked = json!([object["metadata"]["uid"], object["spec"]]);
        let known = self.workers.get_mut(name);
        if known.as_ref().is_some_and(|known| known.checked == checked) {
            return;
        }
        let remote = Remote::read(&state.front_proxy, object);
        match known {
            Some(known) => {
                let former = known.remote.borrow().clone();
                known.remote.send_replace(Arc::new(remote.after(&former)));
                known.checked = checked;
            }
            None => {
                let (sender, remotes) = watch::channel(Arc::new(remote));
                coracle_threads::spawn(worker::run(self.state.clone(), self.kind.clone(), remotes));
                self.workers.insert(name.to_owned(), WorkerHandle { checked, remote: sender });
            }
        }
        self.publish(state);
    }

    /// Ends the worker of an APIService, if there is one.
    fn end(&mut self, state: &State, name: &str) {
        if self.workers.remove(name).is_some() {
            state.metrics.remotes.forget(name, &check::REASONS);
            self.publish(state);
        }
    }

    /// Publishes the servers for requests and documents.
    fn publish(&self, state: &State) {
        let remotes = self.workers.values().map(|worker| worker.remote.borrow().clone());
        let keyed = remotes.map(|remote| ((remote.group.clone(), remote.version.clone()), remote));
        state.remotes.replace(keyed.collect());
    }
}

//! The config maps and secrets that pods use: one watch for each object. All users of an object share its
//! watch, which ends with the last user.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};

use coracle_error_chain::chain;
use coracle_watch::watch_object;
use futures::StreamExt;
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kube::{Api, Client};
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;

use super::error::SetUpError;
use super::lock;
use super::payload::{Data, Kind, config_map_data, secret_data};
use crate::config_cache::{Config, ConfigCache};

/// All watched objects.
pub(super) struct Objects {
    client: Client,
    configs: ConfigCache,
    watched: Mutex<HashMap<Key, Weak<Object>>>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Key {
    kind: Kind,
    namespace: String,
    name: String,
}

/// A watched object. The watch ends with the last reference.
#[derive(Debug)]
pub(super) struct Object {
    key: Key,
    state: watch::Receiver<State>,
    _watch: AbortOnDropHandle<()>,
}

#[derive(Clone, Debug)]
enum State {
    Asked,
    Known(Option<Arc<Data>>),
    Failed(String),
}

// === impl Objects ===

impl Objects {
    pub(super) fn new(client: Client, configs: ConfigCache) -> Objects {
        Objects { client, configs, watched: Mutex::default() }
    }

    /// The object, with its watch. Starts the watch unless it runs.
    pub(super) fn get(&self, kind: Kind, namespace: &str, name: &str) -> Arc<Object> {
        let key = Key { kind, namespace: namespace.to_owned(), name: name.to_owned() };
        let mut watched = lock(&self.watched);
        if let Some(object) = watched.get(&key).and_then(Weak::upgrade).filter(|object| !object.has_failed())
        {
            return object;
        }
        watched.retain(|_, object| object.strong_count() > 0);
        let object = Arc::new(self.start(key.clone()));
        watched.insert(key, Arc::downgrade(&object));
        object
    }

    fn start(&self, key: Key) -> Object {
        let (publish, state) = watch::channel(State::Asked);
        let (client, configs, of) = (self.client.clone(), self.configs.clone(), key.clone());
        let task = async move {
            match of.kind {
                Kind::ConfigMap => {
                    let first = configs.get::<ConfigMap>(&of.namespace, &of.name).await;
                    publish.send_replace(to_state(first, config_map_data));
                    follow::<ConfigMap>(client, &of, &configs, &publish, config_map_data).await;
                }
                Kind::Secret => {
                    let first = configs.get::<Secret>(&of.namespace, &of.name).await;
                    publish.send_replace(to_state(first, secret_data));
                    follow::<Secret>(client, &of, &configs, &publish, secret_data).await;
                }
            }
        };
        Object { key, state, _watch: AbortOnDropHandle::new(coracle_threads::spawn(task)) }
    }
}

fn to_state<K, E: std::error::Error>(found: Result<Option<K>, E>, data: fn(K) -> Data) -> State {
    match found {
        Ok(found) => State::Known(found.map(|object| Arc::new(data(object)))),
        Err(error) => State::Failed(chain(&error)),
    }
}

async fn follow<K: Config + Send + 'static>(
    client: Client,
    key: &Key,
    configs: &ConfigCache,
    publish: &watch::Sender<State>,
    data: fn(K) -> Data,
) {
    let api: Api<K> = Api::namespaced(client, &key.namespace);
    let mut changes = watch_object(api, &key.name);
    while let Some(change) = changes.next().await {
        match change {
            Ok(found) => {
                configs.store(&key.namespace, &key.name, found.as_ref());
                let found = found.map(|object| Arc::new(data(object)));
                publish.send_if_modified(|state| state.update(found));
            }
            // The known data stays valid; the watch restarts with its back-off.
            Err(error) => tracing::debug!(error = chain(&error), ?key, "the watch of an object failed"),
        }
    }
}

// === impl State ===

impl State {
    /// Stores the data. Returns whether it differs from the stored data.
    fn update(&mut self, found: Option<Arc<Data>>) -> bool {
        if matches!(self, State::Known(known) if *known == found) {
            return false;
        }
        *self = State::Known(found);
        true
    }
}

// === impl Object ===

impl Object {
    /// The object's data, as soon as it is known; `None` if there is no such object.
    pub(super) async fn data(&self) -> Result<Option<Arc<Data>>, SetUpError> {
        let mut state = self.state.clone();
        let known = state.wait_for(|state| !matches!(state, State::Asked)).await;
        match known.as_deref() {
            Ok(State::Known(data)) => Ok(data.clone()),
            Ok(State::Failed(reason)) => Err(self.failed(reason.clone())),
            Ok(State::Asked) | Err(_) => Err(self.failed("the agent is stopping".to_owned())),
        }
    }

    /// Wakes when the data changed after this call.
    pub(super) fn changes(&self) -> impl Future<Output = ()> + Send + use<> {
        let mut state = self.state.clone();
        state.mark_unchanged();
        async move {
            if state.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }

    fn has_failed(&self) -> bool {
        matches!(*self.state.borrow(), State::Failed(_))
    }

    fn failed(&self, reason: String) -> SetUpError {
        SetUpError::Unavailable { kind: self.key.kind.name(), name: self.key.name.clone(), reason }
    }
}

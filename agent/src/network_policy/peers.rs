//! Watches of the objects that policies refer to: namespaces, pods and nodes.

use std::borrow::Borrow;
use std::collections::HashSet;
use std::hash::Hash;

use coracle_error_chain::chain;
use coracle_watch::{Config, Error, Event};
use futures::stream::{BoxStream, StreamExt};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::{Api, Client};

use super::NetworkPolicies;
use crate::namespace_watch::{NamespaceEvent, NamespaceWatch, Need};

/// Maximum events of one watch that one transaction covers.
const EVENTS_MAX: usize = 512;
/// Maximum characters of the error of a list in messages about pods.
const FAILURE_MAX: usize = 512;

/// An event of a watch, or why a request failed.
pub(super) type Received<K> = Result<Event<K>, Error>;
/// The events of a watch, in batches. A batch has the events that are ready.
pub(super) type Events<K> = BoxStream<'static, Vec<Received<K>>>;

/// Objects of a list that is being received.
#[derive(Debug)]
pub(super) struct Listing<K> {
    pub(super) listed: HashSet<K>,
    /// Whether the list was complete once.
    pub(super) is_complete: bool,
    /// The reason why requests for the first list failed. None after the first list, or if no request has failed.
    failure: Option<String>,
}

/// The watch of pods, and the events of the shared watch of namespaces.
pub(super) struct Peers {
    pub(super) pods: Events<Pod>,
    pub(super) namespaces: BoxStream<'static, Vec<NamespaceEvent>>,
    pub(super) listed_pods: Listing<String>,
    listed_namespaces: Listing<String>,
}

/// The watch of nodes.
pub(super) struct Nodes {
    pub(super) events: Events<Node>,
    listed: Listing<String>,
}

/// A change of an object with a name.
enum Change<K> {
    Put(String, K),
    Remove(String),
}

// === impl Listing ===

impl<K> Default for Listing<K> {
    fn default() -> Self {
        Self { listed: HashSet::new(), is_complete: false, failure: None }
    }
}

impl<K> Listing<K> {
    /// The event, if the request succeeded. Records the failure of a request for the first list.
    pub(super) fn receive<T, E: Borrow<Error>>(
        &mut self,
        event: Result<Event<T>, E>,
        kind: &'static str,
    ) -> Option<Event<T>> {
        let record = |error: &E| {
            let error: &Error = error.borrow();
            tracing::debug!(error = chain(error), kind, "a watch failed");
            if !self.is_complete {
                set_failure(&mut self.failure, kind, error);
            }
        };
        event.inspect_err(record).ok()
    }

    /// The reason why the first list is not complete, if a request for it failed.
    pub(super) fn failure(&self) -> Option<&str> {
        self.failure.as_deref()
    }
}

impl<K: Hash + Eq> Listing<K> {
    /// Ends the list. Returns its objects.
    pub(super) fn complete(&mut self) -> HashSet<K> {
        self.is_complete = true;
        self.failure = None;
        std::mem::take(&mut self.listed)
    }
}

impl Listing<String> {
    /// Converts an event to changes of objects. `known` has the names before the event.
    fn changes<'a, K: kube::Resource>(
        &mut self,
        event: Event<K>,
        known: impl Iterator<Item = &'a str>,
    ) -> Vec<Change<K>> {
        let name = |object: &K| object.meta().name.clone().unwrap_or_default();
        match event {
            Event::Init => {
                self.listed.clear();
                Vec::new()
            }
            Event::InitApply(object) => {
                self.listed.insert(name(&object));
                vec![Change::Put(name(&object), object)]
            }
            Event::Apply(object) => vec![Change::Put(name(&object), object)],
            Event::InitDone => {
                let listed = self.complete();
                let absent = known.filter(|name| !listed.contains(*name));
                absent.map(|name| Change::Remove(name.to_owned())).collect()
            }
            Event::Delete(object) => vec![Change::Remove(name(&object))],
        }
    }
}

// === impl Peers ===

impl Peers {
    pub(super) fn watch(client: &Client, namespaces: &NamespaceWatch) -> Self {
        Self {
            pods: watch(client),
            namespaces: namespaces.follow(Need::Required).ready_chunks(EVENTS_MAX).boxed(),
            listed_pods: Listing::default(),
            listed_namespaces: Listing::default(),
        }
    }

    pub(super) fn are_complete(&self) -> bool {
        self.listed_pods.is_complete && self.listed_namespaces.is_complete
    }

    /// The reason why a list is not complete, if a request for it failed.
    pub(super) fn failure(&self) -> Option<&str> {
        self.listed_pods.failure().or_else(|| self.listed_namespaces.failure())
    }
}

// === impl Nodes ===

impl Nodes {
    /// The reason why the list is not complete, if a request for it failed.
    pub(super) fn failure(&self) -> Option<&str> {
        self.listed.failure()
    }
}

// === impl NetworkPolicies ===

impl NetworkPolicies {
    pub(super) fn apply_namespace_events(&mut self, events: Vec<NamespaceEvent>) {
        let Some(peers) = &mut self.peers else { return };
        self.record.change();
        let mut model = self.model.lock();
        for event in events {
            let Some(event) = peers.listed_namespaces.receive(event, "namespaces") else { continue };
            let known = model.namespaces().map(String::as_str);
            for change in peers.listed_namespaces.changes(event, known) {
                match change {
                    Change::Put(name, namespace) => {
                        model.put_namespace(&name, namespace.metadata.labels.unwrap_or_default());
                    }
                    Change::Remove(name) => model.remove_namespace(&name),
                }
            }
        }
    }

    pub(super) fn apply_node_events(&mut self, events: Vec<Received<Node>>) {
        let Some(nodes) = &mut self.nodes else { return };
        let mut model = self.model.lock();
        for event in events {
            let Some(event) = nodes.listed.receive(event, "nodes") else { continue };
            for change in nodes.listed.changes(event, model.nodes()) {
                match change {
                    Change::Put(_, node) => model.put_node(&node),
                    Change::Remove(name) => model.remove_node(&name),
                }
            }
        }
    }

    /// Watches nodes while policies have nodes as peers. Returns whether all nodes that the policies need are known.
    pub(super) fn follow_nodes(&mut self) -> bool {
        let are_needed = self.model.lock().needs_nodes();
        match (&self.nodes, are_needed) {
            (Some(nodes), true) => nodes.listed.is_complete,
            (None, true) => {
                self.nodes = Some(Nodes { events: watch(&self.client), listed: Listing::default() });
                false
            }
            (None, false) => true,
            (Some(_), false) => {
                self.nodes = None;
                let mut model = self.model.lock();
                let names: Vec<String> = model.nodes().map(str::to_owned).collect();
                names.iter().for_each(|name| model.remove_node(name));
                true
            }
        }
    }
}

/// The events of all objects of a kind. Failed requests are retried with back-off.
pub(super) fn watch<K>(client: &Client) -> Events<K>
where
    K: kube::Resource<DynamicType = ()> + serde::de::DeserializeOwned + Send + 'static,
{
    watch_with(Api::<K>::all(client.clone()), Config::default())
}

/// Like [`watch`], with a given API and configuration.
pub(super) fn watch_with<K>(api: Api<K>, config: Config) -> Events<K>
where
    K: kube::Resource + serde::de::DeserializeOwned + Send + 'static,
{
    coracle_watch::watch(api, config).ready_chunks(EVENTS_MAX).boxed()
}

/// The next item of a stream. Waits forever if there is no stream.
pub(super) async fn next<T>(stream: Option<&mut BoxStream<'static, T>>) -> Option<T> {
    match stream {
        Some(stream) => stream.next().await,
        None => std::future::pending().await,
    }
}

/// Records why the objects of a kind were not listed. The first failure is logged.
pub(super) fn set_failure(failure: &mut Option<String>, kind: &str, error: &Error) {
    // The text of the client's error has all fields of the response, so only the message and the code are used.
    let text = match error.status() {
        Some(status) => format!("{} (HTTP status {})", status.message, status.code),
        None => chain(error),
    };
    let text: String = text.chars().take(FAILURE_MAX).collect();
    if failure.is_none() {
        tracing::warn!(error = text, kind, "cannot list objects that network policies need, retrying");
    }
    *failure = Some(format!("cannot list {kind}: {text}"));
}

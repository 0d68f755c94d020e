//! Runs the enforcement of network policies: watches policies, and pods and namespaces while there are policies.
//!
//! The table is replaced after the first complete lists, after a change by another process and after a failed
//! transaction. Any other change commits only its difference. Until the first replacement, the table of the previous
//! run stays as it is. Containers of a pod start after its policies are in the kernel, see
//! [`PolicyGate`](policy_gate::PolicyGate). If the API server does not answer, containers start in pods whose policies
//! are in the table of the previous run. Without such a table, as after a boot, the stored policies are enforced.

mod admission;
mod checks;
mod cluster;
mod peers;
mod stored;

use std::path::PathBuf;

use coracle_error_chain::chain;
use coracle_network_policy::{Effect, Enforcer, Model, OwnNode, PodFacts};
use coracle_nft::{Monitor, TableError};
use coracle_values::object::Key;
use coracle_watch::Event;
use futures::stream::StreamExt;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::networking::v1::NetworkPolicy;
use kube::Client;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::deadline::until;
use crate::event_recorder::Recorder;
use crate::namespace_watch::NamespaceWatch;
use crate::pod::NodeContext;
use crate::policy_gate::{self, GateEnd, Request};
use crate::repair::RepairBackoff;
use admission::Admitted;
use checks::{Checks, SharedModel};
use cluster::{ClusterPolicies, ClusterPolicyEvents};
use peers::{Events, Listing, Nodes, Peers, Received, next, watch};
use stored::{Earlier, PolicyRecord, StoredPolicies};

/// The task that keeps the table of policies.
pub(crate) struct NetworkPolicies {
    client: Client,
    namespaces: NamespaceWatch,
    node_name: String,
    /// The node, as its table filters packets to it.
    own_node: OwnNode,
    table: String,
    requests: mpsc::UnboundedReceiver<Request>,
    restricted: policy_gate::Restricted,
    model: SharedModel,
    admitted: Admitted,
    policies: Listing<Key>,
    cluster: ClusterPolicies,
    peers: Option<Peers>,
    /// The watch of the nodes. `None` unless policies have nodes as peers.
    nodes: Option<Nodes>,
    checks: Checks,
    record: PolicyRecord,
    /// The table of the previous run, while it is in force because the API server does not answer.
    earlier_table: Option<Table>,
    /// Whether the namespaces with policies may have changed since they were recorded.
    are_namespaces_new: bool,
}

/// The table, and the notifications of its changes.
struct Table {
    enforcer: Enforcer,
    monitor: Monitor,
}

// === impl NetworkPolicies ===

impl NetworkPolicies {
    /// The task of this node. It receives the requests of the [`PolicyGate`](policy_gate::PolicyGate).
    pub(crate) fn new(node: &NodeContext, table: &str, end: GateEnd) -> Self {
        let namespaces = node.services.namespaces().clone();
        let own =
            Self::with(node.configs.client(), node.recorder.clone(), &node.config.node_name, table, end);
        let dns = node.config.dns.as_ref().map(|dns| dns.addresses.clone()).unwrap_or_default();
        let own_node = OwnNode { dns, bridge: Some(node.config.bridge.clone()) };
        Self { namespaces, own_node, ..own }
    }

    fn with(client: &Client, recorder: Recorder, node_name: &str, table: &str, end: GateEnd) -> Self {
        let GateEnd { requests, restricted } = end;
        let model = SharedModel::default();
        Self {
            checks: Checks::new(model.clone()),
            record: PolicyRecord::beside(restricted.record()),
            cluster: ClusterPolicies::watch(client, recorder),
            client: client.clone(),
            namespaces: NamespaceWatch::new(client.clone()),
            node_name: node_name.to_owned(),
            own_node: OwnNode::default(),
            table: table.to_owned(),
            requests,
            restricted,
            model,
            admitted: Admitted::default(),
            policies: Listing::default(),
            peers: None,
            nodes: None,
            earlier_table: None,
            are_namespaces_new: true,
        }
    }

    /// Runs until dropped. Policies stay in force while the table exists, even after the agent has ended.
    pub(crate) async fn run(mut self) {
        let mut policies: Events<NetworkPolicy> = watch(&self.client);
        let mut table: Option<Table> = None;
        let mut backoff = RepairBackoff::default();
        let mut earlier = JoinSet::new();
        earlier.spawn(Earlier::find(self.record.path().to_owned(), self.table.clone()));
        // Time of the next attempt after a failure. Until then, events are received, because an event may remove the
        // cause.
        let mut retry: Option<Instant> = None;
        loop {
            if retry.is_none_or(|at| at <= Instant::now()) {
                retry = None;
                let committed = self.commit(&mut table).await;
                self.explain(committed.as_ref().err());
                if let Err(error) = committed {
                    tracing::warn!(error = chain(&error), "cannot enforce network policies, retrying");
                    table = None;
                    retry = Some(backoff.next_after_failure());
                }
            }
            let (pods, namespaces) = match &mut self.peers {
                Some(peers) => (Some(&mut peers.pods), Some(&mut peers.namespaces)),
                None => (None, None),
            };
            let nodes = self.nodes.as_mut().map(|nodes| &mut nodes.events);
            // Cancel-safe: streams and channels keep items that were not returned. A notification of a foreign change
            // may be lost, but the next replacement repairs that change.
            tokio::select! {
                Some(events) = policies.next() => self.apply_policy_events(events),
                Some(events) = next(pods) => self.apply_pod_events(events),
                Some(events) = next(namespaces) => self.apply_namespace_events(events),
                Some(events) = next(nodes) => self.apply_node_events(events),
                Some(events) = self.cluster.next() => self.apply_cluster_events(events),
                Some(request) = self.requests.recv() => self.serve(request),
                () = until(retry) => {}
                () = self.checks.next() => {}
                () = self.record.is_due() => self.write_record(),
                Some(Ok(Some(found))) = earlier.join_next() => self.use_earlier(found),
                () = foreign_change(self.earlier_table.as_mut(), &self.table) => {
                    // If the table was removed, the stored policies are used next.
                    self.earlier_table = None;
                    earlier.spawn(Earlier::find(self.record.path().to_owned(), self.table.clone()));
                }
                () = foreign_change(table.as_mut(), &self.table) => {
                    table = None;
                    backoff.before_repair().await;
                }
            }
        }
    }

    /// Writes the model to the kernel, and answers the requests of pods whose policies are in the kernel then.
    async fn commit(&mut self, table: &mut Option<Table>) -> Result<(), TableError> {
        if !self.policies.is_complete || !self.cluster.are_complete() {
            return match self.record.is_used() {
                true => self.commit_stored(table).await,
                false => self.admit_by_earlier_table(),
            };
        }
        if self.record.end_use() {
            // The table is replaced, so that all connections are checked. The stored policies may have allowed some of
            // them.
            *table = None;
            self.admitted.is_settled = false;
        }
        self.earlier_table = None;
        // The namespaces are recorded before their policies are in the kernel, because their pods must wait for the
        // policies.
        self.record_restricted().await;
        if self.model.lock().is_empty() {
            if table.take().is_some() || self.peers.is_some() || !self.admitted.is_settled {
                Enforcer::open(&self.table)?.remove()?;
            }
            (self.peers, self.nodes) = (None, None);
            *self.model.lock() = Model::default();
            self.admitted.answer(|_| true);
            return Ok(());
        }
        let peers = match &mut self.peers {
            Some(peers) => peers,
            none => {
                // Pods of this node are restricted before the list of all pods is complete.
                self.admitted.facts().for_each(|facts| self.model.lock().put_pod(facts));
                none.insert(Peers::watch(&self.client, &self.namespaces))
            }
        };
        let are_peers_complete = peers.are_complete();
        if !self.follow_nodes() || !are_peers_complete {
            return Ok(());
        }
        let effect = self.write_table(table).await?;
        self.admitted.answer(|namespace| self.model.lock().has_all_policies_of(namespace));
        self.checks.begin(effect);
        Ok(())
    }

    /// Sets the cause that is shown for pods that wait for their policies: the error of the kernel, or of a failed
    /// list.
    fn explain(&self, error: Option<&TableError>) {
        let error =
            error.map(|error| format!("cannot change the table of network policies: {}", chain(error)));
        self.restricted.explain(error.or_else(|| self.list_failure().map(str::to_owned)));
    }

    /// The reason why a list that pods wait for is not complete, if a request for it failed.
    fn list_failure(&self) -> Option<&str> {
        let policies = self.policies.failure().or_else(|| self.cluster.failure());
        let peers = || self.peers.as_ref().and_then(Peers::failure);
        let nodes = || self.nodes.as_ref().and_then(Nodes::failure);
        policies.or_else(peers).or_else(nodes)
    }

    /// Writes the changes of the model to the table, or replaces the table. Returns the effect of the changes. `None`
    /// after a replacement.
    async fn write_table(&mut self, table: &mut Option<Table>) -> Result<Option<Effect>, TableError> {
        if table.as_ref().is_some_and(|table| table.enforcer.must_replace(&self.model.lock())) {
            *table = None;
        }
        if let Some(table) = table {
            return table.enforcer.change(&mut self.model.lock()).map(Some);
        }
        let enforcer = Enforcer::open(&self.table)?.at(self.own_node.clone());
        let mut enforcer = replace(enforcer, self.model.clone()).await?;
        // The monitor is opened after the replacement, because the notifications of the replacement may exceed its
        // buffer.
        let monitor = Monitor::open().map_err(TableError::Socket)?;
        if !enforcer.is_intact()? {
            return Err(TableError::Changed { table: self.table.clone() });
        }
        *table = Some(Table { enforcer, monitor });
        Ok(None)
    }

    /// Writes the stored policies to the kernel, and answers the requests of pods in their namespaces.
    async fn commit_stored(&mut self, table: &mut Option<Table>) -> Result<(), TableError> {
        // A list of policies of the whole cluster may have begun. Then no pod's policies are known completely.
        let is_tiered = self.model.lock().is_tiered();
        for mut facts in self.admitted.facts() {
            // Pods of namespaces without stored policies only serve as peers of rules.
            facts.are_policies_known = !is_tiered && self.record.has(facts.namespace());
            self.model.lock().put_pod(facts);
        }
        self.write_table(table).await?;
        self.admitted.answer(|namespace| !is_tiered && self.record.has(namespace));
        Ok(())
    }

    /// Answers the requests of pods whose policies are in the table of the previous run.
    fn admit_by_earlier_table(&mut self) -> Result<(), TableError> {
        // Listed policies may be newer than the table.
        let is_current = !self.policies.is_complete && !self.model.lock().is_tiered();
        let Some(table) = self.earlier_table.as_mut().filter(|_| is_current) else { return Ok(()) };
        self.admitted.answer_enforced(|facts| table.enforcer.enforces(&facts.uid, &facts.ips))
    }

    /// Uses the policies of the previous run if the API server has not listed the policies yet.
    fn use_earlier(&mut self, earlier: Earlier) {
        // Policies of the whole cluster are not stored, and need the labels of namespaces.
        if self.policies.is_complete || self.restricted.has(policy_gate::EVERY_NAMESPACE) {
            return;
        }
        match earlier {
            Earlier::Table(enforcer) => match Monitor::open() {
                Ok(monitor) => {
                    tracing::info!("the API server does not answer, keeping the table of network policies");
                    self.earlier_table = Some(Table { enforcer, monitor });
                }
                Err(error) => {
                    let error = &error as &dyn std::error::Error;
                    tracing::warn!(
                        error,
                        "cannot monitor the table of network policies, pods wait for the API server"
                    );
                }
            },
            Earlier::Stored(stored) => self.use_stored(stored),
        }
    }

    fn use_stored(&mut self, stored: StoredPolicies) {
        tracing::info!("the API server does not answer, enforcing the stored network policies");
        self.record.use_stored(stored, &mut self.model.lock());
    }

    /// Writes the record of the policies, after the first lists. Before these lists, not all pods and namespaces are
    /// known.
    fn write_record(&mut self) {
        let are_policies_complete = self.policies.is_complete && self.cluster.are_complete();
        let are_peers_complete = match &self.peers {
            Some(peers) => peers.are_complete(),
            None => self.model.lock().is_empty(),
        };
        let content = match are_policies_complete && are_peers_complete {
            true => self.record.content(&self.model.lock()),
            false => return self.record.cancel(),
        };
        self.record.write(content);
    }

    /// Records the namespaces with policies, if they may have changed. A failed write is repeated later.
    async fn record_restricted(&mut self) {
        if !std::mem::take(&mut self.are_namespaces_new) {
            return self.restricted.retry().await;
        }
        let mut restricted = self.model.lock().restricted_namespaces();
        restricted.extend(self.model.lock().is_tiered().then(|| policy_gate::EVERY_NAMESPACE.to_owned()));
        self.restricted.set(restricted).await;
    }

    fn serve(&mut self, request: Request) {
        match request {
            Request::Admit { facts, done } => {
                let facts = self.admitted.add(facts, done);
                self.record.change();
                if self.peers.is_some() {
                    self.model.lock().put_pod(facts);
                }
            }
            // The object of a pod without sandbox may exist for days, while another pod gets its address.
            Request::Release { uid } => {
                self.admitted.remove(&uid);
                self.model.lock().remove_pod(&uid);
                self.record.change();
            }
        }
    }

    fn apply_policy_events(&mut self, events: Vec<Received<NetworkPolicy>>) {
        let mut model = self.model.lock();
        for event in events {
            let Some(event) = self.policies.receive(event, "networkpolicies") else { continue };
            match event {
                Event::Init => self.policies.listed.clear(),
                Event::InitApply(policy) => {
                    let key = Key::of(&policy.metadata);
                    self.record.put(&policy);
                    self.are_namespaces_new |=
                        changes_restriction(&mut model, &key.namespace, |model| model.put_policy(&policy));
                    self.policies.listed.insert(key);
                }
                Event::InitDone => {
                    self.are_namespaces_new = true;
                    let listed = self.policies.complete();
                    self.record.retain(|key| listed.contains(key));
                    let absent = model.policies().filter(|key| !listed.contains(key)).cloned();
                    absent.collect::<Vec<_>>().iter().for_each(|key| model.remove_policy(key));
                }
                Event::Apply(policy) => {
                    let key = Key::of(&policy.metadata);
                    self.record.put(&policy);
                    self.are_namespaces_new |=
                        changes_restriction(&mut model, &key.namespace, |model| model.put_policy(&policy));
                }
                Event::Delete(policy) => {
                    let key = Key::of(&policy.metadata);
                    self.record.remove(&key);
                    self.are_namespaces_new |=
                        changes_restriction(&mut model, &key.namespace, |model| model.remove_policy(&key));
                }
            }
        }
    }

    fn apply_cluster_events(&mut self, events: ClusterPolicyEvents) {
        let were_complete = self.cluster.are_complete();
        self.are_namespaces_new |= self.cluster.apply(events, &mut self.model.lock());
        if !were_complete && self.cluster.are_complete() {
            self.record.change();
        }
    }

    fn apply_pod_events(&mut self, events: Vec<Received<Pod>>) {
        for event in events {
            let event = match &mut self.peers {
                Some(peers) => peers.listed_pods.receive(event, "pods"),
                None => event.ok(),
            };
            let Some(event) = event else { continue };
            match event {
                Event::Init => self.pods_listing(|listing| listing.listed.clear()),
                Event::InitApply(pod) => {
                    let uid = pod.metadata.uid.clone().unwrap_or_default();
                    self.pods_listing(|listing| listing.listed.extend([uid]));
                    self.update_pod(&pod);
                }
                Event::InitDone => {
                    let listed = self.peers.as_mut().map(|peers| peers.listed_pods.complete());
                    let listed = listed.unwrap_or_default();
                    let is_absent = |uid: &&String| !listed.contains(*uid);
                    let absent: Vec<_> = self.model.lock().pods().filter(is_absent).cloned().collect();
                    absent.iter().for_each(|uid| self.remove_deleted_pod(uid));
                    self.record.change();
                }
                Event::Apply(pod) => self.update_pod(&pod),
                Event::Delete(pod) => self.remove_deleted_pod(&pod.metadata.uid.unwrap_or_default()),
            }
        }
    }

    fn pods_listing(&mut self, change: impl FnOnce(&mut Listing<String>)) {
        if let Some(peers) = &mut self.peers {
            change(&mut peers.listed_pods);
        }
    }

    /// Adds a pod or replaces its facts. A pod that has ended is removed, unless its sandbox on this node still
    /// exists.
    fn update_pod(&mut self, pod: &Pod) {
        let Some(mut facts) = PodFacts::of(pod, &self.node_name) else { return };
        let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
        if matches!(phase, Some("Succeeded" | "Failed")) && !self.admitted.has(&facts.uid) {
            self.model.lock().remove_pod(&facts.uid);
            return;
        }
        self.admitted.correct(&mut facts);
        self.model.lock().put_pod(facts);
    }

    /// Removes a pod whose object was deleted. If its sandbox on this node still exists, the pod is kept until its
    /// release.
    fn remove_deleted_pod(&mut self, uid: &str) {
        if !self.admitted.has(uid) {
            self.model.lock().remove_pod(uid);
        }
    }
}

/// Changes the policies of a namespace. Returns whether it is the namespace's first policy, or the removal of its last
/// policy.
fn changes_restriction(model: &mut Model, namespace: &str, change: impl FnOnce(&mut Model)) -> bool {
    let was_restricted = model.is_restricted(namespace);
    change(model);
    was_restricted != model.is_restricted(namespace)
}

/// Replaces the table on a thread that may block.
async fn replace(mut enforcer: Enforcer, model: SharedModel) -> Result<Enforcer, TableError> {
    let replace = move || enforcer.replace(&mut model.lock()).map(|()| enforcer);
    let replaced = coracle_threads::spawn_blocking(replace).await;
    replaced.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()))
}

/// Waits for a change by another process, or for a failure of the notifications. The table must then be replaced.
async fn foreign_change(table: Option<&mut Table>, name: &str) {
    let Some(table) = table else { return std::future::pending().await };
    let author = table.enforcer.author();
    match table.monitor.foreign_change(name, author).await {
        Ok(()) => tracing::info!(table = name, "another process has changed the table of network policies"),
        Err(error) => tracing::warn!(
            error = &error as &dyn std::error::Error,
            "notifications of firewall changes failed, replacing the table of network policies"
        ),
    }
}

/// Removes table and record of an earlier run, on a node whose policies another program enforces. Otherwise the
/// policies of the table would stay in force. The outdated record would decide which pods start when policies are
/// enabled again.
pub(crate) async fn remove(table: String, record: PathBuf) {
    let name = table.clone();
    let removed = coracle_threads::spawn_blocking(move || {
        if let Err(error) = coracle_tree::remove_file(&record) {
            tracing::warn!(%error, record = %record.display(), "cannot remove the record of network policies");
        }
        Enforcer::open(&name)?.remove()
    });
    let removed = removed.await.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()));
    if let Err(error) = removed {
        tracing::warn!(error = chain(&error), table, "cannot remove the table of network policies");
    }
}

/// The record of the namespaces with policies, below the node's state directory.
pub(crate) fn record(state_dir: &std::path::Path) -> PathBuf {
    state_dir.join("network-policies.json")
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;
    use std::time::Duration;

    use coracle_network_policy::{ClusterKind, ClusterPolicy};
    use coracle_testing::{eventually_async, in_new_namespace, in_new_namespace_async, until};
    use serde_json::json;

    use super::*;
    use crate::client;

    const TABLE: &str = "test-policies";
    const UID: &str = "0b5c1f2e-6d3a-4c1b-9a77-1f0e6c5d4b3a";

    /// A runtime whose threads are in the network namespace of this thread. Its time is paused. Functions that block
    /// run one after the other.
    fn paused_runtime() -> tokio::runtime::Runtime {
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        runtime.enable_all().start_paused(true).max_blocking_threads(1).build().unwrap()
    }

    /// A policy that selects all pods of the namespace `n`.
    fn policy() -> serde_json::Value {
        json!({"metadata": {"namespace": "n", "name": "p"}, "spec": {"podSelector": {}}})
    }

    /// The record of the policies of an earlier run, which had only [`policy`].
    fn stored() -> serde_json::Value {
        json!({"namespaces": {"n": {}}, "policies": [policy()]})
    }

    /// Writes the records of an earlier run. Returns the path of the record of the namespaces with policies.
    fn records_of_earlier_run(dir: &std::path::Path) -> PathBuf {
        let namespaces = record(dir);
        std::fs::write(&namespaces, r#"["n"]"#).unwrap();
        std::fs::write(PolicyRecord::beside(&namespaces).path(), stored().to_string()).unwrap();
        namespaces
    }

    /// Whether each pod starts while the API server does not answer. `namespaces` is the path of the record of the
    /// namespaces with policies.
    fn admitted(namespaces: &std::path::Path, pods: &[(Pod, IpAddr)]) -> Vec<bool> {
        paused_runtime().block_on(async {
            let client = client::silent();
            let (recorder, _events) = crate::event_recorder::channel(client.clone(), "here");
            let (gate, end) = policy_gate::gate("here", Some(namespaces));
            let policies = NetworkPolicies::with(&client, recorder, "here", TABLE, end.unwrap());
            let admit = async {
                let mut admitted = Vec::new();
                for (pod, ip) in pods {
                    admitted.push(gate.admit(pod, &[*ip]).await.is_ok());
                }
                admitted
            };
            tokio::select! {
                () = policies.run() => panic!("the task runs until it is dropped"),
                admitted = admit => admitted,
            }
        })
    }

    /// A pod of the namespace `n`.
    fn pod(uid: &str) -> Pod {
        serde_json::from_value(json!({"metadata": {"uid": uid, "namespace": "n"},
            "spec": {"nodeName": "here", "containers": []}}))
        .unwrap()
    }

    #[test]
    fn stored_policies_are_enforced_while_the_api_server_does_not_answer() {
        in_new_namespace(|| {
            let dir = tempfile::tempdir().unwrap();
            let namespaces = records_of_earlier_run(dir.path());
            assert_eq!(admitted(&namespaces, &[(pod("u"), IpAddr::from([10, 42, 0, 2]))]), [true]);
            assert!(Enforcer::open(TABLE).unwrap().is_intact().unwrap());
        });
    }

    /// The task while it uses the stored [`policy`], and a value that keeps its channels and directory.
    fn with_stored_policy() -> (NetworkPolicies, impl Sized) {
        let (client, dir) = (client::silent(), tempfile::tempdir().unwrap());
        let (recorder, events) = crate::event_recorder::channel(client.clone(), "here");
        let (gate, end) = policy_gate::gate("here", Some(&record(dir.path())));
        let mut policies = NetworkPolicies::with(&client, recorder, "here", TABLE, end.unwrap());
        policies.use_stored(serde_json::from_value(stored()).unwrap());
        (policies, (dir, events, gate))
    }

    #[test]
    fn the_table_of_stored_policies_is_replaced_or_removed_after_the_first_lists() {
        in_new_namespace(|| {
            // The runtime's threads are in the network namespace of this thread.
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let (mut policies, _held) = with_stored_policy();
                let mut table = None;
                policies.commit(&mut table).await.unwrap();
                assert!(table.is_some());
                let policy: NetworkPolicy = serde_json::from_value(policy()).unwrap();
                let listed = [Event::Init, Event::InitApply(policy.clone()), Event::InitDone];
                policies.apply_policy_events(listed.into_iter().map(Ok).collect());
                for kind in coracle_network_policy::ClusterKind::ALL {
                    let none = vec![Ok(Event::Init), Ok(Event::InitDone)];
                    let none = cluster::ClusterPolicyEvents::Definition(kind, none);
                    policies.cluster.apply(none, &mut policies.model.lock());
                }
                policies.commit(&mut table).await.unwrap();
                assert!(table.is_none(), "it is replaced when the pods are known");
                assert!(Enforcer::open(TABLE).unwrap().is_intact().unwrap(), "it is in force until then");
                policies.apply_policy_events(vec![Ok(Event::Delete(policy))]);
                policies.commit(&mut table).await.unwrap();
                assert!(!Enforcer::open(TABLE).unwrap().is_intact().unwrap());
            });
        });
    }

    #[test]
    fn pods_of_the_previous_table_start_while_the_api_server_does_not_answer() {
        const NEW: &str = "0b5c1f2e-6d3a-4c1b-9a77-1f0e6c5d4b3b";
        in_new_namespace(|| {
            let dir = tempfile::tempdir().unwrap();
            let namespaces = record(dir.path());
            std::fs::write(&namespaces, r#"["n"]"#).unwrap();
            let [first, second] = [2_u8, 3].map(|last| IpAddr::from([10, 42, 0, last]));
            let mut model = Model::default();
            model.put_policy(&serde_json::from_value(policy()).unwrap());
            let mut facts = PodFacts::of(&pod(UID), "here").unwrap();
            facts.ips = vec![first];
            model.put_pod(facts);
            let mut enforcer = Enforcer::open(TABLE).unwrap();
            enforcer.replace(&mut model).unwrap();
            let pods = [(pod(UID), first), (pod(NEW), second), (pod(NEW), first), (pod(UID), second)];
            assert_eq!(admitted(&namespaces, &pods), [true, false, false, false]);
            assert!(enforcer.enforces(UID, &[first]).unwrap(), "the table stays as it is");
            std::fs::write(&namespaces, r#"["n", "*"]"#).unwrap();
            assert_eq!(admitted(&namespaces, &[(pod(UID), first)]), [false], "policies of the whole cluster");
        });
    }

    #[test]
    fn stored_policies_follow_when_another_process_removes_the_previous_table() {
        in_new_namespace(|| {
            let dir = tempfile::tempdir().unwrap();
            let namespaces = records_of_earlier_run(dir.path());
            let ips = [IpAddr::from([10, 42, 0, 2])];
            let mut model = Model::default();
            model.put_policy(&serde_json::from_value(policy()).unwrap());
            let mut facts = PodFacts::of(&pod(UID), "here").unwrap();
            facts.ips = ips.to_vec();
            model.put_pod(facts);
            let mut other = Enforcer::open(TABLE).unwrap();
            other.replace(&mut model).unwrap();
            paused_runtime().block_on(async {
                let client = client::silent();
                let (recorder, _events) = crate::event_recorder::channel(client.clone(), "here");
                let (gate, end) = policy_gate::gate("here", Some(&namespaces));
                let policies = NetworkPolicies::with(&client, recorder, "here", TABLE, end.unwrap());
                let remove = async {
                    assert!(gate.admit(&pod(UID), &ips).await.is_ok(), "by the previous table");
                    other.remove().unwrap();
                    let enforces = || other.enforces(UID, &ips).unwrap();
                    until("its policies to be in the kernel", 10, enforces).await;
                };
                tokio::select! {
                    () = policies.run() => panic!("the task runs until it is dropped"),
                    () = remove => {}
                }
            });
        });
    }

    #[test]
    fn policies_stay_in_force_for_hours_without_the_api_server() {
        const NEW: &str = "0b5c1f2e-6d3a-4c1b-9a77-1f0e6c5d4b3b";
        in_new_namespace(|| {
            let dir = tempfile::tempdir().unwrap();
            paused_runtime().block_on(async {
                let client = client::unreachable_after_lists(|path| match path.rsplit('/').next() {
                    Some("networkpolicies") => json!([policy()]),
                    _ => json!([]),
                });
                let (recorder, _events) = crate::event_recorder::channel(client.clone(), "here");
                let (gate, end) = policy_gate::gate("here", Some(&record(dir.path())));
                let policies = NetworkPolicies::with(&client, recorder, "here", TABLE, end.unwrap());
                let [first, second] = [2_u8, 3].map(|last| [IpAddr::from([10, 42, 0, last])]);
                let away = async {
                    let is_admitted = async || gate.admit(&pod(UID), &first).await.is_ok();
                    eventually_async("the policies to be in the kernel", 10, is_admitted).await;
                    let mut table = Enforcer::open(TABLE).unwrap();
                    for hours in 1..=3 {
                        tokio::time::sleep(Duration::from_secs(3600)).await;
                        assert!(table.enforces(UID, &first).unwrap(), "after {hours} hours");
                    }
                    assert!(gate.admit(&pod(NEW), &second).await.is_ok(), "a pod that starts now");
                    assert!(table.enforces(NEW, &second).unwrap());
                };
                tokio::select! {
                    () = policies.run() => panic!("the task runs until it is dropped"),
                    () = away => {}
                }
            });
        });
    }

    #[test]
    fn events_are_received_while_the_kernel_refuses_the_table() {
        in_new_namespace(|| {
            let dir = tempfile::tempdir().unwrap();
            let namespaces = records_of_earlier_run(dir.path());
            paused_runtime().block_on(async {
                let client = client::silent();
                let (recorder, _events) = crate::event_recorder::channel(client.clone(), "here");
                let (gate, end) = policy_gate::gate("here", Some(&namespaces));
                // The kernel refuses such a long name.
                let table = "t".repeat(300);
                let policies = NetworkPolicies::with(&client, recorder, "here", &table, end.unwrap());
                let model = policies.model.clone();
                let admit = async {
                    // After this time the stored policies are in use.
                    tokio::time::sleep(Duration::from_secs(10)).await;
                    gate.admit(&pod(UID), &[IpAddr::from([10, 42, 0, 2])]).await.is_ok()
                };
                let is_admitted = tokio::select! {
                    () = policies.run() => panic!("the task runs until it is dropped"),
                    is_admitted = admit => is_admitted,
                };
                assert!(!is_admitted);
                assert_eq!(model.lock().pods().count(), 1, "received after the first failure");
            });
        });
    }

    #[test]
    fn stored_policies_admit_no_pod_while_there_are_policies_of_the_whole_cluster() {
        in_new_namespace(|| {
            // The runtime's threads are in the network namespace of this thread.
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let (mut policies, _held) = with_stored_policy();
                // This is the first policy of a list that is not complete.
                let kind = ClusterKind::AdminNetworkPolicy;
                let specification = json!({"priority": 1, "subject": {"namespaces": {}}});
                let of_cluster = ClusterPolicy::parse(kind, "p", &specification).unwrap();
                policies.model.lock().put_cluster_policy(of_cluster);
                let mut facts = PodFacts::of(&pod(UID), "here").unwrap();
                facts.ips = vec![IpAddr::from([10, 42, 0, 2])];
                let ips = facts.ips.clone();
                let (done, mut answered) = tokio::sync::oneshot::channel();
                policies.serve(Request::Admit { facts, done });
                let mut table = None;
                policies.commit(&mut table).await.unwrap();
                assert!(answered.try_recv().is_err());
                let mut next = Enforcer::open(TABLE).unwrap();
                assert!(!next.enforces(UID, &ips).unwrap(), "the next agent must not start it either");
                policies.model.lock().remove_cluster_policy(kind, "p");
                policies.commit(&mut table).await.unwrap();
                assert!(answered.try_recv().is_ok() && next.enforces(UID, &ips).unwrap());
            });
        });
    }

    #[tokio::test(start_paused = true)]
    async fn the_record_of_policies_is_written_after_all_lists() {
        let (client, dir) = (client::silent(), tempfile::tempdir().unwrap());
        let (recorder, _events) = crate::event_recorder::channel(client.clone(), "here");
        let (_gate, end) = policy_gate::gate("here", Some(&record(dir.path())));
        let mut policies = NetworkPolicies::with(&client, recorder, "here", TABLE, end.unwrap());
        let path = policies.record.path().to_owned();
        std::fs::write(&path, "of an earlier run").unwrap();
        let policy: NetworkPolicy = serde_json::from_value(policy()).unwrap();
        let listed = [Event::Init, Event::InitApply(policy), Event::InitDone];
        policies.apply_policy_events(listed.into_iter().map(Ok).collect());
        policies.record.is_due().await;
        policies.write_record();
        // This call also ends a write in progress.
        let is_due = tokio::time::timeout(Duration::from_secs(60), policies.record.is_due()).await;
        assert!(is_due.is_err(), "the policies of the whole cluster are not known");
        assert_eq!(std::fs::read(&path).unwrap(), b"of an earlier run");
        for kind in ClusterKind::ALL {
            let none = vec![Ok(Event::Init), Ok(Event::InitDone)];
            policies.apply_cluster_events(ClusterPolicyEvents::Definition(kind, none));
        }
        let is_due = tokio::time::timeout(Duration::from_secs(60), policies.record.is_due()).await;
        assert!(is_due.is_ok(), "an outdated record must not stay");
    }

    #[tokio::test]
    async fn namespaces_are_recorded_after_their_first_policy_and_without_their_last() {
        let (client, dir) = (client::silent(), tempfile::tempdir().unwrap());
        let (recorder, _events) = crate::event_recorder::channel(client.clone(), "here");
        let (_gate, end) = policy_gate::gate("here", Some(&record(dir.path())));
        let mut policies = NetworkPolicies::with(&client, recorder, "here", TABLE, end.unwrap());
        let mut after = |event: Event<NetworkPolicy>| {
            policies.apply_policy_events(vec![Ok(event)]);
            std::mem::take(&mut policies.are_namespaces_new)
        };
        let named = |name: &str, label: &str| -> NetworkPolicy {
            let spec = json!({"podSelector": {"matchLabels": {"app": label}}});
            serde_json::from_value(json!({"metadata": {"namespace": "n", "name": name}, "spec": spec}))
                .unwrap()
        };
        assert!(after(Event::Init), "nothing is recorded");
        assert!(after(Event::InitApply(named("p", "a"))));
        assert!(after(Event::InitDone));
        assert!(!after(Event::Apply(named("p", "b"))), "another version");
        assert!(!after(Event::Apply(named("q", "a"))), "a second policy");
        assert!(!after(Event::Delete(named("p", "b"))));
        assert!(after(Event::Delete(named("q", "a"))), "the last policy");
        assert!(after(Event::Apply(named("p", "a"))), "the first policy");
    }

    #[tokio::test(start_paused = true)]
    async fn a_pod_that_waits_shows_which_list_failed() {
        let (client, dir) = (client::silent(), tempfile::tempdir().unwrap());
        let (recorder, _events) = crate::event_recorder::channel(client.clone(), "here");
        let (gate, end) = policy_gate::gate("here", Some(&record(dir.path())));
        let mut policies = NetworkPolicies::with(&client, recorder, "here", TABLE, end.unwrap());
        let error = || {
            let status = kube::core::Status::failure("no storage", "InternalError").with_code(503);
            coracle_watch::Error::List(kube::Error::Api(Box::new(status)))
        };
        policies.apply_policy_events(vec![Ok(Event::Init), Err(error())]);
        policies.explain(None);
        let shown = gate.admit(&pod(UID), &[]).await.unwrap_err().to_string();
        assert!(shown.ends_with("yet: cannot list networkpolicies: no storage (HTTP status 503)"), "{shown}");
        policies.apply_policy_events(vec![Ok(Event::Init), Ok(Event::InitDone)]);
        policies.explain(None);
        let shown = gate.admit(&pod(UID), &[]).await.unwrap_err().to_string();
        assert!(!shown.contains("cannot list"), "{shown}");
        // Policies select pods, so the pods have to be listed, too.
        policies.peers = Some(Peers::watch(&client, &policies.namespaces));
        policies.apply_pod_events(vec![Err(error())]);
        policies.explain(None);
        let shown = gate.admit(&pod(UID), &[]).await.unwrap_err().to_string();
        assert!(shown.ends_with("yet: cannot list pods: no storage (HTTP status 503)"), "{shown}");
        policies.apply_pod_events(vec![Ok(Event::Init), Ok(Event::InitDone)]);
        policies.explain(None);
        let shown = gate.admit(&pod(UID), &[]).await.unwrap_err().to_string();
        assert!(!shown.contains("cannot list"), "{shown}");
    }

    #[tokio::test]
    async fn a_pod_without_a_sandbox_has_no_address() {
        let client = client::silent();
        let (recorder, _events) = crate::event_recorder::channel(client.clone(), "here");
        let dir = tempfile::tempdir().unwrap();
        let (_gate, end) = policy_gate::gate("here", Some(&record(dir.path())));
        let mut policies = NetworkPolicies::with(&client, recorder, "here", "test-policies", end.unwrap());
        policies.peers = Some(Peers::watch(&client, &policies.namespaces));
        let pod: Pod = serde_json::from_value(json!({"metadata": {"uid": "u", "namespace": "n"},
            "spec": {"nodeName": "here", "containers": []}, "status": {"podIPs": [{"ip": "10.42.0.2"}]}}))
        .unwrap();
        let facts = PodFacts::of(&pod, "here").unwrap();
        policies.serve(Request::Admit { facts, done: tokio::sync::oneshot::channel().0 });
        policies.apply_pod_events(vec![Ok(Event::Apply(pod))]);
        assert_eq!(policies.model.lock().pods().count(), 1);
        policies.serve(Request::Release { uid: "u".to_owned() });
        assert_eq!(policies.model.lock().pods().count(), 0, "its object still exists");
    }

    #[test]
    fn table_and_record_of_an_earlier_run_are_removed() {
        in_new_namespace_async(async || {
            let directory = tempfile::tempdir().unwrap();
            let record = record(directory.path());
            std::fs::write(&record, "[]").unwrap();
            let mut enforcer = Enforcer::open("test-policies").unwrap();
            enforcer.replace(&mut Model::default()).unwrap();
            assert!(enforcer.is_intact().unwrap());
            remove("test-policies".to_owned(), record.clone()).await;
            assert!(!enforcer.is_intact().unwrap());
            assert!(!record.exists());
        });
    }
}

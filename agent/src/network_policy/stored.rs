//! The record of the policies in the namespaces of this node's pods. A node that boots while the API server does not answer
//! enforces them, so that pods of these namespaces start.
//!
//! The pods of other nodes are unknown then, so selectors of pods permit only pods of this node. Policies of the whole
//! cluster are not recorded: while there are such policies, pods wait for the API server.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use coracle_network_policy::{Enforcer, Model};
use coracle_values::label_selector::Labels;
use coracle_values::object::Key;
use k8s_openapi::api::networking::v1::NetworkPolicy;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use tokio::time::Instant;

/// Name of the record, in the directory of the record of the namespaces with policies.
const RECORD: &str = "network-policies-of-pods.json";
/// Maximum size in bytes of the record. A larger one is not read.
const RECORD_MAX: u64 = 64 << 20;
/// Time from a change until it is written, so that a burst is written once.
const WRITE_AFTER: Duration = Duration::from_secs(1);
/// Time from a failed write until it is repeated.
const RETRY_AFTER: Duration = Duration::from_secs(60);
/// Wait for the API server after the start.
const LIST_TIMEOUT: Duration = Duration::from_secs(2);

/// The content of the record.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct StoredPolicies {
    /// Namespaces of this node's pods with their labels. The record has all of their policies.
    namespaces: BTreeMap<String, Labels>,
    policies: Vec<NetworkPolicy>,
}

/// The record on disk, and the policies that it may have.
pub(super) struct PolicyRecord {
    path: PathBuf,
    /// All policies of the cluster in JSON, with the fields that are stored.
    policies: BTreeMap<Key, Box<str>>,
    /// Time of the next write, if there are changes.
    due: Option<Instant>,
    /// Digest of the content on disk. None if it is not known.
    written: Option<[u8; 32]>,
    /// The namespaces with stored policies, while these are in use.
    used: BTreeSet<String>,
}

// === impl StoredPolicies ===

impl StoredPolicies {
    /// Reads the record after a wait for the API server. None if there is no record, or if the kernel has the table of an
    /// earlier run, which stays in force.
    pub(super) async fn load(record: PathBuf, table: String) -> Option<Self> {
        tokio::time::sleep(LIST_TIMEOUT).await;
        let read = move || {
            let has_table = Enforcer::open(&table).and_then(|mut enforcer| enforcer.is_intact());
            if has_table.unwrap_or(true) { None } else { read(&record) }
        };
        let read = tokio::task::spawn_blocking(read).await;
        read.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()))
    }
}

fn read(record: &Path) -> Option<StoredPolicies> {
    let content = crate::bounded::read(record, RECORD_MAX)
        .and_then(|text| serde_json::from_slice(&text).map_err(io::Error::from));
    match content {
        Ok(content) => Some(content),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => {
            tracing::warn!(%error, record = %record.display(), "the record of network policies is unreadable");
            None
        }
    }
}

// === impl PolicyRecord ===

impl PolicyRecord {
    /// A record in the directory of the record of the namespaces with policies.
    pub(super) fn beside(namespaces: &Path) -> Self {
        Self {
            path: namespaces.with_file_name(RECORD),
            policies: BTreeMap::new(),
            due: None,
            written: None,
            used: BTreeSet::new(),
        }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Notes that the content may have changed.
    pub(super) fn change(&mut self) {
        self.due.get_or_insert_with(|| Instant::now() + WRITE_AFTER);
    }

    /// Cancels the next write, because a list has begun. The end of the list schedules a write.
    pub(super) fn cancel(&mut self) {
        self.due = None;
    }

    /// Adds a policy or replaces it.
    pub(super) fn put(&mut self, policy: &NetworkPolicy) {
        let mut stored = NetworkPolicy { spec: policy.spec.clone(), ..NetworkPolicy::default() };
        stored.metadata.name.clone_from(&policy.metadata.name);
        stored.metadata.namespace.clone_from(&policy.metadata.namespace);
        let key = Key::of(&policy.metadata);
        match serde_json::to_string(&stored) {
            Ok(text) => drop(self.policies.insert(key, text.into_boxed_str())),
            Err(error) => {
                tracing::warn!(%error, ?key, "cannot encode a network policy for the record");
                self.policies.remove(&key);
            }
        }
        self.change();
    }

    /// Removes a policy.
    pub(super) fn remove(&mut self, key: &Key) {
        self.policies.remove(key);
        self.change();
    }

    /// Removes the policies that are not in a list.
    pub(super) fn retain(&mut self, is_listed: impl Fn(&Key) -> bool) {
        self.policies.retain(|key, _| is_listed(key));
        self.change();
    }

    /// Returns when changes must be written. Cancel safe.
    pub(super) async fn is_due(&self) {
        match self.due {
            Some(due) => tokio::time::sleep_until(due).await,
            None => std::future::pending().await,
        }
    }

    /// The content for these namespaces.
    fn text(&self, namespaces: &BTreeMap<&str, &Labels>) -> serde_json::Result<String> {
        let policies =
            self.policies.iter().filter(|(key, _)| namespaces.contains_key(key.namespace.as_str()));
        let policies: Vec<&str> = policies.map(|(_, text)| &**text).collect();
        let namespaces = serde_json::to_string(namespaces)?;
        Ok(format!(r#"{{"namespaces":{namespaces},"policies":[{}]}}"#, policies.join(",")))
    }

    /// The content to write for a model. Empty if there is no policy: then the record is removed.
    pub(super) fn content(&self, model: &Model) -> String {
        if model.is_empty() {
            return String::new();
        }
        self.text(&model.local_namespaces()).unwrap_or_else(|error| {
            tracing::warn!(%error, "cannot encode the record of network policies");
            String::new()
        })
    }

    /// Writes the content unless it is on disk. A failed write is repeated later.
    pub(super) async fn write(&mut self, content: String) {
        self.due = None;
        let digest: [u8; 32] = Sha256::digest(content.as_bytes()).into();
        if self.written == Some(digest) {
            return;
        }
        let path = self.path.clone();
        let write = move || match content.is_empty() {
            true => match std::fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
                _ => Ok(()),
            },
            false => crate::private_file::replace(&path, content.as_bytes()),
        };
        let written = tokio::task::spawn_blocking(write).await;
        match written.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic())) {
            Ok(()) => self.written = Some(digest),
            Err(error) => {
                tracing::warn!(%error, record = %self.path.display(), "cannot record network policies, retrying");
                self.due = Some(Instant::now() + RETRY_AFTER);
            }
        }
    }

    /// Adds stored policies to a model without policies.
    pub(super) fn use_stored(&mut self, stored: StoredPolicies, model: &mut Model) {
        for (name, labels) in stored.namespaces {
            model.put_namespace(&name, labels);
        }
        stored.policies.iter().for_each(|policy| model.put_policy(policy));
        // The first policy of another namespace may be newer than the record.
        self.used = model.restricted_namespaces();
    }

    /// Whether stored policies are in use.
    pub(super) fn is_used(&self) -> bool {
        !self.used.is_empty()
    }

    /// Whether stored policies of the namespace are in use.
    pub(super) fn has(&self, namespace: &str) -> bool {
        self.used.contains(namespace)
    }

    /// Ends the use of stored policies: the API server has listed all.
    pub(super) fn end_use(&mut self) {
        self.used.clear();
    }
}

#[cfg(test)]
mod tests {
    use coracle_network_policy::PodFacts;
    use serde_json::json;

    use super::*;

    fn policy(namespace: &str, name: &str) -> NetworkPolicy {
        let metadata = json!({"namespace": namespace, "name": name, "labels": {"a": "b"}});
        serde_json::from_value(json!({"metadata": metadata, "spec": {"podSelector": {}}})).unwrap()
    }

    fn put_pod(model: &mut Model, namespace: &str, node: &str) {
        let pod = json!({"metadata": {"uid": namespace, "namespace": namespace},
            "spec": {"nodeName": node, "containers": []}, "status": {"podIPs": [{"ip": "10.42.0.2"}]}});
        model.put_pod(PodFacts::of(&serde_json::from_value(pod).unwrap(), "here").unwrap());
    }

    #[tokio::test]
    async fn the_policies_of_this_nodes_namespaces_are_read_back() {
        let dir = tempfile::tempdir().unwrap();
        let mut record = PolicyRecord::beside(&dir.path().join("network-policies.json"));
        let mut model = Model::default();
        for (namespace, node) in [("own", "here"), ("unlabelled", "here"), ("far", "there")] {
            put_pod(&mut model, namespace, node);
            record.put(&policy(namespace, "p"));
            model.put_policy(&policy(namespace, "p"));
        }
        put_pod(&mut model, "free", "here");
        let labels = |name: &str| Labels::from([("kubernetes.io/metadata.name".to_owned(), name.to_owned())]);
        ["own", "far", "free"].iter().for_each(|name| model.put_namespace(name, labels(name)));
        record.write(record.content(&model)).await;
        let stored = read(record.path()).unwrap();
        let namespaces = ["free", "own"].map(|name| (name.to_owned(), labels(name)));
        assert_eq!(stored.namespaces, BTreeMap::from(namespaces));
        let mut expected = policy("own", "p");
        expected.metadata.labels = None;
        assert_eq!(stored.policies, [expected]);

        let (mut next, mut model) = (PolicyRecord::beside(record.path()), Model::default());
        next.use_stored(stored, &mut model);
        assert!(next.is_used() && next.has("own"));
        let others = ["far", "unlabelled", "free"];
        assert!(!others.iter().any(|name| next.has(name)), "their policies are not known, or newer");
        assert_eq!(model.policies().collect::<Vec<_>>(), [&Key::new("own", "p")]);
        next.end_use();
        assert!(!next.is_used());
        // The last policy was deleted.
        next.write(next.content(&Model::default())).await;
        assert!(!next.path().exists());
    }

    #[test]
    fn a_record_of_policies_that_is_too_large_is_not_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("policies.json");
        std::fs::File::create(&path).unwrap().set_len(RECORD_MAX + 1).unwrap();
        assert!(read(&path).is_none());
        std::fs::write(&path, r#"{"namespaces":{},"policies":[]}"#).unwrap();
        assert!(read(&path).is_some());
    }
}

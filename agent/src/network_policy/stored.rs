//! The record of the policies in the namespaces of this node's pods. A node that boots while the API server does not
//! answer enforces these policies, so that pods of these namespaces start.
//!
//! The pods of other nodes are unknown then, so selectors of pods permit only pods of this node. Policies of the whole
//! cluster are not recorded: while there are such policies, pods wait for the API server.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use coracle_network_policy::{Enforcer, Model};
use coracle_tree::remove_file;
use coracle_values::label_selector::Labels;
use coracle_values::object::Key;
use k8s_openapi::api::networking::v1::NetworkPolicy;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::deadline::until;

/// Name of the record, in the directory of the record of the namespaces with policies.
const RECORD: &str = "network-policies-of-pods.json";
/// Maximum size in bytes of the record. A larger record is not read.
const RECORD_MAX: u64 = 64 << 20;
/// Maximum size in bytes of the policies of one namespace in the record. If the policies are larger, the pods of the
/// namespace wait for the API server.
const NAMESPACE_MAX: usize = 1 << 20;
/// Time from a change until it is written, so that a burst is written once.
const WRITE_AFTER: Duration = Duration::from_secs(1);
/// Time from a failed write until it is repeated.
const RETRY_AFTER: Duration = Duration::from_secs(60);
/// Wait for the API server after the start.
const LIST_TIMEOUT: Duration = Duration::from_secs(2);

/// The content of the record.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct StoredPolicies {
    /// Namespaces of this node's pods with their labels. The record has all policies of a namespace, or none if they
    /// are larger than [`NAMESPACE_MAX`].
    namespaces: BTreeMap<String, Labels>,
    policies: Vec<NetworkPolicy>,
}

/// The policies of an earlier agent.
pub(super) enum Earlier {
    /// The table of the earlier agent is in the kernel and stays in force.
    Table(Enforcer),
    /// The kernel has no table, as after a boot, but there is a record.
    Stored(StoredPolicies),
}

/// The record on disk, and the policies that it may contain.
pub(super) struct PolicyRecord {
    path: PathBuf,
    /// All policies of the cluster in JSON, with the fields that are stored.
    policies: BTreeMap<Key, Box<str>>,
    /// Time of the next write, if there are changes.
    due: Option<Instant>,
    /// Digest of the content on disk. None if it is not known.
    written: Option<[u8; 32]>,
    /// The write in progress. Pods do not wait for the disk.
    writing: Option<JoinHandle<Outcome>>,
    /// The namespaces with stored policies, while the stored policies are in use.
    used: BTreeSet<String>,
}

/// Result of a write.
struct Outcome {
    digest: [u8; 32],
    written: io::Result<()>,
}

// === impl Earlier ===

impl Earlier {
    /// Waits for the API server, then looks for the kernel's table. Reads the record if the table is missing or was
    /// changed. `None` if there is neither a table nor a record, or if the table cannot be read.
    pub(super) async fn find(record: PathBuf, table: String) -> Option<Self> {
        tokio::time::sleep(LIST_TIMEOUT).await;
        let find = move || {
            let mut enforcer = Enforcer::open(&table).ok()?;
            match enforcer.is_intact().ok()? {
                true => Some(Self::Table(enforcer)),
                false => read(&record).map(Self::Stored),
            }
        };
        let found = coracle_threads::spawn_blocking(find).await;
        found.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()))
    }
}

/// Whether an earlier run has written this content.
fn has_content(record: &Path, content: &str) -> bool {
    crate::bounded::read(record, RECORD_MAX).is_ok_and(|found| found == content.as_bytes())
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
            writing: None,
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

    /// Cancels the next write, because the first lists are not complete. The end of a list schedules a write.
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

    /// Returns when changes must be written, after the end of a write in progress. Cancel safe.
    pub(super) async fn is_due(&mut self) {
        self.end_write().await;
        until(self.due).await;
    }

    /// The content for these namespaces. The policies of a namespace are complete or left out.
    fn text(&self, namespaces: &BTreeMap<&str, &Labels>) -> serde_json::Result<String> {
        let mut of: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        let policies =
            self.policies.iter().filter(|(key, _)| namespaces.contains_key(key.namespace.as_str()));
        policies.for_each(|(key, text)| of.entry(key.namespace.as_str()).or_default().push(text));
        of.retain(|_, policies| policies.iter().map(|text| text.len()).sum::<usize>() <= NAMESPACE_MAX);
        let policies: Vec<&str> = of.into_values().flatten().collect();
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

    /// Begins to write the content unless it is on disk. To be called after [`is_due`](Self::is_due).
    pub(super) fn write(&mut self, content: String) {
        self.due = None;
        let digest: [u8; 32] = Sha256::digest(content.as_bytes()).into();
        if self.written == Some(digest) {
            return;
        }
        let (path, is_unknown) = (self.path.clone(), self.written.is_none());
        self.writing = Some(coracle_threads::spawn_blocking(move || {
            let written = match content.is_empty() {
                true => remove_file(&path),
                false if is_unknown && has_content(&path, &content) => Ok(()),
                false => crate::private_file::replace(&path, content.as_bytes()),
            };
            Outcome { digest, written: written.inspect_err(|_| drop(remove_file(&path))) }
        }));
    }

    /// Waits for the end of the write in progress. A failed write is repeated later. Until then there is no record,
    /// because outdated policies could allow connections that newer policies forbid. Cancel safe.
    async fn end_write(&mut self) {
        let Some(writing) = &mut self.writing else { return };
        let done = writing.await.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()));
        self.writing = None;
        self.written = done.written.is_ok().then_some(done.digest);
        if let Err(error) = done.written {
            tracing::warn!(%error, record = %self.path.display(), "cannot record network policies, retrying");
            self.due = Some(Instant::now() + RETRY_AFTER);
        }
    }

    /// Adds stored policies to a model. The API server may have sent the first part of a list, whose policies are
    /// newer.
    pub(super) fn use_stored(&mut self, stored: StoredPolicies, model: &mut Model) {
        for (name, labels) in stored.namespaces {
            model.put_namespace(&name, labels);
        }
        for policy in stored.policies {
            let key = Key::of(&policy.metadata);
            if !self.policies.contains_key(&key) {
                model.put_policy(&policy);
            }
            // The stored policies of this namespace are complete. Policies of other namespaces may be missing.
            self.used.insert(key.namespace);
        }
    }

    /// Whether stored policies are in use.
    pub(super) fn is_used(&self) -> bool {
        !self.used.is_empty()
    }

    /// Whether stored policies of the namespace are in use.
    pub(super) fn has(&self, namespace: &str) -> bool {
        self.used.contains(namespace)
    }

    /// Ends the use of stored policies: the API server has listed all policies. Returns whether they were in use.
    pub(super) fn end_use(&mut self) -> bool {
        !std::mem::take(&mut self.used).is_empty()
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

    async fn write(record: &mut PolicyRecord, content: &str) {
        record.write(content.to_owned());
        record.end_write().await;
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
        let content = record.content(&model);
        write(&mut record, &content).await;
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
        assert!(next.end_use() && !next.is_used() && !next.end_use());
        // The last policy was deleted.
        let content = next.content(&Model::default());
        write(&mut next, &content).await;
        assert!(!next.path().exists());
    }

    #[tokio::test]
    async fn an_outdated_record_of_policies_is_removed_if_it_cannot_be_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let mut record = PolicyRecord::beside(&dir.path().join("network-policies.json"));
        write(&mut record, "old").await;
        // A directory in the place of the temporary file makes the replacement fail, as a full disk does.
        std::fs::create_dir(record.path().with_extension("tmp")).unwrap();
        write(&mut record, "new").await;
        assert!(!record.path().exists() && record.due.is_some());
        std::fs::remove_dir(record.path().with_extension("tmp")).unwrap();
        write(&mut record, "old").await;
        assert!(record.path().exists(), "the former content is not on disk any more");
    }

    #[tokio::test]
    async fn an_unchanged_record_of_policies_is_not_written_after_a_start() {
        let dir = tempfile::tempdir().unwrap();
        let namespaces = dir.path().join("network-policies.json");
        write(&mut PolicyRecord::beside(&namespaces), "content").await;
        let mut next = PolicyRecord::beside(&namespaces);
        let path = next.path().to_owned();
        let inode = || std::os::unix::fs::MetadataExt::ino(&std::fs::metadata(&path).unwrap());
        let first = inode();
        write(&mut next, "content").await;
        assert_eq!(inode(), first);
        write(&mut next, "other").await;
        assert_ne!(inode(), first);
    }

    #[test]
    fn stored_policies_do_not_replace_those_that_were_received() {
        let mut record = PolicyRecord::beside(Path::new("/network-policies.json"));
        let mut model = Model::default();
        put_pod(&mut model, "own", "here");
        let mut received = policy("own", "p");
        received.spec.get_or_insert_default().policy_types = Some(vec!["Egress".to_owned()]);
        // These policies are the first part of a list.
        for policy in [received, policy("new", "p")] {
            record.put(&policy);
            model.put_policy(&policy);
        }
        let stored = |namespace: &str| StoredPolicies {
            namespaces: BTreeMap::from([(namespace.to_owned(), Labels::new())]),
            policies: vec![policy(namespace, "p")],
        };
        record.use_stored(stored("own"), &mut model);
        let into_the_pod = coracle_nft::Flow {
            protocol: 17,
            from: [192, 0, 2, 1].into(),
            to: [10, 42, 0, 2].into(),
            port: 80,
            answered_by: [10, 42, 0, 2].into(),
            answering_port: 80,
            mark: 0,
        };
        assert!(model.allows(&into_the_pod), "the stored policy forbids it");
        assert!(
            record.has("own") && !record.has("new"),
            "other policies of the namespace may follow in the list"
        );
    }

    #[test]
    fn a_namespace_with_too_many_policies_is_not_in_the_record() {
        let mut record = PolicyRecord::beside(Path::new("/network-policies.json"));
        record.put(&policy("small", "p"));
        let name = "n".repeat(250);
        (0..4000).for_each(|number| record.put(&policy("large", &format!("{name}{number}"))));
        let labels = Labels::new();
        let text = record.text(&BTreeMap::from([("large", &labels), ("small", &labels)])).unwrap();
        let stored: StoredPolicies = serde_json::from_str(&text).unwrap();
        assert_eq!(stored.policies.len(), 1);
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

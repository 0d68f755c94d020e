//! Pods of this node in the checkpoint: they start while the API server does not answer.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use k8s_openapi::api::core::v1::{Pod, PodCondition, PodStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;

use super::is_static;
use crate::checkpoint::{Checkpoint, Key, Kind, references};

/// The reasons in the record of a pod that this node has evicted or preempted, or ended when the machine shut down.
/// Other records have no reason.
const REASONS: [&str; 3] = ["Evicted", "Terminated", "Preempting"];
/// The condition in the record of a pod that was not evicted for its own limits.
const DISRUPTED: &str = "DisruptionTarget";

/// The stored pods; cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct PodCheckpoint {
    checkpoint: Checkpoint,
    /// Evictions by uid, until the pod is removed.
    evictions: Arc<Mutex<HashMap<String, StoredEviction>>>,
}

/// The reason why the node has evicted a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StoredEviction {
    /// One of [`REASONS`].
    pub(crate) reason: &'static str,
    pub(crate) message: String,
    /// Whether the pod has the condition `DisruptionTarget`.
    pub(crate) disrupted: bool,
}

impl PodCheckpoint {
    pub(crate) fn new(checkpoint: Checkpoint) -> Self {
        Self { checkpoint, evictions: Arc::default() }
    }

    /// All stored pods, for the start of the agent. Removes records that no stored pod needs.
    pub(crate) fn load(&self) -> Vec<Pod> {
        let mut pods: Vec<Pod> = self.checkpoint.all(Kind::Pod);
        for pod in &mut pods {
            if let Some(eviction) = StoredEviction::take(pod) {
                self.lock().insert(uid(pod).to_owned(), eviction);
            }
            self.checkpoint.own(uid(pod), references(pod));
        }
        self.checkpoint.remove_unowned();
        pods
    }

    /// Stores a new pod. An admitted pod has a start time already, which is not in the API server yet. The record has
    /// this time, so that the record is not written again when the API server returns the time.
    pub(crate) fn keep_new(&self, pod: &Pod, start_time: Option<Timestamp>) {
        let mut fields = stored_fields(pod);
        if let Some(start_time) = start_time {
            fields.status.get_or_insert_default().start_time = Some(Time(start_time));
        }
        self.put(fields);
    }

    /// Stores a pod that the node evicts, and waits until its record is on disk. An agent that starts after the stop of
    /// the pod must not run it again. The wait takes two seconds at most, because the disk may be full. Until the pod
    /// is removed, its record has the eviction, even if the API server has another status.
    pub(crate) async fn keep_evicted(
        &self,
        pod: &Pod,
        start_time: Option<Timestamp>,
        eviction: StoredEviction,
    ) {
        self.lock().insert(uid(pod).to_owned(), eviction);
        self.keep_new(pod, start_time);
        self.checkpoint.written(&Key::pod(uid(pod))).await;
    }

    /// The eviction of the pod, by this agent or an earlier agent.
    pub(crate) fn eviction(&self, uid: &str) -> Option<StoredEviction> {
        self.lock().get(uid).cloned()
    }

    /// Stores a pod if a restart would treat it differently from its earlier version.
    pub(crate) fn keep(&self, before: &Pod, pod: &Pod) {
        if !has_same_stored_fields(before, pod) {
            self.put(stored_fields(pod));
        }
    }

    /// Static pods have no record: their manifests are on the node.
    fn put(&self, mut fields: Pod) {
        if uid(&fields).is_empty() || is_static(uid(&fields)) {
            return;
        }
        if let Some(eviction) = self.eviction(uid(&fields)) {
            eviction.add_to(&mut fields);
        }
        self.checkpoint.own(uid(&fields), references(&fields));
        self.checkpoint.put(Key::pod(uid(&fields)), &fields);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, StoredEviction>> {
        self.evictions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Removes a pod's record, and the records that only this pod needs.
    pub(crate) fn remove(&self, uid: &str) {
        self.lock().remove(uid);
        self.checkpoint.release(uid);
        self.checkpoint.remove(&Key::pod(uid));
    }

    /// Like [`remove`](Self::remove), and waits until the removal is on disk: the pod must not start again after its
    /// object was deleted.
    pub(crate) async fn remove_durably(&self, uid: &str) {
        self.remove(uid);
        self.checkpoint.written(&Key::pod(uid)).await;
    }
}

// === impl StoredEviction ===

impl StoredEviction {
    /// Adds the eviction to the record of a pod.
    fn add_to(self, fields: &mut Pod) {
        let status = fields.status.get_or_insert_default();
        status.reason = Some(self.reason.to_owned());
        status.message = Some(self.message);
        let disrupted = PodCondition {
            type_: DISRUPTED.to_owned(),
            status: "True".to_owned(),
            ..PodCondition::default()
        };
        status.conditions = self.disrupted.then(|| vec![disrupted]);
    }

    /// Removes the eviction from the record of a pod. None if the record has no eviction.
    fn take(fields: &mut Pod) -> Option<Self> {
        let status = fields.status.as_mut()?;
        let reason = REASONS.into_iter().find(|reason| status.reason.as_deref() == Some(*reason))?;
        status.reason = None;
        let message = status.message.take().unwrap_or_default();
        let conditions = status.conditions.take().unwrap_or_default();
        let disrupted = conditions.iter().any(|condition| condition.type_ == DISRUPTED);
        Some(Self { reason, message, disrupted })
    }
}

fn uid(pod: &Pod) -> &str {
    pod.metadata.uid.as_deref().unwrap_or_default()
}

/// Whether two versions of a pod have the same [`stored_fields`]. Fields that the API server never changes are not
/// compared.
fn has_same_stored_fields(a: &Pod, b: &Pod) -> bool {
    let meta = |pod: &Pod| {
        let meta = &pod.metadata;
        (meta.deletion_timestamp.clone(), meta.deletion_grace_period_seconds, meta.generation)
    };
    let shown = |a: &Pod, b: &Pod| {
        a.metadata.labels == b.metadata.labels && a.metadata.annotations == b.metadata.annotations
    };
    meta(a) == meta(b) && stored_status(a) == stored_status(b) && shown(a, b) && a.spec == b.spec
}

/// A pod without fields that change while it runs.
fn stored_fields(pod: &Pod) -> Pod {
    let mut metadata = pod.metadata.clone();
    metadata.resource_version = None;
    metadata.managed_fields = None;
    Pod { metadata, spec: pod.spec.clone(), status: stored_status(pod) }
}

/// The fields of a status that a restart needs: the start time, the phase of an ended pod, and the names of claims.
fn stored_status(pod: &Pod) -> Option<PodStatus> {
    let status = pod.status.as_ref()?;
    Some(PodStatus {
        phase: status.phase.clone().filter(|phase| phase == "Failed" || phase == "Succeeded"),
        start_time: status.start_time.clone(),
        qos_class: status.qos_class.clone(),
        resource_claim_statuses: status.resource_claim_statuses.clone(),
        extended_resource_claim_status: status.extended_resource_claim_status.clone(),
        ..PodStatus::default()
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::DirEntryExt as _;

    use serde_json::json;

    use super::*;

    fn pod(status: serde_json::Value) -> Pod {
        serde_json::from_value(json!({"metadata": {"uid": "u", "name": "p"}, "status": status})).unwrap()
    }

    fn evicted(message: &str, disrupted: bool) -> StoredEviction {
        StoredEviction { reason: "Evicted", message: message.to_owned(), disrupted }
    }

    #[test]
    fn a_record_keeps_why_the_node_has_ended_the_pod() {
        for reason in REASONS {
            let eviction = StoredEviction { reason, message: "m".to_owned(), disrupted: true };
            let mut fields = pod(json!({}));
            eviction.clone().add_to(&mut fields);
            assert_eq!(StoredEviction::take(&mut fields), Some(eviction));
            assert_eq!(StoredEviction::take(&mut fields), None);
        }
        assert_eq!(StoredEviction::take(&mut pod(json!({"reason": "NodeShutdown"}))), None);
    }

    #[test]
    fn status_changes_of_a_running_pod_are_not_written() {
        let a = pod(json!({"phase": "Pending", "podIP": "1.1.1.1"}));
        let b = pod(json!({"phase": "Running", "podIP": "1.1.1.2"}));
        assert!(has_same_stored_fields(&a, &b));
        assert_eq!(stored_fields(&a), stored_fields(&b));
        let claims = pod(json!({"resourceClaimStatuses": [{"name": "a", "resourceClaimName": "p-a-x"}]}));
        assert_eq!(stored_fields(&claims).status, claims.status);
        let failed = pod(json!({"phase": "Failed"}));
        assert!(!has_same_stored_fields(&a, &failed));
        assert_ne!(stored_fields(&a), stored_fields(&failed));
    }

    #[test]
    fn a_start_time_that_the_api_server_returns_is_not_written_again() {
        let dir = tempfile::tempdir().unwrap();
        let checkpoint = Checkpoint::open(dir.path(), &dir.path().join("sealing.key")).unwrap();
        let pods = PodCheckpoint::new(checkpoint);
        let new = pod(json!({"phase": "Pending"}));
        let started = pod(json!({"phase": "Running", "startTime": "2026-01-02T03:04:05Z"}));
        let time = started.status.as_ref().unwrap().start_time.as_ref().unwrap().0;
        let inodes = || -> Vec<u64> {
            let records =
                std::fs::read_dir(dir.path().join("checkpoint").join(Kind::Pod.directory())).unwrap();
            records.map(|record| record.unwrap().ino()).collect()
        };
        pods.keep_new(&new, Some(time));
        assert_eq!(pods.load(), [stored_fields(&started)]);
        let first = inodes();
        pods.keep(&new, &started);
        assert_eq!(pods.load().len(), 1);
        assert_eq!((first.len(), inodes()), (1, first));
        pods.keep(&started, &pod(json!({"phase": "Failed", "startTime": "2026-01-02T03:04:05Z"})));
        assert_eq!(pods.load()[0].status.as_ref().unwrap().phase.as_deref(), Some("Failed"));
    }

    #[test]
    fn a_static_pod_has_no_record() {
        let dir = tempfile::tempdir().unwrap();
        let checkpoint = Checkpoint::open(dir.path(), &dir.path().join("sealing.key")).unwrap();
        let pods = PodCheckpoint::new(checkpoint);
        let mut of_manifest = pod(json!({}));
        of_manifest.metadata.uid = Some("0123456789abcdef0123456789abcdef".to_owned());
        pods.keep_new(&of_manifest, None);
        assert_eq!(pods.load(), Vec::<Pod>::new());
    }

    #[test]
    fn a_pod_is_restored_until_it_is_removed_from_the_checkpoint() {
        let dir = tempfile::tempdir().unwrap();
        let open = || {
            let checkpoint = Checkpoint::open(dir.path(), &dir.path().join("sealing.key")).unwrap();
            PodCheckpoint::new(checkpoint)
        };
        let pods = open();
        pods.keep_new(&pod(json!({})), None);
        assert_eq!(pods.load().len(), 1);
        assert_eq!(open().load().len(), 1);
        pods.remove("u");
        pods.remove("../x");
        assert!(pods.load().is_empty() && open().load().is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn an_eviction_is_on_disk_before_the_pod_is_stopped() {
        let dir = tempfile::tempdir().unwrap();
        let open = || Checkpoint::open(dir.path(), &dir.path().join("sealing.key")).unwrap();
        let checkpoint = open();
        let writing = tokio::spawn(checkpoint.clone().run(tokio::sync::watch::channel(false).1));
        let pods = PodCheckpoint::new(checkpoint);
        let eviction = evicted("low", true);
        pods.keep_evicted(&pod(json!({"phase": "Running"})), None, eviction.clone()).await;
        writing.abort();
        // The process was killed: changes that were due are lost.
        let restarted = PodCheckpoint::new(open());
        assert_eq!((restarted.load().len(), restarted.eviction("u")), (1, Some(eviction)));
    }

    #[tokio::test(start_paused = true)]
    async fn an_eviction_is_stored_until_the_pod_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let open = || {
            let checkpoint = Checkpoint::open(dir.path(), &dir.path().join("sealing.key")).unwrap();
            PodCheckpoint::new(checkpoint)
        };
        let running = pod(json!({"phase": "Running", "startTime": "2026-01-02T03:04:05Z"}));
        let time = running.status.as_ref().unwrap().start_time.as_ref().unwrap().0;
        let pods = open();
        pods.keep_new(&running, Some(time));
        assert_eq!(pods.eviction("u"), None);
        let eviction = evicted("low", true);
        pods.keep_evicted(&pod(json!({})), Some(time), eviction.clone()).await;
        assert_eq!(pods.load(), [stored_fields(&running)]);
        // A change of the pod that the API server sends does not remove the eviction.
        let mut changed = running.clone();
        changed.metadata.generation = Some(2);
        pods.keep(&running, &changed);
        assert_eq!(pods.load(), [stored_fields(&changed)]);
        let restarted = open();
        assert_eq!(restarted.load(), [stored_fields(&changed)]);
        assert_eq!(restarted.eviction("u"), Some(eviction));
        restarted.remove("u");
        assert_eq!(restarted.eviction("u"), None);
        let limit = evicted("full", false);
        restarted.keep_evicted(&running, None, limit.clone()).await;
        assert_eq!(restarted.load().len(), 1);
        let restarted = open();
        assert_eq!((restarted.load().len(), restarted.eviction("u")), (1, Some(limit)));
    }
}

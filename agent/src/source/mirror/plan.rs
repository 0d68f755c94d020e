//! The requests that follow from the static pods and the mirror pods in the API. Pure.

use std::collections::BTreeMap;
use std::sync::Arc;

use coracle_values::CollectMap;
use coracle_values::merge_patch;
use coracle_values::object::Key;
use k8s_openapi::api::core::v1::{Node, Pod, PodStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use serde_json::Value;

use super::MIRROR;

/// The static pods that run, and the mirror pods in the API.
#[derive(Debug, Default)]
pub(super) struct State {
    /// By uid of the static pod.
    static_pods: BTreeMap<String, StaticPod>,
    /// By uid of the mirror pod.
    mirrors: BTreeMap<String, Mirror>,
    /// Whether all static pods and all mirror pods are known.
    pub(super) is_complete: bool,
}

/// A static pod.
#[derive(Debug)]
struct StaticPod {
    pod: Arc<Pod>,
    /// Whether the node has admitted the pod. No mirror pod is created before that.
    is_admitted: bool,
    /// None before the first report.
    status: Option<Box<PodStatus>>,
    /// The uid of the mirror pod that has this status, and the status. The API server may change a part of the status.
    reported: Option<(String, Box<PodStatus>)>,
}

/// A pod in the API with the annotation of mirror pods.
#[derive(Debug)]
pub(super) struct Mirror {
    uid: String,
    key: Key,
    /// Value of the annotation.
    hash: String,
    /// The only owner, if it is a Node that controls the pod.
    owner: Option<Owner>,
    is_deleted: bool,
    status: PodStatus,
}

/// The Node object that owns mirror pods.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Owner {
    name: String,
    uid: String,
}

/// A request.
#[derive(Debug, PartialEq)]
pub(super) enum Action {
    /// Creates the mirror pod of the static pod `uid`. The request fails if another pod has the name, so it replaces no
    /// pod.
    Create { uid: String, pod: Box<Pod> },
    /// Deletes the mirror pod with this uid.
    Delete { uid: String, key: Key },
    /// Writes the status of the static pod `uid` to the mirror pod with the uid `mirror`.
    Report { uid: String, mirror: String, key: Key, status: Box<PodStatus>, patch: Value },
}

// === impl State ===

impl State {
    pub(super) fn add_static_pod(&mut self, pod: &Arc<Pod>) {
        let uid = pod.metadata.uid.clone().unwrap_or_default();
        let new = || StaticPod { pod: Arc::clone(pod), is_admitted: false, status: None, reported: None };
        self.static_pods.entry(uid).or_insert_with(new);
    }

    pub(super) fn admit(&mut self, uid: &str) {
        if let Some(static_pod) = self.static_pods.get_mut(uid) {
            static_pod.is_admitted = true;
        }
    }

    pub(super) fn remove_static_pod(&mut self, uid: &str) {
        self.static_pods.remove(uid);
    }

    pub(super) fn report(&mut self, uid: &str, status: PodStatus) {
        if let Some(static_pod) = self.static_pods.get_mut(uid) {
            static_pod.status = Some(Box::new(status));
        }
    }

    /// Records that the mirror pod with the uid `mirror` has the status. The watch delivers it later: a report before
    /// that must start from this status.
    pub(super) fn reported(&mut self, uid: &str, mirror: &str, status: &PodStatus) {
        if let Some(static_pod) = self.static_pods.get_mut(uid) {
            static_pod.reported = Some((mirror.to_owned(), Box::new(status.clone())));
        }
        if let Some(mirror) = self.mirrors.get_mut(mirror) {
            mirror.status = mirror.with_own_fields(status);
        }
    }

    /// Whether a mirror pod has the final status of the static pod, or no mirror pod will be created.
    pub(super) fn is_end_reported(&self, uid: &str) -> bool {
        let Some(static_pod) = self.static_pods.get(uid) else { return false };
        let phase = static_pod.reported.as_ref().and_then(|(_, status)| status.phase.as_deref());
        !static_pod.is_admitted || matches!(phase, Some("Failed" | "Succeeded"))
    }

    pub(super) fn replace(&mut self, mirrors: impl Iterator<Item = Mirror>) {
        self.mirrors = mirrors.map(|mirror| (mirror.uid.clone(), mirror)).collect_map();
    }

    pub(super) fn observe(&mut self, mirror: Mirror) {
        self.mirrors.insert(mirror.uid.clone(), mirror);
    }

    pub(super) fn remove(&mut self, uid: &str) {
        self.mirrors.remove(uid);
    }

    /// The next requests, deletions last: users can create any number of pods that must be deleted.
    pub(super) fn plan(&self, owner: &Owner) -> Vec<Action> {
        if !self.is_complete {
            return Vec::new();
        }
        let (mut actions, mut deletions) = (Vec::new(), Vec::new());
        let mut current: BTreeMap<&str, &Mirror> = BTreeMap::new();
        for mirror in self.mirrors.values() {
            if self.is_current(mirror, owner) && !current.contains_key(mirror.hash.as_str()) {
                current.insert(&mirror.hash, mirror);
            } else {
                deletions.push(Action::Delete { uid: mirror.uid.clone(), key: mirror.key.clone() });
            }
        }
        for (uid, desired) in &self.static_pods {
            match current.get(uid.as_str()) {
                Some(mirror) => actions.extend(desired.report(uid, mirror)),
                None if !desired.is_admitted => {}
                // The name is taken until the old mirror pod is deleted.
                None if self.mirrors.values().any(|mirror| mirror.key == Key::of(&desired.pod.metadata)) => {}
                None => {
                    let pod = Box::new(mirror_pod(&desired.pod, uid, owner));
                    actions.push(Action::Create { uid: uid.clone(), pod });
                }
            }
        }
        actions.extend(deletions);
        actions
    }

    /// Whether the mirror pod shows a static pod of this node.
    fn is_current(&self, mirror: &Mirror, owner: &Owner) -> bool {
        let is_shown = |static_pod: &StaticPod| mirror.key == Key::of(&static_pod.pod.metadata);
        !mirror.is_deleted
            && mirror.owner.as_ref() == Some(owner)
            && self.static_pods.get(&mirror.hash).is_some_and(is_shown)
    }
}

// === impl StaticPod ===

impl StaticPod {
    /// The request that gives the mirror pod the newest status. None if the mirror pod already has that status.
    fn report(&self, uid: &str, mirror: &Mirror) -> Option<Action> {
        let status = self.status.as_ref()?;
        if self.reported.as_ref().is_some_and(|(of, reported)| *of == mirror.uid && reported == status) {
            return None;
        }
        let new = mirror.with_own_fields(status);
        let json = |status: &PodStatus| serde_json::to_value(status).unwrap_or_default();
        Some(Action::Report {
            uid: uid.to_owned(),
            mirror: mirror.uid.clone(),
            key: mirror.key.clone(),
            status: status.clone(),
            patch: merge_patch::difference(&json(&mirror.status), &json(&new))?,
        })
    }
}

// === impl Mirror ===

impl Mirror {
    /// The mirror pod. None if the pod has no annotation of mirror pods.
    pub(super) fn of(pod: &Pod) -> Option<Self> {
        let metadata = &pod.metadata;
        let owner = match metadata.owner_references.as_deref() {
            Some([owner]) => Owner::of_reference(owner),
            _ => None,
        };
        Some(Self {
            uid: metadata.uid.clone()?,
            key: Key::of(metadata),
            hash: metadata.annotations.as_ref()?.get(MIRROR)?.clone(),
            owner,
            is_deleted: metadata.deletion_timestamp.is_some(),
            status: pod.status.clone().unwrap_or_default(),
        })
    }

    /// The status with the class and the start time of the mirror pod. The class is immutable, and the API server sets
    /// it. A restart of the agent does not change the start time, as upstream (`updateStatusInternal`).
    fn with_own_fields(&self, status: &PodStatus) -> PodStatus {
        let class = self.status.qos_class.as_ref().or(status.qos_class.as_ref());
        let start_time = self.status.start_time.as_ref().or(status.start_time.as_ref());
        PodStatus { qos_class: class.cloned(), start_time: start_time.cloned(), ..status.clone() }
    }
}

// === impl Owner ===

impl Owner {
    /// The Node as owner. None if the API server has not given it a uid.
    pub(super) fn of(node: &Node) -> Option<Self> {
        Some(Self { name: node.metadata.name.clone()?, uid: node.metadata.uid.clone()? })
    }

    fn of_reference(owner: &OwnerReference) -> Option<Self> {
        let is_node = owner.api_version == "v1" && owner.kind == "Node" && owner.controller == Some(true);
        is_node.then(|| Self { name: owner.name.clone(), uid: owner.uid.clone() })
    }

    fn reference(&self) -> OwnerReference {
        OwnerReference {
            api_version: "v1".to_owned(),
            kind: "Node".to_owned(),
            name: self.name.clone(),
            uid: self.uid.clone(),
            controller: Some(true),
            block_owner_deletion: None,
        }
    }
}

// === impl Action ===

impl Action {
    /// Identifies the action among the actions of all pods.
    pub(super) fn key(&self) -> String {
        match self {
            Self::Create { uid, .. } => Self::creation_key(uid),
            Self::Delete { uid, .. } => format!("delete/{uid}"),
            Self::Report { uid, .. } => format!("report/{uid}"),
        }
    }

    /// The key of the creation of the static pod's mirror pod.
    pub(super) fn creation_key(uid: &str) -> String {
        format!("create/{uid}")
    }

    /// Name of the mirror pod.
    pub(super) fn name(&self) -> &str {
        match self {
            Self::Create { pod, .. } => pod.metadata.name.as_deref().unwrap_or_default(),
            Self::Delete { key, .. } | Self::Report { key, .. } => &key.name,
        }
    }
}

fn mirror_pod(pod: &Pod, uid: &str, owner: &Owner) -> Pod {
    let mut mirror = Pod { metadata: pod.metadata.clone(), spec: pod.spec.clone(), status: None };
    mirror.metadata.uid = None;
    mirror.metadata.annotations.get_or_insert_default().insert(MIRROR.to_owned(), uid.to_owned());
    mirror.metadata.owner_references = Some(vec![owner.reference()]);
    mirror
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn owner() -> Owner {
        Owner { name: "n1".to_owned(), uid: "node-uid".to_owned() }
    }

    fn static_pod(name: &str, uid: &str) -> Arc<Pod> {
        let pod =
            json!({"metadata": {"namespace": "n", "name": name, "uid": uid}, "spec": {"containers": []}});
        Arc::new(serde_json::from_value(pod).unwrap())
    }

    fn state(pods: &[(&str, &str)]) -> State {
        let mut state = State { is_complete: true, ..State::default() };
        for (name, uid) in pods {
            state.add_static_pod(&static_pod(name, uid));
            state.admit(uid);
        }
        state
    }

    /// The mirror pod that the plan creates, with a uid, and with these changes of its metadata.
    fn observe(state: &mut State, uid: &str, hash: &str, change: impl FnOnce(&mut Pod)) {
        let mut pod = mirror_pod(&static_pod("web-n1", hash), hash, &owner());
        pod.metadata.uid = Some(uid.to_owned());
        change(&mut pod);
        state.observe(Mirror::of(&pod).unwrap());
    }

    fn keys(state: &State) -> Vec<String> {
        state.plan(&owner()).iter().map(Action::key).collect()
    }

    #[test]
    fn a_static_pod_has_one_mirror_pod() {
        let mut state = state(&[("web-n1", "h1")]);
        let [Action::Create { pod, .. }] = &state.plan(&owner())[..] else { panic!("no creation") };
        let metadata = serde_json::to_value(&pod.metadata).unwrap();
        assert_eq!(metadata["annotations"], json!({MIRROR: "h1"}));
        let reference = json!([{"apiVersion": "v1", "kind": "Node", "name": "n1", "uid": "node-uid", "controller": true}]);
        assert_eq!((&metadata["ownerReferences"], &metadata["uid"]), (&reference, &Value::Null));
        observe(&mut state, "m1", "h1", |_| {});
        assert_eq!(keys(&state), Vec::<String>::new());
        observe(&mut state, "m2", "h1", |_| {});
        assert_eq!(keys(&state), ["delete/m2"]);
        state.is_complete = false;
        assert_eq!(keys(&state), Vec::<String>::new());
    }

    #[test]
    fn a_rejected_static_pod_gets_no_mirror_pod_and_keeps_an_existing_one() {
        let mut state = State { is_complete: true, ..State::default() };
        state.add_static_pod(&static_pod("web-n1", "h1"));
        let failed = PodStatus { phase: Some("Failed".to_owned()), ..PodStatus::default() };
        state.report("h1", failed);
        assert_eq!(keys(&state), Vec::<String>::new());
        assert!(state.is_end_reported("h1"), "a shutdown does not wait for a mirror pod");
        // An earlier agent has admitted the pod.
        observe(&mut state, "m1", "h1", |_| {});
        assert_eq!(keys(&state), ["report/h1"]);
        state.remove("m1");
        state.admit("h1");
        assert_eq!(keys(&state), ["create/h1"]);
        assert!(!state.is_end_reported("h1") && !state.is_end_reported("h2"));
    }

    #[test]
    fn other_mirror_pods_are_deleted_before_the_right_one_is_created() {
        let changes: [fn(&mut Pod); 5] = [
            |pod| {
                drop(pod.metadata.annotations.as_mut().unwrap().insert(MIRROR.to_owned(), "old".to_owned()))
            },
            |pod| pod.metadata.owner_references = None,
            |pod| pod.metadata.owner_references.as_mut().unwrap()[0].uid = "former".to_owned(),
            |pod| pod.metadata.owner_references.as_mut().unwrap()[0].controller = None,
            |pod| {
                pod.metadata.deletion_timestamp =
                    serde_json::from_value(json!("2026-01-02T03:04:05Z")).unwrap()
            },
        ];
        for change in changes {
            let mut state = state(&[("web-n1", "h1")]);
            observe(&mut state, "m1", "h1", change);
            assert_eq!(keys(&state), ["delete/m1"]);
            state.remove("m1");
            assert_eq!(keys(&state), ["create/h1"]);
        }
        // The hash of a static pod under another name: a copy by a user.
        let mut state = state(&[("web-n1", "h1")]);
        observe(&mut state, "m1", "h1", |pod| pod.metadata.name = Some("copy".to_owned()));
        assert_eq!(keys(&state), ["create/h1", "delete/m1"]);
    }

    #[test]
    fn the_mirror_pod_of_an_ended_static_pod_is_deleted() {
        let mut state = state(&[("web-n1", "h1")]);
        observe(&mut state, "m1", "h1", |_| {});
        state.remove_static_pod("h1");
        assert_eq!(keys(&state), ["delete/m1"]);
    }

    #[test]
    fn a_restart_of_the_agent_does_not_change_the_start_time() {
        let mut state = state(&[("web-n1", "h1")]);
        let of = |time: &str| -> PodStatus { serde_json::from_value(json!({"startTime": time})).unwrap() };
        let first = of("2026-01-02T03:04:05Z");
        observe(&mut state, "m1", "h1", |pod| pod.status = Some(first.clone()));
        state.report("h1", of("2026-01-02T04:00:00Z"));
        assert_eq!(keys(&state), Vec::<String>::new());
        state.remove("m1");
        observe(&mut state, "m2", "h1", |_| {});
        let [Action::Report { patch, .. }] = &state.plan(&owner())[..] else { panic!("no status") };
        assert_eq!(patch, &json!({"startTime": "2026-01-02T04:00:00Z"}));
    }

    #[test]
    fn a_status_is_written_once_to_each_mirror_pod() {
        let mut state = state(&[("web-n1", "h1")]);
        let status = PodStatus { phase: Some("Running".to_owned()), ..PodStatus::default() };
        state.report("h1", status.clone());
        assert_eq!(keys(&state), ["create/h1"]);
        let class = |pod: &mut Pod| {
            pod.status = Some(PodStatus { qos_class: Some("Burstable".to_owned()), ..PodStatus::default() });
        };
        observe(&mut state, "m1", "h1", class);
        let [Action::Report { patch, mirror, .. }] = &state.plan(&owner())[..] else { panic!("no status") };
        assert_eq!((patch, mirror.as_str()), (&json!({"phase": "Running"}), "m1"));
        state.reported("h1", "m1", &status);
        assert_eq!(keys(&state), Vec::<String>::new());
        // The watch has not delivered the status yet.
        state.report("h1", PodStatus::default());
        let [Action::Report { patch, .. }] = &state.plan(&owner())[..] else { panic!("no status") };
        assert_eq!(patch, &json!({"phase": null}));
        state.report("h1", status.clone());
        assert!(!state.is_end_reported("h1"));
        let ended = PodStatus { phase: Some("Failed".to_owned()), ..PodStatus::default() };
        state.reported("h1", "m1", &ended);
        assert!(state.is_end_reported("h1"));
        state.reported("h1", "m1", &status);
        state.remove("m1");
        observe(&mut state, "m2", "h1", class);
        assert_eq!(keys(&state), ["report/h1"]);
    }
}

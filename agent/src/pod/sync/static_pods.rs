//! Static pods: pods of manifests on the node. Static pods follow the manifests only, and not the API server.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use coracle_values::object::Key;
use k8s_openapi::api::core::v1::Pod;

use super::Sync;
use crate::pod::state::DesiredPod;
use crate::pod::worker;
use crate::source::is_static;

impl Sync {
    /// Ends the static pods of an earlier agent whose uids are not among these.
    pub(super) fn static_complete(&mut self, uids: &HashSet<String>) {
        for (uid, pod) in std::mem::take(&mut self.static_orphans) {
            if !uids.contains(&uid) && !self.handles.contains_key(&uid) {
                self.end_orphan(uid, pod);
            }
        }
    }

    fn end_orphan(&mut self, uid: String, pod: Arc<Pod>) {
        tracing::info!(uid, pod = pod.metadata.name, "terminating a static pod without a manifest");
        let start_time = worker::start_time(&pod);
        self.node.metrics.pods.orphan_found();
        self.inputs.pods.add_orphan(&uid);
        self.start(uid, DesiredPod::Gone(pod), None, start_time);
    }

    /// Ends the former versions of a static pod that an earlier agent ran. While the URL of static pods has not
    /// responded, it is unknown which other static pods must end.
    fn end_former(&mut self, pod: &Pod) {
        let former = former_versions(&self.static_orphans, pod);
        for (uid, orphan) in former {
            self.static_orphans.remove(&uid);
            if !self.handles.contains_key(&uid) {
                self.end_orphan(uid, orphan);
            }
        }
    }

    /// Called after all static pods at the start were added.
    pub(super) fn statics_sent(&mut self) {
        self.are_statics_known = true;
        // The pods of the checkpoint were added before.
        self.inputs.pods.set_known();
        self.complete_mirrors();
    }

    /// Permits writes of mirror pods when the static pods and the pods of the API are known. While the manifests cannot
    /// be read, the mirror pods of running static pods must stay.
    pub(super) fn complete_mirrors(&self) {
        if self.are_statics_known && self.orphans.is_none() {
            self.node.statuses.mirrors().complete();
        }
    }

    /// Adds a static pod and starts it.
    pub(super) fn add_static(&mut self, pod: Arc<Pod>) {
        let Some(uid) = pod.metadata.uid.clone() else { return };
        self.static_pods.insert(uid, Arc::clone(&pod));
        self.end_former(&pod);
        self.start_static(&pod);
    }

    /// Ends a static pod whose manifest was removed. Its containers have the grace period of the pod.
    pub(super) fn remove_static(&mut self, uid: &str) {
        if let Some(pod) = self.static_pods.remove(uid) {
            let waits = self.preemptors.contains_key(uid);
            self.end_pod(uid, &pod);
            if waits {
                // It has no worker whose end would remove the mirror pod.
                self.node.statuses.mirrors().remove_static_pod(uid);
            }
        }
    }

    /// Called after the end of a pod's worker. Starts the static pods that waited for it.
    pub(super) fn static_ended(&mut self, uid: &str) {
        if !is_static(uid) {
            return;
        }
        self.node.statuses.mirrors().remove_static_pod(uid);
        if self.static_pods.contains_key(uid) && !self.finished.contains(uid) {
            self.node.metrics.pods.static_pod_restarted();
        }
        let handles = &self.handles;
        let waiting = self.static_pods.iter().filter(|(uid, _)| !handles.contains_key(*uid));
        let waiting: Vec<Arc<Pod>> = waiting.map(|(_, pod)| Arc::clone(pod)).collect();
        waiting.iter().for_each(|pod| self.start_static(pod));
    }

    /// Starts a static pod. If a former version of the pod still runs, the pod starts after the end of that version.
    fn start_static(&mut self, pod: &Arc<Pod>) {
        let key = Key::of(&pod.metadata);
        let mut others = self.handles.iter().filter(|(uid, _)| is_static(uid));
        if others.any(|(_, handle)| Key::of(&handle.desired.borrow().pod().metadata) == key) {
            return;
        }
        self.node.statuses.mirrors().add_static_pod(pod);
        self.set_desired(pod, true);
    }
}

/// The pods with the same name and another uid.
fn former_versions(pods: &HashMap<String, Arc<Pod>>, pod: &Pod) -> Vec<(String, Arc<Pod>)> {
    let key = Key::of(&pod.metadata);
    let is_former =
        |uid: &str, other: &Pod| pod.metadata.uid.as_deref() != Some(uid) && Key::of(&other.metadata) == key;
    let former = pods.iter().filter(|(uid, other)| is_former(uid, other));
    former.map(|(uid, other)| (uid.clone(), Arc::clone(other))).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn former_versions_of_a_pod_have_its_name_and_another_uid() {
        let pod = |name: &str, uid: &str| -> Pod {
            let metadata = json!({"namespace": "default", "name": name, "uid": uid});
            serde_json::from_value(json!({"metadata": metadata, "spec": {"containers": []}})).unwrap()
        };
        let orphans = [("a-n", "1"), ("a-n", "2"), ("b-n", "3")]
            .map(|(name, uid)| (uid.to_owned(), Arc::new(pod(name, uid))));
        let former = former_versions(&orphans.into(), &pod("a-n", "2"));
        assert_eq!(former.iter().map(|(uid, _)| uid.as_str()).collect::<Vec<_>>(), ["1"]);
    }
}

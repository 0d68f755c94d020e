//! Pods of this node whose sandbox exists, with the sandbox's addresses, which the API server gets later.

use std::collections::HashMap;

use coracle_network_policy::PodFacts;
use tokio::sync::oneshot;

/// The pods, and the requests that wait for their policies.
#[derive(Default)]
pub(super) struct Admitted {
    pods: HashMap<String, Entry>,
    /// Namespaces of the pods, and the requests.
    waiting: Vec<(String, oneshot::Sender<()>)>,
    /// Whether the table was written, or removed, since the start.
    pub(super) is_settled: bool,
}

struct Entry {
    facts: PodFacts,
    /// Whether the pod's object exists.
    is_watched: bool,
}

// === impl Admitted ===

impl Admitted {
    /// Adds a pod or replaces its addresses. `done` is answered when its policies are in the kernel.
    pub(super) fn add(&mut self, facts: PodFacts, done: oneshot::Sender<()>) {
        let is_watched = self.pods.get(&facts.uid).is_some_and(|entry| entry.is_watched);
        self.waiting.push((facts.namespace().to_owned(), done));
        self.pods.insert(facts.uid.clone(), Entry { facts, is_watched });
    }

    /// Removes a pod without a sandbox. Returns whether its object exists.
    pub(super) fn remove(&mut self, uid: &str) -> Option<bool> {
        self.pods.remove(uid).map(|entry| entry.is_watched)
    }

    pub(super) fn has(&self, uid: &str) -> bool {
        self.pods.contains_key(uid)
    }

    /// All pods.
    pub(super) fn facts(&self) -> impl Iterator<Item = PodFacts> + '_ {
        self.pods.values().map(|entry| entry.facts.clone())
    }

    /// Sets the addresses of the sandbox instead of those of the pod's status, and keeps the other facts.
    pub(super) fn correct(&mut self, facts: &mut PodFacts) {
        if let Some(entry) = self.pods.get_mut(&facts.uid) {
            facts.ips.clone_from(&entry.facts.ips);
            entry.facts = facts.clone();
            entry.is_watched = true;
        }
    }

    /// Records that the pod's object was deleted. Returns whether the sandbox may still exist.
    pub(super) fn mark_deleted(&mut self, uid: &str) -> bool {
        self.pods.get_mut(uid).map(|entry| entry.is_watched = false).is_some()
    }

    /// Answers the waiting requests of pods in these namespaces.
    pub(super) fn answer(&mut self, are_known: impl Fn(&str) -> bool) {
        self.is_settled = true;
        for (_, done) in self.waiting.extract_if(.., |(namespace, _)| are_known(namespace)) {
            // A caller that disconnects before the answer has stopped waiting.
            let _ = done.send(());
        }
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::Pod;
    use serde_json::json;

    use super::*;

    fn facts(ip: &str) -> PodFacts {
        let pod: Pod = serde_json::from_value(json!({"metadata": {"uid": "u", "namespace": "n"},
            "spec": {"nodeName": "here", "containers": []}, "status": {"podIPs": [{"ip": ip}]}}))
        .unwrap();
        PodFacts::of(&pod, "here").unwrap()
    }

    #[test]
    fn addresses_of_the_sandbox_replace_those_of_the_status() {
        let mut admitted = Admitted::default();
        let (done, mut answered) = oneshot::channel();
        admitted.add(facts("10.0.0.2"), done);
        assert!(answered.try_recv().is_err());
        admitted.answer(|namespace| namespace != "n");
        assert!(answered.try_recv().is_err(), "the policies of its namespace are unknown");
        admitted.answer(|_| true);
        assert!(answered.try_recv().is_ok());
        let mut stale = facts("10.0.0.1");
        admitted.correct(&mut stale);
        assert_eq!(stale, facts("10.0.0.2"));
        assert!(admitted.mark_deleted("u"), "the sandbox still exists");
        assert_eq!(admitted.remove("u"), Some(false));
        assert!(!admitted.mark_deleted("u"));
    }
}

//! Pods of this node whose sandbox exists, with the addresses of the sandbox. The API server gets these addresses
//! later.

use std::collections::{BTreeSet, HashMap};

use coracle_network_policy::PodFacts;
use tokio::sync::oneshot;

/// The pods, and the requests that wait for their policies.
#[derive(Default)]
pub(super) struct Admitted {
    pods: HashMap<String, PodFacts>,
    /// Number of requests so far.
    count: u64,
    waiting: Vec<Waiting>,
    /// Whether the table was written, or removed, since the start.
    pub(super) is_settled: bool,
}

/// A request that waits for the policies of its pod.
struct Waiting {
    uid: String,
    namespace: String,
    done: oneshot::Sender<()>,
}

// === impl Admitted ===

impl Admitted {
    /// Adds a pod or replaces its addresses. `done` is answered when its policies are in the kernel. Returns the facts
    /// with the position of the sandbox.
    pub(super) fn add(&mut self, mut facts: PodFacts, done: oneshot::Sender<()>) -> PodFacts {
        self.count += 1;
        facts.sandbox = self.count;
        // Pods repeat their requests while the API server does not answer. Requests whose caller has gone are removed
        // here.
        self.waiting.retain(|waiting| !waiting.done.is_closed());
        self.waiting.push(Waiting { uid: facts.uid.clone(), namespace: facts.namespace().to_owned(), done });
        self.pods.insert(facts.uid.clone(), facts.clone());
        facts
    }

    /// Removes a pod without a sandbox.
    pub(super) fn remove(&mut self, uid: &str) {
        self.pods.remove(uid);
    }

    pub(super) fn has(&self, uid: &str) -> bool {
        self.pods.contains_key(uid)
    }

    /// All pods.
    pub(super) fn facts(&self) -> impl Iterator<Item = PodFacts> + '_ {
        self.pods.values().cloned()
    }

    /// Replaces the addresses of the pod's status with the addresses of the sandbox, and keeps the other facts.
    pub(super) fn correct(&mut self, facts: &mut PodFacts) {
        if let Some(known) = self.pods.get_mut(&facts.uid) {
            facts.ips.clone_from(&known.ips);
            facts.sandbox = known.sandbox;
            known.clone_from(facts);
        }
    }

    /// Answers the waiting requests of pods in these namespaces.
    pub(super) fn answer(&mut self, are_known: impl Fn(&str) -> bool) {
        self.is_settled = true;
        for waiting in self.waiting.extract_if(.., |waiting| are_known(&waiting.namespace)) {
            // A caller that disconnects before the answer has stopped waiting.
            let _ = waiting.done.send(());
        }
    }

    /// Answers the waiting requests of pods whose policies are in the table of an earlier agent.
    pub(super) fn answer_enforced<E>(
        &mut self,
        mut is_enforced: impl FnMut(&PodFacts) -> Result<bool, E>,
    ) -> Result<(), E> {
        let mut enforced = BTreeSet::new();
        for waiting in &self.waiting {
            if let Some(facts) = self.pods.get(&waiting.uid)
                && is_enforced(facts)?
            {
                enforced.insert(waiting.uid.clone());
            }
        }
        for waiting in self.waiting.extract_if(.., |waiting| enforced.contains(&waiting.uid)) {
            let _ = waiting.done.send(());
        }
        Ok(())
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
        assert_eq!((&stale.ips, stale.sandbox), (&facts("10.0.0.2").ips, 1));
        let next = admitted.add(facts("10.0.0.3"), oneshot::channel().0);
        assert_eq!(next.sandbox, 2, "a later sandbox");
        admitted.correct(&mut stale);
        assert_eq!(stale, next);
        admitted.remove("u");
        assert!(!admitted.has("u"));
    }
}

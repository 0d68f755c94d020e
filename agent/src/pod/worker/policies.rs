//! Containers whose start waits for network policies. Their back-off ends when the policies are in the kernel.

use super::Worker;
use crate::policy_gate::PendingAdmission;

/// Containers that did not start because their pod's policies were not in the kernel.
pub(super) struct AwaitedPolicies {
    pub(super) containers: Vec<String>,
    pub(super) pending: PendingAdmission,
}

/// Waits for the policies in the kernel, and returns the containers that can start now. Never returns if no container
/// waits. Cancel safe.
pub(super) async fn enforced(awaited: &mut Option<Box<AwaitedPolicies>>) -> Vec<String> {
    let Some(waiting) = awaited else { return std::future::pending().await };
    waiting.pending.enforced().await;
    awaited.take().map(|waiting| waiting.containers).unwrap_or_default()
}

impl Worker {
    /// Ends the back-off of containers that wait for their policies.
    pub(super) fn policies_enforced(&mut self, containers: &[String]) {
        containers.iter().for_each(|container| self.state.retries.clear(container));
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;
    use serde_json::json;

    use super::*;
    use crate::policy_gate::{Request, gate};

    #[tokio::test(start_paused = true)]
    async fn containers_that_wait_for_policies_can_start_when_the_policies_are_in_the_kernel() {
        let dir = tempfile::tempdir().unwrap();
        let (gate, end) = gate("here", Some(&dir.path().join("record")));
        let mut requests = end.unwrap().requests;
        let pod = json!({"metadata": {"uid": "u", "namespace": "n"}, "spec": {"containers": []}});
        let not = gate.admit(&serde_json::from_value(pod).unwrap(), &[]).await.unwrap_err();
        let waiting = AwaitedPolicies { containers: vec!["c".to_owned()], pending: not.pending };
        let mut awaited = Some(Box::new(waiting));
        assert!(enforced(&mut awaited).now_or_never().is_none());
        let Ok(Request::Admit { done, .. }) = requests.try_recv() else { panic!("no request") };
        assert!(done.send(()).is_ok());
        assert_eq!(enforced(&mut awaited).await, ["c"]);
        assert!(enforced(&mut awaited).now_or_never().is_none(), "it returns them once");
    }
}

//! End of the pods when the machine shuts down, as in the kubelet (`killPods` of `pkg/kubelet/nodeshutdown`).
//!
//! The groups of pods end one after the other, the lowest priority first. A pod ends by an eviction, so that its worker
//! runs `preStop` hooks and records why the pod has failed.

mod times;

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Node, Pod, PodStatus};
use tokio::sync::watch;

use super::NodeContext;
use super::eviction::{Evicted, EvictionCause, grace, priority};
use super::state::has_ended;
use crate::event_recorder::Level;
use crate::server::PodView as _;
use crate::shutdown_policy::{REPORT_LIMIT, ShutdownPeriod};
use crate::source::is_static;
use times::ShutdownTimes;

/// The message in the status of an ended pod. The text is upstream's.
const MESSAGE: &str = "Pod was terminated in response to imminent node shutdown.";
/// Maximum time for which an agent that has just started waits until it knows its pods. Manifests of static pods may be
/// on a server that does not respond.
const KNOWN_LIMIT: Duration = Duration::from_secs(5);
/// Interval of the checks whether pods have ended.
const INTERVAL: Duration = Duration::from_millis(100);

/// Ends all pods when the machine shuts down.
pub(crate) struct MachineShutdown {
    node: Arc<NodeContext>,
    /// The Node object, to wait until it is not ready.
    node_object: watch::Receiver<Option<Arc<Node>>>,
    /// The uids of the pods whose end was requested.
    requested: HashSet<String>,
}

// === impl MachineShutdown ===

impl MachineShutdown {
    pub(crate) fn new(node: Arc<NodeContext>, node_object: watch::Receiver<Option<Arc<Node>>>) -> Self {
        Self { node, node_object, requested: HashSet::new() }
    }

    /// Waits until the machine shuts down, and ends the pods. Returns when all pods have ended, or when their periods
    /// are over.
    pub(crate) async fn run(mut self) {
        let file = times::path(&self.node.config.state_dir);
        if let Some(last) = ShutdownTimes::read(file.clone()).await {
            self.node.metrics.endings.shutdown(last.start_time, last.end_time);
        }
        self.node.config.machine_shutdown.cancelled().await;
        let begun = ShutdownTimes::begin();
        self.node.metrics.endings.shutdown(begun.start_time, begun.end_time);
        // The pods end also if the disk does not respond.
        let storing = begun.store(file.clone());
        self.end_pods().await;
        let ended = begun.ended();
        self.node.metrics.endings.shutdown(ended.start_time, ended.end_time);
        let stored = async {
            // Two writers of the file must not run at the same time.
            let _begun = storing.await;
            let _ended = ended.store(file).await;
        };
        // If the API server does not answer, the statuses are in the checkpoint, and the next start reports them.
        let reports = async { tokio::join!(self.wait_for_reports(), stored) };
        let reported = tokio::time::timeout(REPORT_LIMIT, reports).await;
        tracing::info!(reported = reported.is_ok(), "the shutdown of the pods has ended");
    }

    /// Ends the groups of pods, one after the other.
    async fn end_pods(&mut self) {
        self.node.recorder.node(Level::Normal, "NodeShutdown", "Shutdown manager detected shutdown event");
        let _are_known = tokio::time::timeout(KNOWN_LIMIT, self.node.pods.until_known()).await;
        let periods = self.node.config.shutdown_periods.clone();
        for (group, period) in periods.all().iter().enumerate() {
            let uids = self.end_group(group, *period);
            // A group without pods takes no time.
            if uids.is_empty() {
                continue;
            }
            tracing::info!(
                priority = period.priority,
                pods = uids.len(),
                "ending pods: the machine shuts down"
            );
            let ended = tokio::time::timeout(period.limit(), self.wait_for_end(&uids)).await;
            if ended.is_err() {
                tracing::warn!(priority = period.priority, "pods have not ended in their period");
            }
            self.requested.extend(uids);
        }
    }

    /// Requests the end of the pods in a group. Returns their uids.
    fn end_group(&self, group: usize, period: ShutdownPeriod) -> HashSet<String> {
        let periods = &self.node.config.shutdown_periods;
        let pods = self.node.pods.all().into_iter().filter(|pod| self.is_active(pod));
        let mut uids = HashSet::new();
        for pod in pods.filter(|pod| periods.group_of(priority(pod)) == group) {
            let Some(uid) = pod.metadata.uid.clone() else { continue };
            self.node.evictions.request(&uid, evicted(&pod, period));
            uids.insert(uid);
        }
        uids
    }

    /// Whether the pod has ended neither in the API nor on this node.
    fn is_active(&self, pod: &Pod) -> bool {
        let uid = pod.metadata.uid.as_deref().unwrap_or_default();
        !has_ended(pod) && !self.node.pods.status(uid).is_some_and(|status| is_final(&status))
    }

    /// Waits until none of the pods has a cgroup.
    async fn wait_for_end(&self, uids: &HashSet<String>) {
        loop {
            let cgroups = self.node.cgroups.pods();
            if !uids.iter().any(|uid| cgroups.contains(uid)) {
                return;
            }
            tokio::time::sleep(INTERVAL).await;
        }
    }

    /// Waits until the API server has the condition of the node and the final status of each pod.
    async fn wait_for_reports(&mut self) {
        // A closed channel means that the node is not registered any more.
        let _closed =
            self.node_object.wait_for(|node| node.as_deref().is_some_and(is_not_ready)).await.is_err();
        let is_pending = |pod: &Arc<Pod>| {
            let uid = pod.metadata.uid.as_deref().unwrap_or_default();
            // A static pod does not change with its status in the API.
            let is_reported = match is_static(uid) {
                true => self.node.statuses.mirrors().is_end_reported(uid),
                false => has_ended(pod),
            };
            self.requested.contains(uid) && !is_reported
        };
        while self.node.pods.all().iter().any(is_pending) {
            tokio::time::sleep(INTERVAL).await;
        }
    }
}

/// The eviction of a pod in a group with this period.
fn evicted(pod: &Pod, period: ShutdownPeriod) -> Evicted {
    let grace = grace(pod, period.seconds);
    Evicted { message: MESSAGE.to_owned(), cause: EvictionCause::Shutdown, grace }
}

fn is_final(status: &PodStatus) -> bool {
    matches!(status.phase.as_deref(), Some("Failed" | "Succeeded"))
}

fn is_not_ready(node: &Node) -> bool {
    let conditions = node.status.as_ref().and_then(|status| status.conditions.as_ref());
    conditions
        .into_iter()
        .flatten()
        .any(|condition| condition.type_ == "Ready" && condition.status == "False")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_pod_has_the_shorter_one_of_its_grace_period_and_its_groups_period() {
        let grace = |own: i64, seconds: u32| {
            let spec = json!({"containers": [], "terminationGracePeriodSeconds": own});
            let pod: Pod = serde_json::from_value(json!({"metadata": {}, "spec": spec})).unwrap();
            evicted(&pod, ShutdownPeriod { priority: 0, seconds }).grace
        };
        assert_eq!([grace(30, 20), grace(5, 20), grace(30, 0)], [20, 5, 1]);
    }

    #[test]
    fn only_a_false_condition_means_not_ready() {
        let node = |conditions: serde_json::Value| -> Node {
            serde_json::from_value(json!({"metadata": {}, "status": {"conditions": conditions}})).unwrap()
        };
        assert!(is_not_ready(&node(json!([{"type": "Ready", "status": "False"}]))));
        assert!(!is_not_ready(&node(json!([{"type": "Ready", "status": "True"}]))));
        assert!(!is_not_ready(&node(json!([{"type": "DiskPressure", "status": "False"}]))));
    }
}

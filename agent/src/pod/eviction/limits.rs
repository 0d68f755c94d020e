//! Eviction of pods that exceed limits on their disk usage.
//!
//! The directories of pods with limits are measured every ten seconds, which is the kubelet's interval. After a slow
//! measurement, the next measurement starts only after fifty times its duration. Without such pods nothing is measured.
//! Each measurement runs in a separate task: a pod with many files must delay neither the checks of other pods nor
//! evictions because of memory pressure.

use std::collections::HashMap;
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use coracle_cri::fair_permits::FairPermits;
use k8s_openapi::api::core::v1::Pod;
use tokio::sync::watch;
use tokio::task::{Id, JoinSet};

use super::due_times::DueTimes;
use super::plan::{self, is_limited};
use super::{Evicted, EvictionCause, INTERVAL, MIN_GRACE, usage};
use crate::pod::NodeContext;
use crate::pod::state::has_ended;

/// Permits of checks: at most [`usage::CHECKS`] checks run at the same time, and at most two of one namespace. Of all
/// namespaces together, at most two have a second check.
static PERMITS: FairPermits = FairPermits::with_further(usage::CHECKS, 2, 2);

/// The task that measures the pods with limits, and evicts pods that exceed their limits.
pub(crate) struct LimitEviction {
    node: Arc<NodeContext>,
    /// The number of pods with limits.
    limited: watch::Receiver<usize>,
    due: DueTimes,
    checks: Checks,
}

/// Checks in progress. Dropping this value ends the checks.
#[derive(Debug, Default)]
struct Checks {
    tasks: JoinSet<(Instant, Duration)>,
    /// Uids of the pods by the id of the task.
    uids: HashMap<Id, String>,
}

/// A check that has ended.
#[derive(Debug)]
struct Ended {
    uid: String,
    begun: Instant,
    took: Duration,
}

// === impl LimitEviction ===

impl LimitEviction {
    pub(crate) fn new(node: Arc<NodeContext>) -> Self {
        let limited = node.pods.limited();
        Self { node, limited, due: DueTimes::new(INTERVAL), checks: Checks::default() }
    }

    /// Measures and evicts until the future or the node's pods are dropped.
    pub(crate) async fn run(mut self) {
        let mut next = tokio::time::Instant::now() + INTERVAL;
        loop {
            let measures = *self.limited.borrow_and_update() > 0;
            tokio::select! {
                // All arms are cancel safe.
                () = tokio::time::sleep_until(next), if measures => {}
                changed = self.limited.changed(), if !measures => if changed.is_err() { return },
                ended = self.checks.ended() => {
                    self.due.add(&ended.uid, ended.begun, ended.took);
                    continue;
                }
            }
            next = tokio::time::Instant::now() + INTERVAL;
            self.round();
        }
    }

    /// Begins the checks that are due.
    fn round(&mut self) {
        let pods = self.node.pods.all().into_iter().filter(|pod| is_running(pod) && is_limited(pod));
        let pods: Vec<Arc<Pod>> = pods.collect();
        self.due.keep(&pods);
        let now = Instant::now();
        for pod in pods {
            let Some(uid) = pod.metadata.uid.clone().filter(|uid| self.due.is_due(uid, now)) else {
                continue;
            };
            let owner = pod.metadata.namespace.clone().unwrap_or_default();
            let node = Arc::clone(&self.node);
            self.checks.begin(uid, owner, async move { check(&node, &pod).await });
        }
    }
}

/// Measures the disk usage of a pod. Evicts the pod if the usage exceeds one of the pod's limits.
async fn check(node: &NodeContext, pod: &Arc<Pod>) {
    let Some(uid) = pod.metadata.uid.as_deref() else { return };
    let used = usage::of(node, pod).await;
    if let Some((message, signal)) = plan::exceeded(pod, &used) {
        tracing::info!(uid, message, "evicting a pod that exceeded a limit on its disk usage");
        let cause = EvictionCause::Limit(signal);
        node.evictions.request(uid, Evicted { message, cause, grace: MIN_GRACE });
    }
}

// === impl Checks ===

impl Checks {
    /// Begins the check of a pod, unless one is in progress. The check waits for a permit of its owner.
    fn begin(&mut self, uid: String, owner: String, check: impl Future<Output = ()> + Send + 'static) {
        if self.uids.values().any(|checked| *checked == uid) {
            return;
        }
        let task = self.tasks.spawn(async move {
            let _permit = PERMITS.take(&owner).await;
            // The duration does not include the wait for the permit.
            let begun = Instant::now();
            check.await;
            (begun, begun.elapsed())
        });
        self.uids.insert(task.id(), uid);
    }

    /// Waits for the end of a check. Never returns if no check is in progress. Cancel safe.
    async fn ended(&mut self) -> Ended {
        loop {
            match self.tasks.join_next_with_id().await {
                Some(Ok((id, (begun, took)))) => {
                    if let Some(uid) = self.uids.remove(&id) {
                        return Ended { uid, begun, took };
                    }
                }
                // The next round begins another check of the pod.
                Some(Err(error)) => {
                    let uid = self.uids.remove(&error.id()).unwrap_or_default();
                    tracing::error!(uid, %error, "the check of a pod's disk usage panicked");
                }
                None => std::future::pending().await,
            }
        }
    }
}

/// Whether the pod has not ended and is not being deleted.
fn is_running(pod: &Pod) -> bool {
    !has_ended(pod) && pod.metadata.deletion_timestamp.is_none()
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn a_pod_with_many_files_does_not_delay_the_checks_of_others() {
        let mut checks = Checks::default();
        for slow in ["a", "b", "c"] {
            checks.begin(slow.to_owned(), "slow".to_owned(), std::future::pending());
        }
        assert!(checks.ended().now_or_never().is_none(), "all of them take long");
        checks.begin("u".to_owned(), "other".to_owned(), async {});
        assert_eq!(checks.ended().await.uid, "u");
        // A check that is in progress does not begin again.
        checks.begin("a".to_owned(), "other".to_owned(), async {});
        assert_eq!(checks.uids.len(), 3);
    }
}

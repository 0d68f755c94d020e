//! Measurement of the pods' disks, concurrent with the eviction rounds. A measurement takes minutes if pods have many
//! files. Evictions for a lack of memory must not wait for the measurement. Several pods are measured at the same time.
//! So a measurement takes as long as its slowest pod, unless many pods have many files.

use std::collections::HashSet;
use std::future::Future;
use std::sync::Arc;

use futures::StreamExt as _;
use k8s_openapi::api::core::v1::Pod;
use tokio::task::JoinSet;

use super::disk::Pace;
use super::plan::{MeasuredPod, Usage};
use super::usage;
use crate::pod::NodeContext;

/// A measurement. Dropping it ends the measurement.
#[derive(Debug)]
pub(super) struct Measurement<T>(JoinSet<T>);

/// The disk usage of the pods that may be evicted for a shortage.
pub(super) struct MeasuredPods {
    pub(super) pace: Pace,
    pub(super) pods: Vec<MeasuredPod<Usage>>,
}

// === impl Measurement ===

impl<T: Send + 'static> Measurement<T> {
    /// No measurement.
    pub(super) fn none() -> Self {
        Self(JoinSet::new())
    }

    /// Begins a measurement, unless one is running.
    pub(super) fn begin(&mut self, measure: impl Future<Output = T> + Send + 'static) {
        if self.0.is_empty() {
            self.0.spawn(measure);
        }
    }

    /// Waits for the result. Never returns if no measurement is running. Cancel safe.
    pub(super) async fn result(&mut self) -> T {
        loop {
            match self.0.join_next().await {
                Some(Ok(result)) => return result,
                // The measurement has panicked. The next round begins another measurement.
                Some(Err(error)) => tracing::error!(%error, "a measurement of the pods' disks panicked"),
                None => std::future::pending().await,
            }
        }
    }
}

/// Measures the disk usage of these pods.
pub(super) async fn measure(node: Arc<NodeContext>, candidates: Vec<Arc<Pod>>, pace: Pace) -> MeasuredPods {
    let measure = |pod: Arc<Pod>| {
        let node = Arc::clone(&node);
        async move {
            // A list of all layers would return old counts, and the ranking of pods needs recent counts.
            let usage = usage::of(&node, &pod).await;
            MeasuredPod { pod, usage }
        }
    };
    MeasuredPods { pace, pods: measure_each(candidates, measure).await }
}

/// Measures all pods, [`usage::RANKED`] at a time. The results are in the order in which the measurements end.
async fn measure_each<P, F: Future>(pods: Vec<P>, measure: impl FnMut(P) -> F) -> Vec<F::Output> {
    futures::stream::iter(pods).map(measure).buffer_unordered(usage::RANKED).collect().await
}

/// The measured pods that may still be evicted. The other pods have ended, or were evicted, during the measurement.
pub(super) fn still_candidates<T>(
    measured: Vec<MeasuredPod<T>>,
    candidates: &[Arc<Pod>],
) -> Vec<MeasuredPod<T>> {
    let uids: HashSet<&str> = candidates.iter().filter_map(|pod| pod.metadata.uid.as_deref()).collect();
    let is_candidate = |pod: &Pod| pod.metadata.uid.as_deref().is_some_and(|uid| uids.contains(uid));
    measured.into_iter().filter(|one| is_candidate(&one.pod)).collect()
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;
    use tokio::sync::oneshot;

    use super::*;

    #[tokio::test]
    async fn a_measurement_delays_nothing_and_is_the_only_one() {
        let mut measurement = Measurement::none();
        assert!(measurement.result().now_or_never().is_none(), "none was begun");
        let (end, ended) = oneshot::channel();
        measurement.begin(async move { ended.await.unwrap_or(0) });
        assert!(measurement.result().now_or_never().is_none(), "other events are received meanwhile");
        measurement.begin(async { 2 });
        end.send(1).unwrap();
        assert_eq!(measurement.result().await, 1);
        assert!(measurement.result().now_or_never().is_none(), "the second one was not begun");
        measurement.begin(async { 3 });
        assert_eq!(measurement.result().await, 3);
    }

    #[tokio::test]
    async fn a_pod_with_many_files_does_not_delay_the_measurement_of_others() {
        let both = tokio::sync::Barrier::new(2);
        let measure = |pod: usize| {
            let both = &both;
            async move {
                // The first measurement does not end before the second one has begun.
                both.wait().await;
                pod
            }
        };
        let mut measured =
            measure_each(vec![1, 2], measure).now_or_never().expect("measured at the same time");
        measured.sort_unstable();
        assert_eq!(measured, [1, 2]);
    }

    #[test]
    fn a_limited_number_of_pods_is_measured_at_the_same_time() {
        let mut begun = 0;
        let measure = |_pod: usize| {
            begun += 1;
            std::future::pending::<()>()
        };
        let pods = (0..usage::RANKED + 3).collect();
        assert!(measure_each(pods, measure).now_or_never().is_none());
        assert_eq!(begun, usage::RANKED);
    }

    #[test]
    fn a_pod_that_ended_during_the_measurement_is_not_evicted() {
        let pod = |uid: &str| -> Arc<Pod> {
            serde_json::from_value(serde_json::json!({"metadata": {"uid": uid}})).map(Arc::new).unwrap()
        };
        let measured = |uid, usage| MeasuredPod { pod: pod(uid), usage };
        let measured = vec![measured("ended", 1), measured("runs", 2)];
        let left = still_candidates(measured, &[pod("runs"), pod("new")]);
        assert_eq!(left.into_iter().map(|one| one.usage).collect::<Vec<i32>>(), [2]);
    }
}

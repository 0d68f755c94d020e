//! Desired pods of this node, with sums over them. Each change updates the sums, so its cost does not depend on the
//! number of pods.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use coracle_values::CollectMap;
use k8s_openapi::api::core::v1::{Pod, PodStatus};
use tokio::sync::watch;

use crate::cgroup::resources::{Amount, pod_requests};
use crate::cgroup::{QosClass, qos_class};
use crate::pod::admit::{HostPort, UsedResources, host_ports, other_requests};
use crate::pod::eviction::is_limited;
use crate::pod::probe::metrics::ProbeMetrics;
use crate::pod::state::has_ended;
use crate::server::PodView;

/// The desired pods of this node. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub(crate) struct Pods {
    state: Arc<RwLock<State>>,
    probes: ProbeMetrics,
}

#[derive(Debug, Default)]
struct State {
    by_uid: HashMap<String, Entry>,
    /// Number of pods that are neither rejected nor ended. `requested` is the sum of their requests.
    pods: usize,
    requested: Amount,
    /// Other resources that these pods request, see [`other_requests`], by name.
    others: BTreeMap<String, i128>,
    burstable_millis: i64,
    /// Host ports by pod uid. Most pods have none.
    ports: HashMap<String, Vec<HostPort>>,
    /// The uids of pods that end because their objects or manifests are gone.
    orphans: HashSet<String>,
    /// The uids of rejected static pods. They have no mirror pods.
    rejected_statics: HashSet<String>,
    /// Statuses that the API server does not have yet, by uid.
    statuses: HashMap<String, PodStatus>,
    /// The number of pods with limits on their disk usage.
    limited: watch::Sender<usize>,
    /// Whether the pods of the checkpoint and the static pods were added after the start of the agent.
    known: watch::Sender<bool>,
}

#[derive(Debug)]
struct Entry {
    pod: Arc<Pod>,
    share: Share,
}

/// A pod's share of the sums.
#[derive(Clone, Debug, Default)]
struct Share {
    /// None if the pod was rejected or has ended.
    requested: Option<Amount>,
    /// Empty if the pod was rejected or has ended.
    others: BTreeMap<String, i128>,
    burstable_millis: i64,
    /// Whether the pod has a limit on its disk usage.
    limited: bool,
}

// === impl Pods ===

impl Pods {
    /// All pods, in no particular order.
    pub(crate) fn all(&self) -> Vec<Arc<Pod>> {
        self.read().by_uid.values().map(|entry| Arc::clone(&entry.pod)).collect()
    }

    /// Requests of CPU and memory, and host ports, of all pods that have not ended, except the pod with this uid. The
    /// amounts of other resources are left out, see [`other_resources_used`](Self::other_resources_used).
    pub(crate) fn used_by_others(&self, uid: &str) -> UsedResources {
        let state = self.read();
        let own = state.by_uid.get(uid).and_then(|entry| entry.share.requested);
        let amount = own.unwrap_or_default();
        let others = state.ports.iter().filter(|(other, _)| *other != uid);
        UsedResources {
            pods: state.pods - usize::from(own.is_some()),
            requested: Amount {
                cpu_millis: state.requested.cpu_millis - amount.cpu_millis,
                memory: state.requested.memory - amount.memory,
            },
            others: BTreeMap::new(),
            ports: others.flat_map(|(_, ports)| ports).cloned().collect(),
        }
    }

    /// Requests of the resources `names` of all pods that have not ended, except the pod with this uid.
    pub(crate) fn other_resources_used(
        &self,
        uid: &str,
        names: impl IntoIterator<Item = String>,
    ) -> BTreeMap<String, i128> {
        let state = self.read();
        let own = state.by_uid.get(uid).map(|entry| &entry.share.others);
        let amount = |name: &str| {
            let sum = state.others.get(name).copied().unwrap_or_default();
            sum - own.and_then(|own| own.get(name)).copied().unwrap_or_default()
        };
        let amounts = names.into_iter().map(|name| {
            let amount = amount(&name);
            (name, amount)
        });
        amounts.collect_map()
    }

    /// Counts of the pods' probes.
    pub(crate) fn probe_metrics(&self) -> &ProbeMetrics {
        &self.probes
    }

    /// Host ports of all pods that have not ended.
    pub(crate) fn host_ports(&self) -> Vec<HostPort> {
        self.read().ports.values().flatten().cloned().collect()
    }

    /// Receiver of the number of pods with limits on their disk usage.
    pub(crate) fn limited(&self) -> watch::Receiver<usize> {
        self.read().limited.subscribe()
    }

    /// Records that the pods of the checkpoint and the static pods were added.
    pub(crate) fn set_known(&self) {
        self.read().known.send_replace(true);
    }

    /// Waits until the pods of the checkpoint and the static pods were added.
    pub(crate) async fn until_known(&self) {
        let mut known = self.read().known.subscribe();
        // The channel is never closed, because this value has the sender.
        let _closed = known.wait_for(|known| *known).await;
    }

    /// Millicores that burstable pods request.
    pub(crate) fn burstable_millis(&self) -> i64 {
        self.read().burstable_millis
    }

    /// Stores the newest version of a pod. A pod that was rejected or has ended on this node stays without requests.
    pub(crate) fn put(&self, uid: &str, pod: &Arc<Pod>) {
        let share = Share::of(pod);
        let ports: Vec<HostPort> = if has_ended(pod) { Vec::new() } else { host_ports(pod).collect() };
        let mut state = self.write();
        let was_released = state.by_uid.get(uid).is_some_and(|old| old.share.requested.is_none());
        state.add(&share);
        let entry = Entry { pod: Arc::clone(pod), share };
        if let Some(old) = state.by_uid.insert(uid.to_owned(), entry) {
            state.subtract(&old.share);
        }
        if ports.is_empty() {
            state.ports.remove(uid);
        } else {
            state.ports.insert(uid.to_owned(), ports);
        }
        if was_released {
            state.release(uid);
        }
    }

    /// Removes the requests of a pod that this node has rejected, before the API server has its final status. Otherwise
    /// other pods could be rejected because of requests that use no resources.
    pub(crate) fn release(&self, uid: &str) {
        self.write().release(uid);
    }

    /// Whether the requests of the pod are in the sums.
    pub(crate) fn is_counted(&self, uid: &str) -> bool {
        self.read().by_uid.get(uid).is_some_and(|entry| entry.share.requested.is_some())
    }

    /// Stores a status that the API server does not have yet. None removes it after the API server has accepted it. As
    /// upstream, a pod with a final status has no requests.
    pub(crate) fn report(&self, uid: &str, status: Option<PodStatus>) {
        let mut state = self.write();
        let Some(status) = status else { return drop(state.statuses.remove(uid)) };
        if matches!(status.phase.as_deref(), Some("Failed" | "Succeeded")) {
            state.release(uid);
        }
        state.statuses.insert(uid.to_owned(), status);
    }

    /// Records that a pod ends because its object or manifest is gone, until it is removed.
    pub(crate) fn add_orphan(&self, uid: &str) {
        self.write().orphans.insert(uid.to_owned());
    }

    /// Records that this node has rejected a static pod, until it is removed.
    pub(crate) fn add_rejected_static(&self, uid: &str) {
        self.write().rejected_statics.insert(uid.to_owned());
    }

    /// Removes a pod.
    pub(crate) fn remove(&self, uid: &str) {
        let mut state = self.write();
        state.orphans.remove(uid);
        state.rejected_statics.remove(uid);
        state.ports.remove(uid);
        state.statuses.remove(uid);
        if let Some(old) = state.by_uid.remove(uid) {
            state.subtract(&old.share);
        }
    }

    fn read(&self) -> RwLockReadGuard<'_, State> {
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, State> {
        self.state.write().unwrap_or_else(PoisonError::into_inner)
    }
}

impl PodView for Pods {
    fn pods(&self) -> Vec<Arc<Pod>> {
        self.all()
    }

    fn active(&self) -> usize {
        self.read().pods
    }

    fn orphans(&self) -> HashSet<String> {
        self.read().orphans.clone()
    }

    fn rejected_statics(&self) -> usize {
        self.read().rejected_statics.len()
    }

    fn status(&self, uid: &str) -> Option<PodStatus> {
        self.read().statuses.get(uid).cloned()
    }

    fn probes(&self) -> String {
        self.probes.render()
    }
}

// === impl State ===

impl State {
    /// Removes a pod's requests and host ports from the sums.
    fn release(&mut self, uid: &str) {
        self.ports.remove(uid);
        let Some(entry) = self.by_uid.get_mut(uid) else { return };
        let rest = Share { burstable_millis: entry.share.burstable_millis, ..Share::default() };
        let share = std::mem::replace(&mut entry.share, rest.clone());
        self.add(&rest);
        self.subtract(&share);
    }

    fn add(&mut self, share: &Share) {
        self.pods += usize::from(share.requested.is_some());
        let amount = share.requested.unwrap_or_default();
        self.requested.cpu_millis += amount.cpu_millis;
        self.requested.memory += amount.memory;
        for (name, amount) in &share.others {
            *self.others.entry(name.clone()).or_default() += amount;
        }
        self.burstable_millis += share.burstable_millis;
        if share.limited {
            self.limited.send_modify(|pods| *pods += 1);
        }
    }

    fn subtract(&mut self, share: &Share) {
        self.pods -= usize::from(share.requested.is_some());
        let amount = share.requested.unwrap_or_default();
        self.requested.cpu_millis -= amount.cpu_millis;
        self.requested.memory -= amount.memory;
        for (name, amount) in &share.others {
            if let Some(sum) = self.others.get_mut(name) {
                *sum -= amount;
            }
            // Remove the name if no pod requests the resource. Pods may use any name, so the map would grow without
            // limit.
            if self.others.get(name) == Some(&0) {
                self.others.remove(name);
            }
        }
        self.burstable_millis -= share.burstable_millis;
        if share.limited {
            self.limited.send_modify(|pods| *pods -= 1);
        }
    }
}

// === impl Share ===

impl Share {
    fn of(pod: &Pod) -> Self {
        let requested = pod_requests(pod);
        let is_burstable = qos_class(pod) == QosClass::Burstable;
        Self {
            requested: (!has_ended(pod)).then_some(requested),
            others: if has_ended(pod) { BTreeMap::new() } else { other_requests(pod) },
            burstable_millis: if is_burstable { requested.cpu_millis } else { 0 },
            limited: !has_ended(pod) && is_limited(pod),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pod(uid: &str, cpu: &str, port: i32, secret: &str, phase: &str) -> Arc<Pod> {
        let container = json!({"name": "c", "resources": {"requests": {"cpu": cpu}},
            "ports": [{"containerPort": 80, "hostPort": port}]});
        let pod = json!({"metadata": {"uid": uid, "name": uid, "namespace": "n"}, "status": {"phase": phase},
            "spec": {"containers": [container], "volumes": [{"name": "v", "secret": {"secretName": secret}}]}});
        Arc::new(serde_json::from_value(pod).unwrap())
    }

    fn sums(pods: &Pods) -> (usize, i64, usize, i64) {
        let used = pods.used_by_others("");
        (used.pods, used.requested.cpu_millis, used.ports.len(), pods.burstable_millis())
    }

    #[test]
    fn pods_with_limits_on_their_disk_are_counted_while_they_run() {
        let pods = Pods::default();
        let limited = |phase: &str| {
            let pod = json!({"metadata": {"uid": "l"}, "status": {"phase": phase}, "spec": {"containers": [
                {"name": "c", "resources": {"limits": {"ephemeral-storage": "1Mi"}}}]}});
            Arc::new(serde_json::from_value(pod).unwrap())
        };
        let count = pods.limited();
        pods.put("l", &limited("Running"));
        pods.put("free", &pod("free", "1", 0, "s", "Running"));
        pods.put("l", &limited("Running"));
        assert_eq!(*count.borrow(), 1);
        pods.put("l", &limited("Failed"));
        assert_eq!(*count.borrow(), 0);
        pods.remove("l");
        assert_eq!(*count.borrow(), 0);
    }

    #[tokio::test]
    async fn a_new_agent_does_not_know_its_pods_at_once() {
        let pods = Pods::default();
        let mut known = Box::pin(pods.until_known());
        assert!(futures::poll!(&mut known).is_pending());
        pods.set_known();
        known.await;
        pods.until_known().await;
    }

    #[test]
    fn other_resources_are_counted_while_their_pods_run() {
        let pods = Pods::default();
        let pod = |uid: &str, phase: &str, count: &str| {
            let requests = json!({"x.io/gpu": count, "cpu": "1", "hugepages-2Mi": "2Mi", "x.io/none": "0",
                "ephemeral-storage": "1Gi"});
            let pod = json!({"metadata": {"uid": uid}, "status": {"phase": phase}, "spec": {"containers": [
                {"name": "c", "resources": {"requests": requests, "limits": requests}}]}});
            Arc::new(serde_json::from_value(pod).unwrap())
        };
        let gpus = |uid: &str| pods.other_resources_used(uid, ["x.io/gpu".to_owned()])["x.io/gpu"];
        pods.put("a", &pod("a", "Running", "2"));
        pods.put("b", &pod("b", "Pending", "3"));
        pods.put("b", &pod("b", "Running", "3"));
        assert_eq!((gpus(""), gpus("a"), gpus("b")), (5, 3, 2));
        let all = ["ephemeral-storage", "hugepages-2Mi"].map(str::to_owned);
        let used: Vec<i128> = pods.other_resources_used("a", all).into_values().collect();
        assert_eq!(used, [1 << 30, 2 << 20]);
        assert_eq!(pods.read().others.len(), 3);
        pods.put("a", &pod("a", "Failed", "2"));
        assert_eq!(gpus(""), 3);
        pods.remove("b");
        assert!(pods.read().others.is_empty());
    }

    #[test]
    fn rejected_and_ended_pods_have_no_requests_before_the_api_server_has_their_status() {
        let (pods, huge) = (Pods::default(), pod("huge", "1000", 80, "s", "Pending"));
        pods.put("huge", &huge);
        assert!(pods.is_counted("huge"));
        pods.release("huge");
        assert_eq!(sums(&pods), (0, 0, 0, 1_000_000));
        pods.put("huge", &huge);
        assert_eq!((pods.is_counted("huge"), sums(&pods)), (false, (0, 0, 0, 1_000_000)));
        let status = |phase: &str| PodStatus { phase: Some(phase.to_owned()), ..PodStatus::default() };
        pods.put("job", &pod("job", "2", 0, "s", "Running"));
        pods.report("job", Some(status("Running")));
        assert_eq!(sums(&pods), (1, 2000, 0, 1_002_000));
        pods.report("job", Some(status("Succeeded")));
        assert_eq!(sums(&pods), (0, 0, 0, 1_002_000));
        pods.report("job", None);
        ["huge", "job"].iter().for_each(|uid| pods.remove(uid));
        assert_eq!(sums(&pods), (0, 0, 0, 0));
    }

    #[test]
    fn sums_follow_each_change_and_end_at_zero() {
        let pods = Pods::default();
        pods.put("a", &pod("a", "1", 80, "s", "Pending"));
        pods.put("b", &pod("b", "2", 0, "s", "Pending"));
        assert_eq!(sums(&pods), (2, 3000, 1, 3000));
        let beside = pods.used_by_others("a");
        assert_eq!((beside.pods, beside.requested.cpu_millis, beside.ports.len()), (1, 2000, 0));
        pods.put("a", &pod("a", "1", 80, "s", "Running"));
        assert_eq!(sums(&pods), (2, 3000, 1, 3000));
        pods.put("a", &pod("a", "1", 80, "s", "Failed"));
        assert_eq!(sums(&pods), (1, 2000, 0, 3000));
        assert_eq!((PodView::pods(&pods).len(), pods.active()), (2, 1));
        ["a", "of-runtime"].iter().for_each(|uid| pods.add_orphan(uid));
        pods.add_rejected_static("b");
        assert_eq!((pods.orphans().len(), pods.rejected_statics()), (2, 1));
        ["a", "b", "b", "of-runtime"].iter().for_each(|uid| pods.remove(uid));
        assert!(pods.orphans().is_empty() && pods.rejected_statics() == 0);
        assert_eq!(sums(&pods), (0, 0, 0, 0));
        assert!(pods.all().is_empty());
    }
}

//! Resize of a running pod: limits of its cgroup and of its containers.

use std::collections::HashMap;
use std::time::Instant;

use coracle_error_chain::chain;
use coracle_proto::cri;
use coracle_values::pod_resources::Side;
use coracle_values::quantity::value_of;
use k8s_openapi::api::core::v1::{Pod, ResourceRequirements};

use super::{Job, Report};
use crate::cgroup::resized_resources;
use crate::cgroup::resources::pod_limits;
use crate::pod::config::POD_UID;
use crate::pod::plan::ResizeContainer;
use crate::pod::resize::{is_decreasing, wanted};
use crate::pod::state::Shape;

/// A memory limit that decreases.
struct MemoryDecrease {
    /// Name of the container; None for the whole pod.
    container: Option<String>,
    limit: i64,
}

impl Job {
    /// Grows the pod's cgroup, updates the containers, and shrinks the pod's cgroup. A container that grows is updated
    /// after the containers that shrink.
    pub(super) async fn resize(&mut self, before: &Pod, containers: Vec<ResizeContainer>) {
        let began = Instant::now();
        let resized = self.try_resize(before, containers).await;
        self.node.metrics.resizes.applied(resized.is_ok(), began.elapsed());
        let report = match resized {
            Ok(()) => Report::ResizeDone { generation: self.pod.metadata.generation },
            Err(message) => Report::ResizeFailed { message },
        };
        self.report(report);
    }

    async fn try_resize(&self, before: &Pod, mut containers: Vec<ResizeContainer>) -> Result<(), String> {
        self.check_usage(before, &containers).await?;
        let cgroups = self.node.cgroups_of(&self.uid);
        cgroups.widen_pod(before, &self.pod).await.map_err(|error| chain(&error))?;
        let spec = self.spec();
        let shape = Shape::of(&spec);
        containers.sort_by_key(|c| {
            !shape.container(&c.name).is_some_and(|to| is_decreasing(&self.pod, to, &c.before))
        });
        for ResizeContainer { name, id, .. } in containers {
            let Some(container) = shape.container(&name) else { continue };
            let mut resources = resized_resources(&self.pod, container, self.node.machine);
            self.node.managers.lift_quota(&self.uid, &name, &mut resources);
            let request = cri::UpdateContainerResourcesRequest {
                container_id: id.clone(),
                linux: Some(resources),
                ..cri::UpdateContainerResourcesRequest::default()
            };
            let updated = self.node.runtime.update_container_resources(request).await;
            updated.map_err(|error| format!("cannot resize container {name}: {}", error.message()))?;
            let resources = wanted(&self.pod, container);
            self.report(Report::Resized { id, resources });
        }
        cgroups.ensure_pod(&self.pod).await.map_err(|error| chain(&error))?;
        Ok(())
    }

    /// Refuses memory limits below the current usage: the kernel would kill the container. Usage may still grow between
    /// this check and the update, as in the upstream kubelet.
    async fn check_usage(&self, before: &Pod, containers: &[ResizeContainer]) -> Result<(), String> {
        let spec = self.spec();
        let decreases = decreases(before, &self.pod, containers, &Shape::of(&spec));
        if decreases.is_empty() {
            return Ok(());
        }
        let filter = cri::ContainerStatsFilter {
            label_selector: [(POD_UID.to_owned(), self.uid.clone())].into(),
            ..cri::ContainerStatsFilter::default()
        };
        let request = cri::ListContainerStatsRequest { filter: Some(filter) };
        let stats = self.node.runtime.list_container_stats(request).await;
        let stats = stats.map_err(|error| format!("unable to read memory usage: {}", error.message()))?;
        let usage = stats.stats.into_iter().filter_map(|stats| {
            let name = stats.attributes?.metadata?.name;
            Some((name, stats.memory?.usage_bytes?.value))
        });
        check_above_usage(&decreases, &usage.collect())
    }
}

/// The memory limits that decrease between two versions of a pod.
fn decreases(
    before: &Pod,
    after: &Pod,
    containers: &[ResizeContainer],
    shape: &Shape<'_>,
) -> Vec<MemoryDecrease> {
    let is_less = |before: i64, after: i64| after > 0 && (before == 0 || after < before);
    let mut decreases = Vec::new();
    let limit = pod_limits(after).memory;
    let is_limited = |pod: &Pod| crate::cgroup::limits_memory(pod);
    let old = if is_limited(before) { pod_limits(before).memory } else { 0 };
    if is_limited(after) && is_less(old, limit) {
        decreases.push(MemoryDecrease { container: None, limit });
    }
    for one in containers {
        let of = |resources: Option<&ResourceRequirements>| {
            Side::Limits.get(resources, "memory").map(value_of).unwrap_or(0)
        };
        let Some(container) = shape.container(&one.name) else { continue };
        let limit = of(Some(&wanted(after, container)));
        if is_less(of(Some(&one.before)), limit) {
            decreases.push(MemoryDecrease { container: Some(one.name.clone()), limit });
        }
    }
    decreases
}

/// Refuses limits that are not above the usage of the containers, in upstream's words.
fn check_above_usage(decreases: &[MemoryDecrease], usage: &HashMap<String, u64>) -> Result<(), String> {
    let mut problems = Vec::new();
    for MemoryDecrease { container, limit } in decreases {
        let (what, used) = match container {
            None => ("pod".to_owned(), Some(usage.values().sum())),
            Some(name) => (format!("container {name:?}"), usage.get(name).copied()),
        };
        match used {
            None => problems.push(format!("missing {what} memory usage")),
            Some(used) if used >= limit.unsigned_abs() => problems.push(format!(
                "attempting to set {what} memory limit ({limit}) below current usage ({used})"
            )),
            Some(_) => {}
        }
    }
    match problems.as_slice() {
        [] => Ok(()),
        [one] => Err(format!("cannot decrease memory limits: {one}")),
        all => Err(format!("cannot decrease memory limits: [{}]", all.join(", "))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_of_the_pod_decreases_for_containers_that_inherit_it() {
        let pod = |memory: &str| -> Pod {
            let whole = serde_json::json!({"limits": {"memory": memory}});
            serde_json::from_value(
                serde_json::json!({"spec": {"resources": whole, "containers": [{"name": "a"}]}}),
            )
            .unwrap()
        };
        let (before, after) = (pod("30Mi"), pod("10Ki"));
        let spec = after.spec.clone().unwrap();
        let one = |pod: &Pod| wanted(pod, &spec.containers[0]);
        let containers =
            [ResizeContainer { name: "a".to_owned(), id: "a0".to_owned(), before: one(&before) }];
        let found = decreases(&before, &after, &containers, &Shape::of(&spec));
        let found: Vec<_> = found.iter().map(|d| (d.container.as_deref(), d.limit)).collect();
        assert_eq!(found, [(None, 10240), (Some("a"), 10240)]);
    }

    #[test]
    fn limits_below_the_usage_are_refused_in_upstreams_words() {
        let usage = HashMap::from([("a".to_owned(), 100), ("b".to_owned(), 50)]);
        let of = |container: Option<&str>, limit| MemoryDecrease {
            container: container.map(str::to_owned),
            limit,
        };
        assert_eq!(check_above_usage(&[of(None, 151), of(Some("a"), 101)], &usage), Ok(()));
        assert_eq!(
            check_above_usage(&[of(Some("a"), 100)], &usage).unwrap_err(),
            "cannot decrease memory limits: attempting to set container \"a\" memory limit (100) below current usage (100)"
        );
        assert_eq!(
            check_above_usage(&[of(None, 150), of(Some("c"), 1)], &usage).unwrap_err(),
            "cannot decrease memory limits: [attempting to set pod memory limit (150) below current usage (150), \
             missing container \"c\" memory usage]"
        );
    }
}

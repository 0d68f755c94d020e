//! The usage of an object, by the resource names of quotas.

use std::collections::BTreeMap;

use coracle_values::{Quantity, pod_resources};
use jiff::{SignedDuration, Timestamp};
use serde_json::Value;

use crate::Resource;

/// Amounts by the names that quotas use, in thousandths. 128 bits, so that no sum overflows.
pub type Usage = BTreeMap<String, i128>;

/// Number of devices that a request for all devices counts as. Source: `AllocationResultsMaxSize`.
const ALL_DEVICES: i128 = 32;
/// Old names of object counts: core resources that quotas count without `count/`.
pub(super) const PLAIN_COUNTS: &[&str] =
    &["configmaps", "replicationcontrollers", "resourcequotas", "secrets"];

/// The usage of an object at a time, by the resource names of quotas, in thousandths.
pub(super) fn of(kind: &Resource, object: &Value, now: Timestamp) -> Usage {
    let mut usage = Usage::new();
    if !is_counted(kind) {
        return usage;
    }
    usage.insert(format!("count/{}", kind.qualified_resource()), 1000);
    match (&*kind.group, &*kind.plural) {
        ("", "pods") => pod(&mut usage, object, now),
        ("", "services") => service(&mut usage, &object["spec"]),
        ("", "persistentvolumeclaims") => claim(&mut usage, object),
        ("resource.k8s.io", "resourceclaims") => devices(&mut usage, object),
        ("", plural) if PLAIN_COUNTS.contains(&plural) => {
            usage.insert(plural.to_owned(), 1000);
        }
        _ => {}
    }
    usage
}

/// Whether two objects of the kind can have different amounts.
pub(super) fn reads_object(kind: &Resource) -> bool {
    let special = ["pods", "services", "persistentvolumeclaims"];
    (kind.group.is_empty() && special.contains(&&*kind.plural))
        || (kind.group == "resource.k8s.io" && kind.plural == "resourceclaims")
}

/// Whether quotas count the objects of a kind. Source: `DefaultIgnoredResources`.
pub(super) fn is_counted(kind: &Resource) -> bool {
    let is_event = matches!(&*kind.group, "" | "events.k8s.io") && kind.plural == "events";
    kind.namespaced && kind.is_stored() && !is_event
}

/// The end of the grace period of a pod that is being deleted. As upstream for quotas, it is one grace period after the
/// deletion timestamp. Afterwards the pod counts only for `count/pods`, because its node may be lost. `None` for other
/// pods, and for pods that have ended. Source: `QuotaV1Pod`.
pub(super) fn grace_end(pod: &Value) -> Option<Timestamp> {
    if has_ended(pod) {
        return None;
    }
    let metadata = &pod["metadata"];
    let deletion: Timestamp = metadata["deletionTimestamp"].as_str()?.parse().ok()?;
    let grace = SignedDuration::from_secs(metadata["deletionGracePeriodSeconds"].as_i64()?);
    Some(deletion.checked_add(grace).unwrap_or(Timestamp::MAX))
}

fn has_ended(pod: &Value) -> bool {
    matches!(pod["status"]["phase"].as_str(), Some("Succeeded" | "Failed"))
}

fn pod(usage: &mut Usage, pod: &Value, now: Timestamp) {
    if has_ended(pod) || grace_end(pod).is_some_and(|end| now > end) {
        return;
    }
    usage.insert("pods".to_owned(), 1000);
    let Some(resources) = pod_resources::of_pod_json(pod) else { return };
    let pod_resources::ResourceTotals { requests, limits } = resources;
    let compute = |of: &pod_resources::Resources| {
        [
            ("cpu", of.cpu_millis),
            ("memory", of.memory.saturating_mul(1000)),
            ("ephemeral-storage", of.ephemeral_storage.saturating_mul(1000)),
        ]
    };
    for (name, amount) in compute(&requests) {
        usage.insert(name.to_owned(), amount);
        usage.insert(format!("requests.{name}"), amount);
    }
    for (name, amount) in compute(&limits) {
        usage.insert(format!("limits.{name}"), amount);
    }
    for (name, amount) in &requests.others {
        let amount = amount.saturating_mul(1000);
        if name.starts_with("hugepages-") {
            usage.insert(name.clone(), amount);
        }
        usage.insert(format!("requests.{name}"), amount);
    }
}

fn service(usage: &mut Usage, spec: &Value) {
    let ports = spec["ports"].as_array().map_or(&[][..], Vec::as_slice);
    let is_balanced = spec["type"] == "LoadBalancer";
    let counted = match spec["type"].as_str() {
        Some("LoadBalancer") if spec["allocateLoadBalancerNodePorts"] == false => {
            ports.iter().filter(|port| port["nodePort"].as_i64().unwrap_or(0) != 0).count()
        }
        Some("NodePort" | "LoadBalancer") => ports.len(),
        _ => 0,
    };
    usage.insert("services".to_owned(), 1000);
    usage.insert("services.nodeports".to_owned(), thousand(counted));
    usage.insert("services.loadbalancers".to_owned(), thousand(usize::from(is_balanced)));
}

fn claim(usage: &mut Usage, claim: &Value) {
    let annotation = &claim["metadata"]["annotations"]["volume.beta.kubernetes.io/storage-class"];
    let class = annotation.as_str().or(claim["spec"]["storageClassName"].as_str()).unwrap_or_default();
    let mut add = |name: &str, amount: i128| {
        usage.insert(name.to_owned(), amount);
        if !class.is_empty() {
            usage.insert(format!("{class}.storageclass.storage.k8s.io/{name}"), amount);
        }
    };
    add("persistentvolumeclaims", 1000);
    let bytes =
        |amount: &Value| Quantity::parse(amount.as_str()?).ok().map(|amount| i128::from(amount.value()));
    if let Some(requested) = bytes(&claim["spec"]["resources"]["requests"]["storage"]) {
        let allocated = bytes(&claim["status"]["allocatedResources"]["storage"]).unwrap_or(0);
        add("requests.storage", requested.max(allocated).saturating_mul(1000));
    }
}

/// Prefix of the quota names for the extended resources that device classes provide implicitly.
pub(super) const IMPLICIT: &str = "requests.deviceclass.resource.kubernetes.io/";

/// The requests of a pod for the extended resources that device classes provide implicitly. Empty if the pod does not
/// count at this time.
pub(super) fn implicit_requests(object: &Value, now: Timestamp) -> Usage {
    let mut usage = Usage::new();
    pod(&mut usage, object, now);
    usage.retain(|name, amount| name.starts_with(IMPLICIT) && *amount > 0);
    usage
}

/// The usage of a claim for the extended resources that device classes provide implicitly.
pub(super) fn implicit_devices(claim: &Value) -> Usage {
    let mut usage = Usage::new();
    devices(&mut usage, claim);
    usage.retain(|name, _| name.starts_with(IMPLICIT));
    usage
}

/// Adds the devices of a claim. They count by their class, and as the extended resource that the class provides
/// implicitly. `extended_claim.rs` has the exception for claims for the extended resources of a pod.
fn devices(usage: &mut Usage, claim: &Value) {
    for request in claim["spec"]["devices"]["requests"].as_array().into_iter().flatten() {
        let exact = &request["exactly"];
        let list = request["firstAvailable"].as_array().into_iter().flatten();
        // If a request has alternatives, each class counts with its largest amount.
        let mut largest: BTreeMap<&str, i128> = BTreeMap::new();
        for one in std::iter::once(exact).chain(list).filter(|one| one.is_object()) {
            let Some(class) = one["deviceClassName"].as_str() else { continue };
            let count = match one["allocationMode"].as_str() {
                Some("All") => ALL_DEVICES,
                _ => i128::from(one["count"].as_i64().unwrap_or(1)),
            };
            let known = largest.entry(class).or_default();
            *known = (*known).max(count);
        }
        for (class, count) in largest {
            let mut add = |name: String| {
                let amount = usage.entry(name).or_default();
                *amount = amount.saturating_add(count.saturating_mul(1000));
            };
            add(format!("{class}.deviceclass.resource.k8s.io/devices"));
            add(format!("{IMPLICIT}{class}"));
        }
    }
}

fn thousand(count: usize) -> i128 {
    i128::try_from(count).unwrap_or(0).saturating_mul(1000)
}

//! The QoS class of a pod, from what its containers request and are limited to.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Pod, ResourceRequirements};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use super::quantity::milli;

/// How dearly a pod's resources are kept; the node takes from the lower classes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum QosClass {
    /// Nothing requested, nothing limited.
    BestEffort,
    /// Something requested or limited.
    Burstable,
    /// Every container's processor and memory are limited, and requested in just that amount.
    Guaranteed,
}

impl QosClass {
    /// The name in `status.qosClass`.
    pub fn as_str(self) -> &'static str {
        match self {
            QosClass::BestEffort => "BestEffort",
            QosClass::Burstable => "Burstable",
            QosClass::Guaranteed => "Guaranteed",
        }
    }
}

/// The class of a pod. It never changes in a pod's life, so a class in the status is believed.
pub fn qos_class(pod: &Pod) -> QosClass {
    match pod.status.as_ref().and_then(|status| status.qos_class.as_deref()) {
        Some("Guaranteed") => QosClass::Guaranteed,
        Some("Burstable") => QosClass::Burstable,
        Some("BestEffort") => QosClass::BestEffort,
        _ => computed(pod),
    }
}

/// Each of processor and memory, where it is there and not zero.
type Amounts = BTreeMap<&'static str, i64>;

fn computed(pod: &Pod) -> QosClass {
    let Some(spec) = &pod.spec else { return QosClass::BestEffort };
    let whole = spec.resources.as_ref().filter(|r| r.requests.is_some() || r.limits.is_some());
    let containers = spec.containers.iter().chain(spec.init_containers.iter().flatten());
    let parts: Vec<Option<&ResourceRequirements>> = match whole {
        Some(whole) => vec![Some(whole)],
        None => containers.map(|c| c.resources.as_ref()).collect(),
    };
    let (mut requests, mut limits, mut all_limited) = (Amounts::new(), Amounts::new(), true);
    for part in parts {
        let requested = amounts(part.and_then(|r| r.requests.as_ref()));
        let limited = amounts(part.and_then(|r| r.limits.as_ref()));
        all_limited &= limited.len() == 2;
        add(&mut requests, requested);
        add(&mut limits, limited);
    }
    if requests.is_empty() && limits.is_empty() {
        QosClass::BestEffort
    } else if all_limited && requests == limits {
        QosClass::Guaranteed
    } else {
        QosClass::Burstable
    }
}

fn amounts(list: Option<&BTreeMap<String, Quantity>>) -> Amounts {
    let amount = |name| list.and_then(|list| list.get(name)).map(milli).filter(|n| *n > 0);
    ["cpu", "memory"].into_iter().filter_map(|name| amount(name).map(|n| (name, n))).collect()
}

fn add(sums: &mut Amounts, more: Amounts) {
    for (name, amount) in more {
        *sums.entry(name).or_default() += amount;
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn class(containers: serde_json::Value) -> QosClass {
        let pod = json!({"metadata": {"name": "p"}, "spec": {"containers": containers}});
        qos_class(&serde_json::from_value(pod).expect("pod"))
    }

    #[test]
    fn the_class_follows_requests_and_limits() {
        let full = json!({"name": "a", "resources": {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"cpu": "1", "memory": "1Gi"}}});
        let spelled = json!({"name": "a", "resources": {"requests": {"cpu": "1000m", "memory": "1024Mi"}, "limits": {"cpu": "1", "memory": "1Gi"}}});
        let half = json!({"name": "a", "resources": {"requests": {"cpu": "500m", "memory": "1Gi"}, "limits": {"cpu": "1", "memory": "1Gi"}}});
        let none = json!({"name": "b"});
        let zero = json!({"name": "b", "resources": {"requests": {"cpu": "0"}}});
        let other = json!({"name": "b", "resources": {"limits": {"example.com/gpu": "1"}}});
        assert_eq!(class(json!([full])), QosClass::Guaranteed);
        assert_eq!(class(json!([spelled])), QosClass::Guaranteed);
        assert_eq!(class(json!([full, none])), QosClass::Burstable);
        assert_eq!(class(json!([half])), QosClass::Burstable);
        assert_eq!(class(json!([none])), QosClass::BestEffort);
        assert_eq!(class(json!([zero])), QosClass::BestEffort);
        assert_eq!(class(json!([other])), QosClass::BestEffort);
    }

    #[test]
    fn pod_level_resources_decide_alone_and_a_status_is_believed() {
        let pod = json!({"spec": {"resources": {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"cpu": "1", "memory": "1Gi"}}, "containers": [{"name": "a"}]}});
        assert_eq!(qos_class(&serde_json::from_value(pod).expect("pod")), QosClass::Guaranteed);
        let pod = json!({"spec": {"containers": [{"name": "a"}]}, "status": {"qosClass": "Burstable"}});
        assert_eq!(qos_class(&serde_json::from_value(pod).expect("pod")), QosClass::Burstable);
    }
}

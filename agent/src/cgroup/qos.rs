//! The quality-of-service class of a pod.

use coracle_values::pod_resources::Side;
use coracle_values::qos::{CpuAndMemory, RequestsAndLimits};
use k8s_openapi::api::core::v1::{Pod, ResourceRequirements};

pub use coracle_values::qos::QosClass;

/// The class of a pod. A class in its status takes precedence, because the class of a pod never changes.
pub fn qos_class(pod: &Pod) -> QosClass {
    let recorded = pod.status.as_ref().and_then(|status| status.qos_class.as_deref());
    recorded.and_then(QosClass::from_name).unwrap_or_else(|| computed(pod))
}

fn computed(pod: &Pod) -> QosClass {
    let Some(spec) = &pod.spec else { return QosClass::BestEffort };
    if let Some(pod_level) = &spec.resources {
        return QosClass::of([part(Some(pod_level))]);
    }
    let containers = spec.containers.iter().chain(spec.init_containers.iter().flatten());
    QosClass::of(containers.map(|container| part(container.resources.as_ref())))
}

fn part(resources: Option<&ResourceRequirements>) -> RequestsAndLimits {
    let read = |side: Side| CpuAndMemory::read(|name| Some(side.get(resources, name)?.0.as_str()));
    RequestsAndLimits { requests: read(Side::Requests), limits: read(Side::Limits) }
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
    fn pod_level_resources_and_the_status_take_precedence() {
        let pod = json!({"spec": {"resources": {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"cpu": "1", "memory": "1Gi"}}, "containers": [{"name": "a"}]}});
        assert_eq!(qos_class(&serde_json::from_value(pod).expect("pod")), QosClass::Guaranteed);
        let pod = json!({"spec": {"containers": [{"name": "a"}]}, "status": {"qosClass": "Burstable"}});
        assert_eq!(qos_class(&serde_json::from_value(pod).expect("pod")), QosClass::Burstable);
    }
}

//! The quality-of-service class of the spec of a pod.

use coracle_values::qos::{CpuAndMemory, QosClass, RequestsAndLimits};
use serde_json::Value;

/// The quality-of-service class of a pod spec.
pub fn qos_class(spec: &Value) -> QosClass {
    let part = |owner: &Value| {
        let list = |list: &str| CpuAndMemory::read(|name| owner["resources"][list][name].as_str());
        let (requests, limits) = (list("requests"), list("limits"));
        // Missing requests count as equal to the limits, because defaulting runs later.
        let requests =
            CpuAndMemory { cpu: requests.cpu.or(limits.cpu), memory: requests.memory.or(limits.memory) };
        RequestsAndLimits { requests, limits }
    };
    if !spec["resources"].is_null() {
        return QosClass::of([part(spec)]);
    }
    let lists = ["containers", "initContainers"].map(|list| spec[list].as_array());
    QosClass::of(lists.into_iter().flatten().flatten().map(part))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn quality_of_service_follows_requests_and_limits() {
        let both = json!({"cpu": "1", "memory": "1Gi"});
        let cases = [
            (json!({}), "BestEffort"),
            (json!({"requests": {"cpu": "1"}}), "Burstable"),
            (json!({"limits": both, "requests": both}), "Guaranteed"),
            (json!({"limits": both}), "Guaranteed"),
            (json!({"limits": both, "requests": {"cpu": "1", "memory": "1"}}), "Burstable"),
            (json!({"limits": {"example.com/gpu": "1"}}), "BestEffort"),
        ];
        for (resources, expect) in cases {
            assert_eq!(
                qos_class(&json!({"containers": [{"resources": resources}]})).as_str(),
                expect,
                "for {resources}"
            );
        }
        let whole = json!({"containers": [{"name": "a"}], "resources": {"limits": both}});
        assert_eq!(qos_class(&whole), QosClass::Guaranteed, "pod-level resources");
    }
}

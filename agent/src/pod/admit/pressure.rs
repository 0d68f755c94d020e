//! Check of the node's conditions of pressure, as in the kubelet (`Admit` of `pkg/kubelet/eviction`). Critical pods are
//! admitted. Under memory pressure only pods of the class BestEffort are rejected, unless they tolerate the taint.

use coracle_values::toleration::is_tolerated;
use k8s_openapi::api::core::v1::{Pod, Taint};

use super::input::{AdmissionInput, refuse};
use crate::cgroup::{QosClass, qos_class};
use crate::node::Pressure;
use crate::pod::eviction::is_critical;
use crate::pod::state::{EVICTED, Verdict};

/// The taint of a node with memory pressure.
const MEMORY_TAINT: &str = "node.kubernetes.io/memory-pressure";

pub(super) fn check(input: &AdmissionInput<'_>) -> Result<(), Verdict> {
    let Pressure { memory, disk, pids } = input.pressure;
    if !(memory || disk || pids) || is_critical(input.pod) {
        return Ok(());
    }
    if !disk && !pids && tolerates_memory_pressure(input.pod) {
        return Ok(());
    }
    let conditions = [(memory, "MemoryPressure"), (disk, "DiskPressure"), (pids, "PIDPressure")];
    let present: Vec<&str> =
        conditions.into_iter().filter(|(is_true, _)| *is_true).map(|(_, name)| name).collect();
    let message = format!("Pod was rejected: The node had condition: [{}]. ", present.join(" "));
    Err(refuse(EVICTED, message))
}

fn tolerates_memory_pressure(pod: &Pod) -> bool {
    let taint = Taint { key: MEMORY_TAINT.to_owned(), effect: "NoSchedule".to_owned(), ..Taint::default() };
    let tolerations = pod.spec.as_ref().and_then(|spec| spec.tolerations.as_deref()).unwrap_or_default();
    qos_class(pod) != QosClass::BestEffort || is_tolerated(&taint, tolerations)
}

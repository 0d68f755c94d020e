//! Events about changes of the Node's status, as a kubelet records them. No I/O.

use std::sync::atomic::{AtomicBool, Ordering};

use k8s_openapi::api::core::v1::{Node, NodeStatus};

use crate::event_recorder::Level;

/// Conditions in the order of their events, with the reasons for True and False.
const CONDITIONS: [(&str, &str, &str); 4] = [
    ("MemoryPressure", "NodeHasInsufficientMemory", "NodeHasSufficientMemory"),
    ("DiskPressure", "NodeHasDiskPressure", "NodeHasNoDiskPressure"),
    ("PIDPressure", "NodeHasInsufficientPID", "NodeHasSufficientPID"),
    ("Ready", "NodeReady", "NodeNotReady"),
];

/// One event about the node.
#[derive(Debug, PartialEq)]
pub(super) struct NodeEvent {
    pub(super) level: Level,
    pub(super) reason: &'static str,
    pub(super) message: String,
}

/// Events for the change from `held` to `now`.
pub(super) fn of_status(name: &str, held: &NodeStatus, now: &NodeStatus) -> Vec<NodeEvent> {
    let condition = |of: &NodeStatus, type_: &str| {
        let mut all = of.conditions.iter().flatten();
        all.find(|one| one.type_ == type_).map(|one| one.status.clone())
    };
    let boot = |of: &NodeStatus| of.node_info.as_ref().map(|info| info.boot_id.clone()).unwrap_or_default();
    let mut events = Vec::new();
    if !boot(held).is_empty() && boot(held) != boot(now) {
        let message = format!("Node {name} has been rebooted, boot id: {}", boot(now));
        events.push(NodeEvent { level: Level::Warning, reason: "Rebooted", message });
    }
    for (type_, yes, no) in CONDITIONS {
        let (before, after) = (condition(held, type_), condition(now, type_));
        if before == after {
            continue;
        }
        match after.as_deref() {
            Some("True") => events.push(status_is(name, yes)),
            // A new node starts as NotReady; this first state is not an event.
            Some("False") if type_ != "Ready" || before.is_some() => events.push(status_is(name, no)),
            _ => {}
        }
    }
    events
}

/// The event of a cordon or uncordon. `known` has the state in the version that was received before, and gets the new
/// state.
pub(super) fn of_cordon(name: &str, known: &AtomicBool, now: &Node) -> Option<NodeEvent> {
    let cordoned = now.spec.as_ref().and_then(|spec| spec.unschedulable) == Some(true);
    let reason = if cordoned { "NodeNotSchedulable" } else { "NodeSchedulable" };
    (known.swap(cordoned, Ordering::Relaxed) != cordoned).then(|| status_is(name, reason))
}

fn status_is(name: &str, reason: &'static str) -> NodeEvent {
    let message = format!("Node {name} status is now: {reason}");
    NodeEvent { level: Level::Normal, reason, message }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn status(ready: &str, memory: &str, boot: &str) -> NodeStatus {
        let info = json!({"bootID": boot, "architecture": "", "containerRuntimeVersion": "", "kernelVersion": "",
            "kubeProxyVersion": "", "kubeletVersion": "", "machineID": "", "operatingSystem": "", "osImage": "",
            "systemUUID": ""});
        let conditions =
            json!([{"type": "MemoryPressure", "status": memory}, {"type": "Ready", "status": ready}]);
        serde_json::from_value(json!({"conditions": conditions, "nodeInfo": info})).expect("a status")
    }

    fn reasons(held: &NodeStatus, now: &NodeStatus) -> Vec<&'static str> {
        of_status("n", held, now).into_iter().map(|event| event.reason).collect()
    }

    #[test]
    fn conditions_of_a_new_node_are_events_except_that_it_is_not_ready() {
        let new = NodeStatus::default();
        assert_eq!(reasons(&new, &status("False", "False", "b")), ["NodeHasSufficientMemory"]);
        assert_eq!(reasons(&new, &status("True", "False", "b")), ["NodeHasSufficientMemory", "NodeReady"]);
    }

    #[test]
    fn each_transition_is_one_event() {
        let well = status("True", "False", "b");
        assert_eq!(reasons(&well, &well), [""; 0]);
        assert_eq!(reasons(&well, &status("False", "False", "b")), ["NodeNotReady"]);
        assert_eq!(reasons(&well, &status("True", "True", "b")), ["NodeHasInsufficientMemory"]);
        let unknown = status("Unknown", "Unknown", "b");
        assert_eq!(reasons(&well, &unknown), [""; 0], "the node does not report Unknown");
        assert_eq!(reasons(&unknown, &well), ["NodeHasSufficientMemory", "NodeReady"]);
    }

    #[test]
    fn a_reboot_is_a_warning_and_cordon_and_uncordon_are_events() {
        let events = of_status("n", &status("True", "False", "a"), &status("True", "False", "b"));
        let message = "Node n has been rebooted, boot id: b".to_owned();
        assert_eq!(events, [NodeEvent { level: Level::Warning, reason: "Rebooted", message }]);
        let node = |cordoned: bool| -> Node {
            serde_json::from_value(json!({"spec": {"unschedulable": cordoned}, "metadata": {}}))
                .expect("a node")
        };
        let known = AtomicBool::new(false);
        let received = [false, true, true, false, false, true];
        let reasons = received.map(|now| of_cordon("n", &known, &node(now)).map(|event| event.reason));
        let (cordon, uncordon) = (Some("NodeNotSchedulable"), Some("NodeSchedulable"));
        assert_eq!(reasons, [None, cordon, None, uncordon, None, cordon]);
    }
}

//! Taints of nodes: a new node gets the taint not-ready, and NoExecute taints get `timeAdded`.

use async_trait::async_trait;
use serde_json::{Value, json};

use super::{Admission, Admit, Attributes, Operation};
use crate::{error::Result, object_meta::now};

const NOT_READY: &str = "node.kubernetes.io/not-ready";

pub(super) struct NodeTaints;

#[async_trait]
impl Admit for NodeTaints {
    async fn mutate(
        &self,
        _admission: &Admission,
        attributes: &Attributes<'_>,
        object: &mut Value,
    ) -> Result<()> {
        let is_node = attributes.kind.kind == "Node" && attributes.kind.group.is_empty();
        if is_node && attributes.subresource.is_empty() {
            if attributes.operation == Operation::Create {
                add_not_ready(object);
            }
            set_time_added(object, &now());
        }
        Ok(())
    }
}

/// Adds the taint not-ready, which the node lifecycle controller removes.
fn add_not_ready(node: &mut Value) {
    let taint = json!({"key": NOT_READY, "effect": "NoSchedule"});
    let Some(node) = node.as_object_mut() else { return };
    let spec = node.entry("spec").or_insert_with(|| json!({}));
    let Some(spec) = spec.as_object_mut() else { return };
    let list = spec.entry("taints").or_insert_with(|| json!([]));
    if list.is_null() {
        *list = json!([]);
    }
    let Some(list) = list.as_array_mut() else { return };
    if !list.iter().any(|known| known["key"] == NOT_READY && known["effect"] == "NoSchedule") {
        list.push(taint);
    }
}

/// Sets `timeAdded` of NoExecute taints. `tolerationSeconds` are counted from this time, even after a restart of the
/// controller.
fn set_time_added(node: &mut Value, now: &str) {
    let list = node["spec"].get_mut("taints").and_then(Value::as_array_mut);
    for taint in list.into_iter().flatten() {
        if taint["effect"] == "NoExecute" && taint["timeAdded"].is_null() {
            taint["timeAdded"] = now.into();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_node_is_not_ready_once() {
        let mut node = json!({"spec": {}});
        add_not_ready(&mut node);
        add_not_ready(&mut node);
        assert_eq!(node["spec"]["taints"], json!([{"key": NOT_READY, "effect": "NoSchedule"}]));
    }

    #[test]
    fn no_execute_taints_get_the_time_once() {
        let mut node = json!({"spec": {"taints": [{"key": "a", "effect": "NoExecute"}, {"key": "b", "effect": "NoSchedule"}]}});
        set_time_added(&mut node, "1");
        set_time_added(&mut node, "2");
        assert_eq!(node["spec"]["taints"][0]["timeAdded"], "1");
        assert!(node["spec"]["taints"][1].get("timeAdded").is_none());
    }
}

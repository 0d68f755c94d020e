//! POST pods/binding: puts a pod on a node, once.

use serde_json::{Value, json};

use super::body_of;
use crate::{
    admit::Operation,
    call::Call,
    error::{ApiError, Result},
    field_manager::Writer,
    reply::{self, Reply},
    write::{self, Part, check_revision, text},
};

pub(crate) async fn run(call: &Call) -> Result<Reply> {
    call.dry_run()?;
    let (binding, warnings) = body_of(call)?;
    let name = &call.resource.name;
    if text(&binding, "name") != name {
        return Err(ApiError::bad_request("name in URL does not match name in Binding object"));
    }
    let causes = coracle_kinds::validate::binding(&binding);
    if !causes.is_empty() {
        return Err(ApiError::invalid(&call.kind, name, &causes));
    }
    let binding = call.state.admission.admit_subresource(call, Operation::Create, binding).await?;
    write::update(call, name, (Part::Internal, Writer::Update), |old| bound(call, old, &binding)).await?;
    Ok(reply::warned(reply::success(201, Value::Null), &warnings))
}

fn bound(call: &Call, old: &Value, binding: &Value) -> Result<Value> {
    let (kind, name) = (&call.kind, text(old, "name"));
    check_revision(kind, old, &binding["metadata"]["resourceVersion"])?;
    if !old["metadata"]["deletionTimestamp"].is_null() {
        return Err(ApiError::conflict(
            kind,
            name,
            format!("pod {name} is being deleted, cannot be assigned to a host"),
        ));
    }
    if let Some(node) = old["spec"]["nodeName"].as_str().filter(|node| !node.is_empty()) {
        return Err(ApiError::conflict(
            kind,
            name,
            format!("pod {name} is already assigned to node \"{node}\""),
        ));
    }
    let mut new = old.clone();
    if let (Some(metadata), uid @ Value::String(_)) =
        (write::metadata_mut(&mut new), &binding["metadata"]["uid"])
    {
        // The update compares it with the pod's.
        metadata.insert("uid".into(), uid.clone());
    }
    for (key, value) in binding["metadata"]["annotations"].as_object().into_iter().flatten() {
        new["metadata"]["annotations"][key] = value.clone();
    }
    new["spec"]["nodeName"] = binding["target"]["name"].clone();
    set_scheduled(&mut new);
    Ok(new)
}

fn set_scheduled(pod: &mut Value) {
    let scheduled = json!({
        "type": "PodScheduled", "status": "True", "lastProbeTime": null, "lastTransitionTime": write::now(),
    });
    let Some(status) = pod["status"].as_object_mut() else {
        pod["status"] = json!({"phase": "Pending", "conditions": [scheduled]});
        return;
    };
    let conditions = status.entry("conditions").or_insert_with(|| json!([]));
    let Some(list) = conditions.as_array_mut() else { return };
    list.retain(|condition| condition["type"] != "PodScheduled");
    list.push(scheduled);
}

//! POST pods/binding, and its older form POST bindings: assigns a pod to a node, once.

use coracle_admission_policies::RequestCost;
use coracle_kinds::{Resource, kind::by_resource};
use serde_json::{Value, json};

use super::body_of;
use crate::{
    admit::Operation,
    call::Call,
    error::{ApiError, Result},
    field_manager::Writer,
    media,
    reply::{self, Reply},
    request::ResourceInfo,
    verb::create::set_namespace,
    warnings::Warnings,
    write::{self, Part, check_revision, text},
};

pub(crate) async fn run(call: &Call) -> Result<Reply> {
    call.dry_run()?;
    let (binding, warnings) = body_of(call)?;
    let name = &call.resource.name;
    if text(&binding, "name") != name {
        return Err(ApiError::bad_request("name in URL does not match name in Binding object"));
    }
    check(&call.kind, name, &binding)?;
    let binding = call.admit_subresource(Operation::Create, binding).await?;
    // Admission may have changed the binding.
    check(&call.kind, name, &binding)?;
    bind(call, &binding).await?;
    Ok(reply::warned(reply::success(201, Value::Null), &warnings))
}

/// POST to the resource `bindings`: assigns the pod with the binding's name. Admission sees the resource `bindings`, as
/// upstream.
pub(crate) async fn create(call: &Call) -> Result<Reply> {
    media::negotiate(&call.headers, &call.info.query, &[])?;
    call.dry_run()?;
    let (mut binding, warnings) = call.object()?;
    set_namespace(call, &mut binding)?;
    let name = text(&binding, "name").to_owned();
    if name.is_empty() {
        return Err(ApiError::bad_request("Name parameter required."));
    }
    let attributes = call.attributes(Operation::Create, &name, None);
    call.state.admission.mutate(&attributes, &mut binding).await?;
    if text(&binding, "name") != name || text(&binding, "namespace") != call.namespace() {
        return Err(ApiError::internal("admission changed the identity of the binding"));
    }
    call.state.admission.validate(&attributes, &binding).await?;
    check(&call.kind, &name, &binding)?;
    bind(&of_pod(call, name)?, &binding).await?;
    Ok(reply::warned(reply::success(201, Value::Null), &warnings))
}

/// The equivalent call of the pod's subresource.
fn of_pod(call: &Call, name: String) -> Result<Call> {
    let kind = by_resource("", "v1", "pods").ok_or_else(ApiError::no_resource)?.clone();
    let resource = ResourceInfo {
        resource: kind.plural.clone().into_owned(),
        subresource: "binding".to_owned(),
        name,
        ..call.resource.clone()
    };
    Ok(Call {
        state: call.state.clone(),
        user: call.user.clone(),
        info: call.info.clone(),
        resource,
        kind,
        headers: call.headers.clone(),
        body: call.body.clone(),
        warnings: Warnings::default(),
        cost: RequestCost::default(),
        audit: call.audit.clone(),
    })
}

fn check(kind: &Resource, name: &str, binding: &Value) -> Result<()> {
    let causes = coracle_kinds::validate::binding(binding);
    if causes.is_empty() { Ok(()) } else { Err(ApiError::invalid(kind, name, &causes)) }
}

/// Assigns the pod of the call to the node of a binding.
async fn bind(call: &Call, binding: &Value) -> Result<()> {
    let name = &call.resource.name;
    write::update(call, name, (Part::Internal, Writer::Update), |old| bound(call, old, binding)).await?;
    Ok(())
}

fn bound(call: &Call, old: &Value, binding: &Value) -> Result<Value> {
    let (kind, name) = (&call.kind, text(old, "name"));
    check_revision(kind, old, &binding["metadata"]["resourceVersion"])?;
    if !old["metadata"]["deletionTimestamp"].is_null() {
        return Err(conflict(
            kind,
            name,
            &format!("pod {name} is being deleted, cannot be assigned to a host"),
        ));
    }
    if let Some(node) = old["spec"]["nodeName"].as_str().filter(|node| !node.is_empty()) {
        return Err(conflict(kind, name, &format!("pod {name} is already assigned to node \"{node}\"")));
    }
    if old["spec"]["schedulingGates"].as_array().is_some_and(|gates| !gates.is_empty()) {
        return Err(conflict(kind, name, &format!("pod {name} has non-empty .spec.schedulingGates")));
    }
    let mut new = old.clone();
    if let (Some(metadata), uid @ Value::String(_)) =
        (write::metadata_mut(&mut new), &binding["metadata"]["uid"])
    {
        // The update compares this uid with that of the stored pod.
        metadata.insert("uid".into(), uid.clone());
    }
    for field in ["annotations", "labels"] {
        for (key, value) in binding["metadata"][field].as_object().into_iter().flatten() {
            new["metadata"][field][key] = value.clone();
        }
    }
    new["spec"]["nodeName"] = binding["target"]["name"].clone();
    set_scheduled(&mut new);
    Ok(new)
}

/// The error of a refused binding. Upstream names the subresource in it.
fn conflict(kind: &Resource, name: &str, why: &str) -> ApiError {
    const RESOURCE: &str = "pods/binding";
    let mut error = ApiError::conflict(kind, name, why);
    error.message = format!("Operation cannot be fulfilled on {RESOURCE} \"{name}\": {why}");
    error.details["kind"] = RESOURCE.into();
    error
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

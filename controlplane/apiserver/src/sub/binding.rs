//! POST pods/binding, and its older form POST bindings: assigns a pod to a node, once.

use bytes::Bytes;
use coracle_admission_policies::RequestCost;
use coracle_kinds::{Resource, kind::by_resource};
use serde_json::{Map, Value, json};

use super::body_of;
use crate::{
    admit::Operation,
    cache::{Fields, Object, encode_fields},
    call::Call,
    error::{ApiError, Result},
    media,
    reply::{self, Reply},
    request::ResourceInfo,
    verb::create::set_namespace,
    warnings::Warnings,
    write::{self, check_revision, check_uid, text},
};

pub(crate) async fn run(call: &Call) -> Result<Reply> {
    call.dry_run()?;
    let (binding, warnings) = body_of(call).await?;
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
    let (mut binding, warnings) = call.object().await?;
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
    write::update_encoded(call, &call.resource.name, |pod| bound(&call.kind, pod, binding)).await
}

/// The encoded pod with the node, the annotations and the labels of a binding. The pod is not parsed to a tree, because
/// trees took most of the processor time of a binding.
fn bound(kind: &Resource, pod: &Object, binding: &Value) -> Result<Bytes> {
    let unreadable = || ApiError::internal(format!("cannot read the stored pod {}", pod.name()));
    let mut fields = pod.fields().ok_or_else(unreadable)?;
    let changed = {
        let object = |name: &str| fields.object(name).ok_or_else(unreadable);
        let (mut metadata, mut spec, mut status) = (object("metadata")?, object("spec")?, object("status")?);
        let old = json!({"metadata": {"name": pod.name(), "resourceVersion": pod.revision.to_string()}});
        check_revision(kind, &old, &binding["metadata"]["resourceVersion"])?;
        check_unbound(kind, pod, &metadata, &spec)?;
        check_uid(kind, pod.name(), &string(&metadata, "uid"), text(binding, "uid"))?;
        for field in ["annotations", "labels"] {
            add(&mut metadata, field, &binding["metadata"][field]);
        }
        spec.set("nodeName", &binding["target"]["name"]);
        set_scheduled(&mut status);
        // A bound pod needs no nominated node. Upstream clears the field with the gate
        // `ClearingNominatedNodeNameAfterBinding`.
        status.remove("nominatedNodeName");
        [("metadata", metadata.json()), ("spec", spec.json()), ("status", status.json())]
    };
    for (name, json) in changed {
        fields.set_text(name, json);
    }
    Ok(encode_fields(kind, &fields))
}

/// Refuses a pod that is being deleted, has a node or has scheduling gates.
fn check_unbound(kind: &Resource, pod: &Object, metadata: &Fields<'_>, spec: &Fields<'_>) -> Result<()> {
    let name = pod.name();
    if !metadata.value("deletionTimestamp").is_null() {
        return Err(conflict(
            kind,
            name,
            &format!("pod {name} is being deleted, cannot be assigned to a host"),
        ));
    }
    let node = string(spec, "nodeName");
    if !node.is_empty() {
        return Err(conflict(kind, name, &format!("pod {name} is already assigned to node \"{node}\"")));
    }
    if spec.value("schedulingGates").as_array().is_some_and(|gates| !gates.is_empty()) {
        return Err(conflict(kind, name, &format!("pod {name} has non-empty .spec.schedulingGates")));
    }
    Ok(())
}

/// A field that is text; empty if it is absent or has another type.
fn string(fields: &Fields<'_>, name: &str) -> String {
    match fields.value(name) {
        Value::String(text) => text,
        _ => String::new(),
    }
}

/// Adds entries to a map of the metadata. The new entries replace entries with the same key.
fn add(metadata: &mut Fields<'_>, field: &str, added: &Value) {
    let Some(added) = added.as_object().filter(|added| !added.is_empty()) else { return };
    let mut all = match metadata.value(field) {
        Value::Object(all) => all,
        _ => Map::new(),
    };
    all.extend(added.clone());
    metadata.set(field, &all.into());
}

/// The error of a refused binding. In upstream, this error names the subresource.
fn conflict(kind: &Resource, name: &str, why: &str) -> ApiError {
    const RESOURCE: &str = "pods/binding";
    let mut error = ApiError::conflict(kind, name, why);
    error.message = format!("Operation cannot be fulfilled on {RESOURCE} \"{name}\": {why}");
    error.details["kind"] = RESOURCE.into();
    error
}

fn set_scheduled(status: &mut Fields<'_>) {
    if status.is_empty() {
        status.set("phase", &"Pending".into());
    }
    let mut conditions = match status.value("conditions") {
        Value::Array(conditions) => conditions,
        _ => Vec::new(),
    };
    conditions.retain(|condition| condition["type"] != "PodScheduled");
    conditions.push(json!({
        "type": "PodScheduled", "status": "True", "lastProbeTime": null, "lastTransitionTime": write::now(),
    }));
    status.set("conditions", &conditions.into());
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::parses;

    fn stored(pod: &Value) -> Object {
        Object::of(by_resource("", "v1", "pods").unwrap(), "/pods/ns/p".into(), 7, pod)
    }

    #[test]
    fn a_binding_changes_only_its_fields_and_makes_no_tree_of_the_pod() {
        let kind = by_resource("", "v1", "pods").unwrap();
        let pod = stored(&json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": "p", "namespace": "ns", "uid": "u", "labels": {"app": "\"x\"", "zone": "b"}},
            "spec": {"containers": [{"name": "c", "image": "i", "args": ["\u{e9}\\n"]}], "priority": -1},
            "status": {"phase": "Pending", "nominatedNodeName": "m", "conditions": [
                {"type": "PodScheduled", "status": "False"}, {"type": "Other", "status": "True"}]},
        }));
        let binding = json!({"metadata": {"name": "p", "uid": "u", "resourceVersion": "7",
            "labels": {"zone": "a"}, "annotations": {"k": "v"}}, "target": {"kind": "Node", "name": "n"}});
        let before = parses::so_far();
        let encoded = bound(kind, &pod, &binding).unwrap();
        assert_eq!(parses::so_far(), before);
        let mut new = Object::from_stored("/pods/ns/p".into(), 8, encoded).value();
        let time = new["status"]["conditions"][1]["lastTransitionTime"].take();
        assert!(time.is_string());
        let expect = json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": "p", "namespace": "ns", "uid": "u", "resourceVersion": "8",
                "labels": {"app": "\"x\"", "zone": "a"}, "annotations": {"k": "v"}},
            "spec": {"containers": [{"name": "c", "image": "i", "args": ["\u{e9}\\n"]}], "priority": -1,
                "nodeName": "n"},
            "status": {"phase": "Pending", "conditions": [{"type": "Other", "status": "True"},
                {"type": "PodScheduled", "status": "True", "lastProbeTime": null, "lastTransitionTime": null}]},
        });
        assert_eq!(new, expect);
    }

    #[test]
    fn a_binding_of_another_pod_or_revision_is_refused() {
        let kind = by_resource("", "v1", "pods").unwrap();
        let refusal = |metadata: Value, given: Value| {
            let pod = stored(&json!({"metadata": metadata, "spec": {}}));
            let binding = json!({"metadata": given, "target": {"name": "n"}});
            bound(kind, &pod, &binding).map_err(|error| (error.code, error.message))
        };
        let of = |given: Value| refusal(json!({"name": "p", "uid": "u"}), given);
        assert!(of(json!({"uid": "", "resourceVersion": "0"})).is_ok());
        let (code, message) = of(json!({"uid": "v"})).unwrap_err();
        assert_eq!((code, message.contains("UID in precondition: v, UID in object meta: u")), (409, true));
        assert_eq!(of(json!({"resourceVersion": "6"})).unwrap_err().0, 409);
        let deleted = json!({"name": "p", "deletionTimestamp": "2026-01-01T00:00:00Z"});
        let (code, message) = refusal(deleted, json!({})).unwrap_err();
        assert_eq!((code, message.contains("pod p is being deleted")), (409, true));
    }
}

//! Prevents privilege escalation. Writing a role requires all rules of the role, or the verb `escalate`. Binding a role
//! requires all rules of the role, or the verb `bind`.

use async_trait::async_trait;
use coracle_kinds::kind::by_resource;
use serde_json::Value;

use super::{Admission, Admit, Attributes, Operation};
use crate::{
    authz::rbac::{self, rule::Rule},
    error::{ApiError, Result},
    offload,
    request::ResourceInfo,
};

pub(super) struct Escalation;

#[async_trait]
impl Admit for Escalation {
    async fn validate(
        &self,
        admission: &Admission,
        attributes: &Attributes<'_>,
        object: &Value,
    ) -> Result<()> {
        let writes = matches!(attributes.operation, Operation::Create | Operation::Update);
        if attributes.kind.group != rbac::GROUP || !writes || attributes.user.is_in("system:masters") {
            return Ok(());
        }
        if attributes.old.is_some_and(|old| is_garbage_collection(old, object)) {
            return Ok(());
        }
        match &*attributes.kind.kind {
            "Role" | "ClusterRole" => write(admission, attributes, object).await,
            "RoleBinding" | "ClusterRoleBinding" => bind(admission, attributes, &object["roleRef"]).await,
            _ => Ok(()),
        }
    }

    fn precedes_validation(&self) -> bool {
        true
    }
}

/// Whether an update changes only owners and finalizers. Source: `IsOnlyMutatingGCFields` of `registry/rbac`. Other
/// changes are checked, including labels: a label can add the rules of a role to an aggregated role.
fn is_garbage_collection(old: &Value, new: &Value) -> bool {
    let rest = |object: &Value| {
        let mut object = object.clone();
        if let Some(metadata) = object.get_mut("metadata").and_then(Value::as_object_mut) {
            let ignored = ["ownerReferences", "finalizers", "managedFields", "resourceVersion"];
            metadata.retain(|field, _| !ignored.contains(&field.as_str()));
        }
        object
    };
    rest(old) == rest(new)
}

async fn write(admission: &Admission, attributes: &Attributes<'_>, role: &Value) -> Result<()> {
    // The permission may be restricted to one name. It must not apply to names that are generated from this name.
    if may(admission, attributes, "escalate", &attributes.kind.plural, attributes.known_name()).await {
        return Ok(());
    }
    let mut wanted = Rule::list(role);
    if [role, attributes.old.unwrap_or(role)].iter().any(|role| role["aggregationRule"].is_object()) {
        // A controller sets the rules of an aggregated role later, so the user must have all rules. An update that
        // removes the aggregation rule also needs all rules, because the role then keeps rules that the controller
        // would remove.
        wanted.extend(Rule::all());
    }
    holds(admission, attributes, &wanted).await
}

async fn bind(admission: &Admission, attributes: &Attributes<'_>, role: &Value) -> Result<()> {
    let (kind, name) = (role["kind"].as_str(), role["name"].as_str().unwrap_or_default());
    let resource = if kind == Some("Role") { "roles" } else { "clusterroles" };
    if may(admission, attributes, "bind", resource, name).await {
        return Ok(());
    }
    let policy = admission.authorizers.policies.current(&admission.cache);
    match policy.bound(attributes.namespace, role) {
        Some(rules) => holds(admission, attributes, &rules).await,
        None => {
            let kind = by_resource(rbac::GROUP, "v1", resource).ok_or_else(ApiError::no_resource)?;
            Err(ApiError::not_found(kind, name))
        }
    }
}

/// Checks that the user holds all of these rules. The comparison of many rules waits for a slot.
async fn holds(admission: &Admission, attributes: &Attributes<'_>, wanted: &[Rule]) -> Result<()> {
    let policy = admission.authorizers.policies.current(&admission.cache);
    let compare = || rbac::holds(&policy, attributes.user, attributes.namespace, wanted);
    let held = offload::run_body(rbac::is_long(wanted), compare).await?;
    held.map_err(|why| ApiError::forbidden_object(attributes.kind, attributes.name, why))
}

async fn may(
    admission: &Admission,
    attributes: &Attributes<'_>,
    verb: &str,
    resource: &str,
    name: &str,
) -> bool {
    let resource = ResourceInfo {
        group: rbac::GROUP.to_owned(),
        version: "*".to_owned(),
        namespace: attributes.namespace.to_owned(),
        resource: resource.to_owned(),
        name: name.to_owned(),
        ..ResourceInfo::default()
    };
    admission.authorize_also(attributes.user, verb, resource).await.is_ok()
}

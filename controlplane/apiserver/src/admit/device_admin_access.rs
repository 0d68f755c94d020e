//! Refuses claims and claim templates with `adminAccess` in namespaces without a label. Such a claim gets devices that
//! other claims use.
//!
//! Source: `AuthorizedForAdmin` and `AuthorizedForAdminStatus` in upstream's `pkg/registry/resource`. No flag disables
//! this check.

use async_trait::async_trait;
use coracle_kinds::{
    kind::by_resource,
    validate::{Causes, Path},
};
use serde_json::Value;

use super::{Admission, Admit, Attributes, Operation};
use crate::error::{ApiError, Result};

/// Label of namespaces that permit admin access. Its value must be `true`.
const LABEL: &str = "resource.kubernetes.io/admin-access";

pub(super) struct DeviceAdminAccess;

/// The part of an object that a request writes.
#[derive(Clone, Copy)]
struct Target<'a> {
    kind: &'a str,
    /// The subresource, or empty.
    subresource: &'a str,
}

#[async_trait]
impl Admit for DeviceAdminAccess {
    async fn validate(
        &self,
        admission: &Admission,
        attributes: &Attributes<'_>,
        object: &Value,
    ) -> Result<()> {
        let is_write = matches!(attributes.operation, Operation::Create | Operation::Update);
        if !is_write || &*attributes.kind.group != "resource.k8s.io" {
            return Ok(());
        }
        let target = Target { kind: &attributes.kind.kind, subresource: attributes.subresource };
        let Some(path) = added(target, attributes.old, object) else { return Ok(()) };
        if is_labelled(admission, attributes.namespace) {
            return Ok(());
        }
        let mut causes = Causes::default();
        let why =
            format!("admin access to devices requires the `{LABEL}: true` label on the containing namespace");
        causes.forbidden(&path, &why);
        Err(ApiError::invalid(attributes.kind, attributes.name, &causes.into_list()))
    }

    fn precedes_validation(&self) -> bool {
        true
    }
}

fn is_labelled(admission: &Admission, name: &str) -> bool {
    let kind = by_resource("", "v1", "namespaces");
    let namespace = kind.and_then(|kind| admission.cache.get(kind, "", name));
    namespace.is_some_and(|namespace| {
        namespace.part(&[&["metadata", "labels"]])["metadata"]["labels"][LABEL] == "true"
    })
}

/// The path of the first `adminAccess` that a request adds. `None` if the old object has admin access: requests and
/// allocations are immutable, so an update keeps it.
fn added(target: Target<'_>, old: Option<&Value>, object: &Value) -> Option<Path> {
    let before = old.and_then(|old| devices(target, old)).and_then(|(_, list)| first(list));
    let (path, list) = devices(target, object)?;
    if before.is_some() {
        return None;
    }
    Some(path.index(first(list)?).field("adminAccess"))
}

/// The requests of a claim or a template, or the results in the status of a claim, with their path.
fn devices<'a>(target: Target<'_>, object: &'a Value) -> Option<(Path, &'a Value)> {
    // As upstream, the path is the same for claims and templates, and does not contain `exactly`.
    let requests = || Path::root("spec").field("devices").field("requests");
    match (target.kind, target.subresource) {
        ("ResourceClaim", "") => Some((requests(), &object["spec"]["devices"]["requests"])),
        ("ResourceClaimTemplate", "") => Some((requests(), &object["spec"]["spec"]["devices"]["requests"])),
        ("ResourceClaim", "status") => {
            let path = Path::root("status").field("allocation").field("devices").field("results");
            Some((path, &object["status"]["allocation"]["devices"]["results"]))
        }
        _ => None,
    }
}

/// The index of the first request or result with admin access. Subrequests (`firstAvailable`) do not have the field.
fn first(list: &Value) -> Option<usize> {
    let is_admin = |one: &Value| one["adminAccess"] == true || one["exactly"]["adminAccess"] == true;
    list.as_array()?.iter().position(is_admin)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const CLAIM: Target<'_> = Target { kind: "ResourceClaim", subresource: "" };
    const STATUS: Target<'_> = Target { kind: "ResourceClaim", subresource: "status" };

    fn path(target: Target<'_>, old: Option<&Value>, object: &Value) -> Option<String> {
        added(target, old, object).map(|path| path.to_string())
    }

    #[test]
    fn the_first_request_with_admin_access_is_found() {
        let plain = json!({"name": "a", "exactly": {"deviceClassName": "c", "adminAccess": false}});
        let admin = json!({"name": "b", "exactly": {"deviceClassName": "c", "adminAccess": true}});
        let either = json!({"name": "d", "firstAvailable": [{"name": "e", "deviceClassName": "c"}]});
        let spec = json!({"devices": {"requests": [plain, either, admin]}});
        let (claim, template) = (json!({"spec": spec}), json!({"spec": {"spec": spec}}));
        let expect = Some("spec.devices.requests[2].adminAccess".to_owned());
        assert_eq!(path(CLAIM, None, &claim), expect);
        assert_eq!(path(Target { kind: "ResourceClaimTemplate", ..CLAIM }, None, &template), expect);
        assert_eq!(path(CLAIM, Some(&json!({"spec": {}})), &claim), expect);
        assert_eq!(path(CLAIM, Some(&claim), &claim), None, "it had admin access before");
        assert_eq!(path(STATUS, None, &claim), None, "a status changes no request");
        for requests in [json!([plain, either]), json!([]), Value::Null] {
            assert_eq!(path(CLAIM, None, &json!({"spec": {"devices": {"requests": requests}}})), None);
        }
        assert_eq!(path(Target { kind: "DeviceClass", ..CLAIM }, None, &claim), None);
    }

    #[test]
    fn an_allocation_with_admin_access_is_found() {
        let status = |results: Value| json!({"status": {"allocation": {"devices": {"results": results}}}});
        let (plain, admin) = (json!({"request": "r"}), json!({"request": "r", "adminAccess": true}));
        let (without, with) = (status(json!([plain])), status(json!([plain, admin])));
        let expect = Some("status.allocation.devices.results[1].adminAccess".to_owned());
        assert_eq!(path(STATUS, Some(&without), &with), expect);
        assert_eq!(path(STATUS, Some(&json!({"status": {}})), &with), expect);
        assert_eq!(path(STATUS, Some(&with), &with), None);
        assert_eq!(path(STATUS, Some(&with), &without), None);
    }
}

//! Refuses changes of the status of a ResourceClaim without the permission for the changed part. The permission for
//! `resourceclaims/status` alone is not sufficient.
//!
//! | part | resource of the permission |
//! |---|---|
//! | allocation and reservations | `resourceclaims/binding`, in all namespaces |
//! | devices of a driver | `resourceclaims/driver` with the driver's name; the verb has a prefix |
//!
//! A service account with a token of the claim's node needs the prefix `associated-node:` or `arbitrary-node:`. Other
//! users need `arbitrary-node:`. Source: `AuthorizedForBinding` and `AuthorizedForDeviceStatus` of upstream's
//! `pkg/registry/resource`, v1.36.

use std::collections::{BTreeSet, HashMap};

use async_trait::async_trait;
use coracle_kinds::validate::{Causes, Path};
use serde_json::Value;

use super::{Admission, Admit, Attributes, Operation};
use crate::{
    authz::impersonation,
    error::{ApiError, Result},
    request::ResourceInfo,
};

const GROUP: &str = "resource.k8s.io";
/// Maximum number of refused drivers in an error.
const MAX_REFUSED: usize = 32;

pub(super) struct ClaimStatus;

#[async_trait]
impl Admit for ClaimStatus {
    async fn validate(
        &self,
        admission: &Admission,
        attributes: &Attributes<'_>,
        object: &Value,
    ) -> Result<()> {
        let is_claim = attributes.kind.is(GROUP, "ResourceClaim") && attributes.subresource == "status";
        let is_update = attributes.operation == Operation::Update;
        let Some(old) = attributes.old.filter(|_| is_claim && is_update) else { return Ok(()) };
        let (old, new) = (&old["status"], &object["status"]);
        let mut causes = Causes::default();
        binding(admission, attributes, old, new, &mut causes).await;
        // Without an allocation the status has no devices: `kinds::strategy` removes them.
        if !new["allocation"].is_null() {
            devices(admission, attributes, old, new, &mut causes).await;
        }
        if causes.is_empty() {
            return Ok(());
        }
        Err(ApiError::invalid(attributes.kind, attributes.name, &causes.into_list()))
    }

    fn precedes_validation(&self) -> bool {
        true
    }
}

/// Checks a change of the allocation and the reservations.
async fn binding(
    admission: &Admission,
    attributes: &Attributes<'_>,
    old: &Value,
    new: &Value,
    causes: &mut Causes,
) {
    if old["allocation"] == new["allocation"] && list(&old["reservedFor"]) == list(&new["reservedFor"]) {
        return;
    }
    let verb = attributes.verb;
    let asked = part(attributes, "binding");
    if let Err(error) = admission.authorize_also(attributes.user, verb, asked).await {
        let why = format!(
            "changing status.allocation or status.reservedFor requires resource=\"resourceclaims/binding\", \
             verb=\"{verb}\" permission: {error}"
        );
        causes.forbidden(&Path::root("status").field("allocation"), &why);
    }
}

/// Checks changes of the devices of drivers.
async fn devices(
    admission: &Admission,
    attributes: &Attributes<'_>,
    old: &Value,
    new: &Value,
    causes: &mut Causes,
) {
    let is_own_node =
        impersonation::node_of_account(attributes.user).is_some_and(|node| Some(node) == allocated_node(new));
    let prefixes: &[&str] =
        if is_own_node { &["associated-node", "arbitrary-node"] } else { &["arbitrary-node"] };
    let verbs: Vec<String> = prefixes.iter().map(|prefix| format!("{prefix}:{}", attributes.verb)).collect();
    let mut refused = 0;
    for driver in changed_drivers(old, new) {
        let Err(error) = may_change(admission, attributes, &verbs, driver).await else { continue };
        let why = format!(
            "changing status.devices requires resource=\"resourceclaims/driver\", verb=\"[{}]\" permission: {error}",
            verbs.join(" ")
        );
        causes.forbidden(&Path::root("status").field("devices"), &why);
        refused += 1;
        if refused == MAX_REFUSED {
            return;
        }
    }
}

/// Checks that the user has one of the verbs for a driver. Returns the error of the first verb.
async fn may_change(
    admission: &Admission,
    attributes: &Attributes<'_>,
    verbs: &[String],
    driver: &str,
) -> Result<()> {
    let mut first = Ok(());
    for verb in verbs {
        let asked = ResourceInfo {
            namespace: attributes.namespace.to_owned(),
            name: driver.to_owned(),
            ..part(attributes, "driver")
        };
        match admission.authorize_also(attributes.user, verb, asked).await {
            Ok(()) => return Ok(()),
            Err(error) if first.is_ok() => first = Err(error),
            Err(_) => {}
        }
    }
    first
}

/// The resource for a part of the status, as in RBAC rules, without a namespace.
fn part(attributes: &Attributes<'_>, subresource: &str) -> ResourceInfo {
    ResourceInfo {
        group: GROUP.to_owned(),
        version: attributes.kind.version.clone().into_owned(),
        resource: "resourceclaims".to_owned(),
        subresource: subresource.to_owned(),
        ..ResourceInfo::default()
    }
}

/// The elements of a list. Empty if the list is absent.
fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[][..], Vec::as_slice)
}

/// The drivers whose devices differ.
fn changed_drivers<'a>(old: &'a Value, new: &'a Value) -> BTreeSet<&'a str> {
    let key = |device: &'a Value| {
        ["driver", "pool", "device", "shareID"].map(|field| device[field].as_str().unwrap_or_default())
    };
    let mut before: HashMap<[&str; 4], &Value> =
        list(&old["devices"]).iter().map(|device| (key(device), device)).collect();
    let mut changed = BTreeSet::new();
    for device in list(&new["devices"]) {
        let key = key(device);
        if before.remove(&key) != Some(device) {
            changed.insert(key[0]);
        }
    }
    changed.extend(before.keys().map(|removed| removed[0]));
    changed
}

/// The node to which an allocation is restricted. `None` if the allocation is not restricted to exactly one named node.
fn allocated_node(status: &Value) -> Option<&str> {
    let [term] = list(&status["allocation"]["nodeSelector"]["nodeSelectorTerms"]) else { return None };
    let ([], [field]) = (list(&term["matchExpressions"]), list(&term["matchFields"])) else { return None };
    let [name] = list(&field["values"]) else { return None };
    let is_name = field["key"] == "metadata.name" && field["operator"] == "In";
    name.as_str().filter(|name| is_name && !name.is_empty())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn drivers_with_new_changed_and_removed_devices_are_found() {
        let device =
            |driver: &str, data: i64| json!({"driver": driver, "pool": "p", "device": "d", "data": data});
        let shared = |id: &str| json!({"driver": "s", "pool": "p", "device": "d", "shareID": id});
        let status = |devices: Vec<Value>| json!({"devices": devices});
        let old = status(vec![device("same", 1), device("changed", 1), device("removed", 1), shared("a")]);
        let new = status(vec![shared("b"), device("new", 1), device("changed", 2), device("same", 1)]);
        let found: Vec<&str> = changed_drivers(&old, &new).into_iter().collect();
        assert_eq!(found, ["changed", "new", "removed", "s"]);
        assert!(
            changed_drivers(&new, &new).is_empty() && changed_drivers(&json!({}), &Value::Null).is_empty()
        );
    }

    #[test]
    fn only_a_selector_of_one_name_names_the_node() {
        let of = |terms: Value| {
            let status = json!({"allocation": {"nodeSelector": {"nodeSelectorTerms": terms}}});
            allocated_node(&status).map(str::to_owned)
        };
        let field = |operator: &str, values: Value| json!({"key": "metadata.name", "operator": operator, "values": values});
        let named = json!({"matchFields": [field("In", json!(["n"]))]});
        assert_eq!(of(json!([named])).as_deref(), Some("n"));
        let labelled =
            json!({"matchFields": [field("In", json!(["n"]))], "matchExpressions": [{"key": "a"}]});
        for terms in [
            json!([]),
            json!([named, named]),
            json!([labelled]),
            json!([{"matchFields": [field("NotIn", json!(["n"]))]}]),
            json!([{"matchFields": [field("In", json!(["n", "m"]))]}]),
            json!([{"matchFields": [field("In", json!([""]))]}]),
        ] {
            assert_eq!(of(terms.clone()), None, "{terms}");
        }
    }
}

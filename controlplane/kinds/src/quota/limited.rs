//! Amounts and scopes that only a quota permits: `limitedResources` in the configuration of the plugin ResourceQuota.
//!
//! Source: `CheckRequest` in `resourcequota/controller.go` of the API server library.

use std::collections::BTreeSet;

use serde::Deserialize;
use serde_json::Value;

use super::scope::ScopeSelector;
use super::{Quota, Usage};
use crate::Resource;

/// An entry of `limitedResources`: a resource that can be used only if a quota limits it.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct LimitedResource {
    #[serde(default)]
    api_group: String,
    #[serde(default)]
    resource: String,
    /// An amount is limited if its name contains one of these texts.
    #[serde(default)]
    match_contains: Vec<String>,
    /// An object in one of these scopes needs a quota with the same scope. The resource of the entry does not matter.
    #[serde(default)]
    match_scopes: Vec<ScopeSelector>,
}

/// The reason why an object needs a quota that its namespace does not have, with upstream's message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Uncovered {
    /// The object uses amounts that no quota limits.
    Amounts(String),
    /// The object is in scopes that no quota has.
    Scopes(String),
}

// === impl LimitedResource ===

impl LimitedResource {
    /// Whether the entry names a resource.
    #[must_use]
    pub fn is_named(&self) -> bool {
        !self.resource.is_empty()
    }

    fn limits(&self, kind: &Resource, name: &str) -> bool {
        *self.api_group == *kind.group
            && *self.resource == *kind.plural
            && self.match_contains.iter().any(|part| name.contains(part.as_str()))
    }
}

/// The reason why an object needs a quota that the namespace does not have. `None` if the quotas suffice. `quotas` has
/// all quotas of the namespace. `usage` is the usage of the object that no pod pays for.
pub fn uncovered<'a>(
    limited: &[LimitedResource],
    quotas: impl Iterator<Item = &'a Quota>,
    kind: &Resource,
    object: &Value,
    usage: &Usage,
) -> Option<Uncovered> {
    let quotas: Vec<&Quota> = quotas.collect();
    let is_covered = |name: &str| {
        quotas.iter().any(|quota| quota.limits(name) && quota.tracks(kind) && quota.covers(kind, object))
    };
    let names = usage.iter().filter(|(_, amount)| **amount > 0).map(|(name, _)| name.as_str());
    let names = names.filter(|&name| limited.iter().any(|one| one.limits(kind, name)) && !is_covered(name));
    let names: Vec<&str> = names.collect();
    if !names.is_empty() {
        return Some(Uncovered::Amounts(format!("insufficient quota to consume: {}", names.join(","))));
    }
    let known: BTreeSet<&str> = quotas.iter().flat_map(|quota| quota.matched_scopes(kind, object)).collect();
    let scopes = limited.iter().flat_map(|one| &one.match_scopes);
    let scopes = scopes.filter(|scope| scope.matches(kind, object) && !known.contains(scope.name()));
    let scopes: Vec<String> = scopes.map(ToString::to_string).collect();
    let why = || format!("insufficient quota to match these scopes: [{}]", scopes.join(" "));
    (!scopes.is_empty()).then(|| Uncovered::Scopes(why()))
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;
    use serde_json::json;

    use super::super::whole_usage;
    use super::*;
    use crate::kind::by_kind;

    fn reason(limited: Value, quotas: &[Value], kind: &str, object: &Value) -> Option<String> {
        let limited: Vec<LimitedResource> = serde_json::from_value(limited).unwrap();
        let quotas: Vec<Quota> = quotas.iter().map(|spec| Quota::read(&json!({"spec": spec}))).collect();
        let kind = by_kind("v1", kind).unwrap();
        let usage = whole_usage(kind, object, Timestamp::UNIX_EPOCH);
        match uncovered(&limited, quotas.iter(), kind, object, &usage)? {
            Uncovered::Amounts(why) | Uncovered::Scopes(why) => Some(why),
        }
    }

    #[test]
    fn limited_amounts_need_a_quota() {
        let limited = json!([{"resource": "persistentvolumeclaims",
            "matchContains": [".storageclass.storage.k8s.io/requests.storage"]}]);
        let claim =
            json!({"spec": {"storageClassName": "fast", "resources": {"requests": {"storage": "1Gi"}}}});
        let name = "fast.storageclass.storage.k8s.io/requests.storage";
        let of = |quotas: &[Value]| reason(limited.clone(), quotas, "PersistentVolumeClaim", &claim);
        let why = format!("insufficient quota to consume: {name}");
        assert_eq!(of(&[]), Some(why.clone()));
        assert_eq!(of(&[json!({"hard": {"requests.storage": "9Gi"}})]), Some(why));
        assert_eq!(of(&[json!({"hard": {(name): "0"}})]), None, "the quota decides");
        let pod = json!({"spec": {"containers": []}});
        assert_eq!(reason(limited.clone(), &[], "Pod", &pod), None);
    }

    #[test]
    fn limited_scopes_need_a_quota_with_the_scope() {
        let scope = json!({"scopeName": "PriorityClass", "operator": "In", "values": ["high", "top"]});
        let limited = json!([{"resource": "pods", "matchScopes": [scope]}]);
        let pod = |class: &str| json!({"spec": {"priorityClassName": class, "containers": []}});
        let of = |quotas: &[Value], class: &str| reason(limited.clone(), quotas, "Pod", &pod(class));
        let why = "insufficient quota to match these scopes: [{PriorityClass In [high top]}]";
        assert_eq!(of(&[], "high").as_deref(), Some(why));
        assert_eq!(of(&[], "low"), None);
        let quota = |value: &str| {
            let scope = json!({"scopeName": "PriorityClass", "operator": "In", "values": [value]});
            json!({"hard": {"pods": "1"}, "scopeSelector": {"matchExpressions": [scope]}})
        };
        assert_eq!(of(&[quota("low"), quota("high")], "high"), None);
        assert_eq!(of(&[quota("low")], "high").as_deref(), Some(why));
    }
}

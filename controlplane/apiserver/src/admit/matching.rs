//! Match rules: select the requests to which a webhook, a policy or a binding applies.

use std::sync::Arc;

use coracle_kinds::{Resource, kind::by_resource, selector::LabelSelector};
use coracle_values::string_list;
use serde_json::Value;

use super::{Admission, Attributes, Operation};

/// The parsed match criteria: rules, selectors and `matchPolicy`.
#[derive(Debug, Default)]
pub(super) struct Matching {
    rules: Vec<Rule>,
    excluded: Vec<Rule>,
    /// Whether requests for other versions of the resource also match.
    equivalent: bool,
    namespaces: LabelSelector,
    objects: LabelSelector,
    /// Whether all resources match if there are no rules.
    all_without_rules: bool,
}

/// A parsed rule.
#[derive(Debug)]
struct Rule {
    operations: Vec<String>,
    groups: Vec<String>,
    versions: Vec<String>,
    resources: Vec<String>,
    /// The names of matching objects. Empty for all names.
    names: Vec<String>,
    scope: String,
}

/// The attributes of a request that match rules compare.
#[derive(Clone, Copy)]
struct Subject<'a> {
    operation: Operation,
    kind: &'a Resource,
    /// Namespace of the object. Empty for a cluster-scoped object.
    namespace: &'a str,
    /// Name of the object. Empty if the name is generated later.
    name: &'a str,
    subresource: &'a str,
}

// === impl Matching ===

impl Matching {
    /// Parses a webhook of a configuration.
    pub(super) fn of_webhook(hook: &Value) -> Self {
        Self::read(hook, "rules")
    }

    /// Parses `matchConstraints` of a policy.
    pub(super) fn of_policy(constraints: &Value) -> Self {
        Self::read(constraints, "resourceRules")
    }

    /// Parses `matchResources` of a binding, which may be absent.
    pub(super) fn of_binding(resources: &Value) -> Self {
        Self { all_without_rules: true, ..Self::read(resources, "resourceRules") }
    }

    fn read(fields: &Value, rules: &str) -> Self {
        let list = |field: &str| fields[field].as_array().into_iter().flatten().map(Rule::read).collect();
        let selector = |field: &str| LabelSelector::from_object(&fields[field]).unwrap_or_default();
        Self {
            rules: list(rules),
            excluded: list("excludeResourceRules"),
            equivalent: fields["matchPolicy"] != "Exact",
            namespaces: selector("namespaceSelector"),
            objects: selector("objectSelector"),
            all_without_rules: false,
        }
    }

    /// The version of the resource that the rules select. `None` if the request does not match.
    pub(super) fn find(
        &self,
        admission: &Admission,
        attributes: &Attributes<'_>,
        object: &Value,
    ) -> Option<Arc<Resource>> {
        let requested = attributes.kind;
        let resources = admission.registry.load();
        let requested = resources.find(&requested.group, &requested.version, &requested.plural)?;
        if self.version(&self.excluded, &resources, requested, attributes).is_some() {
            return None;
        }
        let kind = if self.rules.is_empty() && self.all_without_rules {
            requested.clone()
        } else {
            self.version(&self.rules, &resources, requested, attributes)?
        };
        (self.selects_namespace(admission, attributes, object) && self.selects_object(attributes, object))
            .then_some(kind)
    }

    fn version(
        &self,
        rules: &[Rule],
        resources: &coracle_kinds::Resources,
        requested: &Arc<Resource>,
        attributes: &Attributes<'_>,
    ) -> Option<Arc<Resource>> {
        let Attributes { operation, namespace, subresource, .. } = *attributes;
        // As upstream, a rule with `resourceNames` does not match an object whose name is generated later. Otherwise
        // the prefix of the name could exclude the object from a policy.
        let name = attributes.known_name();
        let fits = |kind: &Resource| {
            let subject = Subject { operation, kind, namespace, name, subresource };
            rules.iter().any(|rule| rule.matches(subject))
        };
        if fits(requested) {
            return Some(requested.clone());
        }
        if !self.equivalent {
            return None;
        }
        resources.served_versions(requested).iter().find(|other| fits(other)).cloned()
    }

    fn selects_namespace(&self, admission: &Admission, attributes: &Attributes<'_>, object: &Value) -> bool {
        if self.namespaces.is_empty() {
            return true;
        }
        if attributes.kind.is("", "Namespace") {
            return self.namespaces.matches_object(object);
        }
        if attributes.namespace.is_empty() {
            return true;
        }
        let namespace = by_resource("", "v1", "namespaces")
            .and_then(|kind| admission.cache.get(kind, "", attributes.namespace));
        namespace.is_some_and(|namespace| self.namespaces.matches_object(&namespace.value()))
    }

    fn selects_object(&self, attributes: &Attributes<'_>, object: &Value) -> bool {
        self.objects.is_empty()
            || self.objects.matches_object(object)
            || attributes.old.is_some_and(|old| self.objects.matches_object(old))
    }
}

// === impl Rule ===

impl Rule {
    fn read(rule: &Value) -> Self {
        let texts = |field: &str| string_list::texts(&rule[field]).map(str::to_owned).collect();
        Self {
            operations: texts("operations"),
            groups: texts("apiGroups"),
            versions: texts("apiVersions"),
            resources: texts("resources"),
            names: texts("resourceNames"),
            scope: rule["scope"].as_str().unwrap_or("*").to_owned(),
        }
    }

    fn matches(&self, subject: Subject<'_>) -> bool {
        let has = |list: &[String], wanted: &str| list.iter().any(|one| one == "*" || one == wanted);
        // A namespace is cluster-scoped, although requests for it have its name as their namespace.
        let is_cluster_scoped = subject.namespace.is_empty() || subject.kind.is("", "Namespace");
        let in_scope = match self.scope.as_str() {
            "Namespaced" => !is_cluster_scoped,
            "Cluster" => is_cluster_scoped,
            _ => true,
        };
        let of_resource = |one: &String| {
            let (resource, subresource) = one.split_once('/').unwrap_or((one, ""));
            (resource == "*" || resource == subject.kind.plural)
                && (subresource == "*" || subresource == subject.subresource)
        };
        in_scope
            && has(&self.operations, subject.operation.name())
            && has(&self.groups, &subject.kind.group)
            && has(&self.versions, &subject.kind.version)
            && self.resources.iter().any(of_resource)
            && (self.names.is_empty() || self.names.iter().any(|name| name == subject.name))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn matches(mut rule: Value, plural: &str, namespace: &str, subresource: &str) -> bool {
        let kind = by_resource("", "v1", plural).unwrap();
        for (field, value) in
            [("operations", json!(["CREATE"])), ("apiGroups", json!([""])), ("apiVersions", json!(["v1"]))]
        {
            if rule[field].is_null() {
                rule[field] = value;
            }
        }
        let subject = Subject { operation: Operation::Create, kind, namespace, name: "x", subresource };
        Rule::read(&rule).matches(subject)
    }

    #[test]
    fn rules_select_operations_resources_and_scopes() {
        assert!(matches(json!({"resources": ["pods"]}), "pods", "ns", ""));
        assert!(!matches(json!({"resources": ["pods"]}), "pods", "ns", "status"));
        assert!(matches(json!({"resources": ["pods/*"]}), "pods", "ns", "status"));
        assert!(matches(json!({"resources": ["*/status"]}), "pods", "ns", "status"));
        assert!(matches(json!({"resources": ["*/*"]}), "pods", "ns", ""));
        assert!(!matches(json!({"resources": ["*"], "operations": ["DELETE"]}), "pods", "ns", ""));
        assert!(matches(json!({"resources": ["*"], "operations": ["*"]}), "pods", "ns", ""));
        assert!(!matches(json!({"resources": ["*"], "apiGroups": ["apps"]}), "pods", "ns", ""));
        assert!(!matches(json!({"resources": ["*"], "scope": "Cluster"}), "pods", "ns", ""));
        assert!(matches(json!({"resources": ["*"], "scope": "Cluster"}), "namespaces", "ns", ""));
        assert!(!matches(json!({"resources": ["*"], "scope": "Namespaced"}), "namespaces", "ns", ""));
        assert!(matches(json!({"resources": ["*"], "resourceNames": ["x"]}), "pods", "ns", ""));
        assert!(!matches(json!({"resources": ["*"], "resourceNames": ["y"]}), "pods", "ns", ""));
    }
}

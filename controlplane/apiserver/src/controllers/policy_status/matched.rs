//! The kinds that a policy names.

use std::{
    hash::{DefaultHasher, Hash as _, Hasher as _},
    sync::Arc,
};

use coracle_admission_policies::TypedKind;
use coracle_cel::Type;
use coracle_kinds::{Resource, Resources};
use coracle_values::string_list::texts;
use serde_json::Value;

/// Maximum number of kinds whose types are checked. Source: `maxTypesToCheck`.
const MAX_KINDS: usize = 10;

/// Maximum number of resources of a policy that are looked up. The names in a rule are combined, so a small policy can
/// name billions of resources.
const MAX_NAMES: usize = 1000;

/// Maximum bytes of a group, a version or a resource (DNS names). Longer names are left out: each is hashed for each
/// combination.
const MAX_NAME_BYTES: usize = 253;

/// The kinds that a policy names and that are served.
pub(super) struct Matched {
    /// The matched kinds, sorted by group, version and kind.
    kinds: Vec<Arc<Resource>>,
    /// The kind of the parameters. `None` without a `paramKind`.
    params: Option<Params>,
}

enum Params {
    Known(Arc<Resource>),
    Unknown,
}

/// The names of a policy's resources and of its kind of parameters, as hashes. The combined names of a small policy
/// can take a hundred times its size. A hash collision only causes an unnecessary check.
#[derive(Debug, Default)]
pub(super) struct Names {
    /// Group, version and plural name.
    resources: Vec<u64>,
    /// Group, version and kind.
    params: Option<u64>,
}

// === impl Matched ===

impl Matched {
    /// Finds the first kinds that the rules of a policy's `spec` name.
    pub(super) fn find(set: &Resources, spec: &Value) -> Matched {
        let mut kinds: Vec<Arc<Resource>> = Vec::new();
        for [group, version, plural] in resources(spec) {
            let Some(resource) = set.find(group, version, plural) else { continue };
            if kinds.len() < MAX_KINDS && !kinds.iter().any(|known| Arc::ptr_eq(known, resource)) {
                kinds.push(resource.clone());
            }
        }
        kinds.sort_by(|a, b| (&a.group, &a.version, &a.kind).cmp(&(&b.group, &b.version, &b.kind)));
        let params = params(spec).map(|[group, version, kind]| {
            set.find_kind(group, version, kind).map_or(Params::Unknown, |kind| Params::Known(kind.clone()))
        });
        Matched { kinds, params }
    }

    /// The types of the kinds, and the type of the parameters. Kinds without a schema are left out. The type of a kind
    /// is made when the iterator reaches it.
    pub(super) fn types(self) -> (impl Iterator<Item = TypedKind>, Option<Type>) {
        let typed = |resource: Arc<Resource>| {
            let name = format!("{}/{}, Kind={}", resource.group, resource.version, resource.kind);
            Some(TypedKind { name, object: resource.strategy().cel_type()? })
        };
        let kinds = self.kinds.into_iter().filter_map(typed);
        let params = self.params.map(|params| match params {
            Params::Known(resource) => resource.strategy().cel_type().unwrap_or(Type::Dyn),
            Params::Unknown => Type::Dyn,
        });
        (kinds, params)
    }
}

// === impl Names ===

impl Names {
    /// Reads the names from the `spec` of a policy.
    pub(super) fn read(spec: &Value) -> Names {
        Names { resources: resources(spec).map(digest).collect(), params: params(spec).map(digest) }
    }

    /// Whether the names include one of these resources.
    pub(super) fn include_any(&self, resources: &[Arc<Resource>]) -> bool {
        resources.iter().any(|resource| {
            let digest_of = |name: &str| digest([&resource.group, &resource.version, name]);
            self.resources.contains(&digest_of(&resource.plural))
                || self.params == Some(digest_of(&resource.kind))
        })
    }
}

fn digest(names: [&str; 3]) -> u64 {
    let mut hasher = DefaultHasher::new();
    names.hash(&mut hasher);
    hasher.finish()
}

/// The resources of the new set that the old set does not have in this form.
pub(super) fn changed(old: &Resources, new: &Resources) -> Vec<Arc<Resource>> {
    let mut found = Vec::new();
    for version in new.group_versions() {
        let former = old.group_version(&version.group, &version.version);
        // Group versions without a change are shared.
        if former.is_some_and(|former| Arc::ptr_eq(former, version)) {
            continue;
        }
        for resource in &version.resources {
            let known = old.find(&resource.group, &resource.version, &resource.plural);
            if known.is_none_or(|known| !Arc::ptr_eq(known, resource)) {
                found.push(resource.clone());
            }
        }
    }
    found
}

/// Group, version and plural name of the resources that the rules name, in upstream's order. A rule with a wildcard in
/// its groups or versions names no resource.
fn resources(spec: &Value) -> impl Iterator<Item = [&str; 3]> {
    let rules = spec["matchConstraints"]["resourceRules"].as_array().into_iter().flatten();
    rules.flat_map(of_rule).take(MAX_NAMES)
}

fn of_rule(rule: &Value) -> impl Iterator<Item = [&str; 3]> {
    let (groups, versions) = (exact(&rule["apiGroups"]), exact(&rule["apiVersions"]));
    let mut plurals = sorted(&rule["resources"]);
    plurals.retain(|name| !name.contains(['*', '/']));
    let mut places = [0_usize; 3];
    // A nested loop as an iterator: the last name changes first.
    std::iter::from_fn(move || {
        let [group, version, plural] = &mut places;
        let names = [*groups.get(*group)?, *versions.get(*version)?, *plurals.get(*plural)?];
        *plural += 1;
        if *plural == plurals.len() {
            (*plural, *version) = (0, *version + 1);
        }
        if *version == versions.len() {
            (*version, *group) = (0, *group + 1);
        }
        Some(names)
    })
}

/// The names in their order. The list is empty if there is a wildcard.
fn exact(list: &Value) -> Vec<&str> {
    if texts(list).any(|name| name.contains('*')) { Vec::new() } else { sorted(list) }
}

/// The names in their order, without names that are too long for a resource.
fn sorted(list: &Value) -> Vec<&str> {
    let mut names: Vec<&str> = texts(list).filter(|name| name.len() <= MAX_NAME_BYTES).collect();
    names.sort_unstable();
    names
}

/// Group, version and kind of the parameters.
fn params(spec: &Value) -> Option<[&str; 3]> {
    let params = spec["paramKind"].as_object()?;
    let text = |field: &str| params.get(field).and_then(Value::as_str).unwrap_or_default();
    let api_version = text("apiVersion");
    let (group, version) = api_version.split_once('/').unwrap_or(("", api_version));
    Some([group, version, text("kind")])
}

#[cfg(test)]
mod tests {
    use coracle_kinds::kind::built_in;
    use serde_json::json;

    use super::*;

    fn spec(groups: &[&str], versions: &[&str], resources: &[&str]) -> Value {
        json!({"matchConstraints": {"resourceRules": [
            {"apiGroups": groups, "apiVersions": versions, "resources": resources}]}})
    }

    fn names(spec: &Value) -> Vec<String> {
        let (kinds, _) = Matched::find(built_in(), spec).types();
        kinds.map(|kind| kind.name).collect()
    }

    #[test]
    fn only_exact_names_are_found() {
        let both =
            spec(&["apps", ""], &["v1"], &["statefulsets", "pods", "pods/exec", "deployments", "none"]);
        assert_eq!(names(&both), ["/v1, Kind=Pod", "apps/v1, Kind=Deployment", "apps/v1, Kind=StatefulSet"]);
        assert_eq!(names(&spec(&["apps"], &["v1"], &["*", "deployments"])), ["apps/v1, Kind=Deployment"]);
        assert!(names(&spec(&["apps"], &["v1", "*"], &["deployments"])).is_empty());
        assert!(names(&spec(&["*"], &["v1"], &["deployments"])).is_empty());
        assert!(names(&spec(&["apps"], &[], &["deployments"])).is_empty());
        assert!(names(&json!({})).is_empty());
    }

    #[test]
    fn kinds_and_names_are_limited() {
        let plurals = [
            "bindings",
            "configmaps",
            "endpoints",
            "events",
            "limitranges",
            "namespaces",
            "nodes",
            "persistentvolumeclaims",
            "persistentvolumes",
            "pods",
            "podtemplates",
            "secrets",
            "services",
        ];
        assert_eq!(names(&spec(&[""], &["v1"], &plurals)).len(), MAX_KINDS);
        let many: Vec<String> = (0..10_000).map(|number| format!("x{number}")).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        assert_eq!(Names::read(&spec(&many, &many, &many)).resources.len(), MAX_NAMES);
        let long = "x".repeat(MAX_NAME_BYTES + 1);
        assert!(Names::read(&spec(&[&long], &many, &many)).resources.is_empty());
    }

    #[test]
    fn a_changed_resource_concerns_the_policies_that_name_it() {
        let resource = |group: &str, version: &str, plural: &str| {
            built_in().find(group, version, plural).unwrap().clone()
        };
        let (deployments, pods) = (resource("apps", "v1", "deployments"), resource("", "v1", "pods"));
        let with = Resources::new(vec![deployments.clone(), pods.clone()]);
        let without = Resources::new(vec![deployments.clone()]);
        let found = changed(&without, &with);
        assert!(found.len() == 1 && Arc::ptr_eq(&found[0], &pods));
        assert!(changed(&with, &without).is_empty() && changed(&with, &with).is_empty());
        let named = Names::read(&spec(&[""], &["v1"], &["pods"]));
        assert!(named.include_any(&found) && !named.include_any(&[deployments]));
        let params = Names::read(&json!({"paramKind": {"apiVersion": "v1", "kind": "Pod"}}));
        assert!(params.include_any(&found));
    }

    #[test]
    fn parameters_of_an_unknown_kind_have_any_type() {
        let of = |kind: Value| Matched::find(built_in(), &json!({"paramKind": kind})).types().1;
        assert!(matches!(of(json!({"apiVersion": "v1", "kind": "ConfigMap"})), Some(Type::Object(_))));
        assert_eq!(of(json!({"apiVersion": "a.b/v1", "kind": "C"})), Some(Type::Dyn));
        assert_eq!(Matched::find(built_in(), &json!({})).types().1, None);
    }
}

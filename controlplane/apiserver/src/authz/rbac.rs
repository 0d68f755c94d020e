//! The RBAC authorizer: the roles that are bound to a user and its groups.
//!
//! An index by user and group is built from the watch cache after each change of roles and bindings. A request reads
//! only the index.

pub(crate) mod rule;

use std::{
    collections::HashMap,
    sync::{Arc, PoisonError, RwLock},
};

use coracle_kinds::{Resource, initializers::is_uninitialized, kind::by_resource};
use serde_json::Value;

use super::{AccessAttributes, Authorizer, Deciding, Decision, RulesScope, UserRules};
use crate::{authn::User, cache::Cache, object_meta::text, offload};
use rule::Rule;

pub(crate) const GROUP: &str = "rbac.authorization.k8s.io";
const RESOURCES: [&str; 4] = ["roles", "clusterroles", "rolebindings", "clusterrolebindings"];

/// Maximum number of short rules that are compared on the async workers.
const FEW_RULES: usize = 20;
/// Maximum number of missing rules in an error.
const MAX_NAMED_RULES: usize = 200;
/// Maximum characters of a word in an error.
const MAX_NAMED_CHARS: usize = 256;

/// The index, and the newest revision of each kind at or before which it was built.
#[derive(Default)]
pub(crate) struct Policies(RwLock<Option<([u64; RESOURCES.len()], Arc<Policy>)>>);

/// Rules by subject and namespace.
#[derive(Default)]
pub(crate) struct Policy {
    /// Rules by namespace (empty for cluster roles) and name.
    roles: HashMap<(String, String), Arc<[Rule]>>,
    users: HashMap<String, Vec<Grant>>,
    groups: HashMap<String, Vec<Grant>>,
}

/// Rules of a subject in one namespace. `None` for all namespaces.
struct Grant {
    namespace: Option<String>,
    rules: Arc<[Rule]>,
}

/// Allows what the roles of a user allow.
pub(super) struct Rbac(pub(super) Arc<Policies>);

impl Authorizer for Rbac {
    fn authorize<'a>(&'a self, attributes: &'a AccessAttributes<'a>) -> Deciding<'a> {
        Decision::allow_if(allows(&self.0, attributes), "a role of the user allows it").ready()
    }

    fn add_rules(&self, of: &RulesScope<'_>, found: &mut UserRules) {
        let policy = self.0.current(of.cache);
        found.rules.extend(policy.rules(of.user, of.namespace).cloned());
    }
}

fn allows(policies: &Policies, attributes: &AccessAttributes<'_>) -> bool {
    let namespace = attributes.info.resource.as_ref().map_or("", |resource| &resource.namespace);
    let policy = policies.current(attributes.cache);
    let name = attributes.info.object_name();
    policy.rules(attributes.user, namespace).any(|rule| rule.allows(attributes.verb, attributes.info, &name))
}

fn kind(resource: &str) -> Option<&'static Arc<Resource>> {
    by_resource(GROUP, "v1", resource)
}

// === impl Policies ===

impl Policies {
    /// The index, rebuilt if a role or a binding changed.
    pub(crate) fn current(&self, cache: &Cache) -> Arc<Policy> {
        let newest = |resource| Some(cache.of(kind(resource)?).ok()?.lock().newest());
        let newest = RESOURCES.map(|resource| newest(resource).unwrap_or_default());
        let known = self.0.read().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some((_, policy)) = known.filter(|(of, _)| *of == newest) {
            return policy;
        }
        // The objects may be newer than these revisions. The index is then rebuilt once more.
        let policy = Arc::new(Policy::read(cache));
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = Some((newest, policy.clone()));
        policy
    }
}

// === impl Policy ===

impl Policy {
    fn read(cache: &Cache) -> Self {
        let objects = |resource| {
            let all: Vec<_> = match kind(resource).map(|kind| cache.of(kind)) {
                Some(Ok(collection)) => collection.lock().under("").cloned().collect(),
                _ => Vec::new(),
            };
            let objects = all.iter().map(|object| object.value());
            objects.filter(|object| !is_uninitialized(object)).collect::<Vec<_>>()
        };
        let [roles, cluster_roles, bindings, cluster_bindings] = RESOURCES.map(objects);
        Self::new(roles.iter().chain(&cluster_roles), bindings.iter().chain(&cluster_bindings))
    }

    fn new<'a>(roles: impl Iterator<Item = &'a Value>, bindings: impl Iterator<Item = &'a Value>) -> Self {
        let key = |role: &Value| (text(role, "namespace").to_owned(), text(role, "name").to_owned());
        let roles = roles.map(|role| (key(role), Rule::list(role).into())).collect();
        let mut policy = Self { roles, ..Self::default() };
        bindings.for_each(|binding| policy.bind(binding));
        policy
    }

    fn bind(&mut self, binding: &Value) {
        let namespace = binding["metadata"]["namespace"].as_str();
        let Some(rules) = self.bound(namespace.unwrap_or_default(), &binding["roleRef"]) else { return };
        for subject in binding["subjects"].as_array().into_iter().flatten() {
            let name = subject["name"].as_str().unwrap_or_default();
            let grants = match subject["kind"].as_str() {
                Some("User") => self.users.entry(name.to_owned()),
                Some("Group") => self.groups.entry(name.to_owned()),
                Some("ServiceAccount") => {
                    // In a RoleBinding an account without a namespace belongs to the binding's namespace.
                    let of = subject["namespace"].as_str().filter(|of| !of.is_empty()).or(namespace);
                    let Some(of) = of else { continue };
                    self.users.entry(format!("system:serviceaccount:{of}:{name}"))
                }
                _ => continue,
            };
            let namespace = namespace.map(str::to_owned);
            grants.or_default().push(Grant { namespace, rules: rules.clone() });
        }
    }

    /// The rules of a binding's role, if the role exists. `namespace` is empty for cluster bindings.
    pub(crate) fn bound(&self, namespace: &str, role: &Value) -> Option<Arc<[Rule]>> {
        let namespace = if role["kind"] == "ClusterRole" { "" } else { namespace };
        let name = role["name"].as_str().unwrap_or_default();
        self.roles.get(&(namespace.to_owned(), name.to_owned())).cloned()
    }

    /// The rules of a user in a namespace. An empty namespace selects the cluster-wide rules.
    pub(crate) fn rules<'a>(
        &'a self,
        user: &'a User,
        namespace: &'a str,
    ) -> impl Iterator<Item = &'a Rule> + Clone {
        let own = self.users.get(&user.name).into_iter().flatten();
        let groups = user.groups.iter().filter_map(|group| self.groups.get(group)).flatten();
        let here = move |grant: &&Grant| grant.namespace.as_deref().is_none_or(|own| own == namespace);
        own.chain(groups).filter(here).flat_map(|grant| grant.rules.iter())
    }
}

/// Checks that the user holds all of these rules in the namespace.
pub(crate) fn holds(policy: &Policy, user: &User, namespace: &str, wanted: &[Rule]) -> Result<(), String> {
    let cut = |word: &String| format!("{:?}", word.chars().take(MAX_NAMED_CHARS).collect::<String>());
    let quoted = |list: &[String]| list.iter().map(cut).collect::<Vec<_>>();
    let refusal = |why: &str| {
        let groups = quoted(&user.groups).join(" ");
        format!("user {:?} (groups=[{groups}]) is attempting to grant RBAC permissions {why}", user.name)
    };
    let compare = || rule::missing(policy.rules(user, namespace), wanted);
    let Ok(mut missing) = offload::run(wanted.len() > FEW_RULES || wanted.iter().any(Rule::is_long), compare)
    else {
        let most = rule::MAX_PARTS;
        return Err(refusal(&format!(
            "of more than {most} combinations of verbs, groups, resources and names; split the role"
        )));
    };
    if missing.is_empty() {
        return Ok(());
    }
    missing.dedup();
    let others = missing.len().saturating_sub(MAX_NAMED_RULES);
    let mut lines: Vec<String> = missing
        .iter()
        .take(MAX_NAMED_RULES)
        .map(|rule| {
            let named = [
                ("APIGroups", &rule.groups),
                ("Resources", &rule.resources),
                ("ResourceNames", &rule.names),
                ("NonResourceURLs", &rule.urls),
                ("Verbs", &rule.verbs),
            ];
            let fields = named.iter().filter(|(_, list)| !list.is_empty());
            let fields = fields.map(|(name, list)| format!("{name}:[{}]", quoted(list).join(", ")));
            format!("{{{}}}", fields.collect::<Vec<_>>().join(", "))
        })
        .collect();
    if others > 0 {
        lines.push(format!("and {others} more"));
    }
    Err(refusal(&format!("not currently held:\n{}", lines.join("\n"))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn role(namespace: Option<&str>, name: &str, resource: &str) -> Value {
        let rule = json!({"verbs": ["get"], "apiGroups": [""], "resources": [resource]});
        let mut metadata = json!({"name": name});
        if let Some(namespace) = namespace {
            metadata["namespace"] = namespace.into();
        }
        json!({"metadata": metadata, "rules": [rule]})
    }

    fn binding(namespace: Option<&str>, kind: &str, role: &str, subject: Value) -> Value {
        let mut metadata = json!({"name": "b"});
        if let Some(namespace) = namespace {
            metadata["namespace"] = namespace.into();
        }
        json!({"metadata": metadata, "roleRef": {"kind": kind, "name": role}, "subjects": [subject]})
    }

    #[test]
    fn a_user_has_what_is_bound_to_it_and_to_its_groups() {
        let roles =
            [role(None, "all", "nodes"), role(Some("a"), "own", "pods"), role(Some("b"), "own", "secrets")];
        let account = json!({"kind": "ServiceAccount", "name": "s", "namespace": "c"});
        let bindings = [
            binding(None, "ClusterRole", "all", json!({"kind": "Group", "name": "g"})),
            binding(Some("a"), "Role", "own", json!({"kind": "User", "name": "u"})),
            binding(Some("b"), "ClusterRole", "all", account),
            binding(Some("b"), "Role", "gone", json!({"kind": "User", "name": "u"})),
            binding(Some("a"), "Role", "own", json!({"kind": "ServiceAccount", "name": "local"})),
            binding(None, "ClusterRole", "all", json!({"kind": "ServiceAccount", "name": "local"})),
        ];
        let policy = Policy::new(roles.iter(), bindings.iter());
        let resources = |name: &str, namespace: &str| {
            let user = User::new(name, &["g"]);
            let rules: Vec<String> =
                policy.rules(&user, namespace).map(|rule| rule.resources[0].clone()).collect();
            rules
        };
        assert_eq!(resources("u", "a"), ["pods", "nodes"]);
        assert_eq!(resources("u", "b"), ["nodes"]);
        assert_eq!(resources("u", ""), ["nodes"]);
        assert_eq!(resources("system:serviceaccount:c:s", "b"), ["nodes", "nodes"]);
        assert_eq!(resources("system:serviceaccount:b:s", "b"), ["nodes"]);
        assert_eq!(resources("system:serviceaccount:a:local", "a"), ["pods", "nodes"]);
        assert_eq!(resources("system:serviceaccount::local", "a"), ["nodes"]);
    }
}

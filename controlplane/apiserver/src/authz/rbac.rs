//! The RBAC authorizer: the roles that are bound to a user and its groups.
//!
//! An index by user and group follows the watch cache. A request first applies the changes of roles and bindings since
//! the last request. Then it reads only the index.

mod parts;
pub(crate) mod rule;

use std::{
    collections::{BTreeMap, HashSet},
    ops::Bound,
    sync::{Arc, PoisonError, RwLock},
};

use coracle_kinds::{Resource, initializers::is_uninitialized, kind::by_resource};
use serde_json::Value;

use super::{AccessAttributes, Authorizer, Deciding, Decision, RulesScope, UserRules, Verdict};
use crate::{
    authn::User,
    cache::{Cache, Change, Shared},
    object_meta::text,
};
use parts::Parts;
use rule::Rule;

pub(crate) const GROUP: &str = "rbac.authorization.k8s.io";
const RESOURCES: [&str; 4] = ["roles", "clusterroles", ROLE_BINDINGS, CLUSTER_ROLE_BINDINGS];
const ROLE_BINDINGS: &str = "rolebindings";
const CLUSTER_ROLE_BINDINGS: &str = "clusterrolebindings";

/// Number of grants after which the authorizer records the roles that it has evaluated.
const FEW_GRANTS: usize = 20;
/// Maximum number of short rules that are compared on the async workers.
const FEW_RULES: usize = 20;
/// Maximum number of missing rules in an error.
const MAX_NAMED_RULES: usize = 200;
/// Maximum characters of a word in an error.
const MAX_NAMED_CHARS: usize = 256;

/// Maximum bytes of the rules in the response to a SelfSubjectRulesReview.
const MAX_LISTED_BYTES: usize = 8 << 20;

/// The index. `None` before the first request.
#[derive(Default)]
pub(crate) struct Policies(RwLock<Option<Indexed>>);

/// The index at the revisions of its resources.
struct Indexed {
    revisions: [u64; RESOURCES.len()],
    policy: Arc<Policy>,
}

/// Rules by subject and namespace. A clone shares all parts that do not change later.
#[derive(Clone, Default)]
pub(crate) struct Policy {
    roles: Parts<RoleKey, Arc<[Rule]>>,
    users: Parts<String, Arc<Grants>>,
    groups: Parts<String, Arc<Grants>>,
}

/// Namespace (empty for cluster roles) and name of a role.
type RoleKey = (String, String);

/// The bindings of a subject with their roles: cluster role bindings first, then the role bindings of each namespace. A
/// value is the key of a role, so a change of the role does not change this map.
type Grants = BTreeMap<Arc<BindingKey>, Arc<RoleKey>>;

/// Namespace and name of a binding. Bindings are ordered by namespace, then by name.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct BindingKey {
    /// Namespace of the binding. `None` for a cluster role binding.
    namespace: Option<String>,
    name: String,
}

/// Allows what the roles of a user allow.
pub(super) struct Rbac(pub(super) Arc<Policies>);

impl Authorizer for Rbac {
    fn authorize<'a>(&'a self, attributes: &'a AccessAttributes<'a>) -> Deciding<'a> {
        let decision = match allowing(&self.0, attributes) {
            Some(reason) => Decision { verdict: Verdict::Allow, reason: reason.into() },
            None => Decision::no_opinion(""),
        };
        decision.ready()
    }

    fn add_rules(&self, of: &RulesScope<'_>, found: &mut UserRules) {
        let policy = self.0.current(of.cache);
        list(policy.rules(of.user, of.namespace), found);
    }
}

/// Adds rules up to [`MAX_LISTED_BYTES`]. A tenant can bind itself a large role a thousand times.
fn list<'a>(rules: impl Iterator<Item = &'a Rule>, found: &mut UserRules) {
    let mut left = MAX_LISTED_BYTES;
    for rule in rules {
        let Some(rest) = left.checked_sub(rule.bytes()) else {
            found.is_cut = true;
            return;
        };
        left = rest;
        found.rules.push(rule.clone());
    }
}

/// The description of a binding that allows a request.
fn allowing(policies: &Policies, attributes: &AccessAttributes<'_>) -> Option<String> {
    let namespace = attributes.info.resource.as_ref().map_or("", |resource| &resource.namespace);
    let policy = policies.current(attributes.cache);
    let name = attributes.info.object_name();
    let allows = |rule: &Rule| rule.allows(attributes.verb, attributes.info, &name);
    policy.allowing(attributes.user, namespace, allows).map(describe)
}

/// The reason of an allowed request, in upstream's words.
fn describe(Grant { kind, name, binding, role }: Grant<'_>) -> String {
    let (role_namespace, role) = role;
    let role_kind = if role_namespace.is_empty() { "ClusterRole" } else { "Role" };
    let account = name.strip_prefix("system:serviceaccount:").filter(|_| kind == "User");
    let subject = match account.and_then(|account| account.split_once(':')) {
        Some((namespace, account)) => format!("ServiceAccount \"{account}/{namespace}\""),
        None => format!("{kind} {name:?}"),
    };
    let (binding_kind, namespace) = match &binding.namespace {
        Some(namespace) => ("RoleBinding", format!("/{namespace}")),
        None => ("ClusterRoleBinding", String::new()),
    };
    let binding = &binding.name;
    format!("RBAC: allowed by {binding_kind} \"{binding}{namespace}\" of {role_kind} {role:?} to {subject}")
}

fn kind(resource: &str) -> Option<&'static Arc<Resource>> {
    by_resource(GROUP, "v1", resource)
}

/// The objects of a resource of [`RESOURCES`].
fn objects(cache: &Cache, resource: &str) -> Option<Arc<Shared>> {
    cache.of(kind(resource)?).ok()
}

// === impl Policies ===

impl Policies {
    /// The index with all changes of the cache.
    pub(crate) fn current(&self, cache: &Cache) -> Arc<Policy> {
        let newest = |resource| objects(cache, resource).map_or(0, |objects| objects.lock().newest());
        let newest = RESOURCES.map(newest);
        let known = self.0.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(indexed) = known.as_ref().filter(|indexed| indexed.revisions == newest) {
            return indexed.policy.clone();
        }
        drop(known);
        let mut known = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let indexed = known.get_or_insert_with(|| Indexed::read(cache));
        if !indexed.catch_up(cache) {
            *indexed = Indexed::read(cache);
        }
        indexed.policy.clone()
    }
}

// === impl Indexed ===

impl Indexed {
    fn read(cache: &Cache) -> Self {
        let mut revisions = [0; RESOURCES.len()];
        let mut policy = Policy::default();
        for (resource, revision) in RESOURCES.into_iter().zip(&mut revisions) {
            let Some(objects) = objects(cache, resource) else { continue };
            let all: Vec<_> = {
                let objects = objects.lock();
                *revision = objects.newest();
                objects.under("").cloned().collect()
            };
            for object in all {
                policy.add(resource, &object.value());
            }
        }
        Self { revisions, policy: Arc::new(policy) }
    }

    /// Applies the changes since the last call. Returns false if the cache no longer has all of these changes. If a
    /// request reads the index at the same time, the changed parts of the index are copied.
    fn catch_up(&mut self, cache: &Cache) -> bool {
        for (resource, revision) in RESOURCES.into_iter().zip(&mut self.revisions) {
            let Some(objects) = objects(cache, resource) else { continue };
            let (changes, newest) = {
                let objects = objects.lock();
                (objects.changes_after(*revision), objects.newest())
            };
            let Some(changes) = changes else { return false };
            *revision = newest;
            if !changes.is_empty() {
                let policy = Arc::make_mut(&mut self.policy);
                changes.iter().for_each(|change| policy.apply(resource, change));
            }
        }
        true
    }
}

// === impl Policy ===

impl Policy {
    fn apply(&mut self, resource: &str, change: &Change) {
        if let Some(old) = &change.old {
            self.remove(resource, &old.value());
        }
        if !change.deleted {
            self.add(resource, &change.new.value());
        }
    }

    fn add(&mut self, resource: &str, object: &Value) {
        if is_uninitialized(object) {
            return;
        }
        match resource {
            ROLE_BINDINGS | CLUSTER_ROLE_BINDINGS => self.bind(object),
            _ => {
                let key = role_key(object);
                self.roles.part_mut(&key).insert(key, Rule::list(object).into());
            }
        }
    }

    fn remove(&mut self, resource: &str, object: &Value) {
        match resource {
            ROLE_BINDINGS | CLUSTER_ROLE_BINDINGS => self.unbind(object),
            _ => {
                let key = role_key(object);
                self.roles.part_mut(&key).remove(&key);
            }
        }
    }

    fn bind(&mut self, binding: &Value) {
        let key = Arc::new(BindingKey::of(binding));
        let role = Arc::new(bound_role(key.namespace.as_deref().unwrap_or_default(), &binding["roleRef"]));
        for subject in subjects(binding) {
            let (subjects, name) = match subject {
                Subject::User(name) => (&mut self.users, name),
                Subject::Group(name) => (&mut self.groups, name),
            };
            let grants = subjects.part_mut(&name).entry(name).or_default();
            Arc::make_mut(grants).insert(key.clone(), role.clone());
        }
    }

    fn unbind(&mut self, binding: &Value) {
        let key = BindingKey::of(binding);
        for subject in subjects(binding) {
            let (subjects, name) = match subject {
                Subject::User(name) => (&mut self.users, name),
                Subject::Group(name) => (&mut self.groups, name),
            };
            let part = subjects.part_mut(&name);
            let Some(grants) = part.get_mut(&name) else { continue };
            let grants = Arc::make_mut(grants);
            grants.remove(&key);
            if grants.is_empty() {
                part.remove(&name);
            }
        }
    }

    /// The rules of a binding's role, if the role exists. `namespace` is empty for cluster bindings.
    pub(crate) fn bound(&self, namespace: &str, role: &Value) -> Option<Arc<[Rule]>> {
        self.roles.get(&bound_role(namespace, role)).cloned()
    }

    /// The rules of a user in a namespace. An empty namespace selects the cluster-wide rules.
    pub(crate) fn rules<'a>(
        &'a self,
        user: &'a User,
        namespace: &'a str,
    ) -> impl Iterator<Item = &'a Rule> + Clone {
        let roles = &self.roles;
        let bound = self.grants(user, namespace).map(|grant| grant.role);
        bound.filter_map(move |role| roles.get(role)).flat_map(|rules| rules.iter())
    }

    /// The first grant whose role has a rule that allows a request. After [`FEW_GRANTS`] grants, each role is evaluated
    /// only once. Otherwise a user could bind a large role thousands of times, and delay the requests of other users.
    fn allowing<'a>(
        &'a self,
        user: &'a User,
        namespace: &'a str,
        allows: impl Fn(&Rule) -> bool,
    ) -> Option<Grant<'a>> {
        let (mut number, mut read) = (0, HashSet::new());
        self.grants(user, namespace).find(|grant| {
            number += 1;
            let is_new = number <= FEW_GRANTS || read.insert(grant.role);
            is_new && self.roles.get(grant.role).is_some_and(|rules| rules.iter().any(&allows))
        })
    }

    /// The grants to a user and its groups in a namespace.
    fn grants<'a>(&'a self, user: &'a User, namespace: &'a str) -> impl Iterator<Item = Grant<'a>> + Clone {
        let own = self.users.get(&user.name).map(|grants| ("User", user.name.as_str(), &**grants));
        let groups = user.groups.iter();
        let groups = groups.filter_map(|group| Some(("Group", group.as_str(), &**self.groups.get(group)?)));
        own.into_iter().chain(groups).flat_map(move |(kind, name, grants)| {
            bound_in(grants, namespace).map(move |(binding, role)| Grant { kind, name, binding, role })
        })
    }
}

/// A binding that grants a role to a subject.
#[derive(Clone, Copy)]
struct Grant<'a> {
    /// Kind of the subject: `User` or `Group`.
    kind: &'static str,
    /// Name of the subject.
    name: &'a str,
    binding: &'a BindingKey,
    role: &'a RoleKey,
}

/// The cluster role bindings, and the bindings in this namespace, each with its role.
fn bound_in<'a>(
    grants: &'a Grants,
    namespace: &'a str,
) -> impl Iterator<Item = (&'a BindingKey, &'a RoleKey)> + Clone {
    let everywhere = grants.iter().take_while(|(binding, _)| binding.namespace.is_none());
    let first = BindingKey { namespace: Some(namespace.to_owned()), name: String::new() };
    let here = grants.range::<BindingKey, _>((Bound::Included(&first), Bound::Unbounded));
    let here = here.take_while(move |(binding, _)| binding.namespace.as_deref() == Some(namespace));
    everywhere.chain(here).map(|(binding, role)| (&**binding, &**role))
}

// === impl BindingKey ===

impl BindingKey {
    fn of(binding: &Value) -> Self {
        let namespace = binding["metadata"]["namespace"].as_str().map(str::to_owned);
        Self { namespace, name: text(binding, "name").to_owned() }
    }
}

/// A subject with its full name.
enum Subject {
    User(String),
    Group(String),
}

/// The subjects of a binding. A binding may repeat a subject.
fn subjects(binding: &Value) -> impl Iterator<Item = Subject> {
    let namespace = binding["metadata"]["namespace"].as_str();
    binding["subjects"].as_array().into_iter().flatten().filter_map(move |subject| {
        let name = subject["name"].as_str().unwrap_or_default();
        match subject["kind"].as_str()? {
            "User" => Some(Subject::User(name.to_owned())),
            "Group" => Some(Subject::Group(name.to_owned())),
            "ServiceAccount" => {
                // In a RoleBinding an account without a namespace belongs to the binding's namespace.
                let of = subject["namespace"].as_str().filter(|of| !of.is_empty()).or(namespace)?;
                Some(Subject::User(format!("system:serviceaccount:{of}:{name}")))
            }
            _ => None,
        }
    })
}

fn role_key(role: &Value) -> RoleKey {
    (text(role, "namespace").to_owned(), text(role, "name").to_owned())
}

/// The key of the role that a binding in this namespace refers to.
fn bound_role(namespace: &str, role: &Value) -> RoleKey {
    let namespace = if role["kind"] == "ClusterRole" { "" } else { namespace };
    (namespace.to_owned(), role["name"].as_str().unwrap_or_default().to_owned())
}

/// Whether [`holds`] may take so long with these rules that it must not run on an async worker.
pub(crate) fn is_long(wanted: &[Rule]) -> bool {
    wanted.len() > FEW_RULES || wanted.iter().any(Rule::is_long)
}

/// Checks that the user holds all of these rules in the namespace.
pub(crate) fn holds(policy: &Policy, user: &User, namespace: &str, wanted: &[Rule]) -> Result<(), String> {
    let cut = |word: &String| format!("{:?}", word.chars().take(MAX_NAMED_CHARS).collect::<String>());
    let quoted = |list: &[String]| list.iter().map(cut).collect::<Vec<_>>();
    let refusal = |why: &str| {
        let groups = quoted(&user.groups).join(" ");
        format!("user {:?} (groups=[{groups}]) is attempting to grant RBAC permissions {why}", user.name)
    };
    let Ok(mut missing) = rule::missing(policy.rules(user, namespace), wanted) else {
        let most = rule::MAX_PARTS;
        return Err(refusal(&format!(
            "of more than {most} combinations of verbs, groups, resources and names, or with too many words to compare \
             with the rules of the user; split the role"
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
    use coracle_store::{Commit, Entry, Page};
    use serde_json::json;

    use super::*;
    use crate::cache::{encode, key_of, parses};

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
        let mut policy = Policy::default();
        roles.iter().for_each(|role| policy.add("roles", role));
        bindings.iter().for_each(|binding| policy.add(ROLE_BINDINGS, binding));
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

    #[test]
    fn a_role_that_is_bound_very_often_is_read_a_few_times() {
        let mut policy = Policy::default();
        policy.add("roles", &role(Some("a"), "own", "pods"));
        for number in 0..1000 {
            let mut binding = binding(Some("a"), "Role", "own", json!({"kind": "Group", "name": "g"}));
            binding["metadata"]["name"] = format!("b{number}").into();
            policy.add(ROLE_BINDINGS, &binding);
        }
        let (user, read) = (User::new("u", &["g"]), std::cell::Cell::new(0));
        let refuses = |_rule: &Rule| {
            read.set(read.get() + 1);
            false
        };
        assert!(policy.allowing(&user, "a", refuses).is_none());
        assert_eq!(read.get(), FEW_GRANTS + 1);
        let grant = policy.allowing(&user, "a", |_rule| true).unwrap();
        assert_eq!((grant.kind, grant.name, grant.role.1.as_str()), ("Group", "g", "own"));
    }

    #[test]
    fn the_list_of_a_users_rules_has_a_limit() {
        let name = "x".repeat(MAX_LISTED_BYTES / 4);
        let rule =
            json!({"verbs": ["get"], "apiGroups": [""], "resources": ["pods"], "resourceNames": [name]});
        let rules = Rule::list(&json!({"rules": [rule]}));
        let of = |count: usize| {
            let mut found = UserRules::default();
            list(rules.iter().cycle().take(count), &mut found);
            (found.rules.len(), found.is_cut)
        };
        assert_eq!(of(3), (3, false));
        assert_eq!(of(100), (3, true));
    }

    /// Stores an object in the cache, or deletes the object with its name.
    fn store(cache: &Cache, resource: &str, object: &Value, is_deleted: bool) {
        let kind = kind(resource).unwrap();
        let revision = cache.revision() + 1;
        let key = key_of(kind, text(object, "namespace"), text(object, "name")).into();
        let value = (!is_deleted).then(|| encode(kind, object));
        cache.apply(&Commit { revision, key, value, created: revision, guard_follows: false });
    }

    /// The resources that each of three users may read, in each of two namespaces.
    fn readable(policy: &Policy) -> Vec<Vec<String>> {
        let users = [("u", ""), ("v", "g"), ("system:serviceaccount:a:s", "")];
        let cases = users.into_iter().flat_map(|user| ["a", "b"].map(|namespace| (user, namespace)));
        let readable = cases.map(|((name, group), namespace)| {
            let user = User::new(name, &[group]);
            let rules = policy.rules(&user, namespace);
            let mut found: Vec<String> = rules.map(|rule| rule.resources[0].clone()).collect();
            found.sort();
            found
        });
        readable.collect()
    }

    #[test]
    fn an_index_that_follows_changes_equals_a_new_one() {
        let (cache, policies) = (Cache::new(1), Policies::default());
        let user = json!({"kind": "User", "name": "u"});
        let (group, account) =
            (json!({"kind": "Group", "name": "g"}), json!({"kind": "ServiceAccount", "name": "s"}));
        let two = |first: &Value, second: &Value| {
            let mut binding = binding(Some("a"), "Role", "own", first.clone());
            binding["subjects"] = json!([first, second]);
            binding
        };
        let mut seen = Vec::new();
        for (resource, object, is_deleted) in [
            (ROLE_BINDINGS, two(&user, &account), false),
            ("roles", role(Some("a"), "own", "pods"), false),
            ("roles", role(Some("a"), "own", "secrets"), false),
            ("clusterroles", role(None, "own", "nodes"), false),
            (CLUSTER_ROLE_BINDINGS, binding(None, "ClusterRole", "own", group.clone()), false),
            (ROLE_BINDINGS, two(&account, &group), false),
            ("roles", role(Some("a"), "own", "secrets"), true),
            (CLUSTER_ROLE_BINDINGS, binding(None, "ClusterRole", "own", user.clone()), false),
            (ROLE_BINDINGS, two(&account, &group), true),
            (CLUSTER_ROLE_BINDINGS, binding(None, "ClusterRole", "own", user.clone()), true),
        ] {
            store(&cache, resource, &object, is_deleted);
            let found = readable(&policies.current(&cache));
            assert_eq!(found, readable(&Policies::default().current(&cache)), "{resource} {object}");
            seen.push(found[0].join(","));
        }
        assert_eq!(seen, ["", "pods", "secrets", "secrets", "secrets", "", "", "nodes", "nodes", ""]);
        let policy = policies.current(&cache);
        assert_eq!(
            (policy.users.iter().count(), policy.groups.iter().count(), policy.roles.iter().count()),
            (0, 0, 1)
        );
    }

    #[test]
    fn the_reason_names_the_binding() {
        let key = |namespace: Option<&str>| BindingKey {
            namespace: namespace.map(str::to_owned),
            name: "b".into(),
        };
        let of = |namespace: &str| (namespace.to_owned(), "r".to_owned());
        assert_eq!(
            describe(Grant { kind: "User", name: "u", binding: &key(Some("n")), role: &of("n") }),
            "RBAC: allowed by RoleBinding \"b/n\" of Role \"r\" to User \"u\""
        );
        assert_eq!(
            describe(Grant {
                kind: "User",
                name: "system:serviceaccount:n:s",
                binding: &key(None),
                role: &of("")
            }),
            "RBAC: allowed by ClusterRoleBinding \"b\" of ClusterRole \"r\" to ServiceAccount \"s/n\""
        );
    }

    #[test]
    fn a_request_looks_at_the_bindings_of_its_namespace_only() {
        let mut policy = Policy::default();
        let user = json!({"kind": "User", "name": "u"});
        for namespace in [None, Some("a"), Some("aa"), Some("b")] {
            let kind = if namespace.is_some() { "Role" } else { "ClusterRole" };
            policy.add("roles", &role(namespace, "own", namespace.unwrap_or("all")));
            policy.add(ROLE_BINDINGS, &binding(namespace, kind, "own", user.clone()));
        }
        let grants = policy.users.get("u").unwrap();
        let bound = |namespace: &'static str| {
            bound_in(grants, namespace).map(|(_, (namespace, _))| namespace.as_str()).collect::<Vec<_>>()
        };
        assert_eq!(bound("a"), ["", "a"]);
        assert_eq!(bound("aa"), ["", "aa"]);
        assert_eq!((bound("b"), bound("c"), bound("")), (vec!["", "b"], vec![""], vec![""]));
    }

    #[test]
    fn a_subject_that_a_binding_repeats_has_one_grant() {
        let user = json!({"kind": "User", "name": "u"});
        let mut binding = binding(Some("a"), "Role", "own", user.clone());
        binding["subjects"] = json!([user, user, {"kind": "Group", "name": "u"}, user]);
        let mut policy = Policy::default();
        policy.add(ROLE_BINDINGS, &binding);
        assert_eq!((policy.users.get("u").unwrap().len(), policy.groups.get("u").unwrap().len()), (1, 1));
        policy.remove(ROLE_BINDINGS, &binding);
        assert!(policy.users.iter().chain(policy.groups.iter()).next().is_none());
    }

    /// All roles and grants of an index, sorted.
    fn content(policy: &Policy) -> Vec<String> {
        let mut lines: Vec<String> =
            policy.roles.iter().map(|(key, rules)| format!("{key:?} {rules:?}")).collect();
        for (kind, all) in [("user", &policy.users), ("group", &policy.groups)] {
            for (name, grants) in all.iter() {
                assert!(!grants.is_empty(), "{kind} {name}");
                lines.extend(grants.iter().map(|(binding, role)| {
                    format!("{kind} {name} {:?} {} {role:?}", binding.namespace, binding.name)
                }));
            }
        }
        lines.sort();
        lines
    }

    /// A random object with one of a few names. `pick` returns a number below its argument.
    fn any_object(pick: &mut impl FnMut(usize) -> usize) -> (&'static str, Value) {
        let resource = RESOURCES[pick(4)];
        let namespace = ["a", "b"][pick(2)];
        let namespace = (!resource.starts_with("cluster")).then_some(namespace);
        let name = ["x", "y"][pick(2)];
        let mut object = if resource.ends_with("bindings") {
            let kind = if namespace.is_some() { ["Role", "ClusterRole"][pick(2)] } else { "ClusterRole" };
            let mut binding = binding(namespace, kind, ["x", "y"][pick(2)], Value::Null);
            let subjects = [
                json!({"kind": "User", "name": "u"}),
                json!({"kind": "Group", "name": "u"}),
                json!({"kind": "ServiceAccount", "name": "s"}),
                json!({"kind": "ServiceAccount", "name": "s", "namespace": "a"}),
            ];
            binding["subjects"] = (0..pick(5)).map(|_| subjects[pick(4)].clone()).collect();
            binding["metadata"]["name"] = name.into();
            binding
        } else {
            role(namespace, name, ["pods", "secrets"][pick(2)])
        };
        if pick(8) == 0 {
            object["metadata"]["initializers"] = json!({"pending": [{"name": "i.example.com"}]});
        }
        (resource, object)
    }

    #[test]
    fn after_any_sequence_of_changes_the_index_equals_a_new_one() {
        let (cache, policies) = (Cache::new(1), Policies::default());
        let mut seed = 1_usize;
        let mut pick = |below: usize| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 33) % below
        };
        let mut largest = 0;
        for step in 0..2000 {
            for _ in 0..=pick(3) {
                let (resource, object) = any_object(&mut pick);
                store(&cache, resource, &object, pick(3) == 0);
            }
            let found = content(&policies.current(&cache));
            assert_eq!(found, content(&Policies::default().current(&cache)), "step {step}");
            largest = largest.max(found.len());
        }
        assert!(largest > 10, "{largest}");
    }

    #[tokio::test(start_paused = true)]
    async fn the_index_is_read_again_after_more_changes_than_the_cache_has_and_after_missed_ones() {
        let (cache, policies) = (Cache::new(1), Policies::default());
        let resources = || readable(&policies.current(&cache)).concat();
        let user = json!({"kind": "User", "name": "u"});
        store(&cache, ROLE_BINDINGS, &binding(Some("a"), "Role", "own", user), false);
        store(&cache, "roles", &role(Some("a"), "own", "secrets"), false);
        assert_eq!(resources(), ["secrets"]);
        store(&cache, "roles", &role(Some("a"), "own", "secrets"), true);
        // The history keeps recent changes, and at most 1,000 older changes. So the index misses the first of these
        // changes.
        for number in 0..1500 {
            store(&cache, "roles", &role(Some("b"), "other", &format!("r{number}")), false);
            tokio::time::advance(crate::cache::RECENT / 100).await;
        }
        assert_eq!(resources(), [""; 0]);
        store(&cache, "roles", &role(Some("a"), "own", "pods"), false);
        assert_eq!(resources(), ["pods"]);
        // The index has missed commits: the store now has another role and no binding. A restore may decrease the
        // revision.
        let (kind, newest) = (kind("roles").unwrap(), cache.revision());
        for revision in [newest + 10, newest - 10] {
            let own = role(Some("a"), "own", "nodes");
            let key = key_of(kind, "a", "own").into();
            let entry = Entry { key, value: encode(kind, &own), created: 2, modified: revision };
            cache.resync(Page { entries: vec![entry], revision, more: false }, &[]);
            let policy = policies.current(&cache);
            assert_eq!(
                (policy.users.iter().count(), policy.roles.iter().count()),
                (0, 1),
                "revision {revision}"
            );
            assert_eq!(content(&policy), content(&Policies::default().current(&cache)));
            let user = json!({"kind": "User", "name": "u"});
            store(&cache, ROLE_BINDINGS, &binding(Some("a"), "Role", "own", user), false);
            assert_eq!(resources(), ["nodes"], "revision {revision}");
        }
    }

    #[test]
    fn a_change_of_one_role_reads_that_role_only() {
        let (cache, policies) = (Cache::new(1), Policies::default());
        for number in 0..100 {
            let (namespace, name) = (format!("n{number}"), format!("r{number}"));
            store(&cache, "roles", &role(Some(&namespace), &name, "pods"), false);
            let user = json!({"kind": "User", "name": "u"});
            store(&cache, ROLE_BINDINGS, &binding(Some(&namespace), "Role", &name, user), false);
        }
        policies.current(&cache);
        store(&cache, "roles", &role(Some("n7"), "r7", "secrets"), false);
        let before = parses::so_far();
        let policy = policies.current(&cache);
        assert_eq!(parses::so_far() - before, 2, "the role before and after");
        let user = User::new("u", &[]);
        let of = |namespace| policy.rules(&user, namespace).map(|rule| rule.resources[0].as_str());
        assert_eq!(
            (of("n7").collect::<Vec<_>>(), of("n8").collect::<Vec<_>>()),
            (vec!["secrets"], vec!["pods"])
        );
    }
}

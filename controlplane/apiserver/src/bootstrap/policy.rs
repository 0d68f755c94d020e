//! The default roles and bindings of every cluster: the defaults of Kubernetes, and the roles and bindings of kubeadm
//! for joining machines.
//!
//! Words in a list are separated by spaces. An empty word is the core group.

mod controllers;
mod optional;
mod roles;

use serde_json::{Value, json};

use coracle_kinds::Resources;

use controllers::CONTROLLERS;
use optional::{OPTIONAL, Optional};
use roles::ROLES;

const API: &str = "rbac.authorization.k8s.io";
const SYSTEM: &str = "kube-system";
const PUBLIC: &str = "kube-public";
const READ: &str = "get list watch";
const WRITE: &str = "create delete deletecollection patch update";
const ALL: &str = "create delete deletecollection get list patch update watch";
const BOOTSTRAPPERS: &str = "system:bootstrappers:kubeadm:default-node-token";
const CERTIFICATES: &str = "certificates.k8s.io";
/// The rule of components that record events.
const EVENTS: Rule = On(" events.k8s.io", "events", "create patch update");

/// A rule. `On`: groups, resources, verbs. `Named`: groups, resources, resource names, verbs. `Urls`: non-resource
/// URLs, verbs.
enum Rule {
    On(&'static str, &'static str, &'static str),
    Named(&'static str, &'static str, &'static str, &'static str),
    Urls(&'static str, &'static str),
}

use Rule::{Named, On, Urls};

/// A cluster role: its name, the role to which it is aggregated (empty: no role), and its rules.
type Role<'a> = (&'a str, &'a str, &'a [Rule]);

/// Aggregated roles: the name of the role, and the role to which it is aggregated (empty: no role).
const AGGREGATED: &[(&str, &str)] = &[("admin", ""), ("edit", "admin"), ("view", "edit")];

/// A binding of a cluster role: its name, the role, and the kind and names of its subjects.
const BINDINGS: &[(&str, &str, &str, &[&str])] = &[
    ("cluster-admin", "cluster-admin", "Group", &["system:masters"]),
    ("system:discovery", "system:discovery", "Group", &["system:authenticated"]),
    ("system:basic-user", "system:basic-user", "Group", &["system:authenticated"]),
    (
        "system:public-info-viewer",
        "system:public-info-viewer",
        "Group",
        &["system:authenticated", "system:unauthenticated"],
    ),
    ("system:monitoring", "system:monitoring", "Group", &["system:monitoring"]),
    (
        "system:service-account-issuer-discovery",
        "system:service-account-issuer-discovery",
        "Group",
        &["system:serviceaccounts"],
    ),
    ("system:kube-scheduler", "system:kube-scheduler", "User", &["system:kube-scheduler"]),
    ("system:volume-scheduler", "system:volume-scheduler", "User", &["system:kube-scheduler"]),
    (
        "system:kube-controller-manager",
        "system:kube-controller-manager",
        "User",
        &["system:kube-controller-manager"],
    ),
    ("system:node-proxier", "system:node-proxier", "User", &["system:kube-proxy"]),
    ("system:kube-dns", "system:kube-dns", "ServiceAccount", &["kube-dns"]),
    ("system:node", "system:node", "Group", &[]),
    ("kubeadm:get-nodes", "kubeadm:get-nodes", "Group", &[BOOTSTRAPPERS]),
    ("kubeadm:kubelet-bootstrap", "system:node-bootstrapper", "Group", &[BOOTSTRAPPERS]),
    (
        "kubeadm:node-autoapprove-bootstrap",
        "system:certificates.k8s.io:certificatesigningrequests:nodeclient",
        "Group",
        &[BOOTSTRAPPERS],
    ),
    (
        "kubeadm:node-autoapprove-certificate-rotation",
        "system:certificates.k8s.io:certificatesigningrequests:selfnodeclient",
        "Group",
        &["system:nodes"],
    ),
];

/// A role of a namespace: the namespace, its name, and its rules.
type LocalRole<'a> = (&'a str, &'a str, &'a [Rule]);

/// A subject: `User`, `Group`, or `ServiceAccount` (of `kube-system`), and its name.
type Subject<'a> = (&'a str, &'a str);

const LOCAL_ROLES: &[LocalRole<'_>] = &[
    // Operators bind this role to aggregated servers, which read there how to authenticate clients.
    (
        SYSTEM,
        "extension-apiserver-authentication-reader",
        &[Named("", "configmaps", "extension-apiserver-authentication", READ)],
    ),
    // Every client may read this config map before it joins.
    (PUBLIC, "kubeadm:bootstrap-signer-clusterinfo", &[Named("", "configmaps", "cluster-info", "get")]),
    (
        PUBLIC,
        "system:controller:bootstrap-signer",
        &[On("", "configmaps", READ), Named("", "configmaps", "cluster-info", "update"), EVENTS],
    ),
    (SYSTEM, "system:controller:bootstrap-signer", &[On("", "secrets", READ)]),
    (SYSTEM, "system:controller:cloud-provider", &[On("", "configmaps", "create get list watch")]),
    (SYSTEM, "system:controller:token-cleaner", &[On("", "secrets", "delete get list watch"), EVENTS]),
    (SYSTEM, "system::leader-locking-kube-controller-manager", LEADER),
    (SYSTEM, "system::leader-locking-kube-scheduler", LEADER),
];

/// Rules of a component that elects a leader.
const LEADER: &[Rule] = &[
    On("coordination.k8s.io", "leases", "create get list update watch"),
    On("coordination.k8s.io", "leasecandidates", "create get list update watch"),
];

/// A binding in a namespace: the namespace, its name, the role, and its subjects.
const LOCAL_BINDINGS: &[(&str, &str, &str, &[Subject<'_>])] = &[
    (
        SYSTEM,
        "system::extension-apiserver-authentication-reader",
        "extension-apiserver-authentication-reader",
        &[("User", "system:kube-controller-manager"), ("User", "system:kube-scheduler")],
    ),
    (
        PUBLIC,
        "kubeadm:bootstrap-signer-clusterinfo",
        "kubeadm:bootstrap-signer-clusterinfo",
        &[("User", "system:anonymous")],
    ),
    (
        PUBLIC,
        "system:controller:bootstrap-signer",
        "system:controller:bootstrap-signer",
        &[("ServiceAccount", "bootstrap-signer")],
    ),
    (
        SYSTEM,
        "system:controller:bootstrap-signer",
        "system:controller:bootstrap-signer",
        &[("ServiceAccount", "bootstrap-signer")],
    ),
    (
        SYSTEM,
        "system:controller:cloud-provider",
        "system:controller:cloud-provider",
        &[("ServiceAccount", "cloud-provider")],
    ),
    (
        SYSTEM,
        "system:controller:token-cleaner",
        "system:controller:token-cleaner",
        &[("ServiceAccount", "token-cleaner")],
    ),
    (
        SYSTEM,
        "system::leader-locking-kube-controller-manager",
        "system::leader-locking-kube-controller-manager",
        &[
            ("User", "system:kube-controller-manager"),
            ("ServiceAccount", "kube-controller-manager"),
            ("ServiceAccount", "leader-election-controller"),
        ],
    ),
    (
        SYSTEM,
        "system::leader-locking-kube-scheduler",
        "system::leader-locking-kube-scheduler",
        &[("User", "system:kube-scheduler"), ("ServiceAccount", "kube-scheduler")],
    ),
];

impl Rule {
    fn json(&self) -> Value {
        let words = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
        match self {
            On(groups, resources, verbs) => {
                json!({"verbs": words(verbs), "apiGroups": words(groups), "resources": words(resources)})
            }
            Named(groups, resources, names, verbs) => {
                let mut rule = On(groups, resources, verbs).json();
                rule["resourceNames"] = words(names).into();
                rule
            }
            Urls(urls, verbs) => json!({"verbs": words(verbs), "nonResourceURLs": words(urls)}),
        }
    }
}

fn object(kind: &str, namespace: &str, name: &str) -> Value {
    let mut metadata = json!({
        "name": name,
        "labels": {"kubernetes.io/bootstrapping": "rbac-defaults"},
        "annotations": {"rbac.authorization.kubernetes.io/autoupdate": "true"},
    });
    if !namespace.is_empty() {
        metadata["namespace"] = namespace.into();
    }
    json!({"apiVersion": format!("{API}/v1"), "kind": kind, "metadata": metadata})
}

fn label(to: &str) -> String {
    format!("{API}/aggregate-to-{to}")
}

/// A cluster role. `to` is the role to which it is aggregated. Empty for no role.
fn role(name: &str, to: &str, rules: &[Rule]) -> Value {
    let mut role = object("ClusterRole", "", name);
    if !to.is_empty() {
        role["metadata"]["labels"][label(to)] = "true".into();
    }
    role["rules"] = rules.iter().map(Rule::json).collect();
    role
}

/// A cluster role that consists of the roles that are aggregated to it.
fn aggregated(name: &str, to: &str) -> Value {
    let mut role = self::role(name, to, &[]);
    role["aggregationRule"] = json!({"clusterRoleSelectors": [{"matchLabels": {label(name): "true"}}]});
    role
}

fn subject(kind: &str, name: &str) -> Value {
    match kind {
        "ServiceAccount" => json!({"kind": kind, "name": name, "namespace": SYSTEM}),
        _ => json!({"apiGroup": API, "kind": kind, "name": name}),
    }
}

fn binding<'a>(
    mut object: Value,
    kind: &str,
    role: &str,
    subjects: impl Iterator<Item = Subject<'a>>,
) -> Value {
    object["roleRef"] = json!({"apiGroup": API, "kind": kind, "name": role});
    let subjects: Vec<Value> = subjects.map(|(kind, name)| subject(kind, name)).collect();
    if !subjects.is_empty() {
        object["subjects"] = subjects.into();
    }
    object
}

/// All default objects, roles before their bindings. As upstream, rules about optional resources are included only
/// while these resources are served.
pub(super) fn objects(served: &Resources) -> Vec<Value> {
    let cluster = |name: &str| object("ClusterRoleBinding", "", name);
    let is_served = |optional: &&Optional| optional.is_served(served);
    let controllers: Vec<(String, &str, &[Rule])> = CONTROLLERS
        .iter()
        .chain(OPTIONAL.iter().filter(is_served).flat_map(|optional| optional.controllers))
        .map(|&(account, rules)| (format!("system:controller:{account}"), account, rules))
        .collect();
    let mut all: Vec<Value> = ROLES.iter().map(|&(name, to, rules)| role(name, to, rules)).collect();
    for (name, rules) in OPTIONAL.iter().filter(is_served).flat_map(|optional| optional.roles) {
        let found = all.iter_mut().find(|role| role["metadata"]["name"] == *name);
        let list = found.and_then(|role| role["rules"].as_array_mut());
        list.into_iter().for_each(|list| list.extend(rules.iter().map(Rule::json)));
    }
    all.extend(AGGREGATED.iter().map(|&(name, to)| aggregated(name, to)));
    all.extend(controllers.iter().map(|(name, _, rules)| role(name, "", rules)));
    all.extend(LOCAL_ROLES.iter().map(|&(namespace, name, rules)| {
        let mut role = object("Role", namespace, name);
        role["rules"] = rules.iter().map(Rule::json).collect();
        role
    }));
    all.extend(BINDINGS.iter().map(|&(name, role, kind, names)| {
        binding(cluster(name), "ClusterRole", role, names.iter().map(|name| (kind, *name)))
    }));
    all.extend(controllers.iter().map(|(name, account, _)| {
        let account = ("ServiceAccount", *account);
        binding(cluster(name), "ClusterRole", name, std::iter::once(account))
    }));
    all.extend(LOCAL_BINDINGS.iter().map(|&(namespace, name, role, subjects)| {
        binding(object("RoleBinding", namespace, name), "Role", role, subjects.iter().copied())
    }));
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use coracle_kinds::{
        defaults,
        kind::{built_in, by_kind},
        validate,
    };

    /// Upstream removed these permissions from the roles of tenants in 1.22.
    #[test]
    fn cve_2021_25740_tenants_do_not_write_endpoints() {
        let all = objects(built_in());
        for to in ["admin", "edit", "view"] {
            let parts = all.iter().filter(|role| role["metadata"]["labels"][label(to)] == "true");
            let rules: Vec<&Value> =
                parts.flat_map(|role| role["rules"].as_array().into_iter().flatten()).collect();
            assert!(!rules.is_empty(), "{to}");
            for rule in rules {
                let has = |field: &str, wanted: &[&str]| {
                    let list = rule[field].as_array().into_iter().flatten();
                    list.filter_map(Value::as_str).any(|one| wanted.contains(&one))
                };
                let is_endpoints = has("resources", &["endpoints", "endpointslices", "*"]);
                let writes = has("verbs", &["create", "update", "patch", "delete", "deletecollection", "*"]);
                assert!(!is_endpoints || !writes, "{to}: {rule}");
            }
        }
    }

    #[test]
    fn default_roles_and_bindings_are_valid_and_complete() {
        let all = objects(built_in());
        for object in &all {
            let kind = by_kind("rbac.authorization.k8s.io/v1", object["kind"].as_str().unwrap()).unwrap();
            let mut filled = object.clone();
            defaults::apply(kind, &mut filled);
            assert_eq!(&filled, object);
            assert_eq!(validate::create(kind, object), Vec::new(), "{object}");
            let role = &object["roleRef"];
            let is_role = |other: &&Value| {
                let of = |field: &str| &other["metadata"][field];
                let is_near =
                    role["kind"] == "ClusterRole" || *of("namespace") == object["metadata"]["namespace"];
                is_near && other["kind"] == role["kind"] && *of("name") == role["name"]
            };
            assert!(role.is_null() || all.iter().any(|other| is_role(&other)), "{object}");
        }
        let core = On("", "pods", READ).json();
        assert_eq!(core["apiGroups"], json!([""]));
        let names: std::collections::BTreeSet<String> =
            all.iter().map(|one| format!("{}{}", one["kind"], one["metadata"])).collect();
        assert_eq!(names.len(), all.len());
    }

    #[test]
    fn each_controller_of_upstream_has_a_role_for_its_service_account_alone() {
        let served = |entries: &[String]| {
            let config = coracle_kinds::kind::RuntimeConfig::parse(entries).unwrap();
            objects(&Resources::served(&config))
        };
        let all = served(&[]);
        let of = |kind: &str, name: &str| {
            let found = all.iter().find(|one| one["kind"] == kind && one["metadata"]["name"] == name);
            found.cloned().unwrap_or_default()
        };
        for account in ["deployment-controller", "generic-garbage-collector", "ttl-after-finished-controller"]
        {
            let name = format!("system:controller:{account}");
            let rules = &of("ClusterRole", &name)["rules"];
            assert!(rules.as_array().is_some_and(|rules| !rules.is_empty()), "{name}");
            let subject = json!([{"kind": "ServiceAccount", "name": account, "namespace": "kube-system"}]);
            assert_eq!(of("ClusterRoleBinding", &name)["subjects"], subject);
        }
        let migrator = "system:controller:storage-version-migrator-controller";
        assert_eq!(of("ClusterRole", migrator), Value::Null);
        let view = |all: &[Value]| {
            let role = all.iter().find(|one| one["metadata"]["name"] == "system:aggregate-to-view").unwrap();
            role["rules"].to_string().contains("podgroups/status")
        };
        let more = served(&["api/all=true".to_owned()]);
        assert!(more.iter().any(|one| one["metadata"]["name"] == migrator));
        assert_eq!((view(&all), view(&more)), (false, true));
        // The node authorizer decides about nodes. If the binding had a subject, each node would have the permissions
        // of all nodes.
        assert!(of("ClusterRoleBinding", "system:node")["subjects"].is_null());
    }
}

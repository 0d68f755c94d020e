//! The default roles and bindings of every cluster: those of Kubernetes that our components and users need, and those
//! that kubeadm adds for joining machines.
//!
//! The words of a list are separated by blanks. The core group is the empty word.

use serde_json::{Value, json};

const API: &str = "rbac.authorization.k8s.io";
const READ: &str = "get list watch";
const WRITE: &str = "create delete deletecollection patch update";
const ALL: &str = "create delete deletecollection get list patch update watch";
const BOOTSTRAPPERS: &str = "system:bootstrappers:kubeadm:default-node-token";
const REQUESTS: &str = "certificates.k8s.io";

/// A rule: groups and resources (with names, or none for all), or URLs; and verbs.
enum Rule {
    On(&'static str, &'static str, &'static str),
    Named(&'static str, &'static str, &'static str, &'static str),
    Urls(&'static str, &'static str),
}

use Rule::{Named, On, Urls};

/// A cluster role: its name, the role that it is aggregated to (or empty), its rules.
type Role<'a> = (&'a str, &'a str, &'a [Rule]);

const ROLES: &[Role<'_>] = &[
    ("cluster-admin", "", &[On("*", "*", "*"), Urls("*", "*")]),
    (
        "system:discovery",
        "",
        &[Urls(
            "/api /api/* /apis /apis/* /healthz /livez /openapi /openapi/* /readyz /version /version/",
            "get",
        )],
    ),
    ("system:public-info-viewer", "", &[Urls("/healthz /livez /readyz /version /version/", "get")]),
    (
        "system:basic-user",
        "",
        &[
            On("authorization.k8s.io", "selfsubjectaccessreviews selfsubjectrulesreviews", "create"),
            On("authentication.k8s.io", "selfsubjectreviews", "create"),
        ],
    ),
    (
        "system:monitoring",
        "",
        &[Urls("/healthz /healthz/* /livez /livez/* /metrics /metrics/slis /readyz /readyz/*", "get")],
    ),
    (
        "system:aggregate-to-admin",
        "admin",
        &[
            On("authorization.k8s.io", "localsubjectaccessreviews", "create"),
            On(API, "roles rolebindings", ALL),
        ],
    ),
    ("system:aggregate-to-edit", "edit", EDIT),
    ("system:aggregate-to-view", "view", VIEW),
    ("system:aggregated-metrics-reader", "view", &[On("metrics.k8s.io", "pods nodes", READ)]),
    (
        "system:auth-delegator",
        "",
        &[
            On("authentication.k8s.io", "tokenreviews", "create"),
            On("authorization.k8s.io", "subjectaccessreviews", "create"),
        ],
    ),
    (
        "system:kubelet-api-admin",
        "",
        &[
            On("", "nodes", READ),
            On("", "nodes", "proxy"),
            On("", "nodes/log nodes/metrics nodes/proxy nodes/stats", "*"),
        ],
    ),
    ("system:node-bootstrapper", "", &[On(REQUESTS, "certificatesigningrequests", "create get list watch")]),
    (
        "system:certificates.k8s.io:certificatesigningrequests:nodeclient",
        "",
        &[On(REQUESTS, "certificatesigningrequests/nodeclient", "create")],
    ),
    (
        "system:certificates.k8s.io:certificatesigningrequests:selfnodeclient",
        "",
        &[On(REQUESTS, "certificatesigningrequests/selfnodeclient", "create")],
    ),
    (
        "system:certificates.k8s.io:kube-apiserver-client-approver",
        "",
        &[Named(REQUESTS, "signers", "kubernetes.io/kube-apiserver-client", "approve")],
    ),
    (
        "system:certificates.k8s.io:kube-apiserver-client-kubelet-approver",
        "",
        &[Named(REQUESTS, "signers", "kubernetes.io/kube-apiserver-client-kubelet", "approve")],
    ),
    (
        "system:certificates.k8s.io:kubelet-serving-approver",
        "",
        &[Named(REQUESTS, "signers", "kubernetes.io/kubelet-serving", "approve")],
    ),
    (
        "system:service-account-issuer-discovery",
        "",
        &[Urls(
            "/.well-known/openid-configuration /.well-known/openid-configuration/ /openid/v1/jwks /openid/v1/jwks/",
            "get",
        )],
    ),
    ("system:kube-scheduler", "", SCHEDULER),
    ("system:volume-scheduler", "", VOLUME_SCHEDULER),
    ("kubeadm:get-nodes", "", &[On("", "nodes", "get")]),
];

const EDIT: &[Rule] = &[
    On("", "pods/attach pods/exec pods/portforward pods/proxy secrets services/proxy", READ),
    On("", "serviceaccounts", "impersonate"),
    On("", "pods pods/attach pods/exec pods/portforward pods/proxy", WRITE),
    On("", "pods/eviction serviceaccounts/token", "create"),
    On(
        "",
        "configmaps events persistentvolumeclaims replicationcontrollers replicationcontrollers/scale secrets \
         serviceaccounts services services/proxy",
        WRITE,
    ),
    On(
        "apps",
        "daemonsets deployments deployments/rollback deployments/scale replicasets replicasets/scale statefulsets \
         statefulsets/scale",
        WRITE,
    ),
    On("autoscaling", "horizontalpodautoscalers", WRITE),
    On("batch", "cronjobs jobs", WRITE),
    On("policy", "poddisruptionbudgets", WRITE),
    On("networking.k8s.io", "ingresses networkpolicies", WRITE),
    On("coordination.k8s.io", "leases", ALL),
];

const VIEW: &[Rule] = &[
    On(
        "",
        "configmaps endpoints persistentvolumeclaims persistentvolumeclaims/status pods replicationcontrollers \
         replicationcontrollers/scale serviceaccounts services services/status",
        READ,
    ),
    On(
        "",
        "bindings events limitranges namespaces/status pods/log pods/status replicationcontrollers/status \
         resourcequotas resourcequotas/status namespaces",
        READ,
    ),
    On("discovery.k8s.io", "endpointslices", READ),
    On(
        "apps",
        "controllerrevisions daemonsets daemonsets/status deployments deployments/scale deployments/status \
         replicasets replicasets/scale replicasets/status statefulsets statefulsets/scale statefulsets/status",
        READ,
    ),
    On("autoscaling", "horizontalpodautoscalers horizontalpodautoscalers/status", READ),
    On("batch", "cronjobs cronjobs/status jobs jobs/status", READ),
    On("policy", "poddisruptionbudgets poddisruptionbudgets/status", READ),
    On("networking.k8s.io", "ingresses ingresses/status networkpolicies", READ),
];

const SCHEDULER: &[Rule] = &[
    On(" events.k8s.io", "events", "create patch update"),
    On("coordination.k8s.io", "leases", "create"),
    Named("coordination.k8s.io", "leases", "kube-scheduler", "get update"),
    On("", "nodes namespaces replicationcontrollers services persistentvolumeclaims persistentvolumes", READ),
    On("", "pods", "delete get list watch"),
    On("", "bindings pods/binding", "create"),
    On("", "pods/status", "patch update"),
    On("apps", "replicasets statefulsets", READ),
    On("policy", "poddisruptionbudgets", READ),
    On("storage.k8s.io", "csidrivers csinodes csistoragecapacities storageclasses volumeattachments", READ),
    On("resource.k8s.io", "deviceclasses resourceslices", READ),
    On("resource.k8s.io", "resourceclaims resourceclaims/status", "get list watch patch update"),
    On("resource.k8s.io", "resourceclaims/binding", "patch update"),
];

const VOLUME_SCHEDULER: &[Rule] = &[
    On("", "persistentvolumes persistentvolumeclaims", "get list patch update watch"),
    On("storage.k8s.io", "storageclasses", READ),
];

/// Aggregated roles.
const AGGREGATED: &[(&str, &str)] = &[("admin", ""), ("edit", "admin"), ("view", "edit")];

/// A binding of a cluster role: its name, the role, and its groups or users.
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

/// The role that lets every client read the config map for joining machines.
const CLUSTER_INFO: &str = "kubeadm:bootstrap-signer-clusterinfo";

/// The role that lets aggregated servers read how to authenticate clients. Their operators bind it.
const EXTENSION_READER: &str = "extension-apiserver-authentication-reader";

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

fn object(kind: &str, (namespace, name): (&str, &str)) -> Value {
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

fn role(&(name, to, rules): &Role<'_>) -> Value {
    let mut role = object("ClusterRole", ("", name));
    if !to.is_empty() {
        role["metadata"]["labels"][label(to)] = "true".into();
    }
    role["rules"] = rules.iter().map(Rule::json).collect();
    role
}

fn aggregated(&(name, to): &(&str, &str)) -> Value {
    let mut role = self::role(&(name, to, &[]));
    role["aggregationRule"] = json!({"clusterRoleSelectors": [{"matchLabels": {label(name): "true"}}]});
    role
}

fn binding(mut object: Value, (kind, role): (&str, &str), (of, names): (&str, &[&str])) -> Value {
    object["roleRef"] = json!({"apiGroup": API, "kind": kind, "name": role});
    object["subjects"] =
        names.iter().map(|name| json!({"apiGroup": API, "kind": of, "name": name})).collect();
    object
}

/// All default objects, roles before their bindings.
pub(super) fn objects() -> Vec<Value> {
    let mut all: Vec<Value> = ROLES.iter().map(role).collect();
    all.extend(AGGREGATED.iter().map(aggregated));
    let mut info = object("Role", ("kube-public", CLUSTER_INFO));
    info["rules"] = json!([Named("", "configmaps", "cluster-info", "get").json()]);
    all.push(info);
    all.extend(BINDINGS.iter().map(|(name, role, of, names)| {
        binding(object("ClusterRoleBinding", ("", name)), ("ClusterRole", role), (of, names))
    }));
    let mut reader = object("Role", ("kube-system", EXTENSION_READER));
    reader["rules"] =
        json!([Named("", "configmaps", "extension-apiserver-authentication", "get list watch").json()]);
    all.push(reader);
    let info = object("RoleBinding", ("kube-public", CLUSTER_INFO));
    all.push(binding(info, ("Role", CLUSTER_INFO), ("User", &["system:anonymous"])));
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use coracle_kinds::{defaults, kind::by_kind, validate};

    /// Upstream removed these permissions from the roles of tenants in 1.22.
    #[test]
    fn cve_2021_25740_tenants_do_not_write_endpoints() {
        for rule in EDIT.iter().chain(VIEW).map(Rule::json) {
            let has = |field: &str, wanted: &[&str]| {
                let list = rule[field].as_array().into_iter().flatten();
                list.filter_map(Value::as_str).any(|one| wanted.contains(&one))
            };
            let is_endpoints = has("resources", &["endpoints", "endpointslices", "*"]);
            let writes = has("verbs", &["create", "update", "patch", "delete", "deletecollection", "*"]);
            assert!(!is_endpoints || !writes, "{rule}");
        }
    }

    #[test]
    fn what_every_cluster_has_is_valid_and_complete() {
        let all = objects();
        for object in &all {
            let kind = by_kind("rbac.authorization.k8s.io/v1", object["kind"].as_str().unwrap()).unwrap();
            let mut filled = object.clone();
            defaults::apply(kind, &mut filled);
            assert_eq!(&filled, object);
            assert_eq!(validate::create(kind, object), Vec::new(), "{object}");
            let role = &object["roleRef"];
            let is_role =
                |other: &&Value| other["kind"] == role["kind"] && other["metadata"]["name"] == role["name"];
            assert!(role.is_null() || all.iter().any(|other| is_role(&other)), "{object}");
        }
        let core = On("", "pods", READ).json();
        assert_eq!(core["apiGroups"], json!([""]));
    }
}

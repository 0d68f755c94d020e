//! Default cluster roles, except the roles of controllers. Source:
//! `plugin/pkg/auth/authorizer/rbac/bootstrappolicy/policy.go`, and kubeadm for the roles with the prefix `kubeadm:`.

use super::{
    ALL, API, CERTIFICATES, EVENTS, READ, Role,
    Rule::{self, Named, On, Urls},
    WRITE,
};

pub(super) const ROLES: &[Role<'_>] = &[
    ("cluster-admin", "", &[On("*", "*", "*"), Urls("*", "*")]),
    (
        "system:aggregate-to-admin",
        "admin",
        &[
            On("authorization.k8s.io", "localsubjectaccessreviews", "create"),
            On(API, "rolebindings roles", ALL),
        ],
    ),
    ("system:aggregate-to-edit", "edit", EDIT),
    ("system:aggregate-to-view", "view", VIEW),
    (
        "system:auth-delegator",
        "",
        &[
            On("authentication.k8s.io", "tokenreviews", "create"),
            On("authorization.k8s.io", "subjectaccessreviews", "create"),
        ],
    ),
    (
        "system:basic-user",
        "",
        &[
            On("authorization.k8s.io", "selfsubjectaccessreviews selfsubjectrulesreviews", "create"),
            On("authentication.k8s.io", "selfsubjectreviews", "create"),
        ],
    ),
    (
        "system:certificates.k8s.io:certificatesigningrequests:nodeclient",
        "",
        &[On(CERTIFICATES, "certificatesigningrequests/nodeclient", "create")],
    ),
    (
        "system:certificates.k8s.io:certificatesigningrequests:selfnodeclient",
        "",
        &[On(CERTIFICATES, "certificatesigningrequests/selfnodeclient", "create")],
    ),
    (
        "system:certificates.k8s.io:kube-apiserver-client-approver",
        "",
        &[Named(CERTIFICATES, "signers", "kubernetes.io/kube-apiserver-client", "approve")],
    ),
    (
        "system:certificates.k8s.io:kube-apiserver-client-kubelet-approver",
        "",
        &[Named(CERTIFICATES, "signers", "kubernetes.io/kube-apiserver-client-kubelet", "approve")],
    ),
    (
        "system:certificates.k8s.io:kubelet-serving-approver",
        "",
        &[Named(CERTIFICATES, "signers", "kubernetes.io/kubelet-serving", "approve")],
    ),
    (
        "system:certificates.k8s.io:legacy-unknown-approver",
        "",
        &[Named(CERTIFICATES, "signers", "kubernetes.io/legacy-unknown", "approve")],
    ),
    (
        "system:discovery",
        "",
        &[Urls(
            "/api /api/* /apis /apis/* /healthz /livez /openapi /openapi/* /readyz /version \
             /version/",
            "get",
        )],
    ),
    (
        "system:heapster",
        "",
        &[On("", "events namespaces nodes pods", READ), On("extensions", "deployments", READ)],
    ),
    ("system:kube-aggregator", "", &[On("", "endpoints services", READ)]),
    ("system:kube-controller-manager", "", CONTROLLER_MANAGER),
    ("system:kube-dns", "", &[On("", "endpoints services", "list watch")]),
    ("system:kube-scheduler", "", SCHEDULER),
    (
        "system:kubelet-api-admin",
        "",
        &[
            On("", "nodes", READ),
            On("", "nodes", "proxy"),
            On("", "nodes/log nodes/metrics nodes/proxy nodes/stats", "*"),
            On("", "nodes/configz nodes/healthz nodes/pods", "*"),
        ],
    ),
    (
        "system:monitoring",
        "",
        &[
            Urls(
                "/flagz /healthz /healthz/* /livez /livez/* /metrics /metrics/slis /readyz /readyz/* \
                 /statusz",
                "get",
            ),
            On("", "nodes/metrics", "get"),
        ],
    ),
    ("system:node", "", NODE),
    (
        "system:node-bootstrapper",
        "",
        &[On(CERTIFICATES, "certificatesigningrequests", "create get list watch")],
    ),
    ("system:node-problem-detector", "", &[On("", "nodes", "get"), On("", "nodes/status", "patch"), EVENTS]),
    (
        "system:node-proxier",
        "",
        &[
            On("", "endpoints services", "list watch"),
            On("", "nodes", READ),
            EVENTS,
            On("networking.k8s.io", "servicecidrs", "list watch"),
            On("discovery.k8s.io", "endpointslices", "list watch"),
        ],
    ),
    (
        "system:persistent-volume-provisioner",
        "",
        &[
            On("", "persistentvolumes", "create delete get list watch"),
            On("", "persistentvolumeclaims", "get list update watch"),
            On("storage.k8s.io", "storageclasses", READ),
            On("", "events", "watch"),
            EVENTS,
        ],
    ),
    ("system:public-info-viewer", "", &[Urls("/healthz /livez /readyz /version /version/", "get")]),
    (
        "system:service-account-issuer-discovery",
        "",
        &[Urls(
            "/.well-known/openid-configuration /.well-known/openid-configuration/ /openid/v1/jwks \
             /openid/v1/jwks/",
            "get",
        )],
    ),
    (
        "system:volume-scheduler",
        "",
        &[
            On("", "persistentvolumes", "get list patch update watch"),
            On("storage.k8s.io", "storageclasses", READ),
            On("", "persistentvolumeclaims", "get list patch update watch"),
        ],
    ),
    // As in metrics-server, which this server replaces.
    ("system:aggregated-metrics-reader", "view", &[On("metrics.k8s.io", "pods nodes", READ)]),
    ("kubeadm:get-nodes", "", &[On("", "nodes", "get")]),
];

/// Rules of the role `edit`, in addition to the rules of `view`.
pub(super) const EDIT: &[Rule] = &[
    On("", "pods/attach pods/exec pods/portforward pods/proxy secrets services/proxy", READ),
    On("", "serviceaccounts", "impersonate"),
    On("", "pods pods/attach pods/exec pods/portforward pods/proxy", WRITE),
    On("", "pods/eviction", "create"),
    On(
        "",
        "configmaps persistentvolumeclaims replicationcontrollers \
         replicationcontrollers/scale secrets serviceaccounts services services/proxy",
        WRITE,
    ),
    On("", "serviceaccounts/token", "create"),
    On(" events.k8s.io", "events", WRITE),
    On(
        "apps",
        "daemonsets deployments deployments/rollback deployments/scale replicasets \
         replicasets/scale statefulsets statefulsets/scale",
        WRITE,
    ),
    On("autoscaling", "horizontalpodautoscalers", WRITE),
    On("batch", "cronjobs jobs", WRITE),
    On(
        "extensions",
        "daemonsets deployments deployments/rollback deployments/scale ingresses \
         networkpolicies replicasets replicasets/scale replicationcontrollers/scale",
        WRITE,
    ),
    On("policy", "poddisruptionbudgets", WRITE),
    On("networking.k8s.io", "ingresses networkpolicies", WRITE),
    On("coordination.k8s.io", "leases", ALL),
    On("resource.k8s.io", "resourceclaims resourceclaimtemplates", WRITE),
];

/// Rules of the role `view`.
pub(super) const VIEW: &[Rule] = &[
    On(
        "",
        "configmaps endpoints persistentvolumeclaims persistentvolumeclaims/status pods \
         replicationcontrollers replicationcontrollers/scale serviceaccounts services \
         services/status",
        READ,
    ),
    On(
        "",
        "bindings limitranges namespaces/status pods/log pods/status \
         replicationcontrollers/status resourcequotas resourcequotas/status",
        READ,
    ),
    On("", "namespaces", READ),
    On(" events.k8s.io", "events", READ),
    On("discovery.k8s.io", "endpointslices", READ),
    On(
        "apps",
        "controllerrevisions daemonsets daemonsets/status deployments deployments/scale \
         deployments/status replicasets replicasets/scale replicasets/status statefulsets \
         statefulsets/scale statefulsets/status",
        READ,
    ),
    On("autoscaling", "horizontalpodautoscalers horizontalpodautoscalers/status", READ),
    On("batch", "cronjobs cronjobs/status jobs jobs/status", READ),
    On(
        "extensions",
        "daemonsets daemonsets/status deployments deployments/scale deployments/status \
         ingresses ingresses/status networkpolicies replicasets replicasets/scale \
         replicasets/status replicationcontrollers/scale",
        READ,
    ),
    On("policy", "poddisruptionbudgets poddisruptionbudgets/status", READ),
    On("networking.k8s.io", "ingresses ingresses/status networkpolicies", READ),
    On("resource.k8s.io", "resourceclaims resourceclaims/status resourceclaimtemplates", READ),
];

const CONTROLLER_MANAGER: &[Rule] = &[
    EVENTS,
    On("coordination.k8s.io", "leases", "create"),
    Named("coordination.k8s.io", "leases", "kube-controller-manager", "get update"),
    On("", "secrets serviceaccounts", "create"),
    On("", "secrets", "delete"),
    On("", "configmaps namespaces secrets serviceaccounts", "get"),
    On("", "secrets serviceaccounts", "update"),
    On("authentication.k8s.io", "tokenreviews", "create"),
    On("authorization.k8s.io", "subjectaccessreviews", "create"),
    On("*", "*", "list watch"),
    On("", "serviceaccounts/token", "create"),
];

const SCHEDULER: &[Rule] = &[
    EVENTS,
    On("coordination.k8s.io", "leases", "create"),
    Named("coordination.k8s.io", "leases", "kube-scheduler", "get list update watch"),
    On("coordination.k8s.io", "leasecandidates", ALL),
    On("", "nodes", READ),
    On("", "pods", "delete get list watch"),
    On("", "bindings pods/binding", "create"),
    On("", "pods/status", "patch update"),
    On("", "replicationcontrollers services", READ),
    On("apps extensions", "replicasets", READ),
    On("apps", "statefulsets", READ),
    On("policy", "poddisruptionbudgets", READ),
    On("", "persistentvolumeclaims persistentvolumes", READ),
    On("authentication.k8s.io", "tokenreviews", "create"),
    On("authorization.k8s.io", "subjectaccessreviews", "create"),
    On("storage.k8s.io", "csinodes", READ),
    On("storage.k8s.io", "volumeattachments", READ),
    On("", "namespaces", READ),
    On("storage.k8s.io", "csidrivers", READ),
    On("storage.k8s.io", "csistoragecapacities", READ),
    On("resource.k8s.io", "deviceclasses", READ),
    On("resource.k8s.io", "resourceclaims", "get list patch update watch"),
    On("resource.k8s.io", "resourceclaims/status", "get list patch update watch"),
    On("", "pods/finalizers", "update"),
    On("resource.k8s.io", "resourceslices", READ),
    On("resource.k8s.io", "resourceclaims", "create delete"),
    On("resource.k8s.io", "resourceclaims/binding", "patch update"),
];

/// Rules of `system:node`. No subject is bound to this role by default, because the node authorizer decides about
/// nodes.
const NODE: &[Rule] = &[
    On("authentication.k8s.io", "tokenreviews", "create"),
    On("authorization.k8s.io", "localsubjectaccessreviews subjectaccessreviews", "create"),
    On("", "services", READ),
    On("", "nodes", "create get list watch"),
    On("", "nodes/status", "patch update"),
    On("", "nodes", "patch update"),
    EVENTS,
    On("", "pods", READ),
    On("", "pods", "create delete"),
    On("", "pods/status", "patch update"),
    On("", "pods/eviction", "create"),
    On("", "configmaps secrets", READ),
    On("", "persistentvolumeclaims persistentvolumes", "get"),
    On("", "endpoints", "get"),
    On(CERTIFICATES, "certificatesigningrequests", "create get list watch"),
    On("coordination.k8s.io", "leases", "create delete get patch update"),
    On("storage.k8s.io", "volumeattachments", "get"),
    On("", "serviceaccounts/token", "create"),
    On("", "persistentvolumeclaims/status", "get patch update"),
    On("storage.k8s.io", "csidrivers", READ),
    On("storage.k8s.io", "csinodes", "create delete get patch update"),
    On("node.k8s.io", "runtimeclasses", READ),
    On("resource.k8s.io", "resourceclaims", "get"),
    On("resource.k8s.io", "resourceslices", "deletecollection"),
    On("", "serviceaccounts", "get"),
];

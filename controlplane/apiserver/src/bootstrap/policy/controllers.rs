//! Cluster roles of the controllers of kube-controller-manager, for its service accounts
//! (`--use-service-account-credentials`). Source:
//! `plugin/pkg/auth/authorizer/rbac/bootstrappolicy/controller_policy.go`.

use super::{
    API, CERTIFICATES, EVENTS, READ,
    Rule::{self, Named, On},
};

/// The rules of each controller. Its cluster role and binding are `system:controller:NAME`; the subject is the service
/// account NAME in `kube-system`.
pub(super) const CONTROLLERS: &[(&str, &[Rule])] = &[
    (
        "attachdetach-controller",
        &[
            On("", "persistentvolumeclaims persistentvolumes", "list watch"),
            On("", "nodes", READ),
            On("", "nodes/status", "patch update"),
            On("", "pods", "list watch"),
            EVENTS,
            On("storage.k8s.io", "volumeattachments", "create delete get list watch"),
            On("storage.k8s.io", "csidrivers", READ),
            On("storage.k8s.io", "csinodes", READ),
        ],
    ),
    (
        "certificate-controller",
        &[
            On(CERTIFICATES, "certificatesigningrequests", "delete get list watch"),
            On(
                CERTIFICATES,
                "certificatesigningrequests/approval certificatesigningrequests/status",
                "update",
            ),
            Named(CERTIFICATES, "signers", "kubernetes.io/kube-apiserver-client-kubelet", "approve"),
            Named(
                CERTIFICATES,
                "signers",
                "kubernetes.io/kube-apiserver-client kubernetes.io/kube-apiserver-client-kubelet \
                 kubernetes.io/kubelet-serving kubernetes.io/legacy-unknown",
                "sign",
            ),
            On("authorization.k8s.io", "subjectaccessreviews", "create"),
            EVENTS,
        ],
    ),
    (
        "clusterrole-aggregation-controller",
        &[On(API, "clusterroles", "escalate get list patch update watch")],
    ),
    (
        "cronjob-controller",
        &[
            On("batch", "cronjobs", "get list update watch"),
            On("batch", "jobs", "create delete get list patch update watch"),
            On("batch", "cronjobs/status", "update"),
            On("batch", "cronjobs/finalizers", "update"),
            On("", "pods", "delete list watch"),
            EVENTS,
        ],
    ),
    (
        "daemon-set-controller",
        &[
            On("apps extensions", "daemonsets", READ),
            On("apps extensions", "daemonsets/status", "update"),
            On("apps extensions", "daemonsets/finalizers", "update"),
            On("", "nodes", "list watch"),
            On("", "pods", "create delete list patch watch"),
            On("", "pods/binding", "create"),
            On("apps", "controllerrevisions", "create delete get list patch update watch"),
            EVENTS,
        ],
    ),
    (
        "deployment-controller",
        &[
            On("apps extensions", "deployments", "get list update watch"),
            On("apps extensions", "deployments/status", "update"),
            On("apps extensions", "deployments/finalizers", "update"),
            On("apps extensions", "replicasets", "create delete get list patch update watch"),
            On("", "pods", "get list update watch"),
            EVENTS,
        ],
    ),
    (
        "device-taint-eviction-controller",
        &[
            On("", "pods", "delete get list watch"),
            On("", "pods/status", "patch update"),
            On("resource.k8s.io", "resourceclaims", READ),
            On("resource.k8s.io", "resourceslices", READ),
            On("resource.k8s.io", "deviceclasses", READ),
            EVENTS,
        ],
    ),
    (
        "disruption-controller",
        &[
            On("apps extensions", "deployments", READ),
            On("apps extensions", "replicasets", READ),
            On("", "replicationcontrollers", READ),
            On("policy", "poddisruptionbudgets", READ),
            On("apps", "statefulsets", READ),
            On("policy", "poddisruptionbudgets/status", "update"),
            On("", "pods/status", "patch update"),
            On("*", "*/scale", "get"),
            EVENTS,
        ],
    ),
    (
        "endpoint-controller",
        &[
            On("", "pods services", READ),
            On("", "endpoints", "create delete get list update watch"),
            On("", "endpoints/restricted", "create"),
            EVENTS,
        ],
    ),
    (
        "endpointslice-controller",
        &[
            On("", "nodes pods services", READ),
            On("", "services/finalizers", "update"),
            On("discovery.k8s.io", "endpointslices", "create delete get list update watch"),
            EVENTS,
        ],
    ),
    (
        "endpointslicemirroring-controller",
        &[
            On("", "endpoints services", READ),
            On("", "services/finalizers", "update"),
            On("", "endpoints/finalizers", "update"),
            On("discovery.k8s.io", "endpointslices", "create delete get list update watch"),
            EVENTS,
        ],
    ),
    (
        "ephemeral-volume-controller",
        &[
            On("", "pods", READ),
            On("", "pods/finalizers", "update"),
            On("", "persistentvolumeclaims", "create get list watch"),
            EVENTS,
        ],
    ),
    (
        "expand-controller",
        &[
            On("", "persistentvolumes", "get list patch update watch"),
            On("", "persistentvolumeclaims/status", "patch update"),
            On("", "persistentvolumeclaims", READ),
            EVENTS,
        ],
    ),
    ("generic-garbage-collector", &[On("*", "*", "delete get list patch update watch"), EVENTS]),
    (
        "horizontal-pod-autoscaler",
        &[
            On("autoscaling", "horizontalpodautoscalers", READ),
            On("autoscaling", "horizontalpodautoscalers/status", "update"),
            On("*", "*/scale", "get update"),
            On("", "pods", "list watch"),
            On("metrics.k8s.io", "pods", "list watch"),
            On("custom.metrics.k8s.io", "*", READ),
            On("external.metrics.k8s.io", "*", READ),
            EVENTS,
        ],
    ),
    (
        "job-controller",
        &[
            On("batch", "jobs", "get list patch update watch"),
            On("batch", "jobs/status", "update"),
            On("batch", "jobs/finalizers", "update"),
            On("", "pods", "create delete list patch watch"),
            EVENTS,
        ],
    ),
    (
        "legacy-service-account-token-cleaner",
        &[
            Named("", "configmaps", "kube-apiserver-legacy-service-account-token-tracking", "get"),
            On("", "secrets", "delete patch"),
        ],
    ),
    (
        "namespace-controller",
        &[
            On("", "namespaces", "delete get list watch"),
            On("", "namespaces/finalize namespaces/status", "update"),
            On("*", "*", "delete deletecollection get list watch"),
        ],
    ),
    (
        "node-controller",
        &[
            On("", "nodes", "delete get list patch update watch"),
            On("", "nodes/status", "patch update"),
            On("", "pods/status", "patch update"),
            On("", "pods", "delete get list watch"),
            EVENTS,
        ],
    ),
    (
        "persistent-volume-binder",
        &[
            On("", "persistentvolumes", "create delete get list update watch"),
            On("", "persistentvolumes/status", "update"),
            On("", "persistentvolumeclaims", "get list update watch"),
            On("", "persistentvolumeclaims/status", "update"),
            On("", "pods", "create delete get list watch"),
            On("storage.k8s.io", "storageclasses", READ),
            On("", "nodes", "list watch"),
            EVENTS,
            On("", "events", "watch"),
        ],
    ),
    (
        "pod-garbage-collector",
        &[On("", "pods", "delete list watch"), On("", "nodes", READ), On("", "pods/status", "patch")],
    ),
    ("pv-protection-controller", &[On("", "persistentvolumes", "get list update watch"), EVENTS]),
    (
        "pvc-protection-controller",
        &[
            On("", "persistentvolumeclaims", "get list update watch"),
            On("", "persistentvolumeclaims/status", "update"),
            On("", "pods", READ),
            EVENTS,
        ],
    ),
    (
        "replicaset-controller",
        &[
            On("apps extensions", "replicasets", "get list update watch"),
            On("apps extensions", "replicasets/status", "update"),
            On("apps extensions", "replicasets/finalizers", "update"),
            On("", "pods", "create delete list patch watch"),
            EVENTS,
        ],
    ),
    (
        "replication-controller",
        &[
            On("", "replicationcontrollers", "get list update watch"),
            On("", "replicationcontrollers/status", "update"),
            On("", "replicationcontrollers/finalizers", "update"),
            On("", "pods", "create delete list patch watch"),
            EVENTS,
        ],
    ),
    (
        "resource-claim-controller",
        &[
            On("", "pods", READ),
            On("", "pods/finalizers", "update"),
            On("resource.k8s.io", "resourceclaims", "create delete get list watch"),
            On("resource.k8s.io", "resourceclaims resourceclaims/status", "patch update"),
            On("", "pods/status", "patch update"),
            EVENTS,
            On("resource.k8s.io", "resourceclaims/binding", "patch update"),
        ],
    ),
    (
        "resourcequota-controller",
        &[On("*", "*", "list watch"), On("", "resourcequotas/status", "update"), EVENTS],
    ),
    ("root-ca-cert-publisher", &[On("", "configmaps", "create update"), EVENTS]),
    ("route-controller", &[On("", "nodes", "list watch"), On("", "nodes/status", "patch"), EVENTS]),
    (
        "selinux-warning-controller",
        &[
            EVENTS,
            On("", "persistentvolumes", READ),
            On("", "persistentvolumeclaims", READ),
            On("", "pods", READ),
            On("storage.k8s.io", "csidrivers", READ),
        ],
    ),
    ("service-account-controller", &[On("", "serviceaccounts", "create"), EVENTS]),
    (
        "service-cidrs-controller",
        &[
            On("networking.k8s.io", "servicecidrs", "get list patch update watch"),
            On("networking.k8s.io", "servicecidrs/finalizers", "patch update"),
            On("networking.k8s.io", "servicecidrs/status", "patch update"),
            On("networking.k8s.io", "ipaddresses", READ),
            EVENTS,
        ],
    ),
    (
        "service-controller",
        &[
            On("", "services", READ),
            On("", "services/status", "patch update"),
            On("", "nodes", "list watch"),
            EVENTS,
        ],
    ),
    (
        "statefulset-controller",
        &[
            On("", "pods", "list watch"),
            On("apps", "statefulsets", READ),
            On("apps", "statefulsets/status", "update"),
            On("apps", "statefulsets/finalizers", "update"),
            On("", "pods", "create delete get patch update"),
            On("apps", "controllerrevisions", "create delete get list patch update watch"),
            On("", "persistentvolumeclaims", "create get list watch"),
            On("", "persistentvolumeclaims", "delete update"),
            On("", "pods/finalizers", "update"),
            EVENTS,
        ],
    ),
    ("ttl-after-finished-controller", &[On("batch", "jobs", "delete get list watch"), EVENTS]),
    ("ttl-controller", &[On("", "nodes", "list patch update watch"), EVENTS]),
    (
        "validatingadmissionpolicy-status-controller",
        &[
            On("admissionregistration.k8s.io", "validatingadmissionpolicies", READ),
            On("admissionregistration.k8s.io", "validatingadmissionpolicies/status", "get patch update"),
            EVENTS,
        ],
    ),
    (
        "volumeattributesclass-protection-controller",
        &[
            On("", "persistentvolumeclaims", READ),
            On("", "persistentvolumes", READ),
            On("storage.k8s.io", "volumeattributesclasses", "get list update watch"),
            EVENTS,
        ],
    ),
];

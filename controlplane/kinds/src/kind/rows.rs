//! The rows of the table. A new kind needs a row here, a root in `controlplane/schemas/data/generate.py`, and its own
//! functions.

mod admission;
mod aggregation;
mod autoscaling;
mod devices;
mod event;
mod extensions;
mod flow_control;
mod migration;
mod networking;
mod policy;
mod rbac;
mod review;
mod scheduling;
mod storage;
mod unstored;
mod workload;

use serde_json::{Value, json};

use super::definition::{Kind, Rules, Subresource, Writes};
use crate::resource::NameRule;
use crate::{defaults, fields, table, validate};

const ALL: &[&str] = &["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"];
const NO_COLLECTION: &[&str] = &["create", "delete", "get", "list", "patch", "update", "watch"];
const GET_PATCH_UPDATE: &[&str] = &["get", "patch", "update"];
const CREATE: &[&str] = &["create"];
const STREAM: &[&str] = &["create", "get"];
const PROXY: &[&str] = &["create", "delete", "get", "patch", "update"];

const PLAIN: Writes = Writes { status: false, generation: false, create: no_defaults, update: no_defaults };
const WITH_STATUS: Writes =
    Writes { status: true, generation: false, create: no_defaults, update: no_defaults };
const WITH_GENERATION: Writes =
    Writes { status: true, generation: true, create: no_defaults, update: no_defaults };

const RULES: Rules = Rules {
    defaults: no_defaults,
    validate: |_, _, _| {},
    name: NameRule::Dns1123Subdomain,
    unconditional_update: true,
    create_on_update: false,
    writes: PLAIN,
    columns: table::CREATED_AT,
    cells: table::created_at,
};

const KIND: Kind = Kind {
    group: "",
    version: "v1",
    kind: "",
    plural: "",
    singular: "",
    short_names: &[],
    categories: &[],
    deprecation: None,
    namespaced: true,
    verbs: ALL,
    subresources: &[],
    schema: "",
    volatile: false,
    ttl_seconds: 0,
    fields: &[],
    stored_as: None,
    rules: RULES,
};

fn no_defaults(_: &mut Value) {}

/// The `status` subresource of a kind.
const fn status(group: &'static str, kind: &'static str) -> Subresource {
    sub("status", group, "v1", kind, GET_PATCH_UPDATE)
}

const fn sub(
    name: &'static str,
    group: &'static str,
    version: &'static str,
    kind: &'static str,
    verbs: &'static [&'static str],
) -> Subresource {
    Subresource { name, group, version, kind, verbs }
}

const SCALE: Subresource = sub("scale", "autoscaling", "v1", "Scale", GET_PATCH_UPDATE);

/// Every built-in kind. [`crate::kind::RuntimeConfig`] selects the served versions.
pub static KINDS: &[Kind] = &[
    NAMESPACES,
    NODES,
    PODS,
    SERVICES,
    ENDPOINTS,
    SECRETS,
    CONFIG_MAPS,
    SERVICE_ACCOUNTS,
    EVENTS,
    event::EVENTS,
    workload::DEPLOYMENTS,
    workload::REPLICA_SETS,
    workload::CONTROLLER_REVISIONS,
    workload::STATEFUL_SETS,
    workload::DAEMON_SETS,
    workload::REPLICATION_CONTROLLERS,
    workload::POD_TEMPLATES,
    workload::JOBS,
    workload::CRON_JOBS,
    autoscaling::AUTOSCALERS,
    autoscaling::AUTOSCALERS_V1,
    storage::PERSISTENT_VOLUMES,
    storage::PERSISTENT_VOLUME_CLAIMS,
    storage::STORAGE_CLASSES,
    storage::VOLUME_ATTACHMENTS,
    storage::CSI_DRIVERS,
    storage::CSI_STORAGE_CAPACITIES,
    storage::VOLUME_ATTRIBUTES_CLASSES,
    LEASES,
    ENDPOINT_SLICES,
    SIGNING_REQUESTS,
    DISRUPTION_BUDGETS,
    CSI_NODES,
    policy::LIMIT_RANGES,
    policy::RESOURCE_QUOTAS,
    policy::PRIORITY_CLASSES,
    policy::RUNTIME_CLASSES,
    admission::MUTATING_WEBHOOKS,
    admission::VALIDATING_WEBHOOKS,
    admission::MUTATING_POLICIES,
    admission::MUTATING_BINDINGS,
    admission::VALIDATING_POLICIES,
    admission::VALIDATING_BINDINGS,
    networking::NETWORK_POLICIES,
    networking::INGRESSES,
    networking::INGRESS_CLASSES,
    networking::SERVICE_CIDRS,
    networking::IP_ADDRESSES,
    flow_control::FLOW_SCHEMAS,
    flow_control::PRIORITY_LEVELS,
    devices::DEVICE_CLASSES,
    devices::CLAIMS,
    devices::CLAIM_TEMPLATES,
    devices::SLICES,
    scheduling::WORKLOADS,
    scheduling::POD_GROUPS,
    migration::MIGRATIONS,
    rbac::ROLES,
    rbac::ROLE_BINDINGS,
    rbac::CLUSTER_ROLES,
    rbac::CLUSTER_ROLE_BINDINGS,
    review::TOKEN_REVIEWS,
    review::SELF_SUBJECT_REVIEWS,
    review::SELF_SUBJECT_ACCESS_REVIEWS,
    review::SELF_SUBJECT_RULES_REVIEWS,
    review::SUBJECT_ACCESS_REVIEWS,
    review::LOCAL_SUBJECT_ACCESS_REVIEWS,
    unstored::BINDINGS,
    unstored::COMPONENT_STATUSES,
    extensions::CUSTOM_RESOURCE_DEFINITIONS,
    aggregation::API_SERVICES,
];

const NAMESPACES: Kind = Kind {
    kind: "Namespace",
    plural: "namespaces",
    singular: "namespace",
    short_names: &["ns"],
    namespaced: false,
    verbs: NO_COLLECTION,
    subresources: &[sub("finalize", "", "v1", "Namespace", &["update"]), status("", "Namespace")],
    schema: "io.k8s.api.core.v1.Namespace",
    fields: fields::NAMESPACE,
    rules: Rules {
        defaults: defaults::object::namespace,
        validate: validate::object::namespace,
        name: NameRule::Dns1123Label,
        writes: Writes { create: crate::strategy::new_namespace, ..WITH_STATUS },
        columns: table::object::NAMESPACE,
        cells: table::object::namespace,
        ..RULES
    },
    ..KIND
};

const NODES: Kind = Kind {
    kind: "Node",
    plural: "nodes",
    singular: "node",
    short_names: &["no"],
    namespaced: false,
    subresources: &[sub("proxy", "", "v1", "NodeProxyOptions", PROXY), status("", "Node")],
    schema: "io.k8s.api.core.v1.Node",
    fields: fields::NODE,
    rules: Rules {
        defaults: defaults::object::node,
        validate: validate::node::node,
        // A new node keeps its status, because the agent registers with a complete status.
        writes: WITH_STATUS,
        columns: table::node::COLUMNS,
        cells: table::node::cells,
        ..RULES
    },
    ..KIND
};

const PODS: Kind = Kind {
    kind: "Pod",
    plural: "pods",
    singular: "pod",
    short_names: &["po"],
    categories: &["all"],
    subresources: &[
        sub("attach", "", "v1", "PodAttachOptions", STREAM),
        sub("binding", "", "v1", "Binding", CREATE),
        sub("ephemeralcontainers", "", "v1", "Pod", GET_PATCH_UPDATE),
        sub("eviction", "policy", "v1", "Eviction", CREATE),
        sub("exec", "", "v1", "PodExecOptions", STREAM),
        sub("log", "", "v1", "Pod", &["get"]),
        sub("portforward", "", "v1", "PodPortForwardOptions", STREAM),
        sub("proxy", "", "v1", "PodProxyOptions", PROXY),
        sub("resize", "", "v1", "Pod", GET_PATCH_UPDATE),
        status("", "Pod"),
    ],
    schema: "io.k8s.api.core.v1.Pod",
    fields: fields::POD,
    rules: Rules {
        defaults: defaults::pod::pod,
        validate: validate::pod::pod,
        writes: Writes { create: crate::strategy::new_pod, ..WITH_GENERATION },
        columns: table::pod::COLUMNS,
        cells: table::pod::cells,
        ..RULES
    },
    ..KIND
};

const SERVICES: Kind = Kind {
    kind: "Service",
    plural: "services",
    singular: "service",
    short_names: &["svc"],
    categories: &["all"],
    subresources: &[sub("proxy", "", "v1", "ServiceProxyOptions", PROXY), status("", "Service")],
    schema: "io.k8s.api.core.v1.Service",
    fields: fields::SERVICE,
    rules: Rules {
        defaults: defaults::service::service,
        validate: validate::service::service,
        create_on_update: true,
        name: NameRule::Dns1123Label,
        writes: Writes { create: |object| object["status"] = json!({"loadBalancer": {}}), ..WITH_STATUS },
        columns: table::service::COLUMNS,
        cells: table::service::cells,
        ..RULES
    },
    ..KIND
};

const ENDPOINTS: Kind = Kind {
    kind: "Endpoints",
    plural: "endpoints",
    singular: "endpoints",
    short_names: &["ep"],
    deprecation: Some("v1 Endpoints is deprecated in v1.33+; use discovery.k8s.io/v1 EndpointSlice"),
    schema: "io.k8s.api.core.v1.Endpoints",
    rules: Rules {
        defaults: defaults::service::endpoints,
        validate: validate::service::endpoints,
        create_on_update: true,
        columns: table::service::ENDPOINTS,
        cells: table::service::endpoints,
        ..RULES
    },
    ..KIND
};

const SECRETS: Kind = Kind {
    kind: "Secret",
    plural: "secrets",
    singular: "secret",
    schema: "io.k8s.api.core.v1.Secret",
    fields: fields::SECRET,
    rules: Rules {
        defaults: defaults::object::secret,
        validate: validate::config::secret,
        columns: table::object::SECRET,
        cells: table::object::secret,
        ..RULES
    },
    ..KIND
};

const CONFIG_MAPS: Kind = Kind {
    kind: "ConfigMap",
    plural: "configmaps",
    singular: "configmap",
    short_names: &["cm"],
    schema: "io.k8s.api.core.v1.ConfigMap",
    rules: Rules {
        validate: validate::config::config_map,
        columns: table::object::CONFIG_MAP,
        cells: table::object::config_map,
        ..RULES
    },
    ..KIND
};

const SERVICE_ACCOUNTS: Kind = Kind {
    kind: "ServiceAccount",
    plural: "serviceaccounts",
    singular: "serviceaccount",
    short_names: &["sa"],
    subresources: &[sub("token", "authentication.k8s.io", "v1", "TokenRequest", CREATE)],
    schema: "io.k8s.api.core.v1.ServiceAccount",
    rules: Rules {
        writes: Writes {
            create: crate::strategy::clean_secrets,
            update: crate::strategy::clean_secrets,
            ..PLAIN
        },
        columns: table::object::SERVICE_ACCOUNT,
        cells: table::object::service_account,
        ..RULES
    },
    ..KIND
};

const EVENTS: Kind = Kind {
    kind: "Event",
    plural: "events",
    singular: "event",
    short_names: &["ev"],
    schema: "io.k8s.api.core.v1.Event",
    volatile: true,
    ttl_seconds: 3600,
    fields: fields::EVENT,
    rules: Rules {
        validate: validate::event::core,
        create_on_update: true,
        columns: table::event::COLUMNS,
        cells: table::event::cells,
        ..RULES
    },
    ..KIND
};

const SIGNING_REQUESTS: Kind = Kind {
    group: "certificates.k8s.io",
    kind: "CertificateSigningRequest",
    plural: "certificatesigningrequests",
    singular: "certificatesigningrequest",
    short_names: &["csr"],
    namespaced: false,
    subresources: &[
        sub("approval", "certificates.k8s.io", "v1", "CertificateSigningRequest", GET_PATCH_UPDATE),
        status("certificates.k8s.io", "CertificateSigningRequest"),
    ],
    schema: "io.k8s.api.certificates.v1.CertificateSigningRequest",
    fields: fields::SIGNING_REQUEST,
    rules: Rules {
        validate: validate::certificate::signing_request,
        name: NameRule::PathSegment,
        writes: Writes { create: |object| object["status"] = json!({}), ..WITH_STATUS },
        columns: table::certificate::COLUMNS,
        cells: table::certificate::cells,
        ..RULES
    },
    ..KIND
};

const DISRUPTION_BUDGETS: Kind = Kind {
    group: "policy",
    kind: "PodDisruptionBudget",
    plural: "poddisruptionbudgets",
    singular: "poddisruptionbudget",
    short_names: &["pdb"],
    subresources: &[status("policy", "PodDisruptionBudget")],
    schema: "io.k8s.api.policy.v1.PodDisruptionBudget",
    rules: Rules {
        validate: validate::disruption::budget,
        unconditional_update: false,
        writes: Writes {
            create: |object| {
                object["status"] = json!({
                    "currentHealthy": 0, "desiredHealthy": 0, "disruptionsAllowed": 0, "expectedPods": 0,
                });
            },
            ..WITH_GENERATION
        },
        columns: table::disruption::BUDGET,
        cells: table::disruption::budget,
        ..RULES
    },
    ..KIND
};

const LEASES: Kind = Kind {
    group: "coordination.k8s.io",
    kind: "Lease",
    plural: "leases",
    singular: "lease",
    schema: "io.k8s.api.coordination.v1.Lease",
    volatile: true,
    rules: Rules {
        validate: validate::object::lease,
        unconditional_update: false,
        create_on_update: true,
        columns: table::object::LEASE,
        cells: table::object::lease,
        ..RULES
    },
    ..KIND
};

/// CSINode: the storage drivers of a node. The upstream kubelet is not Ready before it has written this object.
const CSI_NODES: Kind = Kind {
    group: "storage.k8s.io",
    kind: "CSINode",
    plural: "csinodes",
    singular: "csinode",
    namespaced: false,
    schema: "io.k8s.api.storage.v1.CSINode",
    rules: Rules {
        validate: validate::node::csi_node,
        unconditional_update: false,
        columns: table::node::CSI_NODE,
        cells: table::node::csi_node,
        ..RULES
    },
    ..KIND
};

const ENDPOINT_SLICES: Kind = Kind {
    group: "discovery.k8s.io",
    kind: "EndpointSlice",
    plural: "endpointslices",
    singular: "endpointslice",
    schema: "io.k8s.api.discovery.v1.EndpointSlice",
    rules: Rules {
        defaults: defaults::service::endpoint_slice,
        validate: validate::service::endpoint_slice,
        writes: Writes { generation: true, ..PLAIN },
        columns: table::service::ENDPOINT_SLICE,
        cells: table::service::endpoint_slice,
        ..RULES
    },
    ..KIND
};

//! The kinds of `networking.k8s.io`.

use serde_json::json;

use super::{KIND, Kind, NameRule, PLAIN, RULES, Rules, WITH_STATUS, Writes, status};
use crate::{defaults, table, validate};

const GROUP: &str = "networking.k8s.io";

/// A kind whose generation counts changes of its spec.
const COUNTED: Writes = Writes { generation: true, ..PLAIN };

pub(super) const NETWORK_POLICIES: Kind = Kind {
    group: GROUP,
    kind: "NetworkPolicy",
    plural: "networkpolicies",
    singular: "networkpolicy",
    short_names: &["netpol"],
    schema: "io.k8s.api.networking.v1.NetworkPolicy",
    rules: Rules {
        defaults: defaults::networking::network_policy,
        validate: validate::networking::network_policy,
        writes: COUNTED,
        columns: table::networking::NETWORK_POLICY,
        cells: table::networking::network_policy,
        ..RULES
    },
    ..KIND
};

pub(super) const INGRESSES: Kind = Kind {
    group: GROUP,
    kind: "Ingress",
    plural: "ingresses",
    singular: "ingress",
    short_names: &["ing"],
    subresources: &[status(GROUP, "Ingress")],
    schema: "io.k8s.api.networking.v1.Ingress",
    rules: Rules {
        validate: validate::networking::ingress,
        writes: Writes {
            generation: true,
            create: |object| object["status"] = json!({"loadBalancer": {}}),
            ..WITH_STATUS
        },
        columns: table::networking::INGRESS,
        cells: table::networking::ingress,
        ..RULES
    },
    ..KIND
};

pub(super) const INGRESS_CLASSES: Kind = Kind {
    group: GROUP,
    kind: "IngressClass",
    plural: "ingressclasses",
    singular: "ingressclass",
    namespaced: false,
    schema: "io.k8s.api.networking.v1.IngressClass",
    rules: Rules {
        defaults: defaults::networking::ingress_class,
        validate: validate::networking::ingress_class,
        writes: COUNTED,
        columns: table::networking::INGRESS_CLASS,
        cells: table::networking::ingress_class,
        ..RULES
    },
    ..KIND
};

pub(super) const SERVICE_CIDRS: Kind = Kind {
    group: GROUP,
    kind: "ServiceCIDR",
    plural: "servicecidrs",
    singular: "servicecidr",
    namespaced: false,
    subresources: &[status(GROUP, "ServiceCIDR")],
    schema: "io.k8s.api.networking.v1.ServiceCIDR",
    rules: Rules {
        validate: validate::networking::service_cidr,
        writes: WITH_STATUS,
        columns: table::networking::SERVICE_CIDR,
        cells: table::networking::service_cidr,
        ..RULES
    },
    ..KIND
};

pub(super) const IP_ADDRESSES: Kind = Kind {
    group: GROUP,
    kind: "IPAddress",
    plural: "ipaddresses",
    singular: "ipaddress",
    short_names: &["ip"],
    namespaced: false,
    schema: "io.k8s.api.networking.v1.IPAddress",
    rules: Rules {
        validate: validate::networking::ip_address,
        name: NameRule::PathSegment,
        columns: table::networking::IP_ADDRESS,
        cells: table::networking::ip_address,
        ..RULES
    },
    ..KIND
};

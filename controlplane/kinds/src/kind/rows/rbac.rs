//! The kinds of `rbac.authorization.k8s.io`.

use super::{KIND, Kind, NameRule, RULES, Rules};
use crate::{defaults, table, validate};

const GROUP: &str = "rbac.authorization.k8s.io";

const RBAC_RULES: Rules = Rules { name: NameRule::PathSegment, create_on_update: true, ..RULES };

const BINDING_RULES: Rules = Rules {
    defaults: defaults::rbac::binding,
    validate: validate::rbac::binding,
    columns: table::rbac::BINDING,
    cells: table::rbac::binding,
    ..RBAC_RULES
};

pub(super) const ROLES: Kind = Kind {
    group: GROUP,
    kind: "Role",
    plural: "roles",
    singular: "role",
    schema: "io.k8s.api.rbac.v1.Role",
    rules: Rules { validate: validate::rbac::role, ..RBAC_RULES },
    ..KIND
};

pub(super) const CLUSTER_ROLES: Kind = Kind {
    group: GROUP,
    kind: "ClusterRole",
    plural: "clusterroles",
    singular: "clusterrole",
    namespaced: false,
    schema: "io.k8s.api.rbac.v1.ClusterRole",
    rules: Rules { validate: validate::rbac::cluster_role, ..RBAC_RULES },
    ..KIND
};

pub(super) const ROLE_BINDINGS: Kind = Kind {
    group: GROUP,
    kind: "RoleBinding",
    plural: "rolebindings",
    singular: "rolebinding",
    schema: "io.k8s.api.rbac.v1.RoleBinding",
    rules: BINDING_RULES,
    ..KIND
};

pub(super) const CLUSTER_ROLE_BINDINGS: Kind = Kind {
    group: GROUP,
    kind: "ClusterRoleBinding",
    plural: "clusterrolebindings",
    singular: "clusterrolebinding",
    namespaced: false,
    schema: "io.k8s.api.rbac.v1.ClusterRoleBinding",
    rules: Rules { validate: validate::rbac::cluster_binding, ..BINDING_RULES },
    ..KIND
};

//! Kinds of the core group that are not stored.

use super::{CREATE, KIND, Kind, RULES, Rules};
use crate::table;

pub(super) const BINDINGS: Kind = Kind {
    kind: "Binding",
    plural: "bindings",
    singular: "binding",
    verbs: CREATE,
    schema: "io.k8s.api.core.v1.Binding",
    ..KIND
};

pub(super) const COMPONENT_STATUSES: Kind = Kind {
    kind: "ComponentStatus",
    plural: "componentstatuses",
    singular: "componentstatus",
    short_names: &["cs"],
    deprecation: Some("v1 ComponentStatus is deprecated in v1.19+"),
    namespaced: false,
    verbs: &["get", "list"],
    schema: "io.k8s.api.core.v1.ComponentStatus",
    rules: Rules {
        columns: table::object::COMPONENT_STATUS,
        cells: |object, _now| table::object::component_status(object),
        ..RULES
    },
    ..KIND
};

//! Kinds that limit or complete pods: limit ranges, priority classes, runtime classes.

use super::{KIND, Kind, PLAIN, RULES, Rules, Writes};
use crate::{defaults, table, validate};

pub(super) const LIMIT_RANGES: Kind = Kind {
    kind: "LimitRange",
    plural: "limitranges",
    singular: "limitrange",
    short_names: &["limits"],
    schema: "io.k8s.api.core.v1.LimitRange",
    rules: Rules {
        defaults: defaults::policy::limit_range,
        validate: validate::policy::limit_range,
        ..RULES
    },
    ..KIND
};

pub(super) const PRIORITY_CLASSES: Kind = Kind {
    group: "scheduling.k8s.io",
    kind: "PriorityClass",
    plural: "priorityclasses",
    singular: "priorityclass",
    short_names: &["pc"],
    namespaced: false,
    schema: "io.k8s.api.scheduling.v1.PriorityClass",
    rules: Rules {
        defaults: defaults::policy::priority_class,
        validate: validate::policy::priority_class,
        writes: Writes { generation: true, ..PLAIN },
        columns: table::policy::PRIORITY_CLASS,
        cells: table::policy::priority_class,
        ..RULES
    },
    ..KIND
};

pub(super) const RUNTIME_CLASSES: Kind = Kind {
    group: "node.k8s.io",
    kind: "RuntimeClass",
    plural: "runtimeclasses",
    singular: "runtimeclass",
    namespaced: false,
    schema: "io.k8s.api.node.v1.RuntimeClass",
    rules: Rules {
        validate: validate::policy::runtime_class,
        unconditional_update: false,
        columns: table::policy::RUNTIME_CLASS,
        cells: table::policy::runtime_class,
        ..RULES
    },
    ..KIND
};

//! Kinds that limit pods or set fields of pods: limit ranges, quotas, priority classes, runtime classes.

use serde_json::json;

use super::{KIND, Kind, PLAIN, RULES, Rules, WITH_STATUS, Writes, status};
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
        create_on_update: true,
        ..RULES
    },
    ..KIND
};

pub(super) const RESOURCE_QUOTAS: Kind = Kind {
    kind: "ResourceQuota",
    plural: "resourcequotas",
    singular: "resourcequota",
    short_names: &["quota"],
    subresources: &[status("", "ResourceQuota")],
    schema: "io.k8s.api.core.v1.ResourceQuota",
    rules: Rules {
        validate: validate::quota::resource_quota,
        writes: Writes {
            create: |object| {
                if let Some(object) = object.as_object_mut() {
                    object.insert("status".to_owned(), json!({}));
                }
            },
            ..WITH_STATUS
        },
        columns: table::policy::RESOURCE_QUOTA,
        cells: table::policy::resource_quota,
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
        create_on_update: true,
        columns: table::policy::RUNTIME_CLASS,
        cells: table::policy::runtime_class,
        ..RULES
    },
    ..KIND
};

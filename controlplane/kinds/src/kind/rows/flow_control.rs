//! Flow control: flow schemas and priority levels.

use serde_json::json;

use super::{KIND, Kind, RULES, Rules, WITH_GENERATION, Writes, status};
use crate::{defaults, table, validate};

const GROUP: &str = "flowcontrol.apiserver.k8s.io";
const WRITES: Writes = Writes {
    create: |object| {
        if let Some(object) = object.as_object_mut() {
            object.insert("status".to_owned(), json!({}));
        }
    },
    ..WITH_GENERATION
};

pub(super) const FLOW_SCHEMAS: Kind = Kind {
    group: GROUP,
    kind: "FlowSchema",
    plural: "flowschemas",
    singular: "flowschema",
    namespaced: false,
    subresources: &[status(GROUP, "FlowSchema")],
    schema: "io.k8s.api.flowcontrol.v1.FlowSchema",
    rules: Rules {
        defaults: defaults::flow_control::flow_schema,
        validate: validate::flow_control::flow_schema,
        writes: WRITES,
        columns: table::flow_control::FLOW_SCHEMA,
        cells: table::flow_control::flow_schema,
        ..RULES
    },
    ..KIND
};

pub(super) const PRIORITY_LEVELS: Kind = Kind {
    group: GROUP,
    kind: "PriorityLevelConfiguration",
    plural: "prioritylevelconfigurations",
    singular: "prioritylevelconfiguration",
    namespaced: false,
    subresources: &[status(GROUP, "PriorityLevelConfiguration")],
    schema: "io.k8s.api.flowcontrol.v1.PriorityLevelConfiguration",
    rules: Rules {
        defaults: defaults::flow_control::priority_level,
        validate: validate::flow_control::priority_level,
        writes: WRITES,
        columns: table::flow_control::PRIORITY_LEVEL,
        cells: table::flow_control::priority_level,
        ..RULES
    },
    ..KIND
};

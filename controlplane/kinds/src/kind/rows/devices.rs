//! Dynamic resource allocation: device classes, claims, claim templates, slices. The scheduler allocates devices,
//! and the drivers of a node prepare them for its pods.

use serde_json::json;

use super::{KIND, Kind, RULES, Rules, WITH_STATUS, Writes, status};
use crate::fields;
use crate::{defaults, table, validate};

const GROUP: &str = "resource.k8s.io";

pub(super) const DEVICE_CLASSES: Kind = Kind {
    group: GROUP,
    kind: "DeviceClass",
    plural: "deviceclasses",
    singular: "deviceclass",
    namespaced: false,
    schema: "io.k8s.api.resource.v1.DeviceClass",
    rules: Rules {
        validate: validate::devices::class,
        writes: Writes { generation: true, ..super::PLAIN },
        columns: table::devices::PLAIN,
        cells: table::devices::plain,
        ..RULES
    },
    ..KIND
};

pub(super) const CLAIMS: Kind = Kind {
    group: GROUP,
    kind: "ResourceClaim",
    plural: "resourceclaims",
    singular: "resourceclaim",
    subresources: &[status(GROUP, "ResourceClaim")],
    schema: "io.k8s.api.resource.v1.ResourceClaim",
    rules: Rules {
        defaults: defaults::devices::claim,
        validate: validate::devices::claim,
        writes: Writes {
            create: |object| {
                if let Some(object) = object.as_object_mut() {
                    object.insert("status".to_owned(), json!({}));
                }
            },
            ..WITH_STATUS
        },
        columns: table::devices::CLAIM,
        cells: table::devices::claim,
        ..RULES
    },
    ..KIND
};

pub(super) const CLAIM_TEMPLATES: Kind = Kind {
    group: GROUP,
    kind: "ResourceClaimTemplate",
    plural: "resourceclaimtemplates",
    singular: "resourceclaimtemplate",
    schema: "io.k8s.api.resource.v1.ResourceClaimTemplate",
    rules: Rules {
        defaults: defaults::devices::template,
        validate: validate::devices::template,
        columns: table::devices::PLAIN,
        cells: table::devices::plain,
        ..RULES
    },
    ..KIND
};

pub(super) const SLICES: Kind = Kind {
    group: GROUP,
    kind: "ResourceSlice",
    plural: "resourceslices",
    singular: "resourceslice",
    namespaced: false,
    schema: "io.k8s.api.resource.v1.ResourceSlice",
    fields: fields::RESOURCE_SLICE,
    rules: Rules {
        defaults: defaults::devices::slice,
        validate: validate::devices::slice,
        writes: Writes { generation: true, ..super::PLAIN },
        columns: table::devices::SLICE,
        cells: table::devices::slice,
        ..RULES
    },
    ..KIND
};

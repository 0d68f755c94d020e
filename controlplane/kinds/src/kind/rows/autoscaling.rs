//! Horizontal pod autoscalers: objects are stored as `autoscaling/v2`, and are also served as v1.

mod convert;

use serde_json::json;

use super::{GET_PATCH_UPDATE, KIND, Kind, NameRule, RULES, Rules, Subresource, WITH_STATUS, Writes, sub};
use crate::kind::definition::StoredAs;
use crate::{defaults, table, validate};

const GROUP: &str = "autoscaling";
const CREATED: Writes = Writes {
    create: |object| {
        if let Some(object) = object.as_object_mut() {
            object.insert("status".to_owned(), json!({"currentReplicas": 0, "desiredReplicas": 0}));
        }
    },
    ..WITH_STATUS
};

pub(super) const AUTOSCALERS: Kind = Kind {
    group: GROUP,
    version: "v2",
    kind: "HorizontalPodAutoscaler",
    plural: "horizontalpodautoscalers",
    singular: "horizontalpodautoscaler",
    short_names: &["hpa"],
    categories: &["all"],
    subresources: &[status("v2")],
    schema: "io.k8s.api.autoscaling.v2.HorizontalPodAutoscaler",
    rules: Rules {
        defaults: defaults::autoscaling::autoscaler,
        validate: validate::autoscaling::autoscaler,
        name: NameRule::Dns1123Subdomain,
        writes: CREATED,
        columns: table::autoscaling::AUTOSCALER,
        cells: table::autoscaling::autoscaler,
        ..RULES
    },
    ..KIND
};

pub(super) const AUTOSCALERS_V1: Kind = Kind {
    version: "v1",
    subresources: &[status("v1")],
    schema: "io.k8s.api.autoscaling.v1.HorizontalPodAutoscaler",
    stored_as: Some(StoredAs {
        group: GROUP,
        version: "v2",
        plural: "horizontalpodautoscalers",
        to_storage: convert::to_v2,
        from_storage: convert::to_v1,
        fields: &[],
    }),
    rules: Rules {
        defaults: defaults::autoscaling::autoscaler_v1,
        validate: |causes, new, old| {
            let v2 = |object: &serde_json::Value| convert::to_v2(object.clone()).unwrap_or_default();
            validate::autoscaling::autoscaler(causes, &v2(new), old.map(v2).as_ref());
        },
        cells: |object, now| {
            let v2 = convert::to_v2(object.clone()).unwrap_or_default();
            table::autoscaling::autoscaler(&v2, now)
        },
        ..AUTOSCALERS.rules
    },
    ..AUTOSCALERS
};

const fn status(version: &'static str) -> Subresource {
    sub("status", GROUP, version, "HorizontalPodAutoscaler", GET_PATCH_UPDATE)
}

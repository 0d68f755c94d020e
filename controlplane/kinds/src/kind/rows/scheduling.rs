//! Groups of pods that are scheduled together. The kinds are not served by default.

use super::{GET_PATCH_UPDATE, KIND, Kind, PLAIN, RULES, Rules, Subresource, WITH_STATUS, Writes, sub};
use crate::strategy::pod_group;
use crate::{table, validate};

const GROUP: &str = "scheduling.k8s.io";
const VERSION: &str = "v1alpha2";
const POD_GROUP_STATUS: Subresource = sub("status", GROUP, VERSION, "PodGroup", GET_PATCH_UPDATE);

pub(super) const WORKLOADS: Kind = Kind {
    group: GROUP,
    version: VERSION,
    kind: "Workload",
    plural: "workloads",
    singular: "workload",
    schema: "io.k8s.api.scheduling.v1alpha2.Workload",
    rules: Rules {
        validate: validate::pod_group::workload,
        writes: Writes {
            create: pod_group::drop_from_workload,
            update: pod_group::drop_from_workload,
            ..PLAIN
        },
        columns: table::pod_group::WORKLOAD,
        cells: table::pod_group::workload,
        ..RULES
    },
    ..KIND
};

pub(super) const POD_GROUPS: Kind = Kind {
    group: GROUP,
    version: VERSION,
    kind: "PodGroup",
    plural: "podgroups",
    singular: "podgroup",
    subresources: &[POD_GROUP_STATUS],
    schema: "io.k8s.api.scheduling.v1alpha2.PodGroup",
    rules: Rules {
        validate: validate::pod_group::pod_group,
        writes: Writes {
            create: pod_group::new_pod_group,
            update: pod_group::drop_from_pod_group,
            ..WITH_STATUS
        },
        columns: table::pod_group::POD_GROUP,
        cells: table::pod_group::pod_group,
        ..RULES
    },
    ..KIND
};

//! Migrations of stored objects to the current stored version. The kinds are not served by default.

use serde_json::json;

use super::{GET_PATCH_UPDATE, KIND, Kind, RULES, Rules, WITH_STATUS, Writes, sub};
use crate::{table, validate};

const GROUP: &str = "storagemigration.k8s.io";
const VERSION: &str = "v1beta1";
const KIND_NAME: &str = "StorageVersionMigration";

pub(super) const MIGRATIONS: Kind = Kind {
    group: GROUP,
    version: VERSION,
    kind: KIND_NAME,
    plural: "storageversionmigrations",
    singular: "storageversionmigration",
    namespaced: false,
    subresources: &[sub("status", GROUP, VERSION, KIND_NAME, GET_PATCH_UPDATE)],
    schema: "io.k8s.api.storagemigration.v1beta1.StorageVersionMigration",
    rules: Rules {
        validate: validate::migration::migration,
        unconditional_update: false,
        writes: Writes { create: |object| object["status"] = json!({}), ..WITH_STATUS },
        columns: table::migration::MIGRATION,
        cells: table::migration::migration,
        ..RULES
    },
    ..KIND
};

//! The rows of storage: volumes, claims, storage classes.

use serde_json::json;

use super::{KIND, RULES, WITH_STATUS, status};
use crate::kind::{Kind, Rules, Writes};
use crate::{defaults, table, validate};

pub(super) const PERSISTENT_VOLUMES: Kind = Kind {
    kind: "PersistentVolume",
    plural: "persistentvolumes",
    singular: "persistentvolume",
    short_names: &["pv"],
    namespaced: false,
    subresources: &[status("", "PersistentVolume")],
    schema: "io.k8s.api.core.v1.PersistentVolume",
    rules: Rules {
        defaults: defaults::storage::volume,
        validate: validate::storage::volume,
        writes: Writes { create: |object| object["status"] = json!({"phase": "Pending"}), ..WITH_STATUS },
        columns: table::storage::VOLUME,
        cells: table::storage::volume,
        ..RULES
    },
    ..KIND
};

pub(super) const PERSISTENT_VOLUME_CLAIMS: Kind = Kind {
    kind: "PersistentVolumeClaim",
    plural: "persistentvolumeclaims",
    singular: "persistentvolumeclaim",
    short_names: &["pvc"],
    subresources: &[status("", "PersistentVolumeClaim")],
    schema: "io.k8s.api.core.v1.PersistentVolumeClaim",
    rules: Rules {
        defaults: defaults::storage::claim,
        validate: validate::storage::claim,
        writes: Writes { create: |object| object["status"] = json!({"phase": "Pending"}), ..WITH_STATUS },
        columns: table::storage::CLAIM,
        cells: table::storage::claim,
        ..RULES
    },
    ..KIND
};

pub(super) const STORAGE_CLASSES: Kind = Kind {
    group: "storage.k8s.io",
    kind: "StorageClass",
    plural: "storageclasses",
    singular: "storageclass",
    short_names: &["sc"],
    namespaced: false,
    schema: "io.k8s.api.storage.v1.StorageClass",
    rules: Rules {
        defaults: defaults::storage::class,
        validate: validate::storage::class,
        columns: table::storage::CLASS,
        cells: table::storage::class,
        ..RULES
    },
    ..KIND
};

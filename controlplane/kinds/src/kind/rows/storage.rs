//! The rows of storage: volumes, claims, and the kinds of `storage.k8s.io`.

use serde_json::json;

use super::{KIND, RULES, WITH_STATUS, status};
use crate::kind::definition::{Kind, Rules, Writes};
use crate::{defaults, strategy, table, validate};

const GROUP: &str = "storage.k8s.io";

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
        validate: validate::persistent_volume::volume,
        writes: Writes { create: strategy::storage::new_volume, ..WITH_STATUS },
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
        writes: Writes {
            create: strategy::storage::new_claim,
            update: strategy::storage::normalize_data_sources,
            ..WITH_STATUS
        },
        columns: table::storage::CLAIM,
        cells: table::storage::claim,
        ..RULES
    },
    ..KIND
};

pub(super) const STORAGE_CLASSES: Kind = Kind {
    group: GROUP,
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

pub(super) const VOLUME_ATTACHMENTS: Kind = Kind {
    group: GROUP,
    kind: "VolumeAttachment",
    plural: "volumeattachments",
    singular: "volumeattachment",
    namespaced: false,
    subresources: &[status(GROUP, "VolumeAttachment")],
    schema: "io.k8s.api.storage.v1.VolumeAttachment",
    rules: Rules {
        validate: validate::attachment::attachment,
        unconditional_update: false,
        writes: Writes { create: |object| object["status"] = json!({"attached": false}), ..WITH_STATUS },
        columns: table::storage::ATTACHMENT,
        cells: table::storage::attachment,
        ..RULES
    },
    ..KIND
};

pub(super) const CSI_DRIVERS: Kind = Kind {
    group: GROUP,
    kind: "CSIDriver",
    plural: "csidrivers",
    singular: "csidriver",
    namespaced: false,
    schema: "io.k8s.api.storage.v1.CSIDriver",
    rules: Rules {
        defaults: defaults::storage::csi_driver,
        validate: validate::attachment::csi_driver,
        unconditional_update: false,
        columns: table::storage::CSI_DRIVER,
        cells: table::storage::csi_driver,
        ..RULES
    },
    ..KIND
};

pub(super) const CSI_STORAGE_CAPACITIES: Kind = Kind {
    group: GROUP,
    kind: "CSIStorageCapacity",
    plural: "csistoragecapacities",
    singular: "csistoragecapacity",
    schema: "io.k8s.api.storage.v1.CSIStorageCapacity",
    rules: Rules {
        validate: validate::attachment::csi_capacity,
        unconditional_update: false,
        columns: table::CREATED_AT,
        cells: table::created_at,
        ..RULES
    },
    ..KIND
};

pub(super) const VOLUME_ATTRIBUTES_CLASSES: Kind = Kind {
    group: GROUP,
    kind: "VolumeAttributesClass",
    plural: "volumeattributesclasses",
    singular: "volumeattributesclass",
    short_names: &["vac"],
    namespaced: false,
    schema: "io.k8s.api.storage.v1.VolumeAttributesClass",
    rules: Rules {
        validate: validate::attachment::attributes_class,
        columns: table::storage::ATTRIBUTES_CLASS,
        cells: table::storage::attributes_class,
        ..RULES
    },
    ..KIND
};

//! Reduced types of claims, volumes and classes: the fields that scheduling reads.

use std::collections::BTreeMap;

use coracle_values::object::ObjectExt;
use coracle_values::{Quantity, resource};
use k8s_openapi::api::core::v1::{ObjectReference, TopologySelectorTerm, VolumeNodeAffinity};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as Text;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta};
use serde::Deserialize;

pub(super) const BIND_COMPLETED: &str = "pv.kubernetes.io/bind-completed";

/// A claim.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default)]
pub(super) struct Claim {
    pub(super) metadata: ObjectMeta,
    pub(super) spec: ClaimSpec,
    pub(super) status: Phase,
}

#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct ClaimSpec {
    pub(super) access_modes: Vec<String>,
    pub(super) volume_name: Option<String>,
    pub(super) storage_class_name: Option<String>,
    pub(super) volume_mode: Option<String>,
    pub(super) volume_attributes_class_name: Option<String>,
    pub(super) selector: Option<LabelSelector>,
    pub(super) resources: Requests,
}

#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default)]
pub(super) struct Requests {
    pub(super) requests: BTreeMap<String, Text>,
}

#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default)]
pub(super) struct Phase {
    pub(super) phase: Option<String>,
}

/// A persistent volume.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default)]
pub(super) struct Volume {
    pub(super) metadata: ObjectMeta,
    pub(super) spec: VolumeSpec,
    pub(super) status: Phase,
}

#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct VolumeSpec {
    pub(super) access_modes: Vec<String>,
    pub(super) capacity: BTreeMap<String, Text>,
    pub(super) claim_ref: Option<ObjectReference>,
    pub(super) storage_class_name: Option<String>,
    pub(super) volume_mode: Option<String>,
    pub(super) volume_attributes_class_name: Option<String>,
    pub(super) node_affinity: Option<VolumeNodeAffinity>,
    pub(super) csi: Option<CsiSource>,
}

/// The CSI driver of a volume, and the name of the volume in the driver.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct CsiSource {
    pub(super) driver: String,
    pub(super) volume_handle: String,
}

/// A storage class.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct StorageClass {
    pub(super) metadata: ObjectMeta,
    pub(super) provisioner: String,
    pub(super) volume_binding_mode: Option<String>,
    pub(super) allowed_topologies: Option<Vec<TopologySelectorTerm>>,
}

/// A driver of volumes.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default)]
pub(super) struct CsiDriver {
    pub(super) metadata: ObjectMeta,
    pub(super) spec: CsiDriverSpec,
}

#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct CsiDriverSpec {
    pub(super) storage_capacity: Option<bool>,
}

/// The drivers of a node.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default)]
pub(super) struct CsiNode {
    pub(super) metadata: ObjectMeta,
    pub(super) spec: CsiNodeSpec,
}

#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default)]
pub(super) struct CsiNodeSpec {
    pub(super) drivers: Vec<NodeDriver>,
}

#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default)]
pub(super) struct NodeDriver {
    pub(super) name: String,
    pub(super) allocatable: Option<VolumeCount>,
}

/// Maximum number of a driver's volumes on a node.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default)]
pub(super) struct VolumeCount {
    pub(super) count: Option<i32>,
}

/// The storage of a class that can be provisioned for some nodes (CSIStorageCapacity).
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct Capacity {
    pub(super) metadata: ObjectMeta,
    pub(super) storage_class_name: String,
    pub(super) node_topology: Option<LabelSelector>,
    pub(super) capacity: Option<Text>,
    pub(super) maximum_volume_size: Option<Text>,
}

/// The attachment of a volume to a node.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default)]
pub(super) struct Attachment {
    pub(super) metadata: ObjectMeta,
    pub(super) spec: AttachmentSpec,
}

#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct AttachmentSpec {
    pub(super) attacher: String,
    pub(super) node_name: String,
    pub(super) source: AttachmentSource,
}

#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct AttachmentSource {
    pub(super) persistent_volume_name: Option<String>,
}

/// A kind that the cache stores without managed fields, because scheduling does not read them.
pub(super) trait Reduce: PartialEq {
    /// Removes the managed fields.
    fn reduce(&mut self);
}

macro_rules! reduce {
    ($($type:ident),*) => {$(
        impl Reduce for $type {
            fn reduce(&mut self) {
                self.metadata.managed_fields = None;
            }
        }
    )*};
}

reduce!(Claim, Volume, StorageClass, CsiDriver, CsiNode, Capacity, Attachment);

// === impl Claim ===

impl Claim {
    pub(super) fn class(&self) -> &str {
        self.spec.storage_class_name.as_deref().unwrap_or_default()
    }

    pub(super) fn requested(&self) -> Option<Quantity> {
        Quantity::parse(&self.spec.resources.requests.get("storage")?.0).ok()
    }

    /// Name of the claim's volume. Empty if the claim has no volume.
    pub(super) fn volume(&self) -> &str {
        self.spec.volume_name.as_deref().unwrap_or_default()
    }

    /// Whether the claim has a volume and the binding is complete.
    pub(super) fn is_bound(&self) -> bool {
        !self.volume().is_empty() && self.annotation(BIND_COMPLETED).is_some()
    }
}

// === impl Capacity ===

impl Capacity {
    /// Maximum size of a volume, in bytes. `None` if it is not reported.
    pub(super) fn limit(&self) -> Option<Quantity> {
        // `maximumVolumeSize` is more precise than `capacity`.
        Quantity::parse(&self.maximum_volume_size.as_ref().or(self.capacity.as_ref())?.0).ok()
    }
}

// === impl Volume ===

impl Volume {
    pub(super) fn class(&self) -> &str {
        self.spec.storage_class_name.as_deref().unwrap_or_default()
    }

    pub(super) fn size(&self) -> Option<Quantity> {
        Quantity::parse(&self.spec.capacity.get("storage")?.0).ok()
    }
}

resource!(Claim, "", "persistentvolumeclaims", NamespaceResourceScope);
resource!(Volume, "", "persistentvolumes", ClusterResourceScope);
resource!(CsiDriver, "storage.k8s.io", "csidrivers", ClusterResourceScope);
resource!(CsiNode, "storage.k8s.io", "csinodes", ClusterResourceScope);
resource!(Capacity, "storage.k8s.io", "csistoragecapacities", NamespaceResourceScope);
resource!(Attachment, "storage.k8s.io", "volumeattachments", ClusterResourceScope);
resource!(StorageClass, "storage.k8s.io", "storageclasses", ClusterResourceScope);

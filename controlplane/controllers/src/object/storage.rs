//! Claims, volumes and storage classes.

use std::collections::BTreeMap;
use std::sync::Arc;

use coracle_values::{Quantity, resource};
use k8s_openapi::api::core::v1::{ObjectReference, PersistentVolumeClaimSpec, PersistentVolumeClaimStatus};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as Text;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::{Deserialize, Deserializer};
use serde_json::Value;

use super::{Key, Object, ObjectExt};

/// A persistent volume claim.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Claim {
    pub(crate) metadata: ObjectMeta,
    pub(crate) spec: PersistentVolumeClaimSpec,
    pub(crate) status: PersistentVolumeClaimStatus,
}

/// A persistent volume.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct PersistentVolume {
    pub(crate) metadata: ObjectMeta,
    pub(crate) spec: VolumeSpec,
    pub(crate) status: VolumeStatus,
}

/// The fields of a volume's spec that controllers read.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct VolumeSpec {
    pub(crate) access_modes: Vec<String>,
    pub(crate) capacity: BTreeMap<String, Text>,
    pub(crate) claim_ref: Option<ObjectReference>,
    pub(crate) persistent_volume_reclaim_policy: Option<String>,
    pub(crate) storage_class_name: Option<String>,
    pub(crate) volume_mode: Option<String>,
    pub(crate) volume_attributes_class_name: Option<String>,
}

/// The fields of a volume's status that controllers read.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct VolumeStatus {
    pub(crate) phase: Option<String>,
    pub(crate) message: Option<String>,
}

/// A storage class.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct StorageClass {
    pub(crate) metadata: ObjectMeta,
    pub(crate) provisioner: String,
    pub(crate) reclaim_policy: Option<String>,
    pub(crate) volume_binding_mode: Option<String>,
    pub(crate) allow_volume_expansion: Option<bool>,
    pub(crate) mount_options: Option<Vec<String>>,
}

/// A class of volume attributes.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct VolumeAttributesClass {
    pub(crate) metadata: ObjectMeta,
}

/// A volume of a pod that uses a claim.
#[derive(Clone, Debug)]
pub(crate) struct PodVolume {
    pub(crate) name: String,
    pub(crate) source: ClaimSource,
}

/// The claim of a pod's volume.
#[derive(Clone, Debug)]
pub(crate) enum ClaimSource {
    /// A claim by name.
    Named(String),
    /// The template of a claim that is created for the pod.
    Template(Value),
}

/// Reads the volumes of a pod that use claims.
pub(super) fn claim_volumes<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Arc<[PodVolume]>, D::Error> {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Volume {
        name: String,
        persistent_volume_claim: Option<Named>,
        ephemeral: Option<Ephemeral>,
    }
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Named {
        claim_name: String,
    }
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Ephemeral {
        volume_claim_template: Option<Value>,
    }
    let volumes = Option::<Vec<Volume>>::deserialize(deserializer)?.unwrap_or_default();
    let claims = volumes.into_iter().filter_map(|volume| {
        let named = volume.persistent_volume_claim.map(|named| ClaimSource::Named(named.claim_name));
        let template = || Some(ClaimSource::Template(volume.ephemeral?.volume_claim_template?));
        Some(PodVolume { name: volume.name, source: named.or_else(template)? })
    });
    Ok(claims.collect())
}

// === impl PodVolume ===

impl PodVolume {
    /// Name of the volume's claim in the pod's namespace.
    pub(crate) fn claim_name(&self, pod: &str) -> String {
        match &self.source {
            ClaimSource::Named(name) => name.clone(),
            ClaimSource::Template(_) => format!("{pod}-{}", self.name),
        }
    }
}

// === impl Claim ===

impl Claim {
    /// Name of the claim's volume. Empty if the claim has no volume.
    pub(crate) fn volume(&self) -> &str {
        self.spec.volume_name.as_deref().unwrap_or_default()
    }

    /// Name of the storage class; empty without one.
    pub(crate) fn class(&self) -> &str {
        class_of(self, self.spec.storage_class_name.as_deref())
    }

    /// The requested size as text.
    pub(crate) fn requested(&self) -> Option<&Text> {
        self.spec.resources.as_ref()?.requests.as_ref()?.get("storage")
    }
}

// === impl PersistentVolume ===

impl PersistentVolume {
    /// Name of the storage class; empty without one.
    pub(crate) fn class(&self) -> &str {
        class_of(self, self.spec.storage_class_name.as_deref())
    }

    /// Key of the claim that the volume is bound to or reserved for.
    pub(crate) fn claim(&self) -> Option<Key> {
        let claim = self.spec.claim_ref.as_ref()?;
        Some(Key::new(claim.namespace.as_deref()?, claim.name.as_deref()?))
    }

    /// Whether the volume is bound to or reserved for this claim.
    pub(crate) fn is_for(&self, claim: &Claim) -> bool {
        let uid = self.spec.claim_ref.as_ref().and_then(|of| of.uid.as_deref()).unwrap_or_default();
        self.claim().as_ref() == Some(&claim.key()) && (uid.is_empty() || uid == claim.uid())
    }

    /// The size.
    pub(crate) fn size(&self) -> Option<Quantity> {
        Quantity::parse(&self.spec.capacity.get("storage")?.0).ok()
    }
}

// === impl StorageClass ===

impl StorageClass {
    /// Whether a claim waits for its first pod.
    pub(crate) fn waits_for_pod(&self) -> bool {
        self.volume_binding_mode.as_deref() == Some("WaitForFirstConsumer")
    }
}

/// Name of an object's storage class. Before Kubernetes 1.6, the name was in an annotation.
fn class_of<'a>(object: &'a impl ObjectExt, name: Option<&'a str>) -> &'a str {
    object.annotation("volume.beta.kubernetes.io/storage-class").or(name).unwrap_or_default()
}

resource!(Claim, "PersistentVolumeClaim", ("", "v1", "persistentvolumeclaims"), NamespaceResourceScope);
resource!(PersistentVolume, "", "persistentvolumes", ClusterResourceScope);
resource!(StorageClass, "storage.k8s.io", "storageclasses", ClusterResourceScope);
resource!(VolumeAttributesClass, "storage.k8s.io", "volumeattributesclasses", ClusterResourceScope);

impl Object for Claim {}
impl Object for PersistentVolume {}
impl Object for StorageClass {}
impl Object for VolumeAttributesClass {}

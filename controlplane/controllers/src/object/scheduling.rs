//! Groups of pods that are scheduled together.

use coracle_values::resource;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::Deserialize;

use super::{Key, Object, ObjectExt, Pod};

/// A group of pods.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct PodGroup {
    pub(crate) metadata: ObjectMeta,
}

/// The group in a pod's spec.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct PodSchedulingGroup {
    pub(crate) pod_group_name: Option<Box<str>>,
}

impl Pod {
    /// The group of a pod that has not finished.
    pub(crate) fn active_group(&self) -> Option<Key> {
        let name = self.spec.scheduling_group.as_ref()?.pod_group_name.as_deref()?;
        let has_ended = matches!(self.status.phase.as_deref(), Some("Succeeded" | "Failed"));
        (!has_ended).then(|| Key::new(self.namespace(), name))
    }
}

resource!(PodGroup, "PodGroup", ("scheduling.k8s.io", "v1alpha2", "podgroups"), NamespaceResourceScope);

impl Object for PodGroup {}

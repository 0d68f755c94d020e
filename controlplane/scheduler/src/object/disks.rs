//! Reduced types of disks in the volumes of a pod.

use serde::Deserialize;

/// A persistent disk of Google Compute Engine.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct GceDisk {
    pub(crate) pd_name: String,
    pub(crate) read_only: bool,
}

/// A volume of Amazon's Elastic Block Store.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(default)]
pub(crate) struct AwsDisk {
    #[serde(rename = "volumeID")]
    pub(crate) volume_id: String,
}

/// An iSCSI disk.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct IscsiDisk {
    pub(crate) iqn: String,
    pub(crate) read_only: bool,
}

/// An image of a Ceph cluster.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct RbdImage {
    pub(crate) monitors: Vec<String>,
    pub(crate) pool: String,
    pub(crate) image: String,
    pub(crate) read_only: bool,
}

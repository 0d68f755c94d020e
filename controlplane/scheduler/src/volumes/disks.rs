//! Disks that only one pod may use, or several pods that only read. Source: upstream's plugin VolumeRestrictions.

use serde::Deserialize;

use crate::object::Pod;

/// Such a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Disk {
    Gce(Box<GceDisk>),
    Aws(Box<AwsDisk>),
    Iscsi(Box<IscsiDisk>),
    Rbd(Box<RbdImage>),
}

/// A persistent disk of Google Compute Engine.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct GceDisk {
    pd_name: String,
    read_only: bool,
}

/// A volume of Amazon's Elastic Block Store.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(default)]
pub(crate) struct AwsDisk {
    #[serde(rename = "volumeID")]
    volume_id: String,
}

/// An iSCSI disk.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct IscsiDisk {
    iqn: String,
    read_only: bool,
}

/// An image of a Ceph cluster.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct RbdImage {
    monitors: Vec<String>,
    pool: String,
    image: String,
    read_only: bool,
}

/// The disks of a pod.
pub(crate) fn disks_of(pod: &Pod) -> Vec<Disk> {
    let disks = pod.spec.volumes.iter().flat_map(|volume| {
        let gce = volume.gce_persistent_disk.clone().map(Disk::Gce);
        let aws = volume.aws_elastic_block_store.clone().map(Disk::Aws);
        let iscsi = volume.iscsi.clone().map(Disk::Iscsi);
        [gce, aws, iscsi, volume.rbd.clone().map(Disk::Rbd)]
    });
    disks.flatten().collect()
}

// === impl Disk ===

impl Disk {
    /// Whether two pods cannot use these disks at the same time.
    pub(super) fn conflicts_with(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Gce(one), Self::Gce(other)) => {
                one.pd_name == other.pd_name && !(one.read_only && other.read_only)
            }
            (Self::Aws(one), Self::Aws(other)) => one.volume_id == other.volume_id,
            (Self::Iscsi(one), Self::Iscsi(other)) => {
                one.iqn == other.iqn && !(one.read_only && other.read_only)
            }
            (Self::Rbd(one), Self::Rbd(other)) => one.conflicts_with(other),
            (Self::Gce(_) | Self::Aws(_) | Self::Iscsi(_) | Self::Rbd(_), _) => false,
        }
    }
}

// === impl RbdImage ===

impl RbdImage {
    fn conflicts_with(&self, other: &Self) -> bool {
        self.monitors.iter().any(|monitor| other.monitors.contains(monitor))
            && self.pool == other.pool
            && self.image == other.image
            && !(self.read_only && other.read_only)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::fixture;

    #[test]
    fn a_disk_has_one_user_or_several_readers() {
        let disk = |volume: Value| disks_of(&fixture::pod("p", json!({"volumes": [volume]}))).remove(0);
        let gce = |name: &str, reads: bool| json!({"gcePersistentDisk": {"pdName": name, "readOnly": reads}});
        let iscsi = |iqn: &str, reads: bool| json!({"iscsi": {"iqn": iqn, "readOnly": reads}});
        let aws = |id: &str| json!({"awsElasticBlockStore": {"volumeID": id, "readOnly": true}});
        let rbd = |monitors: &[&str], pool: &str, reads: bool| json!({"rbd": {"monitors": monitors, "pool": pool, "image": "i", "readOnly": reads}});
        let cases = [
            (gce("a", false), gce("a", true), true),
            (gce("a", true), gce("a", true), false),
            (gce("a", false), gce("b", false), false),
            (aws("a"), aws("a"), true),
            (aws("a"), aws("b"), false),
            (iscsi("a", true), iscsi("a", false), true),
            (iscsi("a", true), iscsi("a", true), false),
            (rbd(&["m", "n"], "p", false), rbd(&["n"], "p", false), true),
            (rbd(&["m"], "p", false), rbd(&["n"], "p", false), false),
            (rbd(&["m"], "p", false), rbd(&["m"], "q", false), false),
            (rbd(&["m"], "p", true), rbd(&["m"], "p", true), false),
            (gce("a", false), iscsi("a", false), false),
        ];
        for (one, other, expected) in cases {
            assert_eq!(disk(one.clone()).conflicts_with(&disk(other.clone())), expected, "{one} {other}");
            assert_eq!(disk(other.clone()).conflicts_with(&disk(one.clone())), expected, "{other} {one}");
        }
        assert!(disks_of(&fixture::pod("p", json!({"volumes": [{"name": "v", "emptyDir": {}}]}))).is_empty());
    }
}

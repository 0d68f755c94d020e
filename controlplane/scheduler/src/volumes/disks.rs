//! Disks that only one pod may use, or that several pods may use if they only read. Source: upstream's plugin
//! VolumeRestrictions.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::object::{Pod, RbdImage};

/// The pool of an image that names no pool, as in the API.
const DEFAULT_POOL: &str = "rbd";

/// The disks of a pod. They are a map by disk, so that the check for common disks of two pods is not quadratic: a pod
/// can have thousands of volumes. A clone shares the disks.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Disks(Option<Arc<BTreeMap<Disk, Monitors>>>);

/// The name of a disk.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Disk {
    Gce(String),
    Aws(String),
    Iscsi(String),
    Rbd { pool: String, image: String },
}

/// The monitors of an image's cluster. The value of each monitor is whether the pod only reads. Pods use the same image
/// if they have a monitor in common. Disks of other types have one monitor with an empty name.
type Monitors = BTreeMap<String, bool>;

/// The disks of a pod.
pub(crate) fn disks_of(pod: &Pod) -> Disks {
    let mut all = BTreeMap::new();
    let alone = || std::iter::once(String::new());
    for volume in &pod.spec.volumes {
        if let Some(gce) = &volume.gce_persistent_disk {
            add(&mut all, Disk::Gce(gce.pd_name.clone()), alone(), gce.read_only);
        }
        // Pods cannot share such a disk, even if all of them only read.
        if let Some(aws) = &volume.aws_elastic_block_store {
            add(&mut all, Disk::Aws(aws.volume_id.clone()), alone(), false);
        }
        if let Some(iscsi) = &volume.iscsi {
            add(&mut all, Disk::Iscsi(iscsi.iqn.clone()), alone(), iscsi.read_only);
        }
        if let Some(rbd) = &volume.rbd {
            add(&mut all, rbd.disk(), rbd.monitors.iter().cloned(), rbd.read_only);
        }
    }
    Disks((!all.is_empty()).then(|| Arc::new(all)))
}

fn add(
    all: &mut BTreeMap<Disk, Monitors>,
    disk: Disk,
    monitors: impl Iterator<Item = String>,
    only_reads: bool,
) {
    let known = all.entry(disk).or_default();
    for monitor in monitors {
        *known.entry(monitor).or_insert(only_reads) &= only_reads;
    }
}

// === impl Disks ===

impl Disks {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_none()
    }

    /// Whether two pods with these disks cannot run at the same time.
    pub(crate) fn conflict_with(&self, other: &Self) -> bool {
        let (Some(own), Some(others)) = (&self.0, &other.0) else { return false };
        others.iter().any(|(disk, monitors)| own.get(disk).is_some_and(|own| conflict(own, monitors)))
    }
}

/// Whether two pods that use a disk with these monitors cannot run at the same time.
fn conflict(own: &Monitors, others: &Monitors) -> bool {
    others.iter().any(|(monitor, only_reads)| own.get(monitor).is_some_and(|own| !(*own && *only_reads)))
}

// === impl RbdImage ===

impl RbdImage {
    fn disk(&self) -> Disk {
        let pool = if self.pool.is_empty() { DEFAULT_POOL } else { &self.pool };
        Disk::Rbd { pool: pool.to_owned(), image: self.image.clone() }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::fixture;

    #[test]
    fn a_disk_has_one_user_or_several_readers() {
        let disk = |volume: Value| disks_of(&fixture::pod("p", json!({"volumes": [volume]})));
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
            (rbd(&["m"], "", false), rbd(&["m"], "rbd", false), true),
            (gce("a", false), iscsi("a", false), false),
        ];
        for (one, other, expected) in cases {
            assert_eq!(disk(one.clone()).conflict_with(&disk(other.clone())), expected, "{one} {other}");
            assert_eq!(disk(other.clone()).conflict_with(&disk(one.clone())), expected, "{other} {one}");
        }
        assert!(disks_of(&fixture::pod("p", json!({"volumes": [{"name": "v", "emptyDir": {}}]}))).is_empty());
    }

    #[test]
    fn a_pod_that_writes_a_disk_in_one_of_its_volumes_is_its_only_user() {
        let disk = |reads: bool| json!({"gcePersistentDisk": {"pdName": "a", "readOnly": reads}});
        let disks = |volumes: Value| disks_of(&fixture::pod("p", json!({"volumes": volumes})));
        let (reader, both) =
            (disks(json!([disk(true)])), disks(json!([disk(true), disk(false), disk(true)])));
        assert!(both.conflict_with(&reader) && reader.conflict_with(&both));
        assert!(!reader.conflict_with(&reader));
    }
}

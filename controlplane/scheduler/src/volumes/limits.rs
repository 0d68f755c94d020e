//! Limits on the number of a driver's volumes on a node. Source: upstream's plugin NodeVolumeLimits.

use std::collections::{HashMap, HashSet};

use coracle_values::object::{Key, ObjectExt};

use super::State;

/// A driver, and its handle of a volume.
type Attached = (String, String);

impl State {
    /// The driver and the volume of a claim. `None` if no driver attaches the volume.
    pub(super) fn driver_and_volume(&self, key: &Key) -> Option<Attached> {
        let claim = self.claims.get(key)?;
        if let Some(volume) = self.volumes.get(claim.volume()) {
            let source = volume.spec.csi.as_ref()?;
            return Some((source.driver.clone(), source.volume_handle.clone()));
        }
        // A volume that will be provisioned also counts.
        let class = self.classes.get(claim.class())?;
        Some((class.provisioner.clone(), format!("{}/{}", claim.namespace(), claim.name())))
    }

    /// Whether the node has room for these volumes in addition to the volumes of its pods.
    pub(super) fn has_room<'a>(
        &self,
        node: &str,
        requested: &HashSet<Attached>,
        used: impl Iterator<Item = &'a Key>,
    ) -> bool {
        let drivers = self.csi_nodes.get(node).map(|node| node.spec.drivers.as_slice()).unwrap_or_default();
        let limits = drivers.iter().filter_map(|driver| {
            Some((
                driver.name.as_str(),
                usize::try_from(driver.allocatable.as_ref()?.count?).unwrap_or_default(),
            ))
        });
        let limits: HashMap<&str, usize> = limits.collect();
        if limits.is_empty() {
            return true;
        }
        let mut attached: HashSet<Attached> = used.filter_map(|key| self.driver_and_volume(key)).collect();
        let new: Vec<&Attached> =
            requested.iter().filter(|attachment| !attached.contains(*attachment)).collect();
        attached.extend(
            self.attachments.values().filter(|attachment| attachment.spec.node_name == node).filter_map(
                |attachment| {
                    let volume =
                        self.volumes.get(attachment.spec.source.persistent_volume_name.as_deref()?)?;
                    Some((attachment.spec.attacher.clone(), volume.spec.csi.as_ref()?.volume_handle.clone()))
                },
            ),
        );
        limits.into_iter().all(|(driver, limit)| {
            let of = |attachment: &&Attached| attachment.0 == driver;
            let new = new.iter().filter(|attachment| of(attachment)).count();
            new == 0 || attached.iter().filter(of).count() + new <= limit
        })
    }
}

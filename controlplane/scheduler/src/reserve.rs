//! Reserves the volumes and devices of a pod on its node before the pod is bound.

use crate::config::Profile;
use crate::decide::reserve_failed;
use crate::devices::Reservations;
use crate::object::Pod;
use crate::snapshot::Snapshot;
use crate::volumes::ChosenVolume;

/// The volumes and the devices that are reserved for a pod.
#[derive(Debug, Default)]
pub(crate) struct Reserved {
    pub(crate) volumes: Vec<ChosenVolume>,
    pub(crate) devices: Reservations,
}

/// Reserves all volumes and devices of a pod on a node, or none of them after an error. The error has upstream's text.
pub(crate) fn reserve(
    pod: &Pod,
    profile: &Profile,
    snapshot: &Snapshot,
    node: &str,
) -> Result<Reserved, String> {
    let volumes = snapshot.reserve_volumes(pod, profile, node);
    let volumes = volumes.map_err(|why| reserve_failed("VolumeBinding", &why))?;
    match snapshot.reserve_devices(pod, node) {
        Ok(devices) => Ok(Reserved { volumes, devices }),
        Err(why) => {
            snapshot.volumes.release(&volumes);
            Err(reserve_failed("DynamicResources", &why))
        }
    }
}

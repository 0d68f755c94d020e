//! The sources of a container's volumes: directories of the node, and images.

use std::path::{Path, PathBuf};

use coracle_images::Held;
use coracle_proto::{cri, shim};

use super::container_create::{image_error, make_dir};
use crate::error::Error;
use crate::records::ContainerRecord;
use crate::runtime::Runtime;
use crate::sandbox::Sandbox;
use crate::sandbox::files::POD_FILES;
use crate::selinux::relabel;

impl Runtime {
    /// Finds the images that are volumes, notes which they are, and keeps their layers.
    pub(super) fn hold_images(&self, config: &mut cri::ContainerConfig) -> Result<Vec<Held>, Error> {
        let mut held = Vec::new();
        for spec in config.mounts.iter_mut().filter_map(|mount| mount.image.as_mut()) {
            let found = self.inner.images.get(&spec.image);
            let image = found.ok_or_else(|| Error::NotFound { what: "image", id: spec.image.clone() })?;
            held.push(self.inner.images.hold(&image.id).map_err(|source| image_error(&image.id, source))?);
            spec.image_ref = image.id;
        }
        Ok(held)
    }

    /// What the shim mounts in the place of the sources that [`find_volumes`] names.
    pub(super) fn image_volumes(
        &self,
        config: &cri::ContainerConfig,
        bundle: &Path,
    ) -> Result<Vec<shim::ImageVolume>, Error> {
        let mounts = config.mounts.iter().enumerate();
        let images = mounts.filter_map(|(at, mount)| Some((at, mount, mount.image.as_ref()?)));
        images
            .map(|(at, mount, spec)| {
                let found = self.inner.images.get(&spec.image_ref);
                let image =
                    found.ok_or_else(|| Error::NotFound { what: "image", id: spec.image_ref.clone() })?;
                Ok(shim::ImageVolume {
                    source: image_source(bundle, at).to_string_lossy().into_owned(),
                    lower: image.layers.iter().map(|layer| layer.to_string_lossy().into_owned()).collect(),
                    sub_path: mount.image_sub_path.clone(),
                })
            })
            .collect()
    }

    /// Gives the container's label to the pod's files and to the volumes that are to be relabelled. Those that are
    /// large take their time, beside all else.
    pub(super) async fn relabel_volumes(
        &self,
        sandbox: &Sandbox,
        record: &ContainerRecord,
    ) -> Result<(), Error> {
        let label = record.selinux.as_ref().and_then(|labels| labels.mount.as_ref());
        let Some(label) = label.map(ToString::to_string) else { return Ok(()) };
        let dir = self.inner.records.sandbox_dir(&sandbox.id);
        let files = POD_FILES.map(|name| dir.join(name));
        let volumes =
            record.config.mounts.iter().filter(|mount| mount.selinux_relabel && mount.image.is_none());
        let paths: Vec<PathBuf> =
            files.into_iter().chain(volumes.map(|mount| PathBuf::from(&mount.host_path))).collect();
        let work = move || {
            paths.iter().try_for_each(|path| {
                // No link leads to what is the node's own.
                let labelled = path.canonicalize().and_then(|path| relabel(&path, &label));
                labelled.map_err(Error::file("relabel", path))
            })
        };
        let done = tokio::task::spawn_blocking(work).await;
        done.map_err(|error| Error::Kernel {
            doing: "relabel volumes",
            source: std::io::Error::other(error),
        })?
    }
}

/// Follows links of the sources, and makes those that are absent, as docker always has.
pub(super) fn find_volumes(config: &mut cri::ContainerConfig, bundle: &Path) -> Result<(), Error> {
    for (at, mount) in config.mounts.iter_mut().enumerate() {
        if mount.image.is_some() {
            mount.host_path = image_source(bundle, at).to_string_lossy().into_owned();
            continue;
        }
        let path = Path::new(&mount.host_path);
        if !path.exists() {
            make_dir(path)?;
        }
        let real = path.canonicalize().map_err(Error::file("find volume", path))?;
        mount.host_path = real.to_string_lossy().into_owned();
    }
    Ok(())
}

/// Stands for an image in the spec; nothing is there.
fn image_source(bundle: &Path, at: usize) -> PathBuf {
    bundle.join("images").join(at.to_string())
}

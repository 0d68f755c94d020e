//! The sources of a container's volumes: directories of the node, and images.

use std::path::{Path, PathBuf};

use coracle_images::Held;
use coracle_proto::{cri, shim};

use super::container_create::{image_error, make_dir};
use crate::error::Error;
use crate::runtime::Runtime;

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

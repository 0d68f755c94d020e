//! The bundle of a container: its spec, its process, its directories and the create call for the shim.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use coracle_images::Image;
use coracle_proto::shim;
use oci_spec::runtime::Spec;

use super::service::ContainerService;
use crate::container::mount_points;
use crate::error::Error;
use crate::namespaces;
use crate::records::{ContainerRecord, replace};
use crate::sandbox::Sandbox;
use crate::sandbox::user_namespace::Mapping;
use crate::services::process_file::PROCESS_FILE;

/// The directories of a container.
struct BundleDirs {
    bundle: PathBuf,
    /// Upper directory of the overlay: what the container writes.
    upper: PathBuf,
    /// Work directory of the overlay.
    work: PathBuf,
    /// Mount point of the root file system.
    rootfs: PathBuf,
    /// Layers with mount points, below the image.
    mount_points: Vec<PathBuf>,
}

impl ContainerService {
    /// Writes the spec and the process, creates the directories, and returns the create call for the shim.
    pub(super) fn write_bundle(
        &self,
        sandbox: &Sandbox,
        record: &ContainerRecord,
        image: &Image,
        spec: &Spec,
    ) -> Result<shim::CreateContainer, Error> {
        let bundle = self.objects.records.container_dir(&record.id);
        let layer = self.objects.records.make_layer(&record.id)?;
        let (upper, work, rootfs) = (layer.join("upper"), layer.join("work"), bundle.join("rootfs"));
        for dir in [&upper, &work, &rootfs] {
            make_dir(dir)?;
        }
        // The container's root directory must be readable for its users, with any umask of this process.
        let all = Permissions::from_mode(0o755);
        std::fs::set_permissions(&upper, all).map_err(Error::file("set the mode of", &upper))?;
        if let Some(mapping) = Mapping::of(Some(&namespaces::options(sandbox.config()))).ok().flatten() {
            // The container's root directory must belong to root of its user namespace.
            let (uid, gid) = mapping.root();
            std::os::unix::fs::chown(&upper, Some(uid), Some(gid))
                .map_err(Error::file("set the owner of", &upper))?;
        }
        if let Some(dir) = Path::new(&record.log_path).parent().filter(|dir| *dir != Path::new("")) {
            make_dir(dir)?;
        }
        write_json(&bundle.join("config.json"), spec)?;
        write_json(&bundle.join(PROCESS_FILE), spec.process())?;
        let images = self.image_volumes(&record.config, &bundle)?;
        let mount_points = mount_points::layers(
            &self.config.root,
            &image.layers,
            spec.mounts().as_deref().unwrap_or_default(),
        );
        let dirs = BundleDirs { bundle, upper, work, rootfs, mount_points };
        let call = self.create_call(record, image, &dirs);
        Ok(shim::CreateContainer { images, ..call })
    }

    fn create_call(
        &self,
        record: &ContainerRecord,
        image: &Image,
        dirs: &BundleDirs,
    ) -> shim::CreateContainer {
        let text = |path: &Path| path.to_string_lossy().into_owned();
        shim::CreateContainer {
            container_id: record.id.clone(),
            bundle: text(&dirs.bundle),
            rootfs: Some(shim::Overlay {
                lower: image.layers.iter().chain(&dirs.mount_points).map(|layer| text(layer)).collect(),
                upper: text(&dirs.upper),
                work: text(&dirs.work),
                target: text(&dirs.rootfs),
                // The container library makes the root file system read-only after its mount points exist.
                read_only: false,
            }),
            terminal: record.config.tty,
            stdin: record.config.stdin,
            stdin_once: record.config.stdin_once,
            log_path: record.log_path.clone(),
            log_max_size: self.config.log_max_size,
            log_max_files: self.config.log_max_files,
            images: Vec::new(),
            seccomp_program: Vec::new(),
        }
    }
}

pub(super) fn make_dir(dir: &Path) -> Result<(), Error> {
    std::fs::create_dir_all(dir).map_err(Error::file("create directory", dir))
}

pub(super) fn write_json<T: serde::Serialize>(path: &Path, value: &T) -> Result<(), Error> {
    let bytes = serde_json::to_vec(value).map_err(|source| Error::Format {
        doing: "encode",
        path: path.to_owned(),
        source,
    })?;
    replace(path, &bytes)
}

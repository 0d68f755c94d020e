//! The bundle of a container: its spec, its process, its directories and the create call for the shim.

use std::fs::Permissions;
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use coracle_images::Image;
use coracle_proto::shim;
use oci_spec::runtime::Spec;

use super::service::ContainerService;
use crate::blocking;
use crate::container::mount_points;
use crate::error::Error;
use crate::json_file::{encode, make_dir};
use crate::namespaces;
use crate::records::ContainerRecord;
use crate::sandbox::Sandbox;
use crate::sandbox::user_namespace::{Mapping, Owner};
use crate::services::process_file::PROCESS_FILE;
use crate::shim_client::file::write_private;

/// The directories of a container.
struct BundleDirs {
    bundle: PathBuf,
    /// Upper directory of the overlay: the files that the container writes.
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
            let Owner { uid, gid } = mapping.root();
            std::os::unix::fs::chown(&upper, Some(uid), Some(gid))
                .map_err(Error::file("set the owner of", &upper))?;
        }
        write_new_json(&bundle.join("config.json"), spec)?;
        write_new_json(&bundle.join(PROCESS_FILE), spec.process())?;
        let images = self.image_volumes(&record.config, &bundle)?;
        let mount_points = mount_points::layers(
            &self.config.root,
            self.image_files.run_link(image).as_deref(),
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
                // The shim makes the root file system read-only after its mount points exist.
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

/// Creates the directory of a container's log. Logs may be on a file system of their own, which might not respond.
pub(super) async fn make_log_dir(log_path: &Path) -> Result<(), Error> {
    let Some(dir) = log_path.parent().filter(|dir| *dir != Path::new("")) else { return Ok(()) };
    let dir = dir.to_owned();
    let made = blocking::run(log_path, move |_abandoned| make_dir(&dir)).await;
    made.map_err(|why| Error::Kernel { doing: "create the log directory", source: io::Error::other(why) })?
}

/// Writes a file of a container that is being created. Nothing reads it before the creation is complete, and a start
/// after a crash removes the whole directory. So the file is written in place, which saves a third of the system
/// calls.
fn write_new_json<T: serde::Serialize>(path: &Path, value: &T) -> Result<(), Error> {
    write_private(path, &encode(path, value)?).map_err(Error::file("write", path))
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn a_new_file_of_a_container_is_private() {
        let dir = tempfile::tempdir().expect("directory");
        let path = dir.path().join("config.json");
        write_new_json(&path, &"a secret").expect("written");
        assert_eq!(std::fs::read_to_string(&path).expect("file"), r#""a secret""#);
        assert_eq!(path.metadata().expect("file").permissions().mode() & 0o7777, 0o600);
    }

    #[tokio::test]
    async fn a_log_directory_that_does_not_respond_blocks_no_other_work() {
        let dir = tempfile::tempdir().expect("directory");
        let log = dir.path().join("pod/c/0.log");
        let (release, released) = mpsc::channel::<()>();
        let blocked = blocking::run(&log, move |_abandoned| released.recv().is_ok());
        let attempt = async {
            let refused = make_log_dir(&log).await;
            drop(release);
            refused
        };
        let (_, refused) = tokio::join!(blocked, attempt);
        assert!(refused.is_err(), "no attempt is made while an earlier attempt blocks");
        make_log_dir(&log).await.expect("made");
        assert!(dir.path().join("pod/c").is_dir());
        make_log_dir(Path::new("")).await.expect("a container without a log");
    }
}

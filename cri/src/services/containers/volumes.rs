//! Sources of a container's volumes: directories of the node, and images.

use std::io;
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use coracle_images::ImageHold;
use coracle_proto::{cri, shim};
use nix::fcntl::{AT_FDCWD, OFlag, OpenHow, ResolveFlag, openat2};
use nix::sys::stat::fstat;

use super::service::ContainerService;
use crate::blocking::{self, Abandoned, FairWork};
use crate::error::Error;
use crate::json_file::make_dir;
use crate::records::ContainerRecord;
use crate::sandbox::Sandbox;
use crate::sandbox::files::POD_FILES;
use crate::selinux::relabel;
use crate::services::images::image_error;

/// Permits to relabel volumes. There are more permits than a node has pods by default (110). So namespaces with many
/// files do not delay the pods of other namespaces.
static RELABELS: FairWork = FairWork::new(128, 8);
/// Interval in which a relabelling checks whether its pod is being stopped.
const STOP_CHECK: Duration = Duration::from_secs(1);

impl ContainerService {
    /// Resolves image volumes, stores their image ids in the configuration, and holds their layers.
    pub(super) fn hold_images(&self, config: &mut cri::ContainerConfig) -> Result<Vec<ImageHold>, Error> {
        let mut held = Vec::new();
        for spec in config.mounts.iter_mut().filter_map(|mount| mount.image.as_mut()) {
            let image = self.image(&spec.image)?;
            held.push(self.images.hold(&image.id).map_err(|source| image_error(&image.id, source))?);
            spec.image_ref = image.id;
        }
        Ok(held)
    }

    /// The image volumes that the shim mounts at the source paths of [`ContainerService::find_volumes`].
    pub(super) fn image_volumes(
        &self,
        config: &cri::ContainerConfig,
        bundle: &Path,
    ) -> Result<Vec<shim::ImageVolume>, Error> {
        let mounts = config.mounts.iter().enumerate();
        let images = mounts.filter_map(|(at, mount)| Some((at, mount, mount.image.as_ref()?)));
        images
            .map(|(at, mount, spec)| {
                let image = self.image(&spec.image_ref)?;
                Ok(shim::ImageVolume {
                    source: image_source(bundle, at).to_string_lossy().into_owned(),
                    lower: image.layers.iter().map(|layer| layer.to_string_lossy().into_owned()).collect(),
                    sub_path: mount.image_sub_path.clone(),
                })
            })
            .collect()
    }

    /// The container's configuration with the sources of its volumes on this node. A volume's server may never respond, so
    /// this runs off the async workers.
    pub(super) async fn find_volumes(&self, record: &ContainerRecord) -> Result<cri::ContainerConfig, Error> {
        let mut config = record.config.clone();
        if config.mounts.is_empty() {
            return Ok(config);
        }
        let bundle = self.objects.records.container_dir(&record.id);
        // The key has the container's name and attempt instead of its id, because a retried creation has another id.
        let metadata = config.metadata.clone().unwrap_or_default();
        let name = format!("{}-{}", metadata.name, metadata.attempt);
        let place = self.objects.records.sandbox_dir(&record.sandbox_id).join(name);
        let found = blocking::run(&place, move |abandoned| {
            resolve_sources(&mut config, &bundle, abandoned).map(|()| config)
        });
        let blocked =
            |why| Error::Kernel { doing: "find the volumes of the container", source: io::Error::other(why) };
        found.await.map_err(blocked)?
    }

    /// Sets the container's SELinux label on the pod's files and on volumes with `selinux_relabel`. Large volumes take long,
    /// so this runs on threads that the namespaces share. The work ends when the pod is stopped.
    pub(super) async fn relabel_volumes(
        &self,
        sandbox: &Sandbox,
        record: &ContainerRecord,
    ) -> Result<(), Error> {
        let label = record.selinux.as_ref().and_then(|labels| labels.mount.as_ref());
        let Some(label) = label.map(ToString::to_string) else { return Ok(()) };
        let dir = self.objects.records.sandbox_dir(&sandbox.id);
        let paths = paths_to_relabel(&dir, &record.config.mounts);
        let work = RELABELS.run(sandbox.namespace(), move |abandoned| {
            paths.iter().try_for_each(|path| {
                // Links are resolved first, so that a link to a system file is recognised.
                let labelled = path.canonicalize().and_then(|path| relabel(&path, &label, abandoned));
                labelled.map_err(Error::file("relabel", path))
            })
        });
        let stopping = async {
            while !sandbox.is_stopping() {
                tokio::time::sleep(STOP_CHECK).await;
            }
        };
        // Both arms may be dropped: work whose future is dropped ends at the next file.
        tokio::select! {
            biased;
            done = work => done.unwrap_or_else(|source| Err(Error::Kernel { doing: "relabel volumes", source })),
            () = stopping => {
                Err(Error::WrongState { what: "pod sandbox", id: sandbox.id.clone(), state: "stopping" })
            }
        }
    }
}

/// The pod's own files in its directory, and the volumes whose mounts request a label. The path of a mount in the
/// container does not matter: another file of the node may be mounted at /etc/hosts.
fn paths_to_relabel(sandbox_dir: &Path, mounts: &[cri::Mount]) -> Vec<PathBuf> {
    let files = POD_FILES.map(|name| sandbox_dir.join(name));
    let volumes = mounts.iter().filter(|mount| mount.selinux_relabel && mount.image.is_none());
    files.into_iter().chain(volumes.map(|mount| PathBuf::from(&mount.host_path))).collect()
}

/// Resolves links in source paths and creates absent directories, as Docker does.
fn resolve_sources(
    config: &mut cri::ContainerConfig,
    bundle: &Path,
    abandoned: &Abandoned,
) -> Result<(), Error> {
    for (at, mount) in config.mounts.iter_mut().enumerate() {
        if mount.image.is_some() {
            mount.host_path = image_source(bundle, at).to_string_lossy().into_owned();
            continue;
        }
        let path = Path::new(&mount.host_path);
        let real = match found_without_links(path) {
            Some(real) => real,
            None => {
                if !path.exists() && !abandoned.is_set() {
                    make_dir(path)?;
                }
                path.canonicalize().map_err(Error::file("find volume", path))?
            }
        };
        mount.host_path = real.to_string_lossy().into_owned();
    }
    Ok(())
}

/// The canonical form of a path in which the kernel finds no symbolic link. `None` for other paths, and if the file does
/// not exist or its file system returns an error. Most sources are paths without links, and [`Path::canonicalize`]
/// takes a system call for each component.
fn found_without_links(path: &Path) -> Option<PathBuf> {
    let is_plain = |part| matches!(part, Component::RootDir | Component::Normal(_));
    if !path.is_absolute() || !path.components().all(is_plain) {
        return None;
    }
    let how =
        OpenHow::new().flags(OFlag::O_PATH | OFlag::O_CLOEXEC).resolve(ResolveFlag::RESOLVE_NO_SYMLINKS);
    // Before Linux 5.6 there is no openat2.
    let found = openat2(AT_FDCWD, path, how).ok()?;
    // The server of a network file system must respond here. The shim has no timeout for it.
    fstat(&found).ok()?;
    Some(path.components().collect())
}

/// Placeholder source path of an image volume in the spec. Nothing exists there.
fn image_source(bundle: &Path, at: usize) -> PathBuf {
    bundle.join("images").join(at.to_string())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// Resolves the sources of mounts that have these source paths.
    fn resolved(sources: &[&Path]) -> Vec<PathBuf> {
        let mount = |source: &&Path| cri::Mount {
            host_path: source.to_string_lossy().into_owned(),
            ..cri::Mount::default()
        };
        let mut config =
            cri::ContainerConfig { mounts: sources.iter().map(mount).collect(), ..Default::default() };
        resolve_sources(&mut config, Path::new("/bundle"), &Abandoned::default()).expect("resolved");
        config.mounts.into_iter().map(|mount| mount.host_path.into()).collect()
    }

    #[test]
    fn sources_are_resolved_as_by_realpath() {
        let dir = tempfile::tempdir().expect("directory");
        let dir = dir.path().canonicalize().expect("path");
        std::fs::create_dir(dir.join("a")).expect("directory");
        std::fs::write(dir.join("a/file"), "").expect("file");
        symlink("a", dir.join("to-a")).expect("link");
        symlink("file", dir.join("a/to-file")).expect("link");
        for name in ["a", "a/", "a//file", "a/./file", "a/../a/file", "to-a", "to-a/file", "a/to-file"] {
            let path = dir.join(name);
            assert_eq!(resolved(&[&path]), [path.canonicalize().expect("path")], "{name}");
        }
        let (file, link) = (dir.join("a/file"), dir.join("a/to-file"));
        assert_eq!(found_without_links(&file), Some(file));
        assert_eq!(found_without_links(&link), None);
        assert_eq!(found_without_links(Path::new("relative")), None);
        assert_eq!(found_without_links(&dir.join("absent")), None);
    }

    #[test]
    fn an_absent_source_is_made_as_a_directory() {
        let dir = tempfile::tempdir().expect("directory");
        let dir = dir.path().canonicalize().expect("path");
        symlink("a", dir.join("to-a")).expect("link");
        std::fs::create_dir(dir.join("a")).expect("directory");
        let absent = dir.join("to-a/b/c");
        assert_eq!(resolved(&[&absent]), [dir.join("a/b/c")]);
        assert!(dir.join("a/b/c").is_dir());
    }

    /// CVE-2021-43816: a file of the node that was mounted at /etc/hosts got the label of the container.
    #[test]
    fn cve_2021_43816_only_own_files_and_requested_volumes_are_relabelled() {
        let mount = |host_path: &str, container_path: &str, selinux_relabel: bool| cri::Mount {
            host_path: host_path.to_owned(),
            container_path: container_path.to_owned(),
            selinux_relabel,
            ..cri::Mount::default()
        };
        let mut image = mount("", "/image", true);
        image.image = Some(cri::ImageSpec::default());
        let mounts = [
            mount("/var/lib/kubelet/config.yaml", "/etc/hosts", false),
            mount("/root/.ssh/authorized_keys", "/etc/resolv.conf", false),
            mount("/volumes/data", "/data", true),
            image,
        ];
        let paths = paths_to_relabel(Path::new("/run/sandbox"), &mounts);
        let expected =
            ["/run/sandbox/hosts", "/run/sandbox/hostname", "/run/sandbox/resolv.conf", "/volumes/data"];
        assert_eq!(paths, expected.map(PathBuf::from));
    }
}

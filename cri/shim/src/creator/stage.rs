//! The stage: a staging directory for mounts that must be prepared before the container is made.
//!
//! The stage is a tmpfs in the creator's own mount namespace, which ends with the creator. The container's mount
//! namespace gets copies of the mounts. The stage has
//!
//! - volumes with a propagation of their own, and all volumes if the host's mounts are private, see
//!   [`propagation`];
//! - volumes and layers with id mappings, which the library refuses;
//! - image volumes;
//! - for a pod with a user namespace: all mounts and the device nodes. Root of that namespace cannot reach the node's
//!   directories and cannot make device nodes. So the stage is finally moved to a world-accessible directory.
//!
//! Most pods need no such mount, and have no stage.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use coracle_proto::shim::{ImageVolume, Overlay};
use libcontainer::oci_spec::runtime::{Mount, Spec};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};

use super::propagation::{self, Propagation, PropagationError};
use crate::host_mounts::HostMounts;
use crate::kernel;
use crate::overlay::{self, OverlayError};
use crate::selinux;
use crate::user_namespace::{self, InnerNamespaces, Mapping, UserNamespace, UserNamespaceError};

/// Candidates for a world-accessible stage: directories of the Filesystem Hierarchy Standard that the creator does not
/// use.
const PUBLIC: [&str; 6] = ["/mnt", "/media", "/srv", "/opt", "/home", "/tmp"];

#[derive(Debug, thiserror::Error)]
pub(super) enum StageError {
    #[error("cannot make the stage in {}", .dir.display())]
    Make { dir: PathBuf, source: io::Error },
    #[error("no directory is accessible to the users of a user namespace: tried {PUBLIC:?}")]
    NowherePublic,
    #[error(transparent)]
    Propagation(#[from] PropagationError),
    #[error("cannot mount the root file system")]
    Root(#[source] OverlayError),
    #[error("cannot mount the image of a volume")]
    Image(#[source] OverlayError),
    #[error("the image volume has no {sub_path:?}")]
    SubPath { sub_path: String, source: io::Error },
    #[error("cannot copy the mount at {}", .path.display())]
    Copy { path: PathBuf, source: io::Error },
    #[error("cannot map the ids of {}: its file system must support idmapped mounts", .path.display())]
    Map { path: PathBuf, source: io::Error },
    #[error("cannot map the ids of a volume")]
    Namespace(#[source] UserNamespaceError),
    #[error("cannot attach {} to the stage", .path.display())]
    Place { path: PathBuf, source: io::Error },
    #[error("cannot make the device {}", .path.display())]
    Device { path: PathBuf, source: nix::Error },
}

/// Arguments for the stage of one container.
#[derive(Clone, Copy)]
pub(super) struct StageRequest<'a> {
    /// The container's own directory.
    pub(super) dir: &'a Path,
    /// The pod's directory. Mounts below it exist in the shim's mount namespace only.
    pub(super) pod_dir: &'a Path,
    pub(super) host_mounts: &'a HostMounts,
    pub(super) user: Option<&'a UserNamespace>,
    pub(super) images: &'a [ImageVolume],
    /// The SELinux label of the mounts.
    pub(super) label: Option<&'a str>,
}

/// The paths of a container's root file system.
pub(super) struct StagedRoot {
    /// The path while the container is prepared.
    pub(super) current: PathBuf,
    /// The path when the container is made.
    pub(super) final_path: PathBuf,
}

/// A volume to be staged.
struct Volume<'a> {
    entry: &'a Mount,
    source: &'a Path,
    /// The file name of the volume on the stage.
    name: &'a str,
    propagation: Propagation,
}

/// A staging directory in a mount namespace of its own.
pub(super) struct Stage {
    /// The path of the stage until it is moved. Mounts are attached below this path.
    at: PathBuf,
    /// The final path. The container is made from the stage at this path.
    final_path: PathBuf,
    label: Option<String>,
}

// === impl StagedRoot ===

impl StagedRoot {
    /// A root file system that is not moved.
    pub(super) fn in_place(path: PathBuf) -> Self {
        Self { current: path.clone(), final_path: path }
    }
}

// === impl StageRequest ===

impl StageRequest<'_> {
    /// The host's mounts, if a volume must be copied from the host's namespace. This is necessary for propagation
    /// between the volume and the host, or if the host's mounts do not propagate into this namespace.
    fn source_of(&self, volume: &Mount, propagation: Propagation) -> Option<&HostMounts> {
        let ours = volume.source().as_ref().is_none_or(|source| source.starts_with(self.pod_dir));
        let needed = propagation != Propagation::Private || !(self.host_mounts.propagate_here() || ours);
        needed.then_some(self.host_mounts)
    }
}

// === impl Stage ===

impl Stage {
    /// Enters a mount namespace with a new stage. `None` if no mount needs a stage.
    pub(super) fn enter(spec: &Spec, request: &StageRequest<'_>) -> Result<Option<Self>, StageError> {
        let mounts = spec.mounts().as_deref().unwrap_or_default();
        let needs_stage = mounts.iter().any(|mount| {
            Propagation::of(mount).is_some_and(|propagation| {
                request.source_of(mount, propagation).is_some() || is_mapped(mount)
            })
        });
        if !needs_stage && request.user.is_none() && request.images.is_empty() {
            return Ok(None);
        }
        let at = request.dir.join("stage");
        let failed = |source| StageError::Make { dir: at.clone(), source };
        let final_path = match request.user {
            None => at.clone(),
            Some(_) => public_directory(request.dir).ok_or(StageError::NowherePublic)?,
        };
        unshare(CloneFlags::CLONE_NEWNS).map_err(|errno| failed(errno.into()))?;
        fs::create_dir_all(&at).map_err(failed)?;
        let options = selinux::with_context("mode=755", request.label);
        mount(Some("stage"), &at, Some("tmpfs"), MsFlags::empty(), Some(options.as_str()))
            .map_err(|errno| failed(errno.into()))?;
        Ok(Some(Self { at, final_path, label: request.label.map(str::to_owned) }))
    }

    /// Mounts the root file system with the ids of the user namespace. Returns its current and its final
    /// path.
    pub(super) fn mount_root(
        &self,
        overlay: &Overlay,
        user: &UserNamespace,
    ) -> Result<StagedRoot, StageError> {
        let at = self.at.join("root");
        let mapped = Overlay {
            lower: self.mapped_layers("root-layer", &overlay.lower, user)?,
            target: at.to_string_lossy().into_owned(),
            ..overlay.clone()
        };
        overlay::mount_at_target(&mapped, self.label.as_deref()).map_err(StageError::Root)?;
        Ok(StagedRoot { current: at, final_path: self.final_path.join("root") })
    }

    /// Stages all volumes of the spec and changes their sources to the stage.
    pub(super) fn stage_volumes(
        &self,
        spec: &mut Spec,
        request: &StageRequest<'_>,
    ) -> Result<(), StageError> {
        for (number, entry) in spec.mounts_mut().iter_mut().flatten().enumerate() {
            let Some(propagation) = Propagation::of(entry) else { continue };
            let Some(source) = entry.source().clone() else { continue };
            let name = number.to_string();
            match request.images.iter().find(|image| Path::new(&image.source) == source) {
                Some(image) => self.stage_image(image, &name, request.user)?,
                None => {
                    let volume = Volume { entry, source: &source, name: &name, propagation };
                    self.stage_volume(&volume, request)?;
                }
            }
            entry.set_source(Some(self.final_path.join(&name)));
            entry.set_uid_mappings(None);
            entry.set_gid_mappings(None);
        }
        Ok(())
    }

    fn stage_volume(&self, volume: &Volume<'_>, request: &StageRequest<'_>) -> Result<(), StageError> {
        let Volume { entry, source, name, propagation } = *volume;
        let copy = propagation::copy(source, request.source_of(entry, propagation))?;
        if is_mapped(entry) {
            let uids = entry.uid_mappings().as_deref().unwrap_or_default();
            let gids = entry.gid_mappings().as_deref().unwrap_or_default();
            let mapping = Mapping::from_oci(uids, gids);
            let own;
            let user = match request.user.filter(|user| user.mapping == mapping) {
                Some(user) => user,
                None => {
                    let inside = InnerNamespaces { flags: CloneFlags::empty(), init: None };
                    own = user_namespace::make(mapping, &inside).map_err(StageError::Namespace)?.0;
                    &own
                }
            };
            kernel::map_ids(&copy, &user.fd)
                .map_err(|error| StageError::Map { path: source.to_owned(), source: error })?;
        }
        let place = self.attach(&copy, name, is_dir(&copy, source)?)?;
        Ok(propagation::set(&place, propagation)?)
    }

    fn stage_image(
        &self,
        image: &ImageVolume,
        name: &str,
        user: Option<&UserNamespace>,
    ) -> Result<(), StageError> {
        let lower = match user {
            Some(user) => self.mapped_layers(&format!("{name}-layer"), &image.lower, user)?,
            None => image.lower.clone(),
        };
        let sub_path = image.sub_path.trim_matches('/');
        let whole = self.at.join(if sub_path.is_empty() { name.to_owned() } else { format!("{name}-image") });
        let target = whole.to_string_lossy().into_owned();
        let mounted = Overlay { lower, target, ..Overlay::default() };
        overlay::mount_at_target(&mounted, self.label.as_deref()).map_err(StageError::Image)?;
        if sub_path.is_empty() {
            return Ok(());
        }
        let failed = |source| StageError::SubPath { sub_path: image.sub_path.clone(), source };
        let root = fs::File::open(&whole).map_err(failed)?;
        let part = kernel::open_in_root(&root, Path::new(sub_path), libc::O_PATH).map_err(failed)?;
        let copy = kernel::copy_mount_at(&part, kernel::Depth::One).map_err(failed)?;
        let is_dir = is_dir(&copy, &whole)?;
        self.attach(&copy, name, is_dir).map(drop)
    }

    /// Copies the layers with the ids of the user namespace. Returns their paths on the stage.
    fn mapped_layers(
        &self,
        name: &str,
        layers: &[String],
        user: &UserNamespace,
    ) -> Result<Vec<String>, StageError> {
        let map = |(number, layer): (usize, &String)| {
            let path = Path::new(layer);
            let copy = kernel::copy_one_mount(path)
                .map_err(|source| StageError::Copy { path: path.to_owned(), source })?;
            kernel::map_ids(&copy, &user.fd)
                .map_err(|source| StageError::Map { path: path.to_owned(), source })?;
            let place = self.attach(&copy, &format!("{name}-{number}"), true)?;
            Ok(place.to_string_lossy().into_owned())
        };
        layers.iter().enumerate().map(map).collect()
    }

    /// Makes the device nodes of the spec on the stage, because root of a user namespace cannot make them. Bind mounts
    /// replace them in the spec. A device at the destination of a mount of the spec is omitted.
    pub(super) fn make_devices(&self, spec: &mut Spec, mapping: &Mapping) -> Result<(), StageError> {
        let Some(mut devices) = spec.linux_mut().as_mut().and_then(|linux| linux.devices().clone()) else {
            return Ok(());
        };
        let mounts = spec.mounts().as_deref().unwrap_or_default();
        devices.retain(|device| !mounts.iter().any(|mount| mount.destination() == device.path()));
        let mut binds = Vec::with_capacity(devices.len());
        for (number, device) in devices.iter().enumerate() {
            let name = format!("device-{number}");
            super::device::make(&self.at.join(&name), device, mapping)
                .map_err(|source| StageError::Device { path: device.path().clone(), source })?;
            binds.push(super::device::bind(&self.final_path.join(&name), device.path()));
        }
        if let Some(linux) = spec.linux_mut() {
            linux.set_devices(None);
        }
        spec.mounts_mut().get_or_insert_default().extend(binds);
        Ok(())
    }

    /// Moves the stage to its final path.
    pub(super) fn move_to_final_path(self) -> Result<(), StageError> {
        if self.at == self.final_path {
            return Ok(());
        }
        let none = None::<&str>;
        mount(Some(&self.at), &self.final_path, none, MsFlags::MS_MOVE, none)
            .map_err(|errno| StageError::Place { path: self.final_path.clone(), source: errno.into() })
    }

    fn attach(&self, tree: &OwnedFd, name: &str, is_dir: bool) -> Result<PathBuf, StageError> {
        let place = self.at.join(name);
        let failed = |source| StageError::Place { path: place.clone(), source };
        if is_dir { fs::create_dir(&place) } else { fs::write(&place, "") }.map_err(failed)?;
        kernel::attach_mount(tree, &place).map_err(failed)?;
        Ok(place)
    }
}

fn is_dir(tree: &OwnedFd, path: &Path) -> Result<bool, StageError> {
    let failed = |errno: nix::Error| StageError::Copy { path: path.to_owned(), source: errno.into() };
    let mode = nix::sys::stat::fstat(tree).map_err(failed)?.st_mode;
    Ok(mode & libc::S_IFMT == libc::S_IFDIR)
}

fn is_mapped(mount: &Mount) -> bool {
    let any = |list: &Option<Vec<_>>| list.as_ref().is_some_and(|list| !list.is_empty());
    any(mount.uid_mappings()) || any(mount.gid_mappings())
}

/// The first world-accessible directory that does not contain `dir`.
fn public_directory(dir: &Path) -> Option<PathBuf> {
    let places = PUBLIC.iter().map(Path::new);
    places.filter(|place| !dir.starts_with(place)).find(|place| is_public(place)).map(Path::to_owned)
}

fn is_public(place: &Path) -> bool {
    let open = |path: &Path| {
        fs::symlink_metadata(path).is_ok_and(|found| found.is_dir() && found.mode() & 0o001 != 0)
    };
    place.ancestors().all(open)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_public_mount_is_readable_and_hides_no_mount_of_the_runtime() {
        let place = public_directory(Path::new("/run/x")).unwrap();
        assert!(is_public(&place) && PUBLIC.iter().any(|public| place == Path::new(public)));
        assert_ne!(public_directory(&place.join("x")), Some(place));
        let closed = std::env::temp_dir().join(format!("coracle-stage-{}", std::process::id()));
        fs::create_dir(&closed).unwrap();
        fs::set_permissions(&closed, std::os::unix::fs::PermissionsExt::from_mode(0o750)).unwrap();
        assert!(!is_public(&closed));
        fs::remove_dir(closed).unwrap();
    }
}

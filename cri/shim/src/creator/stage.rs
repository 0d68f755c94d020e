//! The stage: what the container library cannot mount is mounted for it, and it binds from there.
//!
//! A tmpfs in a mount namespace of the creator's own, which ends with the container. On it are
//!
//! - volumes with a propagation of their own, and all where the host's mounts are private, see [`propagation`];
//! - volumes and layers whose ids are mapped, which the library refuses;
//! - images as volumes;
//! - for a pod with a user namespace everything: its root cannot reach the node's directories, so the
//!   whole stage is moved to where everybody may go, and device nodes, which it may not make, are
//!   made here.
//!
//! Nearly every other pod needs none of this and has no stage.

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
use crate::user_namespace::{self, Inside, Mapping, UserNamespace, UserNamespaceError};

/// Where a stage for everybody may lie: directories of the Filesystem Hierarchy Standard that nothing here
/// needs while the container is made.
const PUBLIC: [&str; 6] = ["/mnt", "/media", "/srv", "/opt", "/home", "/tmp"];

#[derive(Debug, thiserror::Error)]
pub(super) enum StageError {
    #[error("make a stage in {}", .dir.display())]
    Make { dir: PathBuf, source: io::Error },
    #[error("no directory is open to the users of a user namespace: tried {PUBLIC:?}")]
    NowherePublic,
    #[error(transparent)]
    Propagation(#[from] PropagationError),
    #[error("mount the root file system")]
    Root(#[source] OverlayError),
    #[error("mount an image as a volume")]
    Image(#[source] OverlayError),
    #[error("the image has no {sub_path:?}")]
    SubPath { sub_path: String, source: io::Error },
    #[error("copy the mount at {}", .path.display())]
    Copy { path: PathBuf, source: io::Error },
    #[error("map the ids of {}: its file system must know idmapped mounts", .path.display())]
    Map { path: PathBuf, source: io::Error },
    #[error("map the ids of a volume")]
    Namespace(#[source] UserNamespaceError),
    #[error("place {} on the stage", .path.display())]
    Place { path: PathBuf, source: io::Error },
    #[error("make the device {}", .path.display())]
    Device { path: PathBuf, source: nix::Error },
}

/// What a container needs a stage for.
#[derive(Clone, Copy)]
pub(super) struct Wanted<'a> {
    /// The container's own directory.
    pub(super) dir: &'a Path,
    /// The pod's directory: what is mounted below it is mounted in the shim's namespace alone.
    pub(super) pod_dir: &'a Path,
    pub(super) host_mounts: &'a HostMounts,
    pub(super) user: Option<&'a UserNamespace>,
    pub(super) images: &'a [ImageVolume],
    /// The SELinux label of what is mounted.
    pub(super) label: Option<&'a str>,
}

/// A directory that no propagation leaves.
pub(super) struct Stage {
    /// Where it is while things are placed on it.
    at: PathBuf,
    /// Where it will be when the library looks.
    seen: PathBuf,
    label: Option<String>,
}

// === impl Wanted ===

impl Wanted<'_> {
    /// The host, if a volume has to be taken from its namespace: to send mounts there, or because what is
    /// mounted there does not arrive here.
    fn source_of(&self, volume: &Mount, spread: Propagation) -> Option<&HostMounts> {
        let ours = volume.source().as_ref().is_none_or(|source| source.starts_with(self.pod_dir));
        let needed = spread != Propagation::Private || !(self.host_mounts.arrive() || ours);
        needed.then_some(self.host_mounts)
    }
}

// === impl Stage ===

impl Stage {
    /// Enters a mount namespace with a stage, if there is anything for it.
    pub(super) fn enter(spec: &Spec, wanted: &Wanted<'_>) -> Result<Option<Self>, StageError> {
        let mounts = spec.mounts().as_deref().unwrap_or_default();
        let special = mounts.iter().any(|mount| {
            Propagation::of(mount)
                .is_some_and(|spread| wanted.source_of(mount, spread).is_some() || is_mapped(mount))
        });
        if !special && wanted.user.is_none() && wanted.images.is_empty() {
            return Ok(None);
        }
        let at = wanted.dir.join("stage");
        let failed = |source| StageError::Make { dir: at.clone(), source };
        let seen = match wanted.user {
            None => at.clone(),
            Some(_) => public_place(wanted.dir).ok_or(StageError::NowherePublic)?,
        };
        unshare(CloneFlags::CLONE_NEWNS).map_err(|errno| failed(errno.into()))?;
        fs::create_dir_all(&at).map_err(failed)?;
        let options = selinux::with_context("mode=755", wanted.label);
        mount(Some("stage"), &at, Some("tmpfs"), MsFlags::empty(), Some(options.as_str()))
            .map_err(|errno| failed(errno.into()))?;
        Ok(Some(Self { at, seen, label: wanted.label.map(str::to_owned) }))
    }

    /// Mounts the root file system with the ids of the user namespace, and says where it is now and
    /// where it will be.
    pub(super) fn root(
        &self,
        overlay: &Overlay,
        user: &UserNamespace,
    ) -> Result<(PathBuf, PathBuf), StageError> {
        let at = self.at.join("root");
        let mapped = Overlay {
            lower: self.mapped_layers("root-layer", &overlay.lower, user)?,
            target: at.to_string_lossy().into_owned(),
            ..overlay.clone()
        };
        overlay::mount_at_target(&mapped, self.label.as_deref()).map_err(StageError::Root)?;
        Ok((at, self.seen.join("root")))
    }

    /// Places all volumes of the spec and points it at them.
    pub(super) fn volumes(&self, spec: &mut Spec, wanted: &Wanted<'_>) -> Result<(), StageError> {
        for (number, entry) in spec.mounts_mut().iter_mut().flatten().enumerate() {
            let Some(propagation) = Propagation::of(entry) else { continue };
            let Some(source) = entry.source().clone() else { continue };
            let name = number.to_string();
            match wanted.images.iter().find(|image| Path::new(&image.source) == source) {
                Some(image) => self.image(image, &name, wanted.user)?,
                None => self.volume(entry, &source, &name, (propagation, wanted))?,
            }
            entry.set_source(Some(self.seen.join(&name)));
            entry.set_uid_mappings(None);
            entry.set_gid_mappings(None);
        }
        Ok(())
    }

    fn volume(
        &self,
        entry: &Mount,
        source: &Path,
        name: &str,
        (wanted, context): (Propagation, &Wanted<'_>),
    ) -> Result<(), StageError> {
        let copy = propagation::copy(source, context.source_of(entry, wanted))?;
        if is_mapped(entry) {
            let uids = entry.uid_mappings().as_deref().unwrap_or_default();
            let gids = entry.gid_mappings().as_deref().unwrap_or_default();
            let mapping = Mapping::from_oci(uids, gids);
            let own;
            let user = match context.user.filter(|user| user.mapping == mapping) {
                Some(user) => user,
                None => {
                    let inside = Inside { flags: CloneFlags::empty(), init: None };
                    own = user_namespace::make(mapping, &inside).map_err(StageError::Namespace)?.0;
                    &own
                }
            };
            kernel::map_ids(&copy, &user.fd)
                .map_err(|error| StageError::Map { path: source.to_owned(), source: error })?;
        }
        let place = self.attach(&copy, name, is_dir(&copy, source)?)?;
        Ok(propagation::set(&place, wanted)?)
    }

    fn image(&self, image: &ImageVolume, name: &str, user: Option<&UserNamespace>) -> Result<(), StageError> {
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

    /// Copies of layers whose files belong to the namespace's users, as paths on the stage.
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

    /// Makes the device nodes, which a user namespace's root may not, and has them bound.
    pub(super) fn devices(&self, spec: &mut Spec, mapping: &Mapping) -> Result<(), StageError> {
        let Some(devices) = spec.linux_mut().as_mut().and_then(|linux| linux.devices().clone()) else {
            return Ok(());
        };
        let mut binds = Vec::with_capacity(devices.len());
        for (number, device) in devices.iter().enumerate() {
            let name = format!("device-{number}");
            super::device::make(&self.at.join(&name), device, mapping)
                .map_err(|source| StageError::Device { path: device.path().clone(), source })?;
            binds.push(super::device::bind(&self.seen.join(&name), device.path()));
        }
        if let Some(linux) = spec.linux_mut() {
            linux.set_devices(None);
        }
        spec.mounts_mut().get_or_insert_default().extend(binds);
        Ok(())
    }

    /// Moves it to where the library will look.
    pub(super) fn show(self) -> Result<(), StageError> {
        if self.at == self.seen {
            return Ok(());
        }
        let none = None::<&str>;
        mount(Some(&self.at), &self.seen, none, MsFlags::MS_MOVE, none)
            .map_err(|errno| StageError::Place { path: self.seen.clone(), source: errno.into() })
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

/// The first directory that everybody may enter and that hides nothing of ours.
fn public_place(dir: &Path) -> Option<PathBuf> {
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
    fn a_public_place_is_open_to_all_and_hides_nothing_of_ours() {
        let place = public_place(Path::new("/run/x")).unwrap();
        assert!(is_public(&place) && PUBLIC.iter().any(|public| place == Path::new(public)));
        assert_ne!(public_place(&place.join("x")), Some(place));
        let closed = std::env::temp_dir().join(format!("coracle-stage-{}", std::process::id()));
        fs::create_dir(&closed).unwrap();
        fs::set_permissions(&closed, std::os::unix::fs::PermissionsExt::from_mode(0o750)).unwrap();
        assert!(!is_public(&closed));
        fs::remove_dir(closed).unwrap();
    }
}

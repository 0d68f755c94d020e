//! Mount propagation of each volume, which the container library does not know.
//!
//! It gives the whole root one propagation and every bind inherits what its source has. So the
//! creator takes a mount namespace of its own, stages each volume there with the propagation that
//! it wants, and the library binds from the stage:
//!
//! | a mount that wants | is staged as | the root becomes |
//! |---|---|---|
//! | rprivate (the default) | private copy | private, slave or shared, as the strongest needs |
//! | rslave | slave of the host's | slave |
//! | rshared | peer of the host's, copied from the host's namespace | shared |
//!
//! With private volumes only, which is nearly every pod, nothing is staged: the root is private.

use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use libcontainer::oci_spec::runtime::{Mount, Spec};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, setns, unshare};

use crate::kernel;

#[derive(Debug, thiserror::Error)]
pub(super) enum PropagationError {
    #[error("make a stage in {}", .dir.display())]
    Stage { dir: PathBuf, source: io::Error },
    #[error("visit the host's mount namespace")]
    Visit(#[source] nix::Error),
    #[error("copy the mounts at {}", .path.display())]
    Copy { path: PathBuf, source: io::Error },
    #[error("place {} on the stage", .path.display())]
    Place { path: PathBuf, source: io::Error },
}

/// From weakest to strongest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Propagation {
    Private,
    Slave,
    Shared,
}

// === impl Propagation ===

impl Propagation {
    fn of(mount: &Mount) -> Option<Self> {
        let options = mount.options().as_deref().unwrap_or_default();
        if !options.iter().any(|option| option == "bind" || option == "rbind") {
            return None;
        }
        let mut named = options.iter().filter_map(|option| match option.as_str() {
            "slave" | "rslave" => Some(Self::Slave),
            "shared" | "rshared" => Some(Self::Shared),
            "private" | "rprivate" => Some(Self::Private),
            _ => None,
        });
        Some(named.next_back().unwrap_or(Self::Private))
    }

    fn root(self) -> &'static str {
        match self {
            Self::Private => "private",
            Self::Slave => "slave",
            Self::Shared => "shared",
        }
    }
}

/// Stages the volumes and points the spec at the stage.
pub(super) fn prepare(spec: &mut Spec, dir: &Path, host_mounts: &OwnedFd) -> Result<(), PropagationError> {
    let binds: Vec<(usize, Propagation)> = {
        let mounts = spec.mounts().as_deref().unwrap_or_default();
        mounts.iter().enumerate().filter_map(|(at, mount)| Some((at, Propagation::of(mount)?))).collect()
    };
    let strongest = binds.iter().map(|(_, wanted)| *wanted).max().unwrap_or(Propagation::Private);
    if let Some(linux) = spec.linux_mut() {
        linux.set_rootfs_propagation(Some(strongest.root().to_owned()));
    }
    if strongest == Propagation::Private {
        return Ok(());
    }
    let stage = enter_stage(dir)?;
    for (at, wanted) in binds {
        let Some(entry) = spec.mounts_mut().as_mut().and_then(|mounts| mounts.get_mut(at)) else { continue };
        let Some(source) = entry.source().clone() else { continue };
        let place = stage.join(at.to_string());
        stage_one(&source, &place, wanted, host_mounts)?;
        entry.set_source(Some(place));
    }
    Ok(())
}

/// A directory that no propagation leaves, in a mount namespace that ends with the creator and the
/// container.
fn enter_stage(dir: &Path) -> Result<PathBuf, PropagationError> {
    let stage = dir.join("stage");
    let failed = |source| PropagationError::Stage { dir: stage.clone(), source };
    unshare(CloneFlags::CLONE_NEWNS).map_err(|errno| failed(errno.into()))?;
    fs::create_dir_all(&stage).map_err(failed)?;
    let none = None::<&str>;
    mount(Some("stage"), &stage, Some("tmpfs"), MsFlags::empty(), none)
        .map_err(|errno| failed(errno.into()))?;
    Ok(stage)
}

fn stage_one(
    source: &Path,
    place: &Path,
    wanted: Propagation,
    host_mounts: &OwnedFd,
) -> Result<(), PropagationError> {
    let failed = |error| PropagationError::Place { path: source.to_owned(), source: error };
    if source.is_dir() { fs::create_dir(place) } else { fs::write(place, "") }.map_err(failed)?;
    let copy =
        if wanted == Propagation::Private { copy(source)? } else { copy_of_host(source, host_mounts)? };
    kernel::attach_mount(&copy, place).map_err(failed)?;
    let flags = match wanted {
        Propagation::Private => MsFlags::MS_PRIVATE,
        Propagation::Slave => MsFlags::MS_SLAVE,
        Propagation::Shared => return Ok(()),
    };
    let none = None::<&str>;
    mount(none, place, none, MsFlags::MS_REC | flags, none).map_err(|errno| failed(errno.into()))
}

fn copy(path: &Path) -> Result<OwnedFd, PropagationError> {
    kernel::copy_mounts(path).map_err(|source| PropagationError::Copy { path: path.to_owned(), source })
}

/// Our own namespace holds slaves of the host's mounts, through which nothing goes back. A copy
/// made in the host's is a peer of the original.
fn copy_of_host(path: &Path, host_mounts: &OwnedFd) -> Result<OwnedFd, PropagationError> {
    let own = fs::File::open("/proc/self/ns/mnt")
        .map_err(|source| PropagationError::Copy { path: path.to_owned(), source })?;
    setns(kernel::borrow(host_mounts.as_raw_fd()), CloneFlags::CLONE_NEWNS)
        .map_err(PropagationError::Visit)?;
    let copied = copy(path);
    setns(own, CloneFlags::CLONE_NEWNS).map_err(PropagationError::Visit)?;
    copied
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bind(options: &[&str]) -> Mount {
        serde_json::from_value(serde_json::json!({
            "destination": "/d", "type": "bind", "source": "/s", "options": options,
        }))
        .unwrap()
    }

    #[test]
    fn the_last_named_propagation_counts_and_none_is_private() {
        assert_eq!(Propagation::of(&bind(&["rbind", "ro"])), Some(Propagation::Private));
        assert_eq!(Propagation::of(&bind(&["rbind", "rslave"])), Some(Propagation::Slave));
        assert_eq!(Propagation::of(&bind(&["rbind", "rprivate", "rshared"])), Some(Propagation::Shared));
        assert_eq!(Propagation::of(&bind(&["rslave"])), None);
    }
}

//! Mount propagation of each volume, which the container library does not support.
//!
//! The library sets one propagation for the whole root, and every bind mount inherits the propagation of its source. So
//! each volume is put on the [stage](super::stage) with the propagation that it requests, and is bound from there:
//!
//! | a mount with | is staged as | the root becomes |
//! |---|---|---|
//! | rprivate (the default) | private copy; copied from the host's namespace if its mounts do not propagate here | private, slave or shared: the strongest of all volumes |
//! | rslave | slave of the host's | slave |
//! | rshared | peer of the host's, copied from the host's namespace | shared |
//!
//! Nearly every pod has private volumes only. If the host's mounts are shared, such a pod needs no stage, and its root
//! is private.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use libcontainer::oci_spec::runtime::{Mount, Spec};
use nix::mount::{MsFlags, mount};

use crate::host_mounts::HostMounts;
use crate::kernel;

#[derive(Debug, thiserror::Error)]
pub(super) enum PropagationError {
    #[error("cannot enter the host's mount namespace")]
    Visit(#[source] io::Error),
    #[error("cannot copy the mounts at {}", .path.display())]
    Copy { path: PathBuf, source: io::Error },
    #[error("cannot set the propagation of {}", .path.display())]
    Set { path: PathBuf, source: io::Error },
}

/// Mount propagation, ordered from weakest to strongest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Propagation {
    Private,
    Slave,
    Shared,
}

// === impl Propagation ===

impl Propagation {
    pub(super) fn of(mount: &Mount) -> Option<Self> {
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

/// Sets the root's propagation to the strongest propagation of all volumes.
pub(super) fn prepare(spec: &mut Spec) {
    let mounts = spec.mounts().as_deref().unwrap_or_default();
    let strongest = mounts.iter().filter_map(Propagation::of).max().unwrap_or(Propagation::Private);
    if let Some(linux) = spec.linux_mut() {
        linux.set_rootfs_propagation(Some(strongest.root().to_owned()));
    }
}

/// A detached copy of a volume's mounts, for the stage. This namespace has slaves of the host's mounts, so its mounts
/// do not propagate to the host. A copy made in the host's namespace is a peer of the original.
pub(super) fn copy(source: &Path, of_host: Option<&HostMounts>) -> Result<OwnedFd, PropagationError> {
    match of_host {
        Some(host) => host.visit(|| copy_here(source)).map_err(PropagationError::Visit)?,
        None => copy_here(source),
    }
}

/// Sets the propagation of a staged volume.
pub(super) fn set(place: &Path, wanted: Propagation) -> Result<(), PropagationError> {
    let flags = match wanted {
        Propagation::Private => MsFlags::MS_PRIVATE,
        Propagation::Slave => MsFlags::MS_SLAVE,
        Propagation::Shared => return Ok(()),
    };
    let none = None::<&str>;
    mount(none, place, none, MsFlags::MS_REC | flags, none)
        .map_err(|errno| PropagationError::Set { path: place.to_owned(), source: errno.into() })
}

fn copy_here(path: &Path) -> Result<OwnedFd, PropagationError> {
    kernel::copy_mounts(path).map_err(|source| PropagationError::Copy { path: path.to_owned(), source })
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
    fn the_last_propagation_option_counts_and_the_default_is_private() {
        assert_eq!(Propagation::of(&bind(&["rbind", "ro"])), Some(Propagation::Private));
        assert_eq!(Propagation::of(&bind(&["rbind", "rslave"])), Some(Propagation::Slave));
        assert_eq!(Propagation::of(&bind(&["rbind", "rprivate", "rshared"])), Some(Propagation::Shared));
        assert_eq!(Propagation::of(&bind(&["rslave"])), None);
    }
}

//! Mount propagation of each volume, which the container library does not know.
//!
//! It gives the whole root one propagation and every bind inherits what its source has. So each
//! volume is placed on the [stage](super::stage) with the propagation that it wants, and the library
//! binds from there:
//!
//! | a mount that wants | is staged as | the root becomes |
//! |---|---|---|
//! | rprivate (the default) | private copy, of the host's where mounts made there do not arrive here | private, slave or shared, as the strongest needs |
//! | rslave | slave of the host's | slave |
//! | rshared | peer of the host's, copied from the host's namespace | shared |
//!
//! With private volumes only, which is nearly every pod, nothing is staged where the host's mounts are shared:
//! the root is private.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use libcontainer::oci_spec::runtime::{Mount, Spec};
use nix::mount::{MsFlags, mount};

use crate::host_mounts::HostMounts;
use crate::kernel;

#[derive(Debug, thiserror::Error)]
pub(super) enum PropagationError {
    #[error("visit the host's mount namespace")]
    Visit(#[source] io::Error),
    #[error("copy the mounts at {}", .path.display())]
    Copy { path: PathBuf, source: io::Error },
    #[error("set the propagation of {}", .path.display())]
    Set { path: PathBuf, source: io::Error },
}

/// From weakest to strongest.
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

/// Gives the root the strongest propagation of all volumes.
pub(super) fn prepare(spec: &mut Spec) {
    let mounts = spec.mounts().as_deref().unwrap_or_default();
    let strongest = mounts.iter().filter_map(Propagation::of).max().unwrap_or(Propagation::Private);
    if let Some(linux) = spec.linux_mut() {
        linux.set_rootfs_propagation(Some(strongest.root().to_owned()));
    }
}

/// A detached copy of what a volume is, for its place on the stage. Our own namespace holds slaves of the
/// host's mounts, through which nothing goes back; a copy made in the host's is a peer of the original.
pub(super) fn copy(source: &Path, of_host: Option<&HostMounts>) -> Result<OwnedFd, PropagationError> {
    match of_host {
        Some(host) => host.visit(|| copy_of_ours(source)).map_err(PropagationError::Visit)?,
        None => copy_of_ours(source),
    }
}

/// Sets the propagation of what is on the stage.
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

fn copy_of_ours(path: &Path) -> Result<OwnedFd, PropagationError> {
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
    fn the_last_named_propagation_counts_and_none_is_private() {
        assert_eq!(Propagation::of(&bind(&["rbind", "ro"])), Some(Propagation::Private));
        assert_eq!(Propagation::of(&bind(&["rbind", "rslave"])), Some(Propagation::Slave));
        assert_eq!(Propagation::of(&bind(&["rbind", "rprivate", "rshared"])), Some(Propagation::Shared));
        assert_eq!(Propagation::of(&bind(&["rslave"])), None);
    }
}

//! Attributes of directories that a layer uses but does not describe.
//!
//! A layer may contain `tmp/x` without an entry for `tmp`. When this layer is unpacked alone, `tmp` becomes a plain
//! directory. overlayfs would show that directory instead of the lower layer's `tmp` with its sticky bit. If the
//! attributes differ, an additional top layer of directories repeats the attributes of the lower layer. The additional
//! layer is named by the digest of its archive like any other layer, so images share it, too.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;

use super::{LayerError, Layers, Lease, Source};
use crate::config::Limits;
use crate::digest::Digest;
use crate::unpack::{Attributes, LayerEntry, inspect_path, unpack};

/// Maximum lookups of directories in layers for one image. Each is a system call.
const LOOKUPS_MAX: usize = 20_000_000;

/// A layer's files, and the directories that it uses but does not describe.
struct LowerLayer {
    files: PathBuf,
    implied: BTreeSet<String>,
}

impl Layers {
    /// The additional layer for the top of these layers (lowest first), if one is needed.
    pub(super) async fn repeat_directory_attributes(
        self: &Arc<Layers>,
        order: &[Lease],
    ) -> Result<Option<Lease>, LayerError> {
        let lowers: Vec<LowerLayer> = order
            .iter()
            .map(|lease| LowerLayer {
                files: self.path(&lease.diff_id()),
                implied: self.meta(&lease.diff_id()).into_iter().flat_map(|meta| meta.implied).collect(),
            })
            .collect();
        let directories: usize = lowers.iter().map(|lower| lower.implied.len()).sum();
        if directories == 0 {
            return Ok(None);
        }
        check_lookups(directories, lowers.len())?;
        let stopped = |_panicked| LayerError::Stopped;
        let Some(archive) =
            tokio::task::spawn_blocking(move || archive(&lowers)).await.map_err(stopped)??
        else {
            return Ok(None);
        };
        let layers = self.clone();
        let local = Source::local();
        let lease = self.ensure(Digest::of(&archive), &local, async move || {
            let unpacking = tokio::task::spawn_blocking(move || {
                let unpack_dir = layers.unpack_dir()?;
                let unpacked = unpack(archive.as_slice(), &unpack_dir.files(), &Limits::default())
                    .map_err(LayerError::DirectoryAttributes)?;
                Ok((unpack_dir, unpacked))
            });
            unpacking.await.map_err(stopped)?
        });
        lease.await.map(Some)
    }
}

/// Refuses an image whose directories take too long to be compared.
fn check_lookups(directories: usize, layers: usize) -> Result<(), LayerError> {
    if directories.saturating_mul(layers) > LOOKUPS_MAX {
        return Err(LayerError::Directories { directories, layers });
    }
    Ok(())
}

/// An archive of all directories whose attributes would be hidden, and of their parents.
fn archive(lowers: &[LowerLayer]) -> Result<Option<Vec<u8>>, LayerError> {
    let implied: BTreeSet<&String> = lowers.iter().flat_map(|lower| &lower.implied).collect();
    let lost = implied.into_iter().filter(|path| {
        let described = described(lowers, path);
        described.is_some() && shown(lowers, path) != described
    });
    let mut paths = BTreeSet::new();
    for path in lost {
        let ends = path.match_indices('/').map(|(at, _)| at).chain([path.len()]);
        paths.extend(ends.map(|end| &path[..end]));
    }
    if paths.is_empty() {
        return Ok(None);
    }
    let mut builder = tar::Builder::new(Vec::new());
    for path in paths {
        // If no layer describes a directory, it keeps the attributes of the topmost layer.
        let Some(attributes) = described(lowers, path).or_else(|| shown(lowers, path)) else { continue };
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(tar::EntryType::Directory);
        header.set_mode(attributes.mode);
        header.set_uid(attributes.uid.into());
        header.set_gid(attributes.gid.into());
        header.set_mtime(0);
        header.set_size(0);
        builder.append_data(&mut header, path, std::io::empty()).map_err(LayerError::Archive)?;
    }
    builder.into_inner().map(Some).map_err(LayerError::Archive)
}

/// The attributes that overlayfs shows: the attributes in the topmost layer that has the directory.
fn shown(lowers: &[LowerLayer], path: &str) -> Option<Attributes> {
    lowers.iter().rev().find_map(|lower| match inspect_path(&lower.files, path) {
        LayerEntry::Directory(attributes) => Some(Some(attributes)),
        LayerEntry::Other => Some(None),
        LayerEntry::Absent => None,
    })?
}

/// The attributes in the topmost layer that describes the directory. `None` if a higher layer has a file
/// there.
fn described(lowers: &[LowerLayer], path: &str) -> Option<Attributes> {
    for lower in lowers.iter().rev() {
        match inspect_path(&lower.files, path) {
            LayerEntry::Directory(attributes) if !lower.implied.contains(path) => return Some(attributes),
            LayerEntry::Directory(_) | LayerEntry::Absent => {}
            LayerEntry::Other => return None,
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn directories_of_a_large_image_are_compared_and_those_of_a_hostile_image_are_not() {
        assert!(check_lookups(50_000, 127).is_ok());
        let refused = check_lookups(1_000_000, 500).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Rejected);
    }
}

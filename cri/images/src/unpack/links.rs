//! Hard links to files of lower layers.
//!
//! A layer is unpacked alone, so a hard link to a file of a lower layer is deferred. An empty placeholder file takes
//! the place of the link, and the layer's metadata records the target. Later entries of the archive act on the
//! placeholder. When an image is composed, `place` makes the links in a mount of all its layers up to this one.

use std::collections::{BTreeMap, HashSet};
use std::path::Path;

use nix::errno::Errno;
use serde::{Deserialize, Serialize};
use xattr::FileExt as _;

use super::error::{TooLarge, UnpackError, write_kind};
use super::root::{PlainPath, Root, errno, is_directory};
use super::times;
use crate::archive::Mtime;
use crate::config::Limits;
use crate::error::{ErrorKind, errno_kind};

/// Attribute with the number of the link that a placeholder file stands for. Images cannot set `trusted.`
/// attributes.
const PLACEHOLDER: &str = "trusted.coracle.link";
/// The unit of a file's allocated size.
const SECTOR: u64 = 512;

/// A hard link to a file of a lower layer. Names are bytes, as in the archive.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Link {
    /// Path of the link, without symbolic links.
    pub(crate) path: Vec<u8>,
    /// Path of the target. Symbolic links in it are followed, except in the last component.
    pub(crate) target: Vec<u8>,
}

/// Deferred links of a layer that is being unpacked.
#[derive(Default)]
pub(super) struct DeferredLinks(Vec<(PlainPath, PlainPath)>);

/// Errors of links to lower layers.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LinkError {
    #[error("the link {path:?} leads to {target:?}, which is not a file of this layer or of a lower layer")]
    Target { path: String, target: String },
    #[error("the target files of the layer's links are too large")]
    TooLarge(#[source] TooLarge),
    #[error("cannot make the link {path:?} to {target:?}")]
    Write {
        path: String,
        target: String,
        #[source]
        source: Errno,
    },
    #[error("cannot open the mount of the lower layers")]
    Open(#[source] Errno),
}

/// The state of making links.
struct LinkMaker {
    root: Root,
    /// Inodes of copies, so that each copy is counted once.
    copied: HashSet<u64>,
    bytes: u64,
    max_bytes: u64,
    /// Modification times of directories that get links. They are restored at the end, because making a link changes
    /// the time.
    times: BTreeMap<Vec<u8>, Mtime>,
}

// === impl LinkError ===

impl LinkError {
    /// The kind of this error.
    pub(crate) fn kind(&self) -> ErrorKind {
        match self {
            LinkError::Target { .. } | LinkError::TooLarge(_) => ErrorKind::Rejected,
            LinkError::Write { source, .. } => write_kind(*source),
            LinkError::Open(source) => errno_kind(*source),
        }
    }
}

// === impl Link ===

impl Link {
    fn names(&self) -> (String, String) {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        (text(&self.path), text(&self.target))
    }

    fn no_target(&self) -> LinkError {
        let (path, target) = self.names();
        LinkError::Target { path, target }
    }

    fn failed(&self, source: Errno) -> LinkError {
        let (path, target) = self.names();
        LinkError::Write { path, target, source }
    }
}

// === impl DeferredLinks ===

impl DeferredLinks {
    /// Whether the file at a path is a placeholder.
    pub(super) fn is_placeholder(&self, root: &Root, path: &PlainPath) -> bool {
        !self.0.is_empty() && number(root, path).is_some()
    }

    /// Creates a placeholder for a link.
    pub(super) fn add(&mut self, root: &mut Root, path: &PlainPath, target: &PlainPath) -> Result<(), Errno> {
        let file = root.make_file(path)?;
        file.set_xattr(PLACEHOLDER, self.0.len().to_string().as_bytes()).map_err(errno)?;
        self.0.push((root.real_path(&file)?, target.clone()));
        Ok(())
    }

    /// The links that no later entry replaced.
    pub(super) fn finish(self, root: &Root) -> Result<Vec<Link>, UnpackError> {
        let mut links = Vec::new();
        for (own, (path, target)) in self.0.iter().enumerate() {
            if number(root, path) != Some(own) {
                continue;
            }
            // The link refers to a file of a lower layer. A file of that name in this layer, after the link, would hide
            // the file of the lower layer.
            let in_this_layer = root.find(target).map_err(|source| super::cannot_write(path, source))?;
            if in_this_layer.is_some() && number(root, target).is_none_or(|other| other >= own) {
                return Err(UnpackError::LinkOrder { path: path.display(), target: target.display() });
            }
            links.push(Link { path: path.as_bytes().to_owned(), target: target.as_bytes().to_owned() });
        }
        Ok(links)
    }
}

fn number(root: &Root, path: &PlainPath) -> Option<usize> {
    String::from_utf8(root.attribute(path, PLACEHOLDER)?).ok()?.parse().ok()
}

// === impl LinkMaker ===

impl LinkMaker {
    fn link(&mut self, link: &Link) -> Result<(), LinkError> {
        let (Some(path), Some(target)) = (PlainPath::new(&link.path), PlainPath::new(&link.target)) else {
            return Err(link.no_target());
        };
        let found = self.root.find(&target).map_err(|e| link.failed(e))?;
        let found = found.filter(|found| !is_directory(found)).ok_or_else(|| link.no_target())?;
        if !self.copied.contains(&found.st_ino) {
            self.bytes += found.st_blocks.unsigned_abs() * SECTOR;
            if self.bytes > self.max_bytes {
                return Err(LinkError::TooLarge(TooLarge::Bytes(self.max_bytes)));
            }
        }
        let (parent, _) = path.split();
        if !self.times.contains_key(parent.as_bytes()) {
            let time = self.root.existing_directory(&parent).and_then(times::get);
            let time = time.map_err(|e| link.failed(e))?;
            self.times.insert(parent.as_bytes().to_owned(), time);
        }
        self.root.make_hard_link(&path, &target).map_err(|e| link.failed(e))?;
        // overlayfs copies a lower file with several names once for each name that gets a link. Before the copies, all
        // names have the same inode number. So the number is read after the copy.
        let made = self.root.find(&path).map_err(|e| link.failed(e))?;
        self.copied.extend(made.map(|made| made.st_ino));
        Ok(())
    }

    fn finish(self) {
        for (path, time) in &self.times {
            let Some(path) = PlainPath::new(path) else { continue };
            let directory = self.root.existing_directory(&path);
            if let Err(error) = directory.and_then(|directory| times::set(&directory, *time)) {
                tracing::debug!(path = path.display(), %error, "cannot set a directory's time");
            }
        }
    }
}

/// Makes the deferred links, in order, in a mount of an image's layers, up to the layer with the links.
pub(crate) fn place(view: &Path, links: &[Link], limits: &Limits) -> Result<(), LinkError> {
    let root = Root::open(view).map_err(LinkError::Open)?;
    let max_bytes = limits.layer_bytes;
    let mut maker = LinkMaker { root, copied: HashSet::new(), bytes: 0, max_bytes, times: BTreeMap::new() };
    links.iter().try_for_each(|link| maker.link(link))?;
    maker.finish();
    Ok(())
}

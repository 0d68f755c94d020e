//! Hard links to files that a layer does not have itself, but one below it has.
//!
//! A layer is unpacked on its own, so such a link waits: an empty file stands in for it, and the layer's mark says
//! where it leads. What later entries of the archive do to the link they do to that file. When an image is composed,
//! `place` makes the links in a view of all its layers up to this one.

use std::collections::{BTreeMap, HashSet};
use std::path::Path;

use nix::errno::Errno;
use nix::sys::stat::{fstat, futimens};
use nix::sys::time::TimeSpec;
use serde::{Deserialize, Serialize};
use xattr::FileExt as _;

use super::root::{PlainPath, Root, errno, is_directory};
use super::{TooLarge, UnpackError};
use crate::config::Limits;

/// Which waiting link a file stands in for: its number. No image can set attributes of this kind.
const STANDS_IN: &str = "trusted.coracle.link";
/// The unit of a file's allocated size.
const SECTOR: u64 = 512;

/// A hard link whose target a lower layer has. Names are bytes, as in the archive.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Link {
    /// Where the link is: no part of it is a symbolic link.
    pub(crate) path: Vec<u8>,
    /// Where it leads; only its last part is not followed.
    pub(crate) target: Vec<u8>,
}

/// Links that wait, while their layer is unpacked.
#[derive(Default)]
pub(super) struct Waiting(Vec<(PlainPath, PlainPath)>);

/// Why a link to a lower layer cannot be made.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LinkError {
    #[error("the link {path:?} leads to {target:?}, which is no file of this layer or of those below it")]
    Target { path: String, target: String },
    #[error("the files that its links lead to are copied")]
    TooLarge(#[source] TooLarge),
    #[error("cannot make the link {path:?} to {target:?}")]
    Write {
        path: String,
        target: String,
        #[source]
        source: Errno,
    },
    #[error("cannot look into the layers below")]
    Open(#[source] Errno),
}

/// Links being made.
struct Placing {
    root: Root,
    /// What was copied, by inode: each file once.
    copied: HashSet<u64>,
    bytes: u64,
    most: u64,
    /// Of directories that get links: a link is no news of the image's.
    times: BTreeMap<Vec<u8>, TimeSpec>,
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

// === impl Waiting ===

impl Waiting {
    /// Whether there is no real file at a path, but one that stands in for a link.
    pub(super) fn stands_in(&self, root: &Root, path: &PlainPath) -> bool {
        !self.0.is_empty() && number(root, path).is_some()
    }

    /// Puts a file where a link will be.
    pub(super) fn add(&mut self, root: &mut Root, path: &PlainPath, target: &PlainPath) -> Result<(), Errno> {
        let file = root.make_file(path)?;
        file.set_xattr(STANDS_IN, self.0.len().to_string().as_bytes()).map_err(errno)?;
        self.0.push((root.whereabouts(&file)?, target.clone()));
        Ok(())
    }

    /// The links that no later entry replaced.
    pub(super) fn finish(self, root: &Root) -> Result<Vec<Link>, UnpackError> {
        let mut links = Vec::new();
        for (own, (path, target)) in self.0.iter().enumerate() {
            if number(root, path) != Some(own) {
                continue;
            }
            // A target that came after the link is not what it means, and hides that.
            let there = root.find(target).map_err(|source| super::cannot_write(path, source))?;
            if there.is_some() && number(root, target).is_none_or(|other| other >= own) {
                return Err(UnpackError::LinkOrder { path: path.display(), target: target.display() });
            }
            links.push(Link { path: path.as_bytes().to_owned(), target: target.as_bytes().to_owned() });
        }
        Ok(links)
    }
}

fn number(root: &Root, path: &PlainPath) -> Option<usize> {
    String::from_utf8(root.attribute(path, STANDS_IN)?).ok()?.parse().ok()
}

// === impl Placing ===

impl Placing {
    fn link(&mut self, link: &Link) -> Result<(), LinkError> {
        let (Some(path), Some(target)) = (PlainPath::new(&link.path), PlainPath::new(&link.target)) else {
            return Err(link.no_target());
        };
        let found = self.root.find(&target).map_err(|e| link.failed(e))?;
        let found = found.filter(|found| !is_directory(found)).ok_or_else(|| link.no_target())?;
        if self.copied.insert(found.st_ino) {
            self.bytes += found.st_blocks.unsigned_abs() * SECTOR;
            if self.bytes > self.most {
                return Err(LinkError::TooLarge(TooLarge::Bytes(self.most)));
            }
        }
        let (parent, _) = path.split();
        if !self.times.contains_key(parent.as_bytes()) {
            let time = self.root.existing_directory(&parent).and_then(|directory| fstat(&directory));
            let time = time.map_err(|e| link.failed(e))?;
            self.times.insert(parent.as_bytes().to_owned(), TimeSpec::new(time.st_mtime, time.st_mtime_nsec));
        }
        self.root.make_hard_link(&path, &target).map_err(|e| link.failed(e))
    }

    fn finish(self) {
        for (path, time) in &self.times {
            let Some(path) = PlainPath::new(path) else { continue };
            let directory = self.root.existing_directory(&path);
            if let Err(error) = directory.and_then(|directory| futimens(&directory, time, time)) {
                tracing::debug!(path = path.display(), %error, "cannot set a directory's time");
            }
        }
    }
}

/// Makes waiting links, in their order, in a directory that shows an image up to the layer that has them.
pub(crate) fn place(view: &Path, links: &[Link], limits: &Limits) -> Result<(), LinkError> {
    let root = Root::open(view).map_err(LinkError::Open)?;
    let most = limits.layer_bytes;
    let mut placing = Placing { root, copied: HashSet::new(), bytes: 0, most, times: BTreeMap::new() };
    links.iter().try_for_each(|link| placing.link(link))?;
    placing.finish();
    Ok(())
}

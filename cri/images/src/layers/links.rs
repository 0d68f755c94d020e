//! Composes the layers of an image: hard links to files of lower layers, and attributes of directories
//! (`directory_attributes.rs`).
//!
//! A layer may contain a hard link to a file of a lower layer (`unpack/links.rs`). Layers are shared, and the
//! same layer may have other layers below it in another image. So its links cannot be made in the layer
//! itself. An additional layer directly above it contains the links together with their target files.
//!
//! The links are made in an overlayfs mount of the layers, so overlayfs writes the additional layer. Other runtimes
//! make such links in a mount too. File and link are then one inode with all attributes of the lower file. The layer's
//! name is the digest of the list of layers below, so images share the additional layer. It is counted and removed like
//! any other layer.

use std::collections::HashSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};

use super::{LayerError, Layers, Lease, Source, UnpackDir, disk};
use crate::config::Limits;
use crate::digest::Digest;
use crate::unpack::{Link, LinkError, Unpacked, place};

/// Maximum bytes of a mount's options, including the terminating NUL: one page.
const OPTIONS_MAX: usize = 4096;

impl Layers {
    /// Completes the layers of an image, lowest first: adds layers for links and for attributes of
    /// directories.
    pub(crate) async fn compose(self: &Arc<Layers>, order: Vec<Lease>) -> Result<Vec<Lease>, LayerError> {
        let mut leases: Vec<Lease> = Vec::new();
        for lease in order {
            let links = self.meta(&lease.diff_id()).map(|meta| meta.links).unwrap_or_default();
            leases.push(lease);
            if !links.is_empty() {
                let ids: Vec<Digest> = leases.iter().map(Lease::diff_id).collect();
                leases.push(self.linked(ids, links).await?);
            }
        }
        let attributes = self.repeat_directory_attributes(&leases).await?;
        leases.extend(attributes);
        Ok(leases)
    }

    /// The additional layer with the links of the topmost of these layers.
    async fn linked(self: &Arc<Layers>, ids: Vec<Digest>, links: Vec<Link>) -> Result<Lease, LayerError> {
        let layers = self.clone();
        let name = name(&ids);
        let local = Source::local();
        let lease = self.ensure(name, &local, async move || {
            let making = tokio::task::spawn_blocking(move || {
                let unpack_dir = layers.unpack_dir()?;
                match layers.link(&unpack_dir, &ids, &links) {
                    Ok(made) => Ok((unpack_dir, Unpacked { diff_id: name, ..made })),
                    Err(error) => {
                        unpack_dir.discard();
                        Err(error)
                    }
                }
            });
            making.await.map_err(|_panicked| LayerError::Stopped)?
        });
        lease.await
    }

    fn link(&self, unpack_dir: &UnpackDir, ids: &[Digest], links: &[Link]) -> Result<Unpacked, LayerError> {
        let Some(layer) = ids.last().copied() else { return Err(LayerError::Stopped) };
        let [work, view] = ["work", "view"].map(|name| unpack_dir.path.join(name));
        for path in [&work, &view] {
            disk::make_private(path)?;
        }
        let unpack_path =
            Path::new("..").join("partial").join(unpack_dir.path.file_name().unwrap_or_default());
        let composed = ComposedMount {
            layers: &self.layers,
            options: options(&unpack_path, ids),
            at: unpack_path.join("view"),
            limits: Limits::default(),
        };
        if composed.options.len() >= OPTIONS_MAX {
            return Err(LayerError::Deep { layer, count: ids.len() });
        }
        let failed = |source| LayerError::View { layer, source };
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("links".to_owned());
            let linking = thread.spawn_scoped(scope, || composed.link(links));
            let linking = linking.map_err(|_refused| failed(Errno::EAGAIN))?;
            linking.join().map_err(|_panicked| LayerError::Stopped)?.map_err(failed)
        })?
        .map_err(|source| LayerError::Link { layer: layer.into(), source })?;
        for path in [&work, &view] {
            disk::remove_tree(path)?;
        }
        let files = unpack_dir.files();
        let made = LayerFacts::of(&files);
        let made = made.map_err(|source| LayerError::Disk { verb: "read", path: files, source })?;
        Ok(made.unpacked(layer))
    }
}

/// A mount of the layers as in an image. Changes are written into the new layer.
struct ComposedMount<'a> {
    layers: &'a Path,
    options: String,
    at: PathBuf,
    limits: Limits,
}

/// Size and directories of the new layer.
#[derive(Default)]
struct LayerFacts {
    inodes: HashSet<u64>,
    bytes: u64,
    directories: Vec<String>,
}

// === impl ComposedMount ===

impl ComposedMount<'_> {
    /// Makes the links. Must be called on a separate thread. The mount is in a namespace that ends with the thread, so
    /// it is invisible elsewhere and cannot be left over.
    fn link(&self, links: &[Link]) -> Result<Result<(), LinkError>, Errno> {
        unshare(CloneFlags::CLONE_NEWNS)?;
        mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>)?;
        nix::unistd::chdir(self.layers)?;
        let flags = MsFlags::MS_NODEV | MsFlags::MS_NOEXEC | MsFlags::MS_NOATIME;
        mount(Some("overlay"), &self.at, Some("overlay"), flags, Some(self.options.as_str()))?;
        let placed = place(&self.at, links, &self.limits);
        umount2(&self.at, MntFlags::empty())?;
        Ok(placed)
    }
}

// === impl LayerFacts ===

impl LayerFacts {
    /// Measures a layer. The walk supports any depth, because the image determines the depth of the directories. An
    /// unreadable directory is an error: its directories would be missing in the list, and would get wrong attributes.
    fn of(files: &Path) -> io::Result<Self> {
        let (mut made, mut path) = (Self::default(), Vec::new());
        coracle_tree::walk_all(files, |found| {
            path.truncate(found.depth);
            path.push(found.name.to_string_lossy().into_owned());
            if made.inodes.insert(found.stat.st_ino) {
                made.bytes += u64::try_from(found.stat.st_blocks).unwrap_or_default() * 512;
            }
            if found.stat.st_mode & libc::S_IFMT == libc::S_IFDIR {
                made.directories.push(path.join("/"));
            }
        })?;
        made.directories.sort_unstable();
        Ok(made)
    }

    /// All its directories count as implied: they have the attributes of lower layers.
    fn unpacked(self, diff_id: Digest) -> Unpacked {
        let inodes = self.inodes.len() as u64;
        Unpacked { diff_id, bytes: self.bytes, inodes, implied: self.directories, links: Vec::new() }
    }
}

/// The name of the additional layer for the topmost of these layers.
fn name(ids: &[Digest]) -> Digest {
    let lines = ids.iter().map(|id| format!("{id}\n"));
    Digest::of(std::iter::once("links of layers\n".to_owned()).chain(lines).collect::<String>().as_bytes())
}

/// Mount options with relative paths, which keeps them short.
fn options(unpack_path: &Path, ids: &[Digest]) -> String {
    let lower: Vec<String> = ids.iter().rev().map(|id| format!("{}/{}", id.short(), disk::FILES)).collect();
    let (upper, work) = (unpack_path.join(disk::FILES), unpack_path.join("work"));
    // With these options off, copied files are complete and have no attributes that only this mount understands.
    format!(
        "lowerdir={},upperdir={},workdir={},index=off,metacopy=off,redirect_dir=off",
        lower.join(":"),
        upper.display(),
        work.display()
    )
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_layer_with_paths_above_the_kernels_limit_is_measured() {
        let layer = tempfile::tempdir().unwrap();
        let (down, next) = (layer.path().join("down"), layer.path().join("next"));
        fs::create_dir(&down).unwrap();
        fs::write(down.join("file"), "content").unwrap();
        fs::hard_link(down.join("file"), down.join("link")).unwrap();
        for _ in 0..30 {
            // The existing tree moves one level down.
            fs::create_dir(&next).unwrap();
            fs::rename(&down, next.join("d".repeat(200))).unwrap();
            fs::rename(&next, &down).unwrap();
        }
        let made = LayerFacts::of(layer.path()).unwrap();
        assert_eq!((made.inodes.len(), made.directories.len()), (32, 31));
        assert_eq!(made.directories[0], "down");
    }

    /// Makes hard links with these targets. A lower file of 32 KiB has the names `n0` to `n7`. The limit of copies is
    /// 200 KB.
    fn link_to_names_of_one_file(targets: &[&str]) -> Result<(), LinkError> {
        let layers = tempfile::tempdir().unwrap();
        let path = |name: &str| layers.path().join(name);
        for name in ["lower", "upper", "work", "view"] {
            fs::create_dir(path(name)).unwrap();
        }
        fs::write(path("lower/n0"), vec![1; 32 << 10]).unwrap();
        for number in 1..8 {
            fs::hard_link(path("lower/n0"), path(&format!("lower/n{number}"))).unwrap();
        }
        let options = "lowerdir=lower,upperdir=upper,workdir=work,index=off,metacopy=off,redirect_dir=off";
        let composed = ComposedMount {
            layers: layers.path(),
            options: options.to_owned(),
            at: "view".into(),
            limits: Limits { layer_bytes: 200_000, ..Limits::default() },
        };
        let links = targets.iter().enumerate();
        let links = links.map(|(number, target)| Link {
            path: format!("link{number}").into_bytes(),
            target: target.as_bytes().to_owned(),
        });
        let links: Vec<Link> = links.collect();
        std::thread::scope(|scope| scope.spawn(|| composed.link(&links)).join()).unwrap().unwrap()
    }

    #[test]
    fn each_name_of_a_lower_file_counts_as_a_copy() {
        let error = link_to_names_of_one_file(&["n0", "n1", "n2", "n3", "n4", "n5", "n6", "n7"]);
        assert!(matches!(error, Err(LinkError::TooLarge(_))), "{error:?}");
        // One copy with several links counts once.
        link_to_names_of_one_file(&["n0", "n0", "n0", "n0", "link0", "link4", "n1", "n1"]).unwrap();
    }

    #[test]
    fn a_layer_with_an_unreadable_directory_is_an_error() {
        use std::os::unix::fs::PermissionsExt as _;
        let layer = tempfile::tempdir().unwrap();
        let hidden = layer.path().join("hidden");
        fs::create_dir_all(hidden.join("below")).unwrap();
        for (path, mode) in [(layer.path(), 0o755), (hidden.as_path(), 0)] {
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        }
        let made = std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                // This changes the user of only this thread. Root could read the directory.
                nix::unistd::setfsuid(nix::unistd::Uid::from_raw(65534));
                LayerFacts::of(layer.path()).map(|made| made.directories)
            });
            thread.join().unwrap()
        });
        assert_eq!(made.unwrap_err().kind(), io::ErrorKind::PermissionDenied);
    }
}

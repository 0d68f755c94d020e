//! Makes a container's working directory: the container library requires that it exists.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Component, Path, PathBuf};

use libcontainer::oci_spec::runtime::{Mount, Spec};
use nix::errno::Errno;
use nix::fcntl::AtFlags;
use nix::sys::stat::{Mode, mkdirat};
use nix::unistd::{Gid, Uid, fchownat};

use crate::kernel;
use crate::user_namespace::Owner;

/// The place of the working directory: a base directory, and a path below it. If the working directory is in a volume,
/// the base is the volume's source, because the volume covers the root at this path. `None` if the directory cannot be
/// made.
fn place<'a>(spec: &'a Spec, root: &'a Path, cwd: &'a Path) -> Option<(&'a Path, PathBuf)> {
    let mounts = spec.mounts().as_deref().unwrap_or_default();
    let enclosing = mounts.iter().filter(|mount| cwd.starts_with(mount.destination()));
    let deepest = enclosing.max_by_key(|mount| mount.destination().components().count());
    match deepest {
        None => Some((root, cwd.to_owned())),
        // The container cannot write this volume. So the directory is not made, although this process can write the
        // source. The library reports the missing directory.
        Some(mount) if is_read_only(mount) => None,
        Some(mount) if is_bind(mount) => {
            let below = cwd.strip_prefix(mount.destination()).unwrap_or(Path::new("")).to_owned();
            mount.source().as_deref().map(|source| (source, below))
        }
        // The working directory is in a file system that is mounted later, such as a tmpfs.
        Some(_) => None,
    }
}

fn is_bind(mount: &Mount) -> bool {
    mount.typ().as_deref() == Some("bind") || has_option(mount, &["bind", "rbind"])
}

fn is_read_only(mount: &Mount) -> bool {
    has_option(mount, &["ro", "rro"])
}

fn has_option(mount: &Mount, any_of: &[&str]) -> bool {
    mount.options().iter().flatten().any(|option| any_of.contains(&option.as_str()))
}

/// Makes the missing directories of the path. Links resolve as they do inside the container.
pub(super) fn make(spec: &Spec, root: &Path, owner: Owner) -> Result<(), (PathBuf, io::Error)> {
    let Some(process) = spec.process() else { return Ok(()) };
    let cwd = process.cwd();
    let Some((base, path)) = place(spec, root, cwd) else { return Ok(()) };
    if !base.exists() {
        // The base is a read-only image volume, or the source of the volume is missing. The library reports a missing source.
        return Ok(());
    }
    // In a volume with mapped ids, the files of uid 0 belong to the root user of the container.
    let owner = if base != root && has_mapped_ids(spec, base) { Owner::default() } else { owner };
    match make_in(base, &path, owner) {
        // The volume is read-only. The library reports the missing directory.
        Err(error) if error.raw_os_error() == Some(libc::EROFS) => Ok(()),
        result => result.map_err(|error| (cwd.clone(), error)),
    }
}

fn has_mapped_ids(spec: &Spec, source: &Path) -> bool {
    let mut mounts = spec.mounts().iter().flatten();
    mounts.any(|mount| mount.source().as_deref() == Some(source) && mount.uid_mappings().is_some())
}

fn make_in(base: &Path, path: &Path, owner: Owner) -> io::Result<()> {
    // A volume can be a file. O_DIRECTORY refuses a file, because the open of a FIFO would wait for a writer.
    let base: OwnedFd =
        std::fs::File::options().read(true).custom_flags(libc::O_DIRECTORY).open(base)?.into();
    let mut made = PathBuf::from("/");
    for part in path.components() {
        let Component::Normal(name) = part else { continue };
        let next = made.join(name);
        match kernel::open_in_root(&base, &next, libc::O_PATH | libc::O_DIRECTORY) {
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let parent = kernel::open_in_root(&base, &made, libc::O_PATH | libc::O_DIRECTORY)?;
                match mkdirat(&parent, name, Mode::from_bits_truncate(0o755)) {
                    Ok(()) => {
                        let (uid, gid) = (Uid::from_raw(owner.uid), Gid::from_raw(owner.gid));
                        fchownat(&parent, name, Some(uid), Some(gid), AtFlags::AT_SYMLINK_NOFOLLOW)?;
                    }
                    // Another container with the same volume has made the directory in the meantime, or the name is a
                    // dangling link. The open of a dangling link fails.
                    Err(Errno::EEXIST) => {
                        kernel::open_in_root(&base, &next, libc::O_PATH | libc::O_DIRECTORY)?;
                    }
                    Err(error) => return Err(error.into()),
                }
            }
            Err(error) => return Err(error),
        }
        made = next;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(json: serde_json::Value) -> Spec {
        serde_json::from_value(json).unwrap()
    }

    #[test]
    fn the_directory_is_made_below_the_deepest_volume() {
        let spec = spec(serde_json::json!({
            "ociVersion": "1.2.0",
            "mounts": [
                { "destination": "/data", "type": "bind", "source": "/vol/a", "options": ["rbind"] },
                { "destination": "/data/tmp", "type": "tmpfs", "source": "tmpfs" },
                { "destination": "/ro", "type": "bind", "source": "/vol/b", "options": ["rbind", "ro"] },
                { "destination": "/rro", "type": "bind", "source": "/vol/c", "options": ["rbind", "rro"] },
            ],
        }));
        let place = |cwd: &str| {
            place(&spec, Path::new("/root-of-it"), Path::new(cwd)).map(|(base, path)| (base.to_owned(), path))
        };
        assert_eq!(place("/srv/x"), Some(("/root-of-it".into(), "/srv/x".into())));
        assert_eq!(place("/data/x"), Some(("/vol/a".into(), "x".into())));
        assert_eq!(place("/data/tmp/x"), None);
        assert_eq!((place("/ro/x"), place("/rro/x")), (None, None));
        assert_eq!(place("/database"), Some(("/root-of-it".into(), "/database".into())));
    }

    #[test]
    fn a_link_in_an_image_cannot_lead_outside_it() {
        let base = std::env::temp_dir().join(format!("coracle-cwd-{}", std::process::id()));
        let outside = base.join("outside");
        let root = base.join("root");
        std::fs::create_dir_all(root.join("inside")).unwrap();
        std::fs::create_dir_all(&outside).unwrap();
        std::os::unix::fs::symlink(&outside, root.join("out")).unwrap();
        std::os::unix::fs::symlink("/inside", root.join("in")).unwrap();
        assert!(make_in(&root, Path::new("/out/x"), Owner::default()).is_err());
        make_in(&root, Path::new("/in/a/b"), Owner::default()).unwrap();
        assert!(root.join("inside/a/b").is_dir());
        assert_eq!(std::fs::read_dir(&outside).unwrap().count(), 0);
        std::fs::remove_dir_all(base).unwrap();
    }

    #[test]
    fn a_volume_that_is_a_fifo_does_not_block() {
        let fifo = std::env::temp_dir().join(format!("coracle-cwd-fifo-{}", std::process::id()));
        nix::unistd::mkfifo(&fifo, Mode::S_IRWXU).unwrap();
        let refused = make_in(&fifo, Path::new("/x"), Owner::default());
        std::fs::remove_file(&fifo).unwrap();
        assert_eq!(refused.unwrap_err().kind(), io::ErrorKind::NotADirectory);
    }

    #[test]
    fn containers_with_one_volume_make_the_same_directory_at_the_same_time() {
        const CONTAINERS: usize = 4;
        let base = std::env::temp_dir().join(format!("coracle-cwd-shared-{}", std::process::id()));
        std::fs::create_dir_all(&base).unwrap();
        let owner = Owner { uid: nix::unistd::geteuid().as_raw(), gid: nix::unistd::getegid().as_raw() };
        for round in 0..100 {
            let (path, barrier) = (format!("/{round}/a/b"), std::sync::Barrier::new(CONTAINERS));
            let make = || {
                barrier.wait();
                make_in(&base, Path::new(&path), owner)
            };
            std::thread::scope(|scope| {
                let all: Vec<_> = (0..CONTAINERS).map(|_| scope.spawn(make)).collect();
                all.into_iter().for_each(|one| one.join().unwrap().unwrap());
            });
        }
        assert!(base.join("99/a/b").is_dir());
        std::os::unix::fs::symlink("absent", base.join("dangling")).unwrap();
        assert!(make_in(&base, Path::new("/dangling/x"), owner).is_err());
        std::fs::remove_dir_all(base).unwrap();
    }
}

//! Locks of names in a network namespace: bridge, nftables table, route protocol number.
//!
//! Two networks with the same bridge or table, or two overlays with the same route protocol number, would remove each
//! other's objects. Each name is a file lock in a directory that belongs to root. The file's name contains the inode of
//! the network namespace. Abstract sockets have the same scope, but a process in a pod with the node's network can bind
//! them, too. The kernel releases the lock of a process that ends. Plugin executables take no lock: they remove only
//! objects of their own attachment.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use tokio::time::Instant;

use crate::error::Error;
use crate::netns;

/// Directory of the locks. Not the run directory: two networks with the same bridge have different run directories.
const DIRECTORY: &str = "/run/coracle-networks";

/// Maximum wait for the locks of a process that is about to exit.
const MAX_WAIT: Duration = Duration::from_secs(5);
/// Interval of attempts to get the locks.
const RETRY_INTERVAL: Duration = Duration::from_millis(20);

/// Locks of a network or an overlay. Dropping releases them.
#[derive(Debug)]
pub(crate) struct NameLocks {
    _locks: Vec<Lock>,
}

/// A name that must be unique in a network namespace.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SharedName<'a> {
    /// The kind of object, for errors: `bridge`.
    pub(crate) kind: &'static str,
    pub(crate) name: &'a str,
    /// The flag that changes the name.
    pub(crate) setting: &'static str,
}

/// A locked file. The drop removes the file before it unlocks it.
#[derive(Debug)]
struct Lock {
    _file: Flock<File>,
    path: PathBuf,
}

// === impl NameLocks ===

impl NameLocks {
    /// Locks these names.
    ///
    /// # Errors
    /// [`Error::NameInUse`] when another process holds one of the locks. [`Error::Name`] when a lock cannot be taken.
    pub(crate) async fn take(wanted: &[SharedName<'_>]) -> Result<Self, Error> {
        Self::take_in(Path::new(DIRECTORY), wanted).await
    }

    async fn take_in(directory: &Path, wanted: &[SharedName<'_>]) -> Result<Self, Error> {
        let failed = |names: &[SharedName<'_>], path: &Path, source| {
            let objects: Vec<String> =
                names.iter().map(|name| format!("{} {}", name.kind, name.name)).collect();
            Error::Name { object: objects.join(" and "), path: path.to_owned(), source }
        };
        open(directory).map_err(|source| failed(wanted, directory, source))?;
        let namespace = netns::id(Path::new("/proc/thread-self/ns/net")).unwrap_or_default();
        let mut locks = Vec::new();
        for wanted in wanted {
            let SharedName { kind, name, setting } = *wanted;
            let path = directory.join(file_name(namespace, kind, name));
            match take(&path).await.map_err(|source| failed(std::slice::from_ref(wanted), &path, source))? {
                Some(lock) => locks.push(lock),
                None => return Err(Error::NameInUse { what: kind, name: name.to_owned(), setting }),
            }
        }
        Ok(Self { _locks: locks })
    }
}

/// Makes the directory, and removes files of processes that were killed.
fn open(directory: &Path) -> io::Result<()> {
    match DirBuilder::new().mode(0o700).create(directory) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    let found = fs::symlink_metadata(directory)?;
    if !found.is_dir() || found.uid() != nix::unistd::geteuid().as_raw() || found.mode() & 0o077 != 0 {
        return Err(io::Error::other("it is not a directory of this user alone (mode 0700)"));
    }
    for entry in fs::read_dir(directory)?.flatten() {
        // Dropping a lock removes its file.
        drop(Lock::try_take(&entry.path(), false));
    }
    Ok(())
}

/// Returns `None` if another process holds the file.
async fn take(path: &Path) -> io::Result<Option<Lock>> {
    let end = Instant::now() + MAX_WAIT;
    loop {
        match Lock::try_take(path, true)? {
            None if Instant::now() < end => tokio::time::sleep(RETRY_INTERVAL).await,
            taken => return Ok(taken),
        }
    }
}

/// File name of a lock: one component of a path, unique for each kind and name.
fn file_name(namespace: u64, kind: &str, name: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    let name = name.bytes().map(|byte| match byte {
        byte if plain(byte) => char::from(byte).to_string(),
        byte => format!("%{byte:02x}"),
    });
    format!("{namespace}:{}:{}", kind.replace(' ', "-"), name.collect::<String>())
}

// === impl Lock ===

impl Lock {
    fn try_take(path: &Path, create: bool) -> io::Result<Option<Self>> {
        loop {
            let mut how = OpenOptions::new();
            how.write(true).create(create).mode(0o600).custom_flags(libc::O_NOFOLLOW);
            let file = match Flock::lock(how.open(path)?, FlockArg::LockExclusiveNonblock) {
                Ok(file) => file,
                Err((_, Errno::EWOULDBLOCK)) => return Ok(None),
                Err((_, errno)) => return Err(errno.into()),
            };
            // The previous holder may have removed the file since it was opened.
            let is_linked = fs::symlink_metadata(path).is_ok_and(|found| {
                file.metadata().is_ok_and(|own| (own.dev(), own.ino()) == (found.dev(), found.ino()))
            });
            if is_linked {
                return Ok(Some(Self { _file: file, path: path.to_owned() }));
            }
            if !create {
                return Ok(None);
            }
        }
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // If the removal fails, the next holder locks the file, or the next start removes it.
        let _ignored = fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bridge(name: &str) -> SharedName<'_> {
        SharedName { kind: "bridge", name, setting: "--bridge" }
    }

    fn names(name: &str) -> [SharedName<'_>; 2] {
        [bridge(name), SharedName { kind: "nftables table", name: "t", setting: "--nft-table" }]
    }

    #[tokio::test(start_paused = true)]
    async fn a_name_is_held_once_until_its_holder_ends() {
        let dir = tempfile::tempdir().unwrap();
        let locks = dir.path().join("locks");
        let first = NameLocks::take_in(&locks, &names("b0")).await.unwrap();
        let refused = NameLocks::take_in(&locks, &names("b0")).await.unwrap_err();
        assert!(matches!(refused, Error::NameInUse { what: "bridge", .. }), "{refused}");
        assert_eq!(fs::read_dir(&locks).unwrap().count(), 2);
        drop(first);
        assert_eq!(fs::read_dir(&locks).unwrap().count(), 0);
        drop(NameLocks::take_in(&locks, &names("b0")).await.unwrap());
    }

    #[tokio::test(start_paused = true)]
    async fn lock_files_of_killed_holders_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let locks = dir.path().join("locks");
        let held = NameLocks::take_in(&locks, &names("b0")).await.unwrap();
        fs::write(locks.join("7:bridge:killed"), "").unwrap();
        let _other = NameLocks::take_in(&locks, &[bridge("b1")]).await.unwrap();
        assert_eq!(fs::read_dir(&locks).unwrap().count(), 3);
        drop(held);
    }

    #[tokio::test]
    async fn errors_name_the_object_the_file_and_the_cause() {
        use std::os::unix::fs::PermissionsExt as _;
        let dir = tempfile::tempdir().unwrap();
        let locks = dir.path().join("locks");
        drop(NameLocks::take_in(&locks, &names("b0")).await.unwrap());
        let shown = locks.display();
        fs::set_permissions(&locks, fs::Permissions::from_mode(0o777)).unwrap();
        let error = NameLocks::take_in(&locks, &names("b0")).await.unwrap_err().chain();
        let object = "cannot reserve bridge b0 and nftables table t: cannot lock";
        assert_eq!(error, format!("{object} {shown}: it is not a directory of this user alone (mode 0700)"));
        fs::set_permissions(&locks, fs::Permissions::from_mode(0o700)).unwrap();
        let namespace = netns::id(Path::new("/proc/thread-self/ns/net")).unwrap_or_default();
        let path = locks.join(file_name(namespace, "bridge", "b0"));
        fs::create_dir(&path).unwrap();
        let error = NameLocks::take_in(&locks, &names("b0")).await.unwrap_err().chain();
        let start = format!("cannot reserve bridge b0: cannot lock {}: ", path.display());
        assert!(error.starts_with(&start), "{error}");
    }

    #[test]
    fn a_directory_that_others_can_write_is_refused() {
        use std::os::unix::fs::PermissionsExt as _;
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o777)).unwrap();
        assert!(open(dir.path()).is_err());
    }

    #[test]
    fn a_name_stays_in_the_directory() {
        assert_eq!(file_name(7, "nftables table", "../a b"), "7:nftables-table:..%2fa%20b");
        assert_ne!(file_name(7, "bridge", "a/b"), file_name(7, "bridge", "a%2fb"));
    }
}

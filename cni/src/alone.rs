//! No two networks of a network namespace have the same bridge or table, and no two overlays the same route protocol
//! number: each would remove what belongs to the other.
//!
//! One file lock for each name, in a directory that is root's alone. Its name holds the network namespace's inode. The
//! names of abstract sockets have the same scope, but a process in a pod with the node's network can bind them as well.
//! The kernel releases a lock with its process. Plugin executables need none: they remove nothing of others.

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

/// Directory of the locks. Not a run directory: two networks with the same bridge have different ones.
const DIRECTORY: &str = "/run/coracle-networks";

/// Longest wait for a holder that is about to end.
const PATIENCE: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(20);

/// Held for as long as the network or the overlay is.
#[derive(Debug)]
pub(crate) struct Alone {
    _locks: Vec<Lock>,
}

/// One file. Removed while it is locked.
#[derive(Debug)]
struct Lock {
    _file: Flock<File>,
    path: PathBuf,
}

// === impl Alone ===

impl Alone {
    /// Takes these names, each with its kind and the setting that gives another one.
    ///
    /// # Errors
    /// [`Error::NameInUse`] when another process holds one.
    pub(crate) async fn take(wanted: &[(&'static str, &str, &'static str)]) -> Result<Self, Error> {
        Self::take_in(Path::new(DIRECTORY), wanted).await
    }

    async fn take_in(directory: &Path, wanted: &[(&'static str, &str, &'static str)]) -> Result<Self, Error> {
        let failed = |path: &Path, source| Error::Name { path: path.to_owned(), source };
        open(directory).map_err(|source| failed(directory, source))?;
        let namespace = netns::id(Path::new("/proc/thread-self/ns/net")).unwrap_or_default();
        let mut locks = Vec::new();
        for (what, name, setting) in wanted.iter().copied() {
            let path = directory.join(file_name(namespace, what, name));
            match take(&path).await.map_err(|source| failed(&path, source))? {
                Some(lock) => locks.push(lock),
                None => return Err(Error::NameInUse { what, name: name.to_owned(), setting }),
            }
        }
        Ok(Self { _locks: locks })
    }
}

/// Makes the directory, and removes the files of holders that were killed.
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
        // Dropped at once, which removes it.
        drop(Lock::try_take(&entry.path(), false));
    }
    Ok(())
}

/// `None` when another process holds the file.
async fn take(path: &Path) -> io::Result<Option<Lock>> {
    let end = Instant::now() + PATIENCE;
    loop {
        match Lock::try_take(path, true)? {
            None if Instant::now() < end => tokio::time::sleep(PAUSE).await,
            taken => return Ok(taken),
        }
    }
}

/// Every name is one part of a path, and no two are the same.
fn file_name(namespace: u64, what: &str, name: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    let name = name.bytes().map(|byte| match byte {
        byte if plain(byte) => char::from(byte).to_string(),
        byte => format!("%{byte:02x}"),
    });
    format!("{namespace}:{}:{}", what.replace(' ', "-"), name.collect::<String>())
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
            // The holder before may have removed it meanwhile.
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
        // A file that stays is locked by the next holder, or removed by the next start.
        let _stays = fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(name: &str) -> [(&'static str, &str, &'static str); 2] {
        [("bridge", name, "--bridge"), ("nftables table", "t", "--nft-table")]
    }

    #[tokio::test(start_paused = true)]
    async fn a_name_is_held_once_until_its_holder_ends() {
        let dir = tempfile::tempdir().unwrap();
        let locks = dir.path().join("locks");
        let first = Alone::take_in(&locks, &names("b0")).await.unwrap();
        let refused = Alone::take_in(&locks, &names("b0")).await.unwrap_err();
        assert!(matches!(refused, Error::NameInUse { what: "bridge", .. }), "{refused}");
        assert_eq!(fs::read_dir(&locks).unwrap().count(), 2);
        drop(first);
        assert_eq!(fs::read_dir(&locks).unwrap().count(), 0);
        drop(Alone::take_in(&locks, &names("b0")).await.unwrap());
    }

    #[tokio::test(start_paused = true)]
    async fn files_of_killed_holders_are_removed_and_those_of_others_stay() {
        let dir = tempfile::tempdir().unwrap();
        let locks = dir.path().join("locks");
        let held = Alone::take_in(&locks, &names("b0")).await.unwrap();
        fs::write(locks.join("7:bridge:killed"), "").unwrap();
        let other = [("bridge", "b1", "--bridge")];
        let _other = Alone::take_in(&locks, &other).await.unwrap();
        assert_eq!(fs::read_dir(&locks).unwrap().count(), 3);
        drop(held);
    }

    #[test]
    fn a_directory_of_others_is_refused() {
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

//! File access with the rights of a directory's owner: for changes of files in the directories of users.

use std::fmt;
use std::fs::{self, Metadata};
use std::io::{self, ErrorKind};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::unistd::{Gid, Uid, geteuid, setfsgid, setfsuid};
use rustix::process::getgroups;
use rustix::thread::set_thread_groups;

/// Maximum number of links in a path, as in the kernel.
const MAX_LINKS: usize = 40;

/// Gives this thread the rights of a user for files, until the value is dropped. During this time the thread lacks root's
/// capabilities for files: capabilities(7), "Effect of user ID changes on capabilities".
pub(super) struct Rights {
    user: Uid,
    former: (Uid, Gid),
    /// Former supplementary groups of the thread. The kernel checks them like the group for files.
    former_groups: Vec<rustix::process::Gid>,
}

// === impl Rights ===

impl Rights {
    /// Takes the rights of the user who owns the directory or a directory above it. `None` if only root can change the
    /// path, or this process is not root.
    pub(super) fn of_owner(dir: &Path) -> io::Result<Option<Self>> {
        if !geteuid().is_root() {
            return Ok(None);
        }
        let Some(owner) = first_owner(dir, MAX_LINKS)? else { return Ok(None) };
        let (user, group) = (Uid::from_raw(owner.uid()), Gid::from_raw(owner.gid()));
        let former_groups = getgroups()?;
        // Change the groups of this thread only. The C library would change the groups of all threads: nptl(7).
        match set_thread_groups(&[]) {
            // The user namespace forbids changes of groups (user_namespaces(7)). The process has the groups of the user
            // who made the namespace, so the groups do not exceed that user's rights.
            Err(rustix::io::Errno::PERM) if denies_setgroups() => {}
            dropped => dropped?,
        }
        let former = (setfsuid(Uid::from_raw(u32::MAX)), setfsgid(group));
        setfsuid(user);
        let taken = Self { user, former, former_groups };
        // The calls above report no errors. A call with an invalid user id changes nothing and returns the current id.
        if setfsuid(Uid::from_raw(u32::MAX)) == user && setfsgid(Gid::from_raw(u32::MAX)) == group {
            Ok(Some(taken))
        } else {
            Err(Errno::EPERM.into())
        }
    }
}

impl Drop for Rights {
    fn drop(&mut self) {
        setfsuid(self.former.0);
        setfsgid(self.former.1);
        // This does not fail, because a change of the user for files does not remove CAP_SETGID. If it failed, the
        // thread would only have fewer rights.
        let _ = set_thread_groups(&self.former_groups);
    }
}

impl fmt::Display for Rights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "user {}, the owner of the directory", self.user)
    }
}

/// Whether this process is in a user namespace in which groups cannot be changed.
fn denies_setgroups() -> bool {
    fs::read("/proc/self/setgroups").is_ok_and(|setting| setting.trim_ascii() == b"deny")
}

/// Metadata of the first part of a path that does not belong to root. The owner of this part can replace everything below
/// it.
fn first_owner(path: &Path, links: usize) -> io::Result<Option<Metadata>> {
    let mut walked = PathBuf::new();
    let mut parts = path.components();
    while let Some(part) = parts.next() {
        walked.push(part);
        let found = match fs::symlink_metadata(&walked) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            found => found?,
        };
        if found.uid() != 0 {
            return Ok(Some(found));
        }
        if found.is_symlink() {
            let links = links.checked_sub(1).ok_or(Errno::ELOOP)?;
            let target = walked.parent().unwrap_or(Path::new("/")).join(fs::read_link(&walked)?);
            return first_owner(&target.join(parts.as_path()), links);
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_groups_of_root_are_dropped_and_come_back() {
        let dir = tempfile::tempdir().unwrap();
        std::os::unix::fs::chown(dir.path(), Some(4321), Some(4321)).unwrap();
        let (before, group) = (getgroups().unwrap(), rustix::process::Gid::from_raw(5432));
        set_thread_groups(&[group]).unwrap();
        let rights = Rights::of_owner(dir.path()).unwrap().unwrap();
        let meanwhile = getgroups().unwrap();
        drop(rights);
        let after = getgroups().unwrap();
        set_thread_groups(&before).unwrap();
        assert!(meanwhile.is_empty(), "{meanwhile:?}");
        assert_eq!(after, [group]);
    }
}

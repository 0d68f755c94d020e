//! The files of a network. Each allocated address has one file, whose two lines are the owner's id and interface. Other
//! files contain the last allocated address of each range set. All processes share one lock.
//!
//! An address file is written under a temporary name and then linked to its final name. So every address has an owner,
//! even if the process is killed at any instruction.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io;
use std::net::IpAddr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nix::fcntl::{Flock, FlockArg};

use crate::error::Error;
use crate::file::{failed, remove_file};

/// Separator of id and interface.
const SEPARATOR: &str = "\r\n";
/// Name of an address file before it is linked. Ignored by readers.
const TEMPORARY: &str = ".taking";

/// The owner of an address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Owner {
    pub(crate) id: String,
    /// Empty in files of earlier versions: then all interfaces of the id match.
    pub(crate) ifname: String,
}

/// A version of a network's directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DirVersion {
    inode: u64,
    /// Seconds and nanoseconds.
    modified: (i64, i64),
}

/// The locked directory of one network. Dropping this value releases the lock.
pub(crate) struct Store {
    dir: PathBuf,
    _lock: Flock<File>,
}

// === impl Owner ===

impl Owner {
    fn parse(text: &str) -> Self {
        let mut lines = text.trim().lines();
        let mut next = || lines.next().unwrap_or_default().trim().to_owned();
        Self { id: next(), ifname: next() }
    }

    pub(crate) fn is(&self, id: &str, ifname: &str) -> bool {
        self.id == id && (self.ifname == ifname || self.ifname.is_empty())
    }
}

// === impl Store ===

impl Store {
    /// Makes the directory if it does not exist, and waits for the lock.
    pub(crate) fn open(dir: &Path) -> Result<Self, Error> {
        let path = dir.join("lock");
        let open = || File::options().read(true).write(true).create(true).truncate(false).open(&path);
        let file = match open() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                fs::create_dir_all(dir).map_err(failed("create", dir))?;
                open()
            }
            opened => opened,
        };
        let file = file.map_err(failed("open", &path))?;
        let lock = Flock::lock(file, FlockArg::LockExclusive);
        let lock = lock.map_err(|(_, errno)| failed("lock", &path)(errno.into()))?;
        // A killed process may have left the temporary file, already linked to an address: writing to it would change
        // the owner of that address.
        remove_file(&dir.join(TEMPORARY))?;
        Ok(Self { dir: dir.to_owned(), _lock: lock })
    }

    /// Like [`open`](Self::open). `None` if the directory does not exist: then no address is allocated.
    pub(crate) fn existing(dir: &Path) -> Result<Option<Self>, Error> {
        if dir.is_dir() { Self::open(dir).map(Some) } else { Ok(None) }
    }

    /// Allocates the first free address of the candidates.
    pub(crate) fn take(
        &mut self,
        owner: &Owner,
        candidates: &mut dyn Iterator<Item = IpAddr>,
    ) -> Result<Option<IpAddr>, Error> {
        let new = self.dir.join(TEMPORARY);
        let text = format!("{}{SEPARATOR}{}", owner.id.trim(), owner.ifname);
        fs::write(&new, text).map_err(failed("write", &new))?;
        coracle_fault::point("host-local.written");
        let mut taken = Ok(None);
        for address in candidates {
            let path = self.path(address);
            match fs::hard_link(&new, &path) {
                Ok(()) => {
                    coracle_fault::point("host-local.taken");
                    taken = Ok(Some(address));
                    break;
                }
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => {
                    taken = Err(failed("create", &path)(error));
                    break;
                }
            }
        }
        remove_file(&new)?;
        taken
    }

    pub(crate) fn free(&mut self, address: IpAddr) -> Result<(), Error> {
        remove_file(&self.path(address))?;
        coracle_fault::point("host-local.freed");
        Ok(())
    }

    pub(crate) fn owner_of(&self, address: IpAddr) -> Result<Option<Owner>, Error> {
        let path = self.path(address);
        match fs::read_to_string(&path) {
            Ok(text) => Ok(Some(Owner::parse(&text))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(failed("read", &path)(error)),
        }
    }

    /// The version of the directory. It changes when a file is created or removed. `None` if the directory cannot be
    /// read.
    ///
    /// Since Linux 6.13 the modification time is exact. In earlier versions the time advances only with the clock tick,
    /// which is at most 10 ms.
    pub(crate) fn version(&self) -> Option<DirVersion> {
        let found = fs::metadata(&self.dir).ok()?;
        Some(DirVersion { inode: found.ino(), modified: (found.mtime(), found.mtime_nsec()) })
    }

    /// All allocated addresses, from the names of their files.
    pub(crate) fn addresses(&self) -> Result<HashSet<IpAddr>, Error> {
        #[cfg(test)]
        listings::count();
        let mut addresses = HashSet::new();
        for entry in fs::read_dir(&self.dir).map_err(failed("read", &self.dir))? {
            let name = entry.map_err(failed("read", &self.dir))?.file_name();
            addresses.extend(name.to_str().and_then(|name| name.parse::<IpAddr>().ok()));
        }
        Ok(addresses)
    }

    /// All allocated addresses with their owners.
    pub(crate) fn allocated(&self) -> Result<Vec<(IpAddr, Owner)>, Error> {
        let mut allocated = Vec::new();
        for address in self.addresses()? {
            if let Some(owner) = self.owner_of(address)? {
                allocated.push((address, owner));
            }
        }
        Ok(allocated)
    }

    pub(crate) fn addresses_of(&self, owner: &Owner) -> Result<Vec<IpAddr>, Error> {
        let allocated =
            self.allocated()?.into_iter().filter(|(_, holder)| holder.is(&owner.id, &owner.ifname));
        Ok(allocated.map(|(address, _)| address).collect())
    }

    /// Frees all addresses except the addresses of the owners that `keeps` selects.
    pub(crate) fn retain(&mut self, keeps: impl Fn(&Owner) -> bool) -> Result<(), Error> {
        for (address, owner) in self.allocated()? {
            if !keeps(&owner) {
                self.free(address)?;
            }
        }
        Ok(())
    }

    /// The last allocated address of a set. `None` if it is unknown.
    pub(crate) fn last(&self, set: usize) -> Option<IpAddr> {
        fs::read_to_string(self.last_path(set)).ok()?.trim().parse().ok()
    }

    pub(crate) fn set_last(&mut self, set: usize, address: IpAddr) -> Result<(), Error> {
        let path = self.last_path(set);
        fs::write(&path, address.to_string()).map_err(failed("write", &path))?;
        coracle_fault::point("host-local.noted");
        Ok(())
    }

    fn last_path(&self, set: usize) -> PathBuf {
        self.dir.join(format!("last_reserved_ip.{set}"))
    }

    fn path(&self, address: IpAddr) -> PathBuf {
        self.dir.join(address.to_string())
    }
}

/// Number of directory listings by this thread. Tests use it to check that the work does not grow with the number of
/// addresses.
#[cfg(test)]
pub(crate) mod listings {
    use std::cell::Cell;

    thread_local!(static COUNT: Cell<usize> = const { Cell::new(0) });

    pub(super) fn count() {
        COUNT.set(COUNT.get() + 1);
    }

    pub(crate) fn total() -> usize {
        COUNT.get()
    }
}

//! One owner of a run directory at a time, and who it is.

use std::fs::{File, OpenOptions, Permissions};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;

use anyhow::{Context, bail};
use nix::fcntl::{Flock, FlockArg};

/// Held for as long as the process owns the node; the kernel lets go of it when the process dies.
#[derive(Debug)]
pub(crate) struct Lock {
    _file: Flock<File>,
}

impl Lock {
    /// Takes `<run dir>/coracle.lock`, or says which process has it.
    pub(crate) fn take(run_dir: &Path) -> anyhow::Result<Self> {
        std::fs::create_dir_all(run_dir).with_context(|| format!("cannot create {}", run_dir.display()))?;
        let path = run_dir.join("coracle.lock");
        let context = || format!("cannot open {}", path.display());
        let mut options = OpenOptions::new();
        let options = options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let mut file = options.open(&path).with_context(context)?;
        // A user who can read a file can lock it (flock(2)), and keep the node from starting. An earlier version let all users read it.
        file.set_permissions(Permissions::from_mode(0o600)).with_context(context)?;
        match Flock::lock(file.try_clone()?, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => {
                file.set_len(0)?;
                file.rewind()?;
                write!(file, "{}", std::process::id())?;
                Ok(Self { _file: lock })
            }
            Err((_, nix::errno::Errno::EWOULDBLOCK)) => {
                let mut pid = String::new();
                file.read_to_string(&mut pid)?;
                bail!("{} is in use by process {}", run_dir.display(), pid.trim())
            }
            Err((_, errno)) => Err(errno).with_context(|| format!("cannot lock {}", path.display())),
        }
    }

    /// The process that holds the run directory, if one does.
    pub(crate) fn holder(run_dir: &Path) -> Option<i32> {
        let file = OpenOptions::new().read(true).write(true).open(run_dir.join("coracle.lock")).ok()?;
        let mut copy = file.try_clone().ok()?;
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(_) => None,
            Err(_) => {
                let mut pid = String::new();
                copy.read_to_string(&mut pid).ok()?;
                pid.trim().parse().ok()
            }
        }
    }
}

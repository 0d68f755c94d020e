//! Confinement of process 1: user, capabilities, AppArmor and seccomp profile, set before its program starts.
//!
//! In other runtimes process 1 runs a program of the pause image. The program here only waits. User and profiles matter
//! for two reasons. A container that shares the pid namespace can read them in /proc. A container's process that traces
//! process 1 can execute code in process 1. The user and the profiles restrict that code.

use std::fs;
use std::io::{self, Write as _};

use caps::{CapSet, Capability};
use coracle_proto::shim::InitProcess;

use crate::kernel;
use crate::seccomp::Filter;

/// The step that failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum ConfineError {
    #[error("cannot set the user {uid}:{gid}")]
    User { uid: u32, gid: u32, source: io::Error },
    #[error("cannot drop capabilities")]
    Capabilities(#[source] caps::errors::CapsError),
    #[error("cannot set the AppArmor profile {name:?}")]
    Apparmor { name: String, source: io::Error },
    #[error("cannot set no_new_privs")]
    NoNewPrivileges(#[source] io::Error),
    #[error("cannot close the shim's descriptors")]
    Close(#[source] io::Error),
    #[error("cannot set the parent-death signal")]
    End(#[source] io::Error),
    #[error("cannot load the seccomp profile")]
    Seccomp(#[source] io::Error),
}

/// User and profiles of process 1. They are checked in the shim, so that errors are reported to the caller of the shim.
#[derive(Debug)]
pub(super) struct Confinement {
    process: InitProcess,
    filter: Option<Filter>,
}

// === impl Confinement ===

impl Confinement {
    pub(super) fn of(mut process: InitProcess) -> io::Result<Self> {
        let filter = Filter::of_program(&process.seccomp_program, &process.seccomp_flags)?;
        process.seccomp_program.clear();
        Ok(Self { process, filter })
    }

    /// Drops all capabilities except CAP_SYS_PTRACE, sets the user and loads the seccomp profile. Closes all
    /// descriptors except the standard streams.
    ///
    /// Any process with the same user id may trace a process without capabilities. The tracer would then act without
    /// its own seccomp profile and limits. So process 1 keeps CAP_SYS_PTRACE: a tracer must have this capability, too.
    pub(super) fn apply(&self) -> Result<(), ConfineError> {
        kernel::close_all_but(&[]).map_err(ConfineError::Close)?;
        let is_kept = |right: &Capability| *right == Capability::CAP_SYS_PTRACE;
        let all = caps::read(None, CapSet::Permitted).map_err(ConfineError::Capabilities)?;
        // A program that root executes gets the whole bounding set. Capabilities can be dropped from this set only with
        // an effective capability, which the change of the user clears.
        for right in caps::read(None, CapSet::Bounding).map_err(ConfineError::Capabilities)? {
            if !is_kept(&right) {
                caps::drop(None, CapSet::Bounding, right).map_err(ConfineError::Capabilities)?;
            }
        }
        self.set_user()?;
        let kept = all.into_iter().filter(is_kept).collect();
        // A program of a user other than root gets the ambient set.
        for set in [CapSet::Inheritable, CapSet::Effective, CapSet::Permitted, CapSet::Ambient] {
            caps::set(None, set, &kept).map_err(ConfineError::Capabilities)?;
        }
        // Otherwise a tracer could make process 1 execute a set-uid program.
        kernel::no_new_privileges().map_err(ConfineError::NoNewPrivileges)?;
        // The parent-death signal is set after the user, because a change of ids clears it.
        kernel::set_parent_death_signal().map_err(ConfineError::End)?;
        self.filter.as_ref().map_or(Ok(()), Filter::load).map_err(ConfineError::Seccomp)
    }

    fn set_user(&self) -> Result<(), ConfineError> {
        let InitProcess { uid, gid, ref groups, .. } = self.process;
        let failed = |source| ConfineError::User { uid, gid, source };
        kernel::keep_capabilities(true).map_err(failed)?;
        kernel::set_groups(groups).map_err(failed)?;
        kernel::set_ids(uid, gid).map_err(failed)?;
        kernel::keep_capabilities(false).map_err(failed)
    }

    /// Makes the program start under the AppArmor profile, as a container's program does.
    pub(super) fn set_apparmor_profile(&self) -> Result<(), ConfineError> {
        let name = &self.process.apparmor_profile;
        if name.is_empty() {
            return Ok(());
        }
        let failed = |source| ConfineError::Apparmor { name: name.clone(), source };
        let open = |path| fs::OpenOptions::new().write(true).open(path);
        // The first path is for stacked security modules, since Linux 5.1.
        let file = open("/proc/self/attr/apparmor/exec").or_else(|_before_5_1| open("/proc/self/attr/exec"));
        let change = format!("exec {name}");
        file.and_then(|mut file| file.write_all(change.as_bytes())).map_err(failed)
    }
}

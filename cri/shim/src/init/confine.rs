//! What process 1 becomes before its program starts: the pod's user, under the pod's profiles.
//!
//! Other runtimes start a program of an image there. The program of process 1 only waits; user and profiles are what a
//! container that shares the pid namespace sees of it, and what binds it if a tracer has it do anything else.

use std::fs;
use std::io::{self, Write as _};

use caps::{CapSet, Capability};
use coracle_proto::shim::InitProcess;

use crate::kernel;
use crate::seccomp::Filter;

/// The step that failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum ConfineError {
    #[error("set the user {uid}:{gid}")]
    User { uid: u32, gid: u32, source: io::Error },
    #[error("give up capabilities")]
    Capabilities(#[source] caps::errors::CapsError),
    #[error("take the AppArmor profile {name:?}")]
    Apparmor { name: String, source: io::Error },
    #[error("forbid new privileges")]
    NoNewPrivileges(#[source] io::Error),
    #[error("close the shim's descriptors")]
    Close(#[source] io::Error),
    #[error("end with the shim")]
    End(#[source] io::Error),
    #[error("load the seccomp profile")]
    Seccomp(#[source] io::Error),
}

/// What it becomes. Made ahead, so that who makes it hears of what is wrong.
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

    /// Gives up all rights but one, and takes the seccomp profile. Everything that is open, but the standard streams, is
    /// closed.
    ///
    /// A process without capabilities is traced by every process with its user's id, and the tracer would act without its
    /// own seccomp profile and limits. So process 1 keeps CAP_SYS_PTRACE, which its tracer must have then.
    pub(super) fn take(&self) -> Result<(), ConfineError> {
        kernel::close_all_but(&[]).map_err(ConfineError::Close)?;
        let is_kept = |right: &Capability| *right == Capability::CAP_SYS_PTRACE;
        let all = caps::read(None, CapSet::Permitted).map_err(ConfineError::Capabilities)?;
        // A program that root starts has the whole bounding set. It needs an effective capability, which the change of
        // the user takes.
        for right in caps::read(None, CapSet::Bounding).map_err(ConfineError::Capabilities)? {
            if !is_kept(&right) {
                caps::drop(None, CapSet::Bounding, right).map_err(ConfineError::Capabilities)?;
            }
        }
        self.take_user()?;
        let kept = all.into_iter().filter(is_kept).collect();
        // The ambient set is what the program of another user than root has.
        for set in [CapSet::Inheritable, CapSet::Effective, CapSet::Permitted, CapSet::Ambient] {
            caps::set(None, set, &kept).map_err(ConfineError::Capabilities)?;
        }
        // Or its tracer has it start something as root.
        kernel::no_new_privileges().map_err(ConfineError::NoNewPrivileges)?;
        // The kernel forgets it at a change of ids.
        kernel::die_with_parent().map_err(ConfineError::End)?;
        self.filter.as_ref().map_or(Ok(()), Filter::load).map_err(ConfineError::Seccomp)
    }

    fn take_user(&self) -> Result<(), ConfineError> {
        let InitProcess { uid, gid, ref groups, .. } = self.process;
        let failed = |source| ConfineError::User { uid, gid, source };
        kernel::keep_capabilities(true).map_err(failed)?;
        kernel::set_groups(groups).map_err(failed)?;
        kernel::set_ids(uid, gid).map_err(failed)?;
        kernel::keep_capabilities(false).map_err(failed)
    }

    /// Has the program begin under the AppArmor profile, as the program of a container.
    pub(super) fn take_profile(&self) -> Result<(), ConfineError> {
        let name = &self.process.apparmor_profile;
        if name.is_empty() {
            return Ok(());
        }
        let failed = |source| ConfineError::Apparmor { name: name.clone(), source };
        let open = |path| fs::OpenOptions::new().write(true).open(path);
        // The first where several security modules are stacked, Linux 5.1.
        let file = open("/proc/self/attr/apparmor/exec").or_else(|_older| open("/proc/self/attr/exec"));
        let change = format!("exec {name}");
        file.and_then(|mut file| file.write_all(change.as_bytes())).map_err(failed)
    }
}

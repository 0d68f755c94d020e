//! What the init becomes: whom the pod runs as, and under its profiles.
//!
//! Other runtimes start a program of an image there. Ours does nothing but wait, and these are what a container that
//! shares its pid namespace sees of it, and what binds it if somebody has it do anything else.

use std::fs;
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use caps::{CapSet, Capability};
use coracle_proto::shim::InitProcess;
use nix::poll::{PollTimeout, poll};
use nix::unistd::chroot;

use crate::kernel;
use crate::seccomp::Filter;

/// The step that failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum ConfineError {
    #[error("take an empty root directory")]
    Root(#[source] io::Error),
    #[error("open what AppArmor knows of it")]
    Own(#[source] io::Error),
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
    #[error("wait under the seccomp profile, which is all that it has to do")]
    Wait(#[source] nix::Error),
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

    /// Makes the working directory the root, and gives up all rights but one. What is without rights anybody may trace
    /// that has its user's id: he would be rid of his seccomp profile and of his limits.
    ///
    /// A root directory that a policy refuses is told by the inner result: the policy confines by itself.
    pub(super) fn take(&self) -> Result<Result<(), ConfineError>, ConfineError> {
        let own = self.own()?;
        let rooted = chroot(".").map_err(|errno| ConfineError::Root(errno.into()));
        self.take_user()?;
        let all = caps::read(None, CapSet::Permitted).map_err(ConfineError::Capabilities)?;
        let kept = all.into_iter().filter(|right| *right == Capability::CAP_SYS_PTRACE).collect();
        for set in [CapSet::Inheritable, CapSet::Effective, CapSet::Permitted] {
            caps::set(None, set, &kept).map_err(ConfineError::Capabilities)?;
        }
        if let Some(own) = own {
            self.take_profile(&own)?;
        }
        // Or whoever traces it has it start something as root.
        kernel::no_new_privileges().map_err(ConfineError::NoNewPrivileges)?;
        Ok(rooted)
    }

    fn take_user(&self) -> Result<(), ConfineError> {
        let InitProcess { uid, gid, ref groups, .. } = self.process;
        let failed = |source| ConfineError::User { uid, gid, source };
        kernel::keep_capabilities(true).map_err(failed)?;
        kernel::set_groups(groups).map_err(failed)?;
        kernel::set_ids(uid, gid).map_err(failed)?;
        kernel::keep_capabilities(false).map_err(failed)
    }

    /// Its directory in /proc, where it has something to do there: without a root directory it is not found any more.
    fn own(&self) -> Result<Option<fs::File>, ConfineError> {
        if self.process.apparmor_profile.is_empty() {
            return Ok(None);
        }
        let opened = fs::OpenOptions::new().read(true).custom_flags(libc::O_PATH).open("/proc/self");
        opened.map(Some).map_err(ConfineError::Own)
    }

    /// Opened here, since the kernel lets nobody write there who was another when he opened it.
    fn take_profile(&self, own: &fs::File) -> Result<(), ConfineError> {
        let name = &self.process.apparmor_profile;
        let failed = |source| ConfineError::Apparmor { name: name.clone(), source };
        let open = |path| kernel::open_in_root(own, Path::new(path), libc::O_WRONLY);
        // The first where several security modules are stacked, Linux 5.1.
        let file = open("attr/apparmor/current").or_else(|_older| open("attr/current")).map_err(failed)?;
        let change = format!("changeprofile {name}");
        nix::unistd::write(&file, change.as_bytes()).map(drop).map_err(|errno| failed(errno.into()))
    }

    /// The last steps: the profile may forbid all but to wait and to say a word.
    pub(super) fn close(&self) -> Result<(), ConfineError> {
        kernel::close_all_but(&[]).map_err(ConfineError::Close)?;
        // The kernel forgets it at a change of ids.
        kernel::die_with_parent().map_err(ConfineError::End)?;
        let Some(filter) = &self.filter else { return Ok(()) };
        filter.load().map_err(ConfineError::Seccomp)?;
        poll(&mut [], PollTimeout::ZERO).map(drop).map_err(ConfineError::Wait)
    }
}

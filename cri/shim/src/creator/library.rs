//! Creation by the container library, for specs that [`super::direct_support`] rejects.

use std::ffi::CString;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;

use coracle_proto::shim::error::Kind;
use libcontainer::container::builder::ContainerBuilder;
use libcontainer::oci_spec::runtime::{Spec, User};
use libcontainer::syscall::syscall::SyscallType;
use libcontainer::workload::{Executor, ExecutorError, ExecutorValidationError};

use super::{CreateError, CreateRequest};
use crate::kernel;
use crate::program;
use crate::report::{Message, Reporter};
use crate::selinux;

/// Makes the container from the config.json in `request.dir` and returns the pid of its first process.
pub(super) fn build(request: &CreateRequest<'_>, reporter: Reporter) -> Result<i32, CreateError> {
    // A hook may close its input before the library has written the whole input.
    kernel::ignore_broken_pipes();
    let library = |error| CreateError::Library(Box::new(error));
    let mut builder = ContainerBuilder::new(request.id.to_owned(), SyscallType::default())
        .with_root_path(request.state)
        .map_err(library)?
        .with_executor(Runner { reporter })
        .with_console_socket(request.console);
    if let Some(stdin) = &request.ends.stdin {
        builder = builder.with_stdin(own(stdin)?);
    }
    if let Some(stdout) = &request.ends.stdout {
        builder = builder.with_stdout(own(stdout)?);
    }
    if let Some(stderr) = &request.ends.stderr {
        builder = builder.with_stderr(own(stderr)?);
    }
    let container = builder
        .as_init(request.dir)
        .with_systemd(false)
        .with_detach(true)
        .as_sibling(true)
        .build()
        .map_err(library)?;
    container.pid().map(|pid| pid.as_raw()).ok_or(CreateError::Missing("process"))
}

/// Whether the library sets this user correctly. On 32-bit ARM it calls the variants of setresuid(2), setresgid(2) and
/// setgroups(2) for ids of 16 bits. These variants would cut off larger ids, and read the upper half of each group as
/// another group.
pub(super) fn can_set(user: &User) -> bool {
    let groups = user.additional_gids().as_deref().unwrap_or_default();
    let is_short = |id: &u32| u16::try_from(*id).is_ok();
    !cfg!(target_arch = "arm")
        || (groups.len() < 2 && groups.iter().chain([&user.uid(), &user.gid()]).all(is_short))
}

/// A duplicate of a descriptor, because the library takes ownership. This process is a fork in which the owner of the
/// original is never dropped.
fn own(fd: &OwnedFd) -> Result<OwnedFd, CreateError> {
    let borrowed: BorrowedFd<'_> = kernel::borrow(fd.as_raw_fd());
    borrowed.try_clone_to_owned().map_err(CreateError::Duplicate)
}

/// The last step of a creation by the library: executes the program after the start signal. The step distinguishes a
/// missing program from a program that cannot be executed. A failure is an error of the start, not of the creation.
#[derive(Clone)]
struct Runner {
    reporter: Reporter,
}

impl Executor for Runner {
    fn exec(&self, spec: &Spec) -> Result<(), ExecutorError> {
        kernel::reset_signals();
        // The pod's processes end with the shim. The signal for that is set here, because a change of ids clears it.
        let _ = kernel::set_parent_death_signal();
        let label = spec.process().as_ref().and_then(|process| process.selinux_label().as_ref());
        if let Some(label) = label.filter(|label| !label.is_empty())
            && let Err(error) = selinux::exec_as(label)
        {
            let message = format!("cannot set the SELinux label {label:?}: {error}");
            self.reporter.send(&Message::Failed(Kind::Internal, message));
            kernel::leave(255)
        }
        let args = spec.process().as_ref().and_then(|process| process.args().clone()).unwrap_or_default();
        let env: Vec<CString> = std::env::vars_os()
            .filter_map(|(name, value)| CString::new([name.as_bytes(), b"=", value.as_bytes()].concat()).ok())
            .collect();
        let (kind, message) = program::become_program(&args, &env);
        self.reporter.send(&Message::Failed(kind, message));
        kernel::leave(if kind == Kind::CommandNotFound { 127 } else { 126 })
    }

    fn validate(&self, _spec: &Spec) -> Result<(), ExecutorValidationError> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_that_the_library_would_set_wrongly_are_refused() {
        let user = |uid: u32, groups: &[u32]| -> User {
            serde_json::from_value(serde_json::json!({ "uid": uid, "gid": 7, "additionalGids": groups }))
                .unwrap()
        };
        let is_everything_right = cfg!(not(target_arch = "arm"));
        assert!(can_set(&user(65_535, &[65_535])));
        assert_eq!(can_set(&user(65_536, &[])), is_everything_right);
        assert_eq!(can_set(&user(1, &[65_536])), is_everything_right);
        assert_eq!(can_set(&user(1, &[1, 2])), is_everything_right);
    }
}

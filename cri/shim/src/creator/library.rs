//! A container by the container library, for what we do not do ourselves: see [`super::ordinary`].

use std::ffi::CString;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;

use coracle_proto::shim::error::Kind;
use libcontainer::container::builder::ContainerBuilder;
use libcontainer::oci_spec::runtime::Spec;
use libcontainer::syscall::syscall::SyscallType;
use libcontainer::workload::{Executor, ExecutorError, ExecutorValidationError};

use super::{CreateError, Plan};
use crate::kernel;
use crate::program;
use crate::report::{Speaker, Word};
use crate::selinux;

/// Makes the container of the config.json in the plan's directory, and returns its first process.
pub(super) fn build(plan: &Plan<'_>, speaker: Speaker) -> Result<i32, CreateError> {
    // A hook need not read what the library writes to it.
    kernel::ignore_broken_pipes();
    let library = |error| CreateError::Library(Box::new(error));
    let mut builder = ContainerBuilder::new(plan.id.to_owned(), SyscallType::default())
        .with_root_path(plan.state)
        .map_err(library)?
        .with_executor(Runner { speaker })
        .with_console_socket(plan.console);
    if let Some(stdin) = &plan.ends.stdin {
        builder = builder.with_stdin(own(stdin)?);
    }
    if let Some(stdout) = &plan.ends.stdout {
        builder = builder.with_stdout(own(stdout)?);
    }
    if let Some(stderr) = &plan.ends.stderr {
        builder = builder.with_stderr(own(stderr)?);
    }
    let container = builder
        .as_init(plan.dir)
        .with_systemd(false)
        .with_detach(true)
        .as_sibling(true)
        .build()
        .map_err(library)?;
    container.pid().map(|pid| pid.as_raw()).ok_or(CreateError::Missing("process"))
}

/// The library takes ownership, and this process is a copy whose owners never drop.
fn own(fd: &OwnedFd) -> Result<OwnedFd, CreateError> {
    let borrowed: BorrowedFd<'_> = kernel::borrow(fd.as_raw_fd());
    borrowed.try_clone_to_owned().map_err(CreateError::Duplicate)
}

/// Its last step, done our way: absent and forbidden programs are told apart, and are told when the
/// container is started, as other runtimes do, not when it is created.
#[derive(Clone)]
struct Runner {
    speaker: Speaker,
}

impl Executor for Runner {
    fn exec(&self, spec: &Spec) -> Result<(), ExecutorError> {
        kernel::reset_signals();
        // A pod ends with its shim. After the change of ids, which would clear it.
        let _ = kernel::die_with_parent();
        let label = spec.process().as_ref().and_then(|process| process.selinux_label().as_ref());
        if let Some(label) = label.filter(|label| !label.is_empty())
            && let Err(error) = selinux::exec_as(label)
        {
            let message = format!("take the SELinux label {label:?}: {error}");
            self.speaker.say(&Word::Failed(Kind::Internal, message));
            kernel::leave(255)
        }
        let args = spec.process().as_ref().and_then(|process| process.args().clone()).unwrap_or_default();
        let env: Vec<CString> = std::env::vars_os()
            .filter_map(|(name, value)| CString::new([name.as_bytes(), b"=", value.as_bytes()].concat()).ok())
            .collect();
        let (kind, message) = program::become_program(&args, &env);
        self.speaker.say(&Word::Failed(kind, message));
        kernel::leave(if kind == Kind::CommandNotFound { 127 } else { 126 })
    }

    fn validate(&self, _spec: &Spec) -> Result<(), ExecutorValidationError> {
        Ok(())
    }
}

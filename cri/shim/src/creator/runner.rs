//! The library's last step, done our way: absent and forbidden programs are told apart, and are
//! told when the container is started, as other runtimes do, not when it is created.

use std::ffi::CString;
use std::os::unix::ffi::OsStrExt as _;

use libcontainer::oci_spec::runtime::Spec;
use libcontainer::workload::{Executor, ExecutorError, ExecutorValidationError};

use coracle_proto::shim::error::Kind;

use crate::kernel;
use crate::program;
use crate::report::{Speaker, Word};

#[derive(Clone)]
pub(super) struct Runner {
    pub(super) speaker: Speaker,
}

impl Executor for Runner {
    fn exec(&self, spec: &Spec) -> Result<(), ExecutorError> {
        // A pod ends with its shim. After the change of ids, which would clear it.
        let _ = kernel::die_with_parent();
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

//! The part of the API of `rust-criu` that libcontainer needs to compile, without an implementation.
//!
//! libcontainer uses `rust-criu` only in `Container::checkpoint`, which this program never calls: it runs CRIU itself
//! (`cri/src/checkpoint/criu.rs`). libcontainer has no feature that leaves the crate out.

use std::fmt;
use std::os::fd::RawFd;

/// A client of CRIU. No value of this type exists, so the compiler leaves out the code that would use it.
#[derive(Debug)]
pub enum Criu {}

/// CRIU cannot be used.
#[derive(Debug)]
pub struct CriuError;

/// CRIU's modes for cgroups.
#[allow(clippy::upper_case_acronyms, reason = "the names of rust-criu")]
#[allow(missing_docs, reason = "the names of CRIU's option --manage-cgroups")]
#[derive(Clone, Debug)]
pub enum CgMode {
    IGNORE,
    NONE,
    PROPS,
    SOFT,
    FULL,
    STRICT,
    DEFAULT,
}

impl Criu {
    /// Always fails.
    ///
    /// # Errors
    /// Always.
    pub fn new() -> Result<Self, CriuError> {
        Err(CriuError)
    }

    /// Version of CRIU. Cannot be called.
    ///
    /// # Errors
    /// Never.
    pub fn get_criu_version(&mut self) -> Result<u32, CriuError> {
        match *self {}
    }

    /// Writes a checkpoint. Cannot be called.
    ///
    /// # Errors
    /// Never.
    pub fn dump(&mut self) -> Result<(), CriuError> {
        match *self {}
    }
}

macro_rules! options {
    ($($name:ident($($value:ty),+);)+) => {
        impl Criu {
            $(
                /// Sets an option. Cannot be called.
                pub fn $name(&mut self, $(_: $value),+) {
                    match *self {}
                }
            )+
        }
    };
}

options! {
    add_external(String);
    cgroups_mode(CgMode);
    set_ext_unix_sk(bool);
    set_external_mount(String, String);
    set_file_locks(bool);
    set_images_dir_fd(RawFd);
    set_leave_running(bool);
    set_link_remap(bool);
    set_log_file(String);
    set_log_level(i32);
    set_manage_cgroups(bool);
    set_orphan_pts_master(bool);
    set_pid(i32);
    set_root(String);
    set_shell_job(bool);
    set_tcp_established(bool);
    set_work_dir_fd(RawFd);
}

impl fmt::Display for CriuError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("libcontainer has no client of CRIU in this program")
    }
}

impl std::error::Error for CriuError {}

/// CRIU's key of an external namespace. Called only with a [`Criu`], so never.
#[must_use]
pub fn criu_ns_to_key(name: &str) -> String {
    name.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_client_of_criu_exists() {
        let error = Criu::new().expect_err("there is no client");
        assert_eq!(error.to_string(), "libcontainer has no client of CRIU in this program");
    }
}

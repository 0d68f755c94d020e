//! The identity of a container's process: user, capabilities, labels and seccomp filter, set before its
//! program starts.
//!
//! A container's first process and an exec take the same steps, in the order that the kernel requires.

use std::ffi::CString;
use std::io;

use libcontainer::oci_spec::runtime::Process;
use libcontainer::syscall::SyscallError;
use libcontainer::syscall::syscall::create_syscall;
use libcontainer::{apparmor, capabilities};

use crate::kernel;
use crate::seccomp::Filter;
use crate::selinux;

mod home;

#[cfg(any(test, feature = "fuzzing"))]
pub use self::home::fuzz as fuzz_home;

/// The step that failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum IdentityError {
    #[error("cannot enter the working directory {path}")]
    Cwd { path: String, source: io::Error },
    #[error("the working directory {0} is not in the container")]
    Outside(String),
    #[error("cannot set the user {uid}:{gid}")]
    User { uid: u32, gid: u32, source: io::Error },
    #[error("cannot apply the AppArmor profile")]
    Apparmor(#[source] Box<dyn std::error::Error>),
    #[error("cannot set the SELinux label {label:?}")]
    Selinux { label: String, source: io::Error },
    #[error("cannot set the capabilities")]
    Capabilities(#[source] Box<dyn std::error::Error>),
    #[error("cannot set no_new_privs")]
    NoNewPrivileges(#[source] io::Error),
    #[error("cannot load the seccomp profile")]
    Seccomp(#[source] io::Error),
}

/// Sets the identity of this process, inside the container. Returns the program's environment.
pub(crate) fn assume(process: &Process, filter: Option<&Filter>) -> Result<Vec<CString>, IdentityError> {
    let (uid, gid) = (process.user().uid(), process.user().gid());
    if let Some(profile) = process.apparmor_profile() {
        apparmor::apply_profile(profile).map_err(|error| IdentityError::Apparmor(error.into()))?;
    }
    if let Some(label) = process.selinux_label().as_ref().filter(|label| !label.is_empty()) {
        let failed = |source| IdentityError::Selinux { label: label.clone(), source };
        selinux::exec_as(label).map_err(failed)?;
    }
    if let Some(umask) = process.user().umask() {
        nix::sys::stat::umask(nix::sys::stat::Mode::from_bits_truncate(umask));
    }
    // The process enters the directory as root, or as the user if root has no permission.
    let entered = enter_cwd_as_root(process);
    let groups = process.user().additional_gids().clone().unwrap_or_default();
    let user = |source| IdentityError::User { uid, gid, source };
    kernel::keep_capabilities(true).map_err(user)?;
    kernel::set_groups(&groups).map_err(user)?;
    kernel::set_ids(uid, gid).map_err(user)?;
    restrict(process, filter, || entered.or_else(|_| enter_cwd(process)))?;
    let entries = process.env().as_deref().unwrap_or_default();
    Ok(environment(entries, || home::of(uid)))
}

fn enter_cwd(process: &Process) -> Result<(), IdentityError> {
    let path = || process.cwd().display().to_string();
    nix::unistd::chdir(process.cwd())
        .map_err(|source| IdentityError::Cwd { path: path(), source: source.into() })?;
    is_inside(path)
}

/// Enters the working directory as root. Root could follow magic links of /proc to directories of other
/// processes (CVE-2024-21626), so a path through a magic link is refused.
fn enter_cwd_as_root(process: &Process) -> Result<(), IdentityError> {
    let path = || process.cwd().display().to_string();
    let flags = libc::O_PATH | libc::O_DIRECTORY;
    let entered = kernel::open_without_magic(process.cwd(), flags)
        .and_then(|directory| Ok(nix::unistd::fchdir(directory)?));
    entered.map_err(|source| IdentityError::Cwd { path: path(), source })?;
    is_inside(path)
}

fn is_inside(path: impl Fn() -> String) -> Result<(), IdentityError> {
    match std::env::current_dir() {
        Ok(found) if found.is_absolute() => Ok(()),
        Ok(_) | Err(_) => Err(IdentityError::Outside(path())),
    }
}

/// Drops capabilities and loads the seccomp filter. Loading needs CAP_SYS_ADMIN or no-new-privileges. With
/// no-new-privileges the filter is loaded as late as possible. Otherwise it is loaded before the capabilities are
/// dropped.
fn restrict(
    process: &Process,
    filter: Option<&Filter>,
    enter_cwd: impl FnOnce() -> Result<(), IdentityError>,
) -> Result<(), IdentityError> {
    let load = || filter.map_or(Ok(()), Filter::load).map_err(IdentityError::Seccomp);
    let no_new_privileges = process.no_new_privileges() == Some(true);
    let syscall = create_syscall();
    let failed = |error: SyscallError| IdentityError::Capabilities(error.into());
    // The change of the user cleared the effective set, which is needed until the last step.
    capabilities::reset_effective(syscall.as_ref()).map_err(failed)?;
    if !no_new_privileges {
        load()?;
    }
    if let Some(sets) = process.capabilities() {
        capabilities::drop_privileges(sets, syscall.as_ref()).map_err(failed)?;
    }
    kernel::keep_capabilities(false).map_err(IdentityError::NoNewPrivileges)?;
    enter_cwd()?;
    if no_new_privileges {
        kernel::no_new_privileges().map_err(IdentityError::NoNewPrivileges)?;
        load()?;
    }
    Ok(())
}

/// The environment of a program. HOME is added if it is missing.
fn environment(entries: &[String], home: impl FnOnce() -> String) -> Vec<CString> {
    let mut env: Vec<CString> =
        entries.iter().filter_map(|entry| CString::new(entry.as_bytes()).ok()).collect();
    if !entries.iter().any(|entry| entry.starts_with("HOME=")) {
        env.extend(CString::new(format!("HOME={}", home())).ok());
    }
    env
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn home_is_added_only_when_it_is_absent() {
        let env = environment(&["A=1".into()], || "/root".into());
        assert_eq!(env, [c"A=1".to_owned(), c"HOME=/root".to_owned()]);
        let env = environment(&["HOME=/x".into()], || "/root".into());
        assert_eq!(env, [c"HOME=/x".to_owned()]);
    }
}

//! A pod's user namespace: made with its mapping, and owner of the pod's other namespaces.
//!
//! The shim stays where it is, for what it mounts and whom it signals. A child goes ahead into a new
//! user namespace, and makes the other namespaces there, which are thereby owned by it; the shim
//! opens them through the child's /proc, enters all but the user namespace, and keeps that one open.

use std::fs;
use std::io::{self, Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use coracle_proto::shim::{IdMapping, SandboxConfig};
use libcontainer::oci_spec::runtime::LinuxIdMapping;
use nix::errno::Errno;
use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::wait::waitpid;
use nix::unistd::Pid;

use crate::init::Init;
use crate::kernel::{self, Fork};

/// The step that failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum UserNamespaceError {
    #[error("start a process in a new user namespace")]
    Fork(#[source] io::Error),
    #[error("make a user namespace")]
    Make(#[source] io::Error),
    #[error("write {file} of the user namespace: {text:?}")]
    Map { file: &'static str, text: String, source: io::Error },
    #[error("make the pod's namespaces in its user namespace")]
    Inside(#[source] io::Error),
    #[error("open the namespace {name}")]
    Open { name: &'static str, source: io::Error },
    #[error("enter the namespace {name}")]
    Enter { name: &'static str, source: nix::Error },
}

/// Whether this process is in a user namespace that somebody made, and so its root is nobody's but theirs. The first
/// one, the machine's own, maps every id to itself.
pub(crate) fn is_inside_one() -> bool {
    let map = fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    !map.is_empty() && map.split_whitespace().ne(["0", "0", "4294967295"])
}

/// Which ids of the node are those of a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Mapping {
    pub(crate) uids: Vec<IdMapping>,
    pub(crate) gids: Vec<IdMapping>,
}

/// A user namespace that is held open.
#[derive(Debug)]
pub(crate) struct UserNamespace {
    pub(crate) fd: OwnedFd,
    pub(crate) mapping: Mapping,
}

/// What a child makes inside.
pub(crate) struct Inside<'a> {
    /// Network, ipc and uts namespaces, as far as the pod has its own.
    pub(crate) flags: CloneFlags,
    /// The first process of a pid namespace, when containers share one. A child of the caller's.
    pub(crate) init: Option<&'a Init>,
}

// === impl Mapping ===

impl Mapping {
    /// `None` when the pod has the node's user namespace.
    pub(crate) fn of(config: &SandboxConfig) -> Option<Self> {
        let mapping = Self { uids: config.uid_mappings.clone(), gids: config.gid_mappings.clone() };
        (mapping != Self::default()).then_some(mapping)
    }

    /// A volume's own.
    pub(crate) fn from_oci(uids: &[LinuxIdMapping], gids: &[LinuxIdMapping]) -> Self {
        let list = |list: &[LinuxIdMapping]| {
            list.iter()
                .map(|m| IdMapping { container_id: m.container_id(), host_id: m.host_id(), length: m.size() })
                .collect()
        };
        Self { uids: list(uids), gids: list(gids) }
    }

    /// The node's user and group that are root inside.
    pub(crate) fn root(&self) -> (u32, u32) {
        self.host_ids(0, 0)
    }

    /// The node's ids of those inside; what is not mapped stays as it is, and thereby out of reach.
    pub(crate) fn host_ids(&self, uid: u32, gid: u32) -> (u32, u32) {
        (host_id(&self.uids, uid), host_id(&self.gids, gid))
    }
}

fn host_id(mappings: &[IdMapping], id: u32) -> u32 {
    let found = mappings.iter().find(|m| id >= m.container_id && id - m.container_id < m.length);
    found.map_or(id, |m| m.host_id + (id - m.container_id))
}

/// Makes a user namespace and what lies inside it, and enters the latter. Returns the pid of the init,
/// or 0.
pub(crate) fn make(
    mapping: Mapping,
    inside: &Inside<'_>,
) -> Result<(UserNamespace, i32), UserNamespaceError> {
    let (mut ours, theirs) = UnixStream::pair().map_err(UserNamespaceError::Fork)?;
    let child = match kernel::fork().map_err(UserNamespaceError::Fork)? {
        Fork::Parent(pid) => pid,
        Fork::Child => {
            // Or it would wait for a parent that has died.
            drop(ours);
            go_ahead(theirs, inside)
        }
    };
    drop(theirs);
    let made = follow(&mut ours, child, mapping, inside.flags);
    drop(ours);
    // It ends when it hears nothing more.
    let _ = waitpid(Pid::from_raw(child), None);
    made
}

/// The child's whole life.
fn go_ahead(mut talk: UnixStream, inside: &Inside<'_>) -> ! {
    let made = unshare(CloneFlags::CLONE_NEWUSER);
    let mapped = say(&mut talk, made.map(|()| 0)) && hear(&mut talk).is_ok();
    if mapped && made.is_ok() && say(&mut talk, fill(inside)) {
        let _ = hear(&mut talk);
    }
    kernel::leave(0)
}

/// Returns the init's pid, or 0.
fn fill(inside: &Inside<'_>) -> nix::Result<i32> {
    let errno = |error: io::Error| error.raw_os_error().map_or(Errno::EIO, Errno::from_raw);
    kernel::set_ids(0, 0).map_err(errno)?;
    unshare(inside.flags)?;
    let Some(init) = inside.init else { return Ok(0) };
    // With the parent's parent as its parent, which is the shim.
    match kernel::clone(libc::CLONE_NEWPID | libc::CLONE_PARENT, 0).map_err(errno)? {
        Fork::Parent(pid) => Ok(pid),
        Fork::Child => init.run(),
    }
}

fn follow(
    talk: &mut UnixStream,
    child: i32,
    mapping: Mapping,
    flags: CloneFlags,
) -> Result<(UserNamespace, i32), UserNamespaceError> {
    hear(talk).map_err(UserNamespaceError::Make)?;
    for (file, mappings) in [("uid_map", &mapping.uids), ("gid_map", &mapping.gids)] {
        let text: String =
            mappings.iter().map(|m| format!("{} {} {}\n", m.container_id, m.host_id, m.length)).collect();
        fs::write(format!("/proc/{child}/{file}"), &text).map_err(|source| UserNamespaceError::Map {
            file,
            text,
            source,
        })?;
    }
    if !say(talk, Ok(0)) {
        return Err(UserNamespaceError::Inside(io::ErrorKind::BrokenPipe.into()));
    }
    let init = hear(talk).map_err(UserNamespaceError::Inside)?;
    let open = |name: &'static str| -> Result<OwnedFd, UserNamespaceError> {
        let file = fs::File::open(format!("/proc/{child}/ns/{name}"));
        file.map(OwnedFd::from).map_err(|source| UserNamespaceError::Open { name, source })
    };
    let others = [
        ("net", CloneFlags::CLONE_NEWNET),
        ("ipc", CloneFlags::CLONE_NEWIPC),
        ("uts", CloneFlags::CLONE_NEWUTS),
    ];
    for (name, flag) in others.into_iter().filter(|(_, flag)| flags.contains(*flag)) {
        setns(open(name)?, flag).map_err(|source| UserNamespaceError::Enter { name, source })?;
    }
    Ok((UserNamespace { fd: open("user")?, mapping }, init))
}

/// Runs `work` as root of the namespace, in a process of its own.
pub(crate) fn as_its_root(
    namespace: &UserNamespace,
    work: impl FnOnce() -> io::Result<()>,
) -> io::Result<()> {
    let (mut ours, mut theirs) = UnixStream::pair()?;
    let child = match kernel::fork()? {
        Fork::Parent(pid) => pid,
        Fork::Child => {
            drop(ours);
            let done = setns(&namespace.fd, CloneFlags::CLONE_NEWUSER)
                .map_err(io::Error::from)
                .and_then(|()| kernel::set_ids(0, 0))
                .and_then(|()| work());
            let errno = |error: io::Error| error.raw_os_error().map_or(Errno::EIO, Errno::from_raw);
            say(&mut theirs, done.map(|()| 0).map_err(errno));
            kernel::leave(0)
        }
    };
    drop(theirs);
    let heard = hear(&mut ours);
    let _ = waitpid(Pid::from_raw(child), None);
    heard.map(drop)
}

/// Four bytes: a number, or an error as its negative. Whether somebody listens.
fn say(talk: &mut UnixStream, result: nix::Result<i32>) -> bool {
    let number = result.unwrap_or_else(|errno| -(errno as i32));
    talk.write_all(&number.to_ne_bytes()).is_ok()
}

fn hear(talk: &mut UnixStream) -> io::Result<i32> {
    let mut bytes = [0; 4];
    talk.read_exact(&mut bytes)?;
    match i32::from_ne_bytes(bytes) {
        number if number < 0 => Err(io::Error::from_raw_os_error(-number)),
        number => Ok(number),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_those_of_the_range_that_holds_them() {
        let one = |container_id, host_id, length| IdMapping { container_id, host_id, length };
        let mapping = Mapping { uids: vec![one(0, 65536, 10)], gids: vec![one(0, 70000, 5), one(5, 100, 1)] };
        assert_eq!(mapping.root(), (65536, 70000));
        assert_eq!(mapping.host_ids(9, 5), (65545, 100));
        assert_eq!(mapping.host_ids(10, 6), (10, 6), "not mapped");
    }
}

//! A pod's user namespace, which owns the pod's other namespaces.
//!
//! The shim stays outside, because it mounts and signals with the node's rights. A child unshares a new user namespace
//! and then the other namespaces, which the user namespace then owns. The shim opens them through the child's /proc
//! directory, enters all namespaces except the user namespace, and keeps the user namespace open.

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
    #[error("cannot start a process in a new user namespace")]
    Fork(#[source] io::Error),
    #[error("cannot make a user namespace")]
    Make(#[source] io::Error),
    #[error("cannot write {file} of the user namespace: {text:?}")]
    Map { file: &'static str, text: String, source: io::Error },
    #[error("cannot make the pod's namespaces in its user namespace")]
    InnerNamespaces(#[source] io::Error),
    #[error("cannot open the namespace {name}")]
    Open { name: &'static str, source: io::Error },
    #[error("cannot enter the namespace {name}")]
    Enter { name: &'static str, source: nix::Error },
}

/// Whether this process is in a user namespace other than the initial user namespace of the machine. The initial user
/// namespace maps every id to itself.
pub(crate) fn is_inside_one() -> bool {
    let map = fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    !map.is_empty() && map.split_whitespace().ne(["0", "0", "4294967295"])
}

/// The mapping between ids of a pod and ids of the node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Mapping {
    pub(crate) uids: Vec<IdMapping>,
    pub(crate) gids: Vec<IdMapping>,
}

/// A user and a group of the node that own files. The default is root.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Owner {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
}

/// An open user namespace and its mapping.
#[derive(Debug)]
pub(crate) struct UserNamespace {
    pub(crate) fd: OwnedFd,
    pub(crate) mapping: Mapping,
}

/// Namespaces and processes that the child makes in the new user namespace.
pub(crate) struct InnerNamespaces<'a> {
    /// Network, ipc and uts namespaces, as far as the pod has its own.
    pub(crate) flags: CloneFlags,
    /// Process 1, if containers share a pid namespace. Process 1 becomes a child of the caller.
    pub(crate) init: Option<&'a Init>,
}

// === impl Mapping ===

impl Mapping {
    /// The mapping of a pod. `None` if the pod uses the node's user namespace.
    pub(crate) fn of(config: &SandboxConfig) -> Option<Self> {
        let mapping = Self { uids: config.uid_mappings.clone(), gids: config.gid_mappings.clone() };
        (mapping != Self::default()).then_some(mapping)
    }

    /// The mapping of a volume.
    pub(crate) fn from_oci(uids: &[LinuxIdMapping], gids: &[LinuxIdMapping]) -> Self {
        let list = |list: &[LinuxIdMapping]| {
            list.iter()
                .map(|m| IdMapping { container_id: m.container_id(), host_id: m.host_id(), length: m.size() })
                .collect()
        };
        Self { uids: list(uids), gids: list(gids) }
    }

    /// The node's ids of the namespace's root.
    pub(crate) fn root(&self) -> Owner {
        self.host_ids(0, 0)
    }

    /// The node's ids for ids of the namespace. An id without a mapping is returned unchanged. The namespace has no
    /// access to such an id.
    pub(crate) fn host_ids(&self, uid: u32, gid: u32) -> Owner {
        Owner { uid: host_id(&self.uids, uid), gid: host_id(&self.gids, gid) }
    }
}

fn host_id(mappings: &[IdMapping], id: u32) -> u32 {
    let found = mappings.iter().find(|m| id >= m.container_id && id - m.container_id < m.length);
    found.map_or(id, |m| m.host_id + (id - m.container_id))
}

/// Makes a user namespace and the pod's namespaces in it. Enters the pod's namespaces, but not the user
/// namespace. Returns the user namespace and the pid of process 1, or 0.
pub(crate) fn make(
    mapping: Mapping,
    inside: &InnerNamespaces<'_>,
) -> Result<(UserNamespace, i32), UserNamespaceError> {
    let (mut ours, theirs) = UnixStream::pair().map_err(UserNamespaceError::Fork)?;
    let child = match kernel::fork().map_err(UserNamespaceError::Fork)? {
        Fork::Parent(pid) => pid,
        Fork::Child => {
            // Close the parent's end in the child. Otherwise the child would wait without end if the parent exits.
            drop(ours);
            run_child(theirs, inside)
        }
    };
    drop(theirs);
    let made = enter_made(&mut ours, child, mapping, inside.flags);
    drop(ours);
    // The child exits when the socket is closed.
    let _ = waitpid(Pid::from_raw(child), None);
    made
}

/// Runs the child to its end.
fn run_child(mut socket: UnixStream, inside: &InnerNamespaces<'_>) -> ! {
    let made = unshare(CloneFlags::CLONE_NEWUSER);
    let mapped = send(&mut socket, made.map(|()| 0)) && receive(&mut socket).is_ok();
    if mapped && made.is_ok() && send(&mut socket, make_inside(inside)) {
        let _ = receive(&mut socket);
    }
    kernel::leave(0)
}

/// Makes the namespaces and process 1 inside. Returns the pid of process 1, or 0.
fn make_inside(inside: &InnerNamespaces<'_>) -> nix::Result<i32> {
    let errno = |error: io::Error| error.raw_os_error().map_or(Errno::EIO, Errno::from_raw);
    kernel::set_ids(0, 0).map_err(errno)?;
    unshare(inside.flags)?;
    let Some(init) = inside.init else { return Ok(0) };
    // With CLONE_PARENT, process 1 becomes a child of the shim.
    match kernel::clone(libc::CLONE_NEWPID | libc::CLONE_PARENT, 0).map_err(errno)? {
        Fork::Parent(pid) => Ok(pid),
        Fork::Child => init.run(),
    }
}

fn enter_made(
    socket: &mut UnixStream,
    child: i32,
    mapping: Mapping,
    flags: CloneFlags,
) -> Result<(UserNamespace, i32), UserNamespaceError> {
    receive(socket).map_err(UserNamespaceError::Make)?;
    for (file, mappings) in [("uid_map", &mapping.uids), ("gid_map", &mapping.gids)] {
        let text: String =
            mappings.iter().map(|m| format!("{} {} {}\n", m.container_id, m.host_id, m.length)).collect();
        fs::write(format!("/proc/{child}/{file}"), &text).map_err(|source| UserNamespaceError::Map {
            file,
            text,
            source,
        })?;
    }
    if !send(socket, Ok(0)) {
        return Err(UserNamespaceError::InnerNamespaces(io::ErrorKind::BrokenPipe.into()));
    }
    let init = receive(socket).map_err(UserNamespaceError::InnerNamespaces)?;
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

/// Runs `work` as root of the namespace, in a forked process.
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
            send(&mut theirs, done.map(|()| 0).map_err(errno));
            kernel::leave(0)
        }
    };
    drop(theirs);
    let received = receive(&mut ours);
    let _ = waitpid(Pid::from_raw(child), None);
    received.map(drop)
}

/// Sends a number, or an error as its negative errno, in four bytes. Returns whether it was sent.
fn send(socket: &mut UnixStream, result: nix::Result<i32>) -> bool {
    let number = result.unwrap_or_else(|errno| -(errno as i32));
    socket.write_all(&number.to_ne_bytes()).is_ok()
}

fn receive(socket: &mut UnixStream) -> io::Result<i32> {
    let mut bytes = [0; 4];
    socket.read_exact(&mut bytes)?;
    match i32::from_ne_bytes(bytes) {
        number if number < 0 => Err(io::Error::from_raw_os_error(-number)),
        number => Ok(number),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_mapped_by_the_range_that_contains_them() {
        let one = |container_id, host_id, length| IdMapping { container_id, host_id, length };
        let mapping = Mapping { uids: vec![one(0, 65536, 10)], gids: vec![one(0, 70000, 5), one(5, 100, 1)] };
        assert_eq!(mapping.root(), Owner { uid: 65536, gid: 70000 });
        assert_eq!(mapping.host_ids(9, 5), Owner { uid: 65545, gid: 100 });
        assert_eq!(mapping.host_ids(10, 6), Owner { uid: 10, gid: 6 }, "not mapped");
    }
}

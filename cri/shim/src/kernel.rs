//! The few system calls that have no safe wrapper elsewhere, one function each.
#![allow(unsafe_code, reason = "this module is where the crate meets the kernel directly")]

mod bpf;
mod mounts;

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use libc::{c_int, c_long, c_uint};

pub(crate) use bpf::{attach_device_program, load_device_program};
pub(crate) use mounts::{
    Attributes, Depth, READ_ONLY, READ_ONLY_DATA, attach_mount_at, change_root, copy_mount_at,
    copy_one_mount, map_ids, set_attributes,
};

/// Which side of a fork we are on.
pub(crate) enum Fork {
    Child,
    Parent(i32),
}

/// What `openat2` is asked for.
#[repr(C)]
struct OpenHow {
    flags: u64,
    mode: u64,
    resolve: u64,
}

const RESOLVE_IN_ROOT: u64 = 0x10;
const RESOLVE_NO_XDEV: u64 = 0x01;
const RESOLVE_NO_MAGICLINKS: u64 = 0x02;
const RESOLVE_NO_SYMLINKS: u64 = 0x04;

fn check(result: c_long) -> io::Result<c_int> {
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    c_int::try_from(result).map_err(io::Error::other)
}

fn owned(result: c_long) -> io::Result<OwnedFd> {
    let fd = check(result)?;
    // SAFETY: the kernel has just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn c_path(path: &Path) -> io::Result<CString> {
    Ok(CString::new(path.as_os_str().as_bytes())?)
}

/// fork(2). The caller must be single-threaded, as the shim always is, and its child must end by
/// [`leave`] or execve: nothing of the parent's may be dropped twice.
pub(crate) fn fork() -> io::Result<Fork> {
    // SAFETY: there is one thread only, so that no lock can be held by another.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => Ok(Fork::Child),
        pid => Ok(Fork::Parent(pid)),
    }
}

/// A fork that does one thing and ends; it is reaped as every orphan and stranger is.
pub(crate) fn fork_briefly(work: impl FnOnce()) -> io::Result<()> {
    match fork()? {
        Fork::Parent(_) => Ok(()),
        Fork::Child => {
            work();
            leave(0)
        }
    }
}

/// A fork whose child has the flags' new namespaces, or our own parent (CLONE_PARENT).
pub(crate) fn clone(flags: c_int, exit_signal: c_int) -> io::Result<Fork> {
    let flags = c_long::from(flags | exit_signal);
    // SAFETY: no stack and no memory flags are passed, so this is a fork: the child has a copy of
    // everything, and there is one thread only.
    match unsafe { libc::syscall(libc::SYS_clone, flags, 0_usize, 0_usize, 0_usize, 0_usize) } {
        -1 => Err(io::Error::last_os_error()),
        0 => Ok(Fork::Child),
        pid => check(pid).map(Fork::Parent),
    }
}

/// What `clone3` is asked for.
#[repr(C)]
#[derive(Default)]
struct CloneArgs {
    flags: u64,
    pidfd: u64,
    child_tid: u64,
    parent_tid: u64,
    exit_signal: u64,
    stack: u64,
    stack_size: u64,
    tls: u64,
    set_tid: u64,
    set_tid_size: u64,
    cgroup: u64,
}

/// A fork whose child is our own parent's, and is born in the v2 cgroup of that directory.
pub(crate) fn clone_sibling_into(cgroup: &OwnedFd) -> io::Result<Fork> {
    const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;
    let cgroup = u64::try_from(cgroup.as_raw_fd()).map_err(io::Error::other)?;
    let parent = u64::try_from(libc::CLONE_PARENT).map_err(io::Error::other)?;
    // The exit signal is our own: CLONE_PARENT allows none.
    let arguments = CloneArgs { flags: CLONE_INTO_CGROUP | parent, cgroup, ..CloneArgs::default() };
    // SAFETY: no stack and no memory flags are passed, so this is a fork: the child has a copy of
    // everything, and there is one thread only. The arguments outlive the call.
    match unsafe { libc::syscall(libc::SYS_clone3, &raw const arguments, std::mem::size_of::<CloneArgs>()) } {
        -1 => Err(io::Error::last_os_error()),
        0 => Ok(Fork::Child),
        pid => check(pid).map(Fork::Parent),
    }
}

/// Ends a forked child at once: no handlers, no destructors.
pub(crate) fn leave(code: i32) -> ! {
    // SAFETY: _exit takes an integer and does not return.
    unsafe { libc::_exit(code) }
}

/// Closes every descriptor but the standard ones and `keep`. A container must not have what is left open when it fails.
pub(crate) fn close_all_but(keep: &[RawFd]) -> io::Result<()> {
    let mut keep: Vec<c_uint> =
        keep.iter().filter_map(|fd| c_uint::try_from(*fd).ok()).filter(|fd| *fd > 2).collect();
    keep.sort_unstable();
    let mut first: c_uint = 3;
    for kept in keep.into_iter().chain([c_uint::MAX]) {
        if kept > first {
            // SAFETY: only a child calls this that owns nothing in the range.
            check(unsafe { libc::syscall(libc::SYS_close_range, first, kept - 1, 0) })?;
        }
        first = kept.saturating_add(1);
    }
    Ok(())
}

/// Default actions for all signals and an empty mask: what a program may expect to start with.
pub(crate) fn reset_signals() {
    // The kernel's `sigaction` of all zeroes is SIG_DFL without flags, whatever its exact layout.
    // Not the C library's call, which refuses the two signals that it uses itself.
    let default = [0_u64; 8];
    for signal in 1..=64 {
        // SAFETY: the structure outlives the call; nothing is written back.
        unsafe {
            libc::syscall(libc::SYS_rt_sigaction, signal, default.as_ptr(), std::ptr::null::<u64>(), 8_usize)
        };
    }
    let none = nix::sys::signal::SigSet::empty();
    let _ = none.thread_set_mask();
}

/// Lets the kernel reap our children: nobody asks for their status.
pub(crate) fn ignore_children() {
    // SAFETY: SIG_IGN is valid for SIGCHLD.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) };
}

/// A pipe that nobody reads is an error to be handled, instead of the end.
pub(crate) fn ignore_broken_pipes() {
    // SAFETY: SIG_IGN is valid for SIGPIPE.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
}

/// Keeps others from reaching this process through /proc while it is between two worlds.
pub(crate) fn hide_from_proc() -> io::Result<()> {
    prctl(libc::PR_SET_DUMPABLE, 0)
}

/// Takes [`hide_from_proc`] back.
pub(crate) fn show_in_proc() -> io::Result<()> {
    prctl(libc::PR_SET_DUMPABLE, 1)
}

fn prctl(option: c_int, argument: usize) -> io::Result<()> {
    // SAFETY: the options used here take an integer, or a string that outlives the call.
    check(c_long::from(unsafe { libc::prctl(option, argument, 0, 0, 0) })).map(drop)
}

pub(crate) fn set_name(name: &std::ffi::CStr) -> io::Result<()> {
    prctl(libc::PR_SET_NAME, name.as_ptr() as usize)
}

/// Orphans among the descendants become this process's children, also when it has become another program.
pub(crate) fn become_subreaper() -> io::Result<()> {
    prctl(libc::PR_SET_CHILD_SUBREAPER, 1)
}

/// SIGKILL when the parent dies, who may have died already. For a child in the parent's own pid namespace.
pub(crate) fn die_with(parent: i32) {
    if die_with_parent().is_err() || i64::from(std::os::unix::process::parent_id()) != i64::from(parent) {
        leave(255)
    }
}

/// SIGKILL when the parent dies. The kernel forgets it at a change of ids.
pub(crate) fn die_with_parent() -> io::Result<()> {
    prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL as usize)
}

pub(crate) fn no_new_privileges() -> io::Result<()> {
    prctl(libc::PR_SET_NO_NEW_PRIVS, 1)
}

/// Puts this process under a seccomp program: an array of `struct sock_filter`.
pub(crate) fn set_filter(program: &[u8], flags: u32) -> io::Result<()> {
    let long = |_too_long| io::Error::from(io::ErrorKind::InvalidInput);
    let len = u16::try_from(program.len() / size_of::<libc::sock_filter>()).map_err(long)?;
    // The kernel copies it, whatever its alignment, and does not write.
    let filter = libc::sock_fprog { len, filter: program.as_ptr().cast_mut().cast() };
    // SAFETY: `filter` names as many bytes as `program` has, and both outlive the call.
    check(unsafe {
        libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, flags, &raw const filter)
    })
    .map(drop)
}

pub(crate) fn keep_capabilities(keep: bool) -> io::Result<()> {
    prctl(libc::PR_SET_KEEPCAPS, usize::from(keep))
}

pub(crate) fn pidfd_open(pid: i32) -> io::Result<OwnedFd> {
    // SAFETY: two integers.
    owned(unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) })
}

pub(crate) fn set_window(terminal: impl AsFd, width: u16, height: u16) -> io::Result<()> {
    let size = libc::winsize { ws_row: height, ws_col: width, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: the descriptor is open and `size` outlives the call.
    check(c_long::from(unsafe {
        libc::ioctl(terminal.as_fd().as_raw_fd(), libc::TIOCSWINSZ, &raw const size)
    }))
    .map(drop)
}

/// pidfd_send_signal(2): to the process that was opened and no other.
pub(crate) fn send_signal(process: &OwnedFd, signal: c_int) -> io::Result<()> {
    let none = std::ptr::null::<libc::siginfo_t>();
    // SAFETY: the descriptor is open, and no siginfo is passed.
    let sent = unsafe { libc::syscall(libc::SYS_pidfd_send_signal, process.as_raw_fd(), signal, none, 0) };
    check(sent).map(drop)
}

/// Whether a process is a child of ours, which may have ended but was not waited for.
pub(crate) fn is_child(process: &OwnedFd) -> bool {
    let Ok(id) = libc::id_t::try_from(process.as_raw_fd()) else { return false };
    // SAFETY: siginfo_t is plain data, for which all zeroes is a value.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    let flags = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
    // SAFETY: the descriptor is open and `info` outlives the call.
    unsafe { libc::waitid(libc::P_PIDFD, id, &raw mut info, flags) == 0 }
}

/// Makes `fd` one of the standard descriptors, without its close-on-exec flag.
pub(crate) fn place(fd: RawFd, standard: RawFd) -> io::Result<()> {
    // SAFETY: both are plain descriptor numbers; `standard` is 0, 1 or 2, which no owner closes.
    check(c_long::from(unsafe { libc::dup2(fd, standard) })).map(drop)
}

/// Sets all three user and all three group ids of this process alone.
pub(crate) fn set_ids(uid: u32, gid: u32) -> io::Result<()> {
    // SAFETY: integers only; the process has one thread, so the raw call covers all of it.
    check(unsafe { libc::syscall(libc::SYS_setresgid, gid, gid, gid) })?;
    // SAFETY: as above.
    check(unsafe { libc::syscall(libc::SYS_setresuid, uid, uid, uid) }).map(drop)
}

pub(crate) fn set_groups(groups: &[u32]) -> io::Result<()> {
    // SAFETY: pointer and length are of one slice that outlives the call.
    check(unsafe { libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()) }).map(drop)
}

/// Opens `path` as it is seen with `root` as the root directory, whatever links it holds.
pub(crate) fn open_in_root(root: impl AsFd, path: &Path, flags: c_int) -> io::Result<OwnedFd> {
    open_at(root, path, flags, RESOLVE_IN_ROOT)
}

/// The same, and refuses links: what is opened is what the path says.
pub(crate) fn open_plain_in_root(root: impl AsFd, path: &Path, flags: c_int) -> io::Result<OwnedFd> {
    open_at(root, path, flags, RESOLVE_IN_ROOT | RESOLVE_NO_SYMLINKS)
}

/// Opens what is below a directory and on the same mount: nothing that is mounted over it, or that a magic link
/// leads to.
pub(crate) fn open_same_mount(directory: impl AsFd, path: &Path, flags: c_int) -> io::Result<OwnedFd> {
    open_at(directory, path, flags, RESOLVE_NO_XDEV | RESOLVE_NO_MAGICLINKS)
}

fn open_at(root: impl AsFd, path: &Path, flags: c_int, resolve: u64) -> io::Result<OwnedFd> {
    let path = c_path(path)?;
    let flags = u64::try_from(flags | libc::O_CLOEXEC).map_err(io::Error::other)?;
    let how = OpenHow { flags, mode: 0, resolve };
    // SAFETY: the strings and `how` outlive the call, and the size is that of `how`.
    owned(unsafe {
        libc::syscall(
            libc::SYS_openat2,
            root.as_fd().as_raw_fd(),
            path.as_ptr(),
            &raw const how,
            std::mem::size_of::<OpenHow>(),
        )
    })
}

/// fsetxattr(2): an extended attribute of an open file.
pub(crate) fn set_attribute(file: impl AsFd, name: &std::ffi::CStr, value: &[u8]) -> io::Result<()> {
    let file = file.as_fd().as_raw_fd();
    // SAFETY: the string outlives the call, and so does the value, whose length is given.
    let set = unsafe { libc::fsetxattr(file, name.as_ptr(), value.as_ptr().cast(), value.len(), 0) };
    check(c_long::from(set)).map(drop)
}

/// fsopen(2): a new, empty file system configuration.
pub(crate) fn fs_open(kind: &std::ffi::CStr) -> io::Result<OwnedFd> {
    const FSOPEN_CLOEXEC: c_uint = 1;
    // SAFETY: the string outlives the call.
    owned(unsafe { libc::syscall(libc::SYS_fsopen, kind.as_ptr(), FSOPEN_CLOEXEC) })
}

pub(crate) fn fs_set(fs: &OwnedFd, key: &std::ffi::CStr, value: &Path) -> io::Result<()> {
    const FSCONFIG_SET_STRING: c_uint = 1;
    let value = c_path(value)?;
    // SAFETY: both strings outlive the call.
    check(unsafe {
        libc::syscall(
            libc::SYS_fsconfig,
            fs.as_raw_fd(),
            FSCONFIG_SET_STRING,
            key.as_ptr(),
            value.as_ptr(),
            0,
        )
    })
    .map(drop)
}

pub(crate) fn fs_set_flag(fs: &OwnedFd, key: &std::ffi::CStr) -> io::Result<()> {
    const FSCONFIG_SET_FLAG: c_uint = 0;
    let none = std::ptr::null::<libc::c_char>();
    // SAFETY: the string outlives the call, and this command takes no value.
    check(unsafe {
        libc::syscall(libc::SYS_fsconfig, fs.as_raw_fd(), FSCONFIG_SET_FLAG, key.as_ptr(), none, 0)
    })
    .map(drop)
}

/// Has all files of the new file system carry an SELinux label.
pub(crate) fn fs_label(fs: &OwnedFd, label: Option<&str>) -> io::Result<()> {
    label.map_or(Ok(()), |label| fs_set(fs, c"context", Path::new(label)))
}

pub(crate) fn fs_create(fs: &OwnedFd) -> io::Result<()> {
    const FSCONFIG_CMD_CREATE: c_uint = 6;
    let none = std::ptr::null::<libc::c_char>();
    // SAFETY: this command takes no key and no value.
    check(unsafe { libc::syscall(libc::SYS_fsconfig, fs.as_raw_fd(), FSCONFIG_CMD_CREATE, none, none, 0) })
        .map(drop)
}

/// fsmount(2): a mount of the configured file system, attached nowhere yet.
pub(crate) fn fs_mount(fs: &OwnedFd, read_only: bool) -> io::Result<OwnedFd> {
    const FSMOUNT_CLOEXEC: c_uint = 1;
    let attributes: c_uint = if read_only { 1 } else { 0 };
    // SAFETY: integers only.
    owned(unsafe { libc::syscall(libc::SYS_fsmount, fs.as_raw_fd(), FSMOUNT_CLOEXEC, attributes) })
}

/// open_tree(2) with OPEN_TREE_CLONE: a detached copy of the mounts below `path`, of the same peer
/// groups.
pub(crate) fn copy_mounts(path: &Path) -> io::Result<OwnedFd> {
    let path = c_path(path)?;
    let flags = libc::OPEN_TREE_CLONE | libc::OPEN_TREE_CLOEXEC | (libc::AT_RECURSIVE as c_uint);
    // SAFETY: the string outlives the call.
    owned(unsafe { libc::syscall(libc::SYS_open_tree, libc::AT_FDCWD, path.as_ptr(), flags) })
}

/// Attaches a detached mount at `target`.
pub(crate) fn attach_mount(mount: &OwnedFd, target: &Path) -> io::Result<()> {
    const MOVE_MOUNT_F_EMPTY_PATH: c_uint = 4;
    let target = c_path(target)?;
    // SAFETY: both strings outlive the call.
    check(unsafe {
        libc::syscall(
            libc::SYS_move_mount,
            mount.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_FDCWD,
            target.as_ptr(),
            MOVE_MOUNT_F_EMPTY_PATH,
        )
    })
    .map(drop)
}

/// The same, and follows no link at all.
pub(crate) fn open_plain_same_mount(directory: impl AsFd, path: &Path, flags: c_int) -> io::Result<OwnedFd> {
    open_at(directory, path, flags, RESOLVE_NO_XDEV | RESOLVE_NO_SYMLINKS)
}

/// Opens a path that leads through no magic link, as `/proc/self/fd/3` is one, from the working directory.
pub(crate) fn open_without_magic(path: &Path, flags: c_int) -> io::Result<OwnedFd> {
    open_at(borrow(libc::AT_FDCWD), path, flags, RESOLVE_NO_MAGICLINKS)
}

/// Unlocks a new terminal by its master and opens its other side, by no path (ioctl_tty(2), Linux 4.13).
pub(crate) fn open_terminal_of(master: &OwnedFd) -> io::Result<OwnedFd> {
    const TIOCSPTLCK: u32 = 0x4004_5431;
    const TIOCGPTPEER: u32 = 0x5441;
    let unlocked: c_int = 0;
    // SAFETY: the descriptor is open and the number outlives the call.
    check(c_long::from(unsafe {
        libc::ioctl(master.as_raw_fd(), TIOCSPTLCK as libc::Ioctl, &raw const unlocked)
    }))?;
    let flags = libc::O_RDWR | libc::O_NOCTTY | libc::O_CLOEXEC;
    // SAFETY: the descriptor is open and the flags are an integer.
    owned(c_long::from(unsafe { libc::ioctl(master.as_raw_fd(), TIOCGPTPEER as libc::Ioctl, flags) }))
}

/// Makes a terminal the controlling one of this process's session.
pub(crate) fn take_terminal(terminal: &OwnedFd) -> io::Result<()> {
    // SAFETY: the descriptor is open and the argument is an integer.
    check(c_long::from(unsafe { libc::ioctl(terminal.as_raw_fd(), libc::TIOCSCTTY, 0) })).map(drop)
}

/// Takes ownership of descriptors that arrived in a message.
pub(crate) fn adopt(fds: Vec<RawFd>) -> Vec<OwnedFd> {
    // SAFETY: the kernel has just made these descriptors for us, and nobody else knows them.
    fds.into_iter().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }).collect()
}

/// A descriptor that a forked child may use while its parent's owner stays the owner.
pub(crate) fn borrow(fd: RawFd) -> std::os::fd::BorrowedFd<'static> {
    // SAFETY: used in forked children only, where nobody closes the copy before the process ends.
    unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) }
}

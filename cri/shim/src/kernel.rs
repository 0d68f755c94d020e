//! System calls without a safe wrapper in other crates, one function each.
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

/// The side of a fork on which the caller continues.
pub(crate) enum Fork {
    Child,
    /// The parent, with the pid of the child.
    Parent(i32),
}

/// Arguments of openat2(2), `struct open_how`.
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

/// Maximum attempts to open a path below a root. openat2(2) returns EAGAIN if any process of the machine renames a file
/// while the kernel resolves a `..`. The kernel then cannot exclude that the `..` led out of the root.
const OPEN_ATTEMPTS: u32 = 1000;

fn check(result: c_long) -> io::Result<c_int> {
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    c_int::try_from(result).map_err(io::Error::other)
}

fn owned(result: c_long) -> io::Result<OwnedFd> {
    let fd = check(result)?;
    // SAFETY: the kernel has just created this descriptor, so no other value owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn c_path(path: &Path) -> io::Result<CString> {
    Ok(CString::new(path.as_os_str().as_bytes())?)
}

/// fork(2). The caller must be single-threaded, as the shim always is. The child must end by [`leave`] or
/// execve, so that no value of the parent is dropped twice.
pub(crate) fn fork() -> io::Result<Fork> {
    // SAFETY: the process has one thread, so no other thread can hold a lock.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => Ok(Fork::Child),
        pid => Ok(Fork::Parent(pid)),
    }
}

/// Forks a child that runs `work` and exits. The shim's event loop reaps the child.
pub(crate) fn fork_briefly(work: impl FnOnce()) -> io::Result<()> {
    match fork()? {
        Fork::Parent(_) => Ok(()),
        Fork::Child => {
            work();
            leave(0)
        }
    }
}

/// clone(2) as a fork. The flags give the child new namespaces, or the caller's own parent (CLONE_PARENT).
pub(crate) fn clone(flags: c_int, exit_signal: c_int) -> io::Result<Fork> {
    let flags = c_long::from(flags | exit_signal);
    // SAFETY: no stack and no memory flags are passed, so this is a fork: the child gets a copy of the
    // memory, and the process has one thread.
    match unsafe { libc::syscall(libc::SYS_clone, flags, 0_usize, 0_usize, 0_usize, 0_usize) } {
        -1 => Err(io::Error::last_os_error()),
        0 => Ok(Fork::Child),
        pid => check(pid).map(Fork::Parent),
    }
}

/// Arguments of clone3(2), `struct clone_args`.
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

/// clone3(2): forks a sibling (a child of the caller's parent) directly into a v2 cgroup. `cgroup` is its directory.
pub(crate) fn clone_sibling_into(cgroup: &OwnedFd) -> io::Result<Fork> {
    const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;
    let cgroup = u64::try_from(cgroup.as_raw_fd()).map_err(io::Error::other)?;
    let parent = u64::try_from(libc::CLONE_PARENT).map_err(io::Error::other)?;
    // The child uses the caller's exit signal: CLONE_PARENT allows no other.
    let arguments = CloneArgs { flags: CLONE_INTO_CGROUP | parent, cgroup, ..CloneArgs::default() };
    // SAFETY: no stack and no memory flags are passed, so this is a fork: the child gets a copy of the
    // memory, and the process has one thread. The arguments outlive the call.
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

/// Closes every descriptor except the standard ones and `keep`. After an error no container may run: it would inherit
/// the other descriptors.
pub(crate) fn close_all_but(keep: &[RawFd]) -> io::Result<()> {
    let mut keep: Vec<c_uint> =
        keep.iter().filter_map(|fd| c_uint::try_from(*fd).ok()).filter(|fd| *fd > 2).collect();
    keep.sort_unstable();
    let mut first: c_uint = 3;
    for kept in keep.into_iter().chain([c_uint::MAX]) {
        if kept > first {
            // SAFETY: the caller is a child, or has just started, and owns no descriptor in the range.
            check(unsafe { libc::syscall(libc::SYS_close_range, first, kept - 1, 0) })?;
        }
        first = kept.saturating_add(1);
    }
    Ok(())
}

/// Sets default actions for all signals and an empty signal mask, which programs expect at their start.
pub(crate) fn reset_signals() {
    // In the kernel's `sigaction`, all zeroes is SIG_DFL without flags, in every layout. The C library's
    // function is not used: it refuses the two signals that the library itself uses.
    let default = [0_u64; 8];
    for signal in 1..=64 {
        // SAFETY: the structure outlives the call, and the kernel does not write to it.
        unsafe {
            libc::syscall(libc::SYS_rt_sigaction, signal, default.as_ptr(), std::ptr::null::<u64>(), 8_usize)
        };
    }
    let none = nix::sys::signal::SigSet::empty();
    let _ = none.thread_set_mask();
}

/// Makes the kernel reap the caller's children.
pub(crate) fn ignore_children() {
    // SAFETY: SIG_IGN is valid for SIGCHLD.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) };
}

/// Makes a write to a pipe without readers return an error instead of ending the process.
pub(crate) fn ignore_broken_pipes() {
    // SAFETY: SIG_IGN is valid for SIGPIPE.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
}

/// Denies other processes access through /proc (PR_SET_DUMPABLE 0) while this process still has more rights
/// than the container.
pub(crate) fn hide_from_proc() -> io::Result<()> {
    prctl(libc::PR_SET_DUMPABLE, 0)
}

/// Reverts [`hide_from_proc`].
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

/// keyctl(2): gives the calling thread a new, empty session keyring, which processes that it starts inherit.
///
/// Fails on a kernel without keys, and if root has used up its quota. Then the former keyring stays.
pub(crate) fn new_session_keyring() -> io::Result<()> {
    const JOIN_SESSION_KEYRING: c_int = 1;
    let no_name = std::ptr::null::<libc::c_char>();
    // SAFETY: without a name the kernel reads no memory of this process.
    check(unsafe { libc::syscall(libc::SYS_keyctl, JOIN_SESSION_KEYRING, no_name) }).map(drop)
}

/// Makes orphans among the descendants children of this process. The setting stays after execve.
pub(crate) fn become_subreaper() -> io::Result<()> {
    prctl(libc::PR_SET_CHILD_SUBREAPER, 1)
}

/// Makes the kernel kill this process when the parent exits. If the parent has exited already, ends this process at
/// once. For a child in the parent's pid namespace.
pub(crate) fn exit_with_parent(parent: i32) {
    if set_parent_death_signal().is_err()
        || i64::from(std::os::unix::process::parent_id()) != i64::from(parent)
    {
        leave(255)
    }
}

/// prctl(2) with PR_SET_PDEATHSIG: the kernel sends SIGKILL to this process when its parent exits. A change of ids
/// clears this setting.
pub(crate) fn set_parent_death_signal() -> io::Result<()> {
    prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL as usize)
}

pub(crate) fn no_new_privileges() -> io::Result<()> {
    prctl(libc::PR_SET_NO_NEW_PRIVS, 1)
}

/// Installs a seccomp program for this process: an array of `struct sock_filter`.
pub(crate) fn set_filter(program: &[u8], flags: u32) -> io::Result<()> {
    let long = |_too_long| io::Error::from(io::ErrorKind::InvalidInput);
    let len = u16::try_from(program.len() / size_of::<libc::sock_filter>()).map_err(long)?;
    // The kernel copies a program of any alignment, and does not write to it.
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

/// pidfd_send_signal(2): a signal to exactly the opened process.
pub(crate) fn send_signal(process: &OwnedFd, signal: c_int) -> io::Result<()> {
    let none = std::ptr::null::<libc::siginfo_t>();
    // SAFETY: the descriptor is open, and no siginfo is passed.
    let sent = unsafe { libc::syscall(libc::SYS_pidfd_send_signal, process.as_raw_fd(), signal, none, 0) };
    check(sent).map(drop)
}

/// Whether a process is a child of this process. A child that has ended counts until it is reaped.
pub(crate) fn is_child(process: &OwnedFd) -> bool {
    let Ok(id) = libc::id_t::try_from(process.as_raw_fd()) else { return false };
    // SAFETY: siginfo_t is plain data; all zeroes is a valid value.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    let flags = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
    // SAFETY: the descriptor is open and `info` outlives the call.
    unsafe { libc::waitid(libc::P_PIDFD, id, &raw mut info, flags) == 0 }
}

/// dup2(2): makes `fd` a standard descriptor, without the close-on-exec flag.
pub(crate) fn dup_to(fd: RawFd, standard: RawFd) -> io::Result<()> {
    // SAFETY: both are plain descriptor numbers; `standard` is 0, 1 or 2, which no Rust value owns.
    check(c_long::from(unsafe { libc::dup2(fd, standard) })).map(drop)
}

// These calls take ids of 32 bits. On arm the older names take ids of 16 bits.
#[cfg(not(target_arch = "arm"))]
const SET_USER_IDS: c_long = libc::SYS_setresuid;
#[cfg(not(target_arch = "arm"))]
const SET_GROUP_IDS: c_long = libc::SYS_setresgid;
#[cfg(not(target_arch = "arm"))]
const SET_GROUPS: c_long = libc::SYS_setgroups;
#[cfg(target_arch = "arm")]
const SET_USER_IDS: c_long = libc::SYS_setresuid32;
#[cfg(target_arch = "arm")]
const SET_GROUP_IDS: c_long = libc::SYS_setresgid32;
#[cfg(target_arch = "arm")]
const SET_GROUPS: c_long = libc::SYS_setgroups32;

/// Sets all three user ids and all three group ids of this process.
pub(crate) fn set_ids(uid: u32, gid: u32) -> io::Result<()> {
    // SAFETY: integers only; the process has one thread, so the raw call covers all of it.
    check(unsafe { libc::syscall(SET_GROUP_IDS, gid, gid, gid) })?;
    // SAFETY: as above.
    check(unsafe { libc::syscall(SET_USER_IDS, uid, uid, uid) }).map(drop)
}

pub(crate) fn set_groups(groups: &[u32]) -> io::Result<()> {
    // SAFETY: pointer and length are of one slice that outlives the call.
    check(unsafe { libc::syscall(SET_GROUPS, groups.len(), groups.as_ptr()) }).map(drop)
}

/// openat2(2) with RESOLVE_IN_ROOT: `path` and all its links resolve with `root` as the root directory.
pub(crate) fn open_in_root(root: impl AsFd, path: &Path, flags: c_int) -> io::Result<OwnedFd> {
    open_at(root, path, flags, RESOLVE_IN_ROOT)
}

/// Like [`open_in_root`], but refuses symbolic links.
pub(crate) fn open_plain_in_root(root: impl AsFd, path: &Path, flags: c_int) -> io::Result<OwnedFd> {
    open_at(root, path, flags, RESOLVE_IN_ROOT | RESOLVE_NO_SYMLINKS)
}

/// Opens a path below a directory on the same mount. Other mounts and magic links are refused.
pub(crate) fn open_same_mount(directory: impl AsFd, path: &Path, flags: c_int) -> io::Result<OwnedFd> {
    open_at(directory, path, flags, RESOLVE_NO_XDEV | RESOLVE_NO_MAGICLINKS)
}

fn open_at(root: impl AsFd, path: &Path, flags: c_int, resolve: u64) -> io::Result<OwnedFd> {
    let path = c_path(path)?;
    let flags = u64::try_from(flags | libc::O_CLOEXEC).map_err(io::Error::other)?;
    let how = OpenHow { flags, mode: 0, resolve };
    let mut attempts = 1..OPEN_ATTEMPTS;
    loop {
        // SAFETY: the strings and `how` outlive the call, and the size is that of `how`.
        let opened = owned(unsafe {
            libc::syscall(
                libc::SYS_openat2,
                root.as_fd().as_raw_fd(),
                path.as_ptr(),
                &raw const how,
                std::mem::size_of::<OpenHow>(),
            )
        });
        match opened {
            Err(error) if error.raw_os_error() == Some(libc::EAGAIN) && attempts.next().is_some() => {}
            opened => return opened,
        }
    }
}

/// fsetxattr(2): sets an extended attribute of an open file.
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

/// Sets the SELinux label of all files of the new file system.
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

/// fsmount(2): a mount of the configured file system, not attached yet.
pub(crate) fn fs_mount(fs: &OwnedFd, read_only: bool) -> io::Result<OwnedFd> {
    const FSMOUNT_CLOEXEC: c_uint = 1;
    let attributes: c_uint = if read_only { 1 } else { 0 };
    // SAFETY: integers only.
    owned(unsafe { libc::syscall(libc::SYS_fsmount, fs.as_raw_fd(), FSMOUNT_CLOEXEC, attributes) })
}

/// open_tree(2) with OPEN_TREE_CLONE: a detached copy of all mounts at and below `path`, in the same peer
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

/// Like [`open_same_mount`], but refuses all links.
pub(crate) fn open_plain_same_mount(directory: impl AsFd, path: &Path, flags: c_int) -> io::Result<OwnedFd> {
    open_at(directory, path, flags, RESOLVE_NO_XDEV | RESOLVE_NO_SYMLINKS)
}

/// Opens a path from the working directory. Magic links, such as `/proc/self/fd/3`, are refused.
pub(crate) fn open_without_magic(path: &Path, flags: c_int) -> io::Result<OwnedFd> {
    open_at(borrow(libc::AT_FDCWD), path, flags, RESOLVE_NO_MAGICLINKS)
}

/// Unlocks a new terminal through its master and opens its slave without a path (ioctl_tty(2), Linux 4.13).
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

/// Makes a terminal the controlling terminal of this process's session.
pub(crate) fn take_terminal(terminal: &OwnedFd) -> io::Result<()> {
    // SAFETY: the descriptor is open and the argument is an integer.
    check(c_long::from(unsafe { libc::ioctl(terminal.as_raw_fd(), libc::TIOCSCTTY, 0) })).map(drop)
}

/// Takes ownership of descriptors that were received in a message.
pub(crate) fn adopt(fds: Vec<RawFd>) -> Vec<OwnedFd> {
    // SAFETY: the kernel has just created these descriptors for this process, so no other value owns them.
    fds.into_iter().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }).collect()
}

/// Borrows a descriptor in a forked child. The owner of the descriptor is a value in the parent.
pub(crate) fn borrow(fd: RawFd) -> std::os::fd::BorrowedFd<'static> {
    // SAFETY: used in forked children only, in which no value closes the copy before the process ends.
    unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) }
}

//! The executable that shims are started from: read-only for processes in pods.
//!
//! A shim forks the process that becomes a container. Until the container's program is executed, `/proc/self/exe` of the
//! entrypoint and `/proc/PID/exe` lead to the shim's executable. On the host's mount, root in a container could write to the
//! executable through such a descriptor when it no longer runs (CVE-2019-5736). So shims are executed from a detached
//! read-only mount. This costs no memory: the pages are those of the host's file.
#![allow(unsafe_code, reason = "open_tree and mount_setattr have no safe wrapper")]

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use nix::fcntl::{OFlag, open};
use nix::sys::stat::Mode;

/// The executable of this process, which is also the executable of shims, except in tests.
pub(crate) const OWN_EXECUTABLE: &str = "/proc/self/exe";

/// The executable of shims.
#[derive(Debug)]
pub(crate) struct ShimProgram {
    path: PathBuf,
    /// Keeps the mount alive.
    _file: Option<OwnedFd>,
}

// === impl ShimProgram ===

impl ShimProgram {
    /// Opens the executable. This process's executable gets a read-only mount. Another executable is used directly.
    pub(crate) fn open(program: &Path) -> io::Result<Self> {
        if program != Path::new(OWN_EXECUTABLE) {
            return Ok(Self { path: program.to_owned(), _file: None });
        }
        let file = read_only(program)?;
        Ok(Self { path: by_descriptor(&file), _file: Some(file) })
    }

    /// Path to execute, valid in child processes of this process.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

/// Opens an executable on a detached read-only mount.
///
/// The descriptor of open_tree(2) is closed afterwards. While it is open, the mount is in an anonymous namespace. In
/// such a namespace, root of any user namespace can clear the read-only flag (measured on Linux 6.18). After the close,
/// mount_setattr(2) refuses this.
fn read_only(program: &Path) -> io::Result<OwnedFd> {
    let tree = copy_mount(program)?;
    set_attributes(&tree, libc::MOUNT_ATTR_RDONLY, 0)?;
    Ok(open(&by_descriptor(&tree), OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty())?)
}

fn by_descriptor(file: &OwnedFd) -> PathBuf {
    format!("{}/{}", coracle_open_files::DIRECTORY, file.as_raw_fd()).into()
}

fn copy_mount(program: &Path) -> io::Result<OwnedFd> {
    let program = CString::new(program.as_os_str().as_bytes())?;
    let flags = libc::OPEN_TREE_CLONE | libc::OPEN_TREE_CLOEXEC;
    // SAFETY: the string outlives the call.
    let tree = unsafe { libc::syscall(libc::SYS_open_tree, libc::AT_FDCWD, program.as_ptr(), flags) };
    let Some(tree) = i32::try_from(tree).ok().filter(|tree| *tree >= 0) else {
        return Err(io::Error::last_os_error());
    };
    // SAFETY: the kernel has just created this descriptor for this process.
    Ok(unsafe { OwnedFd::from_raw_fd(tree) })
}

fn set_attributes(mount: &OwnedFd, set: u64, clear: u64) -> io::Result<()> {
    let attributes = libc::mount_attr { attr_set: set, attr_clr: clear, propagation: 0, userns_fd: 0 };
    // SAFETY: string and structure outlive the call, and the size is that of the structure.
    let done = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            &raw const attributes,
            std::mem::size_of_val(&attributes),
        )
    };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn the_executable_cannot_be_written_or_made_writable() {
        let dir = tempfile::tempdir().expect("directory");
        let program = dir.path().join("program");
        std::fs::copy("/bin/sleep", &program).expect("copy");
        let file = read_only(&program).expect("a mount of its own; this test needs root");
        let mut child = Command::new(by_descriptor(&file)).arg("1000").spawn().expect("it runs");
        let exe = format!("/proc/{}/exe", child.id());
        let exe = open(exe.as_str(), OFlag::O_PATH, Mode::empty()).expect("its program");
        child.kill().expect("kill");
        child.wait().expect("its end");
        assert!(set_attributes(&exe, 0, libc::MOUNT_ATTR_RDONLY).is_err());
        let write = std::fs::File::options().write(true).open(by_descriptor(&exe));
        assert_eq!(write.expect_err("it is read-only").raw_os_error(), Some(libc::EROFS));
    }
}

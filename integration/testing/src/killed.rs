//! Tests of processes that are killed: the test runs again in another process, which aborts at a fault point.

use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::within;

/// Environment variable of a process that [`run_until_killed`] starts.
const KILLED: &str = "CORACLE_TEST_KILLED";
/// Environment variable with the directory of a process that [`run_until_killed_in`] starts.
const DIR: &str = "CORACLE_TEST_KILLED_DIR";
/// The signal by which an abort ends a process.
const SIGABRT: i32 = 6;

/// Whether [`run_until_killed`] has started this process.
#[must_use]
pub fn is_to_be_killed() -> bool {
    std::env::var_os(KILLED).is_some()
}

/// The directory of this process, if [`run_until_killed_in`] has started it.
#[must_use]
pub fn killed_dir() -> Option<PathBuf> {
    std::env::var_os(DIR).map(PathBuf::from)
}

/// Like [`run_until_killed`]. The test finds the directory with [`killed_dir`].
///
/// # Panics
/// When the process cannot be started, or does not reach the fault point.
pub fn run_until_killed_in(test: &str, point: &str, dir: &Path) {
    run(test, point, Some(dir));
}

/// Runs a test of this program in another process, in the namespaces of the caller, until a fault point kills it.
///
/// # Panics
/// When the process cannot be started, or does not reach the fault point.
pub fn run_until_killed(test: &str, point: &str) {
    run(test, point, None);
}

#[expect(clippy::expect_used, reason = "a test panics")]
fn run(test: &str, point: &str, dir: Option<&Path>) {
    let program = std::env::current_exe().expect("the test program has a path");
    let mut command = Command::new(program);
    command.args(["--exact", test]).env(KILLED, "1").env("CORACLE_FAULT", point);
    if let Some(dir) = dir {
        command.env(DIR, dir);
    }
    let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn();
    let mut child = child.expect("the test program can be started");
    let status = within(60, || child.try_wait().transpose());
    let Some(status) = status else {
        child.kill().ok();
        child.wait().ok();
        panic!("{point} was not reached in time");
    };
    let status = status.expect("the test program is a child of this process");
    assert_eq!(status.signal(), Some(SIGABRT), "{point} was not reached: {status}");
}

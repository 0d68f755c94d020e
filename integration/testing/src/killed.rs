//! Tests of processes that are killed: the test runs again in another process, which aborts at a fault point.

use std::os::unix::process::ExitStatusExt as _;
use std::process::{Command, Stdio};

use crate::within;

/// Environment variable of a process that [`run_until_killed`] starts.
const KILLED: &str = "CORACLE_TEST_KILLED";
/// The signal by which an abort ends a process.
const SIGABRT: i32 = 6;

/// Whether [`run_until_killed`] has started this process.
#[must_use]
pub fn is_to_be_killed() -> bool {
    std::env::var_os(KILLED).is_some()
}

/// Runs a test of this program in another process, in the namespaces of the caller, until a fault point kills it.
///
/// # Panics
/// When the process cannot be started, or does not reach the fault point.
#[expect(clippy::expect_used, reason = "a test panics")]
pub fn run_until_killed(test: &str, point: &str) {
    let program = std::env::current_exe().expect("the test program has a path");
    let mut command = Command::new(program);
    command.args(["--exact", test]).env(KILLED, "1").env("CORACLE_FAULT", point);
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

//! Reuse of pids, in a pid namespace of the test. In that of the machine, other processes take pids at any time, and
//! other tests would get reused pids.

use std::fs;
use std::process::{Child, Command};

/// Environment variable of a process that [`run_with_own_pids`] starts.
const OWN_PIDS: &str = "CORACLE_TEST_OWN_PIDS";
/// The last pid that was given to a process of this pid namespace (proc_sys_kernel(5)).
const LAST_PID: &str = "/proc/sys/kernel/ns_last_pid";

/// A process that sleeps until the value is dropped.
#[derive(Debug)]
pub struct SleepingProcess(Child);

/// Whether [`run_with_own_pids`] has started this process.
#[must_use]
pub fn has_own_pids() -> bool {
    std::env::var_os(OWN_PIDS).is_some()
}

/// Runs a test of this program in another process, in a new pid namespace with its own /proc.
///
/// # Panics
/// When the test fails or does not exist, or without root privileges.
#[expect(clippy::expect_used, reason = "a test panics")]
pub fn run_with_own_pids(test: &str) {
    let program = std::env::current_exe().expect("the test program has a path");
    let mut command = Command::new("unshare");
    command.args(["--pid", "--fork", "--mount-proc", "--"]).arg(program);
    command.args(["--exact", test]).env(OWN_PIDS, "1");
    let output = command.output().expect("unshare can be started");
    let text = String::from_utf8_lossy(&output.stdout);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "{test}: {text}{error}");
}

/// Starts a process, passes its pid to `open`, ends the process, and starts another one with the same pid. Returns the
/// result of `open` and the second process.
///
/// # Panics
/// When [`run_with_own_pids`] has not started this process, or a process cannot be started.
#[expect(clippy::expect_used, reason = "a test panics")]
pub fn reuse_pid<T>(open: impl FnOnce(i32) -> T) -> (T, SleepingProcess) {
    assert!(has_own_pids(), "the test needs a pid namespace of its own");
    let first = SleepingProcess::start();
    let pid = first.pid();
    let opened = open(pid);
    drop(first);
    fs::write(LAST_PID, (pid - 1).to_string()).expect("the kernel has ns_last_pid");
    let second = SleepingProcess::start();
    assert_eq!(second.pid(), pid, "another process has taken the pid");
    (opened, second)
}

// === impl SleepingProcess ===

impl SleepingProcess {
    #[expect(clippy::expect_used, reason = "a test panics")]
    fn start() -> Self {
        Self(Command::new("sleep").arg("1000").spawn().expect("sleep can be started"))
    }

    /// The pid in the pid namespace of the test.
    #[must_use]
    pub fn pid(&self) -> i32 {
        self.0.id().cast_signed()
    }
}

impl Drop for SleepingProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pid_of_an_ended_process_is_reused() {
        if !has_own_pids() {
            return run_with_own_pids("pids::tests::the_pid_of_an_ended_process_is_reused");
        }
        let (first, second) = reuse_pid(|pid| pid);
        assert_eq!(first, second.pid());
    }

    #[test]
    #[should_panic(expected = "0 passed")]
    fn a_test_that_does_not_exist_fails() {
        run_with_own_pids("pids::tests::does_not_exist");
    }
}

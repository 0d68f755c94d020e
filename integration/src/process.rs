//! Processes under test: start with a log file, end with a signal, print the end of the log after a failure.

use std::fmt::Display;
use std::fs::{self, File};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Output, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::within;

/// Lines of a log that are printed after a failure.
const PRINTED_LINES: usize = 60;
/// Seconds after which a process that does not exit is killed, on a fast machine.
const EXIT_SECONDS: u64 = 60;

/// Starts a program without standard input; its output is appended to a file.
pub(crate) fn start(mut command: Command, log: &Path) -> Child {
    let log = File::options().create(true).append(true).open(log).unwrap();
    command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap()
}

/// Sends a signal to the process, if it runs, and waits until it exits.
pub(crate) fn end(process: &mut Option<Child>, signal: Signal) {
    if let Some(mut process) = process.take() {
        let pid = Pid::from_raw(i32::try_from(process.id()).unwrap());
        kill(pid, signal).ok();
        // A stopped process handles signals after SIGCONT.
        kill(pid, Signal::SIGCONT).ok();
        wait_for_exit(&mut process);
    }
}

/// Waits until the process exits. A process that does not exit in time is killed and fails the test.
///
/// # Panics
/// When the process does not exit in time.
pub fn wait_for_exit(process: &mut Child) -> ExitStatus {
    if let Some(status) = within(EXIT_SECONDS, || process.try_wait().unwrap()) {
        return status;
    }
    process.kill().unwrap();
    let status = process.wait().unwrap();
    // A second panic would abort the test program.
    assert!(std::thread::panicking(), "process {} did not exit in time", process.id());
    status
}

/// Standard error of a program.
#[must_use]
pub fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Standard output of a program that must have succeeded.
///
/// # Panics
/// When the program failed. The message is its standard error.
#[track_caller]
pub fn checked_stdout(output: &Output) -> String {
    assert!(output.status.success(), "{}", stderr(output));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Number of a field of `/proc/<pid>/status`, for example `PPid`. Sizes such as `VmRSS` are in kB.
///
/// # Panics
/// When the process does not exist, or the field has no number.
#[must_use]
pub fn process_status(pid: impl Display, field: &str) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let value = status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
    value.and_then(|value| value.split_whitespace().next()).unwrap().parse().unwrap()
}

/// Prints the last lines of a log.
pub(crate) fn print_end(name: &str, log: &Path) {
    let text = fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    eprintln!("--- the end of the log of {name}:");
    lines.iter().skip(lines.len().saturating_sub(PRINTED_LINES)).for_each(|line| eprintln!("{line}"));
}

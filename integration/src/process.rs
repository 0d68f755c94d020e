//! Processes under test: start with a log file, end with a signal, print the end of the log after a failure.

use std::fs::{self, File};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// Lines of a log that are printed after a failure.
const PRINTED_LINES: usize = 60;

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
        process.wait().unwrap();
    }
}

/// Prints the last lines of a log.
pub(crate) fn print_end(name: &str, log: &Path) {
    let text = fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    eprintln!("--- the end of the log of {name}:");
    lines.iter().skip(lines.len().saturating_sub(PRINTED_LINES)).for_each(|line| eprintln!("{line}"));
}

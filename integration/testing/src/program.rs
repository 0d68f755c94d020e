//! Programs that tests run.

use std::process::Command;

/// Runs a program and returns its output.
///
/// # Panics
/// When the program cannot be started or fails, or when its output is not UTF-8. The message contains the command and
/// what the program wrote to its standard error.
#[track_caller]
pub fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output();
    let output = output.unwrap_or_else(|error| panic!("cannot start {program}: {error}"));
    assert!(output.status.success(), "{program} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap_or_else(|error| panic!("{program} {arguments:?}: {error}"))
}

/// Runs `ip` with the words of a line and returns its output.
///
/// # Panics
/// When `ip` fails. The message contains the command and the error.
#[track_caller]
pub fn ip(line: &str) -> String {
    run("ip", &line.split_whitespace().collect::<Vec<_>>())
}

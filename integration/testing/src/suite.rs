//! Test programs with their own `main`: flags, filters and output as with Rust's test harness.

use std::io::Write;
use std::process::ExitCode;
use std::time::Instant;

use libtest_mimic::{Arguments, Completion, Trial};

use crate::skipped::take_reason;

/// A test: its name, and a function that panics if the test fails.
pub type Test = (&'static str, Box<dyn FnOnce() + Send>);

/// A test program, with the arguments of Rust's test harness (`--help` lists them).
pub struct Suite {
    arguments: Arguments,
}

// === impl Suite ===

impl Suite {
    /// Parses the arguments of this process. Ends the process if they are invalid, or with `--help`.
    #[must_use]
    pub fn from_args() -> Self {
        // Tests share a machine, and tests that unshare namespaces need the main thread.
        Self { arguments: Arguments { test_threads: Some(1), ..Arguments::from_args() } }
    }

    /// Whether the tests run. With `--list` only their names are printed.
    #[must_use]
    pub fn is_run(&self) -> bool {
        !self.arguments.list
    }

    /// Runs the tests that the filters select, in this order, on the calling thread. With the environment variable
    /// `TEST_PART`, only the tests of that part run: scripts/test-runner divides slow programs among processes.
    ///
    /// No selected test is a success, as in Rust's harness: cargo gives the same filter, also with `--exact`, to all
    /// programs, and a part may have none of the tests. scripts/test fails if no program has a selected test.
    ///
    /// # Panics
    /// If `TEST_PART` does not have the form NUMBER/PARTS.
    #[must_use]
    pub fn run(self, tests: Vec<Test>) -> ExitCode {
        let part = std::env::var("TEST_PART").ok();
        let tests = tests.into_iter().enumerate().filter(|(index, _)| is_in_part(*index, part.as_deref()));
        let trials = tests.map(|(_, (name, test))| {
            Trial::ignorable_test(name, move || {
                let start = Instant::now();
                drop(take_reason());
                test();
                record_time(name, start);
                Ok(match take_reason() {
                    Some(reason) => Completion::ignored_with(reason),
                    None => Completion::Completed,
                })
            })
        });
        libtest_mimic::run(&self.arguments, trials.collect()).exit_code()
    }
}

/// Whether the test with this index belongs to a part "NUMBER/PARTS", which has every PARTS-th test. NUMBER is below
/// PARTS. If no part is given, every test belongs.
///
/// # Panics
/// If the text does not have the form NUMBER/PARTS.
fn is_in_part(index: usize, part: Option<&str>) -> bool {
    let Some(part) = part else { return true };
    let (number, parts) = part.split_once('/').unwrap_or_default();
    match (number.parse::<usize>(), parts.parse::<usize>()) {
        (Ok(number), Ok(parts)) if number < parts => index % parts == number,
        _ => panic!("TEST_PART is {part:?} instead of NUMBER/PARTS"),
    }
}

/// Appends "SECONDS PROGRAM TEST" to the file that `TEST_TIMES` names, as scripts/test-runner does for other programs.
fn record_time(test: &str, start: Instant) {
    let Some(path) = std::env::var_os("TEST_TIMES") else { return };
    let program = std::env::var("TEST_PROGRAM").unwrap_or_default();
    let line = format!("{:.3} {program} {test}\n", start.elapsed().as_secs_f64());
    let file = std::fs::File::options().append(true).open(path);
    // The times are information only: the test has passed.
    let _unwritten = file.and_then(|mut file| file.write_all(line.as_bytes()));
}

#[cfg(test)]
mod tests {
    use super::is_in_part;

    #[test]
    fn each_test_is_in_one_part() {
        for index in 0..10 {
            let parts = ["0/3", "1/3", "2/3"].into_iter();
            assert_eq!(parts.filter(|part| is_in_part(index, Some(*part))).count(), 1, "{index}");
            assert!(is_in_part(index, None));
        }
    }

    #[test]
    fn other_texts_are_refused() {
        for text in ["", "1", "3/3", "0/0", "a/2", "-1/2"] {
            assert!(std::panic::catch_unwind(|| is_in_part(0, Some(text))).is_err(), "{text:?}");
        }
    }
}

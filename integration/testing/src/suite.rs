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

    /// Runs the tests that the filters select, in this order, on the calling thread.
    #[must_use]
    pub fn run(self, tests: Vec<Test>) -> ExitCode {
        let trials = tests.into_iter().map(|(name, test)| {
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

/// Appends "SECONDS PROGRAM TEST" to the file that `TEST_TIMES` names, as scripts/test-runner does for other programs.
fn record_time(test: &str, start: Instant) {
    let Some(path) = std::env::var_os("TEST_TIMES") else { return };
    let program = std::env::var("TEST_PROGRAM").unwrap_or_default();
    let line = format!("{:.3} {program} {test}\n", start.elapsed().as_secs_f64());
    let file = std::fs::File::options().append(true).open(path);
    // The times are information only: the test has passed.
    let _unwritten = file.and_then(|mut file| file.write_all(line.as_bytes()));
}

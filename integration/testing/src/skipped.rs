//! Skipped tests: recorded in a file, so that a run can compare them with the expected list.

use std::cell::Cell;
use std::io::Write;

/// Environment variable with the path of the file to which skipped tests are appended.
const FILE: &str = "TEST_SKIPS";

thread_local! {
    static REASON: Cell<Option<String>> = const { Cell::new(None) };
}

/// Ends the current test as skipped. The machine lacks something that the test needs; the argument is the reason.
///
/// `scripts/test` fails if the skipped tests differ from `integration/skipped-tests`. Call this macro directly in the
/// test function or in a closure of it, because the record contains the name of the enclosing function.
#[macro_export]
macro_rules! skip {
    ($reason:expr) => {{
        $crate::record_skip($crate::test_name(&|| {}), $reason);
        return;
    }};
}

/// Records that a part of the current test is skipped, because the machine lacks something. The test continues.
#[macro_export]
macro_rules! skip_part {
    ($reason:expr) => {
        $crate::record_skipped_part($crate::test_name(&|| {}), $reason)
    };
}

/// The path of the function in which `closure` was written.
pub fn test_name<T>(_closure: &T) -> &'static str {
    let name = std::any::type_name::<T>();
    name.split("::{{closure}}").next().unwrap_or(name)
}

/// Records that the test on this thread is skipped. [`skip!`](crate::skip) calls this.
///
/// # Panics
/// When the file that `TEST_SKIPS` names cannot be written.
pub fn record_skip(test: &str, reason: &str) {
    record_skipped_part(test, reason);
    REASON.set(Some(reason.to_owned()));
}

/// Prints a line and appends it to the file that `TEST_SKIPS` names. [`skip_part!`](crate::skip_part) calls this.
///
/// # Panics
/// When the file cannot be written.
#[expect(clippy::expect_used, reason = "a lost record would hide a skipped test")]
pub fn record_skipped_part(test: &str, reason: &str) {
    eprintln!("skipped: {test}: {reason}");
    if let Some(path) = std::env::var_os(FILE) {
        let file = std::fs::File::options().create(true).append(true).open(path);
        file.and_then(|mut file| writeln!(file, "{test}: {reason}")).expect("TEST_SKIPS is writable");
    }
}

/// Why the test on this thread was skipped. Clears the reason.
pub(crate) fn take_reason() -> Option<String> {
    REASON.take()
}

/// Why a pod with a user namespace is not tested: see [`has_idmapped_tmpfs`].
pub const NO_IDMAPPED_TMPFS: &str = "Linux before 6.3 has no idmapped mounts of a tmpfs";

/// Whether this kernel has idmapped mounts of a tmpfs, since Linux 6.3. Kubernetes requires them for pods with a user
/// namespace.
pub fn has_idmapped_tmpfs() -> bool {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let mut numbers = release.split(['.', '-']).map_while(|part| part.trim().parse::<u32>().ok());
    (numbers.next(), numbers.next()) >= (Some(6), Some(3))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_skipped_test_has_the_name_of_its_function() {
        let inner = || test_name(&|| {});
        let name = inner();
        assert_eq!(name, "coracle_testing::skipped::tests::a_skipped_test_has_the_name_of_its_function");
    }

    #[test]
    fn the_reason_is_taken_once() {
        REASON.set(Some("an example".to_owned()));
        assert_eq!(take_reason().as_deref(), Some("an example"));
        assert_eq!(take_reason(), None);
    }
}

//! An error and its sources as one line of text, for places that only take text: gRPC status messages, Kubernetes
//! conditions and events, files, terminals.
//!
//! Log fields do not need it: `tracing` prints the sources of an error itself.

use std::error::Error;

/// The error and its sources, outermost first, joined with `: `.
///
/// Some libraries repeat the text of a source in their own text. So a source is skipped if the line already ends with
/// its text. An error is skipped if the text of its source begins with the error's own text: `cannot pull x` before
/// `cannot pull x: not found`.
///
/// The numbers of the kernel's errors are left out. In `No such file or directory (os error 2)` the number repeats the
/// text.
pub fn chain(error: &dyn Error) -> String {
    let mut line = without_numbers(error.to_string());
    // Where the text of the last error begins.
    let mut last = 0;
    let mut source = error.source();
    while let Some(error) = source {
        let text = without_numbers(error.to_string());
        if !line.ends_with(&text) {
            if line.get(last..).is_some_and(|before| begins_with(&text, before)) {
                line.truncate(last);
            } else {
                line.push_str(": ");
            }
            last = line.len();
            line.push_str(&text);
        }
        source = error.source();
    }
    line
}

/// The text without ` (os error N)`, which Rust's standard library adds to the kernel's errors.
fn without_numbers(text: String) -> String {
    const START: &str = " (os error ";
    if !text.contains(START) {
        return text;
    }
    let (mut plain, mut rest) = (String::with_capacity(text.len()), text.as_str());
    while let Some((before, after)) = rest.split_once(START) {
        plain.push_str(before);
        rest = match after.split_once(')') {
            Some((number, behind)) if number.bytes().all(|byte| byte.is_ascii_digit()) => behind,
            _ => {
                plain.push_str(START);
                after
            }
        };
    }
    plain.push_str(rest);
    plain
}

/// Whether an error's text has the form `operation: cause` with this operation.
fn begins_with(text: &str, operation: &str) -> bool {
    text.strip_prefix(operation).is_some_and(|cause| cause.starts_with(": "))
}

#[cfg(test)]
mod tests {
    use std::fmt;

    use super::*;

    #[derive(Debug)]
    struct Failure(&'static str, Option<Box<Failure>>);

    impl fmt::Display for Failure {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str(self.0)
        }
    }

    impl Error for Failure {
        fn source(&self) -> Option<&(dyn Error + 'static)> {
            self.1.as_deref().map(|source| source as _)
        }
    }

    fn failure(texts: &[&'static str]) -> Failure {
        let (first, rest) = texts.split_first().unwrap();
        Failure(first, (!rest.is_empty()).then(|| Box::new(failure(rest))))
    }

    #[test]
    fn sources_follow_their_errors() {
        assert_eq!(chain(&failure(&["a"])), "a");
        assert_eq!(
            chain(&failure(&["cannot start x", "cannot open y", "not found"])),
            "cannot start x: cannot open y: not found"
        );
    }

    #[test]
    fn a_repeated_source_is_skipped() {
        assert_eq!(chain(&failure(&["cannot open y: not found", "not found"])), "cannot open y: not found");
        assert_eq!(chain(&failure(&["a: b", "b", "c"])), "a: b: c");
    }

    #[test]
    fn the_numbers_of_kernel_errors_are_left_out() {
        let missing = std::io::Error::from_raw_os_error(2);
        assert_eq!(chain(&missing), "No such file or directory");
        let texts = ["cannot open x", "cannot read x: Is a directory (os error 21) (twice)", "(os error 21)"];
        assert_eq!(
            chain(&failure(&texts)),
            "cannot open x: cannot read x: Is a directory (twice): (os error 21)"
        );
        assert_eq!(chain(&failure(&["a (os error x) (os error "])), "a (os error x) (os error ");
    }

    #[test]
    fn a_repeated_operation_is_skipped() {
        assert_eq!(
            chain(&failure(&["cannot pull x", "cannot pull x: no host", "no host"])),
            "cannot pull x: no host"
        );
        assert_eq!(chain(&failure(&["cannot pull x", "cannot pull x", "no host"])), "cannot pull x: no host");
        assert_eq!(chain(&failure(&["a", "cannot pull x", "cannot pull x: b"])), "a: cannot pull x: b");
        assert_eq!(chain(&failure(&["a", "ab: c"])), "a: ab: c");
    }
}

//! Progress of long operations: a line on a terminal, which the next line overwrites. If the output is not a terminal,
//! nothing is written.

use std::io::Write as _;

use crate::terminal;

/// Replaces the line.
pub(super) fn show(line: &str) {
    let mut errors = std::io::stderr();
    if terminal::has_escapes(&errors) {
        // A closed terminal does not stop the operation.
        let _gone = write!(errors, "\r{line}\x1b[K").and_then(|()| errors.flush());
    }
}

/// Removes the line when it is dropped: an error message starts on an empty line.
pub(super) struct ClearAtEnd;

impl Drop for ClearAtEnd {
    fn drop(&mut self) {
        clear();
    }
}

/// Removes the line.
pub(super) fn clear() {
    show("");
}

//! Progress of long operations: a line on a terminal, which the next one overwrites. Elsewhere nothing is written.

use std::io::{IsTerminal as _, Write as _};

/// Replaces the line.
pub(super) fn show(line: &str) {
    let mut terminal = std::io::stderr();
    if terminal.is_terminal() {
        // A closed terminal does not stop the operation.
        let _gone = write!(terminal, "\r{line}\x1b[K").and_then(|()| terminal.flush());
    }
}

#[cfg(feature = "controlplane")]
/// Removes the line.
pub(super) fn clear() {
    show("");
}

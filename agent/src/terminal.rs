//! Terminals: whether a stream may get colours and other escape sequences.

use std::ffi::OsStr;
use std::io::IsTerminal;

/// Whether the stream is a terminal that supports escape sequences, and the user has not disabled colours.
pub(crate) fn has_escapes(stream: &impl IsTerminal) -> bool {
    let variable = |name| std::env::var_os(name).unwrap_or_default();
    stream.is_terminal() && allow_escapes(&variable("TERM"), &variable("NO_COLOR"))
}

/// `TERM=dumb` means a terminal without escape sequences. If `NO_COLOR` has a value, colours are disabled
/// (no-color.org).
fn allow_escapes(term: &OsStr, no_color: &OsStr) -> bool {
    term != "dumb" && no_color.is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dumb_terminals_and_no_color_disable_colours() {
        let allow = |term: &str, no_color: &str| allow_escapes(term.as_ref(), no_color.as_ref());
        assert!(allow("xterm-256color", "") && allow("", ""));
        assert!(!allow("dumb", "") && !allow("xterm", "1"));
    }
}

//! Text of containers, registries, runtimes and other peers, fit for events, statuses and logs.

/// At most `most` bytes of a text, without control characters other than line ends and tabs: terminals obey some
/// (CVE-2021-25743).
pub(crate) fn printable(text: &str, most: usize) -> String {
    let mut clean = String::with_capacity(text.len().min(most));
    for character in text.chars() {
        let shown = match character {
            '\n' | '\t' => character,
            control if control.is_control() => '\u{fffd}',
            other => other,
        };
        if clean.len() + shown.len_utf8() > most {
            break;
        }
        clean.push(shown);
    }
    clean
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_short_and_does_not_drive_a_terminal() {
        assert_eq!(printable("a\tb\nc", 100), "a\tb\nc");
        assert_eq!(printable("\x1b[2Jx\r\u{9b}", 100), "\u{fffd}[2Jx\u{fffd}\u{fffd}");
        assert_eq!(printable("ééé", 5), "éé");
        assert_eq!(printable(&"x".repeat(1 << 20), 1024).len(), 1024);
    }
}

//! Untrusted text (of containers, registries, runtimes) for events, statuses and logs.

/// At most `max_bytes` bytes of a text. Control characters other than line ends and tabs are replaced, because
/// terminals interpret some of these characters as commands (CVE-2021-25743).
pub fn printable(text: &str, max_bytes: usize) -> String {
    let mut clean = String::with_capacity(text.len().min(max_bytes));
    for character in text.chars() {
        let shown = match character {
            '\n' | '\t' => character,
            control if control.is_control() => '\u{fffd}',
            other => other,
        };
        if clean.len() + shown.len_utf8() > max_bytes {
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
    fn text_is_cut_and_has_no_control_characters() {
        assert_eq!(printable("a\tb\nc", 100), "a\tb\nc");
        assert_eq!(printable("\x1b[2Jx\r\u{9b}", 100), "\u{fffd}[2Jx\u{fffd}\u{fffd}");
        assert_eq!(printable("ééé", 5), "éé");
        assert_eq!(printable(&"x".repeat(1 << 20), 1024).len(), 1024);
    }
}

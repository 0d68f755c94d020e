//! Durations in Go's syntax: `1h30m`, `1.5s`, `0`.

use std::time::Duration;

use jiff::SignedDuration;

/// Parses a duration. None if the text is not a duration, or if the duration is negative.
#[must_use]
pub fn parse(text: &str) -> Option<Duration> {
    if text == "0" {
        return Some(Duration::ZERO);
    }
    text.parse::<SignedDuration>().ok()?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::parse;

    #[test]
    fn durations_in_the_syntax_of_go_are_parsed() {
        for (text, milliseconds) in [
            ("0", Some(0)),
            ("0s", Some(0)),
            ("10m", Some(600_000)),
            ("1h30m0.5s", Some(5_400_500)),
            ("250ms", Some(250)),
            ("", None),
            ("10", None),
            ("-1s", None),
            ("1d", None),
            ("s", None),
            ("99999999999999999999h", None),
        ] {
            assert_eq!(parse(text), milliseconds.map(Duration::from_millis), "{text:?}");
        }
    }
}

//! Durations of Go: `1h2m3.5s`.

/// Maximum length of a text in bytes. A field is read again at each use, so a long text would cost much time.
const MAX_LENGTH: usize = 1024;

/// The duration in nanoseconds. `None` if the text is not a duration, is too long or is out of range.
pub fn parse(text: &str) -> Option<i64> {
    if text.len() > MAX_LENGTH {
        return None;
    }
    let (negative, mut rest) = match text.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    };
    if rest == "0" {
        return Some(0);
    }
    if rest.is_empty() {
        return None;
    }
    let mut total: i128 = 0;
    while !rest.is_empty() {
        let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let (number, after) = rest.split_at(end);
        let end = after.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(after.len());
        let (unit, after) = after.split_at(end);
        total = total.checked_add(part(number, unit)?)?;
        rest = after;
    }
    i64::try_from(if negative { -total } else { total }).ok()
}

fn part(number: &str, unit: &str) -> Option<i128> {
    let scale: i128 = match unit {
        "ns" => 1,
        "us" | "µs" | "μs" => 1_000,
        "ms" => 1_000_000,
        "s" => 1_000_000_000,
        "m" => 60_000_000_000,
        "h" => 3_600_000_000_000,
        _ => return None,
    };
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if (whole.is_empty() && fraction.is_empty()) || number.len() > 40 || fraction.contains('.') {
        return None;
    }
    let mut total = if whole.is_empty() { 0 } else { whole.parse::<i128>().ok()?.checked_mul(scale)? };
    let mut digit_scale = scale;
    for digit in fraction.bytes() {
        digit_scale /= 10;
        total += i128::from(digit - b'0') * digit_scale;
    }
    Some(total)
}

/// The duration as CEL prints it: seconds.
pub fn print(nanoseconds: i64) -> String {
    let sign = if nanoseconds < 0 { "-" } else { "" };
    let magnitude = nanoseconds.unsigned_abs();
    let (seconds, fraction) = (magnitude / 1_000_000_000, magnitude % 1_000_000_000);
    if fraction == 0 {
        return format!("{sign}{seconds}s");
    }
    let digits = format!("{fraction:09}");
    format!("{sign}{seconds}.{}s", digits.trim_end_matches('0'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_of_go_are_parsed_and_printed_as_seconds() {
        assert_eq!(parse("1h2m3.5s"), Some(3_723_500_000_000));
        assert_eq!(parse("-1.5ms"), Some(-1_500_000));
        assert_eq!(parse("0"), Some(0));
        for bad in ["", "1", "1x", "s", "1.2.3s", "99999999999h", "-", "."] {
            assert_eq!(parse(bad), None, "{bad}");
        }
        assert_eq!(print(1_500_000_000), "1.5s");
    }
}

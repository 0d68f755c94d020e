//! Durations in the form of Go's `time.ParseDuration`, such as `1h30m`, `1.5h` or `90s`.

/// Maximum of the nanoseconds without their sign.
const MAX: u64 = 1 << 63;

/// Parses a duration: nanoseconds. `None` if the text is not a duration, or longer than 292 years.
pub(crate) fn nanoseconds(text: &str) -> Option<i64> {
    let is_negative = text.starts_with('-');
    let mut rest = text.strip_prefix(['-', '+']).unwrap_or(text);
    if rest == "0" {
        return Some(0);
    }
    if rest.is_empty() {
        return None;
    }
    let mut total = 0_u64;
    while !rest.is_empty() {
        let part;
        (part, rest) = first_part(rest)?;
        total = total.checked_add(part).filter(|total| *total <= MAX)?;
    }
    if is_negative { 0_i64.checked_sub_unsigned(total) } else { i64::try_from(total).ok() }
}

/// The first number with its unit in nanoseconds, and the rest of the text.
fn first_part(text: &str) -> Option<(u64, &str)> {
    let (whole, rest) = digits(text);
    let (fraction, rest) = rest.strip_prefix('.').map_or(("", rest), digits);
    if whole.is_empty() && fraction.is_empty() {
        return None;
    }
    let end = rest.find(|c: char| c == '.' || c.is_ascii_digit()).unwrap_or(rest.len());
    let (unit, rest) = rest.split_at(end);
    let unit: u64 = match unit {
        "h" => 3_600_000_000_000,
        "m" => 60_000_000_000,
        "s" => 1_000_000_000,
        "ms" => 1_000_000,
        // The micro sign, and the Greek letter.
        "us" | "\u{b5}s" | "\u{3bc}s" => 1_000,
        "ns" => 1,
        _ => return None,
    };
    let whole: u64 = if whole.is_empty() { 0 } else { whole.parse().ok()? };
    let whole = whole.checked_mul(unit).filter(|whole| *whole <= MAX)?;
    Some((whole.checked_add(part_of(unit, fraction))?, rest))
}

/// The part of a unit that the digits after the decimal point stand for. As in Go, digits that exceed 64 bits are
/// ignored, and the result has the precision of a floating-point number.
fn part_of(unit: u64, fraction: &str) -> u64 {
    let (mut value, mut scale) = (0_u64, 1.0_f64);
    for digit in fraction.bytes() {
        let next =
            value.checked_mul(10).and_then(|next| next.checked_add(u64::from(digit.wrapping_sub(b'0'))));
        let Some(next) = next.filter(|next| *next <= MAX) else { break };
        (value, scale) = (next, scale * 10.0);
    }
    // The conversion to an integer drops the fraction.
    (value as f64 * (unit as f64 / scale)) as u64
}

/// The digits at the start of a text, and the rest.
fn digits(text: &str) -> (&str, &str) {
    text.split_at(text.bytes().take_while(u8::is_ascii_digit).count())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_have_the_same_value_as_in_go() {
        const SECOND: i64 = 1_000_000_000;
        for (text, expect) in [
            ("0", Some(0)),
            ("-0", Some(0)),
            ("+5s", Some(5 * SECOND)),
            ("-1.5h", Some(-5400 * SECOND)),
            ("1h2m3s4ms5us6ns", Some(3723 * SECOND + 4_005_006)),
            ("1.s", Some(SECOND)),
            (".5s", Some(SECOND / 2)),
            ("0.100000000000000000000h", Some(360 * SECOND)),
            ("0.9223372036854775807h", Some(3_320_413_933_267)),
            ("0.99999999999999999999h", Some(3600 * SECOND)),
            ("9223372036854775807ns", Some(i64::MAX)),
            ("9223372036854775808ns", None),
            ("-9223372036854775808ns", Some(i64::MIN)),
            ("-9223372036854775809ns", None),
            ("9223372036s854775808ns", None),
            ("3000000h", None),
            ("1", None),
            ("1h ", None),
            (" 1h", None),
            ("1H", None),
            ("", None),
            (".", None),
            ("-.s", None),
            ("+-1s", None),
            ("00", None),
        ] {
            assert_eq!(nanoseconds(text), expect, "for {text:?}");
        }
    }
}

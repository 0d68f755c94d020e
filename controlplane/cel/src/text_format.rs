//! Formats of texts that schemas and CEL expressions share (`kube-openapi/pkg/validation/strfmt`).

/// Whether the text is a UUID. Upper case is allowed, and each dash may be absent.
pub fn is_uuid(text: &str) -> bool {
    let mut rest = text;
    for (index, length) in [8, 4, 4, 4, 12].into_iter().enumerate() {
        if index > 0 {
            rest = rest.strip_prefix('-').unwrap_or(rest);
        }
        let Some((group, after)) = rest.split_at_checked(length) else { return false };
        if !group.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return false;
        }
        rest = after;
    }
    rest.is_empty()
}

/// Whether the text is base64 with padding. An empty text is not valid.
pub fn is_base64(text: &str) -> bool {
    let digits = text.trim_end_matches('=');
    let padding = text.len() - digits.len();
    !text.is_empty()
        && text.len().is_multiple_of(4)
        && padding <= 2
        && digits.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'/'))
}

/// Whether the text is a date, `2006-01-02`.
pub fn is_date(text: &str) -> bool {
    text.len() == 10 && text.parse::<jiff::civil::Date>().is_ok()
}

/// Whether the text is a date and a time with a zone. As upstream, only the form of the zone is checked.
pub fn is_date_time(text: &str) -> bool {
    let text = text.to_ascii_lowercase();
    let mut parts = text.split('t');
    match (parts.next(), parts.next()) {
        (Some(date), Some(time)) => is_date(date) && is_time(time),
        _ => false,
    }
}

/// Whether the text is a time (`15:04:05`), an optional fraction and a zone, in lower case.
fn is_time(text: &str) -> bool {
    let Some((time, rest)) = text.split_at_checked(8) else { return false };
    if !fits(time, "##:##:##") || !is_in_range(time) {
        return false;
    }
    // Upstream's expression allows any separator before the fraction.
    let mut characters = rest.chars();
    let fraction = match (rest.starts_with(['z', '+', '-']), characters.next()) {
        (false, Some(_)) => {
            let after = characters.as_str().trim_start_matches(|digit: char| digit.is_ascii_digit());
            if after.len() == characters.as_str().len() {
                return false;
            }
            after
        }
        _ => rest,
    };
    fraction == "z" || fits(fraction, "+##:##") || fits(fraction, "-##:##")
}

/// Whether the hour is at most 23, and minute and second are at most 59.
fn is_in_range(time: &str) -> bool {
    let mut parts = time.split(':');
    parts.next().is_some_and(|hour| hour <= "23") && parts.all(|part| part <= "59")
}

/// Whether the text has the form: `#` stands for a digit, another character for itself.
fn fits(text: &str, form: &str) -> bool {
    text.len() == form.len()
        && text.bytes().zip(form.bytes()).all(|(byte, wanted)| match wanted {
            b'#' => byte.is_ascii_digit(),
            _ => byte == wanted,
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(is_valid: fn(&str) -> bool, good: &[&str], bad: &[&str]) {
        for text in good {
            assert!(is_valid(text), "{text}");
        }
        for text in bad {
            assert!(!is_valid(text), "{text}");
        }
    }

    #[test]
    fn formats_are_those_of_upstream() {
        check(
            is_uuid,
            &["123e4567-e89b-12d3-a456-426614174000", "123E4567e89b12d3a456-426614174000"],
            &[
                "1-23e4567e89b12d3a456426614174000",
                "123e4567-e89b-12d3-a456-42661417400",
                "{}",
                "--------",
                "",
            ],
        );
        check(
            is_base64,
            &["aGVsbG8=", "YWJj", "YQ==", "YR=="],
            &["", "YQ=", "YQ", "Y===", "a-_b", "YQ==YQ=="],
        );
        check(is_date, &["2021-01-01", "2024-02-29"], &["20210101", "2021-02-29", "2021-1-1", ""]);
        check(
            is_date_time,
            &["2021-01-01T00:00:00Z", "2021-01-01t23:59:59.5z", "2021-01-01T00:00:00,25+99:99"],
            &[
                "2021-01-01",
                "2021-01-01T24:00:00Z",
                "2021-01-01T00:60:00Z",
                "2021-01-01T00:00:00",
                "2021-01-01T00:00:00.Z",
                "2021-01-01 00:00:00Z",
                "2021-01-01T00:00:00Zé",
            ],
        );
    }
}

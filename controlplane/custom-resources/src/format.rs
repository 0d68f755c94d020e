//! Formats of texts (`kube-openapi/pkg/validation/strfmt`). An unknown format is not checked, as upstream.

use std::net::{Ipv4Addr, Ipv6Addr};
use std::sync::LazyLock;

use coracle_cel::text_format;
use regex::Regex;

/// Whether the text has the format. A format that is unknown or empty fits every text.
pub(crate) fn fits(format: &str, text: &str) -> bool {
    match format.replace('-', "").as_str() {
        "uri" => coracle_cel::go_url::GoUrl::check(text).is_ok(),
        "email" => is_email(text),
        "hostname" => {
            matches(&HOSTNAME, text) && text.split('.').all(|label| label.len() <= 63) && text.len() <= 255
        }
        "ipv4" => text.parse::<Ipv4Addr>().is_ok(),
        "ipv6" => text.parse::<Ipv6Addr>().is_ok(),
        "cidr" => {
            coracle_values::names::has_prefix_length(text) && text.parse::<ipnetwork::IpNetwork>().is_ok()
        }
        "mac" => is_mac(text),
        "uuid" => text_format::is_uuid(text),
        "uuid3" => text_format::is_uuid(text) && uuid_version(text) == Some('3'),
        "uuid4" => text_format::is_uuid(text) && uuid_version(text) == Some('4') && is_rfc_variant(text),
        "uuid5" => text_format::is_uuid(text) && uuid_version(text) == Some('5') && is_rfc_variant(text),
        "bsonobjectid" => text.len() == 24 && text.bytes().all(|byte| byte.is_ascii_hexdigit()),
        "isbn" => is_isbn10(text) || is_isbn13(text),
        "isbn10" => is_isbn10(text),
        "isbn13" => is_isbn13(text),
        "creditcard" => matches(&CREDIT_CARD, &digits(text)),
        "ssn" => matches(&SSN, text),
        "hexcolor" => matches(&HEX_COLOR, text),
        "rgbcolor" => matches(&RGB_COLOR, text),
        "byte" => text_format::is_base64(text),
        "date" => text_format::is_date(text),
        "datetime" => text_format::is_date_time(text),
        "duration" => coracle_cel::duration::parse(text).is_some() || matches(&SCALA_DURATION, text),
        "k8sshortname" => coracle_values::names::dns1123_label(text).is_empty(),
        "k8slongname" => coracle_values::names::dns1123_subdomain(text).is_empty(),
        _ => true,
    }
}

/// Whether upstream supports the format for the type. Unsupported formats get a warning.
pub(crate) fn is_known(kind: &str, format: &str) -> bool {
    const TEXTS: &[&str] = &[
        "uri",
        "email",
        "hostname",
        "ipv4",
        "ipv6",
        "cidr",
        "mac",
        "uuid",
        "uuid3",
        "uuid4",
        "uuid5",
        "bsonobjectid",
        "isbn",
        "isbn10",
        "isbn13",
        "creditcard",
        "ssn",
        "hexcolor",
        "rgbcolor",
        "byte",
        "password",
        "date",
        "datetime",
        "duration",
        "k8sshortname",
        "k8slongname",
    ];
    match kind {
        "" | "string" => TEXTS.contains(&format.replace('-', "").as_str()),
        "integer" => matches!(format, "int32" | "int64"),
        "number" => matches!(format, "float" | "double"),
        _ => false,
    }
}

type Expression = LazyLock<Option<Regex>>;

static HOSTNAME: Expression =
    LazyLock::new(|| Regex::new(r"^[a-zA-Z0-9\p{L}]([a-zA-Z0-9\p{L}.-]*[a-zA-Z0-9\p{L}])?\.?$").ok());
static CREDIT_CARD: Expression = LazyLock::new(|| {
    Regex::new(
        r"^(?:4[0-9]{12}(?:[0-9]{3})?|5[1-5][0-9]{14}|6(?:011|5[0-9][0-9])[0-9]{12}|3[47][0-9]{13}|3(?:0[0-5]|[68][0-9])[0-9]{11}|(?:2131|1800|35[0-9]{3})[0-9]{11})$",
    )
    .ok()
});
static SSN: Expression = LazyLock::new(|| Regex::new(r"^[0-9]{3}[- ]?[0-9]{2}[- ]?[0-9]{4}$").ok());
static HEX_COLOR: Expression = LazyLock::new(|| Regex::new("^#?([0-9a-fA-F]{3}|[0-9a-fA-F]{6})$").ok());
static RGB_COLOR: Expression = LazyLock::new(|| {
    let part = r"\s*(0|[1-9][0-9]?|1[0-9][0-9]?|2[0-4][0-9]|25[0-5])\s*";
    Regex::new(&format!(r"^rgb\({part},{part},{part}\)$")).ok()
});
static SCALA_DURATION: Expression = LazyLock::new(|| {
    Regex::new(r"^([0-9]+(?:\.[0-9]+)?\s*(?:ns|nanos?|us|µs|micros?|ms|millis?|milliseconds?|s|secs?|seconds?|m|mins?|minutes?|h|hrs?|hours?|d|days?|w|wks?|weeks?)\s*)+$").ok()
});

fn matches(expression: &Expression, text: &str) -> bool {
    expression.as_ref().is_some_and(|regex| regex.is_match(text))
}

fn is_email(text: &str) -> bool {
    let address = match (text.find('<'), text.ends_with('>')) {
        (Some(start), true) => &text[start + 1..text.len() - 1],
        _ => text,
    };
    match address.rsplit_once('@') {
        Some((user, host)) => {
            !user.is_empty()
                && !host.is_empty()
                && !address.contains(char::is_whitespace)
                && !user.contains('@')
        }
        None => false,
    }
}

fn is_mac(text: &str) -> bool {
    let separated = |separator: char, width: usize, counts: &[usize]| {
        let parts: Vec<&str> = text.split(separator).collect();
        counts.contains(&parts.len())
            && parts
                .iter()
                .all(|part| part.len() == width && part.bytes().all(|byte| byte.is_ascii_hexdigit()))
    };
    separated(':', 2, &[6, 8, 20]) || separated('-', 2, &[6, 8, 20]) || separated('.', 4, &[3, 4, 10])
}

fn uuid_version(text: &str) -> Option<char> {
    text.chars().filter(|c| *c != '-').nth(12)
}

fn is_rfc_variant(text: &str) -> bool {
    text.chars().filter(|c| *c != '-').nth(16).is_some_and(|c| "89abAB".contains(c))
}

fn digits(text: &str) -> String {
    text.chars().filter(char::is_ascii_digit).collect()
}

fn is_isbn10(text: &str) -> bool {
    let text: Vec<char> = text.chars().filter(|c| !matches!(c, ' ' | '-')).collect();
    text.len() == 10
        && (1u32..)
            .zip(&text)
            .map(|(weight, c)| match c {
                'X' if weight == 10 => Some(100),
                c => c.to_digit(10).map(|digit| digit * weight),
            })
            .sum::<Option<u32>>()
            .is_some_and(|sum| sum % 11 == 0)
}

fn is_isbn13(text: &str) -> bool {
    let text: Vec<char> = text.chars().filter(|c| !matches!(c, ' ' | '-')).collect();
    text.len() == 13
        && [1u32, 3]
            .iter()
            .cycle()
            .zip(&text)
            .map(|(weight, c)| c.to_digit(10).map(|digit| digit * weight))
            .sum::<Option<u32>>()
            .is_some_and(|sum| sum % 10 == 0)
}

#[cfg(test)]
mod tests {
    use super::fits;

    #[test]
    fn texts_are_checked_by_their_format() {
        for (format, good, bad) in [
            ("date-time", "2024-01-02T03:04:05Z", "2024-01-02"),
            ("date", "2024-01-02", "2024-13-02"),
            ("ipv4", "10.0.0.1", "10.0.0.256"),
            ("ipv6", "::1", "10.0.0.1"),
            ("cidr", "10.0.0.0/8", "10.0.0.0"),
            ("cidr", "fd00::/8", "10.0.0.0/255.0.0.0"),
            ("uri", "https://a.b/c?d", "a b"),
            ("uri", "/path", "https://a:b"),
            ("date-time", "2024-01-02T03:04:05+99:99", "2024-01-02 03:04:05Z"),
            ("uuid", "550e8400-e29b-41d4-a716-446655440000", "550e8400"),
            ("uuid4", "550e8400-e29b-41d4-a716-446655440000", "550e8400-e29b-51d4-a716-446655440000"),
            ("mac", "00:00:5e:00:53:01", "00:00:5e"),
            ("hostname", "a.example.com", "-a"),
            ("email", "a@b.c", "a"),
            ("byte", "YWJj", "a$"),
            ("isbn10", "0321751043", "0321751044"),
            ("isbn13", "978-0321751041", "978-0321751042"),
            ("hexcolor", "#fff", "#ff"),
            ("duration", "22 ns", "soon"),
            ("k8s-short-name", "a-b", "a.b"),
            ("unknown", "anything", ""),
        ] {
            assert!(fits(format, good), "{format} {good}");
            assert!(bad.is_empty() || !fits(format, bad), "{format} {bad}");
        }
    }
}

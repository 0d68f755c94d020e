//! Validation of names, labels and keys. Each check returns upstream's error texts; an empty list means valid.
//!
//! The error texts are part of the API: clients and tests compare them.

use std::borrow::Cow;

const LABEL: &str = "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end with an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?')";
const SUBDOMAIN: &str = "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')";
const LABEL_1035: &str = "a DNS-1035 label must consist of lower case alphanumeric characters or '-', start with an alphabetic character, and end with an alphanumeric character (e.g. 'my-name',  or 'abc-123', regex used for validation is '[a-z]([-a-z0-9]*[a-z0-9])?')";
const LABEL_VALUE: &str = "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345', regex used for validation is '(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?')";
const NAME_PART: &str = "name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')";
const QUALIFIED: &str = "a valid label key must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]') with an optional DNS subdomain prefix and '/' (e.g. 'example.com/MyName')";
const CONFIG_KEY: &str = "a valid config key must consist of alphanumeric characters, '-', '_' or '.' (e.g. 'key.name',  or 'KEY_NAME',  or 'key-name', regex used for validation is '[-._a-zA-Z0-9]+')";
const ENV_NAME: &str =
    "a valid environment variable name must consist only of printable ASCII characters other than '='";

/// Whether the part of a CIDR after `/` is a number. Go's parser refuses a netmask there (`10.0.0.0/255.0.0.0`), but
/// other parsers accept it.
pub fn has_prefix_length(cidr: &str) -> bool {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    cidr.split_once('/').is_some_and(|(_address, length)| is_number(length))
}

/// The texts of the checks that failed.
fn problems<const N: usize>(checks: [(bool, String); N]) -> Vec<String> {
    checks.into_iter().filter(|(failed, _)| *failed).map(|(_, text)| text).collect()
}

/// The error of a name that is too long. [`too_many_bytes`] is the error of a label or a key. Source: the two functions
/// `MaxLenError` of apimachinery.
fn too_long(max: usize) -> String {
    format!("must be no more than {max} characters")
}

fn too_many_bytes(max: usize) -> String {
    format!("must be no more than {max} bytes")
}

fn is_lower(byte: u8) -> bool {
    byte.is_ascii_lowercase() || byte.is_ascii_digit()
}

fn is_label(text: &str) -> bool {
    let bytes = text.as_bytes();
    matches!((bytes.first(), bytes.last()), (Some(first), Some(last)) if is_lower(*first) && is_lower(*last))
        && bytes.iter().all(|byte| is_lower(*byte) || *byte == b'-')
}

/// Letters and digits; `-`, `_` and `.` are also allowed, but not first or last.
fn is_word(text: &str) -> bool {
    let bytes = text.as_bytes();
    matches!((bytes.first(), bytes.last()), (Some(first), Some(last)) if first.is_ascii_alphanumeric() && last.is_ascii_alphanumeric())
        && bytes.iter().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(byte))
}

/// Checks a DNS label (RFC 1123), at most 63 bytes.
pub fn dns1123_label(text: &str) -> Vec<String> {
    let dotted = text.split('.').all(is_label);
    let problem = if dotted { "must not contain dots" } else { LABEL };
    problems([(text.len() > 63, too_long(63)), (!is_label(text), problem.to_owned())])
}

/// Checks a DNS subdomain (RFC 1123): labels joined by dots, at most 253 bytes in total.
pub fn dns1123_subdomain(text: &str) -> Vec<String> {
    subdomain(text, too_long)
}

fn subdomain(text: &str, too_long: fn(usize) -> String) -> Vec<String> {
    let good = text.split('.').all(is_label);
    problems([(text.len() > 253, too_long(253)), (!good, SUBDOMAIN.to_owned())])
}

/// Checks a DNS label (RFC 1035), which starts with a letter.
pub fn dns1035_label(text: &str) -> Vec<String> {
    let good = is_label(text) && text.starts_with(|first: char| first.is_ascii_lowercase());
    problems([(text.len() > 63, too_long(63)), (!good, LABEL_1035.to_owned())])
}

/// Checks a name that is used as one segment of a URL path.
pub fn path_segment(text: &str) -> Vec<String> {
    problems([
        (text == "." || text == "..", format!("may not be '{text}'")),
        (text.contains('/'), "may not contain '/'".to_owned()),
        (text.contains('%'), "may not contain '%'".to_owned()),
    ])
}

/// Prepares a prefix of names for the check of a name, because more characters follow a prefix. Replaces a dash at the
/// end, and the character before the dash, by a letter. Source: `maskTrailingDash` of apimachinery.
pub fn masked_prefix(prefix: &str) -> Cow<'_, str> {
    match prefix.strip_suffix('-') {
        Some(before) if !before.is_empty() => {
            let kept = before.strip_suffix(|last: char| last.is_ascii()).unwrap_or(before);
            Cow::Owned(format!("{kept}a"))
        }
        _ => Cow::Borrowed(prefix),
    }
}

/// Checks the value of a label.
pub fn label_value(text: &str) -> Vec<String> {
    let good = text.is_empty() || is_word(text);
    problems([(text.len() > 63, too_many_bytes(63)), (!good, LABEL_VALUE.to_owned())])
}

/// Checks a qualified name: the key of a label, annotation or taint, or a finalizer.
pub fn qualified_name(text: &str) -> Vec<String> {
    let mut wrong = Vec::new();
    let parts: Vec<&str> = text.split('/').collect();
    let name = match parts.as_slice() {
        [name] => name,
        [prefix, name] => {
            if prefix.is_empty() {
                wrong.push("prefix part must be non-empty".to_owned());
            } else {
                let problems = subdomain(prefix, too_many_bytes);
                wrong.extend(problems.into_iter().map(|text| format!("prefix part {text}")));
            }
            name
        }
        _ => return vec![QUALIFIED.to_owned()],
    };
    wrong.extend(problems([
        (name.is_empty(), "name part must be non-empty".to_owned()),
        (name.len() > 63, format!("name part {}", too_many_bytes(63))),
        (!is_word(name), NAME_PART.to_owned()),
    ]));
    wrong
}

/// Checks a key of a config map or secret. Volumes use the key as a file name.
pub fn config_key(text: &str) -> Vec<String> {
    let good =
        !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte));
    let mut wrong = problems([(text.len() > 253, too_long(253)), (!good, CONFIG_KEY.to_owned())]);
    if matches!(text, "." | "..") {
        wrong.push(format!("must not be '{text}'"));
    } else if text.starts_with("..") {
        wrong.push("must not start with '..'".to_owned());
    }
    wrong
}

/// Checks the name of an environment variable.
pub fn env_name(text: &str) -> Vec<String> {
    let good = !text.is_empty() && text.bytes().all(|byte| (b' '..=b'~').contains(&byte) && byte != b'=');
    problems([(!good, ENV_NAME.to_owned())])
}

/// Checks the name of a port (RFC 6335).
pub fn port_name(text: &str) -> Vec<String> {
    let known = !text.is_empty() && text.bytes().all(|byte| is_lower(byte) || byte == b'-');
    problems([
        (text.len() > 15, too_long(15)),
        (!known, "must contain only alpha-numeric characters (a-z, 0-9), and hyphens (-)".to_owned()),
        (
            !text.bytes().any(|byte| byte.is_ascii_lowercase()),
            "must contain at least one letter (a-z)".to_owned(),
        ),
        (text.contains("--"), "must not contain consecutive hyphens".to_owned()),
        (text.starts_with('-') || text.ends_with('-'), "must not begin or end with a hyphen".to_owned()),
    ])
}

/// Whether a name is the name of an extended resource, such as `example.com/gpu`. False for names with the prefix
/// `requests.`, which quotas use. Source: upstream's `IsExtendedResourceName`.
#[must_use]
pub fn is_extended_resource(name: &str) -> bool {
    name.contains('/') && !name.contains("kubernetes.io/") && !name.starts_with("requests.")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(rule: fn(&str) -> Vec<String>, good: &[&str], bad: &[&str]) {
        for text in good {
            assert_eq!(rule(text), Vec::<String>::new(), "for {text:?}");
        }
        for text in bad {
            assert!(!rule(text).is_empty(), "for {text:?}");
        }
    }

    #[test]
    fn names_follow_their_formats() {
        let (long, longer) = ("a".repeat(63), "a".repeat(64));
        check(dns1123_label, &["a", "a-b", "1", "0-9", &long], &["", "A", "-a", "a-", "a.b", "a_b", &longer]);
        check(dns1123_subdomain, &["a.b-c.d", "1.2", &longer], &["", "a..b", ".a", "a.", "A.b", "a_b"]);
        check(dns1035_label, &["a1", "a-b"], &["1a", "-a", "A", ""]);
        check(label_value, &["", "a", "A_b.c-d", &long], &["-a", "a-", "a b", &longer]);
        check(qualified_name, &["a", "a.b_c", "example.com/a"], &["", "/a", "a/", "a/b/c", "A.com/a", "-a"]);
        check(config_key, &["a", ".a", "A_b-c.d"], &["", ".", "..", "..a", "a/b", "a b"]);
        check(env_name, &["A", "a.b-c", "1x", "a b"], &["", "a=b", "ä"]);
        check(port_name, &["http", "a1", "1a"], &["", "1", "a--b", "-a", "a-", "A", "abcdefghijklmnop"]);
    }

    #[test]
    fn lengths_are_in_the_unit_that_upstream_names() {
        let (label, subdomain) = ("a".repeat(64), "a".repeat(254));
        for (problems, expect) in [
            (dns1123_label(&label), "must be no more than 63 characters"),
            (dns1035_label(&label), "must be no more than 63 characters"),
            (dns1123_subdomain(&subdomain), "must be no more than 253 characters"),
            (config_key(&subdomain), "must be no more than 253 characters"),
            (port_name("abcdefghijklmnop"), "must be no more than 15 characters"),
            (label_value(&label), "must be no more than 63 bytes"),
            (qualified_name(&label), "name part must be no more than 63 bytes"),
            (qualified_name(&format!("{subdomain}/a")), "prefix part must be no more than 253 bytes"),
            (qualified_name("a/b/c"), QUALIFIED),
        ] {
            assert_eq!(problems, [expect]);
        }
    }
}

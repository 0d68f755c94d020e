//! Field selectors as text: `spec.nodeName=a,status.phase!=Failed`.

use crate::selector_error::{SelectorError, check_count, check_size};

/// One requirement: a field has, or does not have, a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FieldRequirement {
    /// The path of the field.
    pub field: String,
    /// Whether the values must be equal: true for `=` and `==`, false for `!=`.
    pub equal: bool,
    /// The value, without escapes.
    pub value: String,
}

/// Parses a field selector. Empty requirements are skipped.
pub fn parse(text: &str) -> Result<Vec<FieldRequirement>, SelectorError> {
    check_size(text)?;
    let mut requirements = Vec::new();
    for part in split(text).into_iter().filter(|part| !part.is_empty()) {
        let requirement = requirement(part);
        let wrong = || SelectorError::Field(text.to_owned(), part.to_owned());
        requirements.push(requirement.ok_or_else(wrong)?);
        check_count(requirements.len())?;
    }
    Ok(requirements)
}

/// Splits at commas without a backslash before them.
fn split(text: &str) -> Vec<&str> {
    let (mut parts, mut start, mut escaped) = (Vec::new(), 0, false);
    for (at, c) in text.char_indices() {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            ',' => {
                parts.push(&text[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&text[start..]);
    parts
}

fn requirement(part: &str) -> Option<FieldRequirement> {
    let (name, value) = part.split_once('=')?;
    let (field, equal, value) = match name.strip_suffix('!') {
        Some(field) => (field, false, value),
        None => (name, true, value.strip_prefix('=').unwrap_or(value)),
    };
    Some(FieldRequirement { field: field.to_owned(), equal, value: unescape(value)? })
}

fn unescape(text: &str) -> Option<String> {
    let (mut out, mut chars) = (String::new(), text.chars());
    while let Some(c) = chars.next() {
        match c {
            '\\' => match chars.next()? {
                c @ ('\\' | ',' | '=') => out.push(c),
                _ => return None,
            },
            ',' | '=' => return None,
            c => out.push(c),
        }
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::selector_error::{MAX_BYTES, MAX_REQUIREMENTS};

    #[test]
    fn requirements_are_read_with_their_escapes() {
        let read = |text: &str| {
            let read = parse(text).unwrap().into_iter();
            read.map(|one| (one.field, one.equal, one.value)).collect::<Vec<_>>()
        };
        let one = |field: &str, equal, value: &str| (field.to_owned(), equal, value.to_owned());
        assert_eq!(read(""), []);
        assert_eq!(
            read("a=b,c==d,,e!=f,g="),
            [one("a", true, "b"), one("c", true, "d"), one("e", false, "f"), one("g", true, "")]
        );
        assert_eq!(read(r"a=b\,c\=d\\"), [one("a", true, r"b,c=d\")]);
    }

    #[test]
    fn other_texts_are_refused() {
        for text in ["a", "a=b=c", r"a=\x", r"a=b\"] {
            assert_eq!(parse(text), Err(SelectorError::Field(text.to_owned(), text.to_owned())));
        }
    }

    #[test]
    fn the_size_is_limited() {
        let error = parse(&vec!["a!=b"; MAX_REQUIREMENTS + 1].join(",")).unwrap_err();
        assert_eq!(error.to_string(), "the selector has too many requirements: 257, the limit is 256");
        let error = parse(&"a".repeat(MAX_BYTES + 1)).unwrap_err();
        assert_eq!(error.to_string(), "the selector has too many bytes: 65537, the limit is 65536");
    }
}

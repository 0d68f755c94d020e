//! Label and field selectors.

mod facets;
pub(crate) mod fields;
mod label;

use serde_json::Value;

pub use self::facets::Facets;
pub use self::label::{LabelSelector, Requirement};
use crate::Kind;

/// A field that lists and watches can select by.
#[derive(Clone, Copy)]
pub struct Field {
    /// As clients write it, `spec.nodeName`.
    pub name: &'static str,
    /// Its value in an object, as text.
    pub value: fn(&Value) -> String,
}

/// Maximum requirements of a selector, and bytes of its text: each watch looks at all of them for each event.
const MAX_REQUIREMENTS: usize = 256;
const MAX_TEXT: usize = 64 << 10;

/// Refuses a selector that would cost too much.
fn check_size(text: &str) -> Result<(), SelectorError> {
    if text.len() > MAX_TEXT {
        return Err(SelectorError::TooLong("bytes", text.len(), MAX_TEXT));
    }
    Ok(())
}

/// Refuses more requirements than a selector may have.
fn check_count(count: usize) -> Result<(), SelectorError> {
    if count > MAX_REQUIREMENTS {
        return Err(SelectorError::TooLong("requirements", count, MAX_REQUIREMENTS));
    }
    Ok(())
}

/// Why a selector cannot be understood (400).
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum SelectorError {
    /// A label selector's syntax.
    #[error("unable to parse requirement: {0}")]
    Label(String),
    /// A field selector's syntax.
    #[error("invalid selector: '{0}'; can't understand '{1}'")]
    Field(String, String),
    /// The kind does not know the field.
    #[error("field label not supported: {0}")]
    UnknownField(String),
    /// It is larger than any client needs: what, how many, and the limit.
    #[error("the selector has too many {0}: {1}, the limit is {2}")]
    TooLong(&'static str, usize, usize),
    /// An operator of a LabelSelector object.
    #[error("{0:?} is not a valid label selector operator")]
    Operator(String),
}

/// All of the requirements on fields.
#[derive(Clone, Default)]
pub struct FieldSelector {
    terms: Vec<Term>,
}

#[derive(Clone)]
struct Term {
    field: Field,
    equal: bool,
    value: String,
}

// === impl FieldSelector ===

impl FieldSelector {
    /// `spec.nodeName=a,status.phase!=Failed`, on the fields that the kind knows.
    pub fn parse(kind: &Kind, text: &str) -> Result<FieldSelector, SelectorError> {
        check_size(text)?;
        let mut terms = Vec::new();
        for part in split_terms(text) {
            if part.is_empty() {
                continue;
            }
            let wrong = || SelectorError::Field(text.to_owned(), part.to_owned());
            let (name, equal, value) = split_term(part).ok_or_else(wrong)?;
            let known = fields::COMMON.iter().chain(kind.fields).find(|field| field.name == name);
            let field = *known.ok_or_else(|| SelectorError::UnknownField(name.to_owned()))?;
            check_count(terms.len() + 1)?;
            terms.push(Term { field, equal, value: unescape(value).ok_or_else(wrong)? });
        }
        Ok(FieldSelector { terms })
    }

    /// Whether nothing is required.
    pub fn is_empty(&self) -> bool {
        self.terms.is_empty()
    }

    /// The one name that `metadata.name=x` asks for.
    pub fn exact_name(&self) -> Option<&str> {
        self.exact("metadata.name")
    }

    /// The value that `field=value` asks for, if it does.
    pub fn exact(&self, field: &str) -> Option<&str> {
        let term = self.terms.iter().find(|term| term.equal && term.field.name == field)?;
        Some(&term.value)
    }

    /// Whether an object meets all requirements.
    pub fn matches(&self, object: &Value) -> bool {
        self.terms.iter().all(|term| ((term.field.value)(object) == term.value) == term.equal)
    }

    /// As [`FieldSelector::matches`], from the object's facets.
    pub fn matches_facets(&self, facets: &Facets) -> bool {
        self.terms.iter().all(|term| (facets.field(term.field.name) == term.value) == term.equal)
    }
}

/// Splits at commas that no backslash escapes.
fn split_terms(text: &str) -> Vec<&str> {
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

fn split_term(part: &str) -> Option<(&str, bool, &str)> {
    let at = part.find('=')?;
    if let Some(name) = part[..at].strip_suffix('!') {
        return Some((name, false, &part[at + 1..]));
    }
    let value = &part[at + 1..];
    Some((&part[..at], true, value.strip_prefix('=').unwrap_or(value)))
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
    use serde_json::json;

    use super::*;
    use crate::kind::by_kind;

    #[test]
    fn fields_select_by_their_text() {
        let pod = json!({"metadata": {"name": "a", "namespace": "b"}, "spec": {"nodeName": "n"}, "status": {"phase": "Running"}});
        let cases = [
            ("", true),
            ("metadata.name=a", true),
            ("metadata.name==a,metadata.namespace=b", true),
            ("metadata.name!=a", false),
            ("spec.nodeName=n,status.phase!=Failed,status.phase!=Succeeded", true),
            ("spec.nodeName=", false),
            ("status.podIP=", true),
            ("spec.hostNetwork=false", true),
        ];
        for (text, expect) in cases {
            let selector = FieldSelector::parse(by_kind("v1", "Pod").unwrap(), text).unwrap();
            assert_eq!(selector.matches(&pod), expect, "for {text}");
        }
    }

    #[test]
    fn selectors_have_a_size() {
        let pod = by_kind("v1", "Pod").unwrap();
        let many = vec!["metadata.name!=a"; MAX_REQUIREMENTS + 1].join(",");
        let error = FieldSelector::parse(pod, &many).map(|_| ()).unwrap_err().to_string();
        assert_eq!(error, "the selector has too many requirements: 257, the limit is 256");
        let many = vec!["!a"; MAX_REQUIREMENTS + 1].join(",");
        assert_eq!(LabelSelector::parse(&many).unwrap_err().to_string(), error);
        let long = format!("a in ({})", "b,".repeat(MAX_TEXT));
        assert!(LabelSelector::parse(&long).unwrap_err().to_string().contains("too many bytes"));
    }

    #[test]
    fn other_fields_and_texts_are_refused() {
        let pod = by_kind("v1", "Pod").unwrap();
        let error = |text| FieldSelector::parse(pod, text).map(|_| ()).unwrap_err().to_string();
        assert_eq!(error("spec.foo=1"), "field label not supported: spec.foo");
        assert_eq!(
            error("metadata.name"),
            "invalid selector: 'metadata.name'; can't understand 'metadata.name'"
        );
        assert_eq!(
            error("metadata.name=a=b"),
            "invalid selector: 'metadata.name=a=b'; can't understand 'metadata.name=a=b'"
        );
    }
}

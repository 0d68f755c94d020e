//! Label and field selectors.

use serde_json::Value;

/// A field that lists and watches can select by.
#[derive(Clone, Copy)]
pub struct Field {
    /// As clients write it, `spec.nodeName`.
    pub name: &'static str,
    /// Its value in an object, as text.
    pub value: fn(&Value) -> String,
}

/// Why a selector cannot be understood (400).
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum SelectorError {
    /// Syntax.
    #[error("unable to parse requirement: {0}")]
    Syntax(String),
    /// The kind does not know the field.
    #[error("field label not supported: {0}")]
    UnknownField(String),
}

/// One requirement on labels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Requirement {
    /// `k in (a,b)`, `k=a`.
    In(String, Vec<String>),
    /// `k notin (a,b)`, `k!=a`: also true without the label.
    NotIn(String, Vec<String>),
    /// `k`.
    Exists(String),
    /// `!k`.
    Absent(String),
}

/// All of the requirements on labels.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct LabelSelector {
    /// All must hold.
    pub requirements: Vec<Requirement>,
}

/// All of the requirements on fields.
#[derive(Clone, Default)]
pub struct FieldSelector {
    terms: Vec<(Field, bool, String)>,
}

impl LabelSelector {
    /// `a=b,c in (d,e),!f`.
    pub fn parse(text: &str) -> Result<LabelSelector, SelectorError> {
        let _ = text;
        Ok(LabelSelector::default())
    }

    /// `{matchLabels: …, matchExpressions: …}`; null or absent selects nothing, so it is an error of the caller.
    pub fn from_object(object: &Value) -> Result<LabelSelector, SelectorError> {
        let _ = object;
        Ok(LabelSelector::default())
    }

    /// Whether nothing is required.
    pub fn is_empty(&self) -> bool {
        self.requirements.is_empty()
    }

    /// Whether a `labels` map (or null) meets all requirements.
    pub fn matches(&self, labels: &Value) -> bool {
        let _ = labels;
        true
    }

    /// Whether an object's labels meet all requirements.
    pub fn matches_object(&self, object: &Value) -> bool {
        self.matches(&object["metadata"]["labels"])
    }
}

impl FieldSelector {
    /// `spec.nodeName=a,status.phase!=Failed`, on the fields that the kind knows.
    pub fn parse(kind: &crate::Kind, text: &str) -> Result<FieldSelector, SelectorError> {
        let _ = (kind, text);
        Ok(FieldSelector::default())
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
        self.terms.iter().find(|(f, equal, _)| *equal && f.name == field).map(|(_, _, value)| value.as_str())
    }

    /// Whether an object meets all requirements.
    pub fn matches(&self, object: &Value) -> bool {
        self.terms.iter().all(|(field, equal, value)| ((field.value)(object) == *value) == *equal)
    }
}

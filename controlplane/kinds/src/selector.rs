//! Selectors of lists and watches: labels, and the fields that a kind can be selected by.

mod attributes;
mod part;

use coracle_values::field_selector;
use serde_json::Value;

pub use self::attributes::SelectorAttributes;
pub use self::part::part;
pub use crate::fields::Field;
pub use coracle_values::SelectorError;
pub use coracle_values::label_selector::LabelSelector;

use crate::resource::{Resource, SelectableField};

/// A field selector of one kind. An object matches if it meets all requirements.
#[derive(Clone, Default)]
pub struct FieldSelector {
    terms: Vec<Term>,
}

#[derive(Clone)]
struct Term {
    field: SelectableField,
    equal: bool,
    value: String,
}

// === impl FieldSelector ===

impl FieldSelector {
    /// Parses the text form. A field by which the kind cannot be selected is an error.
    pub fn parse(kind: &Resource, text: &str) -> Result<FieldSelector, SelectorError> {
        let mut terms = Vec::new();
        for field_selector::FieldRequirement { field: name, equal, value } in field_selector::parse(text)? {
            let known = kind.fields.iter().find(|field| *field.name == *name).cloned();
            let field = known.ok_or_else(|| SelectorError::UnknownField(unknown(kind, &name)))?;
            terms.push(Term { field, equal, value });
        }
        Ok(FieldSelector { terms })
    }

    /// Whether the selector has no requirements. Such a selector matches every object.
    pub fn is_empty(&self) -> bool {
        self.terms.is_empty()
    }

    /// Whether all requirements refer to the metadata, which is the same in all versions.
    pub fn is_about_metadata(&self) -> bool {
        self.terms.iter().all(|term| term.field.name.starts_with("metadata."))
    }

    /// The name in `metadata.name=…`, if there is such a requirement.
    pub fn exact_name(&self) -> Option<&str> {
        self.exact("metadata.name")
    }

    /// The value in `field=…`, if there is such a requirement.
    pub fn exact(&self, field: &str) -> Option<&str> {
        let term = self.terms.iter().find(|term| term.equal && *term.field.name == *field)?;
        Some(&term.value)
    }

    /// Whether an object meets all requirements.
    pub fn matches(&self, object: &Value) -> bool {
        self.terms.iter().all(|term| (term.field.read(object) == term.value) == term.equal)
    }

    /// Does the same as [`FieldSelector::matches`], for the object's attributes.
    pub fn matches_attributes(&self, attributes: &SelectorAttributes) -> bool {
        self.terms.iter().all(|term| (attributes.field(&term.field.stored) == term.value) == term.equal)
    }
}

/// The message about a field that a kind cannot be selected by. Source: `AddFieldLabelConversionFunc` of the groups,
/// and `DefaultMetaV1FieldSelectorConversion` for kinds without a function.
fn unknown(kind: &Resource, name: &str) -> String {
    let has_function = matches!(
        (&*kind.group, &*kind.kind),
        ("", "Pod" | "Node" | "ReplicationController" | "Event" | "Namespace" | "Secret" | "Service")
            | ("events.k8s.io", "Event")
            | ("certificates.k8s.io", _)
    );
    let is_built_in = || crate::kind::by_resource(&kind.group, &kind.version, &kind.plural).is_some();
    match (&*kind.group, &*kind.kind) {
        ("batch", "Job") => format!("field label {name:?} not supported for Job"),
        ("resource.k8s.io", "ResourceSlice") => {
            format!("field label not supported for {}, Kind={}: {name}", kind.api_version(), kind.kind)
        }
        _ if has_function || !is_built_in() => format!("field label not supported: {name}"),
        _ => {
            format!("{name:?} is not a known field selector: only \"metadata.name\", \"metadata.namespace\"")
        }
    }
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
    fn other_fields_and_texts_are_refused() {
        let pod = by_kind("v1", "Pod").unwrap();
        let error = |text| FieldSelector::parse(pod, text).map(|_| ()).unwrap_err().to_string();
        assert_eq!(error("spec.foo=1"), "field label not supported: spec.foo");
        for (api_version, kind, message) in [
            ("batch/v1", "Job", "field label \"x\" not supported for Job"),
            (
                "batch/v1",
                "CronJob",
                "\"x\" is not a known field selector: only \"metadata.name\", \"metadata.namespace\"",
            ),
            (
                "resource.k8s.io/v1",
                "ResourceSlice",
                "field label not supported for resource.k8s.io/v1, Kind=ResourceSlice: x",
            ),
        ] {
            let error =
                FieldSelector::parse(by_kind(api_version, kind).unwrap(), "x=1").map(|_| ()).unwrap_err();
            assert_eq!(error.to_string(), message, "{kind}");
        }
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

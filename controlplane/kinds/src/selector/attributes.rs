//! Attributes for selectors: the labels and selectable fields of an encoded object. They are read once and kept beside
//! the object.

use std::sync::Arc;

use coracle_values::label_selector::LabelSelector;

use super::part;
use crate::Resource;

/// An attribute that only uninitialized objects have, with the value `true`. No selector can name it.
const UNINITIALIZED: &str = "metadata.initializers";

/// Labels and selectable fields of one object.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SelectorAttributes {
    labels: Box<[(Box<str>, Box<str>)]>,
    /// Values by field name. Empty values are omitted.
    fields: Box<[(Arc<str>, Box<str>)]>,
}

// === impl SelectorAttributes ===

impl SelectorAttributes {
    /// Reads the attributes of an encoded object. The parser skips the rest of the object.
    pub fn read(kind: &Resource, json: &[u8]) -> SelectorAttributes {
        let mut paths: Vec<Vec<&str>> =
            kind.fields.iter().map(|field| field.name.split('.').collect()).collect();
        paths.push(vec!["metadata", "labels"]);
        paths.push(UNINITIALIZED.split('.').collect());
        let paths: Vec<&[&str]> = paths.iter().map(Vec::as_slice).collect();
        let text = std::str::from_utf8(json).unwrap_or_default();
        let object = part(text, &paths);
        let labels = object["metadata"]["labels"].as_object().into_iter().flatten();
        let labels = labels.filter_map(|(key, value)| Some((key.as_str().into(), value.as_str()?.into())));
        let fields = kind.fields.iter();
        let fields = fields.map(|field| (field.name.clone(), field.read(&object).into_boxed_str()));
        let is_uninitialized = crate::initialization::is_uninitialized(&object);
        let fields = fields.chain(is_uninitialized.then(|| (UNINITIALIZED.into(), "true".into())));
        SelectorAttributes {
            labels: labels.collect(),
            fields: fields.filter(|(_, value)| !value.is_empty()).collect(),
        }
    }

    /// The value of a label.
    pub fn label(&self, key: &str) -> Option<&str> {
        self.labels.iter().find(|(name, _)| **name == *key).map(|(_, value)| &**value)
    }

    /// Whether the labels match a selector.
    pub fn match_labels(&self, selector: &LabelSelector) -> bool {
        selector.matches_by(|key| self.label(key))
    }

    /// Whether the object has not been initialized yet.
    pub fn is_uninitialized(&self) -> bool {
        !self.field(UNINITIALIZED).is_empty()
    }

    /// The value of a selectable field as text; empty if the object does not have it.
    pub fn field(&self, name: &str) -> &str {
        self.fields.iter().find(|(known, _)| **known == *name).map_or("", |(_, value)| value)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::selector::FieldSelector;

    #[test]
    fn attributes_select_as_the_whole_object_does() {
        let object = json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": "a", "namespace": "b", "labels": {"app": "web", "x": ""}, "annotations": {"a\"b": "c"}},
            "spec": {"nodeName": "n", "hostNetwork": true, "containers": [{"name": "c", "type": "no"}], "type": "t"},
            "status": {"phase": "Running", "podIP": null, "replicas": 3},
            "source": {"component": "s"}, "type": "Warning", "reason": "r",
            "involvedObject": {"kind": "Pod", "resourceVersion": 7},
        });
        let text = object.to_string();
        for kind in crate::kind::built_in().iter() {
            let attributes = SelectorAttributes::read(kind, text.as_bytes());
            for field in &kind.fields {
                assert_eq!(
                    attributes.field(&field.name),
                    field.read(&object),
                    "{} {}",
                    kind.kind,
                    field.name
                );
            }
        }
        let attributes =
            SelectorAttributes::read(crate::kind::by_kind("v1", "Pod").unwrap(), text.as_bytes());
        for selector in ["app=web", "app!=web", "!app", "x=", "y", "app in (a,web),x"] {
            let selector = LabelSelector::parse(selector).unwrap();
            assert_eq!(attributes.match_labels(&selector), selector.matches_object(&object), "{selector}");
        }
    }

    #[test]
    fn an_object_with_initializers_is_uninitialized() {
        let pod = crate::kind::by_kind("v1", "Pod").unwrap();
        for (metadata, expect) in [
            (json!({"name": "a"}), false),
            (json!({"initializers": {"pending": [{"name": "a.b.c"}]}}), true),
            (json!({"initializers": {"result": {"status": "Failure"}}}), true),
        ] {
            let attributes =
                SelectorAttributes::read(pod, json!({"metadata": metadata}).to_string().as_bytes());
            assert_eq!(attributes.is_uninitialized(), expect, "{metadata}");
        }
        assert!(FieldSelector::parse(pod, "metadata.initializers=true").is_err());
    }

    #[test]
    fn other_texts_have_no_attributes_and_absent_flags_are_false() {
        let pod = crate::kind::by_kind("v1", "Pod").unwrap();
        for text in ["", "null", "[1]", "{\"spec\":7}", "{\"metadata\":{\"labels\":[]}}"] {
            let attributes = SelectorAttributes::read(pod, text.as_bytes());
            assert_eq!(attributes.label("a"), None);
            assert_eq!(attributes.field("spec.hostNetwork"), "false", "for {text}");
            let unset = FieldSelector::parse(pod, "spec.nodeName=,metadata.name=").unwrap();
            assert!(unset.matches_attributes(&attributes));
        }
    }
}

//! Schemas of lists.

use serde_json::{Value, json};

use crate::resource::Resource;

/// The definition of the metadata of lists.
const LIST_META: &str = "io.k8s.apimachinery.pkg.apis.meta.v1.ListMeta";
const SELECTABLE: &str = "x-kubernetes-selectable-fields";
const CONVENTIONS: &str =
    "https://git.k8s.io/community/contributors/devel/sig-architecture/api-conventions.md";

/// The name and the definition of the lists of a custom resource. `None` for a built-in kind. `typed` is a definition
/// with the properties `apiVersion` and `kind`. Source: `buildListSchema` of `k8s.io/apiextensions-apiserver`.
pub(super) fn custom(kind: &Resource, typed: &Value) -> Option<(String, Value)> {
    let definition = kind.definition.as_ref()?;
    let properties = &typed["properties"];
    let mut schema = json!({
        "description": format!("{} is a list of {}", kind.list_kind, kind.kind),
        "type": "object",
        "required": ["items"],
        "properties": {
            "apiVersion": properties["apiVersion"],
            "kind": properties["kind"],
            "items": {
                "description": format!("List of {}. More info: {CONVENTIONS}", kind.plural),
                "type": "array",
                "items": reference(&kind.schema),
            },
            "metadata": {
                "description": format!("Standard list metadata. More info: {CONVENTIONS}#types-kinds"),
                "allOf": [reference(LIST_META)],
            },
        },
        "x-kubernetes-group-version-kind":
            [{"group": kind.group, "version": kind.version, "kind": kind.list_kind}],
    });
    if let Some(fields) = definition.get(SELECTABLE) {
        schema[SELECTABLE] = fields.clone();
    }
    Some((name(kind), schema))
}

/// A reference to a definition.
fn reference(name: &str) -> Value {
    json!({"$ref": format!("#/components/schemas/{name}")})
}

/// The name of the definition of a kind's lists: `io.k8s.api.core.v1.PodList`, `com.example.v1.WidgetList`.
pub(super) fn name(kind: &Resource) -> String {
    let prefix = kind.schema.strip_suffix(&*kind.kind).unwrap_or_default();
    format!("{prefix}{}", kind.list_kind)
}

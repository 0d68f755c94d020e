//! The OpenAPI v2 document, as JSON and as the protobuf message that kubectl reads.
//!
//! kubectl uses it to validate what the API server cannot, such as `kind: List`. Message and field numbers:
//! `openapiv2/OpenAPIv2.proto` of gnostic.

use std::collections::HashSet;
use std::collections::btree_map::{BTreeMap, Entry};
use std::hash::Hash as _;
use std::sync::Arc;

use coracle_values::CollectMap;
use serde_json::value::{RawValue, to_raw_value};
use serde_json::{Map, Value, json};

use super::fingerprint::Fingerprint;
use super::paths::{Form, Operations, V2, V3};
use super::{Definitions, Subject, list, operation};
use crate::kind::built_in;
use crate::resource::{Resource, Resources};
use crate::schema::model::operations_text;

/// Members of a section by name, as JSON text. Trees take several times as much memory.
pub type Section = BTreeMap<String, Box<RawValue>>;

/// The document.
#[derive(Debug, Default, serde::Serialize, serde::Deserialize)]
pub struct Document {
    swagger: String,
    info: Value,
    /// The path items.
    pub paths: Section,
    /// The schemas.
    pub definitions: Section,
    /// The parameters that operations share.
    pub parameters: Section,
    #[serde(rename = "securityDefinitions")]
    security_definitions: Value,
    security: Value,
}

/// The hash of the document of these resources. A changed document has another hash. Another version of this program
/// can have another hash for the same document.
pub fn hash(set: &Resources) -> String {
    let mut hash = Fingerprint::new();
    for version in set.group_versions() {
        Subject::of(version).hash().hash(&mut hash);
    }
    hash.text()
}

/// The document of the built-in kinds. [`Document::add_custom`] adds the custom resources.
pub fn of_built_in(set: &Resources) -> Document {
    let texts = super::Texts::load();
    let all = Definitions::read(&texts);
    let mut items = super::common_paths(set);
    let versions = set.group_versions().iter().filter(|version| super::is_built_in(version));
    items.extend(versions.map(|version| operation::of_group_version(version)));
    let mut document = Document {
        swagger: "2.0".to_owned(),
        info: json!({"title": "Kubernetes", "version": all.version}),
        paths: all.operations.texts(items, Form::V2).into_iter().collect_map(),
        definitions: definitions(set, &all),
        parameters: all.operations.shared(),
        security_definitions: json!({"BearerToken": super::security_scheme()}),
        security: json!([{"BearerToken": []}]),
    };
    document.add(&all.operations, set.iter().filter(|kind| kind.is_built_in()));
    document
}

/// The definitions of the served built-in kinds and of their lists, and the definitions that belong to no kind.
fn definitions(set: &Resources, all: &Definitions<'_>) -> Section {
    let served = set.iter().filter(|kind| kind.is_built_in());
    let served: HashSet<&str> = served.map(|kind| &*kind.schema).collect();
    let known: HashSet<&str> = built_in().iter().map(|resource| &*resource.schema).collect();
    let is_served = |name: &str| {
        let kind = name.strip_suffix("List").filter(|kind| known.contains(*kind)).unwrap_or(name);
        served.contains(kind) || !known.contains(kind)
    };
    let served = all.texts.iter().filter(|(name, _)| is_served(name));
    let converted = served.filter_map(|(name, schema)| {
        let schema: Value = serde_json::from_str(schema.get()).ok()?;
        Some(((*name).to_owned(), to_raw_value(&schema_of(&schema)).ok()?))
    });
    converted.collect_map()
}

// === impl Document ===

impl Document {
    /// Adds the paths and the definitions of custom resources.
    pub fn add_custom(&mut self, set: &Resources) {
        let text = operations_text();
        self.add(&Operations::read(&text), set.iter().filter(|kind| !kind.is_built_in()));
    }

    /// Adds the paths of kinds. Also adds the definitions that kinds contain themselves, unless the document already
    /// has a definition with the same name.
    fn add<'a>(&mut self, operations: &Operations<'_>, kinds: impl Iterator<Item = &'a Arc<Resource>>) {
        let typed = self.definitions.get(super::DELETE_OPTIONS);
        let typed: Option<Value> = typed.and_then(|text| serde_json::from_str(text.get()).ok());
        let typed = typed.unwrap_or_default();
        for kind in kinds {
            self.paths.extend(operations.texts(operation::of_kind(kind), Form::V2));
            let own = kind.definition_v2.as_deref().or(kind.definition.as_deref());
            let own = own.map(|schema| (kind.schema.clone().into_owned(), schema_of(schema)));
            let list = list::custom(kind, &typed).map(|(name, schema)| (name, schema_of(&schema)));
            for (name, schema) in own.into_iter().chain(list) {
                if let (Entry::Vacant(free), Ok(text)) = (self.definitions.entry(name), to_raw_value(&schema))
                {
                    free.insert(text);
                }
            }
        }
    }
}

/// The members of a section as JSON values. Each is parsed when the iterator reaches it.
fn trees(section: &Section) -> impl Iterator<Item = (&String, Value)> {
    section.iter().map(|(name, text)| (name, serde_json::from_str(text.get()).unwrap_or_default()))
}

/// A document as protobuf. It has only the PATCH operations, and only the paths with a PATCH: kubectl reads no other
/// operations.
pub fn protobuf(document: &Document) -> Vec<u8> {
    let mut message = Message::default();
    message.bytes(1, document.swagger.as_bytes());
    let mut info = Message::default();
    info.text(1, &document.info["title"]);
    info.text(2, &document.info["version"]);
    message.message(2, info);
    let shared: Map<String, Value> =
        trees(&document.parameters).map(|(name, value)| (name.clone(), value)).collect_map();
    let shared = Value::Object(shared);
    let mut all = Message::default();
    for (path, item) in trees(&document.paths) {
        if item["patch"].is_object() {
            all.message(2, named(path, path_item(&item, &shared)));
        }
    }
    message.message(8, all);
    let mut all = Message::default();
    for (name, schema) in trees(&document.definitions) {
        all.message(1, named(name, encoded(&schema)));
    }
    message.message(9, all);
    message.0
}

/// A schema in the form of OpenAPI v2, where a reference has no siblings except the description. Defaults are omitted,
/// as kube-apiserver omits them.
fn schema_of(schema: &Value) -> Value {
    match schema {
        Value::Object(map) => {
            Value::Object(map.iter().filter_map(|(name, value)| member(name, value)).collect_map())
        }
        Value::Array(list) => list.iter().map(schema_of).collect(),
        other => other.clone(),
    }
}

/// A keyword of a schema with its value. `None` if OpenAPI v2 does not have the keyword.
fn member(name: &str, value: &Value) -> Option<(String, Value)> {
    let reference = value.get(0).and_then(|first| first.get("$ref"));
    let (name, value) = match (name, reference) {
        ("default", _) => return None,
        // A property may have the name of a keyword, as in JSONSchemaProps.
        ("properties", _) => {
            let properties = entries(value).map(|(name, schema)| (name.clone(), schema_of(schema)));
            (name, Value::Object(properties.collect_map()))
        }
        ("enum" | "example", _) => (name, value.clone()),
        ("allOf", Some(reference)) => ("$ref", reference_of(reference)),
        // A scalar of several types, such as IntOrString, is a string.
        ("oneOf", _) if value.is_array() => ("type", "string".into()),
        ("$ref", _) if value.is_string() => (name, reference_of(value)),
        _ => (name, schema_of(value)),
    };
    Some((name.to_owned(), value))
}

fn reference_of(value: &Value) -> Value {
    value.as_str().unwrap_or_default().replace(V3, V2).into()
}

// === messages ===

/// A protobuf message under construction.
#[derive(Default)]
struct Message(Vec<u8>);

impl Message {
    fn varint(&mut self, mut number: usize) {
        while number >= 0x80 {
            self.0.push((number % 0x80) as u8 | 0x80);
            number /= 0x80;
        }
        self.0.push((number % 0x80) as u8);
    }

    fn bytes(&mut self, field: usize, bytes: &[u8]) {
        self.varint(field << 3 | 2);
        self.varint(bytes.len());
        self.0.extend_from_slice(bytes);
    }

    fn message(&mut self, field: usize, message: Message) {
        self.bytes(field, &message.0);
    }

    /// Writes a text, if present.
    fn text(&mut self, field: usize, value: &Value) {
        if let Some(text) = value.as_str() {
            self.bytes(field, text.as_bytes());
        }
    }

    /// Writes the members whose names start with `x-`.
    fn extensions(&mut self, field: usize, object: &Value) {
        for (name, value) in entries(object).filter(|(name, _)| name.starts_with("x-")) {
            self.message(field, named(name, any(value)));
        }
    }
}

fn entries(value: &Value) -> impl Iterator<Item = (&String, &Value)> {
    value.as_object().into_iter().flatten()
}

fn items(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

fn named(name: &str, value: Message) -> Message {
    let mut message = Message::default();
    message.bytes(1, name.as_bytes());
    message.message(2, value);
    message
}

/// `Any` with a value in YAML; JSON is valid YAML.
fn any(value: &Value) -> Message {
    let mut message = Message::default();
    message.bytes(2, value.to_string().as_bytes());
    message
}

fn only(field: usize, inner: Message) -> Message {
    let mut message = Message::default();
    message.message(field, inner);
    message
}

/// `Schema`.
fn encoded(schema: &Value) -> Message {
    let mut message = Message::default();
    message.text(1, &schema["$ref"]);
    message.text(2, &schema["format"]);
    message.text(4, &schema["description"]);
    if !schema["default"].is_null() {
        message.message(5, any(&schema["default"]));
    }
    items(&schema["required"]).for_each(|name| message.text(19, name));
    items(&schema["enum"]).for_each(|value| message.message(20, any(value)));
    if schema["additionalProperties"].is_object() {
        message.message(21, only(1, encoded(&schema["additionalProperties"])));
    }
    if schema["type"].is_string() {
        let mut types = Message::default();
        types.text(1, &schema["type"]);
        message.message(22, types);
    }
    if schema["items"].is_object() {
        message.message(23, only(1, encoded(&schema["items"])));
    }
    if schema["properties"].is_object() {
        let mut all = Message::default();
        for (name, property) in entries(&schema["properties"]) {
            all.message(1, named(name, encoded(property)));
        }
        message.message(25, all);
    }
    message.extensions(31, schema);
    message
}

/// Maximum bytes of a parameter's name. Parameters with longer names are omitted: each operation that refers to a
/// parameter repeats its name.
const MAX_PARAMETER: usize = 256;

/// `PathItem` with its PATCH, if it has one. `shared` has the parameters to which operations refer.
fn path_item(item: &Value, shared: &Value) -> Message {
    let patch = &item["patch"];
    if !patch.is_object() {
        return Message::default();
    }
    let mut operation = Message::default();
    for parameter in items(&patch["parameters"]).chain(items(&item["parameters"])) {
        let reference = parameter["$ref"].as_str().and_then(|text| text.strip_prefix("#/parameters/"));
        let parameter = reference.map_or(parameter, |name| &shared[name]);
        let name = parameter["name"].as_str().unwrap_or_default();
        if parameter["in"] != "query" || name.len() > MAX_PARAMETER {
            continue;
        }
        let mut query = Message::default();
        query.text(2, &parameter["in"]);
        query.text(4, &parameter["name"]);
        query.text(6, &parameter["type"]);
        // The field numbers of the messages ParametersItem, Parameter and NonBodyParameter.
        operation.message(8, only(1, only(2, only(3, query))));
    }
    let mut responses = Message::default();
    for (code, response) in entries(&patch["responses"]) {
        let mut value = Message::default();
        value.text(1, &response["description"]);
        value.message(2, only(1, encoded(&response["schema"])));
        responses.message(1, named(code, only(1, value)));
    }
    operation.message(9, responses);
    operation.extensions(13, patch);
    only(7, operation)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::openapi::tests::custom;
    use crate::protobuf::wire::{Reader, WireValue};

    /// The messages and texts with a field number.
    fn under(message: &[u8], wanted: u32) -> Vec<&[u8]> {
        let mut reader = Reader::new(message);
        let mut found = Vec::new();
        while let Ok(Some((field, value))) = reader.next() {
            if let (true, WireValue::Bytes(bytes)) = (field == wanted, value) {
                found.push(bytes);
            }
        }
        found
    }

    fn definition(name: &str) -> Value {
        serde_json::from_str(of_built_in(built_in()).definitions[name].get()).unwrap()
    }

    #[test]
    fn the_hash_changes_with_each_group_version() {
        let with = |description: &str| {
            let custom = Arc::new(custom("Cup", description, |_| {}));
            hash(&built_in().with(&[custom]).unwrap())
        };
        assert_eq!(with("A cup."), with("A cup."));
        let hashes = [hash(built_in()), with("A cup."), with("A mug.")];
        assert_eq!(HashSet::from(hashes).len(), 3);
    }

    #[test]
    fn custom_resources_are_added_and_replace_no_definition() {
        let pod = |kind: &mut Resource| kind.schema = "io.k8s.api.core.v1.Pod".into();
        let mug = custom("Mug", "A mug.", pod);
        let set = built_in().with(&[Arc::new(custom("Cup", "A cup.", |_| {}))]).unwrap();
        let set = set.with(&[Arc::new(mug)]).unwrap();
        let mut document = of_built_in(&set);
        let before = document.definitions["io.k8s.api.core.v1.Pod"].get().to_owned();
        assert!(!document.definitions.contains_key("example.a.v1.Cup"));
        document.add_custom(&set);
        assert_eq!(document.definitions["io.k8s.api.core.v1.Pod"].get(), before);
        let list: Value = serde_json::from_str(document.definitions["example.a.v1.CupList"].get()).unwrap();
        let items = &list["properties"]["items"]["items"]["$ref"];
        assert_eq!(*items, "#/definitions/example.a.v1.Cup");
        assert!(document.definitions["example.a.v1.Cup"].get().contains("A cup."));
        for path in ["cups", "namespaces/{namespace}/mugs/{name}"] {
            assert!(document.paths.contains_key(&format!("/apis/a.example/v1/{path}")), "{path}");
        }
        // Built-in kinds with definitions of their own.
        assert!(document.definitions.keys().any(|name| name.ends_with("PodMetricsList")));
    }

    #[test]
    fn every_reference_leads_to_a_definition() {
        let document = of_built_in(built_in());
        let text = serde_json::to_string(&document).unwrap();
        assert!(!text.contains("#/components/") && !text.contains("\"allOf\":["));
        for section in ["definitions", "parameters"] {
            let start = format!("\"$ref\":\"#/{section}/");
            let references = text.split(&start).skip(1);
            for name in references.filter_map(|rest| rest.split('"').next()) {
                let all = if section == "definitions" { &document.definitions } else { &document.parameters };
                assert!(all.contains_key(name), "{name}");
            }
        }
    }

    #[test]
    fn defaults_are_omitted_and_fields_of_that_name_stay() {
        let port = &definition("io.k8s.api.core.v1.ContainerPort")["properties"]["protocol"];
        assert_eq!((&port["type"], port.get("default")), (&"string".into(), None));
        let items = &definition("io.k8s.api.core.v1.PodSpec")["properties"]["containers"]["items"];
        assert_eq!(*items, serde_json::json!({"$ref": "#/definitions/io.k8s.api.core.v1.Container"}));
        let limits = &definition("io.k8s.api.core.v1.LimitRangeItem")["properties"]["default"];
        assert_eq!(limits["type"], "object");
    }

    #[test]
    fn scalars_have_the_type_of_their_text() {
        let scalars = definition("io.k8s.apimachinery.pkg.util.intstr.IntOrString");
        assert_eq!((&scalars["type"], &scalars["format"]), (&"string".into(), &"int-or-string".into()));
        let policy = &definition("io.k8s.api.core.v1.Container")["properties"]["imagePullPolicy"];
        assert_eq!(under(&encoded(policy).0, 20).len(), 3);
    }

    #[test]
    fn parameters_that_an_operation_refers_to_are_in_the_message() {
        let shared = serde_json::json!({"a": {"in": "query", "name": "fieldValidation", "type": "string"},
            "b": {"in": "query", "name": "x".repeat(MAX_PARAMETER + 1)}, "c": {"in": "body", "name": "body"}});
        let item = serde_json::json!({"patch": {"parameters": [{"$ref": "#/parameters/a"},
            {"$ref": "#/parameters/b"}, {"$ref": "#/parameters/c"}, {"$ref": "#/parameters/none"}]}});
        let message = path_item(&item, &shared);
        let operation = under(&message.0, 7)[0];
        let names: Vec<_> = under(operation, 8)
            .into_iter()
            .map(|item| under(under(under(under(item, 1)[0], 2)[0], 3)[0], 4)[0])
            .collect();
        assert_eq!(names, [b"fieldValidation"]);
        assert!(path_item(&serde_json::json!({"get": {}}), &shared).0.is_empty());
    }

    #[test]
    fn a_kind_is_found_in_the_message_by_its_extension() {
        let bytes = protobuf(&of_built_in(built_in()));
        assert_eq!(under(&bytes, 1), [b"2.0"]);
        let definitions = under(&bytes, 9)[0];
        let pod =
            under(definitions, 1).into_iter().find(|entry| under(entry, 1) == [b"io.k8s.api.core.v1.Pod"]);
        let schema = under(pod.unwrap(), 2)[0];
        let extension = under(schema, 31)
            .into_iter()
            .find(|entry| under(entry, 1) == [b"x-kubernetes-group-version-kind"]);
        let yaml = under(under(extension.unwrap(), 2)[0], 2)[0];
        assert_eq!(yaml, br#"[{"group":"","kind":"Pod","version":"v1"}]"#);
        let properties = under(schema, 25)[0];
        let spec = under(properties, 1).into_iter().find(|entry| under(entry, 1) == [b"spec"]).unwrap();
        assert_eq!(under(under(spec, 2)[0], 1), [b"#/definitions/io.k8s.api.core.v1.PodSpec"]);
    }
}

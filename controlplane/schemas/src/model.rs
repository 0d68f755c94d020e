//! The definitions as compact structs, read once from the generated file. Descriptions stay compressed.

use std::borrow::Cow;
use std::collections::HashMap;
use std::io::Read;
use std::sync::LazyLock;

use serde::Deserialize;

static DEFINITIONS: &[u8] = include_bytes!("../data/definitions.json.deflate");
/// Lists that differ if they are empty or absent: an absent list gets a default, an empty list is invalid.
const REFUSED_IF_EMPTY: &[(&str, &str)] = &[("io.k8s.api.autoscaling.v2.HPAScalingRules", "policies")];
static OPERATIONS: &[u8] = include_bytes!("../data/operations.json.deflate");
static MESSAGES: &[u8] = include_bytes!("../data/messages.json.deflate");
static PRESENCE: &[u8] = include_bytes!("../data/presence.json.deflate");
static TYPES: &[u8] = include_bytes!("../data/types.json.deflate");
static SCHEMAS: LazyLock<Schemas> = LazyLock::new(Schemas::load);

/// Index of a definition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DefinitionId(u16);

/// All definitions.
#[derive(Default)]
pub struct Schemas {
    definitions: Vec<Definition>,
    names: HashMap<Box<str>, DefinitionId>,
}

/// One named type.
pub struct Definition {
    /// `io.k8s.api.core.v1.Container`.
    pub name: Box<str>,
    /// The properties, sorted by name.
    pub properties: Box<[Property]>,
    /// The start of each property's name, in the order of the properties. A search in these numbers reads few cache
    /// lines, a search in the names reads two for each compared name.
    prefixes: Box<[u64]>,
    /// `x-kubernetes-map-type: atomic`: an object of this type has one owner.
    pub atomic: bool,
    /// Indexes of the properties that have their zero value if they are absent.
    pub always: Box<[u16]>,
}

/// One field of a type.
pub struct Property {
    /// JSON name.
    pub name: Box<str>,
    /// Type of the property.
    pub value_type: ValueType,
    /// The condition under which Go writes the field.
    pub presence: Presence,
    /// Go type and embedded structs in decoding errors, if they do not follow from `value_type`.
    pub go: Option<Box<GoField>>,
    /// Markers for strategic merge patches.
    pub patch: PatchMarkers,
    /// Markers for field ownership.
    pub ownership: OwnershipMarkers,
}

/// The Go type and the embedded structs of a field, for Go's decoding errors.
pub struct GoField {
    /// `[]v1.PersistentVolumeAccessMode`.
    pub of: Box<str>,
    /// Path of the embedded structs that the field is in, such as `VolumeSource.`; empty for none.
    pub within: Box<str>,
}

/// The condition under which Go writes a field. It follows from the Go type and the JSON tag.
/// `integration/differential/fields` prints it for each field.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Presence {
    /// Go omits the field if it is zero or empty.
    NotZero,
    /// Go writes the field if it is present, zero included.
    #[default]
    Present,
    /// Go always writes the field. An absent field has its zero value.
    Zero,
    /// Go always writes the field. An absent field is null.
    Null,
}

/// Markers of a field for field ownership.
#[derive(Default, Clone, Debug)]
pub struct OwnershipMarkers {
    /// `x-kubernetes-list-type` and its keys.
    pub list: ListType,
    /// `x-kubernetes-map-type: atomic`.
    pub atomic_map: bool,
    /// `default`. An empty object means that an absent field is the same as `{}`.
    pub default: Option<serde_json::Value>,
}

/// Field ownership of a list: `x-kubernetes-list-type`.
#[derive(Default, Clone, Debug)]
pub enum ListType {
    /// The list has one owner.
    #[default]
    Atomic,
    /// Elements are distinct scalars.
    Set,
    /// A list whose elements are identified by these fields.
    Map(Box<[Box<str>]>),
}

/// `x-kubernetes-patch-*` of a field.
#[derive(Default, Clone, Debug)]
pub struct PatchMarkers {
    /// Whether lists are merged instead of replaced.
    pub merge: bool,
    /// The merge key of a list of objects.
    pub merge_key: Option<Box<str>>,
}

/// A type.
#[derive(Clone, Debug)]
pub enum ValueType {
    /// Free-form.
    Any,
    /// `true` or `false`.
    Bool,
    /// An integer of 32 bits.
    Int32,
    /// An integer of 64 bits.
    Int64,
    /// A floating-point number.
    Number,
    /// A string.
    Text,
    /// Base64 text.
    Bytes,
    /// RFC 3339 to the second.
    Time,
    /// RFC 3339 to the microsecond.
    MicroTime,
    /// An integer, or a string such as a percentage.
    IntOrString,
    /// An amount such as `500Mi`.
    Quantity,
    /// An object with this definition.
    Object(DefinitionId),
    /// An object with this definition, or a value of another type: a schema, or `true`.
    Choice(DefinitionId),
    /// A list of values of this type.
    List(Box<ValueType>),
    /// An object whose values have this type.
    Map(Box<ValueType>),
}

/// The first eight bytes of a name, as a number. The numbers have the order of the names.
fn prefix(name: &str) -> u64 {
    let mut start = [0; 8];
    start.iter_mut().zip(name.bytes()).for_each(|(place, byte)| *place = byte);
    u64::from_be_bytes(start)
}

/// The schemas, decompressed at their first use.
pub fn schemas() -> &'static Schemas {
    &SCHEMAS
}

/// The text of a generated file.
fn inflate(packed: &[u8]) -> String {
    let mut text = String::new();
    // The bytes are part of the program, so an error cannot happen at run time. The unit tests would find it.
    let _ = flate2::read::DeflateDecoder::new(packed).read_to_string(&mut text);
    text
}

/// The definitions as OpenAPI text, with descriptions.
pub fn definitions_text() -> String {
    inflate(DEFINITIONS)
}

/// JSON text with the further definitions of OpenAPI documents, such as those of lists, and the parameters of
/// operations.
pub fn operations_text() -> String {
    inflate(OPERATIONS)
}

/// The compressed texts of [`definitions_text`] and [`operations_text`].
pub fn packed_documents() -> [&'static [u8]; 2] {
    [DEFINITIONS, OPERATIONS]
}

/// The protobuf messages of the types as JSON text: field numbers, JSON names and types.
pub fn messages_text() -> String {
    inflate(MESSAGES)
}

// === impl Schemas ===

impl Schemas {
    fn load() -> Schemas {
        let text = definitions_text();
        let Ok(file) = serde_json::from_str::<File<'_>>(&text) else { return Schemas::default() };
        let presence = inflate(PRESENCE);
        let presence: HashMap<&str, &str> = serde_json::from_str(&presence).unwrap_or_default();
        let types = inflate(TYPES);
        let types: HashMap<&str, HashMap<&str, &str>> = serde_json::from_str(&types).unwrap_or_default();
        let mut names: Vec<&str> = file.definitions.keys().map(AsRef::as_ref).collect();
        names.sort_unstable();
        let ids = names.iter().zip(0..).map(|(name, id)| (Box::from(*name), DefinitionId(id))).collect();
        let definitions = names
            .iter()
            .filter_map(|name| {
                let mut definition = Definition::new(name, file.definitions.get(*name)?, &ids);
                definition.set_presence(presence.get(name).copied().unwrap_or_default());
                definition.keep_empty_lists();
                if let Some(types) = types.get(name) {
                    definition.set_types(types);
                }
                Some(definition)
            })
            .collect();
        Schemas { definitions, names: ids }
    }

    /// All definitions, in the order of their indexes.
    pub fn all(&self) -> &[Definition] {
        &self.definitions
    }

    /// The index of the definition with this name.
    pub fn id(&self, name: &str) -> Option<DefinitionId> {
        self.names.get(name).copied()
    }

    /// The definition with this name.
    pub fn find(&self, name: &str) -> Option<&Definition> {
        self.names.get(name).map(|id| self.get(*id))
    }

    /// The definition with this index.
    pub fn get(&self, id: DefinitionId) -> &Definition {
        &self.definitions[usize::from(id.0)]
    }
}

// === impl DefinitionId ===

impl DefinitionId {
    /// The position in [`Schemas::all`].
    pub fn index(self) -> usize {
        usize::from(self.0)
    }
}

// === impl Definition ===

impl Definition {
    fn new(name: &str, raw: &RawSchema<'_>, ids: &HashMap<Box<str>, DefinitionId>) -> Definition {
        let properties: Vec<Property> = raw
            .properties
            .iter()
            .map(|(field, schema)| Property {
                name: Box::from(field.as_ref()),
                value_type: ValueType::new(schema, ids),
                presence: Presence::default(),
                go: None,
                patch: PatchMarkers {
                    merge: schema.strategy.split(',').any(|word| word == "merge"),
                    merge_key: schema.merge_key.as_deref().map(Box::from),
                },
                ownership: OwnershipMarkers::new(schema),
            })
            .collect();
        Definition { atomic: raw.map_type == "atomic", ..Definition::with_properties(name, properties) }
    }

    /// A definition with these properties, whose objects may have several owners.
    pub fn with_properties(name: &str, mut properties: Vec<Property>) -> Definition {
        properties.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        let prefixes = properties.iter().map(|property| prefix(&property.name)).collect();
        let (properties, always) = (properties.into(), Box::default());
        Definition { name: Box::from(name), properties, prefixes, atomic: false, always }
    }

    /// Sets the presence of each property. `letters` has one letter for each property, in the order of the names.
    fn set_presence(&mut self, letters: &str) {
        for (property, letter) in self.properties.iter_mut().zip(letters.chars()) {
            property.presence = match letter {
                'o' => Presence::NotZero,
                'z' => Presence::Zero,
                'n' => Presence::Null,
                _ => Presence::Present,
            };
        }
        let always = (0..)
            .zip(&self.properties)
            .filter_map(|(index, property)| (property.presence == Presence::Zero).then_some(index));
        self.always = always.collect();
    }

    /// Keeps empty lists that validation refuses: Go decodes them, and omits them only when it encodes.
    fn keep_empty_lists(&mut self) {
        let Some((_, field)) = REFUSED_IF_EMPTY.iter().find(|(name, _)| *name == &*self.name) else { return };
        for property in self.properties.iter_mut().filter(|property| &*property.name == *field) {
            property.presence = Presence::Present;
        }
    }

    /// Sets the Go types of fields: each is a type, a space, and the path of the embedded structs.
    fn set_types(&mut self, types: &HashMap<&str, &str>) {
        for property in &mut self.properties {
            let words = types.get(property.name.as_ref()).and_then(|words| words.split_once(' '));
            property.go =
                words.map(|(of, within)| Box::new(GoField { of: of.into(), within: within.into() }));
        }
    }

    /// The field with this name.
    pub fn property(&self, name: &str) -> Option<&Property> {
        let start = prefix(name);
        let first = self.prefixes.partition_point(|other| *other < start);
        let count = self.prefixes.get(first..)?.iter().take_while(|other| **other == start).count();
        self.properties.get(first..first + count)?.iter().find(|property| *property.name == *name)
    }

    /// The name of the Go struct, for decoding errors.
    pub fn short_name(&self) -> &str {
        self.name.rsplit_once('.').map_or(&self.name, |(_, short)| short)
    }

    /// The Go type, `v1.Container`.
    pub fn go_type(&self) -> &str {
        let dot = self.name.rmatch_indices('.').nth(1).map_or(0, |(at, _)| at + 1);
        &self.name[dot..]
    }
}

// === impl OwnershipMarkers ===

impl OwnershipMarkers {
    fn new(raw: &RawSchema<'_>) -> OwnershipMarkers {
        let list = match raw.list_type {
            "set" => ListType::Set,
            "map" => ListType::Map(raw.list_keys.iter().map(|key| Box::from(key.as_ref())).collect()),
            _ => ListType::Atomic,
        };
        OwnershipMarkers { list, atomic_map: raw.map_type == "atomic", default: raw.default.clone() }
    }
}

// === impl ValueType ===

impl ValueType {
    fn new(raw: &RawSchema<'_>, ids: &HashMap<Box<str>, DefinitionId>) -> ValueType {
        if let Some(reference) =
            raw.reference.as_deref().or(raw.all_of.first().and_then(|r| r.reference.as_deref()))
        {
            return ValueType::named(reference.rsplit('/').next().unwrap_or(reference), ids);
        }
        match (raw.kind, raw.format) {
            ("boolean", _) => ValueType::Bool,
            ("integer", "int32") => ValueType::Int32,
            ("integer", _) => ValueType::Int64,
            ("number", _) => ValueType::Number,
            ("string", "byte") => ValueType::Bytes,
            ("string", "int-or-string") => ValueType::IntOrString,
            ("string", _) => ValueType::Text,
            ("array", _) => ValueType::List(Box::new(
                raw.items.as_deref().map_or(ValueType::Any, |items| ValueType::new(items, ids)),
            )),
            ("object", _) => match &raw.additional {
                Some(values) => ValueType::Map(Box::new(ValueType::new(values, ids))),
                None => ValueType::Any,
            },
            _ => ValueType::Any,
        }
    }

    fn named(name: &str, ids: &HashMap<Box<str>, DefinitionId>) -> ValueType {
        let (package, short) = name.rsplit_once('.').unwrap_or(("", name));
        match (package.ends_with("meta.v1"), short) {
            (true, "Time") => ValueType::Time,
            (true, "MicroTime") => ValueType::MicroTime,
            (true, "FieldsV1") | (false, "RawExtension" | "JSON" | "JSONSchemaPropsOrStringArray") => {
                ValueType::Any
            }
            (false, "JSONSchemaPropsOrArray" | "JSONSchemaPropsOrBool") => {
                let schema = format!("{package}.JSONSchemaProps");
                ids.get(schema.as_str()).map_or(ValueType::Any, |id| ValueType::Choice(*id))
            }
            (false, "Quantity") => ValueType::Quantity,
            (false, "IntOrString") => ValueType::IntOrString,
            _ => ids.get(name).map_or(ValueType::Any, |id| ValueType::Object(*id)),
        }
    }
}

// === the file ===

#[derive(Deserialize)]
struct File<'a> {
    #[serde(borrow)]
    definitions: HashMap<Cow<'a, str>, RawSchema<'a>>,
}

#[derive(Deserialize)]
#[serde(default)]
#[derive(Default)]
struct RawSchema<'a> {
    #[serde(rename = "type")]
    kind: &'a str,
    format: &'a str,
    #[serde(rename = "$ref", borrow)]
    reference: Option<Cow<'a, str>>,
    #[serde(rename = "allOf", borrow)]
    all_of: Vec<RawSchema<'a>>,
    #[serde(borrow)]
    properties: HashMap<Cow<'a, str>, RawSchema<'a>>,
    #[serde(borrow)]
    items: Option<Box<RawSchema<'a>>>,
    #[serde(rename = "additionalProperties", borrow)]
    additional: Option<Box<RawSchema<'a>>>,
    #[serde(rename = "x-kubernetes-patch-strategy")]
    strategy: &'a str,
    #[serde(rename = "x-kubernetes-patch-merge-key", borrow)]
    merge_key: Option<Cow<'a, str>>,
    #[serde(rename = "x-kubernetes-list-type")]
    list_type: &'a str,
    #[serde(rename = "x-kubernetes-list-map-keys", borrow)]
    list_keys: Vec<Cow<'a, str>>,
    #[serde(rename = "x-kubernetes-map-type")]
    map_type: &'a str,
    default: Option<serde_json::Value>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_property_is_found_by_its_name_only() {
        for definition in schemas().all() {
            for property in &definition.properties {
                let found = definition.property(&property.name).unwrap();
                assert!(std::ptr::eq(found, property), "{} {}", definition.name, property.name);
                let longer = format!("{}\0", property.name);
                assert!(definition.property(&longer).is_none(), "{} {}", definition.name, property.name);
            }
            assert!(definition.property("").is_none() && definition.property("~").is_none());
        }
    }
}

//! Tables for `kubectl get`.

pub(crate) mod admission;
mod age;
pub(crate) mod aggregation;
pub(crate) mod autoscaling;
pub(crate) mod batch;
pub(crate) mod certificate;
pub(crate) mod devices;
pub(crate) mod disruption;
pub(crate) mod event;
pub(crate) mod flow_control;
pub(crate) mod migration;
pub(crate) mod networking;
pub(crate) mod node;
pub(crate) mod object;
pub(crate) mod pod;
pub(crate) mod pod_group;
pub(crate) mod policy;
pub(crate) mod rbac;
pub(crate) mod service;
pub(crate) mod storage;
pub(crate) mod workload;

use jiff::Timestamp;
use serde_json::{Map, Value, json};

use self::age::age;
use crate::Resource;

/// One column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Column {
    /// Header.
    pub name: &'static str,
    /// Type of the cells: `string`, `integer`, `boolean` or `date`.
    pub r#type: &'static str,
    /// `name` for the first column, empty for the other columns.
    pub format: &'static str,
    /// Priority of the column: 0 is always shown, 1 only with `-o wide`.
    pub priority: u8,
    /// Description.
    pub description: &'static str,
}

/// `includeObject` of a Table request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Include {
    /// Rows without objects.
    None,
    /// The object's metadata.
    #[default]
    Metadata,
    /// The whole object.
    Object,
}

/// The version of `meta.k8s.io` in which tables and partial metadata are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum MetaVersion {
    /// `v1`.
    #[default]
    V1,
    /// `v1beta1`, which old clients request.
    V1Beta1,
}

/// The content of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Content {
    /// The objects of the rows.
    pub include: Include,
    /// The version.
    pub version: MetaVersion,
}

/// Options of a table.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// The content.
    pub content: Content,
    /// Whether the table has column definitions. In a watch only the first event has them.
    pub headers: bool,
    /// The current time, for ages.
    pub now: Timestamp,
}

/// The time since a point in time, as tables show it: `4d`.
pub fn age_of(at: Timestamp, now: Timestamp) -> String {
    age::span(now.as_second() - at.as_second())
}

/// A Table. `list_meta` is the metadata of the Table (resourceVersion, continue, remainingItemCount).
pub fn render<'a>(
    kind: &Resource,
    objects: impl IntoIterator<Item = &'a Value>,
    list_meta: Value,
    options: Options,
) -> Value {
    let rows = objects
        .into_iter()
        .map(|object| row(Some(kind), kind.strategy().cells(object, options.now), object, options.content));
    let rows = rows.collect();
    let columns = if options.headers { kind.columns.clone() } else { Value::Null };
    table(columns, list_meta, rows, options.content.version)
}

/// The Table of a Scale.
pub fn scale(scale: &Value, options: Options) -> Value {
    let columns = workload::SCALE.iter().map(Column::definition).collect();
    let list_meta = json!({"resourceVersion": scale["metadata"]["resourceVersion"]});
    let cells = workload::scale(scale, options.now);
    table(columns, list_meta, vec![row(None, cells, scale, options.content)], options.content.version)
}

fn table(columns: Value, list_meta: Value, rows: Vec<Value>, version: MetaVersion) -> Value {
    json!({
        "kind": "Table",
        "apiVersion": version.api_version(),
        "metadata": if list_meta.is_null() { json!({}) } else { list_meta },
        "columnDefinitions": columns,
        "rows": rows,
    })
}

/// The row of an object. `kind` is needed if the object does not have the field `kind`.
fn row(kind: Option<&Resource>, cells: Vec<Value>, object: &Value, content: Content) -> Value {
    match content.include {
        Include::None => json!({"cells": cells}),
        Include::Metadata => {
            json!({"cells": cells, "object": partial_metadata(object, content.version)})
        }
        Include::Object => {
            let mut whole = object.clone();
            if let Some(kind) = kind {
                whole["kind"] = kind.kind.as_ref().into();
                whole["apiVersion"] = kind.api_version().into();
            }
            json!({"cells": cells, "object": whole})
        }
    }
}

/// PartialObjectMetadata of an object.
pub fn partial_metadata(object: &Value, version: MetaVersion) -> Value {
    json!({
        "kind": "PartialObjectMetadata",
        "apiVersion": version.api_version(),
        "metadata": object.get("metadata").cloned().unwrap_or_else(|| Map::new().into()),
    })
}

// === impl MetaVersion ===

impl MetaVersion {
    /// `meta.k8s.io/v1`.
    pub fn api_version(self) -> &'static str {
        match self {
            Self::V1 => "meta.k8s.io/v1",
            Self::V1Beta1 => "meta.k8s.io/v1beta1",
        }
    }
}

// === impl Column ===

impl Column {
    /// The column in the `columnDefinitions` of a Table.
    pub(crate) fn definition(&self) -> Value {
        json!({
            "name": self.name,
            "type": self.r#type,
            "format": self.format,
            "priority": self.priority,
            "description": self.description,
        })
    }
}

/// The first column of every kind.
pub(crate) const NAME: Column = Column {
    name: "Name",
    r#type: "string",
    format: "name",
    priority: 0,
    description: "Name of the object, unique within its namespace and kind.",
};
const AGE: Column = string("Age", "Time since the object was created.");

pub(crate) const fn string(name: &'static str, description: &'static str) -> Column {
    Column { name, r#type: "string", format: "", priority: 0, description }
}

const fn integer(name: &'static str, description: &'static str) -> Column {
    Column { name, r#type: "integer", format: "", priority: 0, description }
}

const fn boolean(name: &'static str, description: &'static str) -> Column {
    Column { name, r#type: "boolean", format: "", priority: 0, description }
}

const fn wide(column: Column) -> Column {
    Column { priority: 1, ..column }
}

/// The columns of kinds without own columns.
pub(crate) const CREATED_AT: &[Column] = &[
    NAME,
    Column {
        name: "Created At",
        r#type: "date",
        format: "",
        priority: 0,
        description: "Time at which the object was created.",
    },
];

/// The cells of kinds without own columns.
pub(crate) fn created_at(object: &Value, _now: Timestamp) -> Vec<Value> {
    let created = object["metadata"]["creationTimestamp"].as_str();
    // A bookmark has no time. Upstream shows the zero time of Go.
    vec![name(object), created.unwrap_or("0001-01-01T00:00:00Z").into()]
}

/// The cell of the column `Name`. A bookmark has no name.
fn name(object: &Value) -> Value {
    object["metadata"]["name"].as_str().unwrap_or_default().into()
}

/// The cell of the column `Age`: the time since the object was created.
fn age_cell(object: &Value, now: Timestamp) -> Value {
    age(&object["metadata"]["creationTimestamp"], now).into()
}

/// Text, or `<none>` if absent.
fn or_none(value: &Value) -> Value {
    match value.as_str() {
        None | Some("") => "<none>".into(),
        Some(text) => text.into(),
    }
}

/// Number of entries of a list or map.
fn length(value: &Value) -> Value {
    value.as_array().map(Vec::len).or(value.as_object().map(Map::len)).unwrap_or(0).into()
}

/// The objects of a list.
fn items(value: &Value) -> impl DoubleEndedIterator<Item = &Value> + ExactSizeIterator {
    value.as_array().map_or(&[] as &[Value], Vec::as_slice).iter()
}

#[cfg(test)]
mod tests;

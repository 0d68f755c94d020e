//! Server-side tables.

use jiff::Timestamp;
use serde_json::Value;

use crate::Kind;

/// One column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Column {
    /// Header.
    pub name: &'static str,
    /// `string`, `integer`, `date`.
    pub r#type: &'static str,
    /// `name` on the first column.
    pub format: &'static str,
    /// 1 means only with `-o wide`.
    pub priority: u8,
    /// What it tells.
    pub description: &'static str,
}

/// `includeObject` of a Table request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Include {
    /// No object in rows.
    None,
    /// The object's metadata.
    #[default]
    Metadata,
    /// The whole object.
    Object,
}

/// How a table is made.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// `includeObject`.
    pub include: Include,
    /// Whether column definitions are given (watches give them in their first event only).
    pub headers: bool,
    /// Ages count to here.
    pub now: Timestamp,
}

/// A `meta.k8s.io/v1` Table; `list_meta` becomes its metadata (resourceVersion, continue, remainingItemCount).
pub fn render<'a>(
    kind: &Kind,
    objects: impl IntoIterator<Item = &'a Value>,
    list_meta: Value,
    options: Options,
) -> Value {
    let _ = (kind, objects.into_iter().count(), options);
    list_meta
}

/// `meta.k8s.io/v1` PartialObjectMetadata of an object.
pub fn partial_metadata(object: &Value) -> Value {
    serde_json::json!({"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": object["metadata"]})
}

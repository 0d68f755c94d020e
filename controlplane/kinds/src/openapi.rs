//! OpenAPI v3 documents with the minimal paths that clients look for.

use serde_json::Value;

/// One group version's document.
#[derive(Clone, Debug)]
pub struct Document {
    /// JSON text.
    pub body: Vec<u8>,
    /// Content hash, upper-case hexadecimal.
    pub hash: String,
}

/// `/openapi/v3`: path → URL with content hash.
pub fn root() -> Value {
    Value::Null
}

/// The document of `api/v1`, `apis/apps/v1`, …
pub fn document(_path: &str) -> Option<Document> {
    None
}

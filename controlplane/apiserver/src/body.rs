//! Decodes request bodies: JSON, YAML or protobuf to a tree of the expected kind.

use bytes::Bytes;
use coracle_kinds::{
    Resource, initializers, protobuf,
    schema::{self, FieldValidation, Parsed},
};
use http::HeaderMap;
use http_body_util::BodyExt as _;
use serde_json::{Map, Value};

use crate::{
    error::{ApiError, OBJECT_TYPES, Result},
    in_flight::BodyMemory,
    media::{self, BodyType},
    offload::{self, MIN_OFFLOADED_BYTES},
};

mod yaml;

pub(crate) use yaml::{first_duplicate, is_slow as is_slow_yaml, parse as parse_yaml};

/// Prefix of the error about a body that is not JSON.
const NO_VERSION: &str = "couldn't get version/kind";
/// Maximum bytes of a request body, as upstream.
const LIMIT: usize = 3 << 20;
/// Minimum growth of the buffer of a body, in bytes.
const MIN_GROWTH: usize = 16 << 10;

/// The expected type of a body.
pub(crate) struct Expected<'a> {
    api_version: &'a str,
    kind: &'a str,
    rules: Rules<'a>,
    /// Whether `metadata.initializers` is a known field.
    initializers: bool,
    /// Another accepted API version, whose fields are the same.
    alias: Option<&'a str>,
}

/// The rules for the fields of a body.
enum Rules<'a> {
    /// A built-in definition, by name.
    Definition(&'a str),
    /// The rules of a resource.
    Resource(&'a Resource),
    /// The rules of a resource for the configuration of a server-side apply.
    Config(&'a Resource),
}

// === impl Expected ===

impl<'a> Expected<'a> {
    /// An object of a resource.
    pub(crate) fn of(resource: &'a Resource) -> Self {
        let rules = Rules::Resource(resource);
        let (api_version, kind) = (resource.api_version(), &*resource.kind);
        Self { api_version, kind, rules, initializers: false, alias: None }
    }

    /// The configuration of a server-side apply.
    pub(crate) fn config(resource: &'a Resource) -> Self {
        Self { rules: Rules::Config(resource), ..Self::of(resource) }
    }

    /// A body with a built-in definition.
    pub(crate) fn defined(api_version: &'a str, kind: &'a str, definition: &'a str) -> Self {
        Self { api_version, kind, rules: Rules::Definition(definition), initializers: false, alias: None }
    }

    /// Accepts another API version with the same fields, too.
    pub(crate) fn or_version(self, alias: Option<&'a str>) -> Self {
        Self { alias, ..self }
    }

    /// Whether the body must have apiVersion and kind. Upstream requires them for custom resources.
    fn needs_type(&self) -> bool {
        matches!(self.rules, Rules::Resource(resource) if !resource.is_built_in())
    }

    /// Sets whether `metadata.initializers` is a known field.
    pub(crate) fn with_initializers(self, are_known: bool) -> Self {
        Self { initializers: are_known, ..self }
    }

    /// The error of a value with the wrong type.
    fn problem(&self, problem: String) -> ApiError {
        let version = self.api_version.rsplit('/').next().unwrap_or_default();
        let kind = self.kind;
        ApiError::bad_request(format!(
            "{kind} in version \"{version}\" cannot be handled as a {kind}: {problem}"
        ))
    }
}

/// Reads the whole body, up to the size limit and the memory limit.
pub(crate) async fn read<B>(body: B, memory: &mut BodyMemory) -> Result<Bytes>
where
    B: http_body::Body<Data = Bytes>,
    B::Error: std::fmt::Display,
{
    read_up_to(body, LIMIT, memory).await
}

/// Reads the whole body, up to `limit` bytes and the memory limit.
pub(crate) async fn read_up_to<B>(body: B, limit: usize, memory: &mut BodyMemory) -> Result<Bytes>
where
    B: http_body::Body<Data = Bytes>,
    B::Error: std::fmt::Display,
{
    let mut body = std::pin::pin!(body);
    let mut first = Bytes::new();
    let mut rest: Option<Vec<u8>> = None;
    while let Some(frame) = body.as_mut().frame().await {
        let frame = frame.map_err(|error| ApiError::bad_request(format!("cannot read the body: {error}")))?;
        let Ok(data) = frame.into_data() else { continue };
        let length = rest.as_ref().map_or(first.len(), Vec::len) + data.len();
        if length > limit {
            return Err(ApiError::too_large());
        }
        memory.grow(length)?;
        if rest.is_none() && first.is_empty() {
            first = data;
            continue;
        }
        let rest = rest.get_or_insert_with(|| std::mem::take(&mut first).to_vec());
        make_room(rest, data.len());
        rest.extend_from_slice(&data);
    }
    Ok(rest.map_or(first, Bytes::from))
}

/// Makes room for further bytes. The vector grows by a quarter: [`BodyMemory`] counts only the length, and the usual
/// doubling could allocate twice as much.
fn make_room(text: &mut Vec<u8>, additional: usize) {
    if text.capacity() - text.len() < additional {
        text.reserve_exact(additional.max(text.len() / 4).max(MIN_GROWTH));
    }
}

/// Decodes a body as an object of an expected kind. Returns the object and warnings. A slow body waits for a slot.
/// `record` gets the object as the client has sent it.
pub(crate) async fn decode(
    headers: &HeaderMap,
    bytes: &Bytes,
    expected: &Expected<'_>,
    validation: FieldValidation,
    record: impl FnOnce(&Value),
) -> Result<(Value, Vec<String>)> {
    let decoded = || {
        let mut parsed = tree(headers, bytes).map_err(|error| unrecognized(error, expected.kind, bytes))?;
        record(&parsed.value);
        if parsed.value.is_null() {
            // As in Go, null decodes to an object without fields.
            parsed.value = Value::Object(Map::new());
        }
        check(parsed, expected, validation)
    };
    offload::run_body(is_slow(headers, bytes), decoded).await?
}

/// Whether the parsing of a body may take so long that it must not run on an async worker.
fn is_slow(headers: &HeaderMap, bytes: &[u8]) -> bool {
    let is_yaml = || matches!(media::body_type(headers), Ok(BodyType::Yaml));
    bytes.len() > MIN_OFFLOADED_BYTES || (is_yaml() && yaml::is_slow(bytes))
}

/// Extends the error of a body that is not JSON by the expected kind and the start of the body. Source:
/// `transformDecodeError` of the generic API server.
fn unrecognized(mut error: ApiError, kind: &str, body: &[u8]) -> ApiError {
    /// Maximum bytes of the body in the message.
    const SHOWN: usize = 30;
    if !error.message.starts_with(NO_VERSION) {
        return error;
    }
    let shown = &body[..body.len().min(SHOWN)];
    let more = if body.len() > SHOWN { " ..." } else { "" };
    let summary = match shown.first() {
        None => "<empty>".to_owned(),
        Some(b'{') => String::from_utf8_lossy(shown).into_owned(),
        Some(_) => shown.iter().fold(String::new(), |text, byte| text + &format!("{byte:02x}")),
    };
    let message = &error.message;
    error.message =
        format!("the object provided is unrecognized (must be of type {kind}): {message} ({summary}{more})");
    error
}

/// Parses a body without a check of its type. A slow body waits for a slot. `record` gets the parsed value.
pub(crate) async fn parse(headers: &HeaderMap, bytes: &Bytes, record: impl FnOnce(&Value)) -> Result<Parsed> {
    let parsed = || tree(headers, bytes).inspect(|parsed| record(&parsed.value));
    offload::run_body(is_slow(headers, bytes), parsed).await?
}

fn tree(headers: &HeaderMap, bytes: &Bytes) -> Result<Parsed> {
    if bytes.is_empty() {
        let message = format!("{NO_VERSION}; json parse error: unexpected end of JSON input");
        return Err(ApiError::bad_request(message));
    }
    match media::body_type(headers)? {
        BodyType::Json => schema::parse_json(bytes).map_err(|error| ApiError::bad_request(error.to_string())),
        BodyType::Yaml => yaml::parse(bytes),
        BodyType::Protobuf => {
            let value = protobuf::decode(bytes).map_err(|error| ApiError::bad_request(error.to_string()))?;
            Ok(Parsed { value, duplicates: Vec::new(), keys: Vec::new() })
        }
        BodyType::JsonPatch | BodyType::MergePatch | BodyType::StrategicPatch | BodyType::ApplyPatch => {
            Err(ApiError::unknown_body(OBJECT_TYPES))
        }
    }
}

/// Checks a tree against the expected type. Sets apiVersion and kind of a built-in object if they are absent.
pub(crate) fn check(
    mut parsed: Parsed,
    expected: &Expected<'_>,
    validation: FieldValidation,
) -> Result<(Value, Vec<String>)> {
    let Some(object) = parsed.value.as_object_mut() else {
        return Err(ApiError::bad_request(format!(
            "{} in version \"{}\" cannot be handled as a {}: the body is not an object",
            expected.kind, expected.api_version, expected.kind
        )));
    };
    if expected.needs_type() {
        let is_missing = |field: &str| object.get(field).and_then(Value::as_str).is_none_or(str::is_empty);
        if let Some((_, name)) =
            [("kind", "Kind"), ("apiVersion", "apiVersion")].into_iter().find(|(field, _)| is_missing(field))
        {
            return Err(ApiError::bad_request(format!(
                "the object provided is unrecognized (must be of type {}): Object '{name}' is missing",
                expected.kind
            )));
        }
    }
    for (field, what, expected, alias) in [
        ("apiVersion", "API version", expected.api_version, expected.alias),
        ("kind", "kind", expected.kind, None),
    ] {
        match object.get(field).and_then(Value::as_str).unwrap_or_default() {
            "" => {
                object.insert(field.to_owned(), expected.into());
            }
            found if found == expected => {}
            found if alias == Some(found) => {
                object.insert(field.to_owned(), expected.into());
            }
            found => {
                return Err(ApiError::bad_request(format!(
                    "the {what} in the data ({found}) does not match the expected {what} ({expected})"
                )));
            }
        }
    }
    let (taken, mut unknown) = match expected.initializers {
        true => initializers::take(&mut parsed.value).map_err(|problem| expected.problem(problem))?,
        false => (None, Vec::new()),
    };
    let decoded = match expected.rules {
        Rules::Definition(name) => schema::decode(name, parsed, validation),
        Rules::Resource(resource) => resource.strategy().decode(parsed, validation),
        Rules::Config(resource) => resource.strategy().decode_config(parsed, validation),
    };
    let (mut object, mut notes) = decoded.map_err(|error| ApiError::bad_request(error.to_string()))?;
    initializers::set(&mut object, taken);
    match validation {
        FieldValidation::Ignore => {}
        FieldValidation::Strict if !unknown.is_empty() => {
            return Err(expected.problem(format!("strict decoding error: {}", unknown.join(", "))));
        }
        FieldValidation::Warn | FieldValidation::Strict => notes.append(&mut unknown),
    }
    Ok((object, notes))
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use http_body::Frame;
    use http_body_util::StreamBody;
    use serde_json::json;

    use super::*;
    use crate::request_owner;

    #[tokio::test]
    async fn a_body_in_parts_takes_little_more_than_its_length() {
        for parts in [1, 2, 100, 180] {
            let part = |_| Ok::<_, Infallible>(Frame::data(Bytes::from(vec![b'x'; 16 << 10])));
            let body = StreamBody::new(futures::stream::iter((0..parts).map(part)));
            let bytes = read(body, &mut BodyMemory::default()).await.unwrap();
            let length = bytes.len();
            assert_eq!(length, parts * (16 << 10));
            let capacity = bytes.try_into_mut().unwrap().capacity();
            assert!(capacity <= length + length / 4 + MIN_GROWTH, "{capacity} for {length}");
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 1)]
    async fn a_slow_body_is_refused_while_too_many_wait_for_a_slot() {
        let of = |media: &'static str, body: String| {
            let mut headers = HeaderMap::new();
            headers.insert(http::header::CONTENT_TYPE, http::HeaderValue::from_static(media));
            (headers, Bytes::from(body))
        };
        let config_map = json!({"metadata": {"name": "a"}, "data": {"a": "x".repeat(MIN_OFFLOADED_BYTES)}});
        let long = of("application/json", config_map.to_string());
        let nested = of("application/yaml", "[".repeat(4_000));
        let short = of("application/yaml", "metadata: {name: a}".to_owned());
        let json = json!({"metadata": {"name": "a"}, "data": {"a": "[".repeat(4_000)}});
        let bracketed = of("application/yaml", json.to_string());
        let parsed = async |(headers, bytes): &(HeaderMap, Bytes)| {
            let parsed = request_owner::scope("body-eve".into(), parse(headers, bytes, |_| ())).await;
            parsed.err().map_or(200, |error| error.code)
        };
        let decoded = async |(headers, bytes): &(HeaderMap, Bytes)| {
            let expected = Expected::defined("v1", "ConfigMap", "io.k8s.api.core.v1.ConfigMap");
            let decoded = decode(headers, bytes, &expected, FieldValidation::Strict, |_| ());
            let decoded = request_owner::scope("body-eve".into(), decoded).await;
            decoded.err().map_or(200, |error| error.code)
        };
        let occupied = offload::occupy_bodies("body-eve").await;
        for body in [&long, &nested] {
            assert_eq!([parsed(body).await, decoded(body).await], [429; 2]);
        }
        for body in [&short, &bracketed] {
            assert_eq!([parsed(body).await, decoded(body).await], [200; 2]);
        }
        drop(occupied);
        assert_eq!([parsed(&long).await, decoded(&long).await], [200; 2]);
        assert_eq!([parsed(&nested).await, decoded(&nested).await], [400; 2]);
    }
}

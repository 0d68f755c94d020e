//! Responses: objects and lists in the requested form.

use std::{
    collections::VecDeque,
    convert::Infallible,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use bytes::Bytes;
use coracle_kinds::{Resource, protobuf::encode, table};
use http::{HeaderMap, HeaderValue, Response, StatusCode, header};
use http_body::{Frame, SizeHint};
use http_body_util::{BodyExt as _, Full, combinators::UnsyncBoxBody};
use serde_json::{Value, json};

use crate::{
    cache::{Object, part_of},
    error::{ApiError, Result},
    in_flight::BodyMemory,
    list_body::ListBody,
    media::{self, Form},
    offload,
    protobuf_list::ProtobufList,
    stored::Stored,
};

/// The body of every response.
pub type Body = UnsyncBoxBody<Bytes, std::io::Error>;

pub(crate) type Reply = Response<Body>;

/// A body in parts, which need not be copied.
struct Parts(VecDeque<Bytes>);

pub(crate) fn full(bytes: impl Into<Bytes>) -> Body {
    Full::new(bytes.into()).map_err(|never| match never {}).boxed_unsync()
}

pub(crate) fn bytes(code: u16, media: &'static str, bytes: impl Into<Bytes>) -> Reply {
    let mut reply = Response::new(full(bytes));
    *reply.status_mut() = StatusCode::from_u16(code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    reply.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(media));
    reply
}

pub(crate) fn json(code: u16, value: &Value) -> Reply {
    bytes(code, "application/json", value.to_string())
}

fn protobuf(code: u16, message: Vec<u8>) -> Reply {
    bytes(code, media::PROTOBUF, message)
}

/// Changes a response in JSON to YAML, if the client prefers YAML. JSON is YAML in flow style after a few characters
/// are escaped.
pub(crate) fn in_preferred_format(mut reply: Reply, headers: &HeaderMap) -> Reply {
    let is_json = reply.headers().get(header::CONTENT_TYPE).is_some_and(|media| media == "application/json");
    if !is_json || !media::prefers_yaml(headers) {
        return reply;
    }
    reply.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(media::YAML));
    reply.map(|body| body.map_frame(|frame| frame.map_data(escaped)).boxed_unsync())
}

/// Escapes the characters of a JSON document that YAML forbids or reads as a line break. They occur only in strings.
/// `data` is a part of the document with whole characters only. Source: sections 4.1.1 and 4.2.4 of YAML 1.1.
fn escaped(data: Bytes) -> Bytes {
    let is_special = |one: char| {
        matches!(one, '\u{7f}'..='\u{9f}' | '\u{2028}' | '\u{2029}' | '\u{feff}' | '\u{fffe}' | '\u{ffff}')
    };
    let Ok(text) = std::str::from_utf8(&data) else { return data };
    if !text.contains(is_special) {
        return data;
    }
    let text = text.chars().fold(String::with_capacity(text.len()), |mut text, one| {
        if is_special(one) {
            return text + &format!("\\u{:04x}", u32::from(one));
        }
        text.push(one);
        text
    });
    text.into()
}

pub(crate) fn text(code: u16, text: impl Into<String>) -> Reply {
    bytes(code, "text/plain; charset=utf-8", text.into())
}

/// Sets `Cache-Control` to `no-cache, private`, unless the response has this header. Source: `WithCacheControl` of
/// `k8s.io/apiserver`.
pub(crate) fn uncached(mut reply: Reply) -> Reply {
    let rule = HeaderValue::from_static("no-cache, private");
    reply.headers_mut().entry(header::CACHE_CONTROL).or_insert(rule);
    reply
}

/// A Status in upstream's byte form, which clients compare: `kind` first, and a newline at the end.
pub(crate) fn status_text(status: &Value) -> String {
    const ORDER: [&str; 8] =
        ["kind", "apiVersion", "metadata", "status", "message", "reason", "details", "code"];
    let fields = ORDER.iter().filter_map(|name| Some((name, status.get(name)?)));
    let fields: Vec<String> = fields.map(|(name, value)| format!("\"{name}\":{value}")).collect();
    format!("{{{}}}\n", fields.join(","))
}

pub(crate) fn failure(error: &ApiError) -> Reply {
    let mut reply = bytes(error.code, "application/json", status_text(&error.status()));
    let retry = error.details.get("retryAfterSeconds").and_then(Value::as_u64);
    if let Some(seconds) = retry {
        reply.headers_mut().insert(header::RETRY_AFTER, seconds.into());
    }
    reply
}

/// One object.
pub(crate) fn object(code: u16, form: Form, kind: &Resource, object: &Stored) -> Reply {
    match (form, object) {
        (Form::Table(content), _) => {
            let value = object.offloaded_value();
            let meta = json!({"resourceVersion": value["metadata"]["resourceVersion"]});
            json(code, &table_of(kind, [&value], meta, options(content)))
        }
        (Form::Partial(version), _) => {
            json(code, &table::partial_metadata(&object.offloaded_value(), version))
        }
        (Form::PartialProtobuf(version), _) => {
            let item = encode::partial_item(&object.offloaded_value());
            protobuf(code, encode::envelope(version.api_version(), "PartialObjectMetadata", &item))
        }
        (Form::Protobuf, _) => {
            let value = object.offloaded_value();
            let is_large = offload::is_longer(&value, offload::MIN_OFFLOADED_BYTES);
            match offload::run(is_large, || encode::encode(&value)) {
                Some(bytes) => protobuf(code, bytes),
                None => json(code, &value),
            }
        }
        (_, Stored::Committed(object)) if object.is_large() => {
            let (start, rest) = object.json_parts();
            let parts = Parts(VecDeque::from([start.into(), part_of(object.clone(), rest)]));
            bytes(code, "application/json", "")
                .map(|_empty| parts.map_err(|never| match never {}).boxed_unsync())
        }
        (_, Stored::Committed(object)) => bytes(code, "application/json", object.json()),
        (_, Stored::DryRun(value)) => json(code, value),
    }
}

/// The options of a table with column headers.
pub(crate) fn options(content: table::Content) -> table::Options {
    table::Options { content, headers: true, now: jiff::Timestamp::now() }
}

pub(crate) fn table_of<'a>(
    kind: &Resource,
    objects: impl IntoIterator<Item = &'a Value>,
    meta: Value,
    options: table::Options,
) -> Value {
    table::render(kind, objects, meta, options)
}

/// A list; `meta` is its ListMeta. The memory of copies is held until the response is sent.
pub(crate) async fn list(
    form: Form,
    kind: Arc<Resource>,
    objects: Vec<Arc<Object>>,
    copies: BodyMemory,
    meta: Value,
) -> Reply {
    let (body, media) = match form {
        Form::Protobuf | Form::PartialProtobuf(_) => {
            let body = ProtobufList::new(form, &kind, objects, &meta).await.holding(copies);
            (body.map_err(|never| match never {}).boxed_unsync(), media::PROTOBUF)
        }
        _ => {
            let body = ListBody::new(form, kind, objects, meta).holding(copies);
            (body.map_err(|never| match never {}).boxed_unsync(), "application/json")
        }
    };
    let mut reply = Response::new(body);
    reply.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(media));
    reply
}

/// Maximum bytes of all warnings of one response, as upstream.
const MAX_WARNING_BYTES: usize = 4096;
/// Maximum bytes of each warning of a response whose warnings exceed [`MAX_WARNING_BYTES`], as upstream.
const MAX_CUT_WARNING_BYTES: usize = 256;

/// Adds warnings for the client.
pub(crate) fn warned(mut reply: Reply, warnings: &[String]) -> Reply {
    let is_long = warnings.iter().map(String::len).sum::<usize>() > MAX_WARNING_BYTES;
    let cut = |warning: &str| {
        warning.floor_char_boundary(if is_long { MAX_CUT_WARNING_BYTES } else { MAX_WARNING_BYTES })
    };
    let mut left = MAX_WARNING_BYTES;
    for warning in warnings {
        let warning = &warning[..cut(warning)];
        let Some(rest) = left.checked_sub(warning.len()) else { break };
        left = rest;
        let text = warning.replace('\\', "\\\\").replace('"', "\\\"").replace(['\n', '\r'], " ");
        if let Ok(value) = HeaderValue::from_str(&format!("299 - \"{text}\"")) {
            reply.headers_mut().append(header::WARNING, value);
        }
    }
    reply
}

/// A `v1` Status for a deleted object.
pub(crate) fn deleted(kind: &Resource, object: &Value) -> Result<Reply> {
    let mut details = json!({
        "name": object["metadata"]["name"], "kind": kind.plural, "uid": object["metadata"]["uid"],
    });
    if !kind.group.is_empty() {
        details["group"] = kind.group.as_ref().into();
    }
    Ok(success(200, details))
}

pub(crate) fn success(code: u16, details: Value) -> Reply {
    let mut status =
        json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": code});
    if let Some(status) = status.as_object_mut().filter(|_| !details.is_null()) {
        status.remove("code");
        status.insert("details".to_owned(), details);
    }
    bytes(code, "application/json", status_text(&status))
}

// === impl Parts ===

impl http_body::Body for Parts {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _cx: &mut Context<'_>,
    ) -> Poll<Option<std::result::Result<Frame<Bytes>, Infallible>>> {
        Poll::Ready(self.0.pop_front().map(|part| Ok(Frame::data(part))))
    }

    fn is_end_stream(&self) -> bool {
        self.0.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.0.iter().map(|part| part.len() as u64).sum())
    }
}

#[cfg(test)]
mod tests {
    use coracle_kinds::kind::by_kind;
    use http_body::Body as _;

    use super::*;

    #[tokio::test]
    async fn a_large_object_is_sent_without_a_copy() {
        let kind = by_kind("v1", "ConfigMap").unwrap();
        for (length, parts) in [(10, 1), (1 << 20, 2)] {
            let value = json!({"metadata": {"name": "n"}, "data": {"a": "x".repeat(length)}});
            let stored = Arc::new(Object::of(kind, "k".into(), 7, &value));
            let text = stored.json();
            let mut body = object(200, Form::Plain, kind, &Stored::Committed(stored)).into_body();
            assert_eq!(body.size_hint().exact(), Some(text.len() as u64));
            let mut received = Vec::new();
            while let Some(frame) = body.frame().await {
                received.push(frame.unwrap().into_data().unwrap());
            }
            assert_eq!(received.len(), parts);
            assert!(received.concat() == text, "the parts are not the object");
        }
    }

    #[tokio::test]
    async fn strings_do_not_change_in_yaml() {
        let value = json!({"a": "\u{7f}\u{80}\u{85}\u{9f}\u{a0}\u{2028}\u{2029}\u{feff}\u{ffff}\u{e9}\n"});
        let mut headers = HeaderMap::new();
        headers.insert(header::ACCEPT, HeaderValue::from_static(media::YAML));
        let reply = in_preferred_format(json(200, &value), &headers);
        let bytes = reply.into_body().collect().await.unwrap().to_bytes();
        let expect = "{\"a\":\"\\u007f\\u0080\\u0085\\u009f\u{a0}\\u2028\\u2029\\ufeff\\uffff\u{e9}\\n\"}";
        assert_eq!(std::str::from_utf8(&bytes).unwrap(), expect);
        assert_eq!(serde_json::from_slice::<Value>(&bytes).unwrap(), value);
    }
}

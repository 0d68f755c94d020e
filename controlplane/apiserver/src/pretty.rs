//! Indented JSON for people: responses to curl, Wget and browsers, and to requests with `pretty=true`.
//!
//! Source: `isPrettyPrint` of `k8s.io/apiserver/pkg/endpoints/handlers/negotiation`.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http::{HeaderMap, header};
use http_body::Frame;
use http_body_util::BodyExt as _;

use crate::{
    reply::{Body, Reply},
    request::RequestInfo,
};

/// Maximum bytes that are indented at once, so that the memory of a response is bounded.
const MAX_PART_BYTES: usize = 4 << 10;
/// Maximum levels of indentation. Deeper values are not indented further, so that the size of a response is bounded.
const MAX_LEVELS: usize = 64;
/// Prefixes of the header `User-Agent` of programs that show responses to people.
const HUMAN_AGENTS: [&str; 3] = ["curl", "Wget", "Mozilla/5.0"];

/// Marks a response of an aggregated server. Its body is not changed: the aggregated server decides about indentation,
/// and the body may be a stream in which white space separates documents.
#[derive(Clone, Copy)]
pub(crate) struct Forwarded;

/// A JSON body that is indented part by part.
struct Indented {
    body: Body,
    /// Received bytes that are not indented yet.
    rest: Bytes,
    indenter: Indenter,
}

/// The state between two parts of a JSON document.
#[derive(Default)]
struct Indenter {
    /// Open objects and lists.
    level: usize,
    position: Position,
}

/// The position in a JSON document.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
enum Position {
    #[default]
    BetweenTokens,
    /// The position after the start of an object or a list.
    Opened,
    InString,
    /// The position in a string after a backslash.
    Escaped,
}

/// Whether the response to this request is indented. As upstream, the version and the list of paths are always
/// indented, and OpenAPI documents are never indented.
pub(crate) fn is_wanted(info: &RequestInfo, headers: &HeaderMap) -> bool {
    match info.path.as_str() {
        "/" | "/version" | "/version/" => return true,
        path if path.starts_with("/openapi/") => return false,
        _ => {}
    }
    match info.query.get("pretty") {
        "" => {
            let agent = headers.get(header::USER_AGENT).and_then(|agent| agent.to_str().ok());
            agent.is_some_and(|agent| HUMAN_AGENTS.iter().any(|human| agent.starts_with(human)))
        }
        value => matches!(value, "1" | "t" | "T" | "true" | "TRUE" | "True"),
    }
}

/// Indents the body of a response, if it is JSON of this server.
pub(crate) fn indented(mut reply: Reply) -> Reply {
    if reply.extensions().get::<Forwarded>().is_some() {
        return reply;
    }
    let headers = reply.headers_mut();
    let is_json = headers.get(header::CONTENT_TYPE).is_some_and(|media| media == "application/json");
    if !is_json || headers.contains_key(header::CONTENT_ENCODING) {
        return reply;
    }
    headers.remove(header::CONTENT_LENGTH);
    reply.map(|body| Indented { body, rest: Bytes::new(), indenter: Indenter::default() }.boxed_unsync())
}

// === impl Indented ===

impl http_body::Body for Indented {
    type Data = Bytes;
    type Error = std::io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, std::io::Error>>> {
        let this = &mut *self;
        loop {
            if !this.rest.is_empty() {
                let part = this.rest.split_to(this.rest.len().min(MAX_PART_BYTES));
                let text = this.indenter.indent(&part);
                if text.is_empty() {
                    continue;
                }
                return Poll::Ready(Some(Ok(Frame::data(text.into()))));
            }
            let Some(frame) = ready!(Pin::new(&mut this.body).poll_frame(context)) else {
                return Poll::Ready(None);
            };
            match frame.map(Frame::into_data) {
                Ok(Ok(data)) => this.rest = data,
                Ok(Err(trailers)) => return Poll::Ready(Some(Ok(trailers))),
                Err(error) => return Poll::Ready(Some(Err(error))),
            }
        }
    }
}

// === impl Indenter ===

impl Indenter {
    /// The next part of a JSON document, in the form of Go's `json.Indent` with two spaces.
    fn indent(&mut self, json: &[u8]) -> Vec<u8> {
        let mut text = Vec::with_capacity(json.len() * 2);
        for &byte in json {
            if matches!(self.position, Position::InString | Position::Escaped) {
                text.push(byte);
                self.in_string(byte);
            } else if !byte.is_ascii_whitespace() {
                self.token(byte, &mut text);
            }
        }
        text
    }

    fn in_string(&mut self, byte: u8) {
        self.position = match byte {
            _ if self.position == Position::Escaped => Position::InString,
            b'\\' => Position::Escaped,
            b'"' => Position::BetweenTokens,
            _ => Position::InString,
        };
    }

    fn token(&mut self, byte: u8, text: &mut Vec<u8>) {
        let closes = matches!(byte, b'}' | b']');
        let was_open = std::mem::take(&mut self.position) == Position::Opened;
        if was_open && !closes {
            self.level += 1;
            self.new_line(text);
        } else if closes && !was_open {
            self.level = self.level.saturating_sub(1);
            self.new_line(text);
        }
        text.push(byte);
        match byte {
            b'{' | b'[' => self.position = Position::Opened,
            b'"' => self.position = Position::InString,
            b':' => text.push(b' '),
            b',' => self.new_line(text),
            _ => {}
        }
    }

    fn new_line(&self, text: &mut Vec<u8>) {
        text.push(b'\n');
        text.resize(text.len() + 2 * self.level.min(MAX_LEVELS), b' ');
    }
}

#[cfg(test)]
mod tests {
    use http::{HeaderValue, Method};
    use serde_json::{Value, json};

    use super::*;
    use crate::reply;

    fn wanted(uri: &str, agent: &'static str) -> bool {
        let mut headers = HeaderMap::new();
        headers.insert(header::USER_AGENT, HeaderValue::from_static(agent));
        is_wanted(&RequestInfo::parse(&Method::GET, &uri.parse().unwrap()), &headers)
    }

    #[test]
    fn people_get_indented_documents() {
        for agent in ["curl/8.5.0", "Wget/1.21", "Mozilla/5.0 (X11)"] {
            assert!(wanted("/api/v1/pods", agent), "{agent}");
            assert!(!wanted("/api/v1/pods?pretty=false", agent), "{agent}");
            assert!(!wanted("/openapi/v2", agent), "{agent}");
        }
        let kubectl = "kubectl/v1.36.0";
        assert!(wanted("/version", kubectl) && wanted("/", kubectl));
        assert!(wanted("/api/v1/pods?pretty=true", kubectl) && !wanted("/api/v1/pods", kubectl));
        let info = RequestInfo::parse(&Method::GET, &"/api".parse().unwrap());
        assert!(!is_wanted(&info, &HeaderMap::new()));
    }

    async fn text_of(reply: Reply) -> String {
        String::from_utf8(reply.into_body().collect().await.unwrap().to_bytes().into()).unwrap()
    }

    #[tokio::test]
    async fn json_has_one_line_for_each_value() {
        let text = r#"{"a":{},"b":[],"c":[1,{"d":"{\"x\": [1,2]}\\"}],"e":null}"#;
        let expected = serde_json::to_string_pretty(&serde_json::from_str::<Value>(text).unwrap()).unwrap();
        let reply = indented(reply::bytes(200, "application/json", format!("{text}\n")));
        assert_eq!(text_of(reply).await, expected);
        let plain = indented(reply::bytes(200, "text/plain", "{}"));
        assert_eq!(text_of(plain).await, "{}");
    }

    #[tokio::test]
    async fn responses_of_aggregated_servers_are_not_changed() {
        let lines = "{\"a\":[1]}\n{\"a\":[2]}\n";
        let mut reply = reply::bytes(200, "application/json", lines);
        reply.extensions_mut().insert(Forwarded);
        assert_eq!(text_of(indented(reply)).await, lines);
    }

    #[tokio::test]
    async fn documents_are_indented_in_parts() {
        let long = json!({"a": vec![json!({"text": "\\\" ,:[{"}); 2 * MAX_PART_BYTES]});
        let expected = serde_json::to_string_pretty(&long).unwrap();
        let reply = indented(reply::json(200, &long));
        assert_eq!(text_of(reply).await, expected);
    }

    #[test]
    fn deep_documents_grow_within_a_limit() {
        let deep = "[".repeat(1000) + &"]".repeat(1000);
        let text = Indenter::default().indent(deep.as_bytes());
        assert!(text.len() <= deep.len() * (2 + 2 * MAX_LEVELS), "{}", text.len());
        let shut = Indenter::default().indent(b"]]");
        assert_eq!(shut, b"\n]\n]");
    }
}

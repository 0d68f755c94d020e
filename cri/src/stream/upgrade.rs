//! Negotiation of transport and protocol for a stream. Pure.

use bytes::Bytes;
use http::header::{
    CONNECTION, HeaderName, HeaderValue, SEC_WEBSOCKET_ACCEPT, SEC_WEBSOCKET_KEY, SEC_WEBSOCKET_PROTOCOL,
    UPGRADE,
};
use http::{HeaderMap, Response, StatusCode};
use http_body_util::Full;
use tokio_tungstenite::tungstenite::handshake::derive_accept_key;

use super::token::StreamRequest;

const SPDY: &str = "SPDY/3.1";
const STREAM_PROTOCOL: HeaderName = HeaderName::from_static("x-stream-protocol-version");

// Supported protocols per kind of stream, in order of preference.
const WEBSOCKET_COMMAND: [&str; 5] = [
    "v5.channel.k8s.io",
    "v4.channel.k8s.io",
    "v4.base64.channel.k8s.io",
    "channel.k8s.io",
    "base64.channel.k8s.io",
];
const WEBSOCKET_FORWARD: [&str; 2] = ["SPDY/3.1+portforward.k8s.io", "v4.channel.k8s.io"];
/// A WebSocket client without a protocol gets `channel.k8s.io` for commands, `v4.channel.k8s.io` for ports.
const NO_PROTOCOL: &str = "";
const SPDY_COMMAND: [&str; 2] = ["v5.channel.k8s.io", "v4.channel.k8s.io"];
const SPDY_FORWARD: [&str; 1] = ["portforward.k8s.io"];

/// The use of the upgraded connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Protocol {
    /// WebSocket messages with a channel number.
    WebSocketChannels(Codec),
    /// SPDY frames in WebSocket messages.
    WebSocketSpdy,
    /// SPDY frames.
    Spdy,
}

/// Encoding of messages in a channel protocol.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Codec {
    /// Text messages: the channel as digit, then base64.
    pub(super) base64: bool,
    /// Before version 4 the status is an error text, and absent after success.
    pub(super) text_status: bool,
}

/// The negotiated transport.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Transport {
    WebSocket {
        /// The answer to the client's key.
        accept: String,
        protocol: &'static str,
    },
    Spdy {
        /// `None` for an old port-forward client that offers no protocol. There is only one protocol for port-forward.
        protocol: Option<&'static str>,
    },
}

/// Negotiates with a client, or returns the reason of the refusal.
pub(super) fn negotiate(headers: &HeaderMap, ticket: &StreamRequest) -> Result<Transport, &'static str> {
    let forward = matches!(ticket, StreamRequest::PortForward(_));
    let upgrade = list(headers, &UPGRADE);
    if upgrade.iter().any(|name| name.eq_ignore_ascii_case("websocket")) {
        let key = headers.get(SEC_WEBSOCKET_KEY).ok_or("the WebSocket key is missing")?;
        let offered = list(headers, &SEC_WEBSOCKET_PROTOCOL);
        let ours: &[&'static str] = if forward { &WEBSOCKET_FORWARD } else { &WEBSOCKET_COMMAND };
        let protocol = if offered.is_empty() { Some(NO_PROTOCOL) } else { choose(ours, &offered) };
        let protocol = protocol.ok_or("none of the offered WebSocket protocols is supported")?;
        return Ok(Transport::WebSocket { accept: derive_accept_key(key.as_bytes()), protocol });
    }
    if upgrade.iter().any(|name| name.eq_ignore_ascii_case(SPDY)) {
        let offered = list(headers, &STREAM_PROTOCOL);
        let ours: &[&'static str] = if forward { &SPDY_FORWARD } else { &SPDY_COMMAND };
        let protocol = choose(ours, &offered);
        if protocol.is_none() && !(offered.is_empty() && forward) {
            return Err("none of the offered stream protocols is supported");
        }
        return Ok(Transport::Spdy { protocol });
    }
    Err("upgrade to WebSocket or SPDY/3.1 required")
}

/// The first supported protocol that is offered.
fn choose(ours: &[&'static str], offered: &[String]) -> Option<&'static str> {
    ours.iter().find(|name| offered.iter().any(|other| other == *name)).copied()
}

/// The values of a header that can be repeated or have a list.
fn list(headers: &HeaderMap, name: &HeaderName) -> Vec<String> {
    headers
        .get_all(name)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .map(|value| value.trim().to_owned())
        .filter(|value| !value.is_empty())
        .collect()
}

// === impl Transport ===

impl Transport {
    pub(super) fn protocol(&self) -> Protocol {
        match self {
            Self::WebSocket { protocol, .. } if *protocol == WEBSOCKET_FORWARD[0] => Protocol::WebSocketSpdy,
            Self::WebSocket { protocol, .. } => Protocol::WebSocketChannels(Codec {
                base64: protocol.contains("base64."),
                text_status: !protocol.starts_with('v'),
            }),
            Self::Spdy { .. } => Protocol::Spdy,
        }
    }

    /// The response that switches protocols.
    pub(super) fn response(&self) -> Response<Full<Bytes>> {
        let mut response = Response::new(Full::default());
        *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
        let headers = response.headers_mut();
        headers.insert(CONNECTION, HeaderValue::from_static("Upgrade"));
        match self {
            Self::WebSocket { accept, protocol } => {
                headers.insert(UPGRADE, HeaderValue::from_static("websocket"));
                if *protocol != NO_PROTOCOL {
                    headers.insert(SEC_WEBSOCKET_PROTOCOL, HeaderValue::from_static(protocol));
                }
                // Base64 is always a valid header value.
                headers
                    .extend(HeaderValue::from_str(accept).ok().map(|accept| (SEC_WEBSOCKET_ACCEPT, accept)));
            }
            Self::Spdy { protocol } => {
                headers.insert(UPGRADE, HeaderValue::from_static(SPDY));
                headers
                    .extend(protocol.map(|protocol| (STREAM_PROTOCOL, HeaderValue::from_static(protocol))));
            }
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use coracle_proto::cri;

    use super::*;

    fn headers(pairs: &[(&str, &str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            let name = HeaderName::from_bytes(name.as_bytes()).expect("name");
            headers.append(name, HeaderValue::from_str(value).expect("value"));
        }
        headers
    }

    #[test]
    fn each_client_gets_the_best_offered_protocol() {
        let exec = StreamRequest::Exec(cri::ExecRequest::default());
        let forward = StreamRequest::PortForward(cri::PortForwardRequest::default());
        let websocket = |protocols: &str| {
            headers(&[
                ("upgrade", "websocket"),
                ("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ=="),
                ("sec-websocket-protocol", protocols),
            ])
        };
        // The key and its answer are the example of RFC 6455.
        let both = negotiate(&websocket("v5.channel.k8s.io, v4.channel.k8s.io"), &exec).expect("agreed");
        assert_eq!(
            both,
            Transport::WebSocket {
                accept: "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=".into(),
                protocol: "v5.channel.k8s.io"
            }
        );
        let python = negotiate(&websocket("v5.channel.k8s.io,v4.channel.k8s.io"), &forward).expect("agreed");
        assert_eq!(python.protocol(), Protocol::WebSocketChannels(Codec::default()));
        let kubectl = negotiate(&websocket("SPDY/3.1+portforward.k8s.io"), &forward).expect("agreed");
        assert_eq!(kubectl.protocol(), Protocol::WebSocketSpdy);
        for (offered, base64, text_status) in [
            ("base64.channel.k8s.io", true, true),
            ("channel.k8s.io", false, true),
            ("v4.base64.channel.k8s.io", true, false),
            ("", false, true),
        ] {
            let agreed = negotiate(&websocket(offered), &exec).expect("agreed");
            assert_eq!(
                agreed.protocol(),
                Protocol::WebSocketChannels(Codec { base64, text_status }),
                "{offered}"
            );
            let answered = agreed.response().headers().get(SEC_WEBSOCKET_PROTOCOL).cloned();
            assert_eq!(answered.is_some(), !offered.is_empty());
        }
        let mut without = websocket("");
        without.remove(SEC_WEBSOCKET_PROTOCOL);
        assert_eq!(negotiate(&without, &exec), negotiate(&websocket(""), &exec));
        assert!(negotiate(&websocket("v3.channel.k8s.io"), &exec).is_err());
        let several = headers(&[
            ("upgrade", "SPDY/3.1"),
            ("x-stream-protocol-version", "v4.channel.k8s.io"),
            ("x-stream-protocol-version", "channel.k8s.io"),
        ]);
        let spdy = negotiate(&several, &exec).expect("agreed");
        assert_eq!(spdy, Transport::Spdy { protocol: Some("v4.channel.k8s.io") });
        assert!(negotiate(&headers(&[]), &exec).is_err());
    }
}

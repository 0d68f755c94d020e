//! A pod's log over a WebSocket: each chunk is one message, binary or base64. The end of the log closes the connection.

use std::time::Duration;

use base64::{Engine as _, prelude::BASE64_STANDARD};
use bytes::Bytes;
use http::{HeaderMap, HeaderValue};
use hyper::body::Incoming;
use tokio_tungstenite::tungstenite::Message;
use tokio_util::sync::CancellationToken;

use crate::{
    client_upgrade::ClientUpgrade,
    error::{ApiError, Result},
    reply::Reply,
    socket_body, web_socket,
};

/// The negotiated WebSocket protocol.
pub(super) struct NegotiatedProtocol {
    accept: HeaderValue,
    /// The negotiated protocol. Empty if the client requests no protocol.
    protocol: &'static str,
}

// === impl NegotiatedProtocol ===

impl NegotiatedProtocol {
    /// Negotiates the protocol of a request. `None` if the request is not a WebSocket upgrade.
    pub(super) fn with(headers: &HeaderMap) -> Result<Option<Self>> {
        if !web_socket::is_upgrade(headers) {
            return Ok(None);
        }
        let accept = socket_body::accept_key(headers)?;
        let offered: Vec<&str> = web_socket::protocols(headers).collect();
        let known = ["binary.k8s.io", "base64.binary.k8s.io"];
        let protocol = known.into_iter().find(|name| offered.contains(name));
        let protocol = if offered.is_empty() { Some("") } else { protocol };
        let protocol = protocol.ok_or_else(|| {
            ApiError::bad_request(format!("the WebSocket protocol must be one of {}", known.join(", ")))
        })?;
        Ok(Some(Self { accept, protocol }))
    }

    /// Responds with the upgrade, and copies the log until the log or the connection ends. A message that the client
    /// does not read within the limit ends the connection.
    ///
    /// # Errors
    /// The header of the protocol is invalid.
    pub(super) fn serve(
        self,
        client: ClientUpgrade,
        log: Incoming,
        shutdown: CancellationToken,
        limit: Duration,
    ) -> Result<Reply> {
        let reply = socket_body::switch(self.accept, self.protocol)?;
        let base64 = self.protocol.starts_with("base64.");
        // Cancelling the copy loses no data: the client can read the log again.
        client.serve(shutdown, move |connection| {
            socket_body::copy(connection, log, move |chunk| message(chunk, base64), limit)
        });
        Ok(reply)
    }
}

fn message(chunk: Bytes, base64: bool) -> Message {
    if base64 { Message::Text(BASE64_STANDARD.encode(&chunk).into()) } else { Message::Binary(chunk) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn agreed(protocols: Option<&str>) -> Result<Option<NegotiatedProtocol>> {
        let mut headers = HeaderMap::new();
        for (name, value) in [("connection", "keep-alive, Upgrade"), ("upgrade", "websocket")] {
            headers.insert(name, value.parse().unwrap());
        }
        headers.insert("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ==".parse().unwrap());
        if let Some(protocols) = protocols {
            headers.insert("sec-websocket-protocol", protocols.parse().unwrap());
        }
        NegotiatedProtocol::with(&headers)
    }

    #[test]
    fn a_log_has_two_protocols_and_a_default() {
        for (offered, expect) in [
            (None, ""),
            (Some("binary.k8s.io"), "binary.k8s.io"),
            (Some("x, base64.binary.k8s.io"), "base64.binary.k8s.io"),
        ] {
            assert_eq!(agreed(offered).unwrap().unwrap().protocol, expect);
        }
        assert!(agreed(Some("v4.channel.k8s.io")).is_err());
        assert!(NegotiatedProtocol::with(&HeaderMap::new()).unwrap().is_none());
        assert_eq!(message(Bytes::from_static(b"hi"), true), Message::Text("aGk=".into()));
    }
}

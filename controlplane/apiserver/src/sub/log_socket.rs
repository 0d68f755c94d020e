//! A pod's log over a WebSocket: each chunk is one message, binary or base64. The end of the log closes the connection.

use base64::{Engine as _, prelude::BASE64_STANDARD};
use bytes::Bytes;
use futures::{SinkExt as _, StreamExt as _};
use http::{HeaderMap, HeaderValue, Response, StatusCode, header};
use http_body_util::BodyExt as _;
use hyper::{body::Incoming, upgrade::OnUpgrade};
use hyper_util::rt::TokioIo;
use tokio_tungstenite::{
    WebSocketStream,
    tungstenite::{
        Message,
        handshake::derive_accept_key,
        protocol::{Role, WebSocketConfig},
    },
};
use tokio_util::sync::CancellationToken;

use crate::{
    error::{ApiError, Result},
    reply::{Reply, full},
};

/// Maximum bytes of a client's message. Clients send no data.
const MAX_MESSAGE: usize = 4 << 10;

/// The negotiated WebSocket protocol.
pub(super) struct NegotiatedProtocol {
    accept: HeaderValue,
    /// Empty if the client requests none.
    protocol: &'static str,
}

// === impl NegotiatedProtocol ===

impl NegotiatedProtocol {
    /// Negotiates the protocol of a request. None if it is not a WebSocket upgrade.
    pub(super) fn with(headers: &HeaderMap) -> Result<Option<Self>> {
        let is_socket = words(headers, &header::UPGRADE).any(|word| word.eq_ignore_ascii_case("websocket"))
            && words(headers, &header::CONNECTION).any(|word| word.eq_ignore_ascii_case("upgrade"));
        if !is_socket {
            return Ok(None);
        }
        let key = headers.get(header::SEC_WEBSOCKET_KEY);
        let key = key.ok_or_else(|| ApiError::bad_request("the header Sec-WebSocket-Key is missing"))?;
        let offered: Vec<&str> = words(headers, &header::SEC_WEBSOCKET_PROTOCOL).collect();
        let known = ["binary.k8s.io", "base64.binary.k8s.io"];
        let protocol = known.into_iter().find(|name| offered.contains(name));
        let protocol = if offered.is_empty() { Some("") } else { protocol };
        let protocol = protocol.ok_or_else(|| {
            ApiError::bad_request(format!("the WebSocket protocol must be one of {}", known.join(", ")))
        })?;
        let accept = HeaderValue::from_str(&derive_accept_key(key.as_bytes())).map_err(ApiError::internal)?;
        Ok(Some(Self { accept, protocol }))
    }

    /// Responds with the upgrade, and copies the log until the log or the connection ends.
    pub(super) fn serve(self, client: OnUpgrade, log: Incoming, shutdown: CancellationToken) -> Reply {
        let mut reply = Response::new(full(""));
        *reply.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
        let headers = reply.headers_mut();
        headers.insert(header::CONNECTION, HeaderValue::from_static("Upgrade"));
        headers.insert(header::UPGRADE, HeaderValue::from_static("websocket"));
        headers.insert(header::SEC_WEBSOCKET_ACCEPT, self.accept);
        if !self.protocol.is_empty() {
            headers.insert(header::SEC_WEBSOCKET_PROTOCOL, HeaderValue::from_static(self.protocol));
        }
        let base64 = self.protocol.starts_with("base64.");
        tokio::spawn(async move {
            match client.await {
                Ok(connection) => {
                    // Cancelling the copy loses no data: the client can read the log again.
                    shutdown.run_until_cancelled(copy(TokioIo::new(connection), log, base64)).await;
                }
                Err(error) => tracing::debug!(%error, "cannot upgrade the connection of a log"),
            }
        });
        reply
    }
}

fn words<'a>(headers: &'a HeaderMap, name: &header::HeaderName) -> impl Iterator<Item = &'a str> {
    let values = headers.get_all(name).iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).map(str::trim).filter(|word| !word.is_empty())
}

async fn copy(connection: TokioIo<hyper::upgrade::Upgraded>, mut log: Incoming, base64: bool) {
    let config =
        WebSocketConfig::default().max_message_size(Some(MAX_MESSAGE)).max_frame_size(Some(MAX_MESSAGE));
    let socket = WebSocketStream::from_raw_socket(connection, Role::Server, Some(config)).await;
    let (mut sink, mut source) = socket.split();
    let sending = async {
        while let Some(Ok(frame)) = log.frame().await {
            let Ok(chunk) = frame.into_data() else { continue };
            if sink.send(message(chunk, base64)).await.is_err() {
                return;
            }
        }
        // The client may have disconnected.
        let _ = sink.close().await;
    };
    // Reads until the client closes, which also answers its pings.
    let receiving = async { while let Some(Ok(_ignored)) = source.next().await {} };
    tokio::select! {
        // Either end of the connection ends the copy.
        () = sending => {}
        () = receiving => {}
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

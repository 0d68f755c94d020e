//! Sends a body over a WebSocket: each part of the body is one message.

use std::time::Duration;

use bytes::Bytes;
use futures::{SinkExt as _, Stream, StreamExt as _};
use http::{HeaderMap, HeaderValue, Response, StatusCode, header};
use http_body::Body;
use http_body_util::BodyExt as _;
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_tungstenite::{
    WebSocketStream,
    tungstenite::{
        Message,
        handshake::derive_accept_key,
        protocol::{Role, WebSocketConfig},
    },
};

use crate::{
    error::{ApiError, Result},
    reply::{Reply, full},
};

/// Maximum bytes of a client's message. Clients send no data.
const MAX_MESSAGE: usize = 4 << 10;

/// The value of the header `Sec-WebSocket-Accept` for a request.
pub(crate) fn accept_key(headers: &HeaderMap) -> Result<HeaderValue> {
    let key = headers.get(header::SEC_WEBSOCKET_KEY);
    let key = key.ok_or_else(|| ApiError::bad_request("the header Sec-WebSocket-Key is missing"))?;
    HeaderValue::from_str(&derive_accept_key(key.as_bytes())).map_err(ApiError::internal)
}

/// The response that accepts the upgrade. `protocol` is one of the offered protocols, or empty.
pub(crate) fn switch(accept: HeaderValue, protocol: &str) -> Result<Reply> {
    let mut reply = Response::new(full(""));
    *reply.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    let headers = reply.headers_mut();
    headers.insert(header::CONNECTION, HeaderValue::from_static("Upgrade"));
    headers.insert(header::UPGRADE, HeaderValue::from_static("websocket"));
    headers.insert(header::SEC_WEBSOCKET_ACCEPT, accept);
    if !protocol.is_empty() {
        let protocol = HeaderValue::from_str(protocol);
        let protocol = protocol.map_err(|error| ApiError::bad_request(error.to_string()))?;
        headers.insert(header::SEC_WEBSOCKET_PROTOCOL, protocol);
    }
    Ok(reply)
}

/// Sends the parts of a body as messages, until the body or the connection ends. If a send takes longer than `limit`,
/// the connection ends.
pub(crate) async fn copy<B>(
    connection: Upgraded,
    body: B,
    message: impl Fn(Bytes) -> Message,
    limit: Duration,
) where
    B: Body<Data = Bytes> + Unpin,
{
    copy_to(socket(TokioIo::new(connection)).await, body, message, limit).await;
}

async fn copy_to<T, B>(
    connection: WebSocketStream<T>,
    mut body: B,
    message: impl Fn(Bytes) -> Message,
    limit: Duration,
) where
    T: AsyncRead + AsyncWrite + Unpin,
    B: Body<Data = Bytes> + Unpin,
{
    let (mut sink, source) = connection.split();
    let sending = async {
        while let Some(Ok(frame)) = body.frame().await {
            let Ok(chunk) = frame.into_data() else { continue };
            let sent = tokio::time::timeout(limit, sink.send(message(chunk))).await;
            if !sent.is_ok_and(|sent| sent.is_ok()) {
                return;
            }
        }
        // The client may have disconnected.
        let _ = sink.close().await;
    };
    tokio::select! {
        // Either end of the connection ends the copy.
        () = sending => {}
        () = receive(source) => {}
    }
}

/// The server's end of a connection after the upgrade.
async fn socket<T>(connection: T) -> WebSocketStream<T>
where
    T: AsyncRead + AsyncWrite + Unpin,
{
    let config =
        WebSocketConfig::default().max_message_size(Some(MAX_MESSAGE)).max_frame_size(Some(MAX_MESSAGE));
    WebSocketStream::from_raw_socket(connection, Role::Server, Some(config)).await
}

/// Reads until the client closes; reading also answers pings.
async fn receive<E>(mut source: impl Stream<Item = std::result::Result<Message, E>> + Unpin) {
    while let Some(Ok(_ignored)) = source.next().await {}
}

/// Fuzz target: a client's frames after the upgrade. All of them are read, or the connection ends with an error.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn fuzz(data: &[u8]) {
    use futures::FutureExt as _;

    let reading = async {
        let source = socket(tokio::io::join(data, tokio::io::sink())).await;
        receive(source.inspect(|read| assert!(read.as_ref().map_or(0, Message::len) <= MAX_MESSAGE))).await;
    };
    assert!(reading.now_or_never().is_some(), "the reader waits after the end of the connection");
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use http_body::Frame;
    use http_body_util::StreamBody;

    use super::*;

    #[tokio::test]
    async fn a_long_message_of_a_client_ends_the_connection() {
        let is_read = async |length: u16| {
            // A masked binary frame. The mask has zeros.
            let mut frame = vec![0x82, 0x80 | 126];
            frame.extend(length.to_be_bytes());
            frame.resize(frame.len() + 4 + usize::from(length), 0);
            let mut source = socket(tokio::io::join(frame.as_slice(), tokio::io::sink())).await;
            source.next().await.is_some_and(|read| read.is_ok())
        };
        assert!(is_read(4096).await && !is_read(4097).await);
    }

    #[tokio::test(start_paused = true)]
    async fn an_event_that_the_client_does_not_read_ends_the_connection() {
        let limit = Duration::from_secs(60);
        let (server, _client) = tokio::io::duplex(1 << 10);
        let event = Ok::<_, Infallible>(Frame::data(Bytes::from(vec![b'x'; 8 << 10])));
        let events = futures::stream::iter([event]).chain(futures::stream::pending());
        let copy = copy_to(socket(server).await, StreamBody::new(events), Message::Binary, limit);
        tokio::time::timeout(limit * 2, copy).await.expect("the end of the connection");
    }
}

//! A streaming client over WebSocket, like kubectl.

use bytes::Bytes;
use futures::{SinkExt, StreamExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use tokio_util::sync::CancellationToken;

use crate::fixture::Machine;

/// The runtime's streaming server. It ends when this is dropped.
pub(crate) struct Streams {
    pub(crate) address: String,
    stop: CancellationToken,
}

impl Streams {
    pub(crate) async fn open(machine: &Machine) -> Self {
        machine.loopback_up();
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("listen");
        let address = listener.local_addr().expect("address").to_string();
        let stop = CancellationToken::new();
        tokio::spawn(coracle_cri::serve_streams(machine.runtime.clone(), listener, stop.clone()));
        Self { address, stop }
    }

    /// Connects to the stream of a URL that the runtime returned.
    pub(crate) async fn connect(&self, url: &str, protocol: &str) -> WebSocketStream<TcpStream> {
        let path = url.splitn(4, '/').nth(3).expect("a path");
        let mut request = format!("ws://{}/{path}", self.address).into_client_request().expect("request");
        request.headers_mut().insert("sec-websocket-protocol", protocol.parse().expect("value"));
        let connection = TcpStream::connect(&self.address).await.expect("connect");
        let (socket, answer) = tokio_tungstenite::client_async(request, connection).await.expect("handshake");
        assert_eq!(answer.headers()["sec-websocket-protocol"], protocol);
        socket
    }
}

impl Drop for Streams {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// Sends messages, then collects the output of each channel until the server closes. One character per byte.
pub(crate) async fn exchange(mut socket: WebSocketStream<TcpStream>, say: &[&[u8]]) -> [String; 5] {
    for message in say {
        socket.send(Message::Binary(Bytes::copy_from_slice(message))).await.expect("send");
    }
    let mut channels: [Vec<u8>; 5] = Default::default();
    while let Some(Ok(message)) = socket.next().await {
        if let Message::Binary(bytes) = message {
            channels[usize::from(bytes[0])].extend_from_slice(&bytes[1..]);
        }
    }
    channels.map(|bytes| bytes.into_iter().map(char::from).collect())
}

/// Closes the connection, and waits until the server has ended the stream.
pub(crate) async fn leave(mut socket: WebSocketStream<TcpStream>) {
    socket.close(None).await.expect("close");
    while let Some(Ok(_)) = socket.next().await {}
}

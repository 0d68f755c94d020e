//! Streams over WebSocket.
//!
//! Exec and attach use `channel.k8s.io` in versions 1, 4 and 5, binary or base64. Port-forward uses `v4.channel.k8s.io`, or
//! SPDY frames in binary messages. A binary message of a channel protocol is one byte for the channel, then its data.

use std::io;
use std::time::Duration;

use base64::{Engine as _, prelude::BASE64_STANDARD};
use bytes::{Bytes, BytesMut};
use coracle_proto::cri;
use futures::stream::{SplitSink, SplitStream};
use futures::{SinkExt, StreamExt};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::protocol::frame::CloseFrame;
use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode;
use tokio_tungstenite::tungstenite::protocol::{Role, WebSocketConfig};

use super::client::{self, Client, Input, Output};
use super::forward::{FORWARD_MEMORY, Forward, Forwarder, PortMessage};
use super::idle::Connection;
use super::queue::{QueueMemory, QueueSender, pieces};
use super::upgrade::Codec;

const STDIN: u8 = 0;
const STDOUT: u8 = 1;
const STDERR: u8 = 2;
const ERROR: u8 = 3;
const RESIZE: u8 = 4;
/// Version 5: the client closes the channel named by the next byte.
const CLOSE: u8 = 255;

const BACKLOG: usize = 2;
const BUFFER: usize = 64 << 10;
/// Maximum bytes of a message: clients send a few kilobytes at a time. Each client can hold one, and one user can have
/// hundreds of clients.
const MESSAGE: usize = 256 << 10;
/// Bytes that are read at once.
const READ_SIZE: usize = 16 << 10;
/// Time for the client to close the connection after the last message.
const LINGER: Duration = Duration::from_secs(5);

type Socket = WebSocketStream<Connection>;
type Sender = SplitSink<Socket, Message>;
type Receiver = SplitStream<Socket>;

/// Starts the WebSocket protocol on an upgraded connection.
pub(super) async fn accept(connection: Connection) -> Socket {
    WebSocketStream::from_raw_socket(connection, Role::Server, Some(limits())).await
}

fn limits() -> WebSocketConfig {
    let limits = WebSocketConfig::default().max_message_size(Some(MESSAGE)).max_frame_size(Some(MESSAGE));
    limits.read_buffer_size(READ_SIZE)
}

/// Serves the client of a command.
pub(super) async fn command(socket: Socket, codec: Codec, run: impl AsyncFnOnce(Client)) {
    let (sink, source) = socket.split();
    let (input_sender, input) = client::input_queue();
    let (output, output_receiver) = mpsc::channel(BACKLOG);
    let receiving = tokio::spawn(receive(source, codec, input_sender));
    let sending = tokio::spawn(send(sink, codec, output_receiver));
    run(Client { input, output }).await;
    // Without a timeout: the client may read slowly. It closes after it has received the status.
    let _sent = sending.await;
    let stop = receiving.abort_handle();
    if timeout(LINGER, receiving).await.is_err() {
        stop.abort();
    }
}

async fn receive(mut source: Receiver, codec: Codec, input: QueueSender<Input>) {
    while let Some(Ok(message)) = source.next().await {
        match message {
            Message::Binary(bytes) => {
                if let Some(decoded) = decode(codec, &bytes) {
                    pass(decoded, &input).await;
                }
            }
            Message::Text(text) => {
                if let Some(decoded) = decode(codec, &Bytes::from(text)) {
                    pass(decoded, &input).await;
                }
            }
            Message::Close(_) => return,
            Message::Ping(_) | Message::Pong(_) | Message::Frame(_) => {}
        }
    }
}

/// Passes a message to the command. After the command's end, messages are discarded until the client closes.
async fn pass(decoded: Input, input: &QueueSender<Input>) {
    let Input::Stdin(bytes) = decoded else {
        let _ended = input.send(decoded).await;
        return;
    };
    for piece in pieces(&bytes) {
        if !input.send(Input::Stdin(piece)).await {
            return;
        }
    }
}

async fn send(mut sink: Sender, codec: Codec, mut output: mpsc::Receiver<Output>) {
    while let Some(output) = output.recv().await {
        let Some(message) = encode(codec, &output) else { continue };
        if sink.send(message).await.is_err() {
            return;
        }
    }
    close(&mut sink).await;
}

async fn close(sink: &mut Sender) {
    let frame = CloseFrame { code: CloseCode::Normal, reason: "".into() };
    // The client may be gone.
    let _gone = sink.send(Message::Close(Some(frame))).await;
}

/// Parses a message of a client. None if it has no meaning.
fn decode(codec: Codec, message: &Bytes) -> Option<Input> {
    if codec.base64 {
        let (digit, text) = message.split_first()?;
        let mut decoded = vec![digit.wrapping_sub(b'0')];
        BASE64_STANDARD.decode_vec(text, &mut decoded).ok()?;
        return decode(Codec::default(), &decoded.into());
    }
    let (channel, rest) = message.split_first()?;
    match (*channel, rest) {
        // `pass` copies it.
        (STDIN, _) => Some(Input::Stdin(message.slice(1..))),
        (RESIZE, size) => client::resize(size),
        (CLOSE, [STDIN]) => Some(Input::StdinClosed),
        _ => None,
    }
}

/// The message of an output. `None` for a status of success in versions before 4, which do not send it.
fn encode(codec: Codec, output: &Output) -> Option<Message> {
    let text;
    let (channel, bytes): (u8, &[u8]) = match output {
        Output::Stdout(bytes) => (STDOUT, bytes),
        Output::Stderr(bytes) => (STDERR, bytes),
        Output::Status(status) if codec.text_status => {
            text = error_text(status)?;
            (ERROR, text.as_bytes())
        }
        Output::Status(status) => (ERROR, status),
    };
    Some(if codec.base64 {
        let digit = char::from(b'0' + channel);
        Message::Text(format!("{digit}{}", BASE64_STANDARD.encode(bytes)).into())
    } else {
        Message::Binary(on(channel, bytes))
    })
}

/// The error message of a Status; none for success.
fn error_text(status: &[u8]) -> Option<String> {
    let status: serde_json::Value = serde_json::from_slice(status).ok()?;
    (status["status"] != "Success").then(|| status["message"].as_str().unwrap_or_default().to_owned())
}

fn on(channel: u8, bytes: &[u8]) -> Bytes {
    let mut message = BytesMut::with_capacity(1 + bytes.len());
    message.extend_from_slice(&[channel]);
    message.extend_from_slice(bytes);
    message.freeze()
}

/// Maximum forwarded ports of one connection: each needs two channels, and a channel is one byte.
pub(crate) const MAX_PORTS: usize = 128;

/// Forwards the requested ports, which were validated. Port n has channels 2n (data) and 2n + 1 (errors). Each channel begins
/// with the port number as two bytes, little-endian.
pub(super) async fn forward(forwarder: &Forwarder, request: cri::PortForwardRequest, socket: Socket) {
    let (mut sink, mut source) = socket.split();
    let (back, mut answers) = mpsc::channel(BACKLOG);
    let memory = QueueMemory::new(FORWARD_MEMORY);
    let mut inputs = Vec::new();
    let ports = request.port.iter().take(MAX_PORTS).filter_map(|port| u16::try_from(*port).ok());
    for (channel, port) in (0..=u8::MAX).step_by(2).zip(ports) {
        for channel in [channel, channel + 1] {
            if sink.send(Message::Binary(on(channel, &port.to_le_bytes()))).await.is_err() {
                return;
            }
        }
        let sandbox_id = request.pod_sandbox_id.clone();
        let forward = Forward { sandbox_id, port, key: channel, back: back.clone(), _permit: None };
        inputs.push(forward.open(forwarder, &memory));
    }
    drop(back);
    let sending = async {
        while let Some((channel, what)) = answers.recv().await {
            let message = match what {
                PortMessage::Data(bytes) => on(channel, &bytes),
                PortMessage::Failed(text) => on(channel + 1, text.as_bytes()),
                PortMessage::End | PortMessage::Closed => continue,
            };
            if sink.send(Message::Binary(message)).await.is_err() {
                return;
            }
        }
        close(&mut sink).await;
    };
    let receiving = async {
        while let Some(Ok(message)) = source.next().await {
            let Message::Binary(bytes) = message else { continue };
            let Some((channel, data)) = bytes.split_first() else { continue };
            if channel % 2 == 0
                && let Some(input) = inputs.get(usize::from(channel / 2))
            {
                for piece in pieces(data) {
                    if !input.send(piece).await {
                        break;
                    }
                }
            }
        }
    };
    tokio::select! {
        // Both arms may be dropped: the client's connection is over.
        () = sending => {}
        () = receiving => {}
    }
}

/// Converts the socket to a byte stream, for SPDY.
pub(super) fn tunnel(socket: Socket) -> DuplexStream {
    let (ours, theirs) = tokio::io::duplex(BUFFER);
    tokio::spawn(async move {
        let (sink, source) = socket.split();
        let (from, to) = tokio::io::split(theirs);
        tokio::select! {
            // Both arms may be dropped: the connection is over.
            _ = receive_input(source, to) => {}
            _ = send_output(from, sink) => {}
        }
    });
    ours
}

async fn receive_input(mut source: Receiver, mut to: impl tokio::io::AsyncWrite + Unpin) -> io::Result<()> {
    while let Some(Ok(message)) = source.next().await {
        match message {
            Message::Binary(bytes) => to.write_all(&bytes).await?,
            Message::Close(_) => break,
            Message::Text(_) | Message::Ping(_) | Message::Pong(_) | Message::Frame(_) => {}
        }
    }
    to.shutdown().await
}

async fn send_output(mut from: impl tokio::io::AsyncRead + Unpin, mut sink: Sender) -> io::Result<()> {
    let mut buffer = BytesMut::new();
    loop {
        buffer.reserve(BUFFER);
        if from.read_buf(&mut buffer).await? == 0 {
            close(&mut sink).await;
            return Ok(());
        }
        let bytes = buffer.split().freeze();
        sink.send(Message::Binary(bytes)).await.map_err(io::Error::other)?;
    }
}

/// A client's frames after its upgrade. The first byte determines the encoding of the messages.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn fuzz(data: &[u8]) {
    use tokio_tungstenite::tungstenite::WebSocket;

    /// A connection that already has the client's bytes, and accepts every response.
    struct Wire<'a>(&'a [u8]);

    impl io::Read for Wire<'_> {
        fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
            io::Read::read(&mut self.0, into)
        }
    }

    impl io::Write for Wire<'_> {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    let (first, frames) = data.split_first().unwrap_or((&0, &[]));
    let codec = Codec { base64: first & 1 != 0, text_status: first & 2 != 0 };
    let mut socket = WebSocket::from_raw_socket(Wire(frames), Role::Server, Some(limits()));
    while let Ok(message) = socket.read() {
        let bytes = match message {
            Message::Binary(bytes) => bytes,
            Message::Text(text) => text.into(),
            Message::Close(_) => return,
            Message::Ping(_) | Message::Pong(_) | Message::Frame(_) => continue,
        };
        assert!(bytes.len() <= MESSAGE);
        if let Some(Input::Stdin(input)) = decode(codec, &bytes) {
            assert!(input.len() < bytes.len(), "more came out than went in");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_longer_message_than_allowed_is_refused_before_it_is_read() {
        use tokio_tungstenite::tungstenite::{Error, WebSocket};

        for (bytes, is_refused) in [(MESSAGE as u64, false), (MESSAGE as u64 + 1, true), (1 << 40, true)] {
            // The head of a masked binary message; no byte of the message follows.
            let head = [&[0x82, 0xff][..], &bytes.to_be_bytes(), &[0; 4]].concat();
            let mut wire = io::Cursor::new(head);
            let mut socket = WebSocket::from_raw_socket(&mut wire, Role::Server, Some(limits()));
            assert_eq!(matches!(socket.read(), Err(Error::Capacity(_))), is_refused, "{bytes}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_message_that_the_command_does_not_read_takes_bounded_memory() {
        let (sender, mut input) = client::input_queue();
        let message = vec![b'x'; MESSAGE - 1];
        let passing = async {
            pass(Input::Stdin(message.clone().into()), &sender).await;
            pass(Input::StdinClosed, &sender).await;
        };
        let receiving = async {
            let mut received = Vec::new();
            while let Some(Input::Stdin(piece)) = input.recv().await {
                assert!(piece.len() * 2 <= client::INPUT_MEMORY as usize, "{}", piece.len());
                received.extend_from_slice(&piece);
            }
            received
        };
        let ((), received) = tokio::join!(passing, receiving);
        assert_eq!(received, message);
    }

    #[test]
    fn messages_are_decoded_by_channel() {
        let cases: [(&[u8], Option<Input>); 7] = [
            (b"\x00hello", Some(Input::Stdin(Bytes::from_static(b"hello")))),
            (b"\x00", Some(Input::Stdin(Bytes::new()))),
            (b"\x04{\"Width\":2,\"Height\":3}\n", Some(Input::Resize { width: 2, height: 3 })),
            (b"\xff\x00", Some(Input::StdinClosed)),
            (b"\xff\x01", None),
            (b"\x01out", None),
            (b"", None),
        ];
        for (message, expected) in cases {
            assert_eq!(decode(Codec::default(), &Bytes::copy_from_slice(message)), expected, "{message:?}");
        }
    }

    #[test]
    fn outputs_are_encoded_with_their_channel() {
        let binary = |output: Output| encode(Codec::default(), &output).expect("a message").into_data();
        assert_eq!(binary(Output::Stdout(Bytes::from_static(b"a"))), Bytes::from_static(b"\x01a"));
        assert_eq!(binary(Output::Stderr(Bytes::from_static(b"b"))), Bytes::from_static(b"\x02b"));
        assert_eq!(binary(Output::Status(Bytes::from_static(b"{}"))), Bytes::from_static(b"\x03{}"));
    }

    #[test]
    fn old_protocols_use_base64_and_a_text_status() {
        let old = Codec { base64: true, text_status: true };
        let out = encode(old, &Output::Stdout(Bytes::from_static(b"hi")));
        assert_eq!(out, Some(Message::Text("1aGk=".into())));
        assert_eq!(decode(old, &Bytes::from_static(b"0aGk=")), Some(Input::Stdin(Bytes::from_static(b"hi"))));
        assert_eq!(decode(old, &Bytes::from_static(b"0???")), None);
        let text = Codec { base64: false, text_status: true };
        let status = |json: &'static str| encode(text, &Output::Status(Bytes::from_static(json.as_bytes())));
        assert_eq!(status(r#"{"status": "Success"}"#), None);
        let failed = status(r#"{"status": "Failure", "message": "exit code 1"}"#);
        assert_eq!(failed, Some(Message::Binary(Bytes::from_static(b"\x03exit code 1"))));
    }
}

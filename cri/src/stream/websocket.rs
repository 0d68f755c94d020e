//! Streams over WebSocket.
//!
//! Exec and attach use `channel.k8s.io` in versions 1, 4 and 5, binary or base64. Port-forward uses `v4.channel.k8s.io`, or
//! SPDY frames in binary messages. A binary message of a channel protocol is one byte for the channel, then its data.

mod frames;
mod messages;

use std::io;
use std::time::Duration;

use bytes::{Buf as _, Bytes, BytesMut};
use coracle_proto::cri;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, DuplexStream, ReadHalf, WriteHalf};
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_util::task::AbortOnDropHandle;

use self::frames::{BINARY, Piece};
use self::messages::{Decoder, encode};
use super::client::{self, Client, Input, Output};
use super::forward::{FORWARD_MEMORY, Forward, Forwarder, PortMessage};
use super::idle::Connection;
use super::queue::{QueueMemory, QueueSender};
use super::upgrade::Codec;

const BACKLOG: usize = 2;
const BUFFER: usize = 16 << 10;
/// Time for the client to close the connection after the last message.
const LINGER: Duration = Duration::from_secs(5);

type Reader<I = Connection> = frames::Reader<ReadHalf<I>>;
type Writer<I = Connection> = frames::Writer<WriteHalf<I>>;

fn split<I: AsyncRead + AsyncWrite>(connection: I) -> (Reader<I>, Writer<I>) {
    let (input, output) = tokio::io::split(connection);
    frames::split(input, output)
}

/// Serves the client of a command.
pub(super) async fn command(connection: Connection, codec: Codec, run: impl AsyncFnOnce(Client)) {
    let (reader, writer) = split(connection);
    let (input_sender, input) = client::input_queue();
    let (output, output_receiver) = mpsc::channel(BACKLOG);
    // Both tasks end with this call, even if it is dropped: they hold the connection.
    let receiving = AbortOnDropHandle::new(coracle_threads::spawn(receive(reader, codec, input_sender)));
    let sending = AbortOnDropHandle::new(tokio::spawn(send(writer, codec, output_receiver)));
    run(Client { input, output }).await;
    // This wait has no timeout, because the client may read slowly. The client closes the connection after it has
    // received the status.
    let _sent = sending.await;
    let _ended = timeout(LINGER, receiving).await;
}

/// Passes messages to the command. After the command's end, they are discarded until the client closes.
async fn receive(mut reader: Reader, codec: Codec, input: QueueSender<Input>) {
    let mut decoder = Decoder::new(codec);
    while let Ok(Some(piece)) = reader.next().await {
        if let Some(decoded) = decoder.input(piece) {
            let _ended = input.send(decoded).await;
        }
    }
}

/// Sends the outputs, then closes. An error means that the client is gone.
async fn send(mut writer: Writer, codec: Codec, mut outputs: mpsc::Receiver<Output>) -> io::Result<()> {
    while let Some(output) = writer.wait_for(outputs.recv()).await? {
        let Some(message) = encode(codec, output) else { continue };
        writer.send(message.opcode, &[&[message.channel], &message.payload]).await?;
    }
    writer.close().await
}

/// Maximum forwarded ports of one connection: each needs two channels, and a channel is one byte.
pub(crate) const MAX_PORTS: usize = 128;

/// Forwards the requested ports, which were validated. Port n has channels 2n (data) and 2n + 1 (errors). Each channel begins
/// with the port number as two bytes, little-endian.
pub(super) async fn forward(
    forwarder: &Forwarder,
    request: cri::PortForwardRequest,
    connection: impl AsyncRead + AsyncWrite,
) {
    let (mut reader, mut writer) = split(connection);
    let (back, mut answers) = mpsc::channel(BACKLOG);
    let memory = QueueMemory::new(FORWARD_MEMORY);
    let mut inputs = Vec::new();
    let ports = request.port.iter().take(MAX_PORTS).filter_map(|port| u16::try_from(*port).ok());
    for (channel, port) in (0..=u8::MAX).step_by(2).zip(ports) {
        for channel in [channel, channel + 1] {
            if writer.send(BINARY, &[&[channel], &port.to_le_bytes()]).await.is_err() {
                return;
            }
        }
        let sandbox_id = request.pod_sandbox_id.clone();
        let forward = Forward { sandbox_id, port, key: channel, back: back.clone(), _permit: None };
        inputs.push(forward.open(forwarder, &memory));
    }
    drop(back);
    let sending = async {
        while let Some((channel, what)) = writer.wait_for(answers.recv()).await? {
            match what {
                PortMessage::Data(bytes) => writer.send(BINARY, &[&[channel], &bytes]).await?,
                PortMessage::Failed(text) => writer.send(BINARY, &[&[channel + 1], text.as_bytes()]).await?,
                PortMessage::End | PortMessage::Closed => {}
            }
        }
        writer.close().await
    };
    let receiving = async {
        let mut channel = None;
        while let Ok(Some(piece)) = reader.next().await {
            let Some((number, bytes)) = port_data(&mut channel, piece) else { continue };
            if let Some(input) = inputs.get(number) {
                let _closed = input.send(bytes).await;
            }
        }
    };
    let is_closed_by_client = tokio::select! {
        // Both arms may be dropped: the client's connection is over.
        _sent = sending => false,
        () = receiving => true,
    };
    let end = async {
        if is_closed_by_client {
            // Some clients wait for the close frame. Other clients have already disconnected, so sending may fail.
            let _sent = writer.close().await;
        } else {
            // A close while data is unread would discard data that the client has not received yet.
            while let Ok(Some(_rest)) = reader.next().await {}
        }
    };
    let _ended = timeout(LINGER, end).await;
}

/// The number of a port and its data in a piece of a message. `channel` is the channel of the current message.
fn port_data(channel: &mut Option<u8>, piece: Piece) -> Option<(usize, Bytes)> {
    let Piece { mut bytes, is_first, .. } = piece;
    if is_first {
        *channel = None;
    }
    if channel.is_none() && !bytes.is_empty() {
        *channel = Some(bytes.get_u8());
    }
    let channel = (*channel).filter(|channel| channel % 2 == 0)?;
    (!bytes.is_empty()).then_some((usize::from(channel / 2), bytes))
}

/// Converts the messages to a byte stream, for SPDY.
pub(super) fn tunnel(connection: Connection) -> DuplexStream {
    let (ours, theirs) = tokio::io::duplex(BUFFER);
    coracle_threads::spawn(async move {
        let (reader, writer) = split(connection);
        let (from, to) = tokio::io::split(theirs);
        tokio::select! {
            // Both arms may be dropped: the connection is over.
            _ = receive_input(reader, to) => {}
            _ = send_output(from, writer) => {}
        }
    });
    ours
}

async fn receive_input(mut reader: Reader, mut to: impl AsyncWrite + Unpin) -> io::Result<()> {
    while let Some(piece) = reader.next().await? {
        to.write_all(&piece.bytes).await?;
    }
    to.shutdown().await
}

async fn send_output(mut from: impl AsyncRead + Unpin, mut writer: Writer) -> io::Result<()> {
    let mut buffer = BytesMut::new();
    loop {
        buffer.reserve(BUFFER);
        if writer.wait_for(from.read_buf(&mut buffer)).await?? == 0 {
            return writer.close().await;
        }
        writer.send(BINARY, &[&buffer]).await?;
        buffer.clear();
    }
}

/// Fuzz target: a client's frames after its upgrade. The first byte determines the encoding of the messages.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn fuzz(data: &[u8]) {
    use self::frames::{Event, Frames, PIECE};

    let (first, received) = data.split_first().unwrap_or((&0, &[]));
    let mut decoder = Decoder::new(Codec { base64: first & 1 != 0, text_status: first & 2 != 0 });
    let mut frames = Frames::of(received);
    let (mut message, mut input) = (0, 0);
    while let Ok(Some(event)) = frames.next() {
        let Event::Data(piece) = event else { continue };
        assert!(piece.bytes.len() <= PIECE);
        if piece.is_first {
            (message, input) = (0, 0);
        }
        message += piece.bytes.len();
        if let Some(Input::Stdin(bytes)) = decoder.input(piece) {
            input += bytes.len();
            assert!(input < message, "more came out than went in");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_client_closes_the_connection_after_the_end_of_all_ports() {
        let forwarder = Forwarder::new(std::sync::Arc::default());
        // The port fails, because there is no sandbox.
        let request = cri::PortForwardRequest { pod_sandbox_id: "absent".into(), port: vec![80] };
        let (server, mut client) = tokio::io::duplex(1 << 10);
        let closing = async {
            let mut received = Vec::new();
            // The frame of a normal closure.
            while !received.ends_with(&[0x88, 2, 3, 0xe8]) {
                received.push(client.read_u8().await.expect("the last frame"));
            }
            assert!(timeout(LINGER / 2, client.read_u8()).await.is_err(), "the connection is open");
            client.shutdown().await.expect("shutdown");
            client.read_u8().await.expect_err("the end");
        };
        tokio::join!(forward(&forwarder, request, server), closing);
    }

    #[test]
    fn data_for_a_port_is_passed_on_before_its_message_ends() {
        let mut channel = None;
        let mut data = |bytes: &'static [u8], is_first| {
            port_data(&mut channel, Piece { bytes: Bytes::from_static(bytes), is_first, is_last: false })
        };
        assert_eq!(data(b"\x02one", true), Some((1, Bytes::from_static(b"one"))));
        assert_eq!(data(b"two", false), Some((1, Bytes::from_static(b"two"))));
        assert_eq!(data(b"", true), None);
        assert_eq!(data(b"\x04", false), None);
        assert_eq!(data(b"three", false), Some((2, Bytes::from_static(b"three"))));
        // Data of clients on the channels for errors is ignored.
        assert_eq!(data(b"\x01x", true), None);
        assert_eq!(data(b"x", false), None);
    }
}

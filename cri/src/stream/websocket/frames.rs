//! WebSocket frames after the handshake, on the server's side (RFC 6455). The payload of a message is passed on as it
//! arrives, so a message of any length needs the memory of one piece.

use std::io::{self, ErrorKind};
use std::pin::pin;

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::sync::mpsc;

/// Maximum bytes of a piece of a message.
pub(super) const PIECE: usize = 16 << 10;
/// Maximum payload of a ping, pong or close frame.
const MAX_CONTROL: u64 = 125;
/// The payload of the last frame: the code of a normal closure.
const NORMAL_CLOSURE: [u8; 2] = 1000_u16.to_be_bytes();

const CONTINUATION: u8 = 0;
pub(super) const TEXT: u8 = 1;
pub(super) const BINARY: u8 = 2;
const CLOSE: u8 = 8;
const PING: u8 = 9;
const PONG: u8 = 10;

/// An event in the client's stream of frames.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Event {
    /// A part of a text or binary message.
    Data(Piece),
    /// A ping, whose payload must be sent back.
    Ping(Bytes),
    /// The end of the client's messages.
    Close,
}

/// A part of a message.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Piece {
    /// At most [`PIECE`] bytes, in memory of their own.
    pub(super) bytes: Bytes,
    /// The message begins with this piece.
    pub(super) is_first: bool,
    /// The message ends with this piece.
    pub(super) is_last: bool,
}

/// Reads the client's frames.
#[derive(Debug)]
pub(super) struct Reader<R> {
    input: R,
    frames: Frames,
    pongs: mpsc::Sender<Bytes>,
}

/// Sends frames to the client.
#[derive(Debug)]
pub(super) struct Writer<W> {
    output: W,
    /// Whether a message was written only in part, because its sending was interrupted.
    is_partial: bool,
    pongs: mpsc::Receiver<Bytes>,
}

/// Converts the client's bytes to events.
#[derive(Debug, Default)]
pub(super) struct Frames {
    buffer: BytesMut,
    /// The frame whose payload is being received.
    current: Option<DataFrame>,
    /// Whether the last frame of the current message has not begun yet.
    is_message_open: bool,
}

#[derive(Debug)]
struct DataFrame {
    left: u64,
    /// The masking key, rotated: its first byte belongs to the next byte of the payload.
    mask: [u8; 4],
    begins_message: bool,
    ends_message: bool,
}

/// The head of a frame.
#[derive(Debug)]
struct Head {
    is_final: bool,
    opcode: u8,
    length: u64,
    mask: [u8; 4],
    /// Bytes of the head itself.
    size: usize,
}

/// Both directions of a connection.
pub(super) fn split<R: AsyncRead + Unpin, W: AsyncWrite + Unpin>(
    input: R,
    output: W,
) -> (Reader<R>, Writer<W>) {
    // Of several pings that arrive while the client does not read, one is answered.
    let (pong_sender, pongs) = mpsc::channel(1);
    (
        Reader { input, frames: Frames::default(), pongs: pong_sender },
        Writer { output, is_partial: false, pongs },
    )
}

fn invalid(why: &'static str) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, why)
}

/// A frame with the payload in parts.
fn encode(opcode: u8, parts: &[&[u8]]) -> BytesMut {
    let length = parts.iter().map(|part| part.len()).sum::<usize>();
    let mut frame = BytesMut::with_capacity(10 + length);
    frame.put_u8(0x80 | opcode);
    match (u8::try_from(length), u16::try_from(length)) {
        (Ok(short @ 0..=125), _) => frame.put_u8(short),
        (_, Ok(middle)) => {
            frame.put_u8(126);
            frame.put_u16(middle);
        }
        _ => {
            frame.put_u8(127);
            frame.put_u64(length as u64);
        }
    }
    for part in parts {
        frame.extend_from_slice(part);
    }
    frame
}

/// A copy of the masked bytes without their mask.
fn unmask(masked: &[u8], mask: [u8; 4]) -> Bytes {
    let mut plain = masked.to_vec();
    for group in plain.chunks_mut(4) {
        for (byte, mask) in group.iter_mut().zip(mask) {
            *byte ^= mask;
        }
    }
    plain.into()
}

// === impl Reader ===

impl<R: AsyncRead + Unpin> Reader<R> {
    /// The next piece of a message. `None` when the client has sent a close frame or has ended its output. Pings are
    /// passed to the writer.
    pub(super) async fn next(&mut self) -> io::Result<Option<Piece>> {
        loop {
            match self.frames.next()? {
                Some(Event::Data(piece)) => return Ok(Some(piece)),
                Some(Event::Ping(payload)) => {
                    // An earlier pong that is not sent yet is enough for this ping.
                    let _waiting = self.pongs.try_send(payload);
                }
                Some(Event::Close) => return Ok(None),
                None => {
                    self.frames.buffer.reserve(PIECE);
                    if self.input.read_buf(&mut self.frames.buffer).await? == 0 {
                        return Ok(None);
                    }
                }
            }
        }
    }
}

// === impl Writer ===

impl<W: AsyncWrite + Unpin> Writer<W> {
    /// Sends a message, whose payload is in parts.
    pub(super) async fn send(&mut self, opcode: u8, parts: &[&[u8]]) -> io::Result<()> {
        self.is_partial = true;
        self.output.write_all(&encode(opcode, parts)).await?;
        self.is_partial = false;
        self.output.flush().await
    }

    /// Sends the close frame. It is not sent after an interrupted message, because the client would read it as a part
    /// of that message.
    pub(super) async fn close(&mut self) -> io::Result<()> {
        if self.is_partial {
            return Ok(());
        }
        self.send(CLOSE, &[&NORMAL_CLOSURE]).await
    }

    /// Waits for a value, and answers pings in the meantime.
    pub(super) async fn wait_for<T>(&mut self, value: impl Future<Output = T>) -> io::Result<T> {
        let mut value = pin!(value);
        loop {
            let payload = tokio::select! {
                // Cancel safe: `value` is outside of the select, and a pong that is not received stays in its channel.
                value = &mut value => return Ok(value),
                Some(payload) = self.pongs.recv() => payload,
            };
            self.send(PONG, &[&payload]).await?;
        }
    }
}

// === impl Frames ===

impl Frames {
    /// Takes the next event from the received bytes. `None` if more bytes are needed.
    pub(super) fn next(&mut self) -> io::Result<Option<Event>> {
        loop {
            if self.current.is_some() {
                return Ok(self.piece().map(Event::Data));
            }
            let Some(head) = Head::parse(&self.buffer)? else { return Ok(None) };
            if head.is_control() {
                let Some(payload) = self.control(&head)? else { return Ok(None) };
                match head.opcode {
                    CLOSE => return Ok(Some(Event::Close)),
                    PING => return Ok(Some(Event::Ping(payload))),
                    // The server sends no pings: a pong has no meaning.
                    _ => continue,
                }
            }
            self.begin(&head)?;
        }
    }

    /// The payload of a ping, pong or close frame, which is short. `None` if it is incomplete.
    fn control(&mut self, head: &Head) -> io::Result<Option<Bytes>> {
        if head.length > MAX_CONTROL || !head.is_final {
            return Err(invalid("a control frame is too long or fragmented"));
        }
        let length = usize::try_from(head.length).unwrap_or(usize::MAX);
        if self.buffer.len() - head.size < length {
            return Ok(None);
        }
        self.buffer.advance(head.size);
        Ok(Some(unmask(&self.buffer.split_to(length), head.mask)))
    }

    /// Begins a frame with a part of a message.
    fn begin(&mut self, head: &Head) -> io::Result<()> {
        let begins_message = match (head.opcode, self.is_message_open) {
            (TEXT | BINARY, false) => true,
            (CONTINUATION, true) => false,
            _ => {
                return Err(invalid(
                    "a continuation frame has no message, or a message begins inside another message",
                ));
            }
        };
        self.buffer.advance(head.size);
        self.is_message_open = !head.is_final;
        self.current = Some(DataFrame {
            left: head.length,
            mask: head.mask,
            begins_message,
            ends_message: head.is_final,
        });
        Ok(())
    }

    /// The received part of the current frame. `None` if no byte of it has arrived. An empty frame gives an empty piece.
    fn piece(&mut self) -> Option<Piece> {
        let frame = self.current.as_mut()?;
        let left = usize::try_from(frame.left).unwrap_or(usize::MAX);
        let count = left.min(self.buffer.len()).min(PIECE);
        if count == 0 && left > 0 {
            return None;
        }
        let bytes = unmask(&self.buffer.split_to(count), frame.mask);
        frame.mask.rotate_left(count % 4);
        frame.left -= count as u64;
        let is_complete = frame.left == 0;
        let is_first = std::mem::take(&mut frame.begins_message);
        let is_last = is_complete && frame.ends_message;
        if is_complete {
            self.current = None;
        }
        Some(Piece { bytes, is_first, is_last })
    }
}

#[cfg(any(test, feature = "fuzzing"))]
impl Frames {
    /// The frames of a client that has sent these bytes.
    pub(super) fn of(received: &[u8]) -> Self {
        Self { buffer: received.into(), ..Self::default() }
    }
}

// === impl Head ===

impl Head {
    /// Parses the head of the next frame. `None` if it is incomplete.
    fn parse(bytes: &[u8]) -> io::Result<Option<Self>> {
        let Some((&[first, second], rest)) = bytes.split_first_chunk::<2>() else { return Ok(None) };
        if first & 0x70 != 0 {
            return Err(invalid("a frame has an extension, which was not negotiated"));
        }
        if second & 0x80 == 0 {
            return Err(invalid("a frame of a client is not masked"));
        }
        let opcode = first & 0x0f;
        if !matches!(opcode, CONTINUATION | TEXT | BINARY | CLOSE | PING | PONG) {
            return Err(invalid("a frame has an unknown opcode"));
        }
        let length = match second & 0x7f {
            126 => rest.split_first_chunk::<2>().map(|(at, rest)| (u64::from(u16::from_be_bytes(*at)), rest)),
            127 => rest.split_first_chunk::<8>().map(|(at, rest)| (u64::from_be_bytes(*at), rest)),
            short => Some((u64::from(short), rest)),
        };
        let Some((length, rest)) = length else { return Ok(None) };
        if length >> 63 != 0 {
            return Err(invalid("a frame has an invalid length"));
        }
        let Some((mask, rest)) = rest.split_first_chunk::<4>() else { return Ok(None) };
        let size = bytes.len() - rest.len();
        Ok(Some(Self { is_final: first & 0x80 != 0, opcode, length, mask: *mask, size }))
    }

    fn is_control(&self) -> bool {
        self.opcode >= CLOSE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MASK: [u8; 4] = [1, 2, 3, 4];

    /// A masked frame of a client.
    fn frame(first: u8, payload: &[u8]) -> Vec<u8> {
        let mut frame = encode(first & 0x0f, &[payload]).to_vec();
        let head = frame.len() - payload.len();
        let masked = unmask(payload, MASK);
        frame.truncate(head);
        frame[0] = first;
        frame[1] |= 0x80;
        frame.extend_from_slice(&MASK);
        frame.extend_from_slice(&masked);
        frame
    }

    /// A piece in the middle of a message.
    fn middle(bytes: &'static [u8]) -> Piece {
        Piece { bytes: Bytes::from_static(bytes), is_first: false, is_last: false }
    }

    fn events(received: &[u8]) -> io::Result<Vec<Event>> {
        let mut frames = Frames::of(received);
        std::iter::from_fn(|| frames.next().transpose()).collect()
    }

    #[test]
    fn fragments_are_passed_on_as_they_arrive_with_control_frames_between_them() {
        let wire = [
            frame(BINARY, b"one"),
            frame(0x80 | PING, b"are you there"),
            frame(CONTINUATION, b""),
            frame(0x80 | PONG, b""),
            frame(0x80 | CONTINUATION, b"two"),
            frame(0x80 | TEXT, b""),
            frame(0x80 | CLOSE, &NORMAL_CLOSURE),
        ]
        .concat();
        let expected = [
            Event::Data(Piece { is_first: true, ..middle(b"one") }),
            Event::Ping(Bytes::from_static(b"are you there")),
            Event::Data(middle(b"")),
            Event::Data(Piece { is_last: true, ..middle(b"two") }),
            Event::Data(Piece { is_first: true, is_last: true, ..middle(b"") }),
            Event::Close,
        ];
        assert_eq!(events(&wire).expect("valid"), expected);
    }

    #[test]
    fn a_message_has_the_same_bytes_when_it_arrives_in_parts_of_any_length() {
        let message: Vec<u8> = (0..=u8::MAX).cycle().take(70_000).collect();
        let wire = frame(0x80 | BINARY, &message);
        for part in [1, 3, 1000, wire.len()] {
            let (mut frames, mut received) = (Frames::default(), Vec::new());
            for bytes in wire.chunks(part) {
                frames.buffer.extend_from_slice(bytes);
                while let Some(event) = frames.next().expect("valid") {
                    let Event::Data(piece) = event else { panic!("{event:?}") };
                    assert_eq!(piece.is_first, received.is_empty());
                    received.extend_from_slice(&piece.bytes);
                    assert_eq!(piece.is_last, received.len() == message.len());
                }
            }
            assert!(received == message, "in parts of {part}");
        }
    }

    #[tokio::test]
    async fn a_message_of_any_length_needs_the_memory_of_one_piece() {
        // The maximum length of other servers, and the maximum length of the protocol.
        for length in [32 << 20, u64::MAX >> 1] {
            let head = [&[0x82, 0xff][..], &u64::to_be_bytes(length), &[0; 4]].concat();
            // Buffers and readers both have a method `chain`.
            let input = tokio::io::AsyncReadExt::chain(io::Cursor::new(head), tokio::io::repeat(b'x'));
            let (mut reader, _writer) = split(input, tokio::io::sink());
            let mut received = 0;
            while received < 1 << 20 {
                let piece = reader.next().await.expect("valid").expect("a piece");
                assert!(piece.bytes.len() <= PIECE, "{}", piece.bytes.len());
                received += piece.bytes.len();
                assert!(reader.frames.buffer.capacity() <= 4 * PIECE, "{}", reader.frames.buffer.capacity());
            }
        }
    }

    #[test]
    fn invalid_frames_are_refused() {
        let huge = [&[0x82, 0xff][..], &u64::MAX.to_be_bytes(), &[0; 4]].concat();
        let cases = [
            ("not masked", encode(BINARY, &[b"x"]).to_vec()),
            ("extension", frame(0xc0 | BINARY, b"x")),
            ("opcode", frame(0x80 | 3, b"x")),
            ("long ping", frame(0x80 | PING, &[0; 126])),
            ("fragmented ping", frame(PING, b"")),
            ("no message to continue", frame(0x80 | CONTINUATION, b"x")),
            ("message in a message", [frame(BINARY, b"x"), frame(0x80 | BINARY, b"y")].concat()),
            ("length", huge),
        ];
        for (case, wire) in cases {
            assert_eq!(events(&wire).expect_err(case).kind(), ErrorKind::InvalidData, "{case}");
        }
    }

    #[test]
    fn heads_encode_the_length_in_the_shortest_form() {
        for (length, head) in [
            (125, vec![0x82, 125]),
            (126, vec![0x82, 126, 0, 126]),
            (1 << 16, vec![0x82, 127, 0, 0, 0, 0, 0, 1, 0, 0]),
        ] {
            assert!(encode(BINARY, &[&vec![0; length]]).starts_with(&head), "{length}");
        }
    }

    #[tokio::test]
    async fn pings_are_answered_while_there_is_nothing_to_send() {
        let wire = frame(0x80 | PING, b"still there?");
        let (mut reader, mut writer) = split(wire.as_slice(), Vec::new());
        assert_eq!(reader.next().await.expect("valid"), None);
        drop(reader);
        writer.wait_for(tokio::task::yield_now()).await.expect("written");
        writer.send(BINARY, &[b"a", b"b"]).await.expect("written");
        writer.close().await.expect("written");
        let expected =
            [encode(PONG, &[b"still there?"]), encode(BINARY, &[b"ab"]), encode(CLOSE, &[&NORMAL_CLOSURE])];
        assert_eq!(writer.output, expected.concat());
    }

    #[tokio::test]
    async fn no_closing_frame_follows_an_interrupted_message() {
        let (output, mut client) = tokio::io::duplex(8);
        let (_reader, mut writer) = split(tokio::io::empty(), output);
        tokio::select! {
            biased;
            sent = writer.send(BINARY, &[&[7; 100]]) => panic!("the client has not read: {sent:?}"),
            () = tokio::task::yield_now() => {}
        }
        let closed = async {
            writer.close().await.expect("nothing is written");
            drop(writer);
        };
        let mut received = Vec::new();
        let ((), read) = tokio::join!(closed, client.read_to_end(&mut received));
        read.expect("the end");
        assert_eq!(received, encode(BINARY, &[&[7; 100]])[..8]);
    }
}

//! Messages of exec and attach: one byte or digit for the channel, then its data. Pure.

use base64::{Engine as _, prelude::BASE64_STANDARD};
use bytes::{Buf as _, Bytes, BytesMut};

use super::super::client::{self, Input, Output};
use super::super::upgrade::Codec;
use super::frames::{BINARY, Piece, TEXT};

const STDIN: u8 = 0;
const STDOUT: u8 = 1;
const STDERR: u8 = 2;
const ERROR: u8 = 3;
const RESIZE: u8 = 4;
/// Version 5: the client closes the channel named by the next byte.
const CLOSE: u8 = 255;

/// Maximum bytes of a message that is not standard input: a terminal size, or a channel to close.
const MAX_SHORT: usize = 1024;

/// Converts pieces of messages to inputs. Standard input is passed on piece by piece.
#[derive(Debug, Default)]
pub(super) struct Decoder {
    codec: Codec,
    /// Channel of the current message. `None` before its first byte.
    channel: Option<u8>,
    /// Whether the current message is invalid. Then its rest is ignored.
    is_invalid: bool,
    /// Base64 characters that are not a group of four yet.
    group: BytesMut,
    /// The received part of a message that is not standard input.
    short: BytesMut,
}

/// A message for the client.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Encoded {
    pub(super) opcode: u8,
    /// The byte or digit of the channel.
    pub(super) channel: u8,
    pub(super) payload: Bytes,
}

// === impl Decoder ===

impl Decoder {
    pub(super) fn new(codec: Codec) -> Self {
        Self { codec, ..Self::default() }
    }

    /// The input of a piece. `None` if the piece is invalid or of an ignored channel, or if more pieces are needed.
    pub(super) fn input(&mut self, piece: Piece) -> Option<Input> {
        let Piece { mut bytes, is_first, is_last } = piece;
        if is_first {
            (self.channel, self.is_invalid) = (None, false);
            self.group.clear();
            self.short.clear();
        }
        if self.channel.is_none() && !bytes.is_empty() {
            let channel = bytes.get_u8();
            self.channel = Some(if self.codec.base64 { channel.wrapping_sub(b'0') } else { channel });
        }
        if self.is_invalid {
            return None;
        }
        if self.codec.base64 {
            bytes = self.decode(&bytes, is_last)?;
        }
        match self.channel? {
            STDIN => (!bytes.is_empty()).then_some(Input::Stdin(bytes)),
            channel @ (RESIZE | CLOSE) => self.short(channel, &bytes, is_last),
            _ => None,
        }
    }

    /// Decodes base64 up to the last complete group of four characters, or to the end of the message.
    fn decode(&mut self, text: &[u8], is_last: bool) -> Option<Bytes> {
        self.group.extend_from_slice(text);
        let complete = if is_last { self.group.len() } else { self.group.len() / 4 * 4 };
        let decoded = BASE64_STANDARD.decode(self.group.split_to(complete)).ok();
        self.is_invalid = decoded.is_none();
        decoded.map(Bytes::from)
    }

    fn short(&mut self, channel: u8, bytes: &[u8], is_last: bool) -> Option<Input> {
        self.is_invalid = self.short.len() + bytes.len() > MAX_SHORT;
        if self.is_invalid {
            return None;
        }
        self.short.extend_from_slice(bytes);
        if !is_last {
            return None;
        }
        match channel {
            RESIZE => client::resize(&self.short),
            _ => (*self.short == [STDIN]).then_some(Input::StdinClosed),
        }
    }
}

/// The message of an output. `None` for a status of success in versions before 4, which do not send it.
pub(super) fn encode(codec: Codec, output: Output) -> Option<Encoded> {
    let (channel, payload) = match output {
        Output::Stdout(bytes) => (STDOUT, bytes),
        Output::Stderr(bytes) => (STDERR, bytes),
        Output::Status(status) if codec.text_status => (ERROR, error_text(&status)?.into()),
        Output::Status(status) => (ERROR, status),
    };
    Some(if codec.base64 {
        let payload = BASE64_STANDARD.encode(payload).into();
        Encoded { opcode: TEXT, channel: b'0' + channel, payload }
    } else {
        Encoded { opcode: BINARY, channel, payload }
    })
}

/// The error message of a Status. `None` for success.
fn error_text(status: &[u8]) -> Option<String> {
    let status: serde_json::Value = serde_json::from_slice(status).ok()?;
    (status["status"] != "Success").then(|| status["message"].as_str().unwrap_or_default().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const OLD: Codec = Codec { base64: true, text_status: true };

    /// The inputs of a message that arrives in parts of this length.
    fn inputs(decoder: &mut Decoder, message: &[u8], part: usize) -> Vec<Input> {
        let count = message.chunks(part).count().max(1);
        (0..count)
            .filter_map(|number| {
                let bytes = message.chunks(part).nth(number).unwrap_or_default();
                let bytes = Bytes::copy_from_slice(bytes);
                decoder.input(Piece { bytes, is_first: number == 0, is_last: number + 1 == count })
            })
            .collect()
    }

    /// The bytes for standard input.
    fn stdin(inputs: Vec<Input>) -> Vec<u8> {
        let bytes = inputs.into_iter().flat_map(|input| match input {
            Input::Stdin(bytes) => bytes,
            other => panic!("{other:?}"),
        });
        bytes.collect()
    }

    #[test]
    fn messages_are_decoded_by_channel_in_parts_of_any_length() {
        let mut decoder = Decoder::new(Codec::default());
        for part in [1, 2, 100] {
            assert_eq!(stdin(inputs(&mut decoder, b"\x00hello", part)), b"hello");
            let cases: [(&[u8], &[Input]); 7] = [
                (b"\x00", &[]),
                (b"\x04{\"Width\":2,\"Height\":3}\n", &[Input::Resize { width: 2, height: 3 }]),
                (b"\x04nonsense", &[]),
                (b"\xff\x00", &[Input::StdinClosed]),
                (b"\xff\x01", &[]),
                (b"\x01out", &[]),
                (b"", &[]),
            ];
            for (message, expected) in cases {
                assert_eq!(inputs(&mut decoder, message, part), expected, "{message:?}");
            }
        }
    }

    #[test]
    fn standard_input_is_passed_on_before_the_message_ends() {
        for (codec, begin) in [(Codec::default(), &b"\x00hel"[..]), (OLD, &b"0aGVsb"[..])] {
            let piece = Piece { bytes: Bytes::from_static(begin), is_first: true, is_last: false };
            assert_eq!(Decoder::new(codec).input(piece), Some(Input::Stdin(Bytes::from_static(b"hel"))));
        }
    }

    #[test]
    fn a_terminal_size_without_an_end_takes_little_memory() {
        let mut decoder = Decoder::new(Codec::default());
        for number in 0..100 {
            let bytes = Bytes::from_static(&[RESIZE; 1000]);
            assert_eq!(decoder.input(Piece { bytes, is_first: number == 0, is_last: false }), None);
            assert!(decoder.short.capacity() <= 4 * MAX_SHORT, "{}", decoder.short.capacity());
        }
        let size = b"\x04{\"Width\":2,\"Height\":3}";
        assert_eq!(inputs(&mut decoder, size, 100), [Input::Resize { width: 2, height: 3 }]);
    }

    #[test]
    fn outputs_are_encoded_with_their_channel() {
        let binary = |output: Output| encode(Codec::default(), output).expect("a message");
        let expected =
            |channel, text: &'static str| Encoded { opcode: BINARY, channel, payload: text.into() };
        assert_eq!(binary(Output::Stdout(Bytes::from_static(b"a"))), expected(1, "a"));
        assert_eq!(binary(Output::Stderr(Bytes::from_static(b"b"))), expected(2, "b"));
        assert_eq!(binary(Output::Status(Bytes::from_static(b"{}"))), expected(3, "{}"));
    }

    #[test]
    fn old_protocols_use_base64_and_a_text_status() {
        let out = encode(OLD, Output::Stdout(Bytes::from_static(b"hi")));
        assert_eq!(out, Some(Encoded { opcode: TEXT, channel: b'1', payload: "aGk=".into() }));
        let mut decoder = Decoder::new(OLD);
        for part in [1, 3, 100] {
            assert_eq!(stdin(inputs(&mut decoder, b"0aGk=", part)), b"hi");
            assert_eq!(stdin(inputs(&mut decoder, b"0aGVsbG8gd29ybGQ=", part)), b"hello world");
            // The rest of an invalid message is ignored. The next message is decoded.
            for invalid in [&b"0???"[..], b"0????aGk=", b"0aGk"] {
                assert!(inputs(&mut decoder, invalid, part).is_empty(), "{invalid:?}");
            }
        }
        let text = Codec { base64: false, text_status: true };
        let status = |json: &'static str| encode(text, Output::Status(Bytes::from_static(json.as_bytes())));
        assert_eq!(status(r#"{"status": "Success"}"#), None);
        let failed = status(r#"{"status": "Failure", "message": "exit code 1"}"#);
        assert_eq!(failed, Some(Encoded { opcode: BINARY, channel: 3, payload: "exit code 1".into() }));
    }
}

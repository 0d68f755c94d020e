//! Frames of ttrpc, which is gRPC without HTTP/2. A frame has a header of ten bytes and a protobuf request or
//! response. The header consists of length and stream (32 bits each, big-endian), then type and flags (8 bits each).

use coracle_proto::ttrpc::{Request, Response, Status};
use prost::Message;

/// Length of a frame's header in bytes.
pub const HEADER: usize = 10;
/// Maximum length of a frame's payload in bytes.
pub const MAX_LENGTH: usize = 4 << 20;

const REQUEST: u8 = 1;
const RESPONSE: u8 = 2;

/// The gRPC status codes used here.
pub mod code {
    /// Any other error of the peer.
    pub const UNKNOWN: i32 = 2;
    /// The request is invalid.
    pub const INVALID_ARGUMENT: i32 = 3;
    /// A limit is exceeded.
    pub const RESOURCE_EXHAUSTED: i32 = 8;
    /// The request is not valid in the current state.
    pub const FAILED_PRECONDITION: i32 = 9;
    /// The method does not exist.
    pub const UNIMPLEMENTED: i32 = 12;
}

/// Content of a frame.
#[derive(Debug, Clone, PartialEq)]
pub enum Body {
    /// A call.
    Request(Request),
    /// The response to a call.
    Response(Response),
}

/// A frame. A call and its response have the same stream number.
#[derive(Debug, Clone, PartialEq)]
pub struct Frame {
    /// Stream number. The caller chooses odd and increasing numbers.
    pub stream: u32,
    /// The content.
    pub body: Body,
}

/// Error of invalid frames.
#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    /// The frame is longer than the protocol allows.
    #[error("the message has {0} bytes, the maximum of ttrpc is {MAX_LENGTH}")]
    TooLong(usize),
    /// The frame is neither a request nor a response.
    #[error("unknown frame type {0}")]
    Type(u8),
    /// The content is not a valid protobuf message.
    #[error("cannot decode the frame")]
    Decode(#[from] prost::DecodeError),
}

/// Assembles frames from the bytes of a connection.
#[derive(Debug, Default)]
pub struct Assembler {
    bytes: Vec<u8>,
}

// === impl Frame ===

impl Frame {
    /// Encodes the frame.
    ///
    /// # Errors
    /// If the message is longer than the protocol allows.
    pub fn encode(&self) -> Result<Vec<u8>, FrameError> {
        let (kind, length) = match &self.body {
            Body::Request(request) => (REQUEST, request.encoded_len()),
            Body::Response(response) => (RESPONSE, response.encoded_len()),
        };
        if length > MAX_LENGTH {
            return Err(FrameError::TooLong(length));
        }
        let mut bytes = Vec::with_capacity(HEADER + length);
        bytes.extend_from_slice(&u32::try_from(length).unwrap_or(u32::MAX).to_be_bytes());
        bytes.extend_from_slice(&self.stream.to_be_bytes());
        bytes.extend_from_slice(&[kind, 0]);
        match &self.body {
            Body::Request(request) => request.encode_raw(&mut bytes),
            Body::Response(response) => response.encode_raw(&mut bytes),
        }
        Ok(bytes)
    }

    /// The response to a call.
    #[must_use]
    pub fn answer(stream: u32, result: Result<Vec<u8>, Status>) -> Self {
        let response = match result {
            Ok(payload) => Response { status: None, payload },
            Err(status) => Response { status: Some(status), payload: Vec::new() },
        };
        Self { stream, body: Body::Response(response) }
    }
}

// === impl Assembler ===

impl Assembler {
    /// Appends received bytes.
    pub fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// The next frame. `None` if it is not complete yet.
    ///
    /// # Errors
    /// If the bytes are not valid frames. The connection cannot be used any more.
    pub fn pop(&mut self) -> Result<Option<Frame>, FrameError> {
        let Some(([a, b, c, d, e, f, g, h, kind, _flags], rest)) = self.bytes.split_first_chunk::<HEADER>()
        else {
            return Ok(None);
        };
        let length = usize::try_from(u32::from_be_bytes([*a, *b, *c, *d])).unwrap_or(usize::MAX);
        if length > MAX_LENGTH {
            return Err(FrameError::TooLong(length));
        }
        let Some(message) = rest.get(..length) else { return Ok(None) };
        let body = match *kind {
            REQUEST => Body::Request(Request::decode(message)?),
            RESPONSE => Body::Response(Response::decode(message)?),
            other => return Err(FrameError::Type(other)),
        };
        let frame = Frame { stream: u32::from_be_bytes([*e, *f, *g, *h]), body };
        self.bytes.drain(..HEADER + length);
        Ok(Some(frame))
    }
}

/// Property for any bytes: a decoded frame is equal after encoding and decoding.
#[cfg(any(test, feature = "fuzzing"))]
pub fn fuzz(data: &[u8]) {
    let mut assembler = Assembler::default();
    for bytes in data.chunks(7) {
        assembler.push(bytes);
        while let Ok(Some(frame)) = assembler.pop() {
            let mut again = Assembler::default();
            again.push(&frame.encode().unwrap_or_default());
            assert_eq!(again.pop().ok(), Some(Some(frame)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_corpus_is_replayed() {
        coracle_testing::replay_corpus("plugin", fuzz);
    }

    fn request(payload: Vec<u8>) -> Frame {
        let request = Request { service: "s".into(), method: "m".into(), payload, ..Default::default() };
        Frame { stream: 3, body: Body::Request(request) }
    }

    #[test]
    fn frames_are_assembled_from_any_pieces() {
        let frames = [request(vec![1; 10]), Frame::answer(5, Ok(vec![2; 5000])), request(Vec::new())];
        let bytes: Vec<u8> = frames.iter().flat_map(|frame| frame.encode().expect("short")).collect();
        for cut in [1, 7, 10, 4096, bytes.len()] {
            let mut assembler = Assembler::default();
            let mut found = Vec::new();
            for part in bytes.chunks(cut) {
                assembler.push(part);
                while let Some(frame) = assembler.pop().expect("frame") {
                    found.push(frame);
                }
            }
            assert_eq!(found, frames);
        }
    }

    #[test]
    fn the_header_has_the_layout_of_ttrpc() {
        let bytes = request(Vec::new()).encode().expect("short");
        assert_eq!(bytes[..HEADER], [0, 0, 0, 6, 0, 0, 0, 3, REQUEST, 0]);
        assert_eq!(bytes[HEADER..], [0x0a, 1, b's', 0x12, 1, b'm']);
    }

    #[test]
    fn too_long_and_invalid_frames_are_refused() {
        assert!(matches!(request(vec![0; MAX_LENGTH]).encode(), Err(FrameError::TooLong(_))));
        for bytes in [[0xff, 0, 0, 0, 0, 0, 0, 1, REQUEST, 0], [0, 0, 0, 0, 0, 0, 0, 1, 9, 0]] {
            let mut assembler = Assembler::default();
            assembler.push(&bytes);
            assert!(assembler.pop().is_err());
        }
    }
}

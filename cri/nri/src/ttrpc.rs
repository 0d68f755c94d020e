//! ttrpc's frames: gRPC without HTTP/2. A header of ten bytes (length and stream, 32 bits each and
//! big-endian, type, flags), then a protobuf request or response.

use coracle_proto::ttrpc::{Request, Response, Status};
use prost::Message;

/// The length of a frame's header.
pub const HEADER: usize = 10;
/// The most that a frame may carry behind its header.
pub const LONGEST: usize = 4 << 20;

const REQUEST: u8 = 1;
const RESPONSE: u8 = 2;

/// The gRPC status codes that are used here.
pub mod code {
    /// The peer failed in its own way.
    pub const UNKNOWN: i32 = 2;
    /// The request makes no sense.
    pub const INVALID_ARGUMENT: i32 = 3;
    /// Too much at once.
    pub const RESOURCE_EXHAUSTED: i32 = 8;
    /// Not in this state.
    pub const FAILED_PRECONDITION: i32 = 9;
    /// There is no such method.
    pub const UNIMPLEMENTED: i32 = 12;
}

/// What a frame says.
#[derive(Debug, Clone, PartialEq)]
pub enum Body {
    /// A call.
    Request(Request),
    /// Its answer.
    Response(Response),
}

/// A message of one stream: a call and its answer share the number.
#[derive(Debug, Clone, PartialEq)]
pub struct Frame {
    /// Chosen by the caller: odd, and larger than those before.
    pub stream: u32,
    /// What it says.
    pub body: Body,
}

/// Why bytes are no frames.
#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    /// Longer than the protocol allows.
    #[error("a message of {0} bytes, of which ttrpc takes {LONGEST} at most")]
    TooLong(usize),
    /// Neither request nor response.
    #[error("a frame of type {0}")]
    Type(u8),
    /// Not a protobuf message.
    #[error("a frame that cannot be decoded")]
    Decode(#[from] prost::DecodeError),
}

/// Puts frames together from the bytes of a connection.
#[derive(Debug, Default)]
pub struct Assembler {
    bytes: Vec<u8>,
}

// === impl Frame ===

impl Frame {
    /// The bytes on the wire.
    ///
    /// # Errors
    /// When the message is longer than the protocol allows.
    pub fn encode(&self) -> Result<Vec<u8>, FrameError> {
        let (kind, length) = match &self.body {
            Body::Request(request) => (REQUEST, request.encoded_len()),
            Body::Response(response) => (RESPONSE, response.encoded_len()),
        };
        if length > LONGEST {
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

    /// The answer to a call.
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
    /// Adds bytes as they came.
    pub fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// The next whole frame.
    ///
    /// # Errors
    /// When the bytes are no frames: the connection is of no use any more.
    pub fn pop(&mut self) -> Result<Option<Frame>, FrameError> {
        let Some(([a, b, c, d, e, f, g, h, kind, _flags], rest)) = self.bytes.split_first_chunk::<HEADER>()
        else {
            return Ok(None);
        };
        let length = usize::try_from(u32::from_be_bytes([*a, *b, *c, *d])).unwrap_or(usize::MAX);
        if length > LONGEST {
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

/// Any bytes: what is a frame is the same frame again.
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
        let corpus =
            std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../integration/fuzz/corpus/plugin");
        let inputs: Vec<_> = std::fs::read_dir(corpus).unwrap().collect();
        assert!(!inputs.is_empty());
        inputs.into_iter().for_each(|input| fuzz(&std::fs::read(input.unwrap().path()).unwrap()));
    }

    fn request(payload: Vec<u8>) -> Frame {
        let request = Request { service: "s".into(), method: "m".into(), payload, ..Default::default() };
        Frame { stream: 3, body: Body::Request(request) }
    }

    #[test]
    fn frames_come_back_however_they_are_cut() {
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
    fn the_header_is_as_ttrpc_has_it() {
        let bytes = request(Vec::new()).encode().expect("short");
        assert_eq!(bytes[..HEADER], [0, 0, 0, 6, 0, 0, 0, 3, REQUEST, 0]);
        assert_eq!(bytes[HEADER..], [0x0a, 1, b's', 0x12, 1, b'm']);
    }

    #[test]
    fn what_is_too_long_or_no_frame_is_refused() {
        assert!(matches!(request(vec![0; LONGEST]).encode(), Err(FrameError::TooLong(_))));
        for bytes in [[0xff, 0, 0, 0, 0, 0, 0, 1, REQUEST, 0], [0, 0, 0, 0, 0, 0, 0, 1, 9, 0]] {
            let mut assembler = Assembler::default();
            assembler.push(&bytes);
            assert!(assembler.pop().is_err());
        }
    }
}

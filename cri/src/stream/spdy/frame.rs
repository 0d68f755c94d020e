//! Encoding and decoding of SPDY/3.1 frames. Pure.

use bytes::{Buf, BufMut, Bytes, BytesMut};

/// Maximum length of a control frame. A data frame can be longer: its data is passed on in parts of at most this
/// length.
const LIMIT: usize = 64 << 10;
const HEADER: usize = 8;
const VERSION: u16 = 3;
const FIN: u8 = 1;

const SYN_STREAM: u16 = 1;
const SYN_REPLY: u16 = 2;
const RST_STREAM: u16 = 3;
const PING: u16 = 6;
const GOAWAY: u16 = 7;

/// A frame. Header blocks are still compressed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Frame {
    /// Opens a stream.
    SynStream { id: u32, fin: bool, block: Bytes },
    /// Accepts a stream.
    SynReply { id: u32, block: Bytes },
    /// Cancels a stream.
    RstStream { id: u32, status: u32 },
    /// Requests the same frame as reply.
    Ping { id: u32 },
    /// Announces the end of the connection.
    GoAway { last: u32 },
    /// Data of a stream.
    Data { id: u32, fin: bool, bytes: Bytes },
    /// Frames that are ignored: settings, headers, and window updates, because flow control is not used.
    Other,
}

/// Takes frames from received bytes.
#[derive(Debug, Default)]
pub(super) struct Decoder {
    /// The rest of a data frame that is longer than the limit.
    long: Option<LongData>,
}

#[derive(Debug)]
struct LongData {
    id: u32,
    fin: bool,
    left: usize,
}

/// Reasons why bytes are not a valid frame.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub(super) enum FrameError {
    #[error("frame of {0} bytes exceeds the limit")]
    TooLong(usize),
    #[error("SPDY version {0} is not supported")]
    Version(u16),
    #[error("frame of type {0} is too short")]
    Short(u16),
}

/// A copy of the next bytes. A slice would keep the whole buffer in memory, and a frame can be a small part of it.
fn take(buffer: &mut BytesMut, length: usize) -> Bytes {
    Bytes::copy_from_slice(&buffer.split_to(length))
}

// === impl Decoder ===

impl Decoder {
    /// Takes the next frame from the buffer. `None` if more bytes are needed.
    pub(super) fn next(&mut self, buffer: &mut BytesMut) -> Result<Option<Frame>, FrameError> {
        if self.long.is_some() {
            return Ok(self.part(buffer));
        }
        if buffer.len() < HEADER {
            return Ok(None);
        }
        let mut peek = &buffer[..HEADER];
        let (word, rest) = (peek.get_u32(), peek.get_u32());
        let fin = (rest >> 24) as u8 & FIN != 0;
        let length = (rest & 0x00ff_ffff) as usize;
        let is_data = word >> 31 == 0;
        if is_data && length > LIMIT {
            buffer.advance(HEADER);
            self.long = Some(LongData { id: word, fin, left: length });
            return Ok(self.part(buffer));
        }
        if length > LIMIT {
            return Err(FrameError::TooLong(length));
        }
        if buffer.len() < HEADER + length {
            return Ok(None);
        }
        buffer.advance(HEADER);
        let body = take(buffer, length);
        if is_data {
            return Ok(Some(Frame::Data { id: word, fin, bytes: body }));
        }
        let version = ((word >> 16) & 0x7fff) as u16;
        if version != VERSION {
            return Err(FrameError::Version(version));
        }
        control((word & 0xffff) as u16, fin, body).map(Some)
    }

    /// The received part of a long data frame, as a frame of its own. Only the last part ends the stream.
    fn part(&mut self, buffer: &mut BytesMut) -> Option<Frame> {
        let long = self.long.as_mut().filter(|_| !buffer.is_empty())?;
        let bytes = take(buffer, long.left.min(buffer.len()).min(LIMIT));
        long.left -= bytes.len();
        let is_last = long.left == 0;
        let (id, fin) = (long.id, long.fin && is_last);
        if is_last {
            self.long = None;
        }
        Some(Frame::Data { id, fin, bytes })
    }
}

fn control(kind: u16, fin: bool, mut body: Bytes) -> Result<Frame, FrameError> {
    let needed = match kind {
        SYN_STREAM => 10,
        RST_STREAM => 8,
        SYN_REPLY | PING | GOAWAY => 4,
        _ => return Ok(Frame::Other),
    };
    if body.len() < needed {
        return Err(FrameError::Short(kind));
    }
    let id = body.get_u32() & 0x7fff_ffff;
    Ok(match kind {
        SYN_STREAM => {
            body.advance(6);
            Frame::SynStream { id, fin, block: body }
        }
        SYN_REPLY => Frame::SynReply { id, block: body },
        RST_STREAM => Frame::RstStream { id, status: body.get_u32() },
        PING => Frame::Ping { id },
        _ => Frame::GoAway { last: id },
    })
}

/// Appends a frame to the buffer.
pub(super) fn encode(frame: &Frame, buffer: &mut BytesMut) {
    match frame {
        Frame::Data { id, fin, bytes } => {
            buffer.put_u32(id & 0x7fff_ffff);
            buffer.put_u32(head(*fin, bytes.len()));
            buffer.extend_from_slice(bytes);
        }
        Frame::SynStream { id, fin, block } => {
            start(buffer, SYN_STREAM, *fin, 10 + block.len());
            buffer.put_u32(*id);
            buffer.put_slice(&[0; 6]);
            buffer.extend_from_slice(block);
        }
        Frame::SynReply { id, block } => {
            start(buffer, SYN_REPLY, false, 4 + block.len());
            buffer.put_u32(*id);
            buffer.extend_from_slice(block);
        }
        Frame::RstStream { id, status } => {
            start(buffer, RST_STREAM, false, 8);
            buffer.put_u32(*id);
            buffer.put_u32(*status);
        }
        Frame::Ping { id } => {
            start(buffer, PING, false, 4);
            buffer.put_u32(*id);
        }
        Frame::GoAway { last } => {
            start(buffer, GOAWAY, false, 8);
            buffer.put_u32(*last);
            buffer.put_u32(0);
        }
        Frame::Other => {}
    }
}

fn start(buffer: &mut BytesMut, kind: u16, fin: bool, length: usize) {
    buffer.put_u16(0x8000 | VERSION);
    buffer.put_u16(kind);
    buffer.put_u32(head(fin, length));
}

fn head(fin: bool, length: usize) -> u32 {
    (u32::from(fin) << 24) | (u32::try_from(length).unwrap_or_default() & 0x00ff_ffff)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_decoded_as_encoded_also_in_pieces() {
        let frames = [
            Frame::SynStream { id: 1, fin: true, block: Bytes::from_static(b"block") },
            Frame::SynReply { id: 1, block: Bytes::from_static(b"b") },
            Frame::RstStream { id: 3, status: 5 },
            Frame::Ping { id: 7 },
            Frame::GoAway { last: 9 },
            Frame::Data { id: 5, fin: false, bytes: Bytes::from_static(b"hello") },
            Frame::Data { id: 5, fin: true, bytes: Bytes::new() },
        ];
        let mut wire = BytesMut::new();
        for frame in &frames {
            encode(frame, &mut wire);
        }
        let (mut decoder, mut buffer, mut found) = (Decoder::default(), BytesMut::new(), Vec::new());
        for byte in wire {
            buffer.put_u8(byte);
            while let Some(frame) = decoder.next(&mut buffer).expect("a frame") {
                found.push(frame);
            }
        }
        assert_eq!(found, frames);
    }

    #[test]
    fn invalid_frames_are_refused_and_unknown_frames_ignored() {
        let decode = |bytes: &[u8]| Decoder::default().next(&mut BytesMut::from(bytes));
        assert_eq!(decode(&[0x80, 2, 0, 1, 0, 0, 0, 0]), Err(FrameError::Version(2)));
        assert_eq!(decode(&[0x80, 3, 0, 1, 0, 0, 0, 0]), Err(FrameError::Short(1)));
        assert_eq!(decode(&[0x80, 3, 0, 1, 0, 0xff, 0xff, 0xff]), Err(FrameError::TooLong(0xff_ffff)));
        assert_eq!(decode(&[0x80, 3, 0, 1, 0, 1, 0, 1]), Err(FrameError::TooLong(LIMIT + 1)));
        assert_eq!(decode(&[0, 0, 0, 1, 0, 1, 0, 0]), Ok(None));
        assert_eq!(decode(&[0x80, 3, 0, 9, 0, 0, 0, 0]), Ok(Some(Frame::Other)));
    }

    #[test]
    fn the_data_of_a_long_frame_is_passed_on_as_it_arrives() {
        let data = |bytes: Vec<u8>, fin| Frame::Data { id: 5, fin, bytes: Bytes::from(bytes) };
        let (mut decoder, mut wire) = (Decoder::default(), BytesMut::new());
        encode(&data(vec![b'x'; 2 * LIMIT + 10], true), &mut wire);
        encode(&Frame::Ping { id: 7 }, &mut wire);
        let mut rest = wire.split_off(HEADER + 100);
        assert_eq!(decoder.next(&mut wire), Ok(Some(data(vec![b'x'; 100], false))));
        assert_eq!(decoder.next(&mut wire), Ok(None));
        for (length, is_last) in [(LIMIT, false), (LIMIT - 90, true)] {
            assert_eq!(decoder.next(&mut rest), Ok(Some(data(vec![b'x'; length], is_last))));
        }
        assert_eq!(decoder.next(&mut rest), Ok(Some(Frame::Ping { id: 7 })));
    }
}

//! Finds the incomplete header block in the frames of an HTTP/2 client. Source: RFC 9113, sections 3.4, 4.1 and 6.

/// Bytes of the client's connection preface.
const PREFACE: usize = 24;
/// Bytes of the header of a frame: length (3), type, flags, stream (4).
const FRAME_HEADER: usize = 9;
/// Types of the frames with parts of a header block: HEADERS and CONTINUATION.
const PARTS: [u8; 2] = [1, 9];
/// Flag of the frame with the last part.
const END_HEADERS: u8 = 4;

/// The position in the bytes that a client sends.
#[derive(Debug)]
pub(super) struct HeaderBlock {
    /// Remaining bytes of the preface, or of the payload of the current frame.
    left: usize,
    header: [u8; FRAME_HEADER],
    /// Number of received bytes of `header`.
    filled: usize,
    /// Whether the payload is a part of a header block.
    is_part: bool,
    is_last: bool,
    /// Number of received bytes of the header block.
    bytes: usize,
}

// === impl HeaderBlock ===

impl Default for HeaderBlock {
    fn default() -> Self {
        Self { left: PREFACE, header: [0; FRAME_HEADER], filled: 0, is_part: false, is_last: false, bytes: 0 }
    }
}

impl HeaderBlock {
    /// Reads the next bytes. Returns the received bytes of the header block whose last frame is not complete.
    pub(super) fn read(&mut self, mut received: &[u8]) -> usize {
        while let Some((first, rest)) = received.split_first() {
            if self.left > 0 {
                let length = self.left.min(received.len());
                self.left -= length;
                if self.is_part {
                    self.bytes += length;
                }
                received = received.get(length..).unwrap_or_default();
            } else {
                if let Some(byte) = self.header.get_mut(self.filled) {
                    *byte = *first;
                }
                self.filled += 1;
                received = rest;
                if self.filled == FRAME_HEADER {
                    self.begin_payload();
                }
            }
            if self.left == 0 && self.filled == 0 && self.is_part && self.is_last {
                (self.is_part, self.bytes) = (false, 0);
            }
        }
        self.bytes
    }

    fn begin_payload(&mut self) {
        let [high, middle, low, kind, flags, ..] = self.header;
        self.left = (usize::from(high) << 16) | (usize::from(middle) << 8) | usize::from(low);
        self.filled = 0;
        self.is_part = PARTS.contains(&kind);
        self.is_last = flags & END_HEADERS != 0;
    }
}

/// Fuzz target: the bytes of a client. The result must be the same for one piece and for single bytes.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn fuzz(data: &[u8]) {
    let whole = HeaderBlock::default().read(data);
    let mut block = HeaderBlock::default();
    let last = data.iter().fold(0, |_, byte| block.read(std::slice::from_ref(byte)));
    assert_eq!(last, whole, "the header block depends on the pieces in which it arrives");
    assert!(whole <= data.len(), "{whole} bytes of {}", data.len());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(kind: u8, flags: u8, length: usize) -> Vec<u8> {
        let [.., high, middle, low] = length.to_be_bytes();
        let mut frame = vec![high, middle, low, kind, flags, 0, 0, 0, 1];
        frame.resize(FRAME_HEADER + length, b'x');
        frame
    }

    #[test]
    fn a_header_block_counts_until_its_last_frame() {
        let mut sent = vec![b'p'; PREFACE];
        for (kind, flags, length) in [(4, 0, 6), (1, 4, 100), (0, 0, 5000), (1, 5, 0)] {
            sent.extend(frame(kind, flags, length));
        }
        for pieces in [1, 7, 4096] {
            let mut block = HeaderBlock::default();
            for piece in sent.chunks(pieces) {
                assert!(block.read(piece) <= 100, "data is no header");
            }
            assert_eq!(block.read(&frame(1, 0, 16 << 10)), 16 << 10);
            let continuation = frame(9, 4, 1000);
            let (most, last) = continuation.split_at(continuation.len() - 1);
            assert_eq!(block.read(most), (16 << 10) + 999);
            assert_eq!(block.read(last), 0);
        }
    }
}

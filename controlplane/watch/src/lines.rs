//! Splits the data of a response into lines.

use bytes::{Buf, Bytes, BytesMut};

/// The lines of a response. A line within one frame is not copied. A buffer exists only while a line is incomplete.
#[derive(Debug)]
pub(crate) struct Lines {
    /// Maximum bytes of a line.
    limit: usize,
    /// The start of a line whose end is not received yet.
    begin: BytesMut,
    /// Received data after `begin`.
    frame: Bytes,
}

/// A line is longer than the limit.
#[derive(Debug, PartialEq)]
pub(crate) struct TooLong;

impl Lines {
    pub(crate) fn new(limit: usize) -> Self {
        Self { limit, begin: BytesMut::new(), frame: Bytes::new() }
    }

    /// Adds received data. The caller must first read all former lines, until `next` returns `None`.
    pub(crate) fn push(&mut self, frame: Bytes) {
        self.frame = frame;
    }

    /// The next complete line, without its end. `None` if more data is needed.
    pub(crate) fn next(&mut self) -> Result<Option<Bytes>, TooLong> {
        let end = memchr::memchr(b'\n', &self.frame);
        let length = end.unwrap_or(self.frame.len());
        if self.begin.len() + length > self.limit {
            return Err(TooLong);
        }
        let line = self.frame.split_to(length);
        let Some(_newline) = end else {
            self.begin.extend_from_slice(&line);
            self.frame = Bytes::new();
            return Ok(None);
        };
        // Skip the line's end, the first byte of the rest.
        self.frame.advance(1);
        if self.begin.is_empty() {
            return Ok(Some(line));
        }
        self.begin.extend_from_slice(&line);
        Ok(Some(std::mem::take(&mut self.begin).freeze()))
    }

    /// The last line, if it has no end.
    pub(crate) fn rest(&mut self) -> Bytes {
        std::mem::take(&mut self.begin).freeze()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(lines: &mut Lines, frame: &'static str) -> Vec<Bytes> {
        lines.push(Bytes::from_static(frame.as_bytes()));
        std::iter::from_fn(|| lines.next().unwrap()).collect()
    }

    #[test]
    fn lines_are_split_at_any_byte() {
        let mut lines = Lines::new(10);
        assert_eq!(read(&mut lines, "one\ntw"), ["one"]);
        assert_eq!(read(&mut lines, ""), [""; 0]);
        assert_eq!(read(&mut lines, "o"), [""; 0]);
        assert_eq!(read(&mut lines, "\n\nthree\nfou"), ["two", "", "three"]);
        assert_eq!(read(&mut lines, "r\n"), ["four"]);
        assert_eq!(lines.begin.capacity(), 0, "no buffer without an incomplete line");
        assert_eq!(read(&mut lines, "rest"), [""; 0]);
        assert_eq!((lines.rest(), lines.rest()), (Bytes::from_static(b"rest"), Bytes::new()));
    }

    #[test]
    fn a_line_is_limited_in_one_frame_and_in_many() {
        let mut lines = Lines::new(4);
        assert_eq!(read(&mut lines, "four\nfour\n"), ["four", "four"]);
        lines.push(Bytes::from_static(b"five5\n"));
        assert_eq!(lines.next(), Err(TooLong));
        let mut lines = Lines::new(4);
        assert_eq!(read(&mut lines, "fo"), [""; 0]);
        assert_eq!(read(&mut lines, "ur"), [""; 0]);
        lines.push(Bytes::from_static(b"5"));
        assert_eq!(lines.next(), Err(TooLong));
    }
}

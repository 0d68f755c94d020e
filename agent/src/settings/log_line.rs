//! Writer of the log: each event is one line of bounded length.
//!
//! Errors quote text of containers, images and clients, which must not be able to forge lines or to fill the disk.

use std::borrow::Cow;
use std::io::{self, Write};

/// Longest line in bytes.
const LINE_MAX: usize = 8 << 10;

/// Standard error. Each write is one whole event.
#[derive(Debug)]
pub(super) struct LogLine;

impl Write for LogLine {
    fn write(&mut self, event: &[u8]) -> io::Result<usize> {
        io::stderr().lock().write_all(&one_line(event))?;
        Ok(event.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}

fn one_line(event: &[u8]) -> Cow<'_, [u8]> {
    let text = event.strip_suffix(b"\n").unwrap_or(event);
    if text.len() <= LINE_MAX && !text.iter().any(|byte| matches!(byte, b'\n' | b'\r')) {
        return Cow::Borrowed(event);
    }
    let mut line = Vec::with_capacity(text.len().min(LINE_MAX) + 8);
    for byte in text {
        if line.len() >= LINE_MAX {
            line.extend_from_slice("…".as_bytes());
            break;
        }
        match byte {
            b'\n' => line.extend_from_slice(b"\\n"),
            b'\r' => line.extend_from_slice(b"\\r"),
            other => line.push(*other),
        }
    }
    line.push(b'\n');
    Cow::Owned(line)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_one_line_of_bounded_length() {
        assert_eq!(&*one_line(b"WARN a b=1\n"), b"WARN a b=1\n");
        assert_eq!(&*one_line(b"WARN a b=x\n2026 INFO forged\r\n"), b"WARN a b=x\\n2026 INFO forged\\r\n");
        let long = [b"x".repeat(1 << 20), b"\n".to_vec()].concat();
        let line = one_line(&long);
        assert!(line.len() < LINE_MAX + 16 && line.ends_with("…\n".as_bytes()));
    }
}

//! Writer of the log: each event is one line of bounded length.
//!
//! Errors quote text of containers, images and clients, which must not be able to forge lines or to fill the disk.

use std::borrow::Cow;
use std::io::{self, Write};

/// Longest line in bytes.
const LINE_MAX: usize = 8 << 10;

/// Standard error. Each write is one whole event. An event that cannot be written is lost: a full disk, or a reader that
/// has ended, must not end the node.
#[derive(Debug)]
pub(super) struct LogLine;

impl Write for LogLine {
    fn write(&mut self, event: &[u8]) -> io::Result<usize> {
        // Tracing would report an error with `eprintln!`, which panics if standard error cannot be written.
        let _lost = io::stderr().lock().write_all(&one_line(event));
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
    use std::fs::File;
    use std::process::Command;

    use super::*;

    #[test]
    fn a_log_that_cannot_be_written_does_not_end_the_program() {
        const IS_CHILD: &str = "CORACLE_TEST_FULL_LOG";
        const NAME: &str = "settings::log_line::tests::a_log_that_cannot_be_written_does_not_end_the_program";
        if std::env::var_os(IS_CHILD).is_none() {
            let full = File::options().write(true).open("/dev/full").expect("open");
            let mut child = Command::new(std::env::current_exe().expect("this program"));
            child.args(["--exact", NAME, "--nocapture"]).env(IS_CHILD, "1").stderr(full);
            let output = child.output().expect("the child");
            let text = String::from_utf8_lossy(&output.stdout);
            assert!(output.status.success() && text.contains("1 passed"), "{text}");
            return;
        }
        let log = tracing_subscriber::fmt().with_writer(|| LogLine).finish();
        tracing::subscriber::with_default(log, || tracing::warn!("lost"));
    }

    #[test]
    fn an_event_is_one_line_of_bounded_length() {
        assert_eq!(&*one_line(b"WARN a b=1\n"), b"WARN a b=1\n");
        assert_eq!(&*one_line(b"WARN a b=x\n2026 INFO forged\r\n"), b"WARN a b=x\\n2026 INFO forged\\r\n");
        let long = [b"x".repeat(1 << 20), b"\n".to_vec()].concat();
        let line = one_line(&long);
        assert!(line.len() < LINE_MAX + 16 && line.ends_with("…\n".as_bytes()));
    }
}

//! One line of the CRI log format: `<RFC 3339 time> <stdout|stderr> <P|F>[:tag…] <text>`. Pure.

use jiff::Timestamp;

use super::options::Options;
use super::output::Output;

/// Maximum length of a line in bytes. Runtimes split longer lines into parts, usually of 16 KiB.
pub(super) const LINE_MAX: usize = 1 << 20;

/// A parsed line; the text is without the newline.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Line<'a> {
    pub(crate) time: &'a [u8],
    pub(crate) output: Output,
    pub(crate) is_partial: bool,
    pub(crate) text: &'a [u8],
}

impl Line<'_> {
    /// None for an incomplete or malformed line.
    pub(crate) fn parse(line: &[u8]) -> Option<Line<'_>> {
        let mut fields = line.splitn(4, |b| *b == b' ');
        let (time, output, tag) = (fields.next()?, fields.next()?, fields.next()?);
        let output = match output {
            b"stdout" => Output::Stdout,
            b"stderr" => Output::Stderr,
            _ => return None,
        };
        let is_partial = match tag.split(|b| *b == b':').next()? {
            b"P" => true,
            b"F" => false,
            _ => return None,
        };
        Some(Line { time, output, is_partial, text: fields.next().unwrap_or_default() })
    }
}

/// Prints lines in the requested form, up to the byte limit.
pub(super) struct Printer {
    options: Options,
    /// Whether the last printed line was a part, so that the next line continues it.
    continues: bool,
    left: usize,
}

impl Printer {
    pub(super) fn new(options: &Options) -> Printer {
        Printer { options: options.clone(), continues: false, left: options.limit.unwrap_or(usize::MAX) }
    }

    /// Whether the byte limit is reached.
    pub(super) fn is_full(&self) -> bool {
        self.left == 0
    }

    pub(super) fn print(&mut self, line: &[u8], out: &mut Vec<u8>) {
        let Some(line) = Line::parse(line) else { return };
        if self.options.only.is_some_and(|only| only != line.output) || self.is_before(line.time) {
            return;
        }
        if self.options.timestamps && !self.continues {
            self.put(line.time, out);
            self.put(b" ", out);
        }
        self.put(line.text, out);
        if !line.is_partial {
            self.put(b"\n", out);
        }
        self.continues = line.is_partial;
    }

    fn is_before(&self, time: &[u8]) -> bool {
        let time = || std::str::from_utf8(time).ok()?.parse::<Timestamp>().ok();
        self.options.since.is_some_and(|since| time().is_some_and(|time| time < since))
    }

    fn put(&mut self, bytes: &[u8], out: &mut Vec<u8>) {
        let taken = bytes.len().min(self.left);
        out.extend_from_slice(&bytes[..taken]);
        self.left -= taken;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: [&str; 4] = [
        "2026-01-01T00:00:01.000000001Z stdout F one",
        "2026-01-01T00:00:02Z stderr P tw",
        "2026-01-01T00:00:03Z stderr F o",
        "2026-01-01T00:00:04Z stdout F ",
    ];

    fn printed(options: Options, lines: &[&str]) -> String {
        let (mut printer, mut out) = (Printer::new(&options), Vec::new());
        lines.iter().for_each(|line| printer.print(line.as_bytes(), &mut out));
        String::from_utf8(out).expect("text")
    }

    #[test]
    fn parts_are_joined_and_stamped_once() {
        assert_eq!(printed(Options::default(), &LOG), "one\ntwo\n\n");
        let stamped = printed(Options { timestamps: true, ..Options::default() }, &LOG);
        assert_eq!(
            stamped,
            "2026-01-01T00:00:01.000000001Z one\n2026-01-01T00:00:02Z two\n2026-01-01T00:00:04Z \n"
        );
    }

    #[test]
    fn only_lines_of_the_requested_age_stream_and_limit_are_returned() {
        let since = "2026-01-01T00:00:03Z".parse().ok();
        assert_eq!(printed(Options { since, ..Options::default() }, &LOG), "o\n\n");
        assert_eq!(printed(Options { only: Some(Output::Stderr), ..Options::default() }, &LOG), "two\n");
        assert_eq!(printed(Options { limit: Some(5), ..Options::default() }, &LOG), "one\nt");
    }

    #[test]
    fn malformed_lines_are_skipped() {
        let torn = [
            "",
            "2026-01-01T00:00:01Z",
            "2026-01-01T00:00:01Z stdin F x",
            "2026-01-01T00:00:01Z stdout X x",
            "2026-01-01T00:00:01Z stdout F:tag x y",
        ];
        assert_eq!(printed(Options::default(), &torn), "x y\n");
    }
}

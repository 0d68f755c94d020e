//! A container's log file in the CRI format, rotated when it exceeds its size limit.
//!
//! A line is `<time> <stream> <tag> <text>`. The tag is F for a full line and P for a part of a longer line
//! (k8s.io/cri-api, "logging format"). A rotated file is named `<path>.<YYYYmmdd-HHMMSS>`, which is the kubelet's
//! naming.

use std::cmp::Ordering;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use nix::fcntl::OFlag;
use nix::sys::stat::Mode;

use crate::null;
use crate::report::note;

/// Maximum bytes of text in one log line. Longer lines are written in parts.
pub(crate) const MAX_TEXT: usize = 16 * 1024;

/// A container's output stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Output {
    Stdout,
    Stderr,
}

/// The size at which the file is rotated, and the number of files to keep.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Limits {
    /// Maximum bytes per file; 0 means unlimited.
    pub(crate) size: u64,
    /// Number of files including the current one; with 0 and 1 only the current file is kept.
    pub(crate) files: u32,
}

/// An open log file.
#[derive(Debug)]
pub(crate) struct Log {
    path: PathBuf,
    file: File,
    /// Length of the file after this process's last write. Other processes may have changed the file since
    /// then.
    written: u64,
    limits: Limits,
    /// Length at which the file is rotated. Larger than the limit after a failed rotation.
    full: u64,
    /// The file ends with an incomplete line, because the disk was full.
    torn: bool,
}

/// The incomplete last line of one output.
#[derive(Debug)]
pub(crate) struct Lines {
    output: Output,
    rest: Vec<u8>,
}

// === impl Output ===

impl Output {
    fn name(self) -> &'static str {
        match self {
            Self::Stdout => "stdout",
            Self::Stderr => "stderr",
        }
    }
}

// === impl Lines ===

impl Lines {
    pub(crate) fn new(output: Output) -> Self {
        Self { output, rest: Vec::new() }
    }

    /// Appends to `into` all lines that `bytes` completes, and parts of too long lines.
    pub(crate) fn push(&mut self, bytes: &[u8], now: Duration, into: &mut Vec<u8>) {
        let mut bytes = bytes;
        while !bytes.is_empty() {
            let room = MAX_TEXT - self.rest.len();
            let window = &bytes[..bytes.len().min(room)];
            if let Some(end) = window.iter().position(|byte| *byte == b'\n') {
                self.line(&window[..end], b'F', now, into);
                bytes = &bytes[end + 1..];
            } else if window.len() == room && bytes.get(room) != Some(&b'\n') {
                self.line(window, b'P', now, into);
                bytes = &bytes[room..];
            } else if window.len() == room {
                self.line(window, b'F', now, into);
                bytes = &bytes[room + 1..];
            } else {
                self.rest.extend_from_slice(window);
                return;
            }
        }
        // Free the buffer, because the container may be idle for a long time.
        if self.rest.is_empty() && self.rest.capacity() > 512 {
            self.rest = Vec::new();
        }
    }

    /// Ends the output: an incomplete last line is written as a part.
    pub(crate) fn finish(&mut self, now: Duration, into: &mut Vec<u8>) {
        if !self.rest.is_empty() {
            self.line(&[], b'P', now, into);
        }
        self.rest = Vec::new();
    }

    fn line(&mut self, text: &[u8], tag: u8, now: Duration, into: &mut Vec<u8>) {
        into.extend_from_slice(timestamp(now).as_bytes());
        into.push(b' ');
        into.extend_from_slice(self.output.name().as_bytes());
        into.extend_from_slice(&[b' ', tag, b' ']);
        into.append(&mut self.rest);
        into.extend_from_slice(text);
        into.push(b'\n');
    }
}

// === impl Log ===

impl Log {
    /// Opens the file for appending. Makes its directory if it is absent.
    pub(crate) fn open(path: &Path, limits: Limits) -> io::Result<Self> {
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent)?;
        }
        let file = append(path)?;
        let written = file.metadata()?.len();
        Ok(Self { path: path.to_owned(), file, written, limits, full: limits.size, torn: false })
    }

    /// Opens the path again, after another process has renamed the file.
    pub(crate) fn reopen(&mut self) -> io::Result<()> {
        let file = append(&self.path)?;
        self.written = file.metadata()?.len();
        self.file = file;
        (self.full, self.torn) = (self.limits.size, false);
        Ok(())
    }

    /// Writes complete formatted lines. On a full disk the lines are lost, but the container is not blocked. If the
    /// rotation fails, the file grows beyond its limit, and no lines are lost.
    pub(crate) fn write(&mut self, lines: &[u8], now: Duration) -> io::Result<()> {
        let length = lines.len() as u64;
        if self.limits.size > 0 && self.written > 0 && self.written + length > self.full {
            self.full = self.limits.size;
            if let Err(error) = self.rotate(now) {
                note(&format!("cannot rotate the log {}: {error}", self.path.display()));
                self.full = self.written + self.limits.size;
            }
        }
        self.end_incomplete_line()?;
        self.append(lines)
    }

    /// Appends the lines. After a partial write, the incomplete line is cut off; if that fails, the next line
    /// starts on a new line.
    fn append(&mut self, lines: &[u8]) -> io::Result<()> {
        let mut rest = lines;
        while !rest.is_empty() {
            let failed = match self.file.write(rest) {
                Ok(0) => io::Error::from(io::ErrorKind::WriteZero),
                Ok(count) => {
                    self.written += count as u64;
                    rest = &rest[count..];
                    continue;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => error,
            };
            let written_part = &lines[..lines.len() - rest.len()];
            let whole = written_part.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
            self.torn = whole < written_part.len();
            let _ = self.cut_off((written_part.len() - whole) as u64);
            return Err(failed);
        }
        Ok(())
    }

    /// Cuts off the incomplete line of the last write, which has `half` bytes.
    fn cut_off(&mut self, half: u64) -> io::Result<()> {
        let length = self.file.metadata()?.len();
        match length.cmp(&self.written) {
            // Another process truncated the file meanwhile, so the incomplete line is gone.
            Ordering::Less => {}
            Ordering::Equal => {
                self.file.set_len(length - half)?;
                self.written -= half;
            }
            // Another process appended to the file. Its data is not cut off.
            Ordering::Greater => return Ok(()),
        }
        self.torn = false;
        Ok(())
    }

    /// Ends an incomplete line that could not be cut off.
    fn end_incomplete_line(&mut self) -> io::Result<()> {
        if self.torn {
            self.file.write_all(b"\n")?;
            self.written += 1;
            self.torn = false;
        }
        Ok(())
    }

    /// Starts a new file. Old files are removed last, so that the new file is open even if the removal fails.
    fn rotate(&mut self, now: Duration) -> io::Result<()> {
        if self.limits.files > 1 {
            match fs::rename(&self.path, self.rotated_path(now)) {
                // Another process renamed or removed the file.
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                Ok(()) | Err(_) => {}
            }
            self.reopen()?;
            self.drop_oldest()
        } else {
            self.file.set_len(0)?;
            (self.written, self.torn) = (0, false);
            Ok(())
        }
    }

    /// The new path of a file that is rotated at this time.
    fn rotated_path(&self, now: Duration) -> PathBuf {
        let with = |suffix: &str| {
            let mut name = self.path.clone().into_os_string();
            name.push(suffix);
            PathBuf::from(name)
        };
        let second = with(&format!(".{}", stamp(now)));
        // A container with much output fills more than one file per second, so the name gets nanoseconds.
        if second.exists() { with(&format!(".{}.{:09}", stamp(now), now.subsec_nanos())) } else { second }
    }

    fn drop_oldest(&self) -> io::Result<()> {
        let (Some(parent), Some(name)) = (self.path.parent(), self.path.file_name()) else { return Ok(()) };
        let prefix = format!("{}.", name.to_string_lossy());
        let mut rotated: Vec<PathBuf> = fs::read_dir(parent)?
            .flatten()
            .filter(|entry| entry.file_name().to_string_lossy().starts_with(&prefix))
            .map(|entry| entry.path())
            .collect();
        rotated.sort();
        let keep = usize::try_from(self.limits.files.saturating_sub(1)).unwrap_or(usize::MAX);
        for old in rotated.iter().take(rotated.len().saturating_sub(keep)) {
            match fs::remove_file(old) {
                // Another process, for example a log collector, removed the file first.
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                Ok(()) | Err(_) => {}
            }
        }
        Ok(())
    }
}

/// Opens a regular file for appending, or makes it.
fn append(path: &Path) -> io::Result<File> {
    match append_existing(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        opened => return opened,
    }
    match OpenOptions::new().create_new(true).append(true).mode(0o640).open(path) {
        // Another process has made the file meanwhile.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => append_existing(path),
        made => made,
    }
}

/// Opens a regular file for appending. A container with a volume in the node's log directory may have replaced the
/// file. A link would redirect the output, and a FIFO would block the shim until it has a reader. The type is checked
/// before the file is opened: opening a device can have effects.
fn append_existing(path: &Path) -> io::Result<File> {
    // With musl, the standard library removes O_PATH from custom flags.
    let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let found = File::from(nix::fcntl::open(path, flags, Mode::empty())?);
    if !found.metadata()?.is_file() && !null::is_null(&found)? {
        return Err(io::Error::other("it is not a regular file"));
    }
    let mut options = OpenOptions::new();
    options.append(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY);
    options.open(format!("/proc/self/fd/{}", found.as_raw_fd()))
}

/// The wall clock: time since 1970.
pub(crate) fn now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// Formats as RFC 3339 in UTC with nanoseconds.
fn timestamp(time: Duration) -> String {
    let DateTime { year, month, day, hour, minute, second } = DateTime::of(time.as_secs());
    let nanos = time.subsec_nanos();
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{nanos:09}Z")
}

/// Formats a time in UTC, as in the name of a rotated file.
fn stamp(time: Duration) -> String {
    let DateTime { year, month, day, hour, minute, second } = DateTime::of(time.as_secs());
    format!("{year:04}{month:02}{day:02}-{hour:02}{minute:02}{second:02}")
}

/// A date of the proleptic Gregorian calendar with a time of day, in UTC.
struct DateTime {
    year: u64,
    month: u64,
    day: u64,
    hour: u64,
    minute: u64,
    second: u64,
}

impl DateTime {
    /// Converts a Unix time in seconds. The calculation uses eras of 400 years that begin on the first of March. So a
    /// leap day is the last day of its year.
    fn of(seconds: u64) -> Self {
        let (days, rest) = (seconds / 86_400, seconds % 86_400);
        let days = days + 719_468;
        let (era, day_of_era) = (days / 146_097, days % 146_097);
        let year_of_era =
            (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let shifted = (5 * day_of_year + 2) / 153;
        let day = day_of_year - (153 * shifted + 2) / 5 + 1;
        let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
        let year = year_of_era + era * 400 + u64::from(month <= 2);
        Self { year, month, day, hour: rest / 3_600, minute: rest % 3_600 / 60, second: rest % 60 }
    }
}

/// Property: for any bytes in any portions the lines contain exactly these bytes, and no line is too long.
#[cfg(any(test, feature = "fuzzing"))]
pub fn fuzz(data: &[u8]) {
    let (portion, text) =
        data.split_first().map_or((1, data), |(first, rest)| (usize::from(*first) * 100 + 1, rest));
    let (mut lines, mut log) = (Lines::new(Output::Stdout), Vec::new());
    text.chunks(portion).for_each(|bytes| lines.push(bytes, Duration::ZERO, &mut log));
    lines.finish(Duration::ZERO, &mut log);
    let mut content = Vec::new();
    let head = timestamp(Duration::ZERO).len() + " stdout F ".len();
    for line in log.split_inclusive(|byte| *byte == b'\n') {
        let rest = &line[head..];
        assert!(rest.len() <= MAX_TEXT + 1);
        // The newline after a part belongs to the log, not to the text.
        let part = line[head - 2] == b'P';
        content.extend_from_slice(if part { &rest[..rest.len() - 1] } else { rest });
    }
    assert_eq!(content, text);
}

#[cfg(test)]
mod tests {
    use super::*;

    const T: Duration = Duration::new(1_136_214_245, 6);

    fn formatted(chunks: &[&[u8]]) -> String {
        let (mut lines, mut out) = (Lines::new(Output::Stdout), Vec::new());
        for chunk in chunks {
            lines.push(chunk, T, &mut out);
        }
        lines.finish(T, &mut out);
        String::from_utf8(out).unwrap()
    }

    /// Puts links, FIFOs and devices in the place of the log, as a pod with a volume of the node's logs
    /// could.
    #[test]
    fn a_path_that_is_not_a_regular_file_is_not_written_to() {
        let dir = std::env::temp_dir().join(format!("coracle-log-special-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let path = dir.join("0.log");
        let other = |path: &Path| assert!(Log::open(path, Limits::default()).is_err());
        std::os::unix::fs::symlink("/etc/passwd", &path).unwrap();
        other(&path);
        fs::remove_file(&path).unwrap();
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        other(&path);
        let _reader = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(&path).unwrap();
        other(&path);
        other(Path::new("/dev/zero"));
        fs::remove_file(&path).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(&path).unwrap();
        // open(2) of a socket fails with ENXIO, so the type was checked before.
        assert_eq!(Log::open(&path, Limits::default()).unwrap_err().raw_os_error(), None);
        assert!(Log::open(Path::new("/dev/null"), Limits::default()).is_ok());
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn the_corpus_is_replayed() {
        coracle_testing::replay_corpus("log", fuzz);
    }

    #[test]
    fn times_are_rfc_3339_in_utc() {
        assert_eq!(timestamp(T), "2006-01-02T15:04:05.000000006Z");
        assert_eq!(timestamp(Duration::from_secs(951_782_400)), "2000-02-29T00:00:00.000000000Z");
        assert_eq!(stamp(Duration::from_secs(4_102_444_799)), "20991231-235959");
    }

    #[test]
    fn a_line_is_complete_even_if_it_arrives_in_portions() {
        let expected = "2006-01-02T15:04:05.000000006Z stdout F hello\n";
        assert_eq!(formatted(&[b"hello\n"]), expected);
        assert_eq!(formatted(&[b"he", b"ll", b"o", b"\n"]), expected);
        assert_eq!(formatted(&[b"\n"]), "2006-01-02T15:04:05.000000006Z stdout F \n");
    }

    #[test]
    fn a_line_without_line_end_is_written_as_a_part() {
        assert_eq!(formatted(&[b"tail"]), "2006-01-02T15:04:05.000000006Z stdout P tail\n");
    }

    #[test]
    fn a_long_line_is_written_in_parts_of_16_kib() {
        let long = vec![b'x'; MAX_TEXT + 5];
        let text = formatted(&[&long, b"\n"]);
        let tags: Vec<_> = text.lines().map(|line| line.split(' ').nth(2).unwrap()).collect();
        assert_eq!(tags, ["P", "F"]);
        let exact = vec![b'x'; MAX_TEXT];
        assert_eq!(formatted(&[&[&exact[..], b"\n"].concat()]).lines().count(), 1);
    }

    #[test]
    fn rotation_keeps_the_newest_files_with_all_their_lines() {
        let dir = std::env::temp_dir().join(format!("coracle-log-rotation-{}", std::process::id()));
        let path = dir.join("0.log");
        let mut log = Log::open(&path, Limits { size: 10, files: 3 }).unwrap();
        for (second, text) in [b"aaaaaaa\n", b"bbbbbbb\n", b"ccccccc\n", b"ddddddd\n"].iter().enumerate() {
            log.write(*text, Duration::from_secs(second as u64)).unwrap();
        }
        let mut names: Vec<_> =
            fs::read_dir(&dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        assert_eq!(names, ["0.log", "0.log.19700101-000002", "0.log.19700101-000003"]);
        assert_eq!(fs::read(&path).unwrap(), b"ddddddd\n");
        fs::remove_dir_all(dir).unwrap();
    }

    fn texts(path: &Path) -> String {
        fs::read_to_string(path).unwrap()
    }

    #[test]
    fn a_log_file_that_was_removed_loses_no_later_line() {
        let dir = std::env::temp_dir().join(format!("coracle-log-gone-{}", std::process::id()));
        let path = dir.join("0.log");
        let mut log = Log::open(&path, Limits { size: 10, files: 3 }).unwrap();
        log.write(b"aaaaaaa\n", T).unwrap();
        fs::rename(&path, dir.join("elsewhere")).unwrap();
        log.write(b"bbbbbbb\n", T).unwrap();
        assert_eq!(texts(&path), "bbbbbbb\n");
        fs::remove_file(&path).unwrap();
        log.write(b"ccccccc\n", T).unwrap();
        assert_eq!(texts(&path), "ccccccc\n");
        // If no new file can be created, the lines go to the old one.
        fs::remove_dir_all(&dir).unwrap();
        log.write(b"ddddddd\n", T).unwrap();
        assert_eq!(log.written, 16);
        fs::create_dir_all(&dir).unwrap();
        log.write(b"eeeeeee\n", T).unwrap();
        assert_eq!(texts(&path), "eeeeeee\n");
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn a_link_or_a_fifo_in_the_place_of_a_log_is_refused_without_blocking() {
        let dir = std::env::temp_dir().join(format!("coracle-log-other-{}", std::process::id()));
        let path = dir.join("0.log");
        let mut log = Log::open(&path, Limits { size: 10, files: 3 }).unwrap();
        fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink(dir.join("target"), &path).unwrap();
        log.reopen().unwrap_err();
        assert!(!dir.join("target").exists());
        fs::remove_file(&path).unwrap();
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        log.reopen().unwrap_err();
        Log::open(&path, Limits::default()).unwrap_err();
        // A log that is already open stays open.
        log.write(b"aaa\n", T).unwrap();
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn an_old_file_that_cannot_be_removed_loses_no_line() {
        let dir = std::env::temp_dir().join(format!("coracle-log-stuck-{}", std::process::id()));
        let path = dir.join("0.log");
        fs::create_dir_all(dir.join("0.log.19690101-000000/x")).unwrap();
        let mut log = Log::open(&path, Limits { size: 10, files: 2 }).unwrap();
        for (second, text) in [b"aaaaaaa\n", b"bbbbbbb\n", b"ccccccc\n"].iter().enumerate() {
            log.write(*text, Duration::from_secs(second as u64)).unwrap();
            assert_eq!(texts(&path).as_bytes(), *text);
        }
        fs::remove_dir_all(dir).unwrap();
    }
}

//! The log file: one thread appends lines, starts a new file when the current file is full, and removes old files.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};

/// Capacity of the queue of lines. While it is full, requests wait.
const QUEUE_CAPACITY: usize = 1024;
/// Maximum KiB of the lines in the queue. A line may have the whole body of a request and of its response.
const QUEUE_KIB: usize = 16 << 10;
/// Maximum KiB of shortened lines that wait for the queue.
const SHORTENED_KIB: usize = 16 << 10;
/// Time between two messages about a log that cannot be written.
const MESSAGE_INTERVAL: Duration = Duration::from_secs(60);

/// The file of the log, and the limits on old files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogOptions {
    /// The file; `-` is the standard output.
    pub path: PathBuf,
    /// Bytes after which a new file is started. The full file gets the time in its name.
    pub max_bytes: u64,
    /// Maximum number of old files; 0 keeps all.
    pub max_backups: usize,
    /// Maximum age of old files; 0 keeps all.
    pub max_age: Duration,
}

/// The log. Its thread ends when the last clone is dropped and all lines are written.
#[derive(Clone, Debug)]
pub struct Log {
    lines: mpsc::Sender<Message>,
    /// Permits for the memory of lines, one for each KiB.
    memory: Arc<Semaphore>,
    /// Permits for the memory of shortened lines, one for each KiB.
    shortened: Arc<Semaphore>,
    /// Number of lines that were not written.
    lost: Arc<AtomicU64>,
}

/// Memory for one line.
#[derive(Debug)]
pub struct LineMemory(#[expect(dead_code, reason = "released when dropped")] OwnedSemaphorePermit);

/// A message to the thread.
#[derive(Debug)]
enum Message {
    /// A line with its memory. The thread reports whether it was written, if there is a sender.
    Line(String, Option<LineMemory>, Option<oneshot::Sender<bool>>),
    /// The thread drops the sender when all earlier messages are handled.
    Flush(oneshot::Sender<()>),
}

/// The open file.
struct Writer {
    options: LogOptions,
    file: Option<File>,
    bytes: u64,
    /// Whether the file's last line is incomplete, because the disk was full or the machine lost power.
    is_torn: bool,
    /// Number of lines that were not written.
    lost: Arc<AtomicU64>,
    last_report: Option<SystemTime>,
}

/// The results of an attempt to append a line.
struct Appended {
    /// Whether the line was written.
    written: io::Result<()>,
    /// Whether a new file was started, if the old file was full.
    rotated: io::Result<()>,
}

// === impl Log ===

impl Log {
    /// Opens the file and starts the thread.
    ///
    /// # Errors
    /// The file cannot be opened for writing, or the thread cannot be started.
    pub fn open(options: LogOptions) -> io::Result<Self> {
        let mut writer = Writer::new(options);
        if !writer.is_standard_output() {
            writer.open()?;
        }
        let (lines, mut queue) = mpsc::channel::<Message>(QUEUE_CAPACITY);
        let log = Self { lost: writer.lost.clone(), ..Self::of(lines) };
        std::thread::Builder::new().name("audit-log".to_owned()).spawn(move || {
            while let Some(message) = queue.blocking_recv() {
                match message {
                    Message::Line(line, _memory, done) => {
                        let is_written = writer.append(line.as_bytes());
                        // The receiver is gone if its request was cancelled or has waited for too long.
                        let _ = done.map(|done| done.send(is_written));
                    }
                    Message::Flush(done) => drop(done),
                }
            }
        })?;
        Ok(log)
    }

    /// Number of lines that could not be written.
    #[must_use]
    pub fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }

    fn of(lines: mpsc::Sender<Message>) -> Self {
        let [memory, shortened] = [QUEUE_KIB, SHORTENED_KIB].map(|kib| Arc::new(Semaphore::new(kib)));
        Self { lines, memory, shortened, lost: Arc::default() }
    }

    /// Queues a line. Waits while the queue is full, so that no event is lost.
    pub async fn write(&self, line: String) {
        // The semaphore is never closed.
        let memory = self.memory.clone().acquire_many_owned(kib(&line)).await.ok();
        self.write_reserved(line, memory.map(LineMemory)).await;
    }

    /// Queues a line as [`Log::write`] does. The receiver gets true if the line was written. False or an error means
    /// that it was not.
    pub async fn submit(&self, line: String) -> oneshot::Receiver<bool> {
        let (done, written) = oneshot::channel();
        // The semaphore is never closed, and the thread ends only after the last sender is dropped.
        let memory = self.memory.clone().acquire_many_owned(kib(&line)).await.ok().map(LineMemory);
        let _ = self.lines.send(Message::Line(line, memory, Some(done))).await;
        written
    }

    /// Reserves memory for a line. `None` if too little of the queue's memory is free.
    pub fn memory(&self, line: &str) -> Option<LineMemory> {
        self.memory.clone().try_acquire_many_owned(kib(line)).ok().map(LineMemory)
    }

    /// Reserves memory for a shortened line from the separate budget of such lines. `None` if too little of this budget
    /// is free.
    pub fn memory_of_shortened(&self, line: &str) -> Option<LineMemory> {
        self.shortened.clone().try_acquire_many_owned(kib(line)).ok().map(LineMemory)
    }

    /// Queues a line for which the caller has reserved memory.
    pub async fn write_reserved(&self, line: String, memory: Option<LineMemory>) {
        // The thread ends only after the last sender is dropped.
        let _ = self.lines.send(Message::Line(line, memory, None)).await;
    }

    /// Waits until all earlier lines are written. It must be called before the process ends, because the thread ends
    /// with the process.
    pub async fn flush(&self) {
        let (done, written) = oneshot::channel();
        if self.lines.send(Message::Flush(done)).await.is_ok() {
            // The thread drops the sender and sends no message. The receiver therefore always returns an error.
            let _ = written.await;
        }
    }
}

/// KiB of memory that a line takes. A line that is longer than the queue takes all of it.
fn kib(line: &str) -> u32 {
    u32::try_from(line.len().div_ceil(1024).clamp(1, QUEUE_KIB)).unwrap_or(u32::MAX)
}

// === impl Writer ===

impl Writer {
    fn new(options: LogOptions) -> Self {
        Self { options, file: None, bytes: 0, is_torn: false, lost: Arc::default(), last_report: None }
    }

    fn is_standard_output(&self) -> bool {
        self.options.path == Path::new("-")
    }

    fn open(&mut self) -> io::Result<()> {
        let mut options = OpenOptions::new();
        let file = options
            .create(true)
            .append(true)
            .mode(0o600)
            .custom_flags(nix::libc::O_NOFOLLOW | nix::libc::O_CLOEXEC)
            .open(&self.options.path)?;
        let metadata = file.metadata()?;
        check_owner(&metadata, nix::unistd::geteuid().as_raw())?;
        self.bytes = metadata.len();
        self.is_torn = !ends_with_a_line(&self.options.path);
        self.file = Some(file);
        Ok(())
    }

    /// Appends a line, and returns whether it was written. An error is logged at most once a minute, and the next line
    /// tries again.
    fn append(&mut self, line: &[u8]) -> bool {
        let Appended { written, rotated } = if self.is_standard_output() {
            Appended { written: io::stdout().write_all(line), rotated: Ok(()) }
        } else {
            self.append_to_file(line)
        };
        let is_written = written.is_ok();
        if !is_written {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
        let Err(error) = written.and(rotated) else { return is_written };
        let now = SystemTime::now();
        let is_quiet = |last: SystemTime| now.duration_since(last).is_ok_and(|past| past < MESSAGE_INTERVAL);
        if !self.last_report.is_some_and(is_quiet) {
            self.last_report = Some(now);
            tracing::error!(path = %self.options.path.display(), %error, "cannot write or rotate the audit log; events may be lost");
        }
        is_written
    }

    fn append_to_file(&mut self, line: &[u8]) -> Appended {
        let length = u64::try_from(line.len()).unwrap_or(u64::MAX);
        let is_full = self.bytes > 0 && self.bytes.saturating_add(length) > self.options.max_bytes;
        // If no new file can be started, the old file grows: no event is lost.
        let rotated = if is_full { self.rotate() } else { Ok(()) };
        let written = self.write(line);
        self.bytes = self.bytes.saturating_add(length);
        Appended { written, rotated }
    }

    fn write(&mut self, line: &[u8]) -> io::Result<()> {
        if self.file.is_none() {
            self.open()?;
        }
        let Some(file) = &mut self.file else { return Ok(()) };
        if self.is_torn {
            // Ends the line of the incomplete event, so that this event gets its own line.
            file.write_all(b"\n")?;
        }
        let written = file.write_all(line);
        self.is_torn = written.is_err() && !ends_with_a_line(&self.options.path);
        written
    }

    /// Gives the file a name with the time, and removes old files beyond the limits.
    fn rotate(&mut self) -> io::Result<()> {
        self.file = None;
        let time = jiff::Timestamp::now().strftime("%Y-%m-%dT%H-%M-%S.%6f").to_string();
        let FileName { stem, extension } = FileName::of(&self.options.path);
        fs::rename(
            &self.options.path,
            self.options.path.with_file_name(format!("{stem}-{time}{extension}")),
        )?;
        self.bytes = 0;
        self.remove_old()
    }

    fn remove_old(&self) -> io::Result<()> {
        let name_of_log = FileName::of(&self.options.path);
        let Some(directory) = self.options.path.parent() else { return Ok(()) };
        let directory = if directory.as_os_str().is_empty() { Path::new(".") } else { directory };
        let mut old = Vec::new();
        for entry in fs::read_dir(directory)? {
            let entry = entry?;
            let name = entry.file_name().into_string().unwrap_or_default();
            if name_of_log.is_of_backup(&name) {
                old.push((name, entry.path(), entry.metadata()?.modified()?));
            }
        }
        // Names end with the time: the newest file comes first.
        old.sort_by(|a, b| b.0.cmp(&a.0));
        let (most, age) = (self.options.max_backups, self.options.max_age);
        for (index, (_, path, modified)) in old.into_iter().enumerate() {
            let is_too_old = !age.is_zero() && modified.elapsed().is_ok_and(|past| past > age);
            if (most > 0 && index >= most) || is_too_old {
                fs::remove_file(path)?;
            }
        }
        Ok(())
    }
}

/// Whether a file is empty or its last line is complete. A file that cannot be read, or is not a regular file, counts
/// as complete.
fn ends_with_a_line(path: &Path) -> bool {
    let is_torn = || -> io::Result<bool> {
        let length = fs::symlink_metadata(path)?.len();
        if length == 0 {
            return Ok(false);
        }
        let mut last = [0];
        File::open(path)?.read_exact_at(&mut last, length - 1)?;
        Ok(last != *b"\n")
    };
    !is_torn().unwrap_or_default()
}

/// Refuses a file of another user, who could read or change the events.
fn check_owner(metadata: &fs::Metadata, own: u32) -> io::Result<()> {
    if metadata.is_file() && metadata.uid() != own {
        return Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            format!("the file belongs to user {}, not to user {own}", metadata.uid()),
        ));
    }
    Ok(())
}

/// The parts of a file's name.
struct FileName {
    /// The name without its extension.
    stem: String,
    /// The extension with its dot. Empty if there is none.
    extension: String,
}

// === impl FileName ===

impl FileName {
    fn of(path: &Path) -> Self {
        let text = |part: Option<&std::ffi::OsStr>| part.unwrap_or_default().to_string_lossy().into_owned();
        let extension = text(path.extension());
        let extension = if extension.is_empty() { extension } else { format!(".{extension}") };
        Self { stem: text(path.file_stem()), extension }
    }

    /// Whether `name` is the name of a rotated file: the stem, a time and the extension.
    fn is_of_backup(&self, name: &str) -> bool {
        let middle = name.strip_prefix(&self.stem).and_then(|rest| rest.strip_suffix(&self.extension));
        middle.and_then(|rest| rest.strip_prefix('-')).is_some_and(|time| {
            time.len() == "2026-11-23T22-30-49.123456".len()
                && time.bytes().all(|byte| byte.is_ascii_digit() || b"-T.".contains(&byte))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn writer(directory: &Path, max_bytes: u64, max_backups: usize) -> Writer {
        let path = directory.join("audit.log");
        let options = LogOptions { path, max_bytes, max_backups, max_age: Duration::ZERO };
        Writer::new(options)
    }

    fn names_in(directory: &Path) -> Vec<String> {
        let mut all: Vec<String> = fs::read_dir(directory)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        all.sort();
        all
    }

    #[test]
    fn a_full_file_is_renamed_and_the_oldest_are_removed() {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("audit-notes.log"), "").unwrap();
        let mut writer = writer(directory.path(), 10, 2);
        for line in ["aaaaaa\n", "bbbbbb\n", "cccccc\n", "dddddd\n"] {
            writer.append(line.as_bytes());
        }
        let names = names_in(directory.path());
        assert_eq!(names.len(), 4, "{names:?}");
        assert!(names.contains(&"audit-notes.log".to_owned()));
        assert_eq!(fs::read_to_string(directory.path().join("audit.log")).unwrap(), "dddddd\n");
        assert_eq!(fs::read_to_string(directory.path().join(&names[0])).unwrap(), "bbbbbb\n");
    }

    #[test]
    fn a_file_that_cannot_be_renamed_grows_and_keeps_every_line() {
        let directory = tempfile::tempdir().unwrap();
        let mut writer = writer(directory.path(), 10, 2);
        // The name is short enough for the file itself, but too long for a full file, whose name contains the time.
        writer.options.path = directory.path().join("a".repeat(250));
        for line in ["aaaaaa\n", "bbbbbb\n", "cccccc\n"] {
            writer.append(line.as_bytes());
        }
        assert!(writer.last_report.is_some());
        assert_eq!(fs::read_to_string(&writer.options.path).unwrap(), "aaaaaa\nbbbbbb\ncccccc\n");
    }

    #[test]
    fn an_incomplete_event_does_not_damage_the_next_one() {
        let directory = tempfile::tempdir().unwrap();
        let mut writer = writer(directory.path(), 1 << 20, 2);
        // The disk was full in the middle of the second event.
        fs::write(&writer.options.path, "{1}\n{2").unwrap();
        for line in ["{3}\n", "{4}\n"] {
            writer.append(line.as_bytes());
        }
        assert_eq!(fs::read_to_string(&writer.options.path).unwrap(), "{1}\n{2\n{3}\n{4}\n");
        assert_eq!(writer.lost.load(Ordering::Relaxed), 0);
    }

    #[tokio::test]
    async fn events_that_cannot_be_written_are_counted() {
        let path = PathBuf::from("/dev/full");
        let options = LogOptions { path, max_bytes: 1 << 20, max_backups: 0, max_age: Duration::ZERO };
        let log = Log::open(options).unwrap();
        for _ in 0..3 {
            log.write("{}\n".to_owned()).await;
        }
        log.flush().await;
        assert_eq!(log.lost(), 3);
    }

    #[tokio::test]
    async fn a_submitted_line_is_in_the_file_or_reported_as_lost() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("audit.log");
        for (path, is_written) in [(path.clone(), true), (PathBuf::from("/dev/full"), false)] {
            let options = LogOptions { path, max_bytes: 1 << 20, max_backups: 0, max_age: Duration::ZERO };
            let log = Log::open(options).unwrap();
            assert_eq!(log.submit("{}\n".to_owned()).await.await, Ok(is_written));
            assert_eq!(log.lost(), u64::from(!is_written));
        }
        assert_eq!(fs::read_to_string(&path).unwrap(), "{}\n");
    }

    #[test]
    fn a_link_is_not_followed_and_the_file_is_private() {
        use std::os::unix::fs::PermissionsExt as _;
        let directory = tempfile::tempdir().unwrap();
        let mut first = writer(directory.path(), 100, 0);
        first.append(b"x\n");
        let mode = fs::metadata(&first.options.path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        fs::remove_file(&first.options.path).unwrap();
        std::os::unix::fs::symlink("/dev/null", &first.options.path).unwrap();
        assert!(writer(directory.path(), 100, 0).open().is_err());
    }

    #[tokio::test]
    async fn lines_are_written_in_order_before_the_thread_ends() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("audit.log");
        let options =
            LogOptions { path: path.clone(), max_bytes: 1 << 20, max_backups: 0, max_age: Duration::ZERO };
        let log = Log::open(options).unwrap();
        let mut expected = String::new();
        for number in 0..QUEUE_CAPACITY * 2 {
            log.write(format!("{number}\n")).await;
            expected.push_str(&format!("{number}\n"));
        }
        log.flush().await;
        assert_eq!(fs::read_to_string(&path).unwrap(), expected);
    }

    #[tokio::test]
    async fn the_bytes_of_waiting_lines_are_limited() {
        let (lines, mut queue) = mpsc::channel::<Message>(QUEUE_CAPACITY);
        let log = Log::of(lines);
        let line = "x".repeat(6 << 20);
        for _ in 0..2 {
            log.write(line.clone()).await;
        }
        assert!(log.memory(&line).is_none() && log.memory_of_shortened("x").is_some());
        let third = log.write(line.clone());
        let waited = tokio::select! {
            biased;
            () = third => false,
            () = tokio::task::yield_now() => true,
        };
        assert!(waited && queue.len() == 2);
        drop(queue.recv().await);
        log.write(line).await;
        // A line that is longer than the whole queue is written alone.
        drop((queue.recv().await, queue.recv().await));
        log.write("x".repeat(40 << 20)).await;
        assert!(log.memory("x").is_none());
    }

    #[test]
    fn a_file_of_another_user_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let writer = writer(directory.path(), 100, 0);
        fs::write(&writer.options.path, "").unwrap();
        let file = File::open(&writer.options.path).unwrap();
        let own = nix::unistd::geteuid().as_raw();
        assert!(check_owner(&file.metadata().unwrap(), own).is_ok());
        let error = check_owner(&file.metadata().unwrap(), own + 1).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
    }
}

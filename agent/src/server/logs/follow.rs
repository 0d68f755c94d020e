//! Reading and following a log over rotations until the container ends.
//!
//! A follower wakes by a [watch](crate::server::log_watches) on the container's log directory, at the container's end,
//! and when its client disconnects. Nothing is polled. At the end of a file the next file is found by inode, so that a
//! slow client misses no rotation.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::mpsc;

use super::container::Ended;
use super::files;
use super::line::{LINE_MAX, Printer};
use super::options::Options;
use crate::bounded;
use crate::server::log_watches::{LogWatches, Watch};

/// Maximum bytes of one read.
const CHUNK: usize = 16 * 1024;
/// Time after which a follower whose client does not read closes a file that the runtime has removed. A removed file
/// occupies the disk while it is open, and no limit of the pod counts this space.
const UNREAD: Duration = Duration::from_secs(60);

/// The reason why a log cannot be read.
#[derive(Debug, thiserror::Error)]
pub(super) enum ReadError {
    #[error("cannot read {path}")]
    File {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot watch {path}")]
    Watch {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

/// Sends the requested lines until the log's end or until the client disconnects.
pub(super) async fn read(
    log: PathBuf,
    options: Options,
    mut ended: Ended,
    watches: Arc<LogWatches>,
    sender: mpsc::Sender<Bytes>,
) -> Result<(), ReadError> {
    let directory = log.parent().unwrap_or(Path::new("/")).to_owned();
    // The watch starts before the first read, so that a write in between wakes the follower.
    let mut watch = if ended.is_over() {
        None
    } else {
        Some(watches.on(&directory).map_err(|source| ReadError::Watch { path: directory, source })?)
    };
    // The start of a tail is searched in all files, which takes long. The search ends when the client disconnects.
    let client = sender.clone();
    let begun =
        coracle_threads::spawn_blocking(move || Reader::begin(log, &options, &|| client.is_closed())).await;
    let mut reader = begun.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()))?;
    loop {
        let is_last = ended.is_over();
        if reader.drain(&sender).await? == Drained::Done || is_last {
            return Ok(());
        }
        tokio::select! {
            // All arms are cancel-safe: they only wake, and the data stays in the files.
            () = ended.wait() => {}
            () = changed(watch.as_mut()) => {}
            () = sender.closed() => return Ok(()),
        }
    }
}

#[derive(PartialEq, Eq)]
enum Drained {
    /// Everything that is written has been sent.
    UpToDate,
    /// The limit is reached, or the client has disconnected.
    Done,
}

struct Reader {
    log: PathBuf,
    file: Option<Open>,
    printer: Printer,
    /// Start of a line that is not complete.
    rest: Vec<u8>,
    /// Whether that line is too long: it is skipped up to its end.
    skips: bool,
}

struct Open {
    file: File,
    inode: u64,
    position: u64,
}

// === impl Reader ===

impl Reader {
    /// Opens the file with the first requested line. The search calls `is_cancelled`, and ends if the result is true.
    fn begin(log: PathBuf, options: &Options, is_cancelled: &dyn Fn() -> bool) -> Result<Reader, ReadError> {
        let all = files::all(&log);
        let (index, offset) = match options.tail {
            Some(count) => files::tail(&all, count, is_cancelled)
                .map_err(|source| ReadError::File { path: log.clone(), source })?,
            None => (first_file_since(&all, options), 0),
        };
        let file = all.get(index).map(|path| Open::at(path, offset)).transpose()?.flatten();
        Ok(Reader { log, file, printer: Printer::new(options), rest: Vec::new(), skips: false })
    }

    async fn drain(&mut self, sender: &mpsc::Sender<Bytes>) -> Result<Drained, ReadError> {
        let (mut chunk, mut out) = (vec![0; CHUNK], Vec::new());
        loop {
            let read = self.read(&mut chunk)?;
            if read == 0 && !self.next_file()? {
                return Ok(Drained::UpToDate);
            }
            self.print(&chunk[..read], &mut out);
            if out.is_empty() {
                // These lines were not requested. Yield, so that other tasks of this thread can run.
                tokio::task::yield_now().await;
                if sender.is_closed() {
                    return Ok(Drained::Done);
                }
            }
            if !out.is_empty() && !self.send(std::mem::take(&mut out), sender).await || self.printer.is_full()
            {
                return Ok(Drained::Done);
            }
        }
    }

    /// Sends lines when the client has read earlier lines. Returns false if the client has disconnected.
    async fn send(&mut self, lines: Vec<u8>, sender: &mpsc::Sender<Bytes>) -> bool {
        loop {
            // Cancel-safe: nothing is sent before there is room.
            match tokio::time::timeout(UNREAD, sender.reserve()).await {
                Ok(Ok(room)) => {
                    room.send(lines.into());
                    return true;
                }
                Ok(Err(_disconnected)) => return false,
                Err(_elapsed) => self.close_removed(),
            }
        }
    }

    /// Closes a removed file. Reading continues with the oldest file that exists then.
    fn close_removed(&mut self) {
        if self.file.as_ref().is_some_and(Open::is_removed) {
            self.file = None;
            self.rest.clear();
            self.skips = false;
        }
    }

    fn read(&mut self, chunk: &mut [u8]) -> Result<usize, ReadError> {
        if self.file.is_none() {
            let oldest = files::all(&self.log).into_iter().find(|path| path.exists());
            self.file = oldest.map(|path| Open::at(&path, 0)).transpose()?.flatten();
        }
        let Some(open) = &mut self.file else { return Ok(0) };
        open.read(chunk).map_err(|source| ReadError::File { path: self.log.clone(), source })
    }

    /// Continues with the next file, if there is one. The current file is complete then: the runtime writes to the
    /// newest file only.
    fn next_file(&mut self) -> Result<bool, ReadError> {
        let Some(open) = &mut self.file else { return Ok(false) };
        let Some(next) = files::after(&self.log, open.inode) else { return Ok(false) };
        if open.file.metadata().is_ok_and(|found| found.len() > open.position) {
            return Ok(true);
        }
        let next = Open::at(&next, 0)?;
        let is_other = next.as_ref().is_some_and(|next| next.inode != open.inode);
        if is_other {
            self.file = next;
        }
        Ok(is_other)
    }

    fn print(&mut self, mut bytes: &[u8], out: &mut Vec<u8>) {
        while let Some(newline) = bytes.iter().position(|b| *b == b'\n') {
            let line = &bytes[..newline];
            if std::mem::take(&mut self.skips) {
                self.rest.clear();
            } else if self.rest.is_empty() {
                self.printer.print(line, out);
            } else {
                self.rest.extend_from_slice(line);
                self.printer.print(&self.rest, out);
                self.rest.clear();
            }
            bytes = &bytes[newline + 1..];
        }
        if self.rest.len() + bytes.len() > LINE_MAX {
            // The line is longer than any line of a runtime, so the rest of it is skipped, too.
            self.rest.clear();
            self.skips = true;
        } else if !self.skips {
            self.rest.extend_from_slice(bytes);
        }
    }
}

/// Index of the first file that can have lines since the requested time: the file was written at or after that time.
fn first_file_since(all: &[PathBuf], options: &Options) -> usize {
    let Some(since) = options.since else { return 0 };
    let is_old = |path: &&PathBuf| fs::metadata(path).is_ok_and(|found| found.mtime() < since.as_second());
    all.iter().take(all.len().saturating_sub(1)).take_while(is_old).count()
}

// === impl Open ===

impl Open {
    fn at(path: &Path, position: u64) -> Result<Option<Open>, ReadError> {
        let failed = |source| ReadError::File { path: path.to_owned(), source };
        let mut file = match bounded::open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            opened => opened.map_err(failed)?,
        };
        let inode = file.metadata().map_err(failed)?.ino();
        file.seek(SeekFrom::Start(position)).map_err(failed)?;
        Ok(Some(Open { file, inode, position }))
    }

    fn is_removed(&self) -> bool {
        self.file.metadata().is_ok_and(|found| found.nlink() == 0)
    }

    fn read(&mut self, chunk: &mut [u8]) -> io::Result<usize> {
        let mut read = self.file.read(chunk)?;
        // copytruncate rotation: the file was truncated instead of renamed.
        if read == 0 && self.file.metadata()?.len() < self.position {
            self.position = self.file.seek(SeekFrom::Start(0))?;
            read = self.file.read(chunk)?;
        }
        self.position += read as u64;
        Ok(read)
    }
}

async fn changed(watch: Option<&mut Watch>) {
    match watch {
        Some(watch) => watch.changed().await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests;

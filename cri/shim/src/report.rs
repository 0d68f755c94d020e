//! What a forked child tells the shim, over a pipe: one word a line.
//!
//! The pipe's write end is close-on-exec, so its end of file says that the program runs. Lines are
//! shorter than PIPE_BUF and thus whole, whichever of the children writes.

use std::io::{self, Write as _};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use coracle_proto::shim::error::Kind;

use crate::fault::Fault;
use crate::kernel;

const LONGEST_LINE: usize = 3_000;
/// Causes kept for one failure.
const MOST_CAUSES: usize = 4;

/// One line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Word {
    /// The cgroup that the container lives in.
    Cgroup(String),
    /// Its processes are in a pid namespace with others'.
    SharesPids,
    /// The process that was made, as the host sees it.
    Pid(i32),
    /// It waits for the start.
    Ready,
    /// The library made it, and it waits at the library's socket.
    ByLibrary,
    /// An error that the container library logged: the cause of a failure that may follow.
    Cause(String),
    /// It failed.
    Failed(Kind, String),
}

/// The child's side. Copies of the descriptor number are good in all further children.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Speaker {
    fd: RawFd,
}

/// The shim's side.
#[derive(Debug)]
pub(crate) struct Report {
    pipe: OwnedFd,
    rest: Vec<u8>,
    causes: Vec<String>,
}

/// What one look at the pipe brought.
pub(crate) struct Heard {
    pub(crate) words: Vec<Word>,
    pub(crate) ended: bool,
}

// === impl Word ===

impl Word {
    fn encode(&self) -> Vec<u8> {
        let line = match self {
            Self::Cgroup(path) => format!("G{path}"),
            Self::SharesPids => "S".to_owned(),
            Self::Pid(pid) => format!("P{pid}"),
            Self::Ready => "R".to_owned(),
            Self::ByLibrary => "L".to_owned(),
            Self::Cause(text) => format!("E{text}"),
            Self::Failed(kind, text) => format!("F{} {text}", i32::from(*kind)),
        };
        let mut line: Vec<u8> = line.bytes().map(|byte| if byte == b'\n' { b' ' } else { byte }).collect();
        line.truncate(LONGEST_LINE);
        line.push(b'\n');
        line
    }

    fn decode(line: &[u8]) -> Option<Self> {
        let line = String::from_utf8_lossy(line);
        let (tag, rest) = line.split_at_checked(1)?;
        match tag {
            "G" => Some(Self::Cgroup(rest.to_owned())),
            "S" => Some(Self::SharesPids),
            "P" => rest.parse().ok().map(Self::Pid),
            "R" => Some(Self::Ready),
            "L" => Some(Self::ByLibrary),
            "E" => Some(Self::Cause(rest.to_owned())),
            "F" => {
                let (kind, text) = rest.split_once(' ')?;
                let kind = kind.parse::<i32>().ok().and_then(|kind| Kind::try_from(kind).ok())?;
                Some(Self::Failed(kind, text.to_owned()))
            }
            _ => None,
        }
    }
}

// === impl Speaker ===

impl Speaker {
    pub(crate) fn new(pipe: &OwnedFd) -> Self {
        Self { fd: pipe.as_raw_fd() }
    }

    pub(crate) fn fd(self) -> RawFd {
        self.fd
    }

    /// Nobody is left to be told when the pipe is broken.
    pub(crate) fn say(self, word: &Word) {
        let _ = nix::unistd::write(kernel::borrow(self.fd), &word.encode());
    }
}

// === impl Report ===

impl Report {
    /// A pipe for one child: the shim's side, and the end to give away.
    pub(crate) fn pipe() -> io::Result<(Self, OwnedFd)> {
        let (read, write) = nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC)?;
        set_nonblocking(&read)?;
        Ok((Self { pipe: read, rest: Vec::new(), causes: Vec::new() }, write))
    }

    pub(crate) fn hear(&mut self) -> Heard {
        let mut ended = false;
        let mut buffer = [0_u8; 4096];
        loop {
            match nix::unistd::read(&self.pipe, &mut buffer) {
                Ok(0) => ended = true,
                Ok(count) => {
                    self.rest.extend_from_slice(&buffer[..count]);
                    continue;
                }
                Err(nix::Error::EINTR) => continue,
                Err(nix::Error::EAGAIN) => {}
                Err(_) => ended = true,
            }
            break;
        }
        let mut words = Vec::new();
        while let Some(end) = self.rest.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.rest.drain(..=end).collect();
            match Word::decode(&line[..end]) {
                Some(Word::Cause(cause)) if self.causes.len() < MOST_CAUSES => self.causes.push(cause),
                Some(Word::Cause(_)) | None => {}
                Some(word) => words.push(word),
            }
        }
        Heard { words, ended }
    }

    /// A failure with the causes that were heard before.
    pub(crate) fn fault(&mut self, kind: Kind, message: &str) -> Fault {
        let causes = std::mem::take(&mut self.causes);
        // The library logs the innermost first, and some on every level.
        let mut text = message.to_owned();
        for cause in causes.iter().rev().filter(|cause| !message.contains(cause.as_str())) {
            text.push_str(": ");
            text.push_str(cause);
        }
        Fault::new(kind, text)
    }
}

impl AsFd for Report {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pipe.as_fd()
    }
}

pub(crate) fn set_nonblocking(fd: impl AsFd) -> io::Result<()> {
    use nix::fcntl::{FcntlArg, OFlag, fcntl};
    let flags = OFlag::from_bits_truncate(fcntl(&fd, FcntlArg::F_GETFL)?);
    fcntl(&fd, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
    Ok(())
}

/// A note in the shim's own log file, which its standard error is. Bounded over the shim's life.
pub(crate) fn note(text: &str) {
    use std::sync::atomic::{AtomicUsize, Ordering};
    const MOST: usize = 256 * 1024;
    static WRITTEN: AtomicUsize = AtomicUsize::new(0);
    if WRITTEN.fetch_add(text.len() + 1, Ordering::Relaxed) < MOST {
        let _ = writeln!(io::stderr(), "{text}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_word_survives_the_pipe() {
        let (mut report, write) = Report::pipe().unwrap();
        let words = [
            Word::Cgroup("/a/b".into()),
            Word::SharesPids,
            Word::Pid(42),
            Word::Ready,
            Word::ByLibrary,
            Word::Failed(Kind::CommandNotFound, "no such\nfile".into()),
        ];
        words.iter().for_each(|word| Speaker::new(&write).say(word));
        let heard = report.hear();
        assert!(!heard.ended);
        assert_eq!(heard.words[..5], words[..5]);
        assert_eq!(heard.words[5], Word::Failed(Kind::CommandNotFound, "no such file".into()));
        drop(write);
        assert!(report.hear().ended);
    }

    #[test]
    fn a_fault_tells_its_causes_outermost_first() {
        let (mut report, write) = Report::pipe().unwrap();
        let speaker = Speaker::new(&write);
        ["inner", "middle"].into_iter().for_each(|cause| speaker.say(&Word::Cause(cause.into())));
        report.hear();
        assert_eq!(report.fault(Kind::Internal, "outer").message, "outer: middle: inner");
    }
}

//! What a forked child reports to the shim, over a private socket: one word a message.
//!
//! A socket and not a pipe, because a pipe can be opened a second time through `/proc/PID/fd` and a socket cannot
//! (`sock_no_open` in net/socket.c). The kernel names the sender of every message (`SCM_CREDENTIALS`, unix(7)): the shim
//! takes a word only from a process that owes it, see [`Owing`]. The child's end is close-on-exec, so its end of file
//! says that the program runs.

mod owing;

use std::io::{self, IoSliceMut, Write as _};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use coracle_proto::shim::error::Kind;
use nix::sys::socket::{
    AddressFamily, ControlMessageOwned, MsgFlags, SockFlag, SockType, UnixCredentials, recvmsg, setsockopt,
    socketpair, sockopt,
};

use crate::fault::Fault;
use crate::kernel;

use owing::Owing;

/// Longest message in bytes; a longer text is cut.
const LONGEST_WORD: usize = 3_000;
/// Causes kept for one failure.
const MOST_CAUSES: usize = 4;

/// One message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Word {
    /// The cgroup that the container lives in.
    Cgroup(String),
    /// Its processes are in a pid namespace with others'.
    SharesPids,
    /// The process that goes on in the sender's place, as the host sees it.
    Successor(i32),
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
    socket: OwnedFd,
    owing: Owing,
    causes: Vec<String>,
}

/// What one look at the socket brought.
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
            Self::Successor(pid) => format!("N{pid}"),
            Self::Pid(pid) => format!("P{pid}"),
            Self::Ready => "R".to_owned(),
            Self::ByLibrary => "L".to_owned(),
            Self::Cause(text) => format!("E{text}"),
            Self::Failed(kind, text) => format!("F{} {text}", i32::from(*kind)),
        };
        let mut line: Vec<u8> = line.bytes().map(|byte| if byte == b'\n' { b' ' } else { byte }).collect();
        line.truncate(LONGEST_WORD);
        line
    }

    fn decode(line: &[u8]) -> Option<Self> {
        let line = String::from_utf8_lossy(line);
        let (tag, rest) = line.split_at_checked(1)?;
        match tag {
            "G" => Some(Self::Cgroup(rest.to_owned())),
            "S" => Some(Self::SharesPids),
            "N" => rest.parse().ok().map(Self::Successor),
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
    pub(crate) fn new(socket: &OwnedFd) -> Self {
        Self { fd: socket.as_raw_fd() }
    }

    pub(crate) fn fd(self) -> RawFd {
        self.fd
    }

    /// Sends a word. A socket without a shim is no error: its child ends as well. By write(2), which a container's
    /// seccomp profile allows.
    pub(crate) fn say(self, word: &Word) {
        let _ = nix::unistd::write(kernel::borrow(self.fd), &word.encode());
    }
}

// === impl Report ===

impl Report {
    /// A socket for one child: the shim's side, and the end to give away. Words count after [`Self::expect`].
    pub(crate) fn pair() -> io::Result<(Self, OwnedFd)> {
        let (ours, theirs) =
            socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)?;
        set_nonblocking(&ours)?;
        setsockopt(&ours, sockopt::PassCred, &true)?;
        Ok((Self { socket: ours, owing: Owing::default(), causes: Vec::new() }, theirs))
    }

    /// Names the child that owes the report.
    pub(crate) fn expect(&mut self, pid: i32) {
        self.owing.expect(pid);
    }

    pub(crate) fn hear(&mut self) -> Heard {
        let mut heard = Vec::new();
        let ended = loop {
            match self.receive() {
                Ok(Some((sender, word))) => heard.append(&mut self.owing.admit(sender, word)),
                Ok(None) => break true,
                Err(nix::Error::EINTR) => {}
                Err(nix::Error::EAGAIN) => break false,
                Err(_) => break true,
            }
        };
        let mut words = Vec::new();
        for word in heard {
            match word {
                Word::Cause(cause) if self.causes.len() < MOST_CAUSES => self.causes.push(cause),
                Word::Cause(_) => {}
                word => words.push(word),
            }
        }
        Heard { words, ended }
    }

    /// The next message and the pid of its sender; none at the end.
    fn receive(&self) -> nix::Result<Option<(i32, Word)>> {
        loop {
            let mut text = [0_u8; LONGEST_WORD];
            let mut slices = [IoSliceMut::new(&mut text)];
            let mut control = nix::cmsg_space!(UnixCredentials);
            let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_CMSG_CLOEXEC;
            let message = recvmsg::<()>(self.socket.as_raw_fd(), &mut slices, Some(&mut control), flags)?;
            let length = message.bytes;
            let credentials = message.cmsgs()?.find_map(|part| match part {
                ControlMessageOwned::ScmCredentials(sender) => Some(sender.pid()),
                _ => None,
            });
            if length == 0 {
                return Ok(None);
            }
            // A message that is no word is passed over.
            if let (Some(sender), Some(word)) = (credentials, Word::decode(&text[..length])) {
                return Ok(Some((sender, word)));
            }
        }
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
        self.socket.as_fd()
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

    fn own() -> i32 {
        nix::unistd::getpid().as_raw()
    }

    fn pair() -> (Report, OwnedFd) {
        let (mut report, speaking) = Report::pair().unwrap();
        report.expect(own());
        (report, speaking)
    }

    #[test]
    fn every_word_survives_the_socket() {
        let (mut report, speaking) = pair();
        let words = [
            Word::Cgroup("/a/b".into()),
            Word::SharesPids,
            Word::Pid(42),
            Word::Ready,
            Word::ByLibrary,
            Word::Failed(Kind::CommandNotFound, "no such\nfile".into()),
        ];
        words.iter().for_each(|word| Speaker::new(&speaking).say(word));
        let heard = report.hear();
        assert!(!heard.ended);
        assert_eq!(heard.words[..5], words[..5]);
        assert_eq!(heard.words[5], Word::Failed(Kind::CommandNotFound, "no such file".into()));
        drop(speaking);
        assert!(report.hear().ended);
    }

    #[test]
    fn a_fault_tells_its_causes_outermost_first() {
        let (mut report, speaking) = pair();
        let speaker = Speaker::new(&speaking);
        ["inner", "middle"].into_iter().for_each(|cause| speaker.say(&Word::Cause(cause.into())));
        report.hear();
        assert_eq!(report.fault(Kind::Internal, "outer").message, "outer: middle: inner");
    }

    /// Another process that has the socket, as a container's would if it were inherited.
    #[test]
    fn a_word_of_another_process_is_not_heard() {
        let (mut report, speaking) = pair();
        let mut other = std::process::Command::new("sh");
        other.args(["-c", "printf P1 >&0; printf 'F5 forged' >&0"]).stdin(speaking.try_clone().unwrap());
        assert!(other.status().unwrap().success());
        assert_eq!(report.hear().words, []);
        Speaker::new(&speaking).say(&Word::Pid(7));
        Speaker::new(&speaking).say(&Word::Pid(8));
        assert_eq!(report.hear().words, [Word::Pid(7)], "one report, of the process that owes it");
    }

    #[test]
    fn the_socket_cannot_be_opened_again() {
        let (_report, speaking) = pair();
        let again =
            std::fs::File::options().write(true).open(format!("/proc/self/fd/{}", speaking.as_raw_fd()));
        assert_eq!(again.unwrap_err().raw_os_error(), Some(libc::ENXIO));
    }
}

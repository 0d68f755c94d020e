//! The report of a forked child to the shim: one message per packet over a private socket.
//!
//! A socket is used, because a pipe can be opened a second time through `/proc/PID/fd`. A socket cannot (`sock_no_open`
//! in net/socket.c). The kernel adds the sender of every message (`SCM_CREDENTIALS`, unix(7)). The shim accepts a
//! message, except a cause of an error, only from a process that may send it, see [`Senders`]. The child's end is
//! close-on-exec. So end of file means that the program runs, or that the child has ended.

mod senders;

use std::io::{self, IoSliceMut, Write as _};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use coracle_proto::shim::error::Kind;
use nix::sys::socket::{
    AddressFamily, ControlMessageOwned, MsgFlags, SockFlag, SockType, UnixCredentials, recvmsg, setsockopt,
    socketpair, sockopt,
};

use crate::call_error::CallError;
use crate::kernel;

use senders::Senders;

/// Maximum bytes of a message; a longer text is cut.
const MAX_MESSAGE: usize = 3_000;
/// Maximum number of causes that are kept for one failure.
const MAX_CAUSES: usize = 4;

/// A message of the child to the shim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Message {
    /// The container's cgroup path.
    Cgroup(String),
    /// The container shares a pid namespace.
    SharesPids,
    /// Pid of the process that continues in the sender's place, in the host's pid namespace.
    Successor(i32),
    /// Pid of the first process, in the host's pid namespace.
    Pid(i32),
    /// The first process waits for the start signal.
    Ready,
    /// The container library has created the container, whose first process waits at the library's socket.
    ByLibrary,
    /// An error that the container library logged: the cause of a failure that may follow.
    Cause(String),
    /// The operation failed.
    Failed(Kind, String),
}

/// The child's end. The descriptor number is also valid in further forks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reporter {
    fd: RawFd,
}

/// The shim's end.
#[derive(Debug)]
pub(crate) struct Report {
    socket: OwnedFd,
    senders: Senders,
    causes: Vec<String>,
}

/// The messages that were queued, and whether the report has ended.
pub(crate) struct ReportUpdate {
    pub(crate) messages: Vec<Message>,
    pub(crate) ended: bool,
}

// === impl Message ===

impl Message {
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
        line.truncate(MAX_MESSAGE);
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

// === impl Reporter ===

impl Reporter {
    pub(crate) fn new(socket: &OwnedFd) -> Self {
        Self { fd: socket.as_raw_fd() }
    }

    pub(crate) fn fd(self) -> RawFd {
        self.fd
    }

    /// Sends a message. A failure is ignored: it means that the shim is dead, and the child ends with the shim. Uses
    /// write(2), which a container's seccomp profile allows.
    pub(crate) fn send(self, message: &Message) {
        let _ = nix::unistd::write(kernel::borrow(self.fd), &message.encode());
    }
}

// === impl Report ===

impl Report {
    /// A socket for one child: the shim's end and the child's. Messages are accepted after [`Self::expect`].
    pub(crate) fn pair() -> io::Result<(Self, OwnedFd)> {
        let (ours, theirs) =
            socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)?;
        set_nonblocking(&ours)?;
        setsockopt(&ours, sockopt::PassCred, &true)?;
        Ok((Self { socket: ours, senders: Senders::default(), causes: Vec::new() }, theirs))
    }

    /// Sets the child that sends the report.
    pub(crate) fn expect(&mut self, pid: i32) {
        self.senders.expect(pid);
    }

    /// Reads all queued messages. Causes are kept for [`Self::error`].
    pub(crate) fn receive_all(&mut self) -> ReportUpdate {
        let mut received = Vec::new();
        let ended = loop {
            match self.receive() {
                Ok(Some((sender, message))) => received.append(&mut self.senders.admit(sender, message)),
                Ok(None) => break true,
                Err(nix::Error::EINTR) => {}
                Err(nix::Error::EAGAIN) => break false,
                Err(_) => break true,
            }
        };
        let mut messages = Vec::new();
        for message in received {
            match message {
                Message::Cause(cause) if self.causes.len() < MAX_CAUSES => self.causes.push(cause),
                Message::Cause(_) => {}
                message => messages.push(message),
            }
        }
        ReportUpdate { messages, ended }
    }

    /// The next message and the pid of its sender; `None` at the end.
    fn receive(&self) -> nix::Result<Option<(i32, Message)>> {
        loop {
            let mut text = [0_u8; MAX_MESSAGE];
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
            // Ignore packets that are not a valid message.
            if let (Some(sender), Some(message)) = (credentials, Message::decode(&text[..length])) {
                return Ok(Some((sender, message)));
            }
        }
    }

    /// An error with the causes that were received before, outermost first.
    pub(crate) fn error(&mut self, kind: Kind, message: &str) -> CallError {
        let causes = std::mem::take(&mut self.causes);
        // The library logs the innermost cause first, and repeats some causes on every level.
        let mut text = message.to_owned();
        for cause in causes.iter().rev().filter(|cause| !message.contains(cause.as_str())) {
            text.push_str(": ");
            text.push_str(cause);
        }
        CallError::new(kind, text)
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

/// Writes a line to the shim's own log file, which is its standard error. The total is limited to 256 KiB.
pub(crate) fn note(text: &str) {
    use std::sync::atomic::{AtomicUsize, Ordering};
    const MAX_BYTES: usize = 256 * 1024;
    static WRITTEN: AtomicUsize = AtomicUsize::new(0);
    if WRITTEN.fetch_add(text.len() + 1, Ordering::Relaxed) < MAX_BYTES {
        let _ = writeln!(io::stderr(), "{text}");
    }
}

/// Fuzz target for messages from arbitrary processes. A message from a process that is not permitted to send it is
/// ignored, and no message counts twice. The input is a list of messages, each a byte for the sender, a byte for the
/// length, and the text.
#[cfg(any(test, feature = "fuzzing"))]
pub fn fuzz(data: &[u8]) {
    const CHILD: i32 = 1;
    let (mut senders, mut permitted, mut counted) = (Senders::default(), vec![CHILD], Vec::new());
    senders.expect(CHILD);
    let mut rest = data;
    while let [sender, length, tail @ ..] = rest {
        let (text, tail) = tail.split_at(tail.len().min(usize::from(*length)));
        rest = tail;
        let Some(message) = Message::decode(text) else { continue };
        let line = message.encode();
        assert_eq!(Message::decode(&line).map(|message| message.encode()), Some(line));
        let (sender, is_cause) = (i32::from(*sender), matches!(message, Message::Cause(_)));
        let admitted = senders.admit(sender, message);
        assert!(is_cause || permitted.contains(&sender) || admitted.is_empty(), "{sender} may not send");
        for message in admitted.into_iter().filter(|message| !matches!(message, Message::Cause(_))) {
            let kind = std::mem::discriminant(&message);
            assert!(!counted.contains(&kind), "{message:?} counted twice");
            counted.push(kind);
            if let Message::Successor(pid) | Message::Pid(pid) = message {
                permitted.push(pid);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_corpus_is_replayed() {
        coracle_testing::replay_corpus("report", fuzz);
    }

    fn own() -> i32 {
        nix::unistd::getpid().as_raw()
    }

    fn pair() -> (Report, OwnedFd) {
        let (mut report, child_end) = Report::pair().unwrap();
        report.expect(own());
        (report, child_end)
    }

    #[test]
    fn messages_are_received_in_order_with_newlines_replaced() {
        let (mut report, child_end) = pair();
        let messages = [
            Message::Cgroup("/a/b".into()),
            Message::SharesPids,
            Message::Pid(42),
            Message::Ready,
            Message::ByLibrary,
            Message::Failed(Kind::CommandNotFound, "no such\nfile".into()),
        ];
        messages.iter().for_each(|message| Reporter::new(&child_end).send(message));
        let received = report.receive_all();
        assert!(!received.ended);
        assert_eq!(received.messages[..5], messages[..5]);
        assert_eq!(received.messages[5], Message::Failed(Kind::CommandNotFound, "no such file".into()));
        drop(child_end);
        assert!(report.receive_all().ended);
    }

    #[test]
    fn an_error_lists_its_causes_outermost_first() {
        let (mut report, child_end) = pair();
        let reporter = Reporter::new(&child_end);
        ["inner", "middle"].into_iter().for_each(|cause| reporter.send(&Message::Cause(cause.into())));
        report.receive_all();
        assert_eq!(report.error(Kind::Internal, "outer").message, "outer: middle: inner");
    }

    #[test]
    fn few_causes_are_kept() {
        let (mut report, child_end) = pair();
        let reporter = Reporter::new(&child_end);
        (1..=6).for_each(|number| reporter.send(&Message::Cause(format!("cause {number}"))));
        report.receive_all();
        let error = report.error(Kind::Internal, "outer");
        assert_eq!(error.message, "outer: cause 4: cause 3: cause 2: cause 1");
    }

    /// The other process has the socket, like a container's process that inherited the descriptor.
    #[test]
    fn a_message_of_another_process_is_ignored() {
        let (mut report, child_end) = pair();
        let mut other = std::process::Command::new("sh");
        other.args(["-c", "printf P1 >&0; printf 'F5 forged' >&0"]).stdin(child_end.try_clone().unwrap());
        assert!(other.status().unwrap().success());
        assert_eq!(report.receive_all().messages, []);
        Reporter::new(&child_end).send(&Message::Pid(7));
        Reporter::new(&child_end).send(&Message::Pid(8));
        assert_eq!(report.receive_all().messages, [Message::Pid(7)], "one report, of the permitted process");
    }

    #[test]
    fn the_socket_cannot_be_opened_again() {
        let (_report, child_end) = pair();
        let again =
            std::fs::File::options().write(true).open(format!("/proc/self/fd/{}", child_end.as_raw_fd()));
        assert_eq!(again.unwrap_err().raw_os_error(), Some(libc::ENXIO));
    }
}

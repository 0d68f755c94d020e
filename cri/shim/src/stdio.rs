//! A container's standard streams: pipes or a terminal on the container's side, the log and attached clients on the
//! other side.
//!
//! The shim does not copy input of a pipe: an attached client gets the write end itself. With stdin-once the
//! shim passes on its only copy, so that the client's close ends the input. Input of a terminal goes through
//! the shim, because the master serves both directions.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use coracle_proto::shim::{Attach, Attached, CreateContainer};
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, send, socketpair};
use nix::unistd::{pipe2, read, write};

use crate::call_error::CallError;
use crate::log::{self, Limits, Lines, Log, Output};
use crate::null;
use crate::output_rate::OutputRate;
use crate::report::{note, set_nonblocking};

/// Maximum reads from one output per event, so that an output with much data does not delay the other outputs.
const MAX_READS: usize = 4;
/// Capacity in bytes of the pipe to an attached client, unless the client requests less. A client that falls behind by
/// more is disconnected. For a client of a terminal, the send buffer of its socket has this role.
const ATTACH_BUFFER: i32 = 1 << 20;

/// The shim's ends of a container's streams, and its attached clients.
#[derive(Debug, Default)]
pub(crate) struct Stdio {
    log: Option<Log>,
    /// The speed of both outputs together.
    rate: OutputRate,
    stdout: Option<Stream>,
    stderr: Option<Stream>,
    /// A terminal's master; `stdout` then reads a copy of it.
    master: Option<OwnedFd>,
    stdin: Option<OwnedFd>,
    stdin_once: bool,
    readers: Vec<Reader>,
    terminals: Vec<Terminal>,
}

#[derive(Debug)]
struct Stream {
    fd: OwnedFd,
    lines: Lines,
}

/// The pipe to a client that is attached to an output.
#[derive(Debug)]
struct Reader {
    output: Output,
    pipe: OwnedFd,
}

/// The socket to a client that is attached to a terminal.
#[derive(Debug)]
pub(crate) struct Terminal {
    pub(crate) socket: OwnedFd,
    stdin: bool,
    stdout: bool,
    /// Input that the terminal has not accepted yet.
    queued_input: Vec<u8>,
}

/// The container's ends, which the creator passes on.
#[derive(Debug, Default)]
pub(crate) struct Ends {
    pub(crate) stdin: Option<OwnedFd>,
    pub(crate) stdout: Option<OwnedFd>,
    pub(crate) stderr: Option<OwnedFd>,
}

// === impl Stdio ===

impl Stdio {
    /// Makes the streams of a new container. A terminal is set later by [`Self::set_master`].
    pub(crate) fn new(create: &CreateContainer) -> io::Result<(Self, Ends)> {
        let mut stdio = Self { stdin_once: create.stdin_once, ..Self::default() };
        if !create.log_path.is_empty() {
            let limits = Limits { size: create.log_max_size, files: create.log_max_files };
            stdio.log = Some(Log::open(create.log_path.as_ref(), limits)?);
        }
        if create.terminal {
            return Ok((stdio, Ends::default()));
        }
        let stdin = if create.stdin {
            let (read, write) = pipe2(OFlag::O_CLOEXEC)?;
            stdio.stdin = Some(write);
            read
        } else {
            null::open()?
        };
        let (stdout, stdout_end) = Stream::new(Output::Stdout)?;
        let (stderr, stderr_end) = Stream::new(Output::Stderr)?;
        (stdio.stdout, stdio.stderr) = (Some(stdout), Some(stderr));
        Ok((stdio, Ends { stdin: Some(stdin), stdout: Some(stdout_end), stderr: Some(stderr_end) }))
    }

    /// Sets the terminal's master, which was made inside the container.
    pub(crate) fn set_master(&mut self, master: OwnedFd) -> io::Result<()> {
        set_nonblocking(&master)?;
        self.stdout = Some(Stream { fd: master.try_clone()?, lines: Lines::new(Output::Stdout) });
        self.master = Some(master);
        Ok(())
    }

    pub(crate) fn master(&self) -> Option<&OwnedFd> {
        self.master.as_ref()
    }

    pub(crate) fn output(&self, output: Output) -> Option<BorrowedFd<'_>> {
        self.stream(output).as_ref().map(|stream| stream.fd.as_fd())
    }

    /// The time at which the outputs may be read again, if the container writes too fast.
    pub(crate) fn paused_until(&self, now: Instant) -> Option<Instant> {
        self.rate.paused_until(now)
    }

    pub(crate) fn terminals(&self) -> &[Terminal] {
        &self.terminals
    }

    /// Number of descriptors for attached clients.
    pub(crate) fn attached_descriptors(&self) -> usize {
        self.readers.len() + self.terminals.len()
    }

    /// Whether a terminal has input that was not written yet.
    pub(crate) fn has_queued_input(&self) -> bool {
        self.terminals.iter().any(|terminal| !terminal.queued_input.is_empty())
    }

    /// Whether all output of the container has been read.
    pub(crate) fn is_drained(&self) -> bool {
        self.stdout.is_none() && self.stderr.is_none()
    }

    /// Reads available output into the log and sends it to all attached clients.
    pub(crate) fn forward_output(&mut self, output: Output, buffer: &mut [u8]) {
        let now = log::now();
        let (mut lines, mut bytes) = (Vec::new(), 0);
        for _ in 0..MAX_READS {
            let Some(stream) = self.stream_mut(output).as_mut() else { break };
            match read(&stream.fd, buffer) {
                Ok(0) => self.end(output, now, &mut lines),
                Ok(count) => {
                    bytes += count;
                    stream.lines.push(&buffer[..count], now, &mut lines);
                    self.fan_out(output, &buffer[..count]);
                    if count < buffer.len() {
                        break;
                    }
                }
                Err(nix::Error::EINTR) => {}
                Err(nix::Error::EAGAIN) => break,
                // A terminal returns EIO when no process has it open any more.
                Err(_) => self.end(output, now, &mut lines),
            }
        }
        // The log adds about 45 bytes to each line. Lines may be empty.
        self.rate.count(bytes.max(lines.len()), Instant::now());
        self.write_log(&lines, now);
    }

    /// Stops reading, even if other processes still hold the container's ends.
    pub(crate) fn finish(&mut self) {
        let now = log::now();
        let mut lines = Vec::new();
        for output in [Output::Stdout, Output::Stderr] {
            self.end(output, now, &mut lines);
        }
        self.write_log(&lines, now);
        self.master = None;
        self.stdin = None;
        self.terminals.clear();
    }

    /// Ends an output and disconnects its clients. A terminal has ended when no process has it open. Its queued input
    /// is dropped: the terminal takes no input any more, and poll(2) would return at once without end.
    fn end(&mut self, output: Output, now: Duration, lines: &mut Vec<u8>) {
        if let Some(mut stream) = self.stream_mut(output).take() {
            stream.lines.finish(now, lines);
        }
        self.readers.retain(|reader| reader.output != output);
        if output == Output::Stdout {
            self.terminals.clear();
        }
    }

    fn write_log(&mut self, lines: &[u8], now: Duration) {
        let Some(log) = self.log.as_mut().filter(|_| !lines.is_empty()) else { return };
        if let Err(error) = log.write(lines, now) {
            note(&format!("lost {} bytes of a container's log: {error}", lines.len()));
        }
    }

    /// Sends a copy to each attached client. A client whose buffer is full is disconnected, so that the
    /// container never waits for it.
    fn fan_out(&mut self, output: Output, bytes: &[u8]) {
        self.readers.retain(|reader| {
            reader.output != output || write(&reader.pipe, bytes).is_ok_and(|count| count == bytes.len())
        });
        if output == Output::Stdout {
            self.terminals.retain(|terminal| {
                let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
                let sent = || send(terminal.socket.as_raw_fd(), bytes, flags);
                !terminal.stdout || sent().is_ok_and(|count| count == bytes.len())
            });
        }
    }

    /// Reads input from one attached terminal.
    pub(crate) fn read_terminal(&mut self, socket: i32, buffer: &mut [u8]) {
        let Some(at) = self.terminals.iter().position(|t| t.socket.as_raw_fd() == socket) else { return };
        match read(&self.terminals[at].socket, buffer) {
            Ok(count) if count > 0 => {
                if self.terminals[at].stdin {
                    self.terminals[at].queued_input.extend_from_slice(&buffer[..count]);
                    self.flush_input();
                }
            }
            Err(nix::Error::EAGAIN | nix::Error::EINTR) => {}
            _ => drop(self.terminals.remove(at)),
        }
    }

    /// Writes queued input to the terminal, as much as it accepts.
    pub(crate) fn flush_input(&mut self) {
        let Some(master) = self.master.as_ref() else { return };
        for terminal in &mut self.terminals {
            if let Ok(count) = write(master, &terminal.queued_input) {
                terminal.queued_input.drain(..count);
            }
            if terminal.queued_input.is_empty() {
                terminal.queued_input = Vec::new();
            }
        }
    }

    pub(crate) fn close_stdin(&mut self) {
        self.stdin = None;
    }

    pub(crate) fn reopen_log(&mut self) -> io::Result<()> {
        self.log.as_mut().map_or(Ok(()), Log::reopen)
    }

    pub(crate) fn attach(&mut self, attach: &Attach) -> Result<(Attached, Vec<OwnedFd>), CallError> {
        let result =
            if self.master.is_some() { self.attach_terminal(attach) } else { self.attach_pipes(attach) };
        result.map_err(|error| CallError::cannot("attach", &error))
    }

    fn attach_terminal(&mut self, attach: &Attach) -> io::Result<(Attached, Vec<OwnedFd>)> {
        if self.stdout.is_none() {
            // The terminal has ended, so the client gets no streams, as with pipes that have ended.
            return Ok((Attached::default(), Vec::new()));
        }
        let flags = SockFlag::SOCK_CLOEXEC;
        let (ours, theirs) = socketpair(AddressFamily::Unix, SockType::Stream, None, flags)?;
        set_nonblocking(&ours)?;
        let (stdin, stdout) = (attach.stdin, attach.stdout || attach.stderr);
        self.terminals.push(Terminal { socket: ours, stdin, stdout, queued_input: Vec::new() });
        Ok((Attached { terminal: true, ..Attached::default() }, vec![theirs]))
    }

    fn attach_pipes(&mut self, attach: &Attach) -> io::Result<(Attached, Vec<OwnedFd>)> {
        let mut attached = Attached::default();
        let mut fds = Vec::new();
        let capacity = match i32::try_from(attach.output_capacity) {
            Ok(wanted @ 1..ATTACH_BUFFER) => wanted,
            _ => ATTACH_BUFFER,
        };
        if attach.stdin {
            let stdin = match self.stdin.as_ref() {
                Some(stdin) if !self.stdin_once => Some(stdin.try_clone()?),
                _ => self.stdin.take(),
            };
            attached.has_stdin = stdin.is_some();
            fds.extend(stdin);
        }
        for (wanted, output) in [(attach.stdout, Output::Stdout), (attach.stderr, Output::Stderr)] {
            if !wanted || self.stream(output).is_none() {
                continue;
            }
            let (theirs, pipe) = pipe2(OFlag::O_CLOEXEC)?;
            // A larger buffer is optional, because the system's limit may forbid it.
            let _ = fcntl(&pipe, FcntlArg::F_SETPIPE_SZ(capacity));
            set_nonblocking(&pipe)?;
            self.readers.push(Reader { output, pipe });
            fds.push(theirs);
            match output {
                Output::Stdout => attached.has_stdout = true,
                Output::Stderr => attached.has_stderr = true,
            }
        }
        Ok((attached, fds))
    }

    /// Pipes of attached readers. The poll loop detects closed pipes by their error flag.
    pub(crate) fn readers(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.readers.iter().map(|reader| reader.pipe.as_fd())
    }

    pub(crate) fn drop_reader(&mut self, pipe: i32) {
        self.readers.retain(|reader| reader.pipe.as_raw_fd() != pipe);
    }

    fn stream(&self, output: Output) -> &Option<Stream> {
        match output {
            Output::Stdout => &self.stdout,
            Output::Stderr => &self.stderr,
        }
    }

    fn stream_mut(&mut self, output: Output) -> &mut Option<Stream> {
        match output {
            Output::Stdout => &mut self.stdout,
            Output::Stderr => &mut self.stderr,
        }
    }
}

// === impl Stream ===

impl Stream {
    fn new(output: Output) -> io::Result<(Self, OwnedFd)> {
        let (read, write) = pipe2(OFlag::O_CLOEXEC)?;
        set_nonblocking(&read)?;
        Ok((Self { fd: read, lines: Lines::new(output) }, write))
    }
}

// === impl Terminal ===

impl Terminal {
    /// Whether the next input may be read, because all earlier input has been written.
    pub(crate) fn is_idle(&self) -> bool {
        self.queued_input.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_log_adds_to_short_lines_counts_for_the_speed() {
        let (mut stdio, ends) = Stdio::new(&CreateContainer::default()).unwrap();
        let (lines, mut buffer) = ("\n".repeat(32 << 10), vec![0; 64 << 10]);
        assert_eq!(write(ends.stdout.as_ref().unwrap(), lines.as_bytes()), Ok(lines.len()));
        stdio.forward_output(Output::Stdout, &mut buffer);
        assert!(stdio.rate.used() > 40 * lines.len() as u64, "{}", stdio.rate.used());
    }

    #[test]
    fn clients_of_a_terminal_that_no_process_has_open_are_disconnected() {
        let nix::pty::OpenptyResult { master, slave } = nix::pty::openpty(None, None).unwrap();
        nix::fcntl::fcntl(&slave, nix::fcntl::FcntlArg::F_SETFD(nix::fcntl::FdFlag::FD_CLOEXEC)).unwrap();
        let mut stdio = Stdio::default();
        stdio.set_master(master).unwrap();
        let attach = Attach { stdin: true, stdout: true, ..Attach::default() };
        let (_, before) = stdio.attach(&attach).unwrap();
        drop(slave);
        // A fork of another test may still have the terminal open.
        coracle_testing::eventually("the end of the terminal", 10, || {
            stdio.forward_output(Output::Stdout, &mut [0; 64]);
            stdio.output(Output::Stdout).is_none()
        });
        assert_eq!(read(&before[0], &mut [0; 8]), Ok(0));
        let (attached, after) = stdio.attach(&attach).unwrap();
        assert!(!attached.terminal && after.is_empty() && stdio.terminals().is_empty());
    }
}

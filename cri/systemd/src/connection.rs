//! A connection to systemd and its calls (org.freedesktop.systemd1(5)). Blocking.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use crate::message::{self, FIXED, Incoming, Value, Writer};
use crate::property::Property;

/// systemd's private socket. Only root can use it, and it needs no message bus.
const SOCKET: &str = "/run/systemd/private";
/// Timeout of a call with its job. A stop can take long, because systemd waits for processes.
const TIMEOUT: Duration = Duration::from_secs(120);

const NO_SUCH_UNIT: &str = "org.freedesktop.systemd1.NoSuchUnit";
const UNIT_EXISTS: &str = "org.freedesktop.systemd1.UnitExists";

/// Errors of calls to systemd.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// systemd is not reachable.
    #[error("cannot connect to systemd at {SOCKET}")]
    Connect(#[source] io::Error),
    /// The connection broke, or there was no reply in time.
    #[error("cannot communicate with systemd")]
    Communication(#[source] io::Error),
    /// systemd returned an error.
    #[error("systemd refuses {member} of {unit}: {text} ({name})")]
    Refused {
        /// The method.
        member: &'static str,
        /// The unit.
        unit: String,
        /// The D-Bus error name.
        name: String,
        /// The error text.
        text: String,
    },
    /// The job failed.
    #[error("the job {member} of systemd for {unit} ended with the result {result:?}")]
    Job {
        /// The method.
        member: &'static str,
        /// The unit.
        unit: String,
        /// The job's result, as in `systemctl`.
        result: String,
    },
}

/// A connection to systemd, for one caller at a time. It should be short-lived: systemd sends signals about
/// every unit of the machine to each connection.
#[derive(Debug)]
pub struct Systemd {
    stream: UnixStream,
    /// Timeout of each call.
    timeout: Duration,
    /// End of the current call.
    deadline: Instant,
    serial: u32,
    /// Jobs that ended before the reply with their name arrived.
    ended: Vec<(String, String)>,
}

/// A stream whose reads and writes end at a deadline.
struct UntilDeadline<'a> {
    stream: &'a UnixStream,
    deadline: Instant,
}

// === impl Systemd ===

impl Systemd {
    /// Connects to systemd.
    ///
    /// # Errors
    /// If systemd is not this machine's init, or refuses the connection.
    pub fn connect() -> Result<Self, Error> {
        let stream = UnixStream::connect(SOCKET).map_err(Error::Connect)?;
        let systemd = Self::over(stream, TIMEOUT);
        systemd.authenticate().map_err(Error::Connect)?;
        Ok(systemd)
    }

    fn over(stream: UnixStream, timeout: Duration) -> Self {
        Self { stream, timeout, deadline: Instant::now() + timeout, serial: 0, ended: Vec::new() }
    }

    /// Makes a scope of these processes in a slice. The scope is delegated: the tree below it and its limits belong to
    /// the caller. The properties in `others` apply before the processes enter.
    ///
    /// # Errors
    /// See [`Error`].
    pub fn start_scope(
        &mut self,
        unit: &str,
        slice: &str,
        pids: &[u32],
        others: &[Property],
    ) -> Result<(), Error> {
        let own = [
            ("Description", Value::Text("container of coracle".to_owned())),
            ("Slice", Value::Text(slice.to_owned())),
            ("PIDs", Value::Numbers(pids.to_vec())),
            ("Delegate", Value::Flag(true)),
            ("DefaultDependencies", Value::Flag(false)),
            // By default systemd would keep a scope with an OOM kill in the state `failed`.
            ("CollectMode", Value::Text("inactive-or-failed".to_owned())),
        ];
        self.start(unit, &[&own[..], others].concat())
    }

    /// Makes a slice with these properties. An existing slice gets the properties.
    ///
    /// # Errors
    /// See [`Error`].
    pub fn ensure_slice(&mut self, unit: &str, properties: &[Property]) -> Result<(), Error> {
        let made = self.start(unit, &[properties, &[("DefaultDependencies", Value::Flag(false))]].concat());
        match made {
            Err(Error::Refused { name, .. }) if name == UNIT_EXISTS => self.set(unit, properties),
            made => made,
        }
    }

    /// Sets properties of a unit until the next boot. systemd also writes them to the cgroup.
    ///
    /// # Errors
    /// See [`Error`].
    pub fn set(&mut self, unit: &str, limits: &[Property]) -> Result<(), Error> {
        if limits.is_empty() {
            return Ok(());
        }
        let mut body = Writer::default();
        body.text(unit).flag(true).properties(limits.iter().map(|(name, value)| (*name, value)));
        self.call("SetUnitProperties", "sba(sv)", unit, &body).map(|_empty| ())
    }

    /// Stops a unit with its processes, and makes systemd unload it. An absent unit is not an error.
    ///
    /// # Errors
    /// See [`Error`].
    pub fn stop(&mut self, unit: &str) -> Result<(), Error> {
        let mut body = Writer::default();
        body.text(unit).text("replace");
        ignore_absent(self.run("StopUnit", "ss", unit, &body))?;
        let mut body = Writer::default();
        body.text(unit);
        ignore_absent(self.call("ResetFailedUnit", "s", unit, &body).map(|_empty| ()))
    }

    fn start(&mut self, unit: &str, properties: &[Property]) -> Result<(), Error> {
        let mut body = Writer::default();
        body.text(unit).text("replace");
        body.properties(properties.iter().map(|(name, value)| (*name, value))).empty_array();
        self.run("StartTransientUnit", "ssa(sv)a(sa(sv))", unit, &body)
    }

    /// Calls a method that starts a job, and waits for the job's end.
    fn run(&mut self, member: &'static str, signature: &str, unit: &str, body: &Writer) -> Result<(), Error> {
        let job = self.call(member, signature, unit, body)?;
        let result = loop {
            if let Some(at) = self.ended.iter().position(|(ended, _)| *ended == job) {
                break self.ended.swap_remove(at).1;
            }
            self.receive().map_err(Error::Communication)?;
        };
        match result.as_str() {
            "done" => Ok(()),
            _ => Err(Error::Job { member, unit: unit.to_owned(), result }),
        }
    }

    /// Calls a method. Returns the text of the reply.
    fn call(
        &mut self,
        member: &'static str,
        signature: &str,
        unit: &str,
        body: &Writer,
    ) -> Result<String, Error> {
        self.serial += 1;
        self.ended.clear();
        self.deadline = Instant::now() + self.timeout;
        let call = message::call(self.serial, member, signature, body);
        self.bounded().write_all(&call).map_err(Error::Communication)?;
        loop {
            match self.receive().map_err(Error::Communication)? {
                Incoming::Reply { to, text } if to == self.serial => return Ok(text),
                Incoming::Refusal { to, name, text } if to == self.serial => {
                    return Err(Error::Refused { member, unit: unit.to_owned(), name, text });
                }
                _ => {}
            }
        }
    }

    /// Reads the next message. Records the end of a job.
    fn receive(&mut self) -> io::Result<Incoming> {
        let damaged = || io::Error::from(io::ErrorKind::InvalidData);
        let mut fixed = [0; FIXED];
        let mut stream = self.bounded();
        stream.read_exact(&mut fixed)?;
        let mut whole = fixed.to_vec();
        whole.resize(FIXED + message::rest(&fixed).ok_or_else(damaged)?, 0);
        if let Some(rest) = whole.get_mut(FIXED..) {
            stream.read_exact(rest)?;
        }
        let received = message::parse(&whole).unwrap_or(Incoming::Other);
        if let Incoming::JobRemoved { job, result } = &received {
            self.ended.push((job.clone(), result.clone()));
        }
        Ok(received)
    }

    /// Authenticates by the peer credentials (D-Bus specification, "Authentication Protocol").
    fn authenticate(&self) -> io::Result<()> {
        let mut stream = self.bounded();
        let user = nix::unistd::geteuid().to_string();
        let user: String = user.bytes().map(|digit| format!("{digit:02x}")).collect();
        // BEGIN is sent together with AUTH. If BEGIN came together with the first call, systemd would not
        // process the call before more data arrives.
        let request = format!("\0AUTH EXTERNAL {user}\r\nBEGIN\r\n");
        stream.write_all(request.as_bytes())?;
        let mut answer = Vec::new();
        let mut byte = [0];
        while !answer.ends_with(b"\r\n") && answer.len() < 256 {
            stream.read_exact(&mut byte)?;
            answer.extend(byte);
        }
        if !answer.starts_with(b"OK") {
            let text = String::from_utf8_lossy(&answer).trim().to_owned();
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, text));
        }
        Ok(())
    }

    /// The stream with the deadline of the current call.
    fn bounded(&self) -> UntilDeadline<'_> {
        UntilDeadline { stream: &self.stream, deadline: self.deadline }
    }
}

// === impl UntilDeadline ===

impl UntilDeadline<'_> {
    /// The time until the deadline, which has not passed.
    fn left(&self) -> io::Result<Duration> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
    }
}

impl Read for UntilDeadline<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(Some(self.left()?))?;
        let mut stream = self.stream;
        stream.read(buffer).map_err(timed_out)
    }
}

impl Write for UntilDeadline<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(Some(self.left()?))?;
        let mut stream = self.stream;
        stream.write(bytes).map_err(timed_out)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The kernel reports a timeout of a socket as EAGAIN.
fn timed_out(error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::WouldBlock => io::ErrorKind::TimedOut.into(),
        _ => error,
    }
}

fn ignore_absent(result: Result<(), Error>) -> Result<(), Error> {
    match result {
        Err(Error::Refused { name, .. }) if name == NO_SUCH_UNIT => Ok(()),
        result => result,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_about_other_units_do_not_extend_a_call() {
        let (stream, mut peer) = UnixStream::pair().unwrap();
        let mut systemd = Systemd::over(stream, Duration::from_millis(20));
        let other = message::call(1, "UnitNew", "", &Writer::default());
        // The thread ends when the connection is closed.
        let sender = std::thread::spawn(move || while peer.write_all(&other).is_ok() {});
        let error = systemd.set("a.slice", &[("MemoryMax", Value::Number(1))]).unwrap_err();
        let is_timeout =
            matches!(&error, Error::Communication(source) if source.kind() == io::ErrorKind::TimedOut);
        assert!(is_timeout, "{error:?}");
        drop(systemd);
        sender.join().unwrap();
    }
}

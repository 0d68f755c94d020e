//! A connection to systemd, and what is asked of it (org.freedesktop.systemd1(5)). Blocking.

use std::io::{self, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use crate::message::{self, FIXED, Incoming, Value, Writer};
use crate::property::Property;

/// Where systemd serves its own interface, to root alone and without a message bus.
const SOCKET: &str = "/run/systemd/private";
/// No answer for so long is none. A stop may take all of it: systemd waits for processes.
const PATIENCE: Duration = Duration::from_secs(120);

const NO_SUCH_UNIT: &str = "org.freedesktop.systemd1.NoSuchUnit";
const UNIT_EXISTS: &str = "org.freedesktop.systemd1.UnitExists";

/// Why systemd did not do it.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It is not there.
    #[error("connect to systemd at {SOCKET}")]
    Connect(#[source] io::Error),
    /// It went away, or did not answer in time.
    #[error("talk with systemd")]
    Talk(#[source] io::Error),
    /// It refused.
    #[error("systemd refuses {member} of {unit}: {text} ({name})")]
    Refused {
        /// The call.
        member: &'static str,
        /// The unit that it was for.
        unit: String,
        /// The refusal's name on the bus.
        name: String,
        /// Why.
        text: String,
    },
    /// It tried and failed.
    #[error("systemd's {member} of {unit} ended as {result:?}")]
    Job {
        /// The call.
        member: &'static str,
        /// The unit that it was for.
        unit: String,
        /// The job's result, as `systemctl` has it.
        result: String,
    },
}

/// A connection to systemd, for one caller at a time. Not to be kept: systemd tells of every unit of the machine to
/// whoever is connected.
#[derive(Debug)]
pub struct Systemd {
    stream: UnixStream,
    serial: u32,
    /// Jobs that ended before the answer that names them.
    ended: Vec<(String, String)>,
}

// === impl Systemd ===

impl Systemd {
    /// Connects.
    ///
    /// # Errors
    /// When systemd is not this machine's init, or does not let us in.
    pub fn connect() -> Result<Self, Error> {
        let stream = UnixStream::connect(SOCKET).map_err(Error::Connect)?;
        let mut systemd = Self { stream, serial: 0, ended: Vec::new() };
        systemd.introduce().map_err(Error::Connect)?;
        Ok(systemd)
    }

    /// Makes a scope of these processes in a slice, with the whole tree below it ours, and its limits ours to set. What
    /// else it is to have from the beginning, it has before they are in it.
    ///
    /// # Errors
    /// systemd's.
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
            // One whose processes the kernel killed for want of memory would be kept as failed.
            ("CollectMode", Value::Text("inactive-or-failed".to_owned())),
        ];
        self.start(unit, &[&own[..], others].concat())
    }

    /// Makes a slice with these properties, or gives them to it if it is there.
    ///
    /// # Errors
    /// systemd's.
    pub fn ensure_slice(&mut self, unit: &str, properties: &[Property]) -> Result<(), Error> {
        let made = self.start(unit, &[properties, &[("DefaultDependencies", Value::Flag(false))]].concat());
        match made {
            Err(Error::Refused { name, .. }) if name == UNIT_EXISTS => self.set(unit, properties),
            made => made,
        }
    }

    /// Tells systemd of a unit's limits, which it sets as well. Until the next boot.
    ///
    /// # Errors
    /// systemd's.
    pub fn set(&mut self, unit: &str, limits: &[Property]) -> Result<(), Error> {
        if limits.is_empty() {
            return Ok(());
        }
        let mut body = Writer::default();
        body.text(unit).flag(true).properties(limits.iter().map(|(name, value)| (*name, value)));
        self.call("SetUnitProperties", "sba(sv)", unit, &body).map(|_empty| ())
    }

    /// Stops a unit and what is in it, and has systemd forget it. Absent is a success.
    ///
    /// # Errors
    /// systemd's.
    pub fn stop(&mut self, unit: &str) -> Result<(), Error> {
        let mut body = Writer::default();
        body.text(unit).text("replace");
        absent(self.run("StopUnit", "ss", unit, &body))?;
        let mut body = Writer::default();
        body.text(unit);
        absent(self.call("ResetFailedUnit", "s", unit, &body).map(|_empty| ()))
    }

    fn start(&mut self, unit: &str, properties: &[Property]) -> Result<(), Error> {
        let mut body = Writer::default();
        body.text(unit).text("replace");
        body.properties(properties.iter().map(|(name, value)| (*name, value))).nothing();
        self.run("StartTransientUnit", "ssa(sv)a(sa(sv))", unit, &body)
    }

    /// Calls for a job, and waits for its end.
    fn run(&mut self, member: &'static str, signature: &str, unit: &str, body: &Writer) -> Result<(), Error> {
        let job = self.call(member, signature, unit, body)?;
        let result = loop {
            if let Some(at) = self.ended.iter().position(|(ended, _)| *ended == job) {
                break self.ended.swap_remove(at).1;
            }
            self.hear().map_err(Error::Talk)?;
        };
        match result.as_str() {
            "done" => Ok(()),
            _ => Err(Error::Job { member, unit: unit.to_owned(), result }),
        }
    }

    /// The answer's text.
    fn call(
        &mut self,
        member: &'static str,
        signature: &str,
        unit: &str,
        body: &Writer,
    ) -> Result<String, Error> {
        self.serial += 1;
        self.ended.clear();
        let call = message::call(self.serial, member, signature, body);
        self.stream.write_all(&call).map_err(Error::Talk)?;
        loop {
            match self.hear().map_err(Error::Talk)? {
                Incoming::Reply { to, text } if to == self.serial => return Ok(text),
                Incoming::Refusal { to, name, text } if to == self.serial => {
                    return Err(Error::Refused { member, unit: unit.to_owned(), name, text });
                }
                _ => {}
            }
        }
    }

    /// The next message; the end of a job is noted.
    fn hear(&mut self) -> io::Result<Incoming> {
        let damaged = || io::Error::from(io::ErrorKind::InvalidData);
        let mut fixed = [0; FIXED];
        self.stream.read_exact(&mut fixed)?;
        let mut whole = fixed.to_vec();
        whole.resize(FIXED + message::rest(&fixed).ok_or_else(damaged)?, 0);
        if let Some(rest) = whole.get_mut(FIXED..) {
            self.stream.read_exact(rest)?;
        }
        let heard = message::parse(&whole).unwrap_or(Incoming::Other);
        if let Incoming::JobRemoved { job, result } = &heard {
            self.ended.push((job.clone(), result.clone()));
        }
        Ok(heard)
    }

    /// Says who we are, as the kernel confirms (D-Bus specification, "Authentication Protocol").
    fn introduce(&mut self) -> io::Result<()> {
        self.stream.set_read_timeout(Some(PATIENCE))?;
        self.stream.set_write_timeout(Some(PATIENCE))?;
        let user = nix::unistd::geteuid().to_string();
        let user: String = user.bytes().map(|digit| format!("{digit:02x}")).collect();
        // With the word to begin, and in one piece: systemd, having read that together with a call, would not look
        // at the call before something else comes.
        let words = format!("\0AUTH EXTERNAL {user}\r\nBEGIN\r\n");
        self.stream.write_all(words.as_bytes())?;
        let mut answer = Vec::new();
        let mut byte = [0];
        while !answer.ends_with(b"\r\n") && answer.len() < 256 {
            self.stream.read_exact(&mut byte)?;
            answer.extend(byte);
        }
        if !answer.starts_with(b"OK") {
            let text = String::from_utf8_lossy(&answer).trim().to_owned();
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, text));
        }
        Ok(())
    }
}

fn absent(result: Result<(), Error>) -> Result<(), Error> {
    match result {
        Err(Error::Refused { name, .. }) if name == NO_SUCH_UNIT => Ok(()),
        result => result,
    }
}

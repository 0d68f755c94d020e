//! Starts shims and talks to them: one connection a pod, calls answered in any order, exits
//! delivered as events until they are acknowledged.
//!
//! A [`Shim`] is a cheap handle. Dropping the last one closes the connection and leaves the shim
//! and its pod running: that is what an agent's end looks like to a pod.
//!
//! Order of use: [`Shim::spawn`] or [`Shim::connect`], take [`Shim::events`] once, then call.
//! Every event is repeated to each new connection until [`Shim::acknowledge`] named its sequence.

mod error;
mod link;
mod process;
mod socket;

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use coracle_proto::shim::{self, reply, request};
use tokio::sync::mpsc;

pub use self::error::{Error, ErrorKind};
use self::link::Link;
use self::process::Process;

/// The protocol version this client speaks.
pub const PROTOCOL: u32 = 1;

/// How long a killed shim that answers nobody is waited for.
const STRAY_DIES: std::time::Duration = std::time::Duration::from_secs(10);

/// A connection to one pod's shim.
#[derive(Clone, Debug)]
pub struct Shim {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    dir: PathBuf,
    link: Link,
    process: Process,
    events: Mutex<Option<mpsc::UnboundedReceiver<shim::Event>>>,
}

/// What a new process in a container reads and writes.
#[derive(Debug)]
pub enum ExecStdio {
    /// A new terminal; its master comes back in [`Started::terminal`].
    Terminal,
    /// The ends given here; what is `None` is `/dev/null`.
    Pipes {
        /// Read end for the process's standard input.
        stdin: Option<OwnedFd>,
        /// Write end for its standard output.
        stdout: Option<OwnedFd>,
        /// Write end for its standard error.
        stderr: Option<OwnedFd>,
    },
    /// For a command that is waited for, and killed with all that it started when that takes too long: it adopts
    /// the orphans among its descendants.
    Captured {
        /// Write end for its standard output.
        stdout: OwnedFd,
        /// Write end for its standard error.
        stderr: OwnedFd,
    },
}

/// A process that was started by [`Shim::exec`].
#[derive(Debug)]
pub struct Started {
    /// Its pid, in the host's pid namespace.
    pub pid: i32,
    /// The terminal's master, when one was asked for.
    pub terminal: Option<OwnedFd>,
}

/// Which of a container's streams to attach to.
#[derive(Clone, Copy, Debug, Default)]
pub struct AttachTo {
    /// Write to its standard input.
    pub stdin: bool,
    /// Read its standard output.
    pub stdout: bool,
    /// Read its standard error (with a terminal there is none).
    pub stderr: bool,
}

/// The ends of an attached container's streams. End of file on the outputs means that the
/// container ended or that this reader was too slow and was dropped.
#[derive(Debug, Default)]
pub struct Attached {
    /// A stream socket, both ways, when the container has a terminal; the rest is then `None`.
    pub terminal: Option<OwnedFd>,
    /// Write end of its standard input.
    pub stdin: Option<OwnedFd>,
    /// Read end of a copy of its standard output.
    pub stdout: Option<OwnedFd>,
    /// Read end of a copy of its standard error.
    pub stderr: Option<OwnedFd>,
}

/// How a shim's connection ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Closed {
    /// The shim's process is gone, and with it the pod.
    Died,
    /// The shim lives but talks to another client, or refused what we sent.
    Replaced,
}

// === impl Shim ===

impl Shim {
    /// Starts `binary shim --dir DIR` and waits until its namespaces and socket are there.
    ///
    /// Makes `dir` and writes `config` to `dir/shim.pb` first. An empty `socket` means
    /// `dir/shim.sock`. The answer's state names the pod's init, if it has one. On failure nothing of
    /// the process is left.
    ///
    /// # Errors
    /// [`ErrorKind::Spawn`] with the shim's own words for the step that failed.
    pub async fn spawn(
        binary: &Path,
        dir: &Path,
        mut config: shim::SandboxConfig,
    ) -> Result<(Self, shim::State), Error> {
        config.protocol = PROTOCOL;
        if config.socket.is_empty() {
            config.socket = socket_path(dir).to_string_lossy().into_owned();
        }
        let process = process::spawn(binary, dir, &config).await?;
        match Self::over(dir, &PathBuf::from(&config.socket), Some(process.clone())).await {
            Ok(reached) => Ok(reached),
            Err(error) => {
                process.kill_and_reap().await;
                Err(error)
            }
        }
    }

    /// Connects to the shim that lives in `dir` and learns what became of its containers.
    /// A client that was connected before is disconnected by this.
    ///
    /// # Errors
    /// [`ErrorKind::Gone`] when no shim answers there.
    pub async fn connect(dir: &Path) -> Result<(Self, shim::State), Error> {
        let socket = process::read_config(dir).await?.socket;
        Self::over(dir, Path::new(&socket), None).await
    }

    async fn over(dir: &Path, path: &Path, process: Option<Process>) -> Result<(Self, shim::State), Error> {
        let socket = socket::Socket::connect(path)?;
        let process = match process {
            Some(process) => process,
            None => Process::open(socket.peer_pid()?)?,
        };
        let (sender, receiver) = mpsc::unbounded_channel();
        let link = Link::open(socket, sender);
        let inner = Inner { dir: dir.to_owned(), link, process, events: Mutex::new(Some(receiver)) };
        let shim = Self { inner: Arc::new(inner) };
        let state = shim.hello().await?;
        Ok((shim, state))
    }

    /// The shim's pid: `/proc/<pid>/ns/{net,ipc,uts}` are the pod's namespaces.
    #[must_use]
    pub fn pid(&self) -> i32 {
        self.inner.process.pid()
    }

    /// The directory that the shim lives in.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.inner.dir
    }

    /// The exits of containers and execs, in order. The first caller gets the receiver, later ones
    /// `None`. It ends when the connection ends.
    #[must_use]
    pub fn events(&self) -> Option<mpsc::UnboundedReceiver<shim::Event>> {
        self.inner.events.lock().ok().and_then(|mut events| events.take())
    }

    /// Waits until the connection has ended. Cancel safe.
    pub async fn closed(&self) -> Closed {
        tokio::select! {
            // Both arms only observe; dropping either loses nothing.
            () = self.inner.process.died() => Closed::Died,
            () = self.inner.link.closed() => {
                if self.inner.process.is_dying().await { Closed::Died } else { Closed::Replaced }
            }
        }
    }

    /// Asks for everything that the shim knows. Pending events are sent again.
    pub async fn hello(&self) -> Result<shim::State, Error> {
        let hello = request::Call::Hello(shim::Hello { protocol: PROTOCOL });
        match self.call(hello, Vec::new()).await? {
            (reply::Result::State(state), _) => Ok(state),
            (other, _) => Err(Error::unexpected(&other)),
        }
    }

    /// Mounts the root file system and creates the container, which then waits for
    /// [`Shim::start`]. On failure nothing of it is left.
    pub async fn create(&self, create: shim::CreateContainer) -> Result<i32, Error> {
        match self.call(request::Call::Create(create), Vec::new()).await? {
            (reply::Result::Created(created), _) => Ok(created.pid),
            (other, _) => Err(Error::unexpected(&other)),
        }
    }

    /// Runs the created container's command.
    pub async fn start(&self, container_id: &str) -> Result<(), Error> {
        let container_id = container_id.to_owned();
        self.done(request::Call::Start(shim::StartContainer { container_id })).await
    }

    /// Starts a created container with the processes of a checkpoint, and gives the pid of the first.
    pub async fn restore(&self, restore: shim::RestoreContainer) -> Result<i32, Error> {
        match self.call(request::Call::Restore(restore), Vec::new()).await? {
            (reply::Result::Created(created), _) => Ok(created.pid),
            (other, _) => Err(Error::unexpected(&other)),
        }
    }

    /// Sends a signal to the container's first process.
    pub async fn kill(&self, container_id: &str, signal: i32) -> Result<(), Error> {
        self.signal(shim::Signal { container_id: container_id.to_owned(), signal, ..Default::default() })
            .await
    }

    /// Sends a signal to a container, one of its execs, or all processes of its cgroup.
    pub async fn signal(&self, signal: shim::Signal) -> Result<(), Error> {
        self.done(request::Call::Signal(signal)).await
    }

    /// Starts another process in a running container; its exit comes as an event with `exec_id`.
    /// `process` is an OCI runtime spec `process` object.
    ///
    /// # Errors
    /// [`ErrorKind::CommandNotFound`] and [`ErrorKind::CommandNotExecutable`] for exit codes 127
    /// and 126.
    pub async fn exec(
        &self,
        container_id: &str,
        exec_id: &str,
        process: &oci_spec::runtime::Process,
        stdio: ExecStdio,
    ) -> Result<Started, Error> {
        let process =
            serde_json::to_vec(process).map_err(|error| Error::invalid("encode the process", &error))?;
        let mut exec = shim::Exec {
            container_id: container_id.to_owned(),
            exec_id: exec_id.to_owned(),
            process,
            ..Default::default()
        };
        let fds = match stdio {
            ExecStdio::Terminal => {
                exec.terminal = true;
                Vec::new()
            }
            ExecStdio::Captured { stdout, stderr } => {
                (exec.has_stdout, exec.has_stderr, exec.adopts_orphans) = (true, true, true);
                vec![stdout, stderr]
            }
            ExecStdio::Pipes { stdin, stdout, stderr } => {
                exec.has_stdin = stdin.is_some();
                exec.has_stdout = stdout.is_some();
                exec.has_stderr = stderr.is_some();
                [stdin, stdout, stderr].into_iter().flatten().collect()
            }
        };
        match self.call(request::Call::Exec(exec), fds).await? {
            (reply::Result::ExecStarted(started), fds) => {
                Ok(Started { pid: started.pid, terminal: fds.into_iter().next() })
            }
            (other, _) => Err(Error::unexpected(&other)),
        }
    }

    /// Sets the terminal's size of a container, or of an exec when `exec_id` is not empty.
    pub async fn resize(
        &self,
        container_id: &str,
        exec_id: &str,
        width: u16,
        height: u16,
    ) -> Result<(), Error> {
        let resize = shim::Resize {
            container_id: container_id.to_owned(),
            exec_id: exec_id.to_owned(),
            width: u32::from(width),
            height: u32::from(height),
        };
        self.done(request::Call::Resize(resize)).await
    }

    /// Attaches to a container's streams, from now on.
    pub async fn attach(&self, container_id: &str, to: AttachTo) -> Result<Attached, Error> {
        let attach = shim::Attach {
            container_id: container_id.to_owned(),
            stdin: to.stdin,
            stdout: to.stdout,
            stderr: to.stderr,
        };
        let (attached, fds) = match self.call(request::Call::Attach(attach), Vec::new()).await? {
            (reply::Result::Attached(attached), fds) => (attached, fds),
            (other, _) => return Err(Error::unexpected(&other)),
        };
        let mut fds = fds.into_iter();
        let mut next = |present: bool| if present { fds.next() } else { None };
        Ok(Attached {
            terminal: next(attached.terminal),
            stdin: next(attached.has_stdin),
            stdout: next(attached.has_stdout),
            stderr: next(attached.has_stderr),
        })
    }

    /// Closes the container's standard input.
    pub async fn close_stdin(&self, container_id: &str) -> Result<(), Error> {
        let container_id = container_id.to_owned();
        self.done(request::Call::CloseStdin(shim::CloseStdin { container_id })).await
    }

    /// Opens the container's log file anew by its path, after somebody renamed it.
    pub async fn reopen_log(&self, container_id: &str) -> Result<(), Error> {
        let container_id = container_id.to_owned();
        self.done(request::Call::ReopenLog(shim::ReopenLog { container_id })).await
    }

    /// Kills what is left of the container, unmounts its root and removes its cgroup. An absent
    /// container is a success, as CRI's RemoveContainer wants it.
    pub async fn delete(&self, container_id: &str) -> Result<(), Error> {
        let container_id = container_id.to_owned();
        self.done(request::Call::Delete(shim::DeleteContainer { container_id })).await
    }

    /// Connects to a TCP port of the pod's loopback, from inside its network.
    ///
    /// # Errors
    /// [`ErrorKind::ConnectionRefused`] when nobody listens there.
    pub async fn connect_port(&self, port: u16) -> Result<std::net::TcpStream, Error> {
        let connect = request::Call::Connect(shim::Connect { port: u32::from(port) });
        match self.call(connect, Vec::new()).await? {
            (reply::Result::Connected(_), fds) => {
                let fd =
                    fds.into_iter().next().ok_or_else(|| Error::protocol("connected, but no socket came"))?;
                Ok(std::net::TcpStream::from(fd))
            }
            (other, _) => Err(Error::unexpected(&other)),
        }
    }

    /// Tells the shim that the events up to `sequence` are on record.
    pub async fn acknowledge(&self, sequence: u64) -> Result<(), Error> {
        self.done(request::Call::Acknowledge(shim::Acknowledge { sequence })).await
    }

    /// Kills all that runs in the pod, unmounts, and waits until the shim's process is gone. A shim that cannot do
    /// it, or does not answer, is killed: what runs in the pod and all its mounts end with it, and whoever asked
    /// has forgotten the pod when he could ask again. What cgroups are left is the caller's to remove.
    pub async fn shutdown(&self) {
        let process = &self.inner.process;
        match self.done(request::Call::Shutdown(shim::Shutdown {})).await {
            Ok(()) => process.died().await,
            Err(error) if error.kind == ErrorKind::Gone && process.is_dying().await => {}
            Err(error) => {
                tracing::warn!(pid = process.pid(), %error, "a shim does not end by itself and is killed");
                process.kill_and_reap().await;
            }
        }
    }

    /// Ends the shim of a directory that nobody can talk to, if there is one: it may have been about to listen, or
    /// be past it. One that the kernel does not let die, as on a mount that hangs, is not waited for any longer
    /// than that: the other pods are waiting too.
    pub async fn end_stray(dir: &Path) {
        let wanted = dir.to_owned();
        let strays = tokio::task::spawn_blocking(move || process::of_directory(&wanted)).await;
        for pid in strays.unwrap_or_default() {
            let Ok(process) = Process::open(pid) else { continue };
            // The number may have become somebody else's meanwhile; from here on it is not given away.
            if process::is_of_directory(pid, dir) {
                tracing::warn!(pid, dir = %dir.display(), "ending a shim that nobody can talk to");
                if tokio::time::timeout(STRAY_DIES, process.kill_and_reap()).await.is_err() {
                    tracing::warn!(pid, "a killed shim does not die: it sleeps in the kernel");
                }
            }
        }
    }

    async fn done(&self, call: request::Call) -> Result<(), Error> {
        match self.call(call, Vec::new()).await? {
            (reply::Result::Done(_), _) => Ok(()),
            (other, _) => Err(Error::unexpected(&other)),
        }
    }

    async fn call(
        &self,
        call: request::Call,
        fds: Vec<OwnedFd>,
    ) -> Result<(reply::Result, Vec<OwnedFd>), Error> {
        match self.inner.link.call(call, fds).await? {
            (reply::Result::Error(error), _) => Err(Error::from(error)),
            answer => Ok(answer),
        }
    }
}

/// Where the shim of `dir` listens unless its configuration says otherwise.
#[must_use]
pub fn socket_path(dir: &Path) -> PathBuf {
    dir.join("shim.sock")
}

/// What a shim sends.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn fuzz(data: &[u8]) {
    link::fuzz(data);
}

//! Client of shims: one connection per pod.
//!
//! Calls are answered in any order. Exits are delivered as events until they are acknowledged.
//!
//! A [`Shim`] is a cheap handle. Dropping the last handle closes the connection; the shim and its pod continue to run,
//! as after the end of the runtime.
//!
//! Usage: [`Shim::spawn`] or [`Shim::connect`], take [`Shim::events`] once, then call. Every event is sent again to
//! each new connection until [`Shim::acknowledge`] is called with its sequence number.
//!
//! A live shim can fail to answer: it can be stopped, frozen, or in uninterruptible sleep because of a hanging disk.
//! So each call except [`Shim::hello`] and [`Shim::restore`] has a timeout, see [`Timeouts`]. After the timeout, the
//! shim can still execute the call when it wakes.

mod error;
pub(crate) mod file;
#[cfg(test)]
mod fixture;
mod link;
mod process;
mod socket;
mod stdio;
mod strays;
mod timeouts;

use std::collections::HashSet;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use coracle_proto::shim::{self, reply, request};
use futures::channel::mpsc;
use tokio::sync::OwnedRwLockReadGuard;
use tokio::time::timeout;

pub use self::error::{Error, ErrorKind};
use self::link::Link;
use self::process::Process;
pub use self::stdio::{AttachTo, Attached, ExecStdio, PendingStart, StartResult, Started};
pub use self::timeouts::Timeouts;

/// Maximum bytes of an inline process in an exec call. A larger process (command and environment) is passed as a file.
/// Shims of earlier versions accept only inline processes.
const MAX_INLINE_BYTES: usize = 128 << 10;

/// Version of the protocol.
pub const PROTOCOL: u32 = 1;

/// A connection to the shim of a pod.
#[derive(Clone, Debug)]
pub struct Shim {
    inner: Arc<Inner>,
    timeouts: Timeouts,
}

/// A live shim after a request for its state.
#[derive(Debug)]
pub enum ConnectResult {
    /// The shim answered.
    Answers(Shim, shim::State),
    /// The shim has not responded yet. The request is still pending.
    Silent(Shim),
}

#[derive(Debug)]
struct Inner {
    dir: PathBuf,
    link: Link,
    process: Process,
    events: Mutex<Option<mpsc::UnboundedReceiver<shim::Event>>>,
}

/// The end of a shim's connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Closed {
    /// The shim's process has ended. The pod has ended with it.
    Exited,
    /// The shim is alive. It serves another client, or one of the two sides could not read a message.
    Replaced,
}

// === impl Shim ===

impl Shim {
    /// Starts `binary shim --dir DIR` and waits for its namespaces and socket.
    ///
    /// Creates `dir` and writes `config` to `dir/shim.pb` first. An empty `socket` means `dir/shim.sock`. The returned state
    /// has the pid of the pod's init, if there is one. On failure the process is killed.
    ///
    /// # Errors
    /// [`ErrorKind::Spawn`] with the shim's error message, or the errors of [`Shim::reach`].
    pub async fn spawn(
        binary: &Path,
        dir: &Path,
        mut config: shim::SandboxConfig,
        timeouts: Timeouts,
    ) -> Result<(Self, shim::State), Error> {
        config.protocol = PROTOCOL;
        if config.socket.is_empty() {
            config.socket = socket_path(dir).to_string_lossy().into_owned();
        }
        let process = process::spawn(binary, dir, &config, timeouts).await?;
        let socket = PathBuf::from(&config.socket);
        let error = match Self::connect_to(dir, &socket, Some(process.clone()), timeouts).await {
            Ok(ConnectResult::Answers(shim, state)) => return Ok((shim, state)),
            Ok(ConnectResult::Silent(_)) => Error::silent(),
            Err(error) => error,
        };
        process.kill_and_reap().await;
        Err(error)
    }

    /// Connects to the shim of `dir` and gets its state. The shim disconnects an earlier client.
    ///
    /// # Errors
    /// [`ErrorKind::Gone`] without a shim, [`ErrorKind::Silent`] if it does not answer.
    pub async fn connect(dir: &Path) -> Result<(Self, shim::State), Error> {
        match Self::reach(dir, Timeouts::default()).await? {
            ConnectResult::Answers(shim, state) => Ok((shim, state)),
            ConnectResult::Silent(_) => Err(Error::silent()),
        }
    }

    /// Connects to a shim that may be silent.
    ///
    /// # Errors
    /// [`ErrorKind::Gone`] without a shim, [`ErrorKind::Silent`] if it does not accept the connection. Other errors do
    /// not mean that the shim is broken. For example, a later version that no longer supports this protocol answers
    /// [`ErrorKind::Unsupported`].
    pub async fn reach(dir: &Path, timeouts: Timeouts) -> Result<ConnectResult, Error> {
        let socket = process::read_config(dir).await?.socket;
        Self::connect_to(dir, Path::new(&socket), None, timeouts).await
    }

    /// Connects to the same shim after the connection ended.
    ///
    /// # Errors
    /// See [`Shim::reach`].
    pub async fn reconnect(&self) -> Result<ConnectResult, Error> {
        Self::reach(self.dir(), self.timeouts).await
    }

    /// The same shim with other timeouts.
    #[must_use]
    pub fn with_timeouts(self, timeouts: Timeouts) -> Self {
        Self { timeouts, ..self }
    }

    async fn connect_to(
        dir: &Path,
        path: &Path,
        process: Option<Process>,
        timeouts: Timeouts,
    ) -> Result<ConnectResult, Error> {
        let connected = timeout(timeouts.answer, socket::Socket::connect(path)).await;
        let socket = connected.map_err(|_late| Error::silent())??;
        let process = match process {
            Some(process) => process,
            None => Process::open_peer(socket.peer_pid()?, dir)?,
        };
        let (sender, receiver) = mpsc::unbounded();
        let link = Link::open(socket, sender);
        let inner = Inner { dir: dir.to_owned(), link, process, events: Mutex::new(Some(receiver)) };
        let shim = Self { inner: Arc::new(inner), timeouts };
        match timeout(timeouts.answer, shim.hello()).await {
            Ok(Ok(state)) => Ok(ConnectResult::Answers(shim, state)),
            // The shim is alive but closed the connection, for example because another client connected. A later attempt can
            // reach it.
            Ok(Err(error)) if error.kind == ErrorKind::Gone && !shim.inner.process.is_ending().await => {
                Ok(ConnectResult::Silent(shim))
            }
            Ok(Err(error)) => Err(error),
            Err(_late) => Ok(ConnectResult::Silent(shim)),
        }
    }

    /// The shim's pid: `/proc/<pid>/ns/{net,ipc,uts}` are the pod's namespaces.
    #[must_use]
    pub fn pid(&self) -> i32 {
        self.inner.process.pid()
    }

    /// The pidfd of the shim.
    #[must_use]
    pub(crate) fn pidfd(&self) -> Arc<OwnedFd> {
        self.inner.process.pidfd()
    }

    /// Prevents the reuse of the shim's pid until the guard is dropped. Only for a shim that this process has started.
    ///
    /// # Errors
    /// [`ErrorKind::Gone`] if the shim has ended.
    pub(crate) async fn keep_pid(&self) -> Result<OwnedRwLockReadGuard<()>, Error> {
        self.inner.process.keep_pid().await
    }

    /// Whether the shim's process still runs. If so, its pid was not reused, and data that was read from `/proc/<pid>`
    /// before this call belongs to the shim.
    #[must_use]
    pub(crate) fn is_alive(&self) -> bool {
        self.inner.process.is_alive()
    }

    /// The directory of the shim.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.inner.dir
    }

    /// The exits of containers and execs, in order. Only the first caller gets the receiver. The channel closes when the
    /// connection ends.
    #[must_use]
    pub fn events(&self) -> Option<mpsc::UnboundedReceiver<shim::Event>> {
        self.inner.events.lock().ok().and_then(|mut events| events.take())
    }

    /// Waits for the end of the connection. Cancel safe.
    pub async fn closed(&self) -> Closed {
        tokio::select! {
            // Cancel safe: both arms only observe.
            () = self.inner.process.ended() => Closed::Exited,
            () = self.inner.link.closed() => {
                if self.inner.process.is_ending().await { Closed::Exited } else { Closed::Replaced }
            }
        }
    }

    /// Waits for the end of the shim. Cancel safe.
    pub async fn ended(&self) {
        self.inner.process.ended().await;
    }

    /// Gets the shim's complete state. Pending events are sent again. The call has no timeout.
    pub async fn hello(&self) -> Result<shim::State, Error> {
        let hello = request::Call::Hello(shim::Hello { protocol: PROTOCOL });
        match self.inner.link.call(hello, Vec::new()).await? {
            (reply::Result::State(state), _) => Ok(state),
            (reply::Result::Error(error), _) => Err(Error::from(error)),
            (other, _) => Err(Error::unexpected(&other)),
        }
    }

    /// Mounts the root file system, creates the container, and returns the pid of its first process. [`Shim::start`]
    /// then starts it. On failure the creation is undone.
    pub async fn create(&self, create: shim::CreateContainer) -> Result<i32, Error> {
        match self.call(request::Call::Create(create), Vec::new(), self.timeouts.work).await? {
            (reply::Result::Created(created), _) => Ok(created.pid),
            (other, _) => Err(Error::unexpected(&other)),
        }
    }

    /// Starts the command of a created container.
    pub async fn start(&self, container_id: &str) -> Result<(), Error> {
        let container_id = container_id.to_owned();
        self.done(request::Call::Start(shim::StartContainer { container_id }), self.timeouts.work).await
    }

    /// Starts a created container from the processes of a checkpoint. Returns the pid of the first process. The call
    /// has no timeout, because the memory of the processes can be large.
    pub async fn restore(&self, restore: shim::RestoreContainer) -> Result<i32, Error> {
        match self.inner.link.call(request::Call::Restore(restore), Vec::new()).await? {
            (reply::Result::Created(created), _) => Ok(created.pid),
            (reply::Result::Error(error), _) => Err(Error::from(error)),
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
        self.done(request::Call::Signal(signal), self.timeouts.answer).await
    }

    /// Starts another process in a running container. Its exit is an event with `exec_id`. If the shim does not answer
    /// within the timeout, it can still start the process. Then the caller must kill that process. `process` is a
    /// `process` object of the OCI runtime specification.
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
    ) -> Result<StartResult, Error> {
        let process =
            serde_json::to_vec(process).map_err(|error| Error::invalid("encode the process", &error))?;
        let mut exec = shim::Exec {
            container_id: container_id.to_owned(),
            exec_id: exec_id.to_owned(),
            process,
            ..Default::default()
        };
        let mut fds = match stdio {
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
        if exec.process.len() > MAX_INLINE_BYTES {
            let process = std::mem::take(&mut exec.process);
            fds.push(
                file::memory_file(&process).map_err(|error| Error::invalid("pass the process", &error))?,
            );
            exec.process_in_file = true;
        }
        let inner = Arc::clone(&self.inner);
        // Runs in a task, because the process may start after the call was cancelled.
        let mut answer = tokio::spawn(async move { inner.link.call(request::Call::Exec(exec), fds).await });
        match timeout(self.timeouts.work, &mut answer).await {
            Ok(answer) => {
                let started: Started = PendingStart::parse(answer)?;
                Ok(StartResult::Started(started))
            }
            Err(_late) => Ok(StartResult::PendingStart(PendingStart(answer))),
        }
    }

    /// Sets the size of a container's terminal.
    pub async fn resize(&self, container_id: &str, width: u16, height: u16) -> Result<(), Error> {
        let (container_id, width, height) = (container_id.to_owned(), u32::from(width), u32::from(height));
        let resize = shim::Resize { container_id, width, height };
        self.done(request::Call::Resize(resize), self.timeouts.answer).await
    }

    /// Attaches to the streams of a container. Earlier output is not sent.
    pub async fn attach(&self, container_id: &str, to: AttachTo) -> Result<Attached, Error> {
        let attach = shim::Attach {
            container_id: container_id.to_owned(),
            stdin: to.stdin,
            stdout: to.stdout,
            stderr: to.stderr,
            output_capacity: to.output_capacity,
        };
        let attach = request::Call::Attach(attach);
        let (attached, fds) = match self.call(attach, Vec::new(), self.timeouts.answer).await? {
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
        self.done(request::Call::CloseStdin(shim::CloseStdin { container_id }), self.timeouts.answer).await
    }

    /// Reopens the container's log file by its path, after the client renamed it.
    pub async fn reopen_log(&self, container_id: &str) -> Result<(), Error> {
        let container_id = container_id.to_owned();
        self.done(request::Call::ReopenLog(shim::ReopenLog { container_id }), self.timeouts.answer).await
    }

    /// Kills the remaining processes of the container, unmounts its root and removes its cgroup. An absent container is
    /// not an error, as the CRI's RemoveContainer requires.
    pub async fn delete(&self, container_id: &str) -> Result<(), Error> {
        let container_id = container_id.to_owned();
        self.done(request::Call::Delete(shim::DeleteContainer { container_id }), self.timeouts.end).await
    }

    /// Connects to a TCP port on the pod's loopback address, in its network namespace.
    ///
    /// # Errors
    /// [`ErrorKind::ConnectionRefused`] if no process listens there.
    pub async fn connect_port(&self, port: u16) -> Result<std::net::TcpStream, Error> {
        let connect = request::Call::Connect(shim::Connect { port: u32::from(port) });
        match self.call(connect, Vec::new(), self.timeouts.work).await? {
            (reply::Result::Connected(_), fds) => {
                let fd =
                    fds.into_iter().next().ok_or_else(|| Error::protocol("connected without a socket"))?;
                Ok(std::net::TcpStream::from(fd))
            }
            (other, _) => Err(Error::unexpected(&other)),
        }
    }

    /// Acknowledges the events up to `sequence`, which the caller has recorded. The shim does not send them again.
    pub async fn acknowledge(&self, sequence: u64) -> Result<(), Error> {
        self.done(request::Call::Acknowledge(shim::Acknowledge { sequence }), self.timeouts.answer).await
    }

    /// Kills all processes of the pod, unmounts, and waits for the end of the shim's process. A shim that fails or does not
    /// answer in time is killed: the pod's mounts end with it. The caller then ends and removes the remaining cgroups.
    ///
    /// # Errors
    /// See [`Shim::kill_shim`].
    pub async fn shutdown(&self) -> Result<(), Error> {
        let process = &self.inner.process;
        let mut ended = pin!(async {
            self.done(request::Call::Shutdown(shim::Shutdown {}), self.timeouts.end).await?;
            process.ended().await;
            Ok::<(), Error>(())
        });
        let early = timeout(self.timeouts.answer, &mut ended).await;
        let ended = match early {
            Ok(ended) => ended,
            // A shim that works on the shutdown still answers other calls.
            Err(_late) => match timeout(self.timeouts.answer, self.hello()).await {
                Ok(_any) => {
                    timeout(self.timeouts.end, ended).await.unwrap_or_else(|_late| Err(Error::silent()))
                }
                Err(_silence) => Err(Error::silent()),
            },
        };
        match ended {
            Ok(()) => Ok(()),
            Err(error) if error.kind == ErrorKind::Gone && process.is_ending().await => Ok(()),
            Err(error) => {
                tracing::warn!(pid = process.pid(), %error, "a shim did not shut down and is killed");
                self.kill_shim().await
            }
        }
    }

    /// Kills the shim without a request, as [`Shim::shutdown`] does after a timeout.
    ///
    /// # Errors
    /// [`ErrorKind::Silent`] if the shim does not die: the kernel kills a process only after its uninterruptible sleep.
    pub async fn kill_shim(&self) -> Result<(), Error> {
        let death = timeout(self.timeouts.death, self.inner.process.kill_and_reap()).await;
        death.map_err(|_late| Error::unkillable(self.pid()))
    }

    /// Kills the shim of a directory if no client can reach the shim: it does not listen yet, or no longer listens. The
    /// wait for its end has a timeout, because other pods wait meanwhile, and a hanging mount can delay the end.
    pub async fn kill_unreachable(dir: &Path, timeouts: Timeouts) {
        process::kill_unreachable(dir, timeouts).await;
    }

    /// Kills the shims of those directories in `parent` that are not in `known`, with their containers. No client can
    /// reach a shim whose directory was removed.
    pub(crate) async fn kill_strays(parent: &Path, known: HashSet<String>, timeouts: Timeouts) {
        strays::kill(parent, known, timeouts).await;
    }

    /// Whether a shim of a directory in `parent` runs. Reads the command lines of all processes, so it may block.
    pub(crate) fn runs_in(parent: &Path) -> bool {
        strays::exist(parent)
    }

    async fn done(&self, call: request::Call, limit: Duration) -> Result<(), Error> {
        match self.call(call, Vec::new(), limit).await? {
            (reply::Result::Done(_), _) => Ok(()),
            (other, _) => Err(Error::unexpected(&other)),
        }
    }

    async fn call(
        &self,
        call: request::Call,
        fds: Vec<OwnedFd>,
        limit: Duration,
    ) -> Result<(reply::Result, Vec<OwnedFd>), Error> {
        let answer = timeout(limit, self.inner.link.call(call, fds)).await;
        match answer.map_err(|_late| Error::silent())?? {
            (reply::Result::Error(error), _) => Err(Error::from(error)),
            answer => Ok(answer),
        }
    }
}

/// Default socket of the shim of `dir`.
#[must_use]
pub fn socket_path(dir: &Path) -> PathBuf {
    dir.join("shim.sock")
}

/// Fuzz target for the messages of a shim.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn fuzz(data: &[u8]) {
    link::fuzz(data);
}

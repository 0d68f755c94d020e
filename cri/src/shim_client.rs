//! Starts shims and talks to them: one connection a pod, calls answered in any order, exits
//! delivered as events until they are acknowledged.
//!
//! A [`Shim`] is a cheap handle. Dropping the last one closes the connection and leaves the shim
//! and its pod running: that is what an agent's end looks like to a pod.
//!
//! Order of use: [`Shim::spawn`] or [`Shim::connect`], take [`Shim::events`] once, then call.
//! Every event is repeated to each new connection until [`Shim::acknowledge`] named its sequence.
//!
//! A shim may live and not answer: stopped, frozen, asleep in the kernel over a disk that hangs. No call waits for it
//! longer than its [`Times`] say, and none is lost on it: what it was asked it does when it wakes.

mod error;
pub(crate) mod file;
mod link;
mod process;
mod socket;
mod stdio;
mod times;

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use coracle_proto::shim::{self, reply, request};
use tokio::sync::{OwnedRwLockReadGuard, mpsc};
use tokio::time::timeout;

pub use self::error::{Error, ErrorKind};
use self::link::Link;
use self::process::Process;
pub use self::stdio::{AttachTo, Attached, Begun, ExecStdio, Late, Started};
pub use self::times::Times;

/// From here on a command with its environment goes to the shim as a file. What is smaller, a shim of an earlier
/// version takes too.
const INLINE: usize = 128 << 10;

/// The protocol version this client speaks.
pub const PROTOCOL: u32 = 1;

/// A connection to one pod's shim.
#[derive(Clone, Debug)]
pub struct Shim {
    inner: Arc<Inner>,
    times: Times,
}

/// A shim that lives, when it was asked for its state.
#[derive(Debug)]
pub enum Reached {
    /// It gave it.
    Answers(Shim, shim::State),
    /// It has not answered yet. What it was asked it still hears.
    Silent(Shim),
}

#[derive(Debug)]
struct Inner {
    dir: PathBuf,
    link: Link,
    process: Process,
    events: Mutex<Option<mpsc::UnboundedReceiver<shim::Event>>>,
}

/// How a shim's connection ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Closed {
    /// The shim's process is gone, and with it the pod.
    Died,
    /// The shim lives. It talks to another client, or one side could not read what the other sent.
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
        times: Times,
    ) -> Result<(Self, shim::State), Error> {
        config.protocol = PROTOCOL;
        if config.socket.is_empty() {
            config.socket = socket_path(dir).to_string_lossy().into_owned();
        }
        let process = process::spawn(binary, dir, &config, times).await?;
        let socket = PathBuf::from(&config.socket);
        let error = match Self::over(dir, &socket, Some(process.clone()), times).await {
            Ok(Reached::Answers(shim, state)) => return Ok((shim, state)),
            Ok(Reached::Silent(_)) => Error::silent(),
            Err(error) => error,
        };
        process.kill_and_reap().await;
        Err(error)
    }

    /// Connects to the shim that lives in `dir` and learns what became of its containers.
    /// A client that was connected before is disconnected by this.
    ///
    /// # Errors
    /// [`ErrorKind::Gone`] when there is no shim, [`ErrorKind::Silent`] when it does not answer.
    pub async fn connect(dir: &Path) -> Result<(Self, shim::State), Error> {
        match Self::reach(dir, Times::default()).await? {
            Reached::Answers(shim, state) => Ok((shim, state)),
            Reached::Silent(_) => Err(Error::silent()),
        }
    }

    /// The same, for one that may be silent and is not given up for that.
    ///
    /// # Errors
    /// [`ErrorKind::Gone`] when there is no shim, [`ErrorKind::Silent`] when it does not even take a connection. All
    /// others say nothing of the shim, which may be well: [`ErrorKind::Unsupported`] is the word of one of a later version
    /// that does not serve ours any more.
    pub async fn reach(dir: &Path, times: Times) -> Result<Reached, Error> {
        let socket = process::read_config(dir).await?.socket;
        Self::over(dir, Path::new(&socket), None, times).await
    }

    /// Connects to the same shim anew, once the connection has ended.
    ///
    /// # Errors
    /// As [`Shim::reach`].
    pub async fn reach_again(&self) -> Result<Reached, Error> {
        Self::reach(self.dir(), self.times).await
    }

    /// The same shim, waited for as long as that.
    #[must_use]
    pub fn within(self, times: Times) -> Self {
        Self { times, ..self }
    }

    async fn over(dir: &Path, path: &Path, process: Option<Process>, times: Times) -> Result<Reached, Error> {
        let connected = timeout(times.answer, socket::Socket::connect(path)).await;
        let socket = connected.map_err(|_late| Error::silent())??;
        let process = match process {
            Some(process) => process,
            None => Process::open_peer(socket.peer_pid()?, dir)?,
        };
        let (sender, receiver) = mpsc::unbounded_channel();
        let link = Link::open(socket, sender);
        let inner = Inner { dir: dir.to_owned(), link, process, events: Mutex::new(Some(receiver)) };
        let shim = Self { inner: Arc::new(inner), times };
        match timeout(times.answer, shim.hello()).await {
            Ok(Ok(state)) => Ok(Reached::Answers(shim, state)),
            // It lives, and ended the connection: somebody else may have come meanwhile. It can be reached again.
            Ok(Err(error)) if error.kind == ErrorKind::Gone && !shim.inner.process.is_dying().await => {
                Ok(Reached::Silent(shim))
            }
            Ok(Err(error)) => Err(error),
            Err(_late) => Ok(Reached::Silent(shim)),
        }
    }

    /// The shim's pid: `/proc/<pid>/ns/{net,ipc,uts}` are the pod's namespaces.
    #[must_use]
    pub fn pid(&self) -> i32 {
        self.inner.process.pid()
    }

    /// As long as the guard lives, the pid of a shim that this process has started is no other process's.
    pub(crate) async fn keep_pid(&self) -> OwnedRwLockReadGuard<()> {
        self.inner.process.keep_pid().await
    }

    /// Whether the shim's process has not ended: what was read before by its pid was its own.
    #[must_use]
    pub(crate) fn is_alive(&self) -> bool {
        self.inner.process.is_alive()
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

    /// Waits until the shim is dead. Cancel safe.
    pub async fn died(&self) {
        self.inner.process.died().await;
    }

    /// Asks for everything that the shim knows. Pending events are sent again. Waits for as long as it takes.
    pub async fn hello(&self) -> Result<shim::State, Error> {
        let hello = request::Call::Hello(shim::Hello { protocol: PROTOCOL });
        match self.inner.link.call(hello, Vec::new()).await? {
            (reply::Result::State(state), _) => Ok(state),
            (reply::Result::Error(error), _) => Err(Error::from(error)),
            (other, _) => Err(Error::unexpected(&other)),
        }
    }

    /// Mounts the root file system and creates the container, which then waits for
    /// [`Shim::start`]. On failure nothing of it is left.
    pub async fn create(&self, create: shim::CreateContainer) -> Result<i32, Error> {
        match self.call(request::Call::Create(create), Vec::new(), self.times.work).await? {
            (reply::Result::Created(created), _) => Ok(created.pid),
            (other, _) => Err(Error::unexpected(&other)),
        }
    }

    /// Runs the created container's command.
    pub async fn start(&self, container_id: &str) -> Result<(), Error> {
        let container_id = container_id.to_owned();
        self.done(request::Call::Start(shim::StartContainer { container_id }), self.times.work).await
    }

    /// Starts a created container with the processes of a checkpoint, and gives the pid of the first. What is in
    /// their memory may be much: as long as the shim lives it is waited for.
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
        self.done(request::Call::Signal(signal), self.times.answer).await
    }

    /// Starts another process in a running container; its exit comes as an event with `exec_id`. One that the shim
    /// may yet start, after its time, is the caller's to end then.
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
    ) -> Result<Begun, Error> {
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
        if exec.process.len() > INLINE {
            let process = std::mem::take(&mut exec.process);
            fds.push(file::holding(&process).map_err(|error| Error::invalid("pass the process", &error))?);
            exec.process_in_file = true;
        }
        let inner = Arc::clone(&self.inner);
        // On its own: whoever gives up has asked for a process that may start yet.
        let mut answer = tokio::spawn(async move { inner.link.call(request::Call::Exec(exec), fds).await });
        match timeout(self.times.work, &mut answer).await {
            Ok(answer) => {
                let started: Started = Late::hear(answer)?;
                Ok(Begun::Started(started))
            }
            Err(_late) => Ok(Begun::Late(Late(answer))),
        }
    }

    /// Sets the size of a container's terminal.
    pub async fn resize(&self, container_id: &str, width: u16, height: u16) -> Result<(), Error> {
        let (container_id, width, height) = (container_id.to_owned(), u32::from(width), u32::from(height));
        let resize = shim::Resize { container_id, width, height };
        self.done(request::Call::Resize(resize), self.times.answer).await
    }

    /// Attaches to a container's streams, from now on.
    pub async fn attach(&self, container_id: &str, to: AttachTo) -> Result<Attached, Error> {
        let attach = shim::Attach {
            container_id: container_id.to_owned(),
            stdin: to.stdin,
            stdout: to.stdout,
            stderr: to.stderr,
        };
        let attach = request::Call::Attach(attach);
        let (attached, fds) = match self.call(attach, Vec::new(), self.times.answer).await? {
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
        self.done(request::Call::CloseStdin(shim::CloseStdin { container_id }), self.times.answer).await
    }

    /// Opens the container's log file anew by its path, after somebody renamed it.
    pub async fn reopen_log(&self, container_id: &str) -> Result<(), Error> {
        let container_id = container_id.to_owned();
        self.done(request::Call::ReopenLog(shim::ReopenLog { container_id }), self.times.answer).await
    }

    /// Kills what is left of the container, unmounts its root and removes its cgroup. An absent
    /// container is a success, as CRI's RemoveContainer wants it.
    pub async fn delete(&self, container_id: &str) -> Result<(), Error> {
        let container_id = container_id.to_owned();
        self.done(request::Call::Delete(shim::DeleteContainer { container_id }), self.times.end).await
    }

    /// Connects to a TCP port of the pod's loopback, from inside its network.
    ///
    /// # Errors
    /// [`ErrorKind::ConnectionRefused`] when nobody listens there.
    pub async fn connect_port(&self, port: u16) -> Result<std::net::TcpStream, Error> {
        let connect = request::Call::Connect(shim::Connect { port: u32::from(port) });
        match self.call(connect, Vec::new(), self.times.work).await? {
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
        self.done(request::Call::Acknowledge(shim::Acknowledge { sequence }), self.times.answer).await
    }

    /// Kills all that runs in the pod, unmounts, and waits until the shim's process is gone. A shim that cannot do
    /// it, or does not answer in its time, is killed: all the pod's mounts end with it, and whoever asked has
    /// forgotten the pod when he could ask again. What runs on in cgroups is the caller's to end and to remove.
    ///
    /// # Errors
    /// As [`Shim::kill_itself`].
    pub async fn shutdown(&self) -> Result<(), Error> {
        let process = &self.inner.process;
        let mut ended = pin!(async {
            self.done(request::Call::Shutdown(shim::Shutdown {}), self.times.end).await?;
            process.died().await;
            Ok::<(), Error>(())
        });
        let early = timeout(self.times.answer, &mut ended).await;
        let ended = match early {
            Ok(ended) => ended,
            // One that works on it says so, by whatever answer.
            Err(_late) => match timeout(self.times.answer, self.hello()).await {
                Ok(_any) => timeout(self.times.end, ended).await.unwrap_or_else(|_late| Err(Error::silent())),
                Err(_silence) => Err(Error::silent()),
            },
        };
        match ended {
            Ok(()) => Ok(()),
            Err(error) if error.kind == ErrorKind::Gone && process.is_dying().await => Ok(()),
            Err(error) => {
                tracing::warn!(pid = process.pid(), %error, "a shim does not end by itself and is killed");
                self.kill_itself().await
            }
        }
    }

    /// Kills the shim without asking it, as [`Shim::shutdown`] does with one that does not answer.
    ///
    /// # Errors
    /// [`ErrorKind::Silent`] when it does not die, which the kernel keeps from one that sleeps in it. It will, when
    /// that ends.
    pub async fn kill_itself(&self) -> Result<(), Error> {
        let death = timeout(self.times.death, self.inner.process.kill_and_reap()).await;
        death.map_err(|_late| Error::undead(self.pid()))
    }

    /// Ends the shim of a directory that nobody can talk to, if there is one: it may have been about to listen, or
    /// be past it. One that the kernel does not let die, as on a mount that hangs, is not waited for any longer
    /// than its time: the other pods are waiting too.
    pub async fn end_stray(dir: &Path, times: Times) {
        process::end_stray(dir, times).await;
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

//! The shim's event loop: all its event sources and their handlers.

mod attach;
mod connect;
mod create;
mod delete;
mod exec;
mod exit;
mod restore;
mod shutdown;
mod signal;
mod start;

use std::collections::BTreeMap;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use coracle_proto::shim::error::Kind;
use coracle_proto::shim::{Done, Request, SandboxConfig, State, reply, request};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::Signal;

use crate::call_error::CallError;
use crate::call_id::CallId;
use crate::container::{Container, Phase};
use crate::events::Events;
use crate::exec::Exec;
use crate::log::Output;
use crate::report::note;
use crate::setup::Pod;
use crate::wire::{Agent, Received};

/// Version of the shim protocol that this shim implements.
const PROTOCOL: u32 = 1;
/// Maximum bytes of one read from a container's output.
const BUFFER: usize = 16 * 1024;

type CallResult = Result<(reply::Result, Vec<OwnedFd>), CallError>;

/// A pod with its containers and execs.
pub(crate) struct Shim {
    config: SandboxConfig,
    dir: PathBuf,
    pod: Pod,
    agent: Option<Agent>,
    /// Number of agent connections so far.
    connection: u64,
    /// The agent has sent Hello, so it receives exit events.
    greeted: bool,
    containers: BTreeMap<u32, Container>,
    execs: BTreeMap<u32, Exec>,
    connects: BTreeMap<u32, connect::Connecting>,
    serial: u32,
    events: Events,
    unclaimed: exit::UnclaimedExits,
    shutdown: Option<shutdown::Shutdown>,
    buffer: Vec<u8>,
}

/// A descriptor that the loop polls. Containers, execs and connects are identified by their serial number.
#[derive(Clone, Copy, Debug)]
enum Source {
    Signals,
    Listener,
    Agent,
    Report(u32),
    Output(u32, Output),
    /// The container's terminal, if it has queued input. The loop waits until the terminal is writable.
    Master(u32),
    /// Input of an attached terminal, by the socket's descriptor.
    Terminal(u32, i32),
    /// The pipe of an attached reader, by its descriptor. The loop detects that the reader has closed the pipe.
    Reader(u32, i32),
    Dying(u32),
    ExecReport(u32),
    Connect(u32),
}

// === impl Shim ===

impl Shim {
    pub(crate) fn new(config: SandboxConfig, dir: PathBuf, pod: Pod) -> Self {
        Self {
            config,
            dir,
            pod,
            agent: None,
            connection: 0,
            greeted: false,
            containers: BTreeMap::new(),
            execs: BTreeMap::new(),
            connects: BTreeMap::new(),
            serial: 0,
            events: Events::default(),
            unclaimed: exit::UnclaimedExits::default(),
            shutdown: None,
            buffer: vec![0; BUFFER],
        }
    }

    /// Runs until the pod is shut down.
    pub(crate) fn serve(mut self) -> nix::Result<()> {
        loop {
            let ready = self.wait()?;
            for (source, flags) in ready {
                self.handle(source, flags);
            }
            self.handle_deadlines();
            if self.is_over() {
                return Ok(());
            }
        }
    }

    fn wait(&self) -> nix::Result<Vec<(Source, PollFlags)>> {
        // `watched` and `next_deadline` use the same time. With two readings of the clock, a pause could end between
        // the readings. The loop would then neither poll the output nor wake up.
        let now = Instant::now();
        let watched = self.watched(now);
        let mut fds: Vec<PollFd<'_>> = watched.iter().map(|one| PollFd::new(one.fd, one.flags)).collect();
        let timeout = self.next_deadline(now).map(|at| at.saturating_duration_since(Instant::now()));
        // The timeout is rounded up. Otherwise the loop could wake up just before the deadline, again and again.
        let timeout = timeout.map(|t| t + Duration::from_millis(1));
        let timeout =
            timeout.map_or(PollTimeout::NONE, |t| PollTimeout::try_from(t).unwrap_or(PollTimeout::MAX));
        match poll(&mut fds, timeout) {
            Ok(_) | Err(nix::Error::EINTR) => {}
            Err(error) => return Err(error),
        }
        let ready = watched.iter().zip(&fds).filter_map(|(one, fd)| {
            let flags = fd.revents().unwrap_or(PollFlags::empty());
            (!flags.is_empty()).then_some((one.source, flags))
        });
        Ok(ready.collect())
    }

    /// All polled descriptors. Reports come before signals, so that a child's messages are read before its
    /// exit.
    fn watched(&self, now: Instant) -> Vec<Watched<'_>> {
        let input = PollFlags::POLLIN;
        let mut watched = Vec::with_capacity(4 + 4 * self.containers.len());
        for (serial, container) in &self.containers {
            watch_container(*serial, container, now, &mut watched);
        }
        for (serial, exec) in &self.execs {
            let report = exec.report.as_ref();
            watched.extend(report.map(|fd| Watched::new(Source::ExecReport(*serial), fd.as_fd(), input)));
        }
        for (serial, connecting) in &self.connects {
            watched.push(Watched::new(Source::Connect(*serial), connecting.as_fd(), PollFlags::POLLOUT));
        }
        if let Some(agent) = &self.agent {
            let output = if agent.has_queued_packets() { PollFlags::POLLOUT } else { PollFlags::empty() };
            watched.push(Watched::new(Source::Agent, agent.as_fd(), input | output));
        }
        watched.push(Watched::new(Source::Signals, self.pod.signals.as_fd(), input));
        watched.push(Watched::new(Source::Listener, self.pod.listener.as_fd(), input));
        watched
    }

    fn handle(&mut self, source: Source, flags: PollFlags) {
        match source {
            Source::Signals => self.take_signals(),
            Source::Listener => self.accept(),
            Source::Agent => self.read_agent(flags),
            Source::Report(serial) => self.read_creator_report(serial),
            Source::ExecReport(serial) => self.read_exec_report(serial),
            Source::Dying(serial) => self.continue_deletion(serial),
            Source::Connect(serial) => self.finish_connect(serial),
            Source::Output(serial, output) => {
                if let Some(container) = self.containers.get_mut(&serial) {
                    container.stdio.forward_output(output, &mut self.buffer);
                }
                self.end_draining(serial);
            }
            Source::Master(serial) => {
                if let Some(container) = self.containers.get_mut(&serial) {
                    container.stdio.flush_input();
                }
            }
            Source::Terminal(serial, socket) => {
                if let Some(container) = self.containers.get_mut(&serial) {
                    container.stdio.read_terminal(socket, &mut self.buffer[..4096]);
                }
            }
            Source::Reader(serial, pipe) => {
                if let Some(container) = self.containers.get_mut(&serial) {
                    container.stdio.drop_reader(pipe);
                }
            }
        }
    }

    fn take_signals(&mut self) {
        while let Ok(Some(info)) = self.pod.signals.read_signal() {
            if info.ssi_signo == Signal::SIGTERM as u32 {
                self.shut_down(None);
            }
        }
        self.reap();
    }

    /// The earliest deadline of any container.
    fn next_deadline(&self, now: Instant) -> Option<Instant> {
        let dues = self.containers.values().flat_map(|container| {
            let draining = match container.phase {
                Phase::Draining { until, .. } => Some(until),
                _ => None,
            };
            [
                draining,
                container.deletion.as_ref().and_then(|deletion| deletion.retry_at),
                container.paused_until(now),
            ]
        });
        dues.flatten().min()
    }

    fn handle_deadlines(&mut self) {
        let now = Instant::now();
        let serials: Vec<u32> = self.containers.keys().copied().collect();
        for serial in serials {
            self.end_draining(serial);
            let again =
                self.containers.get(&serial).and_then(|c| c.deletion.as_ref()).and_then(|d| d.retry_at);
            if again.is_some_and(|at| at <= now) {
                self.continue_deletion(serial);
            }
        }
    }

    // --- the agent ---

    /// Accepts an agent. The new connection replaces the previous connection, whose agent has ended or is about to be
    /// replaced.
    fn accept(&mut self) {
        match self.pod.listener.accept() {
            Ok(agent) => {
                self.agent = Some(agent);
                self.connection += 1;
                self.greeted = false;
            }
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(error) => note(&format!("cannot accept an agent: {error}")),
        }
    }

    fn read_agent(&mut self, flags: PollFlags) {
        if flags.contains(PollFlags::POLLOUT) {
            let flushed = self.agent.as_mut().map_or(Ok(()), Agent::flush);
            self.disconnect_on_error(flushed);
        }
        if !flags.intersects(PollFlags::POLLIN | PollFlags::POLLHUP | PollFlags::POLLERR) {
            return;
        }
        let Some(agent) = self.agent.as_ref() else { return };
        match agent.receive() {
            Received::Nothing => {}
            Received::End => self.agent = None,
            Received::Request { id, request, fds } => {
                let call_id = CallId { connection: self.connection, id };
                if let Some(answer) = self.call(call_id, request, fds) {
                    self.reply(call_id, answer);
                }
            }
        }
    }

    fn disconnect_on_error(&mut self, sent: std::io::Result<()>) {
        if let Err(error) = sent {
            note(&format!("cannot send to the agent, closing its connection: {error}"));
            self.agent = None;
        }
    }

    fn reply(&mut self, call_id: CallId, answer: CallResult) {
        if call_id.connection != self.connection {
            return;
        }
        let is_hello = matches!(answer, Ok((reply::Result::State(_), _)));
        let Some(agent) = self.agent.as_mut() else { return };
        let mut sent = agent.reply(call_id.id, answer);
        if is_hello {
            self.greeted = true;
            sent = sent.and_then(|()| self.events.pending().try_for_each(|event| agent.event(event)));
        }
        self.disconnect_on_error(sent);
    }

    /// Handles a call. `None` if the reply is sent later.
    fn call(&mut self, call_id: CallId, request: Request, fds: Vec<OwnedFd>) -> Option<CallResult> {
        use request::Call;
        let unknown = || Err(CallError::new(Kind::Unsupported, "this shim does not support that call"));
        Some(match request.call {
            None => unknown(),
            Some(Call::Acknowledge(acknowledge)) => {
                self.events.acknowledge(acknowledge.sequence);
                done()
            }
            Some(Call::Shutdown(_)) => {
                self.shut_down(Some(call_id));
                return None;
            }
            Some(_) if self.shutdown.is_some() => {
                Err(CallError::new(Kind::WrongState, "the pod is being shut down"))
            }
            Some(Call::Hello(_)) => Ok((reply::Result::State(self.state()), Vec::new())),
            Some(Call::Create(create)) => return self.create(call_id, &create).err().map(Err),
            Some(Call::Start(start)) => return self.start(call_id, &start.container_id).err().map(Err),
            Some(Call::Restore(restore)) => return self.restore(call_id, &restore).err().map(Err),
            Some(Call::Signal(signal)) => self.signal(&signal).and_then(|()| done()),
            Some(Call::Exec(exec)) => return self.exec(call_id, &exec, fds).err().map(Err),
            Some(Call::Resize(resize)) => self.resize(&resize).and_then(|()| done()),
            Some(Call::Attach(attach)) => self.attach(&attach),
            Some(Call::CloseStdin(close)) => self.close_stdin(&close.container_id).and_then(|()| done()),
            Some(Call::ReopenLog(reopen)) => self.reopen_log(&reopen.container_id).and_then(|()| done()),
            Some(Call::Delete(delete)) => return self.delete(call_id, &delete.container_id),
            Some(Call::Connect(connect)) => return self.connect(call_id, connect.port),
        })
    }

    fn state(&self) -> State {
        State {
            protocol: PROTOCOL,
            sandbox_id: self.config.sandbox_id.clone(),
            pid: nix::unistd::getpid().as_raw(),
            init_pid: self.pod.init.as_ref().map_or(0, |init| init.pid()),
            containers: self.containers.values().map(Container::state).collect(),
            pending_events: self.events.pending().len() as u64,
            execs: self.execs.values().filter_map(Exec::state).collect(),
        }
    }

    // --- lookup ---

    fn next_serial(&mut self) -> u32 {
        self.serial = self.serial.wrapping_add(1);
        self.serial
    }

    fn serial_of(&self, id: &str) -> Result<u32, CallError> {
        let found = self.containers.iter().find(|(_, container)| container.id == id);
        found.map(|(serial, _)| *serial).ok_or_else(|| CallError::no_container(id))
    }

    fn container(&mut self, id: &str) -> Result<&mut Container, CallError> {
        self.containers
            .values_mut()
            .find(|container| container.id == id)
            .ok_or_else(|| CallError::no_container(id))
    }

    fn exec_of(&self, container_id: &str, exec_id: &str) -> Result<&Exec, CallError> {
        let mut execs = self.execs.values();
        let found = execs.find(|exec| exec.container_id == container_id && exec.exec_id == exec_id);
        found.ok_or_else(|| {
            CallError::new(Kind::NotFound, format!("there is no exec {exec_id} in {container_id}"))
        })
    }
}

/// A polled descriptor.
struct Watched<'a> {
    source: Source,
    fd: BorrowedFd<'a>,
    flags: PollFlags,
}

// === impl Watched ===

impl<'a> Watched<'a> {
    fn new(source: Source, fd: BorrowedFd<'a>, flags: PollFlags) -> Self {
        Self { source, fd, flags }
    }
}

fn done() -> CallResult {
    Ok((reply::Result::Done(Done {}), Vec::new()))
}

fn watch_container<'a>(serial: u32, container: &'a Container, now: Instant, watched: &mut Vec<Watched<'a>>) {
    let input = PollFlags::POLLIN;
    let report = container.report.as_ref();
    watched.extend(report.map(|fd| Watched::new(Source::Report(serial), fd.as_fd(), input)));
    let is_paused = container.paused_until(now).is_some();
    for output in [Output::Stdout, Output::Stderr].into_iter().filter(|_| !is_paused) {
        let pipe = container.stdio.output(output);
        watched.extend(pipe.map(|fd| Watched::new(Source::Output(serial, output), fd, input)));
    }
    if let Some(master) = container.stdio.master().filter(|_| container.stdio.has_queued_input()) {
        watched.push(Watched::new(Source::Master(serial), master.as_fd(), PollFlags::POLLOUT));
    }
    for terminal in container.stdio.terminals() {
        // A terminal with queued input is not read, but its hang-up is still detected.
        let flags = if terminal.is_idle() { input } else { PollFlags::empty() };
        let source = Source::Terminal(serial, terminal.socket.as_raw_fd());
        watched.push(Watched::new(source, terminal.socket.as_fd(), flags));
    }
    for reader in container.stdio.readers() {
        let source = Source::Reader(serial, reader.as_raw_fd());
        watched.push(Watched::new(source, reader, PollFlags::empty()));
    }
    let dying = container.deletion.iter().flat_map(|deletion| &deletion.dying);
    watched.extend(dying.map(|pidfd| Watched::new(Source::Dying(serial), pidfd.as_fd(), input)));
}

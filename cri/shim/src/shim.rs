//! The shim's loop: everything that can wake it, and what it then does.

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

use crate::container::{Container, Phase};
use crate::events::Events;
use crate::exec::Exec;
use crate::fault::Fault;
use crate::log::Output;
use crate::report::note;
use crate::setup::Pod;
use crate::wire::{Agent, Received};

/// The protocol's version that this shim speaks.
const PROTOCOL: u32 = 1;
/// One read of an output, and longest line of a log.
const BUFFER: usize = 16 * 1024;

type Answer = Result<(reply::Result, Vec<OwnedFd>), Fault>;

/// Who waits for a reply: a call of one connection. One of a connection that ended gets none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ticket {
    connection: u64,
    id: u64,
}

/// A pod and all that runs in it.
pub(crate) struct Shim {
    config: SandboxConfig,
    dir: PathBuf,
    pod: Pod,
    agent: Option<Agent>,
    /// Counts the agents that have connected.
    connection: u64,
    /// The agent has said hello and so is told of exits.
    greeted: bool,
    containers: BTreeMap<u32, Container>,
    execs: BTreeMap<u32, Exec>,
    connects: BTreeMap<u32, connect::Connecting>,
    serial: u32,
    events: Events,
    early: exit::Early,
    ending: Option<shutdown::Ending>,
    buffer: Vec<u8>,
}

/// One thing that woke us.
#[derive(Clone, Copy, Debug)]
enum Source {
    Signals,
    Listener,
    Agent,
    Report(u32),
    Output(u32, Output),
    /// A terminal that takes input again.
    Master(u32),
    /// What somebody types who is attached, by the socket's number.
    Terminal(u32, i32),
    /// One who is attached to an output, gone.
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
            early: exit::Early::default(),
            ending: None,
            buffer: vec![0; BUFFER],
        }
    }

    /// Until the pod is shut down.
    pub(crate) fn serve(mut self) -> nix::Result<()> {
        loop {
            let ready = self.wait()?;
            for (source, flags) in ready {
                self.handle(source, flags);
            }
            self.look_at_clock();
            if self.is_over() {
                return Ok(());
            }
        }
    }

    fn wait(&self) -> nix::Result<Vec<(Source, PollFlags)>> {
        let watched = self.watched();
        let mut fds: Vec<PollFd<'_>> =
            watched.iter().map(|(_, fd, flags)| PollFd::new(*fd, *flags)).collect();
        let timeout = self.next_deadline().map(|at| at.saturating_duration_since(Instant::now()));
        // Rounded up: a wake-up just before the time would spin.
        let timeout = timeout.map(|t| t + Duration::from_millis(1));
        let timeout =
            timeout.map_or(PollTimeout::NONE, |t| PollTimeout::try_from(t).unwrap_or(PollTimeout::MAX));
        match poll(&mut fds, timeout) {
            Ok(_) | Err(nix::Error::EINTR) => {}
            Err(error) => return Err(error),
        }
        let ready = watched.iter().zip(&fds).filter_map(|((source, ..), fd)| {
            let flags = fd.revents().unwrap_or(PollFlags::empty());
            (!flags.is_empty()).then_some((*source, flags))
        });
        Ok(ready.collect())
    }

    /// Reports before signals: a child's word is heard before its end.
    fn watched(&self) -> Vec<(Source, BorrowedFd<'_>, PollFlags)> {
        let input = PollFlags::POLLIN;
        let mut watched = Vec::with_capacity(4 + 4 * self.containers.len());
        for (serial, container) in &self.containers {
            watch_container(*serial, container, &mut watched);
        }
        for (serial, exec) in &self.execs {
            watched.extend(
                exec.report.as_ref().map(|report| (Source::ExecReport(*serial), report.as_fd(), input)),
            );
        }
        for (serial, connecting) in &self.connects {
            watched.push((Source::Connect(*serial), connecting.as_fd(), PollFlags::POLLOUT));
        }
        if let Some(agent) = &self.agent {
            let behind = if agent.is_behind() { PollFlags::POLLOUT } else { PollFlags::empty() };
            watched.push((Source::Agent, agent.as_fd(), input | behind));
        }
        watched.push((Source::Signals, self.pod.signals.as_fd(), input));
        watched.push((Source::Listener, self.pod.listener.as_fd(), input));
        watched
    }

    fn handle(&mut self, source: Source, flags: PollFlags) {
        match source {
            Source::Signals => self.take_signals(),
            Source::Listener => self.accept(),
            Source::Agent => self.hear_agent(flags),
            Source::Report(serial) => self.hear_creator(serial),
            Source::ExecReport(serial) => self.hear_exec(serial),
            Source::Dying(serial) => self.go_on_deleting(serial),
            Source::Connect(serial) => self.finish_connect(serial),
            Source::Output(serial, output) => {
                if let Some(container) = self.containers.get_mut(&serial) {
                    container.stdio.pump(output, &mut self.buffer);
                }
                self.end_draining(serial);
            }
            Source::Master(serial) => {
                if let Some(container) = self.containers.get_mut(&serial) {
                    container.stdio.type_on();
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

    /// The earliest moment at which something is due.
    fn next_deadline(&self) -> Option<Instant> {
        let dues = self.containers.values().flat_map(|container| {
            let draining = match container.phase {
                Phase::Draining { until, .. } => Some(until),
                _ => None,
            };
            [draining, container.deletion.as_ref().and_then(|deletion| deletion.again)]
        });
        dues.flatten().min()
    }

    fn look_at_clock(&mut self) {
        let now = Instant::now();
        let serials: Vec<u32> = self.containers.keys().copied().collect();
        for serial in serials {
            self.end_draining(serial);
            let again = self.containers.get(&serial).and_then(|c| c.deletion.as_ref()).and_then(|d| d.again);
            if again.is_some_and(|at| at <= now) {
                self.go_on_deleting(serial);
            }
        }
    }

    // --- the agent ---

    /// The newest agent is the right one: the one before is gone, or about to be replaced.
    fn accept(&mut self) {
        match self.pod.listener.accept() {
            Ok(agent) => {
                self.agent = Some(agent);
                self.connection += 1;
                self.greeted = false;
            }
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(error) => note(&format!("accept an agent: {error}")),
        }
    }

    fn hear_agent(&mut self, flags: PollFlags) {
        if flags.contains(PollFlags::POLLOUT) {
            let flushed = self.agent.as_mut().map_or(Ok(()), Agent::flush);
            self.keep_agent(flushed);
        }
        if !flags.intersects(PollFlags::POLLIN | PollFlags::POLLHUP | PollFlags::POLLERR) {
            return;
        }
        let Some(agent) = self.agent.as_ref() else { return };
        match agent.receive() {
            Received::Nothing => {}
            Received::End => self.agent = None,
            Received::Request { id, request, fds } => {
                let ticket = Ticket { connection: self.connection, id };
                if let Some(answer) = self.call(ticket, request, fds) {
                    self.reply(ticket, answer);
                }
            }
        }
    }

    fn keep_agent(&mut self, sent: std::io::Result<()>) {
        if let Err(error) = sent {
            note(&format!("the agent was cut off: {error}"));
            self.agent = None;
        }
    }

    fn reply(&mut self, ticket: Ticket, answer: Answer) {
        if ticket.connection != self.connection {
            return;
        }
        let greeting = matches!(answer, Ok((reply::Result::State(_), _)));
        let Some(agent) = self.agent.as_mut() else { return };
        let mut sent = agent.reply(ticket.id, answer);
        if greeting {
            self.greeted = true;
            sent = sent.and_then(|()| self.events.pending().try_for_each(|event| agent.event(event)));
        }
        self.keep_agent(sent);
    }

    /// `None` when the answer comes later.
    fn call(&mut self, ticket: Ticket, request: Request, fds: Vec<OwnedFd>) -> Option<Answer> {
        use request::Call;
        let unknown = || Err(Fault::new(Kind::Unsupported, "this shim does not know that call"));
        Some(match request.call {
            None => unknown(),
            Some(Call::Acknowledge(acknowledge)) => {
                self.events.acknowledge(acknowledge.sequence);
                done()
            }
            Some(Call::Shutdown(_)) => {
                self.shut_down(Some(ticket));
                return None;
            }
            Some(_) if self.ending.is_some() => {
                Err(Fault::new(Kind::WrongState, "the pod is being shut down"))
            }
            Some(Call::Hello(_)) => Ok((reply::Result::State(self.state()), Vec::new())),
            Some(Call::Create(create)) => return self.create(ticket, &create).err().map(Err),
            Some(Call::Start(start)) => return self.start(ticket, &start.container_id).err().map(Err),
            Some(Call::Restore(restore)) => return self.restore(ticket, &restore).err().map(Err),
            Some(Call::Signal(signal)) => self.signal(&signal).and_then(|()| done()),
            Some(Call::Exec(exec)) => return self.exec(ticket, &exec, fds).err().map(Err),
            Some(Call::Resize(resize)) => self.resize(&resize).and_then(|()| done()),
            Some(Call::Attach(attach)) => self.attach(&attach),
            Some(Call::CloseStdin(close)) => self.close_stdin(&close.container_id).and_then(|()| done()),
            Some(Call::ReopenLog(reopen)) => self.reopen_log(&reopen.container_id).and_then(|()| done()),
            Some(Call::Delete(delete)) => return self.delete(ticket, &delete.container_id),
            Some(Call::Connect(connect)) => return self.connect(ticket, connect.port),
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

    fn serial_of(&self, id: &str) -> Result<u32, Fault> {
        let found = self.containers.iter().find(|(_, container)| container.id == id);
        found.map(|(serial, _)| *serial).ok_or_else(|| Fault::no_container(id))
    }

    fn container(&mut self, id: &str) -> Result<&mut Container, Fault> {
        self.containers
            .values_mut()
            .find(|container| container.id == id)
            .ok_or_else(|| Fault::no_container(id))
    }

    fn exec_of(&self, container_id: &str, exec_id: &str) -> Result<&Exec, Fault> {
        let mut execs = self.execs.values();
        let found = execs.find(|exec| exec.container_id == container_id && exec.exec_id == exec_id);
        found.ok_or_else(|| {
            Fault::new(Kind::NotFound, format!("there is no exec {exec_id} in {container_id}"))
        })
    }
}

fn done() -> Answer {
    Ok((reply::Result::Done(Done {}), Vec::new()))
}

fn watch_container<'a>(
    serial: u32,
    container: &'a Container,
    watched: &mut Vec<(Source, BorrowedFd<'a>, PollFlags)>,
) {
    let input = PollFlags::POLLIN;
    watched.extend(container.report.as_ref().map(|report| (Source::Report(serial), report.as_fd(), input)));
    for output in [Output::Stdout, Output::Stderr] {
        watched.extend(container.stdio.output(output).map(|fd| (Source::Output(serial, output), fd, input)));
    }
    if let Some(master) = container.stdio.master().filter(|_| container.stdio.has_typed()) {
        watched.push((Source::Master(serial), master.as_fd(), PollFlags::POLLOUT));
    }
    for terminal in container.stdio.terminals() {
        // One whose input is stuck is not read on, but its end is noticed.
        let flags = if terminal.is_idle() { input } else { PollFlags::empty() };
        let source = Source::Terminal(serial, terminal.socket.as_raw_fd());
        watched.push((source, terminal.socket.as_fd(), flags));
    }
    for reader in container.stdio.readers() {
        watched.push((Source::Reader(serial, reader.as_raw_fd()), reader, PollFlags::empty()));
    }
    let dying = container.deletion.iter().flat_map(|deletion| &deletion.dying);
    watched.extend(dying.map(|pidfd| (Source::Dying(serial), pidfd.as_fd(), input)));
}

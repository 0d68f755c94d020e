//! Exec: forks a process that joins the container. The process reports to the shim until it executes the program.

use std::io;
use std::os::fd::OwnedFd;

use coracle_proto::shim::error::Kind;
use coracle_proto::shim::{self as wire, ExecStarted, reply};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};

use super::{CallId, Shim};
use crate::call_error::CallError;
use crate::cgroup;
use crate::console;
use crate::container::Phase;
use crate::exec::{self, Exec};
use crate::kernel::{self, Fork};
use crate::report::{Message, Report, Reporter};

/// Maximum execs of a pod whose programs have not started. An exec freezes when it enters the cgroup of a frozen container,
/// and the shim keeps descriptors for it.
const MAX_STARTING: usize = 256;

impl Shim {
    /// Starts an exec. Returns an error if the exec cannot begin. Otherwise the call is answered when the forks report.
    pub(super) fn exec(
        &mut self,
        call_id: CallId,
        exec: &wire::Exec,
        fds: Vec<OwnedFd>,
    ) -> Result<(), CallError> {
        let id = &exec.container_id;
        let serial = self.serial_of(id)?;
        if exec.exec_id.is_empty() {
            return Err(CallError::new(Kind::Invalid, "an exec needs an id"));
        }
        if self.exec_of(id, &exec.exec_id).is_ok() {
            return Err(CallError::new(
                Kind::AlreadyExists,
                format!("the exec {} exists already", exec.exec_id),
            ));
        }
        let Some(container) = self.containers.get(&serial) else { return Err(CallError::no_container(id)) };
        if !matches!(container.phase, Phase::Running) || container.deletion.is_some() {
            return Err(CallError::wrong_state(id, container.description()));
        }
        if self.execs.values().filter(|exec| exec.report.is_some()).count() >= MAX_STARTING {
            let message =
                format!("{MAX_STARTING} commands in the pod have not started yet, which is the maximum");
            return Err(CallError::new(Kind::Internal, message));
        }
        let wanted = [exec.has_stdin, exec.has_stdout, exec.has_stderr, exec.process_in_file];
        let wanted = wanted.iter().filter(|has| **has).count();
        if wanted != fds.len() {
            return Err(CallError::new(
                Kind::Invalid,
                format!("the request names {wanted} descriptors, but has {}", fds.len()),
            ));
        }
        let begun = self.begin_exec(serial, call_id, exec, &fds);
        begun.map_err(|error| CallError::cannot("prepare the exec", &error))
    }

    fn begin_exec(
        &mut self,
        serial: u32,
        call_id: CallId,
        exec: &wire::Exec,
        fds: &[OwnedFd],
    ) -> io::Result<()> {
        let (cgroup, pid) = match self.containers.get(&serial) {
            Some(container) => (container.cgroup.clone(), container.pid),
            None => return Err(io::Error::from(io::ErrorKind::NotFound)),
        };
        let target = kernel::pidfd_open(pid)?;
        let (mut report, child_end) = Report::pair()?;
        let (console, child_console) = if exec.terminal {
            let pair = socketpair(AddressFamily::Unix, SockType::Stream, None, SockFlag::SOCK_CLOEXEC)?;
            (Some(pair.0), Some(pair.1))
        } else {
            (None, None)
        };
        let process = match fds.last() {
            Some(file) if exec.process_in_file => exec::ProcessSource::File(file),
            _ => exec::ProcessSource::Inline(&exec.process),
        };
        let mut fds = fds.iter();
        let stdio = [exec.has_stdin, exec.has_stdout, exec.has_stderr];
        let request = exec::ExecRequest {
            process,
            dir: &self.container_dir(&exec.container_id),
            cgroups: cgroup::existing(&self.pod.hierarchies, &cgroup),
            cgroup: &cgroup,
            target: &target,
            target_pid: pid,
            stdio: stdio.map(|has| if has { fds.next() } else { None }),
            terminal: child_console.as_ref(),
            adopts_orphans: exec.adopts_orphans,
            shim: nix::unistd::getpid().as_raw(),
            reporter: Reporter::new(&child_end),
        };
        match kernel::fork()? {
            Fork::Parent(pid) => report.expect(pid),
            Fork::Child => exec::run(&request),
        }
        let started = Exec {
            container: serial,
            container_id: exec.container_id.clone(),
            exec_id: exec.exec_id.clone(),
            awaited: exec.adopts_orphans,
            pid: 0,
            report: Some(report),
            call_id: Some(call_id),
            console,
            exit: None,
        };
        let serial = self.next_serial();
        self.execs.insert(serial, started);
        coracle_fault::point("shim.exec-forked");
        Ok(())
    }

    pub(super) fn read_exec_report(&mut self, serial: u32) {
        let Some(exec) = self.execs.get_mut(&serial) else { return };
        let Some(received) = exec.report.as_mut().map(Report::receive_all) else { return };
        let mut failed = None;
        for message in received.messages {
            match message {
                Message::Pid(pid) => {
                    exec.pid = pid;
                    // The process may have ended before its pid was reported.
                    exec.exit = self.unclaimed.take(pid).map(super::exit::exit_of);
                }
                Message::Failed(kind, message) => {
                    failed = exec.report.as_mut().map(|report| report.error(kind, &message));
                }
                Message::Cgroup(_)
                | Message::SharesPids
                | Message::Successor(_)
                | Message::Cause(_)
                | Message::Ready
                | Message::ByLibrary => {}
            }
        }
        if received.ended {
            let without_pid = exec.pid == 0;
            let ended_early = || CallError::new(Kind::Internal, "the exec ended before its program started");
            let error = failed.or_else(|| without_pid.then(ended_early));
            self.exec_started(serial, error);
        } else if let Some(error) = failed {
            // The failure is known, so the reply does not wait for the end of the first fork.
            self.exec_started(serial, Some(error));
        }
    }

    fn exec_started(&mut self, serial: u32, error: Option<CallError>) {
        let Some(exec) = self.execs.get_mut(&serial) else { return };
        exec.report = None;
        let call_id = exec.call_id.take();
        coracle_fault::point("shim.exec-begun");
        // An agent that has connected since the call does not wait for this exec. The shim's reply to that agent's
        // Hello did not list this exec as awaited.
        if exec.awaited
            && exec.pid > 0
            && call_id.is_some_and(|call_id| call_id.connection != self.connection)
        {
            let _already_ended = super::signal::send(exec.pid, nix::libc::SIGKILL);
        }
        let answer = match error {
            Some(error) => Err(error),
            None => take_terminal(exec)
                .map(|fds| (reply::Result::ExecStarted(ExecStarted { pid: exec.pid }), fds)),
        };
        let failed = answer.is_err();
        let exit = exec.exit.take();
        if let Some(call_id) = call_id {
            self.reply(call_id, answer);
        }
        if failed {
            self.execs.remove(&serial);
        } else if let Some(exit) = exit {
            self.exec_exited(serial, exit);
        }
    }
}

/// Receives the terminal's master for the agent. The shim keeps no copy, so that the terminal is hung up when the agent
/// closes its descriptor.
fn take_terminal(exec: &mut Exec) -> Result<Vec<OwnedFd>, CallError> {
    let Some(console) = exec.console.take() else { return Ok(Vec::new()) };
    let failed = |error: io::Error| CallError::cannot("receive the terminal", &error);
    Ok(vec![console::receive_from(&console).map_err(failed)?])
}

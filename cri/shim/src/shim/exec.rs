//! Exec: a fork that joins the container, whose report's end says that the program runs.

use std::io;
use std::os::fd::OwnedFd;

use coracle_proto::shim::error::Kind;
use coracle_proto::shim::{self as wire, ExecStarted, reply};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};

use super::{Shim, Ticket};
use crate::cgroup;
use crate::console;
use crate::container::Phase;
use crate::exec::{self, Exec};
use crate::fault::Fault;
use crate::kernel::{self, Fork};
use crate::report::{Report, Speaker, Word};

impl Shim {
    /// Answers itself only when it fails at once; else the forks' words do.
    pub(super) fn exec(&mut self, ticket: Ticket, exec: &wire::Exec, fds: Vec<OwnedFd>) -> Result<(), Fault> {
        let id = &exec.container_id;
        let serial = self.serial_of(id)?;
        if exec.exec_id.is_empty() {
            return Err(Fault::new(Kind::Invalid, "an exec needs an id"));
        }
        if self.exec_of(id, &exec.exec_id).is_ok() {
            return Err(Fault::new(
                Kind::AlreadyExists,
                format!("there is an exec {} already", exec.exec_id),
            ));
        }
        let Some(container) = self.containers.get(&serial) else { return Err(Fault::no_container(id)) };
        if !matches!(container.phase, Phase::Running) || container.deletion.is_some() {
            return Err(Fault::wrong_state(id, container.words()));
        }
        let wanted = [exec.has_stdin, exec.has_stdout, exec.has_stderr, exec.process_in_file];
        let wanted = wanted.iter().filter(|has| **has).count();
        if wanted != fds.len() {
            return Err(Fault::new(
                Kind::Invalid,
                format!("{wanted} descriptors are named, {} came", fds.len()),
            ));
        }
        let begun = self.begin_exec(serial, ticket, exec, &fds);
        begun.map_err(|error| Fault::doing("prepare the exec", &error))
    }

    fn begin_exec(
        &mut self,
        serial: u32,
        ticket: Ticket,
        exec: &wire::Exec,
        fds: &[OwnedFd],
    ) -> io::Result<()> {
        let (cgroup, pid) = match self.containers.get(&serial) {
            Some(container) => (container.cgroup.clone(), container.pid),
            None => return Err(io::Error::from(io::ErrorKind::NotFound)),
        };
        let target = kernel::pidfd_open(pid)?;
        let (report, speaking) = Report::pipe()?;
        let (console, theirs) = if exec.terminal {
            let pair = socketpair(AddressFamily::Unix, SockType::Stream, None, SockFlag::SOCK_CLOEXEC)?;
            (Some(pair.0), Some(pair.1))
        } else {
            (None, None)
        };
        let process = match fds.last() {
            Some(file) if exec.process_in_file => exec::Told::InFile(file),
            _ => exec::Told::Here(&exec.process),
        };
        let mut fds = fds.iter();
        let stdio = [exec.has_stdin, exec.has_stdout, exec.has_stderr];
        let plan = exec::Plan {
            process,
            dir: &self.container_dir(&exec.container_id),
            cgroups: cgroup::existing(&self.pod.hierarchies, &cgroup),
            cgroup: &cgroup,
            target: &target,
            target_pid: pid,
            stdio: stdio.map(|has| if has { fds.next() } else { None }),
            terminal: theirs.as_ref(),
            adopts_orphans: exec.adopts_orphans,
            shim: nix::unistd::getpid().as_raw(),
            speaker: Speaker::new(&speaking),
        };
        match kernel::fork()? {
            Fork::Parent(_) => {}
            Fork::Child => exec::run(&plan),
        }
        let begun = Exec {
            container: serial,
            container_id: exec.container_id.clone(),
            exec_id: exec.exec_id.clone(),
            awaited: exec.adopts_orphans,
            pid: 0,
            report: Some(report),
            ticket: Some(ticket),
            console,
            exit: None,
        };
        let serial = self.next_serial();
        self.execs.insert(serial, begun);
        coracle_fault::point("shim.exec-forked");
        Ok(())
    }

    pub(super) fn hear_exec(&mut self, serial: u32) {
        let Some(exec) = self.execs.get_mut(&serial) else { return };
        let Some(heard) = exec.report.as_mut().map(Report::hear) else { return };
        let mut failed = None;
        for word in heard.words {
            match word {
                Word::Pid(pid) => {
                    exec.pid = pid;
                    // It may have ended before its pid was told.
                    exec.exit = self.early.take(pid).map(super::exit::exit_of);
                }
                Word::Failed(kind, message) => {
                    failed = exec.report.as_mut().map(|report| report.fault(kind, &message));
                }
                Word::Cgroup(_) | Word::SharesPids | Word::Cause(_) | Word::Ready | Word::ByLibrary => {}
            }
        }
        if heard.ended {
            let never = exec.pid == 0;
            let silent = || Fault::new(Kind::Internal, "the exec died before it began");
            let fault = failed.or_else(|| never.then(silent));
            self.exec_began(serial, fault);
        } else if let Some(fault) = failed {
            // The other fork has still to go; nobody waits for it.
            self.exec_began(serial, Some(fault));
        }
    }

    fn exec_began(&mut self, serial: u32, fault: Option<Fault>) {
        let Some(exec) = self.execs.get_mut(&serial) else { return };
        exec.report = None;
        let ticket = exec.ticket.take();
        coracle_fault::point("shim.exec-begun");
        // The next agent was told of what it has to end when it said hello, and this was not there yet.
        if exec.awaited && exec.pid > 0 && ticket.is_some_and(|ticket| ticket.connection != self.connection) {
            let _ended_meanwhile = super::signal::send(exec.pid, nix::libc::SIGKILL);
        }
        let answer = match fault {
            Some(fault) => Err(fault),
            None => take_terminal(exec)
                .map(|fds| (reply::Result::ExecStarted(ExecStarted { pid: exec.pid }), fds)),
        };
        let failed = answer.is_err();
        let exit = exec.exit.take();
        if let Some(ticket) = ticket {
            self.reply(ticket, answer);
        }
        if failed {
            self.execs.remove(&serial);
        } else if let Some(exit) = exit {
            self.exec_exited(serial, exit);
        }
    }
}

/// The terminal's master for the agent. No copy stays: when the agent's is closed the terminal is hung up, as one is
/// that lost its user.
fn take_terminal(exec: &mut Exec) -> Result<Vec<OwnedFd>, Fault> {
    let Some(console) = exec.console.take() else { return Ok(Vec::new()) };
    let failed = |error: io::Error| Fault::doing("receive the terminal", &error);
    Ok(vec![console::receive_from(&console).map_err(failed)?])
}

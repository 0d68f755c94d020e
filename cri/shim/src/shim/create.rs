//! CreateContainer: streams and a creator, whose words are heard in the loop.

use std::io;
use std::path::{Path, PathBuf};

use coracle_proto::shim::error::Kind;
use coracle_proto::shim::{CreateContainer, Created, reply};
use nix::fcntl::OFlag;
use nix::unistd::pipe2;

use super::{Shim, Ticket};
use crate::cgroup;
use crate::console::Console;
use crate::container::{Container, Gate, Phase};
use crate::creator;
use crate::fault::Fault;
use crate::init::Process1;
use crate::kernel::{self, Fork};
use crate::log;
use crate::oom::OomEvents;
use crate::overlay;
use crate::process::PidNamespace;
use crate::report::{Report, Speaker, Word, note};
use crate::stdio::Stdio;

impl Shim {
    /// Answers itself only when it fails at once; else the creator's words do.
    pub(super) fn create(&mut self, ticket: Ticket, create: &CreateContainer) -> Result<(), Fault> {
        let id = &create.container_id;
        if !is_name(id) {
            return Err(Fault::new(Kind::Invalid, format!("{id:?} is no container id")));
        }
        if self.serial_of(id).is_ok() {
            return Err(Fault::new(Kind::AlreadyExists, format!("there is a container {id} already")));
        }
        let begun = self.begin(ticket, create);
        if begun.is_err() {
            let _ = creator::forget(&self.container_dir(id), &self.state_dir(id));
        }
        begun.map_err(|error| Fault::doing("prepare the container", &error))
    }

    fn begin(&mut self, ticket: Ticket, create: &CreateContainer) -> io::Result<()> {
        let id = &create.container_id;
        let dir = self.container_dir(id);
        std::fs::create_dir_all(&dir)?;
        let (stdio, ends) = Stdio::new(create)?;
        let console = if create.terminal { Some(Console::listen(&dir)?) } else { None };
        let (mut report, speaking) = Report::pair()?;
        let (waiting, gate) = pipe2(OFlag::O_CLOEXEC)?;
        // Nobody has waited for these processes, so their numbers are their own.
        let alive = self.containers.values().filter(|container| container.is_alive() && container.pid > 0);
        let of_containers: Vec<_> =
            alive.filter_map(|container| PidNamespace::of_child(container.pid)).collect();
        let of_init = self.pod.init.as_ref().map(Process1::namespace);
        let pid_namespaces: Vec<_> = of_init.into_iter().chain(&of_containers).collect();
        let plan = creator::Plan {
            id,
            bundle: Path::new(&create.bundle),
            dir: &dir,
            state: &self.dir.join("state"),
            rootfs: create.rootfs.as_ref(),
            console: console.as_ref().map(Console::path),
            ends: &ends,
            pod_dir: &self.dir,
            host_mounts: &self.pod.host_mounts,
            hierarchies: &self.pod.hierarchies,
            user: self.pod.user.as_ref(),
            images: &create.images,
            seccomp_program: &create.seccomp_program,
            shim: nix::unistd::getpid().as_raw(),
            pid_namespaces: &pid_namespaces,
            gate: &waiting,
        };
        let creator = fork_creator(&plan, Speaker::new(&speaking))?;
        report.expect(creator);
        let container = Container {
            id: id.clone(),
            phase: Phase::Creating { ticket, creator, first: 0, ready: false },
            pid: 0,
            gate: Gate::Pipe(gate),
            cgroup: String::new(),
            shares_pids: false,
            pod_oom_kills: 0,
            oom_events: None,
            target: create.rootfs.as_ref().map(|overlay| PathBuf::from(&overlay.target)),
            report: Some(report),
            console,
            stdio,
            created_at: 0,
            started_at: 0,
            restored_in: None,
            deletion: None,
        };
        let serial = self.next_serial();
        self.containers.insert(serial, container);
        Ok(())
    }

    pub(super) fn hear_creator(&mut self, serial: u32) {
        let Some(container) = self.containers.get_mut(&serial) else { return };
        let Some(heard) = container.report.as_mut().map(Report::hear) else { return };
        for word in heard.words {
            self.hear_word(serial, word);
        }
        if heard.ended {
            self.report_ended(serial);
        }
    }

    fn hear_word(&mut self, serial: u32, word: Word) {
        let Some(container) = self.containers.get_mut(&serial) else { return };
        match (word, &mut container.phase) {
            (Word::Cgroup(cgroup), _) => {
                let pod = cgroup::parent(&cgroup);
                container.pod_oom_kills = cgroup::oom_kills(&self.pod.hierarchies, pod).unwrap_or(0);
                container.cgroup = cgroup;
            }
            (Word::SharesPids, _) => container.shares_pids = true,
            // These two come from two processes, in any order.
            (Word::Pid(pid), Phase::Creating { first, .. }) => {
                *first = pid;
                self.created(serial);
            }
            (Word::Ready, Phase::Creating { ready, .. }) => {
                *ready = true;
                self.created(serial);
            }
            (Word::ByLibrary, Phase::Creating { ready, .. }) => {
                *ready = true;
                container.gate = Gate::Library;
                self.created(serial);
            }
            (Word::Failed(kind, message), Phase::Creating { ticket, .. }) => {
                let ticket = *ticket;
                let fault = container.report.as_mut().map(|report| report.fault(kind, &message));
                let fault = fault.unwrap_or_else(|| Fault::new(kind, message));
                self.creation_failed(serial, ticket, fault);
            }
            (Word::Failed(kind, message), Phase::Starting { ticket }) => {
                let ticket = *ticket;
                self.start_failed(serial, ticket, Fault::new(kind, message));
            }
            // Causes are kept by the report; the rest was said before or is too late.
            _ => {}
        }
    }

    /// Once all is said that there is to say.
    fn created(&mut self, serial: u32) {
        let Some(container) = self.containers.get_mut(&serial) else { return };
        let Phase::Creating { ticket, first: pid @ 1.., ready: true, .. } = container.phase else { return };
        coracle_fault::point("shim.created");
        if let Some(console) = container.console.take() {
            let master = console.receive().and_then(|master| container.stdio.set_master(master));
            if let Err(error) = master {
                note(&format!("the terminal of {} did not come: {error}", container.id));
            }
        }
        container.oom_events =
            OomEvents::listen(&self.pod.hierarchies, &container.cgroup).and_then(|events| {
                let id = &container.id;
                events
                    .map_err(|error| {
                        note(&format!("the kernel will not tell of a want of memory of {id}: {error}"))
                    })
                    .ok()
            });
        container.pid = pid;
        container.phase = Phase::Created;
        container.created_at = nanos();
        self.reply(ticket, Ok((reply::Result::Created(Created { pid }), Vec::new())));
        self.claim(pid);
    }

    /// The end of the report: the program runs, or nothing does.
    fn report_ended(&mut self, serial: u32) {
        let Some(container) = self.containers.get_mut(&serial) else { return };
        let phase = container.phase.clone();
        match phase {
            Phase::Creating { ticket, .. } => {
                let report = container.report.as_mut();
                let fault = report.map(|report| report.fault(Kind::Internal, "the creator died"));
                let fault = fault.unwrap_or_else(|| Fault::new(Kind::Internal, "the creator died"));
                self.creation_failed(serial, ticket, fault);
            }
            Phase::Starting { ticket } => self.started(serial, ticket),
            Phase::Created
            | Phase::Restoring { .. }
            | Phase::Running
            | Phase::Draining { .. }
            | Phase::Exited { .. } => {
                container.report = None;
            }
        }
    }

    /// Undoes it by the way of every deletion, and answers when nothing is left.
    fn creation_failed(&mut self, serial: u32, ticket: Ticket, fault: Fault) {
        if let Some(container) = self.containers.get_mut(&serial) {
            container.report = None;
            let exit = super::exit::never_ran();
            container.phase = Phase::Exited { exit };
            container.deletion.get_or_insert_default().failed = Some((ticket, fault));
        }
        self.begin_deleting(serial, None);
    }

    pub(super) fn container_dir(&self, id: &str) -> PathBuf {
        self.dir.join("containers").join(id)
    }

    pub(super) fn state_dir(&self, id: &str) -> PathBuf {
        self.dir.join("state").join(id)
    }

    pub(super) fn unmount_root(&self, serial: u32) {
        let Some(container) = self.containers.get(&serial) else { return };
        if let Some(target) = container.target.as_deref()
            && let Err(error) = overlay::unmount(target)
        {
            note(&format!("unmount {}: {error}", target.display()));
        }
    }
}

fn fork_creator(plan: &creator::Plan<'_>, speaker: Speaker) -> io::Result<i32> {
    match kernel::fork()? {
        Fork::Parent(pid) => Ok(pid),
        Fork::Child => creator::run(plan, speaker),
    }
}

/// A name that is one part of a path and means only itself.
fn is_name(id: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    !id.is_empty() && id.len() <= 128 && !id.starts_with('.') && id.bytes().all(allowed)
}

pub(super) fn nanos() -> i64 {
    i64::try_from(log::now().as_nanos()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_cannot_leave_its_directory() {
        assert!(is_name("0f3a-b_c.d"));
        ["", ".", "..", "a/b", "a b", ".x"].iter().for_each(|id| assert!(!is_name(id), "{id:?}"));
    }
}

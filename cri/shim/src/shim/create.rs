//! CreateContainer: makes the streams and forks a creator, whose report the loop reads.

use std::io;
use std::path::{Path, PathBuf};

use coracle_proto::shim::error::Kind;
use coracle_proto::shim::{CreateContainer, Created, Exit, reply};
use nix::fcntl::OFlag;
use nix::unistd::pipe2;

use super::{CallId, Shim};
use crate::call_error::CallError;
use crate::cgroup;
use crate::console::Console;
use crate::container::{Container, Phase, StartChannel};
use crate::creator;
use crate::init::Process1;
use crate::kernel::{self, Fork};
use crate::log;
use crate::oom::OomEvents;
use crate::overlay;
use crate::process::PidNamespace;
use crate::report::{Message, Report, Reporter, note};
use crate::stdio::Stdio;

impl Shim {
    /// Forks a creator. Returns an error if the creation cannot begin. Otherwise the call is answered when the creator
    /// reports.
    pub(super) fn create(&mut self, call_id: CallId, create: &CreateContainer) -> Result<(), CallError> {
        let id = &create.container_id;
        if !is_name(id) {
            return Err(CallError::new(
                Kind::Invalid,
                format!(
                    "invalid container id {id:?}: use letters, digits, '-', '_', '.', at most 128 characters"
                ),
            ));
        }
        if self.serial_of(id).is_ok() {
            return Err(CallError::new(Kind::AlreadyExists, format!("the container {id} exists already")));
        }
        let begun = self.begin(call_id, create);
        if begun.is_err() {
            let _ = creator::remove_files(&self.container_dir(id), &self.state_dir(id));
        }
        begun.map_err(|error| CallError::cannot("prepare the container", &error))
    }

    fn begin(&mut self, call_id: CallId, create: &CreateContainer) -> io::Result<()> {
        let id = &create.container_id;
        let dir = self.container_dir(id);
        std::fs::create_dir_all(&dir)?;
        let (stdio, ends) = Stdio::new(create)?;
        let console = if create.terminal { Some(Console::listen(&dir)?) } else { None };
        let (mut report, child_end) = Report::pair()?;
        let (waiting, start_pipe) = pipe2(OFlag::O_CLOEXEC)?;
        // The first processes of these containers are not reaped yet, so their pids cannot have been reused.
        let alive = self.containers.values().filter(|container| container.is_alive() && container.pid > 0);
        let of_containers: Vec<_> =
            alive.filter_map(|container| PidNamespace::of_child(container.pid)).collect();
        let of_init = self.pod.init.as_ref().map(Process1::namespace);
        let pid_namespaces: Vec<_> = of_init.into_iter().chain(&of_containers).collect();
        let request = creator::CreateRequest {
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
            start_pipe: &waiting,
        };
        let creator = fork_creator(&request, Reporter::new(&child_end))?;
        report.expect(creator);
        let container = Container {
            id: id.clone(),
            phase: Phase::Creating { call_id, creator, first: 0, ready: false },
            pid: 0,
            start_channel: StartChannel::Pipe(start_pipe),
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

    pub(super) fn read_creator_report(&mut self, serial: u32) {
        let Some(container) = self.containers.get_mut(&serial) else { return };
        let Some(received) = container.report.as_mut().map(Report::receive_all) else { return };
        for message in received.messages {
            self.handle_message(serial, message);
        }
        if received.ended {
            self.report_ended(serial);
        }
    }

    fn handle_message(&mut self, serial: u32, message: Message) {
        let Some(container) = self.containers.get_mut(&serial) else { return };
        match (message, &mut container.phase) {
            (Message::Cgroup(cgroup), _) => {
                let pod = cgroup::parent(&cgroup);
                container.pod_oom_kills = cgroup::oom_kills(&self.pod.hierarchies, pod).unwrap_or(0);
                container.cgroup = cgroup;
            }
            (Message::SharesPids, _) => container.shares_pids = true,
            // Pid and Ready come from two processes, in any order.
            (Message::Pid(pid), Phase::Creating { first, .. }) => {
                *first = pid;
                self.created(serial);
            }
            (Message::Ready, Phase::Creating { ready, .. }) => {
                *ready = true;
                self.created(serial);
            }
            (Message::ByLibrary, Phase::Creating { ready, .. }) => {
                *ready = true;
                container.start_channel = StartChannel::Library;
                self.created(serial);
            }
            (Message::Failed(kind, message), Phase::Creating { call_id, .. }) => {
                let call_id = *call_id;
                let error = container.report.as_mut().map(|report| report.error(kind, &message));
                let error = error.unwrap_or_else(|| CallError::new(kind, message));
                self.creation_failed(serial, call_id, error);
            }
            (Message::Failed(kind, message), Phase::Starting { call_id }) => {
                let call_id = *call_id;
                self.start_failed(serial, call_id, CallError::new(kind, message));
            }
            // `Report` itself collects `Cause` messages. All other combinations repeat an earlier message or arrive too late.
            _ => {}
        }
    }

    /// Completes the creation when both Pid and Ready have arrived.
    fn created(&mut self, serial: u32) {
        let Some(container) = self.containers.get_mut(&serial) else { return };
        let Phase::Creating { call_id, first: pid @ 1.., ready: true, .. } = container.phase else { return };
        coracle_fault::point("shim.created");
        if let Some(console) = container.console.take() {
            let master = console.receive().and_then(|master| container.stdio.set_master(master));
            if let Err(error) = master {
                note(&format!("cannot receive the terminal of container {}: {error}", container.id));
            }
        }
        container.oom_events =
            OomEvents::listen(&self.pod.hierarchies, &container.cgroup).and_then(|events| {
                let id = &container.id;
                events.map_err(|error| note(&format!("cannot watch OOM events of {id}: {error}"))).ok()
            });
        container.pid = pid;
        container.phase = Phase::Created;
        container.created_at = nanos();
        self.reply(call_id, Ok((reply::Result::Created(Created { pid }), Vec::new())));
        self.claim(pid);
    }

    /// Handles the end of the report: the program runs, or the creator has failed.
    fn report_ended(&mut self, serial: u32) {
        let Some(container) = self.containers.get_mut(&serial) else { return };
        let phase = container.phase.clone();
        match phase {
            Phase::Creating { call_id, .. } => {
                let report = container.report.as_mut();
                let error =
                    report.map(|report| report.error(Kind::Internal, "the creator ended without a result"));
                let error = error
                    .unwrap_or_else(|| CallError::new(Kind::Internal, "the creator ended without a result"));
                self.creation_failed(serial, call_id, error);
            }
            Phase::Starting { call_id } => self.started(serial, call_id),
            Phase::Created
            | Phase::Restoring { .. }
            | Phase::Running
            | Phase::Draining { .. }
            | Phase::Exited { .. } => {
                container.report = None;
            }
        }
    }

    /// Deletes the incomplete container, as DeleteContainer does, and then answers the call with the error.
    fn creation_failed(&mut self, serial: u32, call_id: CallId, error: CallError) {
        if let Some(container) = self.containers.get_mut(&serial) {
            container.report = None;
            let exit = never_ran();
            container.phase = Phase::Exited { exit };
            container.deletion.get_or_insert_default().failed = Some((call_id, error));
        }
        self.begin_deletion(serial, None);
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
            note(&format!("cannot unmount {}: {error}", target.display()));
        }
    }
}

fn fork_creator(request: &creator::CreateRequest<'_>, reporter: Reporter) -> io::Result<i32> {
    match kernel::fork()? {
        Fork::Parent(pid) => Ok(pid),
        Fork::Child => creator::run(request, reporter),
    }
}

/// Whether an id is a plain file name.
fn is_name(id: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    !id.is_empty() && id.len() <= 128 && !id.starts_with('.') && id.bytes().all(allowed)
}

/// The exit of a container whose creation failed. It is not reported.
fn never_ran() -> Exit {
    Exit { code: 128, signal: 0, oom_killed: false, at: 0 }
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

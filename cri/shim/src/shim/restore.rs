//! RestoreContainer: forks a restorer. The restored process replaces the waiting first process.

use std::io;
use std::path::Path;

use coracle_proto::shim::error::Kind;
use coracle_proto::shim::{Created, RestoreContainer, reply};

use super::delete::end;
use super::{CallId, Shim, create};
use crate::call_error::CallError;
use crate::cgroup;
use crate::container::Phase;
use crate::kernel::{self, Fork};
use crate::process;
use crate::restorer::{self, PID_FILE};

impl Shim {
    /// Forks a restorer. Returns an error if the restore cannot begin. Otherwise the call is answered when the restorer
    /// ends.
    pub(super) fn restore(&mut self, call_id: CallId, restore: &RestoreContainer) -> Result<(), CallError> {
        let id = &restore.container_id;
        let dir = self.container_dir(id);
        let serial = self.serial_of(id)?;
        let Some(container) = self.containers.get_mut(&serial) else {
            return Err(CallError::no_container(id));
        };
        if !matches!(container.phase, Phase::Created) || container.deletion.is_some() {
            return Err(CallError::wrong_state(id, container.description()));
        }
        if container.stdio.master().is_some() || self.pod.user.is_some() {
            let what = "a container with a terminal or a user namespace cannot be restored";
            return Err(CallError::new(Kind::Unsupported, what));
        }
        let waiting = process::directory(container.pid)
            .map_err(|error| CallError::cannot("find the container", &error))?;
        let request = restorer::RestoreRequest {
            restore,
            waiting: &waiting,
            cgroups: cgroup::existing(&self.pod.hierarchies, &container.cgroup),
            stage: &dir,
            shim: nix::unistd::getpid().as_raw(),
        };
        let restorer = fork(&request).map_err(|error| CallError::cannot("restore the container", &error))?;
        container.phase = Phase::Restoring { call_id, restorer };
        container.restored_in = Some(restore.work.clone().into());
        container.started_at = create::nanos();
        Ok(())
    }

    /// Processes the end of a restorer, or of the waiting first process during a restore. Returns false for other
    /// processes.
    pub(super) fn handle_restore_exit(&mut self, pid: i32, status: i32) -> bool {
        for (serial, container) in &mut self.containers {
            let Phase::Restoring { call_id, restorer } = container.phase else { continue };
            if restorer == pid {
                let serial = *serial;
                self.restored(serial, call_id, status);
                return true;
            }
            if container.pid == pid {
                // The waiting process is not needed after its mounts are copied. If it ended before, the restorer fails
                // and reports the missing mounts.
                container.pid = 0;
                return true;
            }
        }
        false
    }

    fn restored(&mut self, serial: u32, call_id: CallId, status: i32) {
        let Some(container) = self.containers.get_mut(&serial) else { return };
        let work = container.restored_in.take().unwrap_or_default();
        let first = if status == 0 {
            self.read_pid(&work)
                .map_err(|error| CallError::cannot("read the pid of the restored process", &error))
        } else {
            Err(CallError::new(Kind::Internal, "CRIU did not restore the container"))
        };
        let Some(container) = self.containers.get_mut(&serial) else { return };
        container.phase = Phase::Running;
        match first {
            Ok(pid) => {
                // The end of the waiting process also closes its start pipe and its report.
                end(std::mem::replace(&mut container.pid, pid));
                self.reply(call_id, Ok((reply::Result::Created(Created { pid }), Vec::new())));
                self.claim(pid);
            }
            Err(error) => {
                self.reply(call_id, Err(error));
                self.abort_restore(serial);
            }
        }
    }

    /// Reads the pid of the restored process, a child of the shim that may have ended and been reaped
    /// already.
    fn read_pid(&self, work: &Path) -> io::Result<i32> {
        let text = std::fs::read_to_string(work.join(PID_FILE))?;
        let pid = text.trim().parse::<i32>().ok();
        let pid = pid.filter(|pid| process::is_child(*pid) || self.has_ended(*pid));
        pid.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))
    }

    /// Kills the restored processes and the waiting process. The exit of the waiting process counts as the exit of the
    /// container.
    fn abort_restore(&mut self, serial: u32) {
        let Some(container) = self.containers.get(&serial) else { return };
        let waiting = container.pid;
        cgroup::signal(&self.pod.hierarchies, &container.cgroup, libc::SIGKILL);
        end(waiting);
        if waiting == 0 {
            self.container_ended(serial, -libc::SIGKILL);
        }
    }
}

fn fork(request: &restorer::RestoreRequest<'_>) -> io::Result<i32> {
    match kernel::fork()? {
        Fork::Parent(pid) => Ok(pid),
        Fork::Child => restorer::run(request),
    }
}

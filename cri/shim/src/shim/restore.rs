//! RestoreContainer: a restorer beside the waiting first process, whose place the restored one takes.

use std::io;
use std::path::Path;

use coracle_proto::shim::error::Kind;
use coracle_proto::shim::{Created, RestoreContainer, reply};

use super::delete::end;
use super::{Shim, Ticket, create};
use crate::cgroup;
use crate::container::Phase;
use crate::fault::Fault;
use crate::kernel::{self, Fork};
use crate::process;
use crate::restorer::{self, PID_FILE};

impl Shim {
    /// Answers itself only when it fails at once; else the restorer's end does.
    pub(super) fn restore(&mut self, ticket: Ticket, restore: &RestoreContainer) -> Result<(), Fault> {
        let id = &restore.container_id;
        let dir = self.container_dir(id);
        let serial = self.serial_of(id)?;
        let Some(container) = self.containers.get_mut(&serial) else { return Err(Fault::no_container(id)) };
        if !matches!(container.phase, Phase::Created) || container.deletion.is_some() {
            return Err(Fault::wrong_state(id, container.words()));
        }
        if container.stdio.master().is_some() || self.pod.user.is_some() {
            let what = "a container with a terminal or a user namespace cannot be restored";
            return Err(Fault::new(Kind::Unsupported, what));
        }
        let waiting =
            process::directory(container.pid).map_err(|error| Fault::doing("find the container", &error))?;
        let plan = restorer::Plan {
            restore,
            waiting: &waiting,
            cgroups: cgroup::existing(&self.pod.hierarchies, &container.cgroup),
            stage: &dir,
            shim: nix::unistd::getpid().as_raw(),
        };
        let restorer = fork(&plan).map_err(|error| Fault::doing("restore the container", &error))?;
        container.phase = Phase::Restoring { ticket, restorer };
        container.restored_in = Some(restore.work.clone().into());
        container.started_at = create::nanos();
        Ok(())
    }

    /// Whether the process that ended is a part of a restoration under way: the restorer, or the first process
    /// that waited.
    pub(super) fn ended_restoring(&mut self, pid: i32, status: i32) -> bool {
        for (serial, container) in &mut self.containers {
            let Phase::Restoring { ticket, restorer } = container.phase else { continue };
            if restorer == pid {
                let serial = *serial;
                self.restored(serial, ticket, status);
                return true;
            }
            if container.pid == pid {
                // Not needed once its mounts are copied; without them the restorer says what is missing.
                container.pid = 0;
                return true;
            }
        }
        false
    }

    fn restored(&mut self, serial: u32, ticket: Ticket, status: i32) {
        let Some(container) = self.containers.get_mut(&serial) else { return };
        let work = container.restored_in.take().unwrap_or_default();
        let first = if status == 0 {
            self.read_pid(&work)
                .map_err(|error| Fault::doing("learn the pid of the restored process", &error))
        } else {
            Err(Fault::new(Kind::Internal, "CRIU did not restore the container"))
        };
        let Some(container) = self.containers.get_mut(&serial) else { return };
        container.phase = Phase::Running;
        match first {
            Ok(pid) => {
                // The gate and the report of the one that waited end with it.
                end(std::mem::replace(&mut container.pid, pid));
                self.reply(ticket, Ok((reply::Result::Created(Created { pid }), Vec::new())));
                self.claim(pid);
            }
            Err(fault) => {
                self.reply(ticket, Err(fault));
                self.end_unrestored(serial);
            }
        }
    }

    /// The restored process is a child of the shim. It may have ended and been waited for by now.
    fn read_pid(&self, work: &Path) -> io::Result<i32> {
        let text = std::fs::read_to_string(work.join(PID_FILE))?;
        let pid = text.trim().parse::<i32>().ok();
        let pid = pid.filter(|pid| process::is_child(*pid) || self.has_ended(*pid));
        pid.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))
    }

    /// Nothing of it is to go on. The end of the process that waited is the container's.
    fn end_unrestored(&mut self, serial: u32) {
        let Some(container) = self.containers.get(&serial) else { return };
        let waiting = container.pid;
        cgroup::signal(&self.pod.hierarchies, &container.cgroup, libc::SIGKILL);
        end(waiting);
        if waiting == 0 {
            self.container_ended(serial, -libc::SIGKILL);
        }
    }
}

fn fork(plan: &restorer::Plan<'_>) -> io::Result<i32> {
    match kernel::fork()? {
        Fork::Parent(pid) => Ok(pid),
        Fork::Child => restorer::run(plan),
    }
}

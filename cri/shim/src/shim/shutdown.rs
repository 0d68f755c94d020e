//! The end of the pod: by Shutdown, where every container is deleted, process 1 ended and a last reply sent; or because
//! process 1 has ended, where the exits of the containers stay for the agent to find.

use nix::mount::{MntFlags, umount2};

use super::delete::end;
use super::{Shim, Ticket, done};
use crate::cgroup;
use crate::container::{Container, Phase};
use crate::report::note;

/// The pod is being shut down.
#[derive(Default)]
pub(super) struct Ending {
    tickets: Vec<Ticket>,
    /// Containers that have exited need not be deleted: nobody has asked for the end.
    keeps_exits: bool,
}

// === impl Ending ===

impl Ending {
    /// Whether the end has to wait for a container.
    fn waits_for(&self, container: &Container) -> bool {
        let has_exited = matches!(container.phase, Phase::Exited { .. }) && container.deletion.is_none();
        !(self.keeps_exits && has_exited)
    }
}

impl Shim {
    /// By the agent's call or by SIGTERM, which a machine that goes down sends to everybody.
    pub(super) fn shut_down(&mut self, ticket: Option<Ticket>) {
        let ending = self.ending.get_or_insert_default();
        ending.tickets.extend(ticket);
        ending.keeps_exits = false;
        let serials: Vec<u32> = self.containers.keys().copied().collect();
        serials.into_iter().for_each(|serial| self.begin_deleting(serial, None));
    }

    /// Process 1 has ended, and the kernel has killed everything in its namespace. Containers with namespaces of their own
    /// are killed as well, for the pod has ended. Calls are refused from here on; the end of the shim tells the agent.
    pub(super) fn init_ended(&mut self) {
        if self.ending.is_some() {
            return;
        }
        note("process 1 of the pod's pid namespace has ended, and the pod with it");
        self.ending = Some(Ending { keeps_exits: true, ..Ending::default() });
        let serials: Vec<u32> = self.containers.keys().copied().collect();
        for serial in serials {
            let Some(container) = self.containers.get(&serial) else { continue };
            match container.phase {
                // Nobody has heard of it yet.
                Phase::Creating { .. } => self.begin_deleting(serial, None),
                Phase::Restoring { restorer, .. } => {
                    end(restorer);
                    cgroup::kill(&self.pod.hierarchies, &container.cgroup);
                }
                Phase::Created | Phase::Starting { .. } | Phase::Running => {
                    end(container.pid);
                    cgroup::kill(&self.pod.hierarchies, &container.cgroup);
                }
                Phase::Draining { .. } | Phase::Exited { .. } => {}
            }
        }
    }

    /// Whether nothing is left. Then the last things are undone and the agent is told.
    pub(super) fn is_over(&mut self) -> bool {
        let Some(ending) = self.ending.as_ref() else { return false };
        if self.containers.values().any(|container| ending.waits_for(container)) {
            return false;
        }
        let tickets = ending.tickets.clone();
        if let Some(init) = &self.pod.init {
            init.kill();
        }
        if !self.config.shm_dir.is_empty() {
            // It would vanish with the namespace; explicit, for the directory below to be removable.
            let _ = umount2(self.config.shm_dir.as_str(), MntFlags::MNT_DETACH);
        }
        let _ = std::fs::remove_file(&self.config.socket);
        tickets.into_iter().for_each(|ticket| self.reply(ticket, done()));
        true
    }
}

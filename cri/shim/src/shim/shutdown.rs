//! Shutdown of the pod, in two cases. On a Shutdown call or SIGTERM all containers are deleted, process 1 is
//! killed and the call is answered. If process 1 has ended, the exits of the containers stay recorded for the
//! agent.

use nix::mount::{MntFlags, umount2};

use super::delete::end;
use super::{CallId, Shim, done};
use crate::cgroup;
use crate::container::{Container, Phase};
use crate::report::note;

/// A shutdown in progress.
#[derive(Default)]
pub(super) struct Shutdown {
    calls: Vec<CallId>,
    /// Whether exited containers are not deleted, because no call requested the shutdown.
    keeps_exits: bool,
}

// === impl Shutdown ===

impl Shutdown {
    /// Whether the shutdown waits for this container.
    fn waits_for(&self, container: &Container) -> bool {
        let has_exited = matches!(container.phase, Phase::Exited { .. }) && container.deletion.is_none();
        !(self.keeps_exits && has_exited)
    }
}

impl Shim {
    /// Shuts down for a call of the agent, or for SIGTERM, which init systems send to all processes at
    /// shutdown.
    pub(super) fn shut_down(&mut self, call_id: Option<CallId>) {
        let shutdown = self.shutdown.get_or_insert_default();
        shutdown.calls.extend(call_id);
        shutdown.keeps_exits = false;
        let serials: Vec<u32> = self.containers.keys().copied().collect();
        serials.into_iter().for_each(|serial| self.begin_deletion(serial, None));
    }

    /// Handles the end of process 1. The kernel has killed all processes of its pid namespace. Containers with pid
    /// namespaces of their own are killed too, because the pod has ended. Further calls are refused. The agent is
    /// notified by the shim's exit.
    pub(super) fn init_ended(&mut self) {
        if self.shutdown.is_some() {
            return;
        }
        note("process 1 of the pod's pid namespace has ended; the pod ends");
        self.shutdown = Some(Shutdown { keeps_exits: true, ..Shutdown::default() });
        let serials: Vec<u32> = self.containers.keys().copied().collect();
        for serial in serials {
            let Some(container) = self.containers.get(&serial) else { continue };
            match container.phase {
                // The agent has no response for this container yet, so the creation is undone.
                Phase::Creating { .. } => self.begin_deletion(serial, None),
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

    /// Whether all containers are deleted or have exited. Then cleans up and answers the waiting calls.
    pub(super) fn is_over(&mut self) -> bool {
        let Some(shutdown) = self.shutdown.as_ref() else { return false };
        if self.containers.values().any(|container| shutdown.waits_for(container)) {
            return false;
        }
        let calls = shutdown.calls.clone();
        if let Some(init) = &self.pod.init {
            init.kill();
        }
        if !self.config.shm_dir.is_empty() {
            // The mount ends with the shim's mount namespace anyway. The explicit unmount makes the directory removable
            // at once.
            let _ = umount2(self.config.shm_dir.as_str(), MntFlags::MNT_DETACH);
        }
        let _ = std::fs::remove_file(&self.config.socket);
        calls.into_iter().for_each(|call_id| self.reply(call_id, done()));
        true
    }
}

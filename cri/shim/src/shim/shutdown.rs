//! Shutdown: every container deleted, the pod's init ended, a last reply, the end.

use nix::mount::{MntFlags, umount2};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::{Shim, Ticket, done};

/// The pod is being shut down.
pub(super) struct Ending {
    tickets: Vec<Ticket>,
}

impl Shim {
    /// By the agent's call or by SIGTERM, which a machine that goes down sends to everybody.
    pub(super) fn shut_down(&mut self, ticket: Option<Ticket>) {
        let ending = self.ending.get_or_insert(Ending { tickets: Vec::new() });
        ending.tickets.extend(ticket);
        let serials: Vec<u32> = self.containers.keys().copied().collect();
        serials.into_iter().for_each(|serial| self.begin_deleting(serial, None));
    }

    /// Whether nothing is left. Then the last things are undone and the agent is told.
    pub(super) fn is_over(&mut self) -> bool {
        let Some(ending) = self.ending.as_ref().filter(|_| self.containers.is_empty()) else { return false };
        let tickets = ending.tickets.clone();
        if self.pod.init > 0 {
            // All that it shares its namespace with goes with it.
            let _ = kill(Pid::from_raw(self.pod.init), Signal::SIGKILL);
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

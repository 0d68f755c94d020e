//! StartContainer: one message to the waiting process; the end of its report is the answer.

use std::fs::File;
use std::io::{self, Write as _};
use std::os::unix::net::UnixStream;

use super::{Shim, Ticket, create, done};
use crate::console;
use crate::container::{Gate, Phase};
use crate::fault::Fault;

impl Shim {
    pub(super) fn start(&mut self, ticket: Ticket, id: &str) -> Result<(), Fault> {
        let state = self.state_dir(id);
        let container = self.container(id)?;
        if !matches!(container.phase, Phase::Created) || container.deletion.is_some() {
            return Err(Fault::wrong_state(id, container.words()));
        }
        let begun = match &container.gate {
            Gate::Pipe(gate) => nix::unistd::write(gate, b"s").map(drop).map_err(io::Error::from),
            Gate::Library => notify(&state),
        };
        begun.map_err(|error| Fault::doing("start the container", &error))?;
        container.phase = Phase::Starting { ticket };
        container.started_at = create::nanos();
        Ok(())
    }

    pub(super) fn started(&mut self, serial: u32, ticket: Ticket) {
        coracle_fault::point("shim.started");
        if let Some(container) = self.containers.get_mut(&serial) {
            container.report = None;
            container.phase = Phase::Running;
        }
        self.reply(ticket, done());
    }

    /// The process ends by itself, with the code that says why; its exit is an event like others.
    pub(super) fn start_failed(&mut self, serial: u32, ticket: Ticket, fault: Fault) {
        if let Some(container) = self.containers.get_mut(&serial) {
            container.report = None;
            container.phase = Phase::Running;
        }
        self.reply(ticket, Err(fault));
    }
}

/// What libcontainer's own start does, without its change of the working directory.
fn notify(state: &std::path::Path) -> io::Result<()> {
    let dir = File::open(state)?;
    let mut socket = UnixStream::connect(console::short(&dir, "notify.sock"))?;
    socket.write_all(b"start container")
}

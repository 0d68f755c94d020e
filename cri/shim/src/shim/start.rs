//! StartContainer: sends the start signal. The end of the first process's report answers the call.

use std::fs::File;
use std::io::{self, Write as _};
use std::os::unix::net::UnixStream;

use super::{CallId, Shim, create, done};
use crate::call_error::CallError;
use crate::console;
use crate::container::{Phase, StartChannel};

impl Shim {
    pub(super) fn start(&mut self, call_id: CallId, id: &str) -> Result<(), CallError> {
        let state = self.state_dir(id);
        let container = self.container(id)?;
        if !matches!(container.phase, Phase::Created) || container.deletion.is_some() {
            return Err(CallError::wrong_state(id, container.description()));
        }
        let begun = match &container.start_channel {
            StartChannel::Pipe(pipe) => nix::unistd::write(pipe, b"s").map(drop).map_err(io::Error::from),
            StartChannel::Library => notify(&state),
        };
        begun.map_err(|error| CallError::cannot("start the container", &error))?;
        container.phase = Phase::Starting { call_id };
        container.started_at = create::nanos();
        Ok(())
    }

    pub(super) fn started(&mut self, serial: u32, call_id: CallId) {
        coracle_fault::point("shim.started");
        if let Some(container) = self.containers.get_mut(&serial) {
            container.report = None;
            container.phase = Phase::Running;
        }
        self.reply(call_id, done());
    }

    /// The first process exits by itself with the code for this error. The exit event of the process follows as usual.
    pub(super) fn start_failed(&mut self, serial: u32, call_id: CallId, error: CallError) {
        if let Some(container) = self.containers.get_mut(&serial) {
            container.report = None;
            container.phase = Phase::Running;
        }
        self.reply(call_id, Err(error));
    }
}

/// Sends libcontainer's start message. libcontainer's own function would change the working directory.
fn notify(state: &std::path::Path) -> io::Result<()> {
    let dir = File::open(state)?;
    let mut socket = UnixStream::connect(console::short_socket_path(&dir, "notify.sock"))?;
    socket.write_all(b"start container")
}

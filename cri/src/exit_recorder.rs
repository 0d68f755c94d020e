//! The ends of containers and sandboxes: recorded once, then sent as events and to NRI plugins.

use std::path::Path;
use std::sync::Arc;

use coracle_proto::cri::ContainerEventType::ContainerStoppedEvent;
use coracle_proto::shim::{Event, Exit};
use prost::Message as _;
use tracing::{info, warn};

use crate::cgroup::Cgroups;
use crate::clock::now;
use crate::container::Container;
use crate::error::Error;
use crate::event_outbox::EventOutbox;
use crate::nri::PluginHooks;
use crate::records::{ExitRecord, Records};
use crate::sandbox::Sandbox;
use crate::tables::Tables;

/// Exit code of a container without a known exit code, as in containerd.
const LOST_CODE: i32 = 255;

/// Directory in a shim's directory in which the shim writes one file per ended container.
const EXITS: &str = "exits";

/// Records the ends of containers and sandboxes.
#[derive(Clone)]
pub(crate) struct ExitRecorder {
    pub(crate) tables: Arc<Tables>,
    pub(crate) records: Arc<Records>,
    pub(crate) cgroups: Arc<Cgroups>,
    pub(crate) outbox: EventOutbox,
    pub(crate) hooks: PluginHooks,
}

// === impl ExitRecorder ===

impl ExitRecorder {
    /// Records the end of a container after its start is complete.
    pub(crate) async fn record_exit_after_start(
        &self,
        container: &Container,
        exit: ExitRecord,
    ) -> Result<(), Error> {
        let _started = container.starting.lock().await;
        self.record_exit(container, exit)
    }

    /// Records the end of a container and sends the event, once. A container that was never completely created gets no
    /// event. The caller holds `starting`.
    pub(crate) fn record_exit(&self, container: &Container, mut exit: ExitRecord) -> Result<(), Error> {
        exit.started_at = container.started_at();
        let (code, reason) = (exit.code, exit.reason.clone());
        let created = container.visible();
        // The transition begins before the new phase is visible. So a client that sees the end and removes the
        // container waits until the end is recorded and sent.
        let mut pending = self.outbox.pending();
        if !container.exited(exit) || !created || self.tables.containers.get(&container.id).is_none() {
            return Ok(());
        }
        info!(container = container.id, code, reason, "container ended");
        container.note(pending.add(ContainerStoppedEvent, now()));
        let written = self.records.write_container(&container.record_now());
        coracle_fault::point("exit.recorded");
        // The event is sent even if the record cannot be written (disk full), because there is no other source of this
        // event.
        pending.send_for_container(container);
        self.hooks.stop_container_in_background(&container.id);
        written
    }

    /// Records that a sandbox has ended and sends the event.
    pub(crate) fn record_sandbox_end(&self, sandbox: &Sandbox) {
        let mut pending = self.outbox.pending();
        sandbox.note(pending.add(ContainerStoppedEvent, now()));
        if let Err(error) = self.records.write_sandbox(&sandbox.record_now()) {
            warn!(sandbox = sandbox.id, error = error.chain(), "cannot record the end of a sandbox");
        }
        pending.send_for_sandbox(sandbox);
    }

    /// Ends a container that has no shim. If the container ended before its shim, the shim has written the exit code to
    /// a file.
    pub(crate) async fn end_lost_container(&self, container: &Container) {
        if !self.cgroups.kill(&container.record.cgroup).await {
            warn!(container = container.id, "killed processes of a lost container have not ended");
        }
        let exits = self.records.sandbox_dir(&container.record.sandbox_id).join(EXITS);
        let exit = match recorded_exit(&exits, &container.id) {
            Some(exit) => exit_record(container, &exit),
            None => ExitRecord {
                started_at: 0,
                finished_at: now(),
                code: LOST_CODE,
                reason: "Unknown".to_owned(),
                message: "the exit code is lost: the pod's shim has exited or does not respond".to_owned(),
            },
        };
        if let Err(error) = self.record_exit_after_start(container, exit).await {
            warn!(container = container.id, error = error.chain(), "cannot record a lost container");
        }
    }
}

/// The exit that a shim wrote to its directory. `None` if the file is absent or incomplete.
fn recorded_exit(exits: &Path, container_id: &str) -> Option<Exit> {
    let bytes = std::fs::read(exits.join(container_id)).ok()?;
    let event = Event::decode(bytes.as_slice()).ok()?;
    event.exited.filter(|_| event.container_id == container_id && event.exec_id.is_empty())
}

/// Converts a shim's exit to the record, with the reasons of the CRI.
pub(crate) fn exit_record(container: &Container, exit: &Exit) -> ExitRecord {
    let reason = match (exit.oom_killed, exit.code) {
        (true, _) => "OOMKilled",
        (false, 0) => "Completed",
        (false, _) => "Error",
    };
    ExitRecord {
        started_at: container.started_at(),
        finished_at: exit.at,
        code: exit.code,
        reason: reason.to_owned(),
        message: String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_complete_exit_file_is_read() {
        let dir = tempfile::tempdir().expect("directory");
        let exit = Exit { code: 137, signal: 9, oom_killed: true, at: 5 };
        let event =
            Event { sequence: 3, container_id: "c".into(), exec_id: String::new(), exited: Some(exit) };
        let bytes = event.encode_to_vec();
        std::fs::write(dir.path().join("c"), &bytes).expect("write");
        assert_eq!(recorded_exit(dir.path(), "c"), Some(exit));
        std::fs::write(dir.path().join("other"), &bytes).expect("write");
        assert_eq!(recorded_exit(dir.path(), "other"), None);
        assert_eq!(recorded_exit(dir.path(), "absent"), None);
        for length in 0..bytes.len() {
            std::fs::write(dir.path().join("c"), &bytes[..length]).expect("write");
            assert_eq!(recorded_exit(dir.path(), "c"), None, "{length}");
        }
    }
}

//! What shims report: exits are recorded, then acknowledged, then told to all. And what happens when
//! a shim itself dies.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::{Arc, Mutex};

use coracle_proto::cri::ContainerEventType::ContainerStoppedEvent;
use coracle_proto::shim::{Event, Exit};
use prost::Message as _;
use tracing::{info, warn};

use crate::container::Container;
use crate::error::Error;
use crate::lock::locked;
use crate::records::ExitRecord;
use crate::recover::relink::{Rest, connect_again};
use crate::runtime::Runtime;
use crate::sandbox::Sandbox;
use crate::server::now;
use crate::shim_client::{Closed, ErrorKind, Shim};

/// The exit code of a container whose own is lost, as containerd reports it.
const LOST_CODE: i32 = 255;

/// Where in its directory a shim writes down how its containers ended, each in a file.
const EXITS: &str = "exits";

/// How far a shim's events are taken care of. It is told of all up to a number, so one that takes time holds back
/// those after it.
#[derive(Debug, Default)]
struct Heard {
    open: BTreeSet<u64>,
    last: u64,
}

// === impl Heard ===

impl Heard {
    fn begin(&mut self, sequence: u64) {
        self.open.insert(sequence);
        self.last = self.last.max(sequence);
    }

    /// The number up to which all are done.
    fn done(&mut self, sequence: u64) -> u64 {
        self.open.remove(&sequence);
        self.open.first().map_or(self.last, |open| open.saturating_sub(1))
    }
}

impl Runtime {
    /// Listens to a shim until it ends, over one connection after the other. The task keeps no runtime alive.
    pub(crate) fn listen(&self, sandbox: Arc<Sandbox>, mut shim: Shim) {
        let inner = Arc::downgrade(&self.inner);
        tokio::spawn(async move {
            let mut rest = Rest::new();
            loop {
                let Some(mut events) = shim.events() else { return };
                let heard = Arc::new(Mutex::new(Heard::default()));
                while let Some(event) = events.recv().await {
                    let Some(inner) = inner.upgrade() else { return };
                    Self { inner }.shim_event((&sandbox, &shim), event, &heard).await;
                }
                if matches!(shim.closed().await, Closed::Died) {
                    break;
                }
                warn!(sandbox = sandbox.id, "the connection to a shim that lives has ended");
                let Some(again) = connect_again(&inner, &sandbox, &shim, &mut rest).await else {
                    // It may take its time to die: what it has open may have to wait for a disk.
                    shim.died().await;
                    break;
                };
                shim = again;
            }
            let Some(inner) = inner.upgrade() else { return };
            Self { inner }.sandbox_died(&sandbox).await;
        });
    }

    /// The end of a container that is being started, or whose limits change, is recorded after that, by a task of its
    /// own: those of all others are not to wait for it. A container ends once, and after its execs.
    async fn shim_event(&self, (sandbox, shim): (&Sandbox, &Shim), event: Event, heard: &Arc<Mutex<Heard>>) {
        locked(heard).begin(event.sequence);
        let mut recorded = Ok(());
        let Some(exit) = event.exited else {
            // Of a later version: news of something else than an end.
            return handled(shim, event.sequence, heard, recorded).await;
        };
        if !event.exec_id.is_empty() {
            sandbox.exec_exited(&event.exec_id, exit);
        } else if let Some(container) = self.inner.containers.get(&event.container_id) {
            let record = exit_record(&container, &exit);
            match container.starting.try_lock() {
                Ok(_started) => recorded = self.note_end(&container, record),
                Err(_busy) => {
                    let (runtime, shim, heard) = (self.clone(), shim.clone(), Arc::clone(heard));
                    let container = Arc::clone(&container);
                    tokio::spawn(async move {
                        let recorded = runtime.container_ended(&container, record).await;
                        handled(&shim, event.sequence, &heard, recorded).await;
                    });
                    return;
                }
            }
        }
        handled(shim, event.sequence, heard, recorded).await;
    }

    /// Records the end of a container once its start is through.
    async fn container_ended(&self, container: &Container, exit: ExitRecord) -> Result<(), Error> {
        let _started = container.starting.lock().await;
        self.note_end(container, exit)
    }

    /// Records the end of a container and tells everybody, once. Of one that was never completely made, nobody was told
    /// anything. The caller holds `starting`.
    pub(crate) fn note_end(&self, container: &Container, mut exit: ExitRecord) -> Result<(), Error> {
        exit.started_at = container.started_at();
        let (code, reason) = (exit.code, exit.reason.clone());
        let made = container.visible();
        // From before anybody sees that it has ended: who then removes it waits until this is written and told.
        let mut telling = self.telling();
        if !container.exited(exit) || !made || self.inner.containers.get(&container.id).is_none() {
            return Ok(());
        }
        info!(container = container.id, code, reason, "container ended");
        container.note(telling.next(ContainerStoppedEvent, now()));
        let written = self.inner.records.write_container(&container.record_now());
        coracle_fault::point("exit.recorded");
        // Also what could not be written, on a disk that is full: nobody would hear of it otherwise.
        telling.tell(container);
        self.tell_stopped_later(&container.id);
        written
    }

    /// Cleans up after a shim that died on its own: what ran in the pod runs on without it, and is
    /// killed by its cgroups.
    pub(crate) async fn sandbox_died(&self, sandbox: &Sandbox) {
        if sandbox.leave().is_none() {
            return;
        }
        warn!(sandbox = sandbox.id, "the shim died; its pod is ended");
        sandbox.forget_all_execs();
        for container in self.containers_of(&sandbox.id) {
            self.container_lost(&container).await;
        }
        self.tell_pod_stopped(sandbox).await;
        if let Err(source) = self.inner.network.del(&sandbox.id).await {
            warn!(
                sandbox = sandbox.id,
                error = source.chain(),
                "could not take a dead pod's network away yet"
            );
            self.inner.network.del_later(&sandbox.id);
        }
        // Not while it is being removed, or its directory would come back.
        let _alone = sandbox.ending.lock().await;
        if self.inner.sandboxes.get(&sandbox.id).is_some() {
            self.note_death(sandbox);
        }
    }

    /// Records that a sandbox is dead and tells everybody.
    pub(crate) fn note_death(&self, sandbox: &Sandbox) {
        let mut telling = self.telling();
        sandbox.note(telling.next(ContainerStoppedEvent, now()));
        if let Err(error) = self.inner.records.write_sandbox(&sandbox.record_now()) {
            warn!(sandbox = sandbox.id, error = error.chain(), "could not record a dead sandbox");
        }
        telling.tell_sandbox(sandbox);
    }

    /// Ends a container that has no shim any more. It may have ended before its shim did, which then left word.
    pub(crate) async fn container_lost(&self, container: &Container) {
        if !self.inner.cgroups.kill(&container.record.cgroup).await {
            warn!(container = container.id, "processes of a lost container do not die");
        }
        let exits = self.inner.records.sandbox_dir(&container.record.sandbox_id).join(EXITS);
        let exit = match recorded_exit(&exits, &container.id) {
            Some(exit) => exit_record(container, &exit),
            None => ExitRecord {
                started_at: 0,
                finished_at: now(),
                code: LOST_CODE,
                reason: "Unknown".to_owned(),
                message: "the pod's shim died or does not answer, and has the exit code".to_owned(),
            },
        };
        if let Err(error) = self.container_ended(container, exit).await {
            warn!(container = container.id, error = error.chain(), "could not record a lost container");
        }
    }
}

/// What a shim wrote down of a container's end. Nothing if it came to none, or died while it wrote.
fn recorded_exit(exits: &Path, container_id: &str) -> Option<Exit> {
    let bytes = std::fs::read(exits.join(container_id)).ok()?;
    let event = Event::decode(bytes.as_slice()).ok()?;
    event.exited.filter(|_| event.container_id == container_id && event.exec_id.is_empty())
}

/// Tells a shim what is taken care of. An end that could not be recorded it tells again to the next agent, unless
/// one after it was recorded.
async fn handled(shim: &Shim, sequence: u64, heard: &Mutex<Heard>, recorded: Result<(), Error>) {
    let all = locked(heard).done(sequence);
    if let Err(error) = recorded {
        warn!(dir = %shim.dir().display(), error = error.chain(), "could not record an exit");
        return;
    }
    // A shim that was asked to end has nobody left to tell.
    if let Err(error) = shim.acknowledge(all).await
        && error.kind != ErrorKind::Gone
    {
        warn!(dir = %shim.dir().display(), %error, "could not acknowledge an exit");
    }
}

/// An exit in the words of the CRI.
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
    fn what_a_shim_wrote_down_counts_when_it_is_whole() {
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

    #[test]
    fn what_takes_time_holds_back_the_acknowledgement_of_what_came_later() {
        let mut heard = Heard::default();
        [1, 2, 3].into_iter().for_each(|sequence| heard.begin(sequence));
        assert_eq!(heard.done(1), 1);
        assert_eq!(heard.done(3), 1);
        assert_eq!(heard.done(2), 3);
    }
}

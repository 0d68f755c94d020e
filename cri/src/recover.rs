//! Recovery: restores the runtime's state at its start.
//!
//! Records have the desired state, shims the observed state. Incomplete objects are undone, objects that ended in the
//! meantime are recorded as ended, and objects without an owner are removed. If a live shim does not respond, a
//! background task waits for it, see `shim_monitor`.

mod checkpoints;
mod networks;
mod shims;
mod undo;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use coracle_cni::Network;
use coracle_images::Images;
use coracle_proto::shim::State;
use futures::future::{join_all, try_join_all};
use tracing::warn;

use crate::cgroup::Cgroups;
use crate::cgroup::driver::Layout;
use crate::checkpoint;
use crate::config::RuntimeConfig;
use crate::container::config_memory::{ConfigMemory, bytes_of_image};
use crate::container::{self, Container};
use crate::error::{Error, chain};
use crate::event_outbox::EventOutbox;
use crate::exec_killer::ExecKiller;
use crate::exit_recorder::{ExitRecorder, exit_record};
use crate::names::Names;
use crate::records::{
    self, ContainerPhase, ContainerRecord, Records, SandboxPhase, SandboxRecord, Transition,
};
use crate::sandbox::{self, LiveShim, Sandbox, SandboxState};
use crate::selinux::Selinux;
use crate::services::containers::ContainerService;
use crate::services::sandboxes::SandboxService;
use crate::shim_monitor::{MissedTransition, ShimMonitor, current_phase, missed_transitions};
use crate::tables::Tables;
use shims::Found;
use undo::is_stop_incomplete;

/// A recorded sandbox and its shim.
struct RecordedSandbox {
    record: SandboxRecord,
    shim: Found,
}

/// Objects that ended with their shim and are not yet recorded as ended.
struct Ended {
    containers: Vec<Arc<Container>>,
    sandbox: Option<Arc<Sandbox>>,
}

/// Restores the runtime's state at its start.
pub(crate) struct Recovery {
    pub(crate) config: Arc<RuntimeConfig>,
    pub(crate) images: Images,
    pub(crate) network: Network,
    pub(crate) tables: Arc<Tables>,
    pub(crate) records: Arc<Records>,
    pub(crate) cgroups: Arc<Cgroups>,
    pub(crate) layout: Arc<Layout>,
    pub(crate) names: Names,
    pub(crate) selinux: Arc<Selinux>,
    pub(crate) outbox: EventOutbox,
    pub(crate) exits: ExitRecorder,
    pub(crate) exec_killer: ExecKiller,
    pub(crate) monitor: ShimMonitor,
    pub(crate) containers: ContainerService,
    pub(crate) sandboxes: SandboxService,
}

// === impl Recovery ===

impl Recovery {
    /// Runs the recovery, before the runtime serves clients.
    pub(crate) async fn run(&self) -> Result<(), Error> {
        // The start fails here, before any change, if a record or shim has an unknown version. So its pod continues to
        // run.
        let (found, containers) = (self.records.sandboxes()?, self.records.containers()?);
        let lost = try_join_all(found.lost.iter().map(|id| self.find_shim(id))).await?;
        let reached = try_join_all(found.readable.iter().map(|record| self.connect_shim(record))).await?;
        let removed = self.records.removed()?;
        let transitions = found.readable.iter().flat_map(|record| &record.transitions);
        self.outbox.skip_numbers(transitions.map(|transition| transition.number));
        self.outbox.skip_numbers(removed.iter().map(|removed| removed.number));
        self.end_strays(&found).await;
        for (id, lost) in found.lost.iter().zip(lost) {
            self.undo_sandbox(id, lost).await;
        }
        let mut sandboxes = Vec::new();
        for (record, found) in found.readable.into_iter().zip(reached) {
            if record.phase == SandboxPhase::Creating {
                self.undo_sandbox(&record.id, found).await;
            } else {
                sandboxes.push(RecordedSandbox { record, shim: found });
            }
        }
        let missed = self.recover_containers(containers, &sandboxes).await?;
        let last = self.number_missed(missed);
        self.reconcile_network(&sandboxes).await;
        coracle_fault::point("recover.network");
        let (mut incomplete, mut stopping, mut recovered) = (Vec::new(), Vec::new(), Vec::new());
        for RecordedSandbox { record, shim } in sandboxes {
            incomplete.extend(record.restoring.then(|| record.id.clone()));
            stopping.extend(is_stop_incomplete(&record).then(|| record.id.clone()));
            recovered.push(self.recover_sandbox(record, shim));
        }
        // Unsent events are replayed before new events are sent.
        self.outbox.replay_unsent(removed, last);
        coracle_fault::point("recover.replayed");
        for ended in recovered {
            self.end_lost(ended).await;
        }
        coracle_fault::point("recover.ended");
        self.outbox.open_to_listeners();
        for id in incomplete {
            self.remove_incomplete_restore(id).await;
        }
        join_all(stopping.into_iter().map(|id| self.complete_stop(id))).await;
        self.check_networks();
        self.collect_images();
        Ok(())
    }

    /// Records transitions that happened while no runtime was running, in their order. Returns the last event number.
    fn number_missed(&self, mut missed: Vec<MissedTransition>) -> u64 {
        missed.sort_by_key(|missed| missed.at);
        let mut send_guard = self.outbox.send_guard();
        for MissedTransition { at, container, what } in &missed {
            container.note(send_guard.number().map(|number| Transition {
                number,
                what: (*what).into(),
                at: *at,
            }));
        }
        for container in self.tables.containers.all() {
            if let Err(error) = self.records.write_container(&container.record_now()) {
                warn!(container = container.id, error = error.chain(), "cannot record a container");
            }
            coracle_fault::point("recover.numbered");
        }
        send_guard.last()
    }

    async fn recover_containers(
        &self,
        found: records::Found<ContainerRecord>,
        sandboxes: &[RecordedSandbox],
    ) -> Result<Vec<MissedTransition>, Error> {
        let shims: HashMap<&str, &Found> =
            sandboxes.iter().map(|sandbox| (sandbox.record.id.as_str(), &sandbox.shim)).collect();
        let transitions = found.readable.iter().flat_map(|record| &record.transitions);
        self.outbox.skip_numbers(transitions.map(|transition| transition.number));
        let mut known = HashSet::new();
        let mut missed = Vec::new();
        for record in found.readable {
            match shims.get(record.sandbox_id.as_str()) {
                Some(found) if record.phase != ContainerPhase::Creating => {
                    known.insert(record.id.clone());
                    let (container, before) = self.recover_container(record, found.state()).await;
                    self.end_checkpoint(&container).await;
                    missed.extend(before);
                }
                Some(Found::Answers(shim, _)) => self.undo_container(&record, Some(shim)).await,
                Some(Found::Silent(_) | Found::Gone) | None => self.undo_container(&record, None).await,
            }
        }
        // Delete these containers before their layers are removed: a container without a record can be running.
        for sandbox in sandboxes {
            self.delete_unknown(&sandbox.shim, &known).await;
        }
        let layers = self.records.layers()?;
        for id in layers.iter().chain(&found.lost).filter(|id| !known.contains(*id)) {
            if let Err(error) = self.records.forget_container(id) {
                warn!(container = id, error = error.chain(), "cannot remove a container without a record");
            }
            coracle_fault::point("recover.bundle-forgotten");
            self.containers.remove_layer(id);
        }
        Ok(missed)
    }

    /// Adds a container to the table, in the state that its shim reports. Returns the container and its missed
    /// transitions.
    async fn recover_container(
        &self,
        mut record: ContainerRecord,
        state: Option<&State>,
    ) -> (Arc<Container>, Vec<MissedTransition>) {
        let before = record.phase.clone();
        let reported = state
            .and_then(|state| state.containers.iter().find(|container| container.container_id == record.id));
        if let Some(reported) = reported {
            record.phase = current_phase(&record.phase, reported);
            // The pid of a restored container changes at its start.
            record.pid = if reported.pid > 0 { reported.pid } else { record.pid };
        }
        if record.restore.is_some() && matches!(record.phase, ContainerPhase::Running { .. }) {
            // The earlier runtime may have ended after the start of the container and before the removal of the
            // checkpoint's images.
            if let Err(error) = checkpoint::forget_images(&self.records.layer_dir(&record.id)) {
                warn!(
                    container = record.id,
                    error = chain(&error),
                    "cannot remove the images of a restored container"
                );
            }
        }
        let volumes = record.config.mounts.iter().filter_map(|mount| mount.image.as_ref());
        let images = volumes.map(|image| &image.image_ref).chain([&record.image_id]);
        let held = images.map(|id| self.images.hold(id).map_err(|error| (id, error)));
        let held = held.filter_map(|held| {
            held.inspect_err(
                |(image, error)| warn!(container = record.id, image, %error, "the image of a container is missing"),
            )
            .ok()
        });
        let held = held.collect();
        let name = container::name(&record.config.metadata.clone().unwrap_or_default(), &record.sandbox_id);
        self.names.hold(name, record.id.clone());
        self.selinux.hold(&record.id, record.selinux.as_ref());
        self.containers.finish_limit_change(&record).await;
        coracle_fault::point("recover.limits");
        let of_image = self.images.get(&record.image_id).as_ref().map_or(0, bytes_of_image);
        let memory = ConfigMemory::of(&record.config, of_image);
        let container = Container::new(record, held, memory);
        if let Some(exit) = reported.and_then(|reported| reported.exit.as_ref()) {
            container.exited(exit_record(&container, exit));
        }
        let container = Arc::new(container);
        self.tables.containers.insert(&container.id, Arc::clone(&container));
        let missed = missed_transitions(&before, &container);
        (container, missed)
    }

    /// Adds a sandbox to the table. Returns the objects that ended while no runtime was running.
    fn recover_sandbox(&self, record: SandboxRecord, found: Found) -> Ended {
        let name = sandbox::name(&record.config.metadata.clone().unwrap_or_default());
        self.names.hold(name, record.id.clone());
        self.selinux.hold(&record.id, record.selinux.as_ref());
        let id = record.id.clone();
        let mut ended = Ended { containers: Vec::new(), sandbox: None };
        let known: HashSet<String> = match found {
            Found::Answers(shim, state) => {
                self.monitor.adopt_sandbox(record, LiveShim { shim, init_pid: state.init_pid });
                self.exec_killer.kill_orphaned(state.execs);
                state.containers.into_iter().map(|container| container.container_id).collect()
            }
            Found::Silent(shim) => {
                self.monitor.adopt_silent(record, shim);
                return ended;
            }
            Found::Gone => {
                let has_exited = record.phase == SandboxPhase::Ready;
                let sandbox = Arc::new(Sandbox::new(record, SandboxState::NotReady));
                self.tables.sandboxes.insert(&sandbox.id, Arc::clone(&sandbox));
                ended.sandbox = has_exited.then_some(sandbox);
                HashSet::new()
            }
        };
        ended.containers = self.tables.containers_of(&id);
        ended.containers.retain(|container| {
            !matches!(container.phase(), ContainerPhase::Exited(_)) && !known.contains(&container.id)
        });
        ended
    }

    async fn end_lost(&self, ended: Ended) {
        for container in ended.containers {
            self.exits.end_lost_container(&container).await;
        }
        if let Some(sandbox) = ended.sandbox {
            self.exits.record_sandbox_end(&sandbox);
        }
    }

    /// Removes unused images and layers of an earlier start, in a task. At this time the recovered containers hold
    /// their images.
    fn collect_images(&self) {
        let images = self.images.clone();
        coracle_threads::spawn(async move {
            if let Err(error) = images.collect().await {
                warn!(%error, "cannot remove unused images");
            }
        });
    }
}

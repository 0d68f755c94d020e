//! Recovery: restores the runtime's state at its start.
//!
//! Records have the desired state, shims the observed state. Incomplete objects are undone, objects that ended in the
//! meantime are recorded as ended, and objects without an owner are removed. If a live shim does not respond, a
//! background task waits for it, see `shim_monitor`.

mod networks;

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;

use coracle_cni::Network;
use coracle_images::Images;
use coracle_proto::shim::State;
use futures::future::{join_all, try_join_all};
use tokio::time::timeout;
use tracing::{info, warn};

use crate::cgroup::Cgroups;
use crate::cgroup::driver::Layout;
use crate::cgroup::freezer::Freezer;
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
use crate::shim_client::{self, ErrorKind, Shim};
use crate::shim_monitor::{MissedTransition, ShimMonitor, current_phase, missed_transitions};
use crate::tables::Tables;

/// A recorded sandbox and its shim.
struct RecordedSandbox {
    record: SandboxRecord,
    shim: Found,
}

/// The shim of a sandbox.
enum Found {
    /// A live shim, with the state of its containers.
    Answers(Shim, State),
    /// A live shim that does not answer.
    Silent(Shim),
    Gone,
}

/// Objects that ended with their shim and are not yet recorded as ended.
struct Ended {
    containers: Vec<Arc<Container>>,
    sandbox: Option<Arc<Sandbox>>,
}

// === impl Found ===

impl Found {
    fn shim(&self) -> Option<&Shim> {
        match self {
            Self::Answers(shim, _) | Self::Silent(shim) => Some(shim),
            Self::Gone => None,
        }
    }

    fn state(&self) -> Option<&State> {
        match self {
            Self::Answers(_, state) => Some(state),
            Self::Silent(_) | Self::Gone => None,
        }
    }
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
        coracle_fault::point("recover.told");
        for ended in recovered {
            self.end_lost(ended).await;
        }
        coracle_fault::point("recover.ended");
        self.outbox.events.open_to_listeners();
        for id in incomplete {
            self.remove_incomplete_restore(id).await;
        }
        join_all(stopping.into_iter().map(|id| self.complete_stop(id))).await;
        self.check_networks();
        self.collect_images();
        Ok(())
    }

    /// Kills the shims of sandboxes whose directories were removed, and removes the cgroups of shims that have ended. The
    /// pods are started again.
    async fn end_strays(&self, found: &records::Found<SandboxRecord>) {
        let known = found.readable.iter().map(|record| record.id.clone()).chain(found.lost.iter().cloned());
        let known: HashSet<String> = known.collect();
        Shim::kill_strays(self.records.sandboxes_dir(), known.clone(), self.config.shim_timeouts).await;
        if let Some(parent) = self.layout.shims() {
            self.cgroups.remove_stray_shims(&parent, known).await;
        }
    }

    /// Removes a pod whose restore is incomplete. Its creation event was already sent.
    async fn remove_incomplete_restore(&self, id: String) {
        info!(sandbox = id, "removing an incompletely restored pod");
        if let Err(error) = self.sandboxes.undo_run(id.clone()).await {
            warn!(sandbox = id, error = error.chain(), "cannot remove an incompletely restored pod");
        }
    }

    /// Completes an interrupted stop of a pod, which may already have lost its network. After the timeout of the
    /// wait, the stop continues in the background.
    async fn complete_stop(&self, id: String) {
        info!(sandbox = id, "completing an interrupted stop of a pod");
        let Some(sandbox) = self.tables.sandboxes.get(&id) else { return };
        let sandboxes = self.sandboxes.clone();
        let stopped = coracle_threads::spawn(async move {
            if let Err(error) = sandboxes.stop_sandbox(&sandbox).await {
                warn!(sandbox = id, error = error.chain(), "cannot complete the stop of a pod");
            }
        });
        let _continues = timeout(self.config.shim_timeouts.answer, stopped).await;
        coracle_fault::point("recover.stopped");
    }

    /// Connects to the shim of a sandbox that should have one.
    async fn connect_shim(&self, record: &SandboxRecord) -> Result<Found, Error> {
        match record.phase {
            SandboxPhase::NotReady => Ok(Found::Gone),
            SandboxPhase::Creating | SandboxPhase::Ready => self.find_shim(&record.id).await,
        }
    }

    /// Connects to a shim. A live shim stays alive even if this runtime cannot talk to it: the shim may be of a later
    /// version, or this process may lack a resource. A shim that no client can ever reach again is killed.
    async fn find_shim(&self, id: &str) -> Result<Found, Error> {
        let dir = self.records.sandbox_dir(id);
        let timeouts = self.config.shim_timeouts;
        match Shim::reach(&dir, timeouts).await {
            Ok(shim_client::ConnectResult::Answers(shim, state)) => Ok(Found::Answers(shim, state)),
            Ok(shim_client::ConnectResult::Silent(shim)) => {
                warn!(sandbox = id, "the shim of a sandbox does not answer");
                Ok(Found::Silent(shim))
            }
            // `WrongState`: the shim answers that it is shutting down.
            Err(error)
                if matches!(error.kind, ErrorKind::Gone | ErrorKind::Silent | ErrorKind::WrongState) =>
            {
                warn!(sandbox = id, %error, "the shim of a sandbox is gone");
                Shim::kill_unreachable(&dir, timeouts).await;
                Ok(Found::Gone)
            }
            Err(source) => Err(Error::Foreign { id: id.to_owned(), source }),
        }
    }

    /// Undoes an incompletely created sandbox, or a sandbox without a readable record.
    async fn undo_sandbox(&self, id: &str, found: Found) {
        info!(sandbox = id, "undoing an incompletely created sandbox");
        let ended = match found {
            Found::Answers(shim, _) => shim.shutdown().await,
            Found::Silent(shim) => shim.kill_shim().await,
            Found::Gone => Ok(()),
        };
        if let Err(error) = ended {
            warn!(sandbox = id, %error, "cannot end the shim of an incompletely created sandbox");
        }
        coracle_fault::point("recover.sandbox-shim");
        if let Err(error) = self.network.del(id).await {
            warn!(sandbox = id, %error, "cannot remove the network of an incompletely created sandbox");
        }
        coracle_fault::point("recover.sandbox-network");
        let group = self.layout.own_pod(id);
        self.cgroups.kill(&group).await;
        let removed = self.cgroups.remove(&group).await;
        self.cgroups.remove_shim(&self.layout.shim_of_pod(id)).await;
        coracle_fault::point("recover.sandbox-cgroup");
        for result in [removed, self.records.remove_sandbox(id)] {
            if let Err(error) = result {
                warn!(sandbox = id, error = error.chain(), "cannot undo an incompletely created sandbox");
            }
        }
        coracle_fault::point("recover.sandbox-forgotten");
    }

    /// Records transitions that happened while no runtime was running, in their order. Returns the last event number.
    fn number_missed(&self, mut missed: Vec<MissedTransition>) -> u64 {
        missed.sort_by_key(|missed| missed.at);
        let mut send_guard = self.outbox.events.send_guard();
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

    /// Deletes a shim's containers without a readable record.
    async fn delete_unknown(&self, found: &Found, known: &HashSet<String>) {
        // If the shim does not respond, the monitor deletes the container when the shim responds again.
        let Found::Answers(shim, state) = found else { return };
        let ids = state.containers.iter().map(|reported| &reported.container_id);
        for id in ids.filter(|id| !known.contains(*id)) {
            if let Err(error) = shim.delete(id).await {
                warn!(container = id, %error, "cannot delete a container without a record");
            }
        }
    }

    /// Thaws a container that was frozen for a checkpoint, and removes the incomplete checkpoint. If its CRIU still runs, a
    /// task waits for the end of CRIU; until then the checkpoint counts as in progress.
    async fn end_checkpoint(&self, container: &Arc<Container>) {
        let layer = self.records.layer_dir(&container.id);
        if !checkpoint::has_incomplete(&layer) {
            return;
        }
        let freezer = self.cgroups.freezer(&container.record.cgroup);
        let (id, looked) = (container.id.clone(), (freezer.clone(), layer.clone()));
        // Runs off the async executor, because it reads all processes and removes files.
        let work = coracle_threads::spawn_blocking(move || {
            let (freezer, layer) = looked;
            let is_at_work = checkpoint::is_criu_running(&layer);
            if !is_at_work {
                remove_checkpoint(&id, freezer.as_ref(), &layer);
            }
            is_at_work
        });
        if !work.await.unwrap_or_default() {
            return;
        }
        info!(container = container.id, "a CRIU of an earlier runtime still works on a container");
        let lock = Arc::clone(&container.removing).lock_owned().await;
        let id = container.id.clone();
        coracle_threads::spawn(async move {
            if let Err(error) = checkpoint::criu_ended(&layer).await {
                warn!(container = id, %error, "cannot wait for the end of CRIU");
            }
            let _gone =
                coracle_threads::spawn_blocking(move || remove_checkpoint(&id, freezer.as_ref(), &layer))
                    .await;
            drop(lock);
        });
    }

    /// Undoes an incompletely created container, or a container of a lost pod.
    async fn undo_container(&self, record: &ContainerRecord, shim: Option<&Shim>) {
        info!(container = record.id, "undoing an incompletely created container");
        if let Some(shim) = shim
            && let Err(error) = shim.delete(&record.id).await
        {
            warn!(container = record.id, %error, "cannot delete an incompletely created container");
        }
        coracle_fault::point("recover.container-deleted");
        self.cgroups.kill(&record.cgroup).await;
        let removed = self.cgroups.remove(&record.cgroup).await;
        coracle_fault::point("recover.container-cgroup");
        for result in [removed, self.records.remove_container(&record.id)] {
            if let Err(error) = result {
                warn!(
                    container = record.id,
                    error = error.chain(),
                    "cannot undo an incompletely created container"
                );
            }
        }
        coracle_fault::point("recover.container-forgotten");
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
                let died = record.phase == SandboxPhase::Ready;
                let sandbox = Arc::new(Sandbox::new(record, SandboxState::NotReady));
                self.tables.sandboxes.insert(&sandbox.id, Arc::clone(&sandbox));
                ended.sandbox = died.then_some(sandbox);
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
            self.exits.record_sandbox_death(&sandbox);
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

/// Thaws a container and removes its incomplete checkpoint.
fn remove_checkpoint(id: &str, freezer: Option<&Freezer>, layer: &Path) {
    if let Some(Err(error)) = freezer.map(Freezer::thaw) {
        warn!(container = id, %error, "cannot thaw a container");
    }
    if let Err(error) = checkpoint::remove_incomplete(layer) {
        let error = chain(&error);
        warn!(container = id, error, "cannot remove an incomplete checkpoint");
    }
}

/// Whether a stop of the pod was interrupted.
fn is_stop_incomplete(record: &SandboxRecord) -> bool {
    record.stopping && record.phase == SandboxPhase::Ready
}

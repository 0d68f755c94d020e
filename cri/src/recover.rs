//! How the runtime finds its pods again: records say what should be, shims what is. Half-made things
//! are undone, what died meanwhile is marked ended, and what nobody owns is removed. A shim that lives and does not
//! answer is waited for beside all else, see `silent`.

mod phase;
pub(crate) mod relink;
mod silent;

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use coracle_cni::Attachment;
use coracle_proto::shim::State;
use futures::future::{join_all, try_join_all};
use tokio::time::timeout;
use tracing::{info, warn};

use self::phase::{Missed, missed, phase_now};
use crate::cgroup::freezer::Freezer;
use crate::checkpoint;
use crate::container::{self, Container};
use crate::error::{Error, chain};
use crate::exits::exit_record;
use crate::records::{self, ContainerPhase, ContainerRecord, SandboxPhase, SandboxRecord, Transition};
use crate::runtime::Runtime;
use crate::sandbox::{self, Live, Sandbox, SandboxState, namespaces};
use crate::shim_client::{self, ErrorKind, Shim};

/// A sandbox's record, and what became of its shim.
type Reached = (SandboxRecord, Found);

/// The shim of a sandbox.
enum Found {
    /// It lives, and has said what became of its containers.
    Answers(Shim, State),
    /// It lives, and does not answer.
    Silent(Shim),
    Gone,
}

/// What has ended with its shim, and is not on record as such.
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

impl Runtime {
    pub(crate) async fn recover(&self) -> Result<(), Error> {
        // What cannot be understood ends the start here, before anything is done: its pod runs on.
        let (found, containers) = (self.inner.records.sandboxes()?, self.inner.records.containers()?);
        let lost = try_join_all(found.lost.iter().map(|id| self.find_shim(id))).await?;
        let reached = try_join_all(found.readable.iter().map(|record| self.reach(record))).await?;
        let removed = self.inner.records.removed()?;
        let transitions = found.readable.iter().flat_map(|record| &record.transitions);
        self.skip_numbers(transitions.map(|transition| transition.number));
        self.skip_numbers(removed.iter().map(|removed| removed.number));
        for (id, lost) in found.lost.iter().zip(lost) {
            self.undo_sandbox(id, lost).await;
        }
        let mut sandboxes = Vec::new();
        for (record, found) in found.readable.into_iter().zip(reached) {
            if record.phase == SandboxPhase::Creating {
                self.undo_sandbox(&record.id, found).await;
            } else {
                sandboxes.push((record, found));
            }
        }
        let missed = self.recover_containers(containers, &sandboxes).await?;
        let last = self.number_missed(missed);
        self.reconcile_network(&sandboxes).await;
        coracle_fault::point("recover.network");
        let (mut half_restored, mut half_stopped, mut recovered) = (Vec::new(), Vec::new(), Vec::new());
        for (record, found) in sandboxes {
            half_restored.extend(record.restoring.then(|| record.id.clone()));
            half_stopped.extend(is_half_stopped(&record).then(|| record.id.clone()));
            recovered.push(self.recover_sandbox(record, found));
        }
        // Before anything new is told.
        self.tell_left(removed, last);
        coracle_fault::point("recover.told");
        for ended in recovered {
            self.end_lost(ended).await;
        }
        coracle_fault::point("recover.ended");
        self.inner.events.open_to_listeners();
        for id in half_restored {
            self.remove_half_restored(id).await;
        }
        join_all(half_stopped.into_iter().map(|id| self.end_half_stopped(id))).await;
        self.check_networks();
        self.collect_images();
        Ok(())
    }

    /// No event gets a number that one of an earlier life has.
    fn skip_numbers(&self, numbers: impl Iterator<Item = u64>) {
        self.inner.events.turn().skip(numbers.max().unwrap_or_default());
    }

    /// Takes back a pod whose restoring did not come to its end. Listeners were told that it is there.
    async fn remove_half_restored(&self, id: String) {
        info!(sandbox = id, "remove a pod that was not completely restored");
        if let Err(error) = self.sandbox_unmake(id.clone()).await {
            warn!(sandbox = id, error = error.chain(), "could not take a half-restored pod back");
        }
    }

    /// Brings to its end what stopping a pod has begun: its network is not its own any more. One that does not end is
    /// not waited for without end.
    async fn end_half_stopped(&self, id: String) {
        info!(sandbox = id, "stop a pod that was not completely stopped");
        let Some(sandbox) = self.inner.sandboxes.get(&id) else { return };
        let runtime = self.clone();
        let stopped = tokio::spawn(async move {
            if let Err(error) = runtime.stop_sandbox(&sandbox).await {
                warn!(sandbox = id, error = error.chain(), "could not stop a half-stopped pod");
            }
        });
        let _goes_on_beside = timeout(self.inner.config.shim_times.answer, stopped).await;
        coracle_fault::point("recover.stopped");
    }

    /// Looks for the shim of a sandbox that should have one, or may.
    async fn reach(&self, record: &SandboxRecord) -> Result<Found, Error> {
        match record.phase {
            SandboxPhase::NotReady => Ok(Found::Gone),
            SandboxPhase::Creating | SandboxPhase::Ready => self.find_shim(&record.id).await,
        }
    }

    /// A shim that is there is ended by nobody who merely cannot talk to it: it may be of a later version, or we may be
    /// short of something. One that nobody can ever talk to again is.
    async fn find_shim(&self, id: &str) -> Result<Found, Error> {
        let dir = self.inner.records.sandbox_dir(id);
        let times = self.inner.config.shim_times;
        match Shim::reach(&dir, times).await {
            Ok(shim_client::Reached::Answers(shim, state)) => Ok(Found::Answers(shim, state)),
            Ok(shim_client::Reached::Silent(shim)) => {
                warn!(sandbox = id, "a sandbox's shim does not answer");
                Ok(Found::Silent(shim))
            }
            // Or it says that it is about to end.
            Err(error)
                if matches!(error.kind, ErrorKind::Gone | ErrorKind::Silent | ErrorKind::WrongState) =>
            {
                warn!(sandbox = id, %error, "a sandbox's shim is gone");
                Shim::end_stray(&dir, times).await;
                Ok(Found::Gone)
            }
            Err(source) => Err(Error::Foreign { id: id.to_owned(), source }),
        }
    }

    /// Takes back what is left of a sandbox that was not completely made, or whose record is lost.
    async fn undo_sandbox(&self, id: &str, found: Found) {
        info!(sandbox = id, "undo a sandbox that was not completely made");
        let ended = match found {
            Found::Answers(shim, _) => shim.shutdown().await,
            Found::Silent(shim) => shim.kill_itself().await,
            Found::Gone => Ok(()),
        };
        if let Err(error) = ended {
            warn!(sandbox = id, %error, "could not end the shim of a half-made sandbox");
        }
        coracle_fault::point("recover.sandbox-shim");
        if let Err(error) = self.inner.network.del(id).await {
            warn!(sandbox = id, %error, "could not take a half-made sandbox's network away");
        }
        coracle_fault::point("recover.sandbox-network");
        let group = self.inner.layout.own_pod(id);
        self.inner.cgroups.kill(&group).await;
        let removed = self.inner.cgroups.remove(&group).await;
        coracle_fault::point("recover.sandbox-cgroup");
        for result in [removed, self.inner.records.remove_sandbox(id)] {
            if let Err(error) = result {
                warn!(sandbox = id, error = error.chain(), "could not undo a half-made sandbox");
            }
        }
        coracle_fault::point("recover.sandbox-forgotten");
    }

    /// Records what happened while no runtime was there, to be told in the order in which it did. Returns the last
    /// number that it got.
    fn number_missed(&self, mut missed: Vec<Missed>) -> u64 {
        missed.sort_by_key(|missed| missed.at);
        let mut turn = self.inner.events.turn();
        for Missed { at, container, what } in &missed {
            container.note(turn.number().map(|number| Transition { number, what: (*what).into(), at: *at }));
        }
        for container in self.inner.containers.all() {
            if let Err(error) = self.inner.records.write_container(&container.record_now()) {
                warn!(container = container.id, error = error.chain(), "could not record a container");
            }
            coracle_fault::point("recover.numbered");
        }
        turn.last()
    }

    async fn recover_containers(
        &self,
        found: records::Found<ContainerRecord>,
        sandboxes: &[Reached],
    ) -> Result<Vec<Missed>, Error> {
        let shims: HashMap<&str, &Found> =
            sandboxes.iter().map(|(record, found)| (record.id.as_str(), found)).collect();
        let transitions = found.readable.iter().flat_map(|record| &record.transitions);
        self.skip_numbers(transitions.map(|transition| transition.number));
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
        // Before their layers go: what no record has may run.
        for (_, found) in sandboxes {
            self.delete_unknown(found, &known).await;
        }
        let layers = self.inner.records.layers()?;
        for id in layers.iter().chain(&found.lost).filter(|id| !known.contains(*id)) {
            if let Err(error) = self.inner.records.forget_container(id) {
                warn!(container = id, error = error.chain(), "could not remove what nobody owns");
            }
            coracle_fault::point("recover.bundle-forgotten");
            self.discard_layer(id);
        }
        Ok(missed)
    }

    /// Has a shim delete the containers that are on nobody's record, or whose records cannot be read.
    async fn delete_unknown(&self, found: &Found, known: &HashSet<String>) {
        // One that is silent is told when it wakes.
        let Found::Answers(shim, state) = found else { return };
        let ids = state.containers.iter().map(|seen| &seen.container_id);
        for id in ids.filter(|id| !known.contains(*id)) {
            if let Err(error) = shim.delete(id).await {
                warn!(container = id, %error, "could not delete what nobody owns");
            }
        }
    }

    /// Lets a container go on that was frozen for a checkpoint, and removes what is half-made. A CRIU that still works
    /// on it is waited for beside all else; until then it is in its checkpoint, as if the runtime had not ended.
    async fn end_checkpoint(&self, container: &Arc<Container>) {
        let layer = self.inner.records.layer_dir(&container.id);
        if !checkpoint::is_left(&layer) {
            return;
        }
        let freezer = self.inner.cgroups.freezer(&container.record.cgroup);
        let (id, looked) = (container.id.clone(), (freezer.clone(), layer.clone()));
        // It reads of all processes, and removes what may be much.
        let work = tokio::task::spawn_blocking(move || {
            let (freezer, layer) = looked;
            let is_at_work = checkpoint::is_at_work(&layer);
            if !is_at_work {
                let_go_on(&id, freezer.as_ref(), &layer);
            }
            is_at_work
        });
        if !work.await.unwrap_or_default() {
            return;
        }
        info!(container = container.id, "a CRIU that outlived its runtime works on a container");
        let stays = Arc::clone(&container.removing).lock_owned().await;
        let id = container.id.clone();
        tokio::spawn(async move {
            if let Err(error) = checkpoint::criu_ended(&layer).await {
                warn!(container = id, %error, "could not wait for a CRIU");
            }
            let _gone = tokio::task::spawn_blocking(move || let_go_on(&id, freezer.as_ref(), &layer)).await;
            drop(stays);
        });
    }

    /// Takes back what is left of a container that was not completely made, or whose pod is lost.
    async fn undo_container(&self, record: &ContainerRecord, shim: Option<&Shim>) {
        info!(container = record.id, "undo a container that was not completely made");
        if let Some(shim) = shim
            && let Err(error) = shim.delete(&record.id).await
        {
            warn!(container = record.id, %error, "could not delete a half-made container");
        }
        coracle_fault::point("recover.container-deleted");
        self.inner.cgroups.kill(&record.cgroup).await;
        let removed = self.inner.cgroups.remove(&record.cgroup).await;
        coracle_fault::point("recover.container-cgroup");
        for result in [removed, self.inner.records.remove_container(&record.id)] {
            if let Err(error) = result {
                warn!(container = record.id, error = error.chain(), "could not undo a half-made container");
            }
        }
        coracle_fault::point("recover.container-forgotten");
    }

    /// Puts a container into the table, in the state that its shim reports. Returns it, and what it went through
    /// meanwhile.
    async fn recover_container(
        &self,
        mut record: ContainerRecord,
        state: Option<&State>,
    ) -> (Arc<Container>, Vec<Missed>) {
        let before = record.phase.clone();
        let seen = state
            .and_then(|state| state.containers.iter().find(|container| container.container_id == record.id));
        if let Some(seen) = seen {
            record.phase = phase_now(&record.phase, seen);
            // Of a restored one it changes at its start.
            record.pid = if seen.pid > 0 { seen.pid } else { record.pid };
        }
        if record.restore.is_some() && matches!(record.phase, ContainerPhase::Running { .. }) {
            // Its start may have been the last that the runtime before did.
            if let Err(error) = checkpoint::forget_images(&self.inner.records.layer_dir(&record.id)) {
                warn!(container = record.id, error = chain(&error), "the images of a container stay with it");
            }
        }
        let volumes = record.config.mounts.iter().filter_map(|mount| mount.image.as_ref());
        let images = volumes.map(|image| &image.image_ref).chain([&record.image_id]);
        let held = images.map(|id| self.inner.images.hold(id).map_err(|error| (id, error)));
        let held = held.filter_map(|held| {
            held.inspect_err(
                |(image, error)| warn!(container = record.id, image, %error, "a container's image is lost"),
            )
            .ok()
        });
        let held = held.collect();
        let name = container::name(&record.config.metadata.clone().unwrap_or_default(), &record.sandbox_id);
        self.inner.names.hold(name, record.id.clone());
        self.inner.selinux.hold(&record.id, record.selinux.as_ref());
        self.settle_limits(&record).await;
        coracle_fault::point("recover.limits");
        let container = Container::new(record, held);
        if let Some(exit) = seen.and_then(|seen| seen.exit.as_ref()) {
            container.exited(exit_record(&container, exit));
        }
        let container = Arc::new(container);
        self.inner.containers.insert(&container.id, Arc::clone(&container));
        let missed = missed(&before, &container);
        (container, missed)
    }

    /// Puts a sandbox into the table. Returns what of it ended while no runtime was there.
    fn recover_sandbox(&self, record: SandboxRecord, found: Found) -> Ended {
        let name = sandbox::name(&record.config.metadata.clone().unwrap_or_default());
        self.inner.names.hold(name, record.id.clone());
        self.inner.selinux.hold(&record.id, record.selinux.as_ref());
        let id = record.id.clone();
        let mut ended = Ended { containers: Vec::new(), sandbox: None };
        let known: HashSet<String> = match found {
            Found::Answers(shim, state) => {
                self.adopt_sandbox(record, Live { shim, init_pid: state.init_pid });
                self.end_execs(state.execs);
                state.containers.into_iter().map(|container| container.container_id).collect()
            }
            Found::Silent(shim) => {
                self.adopt_silent(record, shim);
                return ended;
            }
            Found::Gone => {
                let died = record.phase == SandboxPhase::Ready;
                let sandbox = Arc::new(Sandbox::new(record, SandboxState::NotReady));
                self.inner.sandboxes.insert(&sandbox.id, Arc::clone(&sandbox));
                ended.sandbox = died.then_some(sandbox);
                HashSet::new()
            }
        };
        ended.containers = self.containers_of(&id);
        ended.containers.retain(|container| {
            !matches!(container.phase(), ContainerPhase::Exited(_)) && !known.contains(&container.id)
        });
        ended
    }

    async fn end_lost(&self, ended: Ended) {
        for container in ended.containers {
            self.container_lost(&container).await;
        }
        if let Some(sandbox) = ended.sandbox {
            self.note_death(&sandbox);
        }
    }

    /// Gives back what belongs to no living pod.
    async fn reconcile_network(&self, sandboxes: &[Reached]) {
        let live: Vec<Attachment> = sandboxes
            .iter()
            .filter(|(record, _)| namespaces::own_network(&record.config) && !is_half_stopped(record))
            .filter_map(|(record, found)| found.shim().map(|shim| (record, shim)))
            .map(|(record, shim)| attachment(record, format!("/proc/{}/ns/net", shim.pid()).into()))
            .collect();
        if let Err(error) = self.inner.network.reconcile(&live).await {
            warn!(error = error.chain(), "could not reconcile the network");
        }
    }

    /// Removes the images and layers that an earlier life left to nobody: all that is in use is held again. Nobody
    /// waits for the disk.
    fn collect_images(&self) {
        let images = self.inner.images.clone();
        tokio::spawn(async move {
            if let Err(error) = images.collect().await {
                warn!(%error, "could not remove images that nobody needs");
            }
        });
    }

    /// Says which pods have not the network any more that they were given, as far as that could not be made again.
    /// Nobody waits for it: plugins may be executables.
    fn check_networks(&self) {
        let inner = Arc::downgrade(&self.inner);
        let sandboxes = self.inner.sandboxes.all();
        tokio::spawn(async move {
            for sandbox in sandboxes {
                // Of one that is being stopped it would be no news.
                let _stays = sandbox.ending.lock().await;
                let Some(inner) = inner.upgrade() else { return };
                if sandbox.live().is_none() {
                    continue;
                }
                if let Err(error) = inner.network.check(&sandbox.id).await {
                    warn!(
                        sandbox = sandbox.id,
                        error = error.chain(),
                        "a pod's network is not as it was made"
                    );
                }
            }
        });
    }
}

/// Thaws a container, and removes what is left of its checkpoint.
fn let_go_on(id: &str, freezer: Option<&Freezer>, layer: &Path) {
    if let Some(Err(error)) = freezer.map(Freezer::thaw) {
        warn!(container = id, %error, "could not thaw a container");
    }
    if let Err(error) = checkpoint::forget(layer) {
        let error = chain(&error);
        warn!(container = id, error, "could not remove a checkpoint that was not finished");
    }
}

/// Whether a stop of the pod has begun and did not come to its end.
fn is_half_stopped(record: &SandboxRecord) -> bool {
    record.stopping && record.phase == SandboxPhase::Ready
}

/// A pod that lives, as the network was told of it.
fn attachment(record: &SandboxRecord, netns: PathBuf) -> Attachment {
    sandbox::attachment::of(&record.id, netns.clone(), &record.config).unwrap_or_else(|error| {
        // By whatever rules it was let in, it lives.
        warn!(sandbox = record.id, error = error.chain(), "not all is known of a pod's network");
        let (id, ifname) = (record.id.clone(), sandbox::attachment::INTERFACE.to_owned());
        Attachment { id, netns, ifname, ..Attachment::default() }
    })
}

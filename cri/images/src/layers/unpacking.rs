//! Unpackings of layers. Callers with the same source share one unpacking of a layer. A caller with another source waits
//! only for a short time, then fetches and unpacks the layer itself. So a registry that sends slowly does not delay images
//! of other registries. The first complete layer is kept, and the other unpackings of it end.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::sync::{oneshot, watch};
use tokio::time::{Instant, timeout_at};

use super::{KEEP, LayerError, LayerState, Layers, Lease, Meta, UnpackDir, names, read_meta};
use crate::digest::Digest;
use crate::image::Login;
use crate::reference::Reference;
use crate::unpack::Unpacked;

/// Maximum time that a pull waits for layers of other sources, from its first such wait.
const WAIT_MAX: Duration = Duration::from_secs(10);

/// The source of layers, for one pull or import.
#[derive(Debug)]
pub(crate) struct Source {
    origin: Arc<Origin>,
    /// The time at which the caller stops waiting for other sources. Set at its first such wait.
    waits_until: OnceLock<Instant>,
}

/// Origin of a layer's data. Callers with equal origins wait for each other.
#[derive(Debug, PartialEq, Eq)]
enum Origin {
    /// Data on this machine.
    Local,
    /// The owner is part of the origin, because a fetch may wait for the owner's [slots](crate::fetch_slots).
    Registry { owner: String, repository: String, login: Option<Login> },
}

/// Unpackings of one layer, at least one.
pub(super) struct InProgress {
    /// Notified when an unpacking fails, closed when the layer is complete or all unpackings have failed.
    changed: watch::Sender<()>,
    /// The callers that fetch or unpack the layer, by number.
    callers: Vec<(u64, Arc<Origin>)>,
    /// Whether an unpacking moves the layer into place.
    is_committing: bool,
    /// Memory for the [names] of the layer that is moved into place, in bytes.
    names: usize,
}

/// The right to unpack one layer.
struct Unpacking {
    layers: Arc<Layers>,
    diff_id: Digest,
    number: u64,
    commits: bool,
    is_complete: bool,
}

/// Next step of a caller that needs a layer.
enum Step {
    Take(Lease),
    Wait { changed: watch::Receiver<()>, until: Option<Instant> },
    Unpack { unpacking: Unpacking, changed: watch::Receiver<()> },
}

/// Next step of a caller that has unpacked a layer.
enum Outcome {
    Take(Lease),
    Wait(watch::Receiver<()>),
    Commit,
    /// The names of all layers would take too much memory.
    Refuse,
}

// === impl Source ===

impl Source {
    /// Data on this machine.
    pub(crate) fn local() -> Source {
        Source { origin: Arc::new(Origin::Local), waits_until: OnceLock::new() }
    }

    /// A repository, with these credentials, on behalf of an owner.
    pub(crate) fn registry(owner: &str, reference: &Reference, login: Option<&Login>) -> Source {
        let (owner, repository, login) = (owner.to_owned(), reference.repository(), login.cloned());
        let origin = Arc::new(Origin::Registry { owner, repository, login });
        Source { origin, waits_until: OnceLock::new() }
    }

    #[cfg(test)]
    pub(super) fn without_wait(self) -> Source {
        Source { waits_until: OnceLock::from(Instant::now()), ..self }
    }

    /// The time until which the caller waits for these unpackings. `None` if it waits for their end.
    fn waits_for(&self, others: &InProgress) -> Option<Instant> {
        // A layer that is being moved into place needs no source any more.
        let waits_for_end =
            others.is_committing || others.callers.iter().any(|(_, other)| *other == self.origin);
        (!waits_for_end).then(|| *self.waits_until.get_or_init(|| Instant::now() + WAIT_MAX))
    }
}

// === impl InProgress ===

impl InProgress {
    fn none() -> InProgress {
        InProgress { changed: watch::channel(()).0, callers: Vec::new(), is_committing: false, names: 0 }
    }

    /// Memory for the names of the layer while it is moved into place, in bytes. Otherwise 0.
    pub(super) fn names(&self) -> usize {
        self.names
    }
}

// === impl Layers ===

impl Layers {
    /// A reference to a layer, which is unpacked if it is absent. A second caller with the same source waits for the
    /// first caller, and unpacks the layer itself if the first caller fails.
    pub(crate) async fn ensure<E: From<LayerError>>(
        self: &Arc<Layers>,
        diff_id: Digest,
        source: &Source,
        unpack: impl AsyncFnOnce() -> Result<(UnpackDir, Unpacked), E>,
    ) -> Result<Lease, E> {
        let (unpacking, changed) = loop {
            match self.begin(diff_id, source) {
                Step::Take(lease) => return Ok(lease),
                Step::Unpack { unpacking, changed } => break (unpacking, changed),
                // The next `begin` finds the new state.
                Step::Wait { mut changed, until: None } => drop(changed.changed().await),
                Step::Wait { mut changed, until: Some(until) } => {
                    drop(timeout_at(until, changed.changed()).await);
                }
            }
        };
        // Cancel-safe: an interrupted unpacking leaves no files, like the unpacking of a cancelled caller.
        let (unpack_dir, unpacked) = tokio::select! {
            unpacked = unpack() => unpacked?,
            lease = self.completed(diff_id, changed) => return Ok(lease),
        };
        let Unpacked { bytes, inodes, implied, links, .. } = unpacked;
        let meta = Meta { diff_id, bytes, inodes, implied, links };
        Ok(self.commit_in_task(unpacking, unpack_dir, meta).await?)
    }

    /// Waits until another caller has completed the layer.
    async fn completed(self: &Arc<Layers>, diff_id: Digest, mut changed: watch::Receiver<()>) -> Lease {
        while changed.changed().await.is_ok() {}
        match self.lease(diff_id) {
            Some(lease) => lease,
            // The layer is removed already: the caller's own unpacking continues.
            None => std::future::pending().await,
        }
    }

    fn begin(self: &Arc<Layers>, diff_id: Digest, source: &Source) -> Step {
        let mut states = self.states();
        let others = match states.entry(diff_id).or_insert_with(|| LayerState::Unpacking(InProgress::none()))
        {
            LayerState::Complete { refs, .. } => {
                *refs += 1;
                return Step::Take(Lease { layers: self.clone(), diff_id, keep: false });
            }
            LayerState::Unpacking(others) => others,
        };
        let changed = others.changed.subscribe();
        if others.is_committing || !others.callers.is_empty() {
            let until = source.waits_for(others);
            if until.is_none_or(|until| Instant::now() < until) {
                return Step::Wait { changed, until };
            }
        }
        let number = self.next_number();
        others.callers.push((number, source.origin.clone()));
        let (commits, is_complete) = (false, false);
        Step::Unpack {
            unpacking: Unpacking { layers: self.clone(), diff_id, number, commits, is_complete },
            changed,
        }
    }

    /// Commits a layer in a separate task, so that a cancelled caller does not interrupt the disk operations. If the
    /// caller is cancelled, a sweep removes the unused layer.
    async fn commit_in_task(
        self: &Arc<Layers>,
        unpacking: Unpacking,
        unpack_dir: UnpackDir,
        meta: Meta,
    ) -> Result<Lease, LayerError> {
        let (sender, receiver) = oneshot::channel();
        let layers = self.clone();
        tokio::spawn(async move {
            let committed = layers.commit_once(unpacking, unpack_dir, meta).await;
            if let Err(Ok(unclaimed)) = sender.send(committed) {
                drop(unclaimed);
                let swept =
                    tokio::task::spawn_blocking(move || layers.sweep(std::time::Instant::now())).await;
                if let Ok(Err(error)) = swept {
                    tracing::warn!(error = crate::error::report(&error), "cannot remove an unused layer");
                }
            }
        });
        receiver.await.map_err(|_dropped| LayerError::Stopped)?
    }

    /// Commits a layer, unless another caller has done so.
    async fn commit_once(
        self: &Arc<Layers>,
        mut unpacking: Unpacking,
        unpack_dir: UnpackDir,
        meta: Meta,
    ) -> Result<Lease, LayerError> {
        loop {
            match unpacking.begin_commit(names::of(&meta)) {
                Outcome::Take(lease) => return Ok(lease),
                Outcome::Wait(mut changed) => drop(changed.changed().await),
                Outcome::Commit => break,
                Outcome::Refuse => return Err(LayerError::Names { layer: meta.diff_id }),
            }
        }
        self.commit(unpack_dir, meta.clone()).await?;
        Ok(unpacking.complete(meta))
    }
}

// === impl Unpacking ===

impl Unpacking {
    /// Begins to move a layer into place. `names` is the memory for its [names], in bytes.
    fn begin_commit(&mut self, names: usize) -> Outcome {
        let mut states = self.layers.states();
        // There is no state if another caller's layer was completed and removed meanwhile.
        match states.entry(self.diff_id).or_insert_with(|| LayerState::Unpacking(InProgress::none())) {
            LayerState::Complete { refs, .. } => {
                *refs += 1;
                return Outcome::Take(Lease {
                    layers: self.layers.clone(),
                    diff_id: self.diff_id,
                    keep: false,
                });
            }
            LayerState::Unpacking(all) if all.is_committing => return Outcome::Wait(all.changed.subscribe()),
            LayerState::Unpacking(_) => {}
        }
        if !names::fit(names, states.values()) {
            return Outcome::Refuse;
        }
        if let Some(LayerState::Unpacking(all)) = states.get_mut(&self.diff_id) {
            (all.is_committing, all.names, self.commits) = (true, names, true);
        }
        Outcome::Commit
    }

    fn complete(mut self, meta: Meta) -> Lease {
        self.is_complete = true;
        let state = LayerState::Complete { meta, refs: 1, keep_until: None };
        self.layers.states().insert(self.diff_id, state);
        Lease { layers: self.layers.clone(), diff_id: self.diff_id, keep: false }
    }
}

impl Drop for Unpacking {
    fn drop(&mut self) {
        if self.is_complete {
            return;
        }
        let mut states = self.layers.states();
        let Some(LayerState::Unpacking(all)) = states.get_mut(&self.diff_id) else { return };
        all.callers.retain(|(number, _)| *number != self.number);
        if self.commits {
            (all.is_committing, all.names) = (false, 0);
            // A commit that was cancelled just after the rename leaves a complete layer without references.
            let found = read_meta(&self.layers.layers.join(self.diff_id.short()));
            if let Some(meta) = found.filter(|meta| meta.diff_id == self.diff_id) {
                let keep_until = Some(std::time::Instant::now() + KEEP);
                states.insert(self.diff_id, LayerState::Complete { meta, refs: 0, keep_until });
                return;
            }
        }
        if all.callers.is_empty() && !all.is_committing {
            states.remove(&self.diff_id);
        } else {
            all.changed.send_replace(());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use super::*;

    fn source(owner: &str, name: &str) -> Source {
        Source::registry(owner, &Reference::parse(name).unwrap(), None)
    }

    fn unpacked(layers: &Layers, diff_id: Digest) -> Result<(UnpackDir, Unpacked), LayerError> {
        let unpacked = Unpacked { diff_id, bytes: 1, inodes: 1, implied: Vec::new(), links: Vec::new() };
        Ok((layers.unpack_dir()?, unpacked))
    }

    #[tokio::test]
    async fn another_source_does_not_wait_for_a_slow_source_and_completes_both() {
        let root = tempfile::tempdir().unwrap();
        let layers = Arc::new(Layers::open(root.path()).unwrap());
        let id = Digest::of(b"a");
        let (slow, good) = (source("a", "slow.example/x"), source("b", "good.example/x").without_wait());
        let first = layers.ensure(id, &slow, async || {
            pending::<()>().await;
            unpacked(&layers, id)
        });
        let second = async {
            tokio::task::yield_now().await;
            layers.ensure(id, &good, async || unpacked(&layers, id)).await
        };
        let (first, second) = tokio::join!(first, second);
        drop((first.unwrap(), second.unwrap()));
        layers.sweep(std::time::Instant::now()).unwrap();
        assert!(!layers.path(&id).exists() && layers.states().is_empty());
        assert_eq!(std::fs::read_dir(root.path().join("partial")).unwrap().count(), 0);
    }

    #[tokio::test]
    async fn sources_that_unpack_a_layer_at_the_same_time_make_one_layer() {
        let root = tempfile::tempdir().unwrap();
        let layers = Arc::new(Layers::open(root.path()).unwrap());
        let id = Digest::of(b"a");
        let sources = ["a", "b", "c"].map(|owner| source(owner, "example.org/x").without_wait());
        let barrier = tokio::sync::Barrier::new(3);
        let get = |from| {
            layers.ensure(id, from, async || {
                let unpacked = unpacked(&layers, id);
                barrier.wait().await;
                unpacked
            })
        };
        let (a, b, c) = tokio::join!(get(&sources[0]), get(&sources[1]), get(&sources[2]));
        let leases = [a, b, c].map(Result::unwrap);
        assert_eq!(layers.usage().bytes, 1);
        drop(leases);
        layers.sweep(std::time::Instant::now()).unwrap();
        assert!(layers.states().is_empty());
    }

    #[tokio::test]
    async fn a_layer_whose_names_do_not_fit_in_memory_is_refused_and_leaves_nothing() {
        let root = tempfile::tempdir().unwrap();
        let layers = Arc::new(Layers::open(root.path()).unwrap());
        let (id, local) = (Digest::of(b"a"), Source::local());
        let refused = layers.ensure(id, &local, async || {
            let (unpack_dir, unpacked) = unpacked(&layers, id)?;
            let implied = vec!["d".repeat(1 << 20); names::TOTAL >> 20];
            Ok::<_, LayerError>((unpack_dir, Unpacked { implied, ..unpacked }))
        });
        assert!(matches!(refused.await.err(), Some(LayerError::Names { .. })));
        assert!(!layers.path(&id).exists() && layers.states().is_empty());
    }

    #[test]
    fn only_equal_sources_wait_to_the_end() {
        let waits = |own: &Source, other: Source| {
            let others = InProgress { callers: vec![(0, other.origin)], ..InProgress::none() };
            own.waits_for(&others).is_none()
        };
        let own = source("a", "example.org/x:1");
        assert!(waits(&own, source("a", "example.org/x:2")));
        assert!(
            !waits(&own, source("b", "example.org/x:1")),
            "the other pull may wait for slots of its owner"
        );
        assert!(!waits(&own, source("a", "example.org/y:1")));
        assert!(!waits(&own, Source::local()) && waits(&Source::local(), Source::local()));
        let committing = InProgress { is_committing: true, ..InProgress::none() };
        assert!(own.waits_for(&committing).is_none());
    }
}

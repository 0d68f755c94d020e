//! The writer thread. It checks the waiting writes, syncs them together and publishes them in order.
//!
//! States: the engine accepts writes, or it has failed. After a failure (full disk, read-only file system, sync error)
//! durable writes are refused. When the disk accepts a file again, the database is closed and reopened. The entries of
//! the failed batch are overwritten with their previous values. So a refused write has no effect, and an acknowledged
//! write is kept.

mod recover;

use std::{
    collections::HashMap,
    sync::{Arc, PoisonError, mpsc},
    time::{Duration, Instant},
};

use tokio::sync::oneshot;

use super::{Job, RESERVED, Shared, SpaceReserves, engine::WriteError, state::State};
use crate::{Commit, Error, Expect, Tier, Write, codec::Revisions};
use recover::Failure;

/// Maximum number of writes that share one sync, so that the first write does not wait too long.
const MAX_BATCH: usize = 256;
/// Interval of attempts to recover. Only a failed store uses this timer.
const RETRY: Duration = Duration::from_secs(1);

type Done = oneshot::Sender<Result<u64, Error>>;

/// The state of the thread.
pub(super) struct Writer<'a> {
    shared: &'a Shared,
    space: SpaceReserves,
    failure: Option<Failure>,
}

/// An accepted write with its revision.
struct Accepted {
    commit: Arc<Commit>,
    /// The commit of the write's guard.
    guard: Option<Arc<Commit>>,
    tier: Tier,
    done: Option<Done>,
}

// === impl Writer ===

impl<'a> Writer<'a> {
    pub(super) fn new(shared: &'a Shared, space: SpaceReserves) -> Self {
        Self { shared, space, failure: None }
    }

    /// Handles writes until all senders of the queue are dropped.
    pub(super) fn run(mut self, queue: &mpsc::Receiver<Job>) {
        loop {
            let first = match self.next(queue) {
                Ok(job) => Some(job),
                Err(mpsc::RecvTimeoutError::Timeout) => None,
                Err(mpsc::RecvTimeoutError::Disconnected) => return,
            };
            self.recover_if_due();
            let jobs: Vec<Job> = first.into_iter().chain(queue.try_iter()).take(MAX_BATCH).collect();
            self.commit(jobs);
        }
    }

    fn next(&self, queue: &mpsc::Receiver<Job>) -> Result<Job, mpsc::RecvTimeoutError> {
        let expiry = self.shared.lock().next_expiry();
        let retry = self.failure.as_ref().map(|failure| failure.retry_at);
        match expiry.into_iter().chain(retry).min() {
            Some(at) => queue.recv_timeout(at.saturating_duration_since(Instant::now())),
            None => queue.recv().map_err(|_closed| mpsc::RecvTimeoutError::Disconnected),
        }
    }

    fn commit(&mut self, jobs: Vec<Job>) {
        let shared = self.shared;
        let mut state = shared.lock();
        let mut batch = Batch { shared, revision: state.revision(), touched: HashMap::new() };
        let mut accepted = Vec::with_capacity(jobs.len());
        for (key, revision) in state.take_expired(Instant::now()) {
            let tier = Tier::Volatile { ttl: None };
            let write = Write { key, expect: Expect::Revision(revision), value: None, tier, guard: None };
            accepted.extend(batch.decide(&state, write));
        }
        // The free space is read once for each batch, and not for deletions.
        let grows = jobs.iter().any(|job| job.write.tier == Tier::Durable && job.write.value.is_some());
        let is_full = grows && self.space.is_full();
        for Job { write, done } in jobs {
            let decided = self.admit(&write, is_full).and_then(|()| batch.decide(&state, write));
            match decided {
                Ok(one) => accepted.push(Accepted { done: Some(done), ..one }),
                Err(error) => drop(done.send(Err(error))),
            }
        }
        match self.persist(&mut state, &accepted) {
            Ok(()) => publish(&mut state, accepted),
            Err(refused) => self.refuse(&mut state, accepted, &refused),
        }
    }

    /// Refuses writes for which the disk has no space. Deletions need only the reserve of the journal.
    fn admit(&self, write: &Write, is_full: bool) -> Result<(), Error> {
        if write.tier != Tier::Durable {
            return Ok(());
        }
        if let Some(failure) = &self.failure {
            return Err(Error::Disk { detail: failure.detail.clone() });
        }
        let is_new = write.expect == Expect::Absent;
        if is_full && write.value.is_some() && (is_new || self.space.is_exhausted()) {
            return Err(Error::Full { path: self.shared.path.clone() });
        }
        Ok(())
    }

    /// Writes the durable commits to disk with one sync. Without durable commits, only a new reservation of revisions
    /// is written.
    fn persist(&mut self, state: &mut State, accepted: &[Accepted]) -> Result<(), Refused> {
        let Some(last) = accepted.last().map(|one| one.commit.revision) else { return Ok(()) };
        let durable = || {
            let durable = accepted.iter().filter(|one| one.tier == Tier::Durable);
            durable.flat_map(|one| std::iter::once(&*one.commit).chain(one.guard.as_deref()))
        };
        if last < state.reserved && durable().next().is_none() {
            return Ok(());
        }
        let engine = self.shared.engine.read().unwrap_or_else(PoisonError::into_inner);
        let Some(engine) = engine.as_ref() else {
            return Err(Refused { detail: "the database is closed".to_owned(), undo: None });
        };
        if last >= state.reserved {
            let until = last + RESERVED;
            engine
                .reserve(until)
                .map_err(|error| Refused::without_undo(WriteError::Engine(error).to_string()))?;
            state.reserved = until;
        }
        match engine.write(durable()) {
            Ok(bytes) => {
                self.space.wrote(bytes);
                Ok(())
            }
            Err(WriteError::Seal(error)) => Err(Refused { detail: error.to_string(), undo: None }),
            Err(error) => {
                // The engine did not apply the failed batch in memory, so it still returns the previous values.
                let undo = engine.undo_of(durable());
                let undo = undo.inspect_err(
                    |error| tracing::warn!(%error, "cannot read the entries that a failed write replaces"),
                );
                Err(Refused { detail: error.to_string(), undo: Some(undo.unwrap_or_default()) })
            }
        }
    }

    fn refuse(&mut self, state: &mut State, accepted: Vec<Accepted>, refused: &Refused) {
        // A part of the batch may be on disk, so the revisions of the batch are never used again.
        if let Some(last) = accepted.last() {
            state.skip_to(last.commit.revision);
        }
        for Accepted { commit, done, .. } in accepted {
            match done {
                Some(done) => drop(done.send(Err(Error::Disk { detail: refused.detail.clone() }))),
                // A commit without a caller is the removal of an expired entry. The removal is tried again later.
                None => state.postpone_expiry(&commit.key, Instant::now()),
            }
        }
        if let Some(undo) = &refused.undo {
            self.fail(refused.detail.clone(), undo.clone());
        }
    }
}

/// The reason why a batch was not written, and the previous entries of its keys if the engine failed.
struct Refused {
    detail: String,
    undo: Option<super::engine::Undo>,
}

impl Refused {
    fn without_undo(detail: String) -> Self {
        Self { detail, undo: Some(Vec::new()) }
    }
}

fn publish(state: &mut State, accepted: Vec<Accepted>) {
    for Accepted { commit, guard, tier, done } in accepted {
        let revision = commit.revision;
        for commit in std::iter::once(commit).chain(guard) {
            if let Tier::Volatile { ttl } = tier {
                state.apply_volatile(&commit, ttl);
            }
            state.publish(commit);
        }
        if let Some(done) = done {
            let _ = done.send(Ok(revision));
        }
    }
}

/// A batch of writes, and the result of the writes that are decided so far.
struct Batch<'a> {
    shared: &'a Shared,
    revision: u64,
    /// Revisions of each written key after the writes so far. `None` if the entry was deleted.
    touched: HashMap<Arc<str>, Option<Revisions>>,
}

impl Batch<'_> {
    fn decide(&mut self, state: &State, write: Write) -> Result<Accepted, Error> {
        let at = state.revision();
        let current = self.current(state, &write.key, write.tier)?;
        let found = current.map(|revisions| revisions.modified);
        let conflict = || Error::Conflict { found, at: found.unwrap_or(at) };
        if !is_satisfied(write.expect, found) || (write.value.is_none() && found.is_none()) {
            return Err(conflict());
        }
        let guarded = match &write.guard {
            Some(guard) => {
                let current = self.current(state, &guard.key, write.tier)?;
                let found = current.map(|revisions| revisions.modified);
                if !is_satisfied(guard.expect, found) {
                    return Err(Error::Guard { at: found.unwrap_or(at) });
                }
                current
            }
            None => None,
        };
        self.revision += 1;
        let (tier, guard) = (write.tier, write.guard);
        let commit = self.accept(write.key, write.value, current, guard.is_some());
        let guard = guard.map(|guard| self.accept(guard.key, Some(bytes::Bytes::new()), guarded, false));
        Ok(Accepted { commit, guard, tier, done: None })
    }

    /// The commit of one entry at the current revision.
    fn accept(
        &mut self,
        key: Arc<str>,
        value: Option<bytes::Bytes>,
        current: Option<Revisions>,
        guard_follows: bool,
    ) -> Arc<Commit> {
        let created = current.map_or(self.revision, |revisions| revisions.created);
        let revisions = value.is_some().then_some(Revisions { created, modified: self.revision });
        self.touched.insert(key.clone(), revisions);
        Arc::new(Commit { revision: self.revision, key, value, created, guard_follows })
    }

    fn current(&self, state: &State, key: &str, tier: Tier) -> Result<Option<Revisions>, Error> {
        if let Some(touched) = self.touched.get(key) {
            return Ok(*touched);
        }
        if let Some(entry) = state.volatile(key) {
            return Ok(Some(Revisions { created: entry.created, modified: entry.modified }));
        }
        if tier != Tier::Durable {
            // A key belongs to one tier, so the key is not on disk. Do not read the disk, because it may have failed.
            return Ok(None);
        }
        self.shared.read(|engine| engine.revisions(key))
    }
}

/// Whether an entry, last changed at `found`, is as expected.
fn is_satisfied(expect: Expect, found: Option<u64>) -> bool {
    match expect {
        Expect::Absent => found.is_none(),
        Expect::Revision(expected) => found == Some(expected),
    }
}

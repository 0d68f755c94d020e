//! The one thread that commits: decide each waiting write, sync them together, publish in order.

use std::{
    collections::HashMap,
    sync::{Arc, mpsc},
    time::Instant,
};

use fjall::PersistMode;
use tokio::sync::oneshot;

use super::{Job, RESERVED, Shared, decode, disk_error, encode, reserve, state::State};
use crate::{Commit, Error, Expect, Tier, Write};

/// At most so many writes share one sync, so that the first does not wait for ever.
const BATCH: usize = 256;

type Done = oneshot::Sender<Result<u64, Error>>;

/// A write that was found to be valid, with its place in the history.
struct Accepted {
    commit: Arc<Commit>,
    tier: Tier,
    done: Option<Done>,
}

/// Serves until every sender of the queue is gone.
pub(super) fn run(shared: &Shared, queue: &mpsc::Receiver<Job>) {
    loop {
        let first = match next(shared, queue) {
            Ok(job) => Some(job),
            Err(mpsc::RecvTimeoutError::Timeout) => None,
            Err(mpsc::RecvTimeoutError::Disconnected) => return,
        };
        let jobs: Vec<Job> = first.into_iter().chain(queue.try_iter().take(BATCH)).collect();
        commit(shared, jobs);
    }
}

fn next(shared: &Shared, queue: &mpsc::Receiver<Job>) -> Result<Job, mpsc::RecvTimeoutError> {
    let expiry = shared.lock().next_expiry();
    match expiry {
        Some(at) => queue.recv_timeout(at.saturating_duration_since(Instant::now())),
        None => queue.recv().map_err(|_closed| mpsc::RecvTimeoutError::Disconnected),
    }
}

fn commit(shared: &Shared, jobs: Vec<Job>) {
    let mut state = shared.lock();
    let mut round = Round { shared, revision: state.revision(), touched: HashMap::new() };
    let mut accepted = Vec::with_capacity(jobs.len());
    for (key, revision) in state.take_expired(Instant::now()) {
        let tier = Tier::Volatile { ttl: None };
        let write = Write { key, expect: Expect::Revision(revision), value: None, tier };
        if let Ok(commit) = round.decide(&state, write) {
            accepted.push(Accepted { commit, tier, done: None });
        }
    }
    for Job { write, done } in jobs {
        let tier = write.tier;
        match round.decide(&state, write) {
            Ok(commit) => accepted.push(Accepted { commit, tier, done: Some(done) }),
            // A caller who no longer waits needs no answer.
            Err(error) => drop(done.send(Err(error))),
        }
    }
    if let Err(error) = persist(shared, &mut state, &accepted) {
        let detail = format!("{error:?}");
        for done in accepted.into_iter().filter_map(|one| one.done) {
            let _ = done.send(Err(Error::Disk { detail: detail.clone() }));
        }
        return;
    }
    for Accepted { commit, tier, done } in accepted {
        if let Tier::Volatile { ttl } = tier {
            state.apply_volatile(&commit, ttl);
        }
        let revision = commit.revision;
        state.publish(commit);
        if let Some(done) = done {
            let _ = done.send(Ok(revision));
        }
    }
}

/// Puts the durable ones on disk with one sync; touches nothing when there are none.
fn persist(shared: &Shared, state: &mut State, accepted: &[Accepted]) -> Result<(), fjall::Error> {
    if let Some(last) = accepted.last()
        && last.commit.revision >= state.reserved
    {
        let until = last.commit.revision + RESERVED;
        reserve(&shared.database, &shared.meta, until)?;
        state.reserved = until;
    }
    let mut batch = shared.database.batch().durability(Some(PersistMode::SyncData));
    for Accepted { commit, .. } in accepted.iter().filter(|one| one.tier == Tier::Durable) {
        let key = commit.key.as_bytes();
        match &commit.value {
            Some(value) => {
                batch.insert(&shared.entries, key, encode(commit.created, commit.revision, value));
            }
            None => batch.remove(&shared.entries, key),
        }
    }
    batch.commit()
}

/// The writes of one round see each other before any of them is applied.
struct Round<'a> {
    shared: &'a Shared,
    revision: u64,
    /// Key to (created, modified) of the entry as this round leaves it; `None` when deleted.
    touched: HashMap<Arc<str>, Option<(u64, u64)>>,
}

impl Round<'_> {
    fn decide(&mut self, state: &State, write: Write) -> Result<Arc<Commit>, Error> {
        let current = self.current(state, &write.key)?;
        let found = current.map(|(_, modified)| modified);
        let created = match (write.expect, current) {
            (Expect::Absent, None) => None,
            (Expect::Revision(expected), Some((created, modified))) if expected == modified => Some(created),
            _ => return Err(Error::Conflict { found }),
        };
        if write.value.is_none() && created.is_none() {
            return Err(Error::Conflict { found });
        }
        self.revision += 1;
        let created = created.unwrap_or(self.revision);
        let left = write.value.is_some().then_some((created, self.revision));
        self.touched.insert(write.key.clone(), left);
        Ok(Arc::new(Commit { revision: self.revision, key: write.key, value: write.value, created }))
    }

    fn current(&self, state: &State, key: &str) -> Result<Option<(u64, u64)>, Error> {
        if let Some(touched) = self.touched.get(key) {
            return Ok(*touched);
        }
        if let Some(entry) = state.volatile(key) {
            return Ok(Some((entry.created, entry.modified)));
        }
        let stored = self.shared.entries.get(key).map_err(disk_error)?;
        Ok(stored.and_then(|bytes| decode(key, &bytes)).map(|entry| (entry.created, entry.modified)))
    }
}

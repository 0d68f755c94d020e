//! The in-memory state of the embedded store: revision, recent commits, watchers, and volatile entries with their
//! expiry times.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::sync::mpsc;

use crate::{Commit, Entry, Error, Event, Watch};

/// Expiry times are rounded up to a multiple of this duration, so that many expiries need one wake-up.
const EXPIRY_STEP: Duration = Duration::from_secs(60);

/// Maximum size of the values of recent commits, in bytes. Without this limit, large objects that change often would
/// need hundreds of megabytes.
const MAX_HISTORY_BYTES: usize = 4 << 20;

fn value_size(commit: &Commit) -> usize {
    commit.value.as_ref().map_or(0, |value| value.len())
}

pub(super) struct State {
    /// The revision of the newest published commit.
    revision: u64,
    /// The last revision that is reserved on disk.
    pub(super) reserved: u64,
    /// `recent` has all commits after this revision.
    compacted: u64,
    recent: VecDeque<Arc<Commit>>,
    /// Bytes of the values in `recent`.
    recent_bytes: usize,
    history: usize,
    watchers: Vec<(String, mpsc::UnboundedSender<Event>)>,
    volatile: BTreeMap<Arc<str>, Entry>,
    expiries: BTreeMap<Instant, HashMap<Arc<str>, u64>>,
    started: Instant,
}

impl State {
    pub(super) fn new(revision: u64, reserved: u64, history: usize) -> Self {
        Self {
            revision,
            reserved,
            compacted: revision,
            recent: VecDeque::new(),
            recent_bytes: 0,
            history,
            watchers: Vec::new(),
            volatile: BTreeMap::new(),
            expiries: BTreeMap::new(),
            started: Instant::now(),
        }
    }

    pub(super) fn revision(&self) -> u64 {
        self.revision
    }

    /// Skips the revisions up to `revision`, so that no commit gets them.
    pub(super) fn skip_to(&mut self, revision: u64) {
        self.revision = self.revision.max(revision);
    }

    pub(super) fn volatile(&self, key: &str) -> Option<Entry> {
        self.volatile.get(key).cloned()
    }

    pub(super) fn volatile_from(&self, start: &str, prefix: &str) -> Vec<Entry> {
        let from = (std::ops::Bound::Included(start), std::ops::Bound::Unbounded);
        let range = self.volatile.range::<str, _>(from);
        range.take_while(|(key, _)| key.starts_with(prefix)).map(|(_, entry)| entry.clone()).collect()
    }

    pub(super) fn apply_volatile(&mut self, commit: &Commit, ttl: Option<Duration>) {
        let Some(value) = commit.value.clone() else {
            self.volatile.remove(&commit.key);
            return;
        };
        let (key, created, modified) = (commit.key.clone(), commit.created, commit.revision);
        self.volatile.insert(key.clone(), Entry { key: key.clone(), value, created, modified });
        if let Some(ttl) = ttl {
            self.expiries.entry(self.expiry(Instant::now() + ttl)).or_default().insert(key, modified);
        }
    }

    /// The time at which the next entry expires.
    pub(super) fn next_expiry(&self) -> Option<Instant> {
        self.expiries.first_key_value().map(|(at, _)| *at)
    }

    /// Removes the due expiry times. Returns their entries that were not changed after the time was set.
    pub(super) fn take_expired(&mut self, now: Instant) -> Vec<(Arc<str>, u64)> {
        let mut due = Vec::new();
        while let Some(first) = self.expiries.first_entry()
            && *first.key() <= now
        {
            due.extend(first.remove());
        }
        due.retain(|(key, revision)| self.volatile.get(key).is_some_and(|entry| entry.modified == *revision));
        due
    }

    /// Makes an expired entry due again, because its removal was refused.
    pub(super) fn postpone_expiry(&mut self, key: &Arc<str>, now: Instant) {
        let Some(modified) = self.volatile.get(key).map(|entry| entry.modified) else { return };
        let at = self.expiry(now);
        self.expiries.entry(at).or_default().insert(key.clone(), modified);
    }

    /// Publishes a commit: adds it to the history and sends it to the watchers.
    pub(super) fn publish(&mut self, commit: Arc<Commit>) {
        self.revision = commit.revision;
        self.watchers.retain(|(prefix, sender)| {
            if commit.key.starts_with(prefix.as_str()) {
                sender.send(Event::Commit(commit.clone())).is_ok()
            } else {
                !sender.is_closed()
            }
        });
        self.recent_bytes += value_size(&commit);
        self.recent.push_back(commit);
        while self.recent.len() > self.history || self.recent_bytes > MAX_HISTORY_BYTES {
            let Some(oldest) = self.remove_oldest() else { break };
            self.compacted = oldest.revision;
        }
    }

    fn remove_oldest(&mut self) -> Option<Arc<Commit>> {
        let oldest = self.recent.pop_front()?;
        self.recent_bytes -= value_size(&oldest);
        Some(oldest)
    }

    pub(super) fn watch(&mut self, prefix: &str, after: u64) -> Result<Watch, Error> {
        if after < self.compacted {
            return Err(Error::Compacted { oldest: self.compacted });
        }
        if after > self.revision {
            return Err(Error::Future { requested: after, newest: self.revision });
        }
        let (sender, events) = mpsc::unbounded_channel();
        for commit in self.recent.iter().filter(|c| c.revision > after && c.key.starts_with(prefix)) {
            let _ = sender.send(Event::Commit(commit.clone()));
        }
        self.watchers.push((prefix.to_owned(), sender));
        Ok(Watch { events })
    }

    pub(super) fn compact(&mut self, revision: u64) -> Result<(), Error> {
        if revision > self.revision {
            return Err(Error::Future { requested: revision, newest: self.revision });
        }
        while self.recent.front().is_some_and(|commit| commit.revision <= revision) {
            self.remove_oldest();
        }
        self.compacted = self.compacted.max(revision);
        Ok(())
    }

    /// Rounds `at` up to a multiple of the step since the start.
    fn expiry(&self, at: Instant) -> Instant {
        let steps = at.duration_since(self.started).as_secs() / EXPIRY_STEP.as_secs() + 1;
        self.started + Duration::from_secs(steps * EXPIRY_STEP.as_secs())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_values_are_not_kept_as_history() {
        let mut state = State::new(0, 1000, 256);
        for revision in 1..=100 {
            let value = Some(vec![0; 1 << 20].into());
            let key = "a/b".into();
            state.publish(Arc::new(Commit { key, revision, value, created: 1, guard_follows: false }));
        }
        assert_eq!((state.recent.len(), state.recent_bytes, state.compacted), (4, 4 << 20, 96));
    }

    #[test]
    fn an_entry_whose_removal_was_refused_expires_again() {
        let mut state = State::new(1, 1000, 256);
        let value = Some(vec![0].into());
        let commit = Commit { key: "a/b".into(), revision: 2, value, created: 2, guard_follows: false };
        state.apply_volatile(&commit, Some(Duration::from_secs(1)));
        let first = state.next_expiry().unwrap();
        let due = state.take_expired(first);
        assert_eq!(due, [(commit.key.clone(), 2)]);
        assert_eq!(state.next_expiry(), None);
        state.postpone_expiry(&commit.key, first);
        let second = state.next_expiry().unwrap();
        assert!(second > first, "the removal is not repeated without a pause");
        assert_eq!(state.take_expired(second), due);
    }
}

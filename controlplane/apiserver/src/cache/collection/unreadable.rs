//! The load of a collection, and the objects of a loaded collection that cannot be decrypted.

use std::{
    ops::Bound,
    sync::{Arc, OnceLock},
};

use coracle_kinds::Resource;
use coracle_store::{Entry, Page, UnreadableEntry};
use tokio::time::Instant;

use super::{Collection, Loading};
use crate::{
    cache::{Change, Object},
    error::{ApiError, Result},
};

// === impl Collection ===

impl Collection {
    /// Keeps commits until [`Collection::loaded`] or [`Collection::unload`] is called. Returns the resource.
    pub(in crate::cache) fn begin_load(&mut self) -> Arc<Resource> {
        self.loading = Loading::Running(Vec::new());
        self.kind.clone()
    }

    /// Waits for [`Collection::begin_load`], without objects.
    pub(in crate::cache) fn unload(&mut self) {
        self.loading = Loading::Waiting;
        self.unreadable.clear();
    }

    /// Adds the stored objects, then applies the kept commits that are newer than the list.
    pub(in crate::cache) fn loaded(&mut self, page: Page, unreadable: Vec<UnreadableEntry>) {
        self.compacted = page.revision;
        for entry in page.entries {
            self.forget_unreadable(&entry.key, entry.modified);
            self.load(entry);
        }
        let loading = std::mem::replace(&mut self.loading, Loading::Done);
        unreadable.into_iter().for_each(|entry| self.mark_unreadable(entry));
        let pending = if let Loading::Running(pending) = loading { pending } else { Vec::new() };
        for commit in pending.iter().filter(|commit| commit.revision > page.revision) {
            self.apply(commit);
        }
    }

    /// Records that the newest state of an object cannot be decrypted. The former state stays visible. Does nothing
    /// while the objects cannot be loaded: a later list contains this object.
    pub(in crate::cache) fn mark_unreadable(&mut self, entry: UnreadableEntry) {
        let is_newer = self.unreadable.get(&entry.key).is_none_or(|known| known.modified < entry.modified);
        if !self.is_closed && !matches!(self.loading, Loading::Waiting) && is_newer {
            self.unreadable.insert(entry.key.clone(), entry);
        }
    }

    /// Forgets that the state of an object at a revision or before cannot be decrypted.
    pub(in crate::cache) fn forget_unreadable(&mut self, key: &str, revision: u64) {
        if self.unreadable.get(key).is_some_and(|known| known.modified <= revision) {
            self.unreadable.remove(key);
        }
    }

    /// The objects whose newest state cannot be decrypted.
    pub(in crate::cache) fn unreadable(&self) -> impl Iterator<Item = &UnreadableEntry> {
        self.unreadable.values()
    }

    /// An object. `None` if it does not exist.
    ///
    /// # Errors
    /// `InternalError`, as upstream, if the object cannot be decrypted and no former state is known.
    pub(crate) fn find(&self, key: &str) -> Result<Option<Arc<Object>>> {
        match (self.objects.get(key), self.unreadable.get(key)) {
            (Some(object), _) => Ok(Some(object.clone())),
            (None, Some(entry)) => Err(self.undecryptable(entry)),
            (None, None) => Ok(None),
        }
    }

    /// Checks that all objects under a prefix are known, so that a list of them is complete.
    ///
    /// # Errors
    /// `InternalError`, as upstream, if an object cannot be decrypted and no former state is known.
    pub(crate) fn check_complete(&self, prefix: &str) -> Result<()> {
        let from = (Bound::Included(prefix), Bound::Unbounded);
        let mut under = self.unreadable.range::<str, _>(from).take_while(|(key, _)| key.starts_with(prefix));
        let unknown = under.find(|(key, _)| !self.objects.contains_key(*key));
        unknown.map_or(Ok(()), |(_, entry)| Err(self.undecryptable(entry)))
    }

    /// Checks that the newest state of an object can be decrypted, if the object exists.
    ///
    /// # Errors
    /// `InternalError`, as upstream.
    pub(in crate::cache) fn check_newest(&self, key: &str) -> Result<()> {
        self.unreadable.get(key).map_or(Ok(()), |entry| Err(self.undecryptable(entry)))
    }

    fn undecryptable(&self, entry: &UnreadableEntry) -> ApiError {
        let why = match &entry.service {
            Some(_) => "the key management service failed",
            None => "its key is unknown, or its value is damaged",
        };
        ApiError::undecryptable(&self.kind.qualified_resource(), why)
    }

    /// Applies the state of an object that could not be decrypted before. For watches the change is at the revision
    /// `at`, which no watch has reached yet. The object keeps its own revision, which is lower.
    pub(in crate::cache) fn apply_late(&mut self, entry: Entry, at: u64) -> Option<Change> {
        let is_newest = self.unreadable.get(&entry.key).is_some_and(|known| known.modified == entry.modified);
        // At an earlier revision than the list of the objects, a watch that starts after the list would miss the
        // change. The next attempt has a later revision.
        if !is_newest || !matches!(self.loading, Loading::Done) || at <= self.compacted {
            return None;
        }
        self.unreadable.remove(&entry.key);
        let new = Arc::new(self.complete_object(entry));
        let old = self.put(new.clone());
        let left = OnceLock::new();
        Some(self.publish(Change { revision: at, at: Instant::now(), old, new, deleted: false, left }))
    }
}

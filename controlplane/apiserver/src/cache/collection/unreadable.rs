//! Loading of a collection, and single objects of a loaded collection that cannot be decrypted.

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

    /// Marks the collection, which must be empty, as not loaded. It ignores commits until [`Collection::begin_load`] is
    /// called.
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

    /// Marks an object whose newest state cannot be decrypted. The former state stays visible. Does nothing while the
    /// collection waits to be loaded: the later list contains this object.
    pub(in crate::cache) fn mark_unreadable(&mut self, entry: UnreadableEntry) {
        let is_newer = self.unreadable.get(&entry.key).is_none_or(|known| known.modified < entry.modified);
        if !self.is_closed && !matches!(self.loading, Loading::Waiting) && is_newer {
            self.unreadable.insert(entry.key.clone(), entry);
        }
    }

    /// Removes the mark of an unreadable object, if the unreadable state is not newer than `revision`.
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
        let unknown = self.unreadable_under(prefix).find(|(key, _)| !self.objects.contains_key(*key));
        unknown.map_or(Ok(()), |(_, entry)| Err(self.undecryptable(entry)))
    }

    /// Checks that the newest state of an object can be decrypted, if the object exists.
    ///
    /// # Errors
    /// `InternalError`, as upstream.
    pub(in crate::cache) fn check_newest(&self, key: &str) -> Result<()> {
        self.unreadable.get(key).map_or(Ok(()), |entry| Err(self.undecryptable(entry)))
    }

    /// The reason why the newest state of an object cannot be decrypted. `None` if it can be decrypted, or if the
    /// object is absent.
    pub(in crate::cache) fn cause(&self, key: &str) -> Option<&'static str> {
        self.unreadable.get(key).map(cause_of)
    }

    /// Number of objects under a prefix that cannot be decrypted, and of which no former state is known.
    pub(crate) fn unknown_len(&self, prefix: &str) -> usize {
        self.unreadable_under(prefix).filter(|(key, _)| !self.objects.contains_key(*key)).count()
    }

    /// Number of objects whose newest state cannot be decrypted.
    pub(crate) fn unreadable_len(&self) -> usize {
        self.unreadable.len()
    }

    /// The error of a list if objects under a prefix cannot be decrypted. It names these objects, so that an
    /// administrator can remove them with unsafe deletions.
    pub(crate) fn store_read_error(&self, prefix: &str) -> ApiError {
        let unknown = self.unreadable_under(prefix).filter(|(key, _)| !self.objects.contains_key(*key));
        let causes = unknown.map(|(key, entry)| (&**key, cause_of(entry)));
        ApiError::store_read(&self.kind, causes)
    }

    fn unreadable_under<'a>(
        &'a self,
        prefix: &'a str,
    ) -> impl Iterator<Item = (&'a Arc<str>, &'a UnreadableEntry)> {
        let from = (Bound::Included(prefix), Bound::Unbounded);
        self.unreadable.range::<str, _>(from).take_while(move |(key, _)| key.starts_with(prefix))
    }

    fn undecryptable(&self, entry: &UnreadableEntry) -> ApiError {
        ApiError::undecryptable(&self.kind.qualified_resource(), cause_of(entry))
    }

    /// Applies the states of objects that could not be decrypted before. Watches get the changes at the revision `at`,
    /// which no watch has reached yet. The objects keep their own revisions, which are lower.
    ///
    /// All changes of one revision must come in one call. A list between two calls would return this revision without
    /// the changes of the second call. A watch that starts after this list would then miss these changes.
    pub(in crate::cache) fn apply_late(&mut self, entries: &[Entry], at: u64) -> Vec<Change> {
        // If the collection was loaded at a later revision, a watch from that revision would miss the changes. The next
        // attempt has a later revision.
        if !matches!(self.loading, Loading::Done) || at <= self.compacted {
            return Vec::new();
        }
        let now = Instant::now();
        let mut changes = Vec::new();
        for entry in entries {
            let is_newest =
                self.unreadable.get(&entry.key).is_some_and(|known| known.modified == entry.modified);
            if is_newest {
                self.unreadable.remove(&entry.key);
                let new = Arc::new(self.complete_object(entry.clone()));
                let (old, left) = (self.put(new.clone()), OnceLock::new());
                changes.push(self.publish(Change { revision: at, at: now, old, new, deleted: false, left }));
            }
        }
        if !changes.is_empty() {
            self.remove_old_changes(now);
            // The events have lower revisions than `at`. The bookmark tells clients that they have reached `at`.
            self.watchers.send_bookmark_to_all(at);
        }
        changes
    }
}

fn cause_of(entry: &UnreadableEntry) -> &'static str {
    match &entry.service {
        Some(_) => "the key management service failed",
        None => "its key is unknown, or its value is damaged",
    }
}

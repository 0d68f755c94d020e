//! Limits the number of the values of a label that clients choose.

use std::{
    collections::HashSet,
    sync::{Mutex, PoisonError},
};

/// The names that have a label of their own. The first ones keep it.
pub(super) struct KnownNames {
    most: usize,
    names: Mutex<HashSet<String>>,
}

// === impl KnownNames ===

impl KnownNames {
    /// At most this many names.
    pub(super) fn new(most: usize) -> Self {
        Self { most, names: Mutex::default() }
    }

    /// Whether the name has a label of its own.
    pub(super) fn has(&self, name: &str) -> bool {
        let mut names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
        if names.contains(name) {
            return true;
        }
        names.len() < self.most && names.insert(name.to_owned())
    }
}

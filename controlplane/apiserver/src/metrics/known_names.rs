//! Limits the number of values of a label, if clients choose the values.

use std::{
    collections::HashSet,
    sync::{Mutex, PoisonError},
};

/// The names that are values of a label. The first names have their own value; all later names share one other value.
pub(super) struct KnownNames {
    most: usize,
    names: Mutex<HashSet<String>>,
}

// === impl KnownNames ===

impl KnownNames {
    /// An empty set. `most` is the maximum number of names.
    pub(super) fn new(most: usize) -> Self {
        Self { most, names: Mutex::default() }
    }

    /// Whether the name is a value of the label. Adds the name while the maximum number of names is not reached.
    pub(super) fn has(&self, name: &str) -> bool {
        let mut names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
        if names.contains(name) {
            return true;
        }
        names.len() < self.most && names.insert(name.to_owned())
    }
}

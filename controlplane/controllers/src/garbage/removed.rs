//! Kinds of custom resources that do not exist any more. A definition is deleted after all of its objects.

use std::collections::{HashMap, HashSet};

/// Maximum number of removed kinds. If there are more, dependents of their last objects may stay.
pub(super) const MAX_REMOVED: usize = 1000;

/// The removed kinds and their definitions.
#[derive(Default)]
pub(super) struct Removed {
    /// Names of deleted definitions: resource and group.
    pub(super) definitions: HashSet<String>,
    /// Names of the definitions, by group and kind.
    pub(super) kinds: HashMap<(String, String), String>,
}

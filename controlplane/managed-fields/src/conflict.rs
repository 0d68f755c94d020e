//! Conflicts of an apply request with other managers.

use std::collections::BTreeMap;

use crate::{
    field_set::FieldSet,
    managers::{ManagerId, Operation},
    path::Path,
};

/// A field that the request sets and another manager owns with another value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Conflict {
    /// The other manager.
    pub manager: ManagerId,
    /// The field.
    pub path: Path,
}

/// All conflicts of a request: the fields of each other manager. They are kept as sets: a list of all paths can take
/// much more memory than the object.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Conflicts(Vec<(ManagerId, FieldSet)>);

/// Maximum number of conflicts in a message and in the causes of a Status.
pub const MAX_LISTED: usize = 500;

// === impl Conflict ===

impl Conflict {
    /// The text of the cause in the Status: `conflict with "kubectl" using apps/v1`.
    pub fn cause(&self) -> String {
        format!("conflict with {}", describe(&self.manager))
    }
}

// === impl Conflicts ===

impl Conflicts {
    /// Adds the fields of a manager.
    pub(crate) fn add(&mut self, manager: ManagerId, fields: FieldSet) {
        if !fields.is_empty() {
            self.0.push((manager, fields));
        }
    }

    /// Removes the conflicts over these fields.
    pub(crate) fn subtract(&mut self, fields: &FieldSet) {
        self.0.retain_mut(|(_, own)| {
            own.subtract(fields);
            !own.is_empty()
        });
    }

    /// Whether there are no conflicts.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Number of conflicts.
    pub fn len(&self) -> usize {
        self.0.iter().map(|(_, fields)| fields.len()).sum()
    }

    /// The first [`MAX_LISTED`] conflicts.
    pub fn listed(&self) -> Vec<Conflict> {
        let mut listed = Vec::new();
        for (manager, fields) in &self.0 {
            let paths = fields.paths(MAX_LISTED - listed.len()).into_iter();
            listed.extend(paths.map(|path| Conflict { manager: manager.clone(), path }));
        }
        listed
    }
}

/// The message of the Status, in upstream's words. It lists the first [`MAX_LISTED`] conflicts.
pub fn conflict_message(conflicts: &Conflicts) -> String {
    let (number, listed) = (conflicts.len(), conflicts.listed());
    if let [only] = listed.as_slice() {
        return format!("Apply failed with 1 conflict: {}: {}", only.cause(), only.path);
    }
    let mut by_manager: BTreeMap<&ManagerId, Vec<&Path>> = BTreeMap::new();
    for conflict in &listed {
        by_manager.entry(&conflict.manager).or_default().push(&conflict.path);
    }
    let mut lines = Vec::new();
    for (manager, paths) in by_manager {
        lines.push(format!("conflicts with {}:", describe(manager)));
        lines.extend(paths.into_iter().map(|path| format!("- {path}")));
    }
    if number > listed.len() {
        lines.push(format!("and {} more", number - listed.len()));
    }
    format!("Apply failed with {number} conflicts: {}", lines.join("\n"))
}

fn describe(manager: &ManagerId) -> String {
    let mut text = format!("{:?}", manager.name);
    if !manager.subresource.is_empty() {
        text.push_str(&format!(" with subresource {:?}", manager.subresource));
    }
    if manager.operation == Operation::Update {
        text.push_str(&format!(" using {}", manager.api_version));
    }
    text
}

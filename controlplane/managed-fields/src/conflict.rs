//! Conflicts of an apply request with other managers.

use std::collections::BTreeMap;

use crate::{
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

/// Maximum number of conflicts in a message and in the causes of a Status.
pub const MAX_LISTED: usize = 500;

// === impl Conflict ===

impl Conflict {
    /// The text of the cause in the Status: `conflict with "kubectl" using apps/v1`.
    pub fn cause(&self) -> String {
        format!("conflict with {}", describe(&self.manager))
    }
}

/// The message of the Status, in upstream's words. It lists the first [`MAX_LISTED`] conflicts.
pub fn conflict_message(conflicts: &[Conflict]) -> String {
    if let [only] = conflicts {
        return format!("Apply failed with 1 conflict: {}: {}", only.cause(), only.path);
    }
    let mut by_manager: BTreeMap<&ManagerId, Vec<&Path>> = BTreeMap::new();
    for conflict in conflicts.iter().take(MAX_LISTED) {
        by_manager.entry(&conflict.manager).or_default().push(&conflict.path);
    }
    let mut lines = Vec::new();
    for (manager, paths) in by_manager {
        lines.push(format!("conflicts with {}:", describe(manager)));
        lines.extend(paths.into_iter().map(|path| format!("- {path}")));
    }
    if conflicts.len() > MAX_LISTED {
        lines.push(format!("and {} more", conflicts.len() - MAX_LISTED));
    }
    format!("Apply failed with {} conflicts: {}", conflicts.len(), lines.join("\n"))
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

//! A change of an object, and the event that a watch with a scope sends for the change.

use std::sync::{Arc, OnceLock};

use coracle_kinds::{
    Resource,
    selector::{FieldSelector, LabelSelector},
};
use tokio::time::Instant;

use super::{
    Object,
    watchers::{Event, Nodes},
};

/// The field with the node of a pod.
const NODE: &str = "spec.nodeName";

/// One applied commit.
#[derive(Clone, Debug)]
pub(crate) struct Change {
    pub(crate) revision: u64,
    pub(super) at: Instant,
    pub(crate) old: Option<Arc<Object>>,
    /// The state after the change. For a deletion: the last state, with the revision of the deletion.
    pub(crate) new: Arc<Object>,
    pub(crate) deleted: bool,
    /// The state before the change, with the revision of the change. Watches whose selectors no longer match the object
    /// share this state. Created at the first use.
    pub(super) left: OnceLock<Arc<Object>>,
}

/// The scope of a list or watch.
#[derive(Clone, Default)]
pub(crate) struct Scope {
    pub(crate) prefix: String,
    pub(crate) labels: LabelSelector,
    pub(crate) fields: FieldSelector,
    /// Whether uninitialized objects are excluded.
    pub(crate) initialized_only: bool,
}

// === impl Change ===

impl Change {
    /// The nodes of a pod.
    pub(super) fn nodes(&self, kind: &Resource) -> Nodes<'_> {
        let old = self.old.as_ref().map_or("", |old| old.selector_attributes(kind).field(NODE));
        Nodes { new: self.new.selector_attributes(kind).field(NODE), old }
    }
}

// === impl Scope ===

impl Scope {
    /// Whether the scope selects by keys only.
    pub(crate) fn is_plain(&self) -> bool {
        self.labels.is_empty() && self.fields.is_empty() && !self.initialized_only
    }

    /// Whether labels, fields and initialization match. The caller checks the prefix.
    pub(crate) fn selects(&self, kind: &Resource, object: &Object) -> bool {
        self.is_plain() || {
            let attributes = object.selector_attributes(kind.stored_as());
            attributes.match_labels(&self.labels)
                && self.fields.matches_attributes(attributes)
                && !(self.initialized_only && attributes.is_uninitialized())
        }
    }

    /// The node, if the scope selects the pods of one node.
    pub(super) fn node(&self) -> Option<&str> {
        self.fields.exact(NODE)
    }

    /// The event of a change for a client with this scope. `None` if the scope selects the object neither before nor
    /// after the change.
    pub(super) fn event(&self, kind: &Resource, change: &Change) -> Option<Event> {
        if !change.new.key.starts_with(&self.prefix) {
            return None;
        }
        let was = change.old.as_ref().is_some_and(|old| self.selects(kind, old));
        let is = !change.deleted && self.selects(kind, &change.new);
        let new = change.new.clone();
        match (was, is, &change.old) {
            (false, true, _) => Some(Event::Added(new)),
            (true, true, _) => Some(Event::Modified(new)),
            // Send the last state that matched, as upstream.
            (true, false, Some(old)) if !change.deleted => {
                let left = change.left.get_or_init(|| Arc::new(old.with_revision(change.revision)));
                Some(Event::Deleted(left.clone()))
            }
            (true, false, _) => Some(Event::Deleted(new)),
            (false, false, _) => None,
        }
    }
}

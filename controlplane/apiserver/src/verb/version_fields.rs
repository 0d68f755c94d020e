//! Field selectors of a custom resource version, which may name fields that the stored version does not have.
//!
//! The attributes in the watch cache belong to the stored version. These selectors are therefore applied to the
//! converted objects.

use std::{collections::HashMap, sync::Arc};

use coracle_kinds::{Resource, selector::FieldSelector};

use crate::{
    cache::{Event, Object, Scope},
    convert,
    error::Result,
};

/// Takes the field selector out of a scope if it must be applied to converted objects.
pub(super) fn take(kind: &Resource, scope: &mut Scope) -> Option<FieldSelector> {
    let is_custom = kind.patch_definition().is_none();
    let differs = kind.convert.is_some() || !kind.is_storage_version();
    let takes = is_custom && differs && !scope.fields.is_about_metadata();
    takes.then(|| std::mem::take(&mut scope.fields))
}

/// Converts the objects to the requested version, and keeps the objects that the selector matches.
pub(super) async fn select(
    kind: &Resource,
    fields: &FieldSelector,
    objects: Vec<Arc<Object>>,
) -> Result<Vec<Arc<Object>>> {
    let mut converted = convert::objects(kind, objects).await?;
    converted.retain(|object| fields.matches(&object.value()));
    Ok(converted)
}

/// The objects that a watch has sent. An object that stops matching is sent as deleted.
pub(super) struct Transitions {
    fields: FieldSelector,
    /// Whether the last state of an object matched.
    matched: HashMap<Arc<str>, bool>,
}

impl Transitions {
    pub(super) fn new(fields: FieldSelector) -> Self {
        Self { fields, matched: HashMap::new() }
    }

    /// Translates the change of a converted object to the event that the client gets.
    pub(super) fn event(&mut self, event: Event) -> Option<Event> {
        let (object, is_new, is_deleted) = match &event {
            Event::Added(object) => (object.clone(), true, false),
            Event::Modified(object) => (object.clone(), false, false),
            Event::Deleted(object) => (object.clone(), false, true),
            Event::Bookmark(_) | Event::InitialEnd(_) => return Some(event),
        };
        let matches = self.fields.matches(&object.value());
        let before = if is_deleted {
            self.matched.remove(&object.key)
        } else {
            self.matched.insert(object.key.clone(), matches)
        };
        // An object that existed before the watch may have matched. Clients ignore the deletion of an unknown object.
        let matched = before.unwrap_or(!is_new && (is_deleted || !matches));
        match (matched, matches && !is_deleted) {
            (false, true) => Some(Event::Added(object)),
            (true, true) => Some(Event::Modified(object)),
            (true, false) => Some(Event::Deleted(object)),
            (false, false) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use coracle_kinds::kind::by_resource;
    use serde_json::json;

    use super::*;

    #[test]
    fn an_object_that_matches_no_more_is_deleted_for_the_client() {
        let kind = by_resource("", "v1", "pods").unwrap();
        let pod = |phase: &str| {
            Arc::new(Object::of(
                kind,
                "k".into(),
                1,
                &json!({"metadata": {"name": "p"}, "status": {"phase": phase}}),
            ))
        };
        let mut transitions = Transitions::new(FieldSelector::parse(kind, "status.phase=Running").unwrap());
        let mut sent = |event: Event| match transitions.event(event) {
            Some(Event::Added(_)) => "added",
            Some(Event::Modified(_)) => "modified",
            Some(Event::Deleted(_)) => "deleted",
            _ => "",
        };
        assert_eq!(sent(Event::Added(pod("Pending"))), "");
        assert_eq!(sent(Event::Modified(pod("Running"))), "added");
        assert_eq!(sent(Event::Modified(pod("Running"))), "modified");
        assert_eq!(sent(Event::Modified(pod("Failed"))), "deleted");
        assert_eq!(sent(Event::Deleted(pod("Failed"))), "");
        // The state before the watch began is unknown.
        assert_eq!(sent(Event::Modified(pod("Failed"))), "deleted");
        assert_eq!(sent(Event::Deleted(pod("Failed"))), "");
        assert_eq!(sent(Event::Deleted(pod("Running"))), "deleted");
    }
}

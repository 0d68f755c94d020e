//! Rendered events that watches share, so that an event is encoded once for all clients with the same form.
//!
//! Only the newest events are kept: watches of one collection receive an event at about the same time.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
};

use bytes::Bytes;

use super::Object;
use crate::media::Form;

/// Maximum number of kept events.
const MAX_EVENTS: usize = 32;
/// Maximum bytes of all kept events. A larger event is not kept.
const MAX_BYTES: usize = 256 << 10;

/// The newest rendered events.
#[derive(Default)]
pub(crate) struct RenderedEvents(Mutex<Newest>);

#[derive(Default)]
struct Newest {
    /// The newest event last.
    events: VecDeque<Rendered>,
    bytes: usize,
}

struct Rendered {
    /// The address identifies the object: it is not used again as long as this reference exists.
    object: Weak<Object>,
    name: &'static str,
    form: Form,
    event: Bytes,
}

// === impl RenderedEvents ===

impl RenderedEvents {
    /// The event with this name about an object. `render` makes it, unless another watch has made it. `render` must depend
    /// only on the object, the name and the form.
    pub(crate) fn get(
        &self,
        object: &Arc<Object>,
        name: &'static str,
        form: Form,
        render: impl FnOnce() -> Bytes,
    ) -> Bytes {
        let is_same = |known: &&Rendered| {
            known.object.as_ptr() == Arc::as_ptr(object) && known.name == name && known.form == form
        };
        if let Some(known) = self.lock().events.iter().rev().find(is_same) {
            return known.event.clone();
        }
        // This runs without the lock, so another watch may render the same event meanwhile.
        let event = render();
        self.lock().add(Rendered { object: Arc::downgrade(object), name, form, event: event.clone() });
        event
    }

    fn lock(&self) -> MutexGuard<'_, Newest> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl Newest ===

impl Newest {
    fn add(&mut self, rendered: Rendered) {
        if rendered.event.len() > MAX_BYTES {
            return;
        }
        self.bytes += rendered.event.len();
        self.events.push_back(rendered);
        while self.events.len() > MAX_EVENTS || self.bytes > MAX_BYTES {
            let Some(oldest) = self.events.pop_front() else { break };
            self.bytes -= oldest.event.len();
        }
    }
}

#[cfg(test)]
mod tests {
    use coracle_kinds::kind::by_kind;
    use serde_json::json;

    use super::*;

    fn object(name: &str) -> Arc<Object> {
        let kind = by_kind("v1", "ConfigMap").unwrap();
        Arc::new(Object::of(kind, name.into(), 7, &json!({"metadata": {"name": name}})))
    }

    #[test]
    fn an_event_is_rendered_once_for_each_name_and_form() {
        let (rendered, object) = (RenderedEvents::default(), object("a"));
        let mut count = 0;
        let mut get = |name: &'static str, form: Form| {
            rendered.get(&object, name, form, || {
                count += 1;
                Bytes::from(format!("{name} {form:?}"))
            })
        };
        let first = get("ADDED", Form::Protobuf);
        assert_eq!(get("ADDED", Form::Protobuf).as_ptr(), first.as_ptr());
        assert_ne!(get("MODIFIED", Form::Protobuf), first);
        assert_ne!(get("ADDED", Form::Partial(Default::default())), first);
        assert_eq!(count, 3);
    }

    #[test]
    fn few_events_are_kept() {
        let rendered = RenderedEvents::default();
        for length in [MAX_BYTES + 1, MAX_BYTES, MAX_BYTES / 2, 10, 10] {
            let object = object("a");
            let event = rendered.get(&object, "ADDED", Form::Protobuf, || Bytes::from(vec![0; length]));
            assert_eq!(event.len(), length);
        }
        let kept = || {
            let newest = rendered.lock();
            (newest.events.len(), newest.bytes)
        };
        assert_eq!(kept(), (3, MAX_BYTES / 2 + 20));
        for _ in 0..100 {
            rendered.get(&object("a"), "ADDED", Form::Protobuf, || Bytes::from_static(b"x"));
        }
        assert_eq!(kept(), (MAX_EVENTS, MAX_EVENTS));
    }
}

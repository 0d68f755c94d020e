//! Rendered events that watches share, so that an event is encoded once for all clients with the same form.
//!
//! Only the newest events are kept: watches of one collection receive an event at about the same time.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
};

use bytes::Bytes;

use super::Object;
use crate::media::Form;

/// Maximum number of kept events. While the event of one write reaches a thousand watches, further writes make dozens
/// of events. If the first event were dropped meanwhile, each remaining watch would render its own copy.
const MAX_EVENTS: usize = 128;
/// Maximum bytes of all kept events. A larger event is not kept.
const MAX_BYTES: usize = 256 << 10;

/// The newest rendered events.
#[derive(Default)]
pub(crate) struct RenderedEvents(Mutex<Newest>);

#[derive(Default)]
struct Newest {
    events: HashMap<Key, Rendered>,
    /// The newest event last.
    order: VecDeque<Key>,
    bytes: usize,
}

/// The values that determine the bytes of an event.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    /// The address of the object.
    object: usize,
    name: &'static str,
    form: Form,
}

struct Rendered {
    /// The address of the object is not used again as long as this reference exists.
    _object: Weak<Object>,
    event: Bytes,
}

// === impl RenderedEvents ===

impl RenderedEvents {
    /// The event with this name about an object. `render` makes the event, unless another watch has already made it.
    /// `render` must depend only on the object, the name and the form.
    pub(crate) fn get(
        &self,
        object: &Arc<Object>,
        name: &'static str,
        form: Form,
        render: impl FnOnce() -> Bytes,
    ) -> Bytes {
        let key = Key { object: Arc::as_ptr(object).addr(), name, form };
        if let Some(known) = self.lock().events.get(&key) {
            return known.event.clone();
        }
        // `render` runs without the lock, so another watch may render the same event meanwhile.
        let event = render();
        self.lock().add(key, Rendered { _object: Arc::downgrade(object), event: event.clone() });
        event
    }

    fn lock(&self) -> MutexGuard<'_, Newest> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl Newest ===

impl Newest {
    fn add(&mut self, key: Key, rendered: Rendered) {
        if rendered.event.len() > MAX_BYTES || self.events.contains_key(&key) {
            return;
        }
        self.bytes += rendered.event.len();
        self.events.insert(key, rendered);
        self.order.push_back(key);
        while self.order.len() > MAX_EVENTS || self.bytes > MAX_BYTES {
            let Some(oldest) = self.order.pop_front() else { break };
            self.bytes -= self.events.remove(&oldest).map_or(0, |oldest| oldest.event.len());
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
    fn a_watch_that_is_a_hundred_events_behind_renders_none() {
        let (rendered, objects) = (RenderedEvents::default(), [(); 100].map(|()| object("a")));
        let mut count = 0;
        for _watch in 0..2 {
            for object in &objects {
                rendered.get(object, "MODIFIED", Form::Protobuf, || {
                    count += 1;
                    Bytes::from_static(b"x")
                });
            }
        }
        assert_eq!(count, objects.len());
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
            assert_eq!(newest.events.len(), newest.order.len());
            (newest.events.len(), newest.bytes)
        };
        assert_eq!(kept(), (3, MAX_BYTES / 2 + 20));
        for _ in 0..2 * MAX_EVENTS {
            rendered.get(&object("a"), "ADDED", Form::Protobuf, || Bytes::from_static(b"x"));
        }
        assert_eq!(kept(), (MAX_EVENTS, MAX_EVENTS));
    }
}

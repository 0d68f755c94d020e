//! Events: in the form of the recorder, and as objects of the API.

use std::borrow::Cow;
use std::hash::Hash;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Event as ApiEvent, EventSource, ObjectReference};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};

use crate::MESSAGE_MAX;
use crate::printable::printable;

/// The type of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EventType {
    /// Information only.
    Normal,
    /// A problem.
    Warning,
}

/// An event about an object: type, reason and message.
#[derive(Clone, Debug)]
pub struct Event {
    /// The type.
    pub event_type: EventType,
    /// One word in CamelCase, for programs.
    pub reason: &'static str,
    /// A sentence, for people.
    pub message: String,
}

/// A recorded event.
#[derive(Clone, Debug)]
pub(crate) struct Record {
    pub(crate) about: ObjectReference,
    pub(crate) component: Cow<'static, str>,
    pub(crate) event: Event,
    pub(crate) at: Timestamp,
}

// === impl EventType ===

impl EventType {
    fn as_str(self) -> &'static str {
        match self {
            EventType::Normal => "Normal",
            EventType::Warning => "Warning",
        }
    }
}

// === impl Event ===

impl Event {
    /// An event of type Normal.
    pub fn normal(reason: &'static str, message: impl Into<String>) -> Self {
        Self { event_type: EventType::Normal, reason, message: message.into() }
    }

    /// An event of type Warning.
    pub fn warning(reason: &'static str, message: impl Into<String>) -> Self {
        Self { event_type: EventType::Warning, reason, message: message.into() }
    }
}

// === impl Record ===

impl Record {
    /// The uid of the event's object; empty if absent.
    pub(crate) fn uid(&self) -> &str {
        self.about.uid.as_deref().unwrap_or_default()
    }

    /// The identity of the event without its message. Events with equal identities and messages are repeats.
    pub(crate) fn group(&self) -> impl Hash + '_ {
        let path = self.about.field_path.as_deref().unwrap_or_default();
        (&*self.component, self.uid(), path, self.event.reason)
    }

    /// The name of the Event object whose first occurrence was at this time.
    pub(crate) fn object_name(&self, first: Timestamp) -> String {
        format!("{}.{:x}", self.about.name.as_deref().unwrap_or_default(), first.as_nanosecond())
    }

    /// The Event object of the first occurrence.
    pub(crate) fn to_api(&self, host: &str) -> ApiEvent {
        let at = Timestamp::from_second(self.at.as_second()).unwrap_or(self.at);
        ApiEvent {
            metadata: ObjectMeta {
                name: Some(self.object_name(self.at)),
                namespace: Some(self.about.namespace.clone().unwrap_or_else(|| "default".to_owned())),
                ..ObjectMeta::default()
            },
            involved_object: self.about.clone(),
            reason: Some(self.event.reason.to_owned()),
            message: Some(printable(&self.event.message, MESSAGE_MAX)),
            type_: Some(self.event.event_type.as_str().to_owned()),
            count: Some(1),
            first_timestamp: Some(Time(at)),
            last_timestamp: Some(Time(at)),
            source: Some(EventSource {
                component: Some(self.component.to_string()),
                host: (!host.is_empty()).then(|| host.to_owned()),
            }),
            reporting_component: Some(self.component.to_string()),
            reporting_instance: Some(host.to_owned()),
            ..ApiEvent::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_names_its_object_and_its_source() {
        let about = ObjectReference { name: Some("a".to_owned()), ..ObjectReference::default() };
        let at = Timestamp::from_nanosecond(1_500_000_000).unwrap();
        let record =
            Record { about, component: "kubelet".into(), event: Event::warning("Failed", "x\x1b"), at };
        let event = serde_json::to_value(record.to_api("node")).unwrap();
        assert_eq!(event["metadata"], serde_json::json!({"name": "a.59682f00", "namespace": "default"}));
        let repeat = Record { at: Timestamp::from_nanosecond(1_700_000_000).unwrap(), ..record.clone() };
        assert_eq!(event["metadata"]["name"], repeat.object_name(at));
        assert_eq!(event["source"], serde_json::json!({"component": "kubelet", "host": "node"}));
        assert_eq!((&event["type"], &event["count"]), (&"Warning".into(), &1.into()));
        assert_eq!(
            (&event["firstTimestamp"], &event["message"]),
            (&"1970-01-01T00:00:01Z".into(), &"x\u{fffd}".into())
        );
        assert_eq!(
            serde_json::to_value(record.to_api("")).unwrap()["source"],
            serde_json::json!({"component": "kubelet"})
        );
    }
}

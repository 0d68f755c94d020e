//! Limits on the size of audit events (`--audit-log-truncate-*`, `--audit-webhook-truncate-*`). Source:
//! `k8s.io/apiserver/plugin/pkg/audit/truncate`.

use coracle_audit::{Event, Level};

use super::TRUNCATED;

/// The limits of one backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AuditTruncateConfig {
    /// Maximum bytes of an event. A larger event loses its objects. If it is then still larger, the event is lost.
    pub max_event_bytes: usize,
    /// Maximum bytes of the events in one request to the webhook. The log has no batches.
    pub max_batch_bytes: usize,
}

/// The line of an event without its objects. The event does not change.
pub(super) fn shortened(event: &mut Event) -> String {
    let objects = (event.request_object.take(), event.response_object.take());
    let former = event.annotations.insert(TRUNCATED.to_owned(), "true".to_owned());
    let line = event.line();
    if former.is_none() {
        event.annotations.remove(TRUNCATED);
    }
    (event.request_object, event.response_object) = objects;
    line
}

// === impl AuditTruncateConfig ===

impl AuditTruncateConfig {
    /// The line of an event within the limit. `None` if the event is too large even without its objects.
    pub(super) fn limit(self, line: String, event: &mut Event) -> Option<String> {
        if line.len() <= self.max_event_bytes {
            return Some(line);
        }
        // An event of a lower level has no objects.
        let line = (event.level >= Level::Request).then(|| shortened(event));
        line.filter(|line| line.len() <= self.max_event_bytes)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json, value::to_raw_value};

    use super::*;

    #[test]
    fn a_large_event_loses_its_objects_and_then_itself() {
        let mut event = Event::received(Level::RequestResponse, "id".to_owned());
        event.request_object = to_raw_value(&json!("x".repeat(1000))).ok();
        let whole = event.line();
        let limit = |max_event_bytes: usize, event: &mut Event| {
            let config = AuditTruncateConfig { max_event_bytes, max_batch_bytes: 1 << 20 };
            config.limit(event.line(), event)
        };
        assert_eq!(limit(whole.len(), &mut event).as_ref(), Some(&whole));
        let line = limit(whole.len() - 1, &mut event).unwrap();
        let value: Value = serde_json::from_str(&line).unwrap();
        assert_eq!(value["annotations"], json!({"audit.k8s.io/truncated": "true"}));
        assert!(value["requestObject"].is_null() && value["auditID"] == "id", "{value}");
        assert_eq!(event.line(), whole, "the next stage has the object");
        assert_eq!(limit(line.len(), &mut event), Some(line.clone()));
        assert_eq!(limit(line.len() - 1, &mut event), None);
        let mut event = Event::received(Level::Metadata, "id".to_owned());
        event.user_agent = "x".repeat(1000);
        assert_eq!(limit(1000, &mut event), None);
    }
}

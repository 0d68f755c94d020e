//! Limits on the size of audit events (`--audit-log-truncate-*`, `--audit-webhook-truncate-*`). Source:
//! `k8s.io/apiserver/plugin/pkg/audit/truncate`.
//!
//! Upstream drops an event that is too large without its objects. With this rule, a user could hide a request by a long
//! query, or by an object with long patches of webhooks. Here the texts of such an event are cut. The event is dropped
//! only if it is still too large.

use coracle_audit::{Event, Level, UserInfo};
use coracle_values::CollectMap;
use serde_json::Value;

use super::TRUNCATED;

/// Maximum bytes of the path and query of a reduced event.
const MAX_URI: usize = 1024;
/// Maximum bytes of each other text of a reduced event.
const MAX_TEXT: usize = 256;
/// Maximum number of annotations of a reduced event, and of groups of a user.
const MAX_ITEMS: usize = 16;
/// Suffix of a text that was cut. Upstream uses this suffix for long user agents.
const CUT: &str = "...TRUNCATED";
/// The fields of the response status that a reduced event keeps.
const STATUS_FIELDS: [&str; 4] = ["metadata", "status", "reason", "code"];

/// The limits of one backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AuditTruncateConfig {
    /// Maximum bytes of an event. A larger event loses its objects, and then long texts. If it is still larger, the
    /// event is lost.
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

/// The line of an event without its objects, extra values of users and details of the response, and with cut texts.
/// User, verb, object, code and the start of the path remain.
fn reduced(event: &mut Event) -> String {
    let objects = (event.request_object.take(), event.response_object.take());
    let mut reduced = event.clone();
    (event.request_object, event.response_object) = objects;
    cut(&mut reduced.request_uri, MAX_URI);
    cut(&mut reduced.verb, MAX_TEXT);
    cut(&mut reduced.user_agent, MAX_TEXT);
    cut_user(&mut reduced.user);
    reduced.impersonated_user.iter_mut().for_each(cut_user);
    if let Some(object) = &mut reduced.object_ref {
        for text in [
            &mut object.resource,
            &mut object.namespace,
            &mut object.name,
            &mut object.uid,
            &mut object.api_group,
            &mut object.api_version,
            &mut object.resource_version,
            &mut object.subresource,
        ] {
            cut(text, MAX_TEXT);
        }
    }
    if let Some(Value::Object(status)) = &mut reduced.response_status {
        status.retain(|name, _| STATUS_FIELDS.contains(&name.as_str()));
        for value in status.values_mut() {
            match value {
                Value::String(text) => cut(text, MAX_TEXT),
                Value::Object(fields) => fields.clear(),
                _ => {}
            }
        }
    }
    let annotations = std::mem::take(&mut reduced.annotations).into_iter();
    reduced.annotations =
        annotations.filter(|(name, _)| name.len() <= MAX_TEXT).take(MAX_ITEMS).collect_map();
    reduced.annotations.values_mut().for_each(|text| cut(text, MAX_TEXT));
    reduced.annotations.insert(TRUNCATED.to_owned(), "true".to_owned());
    reduced.line()
}

fn cut_user(user: &mut UserInfo) {
    cut(&mut user.username, MAX_TEXT);
    cut(&mut user.uid, MAX_TEXT);
    user.groups.truncate(MAX_ITEMS);
    user.groups.iter_mut().for_each(|group| cut(group, MAX_TEXT));
    user.extra.clear();
}

fn cut(text: &mut String, most: usize) {
    if text.len() > most {
        text.truncate(text.floor_char_boundary(most));
        text.push_str(CUT);
    }
}

// === impl AuditTruncateConfig ===

impl AuditTruncateConfig {
    /// The line of an event within the limit. `None` if the event is too large even without its objects and with cut
    /// texts.
    pub(super) fn limit(self, line: String, event: &mut Event) -> Option<String> {
        let fits = |line: &String| line.len() <= self.max_event_bytes;
        if fits(&line) {
            return Some(line);
        }
        // An event of a lower level has no objects.
        let without_objects = (event.level >= Level::Request).then(|| shortened(event));
        without_objects.filter(fits).or_else(|| Some(reduced(event)).filter(fits))
    }
}

#[cfg(test)]
mod tests {
    use coracle_audit::ObjectReference;
    use serde_json::{json, value::to_raw_value};

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
    }

    #[test]
    fn long_texts_of_a_request_cannot_hide_it() {
        let mut event = Event::received(Level::RequestResponse, "id".to_owned());
        // In JSON these characters take two bytes.
        event.request_uri = format!("/api/v1/namespaces/n/secrets/s?{}", "\\".repeat(65_000));
        event.verb = "delete".to_owned();
        event.user.username = "eve".to_owned();
        event.user.groups = (0..1000).map(|group| format!("{group}-{}", "ü".repeat(1000))).collect();
        event.user.extra = [("key".to_owned(), vec!["x".repeat(100_000)])].into();
        let name = "x".repeat(60_000);
        event.object_ref = Some(ObjectReference {
            resource: "secrets".to_owned(),
            name: name.clone(),
            subresource: name,
            ..ObjectReference::default()
        });
        let details = json!({"causes": [{"message": "x".repeat(100_000)}]});
        event.response_status = Some(json!({"code": 403, "reason": "Forbidden", "details": details}));
        event.response_object = to_raw_value(&json!("x".repeat(200_000))).ok();
        event.annotations = (0..100).map(|round| (format!("b/{round}"), "x".repeat(30_000))).collect();
        event.annotations.insert("a/decision".to_owned(), "allow".to_owned());
        event.annotations.insert("x".repeat(100_000), String::new());
        let whole = event.line();
        let config = AuditTruncateConfig { max_event_bytes: 102_400, max_batch_bytes: 102_400 };
        let line = config.limit(whole.clone(), &mut event).unwrap();
        assert!(event.line() == whole, "the event of the other backend is complete");
        let value: Value = serde_json::from_str(&line).unwrap();
        assert_eq!(
            (&value["user"]["username"], &value["verb"], &value["objectRef"]["resource"]),
            (&json!("eve"), &json!("delete"), &json!("secrets"))
        );
        assert_eq!(value["responseStatus"], json!({"code": 403, "reason": "Forbidden"}));
        let uri = value["requestURI"].as_str().unwrap();
        assert!(uri.starts_with("/api/v1/namespaces/n/secrets/s?") && uri.ends_with(CUT), "{uri}");
        let annotations = &value["annotations"];
        assert_eq!((&annotations[TRUNCATED], &annotations["a/decision"]), (&json!("true"), &json!("allow")));
    }
}

//! The record of one stage of one request: `Event` of `audit.k8s.io/v1`.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::{Value, value::RawValue};

use crate::policy::{Level, Stage};

/// One record. Its JSON form is one line of the log.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Event {
    kind: &'static str,
    api_version: &'static str,
    /// The level of detail of the record.
    pub level: Level,
    /// Id of the request. All events of the request have this id.
    #[serde(rename = "auditID")]
    pub audit_id: String,
    /// The stage.
    pub stage: Stage,
    /// Path and query.
    #[serde(rename = "requestURI")]
    pub request_uri: String,
    /// The verb, such as `get`, `list` or `create`.
    pub verb: String,
    /// The authenticated user.
    pub user: UserInfo,
    /// The impersonated user, if the request impersonates one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub impersonated_user: Option<UserInfo>,
    /// The permission that constrained impersonation used. `None` for all other requests.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub authentication_metadata: Option<AuthenticationMetadata>,
    /// Addresses of the client: first the addresses from the headers of proxies, last the address of the connection.
    #[serde(rename = "sourceIPs", skip_serializing_if = "Vec::is_empty")]
    pub source_ips: Vec<String>,
    /// The `User-Agent` of the client.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub user_agent: String,
    /// The object, if the path names a resource.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub object_ref: Option<ObjectReference>,
    /// A Status without details, or only its `code`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub response_status: Option<Value>,
    /// The object of the request. It is text, because a tree takes more than twenty times the memory, and an event may
    /// wait for a slow backend.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub request_object: Option<Box<RawValue>>,
    /// The object of the response.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub response_object: Option<Box<RawValue>>,
    /// Time of the request's arrival: RFC 3339 with microseconds.
    pub request_received_timestamp: String,
    /// Time at which the stage was reached.
    pub stage_timestamp: String,
    /// Annotations that the handlers of the request added, such as `authorization.k8s.io/decision`.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
}

/// A user: `UserInfo` of `authentication.k8s.io/v1`.
#[derive(Clone, Debug, Default, Serialize)]
pub struct UserInfo {
    /// Name.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub username: String,
    /// Unique id.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub uid: String,
    /// Groups.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub groups: Vec<String>,
    /// Additional values from the authenticator.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub extra: BTreeMap<String, Vec<String>>,
}

/// The method that authenticated a request.
#[derive(Clone, Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AuthenticationMetadata {
    /// The verb of constrained impersonation: `impersonate:user-info`.
    pub impersonation_constraint: String,
}

/// The object of a request.
#[derive(Clone, Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ObjectReference {
    /// Plural name.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub resource: String,
    /// Namespace.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub namespace: String,
    /// Name.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub name: String,
    /// Uid in the request's object.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub uid: String,
    /// API group; empty for core.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub api_group: String,
    /// Version.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub api_version: String,
    /// Resource version in the request's object.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub resource_version: String,
    /// Subresource.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub subresource: String,
}

// === impl Event ===

impl Event {
    /// The event of a request that was received now. The other fields are empty.
    #[must_use]
    pub fn received(level: Level, audit_id: String) -> Self {
        let now = timestamp();
        Self {
            kind: "Event",
            api_version: "audit.k8s.io/v1",
            level,
            audit_id,
            stage: Stage::RequestReceived,
            request_uri: String::new(),
            verb: String::new(),
            user: UserInfo::default(),
            impersonated_user: None,
            authentication_metadata: None,
            source_ips: Vec::new(),
            user_agent: String::new(),
            object_ref: None,
            response_status: None,
            request_object: None,
            response_object: None,
            request_received_timestamp: now.clone(),
            stage_timestamp: now,
            annotations: BTreeMap::new(),
        }
    }

    /// Sets the stage, which is reached now.
    pub fn reach(&mut self, stage: Stage) {
        self.stage = stage;
        self.stage_timestamp = timestamp();
    }

    /// The event as one line of JSON.
    #[must_use]
    pub fn line(&self) -> String {
        let mut line = serde_json::to_string(self).unwrap_or_default();
        line.push('\n');
        line
    }
}

/// The current time, for example `2026-11-23T22:30:49.123456Z`.
fn timestamp() -> String {
    jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%S.%6fZ").to_string()
}

#[cfg(test)]
mod tests {
    use serde_json::{json, value::to_raw_value};

    use super::*;

    #[test]
    fn objects_are_kept_as_text() {
        let mut event = Event::received(Level::RequestResponse, "id".to_owned());
        let objects = [json!({"data": {"key": "one\ntwo"}}), json!([1, "a"])];
        event.request_object = to_raw_value(&objects[0]).ok();
        event.response_object = to_raw_value(&objects[1]).ok();
        assert_eq!(event.response_object.as_ref().unwrap().get(), "[1,\"a\"]");
        let line = event.line();
        let value: Value = serde_json::from_str(&line).unwrap();
        assert_eq!([&value["requestObject"], &value["responseObject"]], [&objects[0], &objects[1]]);
        assert_eq!(line.matches('\n').count(), 1);
    }

    #[test]
    fn a_line_has_upstreams_names_and_no_empty_fields() {
        let mut event = Event::received(Level::Metadata, "id".to_owned());
        event.request_uri = "/api".to_owned();
        event.reach(Stage::ResponseComplete);
        let line = event.line();
        let value: Value = serde_json::from_str(&line).unwrap();
        let keys: Vec<&String> = value.as_object().unwrap().keys().collect();
        let expected = [
            "apiVersion",
            "auditID",
            "kind",
            "level",
            "requestReceivedTimestamp",
            "requestURI",
            "stage",
            "stageTimestamp",
            "user",
            "verb",
        ];
        let mut sorted = keys.clone();
        sorted.sort();
        assert_eq!(sorted, expected);
        assert_eq!(value["stage"], "ResponseComplete");
        assert!(line.ends_with("}\n") && line.matches('\n').count() == 1);
        assert_eq!(value["stageTimestamp"].as_str().unwrap().len(), "2026-11-23T22:30:49.123456Z".len());
    }
}

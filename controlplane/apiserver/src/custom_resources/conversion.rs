//! Conversion webhooks of definitions. Source: `apiextensions-apiserver/pkg/apiserver/conversion`.
//!
//! Only requests that need another version wait for the webhook. Each call has a timeout.

use std::sync::{Arc, Weak};
use std::time::Duration;

use coracle_custom_resources::definition::Conversion;
use coracle_kinds::Resource;
use coracle_kinds::resource::{ConversionError, Convert, Converting};
use serde_json::{Map, Value, json};

use crate::cache::Cache;
use crate::in_flight::InFlight;
use crate::webhook_client::{self, Endpoint};

/// Timeout of one call.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Maximum bytes of the response to a long request: a list of large objects is converted by one call. The limit is
/// below a single owner's share of the memory for responses.
const MAX_RESPONSE: usize = 48 << 20;

/// Maximum number of objects in one call. A longer list is converted by several calls.
const MAX_OBJECTS: usize = 500;

/// Maximum bytes of the reason of a failed conversion. The reason may contain parts of the response. The client may
/// read the error slowly, and its memory is not charged to the memory of webhook responses.
const MAX_REASON: usize = 64 << 10;

/// The services that a call of a conversion webhook needs. The cache owns the custom resources, and the custom
/// resources own this client. The reference to the cache is weak to avoid a reference cycle.
#[derive(Clone)]
pub(crate) struct ConversionClient {
    pub(crate) cache: Weak<Cache>,
    pub(crate) in_flight: Arc<InFlight>,
}

/// Converts objects by a webhook.
pub(super) struct WebhookConversion {
    client: ConversionClient,
    endpoint: Endpoint,
    version: &'static str,
}

impl WebhookConversion {
    /// Creates the client of a conversion webhook. `None` if the strategy is not `Webhook`.
    pub(super) fn new(client: &ConversionClient, conversion: Option<&Conversion>) -> Option<Self> {
        let conversion = conversion.filter(|conversion| conversion.strategy == "Webhook")?;
        let webhook = conversion.webhook.clone().unwrap_or_default();
        let config = webhook.client_config.unwrap_or_default();
        let known = webhook.conversion_review_versions;
        let version = known.iter().find_map(|version| match version.as_str() {
            "v1" => Some("v1"),
            "v1beta1" => Some("v1beta1"),
            _ => None,
        });
        Some(Self {
            client: client.clone(),
            endpoint: Endpoint::read(&config, TIMEOUT).with_max_response(MAX_RESPONSE),
            version: version.unwrap_or("v1"),
        })
    }

    async fn call(&self, objects: &[Value], to: &str) -> Result<Vec<Value>, String> {
        let cache = self.client.cache.upgrade().ok_or("the server is stopping")?;
        let in_flight = &self.client.in_flight;
        let slot = webhook_client::reserve(in_flight, &self.endpoint).await?;
        let uid = uuid::Uuid::new_v4().to_string();
        let api_version = format!("apiextensions.k8s.io/{}", self.version);
        let request = json!({"kind": "ConversionReview", "apiVersion": api_version, "request": {
            "uid": uid, "desiredAPIVersion": to, "objects": objects,
        }});
        let mut memory = in_flight.response(&self.endpoint.host());
        let review = webhook_client::call(&cache, &self.endpoint, slot, &request, &mut memory).await?;
        let converted = response(review, &api_version, &uid)?;
        if converted.len() != objects.len() {
            return Err(format!("returned {} objects, expected {}", converted.len(), objects.len()));
        }
        let pairs = objects.iter().zip(converted).enumerate();
        pairs
            .map(|(index, (old, new))| {
                checked(old, new, to)
                    .map_err(|why| format!("returned invalid converted object at index {index}: {why}"))
            })
            .collect()
    }
}

impl Convert for WebhookConversion {
    fn convert<'a>(&'a self, mut objects: Vec<Value>, to: &'a Resource) -> Converting<'a> {
        Box::pin(async move {
            let wanted = to.api_version();
            let places: Vec<usize> = (0..objects.len())
                .filter(|place| objects.get(*place).is_some_and(|object| object["apiVersion"] != wanted))
                .collect();
            for part in places.chunks(MAX_OBJECTS) {
                let sent: Vec<Value> = part.iter().filter_map(|place| objects.get(*place).cloned()).collect();
                let from = sent.first().map(|object| object["apiVersion"].clone()).unwrap_or_default();
                let converted = self.call(&sent, wanted).await.map_err(|why| ConversionError {
                    to: wanted.to_owned(),
                    reason: format!(
                        "conversion webhook for {}, Kind={} failed: {}",
                        from.as_str().unwrap_or_default(),
                        to.kind,
                        beginning(&why)
                    ),
                })?;
                for (place, new) in part.iter().zip(converted) {
                    if let Some(slot) = objects.get_mut(*place) {
                        *slot = new;
                    }
                }
            }
            Ok(objects)
        })
    }
}

/// The beginning of the reason of a failed call.
fn beginning(why: &str) -> &str {
    &why[..why.floor_char_boundary(MAX_REASON)]
}

/// The objects of a response.
fn response(mut review: Value, api_version: &str, uid: &str) -> Result<Vec<Value>, String> {
    if review["apiVersion"] != api_version || review["kind"] != "ConversionReview" {
        return Err(format!(
            "expected webhook response of {api_version}, Kind=ConversionReview, got {}, Kind={}",
            review["apiVersion"], review["kind"]
        ));
    }
    let response = review.get_mut("response").map(Value::take).unwrap_or_default();
    let Value::Object(mut response) = response else { return Err("no response provided".to_owned()) };
    if response.get("uid").and_then(Value::as_str) != Some(uid) {
        let found = response.get("uid").cloned().unwrap_or_default();
        return Err(format!("expected response.uid={uid:?}, got {found}"));
    }
    let result = response.get("result").cloned().unwrap_or_default();
    if result["status"] != "Success" {
        return Err(match result["message"].as_str().filter(|message| !message.is_empty()) {
            Some(message) => message.to_owned(),
            None => format!("response.result.status was {}, not \"Success\"", result["status"]),
        });
    }
    match response.remove("convertedObjects") {
        Some(Value::Array(objects)) => Ok(objects),
        _ => Ok(Vec::new()),
    }
}

/// Checks and returns a converted object. Only labels and annotations of its metadata may differ from the original.
fn checked(old: &Value, mut new: Value, to: &str) -> Result<Value, String> {
    if new["apiVersion"] != to {
        return Err(format!("invalid groupVersion (expected {to}, received {})", new["apiVersion"]));
    }
    if new["kind"] != old["kind"] {
        return Err(format!("invalid kind (expected {}, received {})", old["kind"], new["kind"]));
    }
    for (field, word) in [("name", "name"), ("namespace", "namespace"), ("uid", "UID")] {
        let (before, after) = (&old["metadata"][field], &new["metadata"][field]);
        if before != after {
            return Err(format!("must have the same {word}: {before} != {after}"));
        }
    }
    let mut metadata = old["metadata"].as_object().cloned().unwrap_or_default();
    for field in ["labels", "annotations"] {
        match &new["metadata"][field] {
            Value::Null => metadata.remove(field),
            Value::Object(map) => {
                checked_texts(field, map)?;
                metadata.insert(field.to_owned(), Value::Object(map.clone()))
            }
            _ => return Err(format!("invalid metadata.{field} in converted object")),
        };
    }
    let Some(fields) = new.as_object_mut() else {
        return Err("the converted object is not a JSON object".to_owned());
    };
    fields.insert("metadata".to_owned(), Value::Object(metadata));
    Ok(new)
}

fn checked_texts(field: &str, map: &Map<String, Value>) -> Result<(), String> {
    for (key, value) in map {
        if !value.is_string() {
            return Err(format!("metadata.{field}[{key}] must be a string in converted object"));
        }
    }
    Ok(())
}

/// Responses of conversion webhooks. The input is a review in JSON.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn fuzz(data: &[u8]) {
    let Ok(review) = serde_json::from_slice::<Value>(data) else { return };
    let old =
        json!({"apiVersion": "g/v1", "kind": "K", "metadata": {"name": "n", "uid": "u", "generation": 3}});
    for version in ["apiextensions.k8s.io/v1", "apiextensions.k8s.io/v1beta1"] {
        let objects = match response(review.clone(), version, "7") {
            Ok(objects) => objects,
            Err(why) => {
                assert!(beginning(&why).len() <= MAX_REASON);
                continue;
            }
        };
        for new in objects {
            let Ok(converted) = checked(&old, new, "g/v2") else { continue };
            let (before, after) = (&old["metadata"], &converted["metadata"]);
            for field in ["name", "uid", "generation"] {
                assert_eq!(before[field], after[field], "metadata.{field} has changed");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn responses_are_checked() {
        let review =
            |response: Value| json!({"apiVersion": "a/v1", "kind": "ConversionReview", "response": response});
        let read = |response_: Value| response(review(response_), "a/v1", "7");
        let good = json!({"uid": "7", "result": {"status": "Success"}, "convertedObjects": [{}]});
        assert_eq!(read(good).unwrap().len(), 1);
        let failed = json!({"uid": "7", "result": {"status": "Failed", "message": "no"}});
        assert_eq!(read(failed).unwrap_err(), "no");
        assert!(
            read(json!({"uid": "8", "result": {"status": "Success"}})).unwrap_err().contains("response.uid")
        );
        assert_eq!(read(Value::Null).unwrap_err(), "no response provided");
    }

    #[test]
    fn the_reason_of_a_failed_conversion_is_cut() {
        let failed = |message: &str| {
            let result = json!({"status": "Failed", "message": message});
            let review = json!({"apiVersion": "a/v1", "kind": "ConversionReview",
                "response": {"uid": "7", "result": result}});
            beginning(&response(review, "a/v1", "7").unwrap_err()).to_owned()
        };
        assert_eq!(failed("no"), "no");
        assert_eq!(failed(&"é".repeat(MAX_REASON)), "é".repeat(MAX_REASON / 2));
    }

    #[test]
    fn only_labels_and_annotations_of_the_metadata_may_differ() {
        let old = json!({"apiVersion": "g/v1", "kind": "K", "metadata": {"name": "n", "uid": "u", "generation": 3, "labels": {"a": "b"}}});
        let new = json!({"apiVersion": "g/v2", "kind": "K", "metadata": {"name": "n", "uid": "u", "generation": 4, "annotations": {"c": "d"}}, "x": 1});
        assert_eq!(
            checked(&old, new.clone(), "g/v2").unwrap(),
            json!({"apiVersion": "g/v2", "kind": "K", "x": 1,
                "metadata": {"name": "n", "uid": "u", "generation": 3, "annotations": {"c": "d"}}})
        );
        let mut other = new.clone();
        other["metadata"]["name"] = "m".into();
        assert!(checked(&old, other, "g/v2").unwrap_err().contains("must have the same name"));
        assert!(checked(&old, new, "g/v3").unwrap_err().contains("invalid groupVersion"));
    }
}

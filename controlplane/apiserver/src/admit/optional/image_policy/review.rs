//! ImageReview: the request to the webhook and its response. No I/O.

use coracle_values::CollectMap;
use coracle_values::names::qualified_name;
use serde_json::{Map, Value, json};

const API_VERSION: &str = "imagepolicy.k8s.io/v1alpha1";
const KIND: &str = "ImageReview";
/// The webhook receives the annotations of the pod whose names contain this text.
const ANNOTATIONS: &str = ".image-policy.k8s.io/";
/// Maximum bytes of a reason. Longer reasons are truncated.
const MAX_REASON: usize = 1024;
/// Maximum bytes of the audit annotations of a response.
const MAX_AUDIT_ANNOTATIONS: usize = 4096;

/// The webhook's decision.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Status {
    pub(super) allowed: bool,
    pub(super) reason: String,
    /// Names without the prefix of the plugin, and their values.
    pub(super) audit_annotations: Vec<(String, String)>,
}

/// The spec of the review of a pod, or of its ephemeral containers.
pub(super) fn spec(pod: &Value, subresource: &str, namespace: &str) -> Value {
    let lists: &[&str] =
        if subresource.is_empty() { &["containers", "initContainers"] } else { &["ephemeralContainers"] };
    let containers = lists.iter().flat_map(|list| pod["spec"][list].as_array().into_iter().flatten());
    let images: Vec<Value> = containers.map(|container| json!({"image": container["image"]})).collect();
    let all = pod["metadata"]["annotations"].as_object().into_iter().flatten();
    let annotations = all.filter(|(name, _)| name.contains(ANNOTATIONS));
    let annotations: Map<String, Value> =
        annotations.map(|(name, value)| (name.clone(), value.clone())).collect_map();
    let mut spec = json!({"containers": images, "namespace": namespace});
    if !annotations.is_empty() {
        spec["annotations"] = annotations.into();
    }
    spec
}

/// The review with this spec.
pub(super) fn request(spec: Value) -> Value {
    json!({"apiVersion": API_VERSION, "kind": KIND, "metadata": {}, "spec": spec, "status": {"allowed": false}})
}

// === impl Status ===

impl Status {
    /// Parses a response. As upstream, a response without a decision refuses the pod.
    pub(super) fn read(answer: &Value) -> Result<Self, String> {
        for (field, expected) in [("apiVersion", API_VERSION), ("kind", KIND)] {
            let found = &answer[field];
            if !found.is_null() && found != expected {
                return Err(format!("the response of the webhook has the {field} {found}, not {expected:?}"));
            }
        }
        let status = &answer["status"];
        let invalid =
            |field: &str| format!("the response of the webhook has an invalid field status.{field}");
        let allowed = match &status["allowed"] {
            Value::Null => false,
            allowed => allowed.as_bool().ok_or_else(|| invalid("allowed"))?,
        };
        let reason = match &status["reason"] {
            Value::Null => "",
            reason => reason.as_str().ok_or_else(|| invalid("reason"))?,
        };
        let audit_annotations =
            audit_annotations(&status["auditAnnotations"]).ok_or_else(|| invalid("auditAnnotations"))?;
        Ok(Self {
            allowed,
            reason: reason[..reason.floor_char_boundary(MAX_REASON)].to_owned(),
            audit_annotations,
        })
    }

    /// `Ok` if the pod is accepted, otherwise the message.
    pub(super) fn decision(&self) -> Result<(), String> {
        match (self.allowed, self.reason.as_str()) {
            (true, _) => Ok(()),
            (false, "") => Err("one or more images rejected by webhook backend".to_owned()),
            (false, reason) => {
                Err(format!("image policy webhook backend denied one or more images: {reason}"))
            }
        }
    }
}

/// The audit annotations. As upstream, invalid names are skipped. `None` if a value is not a text, or if the
/// annotations are too long.
fn audit_annotations(list: &Value) -> Option<Vec<(String, String)>> {
    if list.is_null() {
        return Some(Vec::new());
    }
    let (mut annotations, mut bytes) = (Vec::new(), 0);
    for (name, value) in list.as_object()? {
        let value = value.as_str()?;
        bytes += name.len() + value.len();
        if bytes > MAX_AUDIT_ANNOTATIONS {
            return None;
        }
        if name.contains('/') || !qualified_name(name).is_empty() {
            tracing::warn!(name, "the image policy webhook returned an invalid audit annotation");
            continue;
        }
        annotations.push((name.clone(), value.to_owned()));
    }
    Some(annotations)
}

/// Responses of image policy webhooks. The input is a review in JSON.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn fuzz(data: &[u8]) {
    let Ok(answer) = serde_json::from_slice::<Value>(data) else { return };
    let Ok(status) = Status::read(&answer) else { return };
    assert!(status.reason.len() <= MAX_REASON, "the reason has {} bytes", status.reason.len());
    let bytes: usize = status.audit_annotations.iter().map(|(name, value)| name.len() + value.len()).sum();
    assert!(bytes <= MAX_AUDIT_ANNOTATIONS, "the audit annotations have {bytes} bytes");
    assert_eq!(status.decision().is_ok(), status.allowed);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_review_has_the_images_and_the_annotations_for_it() {
        let pod = json!({
            "metadata": {"annotations": {"break-glass.image-policy.k8s.io/ticket": "1", "other": "2"}},
            "spec": {"initContainers": [{"image": "i"}], "containers": [{"image": "c"}, {"image": "d"}],
                "ephemeralContainers": [{"image": "e"}]},
        });
        let annotations = json!({"break-glass.image-policy.k8s.io/ticket": "1"});
        let images = |images: &[&str]| images.iter().map(|image| json!({"image": image})).collect::<Vec<_>>();
        assert_eq!(
            spec(&pod, "", "n"),
            json!({"containers": images(&["c", "d", "i"]), "namespace": "n", "annotations": annotations})
        );
        assert_eq!(spec(&pod, "ephemeralcontainers", "n")["containers"], json!(images(&["e"])));
        assert!(spec(&json!({}), "", "n").get("annotations").is_none());
    }

    #[test]
    fn answers_are_checked_and_limited() {
        let status = |status: Value| Status::read(&json!({"status": status}));
        let full = json!({"allowed": true, "auditAnnotations": {"a": "b", "a/b": "c", "": "d"}});
        let expected = vec![("a".to_owned(), "b".to_owned())];
        assert_eq!(status(full).unwrap().audit_annotations, expected);
        assert_eq!(Status::read(&json!({})).unwrap(), Status::default());
        let denied = Status::default().decision().unwrap_err();
        assert_eq!(denied, "one or more images rejected by webhook backend");
        assert_eq!(status(json!({"reason": "ä".repeat(MAX_REASON)})).unwrap().reason.len(), MAX_REASON);
        for invalid in [
            json!({"allowed": "true"}),
            json!({"reason": 1}),
            json!({"auditAnnotations": {"a": 1}}),
            json!({"auditAnnotations": []}),
            json!({"auditAnnotations": {"a": "x".repeat(MAX_AUDIT_ANNOTATIONS)}}),
        ] {
            assert!(status(invalid.clone()).is_err(), "{invalid}");
        }
        let v1 = json!({"apiVersion": "imagepolicy.k8s.io/v1", "status": {"allowed": true}});
        assert!(Status::read(&v1).unwrap_err().contains("the apiVersion \"imagepolicy.k8s.io/v1\""));
    }
}

//! AdmissionReview: the request to a webhook and its response. No I/O.

use base64::{Engine as _, prelude::BASE64_STANDARD};
use coracle_kinds::Resource;
use coracle_values::string_list;
use serde_json::{Value, json};

use super::{Attributes, Operation, RequestOptions};
use crate::{error::ApiError, request::Query};

/// The response of a webhook.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Verdict {
    pub(super) allowed: bool,
    /// The Status of a refusal.
    pub(super) status: Value,
    /// A JSON patch, or null.
    pub(super) patch: Value,
    pub(super) warnings: Vec<String>,
    /// Annotations of the audit event: names without the webhook's name, and values.
    pub(super) annotations: Vec<(String, String)>,
}

/// The stage of admission that a webhook belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    Mutating,
    Validating,
}

/// Maximum number of audit annotations of one response, and maximum bytes of one value. Further and larger annotations
/// are left out.
const MAX_ANNOTATIONS: usize = 100;
const MAX_ANNOTATION_BYTES: usize = 32 << 10;

/// Maximum bytes of a webhook's text in the message of an error. The client may read the error slowly, and its memory
/// is not charged to the memory of webhook responses.
const MAX_MESSAGE_BYTES: usize = 64 << 10;

/// The object before and after the request, in the version that the webhook's rules select.
pub(super) struct Objects {
    pub(super) new: Value,
    pub(super) old: Value,
}

/// Builds the AdmissionReview of a request.
pub(super) fn request(
    of: &Attributes<'_>,
    version: &str,
    uid: &str,
    kind: &Resource,
    objects: &Objects,
) -> Value {
    let mut request = attributes(of, kind);
    if let Some(fields) = request.as_object_mut() {
        fields.insert("uid".to_owned(), uid.into());
        fields.insert("object".to_owned(), objects.new.clone());
        fields.insert("oldObject".to_owned(), objects.old.clone());
    }
    let api_version = format!("admission.k8s.io/{version}");
    json!({"kind": "AdmissionReview", "apiVersion": api_version, "request": request})
}

/// An AdmissionRequest without its objects. `kind` is the version of the resource that a rule names.
pub(super) fn attributes(attributes: &Attributes<'_>, kind: &Resource) -> Value {
    let kind_of = |kind: &Resource| match attributes.declared {
        Some(declared) if declared.kind != kind.kind => {
            json!({"group": declared.group, "version": declared.version, "kind": declared.kind})
        }
        _ => json!({"group": kind.group, "version": kind.version, "kind": kind.kind}),
    };
    let resource_of =
        |kind: &Resource| json!({"group": kind.group, "version": kind.version, "resource": kind.plural});
    let user = attributes.user;
    let mut request = serde_json::Map::new();
    for (field, value) in [
        ("kind", kind_of(kind)),
        ("resource", resource_of(kind)),
        ("requestKind", kind_of(attributes.kind)),
        ("requestResource", resource_of(attributes.kind)),
        ("operation", attributes.operation.name().into()),
        (
            "userInfo",
            json!({"username": user.name, "uid": user.uid, "groups": user.groups, "extra": user.extra}),
        ),
        ("dryRun", attributes.dry_run.into()),
        ("options", options(attributes)),
    ] {
        request.insert(field.to_owned(), value);
    }
    for (field, value) in [
        ("name", attributes.known_name()),
        ("namespace", attributes.namespace),
        ("subResource", attributes.subresource),
        ("requestSubResource", attributes.subresource),
    ] {
        if !value.is_empty() {
            request.insert(field.to_owned(), value.into());
        }
    }
    Value::Object(request)
}

/// The options of the request. Null for a connection.
fn options(attributes: &Attributes<'_>) -> Value {
    let kind = match attributes.operation {
        Operation::Create => "CreateOptions",
        Operation::Update => "UpdateOptions",
        Operation::Delete => "DeleteOptions",
        Operation::Connect => return Value::Null,
    };
    let mut options = match attributes.options {
        RequestOptions::Parameters(query) => parameters(query),
        RequestOptions::Deletion(sent) => sent.as_object().cloned().unwrap_or_default(),
    };
    options.insert("kind".to_owned(), kind.into());
    options.insert("apiVersion".to_owned(), "meta.k8s.io/v1".into());
    Value::Object(options)
}

/// The fields of CreateOptions and UpdateOptions that the query sets.
fn parameters(query: &Query) -> serde_json::Map<String, Value> {
    let mut options = serde_json::Map::new();
    let dry_run = query.all("dryRun");
    if !dry_run.is_empty() {
        options.insert("dryRun".to_owned(), dry_run.into());
    }
    for name in ["fieldManager", "fieldValidation"] {
        let value = query.get(name);
        if !value.is_empty() {
            options.insert(name.to_owned(), value.into());
        }
    }
    options
}

/// Parses the response to a review with this version and uid. An error counts as a failed call.
pub(super) fn response(review: &Value, version: &str, uid: &str, phase: Phase) -> Result<Verdict, String> {
    let api_version = format!("admission.k8s.io/{version}");
    // As upstream, version, uid and patch type of a v1beta1 response are not checked.
    let is_v1 = version == "v1";
    if is_v1 && (review["apiVersion"] != api_version.as_str() || review["kind"] != "AdmissionReview") {
        return Err(format!(
            "expected webhook response of {api_version}, Kind=AdmissionReview, got {}, Kind={}",
            review["apiVersion"], review["kind"]
        ));
    }
    let response = &review["response"];
    if !response.is_object() {
        return Err("webhook response was absent".to_owned());
    }
    if is_v1 && response["uid"] != uid {
        return Err(format!("expected response.uid={uid:?}, got {}", response["uid"]));
    }
    let allowed = match &response["allowed"] {
        Value::Bool(allowed) => *allowed,
        // As upstream, a response without the field is a refusal. `failurePolicy: Ignore` does not apply to refusals.
        Value::Null => false,
        _ => return Err("the field response.allowed is not a boolean".to_owned()),
    };
    if is_v1 && phase == Phase::Validating {
        refuse_patch(response)?;
    }
    let mut patch = Value::Null;
    if let Some(text) = response["patch"].as_str().filter(|text| !text.is_empty()) {
        if is_v1 && response["patchType"] != "JSONPatch" {
            return Err(format!("invalid response.patchType {}", response["patchType"]));
        }
        let bytes = BASE64_STANDARD.decode(text).map_err(|error| format!("response.patch: {error}"))?;
        patch = serde_json::from_slice(&bytes).map_err(|error| format!("response.patch: {error}"))?;
    }
    let warnings = string_list::texts(&response["warnings"]).map(str::to_owned).collect();
    let annotations = annotations(&response["auditAnnotations"]);
    Ok(Verdict { allowed, status: response["status"].clone(), patch, warnings, annotations })
}

/// Refuses the response of a validating webhook that contains a patch. Source: `VerifyAdmissionResponse`.
fn refuse_patch(response: &Value) -> Result<(), String> {
    if response["patch"].as_str().is_some_and(|patch| !patch.is_empty()) {
        return Err("validating webhook may not return response.patch".to_owned());
    }
    if !response["patchType"].is_null() {
        return Err("validating webhook may not return response.patchType".to_owned());
    }
    Ok(())
}

fn annotations(sent: &Value) -> Vec<(String, String)> {
    let texts = sent.as_object().into_iter().flatten();
    let texts = texts.filter_map(|(name, value)| Some((name, value.as_str()?)));
    let small = texts.filter(|(_, value)| value.len() <= MAX_ANNOTATION_BYTES);
    small.take(MAX_ANNOTATIONS).map(|(name, value)| (name.clone(), value.to_owned())).collect()
}

/// The beginning of a text that may contain parts of a webhook's response, for the message of an error.
pub(super) fn beginning(text: &str) -> &str {
    &text[..text.floor_char_boundary(MAX_MESSAGE_BYTES)]
}

/// The error of a patch that cannot be applied. The reason may contain parts of the patch.
pub(super) fn unusable_patch(hook: &str, why: &str) -> ApiError {
    ApiError::internal(format!("the patch of webhook {hook:?}: {}", beginning(why)))
}

/// The error of a refused request. Source: `webhook/errors.ToStatusErr`.
pub(super) fn refusal(hook: &str, status: &Value) -> ApiError {
    let text = |field: &str| status[field].as_str().filter(|text| !text.is_empty());
    let denied = format!("admission webhook {hook:?} denied the request");
    let message = match text("message").or_else(|| text("reason")) {
        Some(why) => format!("{denied}: {}", beginning(why)),
        None => format!("{denied} without explanation"),
    };
    let code = status["code"].as_u64().and_then(|code| u16::try_from(code).ok());
    let code = code.filter(|code| (400..600).contains(code)).unwrap_or(400);
    ApiError::of_webhook(code, text("reason").unwrap_or_default(), message)
}

/// Responses of admission webhooks. The input is a review in JSON.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn fuzz(data: &[u8]) {
    let Ok(review) = serde_json::from_slice::<Value>(data) else { return };
    for (version, phase) in [("v1", Phase::Mutating), ("v1", Phase::Validating), ("v1beta1", Phase::Mutating)]
    {
        let Ok(verdict) = response(&review, version, "7", phase) else { continue };
        assert!(verdict.annotations.len() <= MAX_ANNOTATIONS, "{} annotations", verdict.annotations.len());
        let _error = refusal("fuzz", &verdict.status);
        let object = json!({"metadata": {"name": "a"}, "spec": {"list": [1, 2]}});
        let _patched = coracle_kinds::patch::json(&object, &verdict.patch);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn review(response: Value) -> Value {
        json!({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response})
    }

    #[test]
    fn responses_are_checked() {
        let read = |response| response_of(response);
        fn response_of(answer: Value) -> Result<Verdict, String> {
            response(&review(answer), "v1", "7", Phase::Mutating)
        }
        let allowed = read(json!({"uid": "7", "allowed": true, "warnings": ["w"]})).unwrap();
        assert_eq!((allowed.allowed, allowed.warnings), (true, vec!["w".to_owned()]));
        let patch = BASE64_STANDARD.encode(r#"[{"op":"add","path":"/a","value":1}]"#);
        let patched = json!({"uid": "7", "allowed": true, "patch": patch, "patchType": "JSONPatch"});
        assert_eq!(read(patched).unwrap().patch[0]["path"], "/a");
        let older = json!({"response": {"allowed": true, "patch": patch}});
        assert_eq!(response(&older, "v1beta1", "7", Phase::Validating).unwrap().patch[0]["path"], "/a");
        assert!(!read(json!({"uid": "7"})).unwrap().allowed);
        for (answer, why) in [
            (json!({"uid": "8", "allowed": true}), "expected response.uid=\"7\", got \"8\""),
            (json!({"uid": "7", "allowed": "true"}), "the field response.allowed is not a boolean"),
            (json!({"uid": "7", "allowed": true, "patch": "W10="}), "invalid response.patchType null"),
            (json!(null), "webhook response was absent"),
        ] {
            assert_eq!(read(answer).unwrap_err(), why);
        }
        assert!(response(&json!({}), "v1", "7", Phase::Mutating).is_err());
    }

    #[test]
    fn a_validating_webhook_may_not_return_a_patch() {
        let read = |answer: Value| response(&review(answer), "v1", "7", Phase::Validating);
        let patched = json!({"uid": "7", "allowed": true, "patch": "W10=", "patchType": "JSONPatch"});
        assert_eq!(read(patched).unwrap_err(), "validating webhook may not return response.patch");
        let typed = json!({"uid": "7", "allowed": true, "patchType": "JSONPatch"});
        assert_eq!(read(typed).unwrap_err(), "validating webhook may not return response.patchType");
        assert!(read(json!({"uid": "7", "allowed": true, "patch": ""})).is_ok());
    }

    #[test]
    fn audit_annotations_are_limited() {
        let mut sent = serde_json::Map::new();
        for number in 0..1000 {
            sent.insert(number.to_string(), "x".into());
        }
        assert_eq!(annotations(&sent.into()).len(), MAX_ANNOTATIONS);
        let sent = json!({"large": "x".repeat(MAX_ANNOTATION_BYTES + 1), "number": 1, "a": "b"});
        assert_eq!(annotations(&sent), [("a".to_owned(), "b".to_owned())]);
        assert!(annotations(&json!("x")).is_empty());
    }

    #[test]
    fn a_refusal_has_the_reason_of_the_webhook() {
        let error = refusal("a.b.c", &json!({"code": 403, "message": "no"}));
        assert_eq!(
            (error.code, error.message.as_str()),
            (403, "admission webhook \"a.b.c\" denied the request: no")
        );
        let long = refusal("a.b.c", &json!({"message": "é".repeat(MAX_MESSAGE_BYTES)})).message;
        assert!(long.ends_with('é') && long.len() < MAX_MESSAGE_BYTES + 100, "{}", long.len());
        let long = unusable_patch("a.b.c", &"é".repeat(MAX_MESSAGE_BYTES)).message;
        assert!(long.ends_with('é') && long.len() < MAX_MESSAGE_BYTES + 200, "{}", long.len());
        let error = refusal("a.b.c", &json!({"code": 200}));
        assert_eq!(error.code, 400);
        assert_eq!(error.message, "admission webhook \"a.b.c\" denied the request without explanation");
    }
}

//! Errors in the form that clients receive: an HTTP code and a `Status` object with reason, message and details.

use coracle_kinds::{Resource, validate::Cause};
use serde_json::{Value, json};

/// The media types of objects, as errors list them.
pub(crate) const OBJECT_TYPES: &str =
    "application/json, application/yaml, application/vnd.kubernetes.protobuf";
/// Maximum causes of [`ApiError::store_read`], as upstream.
const MAX_CAUSES: usize = 100;
/// Reason of the cause of [`ApiError::future_revision`].
const TOO_LARGE_VERSION: &str = "ResourceVersionTooLarge";

/// A failed request.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    /// HTTP code.
    pub code: u16,
    /// Machine-readable reason, for example `NotFound`.
    pub reason: &'static str,
    /// The message that clients print.
    pub message: String,
    /// `details` of the Status. Null omits the field.
    pub details: Value,
    /// `metadata.continue` of the Status: a token for the rest of an expired list. Empty omits the field.
    pub rest: String,
}

/// The result of request handlers and of the functions that they call.
pub(crate) type Result<T> = std::result::Result<T, ApiError>;

// === impl ApiError ===

impl ApiError {
    fn new(code: u16, reason: &'static str, message: impl Into<String>) -> Self {
        Self { code, reason, message: message.into(), details: Value::Null, rest: String::new() }
    }

    fn of_object(mut self, kind: &Resource, name: &str) -> Self {
        self.details = json!({"kind": kind.plural});
        if !name.is_empty() {
            self.details["name"] = name.into();
        }
        if !kind.group.is_empty() {
            self.details["group"] = kind.group.as_ref().into();
        }
        self
    }

    pub(crate) fn bad_request(message: impl Into<String>) -> Self {
        Self::new(400, "BadRequest", message)
    }

    pub(crate) fn unauthorized() -> Self {
        Self::new(401, "Unauthorized", "Unauthorized")
    }

    pub(crate) fn forbidden(message: impl Into<String>) -> Self {
        Self::new(403, "Forbidden", message)
    }

    /// Admission refuses an object.
    pub(crate) fn forbidden_object(kind: &Resource, name: &str, why: impl std::fmt::Display) -> Self {
        let message = format!("{} \"{name}\" is forbidden: {why}", kind.qualified_resource());
        Self::forbidden(message).of_object(kind, name)
    }

    pub(crate) fn not_found(kind: &Resource, name: &str) -> Self {
        let message = format!("{} \"{name}\" not found", kind.qualified_resource());
        Self::new(404, "NotFound", message).of_object(kind, name)
    }

    /// The resource is not served.
    pub(crate) fn no_resource() -> Self {
        let error = Self::new(404, "NotFound", "the server could not find the requested resource");
        // The details are an object without fields, as in upstream's `NewGenericServerResponse`.
        Self { details: json!({}), ..error }
    }

    /// No component has this name. As upstream, the error has the singular name of the resource.
    pub(crate) fn unknown_component(name: &str) -> Self {
        let kind = "componentstatus";
        let error = Self::new(404, "NotFound", format!("{kind} \"{name}\" not found"));
        Self { details: json!({"kind": kind, "name": name}), ..error }
    }

    pub(crate) fn method_not_allowed() -> Self {
        let message = "the server does not allow this method on the requested resource";
        Self { details: json!({}), ..Self::new(405, "MethodNotAllowed", message) }
    }

    pub(crate) fn not_acceptable() -> Self {
        Self::not_acceptable_as(OBJECT_TYPES)
    }

    /// The client accepts none of the media types that the response may have.
    pub(crate) fn not_acceptable_as(types: &str) -> Self {
        let message = format!("only the following media types are accepted: {types}");
        Self::new(406, "NotAcceptable", message)
    }

    /// The client asks for the metadata of a list instead of one object, or of one object instead of a list.
    pub(crate) fn other_form(requested: &str, is_list: bool) -> Self {
        let found = if is_list { "a list" } else { "not a list" };
        let message = format!("you requested {requested}, but the requested object is {found}");
        Self::new(406, "NotAcceptable", message)
    }

    pub(crate) fn already_exists(kind: &Resource, name: &str) -> Self {
        let message = format!("{} \"{name}\" already exists", kind.qualified_resource());
        Self::new(409, "AlreadyExists", message).of_object(kind, name)
    }

    /// The name of an object with `generateName` is in use. Source: `NewGenerateNameConflict`.
    pub(crate) fn no_unique_name(kind: &Resource, name: &str) -> Self {
        let mut error = Self::already_exists(kind, name);
        error.message.push_str(", the server was not able to generate a unique name for the object");
        error.details["retryAfterSeconds"] = 1.into();
        error
    }

    pub(crate) fn conflict(kind: &Resource, name: &str, why: impl std::fmt::Display) -> Self {
        let message =
            format!("Operation cannot be fulfilled on {} \"{name}\": {why}", kind.qualified_resource());
        Self::new(409, "Conflict", message).of_object(kind, name)
    }

    /// The object differs from the preconditions of a deletion. Upstream names the kind here, not the resource. Source:
    /// `BeforeDelete`.
    pub(crate) fn precondition(kind: &Resource, name: &str, why: &str) -> Self {
        let mut error = Self::conflict(kind, name, why);
        let kind = kind.stored_as();
        error.message =
            format!("Operation cannot be fulfilled on {} \"{name}\": {why}", kind.qualified_kind());
        error.details["kind"] = kind.kind.as_ref().into();
        error
    }

    /// The object changed since the client read it.
    pub(crate) fn modified(kind: &Resource, name: &str) -> Self {
        let why =
            "the object has been modified; please apply your changes to the latest version and try again";
        Self::conflict(kind, name, why)
    }

    /// An apply request changes fields that other managers own.
    pub(crate) fn apply_conflict(message: impl Into<String>) -> Self {
        Self::new(409, "Conflict", message)
    }

    /// Server-side apply cannot merge a configuration. As upstream, the error has no reason.
    pub(crate) fn of_apply(message: impl Into<String>) -> Self {
        Self::new(500, "", message)
    }

    pub(crate) fn expired(message: impl Into<String>) -> Self {
        Self::new(410, "Expired", message)
    }

    /// A list cannot continue at the revision of its first page. `rest` is a token for the rest at the newest revision.
    pub(crate) fn expired_list(rest: String) -> Self {
        let mut error = Self::expired(
            "The provided continue parameter is too old to display a consistent list result. You can start a new list \
             without the continue parameter, or use the continue token in this response to retrieve the remainder of \
             the results. Continuing with the provided token results in an inconsistent list - objects that were \
             created, modified, or deleted between the time the first chunk was returned and now may show up in the \
             list.",
        );
        error.rest = rest;
        error
    }

    pub(crate) fn is_expired(&self) -> bool {
        self.code == 410
    }

    /// Whether the error is [`ApiError::future_revision`].
    pub(crate) fn is_future_revision(&self) -> bool {
        self.details["causes"][0]["reason"] == TOO_LARGE_VERSION
    }

    pub(crate) fn too_large() -> Self {
        let message = "Request entity too large: limit is 3145728";
        Self::new(413, "RequestEntityTooLarge", message)
    }

    /// etcd refuses an object because of its size. Source: `etcdserver: request is too large` of etcd.
    fn too_large_for_etcd() -> Self {
        Self::new(413, "RequestEntityTooLarge", "etcdserver: request is too large")
    }

    /// A request exceeds a limit other than its number of bytes.
    pub(crate) fn entity_too_large(message: impl Into<String>) -> Self {
        Self::new(413, "RequestEntityTooLarge", message)
    }

    /// Too many requests are in flight. The client may retry after a second.
    pub(crate) fn too_many_requests() -> Self {
        let message = "Too many requests, please try again later.";
        let mut error = Self::new(429, "TooManyRequests", message);
        error.details = json!({"retryAfterSeconds": 1});
        error
    }

    /// The client exceeds a rate. It may retry after a second. Source: `NewTooManyRequestsError`.
    pub(crate) fn rate_limited(why: &str) -> Self {
        let mut error = Self::too_many_requests();
        error.message = format!("Too many requests: {why}");
        error
    }

    /// An admission plugin refuses a request. Upstream's error has no reason.
    pub(crate) fn without_reason(message: impl Into<String>) -> Self {
        Self::new(500, "", message)
    }

    /// The body has none of the media types that the request may have.
    pub(crate) fn unknown_body(types: &str) -> Self {
        Self::unsupported_media_type(format!(
            "the body of the request was in an unknown format - accepted media types include: {types}"
        ))
    }

    pub(crate) fn unsupported_media_type(message: impl Into<String>) -> Self {
        Self::new(415, "UnsupportedMediaType", message)
    }

    pub(crate) fn invalid(kind: &Resource, name: &str, causes: &[Cause]) -> Self {
        // The error names the stored version, because upstream reports events of both groups as objects of the core
        // group.
        let kind = kind.stored_as();
        let message = coracle_kinds::validate::message(kind, name, causes);
        let mut error = Self::new(422, "Invalid", message).of_object(kind, name);
        // `details.kind` is the kind here. In other errors of this file it is the resource.
        error.details["kind"] = kind.kind.as_ref().into();
        error.details["causes"] = listed(causes);
        error
    }

    /// An invalid Scale of a workload.
    pub(crate) fn invalid_scale(name: &str, causes: &[Cause]) -> Self {
        let mut error = Self::invalid_parameters("Scale", "autoscaling", causes);
        error.message = error.message.replacen("\"\"", &format!("\"{name}\""), 1);
        error.details["name"] = name.into();
        error
    }

    /// The object in a request for a named object has no name.
    pub(crate) fn no_name(name: &str) -> Self {
        Self::bad_request(format!(
            "the name of the object ({name} based on URL) was undeterminable: name must be provided"
        ))
    }

    /// Invalid parameters of a request, which upstream reports as fields of an object of `meta.k8s.io`. This error is
    /// also used for an invalid TokenRequest.
    pub(crate) fn invalid_parameters(kind: &str, group: &str, causes: &[Cause]) -> Self {
        let texts: Vec<String> =
            causes.iter().map(|cause| format!("{}: {}", cause.field, cause.message)).collect();
        let texts =
            if let [text] = texts.as_slice() { text.clone() } else { format!("[{}]", texts.join(", ")) };
        let mut error = Self::new(422, "Invalid", format!("{kind}.{group} \"\" is invalid: {texts}"));
        error.details = json!({"kind": kind, "group": group, "causes": listed(causes)});
        error
    }

    /// The result of a patch is not a valid object.
    pub(crate) fn invalid_patch(why: &str) -> Self {
        let mut error = Self::new(422, "Invalid", format!(" \"\" is invalid: patch: Invalid value: {why}"));
        error.details = json!({"causes": [
            {"reason": "FieldValueInvalid", "message": format!("Invalid value: {why}"), "field": "patch"}]});
        error
    }

    /// The request itself is invalid, not the object in it.
    pub(crate) fn unprocessable(message: impl Into<String>) -> Self {
        Self::new(422, "Invalid", message)
    }

    pub(crate) fn internal(message: impl std::fmt::Display) -> Self {
        Self::new(500, "InternalError", format!("Internal error occurred: {message}"))
    }

    /// The error of a request that needs stored objects that cannot be decrypted. Source: `storage/etcd3/store.go`.
    /// Unlike upstream, the text does not name the key, because the object may be in another namespace.
    pub(crate) fn undecryptable(resource: &str, why: &str) -> Self {
        Self::internal(format!("unable to transform {resource} from storage: failed to decrypt: {why}"))
    }

    /// The error of an ordinary deletion of an object that cannot be decrypted, if the server supports unsafe
    /// deletions. Source: `StorageError` of `k8s.io/apiserver`.
    pub(crate) fn corrupt_object(key: &str, why: &str) -> Self {
        Self::internal(corrupt_object(key, why))
    }

    /// The error of a list with objects that cannot be decrypted, by key and cause. Source: `aggregatedStorageError` of
    /// `k8s.io/apiserver`.
    pub(crate) fn store_read<'a>(kind: &Resource, objects: impl Iterator<Item = (&'a str, &'a str)>) -> Self {
        let message = format!("failed to read one or more {} from the storage", kind.qualified_resource());
        let mut causes = Vec::new();
        for (key, why) in objects {
            if causes.len() == MAX_CAUSES {
                let message = "too many errors, the list is truncated";
                causes.push(json!({"reason": "FieldValueTooMany", "message": message}));
                break;
            }
            let message = corrupt_object(key, why);
            causes.push(json!({"reason": "UnexpectedServerResponse", "message": message, "field": key}));
        }
        let mut error = Self::new(500, "StorageReadError", message).of_object(kind, "list");
        error.details["causes"] = causes.into();
        error
    }

    /// The error of an unsafe deletion of an object that can be read. As upstream, it names the resource instead of the
    /// kind.
    pub(crate) fn not_corrupt(kind: &Resource, name: &str, causes: &[Cause]) -> Self {
        let mut error = Self::invalid(kind, name, causes);
        let kind = kind.stored_as();
        error.message = error.message.replacen(&kind.qualified_kind(), &kind.qualified_resource(), 1);
        error.details["kind"] = kind.plural.as_ref().into();
        error
    }

    pub(crate) fn unavailable(message: impl Into<String>) -> Self {
        Self::new(503, "ServiceUnavailable", message)
    }

    /// The error response of a node. The client gets the node's text and HTTP status.
    pub(crate) fn of_node(code: u16, said: &str) -> Self {
        let said = said.trim();
        match code {
            400 => Self::bad_request(said),
            403 => Self::forbidden(said),
            404 => Self::new(404, "NotFound", said),
            422 => Self::unprocessable(said),
            500 => Self::internal(said),
            503 => Self::unavailable(said),
            code => Self::new(code, "", said),
        }
    }

    /// A webhook refuses a request, with its own code and reason. An unknown reason is omitted.
    pub(crate) fn of_webhook(code: u16, reason: &str, message: String) -> Self {
        const REASONS: [&str; 8] = [
            "BadRequest",
            "Conflict",
            "Forbidden",
            "Gone",
            "Invalid",
            "NotFound",
            "TooManyRequests",
            "Unauthorized",
        ];
        let reason = REASONS.into_iter().find(|known| *known == reason).unwrap_or_default();
        Self::new(code, reason, message)
    }

    /// A disruption budget does not allow an eviction now. The client may retry after `seconds`; 0 omits the time.
    pub(crate) fn disruption_budget(why: &str, seconds: u64) -> Self {
        let message = "Cannot evict pod as it would violate the pod's disruption budget.";
        let mut error = Self::new(429, "TooManyRequests", message);
        error.details = json!({"causes": [{"reason": "DisruptionBudget", "message": why}]});
        if seconds > 0 {
            error.details["retryAfterSeconds"] = seconds.into();
        }
        error
    }

    /// Several disruption budgets select the pod of an eviction.
    pub(crate) fn several_budgets() -> Self {
        let message = "This pod has more than one PodDisruptionBudget, which the eviction subresource does not support.";
        Self::new(500, "", message)
    }

    /// The request took too long. The client may retry after `seconds`.
    pub(crate) fn timeout(why: impl std::fmt::Display, seconds: u64) -> Self {
        let mut error = Self::new(504, "Timeout", format!("Timeout: {why}"));
        error.details = json!({"retryAfterSeconds": seconds});
        error
    }

    /// The client requests a revision that does not exist yet.
    pub(crate) fn future_revision(asked: u64, newest: u64) -> Self {
        let message = format!("Timeout: Too large resource version: {asked}, current: {newest}");
        let mut error = Self::new(504, "Timeout", message);
        let cause = "Too large resource version";
        error.details =
            json!({"causes": [{"reason": TOO_LARGE_VERSION, "message": cause}], "retryAfterSeconds": 1});
        error
    }

    /// The `v1` Status that is sent to the client.
    #[must_use]
    pub fn status(&self) -> Value {
        let mut status = json!({
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "message": self.message, "reason": self.reason, "code": self.code,
        });
        if self.reason.is_empty() {
            status.as_object_mut().map(|status| status.remove("reason"));
        }
        if !self.rest.is_empty() {
            status["metadata"] = json!({"continue": self.rest});
        }
        if !self.details.is_null() {
            status["details"] = self.details.clone();
        }
        status
    }
}

/// Message about an object that cannot be decrypted.
fn corrupt_object(key: &str, why: &str) -> String {
    format!(
        "StorageError: corrupt object, Code: 7, Key: {key}, ResourceVersion: 0, AdditionalErrorMsg: data from the \
         storage is not transformable revision=0: failed to decrypt: {why}"
    )
}

fn listed(causes: &[Cause]) -> Value {
    let list = causes.iter();
    list.map(|cause| json!({"reason": cause.reason, "message": cause.message, "field": cause.field}))
        .collect()
}

impl From<coracle_store::Error> for ApiError {
    fn from(error: coracle_store::Error) -> Self {
        use coracle_store::Error as E;
        match &error {
            E::Unavailable { .. } => Self::unavailable(error.to_string()),
            E::TooLarge => Self::too_large_for_etcd(),
            _ => Self::internal(error),
        }
    }
}

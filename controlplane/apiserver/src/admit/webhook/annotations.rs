//! Annotations of the audit event: the webhooks that changed the object, and the webhooks that failed without a
//! refusal.
//!
//! Source: `webhookAnnotator` of the mutating dispatcher, and `Dispatch` of the validating dispatcher.

use serde::Serialize;
use serde_json::Value;

use crate::audit::Record;

const MUTATION: &str = "mutation.webhook.admission.k8s.io/";
const PATCH: &str = "patch.webhook.admission.k8s.io/";
const FAILED_OPEN_MUTATION: &str = "failed-open.mutation.webhook.admission.k8s.io/";
const FAILED_OPEN_VALIDATION: &str = "failed-open.validating.webhook.admission.k8s.io/";

/// The position of a call. The keys of its annotations contain this position.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    /// Number of the call: 0 for the first call, 1 for the call after other plugins have changed the object.
    pub(super) round: u8,
    /// Position of a mutating webhook among all webhooks of its plugin, or of a validating webhook among the webhooks
    /// that the request matches.
    pub(super) index: usize,
}

/// The effect of a call of a mutating webhook.
pub(super) enum Effect {
    /// The call failed, and the failure policy is `Ignore`.
    FailedOpen,
    /// The webhook returned no patch.
    NoPatch,
    Patched {
        patch: Value,
        /// Whether the patch changed the object.
        changed: bool,
    },
}

/// The value of an annotation. The order of the fields is upstream's.
#[derive(Clone, Copy, Serialize)]
#[serde(rename_all = "camelCase")]
struct Annotation<'a> {
    configuration: &'a str,
    webhook: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    mutated: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    patch: Option<&'a Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    patch_type: Option<&'static str>,
}

/// Records the call of a mutating webhook. `None` is a refusal, or a failure that refuses the request.
pub(super) fn record_mutation(
    record: &Record,
    place: Place,
    configuration: &str,
    webhook: &str,
    effect: Option<&Effect>,
) {
    let plain = Annotation { configuration, webhook, mutated: None, patch: None, patch_type: None };
    let mutated = matches!(effect, Some(Effect::Patched { changed: true, .. }));
    record.annotate(&place.key(MUTATION), text(&Annotation { mutated: Some(mutated), ..plain }));
    match effect {
        Some(Effect::FailedOpen) => record.annotate(&place.key(FAILED_OPEN_MUTATION), webhook),
        // A patch has values of the object, so it is recorded only with the object.
        Some(Effect::Patched { patch, .. }) if record.has_request_object() => {
            let annotation = Annotation { patch: Some(patch), patch_type: Some("JSONPatch"), ..plain };
            record.annotate_limited(&place.key(PATCH), &text(&annotation));
        }
        Some(Effect::Patched { .. } | Effect::NoPatch) | None => {}
    }
}

/// Records that the call of a validating webhook failed, and that its failure policy is `Ignore`.
pub(super) fn record_failed_validation(record: &Record, index: usize, webhook: &str) {
    let place = Place { round: 0, index };
    record.annotate(&place.key(FAILED_OPEN_VALIDATION), webhook);
}

/// The annotation as JSON.
fn text(annotation: &Annotation<'_>) -> String {
    // The fields are texts, flags and JSON values, which always have a JSON form.
    serde_json::to_string(annotation).unwrap_or_default()
}

// === impl Place ===

impl Place {
    fn key(self, prefix: &str) -> String {
        format!("{prefix}round_{}_index_{}", self.round, self.index)
    }
}

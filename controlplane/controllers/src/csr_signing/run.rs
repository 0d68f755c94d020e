//! Signs approved requests, or sets the condition Failed.

use std::sync::Arc;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use jiff::Timestamp;
use serde_json::{Value, json};

use crate::certificate::{CLIENT, NODE_CLIENT, NODE_SERVING, RequestedCertificate};
use crate::certificate_signer::Signer;
use crate::context::Context;
use crate::error::Error;
use crate::object::{CertificateSigningRequest, Key, ObjectExt};
use crate::queue::{Next, Queue};
use crate::write::Part;

/// Queues requests that can be signed.
pub(crate) fn listen(context: &Context, queue: &Arc<Queue<Key>>) {
    let own = queue.clone();
    context.caches.signing_requests.on_change(move |change| {
        if let Some(request) = change.new.filter(|request| is_ready(request)) {
            own.add(request.key());
        }
    });
}

/// Whether the request is approved, for one of the signers of this controller, and neither signed nor failed.
fn is_ready(request: &CertificateSigningRequest) -> bool {
    [CLIENT, NODE_CLIENT, NODE_SERVING].contains(&request.spec.signer_name.as_str())
        && request.condition("Approved").is_some()
        && request.condition("Denied").is_none()
        && request.condition("Failed").is_none()
        && request.status.certificate.is_none()
}

/// Reconciles one request.
pub(crate) async fn reconcile(context: &Context, key: Key) -> Result<Next, Error> {
    let request = context.caches.signing_requests.get(&key).filter(|request| is_ready(request));
    let (Some(request), Some(signer)) = (request, &context.config.signer) else { return Ok(Next::Wait) };
    let status = match certificate(signer, &request) {
        Ok(pem) => json!({"certificate": BASE64_STANDARD.encode(pem)}),
        Err(why) => failed(&request, &why),
    };
    let patch = json!({
        "metadata": {"uid": request.uid(), "resourceVersion": request.metadata.resource_version},
        "status": status,
    });
    context.writer(&context.caches.signing_requests).merge(&key, Part::Status, patch).await?;
    Ok(Next::Wait)
}

fn certificate(signer: &Signer, request: &CertificateSigningRequest) -> Result<String, String> {
    let spec = &request.spec;
    let requested = RequestedCertificate::read(&spec.request.0)?;
    if let Some(why) = requested.refusal(&spec.signer_name, &spec.usages) {
        return Err(why);
    }
    let now = u64::try_from(Timestamp::now().as_second()).unwrap_or(0);
    signer.sign(&requested, &spec.usages, spec.expiration_seconds, now).map_err(|error| {
        let cause = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
        format!("{error}: {cause}")
    })
}

fn failed(request: &CertificateSigningRequest, why: &str) -> Value {
    let mut conditions: Vec<Value> = request.status.conditions.iter().map(|known| json!(known)).collect();
    conditions.push(
        json!({"type": "Failed", "status": "True", "reason": "SignerValidationFailure", "message": why}),
    );
    json!({"conditions": conditions})
}

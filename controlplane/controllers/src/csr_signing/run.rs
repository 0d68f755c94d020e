//! Signs approved requests, or sets the condition Failed.

use std::sync::Arc;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use jiff::Timestamp;
use serde_json::json;

use super::plan::{failed, is_ready};
use crate::certificate::RequestedCertificate;
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

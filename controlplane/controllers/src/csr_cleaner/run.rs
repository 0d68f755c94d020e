//! Deletes expired requests.

use std::sync::Arc;

use jiff::Timestamp;

use super::plan;
use crate::context::Context;
use crate::error::Error;
use crate::object::Key;
use crate::queue::{Next, Queue, until};
use crate::queueing::queue_stored;
use crate::write::if_unchanged;

/// Queues every request.
pub(crate) fn listen(context: &Context, queue: &Arc<Queue<Key>>) {
    queue_stored(&context.caches.signing_requests, queue);
}

/// Reconciles one request. A newer version of the request may have a later decision, so the version is a precondition.
pub(crate) async fn reconcile(context: &Context, key: Key) -> Result<Next, Error> {
    let Some(request) = context.caches.signing_requests.get(&key) else { return Ok(Next::Wait) };
    let Some(end) = plan::end(&request) else { return Ok(Next::Wait) };
    if let Some(wait) = until(end, Timestamp::now()) {
        return Ok(Next::After(wait));
    }
    let failed = |source| {
        let object = format!("CertificateSigningRequest {key}");
        Error::Request { verb: "delete", object, source }
    };
    let writer = context.writer(&context.caches.signing_requests);
    writer.delete(&request, if_unchanged(&*request)).await.map_err(failed)?;
    Ok(Next::Wait)
}

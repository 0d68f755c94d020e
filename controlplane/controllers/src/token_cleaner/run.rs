//! Deletes each token when it expires.

use std::sync::Arc;

use jiff::Timestamp;

use super::plan::{Expiration, expiration};
use crate::context::Context;
use crate::error::Error;
use crate::object::Key;
use crate::queue::{Next, Queue};
use crate::queueing::queue_stored;
use crate::write::if_unchanged;

/// Queues every token.
pub(crate) fn listen(context: &Context, queue: &Arc<Queue<Key>>) {
    queue_stored(&context.caches.tokens, queue);
}

/// Deletes one token if it has expired. The version is a precondition, because a newer version may expire later.
pub(crate) async fn reconcile(context: &Context, key: Key) -> Result<Next, Error> {
    let Some(token) = context.caches.tokens.get(&key) else { return Ok(Next::Wait) };
    match expiration(token.text("expiration"), Timestamp::now()) {
        Expiration::Never => return Ok(Next::Wait),
        Expiration::In(wait) => return Ok(Next::After(wait)),
        Expiration::Expired => {}
    }
    tracing::info!(token = %key, "deleting an expired bootstrap token");
    let failed = |source| Error::Request { verb: "delete", object: format!("Secret {key}"), source };
    context.writer(&context.caches.tokens).delete(&token, if_unchanged(&*token)).await.map_err(failed)?;
    Ok(Next::Wait)
}

//! Removes each when it is due.

use std::sync::Arc;

use jiff::Timestamp;
use kube::api::DeleteParams;

use crate::context::Context;
use crate::error::Error;
use crate::object::{Key, Object};
use crate::queue::{Next, Queue, until};

/// Has the queue told of every token.
pub(crate) fn listen(context: &Context, queue: &Arc<Queue<Key>>) {
    let own = queue.clone();
    context.caches.tokens.on_change(move |change| {
        if let Some(token) = change.new {
            own.add(token.key());
        }
    });
}

/// One look at one token. What cannot be read as a time is over, for the API takes it so, too.
pub(crate) async fn reconcile(context: &Context, key: Key) -> Result<Next, Error> {
    let Some(token) = context.caches.tokens.get(&key) else { return Ok(Next::Wait) };
    let Some(expiration) = token.text("expiration") else { return Ok(Next::Wait) };
    if let Ok(end) = expiration.parse::<Timestamp>()
        && let Some(wait) = until(end, Timestamp::now())
    {
        return Ok(Next::After(wait));
    }
    tracing::info!(token = %key, "the bootstrap token has expired");
    let failed = |source| Error::Request { verb: "delete", object: format!("Secret {key}"), source };
    context.writer(&context.caches.tokens).delete(&token, DeleteParams::default()).await.map_err(failed)?;
    Ok(Next::Wait)
}

//! Unsafe deletion of one object that cannot be decrypted. It skips admission, finalizers and grace periods, because
//! they need the object. Source: `corruptObjectDeleter` and `authorizeUnsafeDelete` of `k8s.io/apiserver`.
//!
//! The feature gate `AllowUnsafeMalformedObjectDeletion` enables it. The gate is off by default.

use std::sync::Arc;

use coracle_kinds::validate::{Causes, Path};
use coracle_store::{Error as StoreError, Expect, Tier, Write};
use serde_json::json;

use crate::{
    cache::key_of,
    call::Call,
    error::{ApiError, Result},
    reply::{self, Reply},
};

/// The option of DeleteOptions.
pub(super) const OPTION: &str = "ignoreStoreReadErrorWithClusterBreakingPotential";
/// The verb that a user needs besides `delete`.
const VERB: &str = "unsafe-delete-ignore-read-errors";
/// The audit annotation of each request with the option. Refused requests get it, too.
const ANNOTATION: &str = "apiserver.k8s.io/unsafe-delete-ignore-read-error";
/// Maximum attempts if other clients change the object at the same time.
const MAX_ATTEMPTS: usize = 16;

/// Deletes the object of the request if it cannot be decrypted.
pub(super) async fn run(call: &Call) -> Result<Reply> {
    if let Some(record) = &call.audit {
        record.annotate(ANNOTATION, "");
    }
    // As upstream, namespaces cannot be deleted in this way: the objects of the namespace would stay.
    if call.kind.is("", "Namespace") {
        return Err(ApiError::internal(format!("no unsafe deleter provided, can not honor {OPTION}")));
    }
    authorize(call).await?;
    remove(call).await?;
    Ok(reply::success(200, json!({"name": call.resource.name, "kind": call.kind.kind})))
}

async fn authorize(call: &Call) -> Result<()> {
    call.authorize_also(VERB).await.map_err(|refusal| {
        let why = format!("not permitted to do {VERB:?}, reason: {}", refusal.message);
        ApiError::forbidden_object(&call.kind, &call.resource.name, why)
    })
}

/// Deletes the entry of the object, if it still has the revision at which it could not be decrypted. A former state in
/// the cache does not prevent the deletion. If the cache has the newest state, the deletion is refused: an ordinary
/// deletion works, even if the key management service does not respond now.
async fn remove(call: &Call) -> Result<()> {
    let (state, name) = (&call.state, &call.resource.name);
    let key = Arc::<str>::from(key_of(&call.kind, call.namespace(), name));
    for _ in 0..MAX_ATTEMPTS {
        let Some(revision) = state.store.revision_of(&key).await? else { return Err(not_corrupt(call)) };
        let known = state.cache.get(&call.kind, call.namespace(), name);
        if known.is_some_and(|known| known.revision == revision) {
            return Err(not_corrupt(call));
        }
        match state.store.get(&key).await {
            Err(StoreError::Sealed { .. }) => {}
            Ok(_) => return Err(not_corrupt(call)),
            Err(error) => return Err(error.into()),
        }
        let expect = Expect::Revision(revision);
        let deletion = Write { key: key.clone(), expect, value: None, tier: Tier::Durable, guard: None };
        match state.store.write(deletion).await {
            Ok(revision) => {
                let user = &*call.user.name;
                tracing::warn!(%key, user, "deleted an object that cannot be decrypted");
                return state.cache.reach(revision).await;
            }
            // Another client has changed the object. Its new state may be readable.
            Err(StoreError::Conflict { .. }) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Err(ApiError::modified(&call.kind, name))
}

/// The error for an object that can be read, or that does not exist.
fn not_corrupt(call: &Call) -> ApiError {
    let mut causes = Causes::default();
    let detail = "is exclusively used to delete corrupt object(s), try again by removing this option";
    causes.invalid(&Path::root(OPTION), &true.into(), detail);
    ApiError::not_corrupt(&call.kind, &call.resource.name, &causes.into_list())
}

//! The create of an object that waits for its initializers, and the removal of a rejected one.

use std::{sync::Arc, time::Duration};

use coracle_kinds::{
    Resource,
    initializers::{failure, is_uninitialized},
};
use coracle_store::Expect;
use serde_json::Value;

use super::{Expected, Failed, Reservations, Stored, commit};
use crate::{
    cache::{Event, Object, Scope, Watcher},
    call::Call,
    convert, deadline,
    error::{ApiError, Result},
    initialization::WaitPermit,
    state::State,
};

/// Maximum time that a create waits, as upstream. The parameter `timeout` shortens this time.
const MAX_WAIT: Duration = Duration::from_secs(30);
/// Maximum attempts to remove a rejected object while other writes change it.
const MAX_ATTEMPTS: usize = 8;
/// The field that shows whether an object is rejected.
pub(crate) const FIELD: &[&str] = &["metadata", "initializers"];

/// Reserves a slot to wait for the initializers of a new object. `None` if the create does not wait.
pub(super) fn enter(call: &Call, object: &Value) -> Result<Option<WaitPermit>> {
    let Some(initialization) = &call.state.admission.initialization else { return Ok(None) };
    if !is_uninitialized(object) || call.includes_uninitialized() || call.dry_run()? {
        return Ok(None);
    }
    initialization.enter(&call.user)
}

/// Waits until a new object is initialized. Returns the initialized object.
///
/// # Errors
/// An initializer rejected the object, the object was deleted, or the time limit expired. After a timeout the object
/// stays.
pub(super) async fn finish(call: &Call, stored: Stored, permit: Option<WaitPermit>) -> Result<Stored> {
    let Some(_permit) = permit else { return Ok(stored) };
    let object = match stored {
        Stored::Committed(object) => object,
        Stored::DryRun(_) => return Ok(stored),
    };
    if let Some(rejection) = rejection(&object.value()) {
        return Err(rejection);
    }
    let scope = Scope { prefix: object.key.to_string(), ..Scope::default() };
    let (watcher, mut events) = Watcher::new(scope, false);
    call.state.cache.of(&call.kind)?.lock().watch_after(watcher, object.revision)?;
    let over = || ApiError::timeout("request did not complete within allowed duration", 0);
    let mut limit = std::pin::pin!(tokio::time::sleep(limit(call.info.query.get("timeout"))));
    loop {
        let event = tokio::select! {
            event = events.recv() => event,
            () = &mut limit => return Err(over()),
            () = call.state.shutdown.cancelled() => return Err(over()),
        };
        match event {
            // The watch also delivers objects whose key begins with this object's key.
            Some(Event::Added(new) | Event::Modified(new)) if new.key == object.key => {
                let value = new.value();
                if let Some(rejection) = rejection(&value) {
                    return Err(rejection);
                }
                if !is_uninitialized(&value) {
                    return convert::object(&call.kind, new).await.map(Stored::Committed);
                }
            }
            Some(Event::Deleted(last)) if last.key == object.key => {
                let deleted = || ApiError::internal("object deleted while waiting for creation");
                return Err(rejection(&last.value()).unwrap_or_else(deleted));
            }
            Some(_) => {}
            None => {
                let what = call.kind.qualified_resource();
                let why = format!(
                    "server has timed out waiting for the initialization of {what} {}",
                    object.name()
                );
                return Err(ApiError::timeout(why, 0));
            }
        }
    }
}

/// The maximum time that a create waits, from the parameter `timeout`, a duration of Go. An invalid duration does not
/// get here: the server refuses its request.
fn limit(text: &str) -> Duration {
    let Ok(seconds) = deadline::go_seconds(text) else { return MAX_WAIT };
    // As upstream, a create with a negative time does not wait.
    Duration::try_from_secs_f64(seconds).unwrap_or_default().min(MAX_WAIT)
}

/// The error of an initializer that has rejected the object.
fn rejection(object: &Value) -> Option<ApiError> {
    let status = failure(object)?;
    let code = status["code"].as_u64().and_then(|code| u16::try_from(code).ok());
    let code = code.filter(|code| (400..600).contains(code)).unwrap_or(500);
    let text = |field: &str| status[field].as_str().unwrap_or_default();
    Some(ApiError::of_webhook(code, text("reason"), text("message").to_owned()))
}

/// Whether an update records the failure of an initializer, which rejects the object.
pub(super) fn rejects(call: &Call, new: &Value) -> bool {
    call.state.admission.initialization.is_some() && failure(new).is_some()
}

/// Commits an update that rejects its object, then removes the object without regard to finalizers. The first commit
/// delivers the reason to the waiting create. Both commits are made even if the client disconnects.
pub(super) async fn reject(
    call: &Call,
    reserved: Reservations,
    current: &Object,
    new: &Value,
) -> std::result::Result<Option<Arc<Object>>, Failed> {
    let expect = Expect::Revision(current.revision);
    // The object is removed next, so its growth has no limit.
    let expect = Expected { entry: expect, guard: reserved.guard(), byte_limits: None };
    let (state, kind) = (call.state.clone(), call.kind.clone());
    let (key, new) = (current.key.clone(), new.clone());
    let task = tokio::spawn(async move {
        let committed = commit(&state, &kind, &key, expect, Some(&new)).await?;
        drop(reserved);
        remove_rejected(&state, &kind, &key).await.map_err(Failed::Other)?;
        Ok(committed)
    });
    task.await.unwrap_or_else(|error| Err(Failed::Other(ApiError::internal(error))))
}

/// Removes an object that an initializer has rejected, even if it has changed since then.
pub(crate) async fn remove_rejected(state: &State, kind: &Resource, key: &str) -> Result<()> {
    for _ in 0..MAX_ATTEMPTS {
        let current = state.cache.of(kind)?.lock().get(key);
        let Some(current) = current else { return Ok(()) };
        if failure(&current.part(&[FIELD])).is_none() {
            return Ok(());
        }
        match commit(state, kind, key, Expect::Revision(current.revision), None).await {
            Ok(_) => return Ok(()),
            Err(Failed::Conflict | Failed::Allocated) => {}
            Err(Failed::Other(error)) => return Err(error),
        }
    }
    Err(ApiError::internal(
        "cannot remove the object that an initializer rejected: other writes keep changing it",
    ))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_create_waits_half_a_minute_at_most() {
        for (text, millis) in [
            ("", 30_000),
            ("5s", 5000),
            ("500ms", 500),
            ("1m", 30_000),
            ("0.25m", 15_000),
            ("0s", 0),
            ("-1s", 0),
            ("2000000h", 30_000),
        ] {
            assert_eq!(limit(text), Duration::from_millis(millis), "{text}");
        }
    }

    #[test]
    fn a_rejection_has_the_code_and_the_message_of_the_initializer() {
        let object = |result: Value| json!({"metadata": {"initializers": {"result": result}}});
        assert!(rejection(&json!({"metadata": {}})).is_none());
        let status = json!({"status": "Failure", "code": 403, "reason": "Forbidden", "message": "no"});
        let error = rejection(&object(status)).unwrap();
        assert_eq!((error.code, error.reason, &*error.message), (403, "Forbidden", "no"));
        for code in [json!(null), json!(200), json!(99_999)] {
            assert_eq!(rejection(&object(json!({"status": "Failure", "code": code}))).unwrap().code, 500);
        }
    }
}

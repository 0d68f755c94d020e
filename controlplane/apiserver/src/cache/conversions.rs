//! Conversions that watches share, so that an object is converted once for all watches of a version. A webhook is
//! called once for an event, not once for each watch.
//!
//! A running conversion is dropped with the last watch that waits for it. Only the newest small results are kept.
//!
//! A call of a webhook belongs to the owner of the watch that begins the conversion. If the call fails, the watches of
//! other owners begin another conversion: the call may have failed because the first owner has too many calls. After
//! [`SHARED_ATTEMPTS`] such failures, an owner shares only its own calls. So its watches fail only with its own call,
//! and wait for a limited number of calls.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
};

use coracle_kinds::Resource;
use futures::{
    FutureExt as _,
    future::{BoxFuture, Shared, WeakShared},
};

use super::Object;
use crate::{error::Result, request_owner};

/// Maximum number of known conversions.
const MAX_CONVERSIONS: usize = 32;
/// Number of conversions of other owners whose failure a watch tolerates before it uses only conversions of its owner.
const SHARED_ATTEMPTS: usize = 2;
/// Maximum bytes of a result that is kept.
const MAX_KEPT_BYTES: usize = 8 << 10;

/// A conversion of one object.
type Converting = BoxFuture<'static, Result<Arc<Object>>>;

/// The newest conversions.
#[derive(Default)]
pub(crate) struct Conversions(Mutex<VecDeque<Conversion>>);

struct Conversion {
    /// The memory addresses of object and kind identify the conversion. As long as these weak references exist, the
    /// allocator does not reuse the addresses.
    object: Weak<Object>,
    kind: Weak<Resource>,
    state: State,
}

enum State {
    Running { conversion: WeakShared<Converting>, owner: Arc<str> },
    Done(Arc<Object>),
}

/// A conversion for a watch.
enum Found {
    Running(Running),
    Done(Arc<Object>),
}

/// A running conversion, and the owner of the watch that has begun it.
struct Running {
    conversion: Shared<Converting>,
    owner: Arc<str>,
}

// === impl Conversions ===

impl Conversions {
    /// The object in the version of `kind`. `convert` makes the conversion, unless another watch has already begun the
    /// conversion. An error is returned to all watches of the owner, and is not kept. `convert` must depend only on the
    /// object, the version and the owner of the task.
    pub(crate) async fn get(
        &self,
        object: &Arc<Object>,
        kind: &Arc<Resource>,
        convert: impl Fn() -> Converting,
    ) -> Result<Arc<Object>> {
        let mut attempts = 0;
        loop {
            let running = match self.find(object, kind, attempts < SHARED_ATTEMPTS, &convert) {
                Found::Done(converted) => return Ok(converted),
                Found::Running(running) => running,
            };
            let is_own = running.owner == request_owner::current();
            let converted = self.finished(object, kind, running).await;
            if is_own || converted.is_ok() {
                return converted;
            }
            attempts += 1;
        }
    }

    /// Waits for the end of a conversion.
    async fn finished(
        &self,
        object: &Arc<Object>,
        kind: &Arc<Resource>,
        running: Running,
    ) -> Result<Arc<Object>> {
        let converted = running.conversion.await;
        self.finish(object, kind, converted.as_ref().ok());
        converted
    }

    /// The conversion of the object. If the cache has no such conversion, it is started. A running conversion of
    /// another owner counts only if `is_shared` is set.
    fn find(
        &self,
        object: &Arc<Object>,
        kind: &Arc<Resource>,
        is_shared: bool,
        convert: impl FnOnce() -> Converting,
    ) -> Found {
        let own = request_owner::current();
        let mut newest = self.lock();
        match newest.iter().find(|one| one.is_of(object, kind)).map(|one| &one.state) {
            Some(State::Done(converted)) => return Found::Done(converted.clone()),
            Some(State::Running { conversion, owner }) if is_shared || *owner == own => {
                if let Some(conversion) = conversion.upgrade() {
                    return Found::Running(Running { conversion, owner: owner.clone() });
                }
            }
            Some(State::Running { .. }) | None => {}
        }
        newest.retain(|one| !one.is_of(object, kind));
        let running = Running { conversion: convert().shared(), owner: own };
        if let Some(conversion) = running.conversion.downgrade() {
            let (object, kind) = (Arc::downgrade(object), Arc::downgrade(kind));
            let state = State::Running { conversion, owner: running.owner.clone() };
            newest.push_back(Conversion { object, kind, state });
        }
        if newest.len() > MAX_CONVERSIONS {
            newest.pop_front();
        }
        Found::Running(running)
    }

    /// Keeps a small result. Removes the conversion if its result is larger, or if it failed (`None`).
    fn finish(&self, object: &Arc<Object>, kind: &Arc<Resource>, converted: Option<&Arc<Object>>) {
        let mut newest = self.lock();
        match converted.filter(|converted| converted.stored_bytes() <= MAX_KEPT_BYTES) {
            Some(converted) => {
                if let Some(known) = newest.iter_mut().find(|one| one.is_of(object, kind)) {
                    known.state = State::Done(converted.clone());
                }
            }
            None => newest.retain(|one| !one.is_of(object, kind)),
        }
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Conversion>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl Conversion ===

impl Conversion {
    fn is_of(&self, object: &Arc<Object>, kind: &Arc<Resource>) -> bool {
        self.object.as_ptr() == Arc::as_ptr(object) && self.kind.as_ptr() == Arc::as_ptr(kind)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use coracle_kinds::kind::by_kind;
    use serde_json::json;
    use tokio::sync::Semaphore;

    use super::*;
    use crate::error::ApiError;

    fn object(size: usize) -> Arc<Object> {
        let kind = by_kind("v1", "ConfigMap").unwrap();
        let value = json!({"metadata": {"name": "a"}, "data": {"a": "x".repeat(size)}});
        Arc::new(Object::of(kind, "k".into(), 7, &value))
    }

    /// Three watches get an object at the same time, and then one further watch. Returns the number of conversions, and
    /// the number of successes.
    async fn conversions(result: Result<Arc<Object>>) -> (usize, usize) {
        let (shared, source, kind) = (Conversions::default(), object(1), by_kind("v1", "ConfigMap").unwrap());
        let (count, open) = (AtomicUsize::new(0), Arc::new(Semaphore::new(0)));
        let get = || {
            shared.get(&source, kind, || {
                count.fetch_add(1, Ordering::Relaxed);
                let (result, open) = (result.clone(), open.clone());
                async move {
                    let _opened = open.acquire().await;
                    result
                }
                .boxed()
            })
        };
        // The conversion ends after all three watches wait for it.
        let (first, second, third, ()) =
            tokio::join!(biased; get(), get(), get(), async { open.add_permits(1) });
        let last = get().await;
        let all = [first, second, third, last];
        (count.load(Ordering::Relaxed), all.iter().filter(|one| one.is_ok()).count())
    }

    #[tokio::test]
    async fn an_object_is_converted_once_for_all_watches() {
        assert_eq!(conversions(Ok(object(1))).await, (1, 4));
        assert_eq!(conversions(Ok(object(MAX_KEPT_BYTES))).await, (2, 4), "a large result is not kept");
        assert_eq!(conversions(Err(ApiError::internal("down"))).await, (2, 0), "an error is not kept");
    }

    /// The webhook refuses further calls of one owner.
    #[tokio::test]
    async fn a_failed_conversion_of_one_owner_does_not_fail_the_watches_of_others() {
        let (shared, source, kind) = (Conversions::default(), object(1), by_kind("v1", "ConfigMap").unwrap());
        let convert = || {
            let is_refused = *request_owner::current() == *"eve";
            async move {
                tokio::task::yield_now().await;
                if is_refused { Err(ApiError::internal("too many calls")) } else { Ok(object(1)) }
            }
            .boxed()
        };
        let get = |owner: &str| request_owner::scope(owner.into(), shared.get(&source, kind, convert));
        let (first, second, of_bob) = tokio::join!(biased; get("eve"), get("eve"), get("bob"));
        assert!(first.is_err() && second.is_err());
        assert!(of_bob.is_ok());
    }

    /// Each owner whose calls the webhook refuses makes a call before the last owner.
    #[tokio::test]
    async fn failed_conversions_of_several_owners_do_not_fail_the_watch_of_another() {
        let (shared, source, kind) = (Conversions::default(), object(1), by_kind("v1", "ConfigMap").unwrap());
        let convert = || {
            let is_refused = *request_owner::current() != *"bob";
            async move {
                tokio::task::yield_now().await;
                if is_refused { Err(ApiError::internal("too many calls")) } else { Ok(object(1)) }
            }
            .boxed()
        };
        let get = |owner: &str| request_owner::scope(owner.into(), shared.get(&source, kind, convert));
        let owners = ["eve1", "eve2", "eve3", "eve4", "bob"];
        let results = futures::future::join_all(owners.map(get)).await;
        let succeeded: Vec<bool> = results.iter().map(Result::is_ok).collect();
        assert_eq!(succeeded, [false, false, false, false, true]);
    }

    #[tokio::test]
    async fn a_conversion_ends_with_its_watches_and_few_are_known() {
        let (shared, kind) = (Conversions::default(), by_kind("v1", "ConfigMap").unwrap());
        let (source, converted) = (object(1), object(2));
        let stuck = shared.get(&source, kind, || std::future::pending().boxed());
        assert!(stuck.now_or_never().is_none());
        let convert = || std::future::ready(Ok(converted.clone())).boxed();
        let found = shared.get(&source, kind, convert).await;
        assert!(Arc::ptr_eq(&found.unwrap(), &converted));
        for _ in 0..100 {
            shared.get(&object(1), kind, convert).await.unwrap();
        }
        assert_eq!(shared.lock().len(), MAX_CONVERSIONS);
    }
}

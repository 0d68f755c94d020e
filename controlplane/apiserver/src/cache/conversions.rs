//! Conversions that watches share, so that an object is converted once for all watches of a version. A webhook is called
//! once for an event, not once for each watch.
//!
//! A running conversion is dropped with the last watch that waits for it. Only the newest small results are kept.

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
use crate::error::Result;

/// Maximum number of known conversions.
const MAX_CONVERSIONS: usize = 32;
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
    Running(WeakShared<Converting>),
    Done(Arc<Object>),
}

/// A conversion for a watch.
enum Found {
    Running(Shared<Converting>),
    Done(Arc<Object>),
}

// === impl Conversions ===

impl Conversions {
    /// The object in the version of `kind`. `convert` makes the conversion, unless another watch has begun it. An error
    /// is returned to all watches that wait, and is not kept. `convert` must depend only on the object and the version.
    pub(crate) async fn get(
        &self,
        object: &Arc<Object>,
        kind: &Arc<Resource>,
        convert: impl FnOnce() -> Converting,
    ) -> Result<Arc<Object>> {
        let running = match self.find(object, kind, convert) {
            Found::Done(converted) => return Ok(converted),
            Found::Running(running) => running,
        };
        let converted = running.await;
        self.finish(object, kind, converted.as_ref().ok());
        converted
    }

    /// The conversion of the object. If the cache has none, it is started.
    fn find(
        &self,
        object: &Arc<Object>,
        kind: &Arc<Resource>,
        convert: impl FnOnce() -> Converting,
    ) -> Found {
        let mut newest = self.lock();
        match newest.iter().find(|one| one.is_of(object, kind)).map(|one| &one.state) {
            Some(State::Done(converted)) => return Found::Done(converted.clone()),
            Some(State::Running(running)) => {
                if let Some(running) = running.upgrade() {
                    return Found::Running(running);
                }
            }
            None => {}
        }
        newest.retain(|one| !one.is_of(object, kind));
        let running = convert().shared();
        if let Some(weak) = running.downgrade() {
            let (object, kind) = (Arc::downgrade(object), Arc::downgrade(kind));
            newest.push_back(Conversion { object, kind, state: State::Running(weak) });
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

    /// Gets an object from three watches at the same time, and then from one more. Returns the number of conversions,
    /// and the number of successes.
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

    #[tokio::test]
    async fn a_conversion_ends_with_its_watches_and_few_are_known() {
        let (shared, kind) = (Conversions::default(), by_kind("v1", "ConfigMap").unwrap());
        let (source, converted) = (object(1), object(2));
        let stuck = shared.get(&source, kind, || std::future::pending().boxed());
        assert!(stuck.now_or_never().is_none());
        let result = converted.clone();
        let found = shared.get(&source, kind, || async move { Ok(result) }.boxed()).await;
        assert!(Arc::ptr_eq(&found.unwrap(), &converted));
        for _ in 0..100 {
            let result = converted.clone();
            shared.get(&object(1), kind, || async move { Ok(result) }.boxed()).await.unwrap();
        }
        assert_eq!(shared.lock().len(), MAX_CONVERSIONS);
    }
}

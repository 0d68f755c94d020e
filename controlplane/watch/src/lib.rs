//! The watch of a kind: lists its objects, watches their changes, and continues after failures.
//!
//! ```text
//! Empty ──► Listing ◄──► Page ──► Listed ──► Starting ──► Watching
//!   ▲          │                    ▲           │            │
//!   └─ failed ─┘                    └─ failed ──┴─ ended ────┤
//!   └─────────── 410, or no resource version ───────────────┘
//! ```
//!
//! [`Watch`] decodes objects. All other code is in `raw`. The code in `raw` does not depend on the type of the objects,
//! so it is compiled once. The watch itself repeats a failed request after a back-off, so a caller only reads the
//! stream. After a failure of the watch, events continue from the last resource version. Objects are listed again if
//! the server no longer has that version.

mod config;
mod error;
mod json;
mod lines;
mod object;
mod page;
mod raw;
mod request;
mod response;

use std::marker::PhantomData;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use futures::Stream;
use kube::{Api, Client, Resource};
use serde::de::DeserializeOwned;

pub use config::Config;
pub use error::Error;
pub use object::{WatchObject, watch_object};
use raw::{RawEvent, RawWatch};
use request::Target;

/// A change of the objects of a kind.
#[derive(Clone, Debug)]
pub enum Event<K> {
    /// An object was added or modified.
    Apply(K),
    /// An object was deleted. The event has its last state.
    Delete(K),
    /// A list begins, before its first request. A failed list begins again with another `Init`.
    Init,
    /// An object of the list.
    InitApply(K),
    /// The list is complete: objects that are not in the list no longer exist.
    InitDone,
}

/// A stream of the events of all objects that a configuration selects. The stream never ends. It is cancel-safe: a
/// dropped `next()` loses no event and no request.
#[derive(Debug)]
pub struct Watch<K> {
    raw: RawWatch,
    objects: PhantomData<fn() -> K>,
}

/// Watches the objects of an API. No request is sent before the first poll.
pub fn watch<K: Resource + DeserializeOwned>(api: Api<K>, config: Config) -> Watch<K> {
    let url = api.resource_url().to_owned();
    Watch::new(api.into_client(), url, config)
}

/// Does the same as [`watch`], for all objects of a kind. This function avoids `Api`, because the code of `Api` is
/// compiled for each kind.
pub fn watch_all<K>(client: Client, config: Config) -> Watch<K>
where
    K: Resource<DynamicType = ()> + DeserializeOwned,
{
    Watch::new(client, K::url_path(&(), None), config)
}

// === impl Watch ===

impl<K: Resource + DeserializeOwned> Watch<K> {
    fn new(client: Client, url: String, config: Config) -> Self {
        let target = Target { client, url, is_metadata: K::metadata_api() };
        Self { raw: RawWatch::new(target, config), objects: PhantomData }
    }

    fn decode(&mut self, event: RawEvent) -> Result<Event<K>, Error> {
        Ok(match event {
            RawEvent::Init => Event::Init,
            RawEvent::InitDone => Event::InitDone,
            // Fail the whole list: without this object in the list, the object would count as deleted.
            RawEvent::InitApply(object) => Event::InitApply(
                json::decode(&object).map_err(|error| self.raw.fail_list(Error::Object(error)))?,
            ),
            // The watch continues with the next events, because they may be about other objects.
            RawEvent::Apply(line) => Event::Apply(self.changed(&line)?),
            RawEvent::Delete(line) => Event::Delete(self.changed(&line)?),
        })
    }

    /// Decodes the object of a line. The watch continues after its version.
    fn changed(&mut self, line: &[u8]) -> Result<K, Error> {
        let object: K = match raw::usual_object(line).map(json::decode) {
            Some(Ok(object)) => object,
            // The line has another form, or its object is invalid.
            Some(Err(_)) | None => {
                let object = self.raw.object(line)?;
                json::decode(object).map_err(|error| self.raw.fail(Error::Object(error)))?
            }
        };
        self.raw.record_version(object.meta())?;
        Ok(object)
    }
}

impl<K: Resource + DeserializeOwned> Stream for Watch<K> {
    type Item = Result<Event<K>, Error>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let own = self.get_mut();
        let event = ready!(own.raw.poll_next(context));
        Poll::Ready(Some(event.and_then(|event| own.decode(event))))
    }
}

#[cfg(test)]
mod tests;

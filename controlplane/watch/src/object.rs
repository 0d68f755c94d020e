//! The watch of one object.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use futures::Stream;
use kube::{Api, Resource};
use serde::de::DeserializeOwned;

use crate::{Config, Error, Event, Watch, watch};

/// The states of one object: `None` while it does not exist. The stream never ends.
#[derive(Debug)]
pub struct WatchObject<K> {
    events: Watch<K>,
    /// Whether the list that is being received has the object.
    is_listed: bool,
}

/// Watches the object with a name. The API must be for one namespace, unless the kind has no namespaces.
pub fn watch_object<K: Resource + DeserializeOwned>(api: Api<K>, name: &str) -> WatchObject<K> {
    let config = Config::default().fields(&format!("metadata.name={name}"));
    WatchObject { events: watch(api, config), is_listed: false }
}

impl<K: Resource + DeserializeOwned> Stream for WatchObject<K> {
    type Item = Result<Option<K>, Error>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let own = self.get_mut();
        loop {
            let Some(event) = ready!(Pin::new(&mut own.events).poll_next(context)) else {
                return Poll::Ready(None);
            };
            return Poll::Ready(Some(match event {
                Ok(Event::Init) => {
                    own.is_listed = false;
                    continue;
                }
                Ok(Event::InitDone) if own.is_listed => continue,
                Ok(Event::InitApply(object)) => {
                    own.is_listed = true;
                    Ok(Some(object))
                }
                Ok(Event::Apply(object)) => Ok(Some(object)),
                Ok(Event::InitDone | Event::Delete(_)) => Ok(None),
                Err(error) => Err(error),
            }));
        }
    }
}

//! Watches of one kind.

use coracle_watch::{Config, Error, Event, watch_all};
use futures::StreamExt;
use futures::stream::BoxStream;
use kube::Client;

/// The events of the objects of a kind that `config` selects. If the server does not serve the kind, for example
/// because the server is older, the kind counts as listed and empty.
pub(crate) fn stream<K>(client: &Client, config: Config) -> BoxStream<'static, Event<K>>
where
    K: kube::Resource<DynamicType = ()> + serde::de::DeserializeOwned + Send + 'static,
{
    let events = watch_all::<K>(client.clone(), config);
    events.filter_map(|received| std::future::ready(event(received))).boxed()
}

/// The event to apply.
fn event<K: kube::Resource<DynamicType = ()>>(received: Result<Event<K>, Error>) -> Option<Event<K>> {
    let error = match received {
        Ok(event) => return Some(event),
        Err(error) => error,
    };
    let cause = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
    tracing::debug!(kind = %K::kind(&()), %error, cause, "cannot watch a kind");
    error.is_unserved().then_some(Event::InitDone)
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::time::Duration;

    use http::{Request, Response};
    use kube::client::Body;
    use serde_json::{Value, json};
    use tokio::time::Instant;

    use super::*;
    use crate::object::Pod;

    /// The paused clock moves only while all tasks wait for a timer.
    #[tokio::test(start_paused = true)]
    async fn a_list_waits_for_no_timer() {
        let metadata = |number: i32| json!({"name": format!("p{number}"), "uid": number.to_string()});
        let items: Vec<Value> = (0..50).map(|number| json!({"metadata": metadata(number)})).collect();
        let list = json!({"apiVersion": "v1", "kind": "PodList", "metadata": {"resourceVersion": "1"}, "items": items});
        let list = list.to_string();
        let service = tower::service_fn(move |_: Request<Body>| {
            let list = list.clone();
            async { Ok::<_, Infallible>(Response::new(Body::from(list.into_bytes()))) }
        });
        let (mut events, start) =
            (stream::<Pod>(&Client::new(service, ""), Config::control_plane()), Instant::now());
        let mut pods = 0;
        while let Some(event) = events.next().await {
            match event {
                Event::InitApply(_) => pods += 1,
                Event::InitDone => break,
                _ => {}
            }
        }
        assert_eq!((pods, start.elapsed()), (50, Duration::ZERO));
    }

    #[tokio::test(start_paused = true)]
    async fn a_kind_that_is_not_served_counts_as_listed() {
        for (code, expected) in [(404_u16, "done"), (403, "init"), (500, "init")] {
            let service = tower::service_fn(move |_: Request<Body>| async move {
                let status = json!({"kind": "Status", "code": code}).to_string();
                let response = Response::builder().status(code).body(Body::from(status.into_bytes()));
                Ok::<_, Infallible>(response.unwrap())
            });
            let events = stream::<Pod>(&Client::new(service, ""), Config::control_plane());
            let names = events.take(2).map(|event| match event {
                Event::Init => "init",
                Event::InitDone => "done",
                _ => "object",
            });
            assert_eq!(names.collect::<Vec<_>>().await, ["init", expected], "{code}");
        }
    }
}

//! Watches of one kind, with a delay between attempts.

use std::time::Duration;

use futures::StreamExt;
use futures::stream::BoxStream;
use kube::runtime::watcher::{self, watcher};
use kube::{Api, Client};

/// Timeout of a watch request: long, so that an idle machine rarely wakes up.
const WATCH_TIMEOUT_SECONDS: u32 = 1500;
const FIRST_DELAY: Duration = Duration::from_millis(20);
const MAX_DELAY: Duration = Duration::from_secs(10);
/// Maximum delay between the attempts to list a kind that the API server does not serve.
const MAX_UNSERVED_DELAY: Duration = Duration::from_secs(300);

/// The settings of a watch of all objects of a kind.
pub(crate) fn watch_config() -> watcher::Config {
    watcher::Config::default().timeout(WATCH_TIMEOUT_SECONDS)
}

/// The watch events of one kind. After a failure the stream pauses. The pause doubles with each failure.
pub(crate) fn stream<K>(client: &Client, config: watcher::Config) -> BoxStream<'static, watcher::Event<K>>
where
    K: kube::Resource<DynamicType = ()>
        + Clone
        + std::fmt::Debug
        + serde::de::DeserializeOwned
        + Send
        + 'static,
{
    let api: Api<K> = Api::all(client.clone());
    let state = (Box::pin(watcher(api, config)), FIRST_DELAY, Duration::ZERO);
    futures::stream::unfold(state, async |(mut events, mut delay, mut pause)| {
        loop {
            // A timer without duration ends only with the current millisecond, which would limit the rate of events.
            if !pause.is_zero() {
                tokio::time::sleep(pause).await;
            }
            let error = match events.next().await? {
                // `Init` comes before the list request, so it does not show that requests succeed again.
                Ok(event @ watcher::Event::Init) => return Some((event, (events, delay, Duration::ZERO))),
                Ok(event) => return Some((event, (events, FIRST_DELAY, Duration::ZERO))),
                Err(error) => error,
            };
            let cause = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
            tracing::debug!(kind = %K::kind(&()), %error, cause, "cannot watch a kind");
            let is_unserved = is_unserved(&error);
            pause = delay.min(if is_unserved { MAX_UNSERVED_DELAY } else { MAX_DELAY });
            delay = pause * 2;
            if is_unserved {
                return Some((watcher::Event::InitDone, (events, delay, pause)));
            }
        }
    })
    .boxed()
}

/// Whether the server does not serve the kind, as an older server may not. The list then counts as empty.
fn is_unserved(error: &watcher::Error) -> bool {
    matches!(error, watcher::Error::InitialListFailed(kube::Error::Api(status)) if status.code == 404)
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

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
        let (mut events, start) = (stream::<Pod>(&Client::new(service, ""), watch_config()), Instant::now());
        let mut pods = 0;
        while let Some(event) = events.next().await {
            match event {
                watcher::Event::InitApply(_) => pods += 1,
                watcher::Event::InitDone => break,
                _ => {}
            }
        }
        assert_eq!((pods, start.elapsed()), (50, Duration::ZERO));
    }

    #[test]
    fn only_a_kind_that_is_not_served_counts_as_listed() {
        let failed = |code| {
            let status = kube::core::Status { code, ..Default::default() };
            watcher::Error::InitialListFailed(kube::Error::Api(Box::new(status)))
        };
        assert!(is_unserved(&failed(404)));
        assert!(!is_unserved(&failed(403)) && !is_unserved(&failed(500)));
    }
}

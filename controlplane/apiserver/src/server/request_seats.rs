//! The seats of a request while its client is slow, and the permit of a large request.
//!
//! Seats of a priority level are for the work of this server. A client that sends its body slowly, or does not read its
//! response, would otherwise hold its seats for the whole request timeout. One user could then use up the seats of a
//! level that all service accounts share. Upstream's server has this weakness.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use coracle_connections::ConnectionPermit;
use futures::future::BoxFuture;
use http::Extensions;
use tokio::time::{Instant, timeout};

use crate::{
    authn::User,
    body,
    call::Call,
    error::Result,
    flow_control::Seats,
    in_flight::{self, BodyMemory, InFlight},
    large_requests::{LargeRequestPermit, LargeRequests},
    media::Form,
    offload::MIN_OFFLOADED_BYTES,
    reply::Reply,
    request::RequestInfo,
    request_owner,
    state::State,
    waits,
};

/// Maximum time that a client sends a body, or reads a response, while the request has seats.
pub(crate) const SLOW_CLIENT: Duration = Duration::from_millis(500);
/// Maximum time for which a large request keeps its permit. A webhook may delay the request for longer. Such a request
/// must not delay the large requests of other users: the webhook itself may wait for one of these requests.
const MAX_PERMIT_TIME: Duration = Duration::from_secs(5);

/// The user and the attributes of a request, which determine its priority level.
#[derive(Clone, Copy)]
pub(super) struct Requester<'a> {
    pub(super) user: &'a User,
    pub(super) info: &'a RequestInfo,
}

/// Releases the memory that a request has until its authentication. A request of an unknown client gets other memory
/// until its response is sent. If too little memory is free, the connection is closed: an unknown client might never
/// read the response.
pub(super) fn identified(in_flight: &InFlight, extensions: &mut Extensions, is_known: bool) {
    let Some(memory) = extensions.remove::<Arc<BodyMemory>>().filter(|_| !is_known) else { return };
    if let Some(memory) = in_flight.unknown(&memory) {
        extensions.insert(Arc::new(memory));
    } else if let Some(permit) = extensions.get::<Arc<ConnectionPermit>>() {
        permit.close();
    }
}

/// The owner of a request until its authentication: the source address. Empty without a connection from the network.
pub(super) fn source(extensions: &Extensions) -> Arc<str> {
    let permit = extensions.get::<Arc<ConnectionPermit>>();
    permit.map_or_else(|| "".into(), |permit| format!("source:{}", permit.source()).into())
}

/// Runs a wait at the start of a request: for its authorization, or for a current cache. If the request waits for
/// another server for a long time, it gives its seats back. Afterwards it waits for seats again.
pub(super) async fn wait(
    state: &State,
    requester: Requester<'_>,
    seats: &mut Option<Seats>,
    wait: impl Future<Output = Result<()>>,
) -> Result<()> {
    let had_seats = seats.is_some();
    waits::holding(seats, wait).await?;
    if had_seats && seats.is_none() {
        *seats = enter_again(state, requester).await?;
    }
    Ok(())
}

/// Waits for the seats of a request that has given its seats back.
async fn enter_again(state: &State, requester: Requester<'_>) -> Result<Option<Seats>> {
    let arrived = Instant::now();
    let (_, granted) = state.flow_control.enter(requester.user, requester.info, &state.cache).await;
    waits::add(arrived.elapsed());
    granted
}

/// Reads the body of a request; `None` is the body of a GET. After [`SLOW_CLIENT`] the request gives its seats back,
/// and waits for seats again when the body is complete.
pub(super) async fn receive<B>(
    state: &State,
    body: Option<B>,
    memory: &mut BodyMemory,
    requester: Requester<'_>,
    seats: &mut Option<Seats>,
) -> Result<Bytes>
where
    B: http_body::Body<Data = Bytes>,
    B::Error: std::fmt::Display,
{
    let Some(body) = body else { return Ok(Bytes::new()) };
    let mut read = std::pin::pin!(body::read(body, memory));
    if let Ok(body) = timeout(SLOW_CLIENT, read.as_mut()).await {
        return body;
    }
    let had_seats = seats.take().is_some();
    let body = read.await?;
    if had_seats {
        *seats = enter_again(state, requester).await?;
    }
    Ok(body)
}

/// Waits for the permit of a request with a large body or object. Other requests need no permit. The permit counts for
/// the authenticated user, not for an impersonated user. Otherwise one user could use the shares of many impersonated
/// users.
pub(super) async fn permit_of(call: &Call, seats: &mut Option<Seats>) -> Option<LargeRequestPermit> {
    let bytes = processed_bytes(call);
    if bytes <= MIN_OFFLOADED_BYTES {
        return None;
    }
    let owner = request_owner::current();
    Some(wait_for_permit(&call.state.large_requests, &owner, bytes, seats).await)
}

/// Waits for a permit. After [`SLOW_CLIENT`] the request gives its seats back. With a permit it needs no seats, because
/// the permits are a limit, too. If it held its permit while it waits for seats, the large requests of all levels would
/// wait until seats of its level are free.
async fn wait_for_permit(
    large: &LargeRequests,
    owner: &str,
    bytes: usize,
    seats: &mut Option<Seats>,
) -> LargeRequestPermit {
    let mut wait = std::pin::pin!(large.enter(owner, bytes));
    if let Ok(permit) = timeout(SLOW_CLIENT, wait.as_mut()).await {
        return permit;
    }
    *seats = None;
    wait.await
}

/// Bytes of the body and of the stored object that a request processes as trees. 0 for requests without a limit.
fn processed_bytes(call: &Call) -> usize {
    if in_flight::is_long_running(&call.info) {
        return 0;
    }
    let is_stored_version = call.kind.is_storage_version();
    if call.info.verb == "get" && is_stored_version && matches!(call.form(), Ok(Form::Plain)) {
        return 0;
    }
    let name = Some(&call.resource.name).filter(|name| !name.is_empty());
    let stored = name.and_then(|name| call.state.cache.get(&call.kind, call.namespace(), name));
    call.body.len() + stored.map_or(0, |object| object.stored_bytes())
}

/// Runs a request. After [`MAX_PERMIT_TIME`] its permit is released: the request continues, and the next large request
/// starts. A request that waits for a slow webhook gives its seats back, and continues without seats. The limits on the
/// requests of one user still apply.
pub(super) async fn run(
    permit: Option<LargeRequestPermit>,
    seats: &mut Option<Seats>,
    request: BoxFuture<'_, Result<Reply>>,
) -> Result<Reply> {
    let mut request = std::pin::pin!(waits::holding(seats, request));
    let Some(permit) = permit else { return request.await };
    if let Ok(reply) = timeout(MAX_PERMIT_TIME, request.as_mut()).await {
        return reply;
    }
    drop(permit);
    request.await
}

#[cfg(test)]
mod tests {
    use http::Method;

    use super::*;
    use crate::{cache::Cache, flow_control::FlowControl};

    #[tokio::test(start_paused = true)]
    async fn a_large_request_with_a_permit_does_not_wait_for_seats() {
        let (control, cache) = (FlowControl::new(20, Duration::from_secs(60)), Cache::new(0));
        let info = RequestInfo::parse(&Method::GET, &"/api/v1/namespaces/a/pods/b".parse().unwrap());
        let enter = async |user: &str| control.enter(&User::new(user, &[]), &info, &cache).await.1;
        let large = LargeRequests::default();
        let mut quick = enter("eve").await.unwrap();
        let first = wait_for_permit(&large, "eve", 2 << 20, &mut quick).await;
        assert!(quick.is_some(), "a request that gets its permit at once keeps its seats");
        let mut seats = enter("eve").await.unwrap();
        let mut waiting = Box::pin(wait_for_permit(&large, "eve", 1 << 20, &mut seats));
        assert!(timeout(SLOW_CLIENT * 2, waiting.as_mut()).await.is_err());
        let mut taken = Vec::new();
        while let Ok(others) = enter("bob").await {
            taken.push(others);
        }
        drop(first);
        timeout(SLOW_CLIENT, waiting).await.expect("the permit");
        assert!(seats.is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_that_waits_for_a_slow_webhook_gives_its_seats_back() {
        let (control, cache) = (FlowControl::new(20, Duration::from_secs(60)), Cache::new(0));
        let info = RequestInfo::parse(&Method::POST, &"/api/v1/namespaces".parse().unwrap());
        let in_use = || control.levels().iter().map(|level| level.seats_in_use).sum::<u64>();
        for (wait, seats_after) in [(SLOW_CLIENT / 2, 1), (SLOW_CLIENT * 4, 0)] {
            let mut seats = control.enter(&User::new("eve", &[]), &info, &cache).await.1.unwrap();
            let request = Box::pin(async {
                waits::for_server(tokio::time::sleep(wait)).await;
                assert_eq!(in_use(), seats_after, "before the request ends");
                Err::<Reply, _>(crate::error::ApiError::internal("refused"))
            });
            assert!(run(None, &mut seats, request).await.is_err());
            assert_eq!(seats.is_some(), seats_after == 1);
        }
    }
}

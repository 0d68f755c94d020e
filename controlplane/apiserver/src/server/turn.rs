//! The seats of a request while its client is slow.
//!
//! Seats of a priority level are for the work of this server. A client that sends its body slowly, or does not read its
//! response, would otherwise hold them for the whole request timeout: one user could use up a level that all service
//! accounts share. Upstream's server has this weakness.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use http::Method;
use tokio::time::{Instant, timeout};

use crate::{
    authn::User,
    body,
    error::Result,
    flow_control::Seats,
    in_flight::{BodyMemory, Permit},
    request::RequestInfo,
    state::State,
    waits,
};

/// Maximum time that a client sends a body, or reads a response, while the request has seats.
pub(crate) const SLOW_CLIENT: Duration = Duration::from_millis(500);

/// Marks a response that must be delivered within the request timeout. Its request counts as in flight until then.
#[derive(Clone, Default)]
pub(crate) struct ShortLived {
    _permit: Option<Arc<Permit>>,
    seats: Option<Arc<Seats>>,
}

/// Reads the body of a request. After [`SLOW_CLIENT`] the request gives its seats back, and waits for seats again when
/// the body is complete.
pub(super) async fn receive<B>(
    state: &State,
    (method, body): (&Method, B),
    memory: &mut BodyMemory,
    (user, info): (&User, &RequestInfo),
    seats: &mut Option<Seats>,
) -> Result<Bytes>
where
    B: http_body::Body<Data = Bytes>,
    B::Error: std::fmt::Display,
{
    if method == Method::GET {
        return Ok(Bytes::new());
    }
    let mut body = std::pin::pin!(body::read(body, memory));
    if let Ok(complete) = timeout(SLOW_CLIENT, body.as_mut()).await {
        return complete;
    }
    let had_seats = seats.take().is_some();
    let complete = body.await?;
    if had_seats {
        let arrived = Instant::now();
        let (_, granted) = state.flow_control.enter(user, info, &state.cache).await;
        waits::add(arrived.elapsed());
        *seats = granted?;
    }
    Ok(complete)
}

// === impl ShortLived ===

impl ShortLived {
    /// The response of a request with seats.
    pub(crate) fn with_seats(seats: Seats) -> Self {
        Self { _permit: None, seats: Some(Arc::new(seats)) }
    }

    /// With the permit of the request in flight.
    pub(super) fn with_permit(self, permit: Option<Permit>) -> Self {
        Self { _permit: permit.map(Arc::new), ..self }
    }

    /// Takes the seats. The last copy that is dropped releases them.
    pub(crate) fn take_seats(&mut self) -> Option<Arc<Seats>> {
        self.seats.take()
    }
}

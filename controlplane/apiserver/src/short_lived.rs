//! Responses that must be delivered within the request timeout, and the resources that their requests hold until then.

use std::sync::Arc;

use tokio_util::task::task_tracker::TaskTrackerToken;

use crate::{
    flow_control::Seats,
    in_flight::{BodyMemory, Permit},
};

/// Marks a response that must be delivered within the request timeout. Its request counts as in flight until then.
#[derive(Clone, Default)]
pub(crate) struct ShortLived {
    _permit: Option<Arc<Permit>>,
    seats: Option<Arc<Seats>>,
    /// The memory of a request whose client is not known.
    _unauthenticated: Option<Arc<BodyMemory>>,
    /// The shutdown waits until the token is dropped.
    _drained: Option<TaskTrackerToken>,
}

// === impl ShortLived ===

impl ShortLived {
    /// The response of a request with seats.
    pub(crate) fn with_seats(seats: Seats) -> Self {
        Self { seats: Some(Arc::new(seats)), ..Self::default() }
    }

    /// Adds the memory of a request whose client is not known.
    pub(crate) fn with_unauthenticated(self, memory: Option<Arc<BodyMemory>>) -> Self {
        Self { _unauthenticated: memory, ..self }
    }

    /// Adds the permit of the request in flight.
    pub(crate) fn with_permit(self, permit: Option<Permit>) -> Self {
        Self { _permit: permit.map(Arc::new), ..self }
    }

    /// Adds a token. The shutdown waits until the token is dropped.
    pub(crate) fn with_drained(self, token: TaskTrackerToken) -> Self {
        Self { _drained: Some(token), ..self }
    }

    /// Takes the seats. They are released when the last copy is dropped.
    pub(crate) fn take_seats(&mut self) -> Option<Arc<Seats>> {
        self.seats.take()
    }
}

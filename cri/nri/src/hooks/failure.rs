//! Failures of events that cannot be undone.

use coracle_proto::nri::Event;
use tracing::warn;

use crate::Error;

/// Logs an error of an event that cannot be undone.
pub(super) fn log(event: Event, result: Result<(), Error>) {
    if let Err(error) = result {
        let cause = std::error::Error::source(&error).map(ToString::to_string);
        warn!(event = crate::events::name(event), %error, cause, "NRI plugin failed an event");
    }
}

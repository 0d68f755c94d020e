//! Logs errors of plugins for events that the runtime cannot undo.

use coracle_proto::nri::Event;
use tracing::warn;

use crate::Error;

/// Logs the error of a plugin for an event that the runtime cannot undo.
pub(super) fn log(event: Event, result: Result<(), Error>) {
    if let Err(error) = result {
        let cause = std::error::Error::source(&error).map(ToString::to_string);
        warn!(event = crate::events::name(event), %error, cause, "NRI plugin failed an event");
    }
}

//! The calls that this version does not serve, in one place.

use crate::error::Error;

/// Refuses a call by its name.
pub(super) fn later(call: &'static str) -> Error {
    Error::Unsupported(call)
}

//! Creation of metrics.

/// Unwraps a result that is an error only if a name in the code is invalid or used twice.
pub(crate) fn valid<T>(made: prometheus::Result<T>) -> T {
    made.unwrap_or_else(|error| unreachable!("invalid metric: {error}"))
}

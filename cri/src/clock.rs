//! The current time in the CRI's unit.

/// Unix time in nanoseconds.
pub(crate) fn now() -> i64 {
    i64::try_from(jiff::Timestamp::now().as_nanosecond()).unwrap_or(i64::MAX)
}

//! Timestamps as the API writes them.

use jiff::Timestamp;

/// A time as metav1.Time has it: RFC 3339 with whole seconds.
pub(crate) fn whole_seconds(time: Timestamp) -> String {
    Timestamp::from_second(time.as_second()).unwrap_or(time).to_string()
}

//! Timestamps in the format of the API.

use jiff::Timestamp;

/// A time in the format of metav1.Time: RFC 3339 with whole seconds.
pub(crate) fn whole_seconds(time: Timestamp) -> String {
    Timestamp::from_second(time.as_second()).unwrap_or(time).to_string()
}

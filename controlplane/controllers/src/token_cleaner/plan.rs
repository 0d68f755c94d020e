//! Whether a bootstrap token has expired.

use std::time::Duration;

use jiff::Timestamp;

use crate::queue::until;

/// The expiration of a token, relative to a given time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Expiration {
    /// The token does not expire.
    Never,
    /// The token expires after this time.
    In(Duration),
    Expired,
}

/// The expiration of a token. `value` is the value of its field `expiration`. As in the API server, an invalid time
/// counts as expired.
pub(super) fn expiration(value: Option<&str>, now: Timestamp) -> Expiration {
    let Some(value) = value else { return Expiration::Never };
    let end: Result<Timestamp, _> = value.parse();
    end.ok().and_then(|end| until(end, now)).map_or(Expiration::Expired, Expiration::In)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_expires_at_its_time_and_an_invalid_time_is_in_the_past() {
        let now: Timestamp = "2026-01-01T12:00:00Z".parse().unwrap();
        assert_eq!(expiration(None, now), Expiration::Never);
        for value in ["2026-01-01T12:00:00Z", "2025-12-31T00:00:00Z", "tomorrow", ""] {
            assert_eq!(expiration(Some(value), now), Expiration::Expired, "{value:?}");
        }
        let Expiration::In(left) = expiration(Some("2026-01-01T13:02:00+01:00"), now) else { panic!() };
        assert_eq!(left.as_secs(), 120);
    }
}

//! Back-off between the attempts to write one status. Pure.

use std::time::Duration;

use coracle_backoff::Backoff;

const FIRST_BACKOFF: Duration = Duration::from_millis(200);
/// Maximum back-off after a temporary failure.
const MAX_BACKOFF: Duration = Duration::from_secs(10);
/// Maximum back-off after authorization has refused an attempt.
const FORBIDDEN_MAX_BACKOFF: Duration = Duration::from_secs(60);
/// Maximum attempts that authorization refuses. These attempts take 12 minutes.
const FORBIDDEN_MAX: u32 = 20;

/// The reason why an attempt failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Failure {
    /// The object is deleted, or replaced by a new object with the same name.
    Gone,
    /// The API server rejects the status.
    Invalid,
    /// The node is not permitted to write the status. The permission may be granted later, because a cluster can be set
    /// up in any order.
    Forbidden,
    /// A later attempt may succeed.
    Temporary,
}

/// The state of the attempts for one status.
#[derive(Debug)]
pub(super) struct Retries {
    backoff: Backoff,
    /// Attempts that authorization refused.
    forbidden: u32,
}

// === impl Failure ===

impl Failure {
    /// The failure that an HTTP status code means.
    pub(super) fn of_code(code: u16) -> Self {
        match code {
            404 | 409 => Self::Gone,
            400 | 422 => Self::Invalid,
            403 => Self::Forbidden,
            _ => Self::Temporary,
        }
    }
}

// === impl Retries ===

impl Default for Retries {
    fn default() -> Self {
        Self { backoff: Backoff::new(FIRST_BACKOFF, MAX_BACKOFF), forbidden: 0 }
    }
}

impl Retries {
    /// The delay before the next attempt. None if a further attempt is useless.
    pub(super) fn after(&mut self, failure: Failure) -> Option<Duration> {
        let max = match failure {
            Failure::Gone | Failure::Invalid => return None,
            Failure::Forbidden => {
                self.forbidden += 1;
                if self.forbidden >= FORBIDDEN_MAX {
                    return None;
                }
                FORBIDDEN_MAX_BACKOFF
            }
            Failure::Temporary => MAX_BACKOFF,
        };
        Some(self.backoff.next_delay_up_to(max))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_forbidden_status_is_tried_for_minutes_but_not_forever() {
        let mut retries = Retries::default();
        let delays: Vec<Duration> =
            std::iter::from_fn(|| retries.after(Failure::of_code(403))).take(1000).collect();
        assert_eq!(delays.len(), 19);
        assert!(delays.is_sorted() && delays[0] == FIRST_BACKOFF && delays[18] == FORBIDDEN_MAX_BACKOFF);
        let total: Duration = delays.iter().sum();
        assert!(total > Duration::from_secs(600) && total < Duration::from_secs(900), "{total:?}");
    }

    #[test]
    fn other_failures_are_final_or_temporary() {
        let mut retries = Retries::default();
        for code in [400, 404, 409, 422] {
            assert_eq!(retries.after(Failure::of_code(code)), None, "{code}");
        }
        let delays: Vec<_> = (0..100).filter_map(|_| retries.after(Failure::of_code(503))).collect();
        assert_eq!((delays.len(), delays[0], delays[99]), (100, FIRST_BACKOFF, MAX_BACKOFF));
    }
}

//! The plan of a candidate for a lease. It does no I/O; the caller passes the time.

use std::time::{Duration, Instant};

use k8s_openapi::api::coordination::v1::LeaseSpec;

/// A lease, and the time at which the candidate first observed this state. Clocks of servers differ, so the times in
/// the lease are not compared with the candidate's clock.
pub(super) struct Observation {
    pub(super) spec: LeaseSpec,
    since: Instant,
}

/// The action for the lease.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// The candidate becomes the holder of the lease.
    Take { transitions: i32 },
    /// The candidate stays the holder of the lease.
    Renew,
    /// Another process holds the lease.
    Wait,
}

// === impl Observation ===

impl Observation {
    /// The observation of a lease. An unchanged lease keeps the time of the previous observation.
    pub(super) fn of(spec: LeaseSpec, previous: Option<Self>, now: Instant) -> Self {
        let since = previous.filter(|previous| previous.spec == spec).map_or(now, |previous| previous.since);
        Self { spec, since }
    }
}

pub(super) fn plan(observation: Option<&Observation>, identity: &str, now: Instant) -> Action {
    let Some(Observation { spec, since }) = observation else { return Action::Take { transitions: 0 } };
    let holder = spec.holder_identity.as_deref().unwrap_or_default();
    if holder == identity {
        return Action::Renew;
    }
    let seconds = u64::try_from(spec.lease_duration_seconds.unwrap_or(0)).unwrap_or(0);
    if holder.is_empty() || now >= *since + Duration::from_secs(seconds) {
        return Action::Take { transitions: spec.lease_transitions.unwrap_or(0).saturating_add(1) };
    }
    Action::Wait
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lease(holder: &str, transitions: i32) -> LeaseSpec {
        LeaseSpec {
            holder_identity: Some(holder.to_owned()),
            lease_duration_seconds: Some(15),
            lease_transitions: Some(transitions),
            ..LeaseSpec::default()
        }
    }

    #[test]
    fn a_lease_is_taken_when_it_is_free_released_or_not_renewed() {
        let start = Instant::now();
        let after = |seconds| start + Duration::from_secs(seconds);
        let seen = |holder: &str| Observation::of(lease(holder, 3), None, start);
        assert_eq!(plan(None, "me", start), Action::Take { transitions: 0 });
        assert_eq!(plan(Some(&seen("")), "me", start), Action::Take { transitions: 4 });
        assert_eq!(plan(Some(&seen("me")), "me", after(60)), Action::Renew);
        assert_eq!(plan(Some(&seen("you")), "me", after(14)), Action::Wait);
        assert_eq!(plan(Some(&seen("you")), "me", after(15)), Action::Take { transitions: 4 });
    }

    #[test]
    fn a_renewed_lease_is_observed_anew() {
        let start = Instant::now();
        let later = start + Duration::from_secs(10);
        let first = Observation::of(lease("you", 3), None, start);
        let same = Observation::of(lease("you", 3), Some(first), later);
        assert_eq!(same.since, start);
        assert_eq!(Observation::of(lease("you", 4), Some(same), later).since, later);
    }
}

//! The decisions of authorization webhooks for expressions.
//!
//! An expression cannot wait for a webhook, because it runs on a thread that other tasks need. A check without a known
//! decision gets an error, and is recorded as missing. After the evaluation, the webhook decides the missing check. The
//! expressions are then evaluated again from the beginning, with this decision.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use coracle_cel::access::{AccessDecision, CheckAttributes};
use tokio::time::{Instant, timeout};

/// Maximum number of decisions for one subject: for the expressions of one policy, or of one webhook, about one
/// request.
const MAX_DECISIONS: usize = 32;
/// Maximum time of all decisions for one subject.
const MAX_TIME: Duration = Duration::from_secs(30);

/// The checks of one subject that need a webhook.
#[derive(Default)]
pub(super) struct RemoteChecks(Mutex<State>);

#[derive(Default)]
struct State {
    decided: HashMap<CheckAttributes, AccessDecision>,
    /// The first check of the last evaluation whose decision is missing.
    missing: Option<CheckAttributes>,
    /// Time of all decisions so far.
    waited: Duration,
}

// === impl RemoteChecks ===

impl RemoteChecks {
    /// The decision for a check, if a webhook has made it.
    pub(super) fn known(&self, check: &CheckAttributes) -> Option<AccessDecision> {
        self.lock().decided.get(check).cloned()
    }

    /// Records that the decision for a check is missing. Returns the decision for the running evaluation: an error.
    /// Only the first missing check of an evaluation is recorded: later checks may result from its error.
    pub(super) fn request(&self, check: &CheckAttributes) -> AccessDecision {
        let mut state = self.lock();
        if state.decided.len() >= MAX_DECISIONS {
            return failed("too many checks of this request need an authorization webhook");
        }
        if state.waited >= MAX_TIME {
            return failed("the authorization webhooks did not decide in time");
        }
        state.missing.get_or_insert_with(|| check.clone());
        failed("the authorization webhook has not decided yet")
    }

    /// Decides the missing check. Returns false if no check is missing.
    pub(super) async fn decide_missing<F>(&self, decide: impl FnOnce(CheckAttributes) -> F) -> bool
    where
        F: Future<Output = AccessDecision>,
    {
        let Some(check) = self.lock().missing.take() else { return false };
        let left = MAX_TIME.saturating_sub(self.lock().waited);
        let began = Instant::now();
        let decided = timeout(left, decide(check.clone())).await;
        let decision =
            decided.unwrap_or_else(|_elapsed| failed("the authorization webhooks did not decide in time"));
        let mut state = self.lock();
        state.waited += began.elapsed();
        state.decided.insert(check, decision);
        true
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn failed(error: &str) -> AccessDecision {
    AccessDecision { error: Some(error.to_owned()), ..AccessDecision::default() }
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};

    use super::*;

    fn check(index: usize) -> CheckAttributes {
        CheckAttributes { name: index.to_string(), ..CheckAttributes::default() }
    }

    fn allow(_check: CheckAttributes) -> impl Future<Output = AccessDecision> {
        ready(AccessDecision { allowed: true, ..AccessDecision::default() })
    }

    #[tokio::test]
    async fn the_number_of_decisions_is_limited() {
        let checks = RemoteChecks::default();
        for index in 0..MAX_DECISIONS {
            assert!(checks.request(&check(index)).error.is_some());
            // The first missing check is decided first.
            checks.request(&check(index + 1));
            assert!(checks.decide_missing(allow).await);
            assert!(checks.known(&check(index)).unwrap().allowed);
            assert_eq!(checks.known(&check(index + 1)), None);
        }
        let refused = checks.request(&check(MAX_DECISIONS));
        assert!(refused.error.unwrap().starts_with("too many"));
        assert!(!checks.decide_missing(allow).await);
    }

    #[tokio::test(start_paused = true)]
    async fn the_time_of_decisions_is_limited() {
        let checks = RemoteChecks::default();
        checks.request(&check(0));
        assert!(checks.decide_missing(|_check| pending()).await);
        assert!(checks.known(&check(0)).unwrap().error.is_some());
        assert!(checks.request(&check(1)).error.unwrap().contains("in time"));
        assert!(!checks.decide_missing(allow).await);
    }
}

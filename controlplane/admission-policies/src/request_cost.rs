//! The cost of all expressions of one request.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::BUDGET;

/// Maximum cost of all policies, bindings, parameters and match conditions of one request. Upstream limits only each
/// evaluation, to [`BUDGET`], which is about a second. So in upstream the time of a request grows with the number of
/// policies.
pub const REQUEST_BUDGET: u64 = 10 * BUDGET;

/// The cost of the expressions of one request until now.
#[derive(Debug, Default)]
pub struct RequestCost {
    spent: AtomicU64,
    /// The total cost at which the running [`attempt`](Self::attempt) ends; 0 if none is running.
    attempt_end: AtomicU64,
    /// Whether the attempt reached its limit.
    is_cut: AtomicBool,
    /// Whether the limit of the request has ended an evaluation.
    is_exhausted: AtomicBool,
}

// === impl RequestCost ===

impl RequestCost {
    /// The cost until now.
    pub fn spent(&self) -> u64 {
        self.spent.load(Ordering::Relaxed)
    }

    /// Whether [`REQUEST_BUDGET`] has ended an evaluation. Upstream has no such limit, so the failure policy `Ignore`
    /// does not cover it. Otherwise users could make requests that are too costly for the policies that restrict them.
    pub fn is_exhausted(&self) -> bool {
        self.is_exhausted.load(Ordering::Relaxed)
    }

    /// Adds the cost of an evaluation.
    pub fn add(&self, cost: u64) {
        self.spent.fetch_add(cost, Ordering::Relaxed);
    }

    /// Evaluates expressions with at most the cost `limit`. `None` if this cost is not enough. The spent cost counts in
    /// both cases.
    pub fn attempt<T>(&self, limit: u64, evaluate: impl FnOnce() -> T) -> Option<T> {
        self.is_cut.store(false, Ordering::Relaxed);
        self.attempt_end.store(self.spent().saturating_add(limit), Ordering::Relaxed);
        let result = evaluate();
        self.attempt_end.store(0, Ordering::Relaxed);
        (!self.is_cut.load(Ordering::Relaxed)).then_some(result)
    }

    pub(crate) fn left(&self) -> u64 {
        self.end().saturating_sub(self.spent())
    }

    /// Records that an evaluation ended at the limit of the attempt or of the request, and not at its own budget.
    pub(crate) fn run_out(&self) {
        let what = if self.end() < REQUEST_BUDGET { &self.is_cut } else { &self.is_exhausted };
        what.store(true, Ordering::Relaxed);
    }

    /// The total cost at which an evaluation ends.
    fn end(&self) -> u64 {
        match self.attempt_end.load(Ordering::Relaxed) {
            0 => REQUEST_BUDGET,
            end => end.min(REQUEST_BUDGET),
        }
    }
}

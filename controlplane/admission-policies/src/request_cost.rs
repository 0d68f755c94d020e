//! The cost of all expressions of one request.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::BUDGET;

/// Maximum cost of all policies, bindings, parameters and match conditions of one request. Upstream limits each
/// evaluation alone, to [`BUDGET`], which is about a second; then the number of policies multiplies the time.
pub const REQUEST_BUDGET: u64 = 10 * BUDGET;

/// The cost of the expressions of one request until now.
#[derive(Debug, Default)]
pub struct RequestCost(AtomicU64);

impl RequestCost {
    /// The cost until now.
    pub fn spent(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    pub(crate) fn left(&self) -> u64 {
        REQUEST_BUDGET.saturating_sub(self.spent())
    }

    /// Adds the cost of an evaluation.
    pub fn add(&self, cost: u64) {
        self.0.fetch_add(cost, Ordering::Relaxed);
    }
}

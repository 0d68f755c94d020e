//! The status of pod disruption budgets: how many of their pods may be evicted now. The API server spends what stands
//! there, and writes down what it spent; it is counted anew here when pods come, go and change.

pub(crate) mod plan;
pub(crate) mod run;

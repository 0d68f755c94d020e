//! The status of pod disruption budgets: the number of pods that may be evicted now.
//!
//! The API server decreases `disruptionsAllowed` at each eviction and records the pod in `disruptedPods`. This
//! controller recomputes both fields when a pod appears, changes or disappears.

mod controller;
pub(crate) mod plan;
pub(crate) mod run;

//! Admission policies and match conditions in CEL.
//!
//! Start reading at [`ValidatingPolicy`], [`MutatingPolicy`] and [`Conditions`]. Each of them is compiled once, and
//! evaluated for each request. An [`Input`] contains the variables of a request.
//!
//! | part | module | upstream (`apiserver/pkg/admission/plugin`) |
//! |---|---|---|
//! | variables and their types | `environment` | `cel/compile.go` |
//! | match conditions of policies and webhooks | `conditions` | `webhook/matchconditions` |
//! | validations, messages, audit annotations | `validating` | `policy/validating/validator.go` |
//! | apply configurations, JSON patches | `mutating` | `policy/mutating/patch` |
//! | warnings about types | `type_check` | `policy/validating/typechecking.go` |
//!
//! Invariants: no I/O, no clock, no panic on any input. Each evaluation has a cost limit.

mod conditions;
mod environment;
mod mutating;
mod request_cost;
mod type_check;
mod validating;

pub use conditions::{Conditions, MAX_CONDITIONS};
pub use environment::{Expressions, Input, ResultType, is_identifier};
pub use mutating::{MutatingPolicy, Patch};
pub use request_cost::{REQUEST_BUDGET, RequestCost};
pub use type_check::{ExpressionWarning, TypedKind, check_types};
pub use validating::{Denial, Outcome, ValidatingPolicy};

/// Maximum number of variables, validations, annotations or mutations of one policy.
pub const MAX_EXPRESSIONS: usize = 500;

/// Maximum cost of the expressions of one kind in one policy (`RuntimeCELCostBudget`).
const BUDGET: u64 = 10_000_000;

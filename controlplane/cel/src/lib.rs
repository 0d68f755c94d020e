//! The Common Expression Language (CEL) in Kubernetes' environment.
//!
//! The crate `cel` parses; this crate checks types, evaluates and counts the cost. `docs/decisions/cel.md` has the
//! reasons. Start at [`Program::compile`] and [`Program::evaluate`].
//!
//! | part | module | upstream |
//! |---|---|---|
//! | parsing into a compact tree | `parse` | `cel-go/parser` |
//! | types of variables and fields | [`types`] | `apiserver/pkg/cel/types.go` |
//! | static check | `check` | `cel-go/checker` |
//! | evaluation | `eval` | `cel-go/interpreter` |
//! | the cost and its limit | `cost_meter` | `cel-go/interpreter/runtimecost.go` |
//! | the estimated cost | `estimate` | `cel-go/checker/cost.go`, `apiserver/pkg/cel/library/cost.go` |
//! | values that expressions share | [`Session`] | `apiserver/pkg/cel/lazy`, `admission/plugin/cel/composition.go` |
//! | permissions | [`access`] | `apiserver/pkg/cel/library/authz.go` |
//! | functions | `functions` | `apiserver/pkg/cel/library`, `cel-go/ext` |
//! | names of fields | [`escape`] | `apiserver/pkg/cel/escaping.go` |
//! | regular expressions of Go | [`pattern`] | `regexp/syntax` |
//! | URLs of Go | [`go_url`] | `net/url` |
//! | formats of texts | [`text_format`] | `kube-openapi/pkg/validation/strfmt` |
//!
//! Invariants: no I/O, no clock, no panic on any input. The cost of an evaluation bounds its time and its memory.

pub mod access;
mod check;
mod cost_meter;
pub mod duration;
mod environment;
pub mod escape;
mod estimate;
mod eval;
mod eval_error;
mod evaluate;
mod functions;
pub mod go_url;
mod literal;
mod operators;
mod parse;
pub mod pattern;
mod program;
mod session;
pub mod text_format;
pub mod types;
mod value;

pub use environment::{CompileError, Environment};
pub use estimate::{Bounds, Limits};
pub use eval_error::EvalError;
pub use evaluate::PER_CALL_LIMIT;
pub use program::{MAX_SHARED_DEPTH, Program};
pub use session::{Session, Shared};
pub use types::{Field, ObjectType, Type, UnorderedList};
pub use value::{Key, OffsetTime, Structure, Value};

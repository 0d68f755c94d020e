//! The result of an evaluation.

use std::fmt;

use crate::value::Value;

/// An evaluation that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EvalError {
    /// The cost limit is reached.
    CostLimit,
    /// The operation does not support these values.
    NoOverload,
    /// Any other error, such as `no such key: a`.
    Failed(String),
}

impl fmt::Display for EvalError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            EvalError::CostLimit => f.write_str("operation cancelled: actual cost limit exceeded"),
            EvalError::NoOverload => f.write_str("no such overload"),
            EvalError::Failed(text) => f.write_str(text),
        }
    }
}

impl std::error::Error for EvalError {}

pub(crate) type Evaluated<'a> = Result<Value<'a>, EvalError>;

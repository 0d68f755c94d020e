//! The evaluation of compiled expressions, alone or in a session.

use crate::eval::Evaluator;
use crate::eval_error::{EvalError, Evaluated};
use crate::program::Program;
use crate::session::Session;
use crate::value::Value;

/// Maximum cost of one evaluation (`PerCallLimit` of `apiserver/pkg/apis/cel`).
pub const PER_CALL_LIMIT: u64 = 1_000_000;

impl Program {
    /// Evaluates the expression. Returns the result and the cost, which exceeds [`PER_CALL_LIMIT`] by at most one step.
    pub fn evaluate<'a>(&'a self, variables: &[(&'a str, Value<'a>)]) -> (Result<Value<'a>, EvalError>, u64) {
        self.evaluate_with(variables, None, PER_CALL_LIMIT)
    }

    /// Evaluates the expression. Returns the result and the cost, which exceeds the lower of the limit and
    /// [`PER_CALL_LIMIT`] by at most one step.
    pub fn evaluate_within<'a>(
        &'a self,
        variables: &[(&'a str, Value<'a>)],
        limit: u64,
    ) -> (Evaluated<'a>, u64) {
        self.evaluate_with(variables, None, limit.min(PER_CALL_LIMIT))
    }

    pub(crate) fn evaluate_with<'a>(
        &'a self,
        variables: &[(&'a str, Value<'a>)],
        session: Option<&Session<'a>>,
        limit: u64,
    ) -> (Result<Value<'a>, EvalError>, u64) {
        let mut evaluator = Evaluator::new(variables, session, limit);
        let result = evaluator.eval(self.expr());
        (result, evaluator.cost())
    }
}

impl<'a> Session<'a> {
    /// Evaluates an expression. Returns the result and the cost, which includes shared values used for the first time.
    /// The cost exceeds the lower of the limit and [`PER_CALL_LIMIT`] by at most one step.
    pub fn evaluate(&self, program: &'a Program, limit: u64) -> (Evaluated<'a>, u64) {
        program.evaluate_with(&self.variables, Some(self), limit.min(PER_CALL_LIMIT))
    }
}

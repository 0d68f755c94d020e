//! Compiled expressions.

use std::collections::BTreeMap;
use std::fmt;

use crate::check;
use crate::eval::{EvalError, Evaluator, PER_CALL_LIMIT};
use crate::parse::{self, Expr, Kind};
use crate::types::Type;
use crate::value::Value;

/// The variables that expressions may use.
#[derive(Clone, Debug, Default)]
pub struct Environment {
    variables: BTreeMap<Box<str>, Type>,
}

/// A compiled expression.
#[derive(Clone, Debug)]
pub struct Program {
    expr: Expr,
    kind: Type,
    variables: Vec<Box<str>>,
}

/// An expression that cannot be compiled, in the words of cel-go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CompileError(pub(crate) String);

// === impl Environment ===

impl Environment {
    /// Declares a variable.
    #[must_use]
    pub fn variable(mut self, name: &str, kind: Type) -> Environment {
        self.variables.insert(name.into(), kind);
        self
    }

    pub(crate) fn find(&self, name: &str) -> Option<&Type> {
        self.variables.get(name)
    }
}

// === impl Program ===

impl Program {
    /// Parses an expression and checks its types.
    ///
    /// # Errors
    /// The syntax is wrong, a name is unknown, or types do not fit.
    pub fn compile(source: &str, environment: &Environment) -> Result<Program, CompileError> {
        let expr = parse::parse(source).map_err(CompileError)?;
        let kind = check::check(&expr, environment, source)?;
        let mut variables = Vec::new();
        references(&expr, &mut variables);
        Ok(Program { expr, kind, variables })
    }

    /// The type of the result.
    pub fn kind(&self) -> &Type {
        &self.kind
    }

    /// Whether the expression mentions this variable.
    pub fn uses(&self, variable: &str) -> bool {
        self.variables.iter().any(|name| &**name == variable)
    }

    /// Evaluates the expression. Returns the result and the cost, which is at most [`PER_CALL_LIMIT`] and one step.
    pub fn evaluate<'a>(&'a self, variables: &[(&'a str, Value<'a>)]) -> (Result<Value<'a>, EvalError>, u64) {
        let mut evaluator = Evaluator::new(variables, PER_CALL_LIMIT);
        let result = evaluator.eval(&self.expr);
        (result, evaluator.cost())
    }
}

impl fmt::Display for CompileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for CompileError {}

/// Collects the names of variables, those that loops declare included.
fn references(expr: &Expr, found: &mut Vec<Box<str>>) {
    let mut all = |list: &[&Expr]| list.iter().for_each(|inner| references(inner, found));
    match &expr.kind {
        Kind::Literal(_) => {}
        Kind::Ident(name) => {
            if !found.contains(name) {
                found.push(name.clone());
            }
        }
        Kind::Select { operand, .. } => all(&[operand]),
        Kind::Call { target, args, .. } => {
            all(&target.iter().map(|target| &**target).chain(args).collect::<Vec<_>>());
        }
        Kind::List(items) => all(&items.iter().map(|(item, _)| item).collect::<Vec<_>>()),
        Kind::Map(entries) => {
            all(&entries.iter().flat_map(|(key, value, _)| [key, value]).collect::<Vec<_>>())
        }
        Kind::Comprehension(inner) => {
            all(&[&inner.range, &inner.init, &inner.condition, &inner.step, &inner.result]);
        }
        Kind::Bind { value, body, .. } => all(&[value, body]),
    }
}

#[cfg(test)]
mod tests;

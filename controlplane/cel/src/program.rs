//! Compiled expressions.

use std::collections::BTreeMap;
use std::fmt;

use crate::check;
use crate::eval::{EvalError, Evaluator, PER_CALL_LIMIT};
use crate::parse::{self, Expr, Kind};
use crate::session::{MAX_SHARED_DEPTH, SHARED, Session};
use crate::types::Type;
use crate::value::Value;

/// The variables that expressions may use.
#[derive(Clone, Debug, Default)]
pub struct Environment {
    variables: BTreeMap<Box<str>, Type>,
    shared: BTreeMap<Box<str>, (Type, usize)>,
    structures: bool,
}

/// A compiled expression.
#[derive(Clone, Debug)]
pub struct Program {
    expr: Expr,
    kind: Type,
    variables: Vec<Box<str>>,
    depth: usize,
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

    /// Declares the shared value `variables.name` with the type and the depth of its expression.
    pub fn shared(&mut self, name: &str, program: &Program) {
        self.shared.insert(name.into(), (program.kind.clone().limited(), program.depth));
    }

    /// Allows expressions to make objects: `Object{…}` and `JSONPatch{…}`.
    #[must_use]
    pub fn with_structures(mut self) -> Environment {
        self.structures = true;
        self
    }

    pub(crate) fn makes_structures(&self) -> bool {
        self.structures
    }

    /// The type of a shared value.
    pub(crate) fn find_shared(&self, name: &str) -> Option<&Type> {
        self.shared.get(name).map(|(kind, _)| kind)
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
        let depth = depth(&expr, environment);
        if depth > MAX_SHARED_DEPTH {
            let message = format!("variables are nested more than {MAX_SHARED_DEPTH} levels deep");
            return Err(CompileError(message));
        }
        Ok(Program { expr, kind, variables, depth })
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
        self.evaluate_with(variables, None, PER_CALL_LIMIT)
    }

    pub(crate) fn evaluate_with<'a>(
        &'a self,
        variables: &[(&'a str, Value<'a>)],
        session: Option<&Session<'a>>,
        limit: u64,
    ) -> (Result<Value<'a>, EvalError>, u64) {
        let mut evaluator = Evaluator::new(variables, session, limit);
        let result = evaluator.eval(&self.expr);
        (result, evaluator.cost())
    }

    pub(crate) fn expr(&self) -> &Expr {
        &self.expr
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
    if let Kind::Ident(name) = &expr.kind
        && !found.contains(name)
    {
        found.push(name.clone());
    }
    children(expr, &mut |inner| references(inner, found));
}

/// The depth of an expression, with that of the shared values that it uses.
fn depth(expr: &Expr, environment: &Environment) -> usize {
    let own = match &expr.kind {
        Kind::Select { operand, field, .. } if matches!(&operand.kind, Kind::Ident(name) if &**name == SHARED) => {
            environment.shared.get(field).map_or(0, |(_, depth)| *depth)
        }
        _ => 0,
    };
    let mut below = 0;
    children(expr, &mut |inner| below = below.max(depth(inner, environment)));
    1 + below.max(own)
}

fn children<'a>(expr: &'a Expr, visit: &mut dyn FnMut(&'a Expr)) {
    match &expr.kind {
        Kind::Literal(_) | Kind::Ident(_) => {}
        Kind::Select { operand, .. } => visit(operand),
        Kind::Call { target, args, .. } => {
            target.iter().for_each(|target| visit(target));
            args.iter().for_each(visit);
        }
        Kind::List(items) => items.iter().for_each(|(item, _)| visit(item)),
        Kind::Map(entries) => {
            for (key, value, _) in entries {
                visit(key);
                visit(value);
            }
        }
        Kind::Structure { fields, .. } => fields.iter().for_each(|(_, value, _)| visit(value)),
        Kind::Comprehension(inner) => {
            [&inner.range, &inner.init, &inner.condition, &inner.step, &inner.result]
                .into_iter()
                .for_each(visit);
        }
        Kind::Bind { value, body, .. } => {
            visit(value);
            visit(body);
        }
    }
}

#[cfg(test)]
mod tests;

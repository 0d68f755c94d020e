//! Compiled expressions.

use crate::check;
use crate::environment::{CompileError, Environment, SHARED};
use crate::estimate::{self, Limits};
use crate::parse::{self, Expr, Kind};
use crate::types::Type;

/// Maximum depth of an expression with the shared values that it uses.
pub const MAX_SHARED_DEPTH: usize = 256;

/// A compiled expression.
#[derive(Clone, Debug)]
pub struct Program {
    expr: Expr,
    kind: Type,
    variables: Vec<Box<str>>,
    depth: usize,
}

// === impl Program ===

impl Environment {
    /// Declares the shared value `variables.name` with the type and the depth of its expression.
    pub fn shared(&mut self, name: &str, program: &Program) {
        self.add_shared(name, program.kind.clone().limited(), program.depth);
    }
}

impl Program {
    /// Parses an expression and checks its types.
    ///
    /// # Errors
    /// The syntax is wrong, a name is unknown, or types do not fit.
    pub fn compile(source: &str, environment: &Environment) -> Result<Program, CompileError> {
        let expr = parse::parse(source).map_err(CompileError)?;
        let kind = check::check(&expr, environment, source)?;
        Program::new(expr, kind, environment)
    }

    /// Compiles like [`Program::compile`], and also returns the estimated maximum cost for values within the limits.
    /// The cost is `None` if it is unknown.
    ///
    /// # Errors
    /// The errors of [`Program::compile`].
    pub fn compile_with_cost(
        source: &str,
        environment: &Environment,
        limits: Limits<'_>,
    ) -> Result<(Program, Option<u64>), CompileError> {
        let expr = parse::parse(source).map_err(CompileError)?;
        let types = check::check_parts(&expr, environment, source)?;
        let cost = estimate::estimate(&expr, &types, limits);
        let kind = types.of(&expr).clone();
        Ok((Program::new(expr, kind, environment)?, cost))
    }

    fn new(expr: Expr, kind: Type, environment: &Environment) -> Result<Program, CompileError> {
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

    pub(crate) fn expr(&self) -> &Expr {
        &self.expr
    }
}

/// Collects the names of variables, including those that loops declare.
fn references(expr: &Expr, found: &mut Vec<Box<str>>) {
    if let Kind::Ident(name) = &expr.kind
        && !found.contains(name)
    {
        found.push(name.clone());
    }
    children(expr, &mut |inner| references(inner, found));
}

/// The depth of an expression, including the depth of the shared values that it uses.
fn depth(expr: &Expr, environment: &Environment) -> usize {
    let own = match &expr.kind {
        Kind::Select { operand, field, .. } if matches!(&operand.kind, Kind::Ident(name) if &**name == SHARED) => {
            environment.shared_depth(field)
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
        Kind::List(items) => items.iter().for_each(|item| visit(&item.expr)),
        Kind::Map(entries) => {
            for parse::MapEntry { key, value, .. } in entries {
                visit(key);
                visit(value);
            }
        }
        Kind::Structure { fields, .. } => fields.iter().for_each(|field| visit(&field.value)),
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

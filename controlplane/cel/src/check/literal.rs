//! Literals that can only fail at evaluation. Source: `cel-go/cel/validator.go`.

use super::{Checker, unwrap};
use crate::environment::CompileError;
use crate::functions::parse_timestamp;
use crate::parse::{Expr, Kind, Literal};
use crate::types::Type;
use crate::{duration, pattern};

impl Checker<'_> {
    /// Checks the literal argument of `duration`, `timestamp` and `matches`.
    pub(super) fn literal_argument(
        &self,
        name: &str,
        target: Option<&Expr>,
        args: &[Expr],
    ) -> Result<(), CompileError> {
        let Some(arg) = args.first() else { return Ok(()) };
        let Kind::Literal(Literal::String(text)) = &arg.kind else { return Ok(()) };
        let is_valid = match (name, target) {
            ("duration", None) => duration::parse(text).is_some(),
            ("timestamp", None) => parse_timestamp(text).is_some(),
            ("matches", Some(_)) => pattern::is_valid(text),
            _ => true,
        };
        if is_valid { Ok(()) } else { Err(self.error(arg, &format!("invalid {name} argument"))) }
    }

    /// Checks that an element has the type of those before it. Arguments of `format` may differ. `dyn` fits any type.
    pub(super) fn same_type(
        &self,
        expr: &Expr,
        before: Option<&Type>,
        kind: &Type,
    ) -> Result<(), CompileError> {
        match before {
            Some(before) if !self.allows_mixed && !before.fits(kind) && !kind.fits(before) => {
                Err(self.error(expr, &format!("expected type '{before}' but found '{kind}'")))
            }
            _ => Ok(()),
        }
    }

    /// The type of an element, which is the inner type of an optional one.
    pub(super) fn element(kind: Type, optional: bool) -> Type {
        if optional { unwrap(kind) } else { kind }
    }
}

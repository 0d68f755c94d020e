//! Literals that can only fail at evaluation. Source: `cel-go/cel/validator.go`.

use super::{Checker, unwrap};
use crate::environment::CompileError;
use crate::functions::{TIMESTAMPS, parse_timestamp};
use crate::parse::{Expr, Kind, Literal};
use crate::types::Type;
use crate::{duration, pattern};

impl Checker<'_> {
    /// Checks the literal argument of `duration` and `timestamp`, and regular expressions.
    pub(super) fn literal_argument(
        &self,
        name: &str,
        target: Option<&Expr>,
        args: &[Expr],
    ) -> Result<(), CompileError> {
        let Some(arg) = args.first() else { return Ok(()) };
        let Kind::Literal(literal) = &arg.kind else { return Ok(()) };
        let is_valid = match (name, target, literal) {
            ("duration", None, Literal::String(text)) => duration::parse(text).is_some(),
            ("timestamp", None, Literal::String(text)) => parse_timestamp(text).is_some(),
            ("timestamp", None, Literal::Int(seconds)) => TIMESTAMPS.contains(seconds),
            ("matches" | "find" | "findAll", Some(_), Literal::String(text)) => pattern::is_valid(text),
            _ => true,
        };
        if is_valid { Ok(()) } else { Err(self.error(arg, &format!("invalid {name} argument"))) }
    }

    /// Checks the clauses of a formatted text and the number of its arguments, if both are literals.
    pub(super) fn format_call(
        &self,
        expr: &Expr,
        target: Option<&Expr>,
        args: &[Expr],
    ) -> Result<(), CompileError> {
        let Some(Kind::Literal(Literal::String(text))) = target.map(|target| &target.kind) else {
            return Ok(());
        };
        let [Expr { kind: Kind::List(items), .. }] = args else { return Ok(()) };
        let problem = match clauses(text, items.len()) {
            Err(problem) => problem,
            Ok(found) if found < items.len() => {
                let given = items.len();
                format!("too many arguments supplied to string.format (expected {found}, got {given})")
            }
            Ok(_) => return Ok(()),
        };
        Err(self.error(expr, &problem))
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

/// Number of clauses of a formatted text. An error names the first clause that is invalid or has no argument.
fn clauses(text: &str, arguments: usize) -> Result<usize, String> {
    let mut found = 0;
    let mut rest = text;
    while let Some((_, clause)) = rest.split_once('%') {
        if let Some(after) = clause.strip_prefix('%') {
            rest = after;
            continue;
        }
        if found >= arguments {
            return Err(format!("index {found} out of range"));
        }
        let letter = match clause.strip_prefix('.') {
            Some(precision) => precision.trim_start_matches(|digit: char| digit.is_ascii_digit()),
            None => clause,
        };
        let mut characters = letter.chars();
        match characters.next() {
            Some('s' | 'd' | 'f' | 'e' | 'b' | 'x' | 'X' | 'o') => {}
            Some(other) => {
                return Err(format!(
                    "could not parse formatting clause: unrecognized formatting clause \"{other}\""
                ));
            }
            None => return Err("unexpected end of string".to_owned()),
        }
        found += 1;
        rest = characters.as_str();
    }
    Ok(found)
}

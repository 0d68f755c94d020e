//! Finds literals whose evaluation always fails. Source: `cel-go/cel/validator.go` and `ext/formatting.go`.

use crate::functions::{TIMESTAMPS, parse_timestamp};
use crate::parse::{Expr, Kind, Literal};
use crate::{duration, pattern};

/// The invalid literal argument of `duration` or `timestamp`, or the invalid regular expression, with an error.
pub(crate) fn invalid_argument<'e>(
    name: &str,
    target: Option<&Expr>,
    args: &'e [Expr],
) -> Option<(&'e Expr, String)> {
    let arg = args.first()?;
    let Kind::Literal(literal) = &arg.kind else { return None };
    let is_valid = match (name, target, literal) {
        ("duration", None, Literal::String(text)) => duration::parse(text).is_some(),
        ("timestamp", None, Literal::String(text)) => parse_timestamp(text).is_some(),
        ("timestamp", None, Literal::Int(seconds)) => TIMESTAMPS.contains(seconds),
        ("matches" | "find" | "findAll", Some(_), Literal::String(text)) => pattern::is_valid(text),
        _ => true,
    };
    (!is_valid).then(|| (arg, format!("invalid {name} argument")))
}

/// The error of a call of `format` whose text and list of arguments are literals: an invalid clause, or a wrong number
/// of arguments.
pub(crate) fn format_error(target: Option<&Expr>, args: &[Expr]) -> Option<String> {
    let Kind::Literal(Literal::String(text)) = &target?.kind else { return None };
    let [Expr { kind: Kind::List(items), .. }] = args else { return None };
    let given = items.len();
    match clauses(text, given) {
        Err(problem) => Some(problem),
        Ok(found) if found < given => {
            Some(format!("too many arguments supplied to string.format (expected {found}, got {given})"))
        }
        Ok(_) => None,
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

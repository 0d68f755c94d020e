//! Checks of numbers.

use serde_json::{Number, Value};

use super::{Checker, Outcome};
use crate::schema::Schema;

/// Checks range, limits and divisor.
pub(super) fn check(
    checker: &mut Checker<'_>,
    number: &Number,
    schema: &Schema,
    path: &str,
    outcome: &mut Outcome,
) {
    let value = Value::Number(number.clone());
    if let Some(detail) = out_of_range(number, schema, path) {
        checker.report(outcome, "", |violations, place| violations.invalid(place, &"".into(), &detail));
    }
    let Some(checks) = &schema.checks else { return };
    let mut fail = |detail: String| {
        checker.report(outcome, path, |violations, place| violations.invalid(place, &value, &detail));
    };
    if let Some(divisor) = &checks.multiple_of {
        if divisor.as_f64().is_none_or(|divisor| divisor <= 0.0) {
            fail(format!("factor MultipleOf declared for {path} must be positive: {divisor}"));
        } else if !is_multiple(number, divisor) {
            fail(format!("{path} in body should be a multiple of {divisor}"));
        }
    }
    if let Some(max) = &checks.maximum {
        match compare(number, max) {
            std::cmp::Ordering::Greater if !checks.exclusive_maximum => {
                fail(format!("{path} in body should be less than or equal to {max}"));
            }
            std::cmp::Ordering::Greater | std::cmp::Ordering::Equal if checks.exclusive_maximum => {
                fail(format!("{path} in body should be less than {max}"));
            }
            _ => {}
        }
    }
    if let Some(min) = &checks.minimum {
        match compare(number, min) {
            std::cmp::Ordering::Less if !checks.exclusive_minimum => {
                fail(format!("{path} in body should be greater than or equal to {min}"));
            }
            std::cmp::Ordering::Less | std::cmp::Ordering::Equal if checks.exclusive_minimum => {
                fail(format!("{path} in body should be greater than {min}"));
            }
            _ => {}
        }
    }
}

/// Whether two values are equal. `1` and `1.0` are equal.
pub(super) fn equal(left: &Value, right: &Value) -> bool {
    match (left, right) {
        (Value::Number(left), Value::Number(right)) => compare(left, right).is_eq(),
        _ => left == right,
    }
}

fn compare(left: &Number, right: &Number) -> std::cmp::Ordering {
    let integers = left.as_i128().zip(right.as_i128());
    match integers {
        Some((left, right)) => left.cmp(&right),
        None => as_f64(left).total_cmp(&as_f64(right)),
    }
}

fn as_f64(number: &Number) -> f64 {
    number.as_f64().unwrap_or(f64::NAN)
}

fn is_multiple(number: &Number, divisor: &Number) -> bool {
    match number.as_i128().zip(divisor.as_i128()) {
        Some((number, divisor)) => divisor != 0 && number % divisor == 0,
        None => {
            let quotient = as_f64(number) / as_f64(divisor);
            quotient.fract() == 0.0
        }
    }
}

fn out_of_range(number: &Number, schema: &Schema, path: &str) -> Option<String> {
    let fits = match (&*schema.kind, &*schema.format) {
        ("integer", "int32") => {
            number.as_i64().is_some_and(|value| i32::try_from(value).is_ok()) || number.is_f64()
        }
        ("integer", _) => number.is_i64() || number.is_f64(),
        ("number", "float") => as_f64(number).abs() <= f64::from(f32::MAX),
        _ => true,
    };
    let kind = if schema.format.is_empty() { "" } else { &*schema.format };
    (!fits).then(|| format!("Checked value must be of type {} with format {kind} in {path}", schema.kind))
}

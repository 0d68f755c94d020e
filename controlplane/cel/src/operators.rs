//! Operators.

use std::sync::Arc;

use crate::cost_meter::CostMeter;
use crate::eval_error::{EvalError, Evaluated};
use crate::value::{Key, OffsetTime, Value, union};

/// Applies an operator. `None` if the name is not an operator.
pub(crate) fn apply<'a>(meter: &mut CostMeter, name: &str, args: &[Value<'a>]) -> Option<Evaluated<'a>> {
    Some(match (name, args) {
        ("_==_", [left, right]) => equals(meter, left, right).map(Value::Bool),
        ("_!=_", [left, right]) => equals(meter, left, right).map(|equal| Value::Bool(!equal)),
        ("_<_", [left, right]) => compare(meter, left, right, std::cmp::Ordering::is_lt),
        ("_<=_", [left, right]) => compare(meter, left, right, std::cmp::Ordering::is_le),
        ("_>_", [left, right]) => compare(meter, left, right, std::cmp::Ordering::is_gt),
        ("_>=_", [left, right]) => compare(meter, left, right, std::cmp::Ordering::is_ge),
        ("@in", [left, right]) => contains(meter, left, right),
        ("_[_]", [operand, index]) => {
            meter.charge(1 + index.cost_size() / 10).and_then(|()| meter.copied(at(operand, index)?))
        }
        ("!_", [Value::Bool(value)]) => meter.charge(1).map(|()| Value::Bool(!value)),
        ("-_", [value]) => meter.charge(1).and_then(|()| negate(value)),
        ("_+_", [left, right]) => add(meter, left, right),
        ("_-_" | "_*_" | "_/_" | "_%_", [left, right]) => {
            meter.charge(1).and_then(|()| arithmetic(name, left, right))
        }
        ("!_" | "_==_" | "_!=_" | "_<_" | "_<=_" | "_>_" | "_>=_", _) => Err(EvalError::NoOverload),
        _ => return None,
    })
}

/// Equality. Its cost grows with the compared sizes and is at least 1.
pub(crate) fn equals<'a>(
    meter: &mut CostMeter,
    left: &Value<'a>,
    right: &Value<'a>,
) -> Result<bool, EvalError> {
    let budget = meter.left();
    let mut left_over = budget;
    let equal = left.equals(right, &mut left_over);
    match equal {
        Some(equal) => meter.charge((budget - left_over).max(1)).map(|()| equal),
        None => meter.charge(budget.saturating_add(1)).and(Err(EvalError::CostLimit)),
    }
}

fn compare<'a>(
    meter: &mut CostMeter,
    left: &Value<'a>,
    right: &Value<'a>,
    test: fn(std::cmp::Ordering) -> bool,
) -> Evaluated<'a> {
    meter.charge(1 + left.cost_size().min(right.cost_size()) / 10)?;
    match (left, right) {
        (Value::Double(left), _) if left.is_nan() => Ok(Value::Bool(false)),
        (_, Value::Double(right)) if right.is_nan() => Ok(Value::Bool(false)),
        _ => left.order(right).map(|order| Value::Bool(test(order))).ok_or(EvalError::NoOverload),
    }
}

fn contains<'a>(meter: &mut CostMeter, item: &Value<'a>, collection: &Value<'a>) -> Evaluated<'a> {
    meter.charge(1 + item.cost_size() / 10)?;
    if collection.is_map() {
        let found = collection.get(item);
        meter.charge(found.as_ref().map_or(0, Value::copy_cost))?;
        return Ok(Value::Bool(found.is_some()));
    }
    if !matches!(collection, Value::List(_) | Value::JsonList(..)) {
        return Err(EvalError::NoOverload);
    }
    let mut index = 0;
    while let Some(element) = collection.at(index) {
        meter.charge(element.copy_cost())?;
        if equals(meter, &element, item)? {
            return Ok(Value::Bool(true));
        }
        index += 1;
    }
    Ok(Value::Bool(false))
}

fn at<'a>(operand: &Value<'a>, index: &Value<'a>) -> Evaluated<'a> {
    if let Value::Optional(inner) = operand {
        return match inner {
            None => Ok(Value::Optional(None)),
            Some(inner) => Ok(Value::optional(at(inner, index).ok())),
        };
    }
    if operand.is_map() {
        return operand.get(index).ok_or_else(|| match Key::of(index) {
            Some(key) => EvalError::Failed(format!("no such key: {key}")),
            None => EvalError::NoOverload,
        });
    }
    if !matches!(operand, Value::List(_) | Value::JsonList(..)) {
        return Err(EvalError::NoOverload);
    }
    let Some(Key::Int(position)) = Key::of(index) else { return Err(EvalError::NoOverload) };
    let found = usize::try_from(position).ok().and_then(|position| operand.at(position));
    found.ok_or_else(|| EvalError::Failed(format!("index out of bounds: {position}")))
}

fn negate<'a>(value: &Value<'a>) -> Evaluated<'a> {
    match value {
        Value::Int(number) => number.checked_neg().map(Value::Int).ok_or_else(|| overflow("integer")),
        Value::Double(number) => Ok(Value::Double(-number)),
        _ => Err(EvalError::NoOverload),
    }
}

fn overflow(kind: &str) -> EvalError {
    EvalError::Failed(format!("{kind} overflow"))
}

fn add<'a>(meter: &mut CostMeter, left: &Value<'a>, right: &Value<'a>) -> Evaluated<'a> {
    match (left, right) {
        (Value::String(first), Value::String(second)) => {
            meter.charge((left.cost_size() + right.cost_size()).div_ceil(10).max(1))?;
            Ok(Value::text(format!("{first}{second}")))
        }
        (Value::Bytes(first), Value::Bytes(second)) => {
            meter.charge((left.cost_size() + right.cost_size()).div_ceil(10).max(1))?;
            Ok(Value::Bytes(first.iter().chain(second.iter()).copied().collect()))
        }
        (Value::List(_) | Value::JsonList(..), Value::List(_) | Value::JsonList(..)) => {
            // `items` charges for each element, because the elements are copied. cel-go links the lists, and charges 1.
            meter.charge(u64::from(left.is_zero() && right.is_zero()))?;
            let (mut items, added) = (meter.items(left)?, meter.items(right)?);
            if let Some(of) = left.unordered() {
                let costs = items.iter().chain(&added).map(|item| item.identity_cost(of));
                meter.charge(costs.fold(0, u64::saturating_add))?;
                return Ok(Value::list(union(items, added, of)));
            }
            items.extend(added);
            Ok(Value::List(Arc::new(items)))
        }
        _ => {
            meter.charge(1)?;
            arithmetic("_+_", left, right)
        }
    }
}

fn arithmetic<'a>(name: &str, left: &Value<'a>, right: &Value<'a>) -> Evaluated<'a> {
    match (left, right) {
        (Value::Int(left), Value::Int(right)) => int(name, *left, *right),
        (Value::Uint(left), Value::Uint(right)) => uint(name, *left, *right),
        (Value::Double(left), Value::Double(right)) => match name {
            "_+_" => Ok(Value::Double(left + right)),
            "_-_" => Ok(Value::Double(left - right)),
            "_*_" => Ok(Value::Double(left * right)),
            "_/_" => Ok(Value::Double(left / right)),
            _ => Err(EvalError::NoOverload),
        },
        _ => time(name, left, right),
    }
}

/// The result of an operator on two integers of one type. `None` if the result overflows.
macro_rules! integer {
    ($name:expr, $left:expr, $right:expr) => {
        match $name {
            "_+_" => $left.checked_add($right),
            "_-_" => $left.checked_sub($right),
            "_*_" => $left.checked_mul($right),
            "_/_" if $right == 0 => return Err(EvalError::Failed("division by zero".to_owned())),
            "_%_" if $right == 0 => return Err(EvalError::Failed("modulus by zero".to_owned())),
            "_/_" => $left.checked_div($right),
            _ => $left.checked_rem($right),
        }
    };
}

fn int<'a>(name: &str, left: i64, right: i64) -> Evaluated<'a> {
    integer!(name, left, right).map(Value::Int).ok_or_else(|| overflow("integer"))
}

fn uint<'a>(name: &str, left: u64, right: u64) -> Evaluated<'a> {
    integer!(name, left, right).map(Value::Uint).ok_or_else(|| overflow("unsigned integer"))
}

fn time<'a>(name: &str, left: &Value<'a>, right: &Value<'a>) -> Evaluated<'a> {
    let shift = |time: &OffsetTime, nanoseconds: Option<i64>| {
        let by = nanoseconds.map(jiff::SignedDuration::from_nanos);
        by.and_then(|by| time.at().checked_add(by).ok())
            .map(|at| Value::Timestamp(time.moved(at)))
            .ok_or_else(|| overflow("timestamp"))
    };
    match (name, left, right) {
        ("_+_", Value::Timestamp(at), Value::Duration(by))
        | ("_+_", Value::Duration(by), Value::Timestamp(at)) => shift(at, Some(*by)),
        ("_-_", Value::Timestamp(at), Value::Duration(by)) => shift(at, by.checked_neg()),
        ("_-_", Value::Timestamp(left), Value::Timestamp(right)) => {
            let difference = left.at().as_nanosecond() - right.at().as_nanosecond();
            i64::try_from(difference).map(Value::Duration).map_err(|_error| overflow("duration"))
        }
        ("_+_", Value::Duration(left), Value::Duration(right)) => {
            left.checked_add(*right).map(Value::Duration).ok_or_else(|| overflow("duration"))
        }
        ("_-_", Value::Duration(left), Value::Duration(right)) => {
            left.checked_sub(*right).map(Value::Duration).ok_or_else(|| overflow("duration"))
        }
        _ => Err(EvalError::NoOverload),
    }
}

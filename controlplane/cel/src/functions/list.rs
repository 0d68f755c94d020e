//! Functions of lists and sets.

use std::cmp::Ordering;

use super::failed;
use crate::cost_meter::CostMeter;
use crate::eval_error::{EvalError, Evaluated};
use crate::operators::{apply, equals};
use crate::types::Type;
use crate::value::Value;

/// Maximum length of `lists.range`.
const MAX_RANGE: i64 = 100_000;

pub(super) fn call<'a>(
    meter: &mut CostMeter,
    name: &str,
    args: &[Value<'a>],
    _member: bool,
) -> Option<Evaluated<'a>> {
    if let ("lists.range", [Value::Int(count)]) = (name, args) {
        if *count > MAX_RANGE {
            return Some(failed(format!("range is longer than {MAX_RANGE}")));
        }
        let cost = u64::try_from(*count).unwrap_or(0);
        return Some(meter.charge(cost + 1).map(|()| Value::list((0..*count).map(Value::Int).collect())));
    }
    if !matches!(args.first()?, Value::List(_) | Value::JsonList(..)) {
        return None;
    }
    if !is_known(name) {
        return None;
    }
    let charged = meter.charge(u64::from(args[0].is_zero()));
    let list = match charged.and_then(|()| meter.items(&args[0])) {
        Ok(list) => list,
        Err(error) => return Some(Err(error)),
    };
    Some(match (name, &args[1..]) {
        ("isSorted", []) => order_cost(meter, &list, 1).and_then(|()| sorted(&list)).map(Value::Bool),
        ("sum", []) => sum(meter, &list, zero_of(&args[0])),
        ("min", []) => order_cost(meter, &list, 1).and_then(|()| extreme(&list, Ordering::Less)),
        ("max", []) => order_cost(meter, &list, 1).and_then(|()| extreme(&list, Ordering::Greater)),
        ("indexOf", [item]) => position(meter, list.iter().enumerate(), item),
        ("lastIndexOf", [item]) => position(meter, list.iter().enumerate().rev(), item),
        ("first", []) => Ok(Value::optional(list.first().cloned())),
        ("last", []) => Ok(Value::optional(list.last().cloned())),
        ("reverse", []) => Ok(Value::list(list.into_iter().rev().collect())),
        ("slice", [Value::Int(start), Value::Int(end)]) => slice(&list, *start, *end),
        ("distinct", []) => distinct(meter, &list),
        ("sort", []) => sort(meter, &list, list.clone()),
        ("@sortByAssociatedKeys", [keys]) => meter.items(keys).and_then(|keys| sort(meter, &keys, list)),
        ("flatten", []) => flatten(meter, &list, 1).map(Value::list),
        ("flatten", [Value::Int(depth)]) => flatten(meter, &list, *depth).map(Value::list),
        ("sets.contains", [other]) => all_in(meter, other, &list).map(Value::Bool),
        ("sets.equivalent", [other]) => equivalent(meter, &args[0], other).map(Value::Bool),
        ("sets.intersects", [other]) => intersects(meter, &list, other).map(Value::Bool),
        _ => return None,
    })
}

/// Whether this module has a function with the name. For any other name the elements of a list are not copied.
fn is_known(name: &str) -> bool {
    const NAMES: &[&str] = &[
        "isSorted",
        "sum",
        "min",
        "max",
        "indexOf",
        "lastIndexOf",
        "first",
        "last",
        "reverse",
        "slice",
        "distinct",
        "sort",
        "@sortByAssociatedKeys",
        "flatten",
        "sets.contains",
        "sets.equivalent",
        "sets.intersects",
    ];
    NAMES.contains(&name)
}

/// Charges the comparison of each element with another element: long texts can have a long part in common.
fn order_cost(meter: &mut CostMeter, list: &[Value<'_>], rounds: u64) -> Result<(), EvalError> {
    let sizes = list.iter().filter(|item| matches!(item, Value::String(_) | Value::Bytes(_)));
    let cost = sizes.map(|item| item.cost_size() / 10).fold(0, u64::saturating_add);
    meter.charge(cost.saturating_mul(rounds))
}

fn sorted(list: &[Value<'_>]) -> Result<bool, EvalError> {
    for pair in list.windows(2) {
        if pair[0].order(&pair[1]).ok_or(EvalError::NoOverload)?.is_gt() {
            return Ok(false);
        }
    }
    Ok(true)
}

/// The sum of an empty list.
fn zero_of<'a>(list: &Value<'a>) -> Value<'a> {
    match list {
        Value::JsonList(_, Type::Duration, _) => Value::Duration(0),
        Value::JsonList(_, Type::Double, _) => Value::Double(0.0),
        _ => Value::Int(0),
    }
}

fn sum<'a>(meter: &mut CostMeter, list: &[Value<'a>], zero: Value<'a>) -> Evaluated<'a> {
    let mut items = list.iter().cloned();
    let Some(mut total) = items.next() else { return Ok(zero) };
    for item in items {
        total = match apply(meter, "_+_", &[total, item]) {
            Some(sum) => sum?,
            None => return Err(EvalError::NoOverload),
        };
    }
    Ok(total)
}

fn extreme<'a>(list: &[Value<'a>], wanted: Ordering) -> Evaluated<'a> {
    let name = if wanted.is_lt() { "min" } else { "max" };
    let Some(mut best) = list.first() else { return failed(format!("{name} called on empty list")) };
    for item in &list[1..] {
        if item.order(best).ok_or(EvalError::NoOverload)? == wanted {
            best = item;
        }
    }
    Ok(best.clone())
}

fn position<'a, 'b>(
    meter: &mut CostMeter,
    items: impl Iterator<Item = (usize, &'b Value<'a>)>,
    wanted: &Value<'a>,
) -> Evaluated<'a>
where
    'a: 'b,
{
    for (index, item) in items {
        if equals(meter, item, wanted)? {
            return Ok(Value::Int(i64::try_from(index).unwrap_or(i64::MAX)));
        }
    }
    Ok(Value::Int(-1))
}

fn slice<'a>(list: &[Value<'a>], start: i64, end: i64) -> Evaluated<'a> {
    let problem = match usize::try_from(start).ok().zip(usize::try_from(end).ok()) {
        None => "negative indexes not supported".to_owned(),
        Some((start, end)) if start > end => "start index must be less than or equal to end index".to_owned(),
        Some((start, end)) => match list.get(start..end) {
            Some(part) => return Ok(Value::list(part.to_vec())),
            None => format!("list is length {}", list.len()),
        },
    };
    failed(format!("cannot slice({start}, {end}), {problem}"))
}

fn distinct<'a>(meter: &mut CostMeter, list: &[Value<'a>]) -> Evaluated<'a> {
    let mut found: Vec<Value<'a>> = Vec::new();
    for item in list {
        if !is_in(meter, item, &found)? {
            found.push(item.clone());
        }
    }
    Ok(Value::list(found))
}

/// Sorts a list by its keys: one for each element, all of one comparable type.
fn sort<'a>(meter: &mut CostMeter, keys: &[Value<'a>], list: Vec<Value<'a>>) -> Evaluated<'a> {
    order_cost(meter, keys, 1)?;
    let kind = keys.first().map(Value::type_name);
    // An order across types is not total: two different integers can equal the same double. NaN has no order.
    if keys.iter().any(|key| Some(key.type_name()) != kind || key.order(key).is_none()) {
        return Err(EvalError::NoOverload);
    }
    if keys.len() != list.len() {
        return failed("the list and its keys have different lengths");
    }
    let rounds = list.len().max(2).ilog2();
    let steps = list.len().saturating_mul(usize::try_from(rounds).unwrap_or(64));
    meter.charge(u64::try_from(steps).unwrap_or(u64::MAX))?;
    order_cost(meter, keys, u64::from(rounds))?;
    let mut pairs: Vec<(&Value<'a>, Value<'a>)> = keys.iter().zip(list).collect();
    pairs.sort_by(|(left, _), (right, _)| left.order(right).unwrap_or(Ordering::Equal));
    Ok(Value::list(pairs.into_iter().map(|(_, item)| item).collect()))
}

fn flatten<'a>(meter: &mut CostMeter, list: &[Value<'a>], depth: i64) -> Result<Vec<Value<'a>>, EvalError> {
    if depth < 0 {
        return failed("level must be non-negative");
    }
    let mut current = list.to_vec();
    for _ in 0..depth.min(32) {
        let mut next = Vec::new();
        for item in &current {
            meter.charge(1)?;
            match item {
                Value::List(_) | Value::JsonList(..) => next.extend(meter.items(item)?),
                other => next.push(meter.copied(other.clone())?),
            }
        }
        current = next;
    }
    Ok(current)
}

fn is_in<'a>(meter: &mut CostMeter, item: &Value<'a>, list: &[Value<'a>]) -> Result<bool, EvalError> {
    for element in list {
        if equals(meter, element, item)? {
            return Ok(true);
        }
    }
    Ok(false)
}

fn all_in<'a>(meter: &mut CostMeter, items: &Value<'a>, list: &[Value<'a>]) -> Result<bool, EvalError> {
    for item in meter.items(items)? {
        if !is_in(meter, &item, list)? {
            return Ok(false);
        }
    }
    Ok(true)
}

fn equivalent<'a>(meter: &mut CostMeter, left: &Value<'a>, right: &Value<'a>) -> Result<bool, EvalError> {
    let (first, second) = (meter.items(left)?, meter.items(right)?);
    Ok(all_in(meter, left, &second)? && all_in(meter, right, &first)?)
}

fn intersects<'a>(meter: &mut CostMeter, list: &[Value<'a>], other: &Value<'a>) -> Result<bool, EvalError> {
    for item in meter.items(other)? {
        if is_in(meter, &item, list)? {
            return Ok(true);
        }
    }
    Ok(false)
}

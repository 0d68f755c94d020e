//! Functions of lists and sets.

use std::cmp::Ordering;

use super::failed;
use crate::eval::{EvalError, Evaluated, Evaluator};
use crate::operators::{apply, equals};
use crate::value::Value;

/// Maximum length of `lists.range`.
const MAX_RANGE: i64 = 100_000;

pub(super) fn call<'a>(
    evaluator: &mut Evaluator<'a, '_>,
    name: &str,
    args: &[Value<'a>],
    _member: bool,
) -> Option<Evaluated<'a>> {
    if let ("lists.range", [Value::Int(count)]) = (name, args) {
        if *count > MAX_RANGE {
            return Some(failed(format!("range is longer than {MAX_RANGE}")));
        }
        let cost = u64::try_from(*count).unwrap_or(0);
        return Some(evaluator.charge(cost + 1).map(|()| Value::list((0..*count).map(Value::Int).collect())));
    }
    if !matches!(args.first()?, Value::List(_) | Value::JsonList(..)) {
        return None;
    }
    if !is_known(name) {
        return None;
    }
    if let Err(error) = evaluator.charge(args[0].cost_size().max(1)) {
        return Some(Err(error));
    }
    let list = args[0].items()?;
    Some(match (name, &args[1..]) {
        ("isSorted", []) => sorted(&list).map(Value::Bool),
        ("sum", []) => sum(evaluator, &list),
        ("min", []) => extreme(&list, Ordering::Less),
        ("max", []) => extreme(&list, Ordering::Greater),
        ("indexOf", [item]) => position(evaluator, list.iter().enumerate(), item),
        ("lastIndexOf", [item]) => position(evaluator, list.iter().enumerate().rev(), item),
        ("first", []) => Ok(Value::optional(list.first().cloned())),
        ("last", []) => Ok(Value::optional(list.last().cloned())),
        ("reverse", []) => Ok(Value::list(list.into_iter().rev().collect())),
        ("slice", [Value::Int(start), Value::Int(end)]) => slice(&list, *start, *end),
        ("distinct", []) => distinct(evaluator, &list),
        ("sort", []) => sort(evaluator, list),
        ("flatten", []) => flatten(evaluator, &list, 1).map(Value::list),
        ("flatten", [Value::Int(depth)]) => flatten(evaluator, &list, *depth).map(Value::list),
        ("sets.contains", [other]) => all_in(evaluator, other, &list).map(Value::Bool),
        ("sets.equivalent", [other]) => equivalent(evaluator, &args[0], other).map(Value::Bool),
        ("sets.intersects", [other]) => intersects(evaluator, &list, other).map(Value::Bool),
        _ => return None,
    })
}

/// Whether this module has a function with the name. The elements of a list are copied only then.
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
        "flatten",
        "sets.contains",
        "sets.equivalent",
        "sets.intersects",
    ];
    NAMES.contains(&name)
}

fn sorted(list: &[Value<'_>]) -> Result<bool, EvalError> {
    for pair in list.windows(2) {
        if pair[0].order(&pair[1]).ok_or(EvalError::NoOverload)?.is_gt() {
            return Ok(false);
        }
    }
    Ok(true)
}

fn sum<'a>(evaluator: &mut Evaluator<'a, '_>, list: &[Value<'a>]) -> Evaluated<'a> {
    let mut items = list.iter().cloned();
    let Some(mut total) = items.next() else { return Ok(Value::Int(0)) };
    for item in items {
        total = match apply(evaluator, "_+_", &[total, item]) {
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
    evaluator: &mut Evaluator<'a, '_>,
    items: impl Iterator<Item = (usize, &'b Value<'a>)>,
    wanted: &Value<'a>,
) -> Evaluated<'a>
where
    'a: 'b,
{
    for (index, item) in items {
        if equals(evaluator, item, wanted)? {
            return Ok(Value::Int(i64::try_from(index).unwrap_or(i64::MAX)));
        }
    }
    Ok(Value::Int(-1))
}

fn slice<'a>(list: &[Value<'a>], start: i64, end: i64) -> Evaluated<'a> {
    let range = usize::try_from(start).ok().zip(usize::try_from(end).ok());
    match range.and_then(|(start, end)| list.get(start..end)) {
        Some(part) => Ok(Value::list(part.to_vec())),
        None => failed(format!("cannot slice({start}, {end}), list is length {}", list.len())),
    }
}

fn distinct<'a>(evaluator: &mut Evaluator<'a, '_>, list: &[Value<'a>]) -> Evaluated<'a> {
    let mut found: Vec<Value<'a>> = Vec::new();
    for item in list {
        if !is_in(evaluator, item, &found)? {
            found.push(item.clone());
        }
    }
    Ok(Value::list(found))
}

fn sort<'a>(evaluator: &mut Evaluator<'a, '_>, mut list: Vec<Value<'a>>) -> Evaluated<'a> {
    if !list.windows(2).all(|pair| pair[0].order(&pair[1]).is_some()) {
        return Err(EvalError::NoOverload);
    }
    let steps = list.len().saturating_mul(usize::try_from(list.len().max(1).ilog2()).unwrap_or(64));
    evaluator.charge(u64::try_from(steps).unwrap_or(u64::MAX))?;
    list.sort_by(|left, right| left.order(right).unwrap_or(Ordering::Equal));
    Ok(Value::list(list))
}

fn flatten<'a>(
    evaluator: &mut Evaluator<'a, '_>,
    list: &[Value<'a>],
    depth: i64,
) -> Result<Vec<Value<'a>>, EvalError> {
    if depth < 0 {
        return failed("level must be non-negative");
    }
    let mut current = list.to_vec();
    for _ in 0..depth.min(32) {
        let mut next = Vec::new();
        for item in &current {
            evaluator.charge(1)?;
            let is_list = matches!(item, Value::List(_) | Value::JsonList(..));
            evaluator.charge(if is_list { item.cost_size() } else { 0 })?;
            match item.items() {
                Some(inner) => next.extend(inner),
                None => next.push(item.clone()),
            }
        }
        current = next;
    }
    Ok(current)
}

fn is_in<'a>(
    evaluator: &mut Evaluator<'a, '_>,
    item: &Value<'a>,
    list: &[Value<'a>],
) -> Result<bool, EvalError> {
    for element in list {
        if equals(evaluator, element, item)? {
            return Ok(true);
        }
    }
    Ok(false)
}

fn all_in<'a>(
    evaluator: &mut Evaluator<'a, '_>,
    items: &Value<'a>,
    list: &[Value<'a>],
) -> Result<bool, EvalError> {
    evaluator.charge(items.cost_size())?;
    for item in items.items().ok_or(EvalError::NoOverload)? {
        if !is_in(evaluator, &item, list)? {
            return Ok(false);
        }
    }
    Ok(true)
}

fn equivalent<'a>(
    evaluator: &mut Evaluator<'a, '_>,
    left: &Value<'a>,
    right: &Value<'a>,
) -> Result<bool, EvalError> {
    evaluator.charge(left.cost_size().saturating_add(right.cost_size()))?;
    let (Some(first), Some(second)) = (left.items(), right.items()) else {
        return Err(EvalError::NoOverload);
    };
    Ok(all_in(evaluator, left, &second)? && all_in(evaluator, right, &first)?)
}

fn intersects<'a>(
    evaluator: &mut Evaluator<'a, '_>,
    list: &[Value<'a>],
    other: &Value<'a>,
) -> Result<bool, EvalError> {
    evaluator.charge(other.cost_size())?;
    for item in other.items().ok_or(EvalError::NoOverload)? {
        if is_in(evaluator, &item, list)? {
            return Ok(true);
        }
    }
    Ok(false)
}

//! Optional values.

use super::failed;
use crate::cost_meter::CostMeter;
use crate::eval_error::Evaluated;
use crate::value::Value;

pub(super) fn call<'a>(
    meter: &mut CostMeter,
    name: &str,
    args: &[Value<'a>],
    _member: bool,
) -> Option<Evaluated<'a>> {
    let result = match (name, args) {
        ("optional.of", [value]) => Ok(Value::optional(Some(value.clone()))),
        ("optional.none", []) => Ok(Value::Optional(None)),
        ("optional.ofNonZeroValue", [value]) => {
            Ok(Value::optional((!value.is_zero()).then(|| value.clone())))
        }
        ("hasValue", [Value::Optional(inner)]) => Ok(Value::Bool(inner.is_some())),
        ("value", [Value::Optional(inner)]) => match inner {
            Some(inner) => Ok((**inner).clone()),
            None => failed("optional.none() dereference"),
        },
        ("or", [first @ Value::Optional(Some(_)), _]) => Ok(first.clone()),
        ("or", [Value::Optional(None), second @ Value::Optional(_)]) => Ok(second.clone()),
        ("orValue", [Value::Optional(Some(inner)), _]) => Ok((**inner).clone()),
        ("orValue", [Value::Optional(None), other]) => Ok(other.clone()),
        ("optional.unwrap" | "unwrapOpt", [list]) => unwrap(meter, list),
        _ => return None,
    };
    Some(meter.charge(1).and(result).and_then(|value| meter.copied(value)))
}

/// The values in a list of optional elements. Elements without a value are skipped.
fn unwrap<'a>(meter: &mut CostMeter, list: &Value<'a>) -> Evaluated<'a> {
    let mut found = Vec::new();
    for item in meter.items(list)? {
        match item {
            Value::Optional(inner) => found.extend(inner.map(|inner| (*inner).clone())),
            _ => return failed("the list has an element that is not optional"),
        }
    }
    Ok(Value::list(found))
}

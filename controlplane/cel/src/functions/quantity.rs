//! Functions of quantities.

use coracle_values::Quantity;

use super::{failed, traversal};
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
        ("quantity" | "isQuantity", [Value::String(text)]) => {
            if let Err(error) = meter.charge(traversal(args[0].cost_size())) {
                return Some(Err(error));
            }
            match (name, Quantity::parse(text)) {
                ("isQuantity", parsed) => Ok(Value::Bool(parsed.is_ok())),
                (_, Ok(quantity)) => Ok(Value::Quantity(quantity)),
                (_, Err(error)) => failed(error.to_string()),
            }
        }
        ("sign", [Value::Quantity(quantity)]) => Ok(Value::Int(quantity.signum().into())),
        ("isInteger", [Value::Quantity(quantity)]) => Ok(Value::Bool(quantity.whole().is_some())),
        ("asInteger", [Value::Quantity(quantity)]) => match quantity.whole() {
            Some(number) => Ok(Value::Int(number)),
            None => failed("cannot convert value to integer"),
        },
        ("asApproximateFloat", [Value::Quantity(quantity)]) => Ok(Value::Double(quantity.approximate())),
        ("isGreaterThan", [Value::Quantity(left), Value::Quantity(right)]) => Ok(Value::Bool(left > right)),
        ("isLessThan", [Value::Quantity(left), Value::Quantity(right)]) => Ok(Value::Bool(left < right)),
        ("compareTo", [Value::Quantity(left), Value::Quantity(right)]) => {
            Ok(Value::Int(match left.cmp(right) {
                std::cmp::Ordering::Less => -1,
                std::cmp::Ordering::Equal => 0,
                std::cmp::Ordering::Greater => 1,
            }))
        }
        ("add" | "sub", [Value::Quantity(left), right]) => {
            let other = match right {
                Value::Quantity(quantity) => Some(*quantity),
                Value::Int(number) => Quantity::parse(&number.to_string()).ok(),
                _ => return None,
            };
            match other.and_then(|other| if name == "add" { Some(other) } else { negated(other) }) {
                Some(other) => Ok(Value::Quantity(left.plus(other))),
                None => failed("quantity overflow"),
            }
        }
        _ => return None,
    };
    Some(meter.charge(1).and(result))
}

fn negated(quantity: Quantity) -> Option<Quantity> {
    let text = quantity.to_string();
    let flipped = match text.strip_prefix('-') {
        Some(rest) => rest.to_owned(),
        None => format!("-{text}"),
    };
    Quantity::parse(&flipped).ok()
}

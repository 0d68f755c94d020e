//! Conversions between types.

use super::{failed, traversal};
use crate::cost_meter::CostMeter;
use crate::duration;
use crate::eval_error::{EvalError, Evaluated};
use crate::value::{Value, timestamp};

pub(super) fn call<'a>(
    meter: &mut CostMeter,
    name: &str,
    args: &[Value<'a>],
    member: bool,
) -> Option<Evaluated<'a>> {
    let ([value], false) = (args, member) else { return None };
    let cost =
        if matches!(value, Value::String(_) | Value::Bytes(_)) { traversal(value.cost_size()) } else { 1 };
    let result = match name {
        "type" => Ok(Value::Type(value.type_name())),
        "dyn" => Ok(value.clone()),
        "bool" => to_bool(value),
        "int" => to_int(value),
        "uint" => to_uint(value),
        "double" => to_double(value),
        "string" => to_text(value),
        "bytes" => to_bytes(value),
        "duration" => to_duration(value),
        "timestamp" => to_timestamp(value),
        _ => return None,
    };
    Some(meter.charge(cost.max(1)).and(result))
}

fn to_bool<'a>(value: &Value<'a>) -> Evaluated<'a> {
    match value {
        Value::Bool(_) => Ok(value.clone()),
        Value::String(text) => match &**text {
            "true" | "True" | "TRUE" | "t" | "1" => Ok(Value::Bool(true)),
            "false" | "False" | "FALSE" | "f" | "0" => Ok(Value::Bool(false)),
            _ => failed("type conversion error from 'string' to 'bool'"),
        },
        _ => Err(EvalError::NoOverload),
    }
}

fn to_int<'a>(value: &Value<'a>) -> Evaluated<'a> {
    let number = match value {
        Value::Int(number) => Some(*number),
        Value::Uint(number) => i64::try_from(*number).ok(),
        #[expect(clippy::cast_possible_truncation, reason = "the range is checked")]
        Value::Double(number) => (number.abs() < 9.223_372_036_854_775e18).then_some(*number as i64),
        Value::String(text) => match text.parse() {
            Ok(number) => Some(number),
            Err(_) => return failed("type conversion error from 'string' to 'int'"),
        },
        Value::Timestamp(at) => Some(at.as_second()),
        Value::Duration(nanoseconds) => Some(*nanoseconds),
        _ => return Err(EvalError::NoOverload),
    };
    number.map(Value::Int).ok_or_else(|| EvalError::Failed("integer overflow".to_owned()))
}

fn to_uint<'a>(value: &Value<'a>) -> Evaluated<'a> {
    let number = match value {
        Value::Uint(number) => Some(*number),
        Value::Int(number) => u64::try_from(*number).ok(),
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the range is checked")]
        Value::Double(number) => {
            (*number >= 0.0 && *number < 1.844_674_407_370_955e19).then_some(*number as u64)
        }
        Value::String(text) => match text.parse() {
            Ok(number) => Some(number),
            Err(_) => return failed("type conversion error from 'string' to 'uint'"),
        },
        _ => return Err(EvalError::NoOverload),
    };
    number.map(Value::Uint).ok_or_else(|| EvalError::Failed("unsigned integer overflow".to_owned()))
}

#[expect(clippy::cast_precision_loss, reason = "as cel-go converts")]
fn to_double<'a>(value: &Value<'a>) -> Evaluated<'a> {
    match value {
        Value::Double(_) => Ok(value.clone()),
        Value::Int(number) => Ok(Value::Double(*number as f64)),
        Value::Uint(number) => Ok(Value::Double(*number as f64)),
        Value::String(text) => match text.parse() {
            Ok(number) => Ok(Value::Double(number)),
            Err(_) => failed("type conversion error from 'string' to 'double'"),
        },
        _ => Err(EvalError::NoOverload),
    }
}

pub(super) fn to_text<'a>(value: &Value<'a>) -> Evaluated<'a> {
    Ok(match value {
        Value::String(_) => value.clone(),
        Value::Bool(flag) => Value::text(flag.to_string()),
        Value::Int(number) => Value::text(number.to_string()),
        Value::Uint(number) => Value::text(number.to_string()),
        Value::Double(number) => Value::text(number.to_string()),
        Value::Bytes(bytes) => match std::str::from_utf8(bytes) {
            Ok(text) => Value::text(text),
            Err(_) => return failed("invalid UTF-8 in bytes, cannot convert to string"),
        },
        Value::Timestamp(at) => Value::text(at.to_string()),
        Value::Duration(nanoseconds) => Value::text(duration::print(*nanoseconds)),
        Value::Ip(address) => Value::text(address.to_string()),
        Value::Cidr(network) => Value::text(network.to_string()),
        _ => return Err(EvalError::NoOverload),
    })
}

fn to_bytes<'a>(value: &Value<'a>) -> Evaluated<'a> {
    match value {
        Value::Bytes(_) => Ok(value.clone()),
        Value::String(text) => Ok(Value::Bytes(text.as_bytes().into())),
        _ => Err(EvalError::NoOverload),
    }
}

fn to_duration<'a>(value: &Value<'a>) -> Evaluated<'a> {
    match value {
        Value::Duration(_) => Ok(value.clone()),
        Value::Int(nanoseconds) => Ok(Value::Duration(*nanoseconds)),
        Value::String(text) => match duration::parse(text) {
            Some(nanoseconds) => Ok(Value::Duration(nanoseconds)),
            None => failed("type conversion error from 'string' to 'google.protobuf.Duration'"),
        },
        _ => Err(EvalError::NoOverload),
    }
}

fn to_timestamp<'a>(value: &Value<'a>) -> Evaluated<'a> {
    match value {
        Value::Timestamp(_) => Ok(value.clone()),
        Value::Int(seconds) => match jiff::Timestamp::from_second(*seconds) {
            Ok(at) => Ok(Value::Timestamp(at)),
            Err(_) => failed("timestamp overflow"),
        },
        Value::String(text) => match timestamp(text) {
            Some(at) => Ok(Value::Timestamp(at)),
            None => failed("type conversion error from 'string' to 'google.protobuf.Timestamp'"),
        },
        _ => Err(EvalError::NoOverload),
    }
}

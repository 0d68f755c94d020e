//! Conversions between types.

use std::ops::RangeInclusive;

use coracle_values::go;

use super::{failed, traversal};
use crate::cost_meter::CostMeter;
use crate::duration;
use crate::eval_error::{EvalError, Evaluated};
use crate::value::{OffsetTime, Value};

/// Timestamps in seconds since 1970: the years 1 to 9999.
pub(crate) const TIMESTAMPS: RangeInclusive<i64> = -62_135_596_800..=253_402_300_799;

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
        Value::String(text) => match go::parse_bool(text) {
            Some(value) => Ok(Value::Bool(value)),
            None => failed("type conversion error from 'string' to 'bool'"),
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
        Value::Timestamp(time) => Some(time.at().as_second()),
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
        // For `uint`, Go accepts no sign.
        Value::String(text) => match text.parse::<u64>().ok().filter(|_| !text.starts_with('+')) {
            Some(number) => Some(number),
            None => return failed("type conversion error from 'string' to 'uint'"),
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
        Value::String(text) => match parse_double(text) {
            Some(number) => Ok(Value::Double(number)),
            None => failed("type conversion error from 'string' to 'double'"),
        },
        _ => Err(EvalError::NoOverload),
    }
}

/// Parses a number, infinity or NaN. `None` for another text, or if the number is out of range, as in Go.
fn parse_double(text: &str) -> Option<f64> {
    let number = text.parse::<f64>().ok()?;
    let is_infinity = || text.trim_start_matches(['+', '-']).starts_with(['i', 'I']);
    (number.is_finite() || number.is_nan() || is_infinity()).then_some(number)
}

/// A number as Go's `%g` prints it: the fewest digits, with an exponent for very small numbers and from one million.
pub(super) fn print_double(number: f64) -> String {
    if number.is_nan() {
        return "NaN".to_owned();
    }
    if number.is_infinite() {
        return if number > 0.0 { "+Inf" } else { "-Inf" }.to_owned();
    }
    let scientific = format!("{number:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    match exponent.parse::<i32>().unwrap_or(0) {
        -4..=5 => number.to_string(),
        exponent => {
            let sign = if exponent < 0 { '-' } else { '+' };
            format!("{digits}e{sign}{:02}", exponent.unsigned_abs())
        }
    }
}

pub(super) fn to_text<'a>(value: &Value<'a>) -> Evaluated<'a> {
    Ok(match value {
        Value::String(_) => value.clone(),
        Value::Bool(flag) => Value::text(flag.to_string()),
        Value::Int(number) => Value::text(number.to_string()),
        Value::Uint(number) => Value::text(number.to_string()),
        Value::Double(number) => Value::text(print_double(*number)),
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
        Value::Int(seconds) if !TIMESTAMPS.contains(seconds) => failed("timestamp overflow"),
        Value::Int(seconds) => match jiff::Timestamp::from_second(*seconds) {
            Ok(at) => Ok(Value::Timestamp(OffsetTime::utc(at))),
            Err(_) => failed("timestamp overflow"),
        },
        Value::String(text) => match parse_timestamp(text) {
            Some(time) => Ok(Value::Timestamp(time)),
            None => failed("type conversion error from 'string' to 'google.protobuf.Timestamp'"),
        },
        _ => Err(EvalError::NoOverload),
    }
}

/// A date with time and zone (RFC 3339). Fields of objects may have other forms, but the function accepts only this
/// form.
pub(crate) fn parse_timestamp(text: &str) -> Option<OffsetTime> {
    let (time, zone) = text.split_at_checked(19)?;
    let separators = [(4, b'-'), (7, b'-'), (10, b'T'), (13, b':'), (16, b':')];
    let is_time = time.bytes().enumerate().all(|(at, byte)| {
        match separators.iter().find(|(position, _)| *position == at) {
            Some((_, separator)) => byte == *separator,
            None => byte.is_ascii_digit(),
        }
    });
    let fraction = zone.strip_prefix('.').map_or(0, |rest| 1 + digits(rest));
    let zone = zone.get(fraction..)?;
    let is_zone = zone == "Z"
        || zone.strip_prefix(['+', '-']).and_then(|offset| offset.split_once(':')).is_some_and(
            |(hours, minutes)| (hours.len(), digits(hours), minutes.len(), digits(minutes)) == (2, 2, 2, 2),
        );
    let parsed = (is_time && is_zone && fraction != 1).then(|| OffsetTime::parse(text)).flatten();
    parsed.filter(|time| TIMESTAMPS.contains(&time.at().as_second()))
}

/// Number of digits that a text begins with.
fn digits(text: &str) -> usize {
    text.bytes().take_while(u8::is_ascii_digit).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doubles_are_printed_as_go_prints_them() {
        for (number, expected) in [
            (0.0, "0"),
            (1.5, "1.5"),
            (-0.5, "-0.5"),
            (123_456.0, "123456"),
            (1_000_000.0, "1e+06"),
            (1_234_567.0, "1.234567e+06"),
            (1e300, "1e+300"),
            (0.0001, "0.0001"),
            (0.000_012_34, "1.234e-05"),
            (f64::NAN, "NaN"),
            (f64::INFINITY, "+Inf"),
            (f64::NEG_INFINITY, "-Inf"),
        ] {
            assert_eq!(print_double(number), expected);
        }
    }

    #[test]
    fn doubles_out_of_range_are_errors() {
        assert_eq!(parse_double("1.5e3"), Some(1500.0));
        assert_eq!(parse_double("-Inf"), Some(f64::NEG_INFINITY));
        assert!(parse_double("NaN").is_some_and(f64::is_nan));
        assert!(
            parse_double("1e999").is_none()
                && parse_double("-1e999").is_none()
                && parse_double("x").is_none()
        );
    }

    #[test]
    fn timestamps_have_date_time_and_zone() {
        for good in ["2024-01-02T03:04:05Z", "2024-01-02T03:04:05.123456789+01:30", "0001-01-01T00:00:00Z"] {
            assert!(parse_timestamp(good).is_some(), "{good}");
        }
        for bad in [
            "2024-01-02",
            "2024-01-02t03:04:05Z",
            "2024-01-02 03:04:05Z",
            "2024-01-02T03:04Z",
            "2024-01-02T03:04:05",
            "2024-01-02T03:04:05.Z",
            "2024-01-02T03:04:05+0130",
            "2024-01-02T03:04:05Z[UTC]",
            "2024-13-02T03:04:05Z",
            "é024-01-02T03:04:05Z",
            "0000-01-02T03:04:05Z",
        ] {
            assert!(parse_timestamp(bad).is_none(), "{bad}");
        }
    }
}

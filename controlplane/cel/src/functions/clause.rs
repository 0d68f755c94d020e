//! Clauses of formatted texts, such as `%s` and `%.2f`. Source: `cel-go/ext/formatting.go`, in the locale en-US.

use std::fmt::Write;

use coracle_values::go::quoted;

use super::convert::{print_double, to_text};
use super::failed;
use crate::duration;
use crate::eval_error::EvalError;
use crate::value::Value;

/// Maximum depth of formatted values.
const MAX_DEPTH: usize = 32;

/// Maximum bytes of a formatted text.
const MAX_BYTES: usize = 1 << 20;

/// Formats a value as the clause requires, and appends it.
pub(super) fn write(
    out: &mut String,
    clause: char,
    precision: usize,
    item: &Value<'_>,
) -> Result<(), EvalError> {
    let text = match (clause, item) {
        ('s', Value::List(_) | Value::JsonList(..)) => return write_element(out, item, 0),
        ('s', item) if item.is_map() => return write_element(out, item, 0),
        ('s', item) => return write_plain(out, item),
        ('d', Value::Int(number)) => number.to_string(),
        ('d', Value::Uint(number)) => number.to_string(),
        ('b', Value::Bool(flag)) => u8::from(*flag).to_string(),
        ('b' | 'o' | 'x' | 'X', Value::Int(number)) => {
            let sign = if *number < 0 { "-" } else { "" };
            format!("{sign}{}", radix(clause, number.unsigned_abs()))
        }
        ('b' | 'o' | 'x' | 'X', Value::Uint(number)) => radix(clause, *number),
        ('x' | 'X', Value::String(text)) => hexadecimal(clause, text.as_bytes()),
        ('x' | 'X', Value::Bytes(bytes)) => hexadecimal(clause, bytes),
        ('f' | 'e', item) => match double(item) {
            Some(number) if clause == 'f' => fixed(number, precision),
            Some(number) => scientific(number, precision),
            None => return mismatch(clause),
        },
        _ => return mismatch(clause),
    };
    out.push_str(&text);
    Ok(())
}

fn mismatch(clause: char) -> Result<(), EvalError> {
    failed(format!("unrecognized formatting clause or wrong type: %{clause}"))
}

fn radix(clause: char, number: u64) -> String {
    match clause {
        'b' => format!("{number:b}"),
        'o' => format!("{number:o}"),
        'x' => format!("{number:x}"),
        _ => format!("{number:X}"),
    }
}

fn hexadecimal(clause: char, bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len() * 2);
    for byte in bytes {
        // Writing to a text cannot fail.
        let _ = if clause == 'x' { write!(text, "{byte:02x}") } else { write!(text, "{byte:02X}") };
    }
    text
}

/// The number of a value. Infinities and NaN are texts, because they have no literal.
fn double(item: &Value<'_>) -> Option<f64> {
    match item {
        Value::Double(number) => Some(*number),
        Value::String(text) => match &**text {
            "NaN" => Some(f64::NAN),
            "Infinity" => Some(f64::INFINITY),
            "-Infinity" => Some(f64::NEG_INFINITY),
            _ => None,
        },
        _ => None,
    }
}

/// The text of infinity or NaN. `None` for other numbers.
fn without_digits(number: f64) -> Option<&'static str> {
    match number {
        _ if number.is_nan() => Some("NaN"),
        f64::INFINITY => Some("∞"),
        f64::NEG_INFINITY => Some("-∞"),
        _ => None,
    }
}

/// A number with groups of three digits, such as `1,234.50`.
fn fixed(number: f64, precision: usize) -> String {
    if let Some(text) = without_digits(number) {
        return text.to_owned();
    }
    let digits = format!("{:.precision$}", number.abs());
    let (whole, fraction) = digits.split_at(digits.find('.').unwrap_or(digits.len()));
    let mut text = String::with_capacity(digits.len() * 2);
    text.push_str(if number < 0.0 { "-" } else { "" });
    for (index, digit) in whole.chars().enumerate() {
        if index > 0 && (whole.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text.push_str(fraction);
    text
}

/// A number with an exponent of ten, such as `1.5×10⁰³`.
fn scientific(number: f64, precision: usize) -> String {
    if let Some(text) = without_digits(number) {
        return text.to_owned();
    }
    let text = format!("{number:.precision$e}");
    let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    let raised = format!("{:02}", exponent.unsigned_abs());
    let raised = raised.chars().map(|digit| match digit {
        '1' => '¹',
        '2' => '²',
        '3' => '³',
        // The code points of the other superscript digits are consecutive.
        digit => char::from_u32(0x2070 + digit.to_digit(10).unwrap_or(0)).unwrap_or(digit),
    });
    let sign = if exponent < 0 { "⁻" } else { "" };
    format!("{digits}×10{sign}{}", raised.collect::<String>())
}

fn write_plain(out: &mut String, value: &Value<'_>) -> Result<(), EvalError> {
    match value {
        Value::Null => out.push_str("null"),
        Value::Type(name) => out.push_str(name),
        other => match to_text(other)? {
            Value::String(text) => out.push_str(&text),
            _ => return Err(EvalError::NoOverload),
        },
    }
    Ok(())
}

/// Appends a collection, or an element of one in the form of a literal.
fn write_element(out: &mut String, value: &Value<'_>, depth: usize) -> Result<(), EvalError> {
    if depth > MAX_DEPTH || out.len() > MAX_BYTES {
        return failed("formatted value is too large");
    }
    if let Some(items) = value.items() {
        out.push('[');
        for (index, item) in items.iter().enumerate() {
            out.push_str(if index > 0 { ", " } else { "" });
            write_element(out, item, depth + 1)?;
        }
        out.push(']');
        return Ok(());
    }
    if let Some(keys) = value.keys() {
        return write_map(out, value, keys, depth);
    }
    match value {
        Value::String(text) => out.push_str(&quoted(text)),
        Value::Bytes(_) => match to_text(value)? {
            Value::String(text) => out.push_str(&format!("b{}", quoted(&text))),
            _ => return Err(EvalError::NoOverload),
        },
        Value::Double(number) if number.is_finite() => out.push_str(&format!("{number:.6}")),
        Value::Double(number) => out.push_str(&quoted(&print_double(*number))),
        Value::Timestamp(at) => out.push_str(&format!("timestamp(\"{at}\")")),
        Value::Duration(nanoseconds) => {
            out.push_str(&format!("duration(\"{}\")", duration::print(*nanoseconds)));
        }
        other => write_plain(out, other)?,
    }
    Ok(())
}

/// Appends a map, in the order of its formatted keys.
fn write_map<'a>(
    out: &mut String,
    map: &Value<'a>,
    keys: Vec<Value<'a>>,
    depth: usize,
) -> Result<(), EvalError> {
    let mut entries = Vec::with_capacity(keys.len());
    for key in keys {
        let mut text = String::new();
        write_element(&mut text, &key, depth + 1)?;
        entries.push((text, key));
    }
    entries.sort_by(|(left, _), (right, _)| left.cmp(right));
    out.push('{');
    for (index, (text, key)) in entries.iter().enumerate() {
        out.push_str(if index > 0 { ", " } else { "" });
        out.push_str(text);
        out.push(':');
        write_element(out, &map.get(key).unwrap_or(Value::Null), depth + 1)?;
    }
    out.push('}');
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(clause: char, precision: usize, item: Value<'_>) -> String {
        let mut out = String::new();
        write(&mut out, clause, precision, &item).unwrap();
        out
    }

    #[test]
    fn numbers_have_the_form_of_go() {
        for (clause, precision, item, expected) in [
            ('f', 3, Value::Double(1_234_567.891), "1,234,567.891"),
            ('f', 0, Value::Double(-1234.5), "-1,234"),
            ('f', 6, Value::Double(2.5), "2.500000"),
            ('f', 2, Value::text("-Infinity"), "-∞"),
            ('e', 6, Value::Double(1_052.033), "1.052033×10⁰³"),
            ('e', 2, Value::Double(-1.5e-7), "-1.50×10⁻⁰⁷"),
            ('e', 0, Value::Double(1e100), "1×10¹⁰⁰"),
            ('b', 6, Value::Int(-5), "-101"),
            ('o', 6, Value::Uint(9), "11"),
            ('X', 6, Value::Int(-255), "-FF"),
            ('x', 6, Value::text("aé"), "61c3a9"),
            ('d', 6, Value::Int(i64::MIN), "-9223372036854775808"),
        ] {
            assert_eq!(written(clause, precision, item), expected);
        }
        assert!(write(&mut String::new(), 'f', 6, &Value::Int(1)).is_err());
    }

    #[test]
    fn elements_have_the_form_of_literals() {
        let list = Value::list(vec![
            Value::text("a\"\n\u{1}"),
            Value::Double(3.25),
            Value::Null,
            Value::Double(f64::INFINITY),
            Value::Duration(7_200_000_000_000),
            Value::Bytes(b"xyz".as_slice().into()),
            Value::list(vec![Value::Int(9), Value::Bool(true)]),
        ]);
        let expected = r#"["a\"\n\x01", 3.250000, null, "+Inf", duration("7200s"), b"xyz", [9, true]]"#;
        assert_eq!(written('s', 6, list), expected);
        let json = serde_json::json!({"b": 1, "a": "x"});
        let map = Value::from_json(&json, &crate::types::DYN);
        assert_eq!(written('s', 6, map), r#"{"a":"x", "b":1}"#);
        assert_eq!(written('s', 6, Value::text("plain \"text\"")), "plain \"text\"");
    }
}

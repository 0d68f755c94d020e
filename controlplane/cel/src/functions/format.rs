//! Named formats, and formatted texts (`"%s".format([…])`).

use std::fmt::Write;

use base64::Engine;
use coracle_values::names;

use super::convert::to_text;
use super::{failed, traversal};
use crate::cost_meter::CostMeter;
use crate::eval_error::{EvalError, Evaluated};
use crate::value::{Value, timestamp};

const FORMATS: &[&str] = &[
    "dns1123Label",
    "dns1123Subdomain",
    "dns1035Label",
    "qualifiedName",
    "dns1123LabelPrefix",
    "dns1123SubdomainPrefix",
    "dns1035LabelPrefix",
    "labelValue",
    "uri",
    "uuid",
    "byte",
    "date",
    "datetime",
];

/// Maximum depth of formatted values.
const MAX_DEPTH: usize = 32;

pub(super) fn call<'a>(
    meter: &mut CostMeter,
    name: &str,
    args: &[Value<'a>],
    _member: bool,
) -> Option<Evaluated<'a>> {
    let find = |wanted: &str| FORMATS.iter().find(|known| **known == wanted).copied();
    let result = match (name, args) {
        ("format.named", [Value::String(wanted)]) => Ok(Value::optional(find(wanted).map(Value::Format))),
        ("validate", [Value::Format(format), Value::String(text)]) => {
            let cost = traversal(args[1].cost_size() + 1).saturating_mul(32);
            if let Err(error) = meter.charge(cost) {
                return Some(Err(error));
            }
            let problems = problems(format, text);
            let list = Value::list(problems.into_iter().map(Value::text).collect());
            Ok(Value::optional((!list.is_zero()).then_some(list)))
        }
        (name, []) => Ok(Value::Format(find(name.strip_prefix("format.")?)?)),
        _ => return None,
    };
    Some(meter.charge(1).and(result))
}

fn problems(format: &str, text: &str) -> Vec<String> {
    let prefix = text.trim_end_matches('-');
    let unless = |fits: bool, problem: &str| if fits { Vec::new() } else { vec![problem.to_owned()] };
    match format {
        "dns1123Label" => names::dns1123_label(text),
        "dns1123LabelPrefix" => names::dns1123_label(prefix),
        "dns1123Subdomain" => names::dns1123_subdomain(text),
        "dns1123SubdomainPrefix" => names::dns1123_subdomain(prefix),
        "dns1035Label" => names::dns1035_label(text),
        "dns1035LabelPrefix" => names::dns1035_label(prefix),
        "qualifiedName" => names::qualified_name(text),
        "labelValue" => names::label_value(text),
        "uri" => unless(text.starts_with('/') || url::Url::parse(text).is_ok(), "invalid URI"),
        "uuid" => unless(is_uuid(text), "does not match the UUID format"),
        "byte" => unless(base64::engine::general_purpose::STANDARD.decode(text).is_ok(), "invalid base64"),
        "date" => unless(text.parse::<jiff::civil::Date>().is_ok() && text.len() == 10, "invalid date"),
        _ => unless(text.len() > 10 && timestamp(text).is_some(), "invalid datetime"),
    }
}

fn is_uuid(text: &str) -> bool {
    let plain: String = text.chars().filter(|c| *c != '-').collect();
    plain.len() == 32 && plain.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Replaces the clauses of a text by the elements of a list.
pub(super) fn format_text<'a>(meter: &mut CostMeter, text: &str, list: &Value<'a>) -> Evaluated<'a> {
    let items = meter.items(list)?;
    meter.charge(traversal(u64::try_from(text.len()).unwrap_or(u64::MAX)).max(1))?;
    let mut next = items.iter();
    let mut out = String::new();
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut clause = chars.next();
        let mut precision = None;
        if clause == Some('.') {
            let mut digits = String::new();
            clause = chars.next();
            while let Some(digit) = clause.filter(char::is_ascii_digit) {
                digits.push(digit);
                clause = chars.next();
            }
            precision = digits.parse::<usize>().ok().filter(|digits| *digits <= 100);
        }
        let Some(clause) = clause else { return failed("unexpected end of string") };
        if clause == '%' {
            out.push('%');
            continue;
        }
        let Some(item) = next.next() else { return failed("index out of range") };
        let before = out.len();
        let written = write_clause(&mut out, clause, precision.unwrap_or(6), item);
        // The text before an error is charged as well: a loop can ignore the error and repeat the call.
        meter.charge(traversal(u64::try_from(out.len() - before).unwrap_or(u64::MAX)))?;
        written?;
    }
    Ok(Value::text(out))
}

fn write_clause(out: &mut String, clause: char, precision: usize, item: &Value<'_>) -> Result<(), EvalError> {
    let written = match (clause, item) {
        ('s', item) => return write_value(out, item, 0),
        ('d', Value::Int(number)) => write!(out, "{number}"),
        ('d', Value::Uint(number)) => write!(out, "{number}"),
        ('b', Value::Int(number)) => write!(out, "{number:b}"),
        ('b', Value::Bool(flag)) => write!(out, "{}", u8::from(*flag)),
        ('o', Value::Int(number)) => write!(out, "{number:o}"),
        ('x', Value::Int(number)) => write!(out, "{number:x}"),
        ('X', Value::Int(number)) => write!(out, "{number:X}"),
        ('x', Value::String(text)) => text.bytes().try_for_each(|byte| write!(out, "{byte:02x}")),
        ('X', Value::String(text)) => text.bytes().try_for_each(|byte| write!(out, "{byte:02X}")),
        ('f', Value::Double(number)) => write!(out, "{number:.precision$}"),
        ('e', Value::Double(number)) => write!(out, "{number:.precision$e}"),
        _ => return failed(format!("unrecognized formatting clause or wrong type: %{clause}")),
    };
    written.map_err(|error| EvalError::Failed(error.to_string()))
}

fn write_value(out: &mut String, value: &Value<'_>, depth: usize) -> Result<(), EvalError> {
    if depth > MAX_DEPTH || out.len() > 1 << 20 {
        return failed("formatted value is too large");
    }
    if let Some(items) = value.items() {
        out.push('[');
        for (index, item) in items.iter().enumerate() {
            out.push_str(if index > 0 { ", " } else { "" });
            write_value(out, item, depth + 1)?;
        }
        out.push(']');
        return Ok(());
    }
    if let Some(keys) = value.keys() {
        out.push('{');
        for (index, key) in keys.iter().enumerate() {
            out.push_str(if index > 0 { ", " } else { "" });
            write_value(out, key, depth + 1)?;
            out.push_str(": ");
            write_value(out, &value.get(key).unwrap_or(Value::Null), depth + 1)?;
        }
        out.push('}');
        return Ok(());
    }
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

//! Named formats, and formatted texts (`"%s".format([…])`).

use coracle_values::names;

use super::{clause, failed, traversal};
use crate::cost_meter::CostMeter;
use crate::eval_error::Evaluated;
use crate::go_url::GoUrl;
use crate::text_format;
use crate::value::Value;

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
    let prefix = || names::masked_prefix(text);
    let unless = |fits: bool, problem: &str| if fits { Vec::new() } else { vec![problem.to_owned()] };
    match format {
        "dns1123Label" => names::dns1123_label(text),
        "dns1123LabelPrefix" => names::dns1123_label(&prefix()),
        "dns1123Subdomain" => names::dns1123_subdomain(text),
        "dns1123SubdomainPrefix" => names::dns1123_subdomain(&prefix()),
        "dns1035Label" => names::dns1035_label(text),
        "dns1035LabelPrefix" => names::dns1035_label(&prefix()),
        "qualifiedName" => names::qualified_name(text),
        "labelValue" => names::label_value(text),
        "uri" => GoUrl::check(text).err().into_iter().collect(),
        "uuid" => unless(text_format::is_uuid(text), "does not match the UUID format"),
        "byte" => unless(text_format::is_base64(text), "invalid base64"),
        "date" => unless(text_format::is_date(text), "invalid date"),
        _ => unless(text_format::is_date_time(text), "invalid datetime"),
    }
}

/// Replaces the clauses of a text (`%s`, `%d`, …) by the elements of a list.
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
        let mut letter = chars.next();
        let mut precision = None;
        if letter == Some('.') {
            let mut digits = String::new();
            letter = chars.next();
            while let Some(digit) = letter.filter(char::is_ascii_digit) {
                digits.push(digit);
                letter = chars.next();
            }
            precision = digits.parse::<usize>().ok().filter(|digits| *digits <= 100);
        }
        let Some(letter) = letter else { return failed("unexpected end of string") };
        if letter == '%' {
            out.push('%');
            continue;
        }
        let Some(item) = next.next() else { return failed("index out of range") };
        let before = out.len();
        let written = clause::write(&mut out, letter, precision.unwrap_or(6), item);
        // The text before an error is charged as well: a loop can ignore the error and repeat the call.
        meter.charge(traversal(u64::try_from(out.len() - before).unwrap_or(u64::MAX)))?;
        written?;
    }
    Ok(Value::text(out))
}

//! Functions of strings, and regular expressions.

use super::{failed, traversal};
use crate::cost_meter::CostMeter;
use crate::eval_error::{EvalError, Evaluated};
use crate::functions::format::format_text;
use crate::pattern;
use crate::value::Value;

pub(super) fn call<'a>(
    meter: &mut CostMeter,
    name: &str,
    args: &[Value<'a>],
    _member: bool,
) -> Option<Evaluated<'a>> {
    if let [value, ..] = args
        && name == "size"
        && args.len() == 1
    {
        let size = value.size().and_then(|size| i64::try_from(size).ok());
        let cost = if matches!(value, Value::String(_)) { traversal(value.cost_size()).max(1) } else { 1 };
        return Some(meter.charge(cost).and(size.map(Value::Int).ok_or(EvalError::NoOverload)));
    }
    let Some(Value::String(text)) = args.first() else {
        return match (name, args) {
            ("join", [list, rest @ ..]) => Some(join(meter, list, rest)),
            _ => None,
        };
    };
    searches(meter, name, text, args).or_else(|| transforms(meter, name, text, args))
}

/// Functions that search in a text.
fn searches<'a>(meter: &mut CostMeter, name: &str, text: &str, args: &[Value<'a>]) -> Option<Evaluated<'a>> {
    let cost = traversal(args[0].cost_size());
    Some(match (name, &args[1..]) {
        ("startsWith", [Value::String(part)]) => {
            meter.charge(traversal(args[1].cost_size())).map(|()| Value::Bool(text.starts_with(&**part)))
        }
        ("endsWith", [Value::String(part)]) => {
            meter.charge(traversal(args[1].cost_size())).map(|()| Value::Bool(text.ends_with(&**part)))
        }
        ("contains", [Value::String(part)]) => {
            let cost = cost.saturating_mul(traversal(args[1].cost_size()));
            meter.charge(cost).map(|()| Value::Bool(text.contains(&**part)))
        }
        ("matches", [Value::String(_)]) => {
            expression(meter, args).map(|regex| Value::Bool(regex.is_match(text)))
        }
        ("find", [Value::String(_)]) => expression(meter, args)
            .map(|regex| Value::text(regex.find(text).map_or("", |found| found.as_str()))),
        ("findAll", [Value::String(_), rest @ ..]) => {
            expression(meter, args).and_then(|regex| find_all(meter, &regex, text, limit(rest)))
        }
        ("charAt", [Value::Int(index)]) => meter.charge(cost.max(1)).and_then(|()| char_at(text, *index)),
        ("indexOf", [Value::String(part), rest @ ..]) => {
            meter.charge(cost.max(1)).and_then(|()| index_of(text, part, rest))
        }
        ("lastIndexOf", [Value::String(part), rest @ ..]) => {
            meter.charge(cost.max(1)).and_then(|()| last_index_of(text, part, rest))
        }
        _ => return None,
    })
}

/// Functions that make other texts from a text.
fn transforms<'a>(
    meter: &mut CostMeter,
    name: &str,
    text: &str,
    args: &[Value<'a>],
) -> Option<Evaluated<'a>> {
    let cost = traversal(args[0].cost_size());
    let two = cost.saturating_mul(2);
    Some(match (name, &args[1..]) {
        ("lowerAscii", []) => meter.charge(cost).map(|()| Value::text(text.to_ascii_lowercase())),
        ("upperAscii", []) => meter.charge(cost).map(|()| Value::text(text.to_ascii_uppercase())),
        ("trim", []) => meter.charge(cost).map(|()| Value::text(text.trim())),
        ("reverse", []) => meter.charge(cost).map(|()| Value::text(text.chars().rev().collect::<String>())),
        ("strings.quote", []) => meter.charge(cost).map(|()| Value::text(quote(text))),
        ("jsonpatch.escapeKey", []) => {
            meter.charge(two).map(|()| Value::text(text.replace('~', "~0").replace('/', "~1")))
        }
        ("substring", [Value::Int(start), rest @ ..]) => {
            meter.charge(cost.max(1)).and_then(|()| substring(text, *start, rest))
        }
        ("split", [Value::String(separator), rest @ ..]) => {
            // Each part costs one unit, because it is copied into a new text.
            let parts =
                if separator.is_empty() { text.len() } else { text.matches(&**separator).count() + 1 };
            let parts = u64::try_from(parts.min(limit(rest))).unwrap_or(u64::MAX);
            let cost = two.saturating_add(parts).max(1);
            meter.charge(cost).map(|()| split(text, separator, limit(rest)))
        }
        ("replace", [Value::String(from), Value::String(to), rest @ ..]) => {
            replace(meter, text, from, to, limit(rest))
        }
        ("format", [list]) => format_text(meter, text, list),
        _ => return None,
    })
}

/// The text in quotation marks, with the escape sequences of cel-go. Other control characters are not escaped.
fn quote(text: &str) -> String {
    let mut quoted = String::with_capacity(text.len() + 2);
    quoted.push('"');
    for character in text.chars() {
        match character {
            '\u{7}' => quoted.push_str("\\a"),
            '\u{8}' => quoted.push_str("\\b"),
            '\u{c}' => quoted.push_str("\\f"),
            '\n' => quoted.push_str("\\n"),
            '\r' => quoted.push_str("\\r"),
            '\t' => quoted.push_str("\\t"),
            '\u{b}' => quoted.push_str("\\v"),
            '\\' | '"' => quoted.extend(['\\', character]),
            _ => quoted.push(character),
        }
    }
    quoted.push('"');
    quoted
}

fn limit(rest: &[Value<'_>]) -> usize {
    match rest {
        [Value::Int(limit)] => usize::try_from(*limit).unwrap_or(usize::MAX),
        _ => usize::MAX,
    }
}

/// Size limit in bytes of the first attempt to compile an expression. This attempt is charged only for the length, the
/// Unicode classes and the folded characters of the expression.
const FREE_BYTES: usize = 16 << 10;

/// The cost of compiling an expression larger than [`FREE_BYTES`], for each KiB of the size limit.
const KIBIBYTE: u64 = 32;

/// The cost of each Unicode class, such as `\pL`. Its three characters are compiled to hundreds of ranges.
const CLASS: u64 = 100;

/// Number of characters whose case can be folded at compilation for one unit of cost.
const FOLDED: u64 = 16;

/// Compiles the second argument. The cost of a search is the product of the costs of the text and of the expression.
fn expression(meter: &mut CostMeter, args: &[Value<'_>]) -> Result<regex::Regex, EvalError> {
    let Some(Value::String(pattern)) = args.get(1) else { return Err(EvalError::NoOverload) };
    let text = traversal(args[0].cost_size() + 1);
    meter.charge(text.saturating_mul(args[1].cost_size().div_ceil(4)).max(1))?;
    // Compiling takes much longer than matching a short text.
    let classes =
        u64::try_from(pattern.matches("\\p").count() + pattern.matches("\\P").count()).unwrap_or(u64::MAX);
    let folded = pattern::folded(pattern) / FOLDED;
    meter.charge(args[1].cost_size().saturating_add(classes.saturating_mul(CLASS)).saturating_add(folded))?;
    let mut compiled = pattern::compile(pattern, FREE_BYTES);
    let mut bytes = FREE_BYTES;
    while compiled.as_ref().is_err_and(|error| error == pattern::TOO_LARGE) && bytes < pattern::MAX_BYTES {
        // The regex crate does not report the size of an expression, so each attempt has a larger limit. The time to
        // compile grows with the size, and at worst also the time of each step of a search.
        bytes *= 4;
        let units = u64::try_from(bytes / 1024).unwrap_or(u64::MAX);
        meter.charge(units.saturating_mul(text.saturating_add(KIBIBYTE)).saturating_add(folded))?;
        compiled = pattern::compile(pattern, bytes);
    }
    compiled.or_else(failed)
}

fn join<'a>(meter: &mut CostMeter, list: &Value<'a>, rest: &[Value<'a>]) -> Evaluated<'a> {
    let separator = match rest {
        [] => "",
        [Value::String(separator)] => separator,
        _ => return Err(EvalError::NoOverload),
    };
    let items = meter.items(list)?;
    let mut text = String::new();
    for (index, item) in items.iter().enumerate() {
        let Value::String(part) = item else { return Err(EvalError::NoOverload) };
        meter.charge(traversal(item.cost_size() + u64::try_from(separator.len()).unwrap_or(u64::MAX)) * 2)?;
        if index > 0 {
            text.push_str(separator);
        }
        text.push_str(part);
    }
    Ok(Value::text(text))
}

fn find_all<'a>(meter: &mut CostMeter, regex: &regex::Regex, text: &str, limit: usize) -> Evaluated<'a> {
    let mut found = Vec::new();
    for part in regex.find_iter(text).take(limit) {
        meter.charge(1)?;
        found.push(Value::text(part.as_str()));
    }
    Ok(Value::list(found))
}

fn char_at<'a>(text: &str, index: i64) -> Evaluated<'a> {
    let length = text.chars().count();
    match usize::try_from(index) {
        Ok(index) if index < length => Ok(Value::text(text.chars().skip(index).take(1).collect::<String>())),
        Ok(index) if index == length => Ok(Value::text("")),
        _ => failed(format!("index out of range: {index}")),
    }
}

/// The position at which a search starts, if the arguments contain one. A negative position is an error.
fn start_of(rest: &[Value<'_>]) -> Result<Option<usize>, EvalError> {
    match rest {
        [] => Ok(None),
        [Value::Int(start)] => match usize::try_from(*start) {
            Ok(start) => Ok(Some(start)),
            Err(_) => failed(format!("index out of range: {start}")),
        },
        _ => Err(EvalError::NoOverload),
    }
}

fn index_of<'a>(text: &str, part: &str, rest: &[Value<'a>]) -> Evaluated<'a> {
    // An empty text is found wherever the search starts.
    if let ("", [start @ Value::Int(_)]) = (part, rest) {
        return Ok(start.clone());
    }
    let start = start_of(rest)?.unwrap_or(0);
    let found = offset_of(text, start).and_then(|offset| {
        let (before, after) = text.split_at_checked(offset)?;
        after.find(part).map(|at| before.len() + at)
    });
    Ok(Value::Int(position_of(text, found)))
}

fn last_index_of<'a>(text: &str, part: &str, rest: &[Value<'a>]) -> Evaluated<'a> {
    if let ("", [start @ Value::Int(_)]) = (part, rest) {
        return Ok(start.clone());
    }
    let searched = match start_of(rest)? {
        None => Some(text),
        Some(start) => offset_of(text, start).filter(|offset| *offset < text.len()).map(|offset| {
            // The last occurrence may start at `offset`, so the searched text ends `part.len()` bytes after it.
            let mut end = (offset + part.len()).min(text.len());
            while !text.is_char_boundary(end) {
                end += 1;
            }
            text.get(..end).unwrap_or(text)
        }),
    };
    Ok(Value::Int(position_of(text, searched.and_then(|searched| searched.rfind(part)))))
}

/// The number of characters before a byte offset. -1 without an offset.
fn position_of(text: &str, offset: Option<usize>) -> i64 {
    let before = offset.and_then(|offset| text.get(..offset));
    before.and_then(|before| i64::try_from(before.chars().count()).ok()).unwrap_or(-1)
}

/// The byte offset of a character. The offset after the last character is allowed.
fn offset_of(text: &str, index: usize) -> Option<usize> {
    text.char_indices().map(|(at, _)| at).chain([text.len()]).nth(index)
}

fn substring<'a>(text: &str, start: i64, rest: &[Value<'a>]) -> Evaluated<'a> {
    let at = |index: i64| match usize::try_from(index).ok().and_then(|index| offset_of(text, index)) {
        Some(offset) => Ok(offset),
        None => failed(format!("index out of range: {index}")),
    };
    let end = match rest {
        [] => text.len(),
        [Value::Int(end)] if *end < start => {
            return failed(format!("invalid substring range. start: {start}, end: {end}"));
        }
        [Value::Int(end)] => at(*end)?,
        _ => return Err(EvalError::NoOverload),
    };
    Ok(Value::text(&text[at(start)?..end]))
}

fn split<'a>(text: &str, separator: &str, limit: usize) -> Value<'a> {
    if limit == 0 {
        return Value::list(Vec::new());
    }
    if separator.is_empty() {
        let mut parts: Vec<Value<'a>> =
            text.chars().take(limit - 1).map(|c| Value::text(c.to_string())).collect();
        let rest: String = text.chars().skip(parts.len()).collect();
        if !rest.is_empty() {
            parts.push(Value::text(rest));
        }
        return Value::list(parts);
    }
    Value::list(text.splitn(limit, separator).map(Value::text).collect())
}

fn replace<'a>(meter: &mut CostMeter, text: &str, from: &str, to: &str, limit: usize) -> Evaluated<'a> {
    let count = if from.is_empty() { text.chars().count() + 1 } else { text.matches(from).count() };
    let grown = text.len().saturating_add(count.min(limit).saturating_mul(to.len()));
    meter.charge(traversal(u64::try_from(grown).unwrap_or(u64::MAX)).saturating_mul(2).max(1))?;
    Ok(Value::text(text.replacen(from, to, limit)))
}

#[cfg(test)]
mod tests {
    use super::quote;

    #[test]
    fn quoted_text_has_the_escape_sequences_of_cel_go() {
        let text = "\u{7}\u{8}\u{c}\n\r\t\u{b}\\\"'\u{0}\u{7f}\u{301}é";
        assert_eq!(quote(text), "\"\\a\\b\\f\\n\\r\\t\\v\\\\\\\"'\u{0}\u{7f}\u{301}é\"");
    }
}

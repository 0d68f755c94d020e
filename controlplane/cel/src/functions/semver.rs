//! Semantic versions.

use std::sync::Arc;

use semver::Version;

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
    let cost = traversal(args.first()?.cost_size()).max(1);
    let number = |value: u64| Ok(Value::Int(i64::try_from(value).unwrap_or(i64::MAX)));
    let result = match (name, args) {
        ("semver" | "isSemver", [Value::String(text), rest @ ..]) => {
            let normalize = match rest {
                [] => false,
                [Value::Bool(normalize)] => *normalize,
                _ => return None,
            };
            let parsed = parse(text, normalize);
            match (name, parsed) {
                ("isSemver", parsed) => Ok(Value::Bool(parsed.is_some())),
                (_, Some(version)) => Ok(Value::Semver(Arc::new(version))),
                (_, None) => failed(format!("invalid semantic version {text:?}")),
            }
        }
        ("major", [Value::Semver(version)]) => number(version.major),
        ("minor", [Value::Semver(version)]) => number(version.minor),
        ("patch", [Value::Semver(version)]) => number(version.patch),
        ("isLessThan", [Value::Semver(left), Value::Semver(right)]) => {
            Ok(Value::Bool(left.cmp_precedence(right).is_lt()))
        }
        ("isGreaterThan", [Value::Semver(left), Value::Semver(right)]) => {
            Ok(Value::Bool(left.cmp_precedence(right).is_gt()))
        }
        ("compareTo", [Value::Semver(left), Value::Semver(right)]) => {
            Ok(Value::Int(match left.cmp_precedence(right) {
                std::cmp::Ordering::Less => -1,
                std::cmp::Ordering::Equal => 0,
                std::cmp::Ordering::Greater => 1,
            }))
        }
        _ => return None,
    };
    Some(meter.charge(cost).and(result))
}

/// Parses a version. Normalizing removes a leading `v` and leading zeros, and adds missing parts.
fn parse(text: &str, normalize: bool) -> Option<Version> {
    if !normalize {
        return Version::parse(text).ok();
    }
    let text = text.trim().trim_start_matches('v');
    let end = text.find(['-', '+']).unwrap_or(text.len());
    let (core, rest) = text.split_at(end);
    let mut parts: Vec<&str> = core
        .split('.')
        .map(|part| match part.trim_start_matches('0') {
            "" if !part.is_empty() => "0",
            trimmed => trimmed,
        })
        .collect();
    while parts.len() < 3 {
        parts.push("0");
    }
    Version::parse(&format!("{}{rest}", parts.join("."))).ok()
}

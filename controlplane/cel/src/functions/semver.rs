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

/// Parses a version. Normalizing removes a leading `v` and leading zeros, and adds missing parts (`normalizeAndParse`).
fn parse(text: &str, normalize: bool) -> Option<Version> {
    if !normalize {
        return Version::parse(text).ok();
    }
    let text = text.strip_prefix('v').unwrap_or(text);
    let mut parts: Vec<&str> = text.splitn(3, '.').map(without_leading_zeros).collect();
    // A short version cannot have a pre-release or build metadata.
    if parts.len() < 3 && parts.last().is_some_and(|last| last.contains(['+', '-'])) {
        return None;
    }
    parts.resize(3, "0");
    Version::parse(&parts.join(".")).ok()
}

/// The part of a version without leading zeros. One zero stays if no other digit follows, as in `0-rc`.
fn without_leading_zeros(part: &str) -> &str {
    let trimmed = part.trim_start_matches('0');
    if trimmed.starts_with(|first: char| first.is_ascii_digit()) || trimmed.len() == part.len() {
        return trimmed;
    }
    part.get(part.len() - trimmed.len() - 1..).unwrap_or(part)
}

#[cfg(test)]
mod tests {
    use super::parse;

    #[test]
    fn normalized_versions_equal_upstreams_versions() {
        for (text, expected) in [
            ("v1.2", Some("1.2.0")),
            ("1", Some("1.0.0")),
            ("01.002.00-rc.1+b", Some("1.2.0-rc.1+b")),
            ("1.2.003", Some("1.2.3")),
            ("00", Some("0.0.0")),
            ("vv1.2.3", None),
            (" 1.2.3", None),
            ("1.2-rc", None),
            ("1.2.3.4", None),
            ("1..2", None),
            ("v", None),
        ] {
            let found = parse(text, true).map(|version| version.to_string());
            assert_eq!(found.as_deref(), expected, "{text}");
        }
        assert!(parse("v1.2.3", false).is_none() && parse("1.2.3", false).is_some());
    }
}

//! The part of the API of `jsonpath-rust` that kube-client uses, for paths of names and indexes.
//!
//! kube-client reads a token from the output of a command with it: `token-key` and `expiry-key` of the authentication
//! provider `gcp`, which client-go has removed. Their values are paths such as `{.credential.access_token}`. Filters,
//! wildcards and slices are refused. kube-client has no feature that leaves the crate out.

use std::fmt;

use serde_json::Value;

/// A path that is not supported.
#[derive(Debug)]
pub struct UnsupportedPath;

/// Values that a path can be applied to.
pub trait JsonPath {
    /// The value at a path such as `$.a.b[0]` or `$['a'].b`. Empty if there is no such value.
    ///
    /// # Errors
    /// When the path has other parts than names and indexes.
    fn query(&self, path: &str) -> Result<Vec<&Self>, UnsupportedPath>;
}

impl JsonPath for Value {
    fn query(&self, path: &str) -> Result<Vec<&Self>, UnsupportedPath> {
        let mut rest = path.strip_prefix('$').ok_or(UnsupportedPath)?;
        let mut found = Some(self);
        while !rest.is_empty() {
            let (step, after) = step(rest).ok_or(UnsupportedPath)?;
            found = found.and_then(|value| match step {
                Step::Name(name) => value.get(name),
                Step::Index(index) => value.get(index),
            });
            rest = after;
        }
        Ok(found.into_iter().collect())
    }
}

enum Step<'a> {
    Name(&'a str),
    Index(usize),
}

/// The first step of a path, and the rest of the path.
fn step(path: &str) -> Option<(Step<'_>, &str)> {
    if let Some(name) = path.strip_prefix('.') {
        let (name, after) = name.split_at(name.find(['.', '[']).unwrap_or(name.len()));
        let plain = |c: char| c.is_alphanumeric() || matches!(c, '_' | '-');
        return (!name.is_empty() && name.chars().all(plain)).then_some((Step::Name(name), after));
    }
    let (step, after) = path.strip_prefix('[')?.split_once(']')?;
    let quoted = |quote| step.strip_prefix(quote)?.strip_suffix(quote);
    match quoted('\'').or_else(|| quoted('"')) {
        Some(name) => (!name.contains(['\\', '\'', '"'])).then_some((Step::Name(name), after)),
        None => Some((Step::Index(step.parse().ok()?), after)),
    }
}

impl fmt::Display for UnsupportedPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("only names and indexes are supported")
    }
}

impl std::error::Error for UnsupportedPath {}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_path_of_names_and_indexes_leads_to_one_value() {
        let value = json!({"credential": {"access_token": "t", "a.b": [1, {"c-d": 2}]}});
        for (path, expected) in [
            ("$.credential.access_token", json!("t")),
            ("$['credential'].access_token", json!("t")),
            ("$.credential[\"a.b\"][1].c-d", json!(2)),
            ("$", value.clone()),
        ] {
            assert_eq!(value.query(path).expect(path), [&expected], "{path}");
        }
    }

    #[test]
    fn a_path_to_an_absent_value_finds_nothing() {
        let value = json!({"a": [1]});
        for path in ["$.b", "$.a.b", "$.a[1]", "$.b.c[0]"] {
            assert!(value.query(path).expect(path).is_empty(), "{path}");
        }
    }

    #[test]
    fn other_parts_of_paths_are_refused() {
        for path in ["a", "$a", "$..a", "$.*", "$.a[*]", "$.a[-1]", "$.a[?@.b]", "$.a[0:1]", "$.a[", "$."] {
            let refused = json!({"a": [1]}).query(path).map(|found| found.len());
            assert!(refused.is_err(), "{path}");
        }
    }
}

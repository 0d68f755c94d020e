//! The audit annotations of a validating policy: one value of each key, from all bindings and parameters.
//!
//! Source: `auditAnnotationCollector` of `policy/validating`.

use std::collections::BTreeMap;

/// Maximum number of different values of one key. Further values are left out.
const MAX_VALUES: usize = 100;

/// Maximum bytes of the values of one key. Further values are left out. One value has at most 10 KiB.
const MAX_BYTES: usize = 32 << 10;

/// The values of each key.
#[derive(Default)]
pub(super) struct Annotations(BTreeMap<String, Vec<String>>);

// === impl Annotations ===

impl Annotations {
    /// Adds keys with their values. Equal values of a key are kept once.
    pub(super) fn add(&mut self, found: Vec<(String, String)>) {
        for (key, value) in found {
            let known = self.0.entry(key).or_default();
            let bytes: usize = known.iter().map(String::len).sum();
            if known.len() < MAX_VALUES && bytes + value.len() <= MAX_BYTES && !known.contains(&value) {
                known.push(value);
            }
        }
    }

    /// Each key with its values as one text.
    pub(super) fn joined(self) -> impl Iterator<Item = (String, String)> {
        self.0.into_iter().map(|(key, values)| (key, values.join(", ")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair(key: &str, value: &str) -> (String, String) {
        (key.to_owned(), value.to_owned())
    }

    #[test]
    fn different_values_of_one_key_are_joined() {
        let mut annotations = Annotations::default();
        annotations.add(vec![pair("a", "x"), pair("b", "y")]);
        annotations.add(vec![pair("a", "z"), pair("a", "x")]);
        let joined: Vec<_> = annotations.joined().collect();
        assert_eq!(joined, [pair("a", "x, z"), pair("b", "y")]);
    }

    #[test]
    fn joined_values_are_limited() {
        let mut annotations = Annotations::default();
        for number in 0..1000 {
            annotations.add(vec![pair("short", &number.to_string())]);
            annotations.add(vec![pair("long", &format!("{number}{}", "x".repeat(10_000)))]);
        }
        let joined: Vec<_> = annotations.joined().collect();
        let [(_, long), (_, short)] = joined.as_slice() else { panic!("{} keys", joined.len()) };
        assert_eq!(short.split(", ").count(), MAX_VALUES);
        assert_eq!(long.split(", ").count(), 3);
    }
}

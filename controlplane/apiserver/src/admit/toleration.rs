//! Sets of tolerations. No I/O.
//!
//! Source: `pkg/util/tolerations`.

use serde::{Deserialize, Serialize};

/// Maximum number of tolerations of a list that is compared with another list, because the comparison takes quadratic
/// time.
pub(super) const MAX_TOLERATIONS: usize = 1000;
/// The field names of a toleration.
pub(super) const FIELDS: [&str; 5] = ["key", "operator", "value", "effect", "tolerationSeconds"];

/// A toleration of a pod. Absent texts are empty.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Toleration {
    #[serde(skip_serializing_if = "String::is_empty")]
    key: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    operator: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    value: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    effect: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    toleration_seconds: Option<i64>,
}

// === impl Toleration ===

impl Toleration {
    /// Tolerates the taint for memory pressure.
    pub(super) fn of_memory_pressure() -> Self {
        Self {
            key: "node.kubernetes.io/memory-pressure".to_owned(),
            operator: "Exists".to_owned(),
            effect: "NoSchedule".to_owned(),
            ..Self::default()
        }
    }

    /// Whether this toleration tolerates every taint that `other` tolerates, for at least as long. As upstream, an
    /// omitted operator of `self` means `Equal`. An omitted operator of `other` does not.
    fn includes(&self, other: &Self) -> bool {
        if self == other {
            return true;
        }
        let is_any_key = self.key.is_empty() && self.operator == "Exists";
        if (self.key != other.key && !is_any_key) || !(self.effect.is_empty() || self.effect == other.effect)
        {
            return false;
        }
        let is_shorter = match (self.toleration_seconds, other.toleration_seconds) {
            (None, _) => false,
            (Some(_), None) => true,
            (Some(own), Some(other)) => own < other,
        };
        if self.effect == "NoExecute" && is_shorter {
            return false;
        }
        match self.operator.as_str() {
            "Exists" => true,
            "" | "Equal" => other.operator == "Equal" && other.value == self.value,
            _ => false,
        }
    }
}

/// Merges two lists of tolerations. A toleration that another toleration includes is left out. Of equal tolerations,
/// the first one is kept.
pub(super) fn merged(own: Vec<Toleration>, added: Vec<Toleration>) -> Vec<Toleration> {
    let all: Vec<Toleration> = own.into_iter().chain(added).collect();
    let mut merged: Vec<Toleration> = Vec::new();
    for (index, toleration) in all.iter().enumerate() {
        let later = &all[index + 1..];
        let is_redundant = merged.iter().any(|kept| kept.includes(toleration))
            || later.iter().any(|other| other != toleration && other.includes(toleration));
        if !is_redundant {
            merged.push(toleration.clone());
        }
    }
    merged
}

/// Whether the whitelist includes each toleration. An empty whitelist allows all tolerations.
pub(super) fn are_allowed(tolerations: &[Toleration], whitelist: &[Toleration]) -> bool {
    let is_allowed = |toleration: &Toleration| whitelist.iter().any(|allowed| allowed.includes(toleration));
    whitelist.is_empty() || tolerations.iter().all(is_allowed)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `key[=value]:effect[:seconds]`; `*` is every key.
    fn one(text: &str) -> Toleration {
        let mut parts = text.split(':');
        let (name, effect) = (parts.next().unwrap(), parts.next().unwrap_or_default());
        let (key, value) = name.split_once('=').unwrap_or((name, ""));
        Toleration {
            key: if key == "*" { String::new() } else { key.to_owned() },
            operator: if value.is_empty() { "Exists" } else { "Equal" }.to_owned(),
            value: value.to_owned(),
            effect: effect.to_owned(),
            toleration_seconds: parts.next().map(|seconds| seconds.parse().unwrap()),
        }
    }

    fn list(texts: &[&str]) -> Vec<Toleration> {
        texts.iter().map(|text| one(text)).collect()
    }

    #[test]
    fn a_toleration_includes_narrower_ones() {
        for (wide, narrow) in [
            ("*", "a=1:NoSchedule"),
            ("*:NoExecute", "a:NoExecute:5"),
            ("a", "a=1"),
            ("a=1", "a=1:NoExecute:5"),
            ("a:NoExecute:10", "a:NoExecute:0"),
            ("a", "a"),
        ] {
            assert!(one(wide).includes(&one(narrow)), "{wide} {narrow}");
        }
        for (one_, other) in [
            ("a", "b"),
            ("a", "*"),
            ("a=1", "a"),
            ("a=1", "a=2"),
            ("a:NoSchedule", "a"),
            ("a:NoSchedule", "a:NoExecute"),
            ("a:NoExecute:10", "a:NoExecute"),
            ("a:NoExecute:10", "a:NoExecute:11"),
        ] {
            assert!(!one(one_).includes(&one(other)), "{one_} {other}");
        }
        let unnamed = Toleration { operator: String::new(), ..one("a=1") };
        let gated = Toleration { operator: "Gt".to_owned(), ..one("a=1:NoExecute") };
        assert!(unnamed.includes(&one("a=1:NoSchedule")) && !one("a=1").includes(&unnamed));
        assert!(!gated.includes(&one("a=1:NoExecute")));
    }

    #[test]
    fn redundant_tolerations_are_dropped() {
        let cases: [[&[&str]; 3]; 5] = [
            [&["a=1:NoSchedule"], &["b"], &["a=1:NoSchedule", "b"]],
            [&["a", "b"], &["a", "b"], &["a", "b"]],
            [&["a=1:NoSchedule", "a=2:NoSchedule"], &["a:NoSchedule", "b"], &["a:NoSchedule", "b"]],
            [&["a=1", "b:NoExecute:10"], &["*"], &["*"]],
            [&["*"], &["a=1", "b:NoExecute:10"], &["*"]],
        ];
        for [own, added, expected] in cases {
            assert_eq!(merged(list(own), list(added)), list(expected), "{own:?} {added:?}");
        }
    }

    #[test]
    fn a_whitelist_allows_what_it_includes() {
        assert!(are_allowed(&list(&["a=1", "a=1"]), &list(&["a"])));
        assert!(are_allowed(&list(&["a=1"]), &[]) && are_allowed(&[], &list(&["a"])));
        assert!(!are_allowed(&list(&["a=1", "b"]), &list(&["a"])));
    }
}

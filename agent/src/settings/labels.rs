//! Labels of the Node object, as settings.

use std::collections::BTreeMap;

use coracle_values::names;

/// Labels in reserved domains that a node may set on itself: the kubelet's list for `--node-labels`.
const ALLOWED: [&str; 12] = [
    "kubernetes.io/hostname",
    "topology.kubernetes.io/zone",
    "topology.kubernetes.io/region",
    "failure-domain.beta.kubernetes.io/zone",
    "failure-domain.beta.kubernetes.io/region",
    "node.kubernetes.io/instance-type",
    "beta.kubernetes.io/instance-type",
    "kubernetes.io/os",
    "kubernetes.io/arch",
    "beta.kubernetes.io/os",
    "beta.kubernetes.io/arch",
    "node.kubernetes.io/windows-build",
];

/// Refuses labels that would make the API server refuse every write of the Node object.
pub(super) fn check(labels: &BTreeMap<String, String>) -> anyhow::Result<()> {
    for (key, value) in labels {
        let domain = key.split_once('/').map_or("", |(domain, _)| domain);
        anyhow::ensure!(is_key(key), "node-labels: {key:?} is not a label key, such as example.com/zone");
        anyhow::ensure!(
            is_value(value),
            "node-labels: {value:?} of {key} is not a label value: at most 63 letters, digits, '-', '_' and '.'"
        );
        let is_reserved = ["kubernetes.io", "k8s.io", "coracle.dev"]
            .iter()
            .any(|reserved| domain == *reserved || domain.ends_with(&format!(".{reserved}")));
        let is_allowed = ALLOWED.contains(&key.as_str())
            || ["kubelet.kubernetes.io", "node.kubernetes.io"]
                .iter()
                .any(|allowed| domain == *allowed || domain.ends_with(&format!(".{allowed}")));
        anyhow::ensure!(
            !is_reserved || is_allowed,
            "node-labels: a node cannot set {key} on itself; use a label outside kubernetes.io and coracle.dev, or set it with kubectl label node"
        );
    }
    Ok(())
}

/// Whether this is the key of a label or taint: a name, or a domain and a name.
pub(super) fn is_key(text: &str) -> bool {
    names::qualified_name(text).is_empty()
}

/// Whether this is the value of a label or taint: a name, or the empty text.
pub(super) fn is_value(text: &str) -> bool {
    names::label_value(text).is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(key: &str, value: &str) -> anyhow::Result<()> {
        check(&BTreeMap::from([(key.to_owned(), value.to_owned())]))
    }

    #[test]
    fn labels_that_the_api_server_accepts_are_accepted() {
        let long = format!("{}.example.com/zone", "x".repeat(64));
        for (key, value) in [
            ("zone", "a"),
            (long.as_str(), "a"),
            ("example.com/rack_1", ""),
            ("topology.kubernetes.io/zone", "eu-1"),
            ("node.kubernetes.io/pool", "blue"),
            ("team.node.kubernetes.io/pool", "blue"),
        ] {
            assert!(of(key, value).is_ok(), "{key}={value}");
        }
    }

    #[test]
    fn labels_that_the_api_server_refuses_are_refused() {
        for (key, value) in [
            ("", "a"),
            ("-zone", "a"),
            ("Example.com/zone", "a"),
            ("/zone", "a"),
            ("a/b/c", "d"),
            ("zone", "a b"),
            ("node-role.kubernetes.io/control-plane", ""),
            ("node-restriction.kubernetes.io/x", "y"),
            ("kubernetes.io/x", "y"),
            ("coracle.dev/enable-lb", "true"),
        ] {
            assert!(of(key, value).is_err(), "{key}={value}");
        }
        assert!(of("zone", &"x".repeat(64)).is_err());
    }
}

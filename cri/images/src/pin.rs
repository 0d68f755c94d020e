//! Pinned images: name patterns in the format of CRI-O's `pinned_images`.

use std::convert::Infallible;
use std::str::FromStr;

use serde::Deserialize;

use crate::reference::Reference;

/// A pattern for image names: `registry.k8s.io/pause:3.10` matches that name, `registry.k8s.io/*` matches a
/// prefix, `*pause*` matches a substring. Case is ignored.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(from = "String")]
pub struct PinPattern(Kind);

#[derive(Debug, Clone, PartialEq, Eq)]
enum Kind {
    Exact(String),
    Prefix(String),
    Keyword(String),
}

// === impl PinPattern ===

impl PinPattern {
    /// Whether a normalised name, with a tag or a digest, matches.
    #[must_use]
    pub fn matches(&self, name: &str) -> bool {
        let name = name.to_lowercase();
        match &self.0 {
            Kind::Exact(exact) => name == *exact,
            Kind::Prefix(prefix) => name.starts_with(prefix),
            Kind::Keyword(keyword) => name.contains(keyword),
        }
    }
}

impl From<String> for PinPattern {
    fn from(text: String) -> PinPattern {
        let lower = text.to_lowercase();
        let kind = match (lower.strip_prefix('*'), lower.strip_suffix('*')) {
            (Some(rest), Some(_)) => Kind::Keyword(rest.strip_suffix('*').unwrap_or_default().to_owned()),
            (None, Some(prefix)) => Kind::Prefix(prefix.to_owned()),
            // An exact name can be short, as in a pod: the default registry and the default tag are added.
            (_, None) => Kind::Exact(
                Reference::parse(&text).map_or(lower, |reference| reference.to_string().to_lowercase()),
            ),
        };
        PinPattern(kind)
    }
}

impl FromStr for PinPattern {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<PinPattern, Infallible> {
        Ok(text.to_owned().into())
    }
}

#[cfg(test)]
mod tests {
    use super::PinPattern;

    #[test]
    fn a_pattern_matches_a_name_a_prefix_or_a_substring() {
        let pause = "registry.k8s.io/pause:3.10";
        for (pattern, name, expected) in [
            (pause, pause, true),
            ("registry.k8s.io/pause", pause, false),
            ("registry.k8s.io/pause:3.1", pause, false),
            ("Registry.K8s.io/pause:3.10", pause, true),
            ("nginx", "docker.io/library/nginx:latest", true),
            ("nginx:1", "docker.io/library/nginx:latest", false),
            ("registry.k8s.io/*", pause, true),
            ("k8s.io/*", pause, false),
            ("registry.k8s.io/pause@*", "registry.k8s.io/pause@sha256:0", true),
            ("*Pause*", pause, true),
            ("*nginx*", pause, false),
            ("*", pause, true),
            ("**", pause, true),
            ("*pause", pause, false),
            ("", pause, false),
        ] {
            assert_eq!(PinPattern::from(pattern.to_owned()).matches(name), expected, "{pattern:?} {name}");
        }
    }
}

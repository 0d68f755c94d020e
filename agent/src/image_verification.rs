//! Settings of the access to images that are on the node already: the kubelet's of the same names.

use std::str::FromStr;

/// Which images of the store need a verification of the pod's pull secrets: `imagePullCredentialsVerificationPolicy`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ImageVerification {
    /// None: every pod may use every image of the store.
    NeverVerify,
    /// Those that the agent pulled.
    #[default]
    NeverVerifyPreloadedImages,
    /// All but those of the list.
    NeverVerifyAllowlistedImages(Vec<AllowedImages>),
    /// All.
    AlwaysVerify,
}

/// An entry of `preloadedImagesVerificationAllowlist`: the name of an image without tag and digest, or a prefix that ends
/// with `/*`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AllowedImages(String);

// === impl ImageVerification ===

impl ImageVerification {
    /// The kubelet's name of the policy.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::NeverVerify => "NeverVerify",
            Self::NeverVerifyPreloadedImages => "NeverVerifyPreloadedImages",
            Self::NeverVerifyAllowlistedImages(_) => "NeverVerifyAllowlistedImages",
            Self::AlwaysVerify => "AlwaysVerify",
        }
    }

    /// The list of images that are not verified.
    #[must_use]
    pub fn allowed(&self) -> &[AllowedImages] {
        match self {
            Self::NeverVerifyAllowlistedImages(allowed) => allowed,
            Self::NeverVerify | Self::NeverVerifyPreloadedImages | Self::AlwaysVerify => &[],
        }
    }

    /// Whether a pod that names this image needs a verification. `is_pulled`: the agent pulled the image.
    pub(crate) fn is_required(&self, image: &str, is_pulled: bool) -> bool {
        match self {
            Self::NeverVerify => false,
            Self::NeverVerifyPreloadedImages => is_pulled,
            Self::NeverVerifyAllowlistedImages(allowed) => {
                let name = without_tag(image);
                !allowed.iter().any(|allowed| allowed.has(name))
            }
            Self::AlwaysVerify => true,
        }
    }
}

// === impl AllowedImages ===

impl AllowedImages {
    /// The entry as it was written.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    fn has(&self, name: &str) -> bool {
        match self.0.strip_suffix('*') {
            Some(prefix) => name.starts_with(prefix),
            None => name == self.0,
        }
    }
}

impl FromStr for AllowedImages {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let fixed = text.strip_suffix("/*").unwrap_or(text);
        if fixed.is_empty() || fixed.contains('*') || fixed.contains(char::is_whitespace) {
            return Err("expected the name of an image, or a prefix that ends with /*".to_owned());
        }
        if without_tag(fixed) != fixed && fixed == text {
            return Err("expected the name of an image without tag and digest".to_owned());
        }
        Ok(Self(text.to_owned()))
    }
}

/// The name of an image without its tag and digest.
fn without_tag(image: &str) -> &str {
    let name = image.split_once('@').map_or(image, |(name, _)| name);
    let last = name.rsplit('/').next().unwrap_or(name);
    let tag = last.split_once(':').map_or(0, |(_, tag)| tag.len() + 1);
    name.get(..name.len() - tag).unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_policy_says_which_images_are_verified() {
        let list =
            ["r.example:5000/a", "r.example/team/*"].map(|text| text.parse::<AllowedImages>().unwrap());
        let listed = ImageVerification::NeverVerifyAllowlistedImages(list.to_vec());
        for (policy, image, is_pulled, required) in [
            (&ImageVerification::NeverVerify, "a", true, false),
            (&ImageVerification::default(), "a", true, true),
            (&ImageVerification::default(), "a", false, false),
            (&ImageVerification::AlwaysVerify, "a", false, true),
            (&listed, "r.example:5000/a:1", true, false),
            (&listed, "r.example:5000/a@sha256:00", true, false),
            (&listed, "r.example:5000/ab", false, true),
            (&listed, "r.example/team/x:1", true, false),
            (&listed, "r.example/teams/x", true, true),
        ] {
            assert_eq!(policy.is_required(image, is_pulled), required, "{} {image}", policy.name());
        }
    }

    #[test]
    fn entries_with_other_patterns_or_tags_are_refused() {
        for text in ["", "*", "/*", "a*", "*/a", "a/*/b", "a:1", "a@sha256:00", " a"] {
            assert!(text.parse::<AllowedImages>().is_err(), "{text}");
        }
        for text in ["a", "r:5000/a", "r:5000/*", "r/a/*"] {
            assert_eq!(text.parse::<AllowedImages>().unwrap().as_str(), text);
        }
    }
}

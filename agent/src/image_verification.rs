//! Settings for the access of pods to images that are already on the node. Names and values are those of the kubelet.

use std::str::FromStr;

use coracle_images::Reference;

/// The policy that selects the images of the store that need a verification of the pod's pull secrets:
/// `imagePullCredentialsVerificationPolicy`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ImageVerification {
    /// No image is verified: every pod may use every image of the store.
    NeverVerify,
    /// Only images that the agent pulled are verified.
    #[default]
    NeverVerifyPreloadedImages,
    /// All images are verified, except the images of the list.
    NeverVerifyAllowlistedImages(Vec<AllowedImages>),
    /// All images are verified.
    AlwaysVerify,
}

/// An entry of `preloadedImagesVerificationAllowlist`. It is the name of an image with its registry and without tag
/// and digest, such as `docker.io/library/busybox`. Or it is a prefix of such names that ends with `/*`.
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

    /// Whether a pod needs a verification for an image. `image` is the image's name in the pod. `repository` is this
    /// name with the registry, and without tag and digest. `is_pulled` is true if the agent pulled the image.
    pub(crate) fn is_required(&self, image: &str, repository: &str, is_pulled: bool) -> bool {
        match self {
            Self::NeverVerify => false,
            Self::NeverVerifyPreloadedImages => is_pulled,
            Self::NeverVerifyAllowlistedImages(allowed) => {
                may_be_id(image) || !allowed.iter().any(|allowed| allowed.has(repository))
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
        let is_name = |text: &str| Reference::parse(text).is_ok_and(|name| name.repository() == text);
        if fixed == text && !is_name(text) {
            return Err("expected the name of an image with its registry, without tag and digest".to_owned());
        }
        Ok(Self(text.to_owned()))
    }
}

/// Whether a runtime may read the name in a pod as the id of an image, or as a prefix of an id. A list of names does
/// not apply to such an image.
fn may_be_id(image: &str) -> bool {
    let digits = image.strip_prefix("sha256:").unwrap_or(image);
    digits.bytes().all(|byte| byte.is_ascii_hexdigit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_policy_says_which_images_are_verified() {
        let list = ["r.example:5000/a", "r.example/team/*", "docker.io/library/*"];
        let list = list.map(|text| text.parse::<AllowedImages>().unwrap());
        let listed = ImageVerification::NeverVerifyAllowlistedImages(list.to_vec());
        for (policy, image, is_pulled, required) in [
            (&ImageVerification::NeverVerify, "a", true, false),
            (&ImageVerification::default(), "a", true, true),
            (&ImageVerification::default(), "a", false, false),
            (&ImageVerification::AlwaysVerify, "a", false, true),
            (&listed, "r.example:5000/a:1", true, false),
            (&listed, "r.example:5000/ab", false, true),
            (&listed, "r.example/team/x:1", true, false),
            (&listed, "r.example/teams/x", true, true),
            (&listed, "busybox", true, false),
            (&listed, "team/busybox", true, true),
            (&listed, "sha256:0123abcd", true, true),
            (&listed, "0123abcd", true, true),
        ] {
            let repository = Reference::parse(image).unwrap().repository();
            assert_eq!(
                policy.is_required(image, &repository, is_pulled),
                required,
                "{} {image}",
                policy.name()
            );
        }
    }

    #[test]
    fn entries_with_other_patterns_tags_or_no_registry_are_refused() {
        for text in ["", "*", "/*", "a*", "*/a", "a/*/b", "a:1", "a@sha256:00", " a", "a", "r/a", "r.example"]
        {
            assert!(text.parse::<AllowedImages>().is_err(), "{text}");
        }
        for text in ["docker.io/library/a", "r:5000/a", "r:5000/*", "r/a/*"] {
            assert_eq!(text.parse::<AllowedImages>().unwrap().as_str(), text);
        }
    }
}

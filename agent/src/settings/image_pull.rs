//! Settings for the access of pods to images that are already on the node. Names and values are those of the kubelet.

use clap::ValueEnum;
use coracle_agent::{CredentialProviderPaths, ImageVerification};

use super::NodeSettings;
use super::value::choices;

/// The kubelet's `imagePullCredentialsVerificationPolicy`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "PascalCase")]
pub(crate) enum Policy {
    NeverVerify,
    NeverVerifyPreloadedImages,
    NeverVerifyAllowlistedImages,
    AlwaysVerify,
}

choices!(Policy);

/// Refuses a list of images that the policy does not use, as the kubelet does.
pub(super) fn decide(node: &NodeSettings) -> anyhow::Result<ImageVerification> {
    let allowed = node.preloaded_images_verification_allowlist.clone();
    let policy = node.image_pull_credentials_verification_policy;
    anyhow::ensure!(
        allowed.is_empty() || policy == Policy::NeverVerifyAllowlistedImages,
        "preloaded-images-verification-allowlist is used only with \
         image-pull-credentials-verification-policy NeverVerifyAllowlistedImages"
    );
    Ok(match policy {
        Policy::NeverVerify => ImageVerification::NeverVerify,
        Policy::NeverVerifyPreloadedImages => ImageVerification::NeverVerifyPreloadedImages,
        Policy::NeverVerifyAllowlistedImages => ImageVerification::NeverVerifyAllowlistedImages(allowed),
        Policy::AlwaysVerify => ImageVerification::AlwaysVerify,
    })
}

/// The configuration of credential providers and the directory of their programs.
pub(super) fn credential_providers(node: &NodeSettings) -> anyhow::Result<Option<CredentialProviderPaths>> {
    match (&node.image_credential_provider_config, &node.image_credential_provider_bin_dir) {
        (Some(config), Some(bin_dir)) => {
            Ok(Some(CredentialProviderPaths { config: config.clone(), bin_dir: bin_dir.clone() }))
        }
        (None, None) => Ok(None),
        _ => anyhow::bail!(
            "only one of image-credential-provider-config and image-credential-provider-bin-dir is set: set both or none"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::node_settings;
    use super::*;

    fn of(text: &str) -> Result<ImageVerification, String> {
        decide(&node_settings(text)?).map_err(|error| error.to_string())
    }

    #[test]
    fn the_policies_have_the_kubelets_names_and_default() {
        assert_eq!(of("").unwrap(), ImageVerification::default());
        for name in ["NeverVerify", "NeverVerifyPreloadedImages", "AlwaysVerify"] {
            let policy = of(&format!("image-pull-credentials-verification-policy = \"{name}\""));
            assert_eq!(policy.unwrap().name(), name);
        }
        assert!(of("image-pull-credentials-verification-policy = \"Never\"").is_err());
    }

    #[test]
    fn a_list_belongs_to_its_policy() {
        let list = "preloaded-images-verification-allowlist = [\"r.example/a\", \"s/*\"]";
        assert!(of(list).unwrap_err().contains("is used only with"));
        let policy = "image-pull-credentials-verification-policy = \"NeverVerifyAllowlistedImages\"";
        let both = of(&format!("{policy}\n{list}")).unwrap();
        assert_eq!(both.allowed().len(), 2);
        assert!(of(&format!("{policy}\npreloaded-images-verification-allowlist = [\"a:1\"]")).is_err());
    }
}

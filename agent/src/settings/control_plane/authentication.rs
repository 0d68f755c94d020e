//! The settings of authentication and authorization.

use std::path::PathBuf;

use coracle_controlplane::{AuthorizationConfig, OidcConfig, RequestHeaderConfig, TokenWebhookConfig};

use super::super::sources::Sources;
use super::ControlPlaneSettings;

/// Checked settings of authentication.
#[derive(Clone, Debug)]
pub(crate) struct Authentication {
    pub(crate) token_file: Option<PathBuf>,
    pub(crate) password_file: Option<PathBuf>,
    pub(crate) config_file: Option<PathBuf>,
    pub(crate) oidc: Option<OidcConfig>,
    pub(crate) allows_anonymous: bool,
    pub(crate) token_webhook: Option<TokenWebhookConfig>,
    pub(crate) request_header: Option<RequestHeaderConfig>,
}

// === impl ControlPlaneSettings ===

impl ControlPlaneSettings {
    /// Checks the settings of authentication. `None` after an error, which is in `sources`.
    pub(super) fn authentication(&self, sources: &mut Sources) -> Option<Authentication> {
        Some(Authentication {
            token_file: self.token_auth_file.clone(),
            password_file: self.basic_auth_file.clone(),
            config_file: self.authentication_config.clone(),
            oidc: sources.take(self.oidc())?,
            allows_anonymous: self.anonymous_auth,
            token_webhook: sources.take(self.token_webhook())?,
            request_header: self.request_header(),
        })
    }

    /// The OIDC issuer, if any OIDC setting is given.
    fn oidc(&self) -> anyhow::Result<Option<OidcConfig>> {
        let set = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
        let config = OidcConfig {
            issuer_url: self.oidc_issuer_url.clone().unwrap_or_default(),
            client_id: self.oidc_client_id.clone().unwrap_or_default(),
            ca_file: self.oidc_ca_file.clone(),
            username_claim: set(&self.oidc_username_claim).unwrap_or_default(),
            username_prefix: set(&self.oidc_username_prefix),
            groups_claim: set(&self.oidc_groups_claim),
            groups_prefix: self.oidc_groups_prefix.clone().unwrap_or_default(),
            required_claims: self.oidc_required_claim.clone(),
            signing_algs: self.oidc_signing_algs.clone(),
        };
        oidc(config, self.authentication_config.is_some())
    }

    /// The webhook for tokens, if there is one.
    fn token_webhook(&self) -> anyhow::Result<Option<TokenWebhookConfig>> {
        let version = self.authentication_token_webhook_version.clone();
        let is_known = matches!(version.as_str(), "v1" | "v1beta1");
        anyhow::ensure!(is_known, "authentication-token-webhook-version {version:?} must be v1 or v1beta1");
        let file = self.authentication_token_webhook_config_file.clone();
        let cache = self.authentication_token_webhook_cache_ttl.0;
        Ok(file.map(|file| TokenWebhookConfig { file, cache, version }))
    }

    /// The authenticating proxies, which send the user in headers. `None` if no CA of proxies is set.
    fn request_header(&self) -> Option<RequestHeaderConfig> {
        self.requestheader_client_ca_file.clone().map(|client_ca_file| RequestHeaderConfig {
            client_ca_file,
            allowed_names: self.requestheader_allowed_names.clone(),
            username_headers: self.requestheader_username_headers.clone(),
            uid_headers: self.requestheader_uid_headers.clone(),
            group_headers: self.requestheader_group_headers.clone(),
            extra_prefixes: self.requestheader_extra_headers_prefix.clone(),
        })
    }

    /// Checks the settings of authorization. A configuration file excludes the files of the modes ABAC and Webhook.
    pub(super) fn authorization(&self) -> anyhow::Result<AuthorizationConfig> {
        let config = AuthorizationConfig {
            modes: self.authorization_mode.clone(),
            policy_file: self.authorization_policy_file.clone(),
            webhook_file: self.authorization_webhook_config_file.clone(),
            webhook_authorized: self.authorization_webhook_cache_authorized_ttl.0,
            webhook_unauthorized: self.authorization_webhook_cache_unauthorized_ttl.0,
            webhook_version: self.authorization_webhook_version.clone(),
            file: self.authorization_config.clone(),
        };
        let version = &config.webhook_version;
        let is_known = matches!(version.as_str(), "v1" | "v1beta1");
        anyhow::ensure!(is_known, "authorization-webhook-version {version:?} must be v1 or v1beta1");
        let has_files = config.policy_file.is_some() || config.webhook_file.is_some();
        let is_single = config.file.is_none() || !has_files;
        anyhow::ensure!(
            is_single,
            "authorization-config cannot be used with authorization-policy-file or authorization-webhook-config-file"
        );
        Ok(config)
    }
}

/// Checks the OIDC settings. As upstream, each OIDC setting needs an issuer and a client ID, and excludes the
/// configuration file.
fn oidc(config: OidcConfig, has_file: bool) -> anyhow::Result<Option<OidcConfig>> {
    if config == OidcConfig::default() {
        return Ok(None);
    }
    anyhow::ensure!(!has_file, "authentication-config and the oidc settings are mutually exclusive");
    let is_complete = !config.issuer_url.is_empty() && !config.client_id.is_empty();
    anyhow::ensure!(
        is_complete,
        "oidc-issuer-url and oidc-client-id must be given together with any oidc setting"
    );
    let claim = Some(config.username_claim).filter(|claim| !claim.is_empty());
    Ok(Some(OidcConfig { username_claim: claim.unwrap_or_else(|| "sub".to_owned()), ..config }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_issuer_needs_url_and_client_and_excludes_the_file() {
        let of = |url: &str, client: &str, claim: &str| OidcConfig {
            issuer_url: url.to_owned(),
            client_id: client.to_owned(),
            username_claim: claim.to_owned(),
            ..OidcConfig::default()
        };
        assert_eq!(oidc(OidcConfig::default(), true).unwrap(), None);
        let found = oidc(of("https://a", "b", ""), false).unwrap().unwrap();
        assert_eq!(found, of("https://a", "b", "sub"));
        let found = oidc(of("https://a", "b", "email"), false).unwrap().unwrap();
        assert_eq!(found.username_claim, "email");
        for (config, has_file) in [
            (of("https://a", "", ""), false),
            (of("", "b", ""), false),
            (of("", "", "email"), false),
            (of("https://a", "b", ""), true),
        ] {
            assert!(oidc(config.clone(), has_file).is_err(), "{config:?}");
        }
    }
}

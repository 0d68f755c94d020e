//! The configuration of authentication: `AuthenticationConfiguration` of `apiserver.config.k8s.io`.
//!
//! Expressions in CEL are not supported; a configuration with one is refused.

use std::collections::BTreeMap;

use jsonwebtoken::Algorithm;
use serde::Deserialize;

/// Algorithms that the file's issuers may use, as upstream.
const ALGORITHMS: [Algorithm; 8] = [
    Algorithm::RS256,
    Algorithm::RS384,
    Algorithm::RS512,
    Algorithm::ES256,
    Algorithm::ES384,
    Algorithm::PS256,
    Algorithm::PS384,
    Algorithm::PS512,
];

/// Which authenticators there are besides those of the cluster itself.
#[derive(Clone, Debug, Default)]
pub(crate) struct AuthenticationConfig {
    pub(crate) issuers: Vec<IssuerConfig>,
    pub(crate) anonymous: AnonymousConfig,
}

/// Which requests without credentials are accepted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum AnonymousConfig {
    /// All of them.
    #[default]
    Enabled,
    Disabled,
    /// Those of these paths.
    Paths(Vec<String>),
}

/// One issuer.
#[derive(Clone, Debug)]
pub(crate) struct IssuerConfig {
    /// The value of the claim `iss`, and where discovery starts.
    pub(crate) url: String,
    /// Another place of the discovery document.
    pub(crate) discovery_url: Option<String>,
    /// Authorities of the issuer's certificate in PEM form; `None` uses the system's.
    pub(crate) authority: Option<String>,
    /// A token must be for one of them.
    pub(crate) audiences: Vec<String>,
    pub(crate) algorithms: Vec<Algorithm>,
    pub(crate) username: PrefixedClaim,
    pub(crate) groups: Option<PrefixedClaim>,
    /// The claim with the uid.
    pub(crate) uid: Option<String>,
    /// Claims with the value that they must have.
    pub(crate) required_claims: BTreeMap<String, String>,
}

/// A claim, and what is put before its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PrefixedClaim {
    pub(crate) claim: String,
    pub(crate) prefix: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct File {
    api_version: String,
    kind: String,
    #[serde(default)]
    jwt: Vec<Jwt>,
    anonymous: Option<Anonymous>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Jwt {
    issuer: Issuer,
    #[serde(default)]
    claim_validation_rules: Vec<ClaimRule>,
    claim_mappings: Mappings,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Issuer {
    url: String,
    #[serde(rename = "discoveryURL")]
    discovery_url: Option<String>,
    certificate_authority: Option<String>,
    audiences: Vec<String>,
    #[serde(default)]
    audience_match_policy: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct ClaimRule {
    claim: String,
    #[serde(default)]
    required_value: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Mappings {
    username: ClaimWithPrefix,
    groups: Option<ClaimWithPrefix>,
    uid: Option<PlainClaim>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct ClaimWithPrefix {
    claim: String,
    /// Upstream requires it, so that it is not forgotten: names without a prefix can collide with those of the cluster.
    prefix: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PlainClaim {
    claim: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Anonymous {
    enabled: bool,
    #[serde(default)]
    conditions: Vec<Condition>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Condition {
    path: String,
}

// === impl AuthenticationConfig ===

impl AuthenticationConfig {
    /// Reads the file's text.
    ///
    /// # Errors
    /// The first invalid field, in one sentence.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let file: File = serde_yaml_ng::from_str(text).map_err(|error| error.to_string())?;
        let versions = ["v1", "v1beta1"].map(|version| format!("apiserver.config.k8s.io/{version}"));
        if !versions.contains(&file.api_version) || file.kind != "AuthenticationConfiguration" {
            return Err(format!(
                "expected an AuthenticationConfiguration of apiserver.config.k8s.io/v1, found {:?} of {:?}",
                file.kind, file.api_version
            ));
        }
        let mut issuers: Vec<IssuerConfig> = Vec::new();
        for (index, jwt) in file.jwt.into_iter().enumerate() {
            let issuer = issuer(jwt).map_err(|reason| format!("jwt[{index}].{reason}"))?;
            if issuers.iter().any(|other| other.url == issuer.url) {
                return Err(format!("jwt[{index}].issuer.url: {:?} is a duplicate", issuer.url));
            }
            issuers.push(issuer);
        }
        Ok(Self { issuers, anonymous: anonymous(file.anonymous)? })
    }
}

fn anonymous(wanted: Option<Anonymous>) -> Result<AnonymousConfig, String> {
    match wanted {
        None => Ok(AnonymousConfig::Enabled),
        Some(Anonymous { enabled: false, conditions }) if conditions.is_empty() => {
            Ok(AnonymousConfig::Disabled)
        }
        Some(Anonymous { enabled: false, .. }) => {
            Err("anonymous.conditions: must be empty unless anonymous.enabled is true".to_owned())
        }
        Some(Anonymous { conditions, .. }) if conditions.is_empty() => Ok(AnonymousConfig::Enabled),
        Some(Anonymous { conditions, .. }) => {
            Ok(AnonymousConfig::Paths(conditions.into_iter().map(|condition| condition.path).collect()))
        }
    }
}

fn issuer(jwt: Jwt) -> Result<IssuerConfig, String> {
    let Issuer { url, discovery_url, certificate_authority, audiences, audience_match_policy } = jwt.issuer;
    check_url("issuer.url", &url)?;
    if let Some(other) = &discovery_url {
        check_url("issuer.discoveryURL", other)?;
        if other.trim_end_matches('/') == url.trim_end_matches('/') {
            return Err("issuer.discoveryURL: must be different from issuer.url".to_owned());
        }
    }
    let several = audiences.len() > 1;
    if audiences.is_empty() || audiences.iter().any(String::is_empty) {
        return Err("issuer.audiences: needs at least one audience, and none may be empty".to_owned());
    }
    match (several, audience_match_policy.as_str()) {
        (_, "MatchAny") | (false, "") => {}
        (true, "") => {
            return Err("issuer.audienceMatchPolicy: must be MatchAny for several audiences".to_owned());
        }
        (_, other) => return Err(format!("issuer.audienceMatchPolicy: {other:?} must be MatchAny")),
    }
    let mut required_claims = BTreeMap::new();
    for (index, rule) in jwt.claim_validation_rules.into_iter().enumerate() {
        if rule.claim.is_empty() || required_claims.insert(rule.claim.clone(), rule.required_value).is_some()
        {
            return Err(format!(
                "claimValidationRules[{index}].claim: {:?} is empty or a duplicate",
                rule.claim
            ));
        }
    }
    let mappings = jwt.claim_mappings;
    Ok(IssuerConfig {
        url,
        discovery_url,
        authority: certificate_authority.filter(|pem| !pem.is_empty()),
        audiences,
        algorithms: ALGORITHMS.to_vec(),
        username: prefixed("claimMappings.username", mappings.username)?,
        groups: mappings.groups.map(|groups| prefixed("claimMappings.groups", groups)).transpose()?,
        uid: mappings.uid.map(|uid| uid.claim),
        required_claims,
    })
}

fn prefixed(field: &str, mapping: ClaimWithPrefix) -> Result<PrefixedClaim, String> {
    match mapping.claim.is_empty() {
        true => Err(format!("{field}.claim: is required")),
        false => Ok(PrefixedClaim { claim: mapping.claim, prefix: mapping.prefix }),
    }
}

/// A URL of an issuer has the scheme https and neither user, query nor fragment.
fn check_url(field: &str, url: &str) -> Result<(), String> {
    let parsed = url.parse::<http::Uri>().map_err(|error| format!("{field}: {url:?}: {error}"))?;
    let is_plain = !url.contains(['?', '#', '@']);
    match parsed.scheme_str() == Some("https") && parsed.host().is_some() && is_plain {
        true => Ok(()),
        false => Err(format!("{field}: {url:?} must be an https URL without user, query and fragment")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(rest: &str) -> Result<AuthenticationConfig, String> {
        AuthenticationConfig::parse(&format!(
            "apiVersion: apiserver.config.k8s.io/v1\nkind: AuthenticationConfiguration\n{rest}"
        ))
    }

    fn issuer_with(issuer: &str, rest: &str) -> Result<AuthenticationConfig, String> {
        parse(&format!(
            "jwt:\n- issuer: {{{issuer}}}\n  claimMappings: {{username: {{claim: sub, prefix: 'x:'}}}}\n  {rest}"
        ))
    }

    #[test]
    fn issuers_and_anonymous_paths_are_read() {
        let config = issuer_with(
            "url: 'https://a', audiences: [b]",
            "claimValidationRules: [{claim: hd, requiredValue: c}]",
        );
        let issuer = config.unwrap().issuers.remove(0);
        assert_eq!((issuer.url.as_str(), issuer.required_claims["hd"].as_str()), ("https://a", "c"));
        assert_eq!(issuer.username, PrefixedClaim { claim: "sub".to_owned(), prefix: "x:".to_owned() });
        let paths = parse("anonymous: {enabled: true, conditions: [{path: /livez}]}").unwrap();
        assert_eq!(paths.anonymous, AnonymousConfig::Paths(vec!["/livez".to_owned()]));
    }

    #[test]
    fn what_is_not_supported_is_refused_with_its_field() {
        for (found, field) in [
            (issuer_with("url: 'http://a', audiences: [b]", ""), "jwt[0].issuer.url"),
            (issuer_with("url: 'https://a?b', audiences: [b]", ""), "jwt[0].issuer.url"),
            (issuer_with("url: 'https://a', audiences: []", ""), "jwt[0].issuer.audiences"),
            (issuer_with("url: 'https://a', audiences: [b, c]", ""), "jwt[0].issuer.audienceMatchPolicy"),
            (
                issuer_with(
                    "url: 'https://a', audiences: [b]",
                    "claimValidationRules: [{expression: 'true'}]",
                ),
                "expression",
            ),
            (
                issuer_with("url: 'https://a', audiences: [b]", "userValidationRules: []"),
                "userValidationRules",
            ),
            (parse("anonymous: {enabled: false, conditions: [{path: /}]}"), "anonymous.conditions"),
            (parse("other: 1"), "other"),
            (
                AuthenticationConfig::parse("apiVersion: v1\nkind: Pod"),
                "expected an AuthenticationConfiguration",
            ),
        ] {
            let reason = found.map(|_| ()).unwrap_err();
            assert!(reason.contains(field), "{field}: {reason}");
        }
    }
}

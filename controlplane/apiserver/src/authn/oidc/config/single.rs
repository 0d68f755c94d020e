//! One issuer from individual settings, as in kube-apiserver's `--oidc-*` flags.

use std::{collections::BTreeMap, path::PathBuf};

use jsonwebtoken::Algorithm;

use super::{ALGORITHMS, ClaimRule, Issuer, IssuerConfig, Jwt, Mappings, Source, issuer};

/// The algorithm that the library for the other algorithms does not support.
const ES512: &str = "ES512";

/// An OpenID Connect issuer, configured by settings instead of the authentication configuration file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OidcConfig {
    /// URL of the issuer.
    pub issuer_url: String,
    /// Client ID. It must be an audience of the tokens.
    pub client_id: String,
    /// PEM file with the certificate authorities of the issuer. `None` uses the system's authorities.
    pub ca_file: Option<PathBuf>,
    /// Claim with the name of the user.
    pub username_claim: String,
    /// Prefix of user names. Default: the issuer's URL and `#`, or no prefix if the claim is `email`. The value `-`
    /// disables the prefix.
    pub username_prefix: Option<String>,
    /// Claim with the groups of the user.
    pub groups_claim: Option<String>,
    /// Prefix of groups.
    pub groups_prefix: String,
    /// Claims that tokens must have, with their required values.
    pub required_claims: BTreeMap<String, String>,
    /// Signing algorithms that tokens may have. Empty means RS256.
    pub signing_algs: Vec<String>,
}

// === impl OidcConfig ===

impl OidcConfig {
    /// The issuer with kube-apiserver's defaults. Reads the file with the authorities.
    ///
    /// Source: `ToAuthenticationConfig` in `pkg/kubeapiserver/options` of Kubernetes.
    ///
    /// # Errors
    /// The first invalid setting, in one sentence.
    pub(crate) fn issuer(&self) -> Result<IssuerConfig, String> {
        let (algorithms, has_es512) = algorithms(&self.signing_algs)?;
        let read = |path: &PathBuf| {
            std::fs::read_to_string(path)
                .map_err(|error| format!("oidc-ca-file: cannot read {}: {error}", path.display()))
        };
        let authority = self.ca_file.as_ref().map(read).transpose()?;
        let config = issuer(self.jwt(authority)).map_err(|reason| format!("oidc settings: {reason}"))?;
        Ok(IssuerConfig { algorithms, has_es512, ..config })
    }

    fn jwt(&self, authority: Option<String>) -> Jwt {
        let rule = |(claim, value): (&String, &String)| ClaimRule {
            claim: claim.clone(),
            required_value: value.clone(),
            ..ClaimRule::default()
        };
        let claim = |claim: &str, prefix: String| Source {
            claim: claim.to_owned(),
            prefix: Some(prefix),
            ..Source::default()
        };
        let groups = self.groups_claim.as_deref().filter(|name| !name.is_empty());
        Jwt {
            issuer: Issuer {
                url: self.issuer_url.clone(),
                discovery_url: None,
                certificate_authority: authority,
                audiences: vec![self.client_id.clone()],
                audience_match_policy: String::new(),
            },
            claim_validation_rules: self.required_claims.iter().map(rule).collect(),
            claim_mappings: Mappings {
                username: claim(&self.username_claim, self.prefix()),
                groups: groups.map(|name| claim(name, self.groups_prefix.clone())),
                uid: None,
                extra: Vec::new(),
            },
            user_validation_rules: Vec::new(),
        }
    }

    /// The prefix of user names.
    fn prefix(&self) -> String {
        match self.username_prefix.as_deref().unwrap_or_default() {
            "-" => String::new(),
            "" if self.username_claim == "email" => String::new(),
            "" => format!("{}#", self.issuer_url),
            prefix => prefix.to_owned(),
        }
    }
}

/// The algorithms with these names, and whether ES512 is among them.
fn algorithms(names: &[String]) -> Result<(Vec<Algorithm>, bool), String> {
    if names.is_empty() {
        return Ok((vec![Algorithm::RS256], false));
    }
    let (mut known, mut has_es512) = (Vec::new(), false);
    for name in names {
        if name == ES512 {
            has_es512 = true;
            continue;
        }
        let algorithm = name.parse::<Algorithm>().ok().filter(|one| ALGORITHMS.contains(one));
        known.push(algorithm.ok_or_else(|| {
            format!("oidc-signing-algs: {name:?} is not one of RS, ES and PS with 256, 384 or 512")
        })?);
    }
    Ok((known, has_es512))
}

#[cfg(test)]
mod tests {
    use super::super::{Mapping, PrefixedClaim};
    use super::*;

    fn config() -> OidcConfig {
        OidcConfig {
            issuer_url: "https://a".to_owned(),
            client_id: "app".to_owned(),
            username_claim: "sub".to_owned(),
            ..OidcConfig::default()
        }
    }

    fn claim(mapping: Option<Mapping>) -> (String, String) {
        let Some(Mapping::Claim(PrefixedClaim { claim, prefix })) = mapping else { panic!("no claim") };
        (claim, prefix)
    }

    #[test]
    fn names_have_the_issuer_before_them_unless_a_prefix_or_email_is_given() {
        for (of, prefix, expected) in [
            ("sub", None, "https://a#"),
            ("sub", Some(""), "https://a#"),
            ("sub", Some("-"), ""),
            ("sub", Some("x:"), "x:"),
            ("email", None, ""),
            ("email", Some("x:"), "x:"),
        ] {
            let prefix = prefix.map(str::to_owned);
            let one = OidcConfig { username_claim: of.to_owned(), username_prefix: prefix, ..config() };
            let username = one.issuer().unwrap().username;
            assert_eq!(claim(Some(username)), (of.to_owned(), expected.to_owned()), "{one:?}");
        }
    }

    #[test]
    fn settings_without_a_value_have_kube_apiservers_defaults() {
        let issuer = config().issuer().unwrap();
        assert_eq!((issuer.url.as_str(), issuer.audiences), ("https://a", vec!["app".to_owned()]));
        assert_eq!((issuer.algorithms, issuer.has_es512), (vec![Algorithm::RS256], false));
        assert!(issuer.groups.is_none() && issuer.required_claims.is_empty() && issuer.authority.is_none());
    }

    #[test]
    fn groups_required_claims_and_algorithms_are_used() {
        let issuer = OidcConfig {
            groups_claim: Some("roles".to_owned()),
            groups_prefix: "g:".to_owned(),
            required_claims: [("hd".to_owned(), "c".to_owned())].into(),
            signing_algs: vec!["ES512".to_owned(), "PS384".to_owned()],
            ..config()
        };
        let issuer = issuer.issuer().unwrap();
        assert_eq!(claim(issuer.groups), ("roles".to_owned(), "g:".to_owned()));
        assert_eq!(issuer.required_claims["hd"], "c");
        assert_eq!((issuer.algorithms, issuer.has_es512), (vec![Algorithm::PS384], true));
    }

    #[test]
    fn invalid_settings_are_named() {
        let algorithm = |name: &str| OidcConfig { signing_algs: vec![name.to_owned()], ..config() };
        for (one, part) in [
            (OidcConfig { issuer_url: "http://a".to_owned(), ..config() }, "issuer.url"),
            (OidcConfig { username_claim: String::new(), ..config() }, "claimMappings.username.claim"),
            (OidcConfig { ca_file: Some("/missing".into()), ..config() }, "oidc-ca-file"),
            (algorithm("HS256"), "oidc-signing-algs"),
            (algorithm("none"), "oidc-signing-algs"),
        ] {
            let reason = one.issuer().map(|_| ()).unwrap_err();
            assert!(reason.contains(part), "{part}: {reason}");
        }
    }
}

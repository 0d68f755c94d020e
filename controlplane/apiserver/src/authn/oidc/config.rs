//! The authentication configuration: `AuthenticationConfiguration` of `apiserver.config.k8s.io`.

mod single;

use std::collections::BTreeMap;

use jsonwebtoken::Algorithm;
use serde::Deserialize;

use super::expression::{Expression, ResultType};
pub use single::OidcConfig;

/// Maximum number of issuers, and of rules and extra mappings of one issuer.
const MAX_RULES: usize = 64;

/// Algorithms that issuers may use, as upstream. ES512 is handled in `es512.rs`.
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

/// The authenticators that the configuration file adds to the authenticators of the cluster.
#[derive(Clone, Debug, Default)]
pub(crate) struct AuthenticationConfig {
    pub(crate) issuers: Vec<IssuerConfig>,
    pub(crate) anonymous: AnonymousConfig,
}

/// Anonymous authentication: whether and where requests without credentials are accepted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum AnonymousConfig {
    /// Anonymous requests are accepted on all paths.
    #[default]
    Enabled,
    Disabled,
    /// Anonymous requests are accepted on these paths only.
    Paths(Vec<String>),
}

/// One issuer.
#[derive(Clone, Debug)]
pub(crate) struct IssuerConfig {
    /// The value of the claim `iss`. It is also the base URL of discovery.
    pub(crate) url: String,
    /// URL of the discovery document, if it differs from the default.
    pub(crate) discovery_url: Option<String>,
    /// Certificate authorities of the issuer in PEM. `None` uses the system's authorities.
    pub(crate) authority: Option<String>,
    /// A token must have one of these audiences.
    pub(crate) audiences: Vec<String>,
    pub(crate) algorithms: Vec<Algorithm>,
    /// Whether tokens may be signed with ES512, which `algorithms` does not contain.
    pub(crate) has_es512: bool,
    pub(crate) username: Mapping,
    pub(crate) groups: Option<Mapping>,
    pub(crate) uid: Option<Mapping>,
    /// Keys of extra values, and the expressions for their values.
    pub(crate) extra: Vec<(String, Expression)>,
    /// Claims that tokens must have, with their required values.
    pub(crate) required_claims: BTreeMap<String, String>,
    /// Rules about the claims.
    pub(crate) claim_rules: Vec<Rule>,
    /// Rules about the user.
    pub(crate) user_rules: Vec<Rule>,
}

/// The source of a value: a claim, or an expression over the claims.
#[derive(Clone, Debug)]
pub(crate) enum Mapping {
    Claim(PrefixedClaim),
    Expression(Expression),
}

/// An expression that must be true, and the message if it is false.
#[derive(Clone, Debug)]
pub(crate) struct Rule {
    pub(crate) expression: Expression,
    pub(crate) message: String,
}

/// A claim, and the prefix for its value.
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
    #[serde(default)]
    user_validation_rules: Vec<UserRule>,
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
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
#[derive(Default)]
struct ClaimRule {
    claim: String,
    required_value: String,
    expression: String,
    message: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct UserRule {
    expression: String,
    #[serde(default)]
    message: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Mappings {
    username: Source,
    groups: Option<Source>,
    uid: Option<Source>,
    #[serde(default)]
    extra: Vec<ExtraMapping>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct Source {
    claim: String,
    /// Prefix of the value. As upstream, `claim` requires a prefix for users and groups: a name without a prefix can be
    /// equal to a name of the cluster.
    prefix: Option<String>,
    expression: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct ExtraMapping {
    key: String,
    value_expression: String,
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
    /// Parses the text of the file.
    ///
    /// # Errors
    /// The first invalid field, in one sentence.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let file: File = serde_yaml_ng::from_str(text).map_err(|error| error.to_string())?;
        let versions =
            ["v1", "v1beta1", "v1alpha1"].map(|version| format!("apiserver.config.k8s.io/{version}"));
        if !versions.contains(&file.api_version) || file.kind != "AuthenticationConfiguration" {
            return Err(format!(
                "expected an AuthenticationConfiguration of apiserver.config.k8s.io/v1, found {:?} of {:?}",
                file.kind, file.api_version
            ));
        }
        at_most("jwt", file.jwt.len())?;
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
    let (required_claims, claim_rules) = claim_rules(jwt.claim_validation_rules)?;
    let mappings = jwt.claim_mappings;
    let config = IssuerConfig {
        url,
        discovery_url,
        authority: certificate_authority.filter(|pem| !pem.is_empty()),
        audiences,
        algorithms: ALGORITHMS.to_vec(),
        has_es512: true,
        username: mapping("claimMappings.username", mappings.username, ResultType::Text, true)?,
        groups: mappings
            .groups
            .map(|groups| mapping("claimMappings.groups", groups, ResultType::Texts, true))
            .transpose()?,
        uid: mappings
            .uid
            .map(|uid| mapping("claimMappings.uid", uid, ResultType::Text, false))
            .transpose()?,
        extra: extra(mappings.extra)?,
        required_claims,
        claim_rules,
        user_rules: user_rules(jwt.user_validation_rules)?,
    };
    check_email(&config)?;
    Ok(config)
}

/// Splits the rules into required claims and expressions.
fn claim_rules(rules: Vec<ClaimRule>) -> Result<(BTreeMap<String, String>, Vec<Rule>), String> {
    at_most("claimValidationRules", rules.len())?;
    let (mut required, mut expressions) = (BTreeMap::new(), Vec::new());
    for (index, rule) in rules.into_iter().enumerate() {
        let field = format!("claimValidationRules[{index}]");
        match (rule.claim.is_empty(), rule.expression.is_empty()) {
            (true, false) if rule.required_value.is_empty() => {
                let expression = Expression::of_claims(&rule.expression, ResultType::Bool);
                let expression = expression.map_err(|reason| format!("{field}.expression: {reason}"))?;
                expressions.push(Rule { expression, message: rule.message });
            }
            (false, true) if rule.message.is_empty() => {
                if required.insert(rule.claim.clone(), rule.required_value).is_some() {
                    return Err(format!("{field}.claim: {:?} is a duplicate", rule.claim));
                }
            }
            _ => {
                return Err(format!(
                    "{field}: needs either claim and requiredValue, or expression and message"
                ));
            }
        }
    }
    Ok((required, expressions))
}

fn user_rules(rules: Vec<UserRule>) -> Result<Vec<Rule>, String> {
    at_most("userValidationRules", rules.len())?;
    let rule = |(index, rule): (usize, UserRule)| {
        let expression = Expression::of_user(&rule.expression, ResultType::Bool);
        let expression =
            expression.map_err(|why| format!("userValidationRules[{index}].expression: {why}"))?;
        Ok(Rule { expression, message: rule.message })
    };
    rules.into_iter().enumerate().map(rule).collect()
}

fn extra(mappings: Vec<ExtraMapping>) -> Result<Vec<(String, Expression)>, String> {
    at_most("claimMappings.extra", mappings.len())?;
    let mut all: Vec<(String, Expression)> = Vec::new();
    for (index, mapping) in mappings.into_iter().enumerate() {
        let field = format!("claimMappings.extra[{index}]");
        let (domain, path) = mapping.key.split_once('/').unwrap_or_default();
        let is_reserved = ["kubernetes.io", "k8s.io"]
            .iter()
            .any(|own| domain == *own || domain.strip_suffix(own).is_some_and(|rest| rest.ends_with('.')));
        if domain.is_empty() || path.is_empty() || mapping.key != mapping.key.to_lowercase() || is_reserved {
            return Err(format!(
                "{field}.key: {:?} must be a domain and a path in lower case, not below kubernetes.io or k8s.io",
                mapping.key
            ));
        }
        if all.iter().any(|(key, _)| *key == mapping.key) {
            return Err(format!("{field}.key: {:?} is a duplicate", mapping.key));
        }
        let expression = Expression::of_claims(&mapping.value_expression, ResultType::Texts);
        all.push((mapping.key, expression.map_err(|reason| format!("{field}.valueExpression: {reason}"))?));
    }
    Ok(all)
}

/// Checks that an expression for the user name that reads `email` is accompanied by an expression that reads
/// `email_verified`. An address that the issuer did not verify may belong to another user.
fn check_email(config: &IssuerConfig) -> Result<(), String> {
    let Mapping::Expression(name) = &config.username else { return Ok(()) };
    let reads = |expression: &Expression, claim: &str| {
        let text = &expression.source;
        text.match_indices(claim).any(|(at, _)| {
            let rest = &text[at + claim.len()..];
            !rest.starts_with(|next: char| next.is_alphanumeric() || next == '_')
        })
    };
    let rules = config.claim_rules.iter().map(|rule| &rule.expression);
    let mut all = [name].into_iter().chain(rules).chain(config.extra.iter().map(|(_, value)| value));
    if reads(name, "email") && !all.any(|expression| reads(expression, "email_verified")) {
        return Err("claimMappings.username.expression: reads the claim email, so claims.email_verified must be used in \
                    this expression, in extra or in claimValidationRules"
            .to_owned());
    }
    Ok(())
}

fn at_most(field: &str, count: usize) -> Result<(), String> {
    match count > MAX_RULES {
        true => Err(format!("{field}: must have at most {MAX_RULES} items")),
        false => Ok(()),
    }
}

fn mapping(field: &str, source: Source, wanted: ResultType, has_prefix: bool) -> Result<Mapping, String> {
    match (source.claim.is_empty(), source.expression.is_empty(), source.prefix) {
        (false, true, Some(prefix)) if has_prefix => {
            Ok(Mapping::Claim(PrefixedClaim { claim: source.claim, prefix }))
        }
        (false, true, None) if !has_prefix => {
            Ok(Mapping::Claim(PrefixedClaim { claim: source.claim, prefix: String::new() }))
        }
        (true, false, None) => {
            let expression = Expression::of_claims(&source.expression, wanted);
            expression.map(Mapping::Expression).map_err(|reason| format!("{field}.expression: {reason}"))
        }
        (true, true, _) => Err(format!("{field}.claim: a claim or an expression is required")),
        (false, false, _) => Err(format!("{field}: claim and expression cannot both be set")),
        (false, true, None) => Err(format!("{field}.prefix: is required with a claim; it may be empty")),
        _ => Err(format!("{field}.prefix: is not allowed here")),
    }
}

/// Checks that the URL of an issuer, or of an endpoint of an issuer, has the scheme https and no user, query or
/// fragment.
pub(super) fn check_url(field: &str, url: &str) -> Result<(), String> {
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

    fn mapped(mappings: &str) -> Result<AuthenticationConfig, String> {
        parse(&format!(
            "jwt:\n- issuer: {{url: 'https://a', audiences: [b]}}\n  claimMappings: {{{mappings}}}"
        ))
    }

    #[test]
    fn expressions_are_compiled() {
        let config = mapped(
            "username: {expression: 'claims.email_verified ? claims.email : claims.sub'}, \
             groups: {expression: 'claims.roles.split(\",\")'}, uid: {claim: sub}, \
             extra: [{key: example.com/tenant, valueExpression: claims.tenant}]",
        );
        let issuer = config.unwrap().issuers.remove(0);
        assert!(matches!(issuer.username, Mapping::Expression(_)));
        assert_eq!(issuer.extra[0].0, "example.com/tenant");
    }

    #[test]
    fn issuers_and_anonymous_paths_are_read() {
        let config = issuer_with(
            "url: 'https://a', audiences: [b]",
            "claimValidationRules: [{claim: hd, requiredValue: c}]",
        );
        let issuer = config.unwrap().issuers.remove(0);
        assert_eq!((issuer.url.as_str(), issuer.required_claims["hd"].as_str()), ("https://a", "c"));
        let Mapping::Claim(username) = issuer.username else { panic!("an expression") };
        assert_eq!(username, PrefixedClaim { claim: "sub".to_owned(), prefix: "x:".to_owned() });
        for (version, is_known) in [("v1beta1", true), ("v1alpha1", true), ("v2", false)] {
            let text =
                format!("apiVersion: apiserver.config.k8s.io/{version}\nkind: AuthenticationConfiguration\n");
            assert_eq!(AuthenticationConfig::parse(&text).is_ok(), is_known, "{version}");
        }
        let paths = parse("anonymous: {enabled: true, conditions: [{path: /livez}]}").unwrap();
        assert_eq!(paths.anonymous, AnonymousConfig::Paths(vec!["/livez".to_owned()]));
    }

    #[test]
    fn an_error_names_the_invalid_field() {
        let one = |number: usize| {
            let issuer = format!("{{url: 'https://a{number}', audiences: [b]}}");
            format!("- {{issuer: {issuer}, claimMappings: {{username: {{claim: sub, prefix: ''}}}}}}\n")
        };
        let many = format!("jwt:\n{}", (0..65).map(one).collect::<String>());
        for (found, field) in [
            (issuer_with("url: 'http://a', audiences: [b]", ""), "jwt[0].issuer.url"),
            (issuer_with("url: 'https://a?b', audiences: [b]", ""), "jwt[0].issuer.url"),
            (issuer_with("url: 'https://a', audiences: []", ""), "jwt[0].issuer.audiences"),
            (issuer_with("url: 'https://a', audiences: [b, c]", ""), "jwt[0].issuer.audienceMatchPolicy"),
            (
                issuer_with(
                    "url: 'https://a', audiences: [b]",
                    "claimValidationRules: [{expression: 'claims.a', message: m}]",
                ),
                "jwt[0].claimValidationRules[0].expression",
            ),
            (
                issuer_with(
                    "url: 'https://a', audiences: [b]",
                    "claimValidationRules: [{claim: a, expression: 'true'}]",
                ),
                "jwt[0].claimValidationRules[0]",
            ),
            (
                issuer_with(
                    "url: 'https://a', audiences: [b]",
                    "userValidationRules: [{expression: 'user.name'}]",
                ),
                "jwt[0].userValidationRules[0].expression",
            ),
            (mapped("username: {claim: a}"), "username.prefix"),
            (mapped("username: {claim: a, prefix: '', expression: 'claims.a'}"), "username"),
            (mapped("username: {expression: 'claims.email'}"), "email_verified"),
            (mapped("username: {expression: '1 == 1'}"), "username.expression"),
            (
                mapped(
                    "username: {expression: 'claims.a'}, extra: [{key: a.k8s.io/b, valueExpression: '\"x\"'}]",
                ),
                "extra[0].key",
            ),
            (
                mapped("username: {expression: 'claims.a'}, extra: [{key: a, valueExpression: '\"x\"'}]"),
                "extra[0].key",
            ),
            (parse("anonymous: {enabled: false, conditions: [{path: /}]}"), "anonymous.conditions"),
            (parse("other: 1"), "other"),
            (parse(&many), "jwt: must have at most 64 items"),
            (
                AuthenticationConfig::parse("apiVersion: v1\nkind: Pod"),
                "expected an AuthenticationConfiguration",
            ),
        ] {
            let reason = found.map(|_| ()).unwrap_err();
            assert!(reason.contains(field), "{field}: {reason}");
        }
    }

    #[test]
    fn the_number_of_expressions_is_limited() {
        let of = |count| {
            let rules = vec!["{expression: 'true', message: m}"; count].join(", ");
            issuer_with("url: 'https://a', audiences: [b]", &format!("claimValidationRules: [{rules}]"))
        };
        assert!(of(64).is_ok());
        assert!(of(65).err().unwrap().contains("must have at most 64 items"));
    }
}

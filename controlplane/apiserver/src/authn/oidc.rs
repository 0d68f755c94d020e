//! Authenticates users of OpenID Connect issuers: JSON web tokens that another server signs.
//!
//! Source: `k8s.io/apiserver/plugin/pkg/authenticator/token/oidc`.

mod claims;
pub(crate) mod config;
mod distributed;
mod es512;
mod expression;
mod keys;

use std::sync::Arc;

use arc_swap::ArcSwap;
use coracle_error_chain::chain;
use jsonwebtoken::{Algorithm, DecodingKey, Validation, decode, decode_header, errors::ErrorKind, jwk::Jwk};
use serde_json::Value;

use super::{Authenticating, Authenticator, Credential, User, known};
use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD};
use config::{IssuerConfig, Mapping};
use distributed::{DistributedError, Endpoints};
use futures::future::Either;
use keys::{KeyQuery, Keys};

/// Tolerance of the claim `nbf` (not before) in seconds, as in upstream's library.
const NOT_BEFORE_LEEWAY: i64 = 300;

/// The issuers of the configuration.
#[derive(Default)]
pub(super) struct Issuers(Vec<Arc<Issuer>>);

/// One issuer with its keys. The first token causes the first fetch of the keys.
struct Issuer {
    config: IssuerConfig,
    keys: Arc<Keys>,
    /// The client for distributed claims. `None` if the configuration does not read the groups from a claim.
    endpoints: Option<Endpoints>,
}

/// A token whose signature is not verified yet.
#[derive(Clone, Copy)]
struct Signed<'a> {
    token: &'a str,
    /// Algorithm of the signature. `None` means ES512.
    algorithm: Option<Algorithm>,
    /// Seconds since 1970.
    now: i64,
}

/// Reason why a token of a known issuer is refused.
#[derive(Debug, thiserror::Error)]
enum Refusal {
    #[error("cannot get the keys of the issuer: {0}")]
    Keys(String),
    #[error("the issuer has no key for the token")]
    UnknownKey,
    #[error("the signing algorithm {0:?} is not allowed")]
    Algorithm(Algorithm),
    #[error(transparent)]
    Token(#[from] jsonwebtoken::errors::Error),
    #[error("the token is not valid yet")]
    TooEarly,
    #[error(transparent)]
    Claims(#[from] claims::ClaimError),
    #[error("cannot resolve the distributed claim {claim:?}")]
    Distributed {
        claim: String,
        #[source]
        source: DistributedError,
    },
    #[error("the endpoint of the claim {0:?} returned a token that is refused")]
    DistributedToken(String, #[source] Box<Refusal>),
}

impl Authenticator for ArcSwap<Issuers> {
    fn authenticate<'a>(&'a self, credential: &'a Credential<'a>) -> Authenticating<'a> {
        self.load().authenticate(credential)
    }
}

// === impl Issuers ===

impl Issuers {
    /// The issuers with these configurations.
    ///
    /// # Errors
    /// An issuer's authority is invalid.
    pub(super) fn new(configs: Vec<IssuerConfig>) -> Result<Self, String> {
        let issuer = |config: IssuerConfig| {
            let has_claim = matches!(config.groups, Some(Mapping::Claim(_)));
            let endpoints = has_claim.then(|| Endpoints::new(&config)).transpose()?;
            Ok(Arc::new(Issuer { keys: Arc::new(Keys::new(&config)?), endpoints, config }))
        };
        configs.into_iter().map(issuer).collect::<Result<Vec<_>, String>>().map(Self)
    }

    /// Authenticates a token. The returned future may outlive these issuers.
    fn authenticate<'a>(&self, credential: &'a Credential<'a>) -> Authenticating<'a> {
        let Some(token) = credential.token else { return known(None) };
        match self.find(token).cloned() {
            Some(issuer) => Either::Right(Box::pin(async move { issuer.user(token).await })),
            None => known(None),
        }
    }

    /// The issuer that a token names.
    fn find(&self, token: &str) -> Option<&Arc<Issuer>> {
        if self.0.is_empty() {
            return None;
        }
        // The issuer is not verified yet: it only selects the keys.
        let issuer = unverified_issuer(token)?;
        self.0.iter().find(|one| one.config.url == issuer)
    }
}

// === impl Issuer ===

impl Issuer {
    async fn user(&self, token: &str) -> Option<User> {
        match self.verified(token).await {
            Ok(user) => Some(user),
            Err(refusal) => {
                tracing::debug!(issuer = self.config.url, refusal = chain(&refusal), "refused a token");
                None
            }
        }
    }

    async fn verified(&self, token: &str) -> Result<User, Refusal> {
        let now = jiff::Timestamp::now().as_second();
        let mut claims = self.claims(token, now).await?;
        self.add_groups(&mut claims, now).await?;
        Ok(claims::user(&self.config, &claims)?)
    }

    /// Adds the groups that the issuer keeps at another endpoint. As upstream, only the claim of the groups can be
    /// distributed.
    async fn add_groups(&self, claims: &mut Value, now: i64) -> Result<(), Refusal> {
        let (Some(endpoints), Some(Mapping::Claim(groups))) = (&self.endpoints, &self.config.groups) else {
            return Ok(());
        };
        let claim = &groups.claim;
        let failed = |source| Refusal::Distributed { claim: claim.clone(), source };
        let Some(source) = distributed::source(claims, claim).map_err(failed)? else { return Ok(()) };
        let token = endpoints.token(&source).await.map_err(failed)?;
        let found = self.claims(&token, now).await;
        let found = found.map_err(|refusal| Refusal::DistributedToken(claim.clone(), Box::new(refusal)))?;
        distributed::add(claims, claim, &found).map_err(failed)
    }

    /// The claims of a token that the issuer has signed for this server, and that is valid now.
    async fn claims(&self, token: &str, now: i64) -> Result<Value, Refusal> {
        // If ES512 is not allowed, `decode_header` refuses the token, because it does not support this algorithm.
        let claims = match es512::header(token).filter(|_| self.config.has_es512) {
            Some(header) => {
                let wanted = KeyQuery::new(header.kid.as_deref(), None);
                self.verified_claims(wanted, Signed { token, algorithm: None, now }).await?
            }
            None => {
                let header = decode_header(token)?;
                if !self.config.algorithms.contains(&header.alg) {
                    return Err(Refusal::Algorithm(header.alg));
                }
                let algorithm = Some(header.alg);
                let wanted = KeyQuery::new(header.kid.as_deref(), algorithm);
                self.verified_claims(wanted, Signed { token, algorithm, now }).await?
            }
        };
        let starts = claims["nbf"].as_f64().unwrap_or(0.0);
        #[expect(clippy::cast_precision_loss, reason = "seconds of today have 31 bits")]
        if starts > now.saturating_add(NOT_BEFORE_LEEWAY) as f64 {
            return Err(Refusal::TooEarly);
        }
        Ok(claims)
    }

    /// The claims of a token, which one of the issuer's keys has signed.
    async fn verified_claims(&self, wanted: KeyQuery<'_>, signed: Signed<'_>) -> Result<Value, Refusal> {
        let keys = self.keys.find(wanted).await.map_err(Refusal::Keys)?;
        let refusal = match signed.claims(&keys, &self.config) {
            // For a token with an unknown key id, `Keys::find` has already fetched the keys.
            Err(refusal) if !wanted.has_id() && refusal.is_of_key() => refusal,
            outcome => return outcome,
        };
        let newer = self.keys.newer(wanted, &keys).await;
        if newer.is_empty() { Err(refusal) } else { signed.claims(&newer, &self.config) }
    }
}

// === impl Signed ===

impl Signed<'_> {
    /// The claims of the token, if one of the keys has signed it.
    fn claims(self, keys: &[Jwk], config: &IssuerConfig) -> Result<Value, Refusal> {
        let mut refusal = Refusal::UnknownKey;
        for key in keys {
            let outcome = match self.algorithm {
                None => es512::claims(self.token, key, config, self.now).map_err(Refusal::from),
                Some(algorithm) => signed_claims(self.token, algorithm, key, config),
            };
            match outcome {
                // Another key may have signed the token.
                Err(other) if other.is_of_key() => refusal = other,
                outcome => return outcome,
            }
        }
        Err(refusal)
    }
}

// === impl Refusal ===

impl Refusal {
    /// Whether the refusal depends on the key: another key may verify the token.
    fn is_of_key(&self) -> bool {
        match self {
            Self::UnknownKey => true,
            Self::Token(error) => matches!(
                error.kind(),
                ErrorKind::InvalidSignature
                    | ErrorKind::InvalidEcdsaKey
                    | ErrorKind::InvalidRsaKey(_)
                    | ErrorKind::InvalidKeyFormat
                    | ErrorKind::Base64(_)
            ),
            _ => false,
        }
    }
}

/// The claims of a token that is signed with the key. ES512 is not supported here.
fn signed_claims(
    token: &str,
    algorithm: Algorithm,
    key: &Jwk,
    config: &IssuerConfig,
) -> Result<Value, Refusal> {
    let key = DecodingKey::from_jwk(key)?;
    let mut validation = Validation::new(algorithm);
    validation.leeway = 0;
    validation.set_issuer(&[&config.url]);
    validation.set_audience(&config.audiences);
    validation.set_required_spec_claims(&["exp", "iss", "aud"]);
    Ok(decode::<Value>(token, &key, &validation)?.claims)
}

/// The issuer that a token names. The token is not verified.
fn unverified_issuer(token: &str) -> Option<String> {
    let mut parts = token.split('.');
    let (_header, payload, _signature) = (parts.next()?, parts.next()?, parts.next()?);
    parts.next().is_none().then_some(())?;
    let payload = BASE64_URL_SAFE_NO_PAD.decode(payload).ok()?;
    let claims: Value = serde_json::from_slice(&payload).ok()?;
    claims["iss"].as_str().map(str::to_owned)
}

/// Fuzz target: parses a token of an issuer, and maps its claims without verifying the signature.
#[cfg(any(test, feature = "fuzzing"))]
pub(super) fn fuzz(token: &str) {
    let _issuer = unverified_issuer(token);
    let _header = decode_header(token);
    let payload = token.split('.').nth(1).and_then(|payload| BASE64_URL_SAFE_NO_PAD.decode(payload).ok());
    let claims = payload.and_then(|payload| serde_json::from_slice(&payload).ok());
    if let (Some(issuer), Some(claims)) = (fuzzed_issuer(), claims)
        && let Ok(user) = claims::user(issuer, &claims)
    {
        let mut groups = user.groups.iter().filter(|group| *group != "system:authenticated");
        assert!(user.name.starts_with("x:") && groups.all(|group| group.starts_with("g:")));
    }
}

/// Fuzz target: the discovery document and the key set of an issuer, with a line end between them. Verifies a token of
/// each algorithm with each key.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn fuzz_keys(data: &[u8]) {
    // Algorithms, and bytes of their signatures.
    const SIGNATURES: [(&str, usize); 5] =
        [("RS256", 256), ("PS384", 512), ("ES256", 64), ("ES384", 96), ("ES512", 132)];
    let mut documents = data.splitn(2, |byte| *byte == b'\n').map(serde_json::from_slice::<Value>);
    let Some(Ok(document)) = documents.next() else { return };
    let _url = keys::key_set_url(&document);
    let Some(Ok(set)) = documents.next() else { return };
    let (Ok(keys), Some(issuer)) = (keys::parse(&set), fuzzed_issuer()) else { return };
    for (algorithm, length) in SIGNATURES {
        let header = BASE64_URL_SAFE_NO_PAD.encode(format!("{{\"alg\":\"{algorithm}\"}}"));
        let token = format!("{header}.e30.{}", BASE64_URL_SAFE_NO_PAD.encode(vec![1_u8; length]));
        for key in &keys {
            let is_accepted = match decode_header(&token) {
                Ok(header) => signed_claims(&token, header.alg, key, issuer).is_ok(),
                Err(_es512) => es512::claims(&token, key, issuer, 0).is_ok(),
            };
            assert!(!is_accepted, "a token without claims was accepted: {token}");
        }
    }
}

/// The issuer in fuzz targets.
#[cfg(any(test, feature = "fuzzing"))]
fn fuzzed_issuer() -> Option<&'static IssuerConfig> {
    const CONFIG: &str = "{apiVersion: apiserver.config.k8s.io/v1, kind: AuthenticationConfiguration, jwt: [{issuer: \
                          {url: 'https://a', audiences: [b]}, claimMappings: {username: {claim: email, prefix: 'x:'}, \
                          groups: {claim: groups, prefix: 'g:'}, uid: {claim: sub}}}]}";
    static ISSUER: std::sync::LazyLock<Option<IssuerConfig>> =
        std::sync::LazyLock::new(|| config::AuthenticationConfig::parse(CONFIG).ok()?.issuers.pop());
    std::sync::LazyLock::force(&ISSUER).as_ref()
}

#[cfg(test)]
mod tests;

//! Groups that an issuer keeps at another endpoint: distributed claims (OpenID Connect Core 1.0, section 5.6.2).
//!
//! The endpoint returns a second token with the claim. Unlike upstream, the issuer of the first token must have signed
//! the second token. If the second token has a subject, it must equal the subject of the first token. Otherwise an
//! endpoint could give any groups to a user.

use std::{collections::BTreeMap, time::Duration};

use http::{HeaderValue, header};
use reqwest::{Client, redirect};
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::Value;

use super::{
    config::{IssuerConfig, check_url},
    keys,
};
use crate::{request_owner, webhook_connections::WebhookConnections};

/// Maximum bytes of a token with a distributed claim.
const MAX_TOKEN: usize = 256 << 10;
/// Maximum number of values of a distributed claim.
const MAX_VALUES: usize = 4096;
/// Maximum concurrent requests for the claims of one issuer's tokens. One owner of requests gets at most half of these
/// requests.
const MAX_CONCURRENT: usize = 16;
/// Maximum requests that wait for their turn. One owner gets at most a quarter of these waiting requests.
const MAX_WAITING: usize = 256;
/// Timeout of a request for a claim, including the wait for its turn.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Reason why a distributed claim is not available.
#[derive(Debug, thiserror::Error)]
pub(super) enum DistributedError {
    #[error("{0} is missing")]
    Missing(&'static str),
    #[error("{name} is invalid")]
    Invalid {
        name: &'static str,
        #[source]
        source: serde_json::Error,
    },
    #[error("_claim_sources does not have the source {0:?} of _claim_names")]
    NoSource(String),
    #[error("{0}")]
    Endpoint(String),
    #[error("too many requests wait for distributed claims")]
    TooMany,
    #[error("the endpoint {0} did not respond within {limit:?}", limit = TIMEOUT)]
    Timeout(String),
    #[error("the access token is not a valid header value")]
    AccessToken(#[source] header::InvalidHeaderValue),
    #[error("cannot get the claim: {0}")]
    Fetch(String),
    #[error("the token of the endpoint does not have the claim")]
    NoClaim,
    #[error("the token of the endpoint has another subject")]
    Subject,
    #[error("the claim has more than {most} values", most = MAX_VALUES)]
    TooManyValues,
}

/// The endpoint that has a claim, and the token for access.
#[derive(Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(default)]
pub(super) struct Source {
    /// URL of the endpoint. Empty for an aggregated claim. As upstream, aggregated claims are not supported.
    endpoint: String,
    access_token: String,
}

/// The client for the endpoints of one issuer's claims.
pub(super) struct Endpoints {
    http: Client,
    calls: WebhookConnections,
}

/// The source of a claim of a verified token. `None` if the claim is not distributed.
pub(super) fn source(claims: &Value, claim: &str) -> Result<Option<Source>, DistributedError> {
    const NAMES: &str = "_claim_names";
    const SOURCES: &str = "_claim_sources";
    let (None, Some(names)) = (claims.get(claim), claims.get(NAMES)) else { return Ok(None) };
    let names: BTreeMap<String, String> = read(NAMES, names)?;
    let sources = claims.get(SOURCES).ok_or(DistributedError::Missing(SOURCES))?;
    let mut sources: BTreeMap<String, Source> = read(SOURCES, sources)?;
    let Some(name) = names.get(claim) else { return Ok(None) };
    let source = sources.remove(name).ok_or_else(|| DistributedError::NoSource(name.clone()))?;
    if source.endpoint.is_empty() {
        return Ok(None);
    }
    check_url("endpoint", &source.endpoint).map_err(DistributedError::Endpoint)?;
    Ok(Some(source))
}

fn read<T: DeserializeOwned>(name: &'static str, value: &Value) -> Result<T, DistributedError> {
    serde_json::from_value(value.clone()).map_err(|source| DistributedError::Invalid { name, source })
}

/// Adds the claim of a second verified token to the claims of the first token.
pub(super) fn add(claims: &mut Value, claim: &str, found: &Value) -> Result<(), DistributedError> {
    let value = found.get(claim).ok_or(DistributedError::NoClaim)?;
    // Without this check, the token of another user would give the groups of that user to this user.
    if found.get("sub").is_some_and(|subject| claims.get("sub") != Some(subject)) {
        return Err(DistributedError::Subject);
    }
    if value.as_array().is_some_and(|values| values.len() > MAX_VALUES) {
        return Err(DistributedError::TooManyValues);
    }
    if let Some(claims) = claims.as_object_mut() {
        claims.insert(claim.to_owned(), value.clone());
    }
    Ok(())
}

// === impl Endpoints ===

impl Endpoints {
    /// The client for an issuer's endpoints. It trusts the authorities of the issuer, and follows no redirects.
    ///
    /// # Errors
    /// The issuer's authority is invalid.
    pub(super) fn new(config: &IssuerConfig) -> Result<Self, String> {
        let http = keys::client(config, redirect::Policy::none())?;
        Ok(Self { http, calls: WebhookConnections::of_one_host(MAX_CONCURRENT, MAX_WAITING) })
    }

    /// Gets the token with a claim. The token is not verified.
    pub(super) async fn token(&self, source: &Source) -> Result<String, DistributedError> {
        let mut request = self.http.get(&source.endpoint);
        if !source.access_token.is_empty() {
            let value = HeaderValue::from_str(&format!("Bearer {}", source.access_token));
            let mut value = value.map_err(DistributedError::AccessToken)?;
            value.set_sensitive(true);
            request = request.header(header::AUTHORIZATION, value);
        }
        let answer = async {
            let call = self.calls.acquire("", request_owner::current()).await;
            let _call = call.ok_or(DistributedError::TooMany)?;
            keys::get(request, MAX_TOKEN).await.map_err(DistributedError::Fetch)
        };
        let answer = tokio::time::timeout(TIMEOUT, answer).await;
        let answer =
            answer.unwrap_or_else(|_elapsed| Err(DistributedError::Timeout(source.endpoint.clone())))?;
        let text = String::from_utf8(answer).map_err(|error| DistributedError::Fetch(error.to_string()))?;
        Ok(text.trim().to_owned())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn with(names: Value, sources: Value) -> Value {
        json!({"sub": "7", "_claim_names": names, "_claim_sources": sources})
    }

    #[test]
    fn only_a_missing_claim_with_an_endpoint_is_distributed() {
        let sources =
            json!({"s": {"endpoint": "https://a/groups", "access_token": "x"}, "t": {"JWT": "a.b.c"}});
        let found = source(&with(json!({"groups": "s"}), sources.clone()), "groups").unwrap().unwrap();
        assert_eq!((found.endpoint.as_str(), found.access_token.as_str()), ("https://a/groups", "x"));
        let mut present = with(json!({"groups": "s"}), sources.clone());
        present["groups"] = json!(["a"]);
        for claims in [
            present,
            json!({"sub": "7"}),
            json!([]),
            with(json!({"roles": "s"}), sources.clone()),
            with(json!({"groups": "t"}), sources),
        ] {
            assert_eq!(source(&claims, "groups").unwrap(), None, "{claims}");
        }
    }

    #[test]
    fn malformed_sources_and_addresses_that_no_issuer_may_have_are_refused() {
        let of = |endpoint: &str| with(json!({"groups": "s"}), json!({"s": {"endpoint": endpoint}}));
        for claims in [
            json!({"_claim_names": {"groups": "s"}}),
            with(json!("groups"), json!({})),
            with(json!({"groups": 7}), json!({})),
            with(json!({"groups": "s"}), json!({})),
            with(json!({"groups": "s"}), json!({"s": {"endpoint": 7}})),
            of("http://a/groups"),
            of("https://a/groups?user=x"),
            of("https://a@b/groups"),
            of("https://a/groups#x"),
            of("/groups"),
            of("unix:///run/x"),
        ] {
            assert!(source(&claims, "groups").is_err(), "{claims}");
        }
    }

    #[test]
    fn a_claim_is_added_for_its_subject_and_has_a_limit() {
        let added = |found: Value| {
            let mut claims = json!({"sub": "7"});
            add(&mut claims, "groups", &found).map(|()| claims["groups"].clone())
        };
        assert_eq!(added(json!({"groups": ["a"]})).unwrap(), json!(["a"]));
        assert_eq!(added(json!({"groups": ["a"], "sub": "7"})).unwrap(), json!(["a"]));
        assert!(matches!(added(json!({"groups": ["a"], "sub": "8"})), Err(DistributedError::Subject)));
        assert!(matches!(added(json!({"roles": ["a"]})), Err(DistributedError::NoClaim)));
        assert!(added(json!({"groups": vec!["a"; MAX_VALUES]})).is_ok());
        let many = added(json!({"groups": vec!["a"; MAX_VALUES + 1]}));
        assert!(matches!(many, Err(DistributedError::TooManyValues)));
    }
}

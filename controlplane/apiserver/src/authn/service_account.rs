//! Service account tokens: issues JSON web tokens, and authenticates tokens, including a check of the objects that they
//! are bound to.

use std::sync::Arc;

use base64::Engine as _;
use futures::future::Either;
use serde_json::{Value, json};

use super::legacy_use::{self, TokenUseQueue};
use super::token_keys::TokenKeys;
use super::{
    Authenticating, Authenticator, CREDENTIAL, Credential, ExtendedToken, LegacyToken, RecordedToken, User,
    known,
};
use crate::{cache::Cache, error::Result};

/// Tolerated clock difference in seconds.
const LEEWAY: i64 = 10;
/// Seconds for which the tokens of a terminating pod stay valid after the pod's grace period, as upstream.
const TERMINATING_SECONDS: i64 = 60;

/// Issuer of tokens in Secrets. Before 1.24 Kubernetes created these tokens automatically. Since 1.24 it creates them
/// on request.
const LEGACY_ISSUER: &str = "kubernetes/serviceaccount";
const LEGACY_TYPE: &str = "kubernetes.io/service-account-token";

/// The signing keys, and the issuers and default audiences of the tokens.
pub(crate) struct Tokens {
    pub(crate) keys: TokenKeys,
    /// The first issuer issues new tokens. Tokens of all issuers are accepted.
    issuers: Vec<String>,
    pub(crate) audiences: Vec<String>,
    legacy_uses: TokenUseQueue,
}

/// The claims of a new token.
pub(crate) struct Claims<'a> {
    pub(crate) namespace: &'a str,
    pub(crate) name: &'a str,
    pub(crate) uid: &'a str,
    pub(crate) audiences: &'a [String],
    pub(crate) seconds: i64,
    /// The real validity in seconds, if it is longer than the validity in the response to the client.
    pub(crate) extended: Option<i64>,
    /// Name and uid of the bound objects by `pod`, `secret` or `node`. The token becomes invalid when a bound object is
    /// deleted.
    pub(crate) bound: Value,
}

/// Authenticates signed tokens as service accounts.
pub(super) struct ServiceAccounts(pub(super) Arc<Tokens>);

impl Authenticator for ServiceAccounts {
    fn authenticate<'a>(&'a self, credential: &'a Credential<'a>) -> Authenticating<'a> {
        let Credential { token: Some(token), audiences, cache, .. } = *credential else { return known(None) };
        match self.0.keys.unknown_to(token, &self.0.issuers) {
            Some(signer) => Either::Right(Box::pin(async move {
                signer.fetch_unknown(token).await;
                self.0.user(cache, token, audiences)
            })),
            None => known(self.0.user(cache, token, audiences)),
        }
    }
}

impl Tokens {
    /// The issuer for tokens signed by these keys. `issuers` must not be empty.
    pub(crate) fn new(
        keys: TokenKeys,
        issuers: Vec<String>,
        audiences: Vec<String>,
        legacy_uses: TokenUseQueue,
    ) -> Self {
        Self { keys, issuers, audiences, legacy_uses }
    }

    /// The issuer of new tokens.
    pub(crate) fn issuer(&self) -> &str {
        self.issuers.first().map_or("", String::as_str)
    }

    /// Whether `name` is one of the issuers.
    pub(crate) fn is_issuer(&self, name: &str) -> bool {
        self.issuers.iter().any(|own| own == name)
    }

    /// A signed token and its expiry for the client, in seconds since 1970.
    pub(crate) async fn issue(&self, claims: &Claims<'_>) -> Result<(String, i64)> {
        let now = jiff::Timestamp::now().as_second();
        let until = now + claims.seconds;
        let mut about = json!({
            "namespace": claims.namespace,
            "serviceaccount": {"name": claims.name, "uid": claims.uid},
        });
        if let (Some(about), Some(bound)) = (about.as_object_mut(), claims.bound.as_object()) {
            about.extend(bound.clone());
        }
        if let (Some(about), Some(_)) = (about.as_object_mut(), claims.extended) {
            about.insert("warnafter".to_owned(), until.into());
        }
        let ends = now + claims.extended.unwrap_or(claims.seconds);
        let payload = json!({
            "aud": claims.audiences, "exp": ends, "iat": now, "nbf": now, "iss": self.issuer(),
            "jti": uuid::Uuid::new_v4().to_string(), "kubernetes.io": about,
            "sub": format!("system:serviceaccount:{}:{}", claims.namespace, claims.name),
        });
        Ok((self.keys.sign(&payload).await?, until))
    }

    /// The service account of a token. `None` if another key signed the token, or if the token is not valid now, or not
    /// for these audiences. Also `None` if the account or a bound object no longer exists.
    pub(crate) fn user(&self, cache: &Cache, token: &str, audiences: &[String]) -> Option<User> {
        let claims = self.keys.verified(token)?;
        if claims["iss"] == LEGACY_ISSUER {
            return self.legacy_user(cache, token, &claims, audiences);
        }
        self.is_current(&claims, audiences).then_some(())?;
        let about = &claims["kubernetes.io"];
        let namespace = about["namespace"].as_str()?;
        let (name, uid) =
            (about["serviceaccount"]["name"].as_str()?, about["serviceaccount"]["uid"].as_str()?);
        require_live(cache, "serviceaccounts", namespace, name, uid)?;
        let mut user = account(namespace, name, uid);
        user.audiences = requested_audiences(&claims, audiences);
        if let Some(id) = claims["jti"].as_str().filter(|id| !id.is_empty()) {
            user.extra.insert(CREDENTIAL.to_owned(), vec![format!("JTI={id}")]);
        }
        if let Some(node) = about.get("node") {
            // A token that is bound only to a node is valid while the Node exists. A pod's token depends only on the
            // pod.
            if about.get("pod").is_none() {
                require_live(cache, "nodes", "", node["name"].as_str()?, node["uid"].as_str()?)?;
            }
            for field in ["name", "uid"] {
                let Some(value) = node[field].as_str() else { continue };
                let key = format!("authentication.kubernetes.io/node-{field}");
                user.extra.insert(key, vec![value.to_owned()]);
            }
        }
        for (claim, resource) in [("pod", "pods"), ("secret", "secrets")] {
            let Some(bound) = about.get(claim) else { continue };
            let (name, uid) = (bound["name"].as_str()?, bound["uid"].as_str()?);
            require_live(cache, resource, namespace, name, uid)?;
            for (field, value) in [("name", name), ("uid", uid)] {
                let key = format!("authentication.kubernetes.io/{claim}-{field}");
                user.extra.insert(key, vec![value.to_owned()]);
            }
        }
        user.recorded_token = about["warnafter"].as_i64().map(|end| {
            let late = jiff::Timestamp::now().as_second().saturating_sub(end);
            RecordedToken::Extended(ExtendedToken { subject: user.name.clone(), late })
        });
        Some(user)
    }

    /// The account of a token in a Secret. Valid while the Secret contains the token and both objects exist. Such a
    /// token does not expire, and its only audience is this server.
    fn legacy_user(&self, cache: &Cache, token: &str, claims: &Value, audiences: &[String]) -> Option<User> {
        let for_us = audiences.iter().any(|one| self.audiences.contains(one));
        let claim = |name: &str| claims[format!("kubernetes.io/serviceaccount/{name}")].as_str();
        let (namespace, name) = (claim("namespace")?, claim("service-account.name")?);
        let uid = claim("service-account.uid")?;
        for_us.then_some(())?;
        let kind = coracle_kinds::kind::by_resource("", "v1", "secrets")?;
        let secret = cache.get(kind, namespace, claim("secret.name")?)?.value();
        let stored = base64::prelude::BASE64_STANDARD.decode(secret["data"]["token"].as_str()?).ok()?;
        let is_live = secret["metadata"]["deletionTimestamp"].is_null();
        (is_live && secret["type"] == LEGACY_TYPE && stored == token.as_bytes()).then_some(())?;
        require_live(cache, "serviceaccounts", namespace, name, uid)?;
        // As upstream, the use of a refused token is also recorded, so that an administrator sees that the token is
        // still used.
        self.legacy_uses.note(&secret);
        if legacy_use::is_invalid(&secret) {
            let name = claim("secret.name").unwrap_or_default();
            tracing::debug!(namespace, secret = name, "refused a token that is marked as invalid");
            return None;
        }
        let secret = claim("secret.name")?.to_owned();
        let is_generated = names_secret(cache, namespace, name, &secret);
        let mut user = account(namespace, name, uid);
        user.recorded_token = Some(RecordedToken::Legacy(LegacyToken { secret, is_generated }));
        Some(user)
    }

    fn is_current(&self, claims: &Value, audiences: &[String]) -> bool {
        let now = jiff::Timestamp::now().as_second();
        let time = |claim: &str, default| claims[claim].as_i64().unwrap_or(default);
        claims["iss"].as_str().is_some_and(|name| self.is_issuer(name))
            && !requested_audiences(claims, audiences).is_empty()
            && time("exp", 0) > now - LEEWAY
            && time("nbf", i64::MAX) <= now + LEEWAY
    }
}

/// Fuzz target: parses a service account token without a valid signature.
#[cfg(any(test, feature = "fuzzing"))]
pub(super) fn fuzz(token: &str) {
    static KEYS: std::sync::LazyLock<Option<TokenKeys>> = std::sync::LazyLock::new(|| {
        use ring::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair};
        let random = ring::rand::SystemRandom::new();
        let key = EcdsaKeyPair::generate_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, &random).ok()?;
        TokenKeys::own(key.as_ref())
    });
    if let Some(keys) = &*KEYS {
        assert!(keys.verified(token).is_none(), "a token without a valid signature was accepted: {token}");
    }
}

/// The requested audiences for which a token with these claims is intended.
fn requested_audiences(claims: &Value, requested: &[String]) -> Vec<String> {
    let of_token = claims["aud"].as_array().map(Vec::as_slice).unwrap_or_default();
    requested.iter().filter(|one| of_token.iter().any(|other| other == one.as_str())).cloned().collect()
}

fn account(namespace: &str, name: &str, uid: &str) -> User {
    let mut user = User::new(
        &format!("system:serviceaccount:{namespace}:{name}"),
        &["system:serviceaccounts", &format!("system:serviceaccounts:{namespace}")],
    );
    uid.clone_into(&mut user.uid);
    user
}

/// Whether the `secrets` of a service account list a Secret.
fn names_secret(cache: &Cache, namespace: &str, name: &str, secret: &str) -> bool {
    let kind = coracle_kinds::kind::by_resource("", "v1", "serviceaccounts");
    let account = kind.and_then(|kind| cache.get(kind, namespace, name));
    let named = account.map(|account| account.part(&[&["secrets"]]));
    named.is_some_and(|account| {
        account["secrets"].as_array().into_iter().flatten().any(|one| one["name"] == secret)
    })
}

/// Checks that the object exists with this name and uid, and is not being deleted. Terminating pods count as existing
/// for a limited time.
fn require_live(cache: &Cache, resource: &str, namespace: &str, name: &str, uid: &str) -> Option<()> {
    let kind = coracle_kinds::kind::by_resource("", "v1", resource)?;
    let fields: &[&[&str]] = &[&["metadata", "deletionTimestamp"], &["metadata", "uid"]];
    let object = cache.get(kind, namespace, name)?.part(fields);
    let deletion = &object["metadata"]["deletionTimestamp"];
    let is_live = match resource {
        "pods" => is_pod_live(deletion, jiff::Timestamp::now().as_second()),
        _ => deletion.is_null(),
    };
    (is_live && object["metadata"]["uid"] == uid).then_some(())
}

/// Whether the tokens of a pod are still valid. `deletion` is its `deletionTimestamp`, the end of the grace period;
/// `now` is in Unix seconds. Tokens end one minute after the grace period, even if the node never confirms the
/// deletion. Source: `invalidIfDeletedBefore` in `pkg/serviceaccount`.
fn is_pod_live(deletion: &Value, now: i64) -> bool {
    let end = deletion.as_str().and_then(|text| text.parse::<jiff::Timestamp>().ok());
    deletion.is_null() || end.is_some_and(|end| now <= end.as_second().saturating_add(TERMINATING_SECONDS))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_of_a_terminating_pod_end_a_minute_after_its_grace_period() {
        let end: jiff::Timestamp = "2026-01-01T00:00:00Z".parse().unwrap();
        let deletion = json!(end.to_string());
        for (after, expect) in [(-3600, true), (0, true), (60, true), (61, false)] {
            assert_eq!(is_pod_live(&deletion, end.as_second() + after), expect, "{after}");
        }
        assert!(is_pod_live(&Value::Null, end.as_second()));
        assert!(!is_pod_live(&json!("soon"), end.as_second()));
    }
}

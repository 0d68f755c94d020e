//! Service-account tokens: JSON web tokens that this server signs (ES256) and checks, with the
//! objects that they are bound to.

use std::sync::Arc;

use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD};
use ring::signature::{self, EcdsaKeyPair, KeyPair as _};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use super::legacy_use::{self, Uses};
use super::{Authenticating, Authenticator, CREDENTIAL, Credential, User, known};
use crate::{
    cache::Cache,
    error::{ApiError, Result},
};

/// Tolerated clock difference in seconds.
const LEEWAY: i64 = 10;

/// Issuer of tokens in Secrets, which Kubernetes made before 1.24 and makes on demand since.
const LEGACY_ISSUER: &str = "kubernetes/serviceaccount";
const LEGACY_TYPE: &str = "kubernetes.io/service-account-token";

/// The signing key, and the issuer and default audiences of the tokens.
pub(crate) struct Tokens {
    key: EcdsaKeyPair,
    key_id: String,
    pub(crate) issuer: String,
    pub(crate) audiences: Vec<String>,
    legacy_uses: Uses,
}

/// The claims of a new token.
pub(crate) struct Claims<'a> {
    pub(crate) namespace: &'a str,
    pub(crate) name: &'a str,
    pub(crate) uid: &'a str,
    pub(crate) audiences: &'a [String],
    pub(crate) seconds: i64,
    /// Claims about the bound objects, by `pod`, `secret` or `node`: name and uid. The token is invalid once the bound
    /// object is deleted.
    pub(crate) bound: Value,
}

/// The service accounts of signed tokens.
pub(super) struct ServiceAccounts(pub(super) Arc<Tokens>);

impl Authenticator for ServiceAccounts {
    fn authenticate<'a>(&'a self, credential: &'a Credential<'a>) -> Authenticating<'a> {
        let Credential { token, audiences, cache, .. } = credential;
        known(token.and_then(|token| self.0.user(cache, token, audiences)))
    }
}

impl Tokens {
    /// Creates the issuer of tokens from a PKCS#8 key on the P-256 curve.
    pub(crate) fn new(
        pkcs8: &[u8],
        issuer: String,
        audiences: Vec<String>,
        legacy_uses: Uses,
    ) -> Option<Self> {
        let random = ring::rand::SystemRandom::new();
        let algorithm = &signature::ECDSA_P256_SHA256_FIXED_SIGNING;
        let key = EcdsaKeyPair::from_pkcs8(algorithm, pkcs8, &random).ok()?;
        let key_id = BASE64_URL_SAFE_NO_PAD.encode(Sha256::digest(key.public_key().as_ref()));
        Some(Self { key, key_id, issuer, audiences, legacy_uses })
    }

    /// A signed token and the second when it ends.
    pub(crate) fn issue(&self, claims: &Claims<'_>) -> Result<(String, i64)> {
        let now = jiff::Timestamp::now().as_second();
        let until = now + claims.seconds;
        let mut about = json!({
            "namespace": claims.namespace,
            "serviceaccount": {"name": claims.name, "uid": claims.uid},
        });
        if let (Some(about), Some(bound)) = (about.as_object_mut(), claims.bound.as_object()) {
            about.extend(bound.clone());
        }
        let payload = json!({
            "aud": claims.audiences, "exp": until, "iat": now, "nbf": now, "iss": self.issuer,
            "jti": uuid::Uuid::new_v4().to_string(), "kubernetes.io": about,
            "sub": format!("system:serviceaccount:{}:{}", claims.namespace, claims.name),
        });
        let header = json!({"alg": "ES256", "kid": self.key_id, "typ": "JWT"});
        Ok((self.sign(&header, &payload)?, until))
    }

    /// A JSON web token with this header and payload.
    pub(crate) fn sign(&self, header: &Value, payload: &Value) -> Result<String> {
        let random = ring::rand::SystemRandom::new();
        let encode = |value: &Value| BASE64_URL_SAFE_NO_PAD.encode(value.to_string());
        let signed = format!("{}.{}", encode(header), encode(payload));
        let signature = self.key.sign(&random, signed.as_bytes());
        let signature = signature.map_err(|_unspecified| ApiError::internal("cannot sign a token"))?;
        Ok(format!("{signed}.{}", BASE64_URL_SAFE_NO_PAD.encode(signature)))
    }

    /// The service account of a token. `None` if another key signed the token, it is not valid now or for these
    /// audiences, or the account or a bound object does not exist any more.
    pub(crate) fn user(&self, cache: &Cache, token: &str, audiences: &[String]) -> Option<User> {
        let claims = self.verified(token)?;
        if claims["iss"] == LEGACY_ISSUER {
            return self.legacy_user(cache, token, &claims, audiences);
        }
        self.is_current(&claims, audiences).then_some(())?;
        let about = &claims["kubernetes.io"];
        let namespace = about["namespace"].as_str()?;
        let (name, uid) =
            (about["serviceaccount"]["name"].as_str()?, about["serviceaccount"]["uid"].as_str()?);
        require_live(cache, "serviceaccounts", (namespace, name, uid))?;
        let mut user = account(namespace, name, uid);
        if let Some(id) = claims["jti"].as_str().filter(|id| !id.is_empty()) {
            user.extra.insert(CREDENTIAL.to_owned(), vec![format!("JTI={id}")]);
        }
        if let Some(node) = about.get("node") {
            // A token that is bound to a node alone is valid while the Node exists. A pod's token needs only the pod.
            if about.get("pod").is_none() {
                require_live(cache, "nodes", ("", node["name"].as_str()?, node["uid"].as_str()?))?;
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
            require_live(cache, resource, (namespace, name, uid))?;
            for (field, value) in [("name", name), ("uid", uid)] {
                let key = format!("authentication.kubernetes.io/{claim}-{field}");
                user.extra.insert(key, vec![value.to_owned()]);
            }
        }
        Some(user)
    }

    /// The account of a token in a Secret, while the Secret has the token and both objects exist. Such a token does not
    /// expire, and its only audience is this server.
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
        require_live(cache, "serviceaccounts", (namespace, name, uid))?;
        (!legacy_use::is_invalid(&secret)).then_some(())?;
        self.legacy_uses.note(&secret);
        Some(account(namespace, name, uid))
    }

    fn verified(&self, token: &str) -> Option<Value> {
        let (signed, signature) = token.rsplit_once('.')?;
        let (header, payload) = signed.split_once('.')?;
        let decode = |text: &str| BASE64_URL_SAFE_NO_PAD.decode(text).ok();
        let header: Value = serde_json::from_slice(&decode(header)?).ok()?;
        (header["alg"] == "ES256").then_some(())?;
        let key = signature::UnparsedPublicKey::new(
            &signature::ECDSA_P256_SHA256_FIXED,
            self.key.public_key().as_ref(),
        );
        key.verify(signed.as_bytes(), &decode(signature)?).ok()?;
        serde_json::from_slice(&decode(payload)?).ok()
    }

    fn is_current(&self, claims: &Value, audiences: &[String]) -> bool {
        let now = jiff::Timestamp::now().as_second();
        let time = |claim: &str, default| claims[claim].as_i64().unwrap_or(default);
        let audience = claims["aud"].as_array().is_some_and(|list| {
            list.iter().filter_map(Value::as_str).any(|one| audiences.iter().any(|own| own == one))
        });
        claims["iss"] == self.issuer.as_str()
            && audience
            && time("exp", 0) > now - LEEWAY
            && time("nbf", i64::MAX) <= now + LEEWAY
    }

    /// The public key as a JSON web key set.
    pub(crate) fn key_set(&self) -> Value {
        // An uncompressed point: 4, x, y.
        let point = self.key.public_key().as_ref();
        let part = |range| point.get(range).map(|bytes| BASE64_URL_SAFE_NO_PAD.encode(bytes));
        json!({"keys": [{
            "use": "sig", "kty": "EC", "kid": self.key_id, "alg": "ES256", "crv": "P-256",
            "x": part(1..33), "y": part(33..65),
        }]})
    }
}

/// Fuzz target: parses a service account token without a valid signature.
#[cfg(any(test, feature = "fuzzing"))]
pub(super) fn fuzz(token: &str) {
    static TOKENS: std::sync::LazyLock<Option<Tokens>> = std::sync::LazyLock::new(|| {
        let random = ring::rand::SystemRandom::new();
        let key = EcdsaKeyPair::generate_pkcs8(&signature::ECDSA_P256_SHA256_FIXED_SIGNING, &random).ok()?;
        Tokens::new(key.as_ref(), "https://a".to_owned(), vec!["b".to_owned()], legacy_use::queue().0)
    });
    if let Some(tokens) = &*TOKENS {
        assert!(tokens.verified(token).is_none(), "a token without a valid signature was accepted: {token}");
    }
}

fn account(namespace: &str, name: &str, uid: &str) -> User {
    let mut user = User::new(
        &format!("system:serviceaccount:{namespace}:{name}"),
        &["system:serviceaccounts", &format!("system:serviceaccounts:{namespace}")],
    );
    uid.clone_into(&mut user.uid);
    user
}

/// `Some` if the object exists with this name and uid and is not being deleted. Terminating pods count as existing.
fn require_live(cache: &Cache, resource: &str, (namespace, name, uid): (&str, &str, &str)) -> Option<()> {
    let kind = coracle_kinds::kind::by_resource("", "v1", resource)?;
    let object = cache.get(kind, namespace, name)?.value();
    let live = object["metadata"]["deletionTimestamp"].is_null() || resource == "pods";
    (live && object["metadata"]["uid"] == uid).then_some(())
}

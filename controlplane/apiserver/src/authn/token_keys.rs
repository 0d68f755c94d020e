//! The keys of service account tokens: this server's own key, or the keys of an external signer.

use std::sync::Arc;

use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD};
use coracle_token_signer::TokenSigner;
use ring::signature::{self, EcdsaKeyPair, KeyPair as _};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use crate::error::{ApiError, Result};

/// The keys that sign tokens and verify them.
pub(crate) enum TokenKeys {
    Own(Box<OwnKey>),
    /// A process that holds the private keys.
    External(Arc<TokenSigner>),
}

/// A key of this server.
pub(crate) struct OwnKey {
    pair: EcdsaKeyPair,
    id: String,
}

// === impl TokenKeys ===

impl TokenKeys {
    /// The keys of the signer, or else the server's own key. `None` if the own key is invalid.
    pub(crate) fn new(signer: Option<Arc<TokenSigner>>, own: &[u8]) -> Option<Self> {
        signer.map_or_else(|| Self::own(own), |signer| Some(Self::External(signer)))
    }

    /// Reads a PKCS#8 key on the P-256 curve.
    pub(crate) fn own(pkcs8: &[u8]) -> Option<Self> {
        let random = ring::rand::SystemRandom::new();
        let algorithm = &signature::ECDSA_P256_SHA256_FIXED_SIGNING;
        let pair = EcdsaKeyPair::from_pkcs8(algorithm, pkcs8, &random).ok()?;
        let id = BASE64_URL_SAFE_NO_PAD.encode(Sha256::digest(pair.public_key().as_ref()));
        Some(Self::Own(Box::new(OwnKey { pair, id })))
    }

    /// Maximum validity of tokens in seconds. `None` for no limit.
    pub(crate) fn max_seconds(&self) -> Option<i64> {
        match self {
            Self::Own(_) => None,
            Self::External(signer) => Some(signer.max_seconds()),
        }
    }

    /// Signs a token with these claims.
    pub(crate) async fn sign(&self, claims: &Value) -> Result<String> {
        match self {
            Self::Own(key) => key.sign(&json!({"alg": "ES256", "kid": key.id, "typ": "JWT"}), claims),
            // As upstream, the client gets a server error. The reason is only logged, because it may contain paths.
            Self::External(signer) => signer.sign(claims).await.map_err(|error| {
                tracing::warn!(%error, "cannot sign a service account token");
                ApiError::internal("failed to generate token: the external signer failed")
            }),
        }
    }

    /// The claims of a token. `None` if none of the keys has signed the token.
    pub(crate) fn verified(&self, token: &str) -> Option<Value> {
        match self {
            Self::Own(key) => key.verified(token),
            Self::External(signer) => signer.verify(token),
        }
    }

    /// The external signer, if a token of one of these issuers names an unknown key.
    pub(crate) fn unknown_to(&self, token: &str, issuers: &[String]) -> Option<&TokenSigner> {
        let Self::External(signer) = self else { return None };
        let is_issued = || issuers.iter().any(|issuer| is_of(token, issuer));
        (signer.is_unknown(token) && is_issued()).then_some(signer)
    }

    /// Whether the key is this server's own key. The keys of an external signer can change at any time.
    pub(crate) fn are_own(&self) -> bool {
        matches!(self, Self::Own(_))
    }

    /// The public keys as a JSON web key set.
    pub(crate) fn key_set(&self) -> Value {
        match self {
            Self::Own(key) => key.key_set(),
            Self::External(signer) => signer.key_set(),
        }
    }

    /// The algorithms with which tokens may be signed.
    pub(crate) fn algorithms(&self) -> Vec<&'static str> {
        match self {
            Self::Own(_) => vec!["ES256"],
            Self::External(signer) => signer.algorithms(),
        }
    }
}

// === impl OwnKey ===

impl OwnKey {
    /// A JSON web token with this header and payload.
    pub(crate) fn sign(&self, header: &Value, payload: &Value) -> Result<String> {
        let random = ring::rand::SystemRandom::new();
        let encode = |value: &Value| BASE64_URL_SAFE_NO_PAD.encode(value.to_string());
        let signed = format!("{}.{}", encode(header), encode(payload));
        let signature = self.pair.sign(&random, signed.as_bytes());
        let signature = signature.map_err(|_unspecified| ApiError::internal("cannot sign a token"))?;
        Ok(format!("{signed}.{}", BASE64_URL_SAFE_NO_PAD.encode(signature)))
    }

    fn verified(&self, token: &str) -> Option<Value> {
        let (signed, signature) = token.rsplit_once('.')?;
        let (header, payload) = signed.split_once('.')?;
        let decode = |text: &str| BASE64_URL_SAFE_NO_PAD.decode(text).ok();
        let header: Value = serde_json::from_slice(&decode(header)?).ok()?;
        (header["alg"] == "ES256").then_some(())?;
        let key = signature::UnparsedPublicKey::new(
            &signature::ECDSA_P256_SHA256_FIXED,
            self.pair.public_key().as_ref(),
        );
        key.verify(signed.as_bytes(), &decode(signature)?).ok()?;
        serde_json::from_slice(&decode(payload)?).ok()
    }

    fn key_set(&self) -> Value {
        // An uncompressed point: 4, x, y.
        let point = self.pair.public_key().as_ref();
        let part = |range| point.get(range).map(|bytes| BASE64_URL_SAFE_NO_PAD.encode(bytes));
        json!({"keys": [{
            "use": "sig", "kty": "EC", "kid": self.id, "alg": "ES256", "crv": "P-256",
            "x": part(1..33), "y": part(33..65),
        }]})
    }
}

/// Whether an unverified token names this issuer.
fn is_of(token: &str, issuer: &str) -> bool {
    #[derive(serde::Deserialize)]
    struct Issued {
        iss: String,
    }
    let claims = token.split('.').nth(1).and_then(|claims| BASE64_URL_SAFE_NO_PAD.decode(claims).ok());
    let issued = claims.and_then(|claims| serde_json::from_slice::<Issued>(&claims).ok());
    issued.is_some_and(|issued| issued.iss == issuer)
}

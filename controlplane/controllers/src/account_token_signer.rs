//! The signer of tokens in Secrets. These tokens do not expire. They are valid while the Secret contains them.

use std::sync::Arc;

use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD};
use ring::rand::SystemRandom;
use ring::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair};
use serde_json::{Value, json};

/// A signer with the cluster's service account key.
#[derive(Clone)]
pub struct AccountTokenSigner(Arc<EcdsaKeyPair>);

impl std::fmt::Debug for AccountTokenSigner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The key must not be printed.
        f.debug_struct("AccountTokenSigner").finish_non_exhaustive()
    }
}

/// The names in a token's claims.
pub(crate) struct Subject<'a> {
    pub(crate) namespace: &'a str,
    pub(crate) secret: &'a str,
    pub(crate) account: &'a str,
    pub(crate) account_uid: &'a str,
}

impl AccountTokenSigner {
    /// Makes a signer from a P-256 key in PKCS#8 form. `None` for any other key.
    #[must_use]
    pub fn new(pkcs8: &[u8]) -> Option<Self> {
        let algorithm = &ECDSA_P256_SHA256_FIXED_SIGNING;
        EcdsaKeyPair::from_pkcs8(algorithm, pkcs8, &SystemRandom::new()).ok().map(|key| Self(Arc::new(key)))
    }

    /// A signed token. `None` if signing fails.
    pub(crate) fn sign(&self, subject: &Subject<'_>) -> Option<String> {
        let Subject { namespace, secret, account, account_uid } = subject;
        let payload = json!({
            "iss": "kubernetes/serviceaccount",
            "kubernetes.io/serviceaccount/namespace": namespace,
            "kubernetes.io/serviceaccount/secret.name": secret,
            "kubernetes.io/serviceaccount/service-account.name": account,
            "kubernetes.io/serviceaccount/service-account.uid": account_uid,
            "sub": format!("system:serviceaccount:{namespace}:{account}"),
        });
        let encode = |value: &Value| BASE64_URL_SAFE_NO_PAD.encode(value.to_string());
        let signed = format!("{}.{}", encode(&json!({"alg": "ES256", "typ": "JWT"})), encode(&payload));
        let signature = self.0.sign(&SystemRandom::new(), signed.as_bytes()).ok()?;
        Some(format!("{signed}.{}", BASE64_URL_SAFE_NO_PAD.encode(signature)))
    }
}

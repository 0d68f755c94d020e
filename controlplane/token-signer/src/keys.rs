//! The public keys of a signer.

use std::time::Duration;

use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD};
use p521::ecdsa::{Signature, VerifyingKey, signature::Verifier as _};
use ring::signature::{self, UnparsedPublicKey, VerificationAlgorithm};
use serde_json::{Value, json};
use x509_parser::{
    oid_registry::{
        OID_EC_P256, OID_KEY_TYPE_EC_PUBLIC_KEY, OID_NIST_EC_P384, OID_NIST_EC_P521, OID_PKCS1_RSAENCRYPTION,
    },
    prelude::FromDer as _,
    public_key::PublicKey,
    x509::SubjectPublicKeyInfo,
};

use crate::v1;

/// Maximum number of keys.
const MAX_KEYS: usize = 100;
/// Maximum bytes of a key's id.
pub(crate) const MAX_ID: usize = 1 << 10;

/// The keys of one response.
#[derive(Debug)]
pub(crate) struct KeySet {
    keys: Vec<Key>,
    /// Time until the keys are fetched again.
    pub(crate) max_age: Duration,
}

/// A public key.
#[derive(Debug)]
pub(crate) struct Key {
    id: String,
    form: Form,
    /// Content of the SubjectPublicKeyInfo: a point, or an RSAPublicKey.
    public: Vec<u8>,
    /// The parts of the JSON web key.
    parts: [(&'static str, String); 2],
    /// Whether the key is not published, because it verifies only legacy tokens (`exclude_from_oidc_discovery`).
    pub(crate) is_excluded: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    Rsa,
    P256,
    P384,
    P521,
}

// === impl KeySet ===

impl KeySet {
    /// Reads the keys of a response. Keys of unsupported kinds are left out.
    ///
    /// # Errors
    /// The reason why the response is invalid.
    pub(crate) fn new(response: v1::FetchKeysResponse) -> Result<Self, String> {
        let max_age = u64::try_from(response.refresh_hint_seconds).unwrap_or_default();
        if max_age == 0 {
            return Err(format!("refresh_hint_seconds is {}, not positive", response.refresh_hint_seconds));
        }
        if response.data_timestamp.is_none() {
            return Err("data_timestamp is missing".to_owned());
        }
        if response.keys.len() > MAX_KEYS {
            return Err(format!("there are {} keys, more than {MAX_KEYS}", response.keys.len()));
        }
        let keys = response.keys.into_iter().map(Key::new).collect::<Result<Vec<_>, _>>()?;
        let keys: Vec<Key> = keys.into_iter().flatten().collect();
        if keys.is_empty() {
            return Err("there are no keys of a supported kind".to_owned());
        }
        Ok(Self { keys, max_age: Duration::from_secs(max_age) })
    }

    pub(crate) fn find(&self, id: &str) -> Option<&Key> {
        self.keys.iter().find(|key| key.id == id)
    }

    /// The published keys as a JSON web key set.
    pub(crate) fn published(&self) -> Value {
        let keys: Vec<Value> = self.keys.iter().filter(|key| !key.is_excluded).map(Key::to_json).collect();
        json!({"keys": keys})
    }

    /// The algorithms of the published keys, each once.
    pub(crate) fn algorithms(&self) -> Vec<&'static str> {
        let published = self.keys.iter().filter(|key| !key.is_excluded);
        let mut found: Vec<_> = published.map(Key::algorithm).collect();
        found.sort_unstable();
        found.dedup();
        found
    }
}

// === impl Key ===

impl Key {
    /// Reads a key. `None` if this server does not support the kind of the key.
    fn new(key: v1::Key) -> Result<Option<Self>, String> {
        let id = key.key_id;
        if id.is_empty() || id.len() > MAX_ID {
            return Err(format!("the id of a key has {} bytes, not 1 to {MAX_ID}", id.len()));
        }
        let invalid = || format!("the key {id:?} is not a SubjectPublicKeyInfo in DER");
        let (rest, info) = SubjectPublicKeyInfo::from_der(&key.key).map_err(|_error| invalid())?;
        if !rest.is_empty() {
            return Err(invalid());
        }
        let found = parts(&info);
        let Some((form, parts)) = found else {
            tracing::warn!(
                ?id,
                "a key of the token signer is not RSA, P-256, P-384 or P-521: its tokens are refused"
            );
            return Ok(None);
        };
        let public = info.subject_public_key.data.to_vec();
        Ok(Some(Self { id, form, public, parts, is_excluded: key.exclude_from_oidc_discovery }))
    }

    /// The signing algorithm of the key's tokens.
    pub(crate) fn algorithm(&self) -> &'static str {
        match self.form {
            Form::Rsa => "RS256",
            Form::P256 => "ES256",
            Form::P384 => "ES384",
            Form::P521 => "ES512",
        }
    }

    /// Verifies a signature. `Some` if the signature was made with this key.
    pub(crate) fn verify(&self, signed: &[u8], signature: &[u8]) -> Option<()> {
        let algorithm: &dyn VerificationAlgorithm = match self.form {
            Form::Rsa => &signature::RSA_PKCS1_2048_8192_SHA256,
            Form::P256 => &signature::ECDSA_P256_SHA256_FIXED,
            Form::P384 => &signature::ECDSA_P384_SHA384_FIXED,
            Form::P521 => return verify_es512(&self.public, signed, signature),
        };
        UnparsedPublicKey::new(algorithm, &self.public).verify(signed, signature).ok()
    }

    fn to_json(&self) -> Value {
        let kind = if self.form == Form::Rsa { "RSA" } else { "EC" };
        let mut key = json!({"use": "sig", "kty": kind, "kid": self.id, "alg": self.algorithm()});
        for (name, value) in &self.parts {
            key[*name] = value.clone().into();
        }
        match self.form {
            Form::Rsa => {}
            Form::P256 => key["crv"] = "P-256".into(),
            Form::P384 => key["crv"] = "P-384".into(),
            Form::P521 => key["crv"] = "P-521".into(),
        }
        key
    }
}

/// Verifies a signature of ES512 (ECDSA with P-521 and SHA-512, in the form of RFC 7518). `public` is a point in the
/// form of SEC 1.
pub fn verify_es512(public: &[u8], signed: &[u8], signature: &[u8]) -> Option<()> {
    let key = VerifyingKey::from_sec1_bytes(public).ok()?;
    key.verify(signed, &Signature::from_slice(signature).ok()?).ok()
}

/// The kind of a key, and the parts of its JSON web key. `None` if the kind is not supported.
fn parts(info: &SubjectPublicKeyInfo<'_>) -> Option<(Form, [(&'static str, String); 2])> {
    let text = |bytes: &[u8]| BASE64_URL_SAFE_NO_PAD.encode(bytes);
    // DER puts a zero byte before an integer whose highest bit is set.
    let integer = |bytes: &[u8]| text(&bytes[bytes.iter().take_while(|byte| **byte == 0).count()..]);
    let algorithm = &info.algorithm;
    if algorithm.algorithm == OID_PKCS1_RSAENCRYPTION {
        let Ok(PublicKey::RSA(key)) = info.parsed() else { return None };
        return Some((Form::Rsa, [("n", integer(key.modulus)), ("e", integer(key.exponent))]));
    }
    if algorithm.algorithm != OID_KEY_TYPE_EC_PUBLIC_KEY {
        return None;
    }
    let curve = algorithm.parameters.as_ref()?.as_oid().ok()?;
    let (form, size) = match () {
        () if curve == OID_EC_P256 => (Form::P256, 32),
        () if curve == OID_NIST_EC_P384 => (Form::P384, 48),
        () if curve == OID_NIST_EC_P521 => (Form::P521, 66),
        () => return None,
    };
    // An uncompressed point: 4, x, y.
    let (head, point) = info.subject_public_key.data.split_first()?;
    let (x, y) = point.split_at_checked(size).filter(|(_, y)| *head == 4 && y.len() == size)?;
    Some((form, [("x", text(x)), ("y", text(y))]))
}

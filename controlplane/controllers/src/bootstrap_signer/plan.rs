//! The desired contents of `cluster-info`, from the bootstrap tokens.

use std::collections::BTreeMap;
use std::sync::Arc;

use base64::Engine;
use base64::prelude::{BASE64_STANDARD, BASE64_URL_SAFE_NO_PAD};
use coracle_values::CollectMap;
use jiff::Timestamp;
use ring::hmac;
use serde_json::{Map, Value, json};

use crate::object::Secret;

/// The key of the signed content.
pub(crate) const KUBECONFIG: &str = "kubeconfig";
const SIGNATURE_PREFIX: &str = "jws-kubeconfig-";

/// The desired data: the kubeconfig, and one signature for each signing token that has not expired.
pub(crate) fn desired(content: String, tokens: &[Arc<Secret>], now: Timestamp) -> BTreeMap<String, String> {
    let mut data = BTreeMap::new();
    for token in tokens {
        if let Some((id, secret)) = signing(token, now) {
            data.insert(format!("{SIGNATURE_PREFIX}{id}"), signature(&content, id, secret));
        }
    }
    data.insert(KUBECONFIG.to_owned(), content);
    data
}

/// The merge patch of the data. It deletes signatures without a token, and keeps other keys.
pub(crate) fn change(
    old: &BTreeMap<String, String>,
    desired: &BTreeMap<String, String>,
) -> Map<String, Value> {
    let is_stale = |name: &&String| name.starts_with(SIGNATURE_PREFIX) && !desired.contains_key(*name);
    let stale = old.keys().filter(is_stale).map(|name| (name.clone(), Value::Null));
    let new = desired.iter().filter(|(name, text)| old.get(*name) != Some(text));
    stale.chain(new.map(|(name, text)| (name.clone(), text.as_str().into()))).collect_map()
}

/// Id and secret of a token with the usage `signing`.
fn signing(token: &Secret, now: Timestamp) -> Option<(&str, &str)> {
    let lasts = match token.text("expiration") {
        None => true,
        Some(text) => text.parse::<Timestamp>().is_ok_and(|end| now < end),
    };
    let usable = lasts
        && token.metadata.namespace.as_deref() == Some("kube-system")
        && token.text("usage-bootstrap-signing") == Some("true");
    usable.then_some((token.text("token-id")?, token.text("token-secret")?))
}

/// A kubeconfig with the cluster's address and CA, without credentials.
pub(crate) fn kubeconfig(server: &str, authority: &str) -> String {
    let authority = BASE64_STANDARD.encode(authority);
    format!(
        "apiVersion: v1\nclusters:\n- cluster:\n    certificate-authority-data: {authority}\n    server: {server}\n  \
         name: \"\"\ncontexts: null\ncurrent-context: \"\"\nkind: Config\npreferences: {{}}\nusers: null\n"
    )
}

/// A JSON web signature (RFC 7515) with detached payload.
fn signature(content: &str, id: &str, secret: &str) -> String {
    let header = BASE64_URL_SAFE_NO_PAD.encode(json!({"alg": "HS256", "kid": id}).to_string());
    let payload = BASE64_URL_SAFE_NO_PAD.encode(content);
    let key = hmac::Key::new(hmac::HMAC_SHA256, secret.as_bytes());
    let tag = hmac::sign(&key, format!("{header}.{payload}").as_bytes());
    format!("{header}..{}", BASE64_URL_SAFE_NO_PAD.encode(tag))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(change: impl FnOnce(&mut serde_json::Value)) -> Arc<Secret> {
        let mut data = json!({"token-id": "abcdef", "token-secret": "0123456789abcdef",
            "usage-bootstrap-signing": "true", "expiration": "2030-01-01T00:00:00Z"});
        change(&mut data);
        for value in data.as_object_mut().unwrap().values_mut() {
            *value = BASE64_STANDARD.encode(value.as_str().unwrap()).into();
        }
        let metadata = json!({"name": "bootstrap-token-abcdef", "namespace": "kube-system"});
        Arc::new(serde_json::from_value(json!({"metadata": metadata, "data": data})).unwrap())
    }

    fn keys(tokens: &[Arc<Secret>]) -> Vec<String> {
        let now = "2029-01-01T00:00:00Z".parse().unwrap();
        desired("content".to_owned(), tokens, now).into_keys().collect()
    }

    #[test]
    fn each_signing_token_signs() {
        assert_eq!(keys(&[token(|_| {})]), ["jws-kubeconfig-abcdef", "kubeconfig"]);
        assert_eq!(keys(&[token(|d| d["usage-bootstrap-signing"] = "false".into())]), ["kubeconfig"]);
        assert_eq!(keys(&[token(|d| d["expiration"] = "2028-01-01T00:00:00Z".into())]), ["kubeconfig"]);
    }

    #[test]
    fn stale_signatures_are_deleted_and_other_keys_are_kept() {
        let data = |names: &[&str]| names.iter().map(|name| ((*name).to_owned(), "x".to_owned())).collect();
        let desired = data(&["kubeconfig", "jws-kubeconfig-abcdef"]);
        let old = data(&["kubeconfig", "jws-kubeconfig-ffffff", "note"]);
        let found = Value::from(change(&old, &desired));
        assert_eq!(found, json!({"jws-kubeconfig-ffffff": null, "jws-kubeconfig-abcdef": "x"}));
        assert!(change(&desired, &desired).is_empty());
    }

    #[test]
    fn a_signature_is_a_detached_hs256() {
        // Made with `openssl dgst -sha256 -hmac 0123456789abcdef` over the two encoded parts.
        let made = signature("content", "abcdef", "0123456789abcdef");
        let (header, tag) = made.split_once("..").unwrap();
        assert_eq!(BASE64_URL_SAFE_NO_PAD.decode(header).unwrap(), br#"{"alg":"HS256","kid":"abcdef"}"#);
        assert_eq!(tag, "psz1NayrXM3IaFzKZGsb5n_mBl7MjtlsZ1xE8MRmF_4");
    }
}

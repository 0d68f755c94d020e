//! Bootstrap tokens of joining machines: `id.secret`, stored as Secrets in `kube-system`.

use base64::{Engine as _, prelude::BASE64_STANDARD};
use coracle_kinds::kind::by_resource;
use coracle_values::BootstrapToken;
use serde_json::Value;
use sha2::{Digest as _, Sha256};

use super::{Authenticating, Authenticator, Credential, User, known};
use crate::cache::Cache;

const NAMESPACE: &str = "kube-system";
const TYPE: &str = "bootstrap.kubernetes.io/token";
const GROUP: &str = "system:bootstrappers";

/// Authenticates bootstrap tokens, which are valid only for this API server.
pub(super) struct BootstrapTokens {
    /// Audiences of this API server.
    pub(super) audiences: Vec<String>,
}

impl Authenticator for BootstrapTokens {
    fn authenticate<'a>(&'a self, credential: &'a Credential<'a>) -> Authenticating<'a> {
        let Credential { token, audiences, cache, .. } = credential;
        let for_us = audiences.iter().any(|one| self.audiences.contains(one));
        known(token.filter(|_| for_us).and_then(|token| user(cache, token)))
    }
}

/// The user of a token. `None` if the token does not exist, does not permit authentication, or has expired.
fn user(cache: &Cache, token: &str) -> Option<User> {
    let BootstrapToken { id, secret } = BootstrapToken::parse(token)?;
    let kind = by_resource("", "v1", "secrets")?;
    let object = cache.get(kind, NAMESPACE, &format!("bootstrap-token-{id}"))?;
    identity(&object.value(), id, secret, jiff::Timestamp::now())
}

fn identity(object: &Value, id: &str, secret: &str, now: jiff::Timestamp) -> Option<User> {
    let field = |name: &str| {
        let bytes = BASE64_STANDARD.decode(object["data"][name].as_str()?).ok()?;
        String::from_utf8(bytes).ok()
    };
    let usable = object["type"] == TYPE
        && object["metadata"]["deletionTimestamp"].is_null()
        && field("token-id").as_deref() == Some(id)
        // Compare digests, so that the duration does not depend on the secret.
        && Sha256::digest(field("token-secret")?) == Sha256::digest(secret)
        && field("usage-bootstrap-authentication").as_deref() == Some("true");
    let is_unexpired = match field("expiration") {
        None => true,
        // An invalid time counts as expired.
        Some(text) => text.parse::<jiff::Timestamp>().is_ok_and(|end| now < end),
    };
    let extra = field("auth-extra-groups").unwrap_or_default();
    let extra: Vec<&str> = extra.split(',').map(str::trim).filter(|group| !group.is_empty()).collect();
    (usable && is_unexpired && extra.iter().all(|group| is_group(group))).then(|| {
        let groups: Vec<&str> = [GROUP].into_iter().chain(extra.iter().copied()).collect();
        User::new(&format!("system:bootstrap:{id}"), &groups)
    })
}

/// Whether a group has the form `system:bootstrappers:[a-z0-9:-]{0,255}[a-z0-9]`. Tokens cannot have other groups.
fn is_group(group: &str) -> bool {
    let Some(rest) = group.strip_prefix(GROUP).and_then(|rest| rest.strip_prefix(':')) else { return false };
    let word = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    rest.len() <= 256
        && rest.bytes().last().is_some_and(word)
        && rest.bytes().all(|byte| word(byte) || b":-".contains(&byte))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn secret(change: impl FnOnce(&mut Value)) -> Value {
        let mut data = json!({"token-id": "abcdef", "token-secret": "0123456789abcdef",
            "usage-bootstrap-authentication": "true", "expiration": "2030-01-01T00:00:00Z",
            "auth-extra-groups": "system:bootstrappers:kubeadm:default-node-token"});
        change(&mut data);
        for value in data.as_object_mut().unwrap().values_mut() {
            *value = BASE64_STANDARD.encode(value.as_str().unwrap()).into();
        }
        json!({"metadata": {}, "type": TYPE, "data": data})
    }

    fn found(object: &Value, secret: &str, now: &str) -> Option<User> {
        identity(object, "abcdef", secret, now.parse().unwrap())
    }

    #[test]
    fn a_token_is_valid_with_its_secret_before_its_expiry_and_for_its_usages() {
        let (right, now) = ("0123456789abcdef", "2029-12-31T23:59:59Z");
        let user = found(&secret(|_| {}), right, now).unwrap();
        assert_eq!(user.name, "system:bootstrap:abcdef");
        let groups = [GROUP, "system:bootstrappers:kubeadm:default-node-token", "system:authenticated"];
        assert_eq!(user.groups, groups);
        assert_eq!(found(&secret(|_| {}), "0123456789abcdee", now), None);
        assert_eq!(found(&secret(|_| {}), right, "2030-01-01T00:00:00Z"), None);
        assert_eq!(found(&secret(|d| d["expiration"] = "soon".into()), right, now), None);
        let use_ = "usage-bootstrap-authentication";
        assert_eq!(found(&secret(|d| d[use_] = "false".into()), right, now), None);
        let mut other_type = secret(|_| {});
        other_type["type"] = "Opaque".into();
        assert_eq!(found(&other_type, right, now), None);
    }

    #[test]
    fn a_token_gives_only_groups_of_bootstrappers() {
        for group in ["system:masters", "system:bootstrappers:", "system:bootstrappers:A", "system:nodes"] {
            let object = secret(|d| d["auth-extra-groups"] = group.into());
            assert_eq!(found(&object, "0123456789abcdef", "2029-01-01T00:00:00Z"), None, "{group}");
        }
    }
}

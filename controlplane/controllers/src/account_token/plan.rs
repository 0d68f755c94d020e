//! The plan for one Secret, from the Secret, its service account and the cluster's CA.

use crate::object::{ObjectExt, Secret, ServiceAccount};

pub(crate) const ACCOUNT_NAME: &str = "kubernetes.io/service-account.name";
pub(crate) const ACCOUNT_UID: &str = "kubernetes.io/service-account.uid";

/// An action on a Secret.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Action {
    Nothing,
    /// The service account does not exist, or was replaced by an account with the same name.
    Delete,
    Fill(Vec<Missing>),
}

/// A part of the Secret that is missing or out of date.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Missing {
    Token,
    Ca,
    Namespace,
    Uid,
}

/// The name of the Secret's service account.
pub(crate) fn account_name(secret: &Secret) -> Option<&str> {
    secret.annotation(ACCOUNT_NAME).filter(|name| !name.is_empty())
}

pub(crate) fn plan(secret: &Secret, account: Option<&ServiceAccount>, ca: Option<&str>) -> Action {
    if secret.is_being_deleted() || account_name(secret).is_none() {
        return Action::Nothing;
    }
    let uid = secret.annotation(ACCOUNT_UID).unwrap_or_default();
    let is_valid = |account: &&ServiceAccount| !account.is_being_deleted() && is_of(secret, account);
    let Some(_account) = account.filter(is_valid) else {
        return Action::Delete;
    };
    let data = |key: &str| secret.data.get(key).map_or(&[][..], |bytes| &bytes.0);
    let parts = [
        (Missing::Token, data("token").is_empty()),
        (Missing::Ca, ca.is_some_and(|ca| data("ca.crt") != ca.as_bytes())),
        (Missing::Namespace, data("namespace").is_empty()),
        (Missing::Uid, uid.is_empty()),
    ];
    let missing: Vec<Missing> = parts.iter().filter(|(_, absent)| *absent).map(|(part, _)| *part).collect();
    if missing.is_empty() { Action::Nothing } else { Action::Fill(missing) }
}

/// Whether the Secret is for this service account, and not for an earlier or later account of the same name.
pub(crate) fn is_of(secret: &Secret, account: &ServiceAccount) -> bool {
    let uid = secret.annotation(ACCOUNT_UID).unwrap_or_default();
    uid.is_empty() || uid == account.uid()
}

#[cfg(test)]
mod tests {
    use super::*;
    use base64::{Engine as _, prelude::BASE64_STANDARD};
    use serde_json::{Value, json};

    fn secret(uid: &str, data: Value) -> Secret {
        let annotations = json!({ACCOUNT_NAME: "a", ACCOUNT_UID: uid});
        let secret = json!({"metadata": {"name": "s", "annotations": annotations}, "data": data});
        serde_json::from_value(secret).unwrap()
    }

    #[test]
    fn a_secret_follows_its_account() {
        let account: ServiceAccount =
            serde_json::from_value(json!({"metadata": {"name": "a", "uid": "1"}})).unwrap();
        let b = |text: &str| BASE64_STANDARD.encode(text);
        let full = json!({"token": b("t"), "ca.crt": b("ca"), "namespace": b("n")});
        let all = vec![Missing::Token, Missing::Ca, Missing::Namespace, Missing::Uid];
        let old = vec![Missing::Ca];
        for (uid, data, there, ca, expect) in [
            ("", json!({}), true, "ca", Action::Fill(all)),
            ("1", full.clone(), true, "ca", Action::Nothing),
            ("1", full.clone(), true, "new", Action::Fill(old)),
            ("2", full.clone(), true, "ca", Action::Delete),
            ("1", full, false, "ca", Action::Delete),
        ] {
            assert_eq!(plan(&secret(uid, data), there.then_some(&account), Some(ca)), expect);
        }
        // The cache may be older than the Secret. If the cached account has another uid, read the account
        // from the API server.
        assert!(is_of(&secret("1", json!({})), &account) && is_of(&secret("", json!({})), &account));
        assert!(!is_of(&secret("2", json!({})), &account));
        let going =
            json!({"metadata": {"name": "a", "uid": "1", "deletionTimestamp": "2026-01-01T00:00:00Z"}});
        let going: ServiceAccount = serde_json::from_value(going).unwrap();
        assert_eq!(plan(&secret("1", json!({})), Some(&going), None), Action::Delete);
    }
}

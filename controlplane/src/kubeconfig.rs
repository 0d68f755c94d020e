//! Kubeconfig files with embedded certificates and keys.

use base64::{Engine as _, prelude::BASE64_STANDARD};

use crate::pki::Pair;

/// A kubeconfig for one server and one user.
pub(crate) fn text(server: &str, authority: &str, user: &str, pair: &Pair) -> String {
    let encode = |text: &str| BASE64_STANDARD.encode(text);
    let (authority, certificate, key) = (encode(authority), encode(&pair.certificate), encode(&pair.key));
    format!(
        "apiVersion: v1
kind: Config
clusters:
- name: coracle
  cluster:
    server: {server}
    certificate-authority-data: {authority}
users:
- name: {user}
  user:
    client-certificate-data: {certificate}
    client-key-data: {key}
contexts:
- name: {user}@coracle
  context:
    cluster: coracle
    user: {user}
current-context: {user}@coracle
"
    )
}

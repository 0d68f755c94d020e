//! Registry credentials out of a pod's pull secrets.

use std::collections::BTreeMap;

use base64::Engine;
use coracle_images::Reference;
use coracle_proto::cri::AuthConfig;
use k8s_openapi::api::core::v1::{Pod, Secret};
use serde::Deserialize;

use super::super::Node;
use super::super::events::Level;

#[derive(Deserialize)]
struct DockerConfig {
    #[serde(default)]
    auths: BTreeMap<String, Entry>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Entry {
    auth: String,
    username: String,
    password: String,
    identitytoken: String,
    registrytoken: String,
}

/// The credentials that match the image, best first; a pull without any comes last only when there are none.
pub(super) async fn credentials(node: &Node, pod: &Pod, reference: &Reference) -> Vec<AuthConfig> {
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    let names = pod.spec.iter().flat_map(|s| s.image_pull_secrets.iter().flatten()).map(|r| &r.name);
    let mut found = Vec::new();
    for name in names.filter(|name| !name.is_empty()) {
        match node.values.secret(namespace, name).await {
            Ok(Some(secret)) => found.extend(matching(&secret, reference)),
            Ok(None) | Err(_) => node.recorder.pod(
                pod,
                Level::Warning,
                "FailedToRetrieveImagePullSecret",
                format!(
                    "Unable to retrieve some image pull secrets ({name}); attempting to pull the image may not succeed."
                ),
            ),
        }
    }
    found.sort_by_key(|(length, _)| std::cmp::Reverse(*length));
    found.into_iter().map(|(_, auth)| auth).collect()
}

/// The entries of a secret that apply to the image, with the length of what they matched.
fn matching(secret: &Secret, reference: &Reference) -> Vec<(usize, AuthConfig)> {
    let data = |key: &str| secret.data.as_ref().and_then(|d| d.get(key)).map(|v| v.0.as_slice());
    let entries = if let Some(config) = data(".dockerconfigjson") {
        serde_json::from_slice::<DockerConfig>(config).map(|c| c.auths)
    } else if let Some(config) = data(".dockercfg") {
        serde_json::from_slice(config)
    } else {
        return Vec::new();
    };
    let entries = entries.unwrap_or_else(|error| {
        tracing::warn!(%error, secret = secret.metadata.name, "unreadable pull secret");
        BTreeMap::new()
    });
    entries
        .into_iter()
        .filter_map(|(key, entry)| {
            let key = location(&key);
            applies(&key, reference.domain(), reference.path()).then(|| (key.len(), entry.auth_config(key)))
        })
        .collect()
}

impl Entry {
    fn auth_config(self, server_address: String) -> AuthConfig {
        let decoded = base64::engine::general_purpose::STANDARD.decode(self.auth.trim()).ok();
        let pair = decoded.and_then(|bytes| String::from_utf8(bytes).ok());
        let (username, password) = match pair.as_deref().and_then(|p| p.split_once(':')) {
            Some((user, password)) if self.username.is_empty() => (user.to_owned(), password.to_owned()),
            _ => (self.username, self.password),
        };
        AuthConfig {
            username,
            password,
            server_address,
            identity_token: self.identitytoken,
            registry_token: self.registrytoken,
            auth: String::new(),
        }
    }
}

/// `https://host/v1/` and the like, reduced to `host[/path]`.
fn location(key: &str) -> String {
    let bare = key.strip_prefix("https://").or_else(|| key.strip_prefix("http://")).unwrap_or(key);
    let bare = bare.trim_end_matches('/');
    let bare = bare.strip_suffix("/v1").or_else(|| bare.strip_suffix("/v2")).unwrap_or(bare);
    bare.to_owned()
}

fn applies(key: &str, domain: &str, path: &str) -> bool {
    let (host, prefix) = key.split_once('/').unwrap_or((key, ""));
    let hub = ["docker.io", "index.docker.io", "registry-1.docker.io"];
    let same_host = host == domain
        || (hub.contains(&host) && hub.contains(&domain))
        || (host.matches('.').count() == domain.matches('.').count()
            && host.split('.').zip(domain.split('.')).all(|(pattern, part)| glob(pattern, part)));
    same_host && (prefix.is_empty() || path == prefix || path.starts_with(&format!("{prefix}/")))
}

/// `*` stands for any run of characters within one part of a host name.
fn glob(pattern: &str, text: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == text,
        Some((before, after)) => {
            text.len() >= before.len() + after.len() && text.starts_with(before) && text.ends_with(after)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_match_hosts_paths_and_wildcards() {
        for (key, domain, path, expected) in [
            ("https://index.docker.io/v1/", "docker.io", "library/nginx", true),
            ("r.example.com", "r.example.com", "a/b", true),
            ("r.example.com/a", "r.example.com", "a/b", true),
            ("r.example.com/a", "r.example.com", "ab", false),
            ("*.example.com", "r.example.com", "a", true),
            ("*.example.com", "x.r.example.com", "a", false),
            ("127.0.0.1:5000", "127.0.0.1:5000", "nginx", true),
        ] {
            assert_eq!(applies(&location(key), domain, path), expected, "{key}");
        }
    }

    #[test]
    fn an_encoded_pair_gives_user_and_password() {
        let entry = Entry { auth: "dTpwOnc=".to_owned(), ..Entry::default() };
        let auth = entry.auth_config("r".to_owned());
        assert_eq!((auth.username.as_str(), auth.password.as_str()), ("u", "p:w"));
    }
}

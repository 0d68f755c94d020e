//! Registry credentials from pull secrets.

use std::collections::{BTreeMap, HashSet};

use base64::Engine;
use coracle_images::Reference;
use coracle_proto::cri::AuthConfig;
use k8s_openapi::api::core::v1::{Pod, Secret};
use serde::Deserialize;

use super::super::NodeContext;
use super::records::UsedSecret;
use crate::event_recorder::Level;

/// Maximum pull secrets of a pod that are read, and maximum credentials of these secrets that are tried. Each attempt
/// is a request to the registry.
const SECRETS_MAX: usize = 64;
const CREDENTIALS_MAX: usize = 64;

#[derive(Deserialize)]
struct DockerConfig {
    #[serde(default)]
    auths: BTreeMap<String, Entry>,
}

/// Credentials for a registry, or for a part of it.
#[derive(Clone, Default, Deserialize)]
#[serde(default)]
pub(super) struct Entry {
    auth: String,
    username: String,
    password: String,
    identitytoken: String,
    registrytoken: String,
}

/// Credentials for a pull.
pub(super) struct Credential {
    pub(super) auth: AuthConfig,
    /// The pod's secret that contains the credentials. None for credentials of the node.
    pub(super) secret: Option<UsedSecret>,
}

/// Credentials that match the image, best first. A pull without credentials is tried only if there are no credentials.
pub(super) async fn credentials(node: &NodeContext, pod: &Pod, reference: &Reference) -> Vec<Credential> {
    let mut found = of_pod(node, pod, reference).await;
    // The pod's secrets precede the credentials of provider plugins, as in the kubelet.
    let mut provided = node.providers.credentials(reference).await;
    provided.sort_by_key(|(length, _)| std::cmp::Reverse(*length));
    found.extend(provided.into_iter().map(|(_, auth)| Credential { auth, secret: None }));
    found
}

/// Credentials of the pod's secrets that match the image, best first.
pub(super) async fn of_pod(node: &NodeContext, pod: &Pod, reference: &Reference) -> Vec<Credential> {
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    let mut found = Vec::new();
    let names = names(pod);
    if names.len() > SECRETS_MAX {
        let message = format!("Only the first {SECRETS_MAX} image pull secrets are used.");
        node.recorder.pod(pod, Level::Warning, "FailedToRetrieveImagePullSecret", message);
    }
    for name in names.into_iter().take(SECRETS_MAX) {
        match node.configs.get::<Secret>(namespace, name).await {
            Ok(Some(secret)) => {
                let used = UsedSecret {
                    namespace: namespace.to_owned(),
                    name: name.to_owned(),
                    uid: secret.metadata.uid.clone().unwrap_or_default(),
                };
                let credential = |auth| Credential { auth, secret: Some(used.clone()) };
                let matching = matching(&secret, reference).into_iter();
                found.extend(matching.map(|(length, auth)| (length, credential(auth))));
            }
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
    found.truncate(CREDENTIALS_MAX);
    found.into_iter().map(|(_, credential)| credential).collect()
}

/// The names of the pod's pull secrets, each once.
fn names(pod: &Pod) -> Vec<&str> {
    let all = pod.spec.iter().flat_map(|spec| spec.image_pull_secrets.iter().flatten());
    let mut seen = HashSet::new();
    all.map(|reference| reference.name.as_str())
        .filter(|name| !name.is_empty() && seen.insert(*name))
        .collect()
}

/// Entries of a secret that match the image, with the length of the match.
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
        // The warning leaves out the parser's message, because it may quote a password.
        let (secret, line, column) = (&secret.metadata.name, error.line(), error.column());
        tracing::warn!(secret, line, column, "ignoring an invalid pull secret");
        BTreeMap::new()
    });
    matched(entries, reference)
}

/// Entries that match an image, with the length of the match.
pub(super) fn matched(entries: BTreeMap<String, Entry>, reference: &Reference) -> Vec<(usize, AuthConfig)> {
    entries
        .into_iter()
        .filter_map(|(key, entry)| {
            let key = location(&key);
            applies(&key, reference.domain(), reference.path()).then(|| (key.len(), entry.auth_config()))
        })
        .collect()
}

impl Entry {
    /// User name and password.
    pub(super) fn login(username: String, password: String) -> Entry {
        Entry { username, password, ..Entry::default() }
    }

    fn auth_config(self) -> AuthConfig {
        let decoded = base64::engine::general_purpose::STANDARD.decode(self.auth.trim()).ok();
        let pair = decoded.and_then(|bytes| String::from_utf8(bytes).ok());
        let (username, password) = match pair.as_deref().and_then(|p| p.split_once(':')) {
            Some((user, password)) if self.username.is_empty() => (user.to_owned(), password.to_owned()),
            _ => (self.username, self.password),
        };
        AuthConfig {
            username,
            password,
            // The key may be a pattern or have a path; the runtime needs the registry's address.
            server_address: String::new(),
            identity_token: self.identitytoken,
            registry_token: self.registrytoken,
            auth: String::new(),
        }
    }
}

/// `https://host/v1/` and similar keys, reduced to `host[/path]`.
pub(super) fn location(key: &str) -> String {
    let bare = key.strip_prefix("https://").or_else(|| key.strip_prefix("http://")).unwrap_or(key);
    let bare = bare.trim_end_matches('/');
    let bare = bare.strip_suffix("/v1").or_else(|| bare.strip_suffix("/v2")).unwrap_or(bare);
    bare.to_owned()
}

/// Whether a key matches an image. Each label of the key's host is a pattern. As in the kubelet, the path of the key is
/// a prefix that may end within a component.
pub(super) fn applies(key: &str, domain: &str, path: &str) -> bool {
    let (host, prefix) = key.split_once('/').unwrap_or((key, ""));
    let hub = ["docker.io", "index.docker.io", "registry-1.docker.io"];
    let same_host = host == domain
        || (hub.contains(&host) && hub.contains(&domain))
        || (host.matches('.').count() == domain.matches('.').count()
            && host.split('.').zip(domain.split('.')).all(|(pattern, part)| glob(pattern, part)));
    same_host && path.starts_with(prefix)
}

/// `*` matches any characters within one label of a host name, `?` one character. Only the last `*` is tried again: a
/// tenant writes the pattern, and recursion would take exponential time.
fn glob(pattern: &str, text: &str) -> bool {
    let (pattern, text): (Vec<char>, Vec<char>) = (pattern.chars().collect(), text.chars().collect());
    let (mut at, mut here) = (0, 0);
    // Position after the last `*`, and the end of the text that it matches.
    let mut star: Option<(usize, usize)> = None;
    while here < text.len() {
        match (pattern.get(at), star) {
            (Some('*'), _) => {
                at += 1;
                star = Some((at, here));
            }
            (Some(c), _) if *c == '?' || Some(c) == text.get(here) => (at, here) = (at + 1, here + 1),
            (_, Some((after, end))) => {
                (at, here) = (after, end + 1);
                star = Some((after, end + 1));
            }
            (_, None) => return false,
        }
    }
    pattern.iter().skip(at).all(|c| *c == '*')
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
            ("r.example.com/a", "r.example.com", "ab", true),
            ("r.example.com/a", "r.example.com", "b/a", false),
            ("app*.*.example.com", "app1.eu.example.com", "a", true),
            ("app?.example.com", "app12.example.com", "a", false),
            ("*.example.com", "r.example.com", "a", true),
            ("*.example.com", "x.r.example.com", "a", false),
            ("127.0.0.1:5000", "127.0.0.1:5000", "nginx", true),
            ("a*b*c.x", "aXbXbXc.x", "a", true),
            ("*b?.x", "abcbd.x", "a", true),
            ("*b?.x", "abcb.x", "a", false),
            ("**.x", "a.x", "a", true),
        ] {
            assert_eq!(applies(&location(key), domain, path), expected, "{key}");
        }
    }

    /// With exponential time, this test does not end.
    #[test]
    fn a_pattern_of_many_stars_takes_little_time() {
        let key = format!("{}b.x", "*a".repeat(30));
        assert!(!applies(&key, &format!("{}.x", "a".repeat(60)), "image"));
    }

    #[test]
    fn a_secret_that_is_named_many_times_is_read_once() {
        let references: Vec<_> =
            ["b", "a", "b", "", "a"].map(|name| serde_json::json!({"name": name})).into();
        let pod = serde_json::json!({"spec": {"containers": [], "imagePullSecrets": references}});
        assert_eq!(names(&serde_json::from_value(pod).unwrap()), ["b", "a"]);
    }

    #[test]
    fn an_encoded_pair_gives_user_and_password() {
        let entry = Entry { auth: "dTpwOnc=".to_owned(), ..Entry::default() };
        let auth = entry.auth_config();
        assert_eq!((auth.username.as_str(), auth.password.as_str()), ("u", "p:w"));
    }
}

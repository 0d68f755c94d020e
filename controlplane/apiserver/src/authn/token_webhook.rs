//! Authentication of bearer tokens by a webhook (TokenReview). Responses are cached.
//!
//! Source: `k8s.io/apiserver/plugin/pkg/authenticator/token/webhook`.

use std::{collections::BTreeMap, path::PathBuf, sync::Arc, time::Duration};

use coracle_connections::LogLimit;
use futures::future::{BoxFuture, Either};
use serde_json::{Value, json};

use super::{Authenticating, Authenticator, Credential, User, known};
use crate::remote::{
    Remote,
    cache::{Outcome, ResponseCache, key},
};

/// Timeout of a call.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum bytes of a token that is sent to the webhook.
const MAX_TOKEN: usize = 16 << 10;
/// Maximum number of groups, and of extra values, of one user.
const MAX_VALUES: usize = 1000;

/// The settings of the webhook.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenWebhookConfig {
    /// Kubeconfig file with the webhook's URL.
    pub file: PathBuf,
    /// Time to live of cached responses, including rejections.
    pub cache: Duration,
    /// Version of the reviews: `v1` or `v1beta1`.
    pub version: String,
}

/// The authenticator.
pub(super) struct TokenWebhook {
    remote: Remote,
    config: TokenWebhookConfig,
    /// Audiences of this API server.
    audiences: Vec<String>,
    answers: ResponseCache<Option<Arc<User>>>,
    failures: LogLimit,
}

// === impl TokenWebhook ===

impl TokenWebhook {
    /// Reads the webhook's kubeconfig file.
    ///
    /// # Errors
    /// The kubeconfig file cannot be used.
    pub(super) fn new(config: TokenWebhookConfig, audiences: Vec<String>) -> Result<Self, String> {
        let remote = Remote::read(&config.file, TIMEOUT);
        let remote = remote.map_err(|reason| format!("{}: {reason}", config.file.display()))?;
        Ok(Self { remote, config, audiences, answers: ResponseCache::new(), failures: LogLimit::default() })
    }

    fn review<'a>(&'a self, token: &'a str, audiences: &'a [String]) -> BoxFuture<'a, Option<User>> {
        Box::pin(async move {
            let cache_key = self.cache_key(token, audiences);
            let request = json!({
                "apiVersion": format!("authentication.k8s.io/{}", self.config.version),
                "kind": "TokenReview",
                "metadata": {},
                "spec": {"token": token, "audiences": audiences},
            });
            let answered = self.remote.post(&request).await;
            let user = answered.and_then(|answer| user(&answer["status"], audiences, &self.audiences));
            match user {
                Ok(user) => {
                    let user = user.map(Arc::new);
                    let outcome = if user.is_some() { Outcome::Accepted } else { Outcome::Refused };
                    self.answers.insert(cache_key, user.clone(), outcome, self.config.cache);
                    user.map(Arc::unwrap_or_clone)
                }
                // Failed calls are not cached.
                Err(reason) => {
                    if let Some(suppressed) = self.failures.allow_without_source() {
                        tracing::warn!(reason, suppressed, "the token webhook failed");
                    }
                    None
                }
            }
        })
    }

    fn cache_key(&self, token: &str, audiences: &[String]) -> crate::remote::cache::Key {
        let parts = [token].into_iter().chain(audiences.iter().map(String::as_str));
        key(&parts.map(str::as_bytes).collect::<Vec<_>>())
    }
}

impl Authenticator for TokenWebhook {
    fn authenticate<'a>(&'a self, credential: &'a Credential<'a>) -> Authenticating<'a> {
        let Some(token) = credential.token.filter(|token| token.len() <= MAX_TOKEN) else {
            return known(None);
        };
        match self.answers.get(&self.cache_key(token, credential.audiences)) {
            Some(user) => known(user.map(Arc::unwrap_or_clone)),
            None => Either::Right(self.review(token, credential.audiences)),
        }
    }
}

/// The user in a response, or `None` if the token is invalid. A response without audiences is valid only for this API
/// server.
fn user(status: &Value, asked: &[String], own: &[String]) -> Result<Option<User>, String> {
    match status["authenticated"].as_bool() {
        Some(true) => {}
        // Webhooks may omit the field if the token is invalid.
        Some(false) | None if status.is_object() => return Ok(None),
        _ => return Err("the response has no status".to_owned()),
    }
    let audiences = texts(&status["audiences"])?;
    let audiences = if audiences.is_empty() { own } else { &audiences };
    let accepted: Vec<String> = asked.iter().filter(|one| audiences.contains(one)).cloned().collect();
    if !asked.is_empty() && accepted.is_empty() {
        return Ok(None);
    }
    let described = &status["user"];
    let name = described["username"].as_str().filter(|name| !name.is_empty());
    let name = name.ok_or("the response has no status.user.username")?;
    let groups = texts(&described["groups"])?;
    let mut extra = BTreeMap::new();
    for (name, values) in described["extra"].as_object().into_iter().flatten() {
        extra.insert(name.to_lowercase(), texts(values)?);
    }
    if groups.len() > MAX_VALUES || extra.values().map(Vec::len).sum::<usize>() > MAX_VALUES {
        return Err(format!("the user has more than {MAX_VALUES} groups or extra values"));
    }
    let groups: Vec<&str> = groups.iter().map(String::as_str).collect();
    let uid = described["uid"].as_str().unwrap_or_default().to_owned();
    Ok(Some(User { uid, extra, audiences: accepted, ..User::new(name, &groups) }))
}

fn texts(list: &Value) -> Result<Vec<String>, String> {
    let wrong = || "a user field of the response is not a string".to_owned();
    match list {
        Value::Null => Ok(Vec::new()),
        Value::Array(list) => {
            list.iter().map(|one| one.as_str().map(str::to_owned).ok_or_else(wrong)).collect()
        }
        _ => Err(wrong()),
    }
}

/// Fuzz target: a response of the webhook, in JSON.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn fuzz(data: &[u8]) {
    let Ok(answer) = serde_json::from_slice::<Value>(data) else { return };
    let (own, other) = (["api".to_owned()], ["other".to_owned()]);
    for asked in [own.as_slice(), other.as_slice(), &[]] {
        let Ok(Some(found)) = user(&answer["status"], asked, &own) else { continue };
        let values = found.extra.values().map(Vec::len).sum::<usize>();
        // `User::new` adds a group.
        assert!(found.groups.len() <= MAX_VALUES + 1 && values <= MAX_VALUES);
        assert!(!found.name.is_empty() && answer["status"]["authenticated"] == true);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{cache::Cache, remote::tests::Hook};

    async fn review(webhook: &TokenWebhook, token: &str, audience: &str) -> Option<User> {
        let (cache, audiences) = (Cache::new(0), [audience.to_owned()]);
        let credential = Credential { token: Some(token), audiences: &audiences, ..Credential::none(&cache) };
        webhook.authenticate(&credential).await
    }

    fn webhook(hook: &Hook) -> TokenWebhook {
        let config = TokenWebhookConfig {
            file: hook.file(),
            cache: Duration::from_secs(120),
            version: "v1".to_owned(),
        };
        TokenWebhook::new(config, vec!["api".to_owned()]).unwrap()
    }

    #[tokio::test]
    async fn answers_name_users_and_are_kept() {
        let hook = Hook::start(|body| {
            let known = body["spec"]["token"] == "good";
            let user = json!({"username": "ann", "uid": "7", "groups": ["dev"], "extra": {"A": ["b"]}});
            (200, json!({"status": {"authenticated": known, "user": user}}).to_string())
        })
        .await;
        let webhook = webhook(&hook);
        for _ in 0..3 {
            let ann = review(&webhook, "good", "api").await.unwrap();
            assert_eq!(
                (ann.name.as_str(), ann.uid.as_str(), &ann.extra["a"]),
                ("ann", "7", &vec!["b".to_owned()])
            );
            assert_eq!(ann.groups, ["dev", "system:authenticated"]);
            assert_eq!(review(&webhook, "bad", "api").await, None);
        }
        assert_eq!(hook.count(), 2);
        assert_eq!(review(&webhook, "good", "other").await, None);
        assert_eq!(review(&webhook, &"x".repeat(MAX_TOKEN + 1), "api").await, None);
        assert_eq!(hook.count(), 3);
    }

    #[tokio::test]
    async fn failures_write_one_line_a_minute() {
        let hook = Hook::start(|_| (200, "{}".to_owned())).await;
        let webhook = webhook(&hook);
        assert_eq!(review(&webhook, "good", "api").await, None);
        assert_eq!(webhook.failures.allow_without_source(), None);
    }

    #[tokio::test]
    async fn users_of_invalid_answers_are_refused() {
        for status in [
            json!(null),
            json!({}),
            json!({"authenticated": "true", "user": {"username": "ann"}}),
            json!({"authenticated": true}),
            json!({"authenticated": true, "user": {"username": ""}}),
            json!({"authenticated": true, "user": {"username": "ann", "groups": "dev"}}),
            json!({"authenticated": true, "user": {"username": "ann", "groups": vec!["g"; MAX_VALUES + 1]}}),
            json!({"authenticated": true, "user": {"username": "ann",
                "extra": {"a": vec!["v"; MAX_VALUES / 2], "b": vec!["v"; MAX_VALUES / 2 + 1]}}}),
            json!({"authenticated": true, "user": {"username": "ann"}, "audiences": ["other"]}),
        ] {
            let text = json!({"status": status}).to_string();
            let hook = Hook::start(move |_| (200, text.clone())).await;
            assert_eq!(review(&webhook(&hook), "good", "api").await, None, "{status}");
        }
    }
}

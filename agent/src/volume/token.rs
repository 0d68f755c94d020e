//! Service-account tokens bound to a pod: requested once, cached in memory and in the checkpoint, renewed before they
//! expire.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Mutex;
use std::time::Duration;

use base64::Engine;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use coracle_error_chain::chain;
use jiff::Timestamp;
use k8s_openapi::api::authentication::v1::{BoundObjectReference, TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::{Pod, ServiceAccount, ServiceAccountTokenProjection};
use kube::Api;
use kube::api::PostParams;
use serde::{Deserialize, Serialize};

use super::error::SetUpError;
use super::{VolumeContext, lock};
use crate::api_health::{ApiHealth, is_unavailable};
use crate::bounded;
use crate::checkpoint::{Checkpoint, Key, TOKEN_SECONDS, account, token_key};
use crate::event_recorder::Level;

/// Maximum age of a token in seconds. A token is renewed after four fifths of its lifetime, and at the latest after a
/// day.
const MAX_AGE: i64 = 24 * 3600;
/// Pause after a failed renewal.
const RETRY: Duration = Duration::from_secs(30);
/// Maximum size in bytes of a token file that is read back.
const TOKEN_MAX: u64 = 64 << 10;

/// Tokens of the node's pods.
pub(super) struct Tokens {
    checkpoint: Checkpoint,
    health: ApiHealth,
    held: Mutex<HashMap<Key, CachedToken>>,
}

struct CachedToken {
    uid: String,
    issued: Issued,
    /// Whether an event has reported that the token expired.
    is_expiry_reported: bool,
}

/// A token with its validity.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Issued {
    token: String,
    /// Start, in seconds since 1970.
    begins: i64,
    /// End, in seconds since 1970. The API server may accept the token for longer, and records such uses.
    ends: i64,
}

/// The pod that a token belongs to, and the token's key in the checkpoint.
struct TokenOf<'a> {
    pod: &'a Pod,
    key: &'a Key,
}

/// A token, and the time until the next token is due.
pub(super) struct Token {
    pub(super) token: String,
    pub(super) renew_in: Duration,
}

// === impl Tokens ===

impl Tokens {
    pub(super) fn new(checkpoint: Checkpoint, health: ApiHealth) -> Self {
        Self { checkpoint, health, held: Mutex::default() }
    }

    /// Returns the pod's token for this projection, and requests a new one if the current token is due for renewal. An
    /// earlier agent may have requested the current token: then it is read from the volume's file or, after a boot,
    /// from the checkpoint. While the API server is not reachable, an expired token is used.
    pub(super) async fn get(
        &self,
        ctx: &VolumeContext,
        pod: &Pod,
        wanted: &ServiceAccountTokenProjection,
        written: &Path,
    ) -> Result<Token, SetUpError> {
        let key = token_key(pod, wanted);
        let now = Timestamp::now();
        let held = lock(&self.held).get(&key).map(|held| held.issued.clone());
        let held = held.or_else(|| Issued::read(written)).or_else(|| self.checkpoint.get(&key));
        if let Some(held) = held.as_ref().filter(|held| !held.is_due(now)) {
            self.keep(&key, pod, held);
            return Ok(held.to_token(now));
        }
        if let Some(held) = held.as_ref().filter(|_| self.health.is_unavailable()) {
            return Ok(self.reuse_expiring(ctx, TokenOf { pod, key: &key }, held, now));
        }
        match self.health.request(held.is_some(), request(ctx, pod, wanted)).await {
            Ok(answer) => {
                let issued = Issued::of(answer)?;
                self.keep(&key, pod, &issued);
                Ok(issued.to_token(now))
            }
            Err(error) => match held.filter(|held| is_unavailable(&error) || !held.is_expired(now)) {
                Some(held) => {
                    let (uid, error) = (pod.metadata.uid.as_deref(), chain(&error));
                    tracing::warn!(error, uid, "cannot renew a service-account token, trying again");
                    Ok(self.reuse_expiring(ctx, TokenOf { pod, key: &key }, &held, now))
                }
                None => Err(SetUpError::Token(chain(&error))),
            },
        }
    }

    /// A token that could not be renewed. If it has expired, a warning event reports that once.
    fn reuse_expiring(&self, ctx: &VolumeContext, of: TokenOf<'_>, held: &Issued, now: Timestamp) -> Token {
        let TokenOf { pod, key } = of;
        self.keep(key, pod, held);
        let is_first_report = held.is_expired(now)
            && lock(&self.held)
                .get_mut(key)
                .is_some_and(|held| !std::mem::replace(&mut held.is_expiry_reported, true));
        if is_first_report {
            let message = format!(
                "The API server is not reachable: the token of service account {:?} expired at {} and is used until it \
                 can be renewed",
                account(pod),
                Timestamp::from_second(held.ends).unwrap_or_default(),
            );
            ctx.shared.recorder.pod(pod, Level::Warning, "ExpiredServiceAccountToken", message);
        }
        Token { token: held.token.clone(), renew_in: RETRY }
    }

    fn keep(&self, key: &Key, pod: &Pod, issued: &Issued) {
        let mut held = lock(&self.held);
        if held.get(key).is_some_and(|held| held.issued == *issued) {
            return;
        }
        let uid = pod.metadata.uid.clone().unwrap_or_default();
        held.insert(key.clone(), CachedToken { uid, issued: issued.clone(), is_expiry_reported: false });
        drop(held);
        self.checkpoint.put(key.clone(), issued);
    }

    #[cfg(test)]
    pub(super) fn checkpoint(&self) -> &Checkpoint {
        &self.checkpoint
    }

    /// Drops the tokens of a pod.
    pub(super) fn remove_pod(&self, uid: &str) {
        lock(&self.held).retain(|_, held| held.uid != uid);
    }
}

// === impl Issued ===

impl Issued {
    fn of(answer: TokenRequest) -> Result<Issued, SetUpError> {
        let issued = answer.status.and_then(|status| Some((status.token?, status.expiration_timestamp?.0)));
        let (token, ends) = issued.ok_or_else(|| SetUpError::Token("the answer has no token".to_owned()))?;
        let begins =
            Issued::parse(&token).map_or_else(|| Timestamp::now().as_second(), |issued| issued.begins);
        Ok(Issued { token, begins, ends: ends.as_second() })
    }

    /// Reads a token from a volume's file. Its claims contain its times. The token is only returned to the pod that has
    /// the file, so its signature is not checked.
    fn read(written: &Path) -> Option<Issued> {
        // `..data` is a symlink, so links are followed.
        Issued::parse(&bounded::read_text(written, TOKEN_MAX).ok()?)
    }

    fn parse(token: &str) -> Option<Issued> {
        let claims = BASE64_URL_SAFE_NO_PAD.decode(token.split('.').nth(1)?).ok()?;
        let claims: serde_json::Value = serde_json::from_slice(&claims).ok()?;
        let time = |path: &str| claims.pointer(path)?.as_i64();
        let ends = time("/kubernetes.io/warnafter").or_else(|| time("/exp"))?;
        Some(Issued { token: token.to_owned(), begins: time("/iat")?, ends })
    }

    /// Seconds from its start to its renewal.
    fn lifetime(&self) -> i64 {
        (self.ends.saturating_sub(self.begins).max(0) / 5 * 4).min(MAX_AGE)
    }

    /// Whether the token must be renewed. A start in the future means that the clock was set back.
    fn is_due(&self, now: Timestamp) -> bool {
        let age = now.as_second().saturating_sub(self.begins);
        age >= self.lifetime() || age < -60
    }

    fn is_expired(&self, now: Timestamp) -> bool {
        now.as_second() >= self.ends
    }

    fn to_token(&self, now: Timestamp) -> Token {
        let left = self.begins.saturating_add(self.lifetime()).saturating_sub(now.as_second());
        let renew_in = Duration::from_secs(u64::try_from(left.min(self.lifetime())).unwrap_or_default());
        // With a wrong clock a new token may be due at once; it must not be requested in a loop.
        Token { token: self.token.clone(), renew_in: if renew_in.is_zero() { RETRY } else { renew_in } }
    }
}

async fn request(
    ctx: &VolumeContext,
    pod: &Pod,
    wanted: &ServiceAccountTokenProjection,
) -> Result<TokenRequest, kube::Error> {
    let api: Api<ServiceAccount> =
        Api::namespaced(ctx.shared.client.clone(), pod.metadata.namespace.as_deref().unwrap_or_default());
    let bound = BoundObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Pod".to_owned()),
        name: pod.metadata.name.clone(),
        uid: pod.metadata.uid.clone(),
    };
    let audience = wanted.audience.clone().filter(|audience| !audience.is_empty());
    let spec = TokenRequestSpec {
        audiences: audience.map(|audience| vec![audience]),
        bound_object_ref: Some(bound),
        expiration_seconds: Some(wanted.expiration_seconds.unwrap_or(TOKEN_SECONDS)),
        ..TokenRequestSpec::default()
    };
    let request = TokenRequest { spec: Some(spec), ..TokenRequest::default() };
    api.create_token_request(account(pod), &PostParams::default(), &request).await
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).expect("time")
    }

    #[test]
    fn a_token_is_renewed_at_four_fifths_of_its_life_or_after_a_day() {
        let issued = |begins, ends| Issued { token: String::new(), begins, ends };
        assert_eq!([3600, 600, 0, -5].map(|ends| issued(0, ends).lifetime()), [2880, 480, 0, 0]);
        assert_eq!(issued(0, 365 * 24 * 3600).lifetime(), MAX_AGE);
        let hour = issued(10_000, 13_600);
        assert_eq!([9_950, 12_879, 12_880].map(|now| hour.is_due(at(now))), [false, false, true]);
        assert!(hour.is_due(at(0)), "after the clock was set back, the token is requested again");
        assert_eq!(hour.to_token(at(12_000)).renew_in.as_secs(), 880);
        assert_eq!(hour.to_token(at(0)).renew_in.as_secs(), 2880, "at most four fifths of its lifetime");
        assert_eq!(
            hour.to_token(at(1 << 37)).renew_in,
            RETRY,
            "a clock that is ahead causes no loop of requests"
        );
    }

    #[test]
    fn an_extended_token_ends_after_the_requested_lifetime() {
        let claims = br#"{"iat":1000,"exp":31537000,"kubernetes.io":{"warnafter":4607}}"#;
        let token = format!("head.{}.sign", BASE64_URL_SAFE_NO_PAD.encode(claims));
        assert_eq!(Issued::parse(&token).map(|issued| (issued.begins, issued.ends)), Some((1000, 4607)));
    }

    #[test]
    fn a_written_token_contains_its_times() {
        let claims = BASE64_URL_SAFE_NO_PAD.encode(br#"{"iat":1000,"exp":4600}"#);
        let dir = tempfile::tempdir().expect("directory");
        let path = dir.path().join("token");
        std::fs::write(&path, format!("head.{claims}.sign")).expect("file");
        let read = Issued::read(&path).expect("a token");
        assert_eq!((read.begins, read.ends), (1000, 4600));
        std::fs::write(&path, "no token").expect("file");
        assert!(Issued::read(&path).is_none());
    }

    #[test]
    fn a_written_token_that_is_too_large_is_not_read() {
        let claims = BASE64_URL_SAFE_NO_PAD.encode(br#"{"iat":1000,"exp":4600}"#);
        let dir = tempfile::tempdir().expect("directory");
        let path = dir.path().join("token");
        let max = usize::try_from(TOKEN_MAX).expect("a length");
        for (length, is_read) in [(max, true), (max + 1, false)] {
            let token = format!("head.{claims}.");
            let sign = "x".repeat(length - token.len());
            std::fs::write(&path, token + &sign).expect("file");
            assert_eq!(Issued::read(&path).is_some(), is_read, "{length} bytes");
        }
    }
}

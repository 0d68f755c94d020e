//! Service-account tokens bound to a pod: asked for once, kept in memory, renewed before they end.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Mutex;
use std::time::Duration;

use base64::Engine;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use jiff::Timestamp;
use k8s_openapi::api::authentication::v1::{BoundObjectReference, TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::{Pod, ServiceAccount, ServiceAccountTokenProjection};
use kube::Api;
use kube::api::PostParams;

use super::{SetUpError, VolumeContext, lock};
use crate::node::chain;

/// What is asked for when the volume does not say: an hour.
const DEFAULT_SECONDS: i64 = 3600;
/// A token is renewed at four fifths of its life, and every day at the latest.
const OLDEST: i64 = 24 * 3600;

/// All tokens that pods of this node have.
#[derive(Default)]
pub(super) struct Tokens {
    issued: Mutex<HashMap<Key, Issued>>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Key {
    uid: String,
    account: String,
    audience: Option<String>,
    seconds: i64,
}

#[derive(Clone)]
struct Issued {
    token: String,
    renew: Timestamp,
    ends: Timestamp,
}

/// A token and when the next one is due.
pub(super) struct Token {
    pub(super) token: String,
    pub(super) renew_in: Duration,
}

// === impl Tokens ===

impl Tokens {
    /// The pod's token for this projection: the one that it has, also from an earlier life of the agent
    /// (`written`), or, when that is due, a new one.
    pub(super) async fn get(
        &self,
        ctx: &VolumeContext,
        pod: &Pod,
        wanted: &ServiceAccountTokenProjection,
        written: &Path,
    ) -> Result<Token, SetUpError> {
        let key = Key {
            uid: pod.metadata.uid.clone().unwrap_or_default(),
            account: account(pod).to_owned(),
            audience: wanted.audience.clone().filter(|audience| !audience.is_empty()),
            seconds: wanted.expiration_seconds.unwrap_or(DEFAULT_SECONDS),
        };
        let now = Timestamp::now();
        let held = lock(&self.issued).get(&key).cloned().or_else(|| Issued::read(written));
        if let Some(held) = held.as_ref().filter(|held| held.renew > now) {
            lock(&self.issued).insert(key, held.clone());
            return Ok(held.given(now));
        }
        match request(ctx, pod, &key).await {
            Ok(issued) => {
                let given = issued.given(now);
                lock(&self.issued).insert(key, issued);
                Ok(given)
            }
            // Not renewed in time is no harm yet: it is tried again within the last fifth of its life.
            Err(error) => match held.filter(|held| held.ends > now) {
                Some(held) => {
                    tracing::warn!(
                        error = chain(&error),
                        uid = key.uid,
                        "cannot renew a service-account token, trying again"
                    );
                    Ok(Token { token: held.token, renew_in: Duration::from_secs(30) })
                }
                None => Err(error),
            },
        }
    }

    /// Drops what a pod had.
    pub(super) fn forget(&self, uid: &str) {
        lock(&self.issued).retain(|key, _| key.uid != uid);
    }
}

// === impl Issued ===

impl Issued {
    /// A token that was written before, with the times that it says of itself. It is handed back to the
    /// pod that it lies with and trusted with nothing else, so its signature does not matter here.
    fn read(written: &Path) -> Option<Issued> {
        let token = std::fs::read_to_string(written).ok()?;
        let claims = BASE64_URL_SAFE_NO_PAD.decode(token.split('.').nth(1)?).ok()?;
        let claims: serde_json::Value = serde_json::from_slice(&claims).ok()?;
        let time = |name: &str| Timestamp::from_second(claims.get(name)?.as_i64()?).ok();
        let (issued, ends) = (time("iat")?, time("exp")?);
        Some(Issued { token, renew: renewal(issued, ends), ends })
    }

    fn given(&self, now: Timestamp) -> Token {
        let renew_in = Duration::try_from(self.renew.duration_since(now)).unwrap_or_default();
        Token { token: self.token.clone(), renew_in }
    }
}

fn account(pod: &Pod) -> &str {
    pod.spec
        .as_ref()
        .and_then(|spec| spec.service_account_name.as_deref())
        .filter(|name| !name.is_empty())
        .unwrap_or("default")
}

async fn request(ctx: &VolumeContext, pod: &Pod, key: &Key) -> Result<Issued, SetUpError> {
    let failed = |error: kube::Error| SetUpError::Token(chain(&error));
    let api: Api<ServiceAccount> =
        Api::namespaced(ctx.shared.client.clone(), pod.metadata.namespace.as_deref().unwrap_or_default());
    let bound = BoundObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Pod".to_owned()),
        name: pod.metadata.name.clone(),
        uid: Some(key.uid.clone()),
    };
    let spec = TokenRequestSpec {
        audiences: key.audience.clone().map(|audience| vec![audience]),
        bound_object_ref: Some(bound),
        expiration_seconds: Some(key.seconds),
        ..TokenRequestSpec::default()
    };
    let request = TokenRequest { spec: Some(spec), ..TokenRequest::default() };
    let answer =
        api.create_token_request(&key.account, &PostParams::default(), &request).await.map_err(failed)?;
    let issued = answer.status.and_then(|status| Some((status.token?, status.expiration_timestamp?.0)));
    let (token, ends) = issued.ok_or_else(|| SetUpError::Token("the answer has no token".to_owned()))?;
    let now = Timestamp::now();
    Ok(Issued { token, renew: renewal(now, ends), ends })
}

/// When a token issued now that ends then is to be replaced.
fn renewal(now: Timestamp, ends: Timestamp) -> Timestamp {
    let life = ends.duration_since(now).as_secs().max(0);
    let after = (life / 5 * 4).min(OLDEST);
    now.checked_add(jiff::SignedDuration::from_secs(after)).unwrap_or(ends)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_renewed_at_four_fifths_of_its_life_or_after_a_day() {
        let now = Timestamp::UNIX_EPOCH;
        let after = |seconds: i64| renewal(now, Timestamp::from_second(seconds).expect("time")).as_second();
        assert_eq!([3600, 600, 0].map(after), [2880, 480, 0]);
        assert_eq!(after(365 * 24 * 3600), OLDEST);
        assert_eq!(renewal(now, Timestamp::from_second(-5).expect("time")), now);
    }

    #[test]
    fn a_written_token_tells_its_own_times() {
        let claims = BASE64_URL_SAFE_NO_PAD.encode(br#"{"iat":1000,"exp":4600}"#);
        let path = std::env::temp_dir().join(format!("coracle-token-{}", std::process::id()));
        std::fs::write(&path, format!("head.{claims}.sign")).expect("file");
        let read = Issued::read(&path).expect("a token");
        assert_eq!((read.renew.as_second(), read.ends.as_second()), (3880, 4600));
        std::fs::write(&path, "no token").expect("file");
        assert!(Issued::read(&path).is_none());
        std::fs::remove_file(&path).expect("clean up");
    }
}

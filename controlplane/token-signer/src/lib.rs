//! Client of an external signer of service account tokens (`--service-account-signing-endpoint`).
//!
//! Source: `pkg/serviceaccount/externaljwt/plugin` of Kubernetes, and `k8s.io/externaljwt/apis/v1`. The signer is a
//! process on a unix socket that has the private keys. It signs the claims of tokens, and returns the public keys by
//! which the API server checks tokens. The keys are fetched at the start, at the interval that the signer returns, and
//! when a token names an unknown key. If a fetch fails, the known keys are kept.
//!
//! The signer is not trusted with the API server's memory and time: each call has a timeout, and each response a limit.

mod client;
mod keys;

use std::{sync::Arc, time::Duration};

use arc_swap::ArcSwap;
use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD};
use serde::Deserialize;
use serde_json::Value;
use tokio::{sync::Mutex, time::Instant};
use tokio_util::sync::CancellationToken;

use client::Client;
use keys::KeySet;
pub use keys::verify_es512;

#[allow(
    clippy::all,
    clippy::pedantic,
    missing_docs,
    unreachable_pub,
    reason = "generated; proto/externaljwt.proto carries the meaning"
)]
mod v1 {
    tonic::include_proto!("v1");
}

/// Maximum time in which the signer must become ready at the start.
const START_TIMEOUT: Duration = Duration::from_secs(60);
/// Delay between two attempts at the start.
const START_RETRY_DELAY: Duration = Duration::from_secs(2);
/// Delay before a failed fetch of the keys is retried.
const FETCH_RETRY_DELAY: Duration = Duration::from_secs(10);
/// Maximum time until the keys are fetched again.
const MAX_AGE: Duration = Duration::from_secs(24 * 3600);
/// Minimum time between two fetches for tokens with unknown keys. Anyone can send such tokens.
const MIN_FETCH_INTERVAL: Duration = Duration::from_secs(1);
/// Smallest permitted value of `max_token_expiration_seconds`, the signer's limit on the validity of tokens.
const MIN_EXPIRATION_LIMIT: i64 = 600;
/// Maximum bytes of a token's header.
const MAX_HEADER: usize = 4 << 10;

/// A request to the signer failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A call failed, or its response was too large.
    #[error("cannot call {call} of the token signer {endpoint}: {reason}")]
    Call {
        /// Name of the RPC.
        call: &'static str,
        /// The socket.
        endpoint: String,
        /// Cause of the failure.
        reason: String,
    },
    /// A response breaks the rules of the protocol.
    #[error("the token signer {endpoint} returned an invalid response to {call}: {reason}")]
    Response {
        /// Name of the RPC.
        call: &'static str,
        /// The socket.
        endpoint: String,
        /// The broken rule.
        reason: String,
    },
}

/// A connected signer and its public keys.
pub struct TokenSigner {
    client: Client,
    keys: ArcSwap<KeySet>,
    max_seconds: i64,
    /// Time at which the last fetch for an unknown key ended. The mutex is locked during every fetch, so that only one
    /// fetch runs at a time.
    fetched: Mutex<Option<Instant>>,
}

/// The header of a token. Other fields are refused.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Header {
    alg: String,
    kid: String,
    typ: String,
}

// === impl TokenSigner ===

impl TokenSigner {
    /// Connects to the signer, and fetches its keys. A task fetches the keys repeatedly until `shutdown` is cancelled.
    /// The endpoint is the path of a unix socket; an abstract address begins with `@`.
    ///
    /// # Errors
    /// The signer is not ready within a minute, or returned an invalid response.
    pub async fn connect(endpoint: &str, shutdown: CancellationToken) -> Result<Arc<Self>, Error> {
        let signer = Self::connect_within(START_TIMEOUT, endpoint).await?;
        tokio::spawn({
            let signer = signer.clone();
            async move { shutdown.run_until_cancelled(signer.refresh()).await }
        });
        Ok(signer)
    }

    /// Connects to the signer. As upstream, waits until the signer listens.
    async fn connect_within(limit: Duration, endpoint: &str) -> Result<Arc<Self>, Error> {
        let (client, begin) = (Client::new(endpoint), Instant::now());
        loop {
            match Self::of(client.clone()).await {
                Err(error @ Error::Call { .. }) if begin.elapsed() < limit => {
                    tracing::info!(%error, "waiting for the token signer");
                    tokio::time::sleep(START_RETRY_DELAY).await;
                }
                outcome => return outcome.map(Arc::new),
            }
        }
    }

    async fn of(client: Client) -> Result<Self, Error> {
        let max_seconds = client.max_seconds().await?;
        if max_seconds < MIN_EXPIRATION_LIMIT {
            let reason =
                format!("max_token_expiration_seconds is {max_seconds}, less than {MIN_EXPIRATION_LIMIT}");
            return Err(client.invalid("Metadata", reason));
        }
        let keys = ArcSwap::from_pointee(client.keys().await?);
        Ok(Self { client, keys, max_seconds, fetched: Mutex::default() })
    }

    /// Maximum validity of a token in seconds.
    #[must_use]
    pub fn max_seconds(&self) -> i64 {
        self.max_seconds
    }

    /// A token with these claims.
    ///
    /// # Errors
    /// The signer does not respond, or the token could not be verified.
    pub async fn sign(&self, claims: &Value) -> Result<String, Error> {
        let claims = BASE64_URL_SAFE_NO_PAD.encode(claims.to_string());
        let signed = self.client.sign(claims.clone()).await?;
        let invalid = |reason: String| self.client.invalid("Sign", reason);
        let header = header(&signed.header).ok_or_else(|| invalid(HEADER.to_owned()))?;
        if self.keys.load().find(&header.kid).is_none() {
            // The signer has rotated its keys.
            let _one_fetch = self.fetched.lock().await;
            // Another call may have fetched the new keys meanwhile.
            if self.keys.load().find(&header.kid).is_none() {
                self.fetch().await?;
            }
        }
        let keys = self.keys.load();
        match keys.find(&header.kid) {
            Some(key) if key.is_excluded => {
                return Err(invalid(format!("the key {:?} is excluded from OIDC discovery", header.kid)));
            }
            Some(key) if key.algorithm() == header.alg => {}
            Some(key) => {
                return Err(invalid(format!("the key is for {}, not {:?}", key.algorithm(), header.alg)));
            }
            None => return Err(invalid(format!("FetchKeys does not return the key {:?}", header.kid))),
        }
        let token = format!("{}.{claims}.{}", signed.header, signed.signature);
        match verified(&keys, &token) {
            Some(_) => Ok(token),
            None => Err(invalid("the signature is wrong".to_owned())),
        }
    }

    /// The claims of a token that one of the known keys has signed.
    #[must_use]
    pub fn verify(&self, token: &str) -> Option<Value> {
        verified(&self.keys.load(), token)
    }

    /// Whether the token names a key that is not known.
    #[must_use]
    pub fn is_unknown(&self, token: &str) -> bool {
        let header = token.split_once('.').and_then(|(first, _)| header(first));
        header.is_some_and(|header| self.keys.load().find(&header.kid).is_none())
    }

    /// Fetches the keys for a token that names an unknown key. Does nothing within a second after such a fetch.
    pub async fn fetch_unknown(&self, token: &str) {
        let mut fetched = self.fetched.lock().await;
        if !self.is_unknown(token) || fetched.is_some_and(|last| last.elapsed() < MIN_FETCH_INTERVAL) {
            return;
        }
        if let Err(error) = self.fetch().await {
            tracing::warn!(%error, "cannot fetch the keys of the token signer; keeping the known keys");
        }
        *fetched = Some(Instant::now());
    }

    /// The published keys as a JSON web key set.
    #[must_use]
    pub fn key_set(&self) -> Value {
        self.keys.load().published()
    }

    /// The signing algorithms of the published keys.
    #[must_use]
    pub fn algorithms(&self) -> Vec<&'static str> {
        self.keys.load().algorithms()
    }

    async fn fetch(&self) -> Result<(), Error> {
        self.keys.store(Arc::new(self.client.keys().await?));
        Ok(())
    }

    /// Fetches the keys whenever they are due.
    async fn refresh(&self) {
        let mut due = self.keys.load().max_age;
        loop {
            tokio::time::sleep(due.min(MAX_AGE)).await;
            let _one_fetch = self.fetched.lock().await;
            due = match self.fetch().await {
                Ok(()) => self.keys.load().max_age,
                Err(error) => {
                    tracing::warn!(%error, "cannot fetch the keys of the token signer; keeping the known keys");
                    FETCH_RETRY_DELAY
                }
            };
        }
    }
}

const HEADER: &str = "the header must have exactly alg, kid (1 to 1024 bytes) and typ, which is JWT";

/// The header of a token, if it is valid.
fn header(encoded: &str) -> Option<Header> {
    let text = (encoded.len() <= MAX_HEADER).then(|| BASE64_URL_SAFE_NO_PAD.decode(encoded).ok())??;
    let header: Header = serde_json::from_slice(&text).ok()?;
    let is_valid = header.typ == "JWT" && (1..=keys::MAX_ID).contains(&header.kid.len());
    is_valid.then_some(header)
}

fn verified(keys: &KeySet, token: &str) -> Option<Value> {
    let (signed, signature) = token.rsplit_once('.')?;
    let (first, claims) = signed.split_once('.')?;
    let header = header(first)?;
    let key = keys.find(&header.kid).filter(|key| key.algorithm() == header.alg)?;
    key.verify(signed.as_bytes(), &BASE64_URL_SAFE_NO_PAD.decode(signature).ok()?)?;
    serde_json::from_slice(&BASE64_URL_SAFE_NO_PAD.decode(claims).ok()?).ok()
}

#[cfg(any(test, feature = "testing"))]
pub mod testing;

#[cfg(test)]
mod tests;

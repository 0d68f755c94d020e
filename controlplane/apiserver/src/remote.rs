//! Clients of the servers that kubeconfig files name: webhooks of authentication, authorization, audit and image
//! policies. Kubeconfig files also contain the identities of this server at admission webhooks.
//!
//! Responses are not trusted. The duration of a call, the bytes of a response, and the number of concurrent calls are
//! limited. Each webhook has a limit of its own on concurrent calls. The requests that use one webhook share its calls
//! fairly: by source address before their authentication, and by user afterwards.

pub(crate) mod cache;
pub(crate) mod identities;
pub(crate) mod kubeconfig;

use std::{path::Path, path::PathBuf, time::Duration};

use base64::{Engine as _, prelude::BASE64_STANDARD};
use coracle_error_chain::chain;
use http::{StatusCode, header};
use reqwest::{Client, redirect};
use serde_json::Value;
use tokio::time::Instant;

use crate::{request_owner, resolver::HttpLookups, waits, webhook_connections::WebhookConnections};

/// Maximum bytes of a response.
const MAX_RESPONSE: usize = 1 << 20;
/// Maximum concurrent calls to one server. Further calls wait within their timeout. One owner of requests gets at most
/// as many calls as are still free.
const MAX_CONCURRENT_CALLS: usize = 100;
/// Maximum calls that wait for one server. One owner gets at most a quarter of these waiting calls.
const MAX_WAITING_CALLS: usize = 4096;
/// Back-off before each retry. Upstream's webhook client has the same factor, but one retry more, and jitter.
const BACKOFFS: [Duration; 3] =
    [Duration::from_millis(500), Duration::from_millis(750), Duration::from_millis(1125)];

/// A server and the credentials for it.
pub(crate) struct Remote {
    http: Client,
    url: String,
    credential: Credential,
    calls: WebhookConnections,
    timeout: Duration,
    /// The back-off before each retry.
    backoffs: Vec<Duration>,
    /// Whether a failed connection is tried again.
    retries_connections: bool,
}

/// Credential in the header `Authorization`.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Credential {
    None,
    Token(String),
    /// Path of a token file. Each call reads it, because other programs replace the token.
    TokenFile(PathBuf),
    Basic(String),
}

/// A failed attempt.
struct Failure {
    reason: String,
    /// Whether another attempt can succeed.
    is_temporary: bool,
}

impl Remote {
    /// Reads a kubeconfig file. A call with all of its attempts takes at most `timeout`.
    ///
    /// # Errors
    /// The file cannot be read, or has a field that is not supported.
    pub(crate) fn read(path: &Path, timeout: Duration) -> Result<Self, String> {
        let parsed = kubeconfig::read(path)?;
        let http = Client::builder()
            .tls_backend_preconfigured(parsed.tls)
            .redirect(redirect::Policy::none())
            .dns_resolver(HttpLookups)
            .no_proxy()
            .timeout(timeout)
            .build()
            .map_err(|error| error.to_string())?;
        let calls = WebhookConnections::of_one_host(MAX_CONCURRENT_CALLS, MAX_WAITING_CALLS);
        let backoffs = BACKOFFS.to_vec();
        let (url, credential) = (parsed.url, parsed.credential);
        Ok(Self { http, url, credential, calls, timeout, backoffs, retries_connections: false })
    }

    /// Enables retries after a failed connection. By default and as upstream, a call whose connection failed is not
    /// retried, so that requests do not wait for a stopped webhook.
    pub(crate) fn with_connection_retries(self) -> Self {
        Self { retries_connections: true, ..self }
    }

    /// Uses four retries. Each back-off is one and a half times the previous back-off, as upstream. The total timeout
    /// does not change.
    pub(crate) fn with_retry_backoff(self, first: Duration) -> Self {
        let backoffs = std::iter::successors(Some(first), |backoff| Some(*backoff * 3 / 2)).take(4).collect();
        Self { backoffs, ..self }
    }

    /// Posts JSON and returns the response. A request that waits for a slow server gives its seats back.
    ///
    /// # Errors
    /// The server does not respond in time, or the response is not a success with JSON.
    pub(crate) async fn post(&self, body: &Value) -> Result<Value, String> {
        let text = body.to_string();
        let answer = waits::for_server(self.post_text(text.into())).await?;
        serde_json::from_slice(&answer)
            .map_err(|error| format!("the response of {} is not JSON: {error}", self.url))
    }

    /// Posts JSON that is encoded already, and returns the bytes of the response.
    ///
    /// # Errors
    /// The server does not respond in time, or the response is not a success.
    pub(crate) async fn post_text(&self, text: bytes::Bytes) -> Result<Vec<u8>, String> {
        let deadline = Instant::now() + self.timeout;
        let attempts = async {
            let call = self.calls.acquire("", request_owner::current()).await;
            let _call = call.ok_or_else(|| format!("too many calls wait for {}; try again", self.url))?;
            let mut backoffs = self.backoffs.iter();
            loop {
                match (self.attempt(text.clone()).await, backoffs.next()) {
                    (Ok(answer), _) => return Ok(answer),
                    (Err(failure), Some(backoff)) if failure.is_temporary => {
                        tokio::time::sleep(*backoff).await
                    }
                    (Err(failure), _) => return Err(failure.reason),
                }
            }
        };
        let answer = tokio::time::timeout_at(deadline, attempts).await;
        answer
            .unwrap_or_else(|_elapsed| Err(format!("{} did not respond within {:?}", self.url, self.timeout)))
    }

    async fn attempt(&self, text: bytes::Bytes) -> Result<Vec<u8>, Failure> {
        let failed = |error: reqwest::Error| Failure {
            reason: chain(&error),
            is_temporary: self.retries_connections || !error.is_connect(),
        };
        let mut request = self
            .http
            .post(&self.url)
            .header(header::CONTENT_TYPE, "application/json")
            .header(header::ACCEPT, "application/json")
            .body(text);
        if let Some(value) = self.credential.header().await? {
            request = request.header(header::AUTHORIZATION, value);
        }
        let mut response = request.send().await.map_err(failed)?;
        let status = response.status();
        if !status.is_success() {
            let is_temporary = status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS;
            return Err(Failure { reason: format!("{} responded with {status}", self.url), is_temporary });
        }
        let mut body = Vec::new();
        while let Some(chunk) = response.chunk().await.map_err(failed)? {
            if body.len() + chunk.len() > MAX_RESPONSE {
                let reason = format!("the response of {} is larger than {MAX_RESPONSE} bytes", self.url);
                return Err(Failure { reason, is_temporary: false });
            }
            body.extend_from_slice(&chunk);
        }
        Ok(body)
    }
}

// === impl Credential ===

impl Credential {
    /// The value of the header `Authorization`.
    async fn header(&self) -> Result<Option<header::HeaderValue>, Failure> {
        let text = match self {
            Self::None => return Ok(None),
            Self::Token(token) => format!("Bearer {token}"),
            Self::TokenFile(path) => {
                let text = tokio::fs::read_to_string(path).await;
                let text = text.map_err(|error| Failure {
                    reason: format!("cannot read the token file {}: {error}", path.display()),
                    is_temporary: false,
                })?;
                format!("Bearer {}", text.trim())
            }
            Self::Basic(pair) => format!("Basic {}", BASE64_STANDARD.encode(pair)),
        };
        let mut value = header::HeaderValue::from_str(&text).map_err(|error| Failure {
            reason: format!("the credential is not a valid header value: {error}"),
            is_temporary: false,
        })?;
        value.set_sensitive(true);
        Ok(Some(value))
    }
}

#[cfg(test)]
pub(crate) mod tests;

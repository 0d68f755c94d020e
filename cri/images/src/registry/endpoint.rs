//! One host of a registry: its HTTP client, address, and authorization.

use std::time::Duration;

use reqwest::header::{AUTHORIZATION, HeaderMap, HeaderName, HeaderValue, RANGE, WWW_AUTHENTICATE};
use reqwest::{Client, Method, Response, StatusCode};
use tokio::sync::Mutex;

use super::challenge::{self, Challenge};
use super::hosts::{Host, is_loopback};
use super::{RegistryError, Timeouts, token};
use crate::image::Auth;

pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(20);
pub(super) const AGENT: &str = concat!("coracle/", env!("CARGO_PKG_VERSION"));

/// A host to send requests to.
pub(super) struct Endpoint {
    pub(super) host: Host,
    client: Client,
    auth: Option<Auth>,
    /// The scope of a pull, for challenges without a scope.
    scope: String,
    /// Value of the header `Authorization` for the next request.
    granted: Mutex<Option<String>>,
    timeouts: Timeouts,
}

/// A request.
pub(super) struct Request<'a> {
    /// Path below the base, such as `/library/nginx/manifests/latest`.
    pub(super) path: &'a str,
    pub(super) accept: &'a str,
    /// Number of bytes to skip at the beginning.
    pub(super) from: u64,
    /// Whether to send HEAD instead of GET.
    pub(super) head: bool,
}

// === impl Endpoint ===

impl Endpoint {
    /// Creates the HTTP client of a host, without a connection.
    pub(super) fn new(
        host: Host,
        repository: &str,
        auth: Option<Auth>,
        timeouts: Timeouts,
    ) -> Result<Endpoint, RegistryError> {
        let secure = host.base.starts_with("https:");
        let tls = super::tls::config(&host.tls, secure).map_err(RegistryError::Tls)?;
        let mut headers = HeaderMap::new();
        for (name, value) in &host.headers {
            let pair = (name.parse::<HeaderName>(), value.parse::<HeaderValue>());
            let (Ok(name), Ok(value)) = pair else {
                return Err(RegistryError::Header { name: name.clone() });
            };
            headers.append(name, value);
        }
        let mut builder = Client::builder()
            .tls_backend_preconfigured(tls)
            .user_agent(AGENT)
            .default_headers(headers)
            .referer(false)
            // One connection per layer, so that a lost packet delays one layer only.
            .http1_only()
            .connect_timeout(host.dial_timeout.unwrap_or(CONNECT_TIMEOUT))
            .read_timeout(timeouts.stall);
        let url: Option<reqwest::Url> = host.base.parse().ok();
        if url.as_ref().and_then(|url| url.host_str()).is_some_and(is_loopback) {
            builder = builder.no_proxy();
        }
        let client = builder.build().map_err(|e| RegistryError::send(host.base.clone(), e))?;
        let granted = match &auth {
            Some(Auth::RegistryToken(token)) => Some(format!("Bearer {token}")),
            _ => None,
        };
        let scope = format!("repository:{repository}:pull");
        Ok(Endpoint { host, client, auth, scope, granted: Mutex::new(granted), timeouts })
    }

    /// The URL of a path below the base.
    pub(super) fn url(&self, path: &str) -> String {
        format!("{}{path}", self.host.base)
    }

    /// Sends a request, and sends it again after one challenge: tokens may expire during a long pull. The timeout includes
    /// the request to the token service, and the wait for another request that fetches a token.
    pub(super) async fn request(&self, request: &Request<'_>) -> Result<Response, RegistryError> {
        let url = self.url(request.path);
        let timeout = self.timeouts.progress;
        let answer = tokio::time::timeout(timeout, self.request_without_timeout(url.clone(), request)).await;
        answer.unwrap_or(Err(RegistryError::NoProgress { url, timeout }))
    }

    async fn request_without_timeout(
        &self,
        url: String,
        request: &Request<'_>,
    ) -> Result<Response, RegistryError> {
        let granted = self.granted.lock().await.clone();
        let response = self.send(&url, request, granted.as_deref()).await?;
        if response.status() != StatusCode::UNAUTHORIZED {
            return check_status(url, response).await;
        }
        let values = response.headers().get_all(WWW_AUTHENTICATE);
        let Some(challenge) = challenge::parse(values.iter().filter_map(|v| v.to_str().ok())) else {
            return Err(RegistryError::status(url, response).await);
        };
        let Some(granted) = self.answer(&challenge, granted).await? else {
            return Err(RegistryError::status(url, response).await);
        };
        let response = self.send(&url, request, Some(&granted)).await?;
        check_status(url, response).await
    }

    /// Gets the authorization for a challenge. `None` if the registry has refused all available credentials.
    async fn answer(
        &self,
        challenge: &Challenge,
        refused: Option<String>,
    ) -> Result<Option<String>, RegistryError> {
        // When a token expires, the requests of several layers may be refused. The first of them fetches a token for all.
        let mut granted = self.granted.lock().await;
        if *granted != refused {
            return Ok(granted.clone());
        }
        let new = match (challenge, &self.auth) {
            (_, Some(Auth::RegistryToken(_))) => return Ok(None),
            (Challenge::Basic, Some(Auth::Basic { username, password })) => {
                Some(token::basic(username, password)).filter(|new| Some(new) != refused.as_ref())
            }
            (Challenge::Basic, _) => None,
            (Challenge::Bearer { realm, service, scope }, auth) => {
                let scope = if scope.is_empty() { &self.scope } else { scope };
                let secure = self.host.base.starts_with("https:");
                let grant = token::Grant { realm, service, scope, secure };
                Some(token::fetch(&self.client, &grant, auth.as_ref()).await?)
            }
        };
        granted.clone_from(&new);
        Ok(new)
    }

    async fn send(
        &self,
        url: &str,
        request: &Request<'_>,
        authorization: Option<&str>,
    ) -> Result<Response, RegistryError> {
        let method = if request.head { Method::HEAD } else { Method::GET };
        let mut builder = self.client.request(method, url).header("accept", request.accept);
        if let Some(authorization) = authorization {
            builder = builder.header(AUTHORIZATION, authorization);
        }
        if request.from > 0 {
            builder = builder.header(RANGE, format!("bytes={}-", request.from));
        }
        builder.send().await.map_err(|e| RegistryError::send(url.to_owned(), e))
    }
}

async fn check_status(url: String, response: Response) -> Result<Response, RegistryError> {
    if response.status().is_success() {
        Ok(response)
    } else {
        Err(RegistryError::status(url, response).await)
    }
}

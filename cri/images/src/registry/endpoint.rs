//! One host of a registry: its HTTP client, address, and authorization.

use std::time::Duration;

use reqwest::header::{AUTHORIZATION, HeaderMap, HeaderName, HeaderValue, LOCATION, RANGE, WWW_AUTHENTICATE};
use reqwest::{Client, ClientBuilder, Method, Response, StatusCode, Url, redirect};
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
    /// Client with the headers of `hosts.toml`. It follows redirects at the same host only.
    client: Client,
    /// Client without these headers, for redirect targets and token services at other hosts.
    foreign: Client,
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
        let mut headers = HeaderMap::new();
        for (name, value) in &host.headers {
            let pair = (name.parse::<HeaderName>(), value.parse::<HeaderValue>());
            let (Ok(name), Ok(value)) = pair else {
                return Err(RegistryError::Header { name: name.clone() });
            };
            headers.append(name, value);
        }
        let failed = |e| RegistryError::send(host.base.clone(), e);
        let own = redirect::Policy::custom(within_host);
        let client = client_builder(&host, timeouts)?.default_headers(headers).redirect(own);
        let client = client.build().map_err(failed)?;
        let foreign = client_builder(&host, timeouts)?.build().map_err(failed)?;
        let granted = match &auth {
            Some(Auth::RegistryToken(token)) => Some(format!("Bearer {token}")),
            _ => None,
        };
        let scope = format!("repository:{repository}:pull");
        Ok(Endpoint { host, client, foreign, auth, scope, granted: Mutex::new(granted), timeouts })
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
                Some(token::fetch(self.client_of(realm), &grant, auth.as_ref()).await?)
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
        let mut builder = request.builder(&self.client, url);
        if let Some(authorization) = authorization {
            builder = builder.header(AUTHORIZATION, authorization);
        }
        let failed = |e| RegistryError::send(url.to_owned(), e);
        let response = builder.send().await.map_err(failed)?;
        match foreign_target(&response) {
            Some(target) => request.builder(&self.foreign, target.as_str()).send().await.map_err(failed),
            None => Ok(response),
        }
    }

    /// The client for a token service. A service at the host gets the headers of `hosts.toml`.
    fn client_of(&self, realm: &str) -> &Client {
        let urls = (self.host.base.parse::<Url>(), realm.parse::<Url>());
        let is_own = matches!(&urls, (Ok(base), Ok(realm)) if is_same_host(base, realm));
        if is_own && !self.host.headers.is_empty() { &self.client } else { &self.foreign }
    }
}

// === impl Request ===

impl Request<'_> {
    fn builder(&self, client: &Client, url: &str) -> reqwest::RequestBuilder {
        let method = if self.head { Method::HEAD } else { Method::GET };
        let builder = client.request(method, url).header("accept", self.accept);
        match self.from {
            0 => builder,
            from => builder.header(RANGE, format!("bytes={from}-")),
        }
    }
}

/// A client of the host, without headers of `hosts.toml`.
fn client_builder(host: &Host, timeouts: Timeouts) -> Result<ClientBuilder, RegistryError> {
    let secure = host.base.starts_with("https:");
    let tls = super::tls::config(&host.tls, secure).map_err(RegistryError::Tls)?;
    let builder = Client::builder()
        .tls_backend_preconfigured(tls)
        .user_agent(AGENT)
        .referer(false)
        // One connection per layer, so that a lost packet delays one layer only.
        .http1_only()
        .connect_timeout(host.dial_timeout.unwrap_or(CONNECT_TIMEOUT))
        .read_timeout(timeouts.stall);
    let url: Option<Url> = host.base.parse().ok();
    let is_local = url.as_ref().and_then(|url| url.host_str()).is_some_and(is_loopback);
    Ok(if is_local { builder.no_proxy() } else { builder })
}

/// Redirect policy: follows redirects at the same host. `reqwest` sends the headers of a client to all redirect targets.
fn within_host(attempt: redirect::Attempt<'_>) -> redirect::Action {
    let is_own = attempt.previous().last().is_some_and(|last| is_same_host(last, attempt.url()));
    if is_own { redirect::Policy::default().redirect(attempt) } else { attempt.stop() }
}

/// The target of a redirect to another host. Other responses have none.
fn foreign_target(response: &Response) -> Option<Url> {
    let location = response.headers().get(LOCATION).filter(|_| response.status().is_redirection())?;
    let target = response.url().join(location.to_str().ok()?).ok()?;
    Some(target).filter(|target| !is_same_host(response.url(), target))
}

/// Whether two URLs have the same scheme, host and port.
fn is_same_host(one: &Url, other: &Url) -> bool {
    one.origin() == other.origin()
}

async fn check_status(url: String, response: Response) -> Result<Response, RegistryError> {
    if response.status().is_success() {
        Ok(response)
    } else {
        Err(RegistryError::status(url, response).await)
    }
}

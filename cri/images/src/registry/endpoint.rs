//! One host of a registry: its HTTP client, address, and authorization.

use std::time::Duration;

use reqwest::header::{
    ACCEPT, AUTHORIZATION, HeaderMap, HeaderName, HeaderValue, LOCATION, RANGE, USER_AGENT, WWW_AUTHENTICATE,
};
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
    /// Headers of `hosts.toml`, for this host only.
    headers: HeaderMap,
    /// Client for requests with secrets. It follows redirects at the same host only.
    client: Client,
    /// Client for redirect targets and token services at other hosts.
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
            // As in containerd, each request sets its own values of these headers.
            if !["accept", "range"].contains(&name.as_str()) {
                headers.append(name, value);
            }
        }
        let failed = |e| RegistryError::send(host.base.clone(), e);
        let own = redirect::Policy::custom(within_host);
        let secure = host.base.starts_with("https:");
        let client = client_builder(&host, timeouts, secure)?.redirect(own).build().map_err(failed)?;
        let foreign = client_builder(&host, timeouts, secure)?.build().map_err(failed)?;
        let granted = match &auth {
            Some(Auth::RegistryToken(token)) => Some(format!("Bearer {token}")),
            _ => None,
        };
        let scope = format!("repository:{repository}:pull");
        Ok(Endpoint { host, headers, client, foreign, auth, scope, granted: Mutex::new(granted), timeouts })
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
                let (client, headers) = self.client_of(realm)?;
                Some(token::fetch(&client, headers, &grant, auth.as_ref()).await?)
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
        let mut headers = self.headers.clone();
        if authorization.is_some() {
            headers.remove(AUTHORIZATION);
        }
        let mut builder = request.builder(&self.client, url, headers);
        if let Some(authorization) = authorization {
            builder = builder.header(AUTHORIZATION, authorization);
        }
        let failed = |e| RegistryError::send(url.to_owned(), e);
        let response = builder.send().await.map_err(failed)?;
        match foreign_target(&response) {
            Some(target) => {
                let client = self.foreign(&target)?;
                let builder = request.builder(&client, target.as_str(), self.foreign_headers());
                builder.send().await.map_err(failed)
            }
            None => Ok(response),
        }
    }

    /// The client and the headers for a token service. A service at the host gets the headers of `hosts.toml`. The body
    /// of a request may have a refresh token. Then the client follows redirects at the same host only.
    fn client_of(&self, realm: &str) -> Result<(Client, HeaderMap), RegistryError> {
        let urls = (self.host.base.parse::<Url>(), realm.parse::<Url>());
        let is_own = matches!(&urls, (Ok(base), Ok(realm)) if is_same_host(base, realm));
        if is_own && !self.headers.is_empty() {
            return Ok((self.client.clone(), self.headers.clone()));
        }
        let client = match &urls.1 {
            Ok(realm) if matches!(self.auth, Some(Auth::IdentityToken(_))) => {
                self.client_for(realm, redirect::Policy::custom(within_host))?
            }
            Ok(realm) => self.foreign(realm)?,
            Err(_) => self.foreign.clone(),
        };
        Ok((client, self.foreign_headers()))
    }

    /// The client for a URL at another host. The clients of a registry without TLS have no certificate authorities.
    /// So a URL with TLS needs another client.
    fn foreign(&self, url: &Url) -> Result<Client, RegistryError> {
        if url.scheme() == "https" && !self.host.base.starts_with("https:") {
            return self.client_for(url, redirect::Policy::default());
        }
        Ok(self.foreign.clone())
    }

    fn client_for(&self, url: &Url, policy: redirect::Policy) -> Result<Client, RegistryError> {
        let builder = client_builder(&self.host, self.timeouts, url.scheme() == "https")?.redirect(policy);
        builder.build().map_err(|e| RegistryError::send(self.host.base.clone(), e))
    }

    /// The headers of `hosts.toml` that other hosts get: only `User-Agent`, because the others may be secrets.
    fn foreign_headers(&self) -> HeaderMap {
        let agents = self.headers.get_all(USER_AGENT).iter();
        agents.map(|agent| (USER_AGENT, agent.clone())).collect()
    }
}

// === impl Request ===

impl Request<'_> {
    fn builder(&self, client: &Client, url: &str, headers: HeaderMap) -> reqwest::RequestBuilder {
        let method = if self.head { Method::HEAD } else { Method::GET };
        let builder = client.request(method, url).headers(headers).header(ACCEPT, self.accept);
        match self.from {
            0 => builder,
            from => builder.header(RANGE, format!("bytes={from}-")),
        }
    }
}

/// A client of the host, for URLs with TLS if `secure` is set.
fn client_builder(host: &Host, timeouts: Timeouts, secure: bool) -> Result<ClientBuilder, RegistryError> {
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

/// Redirect policy: follows redirects at the same host. `reqwest` sends bodies and most headers to all redirect
/// targets.
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

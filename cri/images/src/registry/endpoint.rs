//! One host of a registry: its client, its address, and the authorization that it asked for.

use std::time::Duration;

use reqwest::header::{AUTHORIZATION, HeaderMap, HeaderName, HeaderValue, RANGE, WWW_AUTHENTICATE};
use reqwest::{Client, Method, Response, StatusCode};
use tokio::sync::Mutex;

use super::challenge::{self, Challenge};
use super::hosts::{Host, is_loopback};
use super::{Patience, RegistryError, token};
use crate::image::Auth;

pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(20);
pub(super) const AGENT: &str = concat!("coracle/", env!("CARGO_PKG_VERSION"));

/// A host that can be asked.
pub(super) struct Endpoint {
    pub(super) host: Host,
    client: Client,
    auth: Option<Auth>,
    /// The scope that pulling needs, for services whose challenge does not say.
    scope: String,
    /// The `Authorization` that was accepted last.
    granted: Mutex<Option<String>>,
    patience: Patience,
}

/// One request.
pub(super) struct Ask<'a> {
    /// Below the base, as `/library/nginx/manifests/latest`.
    pub(super) path: &'a str,
    pub(super) accept: &'a str,
    /// Bytes to leave out at the beginning.
    pub(super) from: u64,
    /// Only the answer's head is wanted.
    pub(super) head: bool,
}

// === impl Endpoint ===

impl Endpoint {
    /// Sets up a client for a host. Connects to nothing yet.
    pub(super) fn new(
        host: Host,
        repository: &str,
        auth: Option<Auth>,
        patience: Patience,
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
            // A connection for each layer: what one loses does not hold up the others.
            .http1_only()
            .connect_timeout(host.dial_timeout.unwrap_or(CONNECT_TIMEOUT))
            .read_timeout(patience.stall);
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
        Ok(Endpoint { host, client, auth, scope, granted: Mutex::new(granted), patience })
    }

    /// The address of a path below the base.
    pub(super) fn url(&self, path: &str) -> String {
        format!("{}{path}", self.host.base)
    }

    /// Asks, answering one challenge on the way: tokens expire in the middle of long pulls too. Ends in time, whoever
    /// stalls: the host, the token service, or another who waits for that.
    pub(super) async fn ask(&self, ask: &Ask<'_>) -> Result<Response, RegistryError> {
        let url = self.url(ask.path);
        let within = self.patience.progress;
        let answer = tokio::time::timeout(within, self.ask_now(url.clone(), ask)).await;
        answer.unwrap_or(Err(RegistryError::NoProgress { url, within }))
    }

    async fn ask_now(&self, url: String, ask: &Ask<'_>) -> Result<Response, RegistryError> {
        let granted = self.granted.lock().await.clone();
        let response = self.send(&url, ask, granted.as_deref()).await?;
        if response.status() != StatusCode::UNAUTHORIZED {
            return check(url, response).await;
        }
        let values = response.headers().get_all(WWW_AUTHENTICATE);
        let Some(challenge) = challenge::parse(values.iter().filter_map(|v| v.to_str().ok())) else {
            return Err(RegistryError::status(url, response).await);
        };
        let Some(granted) = self.answer(&challenge, granted).await? else {
            return Err(RegistryError::status(url, response).await);
        };
        let response = self.send(&url, ask, Some(&granted)).await?;
        check(url, response).await
    }

    /// Gets what a challenge asks for; none if we have already shown all that we have.
    async fn answer(
        &self,
        challenge: &Challenge,
        refused: Option<String>,
    ) -> Result<Option<String>, RegistryError> {
        // Several layers may be refused at once when a token expires: the first gets the new one for all.
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
                let grant = token::Grant { realm, service, scope };
                Some(token::fetch(&self.client, &grant, auth.as_ref()).await?)
            }
        };
        granted.clone_from(&new);
        Ok(new)
    }

    async fn send(
        &self,
        url: &str,
        ask: &Ask<'_>,
        authorization: Option<&str>,
    ) -> Result<Response, RegistryError> {
        let method = if ask.head { Method::HEAD } else { Method::GET };
        let mut request = self.client.request(method, url).header("accept", ask.accept);
        if let Some(authorization) = authorization {
            request = request.header(AUTHORIZATION, authorization);
        }
        if ask.from > 0 {
            request = request.header(RANGE, format!("bytes={}-", ask.from));
        }
        request.send().await.map_err(|e| RegistryError::send(url.to_owned(), e))
    }
}

async fn check(url: String, response: Response) -> Result<Response, RegistryError> {
    if response.status().is_success() {
        Ok(response)
    } else {
        Err(RegistryError::status(url, response).await)
    }
}

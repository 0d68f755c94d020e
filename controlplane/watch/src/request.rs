//! The requests of a watch.

use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, LengthLimitError, Limited};
use kube::Client;
use kube::api::Request;
use kube::client::Body;
use kube::core::Status;

use crate::config::Config;
use crate::error::Error;
use crate::json;
use crate::page::Page;

/// Maximum bytes of the body of an error response.
const STATUS_LIMIT: usize = 1 << 20;
/// Maximum characters of an error response that is text.
const MESSAGE_MAX: usize = 300;
/// Maximum time until a page is received, or a watch begins. An API server takes at most 60 seconds.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(120);

/// The kind to watch, and its server.
#[derive(Clone)]
pub(crate) struct Target {
    pub(crate) client: Client,
    /// Path of the kind, with the namespace if only one namespace is watched.
    pub(crate) url: String,
    /// Whether only the metadata of objects is requested.
    pub(crate) is_metadata: bool,
}

impl std::fmt::Debug for Target {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Target").field("url", &self.url).finish_non_exhaustive()
    }
}

impl Target {
    /// Requests a page of the list. `token` selects the page. The first page has no token.
    pub(crate) async fn list(self, config: Config, token: Option<String>) -> Result<Page, Error> {
        let params = config.list_params(token);
        let request = Request::new(self.url.clone());
        let request = if self.is_metadata { request.list_metadata(&params) } else { request.list(&params) };
        let read = async {
            let body = send(&self.client, request, "list").await.map_err(Error::List)?;
            collect(body, config.page_limit).await.map_err(|error| error.of(Error::List))
        };
        let limit = REQUEST_TIMEOUT;
        let response =
            tokio::time::timeout(limit, read).await.map_err(|_elapsed| Error::Timeout { limit })??;
        Page::parse(&response).map_err(Error::Invalid)
    }

    /// Starts a watch after a resource version.
    pub(crate) async fn watch(self, config: Config, version: String) -> Result<Body, Error> {
        let params = config.watch_params();
        let request = Request::new(self.url.clone());
        let request = match self.is_metadata {
            true => request.watch_metadata(&params, &version),
            false => request.watch(&params, &version),
        };
        let limit = REQUEST_TIMEOUT;
        let started = tokio::time::timeout(limit, send(&self.client, request, "watch")).await;
        started.map_err(|_elapsed| Error::Timeout { limit })?.map_err(Error::Start)
    }
}

/// Sends a request. An error response is returned as an error that contains its status.
async fn send(
    client: &Client,
    request: Result<http::Request<Vec<u8>>, kube::core::request::Error>,
    verb: &'static str,
) -> Result<Body, kube::Error> {
    let mut request = request.map_err(kube::Error::BuildRequest)?.map(Body::from);
    // The name of the request in the traces of the client.
    request.extensions_mut().insert(verb);
    let response = client.send(request).await?;
    let code = response.status();
    if !code.is_client_error() && !code.is_server_error() {
        return Ok(response.into_body());
    }
    let body = collect(response.into_body(), STATUS_LIMIT).await.unwrap_or_default();
    let status = json::decode::<Status>(&body).ok().filter(|status| status.code != 0);
    // The response of a proxy may be text.
    let status = status.unwrap_or_else(|| {
        let text: String = String::from_utf8_lossy(&body).trim().chars().take(MESSAGE_MAX).collect();
        Status::failure(&text, "Unknown").with_code(code.as_u16())
    });
    Err(kube::Error::Api(Box::new(status)))
}

/// The reason why a body could not be read.
enum CollectError {
    TooLarge(usize),
    Read(Box<dyn std::error::Error + Send + Sync>),
}

impl CollectError {
    /// The error of the watch. `wrap` adds the request that failed.
    fn of(self, wrap: fn(kube::Error) -> Error) -> Error {
        match self {
            Self::TooLarge(limit) => Error::TooLarge { limit },
            Self::Read(error) => wrap(match error.downcast::<kube::Error>() {
                Ok(error) => *error,
                Err(error) => kube::Error::Service(error),
            }),
        }
    }
}

/// Reads a whole body.
async fn collect(body: Body, limit: usize) -> Result<Bytes, CollectError> {
    match Limited::new(body, limit).collect().await {
        Ok(collected) => Ok(collected.to_bytes()),
        Err(error) if error.is::<LengthLimitError>() => Err(CollectError::TooLarge(limit)),
        Err(error) => Err(CollectError::Read(error)),
    }
}

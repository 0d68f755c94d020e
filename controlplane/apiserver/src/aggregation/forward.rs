//! Sends requests to aggregated servers, with the user's identity in `X-Remote-*` headers.

use std::{sync::Arc, time::Duration};

use coracle_connections::PermitStream;
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, StatusCode, header};
use http_body_util::{BodyExt as _, Limited};
use hyper::body::Incoming;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use rustls_pki_types::ServerName;
use serde_json::Value;

use super::{
    Remote, ServiceReference,
    pool::{Pool, is_repeatable},
};
use crate::{
    authn::User,
    cache::Cache,
    error::{ApiError, Result},
    external_name,
    reply::{Body, full},
    target::{self, ConnectionGuard, Endpoint, TlsServer},
};

/// Maximum bytes of a discovery document.
pub(super) const MAX_DOCUMENT: usize = 3 << 20;
/// The media type of most documents.
pub(super) const JSON: &str = "application/json";

/// The request for a document of another server.
pub(super) struct DocumentRequest<'a> {
    pub(super) path: &'a str,
    /// The accepted media type.
    pub(super) media: &'static str,
    /// ETag of the cached document.
    pub(super) tag: Option<&'a str>,
    /// Maximum bytes of the document.
    pub(super) max: usize,
}

/// A fetched document.
pub(super) struct Fetched {
    pub(super) headers: HeaderMap,
    pub(super) body: bytes::Bytes,
}

/// The reason why a document cannot be fetched.
#[derive(Debug, thiserror::Error)]
pub(super) enum FetchError {
    /// The status of the response is not successful.
    #[error("bad status from {url}: {}", .code.as_u16())]
    Status { url: String, code: StatusCode },
    /// The request failed, or the document is invalid.
    #[error("{0}")]
    Other(String),
}

/// The client of aggregated servers.
#[derive(Clone)]
pub(crate) struct Forwarder {
    pub(crate) cache: Arc<Cache>,
    /// Maximum time until the head of a response arrives.
    pub(crate) timeout: Duration,
}

// === impl Forwarder ===

impl Forwarder {
    /// Requests the APIResourceList of the group version. Returns the response when its head arrives.
    ///
    /// # Errors
    /// The server does not respond, or the status is not successful.
    pub(crate) async fn probe(&self, remote: &Remote) -> std::result::Result<Response<Incoming>, String> {
        let path = remote.path();
        let wanted = DocumentRequest { path: &path, media: JSON, tag: None, max: MAX_DOCUMENT };
        self.open(remote, &wanted).await.map_err(|error| error.to_string())
    }

    /// Reads a document with the aggregator's credentials. `None` if the document is not modified.
    pub(super) async fn fetch(
        &self,
        remote: &Remote,
        wanted: DocumentRequest<'_>,
    ) -> std::result::Result<Option<Fetched>, FetchError> {
        let answer = self.open(remote, &wanted).await?;
        if answer.status() == StatusCode::NOT_MODIFIED {
            return Ok(None);
        }
        let (head, body) = answer.into_parts();
        let body = read(body, &wanted).await.map_err(FetchError::Other)?;
        Ok(Some(Fetched { headers: head.headers, body }))
    }

    /// Requests a document. The response has a successful status. With a tag, the status may also be 304.
    async fn open(
        &self,
        remote: &Remote,
        wanted: &DocumentRequest<'_>,
    ) -> std::result::Result<Response<Incoming>, FetchError> {
        let mut request = Request::get(wanted.path).header(header::ACCEPT, wanted.media);
        if let Some(tag) = wanted.tag {
            request = request.header(header::IF_NONE_MATCH, tag);
        }
        let request = request.body(full("")).map_err(|error| FetchError::Other(error.to_string()))?;
        let aggregator = User::new("system:kube-aggregator", &["system:masters"]);
        let answer = self.send(remote, &aggregator, request, ()).await;
        let answer = answer.map_err(|error| FetchError::Other(error.message))?;
        let status = answer.status();
        let is_known = wanted.tag.is_some() && status == StatusCode::NOT_MODIFIED;
        match status.is_success() || is_known {
            true => Ok(answer),
            false => Err(FetchError::Status { url: remote.url(wanted.path), code: status }),
        }
    }

    /// Sends a request on behalf of a user. The permit is held until the response ends. If the connection cannot be
    /// reused, the permit is held until the connection ends.
    pub(crate) async fn send(
        &self,
        remote: &Remote,
        user: &User,
        mut request: Request<Body>,
        permit: impl Send + Sync + Unpin + 'static,
    ) -> Result<Response<Incoming>> {
        identify(request.headers_mut(), user)?;
        let ServiceReference { namespace, name, port } = &remote.service;
        let config = remote.tls.clone().map_err(ApiError::unavailable)?;
        let host = format!("{name}.{namespace}.svc");
        let server_name = ServerName::try_from(host.clone()).map_err(ApiError::internal)?;
        let server = TlsServer { config, name: server_name };
        let host = HeaderValue::from_str(&host).map_err(ApiError::internal)?;
        request.headers_mut().insert(header::HOST, host);
        let (endpoint, stream) = match external_name::of(&self.cache, namespace, name) {
            Some(host) => external_name::connect(&host, *port).await?,
            None => {
                let endpoint = target::service(&self.cache, namespace, name, &port.to_string())?;
                if is_repeatable(&request) {
                    let mut answer = self.send_repeatable(&remote.pool, &endpoint, server, request).await?;
                    answer.extensions_mut().insert(ConnectionGuard::new(permit));
                    return Ok(answer);
                }
                let stream = endpoint.connect().await?;
                (endpoint, stream)
            }
        };
        let stream = PermitStream::new(stream, permit);
        endpoint.send_tls(stream, server, request, self.timeout).await
    }

    /// Sends a request on an idle connection, or on a new connection.
    async fn send_repeatable(
        &self,
        pool: &Arc<Pool>,
        endpoint: &Endpoint,
        server: TlsServer,
        request: Request<Body>,
    ) -> Result<Response<Incoming>> {
        pool.send(endpoint, request, self.timeout, endpoint.open(server)).await
    }
}

/// Reads the APIResourceList of a [probe](Forwarder::probe).
pub(crate) async fn resource_list<B>(body: B) -> std::result::Result<Value, String>
where
    B: http_body::Body,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let wanted = DocumentRequest { path: "the APIResourceList", media: JSON, tag: None, max: MAX_DOCUMENT };
    let body = read(body, &wanted).await?;
    let list = serde_json::from_slice(&body);
    list.map_err(|error| format!("the APIResourceList is not JSON: {error}"))
}

/// Reads a document up to its limit.
async fn read<B>(body: B, wanted: &DocumentRequest<'_>) -> std::result::Result<bytes::Bytes, String>
where
    B: http_body::Body,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let body = Limited::new(body, wanted.max).collect().await;
    Ok(body.map_err(|error| format!("cannot read {}: {error}", wanted.path))?.to_bytes())
}

/// Adds the headers with the user's identity. An identity that cannot be encoded in headers is an error: with an
/// incomplete identity, the server could mistake the user for another user.
fn identify(headers: &mut HeaderMap, user: &User) -> Result<()> {
    let mut add = |name: &str, value: &str| {
        let name = HeaderName::from_bytes(name.to_ascii_lowercase().as_bytes());
        // A server removes white space around the value of a header, so `system:masters ` would become another group.
        // All other text is sent in UTF-8, as upstream.
        let is_whole = value.trim_matches([' ', '\t']) == value;
        let value = HeaderValue::from_bytes(value.as_bytes());
        let (Ok(name), Ok(value), true) = (name, value, is_whole) else {
            return Err(ApiError::bad_request(
                "cannot send the user to an aggregated server: the name, the UID, a group or an extra value has \
                 control characters, or white space at its ends",
            ));
        };
        headers.append(name, value);
        Ok(())
    };
    add("x-remote-user", &user.name)?;
    if !user.uid.is_empty() {
        add("x-remote-uid", &user.uid)?;
    }
    // The aggregated server knows no roles of controllers, but it permits all requests of this group.
    let masters = user.is_component().then_some("system:masters");
    for group in user.groups.iter().map(String::as_str).chain(masters) {
        add("x-remote-group", group)?;
    }
    for (key, values) in &user.extra {
        let key = format!("x-remote-extra-{}", utf8_percent_encode(key, NON_ALPHANUMERIC));
        for value in values {
            add(&key, value)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use http_body_util::Full;

    use super::*;

    #[test]
    fn the_identity_is_in_headers() {
        let mut user = User::new("ann", &["dev"]);
        user.extra.insert("a/b".to_owned(), vec!["1".to_owned(), "2".to_owned()]);
        let mut headers = HeaderMap::new();
        identify(&mut headers, &user).unwrap();
        assert_eq!(headers["x-remote-user"], "ann");
        let all = |name: &str| headers.get_all(name).iter().cloned().collect::<Vec<_>>();
        assert_eq!(all("x-remote-group"), ["dev", "system:authenticated"]);
        assert_eq!(all("x-remote-extra-a%2fb"), ["1", "2"]);
        let mut headers = HeaderMap::new();
        identify(&mut headers, &User::controllers()).unwrap();
        assert_eq!(headers["x-remote-user"], "system:kube-controller-manager");
        assert!(headers.get_all("x-remote-group").iter().any(|group| group == "system:masters"));
    }

    #[test]
    fn an_identity_that_does_not_fit_into_headers_is_refused() {
        // White space around a value would be lost.
        let spaces =
            [User::new("ann ", &[]), User::new("ann", &["system:masters "]), User::new("\tann", &[])];
        for user in [User::new("ann\n", &[]), User::new("ann", &["de\nv"])].into_iter().chain(spaces) {
            assert!(identify(&mut HeaderMap::new(), &user).is_err(), "{:?}", user.groups);
        }
    }

    #[test]
    fn names_in_other_languages_are_sent_in_utf_8() {
        let mut headers = HeaderMap::new();
        identify(&mut headers, &User::new("jürgen k", &["größe"])).unwrap();
        assert_eq!(headers["x-remote-user"].as_bytes(), "jürgen k".as_bytes());
        assert_eq!(headers["x-remote-group"].as_bytes(), "größe".as_bytes());
    }

    #[tokio::test]
    async fn a_document_is_read_up_to_its_limit() {
        let wanted = DocumentRequest { path: "/apis/far.io/v1", media: JSON, tag: None, max: MAX_DOCUMENT };
        let body = |length: usize| Full::new(bytes::Bytes::from(vec![b' '; length]));
        assert_eq!(read(body(MAX_DOCUMENT), &wanted).await.unwrap().len(), MAX_DOCUMENT);
        let error = read(body(MAX_DOCUMENT + 1), &wanted).await.unwrap_err();
        assert!(error.starts_with("cannot read /apis/far.io/v1: ") && error.contains("limit"), "{error}");
        assert!(resource_list(body(MAX_DOCUMENT + 1)).await.is_err());
        assert!(resource_list(Full::new(bytes::Bytes::from("<html>"))).await.is_err());
        assert_eq!(resource_list(Full::new(bytes::Bytes::from("{}"))).await.unwrap(), serde_json::json!({}));
    }
}

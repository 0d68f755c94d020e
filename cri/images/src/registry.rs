//! Client of a registry: fetches manifests and blobs, from mirrors first, with resume and verification.

use std::io;
use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use reqwest::StatusCode;

use crate::digest::Digest;
use crate::error::ErrorKind;
use crate::image::Login;
use crate::manifest::{ACCEPT, Descriptor, MANIFEST_MAX};
use crate::reference::{Reference, Target};

mod blob;
mod challenge;
mod client_certificate;
mod detail;
mod endpoint;
mod foreign;
mod host_match;
mod hosts;
mod retry;
mod tls;
mod token;

pub(crate) use blob::Blob;
use endpoint::{Endpoint, Request};

/// The hosts that serve a repository.
pub(crate) struct Registry {
    endpoints: Vec<Endpoint>,
    domain: String,
    repository: String,
    timeouts: Timeouts,
}

/// Timeouts for a registry.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Timeouts {
    /// Maximum time between two bytes.
    pub(crate) stall: Duration,
    /// Maximum time for a document, or for the next 64 KiB of a [`blob`]. Includes retries.
    pub(crate) progress: Duration,
}

/// A document from a registry.
#[derive(Debug)]
pub(crate) struct Fetched {
    pub(crate) bytes: Bytes,
    pub(crate) digest: Digest,
}

/// Errors of requests to a registry.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RegistryError {
    #[error("cannot use the registry configuration")]
    Hosts(#[source] hosts::HostsError),
    #[error("cannot set up TLS for the registry")]
    Tls(#[source] tls::TlsError),
    #[error("the configured header {name:?} is invalid")]
    Header { name: String },
    #[error("cannot reach {url}")]
    Connect {
        url: String,
        #[source]
        source: reqwest::Error,
    },
    #[error("{url} sent no data within the timeout")]
    Stalled {
        url: String,
        #[source]
        source: reqwest::Error,
    },
    #[error("{url} made no progress in {timeout:?}")]
    NoProgress { url: String, timeout: Duration },
    #[error("the transfer of {url} was interrupted")]
    Broken {
        url: String,
        #[source]
        source: reqwest::Error,
    },
    #[error("the transfer of {url} ended after {got} of {size} bytes")]
    Short { url: String, got: u64, size: u64 },
    #[error("{url} has {length} bytes, not {size}")]
    Length { url: String, length: u64, size: u64 },
    #[error("{url} answers {status}{detail}")]
    Status {
        url: String,
        status: StatusCode,
        detail: String,
        /// Value of the Retry-After header.
        retry_after: Option<Duration>,
    },
    #[error("{realm} is not a usable token service")]
    Realm { realm: String },
    #[error("the registry uses TLS, but its token service {realm} does not: no credentials are sent to it")]
    PlainRealm { realm: String },
    #[error("cannot parse the token from {realm}")]
    Token { realm: String },
    #[error("{url} is larger than {max} bytes")]
    TooLarge { url: String, max: u64 },
    #[error("{url} has the digest {actual}, not {expected}")]
    Digest { url: String, expected: Box<Digest>, actual: Box<Digest> },
    #[error("the spooled data of {digest} is damaged")]
    DamagedSpool {
        digest: Box<Digest>,
        #[source]
        source: io::Error,
    },
    #[error("no host of {domain} has the capability for this request; check its hosts.toml")]
    NoHost { domain: String },
    #[error("all hosts of {domain} failed: {before}; last")]
    AllHosts {
        domain: String,
        /// Errors of all hosts except the last.
        before: String,
        #[source]
        last: Box<RegistryError>,
    },
}

// === impl Registry ===

impl Registry {
    /// Determines the hosts. Makes no connection yet.
    pub(crate) fn new(
        configuration: Option<&Path>,
        reference: &Reference,
        login: Option<&Login>,
        timeouts: Timeouts,
    ) -> Result<Registry, RegistryError> {
        let hosts = hosts::load(configuration, reference.domain()).map_err(RegistryError::Hosts)?;
        let endpoints = hosts
            .into_iter()
            .filter(|host| host.pull || host.resolve)
            .map(|host| {
                let own = login.filter(|login| belongs_to(login, reference, &host));
                Endpoint::new(host, reference.path(), own.map(|login| login.auth.clone()), timeouts)
            })
            .collect::<Result<Vec<_>, _>>()?;
        Ok(Registry {
            endpoints,
            domain: reference.domain().to_owned(),
            repository: reference.path().to_owned(),
            timeouts,
        })
    }

    /// Fetches the manifest or index of a tag.
    pub(crate) async fn resolve(&self, tag: &str) -> Result<Fetched, RegistryError> {
        self.manifest(tag, None).await
    }

    /// Fetches the manifest or index with a digest.
    pub(crate) async fn by_digest(&self, digest: Digest) -> Result<Fetched, RegistryError> {
        self.manifest(&digest.to_string(), Some(digest)).await
    }

    /// The digest of a tag or digest, by one HEAD request to the first host with the capability. Registries do not
    /// count a HEAD request as a pull. `None` if the request fails or returns no digest of a tag: then the caller
    /// fetches the document. A digest in the reference is never replaced: a mirror could substitute another image.
    pub(crate) async fn digest(&self, target: &Target) -> Option<Digest> {
        let has_capability = |endpoint: &Endpoint| match target {
            Target::Tag(_) => endpoint.host.resolve,
            Target::Digest(_) => endpoint.host.pull,
        };
        let (index, endpoint) =
            self.endpoints.iter().enumerate().find(|(_, endpoint)| has_capability(endpoint))?;
        let path = self.path(index, &format!("manifests/{}", target.as_str()));
        let answer =
            endpoint.request(&Request { path: &path, accept: ACCEPT, from: 0, head: true }).await.ok()?;
        match target {
            Target::Tag(_) => content_digest(&answer),
            Target::Digest(digest) => digest.parse().ok(),
        }
    }

    /// A blob, to be read in pieces.
    pub(crate) fn blob(&self, descriptor: &Descriptor) -> Blob<'_> {
        Blob::new(self, descriptor)
    }

    /// Indexes of the endpoints with the pull capability.
    fn pull_hosts(&self) -> Vec<usize> {
        let hosts = self.endpoints.iter().enumerate().filter(|(_, endpoint)| endpoint.host.pull);
        hosts.map(|(index, _)| index).collect()
    }

    async fn manifest(&self, target: &str, expected: Option<Digest>) -> Result<Fetched, RegistryError> {
        let mut failures: Vec<RegistryError> = Vec::new();
        for (index, endpoint) in self.endpoints.iter().enumerate() {
            let has_capability = if expected.is_some() { endpoint.host.pull } else { endpoint.host.resolve };
            if !has_capability {
                continue;
            }
            let path = self.path(index, &format!("manifests/{target}"));
            let timeout = self.timeouts.progress;
            let got = tokio::time::timeout(timeout, manifest_from(endpoint, &path, expected)).await;
            let late = |_late| Err(RegistryError::NoProgress { url: endpoint.url(&path), timeout });
            match got.unwrap_or_else(late) {
                Ok(fetched) => return Ok(fetched),
                Err(error) => failures.push(error),
            }
        }
        Err(self.joined(failures))
    }

    /// The path of a request. Mirrors get the registry's name as `ns`, as in containerd.
    fn path(&self, endpoint: usize, rest: &str) -> String {
        let mirror = self.endpoints.get(endpoint).is_some_and(|e| e.host.mirror);
        let ns = if mirror { format!("?ns={}", self.domain) } else { String::new() };
        format!("/{}/{rest}{ns}", self.repository)
    }

    fn joined(&self, mut failures: Vec<RegistryError>) -> RegistryError {
        let Some(last) = failures.pop() else {
            return RegistryError::NoHost { domain: self.domain.clone() };
        };
        if failures.is_empty() {
            return last;
        }
        RegistryError::AllHosts {
            domain: self.domain.clone(),
            before: deduplicated(&failures),
            last: Box::new(last),
        }
    }
}

/// Whether credentials belong to a host. Credentials that name a host belong to that host. Other credentials belong to
/// the registry of the image. A mirror gets only credentials that name the mirror.
fn belongs_to(login: &Login, reference: &Reference, host: &hosts::Host) -> bool {
    let name = match host_match::host_of(&login.address) {
        "" => reference.domain(),
        name => name,
    };
    host_match::is_address_of(&host.base, name)
}

/// Joins errors in order. Repeated errors are listed once with their count.
fn deduplicated(failures: &[RegistryError]) -> String {
    let mut reported: Vec<(String, u32)> = Vec::new();
    for failure in failures {
        let report = crate::error::report(failure);
        match reported.iter_mut().find(|(known, _)| *known == report) {
            Some((_, times)) => *times += 1,
            None => reported.push((report, 1)),
        }
    }
    let lines = reported.into_iter().map(|(report, times)| match times {
        1 => report,
        times => format!("{report} ({times} times)"),
    });
    lines.collect::<Vec<_>>().join("; ")
}

/// Fetches a manifest from one host. Manifests are small, so a broken transfer starts again. The content is
/// checked against the expected digest, or, for a tag, against the digest in the response header.
async fn manifest_from(
    endpoint: &Endpoint,
    path: &str,
    expected: Option<Digest>,
) -> Result<Fetched, RegistryError> {
    let url = endpoint.url(path);
    let mut failures = 0;
    let (bytes, declared) = loop {
        let request = Request { path, accept: ACCEPT, from: 0, head: false };
        let got = match endpoint.request(&request).await {
            Ok(response) => {
                let declared = content_digest(&response);
                body(response, MANIFEST_MAX, &url).await.map(|bytes| (bytes, declared))
            }
            Err(error) => Err(error),
        };
        match got {
            Ok(got) => break got,
            Err(error) => {
                failures += 1;
                let delay = retry::delay(&error, failures).filter(|_| failures < retry::TRIES);
                let Some(delay) = delay else { return Err(error) };
                tokio::time::sleep(delay).await;
            }
        }
    };
    if let Some(expected) = expected.or(declared) {
        let actual = Digest::by(expected.algorithm(), &bytes);
        if actual != expected {
            return Err(RegistryError::Digest { url, expected: expected.into(), actual: actual.into() });
        }
    }
    let digest = expected.unwrap_or_else(|| Digest::of(&bytes));
    Ok(Fetched { bytes, digest })
}

/// The digest in the response header.
fn content_digest(response: &reqwest::Response) -> Option<Digest> {
    response.headers().get("docker-content-digest")?.to_str().ok()?.parse().ok()
}

/// Reads a response of at most `max` bytes.
async fn body(mut response: reqwest::Response, max: u64, url: &str) -> Result<Bytes, RegistryError> {
    let mut whole = Vec::new();
    while let Some(piece) = response.chunk().await.map_err(|e| RegistryError::transfer(url.to_owned(), e))? {
        if whole.len() as u64 + piece.len() as u64 > max {
            return Err(RegistryError::TooLarge { url: url.to_owned(), max });
        }
        whole.extend_from_slice(&piece);
    }
    Ok(whole.into())
}

// === impl RegistryError ===

impl RegistryError {
    /// The kind of this error.
    pub(crate) fn kind(&self) -> ErrorKind {
        match self {
            RegistryError::Status { status, .. } => match *status {
                StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => ErrorKind::Unauthorized,
                StatusCode::NOT_FOUND => ErrorKind::NotFound,
                _ => ErrorKind::Unavailable,
            },
            RegistryError::Connect { .. }
            | RegistryError::Stalled { .. }
            | RegistryError::NoProgress { .. }
            | RegistryError::Broken { .. }
            | RegistryError::Short { .. }
            | RegistryError::Realm { .. }
            | RegistryError::PlainRealm { .. }
            | RegistryError::Token { .. } => ErrorKind::Unavailable,
            RegistryError::Digest { .. }
            | RegistryError::DamagedSpool { .. }
            | RegistryError::Length { .. } => ErrorKind::Corrupt,
            RegistryError::TooLarge { .. } => ErrorKind::Rejected,
            RegistryError::Hosts(_)
            | RegistryError::Tls(_)
            | RegistryError::Header { .. }
            | RegistryError::NoHost { .. } => ErrorKind::Io,
            RegistryError::AllHosts { last, .. } => last.kind(),
        }
    }

    /// Whether a retry may succeed soon.
    fn is_temporary(&self) -> bool {
        match self {
            RegistryError::Broken { .. } | RegistryError::Short { .. } => true,
            RegistryError::Status { status, .. } => {
                status.is_server_error()
                    || matches!(*status, StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT)
            }
            _ => false,
        }
    }

    /// The delay that the registry requests.
    fn requested_delay(&self) -> Option<Duration> {
        match self {
            RegistryError::Status { retry_after, .. } => *retry_after,
            _ => None,
        }
    }

    /// The error of a request without a response.
    fn send(url: String, source: reqwest::Error) -> RegistryError {
        // The message has the URL already. After a redirect the error's own URL may contain secrets.
        let source = source.without_url();
        if source.is_connect() {
            RegistryError::Connect { url, source }
        } else {
            RegistryError::transfer(url, source)
        }
    }

    /// The error of an incomplete response.
    fn transfer(url: String, source: reqwest::Error) -> RegistryError {
        let source = source.without_url();
        if source.is_timeout() {
            RegistryError::Stalled { url, source }
        } else {
            RegistryError::Broken { url, source }
        }
    }

    /// The error of a response with an error status, with the registry's own reason.
    async fn status(url: String, response: reqwest::Response) -> RegistryError {
        let is_own = detail::is_of(&response, &url);
        let (status, retry_after) = head(&response);
        let bytes = match is_own {
            true => body(response, 64 << 10, &url).await.unwrap_or_default(),
            false => Bytes::new(),
        };
        RegistryError::Status { url, status, detail: detail::of(&bytes), retry_after }
    }

    /// The error of a response with an error status. The server's text is left out.
    fn refused(url: String, response: &reqwest::Response) -> RegistryError {
        let (status, retry_after) = head(response);
        RegistryError::Status { url, status, detail: String::new(), retry_after }
    }
}

/// The status of a response and the value of Retry-After.
fn head(response: &reqwest::Response) -> (StatusCode, Option<Duration>) {
    (response.status(), retry::requested(response.headers(), jiff::Timestamp::now()))
}

/// Fuzz target: any text as registry settings.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn fuzz_hosts(text: &str) {
    if let Ok(hosts) = hosts::parse(text, Path::new("/c/r.example/hosts.toml"), "r.example") {
        assert!(!hosts.is_empty());
        for host in hosts {
            assert!(host.base.parse::<reqwest::Url>().is_ok_and(|url| url.has_host()), "{}", host.base);
        }
    }
}

/// Fuzz target: any text as an authentication challenge.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn fuzz_challenge(text: &str) {
    let _any = challenge::parse([text]);
}

/// TLS settings of clients in tests that use plain HTTP.
#[cfg(test)]
pub(crate) fn plain_tls() -> rustls::ClientConfig {
    tls::config(&hosts::TlsFiles::default(), false).unwrap()
}

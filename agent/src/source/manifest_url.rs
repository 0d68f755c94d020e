//! Manifests of static pods at a URL (`staticPodURL`): one Pod, or a list of pods. The agent reads the URL at its start
//! and then at an interval. Source: `pkg/kubelet/config/http.go`.

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use coracle_error_chain::chain;
use k8s_openapi::api::core::v1::Pod;
use reqwest::header::{HeaderMap, HeaderName, HeaderValue, LOCATION};
use reqwest::{Client, Response, StatusCode, Url, redirect};
use rustls::{ClientConfig, RootCertStore};
use sha2::{Digest as _, Sha256};
use tokio::sync::watch;
use tokio::time::Instant;

use super::manifest;

/// Maximum bytes of a response. Upstream reads 10 MiB.
const MAX_BYTES: usize = 2 << 20;
/// Timeout of a request with its redirects and its response, as upstream.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum redirects of a request, as in Go.
const MAX_REDIRECTS: usize = 10;

/// The pods of the last usable response. None before the first response.
pub(super) type FetchedPods = Option<Arc<[Pod]>>;

/// A URL with manifests of static pods.
#[derive(Clone)]
pub struct ManifestUrl {
    url: Url,
    /// Headers for the host of the URL only.
    headers: HeaderMap,
    client: Client,
    interval: Duration,
}

/// The reason why a URL cannot be used. No message has the value of a header, which may be a secret.
#[derive(Debug, thiserror::Error)]
pub enum ManifestUrlError {
    /// The text is no URL that the node can read.
    #[error("it is not of the form http://HOST/PATH or https://HOST/PATH, without user and password")]
    Url,
    /// The header at this place of the list is invalid.
    #[error("header {0} is not of the form NAME:VALUE")]
    Header(usize),
    /// TLS cannot be set up.
    #[error("cannot set up TLS")]
    Tls(#[source] rustls::Error),
    /// The HTTP client cannot be made.
    #[error("cannot make an HTTP client")]
    Client(#[source] reqwest::Error),
}

/// The reason why a response cannot be read.
#[derive(Debug, thiserror::Error)]
enum FetchError {
    #[error("the request failed")]
    Request(#[source] reqwest::Error),
    #[error("too many redirects")]
    TooManyRedirects,
    #[error("the redirect goes from https to http")]
    NotSecure,
    #[error("the server answers {0}")]
    Status(StatusCode),
    #[error("the response is larger than {MAX_BYTES} bytes")]
    TooLarge,
}

/// The state of the reads.
struct Reader<'a> {
    from: &'a ManifestUrl,
    node: &'a str,
    /// Hash of the last response. The same response is not decoded again.
    digest: Option<[u8; 32]>,
    /// The error of the last response, if it cannot be used.
    decoded: Result<(), String>,
}

// === impl ManifestUrl ===

impl ManifestUrl {
    /// A URL that is read with these headers (`NAME:VALUE`) at this interval.
    ///
    /// # Errors
    /// The URL or a header is invalid, or the HTTP client cannot be made.
    pub fn new(url: &str, headers: &[String], interval: Duration) -> Result<Self, ManifestUrlError> {
        let url: Url = url.parse().map_err(|_invalid| ManifestUrlError::Url)?;
        let has_user = !url.username().is_empty() || url.password().is_some();
        if !matches!(url.scheme(), "http" | "https") || !url.has_host() || has_user {
            return Err(ManifestUrlError::Url);
        }
        let mut all = HeaderMap::new();
        for (index, text) in headers.iter().enumerate() {
            let (name, value) = header(text).ok_or(ManifestUrlError::Header(index + 1))?;
            all.append(name, value);
        }
        let mut builder = Client::builder()
            .tls_backend_preconfigured(tls().map_err(ManifestUrlError::Tls)?)
            .referer(false)
            .http1_only()
            .redirect(redirect::Policy::none());
        if is_loopback(&url) {
            // As Go, the proxies of the environment do not apply to the machine itself.
            builder = builder.no_proxy();
        }
        let client = builder.build().map_err(ManifestUrlError::Client)?;
        Ok(Self { url, headers: all, client, interval })
    }

    /// The URL without its query, which may have a secret.
    pub(crate) fn shown(&self) -> String {
        self.url[..url::Position::AfterPath].to_owned()
    }

    /// The interval of the reads.
    pub(crate) fn interval(&self) -> Duration {
        self.interval
    }

    /// Reads the URL until there is no receiver. As upstream, a failure keeps the pods of the last response.
    pub(super) async fn follow(self, node: &str, fetched: watch::Sender<FetchedPods>) {
        let mut reader = Reader { from: &self, node, digest: None, decoded: Ok(()) };
        let mut failure: Option<String> = None;
        loop {
            let result = reader.read(&fetched).await;
            // Each cause is logged once.
            if result.as_ref().err() != failure.as_ref() {
                match &result {
                    Ok(()) => tracing::info!(url = self.shown(), "the URL of static pods can be read again"),
                    Err(error) => {
                        tracing::warn!(url = self.shown(), error, "cannot use the URL of static pods")
                    }
                }
            }
            failure = result.err();
            tokio::select! {
                () = tokio::time::sleep(self.interval) => {}
                () = fetched.closed() => return,
            }
        }
    }

    async fn fetch(&self) -> Result<Vec<u8>, FetchError> {
        let mut response = self.get().await?;
        if response.status() != StatusCode::OK {
            return Err(FetchError::Status(response.status()));
        }
        let mut body = Vec::new();
        while let Some(chunk) = response.chunk().await.map_err(failed)? {
            if body.len() + chunk.len() > MAX_BYTES {
                return Err(FetchError::TooLarge);
            }
            body.extend_from_slice(&chunk);
        }
        Ok(body)
    }

    /// Requests the URL. Redirects are followed as upstream, but never from https to http: the manifests may control
    /// the node. The headers may be secrets, so another host does not get them. As in Go, no later target gets them
    /// either.
    async fn get(&self) -> Result<Response, FetchError> {
        let (mut url, mut headers) = (self.url.clone(), self.headers.clone());
        let began = Instant::now();
        for _ in 0..=MAX_REDIRECTS {
            let left = TIMEOUT.saturating_sub(began.elapsed());
            let request = self.client.get(url.clone()).headers(headers.clone()).timeout(left);
            let response = request.send().await.map_err(failed)?;
            let Some(target) = redirect_target(&response) else { return Ok(response) };
            if url.scheme() == "https" && target.scheme() != "https" {
                return Err(FetchError::NotSecure);
            }
            if !is_same_host(&url, &target) {
                headers.clear();
            }
            url = target;
        }
        Err(FetchError::TooManyRedirects)
    }
}

impl fmt::Debug for ManifestUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The query and the headers may have secrets.
        f.debug_struct("ManifestUrl")
            .field("url", &self.shown())
            .field("interval", &self.interval)
            .finish_non_exhaustive()
    }
}

// === impl Reader ===

impl Reader<'_> {
    /// Reads the URL, and sends the pods if the response has changed.
    async fn read(&mut self, fetched: &watch::Sender<FetchedPods>) -> Result<(), String> {
        let bytes = self.from.fetch().await.map_err(|error| chain(&error))?;
        let digest: [u8; 32] = Sha256::digest(&bytes).into();
        if self.digest != Some(digest) {
            self.digest = Some(digest);
            let pods = self.decode(bytes).await;
            self.decoded = pods.map(|pods| drop(fetched.send_replace(Some(pods.into()))));
        }
        self.decoded.clone()
    }

    /// The pods of a response. An empty response has no pods, as upstream.
    async fn decode(&self, bytes: Vec<u8>) -> Result<Vec<Pod>, String> {
        if bytes.is_empty() {
            return Ok(Vec::new());
        }
        let (url, node) = (self.from.url.to_string(), self.node.to_owned());
        let decoded = coracle_threads::spawn_blocking(move || manifest::of_url(&bytes, &url, &node));
        match decoded.await {
            Ok(pods) => pods.map_err(|error| chain(&error)),
            Err(panicked) => Err(panicked.to_string()),
        }
    }
}

/// A header of the form `NAME:VALUE`.
fn header(text: &str) -> Option<(HeaderName, HeaderValue)> {
    let (name, value) = text.split_once(':')?;
    let mut value: HeaderValue = value.trim().parse().ok()?;
    value.set_sensitive(true);
    Some((name.trim().parse().ok()?, value))
}

/// The failure of a request without its URL, which could show the secret of a redirect.
fn failed(error: reqwest::Error) -> FetchError {
    FetchError::Request(error.without_url())
}

/// The target of a redirect. Other responses have none.
fn redirect_target(response: &Response) -> Option<Url> {
    let location = response.headers().get(LOCATION)?;
    let is_redirect = matches!(response.status().as_u16(), 301 | 302 | 303 | 307 | 308);
    response.url().join(location.to_str().ok().filter(|_| is_redirect)?).ok()
}

/// Whether the target has the scheme, host and port of the URL. The same host also counts if the redirect goes from
/// http to https, and both use the default ports.
fn is_same_host(url: &Url, target: &Url) -> bool {
    let is_upgrade = (url.scheme(), target.scheme()) == ("http", "https")
        && url.host_str() == target.host_str()
        && url.port().is_none()
        && target.port().is_none();
    is_upgrade || url.origin() == target.origin()
}

fn is_loopback(url: &Url) -> bool {
    let host = url.host_str().unwrap_or_default().trim_matches(['[', ']']);
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// TLS with the authorities of the machine.
fn tls() -> Result<ClientConfig, rustls::Error> {
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
    Ok(builder.with_root_certificates(roots).with_no_client_auth())
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    /// Time after which a test fails.
    const DEADLINE: Duration = Duration::from_secs(60);

    /// A server with one response, and the heads of the requests. `/moved` redirects to `/pods`, and `/away` to the URL
    /// in `away`.
    #[derive(Clone, Default)]
    struct Server {
        response: Arc<Mutex<String>>,
        heads: Arc<Mutex<Vec<String>>>,
        away: Arc<Mutex<String>>,
    }

    impl Server {
        async fn start(&self) -> u16 {
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            let port = listener.local_addr().unwrap().port();
            let server = self.clone();
            tokio::spawn(async move {
                while let Ok((mut stream, _)) = listener.accept().await {
                    let mut head = [0; 2048];
                    let read = stream.read(&mut head).await.unwrap();
                    let head = String::from_utf8_lossy(&head[..read]).into_owned();
                    let mut response = server.response.lock().unwrap().clone();
                    let moved = |to: &str| {
                        format!(
                            "HTTP/1.1 302 Found\r\nLocation: {to}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
                        )
                    };
                    if head.starts_with("GET /moved ") {
                        response = moved("/pods");
                    } else {
                        if head.starts_with("GET /away ") {
                            response = moved(&server.away.lock().unwrap());
                        }
                        server.heads.lock().unwrap().push(head);
                    }
                    // The client may close the connection before it has read a response that is too large.
                    let _closed = stream.write_all(response.as_bytes()).await;
                }
            });
            port
        }

        fn answer(&self, status: &str, body: &str) {
            let length = body.len();
            let head =
                format!("HTTP/1.1 {status}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}");
            *self.response.lock().unwrap() = head;
        }

        /// Waits until the client has handled the response. The first of three further requests may still get the
        /// former response. The third request begins after the client has handled the response to the second request.
        async fn until_read(&self) {
            let requests = || self.heads.lock().unwrap().len();
            let wanted = requests() + 3;
            let is_read = async || requests() >= wanted;
            coracle_testing::eventually_async("three more requests", 60, is_read).await;
        }
    }

    fn pod(name: &str) -> String {
        let spec = "{\"containers\": [{\"name\": \"c\", \"image\": \"i\"}]}";
        format!(
            "{{\"apiVersion\": \"v1\", \"kind\": \"Pod\", \"metadata\": {{\"name\": \"{name}\"}}, \"spec\": {spec}}}"
        )
    }

    fn names(pods: &FetchedPods) -> Option<Vec<String>> {
        pods.as_ref().map(|pods| pods.iter().map(|pod| pod.metadata.name.clone().unwrap()).collect())
    }

    async fn until(fetched: &mut watch::Receiver<FetchedPods>, expected: &[&str]) {
        let is_expected = |pods: &FetchedPods| names(pods).is_some_and(|names| names == expected);
        tokio::time::timeout(DEADLINE, fetched.wait_for(is_expected)).await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn pods_follow_the_response_and_stay_after_a_failure() {
        let server = Server::default();
        server.answer("200 OK", &pod("a"));
        let url = format!("http://127.0.0.1:{}/moved", server.start().await);
        let headers = ["X-Token: secret".to_owned()];
        let url = ManifestUrl::new(&url, &headers, Duration::from_millis(1)).unwrap();
        assert!(!format!("{url:?}").contains("secret"));
        let (sender, mut fetched) = watch::channel(None);
        let following = tokio::spawn(async move { url.follow("n1", sender).await });
        until(&mut fetched, &["a-n1"]).await;
        let head = server.heads.lock().unwrap()[0].to_ascii_lowercase();
        assert!(head.starts_with("get /pods ") && head.contains("x-token: secret"), "{head}");
        let (uid, large) =
            (fetched.borrow().as_ref().unwrap()[0].metadata.uid.clone(), " ".repeat(MAX_BYTES + 1));
        assert!(super::super::is_static(&uid.unwrap()));
        for (status, body) in [("500 Oops", ""), ("200 OK", large.as_str()), ("200 OK", "kind: [")] {
            server.answer(status, body);
            server.until_read().await;
            assert_eq!(names(&fetched.borrow()).unwrap(), ["a-n1"], "{status}");
        }
        let item = "{\"metadata\": {\"name\": \"c\"}, \"spec\": {\"containers\": [{\"name\": \"c\", \"image\": \"i\"}]}}";
        let list =
            format!("{{\"apiVersion\": \"v1\", \"kind\": \"PodList\", \"items\": [{}, {item}]}}", pod("b"));
        server.answer("200 OK", &list);
        until(&mut fetched, &["b-n1", "c-n1"]).await;
        server.answer("200 OK", "");
        until(&mut fetched, &[]).await;
        drop(fetched);
        tokio::time::timeout(DEADLINE, following).await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn headers_are_not_sent_to_redirect_targets_at_other_hosts() {
        let (own, other) = (Server::default(), Server::default());
        let [own_port, other_port] = [own.start().await, other.start().await];
        own.answer("200 OK", "own");
        *own.away.lock().unwrap() = format!("http://127.0.0.1:{other_port}/away");
        // The redirect back to the first host gets no headers either.
        *other.away.lock().unwrap() = format!("http://127.0.0.1:{own_port}/pods");
        let headers = ["X-Token: one", "X-Token: two", "Authorization: Bearer three"].map(str::to_owned);
        let url = format!("http://127.0.0.1:{own_port}/away");
        let url = ManifestUrl::new(&url, &headers, Duration::from_secs(1)).unwrap();
        assert_eq!(url.fetch().await.unwrap(), b"own");
        let own = own.heads.lock().unwrap().iter().map(|head| head.to_ascii_lowercase()).collect::<Vec<_>>();
        let secrets = ["x-token: one", "x-token: two", "authorization: bearer three"];
        assert_eq!(own.len(), 2);
        assert!(secrets.iter().all(|secret| own[0].contains(secret)), "{own:?}");
        for head in [&own[1], &other.heads.lock().unwrap()[0].to_ascii_lowercase()] {
            assert!(!head.contains("x-token") && !head.contains("authorization"), "{head}");
        }
    }

    #[tokio::test]
    async fn the_number_of_redirects_is_limited() {
        let server = Server::default();
        let url = format!("http://127.0.0.1:{}/away", server.start().await);
        *server.away.lock().unwrap() = url.clone();
        let url = ManifestUrl::new(&url, &[], Duration::from_secs(1)).unwrap();
        assert!(matches!(url.fetch().await, Err(FetchError::TooManyRedirects)));
        assert_eq!(server.heads.lock().unwrap().len(), 1 + MAX_REDIRECTS);
    }

    #[test]
    fn a_host_with_tls_gets_the_headers_of_the_host_without() {
        let is = |one: &str, other: &str| is_same_host(&one.parse().unwrap(), &other.parse().unwrap());
        assert!(
            is("http://a.example/x", "http://a.example/y") && is("http://a.example/", "https://a.example/")
        );
        for (one, other) in [
            ("https://a.example/", "http://a.example/"),
            ("http://a.example/", "http://b.a.example/"),
            ("http://a.example/", "http://a.example:8080/"),
            ("http://a.example:8080/", "https://a.example/"),
            ("http://a.example:8080/", "https://a.example:8080/"),
        ] {
            assert!(!is(one, other), "{one} {other}");
        }
    }

    #[test]
    fn invalid_urls_and_headers_are_refused_without_their_secrets() {
        let error = |url: &str, headers: &[&str]| {
            let headers: Vec<String> = headers.iter().map(|text| (*text).to_owned()).collect();
            ManifestUrl::new(url, &headers, TIMEOUT).unwrap_err().to_string()
        };
        for url in ["", "/manifests", "file:///manifests", "https://user:secret@host/"] {
            let error = error(url, &[]);
            assert!(
                error.contains("not of the form http://HOST/PATH") && !error.contains("secret"),
                "{error}"
            );
        }
        let error = error("http://host/", &["a: b", "secret"]);
        assert_eq!(error, "header 2 is not of the form NAME:VALUE");
        let url = ManifestUrl::new("https://host/pods?token=secret", &[], TIMEOUT).unwrap();
        assert_eq!(url.shown(), "https://host/pods");
        assert!(!format!("{url:?}").contains("secret"));
    }

    #[test]
    fn only_the_machine_itself_has_no_proxy() {
        let is = |url: &str| is_loopback(&url.parse().unwrap());
        assert!(is("http://127.0.0.1:80/") && is("http://[::1]/") && is("https://localhost/"));
        assert!(!is("http://192.0.2.1/") && !is("http://host/"));
    }
}

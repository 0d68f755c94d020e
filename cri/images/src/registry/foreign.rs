//! The `urls` of a descriptor: other sources of layers that registries are not permitted to distribute.
//!
//! The author of the manifest selects these hosts, not an administrator. So they are tried last, if no host
//! of the registry has the content. They get no credentials, headers or certificates, and no reply to a
//! challenge (CVE-2020-15157). Their error texts are not passed on, because they may come from a service that
//! only this machine can reach.

use reqwest::header::RANGE;
use reqwest::{Client, Response, Url};

use super::endpoint::{AGENT, CONNECT_TIMEOUT};
use super::hosts::{TlsFiles, is_loopback};
use super::{RegistryError, Timeouts, detail, tls};

/// Maximum number of URLs of one blob that are tried.
const URLS_MAX: usize = 8;

/// The usable URLs of a descriptor.
pub(super) fn usable_urls(urls: &[String]) -> Vec<Url> {
    urls.iter().filter_map(|url| usable_url(url)).take(URLS_MAX).collect()
}

fn usable_url(url: &str) -> Option<Url> {
    let mut url: Url = url.parse().ok()?;
    if !matches!(url.scheme(), "http" | "https") {
        return None;
    }
    // User and password would be sent as credentials.
    url.set_username("").ok()?;
    url.set_password(None).ok()?;
    Some(url)
}

/// Requests the content of a URL, starting at byte `from`.
pub(super) async fn request(url: &Url, from: u64, timeouts: Timeouts) -> Result<Response, RegistryError> {
    // A redirect may lead from HTTP to HTTPS.
    let tls = tls::config(&TlsFiles::default(), true).map_err(RegistryError::Tls)?;
    let mut builder = Client::builder()
        .tls_backend_preconfigured(tls)
        .user_agent(AGENT)
        .referer(false)
        .http1_only()
        .connect_timeout(CONNECT_TIMEOUT)
        .read_timeout(timeouts.stall);
    if url.host_str().is_some_and(is_loopback) {
        builder = builder.no_proxy();
    }
    let failed = |error| RegistryError::send(detail::without_secrets(url.as_str()), error);
    let mut request = builder.build().map_err(failed)?.get(url.clone());
    if from > 0 {
        request = request.header(RANGE, format!("bytes={from}-"));
    }
    let response = request.send().await.map_err(failed)?;
    if response.status().is_success() {
        return Ok(response);
    }
    Err(RegistryError::refused(detail::without_secrets(url.as_str()), &response))
}

#[cfg(test)]
mod tests {
    use super::{URLS_MAX, usable_urls};

    #[test]
    fn urls_are_limited_to_http_without_credentials_and_in_number() {
        for (url, expected) in [
            ("https://e.example/a?b=c", Some("https://e.example/a?b=c")),
            ("http://user:password@e.example/a", Some("http://e.example/a")),
            ("ftp://e.example/a", None),
            ("file:///etc/passwd", None),
            ("e.example/a", None),
            ("/a", None),
            ("", None),
        ] {
            let found = usable_urls(&[url.to_owned()]);
            assert_eq!(found.first().map(|url| url.as_str()), expected, "{url}");
        }
        assert_eq!(usable_urls(&vec!["https://e.example/a".to_owned(); 100]).len(), URLS_MAX);
    }
}

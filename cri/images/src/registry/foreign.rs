//! What a manifest says can be had elsewhere: the `urls` of a descriptor, for layers that registries may not give away.
//!
//! Whoever wrote the manifest chose these hosts, and nobody configured them. So they are asked last, when no host of the
//! registry has the content; they get no credentials, headers or certificates, and no answer to a demand for any
//! (CVE-2020-15157). What they say instead of the content is not passed on: it may come from where only this machine can
//! ask.

use reqwest::header::RANGE;
use reqwest::{Client, Response, Url};

use super::endpoint::{AGENT, CONNECT_TIMEOUT};
use super::hosts::{TlsFiles, is_loopback};
use super::{Patience, RegistryError, detail, tls};

/// Most places of one blob that are asked.
const URLS_MAX: usize = 8;

/// Those of a descriptor's places that can be asked.
pub(super) fn places(urls: &[String]) -> Vec<Url> {
    urls.iter().filter_map(|url| place(url)).take(URLS_MAX).collect()
}

fn place(url: &str) -> Option<Url> {
    let mut url: Url = url.parse().ok()?;
    if !matches!(url.scheme(), "http" | "https") {
        return None;
    }
    // A name and a password would be sent as such.
    url.set_username("").ok()?;
    url.set_password(None).ok()?;
    Some(url)
}

/// Asks for what is at a place, without so many bytes at its beginning.
pub(super) async fn ask(url: &Url, from: u64, patience: Patience) -> Result<Response, RegistryError> {
    // It may lead from the one scheme to the other.
    let tls = tls::config(&TlsFiles::default(), true).map_err(RegistryError::Tls)?;
    let mut builder = Client::builder()
        .tls_backend_preconfigured(tls)
        .user_agent(AGENT)
        .referer(false)
        .http1_only()
        .connect_timeout(CONNECT_TIMEOUT)
        .read_timeout(patience.stall);
    if url.host_str().is_some_and(is_loopback) {
        builder = builder.no_proxy();
    }
    let failed = |error| RegistryError::send(detail::shown(url.as_str()), error);
    let mut request = builder.build().map_err(failed)?.get(url.clone());
    if from > 0 {
        request = request.header(RANGE, format!("bytes={from}-"));
    }
    let response = request.send().await.map_err(failed)?;
    if response.status().is_success() {
        return Ok(response);
    }
    Err(RegistryError::refused(detail::shown(url.as_str()), &response))
}

#[cfg(test)]
mod tests {
    use super::{URLS_MAX, places};

    #[test]
    fn places_are_of_the_web_without_anybodys_password_and_not_too_many() {
        for (url, expected) in [
            ("https://e.example/a?b=c", Some("https://e.example/a?b=c")),
            ("http://user:password@e.example/a", Some("http://e.example/a")),
            ("ftp://e.example/a", None),
            ("file:///etc/passwd", None),
            ("e.example/a", None),
            ("/a", None),
            ("", None),
        ] {
            let found = places(&[url.to_owned()]);
            assert_eq!(found.first().map(|url| url.as_str()), expected, "{url}");
        }
        assert_eq!(places(&vec!["https://e.example/a".to_owned(); 100]).len(), URLS_MAX);
    }
}

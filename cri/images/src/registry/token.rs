//! Fetches tokens from a registry's token service, by password or refresh token.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use reqwest::header::{AUTHORIZATION, HeaderMap};
use serde::Deserialize;

use super::RegistryError;
use super::body;
use super::detail;
use super::hosts::is_loopback;
use crate::image::Auth;
use crate::manifest::or_default;

/// The OAuth2 client id.
const CLIENT: &str = "coracle";

#[derive(Deserialize)]
struct Answer {
    #[serde(default, deserialize_with = "or_default")]
    token: String,
    #[serde(default, deserialize_with = "or_default")]
    access_token: String,
}

/// Parameters of a token request.
pub(super) struct Grant<'a> {
    pub(super) realm: &'a str,
    pub(super) service: &'a str,
    pub(super) scope: &'a str,
    /// Whether the registry is reached by TLS.
    pub(super) secure: bool,
}

/// The `Authorization` value for a user name and a password.
pub(super) fn basic(username: &str, password: &str) -> String {
    format!("Basic {}", STANDARD.encode(format!("{username}:{password}")))
}

/// Fetches a token. Without `auth` the token is anonymous. `headers` are those of `hosts.toml` for the service.
pub(super) async fn fetch(
    client: &reqwest::Client,
    mut headers: HeaderMap,
    grant: &Grant<'_>,
    auth: Option<&Auth>,
) -> Result<String, RegistryError> {
    let mut url: reqwest::Url = grant
        .realm
        .parse()
        .map_err(|_bad| RegistryError::Realm { realm: detail::without_secrets(grant.realm) })?;
    // CVE-2019-10214: the registry must not redirect credentials to a service without TLS.
    let is_private = url.scheme() == "https" || url.host_str().is_some_and(is_loopback);
    if auth.is_some() && grant.secure && !is_private {
        return Err(RegistryError::PlainRealm { realm: detail::without_secrets(grant.realm) });
    }
    let request = if let Some(Auth::IdentityToken(refresh)) = auth {
        let form = form(&[
            ("grant_type", "refresh_token"),
            ("service", grant.service),
            ("scope", grant.scope),
            ("client_id", CLIENT),
            ("refresh_token", refresh),
        ]);
        client
            .post(url)
            .headers(headers)
            .header("content-type", "application/x-www-form-urlencoded")
            .body(form)
    } else {
        {
            let mut query = url.query_pairs_mut();
            for (name, value) in [("service", grant.service), ("scope", grant.scope)] {
                if !value.is_empty() {
                    query.append_pair(name, value);
                }
            }
        }
        match auth {
            Some(Auth::Basic { username, password }) => {
                headers.remove(AUTHORIZATION);
                client.get(url).headers(headers).header(AUTHORIZATION, basic(username, password))
            }
            _ => client.get(url).headers(headers),
        }
    };
    let realm = || detail::without_secrets(grant.realm);
    let what = || format!("a token from {}", realm());
    let response = request.send().await.map_err(|e| RegistryError::send(what(), e))?;
    // The registry chose this service, so its error text is not passed on.
    if !response.status().is_success() {
        return Err(RegistryError::refused(what(), &response));
    }
    let bytes = body(response, 1 << 20, &what()).await?;
    let answer: Answer = serde_json::from_slice(&bytes)
        .map_err(|_contains_the_response| RegistryError::Token { realm: realm() })?;
    let token = if answer.token.is_empty() { answer.access_token } else { answer.token };
    if token.is_empty() {
        return Err(RegistryError::Realm { realm: realm() });
    }
    Ok(format!("Bearer {token}"))
}

fn form(pairs: &[(&str, &str)]) -> String {
    // Forms and URL queries have the same encoding.
    let mut url = reqwest::Url::parse("http://form").ok();
    if let Some(url) = &mut url {
        url.query_pairs_mut().extend_pairs(pairs);
    }
    url.and_then(|url| url.query().map(str::to_owned)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::hosts::TlsFiles;

    #[tokio::test]
    async fn cve_2019_10214_credentials_are_not_sent_to_a_token_service_without_tls() {
        let tls = super::super::tls::config(&TlsFiles::default(), false).expect("tls");
        let client = reqwest::Client::builder().tls_backend_preconfigured(tls).no_proxy().build();
        let client = client.expect("client");
        let basic = Auth::Basic { username: "u".into(), password: "p".into() };
        let refresh = Auth::IdentityToken("r".into());
        let fetch = async |realm: &str, secure: bool, auth: Option<&Auth>| {
            let grant = Grant { realm, service: "s", scope: "x", secure };
            fetch(&client, HeaderMap::new(), &grant, auth).await.expect_err("no server listens")
        };
        let is_refused = |error: RegistryError| matches!(error, RegistryError::PlainRealm { .. });
        for auth in [&basic, &refresh] {
            assert!(is_refused(fetch("http://192.0.2.1:1/token", true, Some(auth)).await));
        }
        for (realm, secure, auth) in [
            ("http://127.0.0.1:1/token", true, Some(&basic)),
            ("http://127.0.0.1:1/token", true, None),
            ("https://127.0.0.1:1/token", true, Some(&basic)),
            ("http://127.0.0.1:1/token", false, Some(&basic)),
        ] {
            assert!(!is_refused(fetch(realm, secure, auth).await), "{realm}");
        }
    }
}

//! The public keys of an issuer. The keys are fetched when a token needs them. They are kept for an hour, or until a
//! token names an unknown key.

use std::{sync::Arc, time::Duration};

use arc_swap::ArcSwap;
use jsonwebtoken::{
    Algorithm,
    jwk::{AlgorithmParameters, EllipticCurve, Jwk},
};
use reqwest::{Client, redirect};
use rustls_pki_types::{CertificateDer, pem::PemObject as _};
use serde_json::Value;
use tokio::{
    sync::{Mutex, OwnedMutexGuard},
    time::Instant,
};

use super::config::IssuerConfig;
use crate::{request_owner, resolver::HttpLookups};

/// Maximum bytes of a document of the issuer.
const MAX_DOCUMENT: usize = 1 << 20;
/// Timeout of one request.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Minimum time between two fetches, because any client can send tokens with unknown keys.
const MIN_FETCH_INTERVAL: Duration = Duration::from_secs(10);
/// Maximum age of keys. Afterwards the next token causes a fetch, so that keys that the issuer removed are rejected. If
/// the issuer does not respond, the old keys are kept.
const MAX_AGE: Duration = Duration::from_secs(3600);
/// Maximum number of keys.
const MAX_KEYS: usize = 100;
/// Maximum number of keys that are tried for a token. A token without a key id can be signed with any key of its
/// algorithm.
const MAX_TRIED: usize = 8;

pub(super) struct Keys {
    http: Client,
    issuer: String,
    discovery: String,
    current: ArcSwap<Vec<Jwk>>,
    /// Time at which the current keys were fetched.
    renewed: ArcSwap<Option<Instant>>,
    /// Time of the last fetch: its start while the fetch runs, and afterwards its end. Locked during a fetch, so that
    /// only one fetch runs at a time.
    fetched: Arc<Mutex<Option<Instant>>>,
}

/// Describes the keys that may have signed a token.
#[derive(Clone, Copy)]
pub(super) struct KeyQuery<'a> {
    /// The key id of the token. `None` if the token has no key id, or an empty key id.
    id: Option<&'a str>,
    family: Family,
}

/// Keys of the same type.
#[derive(Clone, Copy)]
enum Family {
    Rsa,
    P256,
    P384,
    P521,
}

// === impl KeyQuery ===

impl<'a> KeyQuery<'a> {
    /// The keys for an algorithm; `None` is ES512.
    pub(super) fn new(id: Option<&'a str>, algorithm: Option<Algorithm>) -> Self {
        let family = match algorithm {
            None => Family::P521,
            Some(Algorithm::ES256) => Family::P256,
            Some(Algorithm::ES384) => Family::P384,
            // All other algorithms that issuers may use have RSA keys.
            Some(_) => Family::Rsa,
        };
        Self { id: id.filter(|id| !id.is_empty()), family }
    }

    /// Whether the token names one key.
    pub(super) fn has_id(&self) -> bool {
        self.id.is_some()
    }

    fn fits(&self, key: &Jwk) -> bool {
        let is_of_family = match (&key.algorithm, self.family) {
            (AlgorithmParameters::RSA(_), Family::Rsa) => true,
            (AlgorithmParameters::EllipticCurve(point), Family::P256) => point.curve == EllipticCurve::P256,
            (AlgorithmParameters::EllipticCurve(point), Family::P384) => point.curve == EllipticCurve::P384,
            (AlgorithmParameters::EllipticCurve(point), Family::P521) => point.curve == EllipticCurve::P521,
            _ => false,
        };
        is_of_family && self.id.is_none_or(|id| key.common.key_id.as_deref() == Some(id))
    }
}

// === impl Keys ===

impl Keys {
    pub(super) fn new(config: &IssuerConfig) -> Result<Self, String> {
        let base = config.discovery_url.clone().unwrap_or_else(|| {
            format!("{}/.well-known/openid-configuration", config.url.trim_end_matches('/'))
        });
        Ok(Self {
            http: client(config, redirect::Policy::limited(3))?,
            issuer: config.url.clone(),
            discovery: base,
            current: ArcSwap::default(),
            renewed: ArcSwap::default(),
            fetched: Arc::default(),
        })
    }

    /// The keys that may have signed a token.
    pub(super) async fn find(self: &Arc<Self>, wanted: KeyQuery<'_>) -> Result<Vec<Jwk>, String> {
        let keys = self.known(wanted);
        if !keys.is_empty() && !self.is_old() {
            return Ok(keys);
        }
        let fetched = match self.fetched.clone().try_lock_owned() {
            Ok(fetched) => fetched,
            // Another request is fetching the keys. Use the old keys until it has finished.
            Err(_) if !keys.is_empty() => return Ok(keys),
            Err(_) => self.fetched.clone().lock_owned().await,
        };
        // Another request may have fetched the keys meanwhile.
        let keys = self.known(wanted);
        if (!keys.is_empty() && !self.is_old()) || is_recent(*fetched) {
            return Ok(keys);
        }
        match self.renew(fetched).await {
            Ok(()) => Ok(self.known(wanted)),
            Err(_) if !keys.is_empty() => Ok(keys),
            Err(reason) => Err(reason),
        }
    }

    /// Returns the keys of the issuer that were not tried yet. This is for a token without a key id, because only its
    /// signature shows that the issuer has replaced the key.
    pub(super) async fn newer(self: &Arc<Self>, wanted: KeyQuery<'_>, tried: &[Jwk]) -> Vec<Jwk> {
        let fetched = self.fetched.clone().lock_owned().await;
        if self.known(wanted) == tried && !is_recent(*fetched) {
            // The reason of a failure is logged.
            let _ = self.renew(fetched).await;
        }
        self.known(wanted).into_iter().filter(|key| !tried.contains(key)).collect()
    }

    /// Fetches the keys. `fetched` is the locked time of the last fetch.
    ///
    /// The fetch continues even if the request that has caused it ends. Otherwise a client without credentials could
    /// start each fetch and cancel it, so that no token of a new key is accepted.
    async fn renew(self: &Arc<Self>, mut fetched: OwnedMutexGuard<Option<Instant>>) -> Result<(), String> {
        *fetched = Some(Instant::now());
        let keys = self.clone();
        let fetch = async move {
            let renewed = keys.fetch().await.inspect_err(|reason| {
                tracing::warn!(issuer = keys.issuer, reason, "cannot fetch the keys of the token issuer");
            });
            // The fetch may have taken longer than the interval. Requests that waited for this fetch do not fetch
            // again.
            *fetched = Some(Instant::now());
            keys.current.store(Arc::new(renewed?));
            keys.renewed.store(Arc::new(Some(Instant::now())));
            Ok::<(), String>(())
        };
        let fetch = tokio::spawn(request_owner::scope(request_owner::current(), fetch));
        fetch.await.unwrap_or_else(|failed| Err(failed.to_string()))
    }

    fn is_old(&self) -> bool {
        self.renewed.load().is_none_or(|renewed| renewed.elapsed() > MAX_AGE)
    }

    fn known(&self, wanted: KeyQuery<'_>) -> Vec<Jwk> {
        let keys = self.current.load();
        keys.iter().filter(|key| wanted.fits(key)).take(MAX_TRIED).cloned().collect()
    }

    async fn fetch(&self) -> Result<Vec<Jwk>, String> {
        let document = self.get(&self.discovery).await?;
        if document["issuer"] != self.issuer.as_str() {
            return Err(format!(
                "{} is the discovery document of the issuer {}",
                self.discovery, document["issuer"]
            ));
        }
        parse(&self.get(key_set_url(&document)?).await?)
    }

    async fn get(&self, url: &str) -> Result<Value, String> {
        let body =
            get(self.http.get(url), MAX_DOCUMENT).await.map_err(|reason| format!("GET {url}: {reason}"))?;
        serde_json::from_slice(&body).map_err(|error| format!("GET {url}: {error}"))
    }
}

/// Whether the last fetch was less than [`MIN_FETCH_INTERVAL`] ago.
fn is_recent(fetched: Option<Instant>) -> bool {
    fetched.is_some_and(|last| last.elapsed() < MIN_FETCH_INTERVAL)
}

/// A client for the servers of an issuer.
///
/// # Errors
/// The issuer's authority is invalid.
pub(super) fn client(config: &IssuerConfig, redirects: redirect::Policy) -> Result<Client, String> {
    let client = Client::builder()
        .tls_backend_preconfigured(tls(config.authority.as_deref())?)
        .https_only(true)
        .redirect(redirects)
        .dns_resolver(HttpLookups)
        .timeout(TIMEOUT);
    client.build().map_err(|error| error.to_string())
}

/// Sends a request, and returns the body of its response.
///
/// # Errors
/// The response is not a success, or has more than `limit` bytes.
pub(super) async fn get(request: reqwest::RequestBuilder, limit: usize) -> Result<Vec<u8>, String> {
    let failed = |error: reqwest::Error| error.to_string();
    let mut response = request.send().await.and_then(reqwest::Response::error_for_status).map_err(failed)?;
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await.map_err(failed)? {
        if body.len() + chunk.len() > limit {
            return Err(format!("the response is larger than {limit} bytes"));
        }
        body.extend_from_slice(&chunk);
    }
    Ok(body)
}

/// The URL of the key set in a discovery document.
pub(super) fn key_set_url(document: &Value) -> Result<&str, String> {
    document["jwks_uri"].as_str().ok_or_else(|| "the discovery document has no jwks_uri".to_owned())
}

/// The keys in a key set.
pub(super) fn parse(set: &Value) -> Result<Vec<Jwk>, String> {
    let keys = set["keys"].as_array().ok_or("the key set has no keys")?;
    // Skip keys of unknown types: the set may contain keys for other clients.
    Ok(keys.iter().take(MAX_KEYS).filter_map(|key| serde_json::from_value(key.clone()).ok()).collect())
}

/// TLS with the authorities of the configuration, or of the system.
fn tls(authority: Option<&str>) -> Result<rustls::ClientConfig, String> {
    let mut roots = rustls::RootCertStore::empty();
    match authority {
        Some(pem) => {
            for certificate in CertificateDer::pem_slice_iter(pem.as_bytes()) {
                let added = certificate
                    .map_err(|error| error.to_string())
                    .and_then(|certificate| roots.add(certificate).map_err(|error| error.to_string()));
                added.map_err(|reason| format!("issuer.certificateAuthority: {reason}"))?;
            }
            if roots.is_empty() {
                return Err("issuer.certificateAuthority: has no certificate".to_owned());
            }
        }
        None => {
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        }
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?;
    Ok(builder.with_root_certificates(roots).with_no_client_auth())
}

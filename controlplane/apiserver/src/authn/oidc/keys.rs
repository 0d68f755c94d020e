//! The public keys of an issuer. They are fetched when a token needs them, and kept for an hour or until a token names
//! an unknown key.

use std::{sync::Arc, time::Duration};

use arc_swap::ArcSwap;
use jsonwebtoken::jwk::Jwk;
use reqwest::{Client, redirect};
use rustls_pki_types::{CertificateDer, pem::PemObject as _};
use serde_json::Value;
use tokio::{sync::Mutex, time::Instant};

use super::config::IssuerConfig;
use crate::resolver::HttpLookups;

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

pub(super) struct Keys {
    http: Client,
    issuer: String,
    discovery: String,
    current: ArcSwap<Vec<Jwk>>,
    /// Time at which the current keys were fetched.
    renewed: ArcSwap<Option<Instant>>,
    /// Time of the last fetch: its start while it runs, then its end. Locked during a fetch, so that only one runs.
    fetched: Mutex<Option<Instant>>,
}

impl Keys {
    pub(super) fn new(config: &IssuerConfig) -> Result<Self, String> {
        let base = config.discovery_url.clone().unwrap_or_else(|| {
            format!("{}/.well-known/openid-configuration", config.url.trim_end_matches('/'))
        });
        let http = Client::builder()
            .tls_backend_preconfigured(tls(config.authority.as_deref())?)
            .https_only(true)
            .redirect(redirect::Policy::limited(3))
            .dns_resolver(HttpLookups)
            .timeout(TIMEOUT)
            .build()
            .map_err(|error| error.to_string())?;
        Ok(Self {
            http,
            issuer: config.url.clone(),
            discovery: base,
            current: ArcSwap::default(),
            renewed: ArcSwap::default(),
            fetched: Mutex::default(),
        })
    }

    /// The key with this id. Without an id, the only key of the issuer.
    pub(super) async fn find(&self, id: Option<&str>) -> Result<Option<Jwk>, String> {
        let key = self.known(id);
        if key.is_some() && !self.is_old() {
            return Ok(key);
        }
        let mut fetched = match self.fetched.try_lock() {
            Ok(fetched) => fetched,
            // Another request is fetching the keys. Use the old key until it has finished.
            Err(_) if key.is_some() => return Ok(key),
            Err(_) => self.fetched.lock().await,
        };
        // Another request may have fetched the key meanwhile.
        let key = self.known(id);
        if (key.is_some() && !self.is_old())
            || fetched.is_some_and(|last| last.elapsed() < MIN_FETCH_INTERVAL)
        {
            return Ok(key);
        }
        *fetched = Some(Instant::now());
        let renewed = self.fetch().await.inspect_err(|reason| {
            tracing::warn!(issuer = self.issuer, reason, "cannot fetch the keys of the token issuer");
        });
        // The fetch may have taken longer than the interval. Requests that waited for it do not fetch again.
        *fetched = Some(Instant::now());
        match (renewed, key) {
            (Ok(keys), _) => {
                self.current.store(Arc::new(keys));
                self.renewed.store(Arc::new(Some(Instant::now())));
                Ok(self.known(id))
            }
            (Err(_), Some(key)) => Ok(Some(key)),
            (Err(reason), None) => Err(reason),
        }
    }

    fn is_old(&self) -> bool {
        self.renewed.load().is_none_or(|renewed| renewed.elapsed() > MAX_AGE)
    }

    fn known(&self, id: Option<&str>) -> Option<Jwk> {
        let keys = self.current.load();
        match id {
            Some(id) => keys.iter().find(|key| key.common.key_id.as_deref() == Some(id)).cloned(),
            None => (keys.len() == 1).then(|| keys.first().cloned()).flatten(),
        }
    }

    async fn fetch(&self) -> Result<Vec<Jwk>, String> {
        let document = self.get(&self.discovery).await?;
        if document["issuer"] != self.issuer.as_str() {
            return Err(format!("{} is the document of the issuer {}", self.discovery, document["issuer"]));
        }
        parse(&self.get(key_set_url(&document)?).await?)
    }

    async fn get(&self, url: &str) -> Result<Value, String> {
        let failed = |error: reqwest::Error| format!("GET {url}: {error}");
        let mut response =
            self.http.get(url).send().await.and_then(reqwest::Response::error_for_status).map_err(failed)?;
        let mut body = Vec::new();
        while let Some(chunk) = response.chunk().await.map_err(failed)? {
            if body.len() + chunk.len() > MAX_DOCUMENT {
                return Err(format!("GET {url}: the response is larger than {MAX_DOCUMENT} bytes"));
            }
            body.extend_from_slice(&chunk);
        }
        serde_json::from_slice(&body).map_err(|error| format!("GET {url}: {error}"))
    }
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

//! Requests to an extender.

use http_body_util::{BodyExt as _, Limited};
use hyper_util::client::legacy::Client as HttpClient;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use kube::client::{Body, ConfigExt as _};
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject as _;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tower::{BoxError, ServiceBuilder};

use super::Extender;

/// Maximum size of a response in bytes. A list of 1,000 nodes has about 5 MB.
const RESPONSE_MAX: usize = 16 << 20;

/// An extender with its connections.
#[derive(Clone)]
pub(crate) struct Remote {
    pub(crate) extender: Extender,
    http: kube::Client,
}

/// A request to an extender failed.
#[derive(Debug, thiserror::Error)]
#[error("extender {url}: {verb}: {reason}")]
pub(crate) struct RequestError {
    url: String,
    verb: String,
    pub(crate) reason: String,
}

impl Remote {
    /// An extender with new connections. Must be called within a tokio runtime. The error is a text about URL or TLS
    /// settings.
    pub(crate) fn new(extender: Extender) -> Result<Self, String> {
        let config = config(&extender)?;
        let mut tcp = HttpConnector::new();
        tcp.enforce_http(false);
        tcp.set_nodelay(true);
        let https = config.rustls_https_connector_with_connector(tcp).map_err(|error| error.to_string())?;
        let service = ServiceBuilder::new()
            .layer(config.base_uri_layer())
            .map_err(BoxError::from)
            .service(HttpClient::builder(TokioExecutor::new()).build(https));
        Ok(Self { http: kube::Client::new(service, ""), extender })
    }

    /// Sends a request. The response must be complete within the extender's timeout.
    pub(crate) async fn call<T: DeserializeOwned>(
        &self,
        verb: &str,
        args: &impl Serialize,
    ) -> Result<T, RequestError> {
        let failed = |reason: String| self.error(verb, reason);
        let body = serde_json::to_vec(args).map_err(|error| failed(error.to_string()))?;
        let path = format!("/{}", verb.trim_start_matches('/'));
        let request = http::Request::post(path).header("content-type", "application/json");
        let request = request.body(Body::from(body)).map_err(|error| failed(error.to_string()))?;
        let exchange = async {
            let response = self.http.send(request).await.map_err(|error| failed(error.to_string()))?;
            if response.status() != http::StatusCode::OK {
                return Err(failed(format!("the response has the status {}", response.status().as_u16())));
            }
            let body = Limited::new(response.into_body(), RESPONSE_MAX).collect().await;
            Ok(body.map_err(|error| failed(error.to_string()))?.to_bytes())
        };
        let timeout = self.extender.timeout;
        let late = |_| failed(format!("no complete response within {timeout:?}"));
        let bytes = tokio::time::timeout(timeout, exchange).await.map_err(late)??;
        serde_json::from_slice(&bytes).map_err(|error| failed(format!("invalid response: {error}")))
    }

    /// An error of a request to the extender.
    pub(crate) fn error(&self, verb: &str, reason: String) -> RequestError {
        RequestError { url: self.extender.url.clone(), verb: verb.to_owned(), reason }
    }
}

/// Checks URL and TLS settings, so that wrong settings are refused at the start.
pub(crate) fn check(extender: &Extender) -> Result<(), String> {
    config(extender)?.rustls_https_connector().map(drop).map_err(|error| error.to_string())
}

fn config(extender: &Extender) -> Result<kube::Config, String> {
    let url: http::Uri = extender.url.parse().map_err(|error| format!("urlPrefix: {error}"))?;
    if !matches!(url.scheme_str(), Some("http" | "https")) || url.host().is_none() {
        return Err(format!("urlPrefix: {:?} is not an http or https URL", extender.url));
    }
    let mut config = kube::Config::new(url);
    let tls = &extender.tls;
    config.accept_invalid_certs = tls.insecure;
    config.tls_server_name.clone_from(&tls.server_name);
    if let Some(pem) = &tls.authorities {
        let read: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
        let read = read.map_err(|error| format!("tlsConfig: caFile or caData: {error}"))?;
        if read.is_empty() {
            return Err("tlsConfig: caFile or caData has no certificate".to_owned());
        }
        config.root_cert = Some(read.into_iter().map(|one| one.to_vec()).collect());
    }
    if let Some((certificate, key)) = &tls.identity {
        use base64::Engine as _;
        let encoded = |pem: &[u8]| base64::engine::general_purpose::STANDARD.encode(pem);
        let identity = serde_json::json!({
            "client-certificate-data": encoded(certificate), "client-key-data": encoded(key),
        });
        config.auth_info = serde_json::from_value(identity).map_err(|error| error.to_string())?;
    }
    Ok(config)
}

//! API clients: with a bootstrap token, and with a certificate that is renewed.

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, PoisonError, RwLock};

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use kube::config::{AuthInfo, KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;
use serde_json::json;

use super::endpoint::{CONNECT_TIMEOUT, Endpoint};
use super::error::JoinError;
use super::request::Identity;
use super::token::Token;

/// An API client that always uses the current certificate.
pub(super) struct Current {
    endpoint: Endpoint,
    authority: String,
    state: RwLock<(Client, Identity)>,
    /// Failed attempts to obtain a certificate.
    pub(super) failures: AtomicU64,
}

/// A configuration that trusts this authority and has no credentials.
fn config_trusting(endpoint: &Endpoint, authority: &str) -> Result<Config, JoinError> {
    let certificates =
        CertificateDer::pem_slice_iter(authority.as_bytes()).map(|one| one.map(|der| der.to_vec()));
    let certificates: Result<Vec<_>, _> = certificates.collect();
    let mut config = endpoint.config();
    config.root_cert = Some(certificates.map_err(|error| JoinError::Certificate(error.to_string()))?);
    Ok(config)
}

/// A client with the token's credentials.
pub(super) async fn with_token(
    endpoint: &Endpoint,
    authority: &str,
    token: &Token,
) -> Result<Client, JoinError> {
    let unusable = |why: String| JoinError::Certificate(why);
    let file = json!({
        "clusters": [{"name": "c", "cluster": {"server": endpoint.to_string(),
            "certificate-authority-data": BASE64_STANDARD.encode(authority)}}],
        "users": [{"name": "u", "user": {"token": format!("{}.{}", token.id, token.secret)}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    });
    let file: Kubeconfig = serde_json::from_value(file).map_err(|error| unusable(error.to_string()))?;
    let config = Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await;
    let mut config = config.map_err(|error| unusable(error.to_string()))?;
    config.connect_timeout = Some(CONNECT_TIMEOUT);
    Client::try_from(config).map_err(|error| unusable(error.to_string()))
}

impl Current {
    pub(super) fn new(endpoint: Endpoint, authority: String, identity: Identity) -> Result<Self, JoinError> {
        let client = connect(&endpoint, &authority, &identity)?;
        let state = RwLock::new((client, identity));
        Ok(Self { endpoint, authority, state, failures: AtomicU64::default() })
    }

    /// A client that sends each request with the certificate that is current then.
    pub(super) fn client(self: &Arc<Self>) -> Client {
        let current = Arc::clone(self);
        let service = tower::service_fn(move |request: http::Request<kube::client::Body>| {
            let client = current.now();
            async move { client.send(request).await }
        });
        Client::new(service, "default")
    }

    /// A client with the current certificate.
    pub(super) fn now(&self) -> Client {
        self.state.read().unwrap_or_else(PoisonError::into_inner).0.clone()
    }

    /// The current certificate.
    pub(super) fn identity(&self) -> Identity {
        self.state.read().unwrap_or_else(PoisonError::into_inner).1.clone()
    }

    /// Uses this certificate for all further requests. Connections with the old certificate end after their requests.
    pub(super) fn replace(&self, identity: Identity) -> Result<(), JoinError> {
        let client = connect(&self.endpoint, &self.authority, &identity)?;
        *self.state.write().unwrap_or_else(PoisonError::into_inner) = (client, identity);
        Ok(())
    }
}

fn connect(endpoint: &Endpoint, authority: &str, identity: &Identity) -> Result<Client, JoinError> {
    let mut config = config_trusting(endpoint, authority)?;
    let data = |pem: &str| BASE64_STANDARD.encode(pem);
    let user = json!({"client-certificate-data": data(&identity.certificate), "client-key-data": data(&identity.key)});
    let user: AuthInfo =
        serde_json::from_value(user).map_err(|error| JoinError::Certificate(error.to_string()))?;
    config.auth_info = user;
    crate::node_client(config).map_err(|error| JoinError::Certificate(coracle_error_chain::chain(&error)))
}

//! The current serving certificate of the kubelet API.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, PoisonError, RwLock};

use rustls::crypto::ring::sign::any_supported_type;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};

use super::Renewal;
use super::error::JoinError;
use super::request::Identity;

/// The certificate that handshakes use. None until the cluster has issued it; handshakes fail then.
#[derive(Debug)]
pub(super) struct Serving {
    state: RwLock<Option<(Arc<CertifiedKey>, Identity)>>,
    /// Failed attempts to obtain a certificate.
    pub(super) failures: AtomicU64,
}

impl Serving {
    pub(super) fn new(identity: Option<Identity>) -> Result<Self, JoinError> {
        let state = identity.map(|identity| Ok((certified(&identity)?, identity))).transpose()?;
        Ok(Self { state: RwLock::new(state), failures: AtomicU64::default() })
    }

    pub(super) fn identity(&self) -> Option<Identity> {
        let state = self.state.read().unwrap_or_else(PoisonError::into_inner);
        state.as_ref().map(|(_, identity)| identity.clone())
    }

    /// The end of the certificate, and the failed attempts to obtain a certificate.
    pub(super) fn renewal(&self) -> Renewal {
        let until = self.identity().map(|identity| identity.not_after());
        Renewal { until, failures: self.failures.load(Relaxed) }
    }

    pub(super) fn replace(&self, identity: Identity) -> Result<(), JoinError> {
        let certified = certified(&identity)?;
        *self.state.write().unwrap_or_else(PoisonError::into_inner) = Some((certified, identity));
        Ok(())
    }
}

impl ResolvesServerCert for Serving {
    fn resolve(&self, _hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        let state = self.state.read().unwrap_or_else(PoisonError::into_inner);
        state.as_ref().map(|(certified, _)| certified.clone())
    }
}

/// Certificate and key in the form of the TLS server.
pub(super) fn certified(identity: &Identity) -> Result<Arc<CertifiedKey>, JoinError> {
    let unusable = |error: &dyn std::fmt::Display| JoinError::Certificate(error.to_string());
    let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(identity.certificate.as_bytes()).collect();
    let key = PrivateKeyDer::from_pem_slice(identity.key.as_bytes()).map_err(|error| unusable(&error))?;
    let key = any_supported_type(&key).map_err(|error| unusable(&error))?;
    Ok(Arc::new(CertifiedKey::new(chain.map_err(|error| unusable(&error))?, key)))
}

//! Errors of the start of the control plane.

use std::net::SocketAddr;
use std::path::PathBuf;

use coracle_apiserver::OpenError;
use coracle_controllers::SignError;

use crate::pki::PkiError;
use crate::store::OpenStoreError;
use crate::tls::TlsError;

/// The control plane did not start.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The store cannot be used.
    #[error("the control plane cannot use its store")]
    Store(#[source] OpenStoreError),
    /// The cluster's keys and certificates cannot be used.
    #[error("the control plane cannot use its keys and certificates")]
    Pki(#[source] PkiError),
    /// Certificates cannot be used for TLS.
    #[error("the control plane cannot set up TLS")]
    Tls(#[source] TlsError),
    /// The authority of the authenticating proxy cannot be read.
    #[error("cannot read requestheader-client-ca-file {path}")]
    ClientAuthority {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// The external signer of service account tokens cannot be used.
    #[error("the API server cannot use service-account-signing-endpoint")]
    TokenSigner(#[source] coracle_token_signer::Error),
    /// The CA cannot sign certificate requests.
    #[error("cannot sign certificates with the cluster's authority")]
    Signer(#[source] SignError),
    /// The API server cannot listen on its address.
    #[error("the API server cannot listen on {address}; --listen sets another address")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// The API server cannot start.
    #[error("the API server cannot start")]
    Apiserver(#[source] OpenError),
}

//! Paths of a certificate and its key.

use std::path::PathBuf;

/// Files of a certificate and its key, in PEM.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CertificateFiles {
    /// The certificate and its intermediate authorities.
    pub certificate: PathBuf,
    /// The private key.
    pub key: PathBuf,
}

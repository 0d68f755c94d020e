//! Serving certificates of a node with a kubeconfig, with the kubelet's files: self-signed (`kubelet.crt`,
//! `kubelet.key` in the certificate directory), or requested from the cluster (`kubelet-server-current.pem`).

use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;

use kube::Client;
use rcgen::{
    CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, KeyUsagePurpose, SanType,
};
use rustls::server::ResolvesServerCert;
use tokio::sync::watch;

use super::Renewal;
use super::error::JoinError;
use super::files::{self, ServingFile};
use super::request::{self, Identity};
use super::rotate;
use super::serving::{Serving, certified};
use crate::bounded;
use crate::certificate_files::CertificateFiles;

/// Lifetime of a self-signed certificate in days, as in the kubelet.
const DAYS: i64 = 365;
/// Maximum size in bytes of a certificate or key file.
const FILE_MAX: u64 = 1 << 20;

/// A serving certificate that is requested with the credentials of a kubeconfig.
pub struct RequestedServing {
    client: Client,
    node: String,
    file: ServingFile,
    serving: Arc<Serving>,
}

impl RequestedServing {
    /// Reads the certificate of an earlier start, if there is one.
    ///
    /// # Errors
    /// [`JoinError`] when the file cannot be read.
    pub fn open(client: Client, node: &str, cert_dir: &Path) -> Result<Self, JoinError> {
        let file = ServingFile { path: cert_dir.join("kubelet-server-current.pem") };
        let serving = Arc::new(Serving::new(file.read()?)?);
        Ok(Self { client, node: node.to_owned(), file, serving })
    }

    /// The certificate, looked up at each handshake. None until the cluster has issued it.
    #[must_use]
    pub fn serving(&self) -> Arc<dyn ResolvesServerCert> {
        self.serving.clone()
    }

    /// The certificate.
    pub(crate) fn renewal(&self) -> Renewal {
        self.serving.renewal()
    }

    /// Requests the certificate for the node's name and addresses, and renews it. Runs until dropped.
    pub async fn keep(&self, addresses: watch::Receiver<Vec<IpAddr>>) {
        rotate::serving(|| self.client.clone(), &self.file, &self.serving, &self.node, addresses).await;
    }
}

impl std::fmt::Debug for RequestedServing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Keys are not printed.
        f.debug_struct("RequestedServing").field("node", &self.node).finish_non_exhaustive()
    }
}

/// Returns the files of a self-signed certificate. The certificate names the node and its addresses. A new
/// pair is written if the stored pair is missing, does not match, has expired or names another node.
///
/// # Errors
/// [`JoinError`] when the files cannot be written.
pub fn self_signed(cert_dir: &Path, node: &str, addresses: &[IpAddr]) -> Result<CertificateFiles, JoinError> {
    let files =
        CertificateFiles { certificate: cert_dir.join("kubelet.crt"), key: cert_dir.join("kubelet.key") };
    if is_usable(&files, node) {
        return Ok(files);
    }
    let unusable = |error: rcgen::Error| JoinError::Certificate(error.to_string());
    let pair = request::new_key()?;
    let mut params = CertificateParams::new(vec![node.to_owned()]).map_err(unusable)?;
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, node);
    params.subject_alt_names.extend(addresses.iter().map(|address| SanType::IpAddress(*address)));
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::KeyEncipherment];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    let now = std::time::SystemTime::now();
    // The validity begins one hour earlier, as upstream, for clients whose clock is behind.
    params.not_before = (now - std::time::Duration::from_secs(3600)).into();
    params.not_after = (now + std::time::Duration::from_secs(DAYS.unsigned_abs() * 24 * 3600)).into();
    let made = params.self_signed(&pair).map_err(unusable)?;
    // The key is written first: after a crash in between the pair does not match, and the next start replaces it.
    files::write(&files.key, &pair.serialize_pem())?;
    files::write(&files.certificate, &made.pem())?;
    tracing::info!(path = %files.certificate.display(), "created a self-signed serving certificate");
    Ok(files)
}

fn is_usable(files: &CertificateFiles, node: &str) -> bool {
    let read = |path: &Path| bounded::read_text(path, FILE_MAX).ok();
    let (Some(certificate), Some(key)) = (read(&files.certificate), read(&files.key)) else { return false };
    let Ok(identity) = Identity::new(certificate, key) else { return false };
    let fits = certified(&identity).is_ok_and(|pair| pair.keys_match().is_ok());
    fits && !identity.is_expired(jiff::Timestamp::now()) && identity.is_for(node)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_self_signed_certificate_is_kept_until_it_does_not_fit() {
        let dir = tempfile::tempdir().unwrap();
        let make = |node: &str| {
            let files = self_signed(&dir.path().join("pki"), node, &["192.0.2.1".parse().unwrap()]).unwrap();
            assert_eq!(fs::metadata(&files.key).unwrap().permissions().mode() & 0o777, 0o600);
            fs::read_to_string(files.certificate).unwrap()
        };
        let first = make("a");
        assert_eq!(make("a"), first);
        let second = make("b");
        assert_ne!(second, first, "for another name");
        fs::write(dir.path().join("pki/kubelet.key"), request::new_key().unwrap().serialize_pem()).unwrap();
        let third = make("b");
        assert_ne!(third, second, "the key is another's");
        fs::write(dir.path().join("pki/kubelet.crt"), "torn").unwrap();
        assert_ne!(make("b"), third);
    }
}

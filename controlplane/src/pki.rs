//! The cluster's certificates and keys: created at the first start, checked and completed at every start.
//!
//! Certificates are valid from one hour before their creation, because clocks differ. They are valid for ten years,
//! because some machines have no administrator to renew them. A certificate that lacks an address, is of another CA, or
//! expires soon is replaced by a new certificate of this CA.

mod file;
mod leaf;

use std::{
    net::IpAddr,
    path::{Path, PathBuf},
};

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, IsCa, Issuer, KeyPair, KeyUsagePurpose,
};

pub use leaf::{Leaf, Usage};

/// An error of the cluster's certificates and keys.
#[derive(Debug, thiserror::Error)]
pub enum PkiError {
    /// A file cannot be read.
    #[error("cannot read {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// A file cannot be written.
    #[error("cannot write {path}")]
    Write {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// A file has no valid key or certificate.
    #[error("cannot use {path}: it has no usable key or certificate")]
    Unusable {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: rcgen::Error,
    },
    /// A certificate cannot be created.
    #[error("cannot create the certificate {name}")]
    Issue {
        /// The file name without its extension.
        name: String,
        /// The cause.
        #[source]
        source: rcgen::Error,
    },
}

/// The directory of keys and certificates, with the CA that signs them.
pub struct Pki {
    dir: PathBuf,
    authority: Issuer<'static, KeyPair>,
    authority_pem: String,
}

/// A certificate and its key in PEM, with the paths of their files.
#[derive(Clone, Debug)]
pub struct Pair {
    /// The certificate.
    pub certificate: String,
    /// The key.
    pub key: String,
    /// The certificate's file.
    pub certificate_path: PathBuf,
    /// The key's file.
    pub key_path: PathBuf,
}

impl Pki {
    /// Opens the directory. Creates the CA if it does not exist.
    ///
    /// # Errors
    /// [`PkiError`] if a file cannot be read or written, or is invalid.
    pub fn open(dir: &Path) -> Result<Self, PkiError> {
        std::fs::create_dir_all(dir).map_err(|source| PkiError::Write { path: dir.to_owned(), source })?;
        let (certificate_path, key_path) = (dir.join("ca.crt"), dir.join("ca.key"));
        if !certificate_path.exists() {
            make_authority(&certificate_path, &key_path)?;
        }
        let authority_pem = file::read(&certificate_path)?;
        let key = KeyPair::from_pem(&file::read(&key_path)?)
            .map_err(|source| PkiError::Unusable { path: key_path, source })?;
        let authority = Issuer::from_ca_cert_pem(&authority_pem, key)
            .map_err(|source| PkiError::Unusable { path: certificate_path, source })?;
        Ok(Self { dir: dir.to_owned(), authority, authority_pem })
    }

    /// Opens a directory that another program made. No file is created.
    ///
    /// # Errors
    /// [`PkiError`] if `ca.crt` or `ca.key` is missing or unusable.
    pub fn existing(dir: &Path) -> Result<Self, PkiError> {
        file::read(&dir.join("ca.crt"))?;
        Self::open(dir)
    }

    /// The directory.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.dir
    }

    /// The CA's certificate in PEM.
    #[must_use]
    pub fn authority_pem(&self) -> &str {
        &self.authority_pem
    }

    /// The file of the CA's certificate.
    #[must_use]
    pub fn authority_path(&self) -> PathBuf {
        self.dir.join("ca.crt")
    }

    /// The CA's key in PEM.
    ///
    /// # Errors
    /// [`PkiError::Read`].
    pub fn authority_key(&self) -> Result<String, PkiError> {
        file::read(&self.dir.join("ca.key"))
    }

    /// The certificate with this file name. The certificate is created if it does not exist, and replaced if it no
    /// longer agrees with `leaf` or expires soon.
    ///
    /// # Errors
    /// [`PkiError`] if a file cannot be read or written.
    pub fn pair(&self, name: &str, leaf: &Leaf) -> Result<Pair, PkiError> {
        let certificate_path = self.dir.join(format!("{name}.crt"));
        let key_path = self.dir.join(format!("{name}.key"));
        if let (Ok(certificate), Ok(key)) = (file::read(&certificate_path), file::read(&key_path))
            && leaf.accepts(&certificate, &key, &self.authority_pem)
        {
            return Ok(Pair { certificate, key, certificate_path, key_path });
        }
        let issued = leaf.issue(&self.authority);
        let leaf::Issued { certificate, key } =
            issued.map_err(|source| PkiError::Issue { name: name.to_owned(), source })?;
        file::write(&key_path, &key, 0o600)?;
        file::write(&certificate_path, &certificate, 0o644)?;
        Ok(Pair { certificate, key, certificate_path, key_path })
    }

    /// A hash of the CA certificate and of the key that signs service account tokens. All servers of a cluster have the
    /// same hash.
    ///
    /// # Errors
    /// [`PkiError`] if the key cannot be read or created.
    pub fn fingerprint(&self) -> Result<String, PkiError> {
        use sha2::{Digest as _, Sha256};
        let hash = Sha256::new().chain_update(&self.authority_pem).chain_update(self.service_account_key()?);
        Ok(format!("sha256:{}", hex::encode(hash.finalize())))
    }

    /// The key that signs service account tokens, in PKCS#8. The public key is in a file beside it.
    ///
    /// # Errors
    /// [`PkiError`] if a file cannot be read or written, or is invalid.
    pub fn service_account_key(&self) -> Result<Vec<u8>, PkiError> {
        let path = self.dir.join("sa.key");
        if !path.exists() {
            let key = KeyPair::generate();
            let key = key.map_err(|source| PkiError::Issue { name: "sa".to_owned(), source })?;
            file::write(&self.dir.join("sa.pub"), &key.public_key_pem(), 0o644)?;
            file::write(&path, &key.serialize_pem(), 0o600)?;
        }
        let key = KeyPair::from_pem(&file::read(&path)?);
        Ok(key.map_err(|source| PkiError::Unusable { path, source })?.serialize_der())
    }

    /// Writes a file with a key into the state directory, with mode 0600.
    ///
    /// # Errors
    /// [`PkiError::Write`].
    pub fn write_secret(path: &Path, text: &str) -> Result<(), PkiError> {
        file::write(path, text, 0o600)
    }
}

fn make_authority(certificate_path: &Path, key_path: &Path) -> Result<(), PkiError> {
    let issue = |source| PkiError::Issue { name: "ca".to_owned(), source };
    let key = KeyPair::generate().map_err(issue)?;
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, "coracle-ca");
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages =
        vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign, KeyUsagePurpose::DigitalSignature];
    leaf::set_validity(&mut params);
    let certificate = params.self_signed(&key).map_err(issue)?;
    file::write(key_path, &key.serialize_pem(), 0o600)?;
    file::write(certificate_path, &certificate.pem(), 0o644)
}

/// The names and addresses by which clients reach the API server.
#[must_use]
pub fn apiserver_leaf(names: &[String], addresses: &[IpAddr]) -> Leaf {
    let fixed = [
        "kubernetes",
        "kubernetes.default",
        "kubernetes.default.svc",
        "kubernetes.default.svc.cluster.local",
        "localhost",
    ];
    let names = fixed.into_iter().map(str::to_owned).chain(names.iter().cloned()).collect();
    Leaf {
        common_name: "kube-apiserver".to_owned(),
        organization: None,
        usage: Usage::Server,
        names,
        addresses: addresses.to_vec(),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn existing_certificates_are_kept_while_they_match_the_leaf() {
        let dir = tempfile::tempdir().unwrap();
        let pki = Pki::open(dir.path()).unwrap();
        let leaf = apiserver_leaf(&["host".into()], &["10.0.0.1".parse().unwrap()]);
        let first = pki.pair("apiserver", &leaf).unwrap();
        let pki = Pki::open(dir.path()).unwrap();
        assert_eq!(pki.pair("apiserver", &leaf).unwrap().certificate, first.certificate);
        let moved = apiserver_leaf(&["host".into()], &["10.0.0.2".parse().unwrap()]);
        assert_ne!(pki.pair("apiserver", &moved).unwrap().certificate, first.certificate);
        assert_eq!(pki.service_account_key().unwrap(), pki.service_account_key().unwrap());
        for key in ["ca.key", "apiserver.key", "sa.key"] {
            let mode = std::fs::metadata(dir.path().join(key)).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600, "{key}");
        }
    }

    #[test]
    fn certificates_of_an_earlier_authority_are_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let leaf = Leaf::client("kubernetes-admin", Some("system:masters"));
        let first = Pki::open(dir.path()).unwrap().pair("admin", &leaf).unwrap();
        std::fs::remove_file(dir.path().join("ca.crt")).unwrap();
        let second = Pki::open(dir.path()).unwrap().pair("admin", &leaf).unwrap();
        assert_ne!(first.certificate, second.certificate);
    }

    #[test]
    fn a_damaged_authority_key_is_an_error_with_the_name_of_the_file() {
        let dir = tempfile::tempdir().unwrap();
        drop(Pki::open(dir.path()).unwrap());
        std::fs::write(dir.path().join("ca.key"), "damaged").unwrap();
        let Err(error) = Pki::open(dir.path()) else { panic!("opened") };
        assert!(error.to_string().contains("ca.key: it has no usable key"));
    }
}

//! The serving certificates of the API server: its own certificate, and certificates from files. The files are read
//! again when they change.
//!
//! A client that sends a server name gets the first certificate for that name. Other clients get the default
//! certificate. The order of names is upstream's: `BuildNamedCertificates` of kube-apiserver, then `getCertificate` of
//! Go's TLS.

use std::{
    fs::File,
    io::Read as _,
    path::{Path, PathBuf},
    sync::{Arc, PoisonError, RwLock, RwLockReadGuard},
};

use futures::FutureExt as _;
use rustls::{
    SupportedProtocolVersion,
    crypto::{CryptoProvider, ring},
    server::{ClientHello, ResolvesServerCert},
    sign::CertifiedKey,
    version::{TLS12, TLS13},
};
use rustls_pki_types::CertificateDer;
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use x509_parser::{
    extensions::GeneralName,
    prelude::{FromDer as _, X509Certificate},
};

use crate::{
    pki::Pair,
    tls::{self, TlsError},
};

/// Maximum bytes of a file with certificates or a key.
const MAX_FILE: u64 = 1 << 20;
/// Minimum versions of TLS, by upstream's names.
const VERSIONS: [&str; 2] = ["VersionTLS12", "VersionTLS13"];

/// Versions of TLS from 1.2 and from 1.3.
static SINCE_12: [&SupportedProtocolVersion; 2] = [&TLS13, &TLS12];
static SINCE_13: [&SupportedProtocolVersion; 1] = [&TLS13];

/// TLS settings of the API server.
#[derive(Clone, Debug, Default)]
pub struct ServingOptions {
    /// Files of the default certificate. `None` for the certificate that the cluster's authority signs.
    pub certificate: Option<CertificateFiles>,
    /// Certificates for some server names.
    pub by_name: Vec<NamedCertificate>,
    /// Minimum version of TLS by upstream's name; empty for 1.2.
    pub min_version: String,
    /// Cipher suites by their names in Go; empty for all supported suites. The suites of TLS 1.3 are always in use, as
    /// in Go.
    pub cipher_suites: Vec<String>,
}

/// Files of a certificate and its key, in PEM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CertificateFiles {
    /// The certificate and its intermediate authorities.
    pub certificate: PathBuf,
    /// The private key.
    pub key: PathBuf,
}

/// A certificate for some server names.
#[derive(Clone, Debug)]
pub struct NamedCertificate {
    /// Files of the certificate.
    pub files: CertificateFiles,
    /// Server names; `*` can be the first label. If the list is empty, the common name and the DNS names of the
    /// certificate count.
    pub names: Vec<String>,
}

/// The certificates that handshakes use.
#[derive(Debug)]
pub(crate) struct ServingCertificates {
    default: Slot,
    by_name: Vec<Slot>,
}

/// One certificate, which changes with its files.
#[derive(Debug)]
struct Slot {
    /// The files of the certificate. `None` for the server's own certificate.
    files: Option<CertificateFiles>,
    /// The configured server names.
    names: Vec<String>,
    current: RwLock<Loaded>,
}

#[derive(Clone, Debug)]
struct Loaded {
    key: Arc<CertifiedKey>,
    names: CertificateNames,
}

/// The server names in a certificate.
#[derive(Clone, Debug, Default)]
struct CertificateNames {
    common: Option<String>,
    /// The DNS names, in lower case.
    dns: Vec<String>,
}

// === impl ServingOptions ===

impl ServingOptions {
    /// Checks the names of versions and cipher suites.
    ///
    /// # Errors
    /// The name of the unknown version or cipher suite, with the known names.
    pub fn check(&self) -> Result<(), String> {
        self.provider()?;
        self.versions().map(drop)
    }

    /// The cryptography with the chosen cipher suites.
    pub(crate) fn provider(&self) -> Result<CryptoProvider, String> {
        coracle_cipher_suites::provider(&self.cipher_suites)
    }

    /// The versions of TLS.
    pub(crate) fn versions(&self) -> Result<&'static [&'static SupportedProtocolVersion], String> {
        match self.min_version.as_str() {
            "" | "VersionTLS12" => Ok(&SINCE_12),
            "VersionTLS13" => Ok(&SINCE_13),
            other => Err(format!(
                "minimum TLS version {other:?} is not supported; supported are {}",
                VERSIONS.join(", ")
            )),
        }
    }
}

// === impl ServingCertificates ===

impl ServingCertificates {
    /// `own` is the certificate that is used if the options have none.
    pub(crate) fn open(own: &Pair, options: &ServingOptions) -> Result<Self, TlsError> {
        let default = match &options.certificate {
            Some(files) => Slot::open(files, &[])?,
            None => Slot {
                files: None,
                names: Vec::new(),
                current: RwLock::new(Loaded::new(&own.certificate, &own.key)?),
            },
        };
        let by_name = options.by_name.iter().map(|one| Slot::open(&one.files, &one.names));
        Ok(Self { default, by_name: by_name.collect::<Result<_, _>>()? })
    }

    /// Reads certificates again when their files change.
    pub(crate) fn follow(self: &Arc<Self>, tasks: &TaskTracker, shutdown: &CancellationToken) {
        for (at, slot) in self.slots().enumerate() {
            let Some(CertificateFiles { certificate, key }) = slot.files.clone() else { continue };
            for path in [certificate, key] {
                let certificates = self.clone();
                let reload = move || certificates.slots().nth(at).is_some_and(Slot::reload);
                tasks.spawn(coracle_apiserver::follow_file(path, shutdown.clone(), reload).boxed());
            }
        }
    }

    fn slots(&self) -> impl Iterator<Item = &Slot> {
        std::iter::once(&self.default).chain(&self.by_name)
    }

    /// The certificate for a server name. An exact name takes precedence over a name with `*`, and a configured name
    /// over the same name in a certificate. If no certificate is found, the DNS names in certificates with configured
    /// names count, too.
    fn chosen(&self, name: Option<&str>) -> Arc<CertifiedKey> {
        let Some(name) = name.map(|name| name.trim_end_matches('.').to_ascii_lowercase()) else {
            return self.default.key();
        };
        let any = name.split_once('.').map_or_else(|| "*".to_owned(), |(_, domain)| format!("*.{domain}"));
        let by_name = |name: &String| {
            let configured = self.by_name.iter().find(|slot| slot.names.contains(name));
            configured.or_else(|| self.by_name.iter().find(|slot| slot.matches_unconfigured_names(name)))
        };
        let found = by_name(&name).or_else(|| by_name(&any));
        let found = found.or_else(|| self.slots().find(|slot| slot.certifies(&name) || slot.certifies(&any)));
        found.unwrap_or(&self.default).key()
    }
}

impl ResolvesServerCert for ServingCertificates {
    fn resolve(&self, hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.chosen(hello.server_name()))
    }
}

// === impl Slot ===

impl Slot {
    fn open(files: &CertificateFiles, names: &[String]) -> Result<Self, TlsError> {
        let current = RwLock::new(Loaded::read(files)?);
        let names = names.iter().map(|name| name.to_ascii_lowercase()).collect();
        Ok(Self { files: Some(files.clone()), names, current })
    }

    fn key(&self) -> Arc<CertifiedKey> {
        self.read().key.clone()
    }

    /// Whether the certificate has no configured names, and `name` is its common name or one of its DNS names.
    fn matches_unconfigured_names(&self, name: &str) -> bool {
        let own = &self.read().names;
        self.names.is_empty() && (own.common.as_deref() == Some(name) || own.has_dns(name))
    }

    /// Whether the certificate has this DNS name.
    fn certifies(&self, name: &str) -> bool {
        self.read().names.has_dns(name)
    }

    fn read(&self) -> RwLockReadGuard<'_, Loaded> {
        self.current.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads the files again. While only one of the two files is changed, certificate and key do not match, and the
    /// current pair is kept. Returns whether the files were used.
    fn reload(&self) -> bool {
        let Some(files) = &self.files else { return true };
        match Loaded::read(files) {
            Ok(loaded) => {
                *self.current.write().unwrap_or_else(PoisonError::into_inner) = loaded;
                tracing::info!(path = %files.certificate.display(), "serving certificate loaded");
                true
            }
            Err(error) => {
                let error = &error as &dyn std::error::Error;
                tracing::warn!(error, "cannot use the changed serving certificate; keeping the current one");
                false
            }
        }
    }
}

// === impl CertificateNames ===

impl CertificateNames {
    fn has_dns(&self, name: &str) -> bool {
        self.dns.iter().any(|own| own == name)
    }
}

// === impl Loaded ===

impl Loaded {
    fn read(files: &CertificateFiles) -> Result<Self, TlsError> {
        let CertificateFiles { certificate, key } = files;
        let loaded = Self::new(&text(certificate)?, &text(key)?);
        loaded.map_err(|source| TlsError::Files { path: certificate.to_owned(), source: Box::new(source) })
    }

    fn new(certificate: &str, key: &str) -> Result<Self, TlsError> {
        let (chain, key) = tls::chain(certificate, key)?;
        let names = chain.first().map(names).unwrap_or_default();
        let key = CertifiedKey::from_der(chain, key, &ring::default_provider()).map_err(TlsError::Rustls)?;
        Ok(Self { key: Arc::new(key), names })
    }
}

/// The server names of a certificate. Addresses are left out: a client cannot send an address as the server name.
fn names(certificate: &CertificateDer<'_>) -> CertificateNames {
    let Ok((_, certificate)) = X509Certificate::from_der(certificate) else {
        return CertificateNames::default();
    };
    let alternatives = certificate.subject_alternative_name().ok().flatten();
    let found = alternatives.map(|names| names.value.general_names.as_slice()).unwrap_or_default();
    let dns = found.iter().filter_map(|name| match name {
        GeneralName::DNSName(name) => Some(name.to_ascii_lowercase()),
        _ => None,
    });
    // Of several common names, Go uses the last one.
    let common = certificate.subject().iter_common_name().last().and_then(|name| name.as_str().ok());
    CertificateNames { common: common.map(str::to_owned), dns: dns.collect() }
}

fn text(path: &Path) -> Result<String, TlsError> {
    let mut text = String::new();
    let read = File::open(path).and_then(|file| file.take(MAX_FILE + 1).read_to_string(&mut text));
    let read = read.and_then(|length| match length as u64 {
        0..=MAX_FILE => Ok(()),
        _ => Err(std::io::ErrorKind::FileTooLarge.into()),
    });
    read.map_err(|source| TlsError::Read { path: path.to_owned(), source })?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use rcgen::{CertificateParams, DistinguishedName, DnType, KeyPair};

    use super::*;

    /// A certificate with its key, in PEM.
    struct Pem {
        certificate: String,
        key: String,
    }

    fn pair(names: &[&str]) -> Pem {
        signed(CertificateParams::new(names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>()).unwrap())
    }

    fn signed(certificate: CertificateParams) -> Pem {
        let key = KeyPair::generate().unwrap();
        Pem { certificate: certificate.self_signed(&key).unwrap().pem(), key: key.serialize_pem() }
    }

    fn with_common_name(common: &str) -> Pem {
        let mut certificate = CertificateParams::default();
        certificate.distinguished_name = DistinguishedName::new();
        certificate.distinguished_name.push(DnType::CommonName, common);
        signed(certificate)
    }

    fn write(directory: &Path, name: &str, pair: &Pem) -> CertificateFiles {
        let path = |extension: &str| directory.join(format!("{name}.{extension}"));
        let files = CertificateFiles { certificate: path("crt"), key: path("key") };
        fs::write(&files.certificate, &pair.certificate).unwrap();
        fs::write(&files.key, &pair.key).unwrap();
        files
    }

    fn own() -> Pair {
        let Pem { certificate, key } = pair(&["kubernetes"]);
        Pair { certificate, key, certificate_path: PathBuf::new(), key_path: PathBuf::new() }
    }

    fn leaf(key: &CertifiedKey) -> Vec<u8> {
        key.cert.first().unwrap().to_vec()
    }

    #[test]
    fn the_server_name_chooses_the_certificate() {
        let directory = tempfile::tempdir().unwrap();
        let named = |file: &str, pair: &Pem, names: &[&str]| {
            let files = write(directory.path(), file, pair);
            NamedCertificate { files, names: names.iter().map(|&name| name.to_owned()).collect() }
        };
        let by_name = vec![
            named("any", &pair(&["x", "*.x.test"]), &["*.Example.com"]),
            named("own", &pair(&["api.example.com", "b.test", "*.late.test", "kubernetes"]), &[]),
            named("late", &pair(&["b.test"]), &["a.late.test"]),
            named("common", &with_common_name("common.test"), &[]),
            named("configured", &pair(&["y"]), &["b.test"]),
        ];
        let options = ServingOptions { by_name, ..ServingOptions::default() };
        let certificates = ServingCertificates::open(&own(), &options).unwrap();
        let slots: Vec<Vec<u8>> = certificates.slots().map(|slot| leaf(&slot.key())).collect();
        for (name, slot) in [
            (None, 0),
            (Some("other.test"), 0),
            (Some("a.b.example.com"), 0),
            (Some("a.example.com"), 1),
            (Some("API.example.com"), 2),
            (Some("a.late.test"), 3),
            (Some("b.late.test"), 2),
            (Some("common.test"), 4),
            // The configured name of the last certificate takes precedence over the same name in earlier certificates.
            (Some("b.test"), 5),
            (Some("kubernetes"), 2),
            // A DNS name of a certificate that has other configured names.
            (Some("x"), 1),
            (Some("a.x.test"), 1),
            (Some("a.a.x.test"), 0),
        ] {
            assert_eq!(leaf(&certificates.chosen(name)), slots[slot], "{name:?}");
        }
    }

    #[test]
    fn a_changed_pair_is_used_once_certificate_and_key_match() {
        let directory = tempfile::tempdir().unwrap();
        let files = write(directory.path(), "a", &pair(&["a"]));
        let options = ServingOptions { certificate: Some(files), ..ServingOptions::default() };
        let certificates = ServingCertificates::open(&own(), &options).unwrap();
        let first = leaf(&certificates.chosen(None));
        let next = pair(&["b"]);
        fs::write(directory.path().join("a.crt"), &next.certificate).unwrap();
        certificates.default.reload();
        assert_eq!(leaf(&certificates.chosen(None)), first);
        fs::write(directory.path().join("a.key"), &next.key).unwrap();
        certificates.default.reload();
        assert_ne!(leaf(&certificates.chosen(None)), first);
        fs::remove_file(directory.path().join("a.key")).unwrap();
        assert!(ServingCertificates::open(&own(), &options).is_err());
    }

    #[test]
    fn only_cipher_suites_and_versions_of_the_library_are_accepted() {
        let of = |suites: &[&str], version: &str| ServingOptions {
            cipher_suites: suites.iter().map(|&suite| suite.to_owned()).collect(),
            min_version: version.to_owned(),
            ..ServingOptions::default()
        };
        assert_eq!(of(&[], "").provider().unwrap().cipher_suites.len(), 9);
        let chosen =
            of(&["TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256", "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305"], "");
        assert_eq!(chosen.provider().unwrap().cipher_suites.len(), 3 + 2);
        assert_eq!(of(&["TLS_AES_128_GCM_SHA256"], "").provider().unwrap().cipher_suites.len(), 3);
        let refused = of(&["TLS_RSA_WITH_AES_128_CBC_SHA"], "").check().unwrap_err();
        assert!(refused.contains("TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256, "), "{refused}");
        assert!(of(&[], "VersionTLS12").check().is_ok());
        assert_eq!(of(&[], "VersionTLS13").versions().unwrap().len(), 1);
        assert!(of(&[], "VersionTLS11").check().unwrap_err().contains("VersionTLS12"));
    }
}

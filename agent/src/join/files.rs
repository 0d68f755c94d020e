//! Files of a joined machine, under `join/` of its state directory: replaced as a whole, readable by root only.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use kube::config::Kubeconfig;
use rcgen::KeyPair;

use super::endpoint::Endpoint;
use super::error::JoinError;
use super::request::{self, Identity};
use super::token::CaHash;
use crate::{bounded, private_file};

/// Maximum size in bytes of each file.
const FILE_MAX: u64 = 1 << 20;

/// The directory `join/`.
pub(super) struct Files {
    dir: PathBuf,
}

impl Files {
    pub(super) fn new(state_dir: &Path) -> Self {
        Self { dir: state_dir.join("join") }
    }

    /// Path of the authority's certificate.
    pub(super) fn authority_path(&self) -> PathBuf {
        self.dir.join("ca.crt")
    }

    pub(super) fn authority(&self) -> Result<String, JoinError> {
        let path = self.authority_path();
        bounded::read_text(&path, FILE_MAX).map_err(|error| unusable(&path, &error))
    }

    /// Checks that the authority of the joined cluster has this hash.
    ///
    /// # Errors
    /// [`JoinError::Joined`] for another cluster; [`JoinError::File`] if the authority cannot be read.
    pub(super) fn check_cluster(&self, hash: &CaHash) -> Result<(), JoinError> {
        let found = CaHash::of(&self.authority()?)?;
        if found == *hash {
            return Ok(());
        }
        let (found, wanted) = (format!("the cluster with {found}"), format!("the cluster with {hash}"));
        Err(JoinError::Joined { found, wanted })
    }

    pub(super) fn write_authority(&self, pem: &str) -> Result<(), JoinError> {
        write(&self.authority_path(), pem)
    }

    pub(super) fn client(&self) -> Result<Identity, JoinError> {
        let path = self.dir.join("client.pem");
        read(&path)?.ok_or_else(|| unusable(&path, &"it does not exist"))
    }

    pub(super) fn write_client(&self, identity: &Identity) -> Result<(), JoinError> {
        write_identity(&self.dir.join("client.pem"), identity)
    }

    /// The key of the unanswered request; a new key if there is no such request.
    pub(super) fn pending_key(&self) -> Result<KeyPair, JoinError> {
        let path = self.dir.join("pending.key");
        let text = match bounded::read_text(&path, FILE_MAX) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            text => Some(text.map_err(|error| unusable(&path, &error))?),
        };
        // With a damaged key, the request is lost, and a new key is made.
        if let Some(key) = text.and_then(|text| KeyPair::from_pem(&text).ok()) {
            return Ok(key);
        }
        let key = request::new_key()?;
        write(&path, &key.serialize_pem())?;
        Ok(key)
    }

    /// Removes the key after its request was answered.
    pub(super) fn forget_pending_key(&self) {
        drop(fs::remove_file(self.dir.join("pending.key")));
        // Removes the directory only if it is empty: the machine has not joined then.
        drop(fs::remove_dir(&self.dir));
    }

    /// The file of the serving certificate.
    pub(super) fn serving(&self) -> ServingFile {
        ServingFile { path: self.dir.join("serving.pem") }
    }

    /// The API server and the node's name; None if the machine has not joined.
    pub(super) fn kubeconfig(&self) -> Result<Option<(Endpoint, String)>, JoinError> {
        let path = self.dir.join("kubeconfig");
        let text = match bounded::read_text(&path, FILE_MAX) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            text => text.map_err(|error| unusable(&path, &error))?,
        };
        let parsed = Kubeconfig::from_yaml(&text).map_err(|error| unusable(&path, &error))?;
        let server = parsed.clusters.into_iter().find_map(|named| named.cluster?.server);
        let node = parsed
            .auth_infos
            .into_iter()
            .find_map(|named| Some(named.name.strip_prefix("system:node:")?.to_owned()));
        let (Some(server), Some(node)) = (server, node) else {
            return Err(unusable(&path, &"it has no server, or no user with the prefix system:node:"));
        };
        Ok(Some((server.parse()?, node)))
    }

    /// Writes the kubeconfig. The kubeconfig refers to the certificate file, because the certificate is renewed.
    pub(super) fn write_kubeconfig(
        &self,
        endpoint: &Endpoint,
        authority: &str,
        node: &str,
    ) -> Result<(), JoinError> {
        let (authority, client) = (BASE64_STANDARD.encode(authority), self.dir.join("client.pem"));
        let (user, client) = (format!("system:node:{node}"), client.display());
        let text = format!(
            "apiVersion: v1
kind: Config
clusters:
- name: coracle
  cluster:
    server: {endpoint}
    certificate-authority-data: {authority}
users:
- name: {user}
  user:
    client-certificate: {client}
    client-key: {client}
contexts:
- name: {user}@coracle
  context:
    cluster: coracle
    user: {user}
current-context: {user}@coracle
"
        );
        write(&self.dir.join("kubeconfig"), &text)
    }
}

fn unusable(path: &Path, reason: &dyn std::fmt::Display) -> JoinError {
    JoinError::File { path: path.to_owned(), reason: reason.to_string() }
}

/// The file of a serving certificate and its key.
pub(super) struct ServingFile {
    pub(super) path: PathBuf,
}

impl ServingFile {
    /// The serving certificate; None if there is none. An unusable certificate is ignored, and a new one is requested.
    pub(super) fn read(&self) -> Result<Option<Identity>, JoinError> {
        let path = &self.path;
        match read(path) {
            Err(JoinError::Certificate(reason)) => {
                tracing::warn!(path = %path.display(), reason, "ignoring an unusable certificate");
                drop(fs::rename(path, path.with_extension("bad")));
                Ok(None)
            }
            other => other,
        }
    }

    pub(super) fn write(&self, identity: &Identity) -> Result<(), JoinError> {
        write_identity(&self.path, identity)
    }
}

const KEY: &str = "-----BEGIN PRIVATE KEY-----";

/// Writes certificate and key to one file, so that they always match.
fn write_identity(path: &Path, identity: &Identity) -> Result<(), JoinError> {
    write(path, &format!("{}\n{}", identity.certificate.trim_end(), identity.key))
}

fn read(path: &Path) -> Result<Option<Identity>, JoinError> {
    let text = match bounded::read_text(path, FILE_MAX) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        text => text.map_err(|error| unusable(path, &error))?,
    };
    let at = text
        .find(KEY)
        .ok_or_else(|| JoinError::Certificate(format!("{} contains no key", path.display())))?;
    let (certificate, key) = text.split_at(at);
    Identity::new(certificate.to_owned(), key.to_owned()).map(Some)
}

/// Replaces a file of mode 0600, and creates its directory if it is absent.
pub(super) fn write(path: &Path, text: &str) -> Result<(), JoinError> {
    private_file::replace(path, text.as_bytes()).map_err(|error| unusable(path, &error))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn identity() -> Identity {
        let key = rcgen::KeyPair::generate().unwrap();
        let certificate = rcgen::CertificateParams::default().self_signed(&key).unwrap();
        Identity::new(certificate.pem(), key.serialize_pem()).unwrap()
    }

    #[test]
    fn written_files_are_read_back_and_readable_by_root_only() {
        let dir = tempfile::tempdir().unwrap();
        let files = Files::new(dir.path());
        assert!(files.kubeconfig().unwrap().is_none() && files.serving().read().unwrap().is_none());
        let identity = identity();
        files.write_client(&identity).unwrap();
        assert!(files.kubeconfig().unwrap().is_none(), "the kubeconfig makes the machine joined");
        let endpoint: Endpoint = "https://192.0.2.1:6443".parse().unwrap();
        files.write_kubeconfig(&endpoint, "pem", "a").unwrap();
        assert_eq!(files.kubeconfig().unwrap(), Some((endpoint, "a".to_owned())));
        assert_eq!(files.client().unwrap().key, identity.key);
        for name in ["client.pem", "kubeconfig"] {
            let mode = fs::metadata(dir.path().join("join").join(name)).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600, "{name}");
        }
    }

    #[test]
    fn a_key_is_the_same_until_its_request_is_answered() {
        let dir = tempfile::tempdir().unwrap();
        let files = Files::new(dir.path());
        let key = || files.pending_key().unwrap().serialize_pem();
        let first = key();
        assert_eq!(key(), first);
        files.forget_pending_key();
        assert!(!files.dir.exists());
        assert_ne!(key(), first);
        fs::write(files.dir.join("pending.key"), "torn").unwrap();
        assert_eq!(key(), key());
    }

    #[test]
    fn a_torn_serving_certificate_is_ignored_and_a_torn_client_certificate_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let files = Files::new(dir.path());
        fs::create_dir_all(&files.dir).unwrap();
        for name in ["serving.pem", "client.pem"] {
            fs::write(files.dir.join(name), format!("torn\n{KEY}\n")).unwrap();
        }
        assert!(files.serving().read().unwrap().is_none());
        assert!(files.dir.join("serving.bad").exists());
        assert!(files.client().is_err());
    }

    #[test]
    fn a_file_that_is_too_large_is_not_read() {
        let dir = tempfile::tempdir().unwrap();
        let files = Files::new(dir.path());
        files.write_client(&identity()).unwrap();
        assert!(files.client().is_ok());
        let path = dir.path().join("join/client.pem");
        let text = fs::read_to_string(&path).unwrap() + &"\n".repeat(1 << 20);
        fs::write(&path, text).unwrap();
        assert!(files.client().is_err());
    }
}

//! Joining a cluster: the machine verifies the control plane, requests certificates for its node and renews them.
//!
//! ```text
//! --join URL --token id.secret --ca-hash sha256:…
//!   cluster-info, from an untrusted server ── authority has the hash? token has signed it?
//!   └─► request for a client certificate, as the token's bootstrapper ── approved, signed
//!       └─► join/client.pem, join/ca.crt, then join/kubeconfig: from here on it has joined
//!           └─► request for a serving certificate, as the node ── approved for the Node's addresses
//! both are renewed at 70 to 90 % of their lifetime, with the certificate that is valid then
//! ```
//! The kubeconfig is written last, and from then on the machine has joined. After an earlier crash the machine joins
//! again; after a later crash it needs no token. A key never leaves the machine and is written in one file with its
//! certificate. The only exception is the key of the first request. This key is stored alone until the request is
//! answered, so that a retry continues with the same request.

mod client;
mod cluster;
mod endpoint;
mod error;
mod files;
mod own_serving;
mod request;
mod rotate;
mod serving;
mod token;

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use kube::Client;
use rustls::server::ResolvesServerCert;
use tokio::sync::watch;

use client::Current;
use files::Files;
use request::RequestedIdentity;
use serving::Serving;

pub use endpoint::Endpoint;
pub use error::JoinError;
pub use own_serving::{RequestedServing, self_signed};
pub use token::{CaHash, Token};

/// Timeout of the approval and signature of a certificate request while the machine joins. The cluster's controllers
/// take milliseconds.
const APPROVAL_TIMEOUT: Duration = Duration::from_secs(60);

/// A machine that has joined: its API client and its certificates.
pub struct Membership {
    node: String,
    files: Files,
    current: Arc<Current>,
    serving: Arc<Serving>,
}

/// A machine that joins a cluster.
#[derive(Clone, Copy, Debug)]
pub struct JoinRequest<'a> {
    /// Name of the node.
    pub node: &'a str,
    /// The API server.
    pub endpoint: &'a Endpoint,
    /// The token to join with.
    pub token: &'a Token,
    /// Hash of the cluster's authority.
    pub hash: &'a CaHash,
}

/// The response that a joining machine waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JoinStep {
    /// The certificate authority of the cluster, from the API server.
    Authority,
    /// The certificate of the node. Its request must be approved and signed.
    Certificate,
}

/// A certificate that the agent renews.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Renewal {
    /// Time at which the certificate expires. None until the cluster has issued it.
    pub(crate) until: Option<jiff::Timestamp>,
    /// Failed attempts to obtain a certificate.
    pub(crate) failures: u64,
}

/// Joins a cluster and stores the result under `state_dir`. The machine must not have joined ([`resume`]), or may join
/// again ([`may_rejoin`]). Calls `on_step` at the beginning of each step.
///
/// # Errors
/// [`JoinError`]. Existing files are unchanged then. An unanswered request stays in the cluster, which removes it
/// after a day, and its key stays on disk.
pub async fn join(
    state_dir: &Path,
    request: &JoinRequest<'_>,
    on_step: impl Fn(JoinStep),
) -> Result<Membership, JoinError> {
    let JoinRequest { node, endpoint, token, hash } = *request;
    on_step(JoinStep::Authority);
    let authority = cluster::authority(endpoint, token, hash).await?;
    let bootstrap = client::with_token(endpoint, &authority, token).await?;
    if cluster::has_ready_node(&bootstrap, node).await.map_err(|error| error.at(endpoint))? {
        return Err(JoinError::NodeExists { node: node.to_owned() });
    }
    let wanted = RequestedIdentity::client(node);
    let files = Files::new(state_dir);
    let key = files.pending_key()?;
    on_step(JoinStep::Certificate);
    let identity = match request::certificate(&bootstrap, &wanted, &key, APPROVAL_TIMEOUT).await {
        Ok(identity) => identity,
        Err(error) => {
            // The key of an unanswered request is kept: a retry with the same key finds the request.
            if !error.is_unanswered() {
                files.forget_pending_key();
            }
            return Err(error.at(endpoint));
        }
    };
    files.write_client(&identity)?;
    files.write_authority(&authority)?;
    files.write_kubeconfig(endpoint, &authority, node)?;
    files.forget_pending_key();
    resume(state_dir, node)?
        .ok_or_else(|| JoinError::Certificate("the files that were just written do not exist".to_owned()))
}

/// The membership of a machine that has joined before; None if it has not.
///
/// # Errors
/// [`JoinError`] when the machine has joined as another node, its certificate has expired, or a file cannot be used.
pub fn resume(state_dir: &Path, node: &str) -> Result<Option<Membership>, JoinError> {
    let files = Files::new(state_dir);
    let Some((endpoint, known)) = files.kubeconfig()? else { return Ok(None) };
    if known != node {
        let (found, wanted) = (format!("as node {known}"), format!("as {node}"));
        return Err(JoinError::Joined { found, wanted });
    }
    let identity = files.client()?;
    if identity.is_expired(jiff::Timestamp::now()) {
        return Err(JoinError::Expired { node: node.to_owned(), at: identity.not_after().to_string() });
    }
    let current = Current::new(endpoint, files.authority()?, identity)?;
    let serving = Serving::new(files.serving().read()?)?;
    let node = node.to_owned();
    Ok(Some(Membership { node, files, current: Arc::new(current), serving: Arc::new(serving) }))
}

/// Whether a machine whose certificate has expired ([`JoinError::Expired`]) may join again over its files. The machine
/// may join only the same cluster, because its pods and volumes belong to that cluster.
///
/// # Errors
/// [`JoinError::Joined`] when the machine has joined another cluster.
pub fn may_rejoin(state_dir: &Path, hash: &CaHash) -> Result<(), JoinError> {
    Files::new(state_dir).check_cluster(hash)
}

// === impl Membership ===

impl Membership {
    /// This membership, if the authority of its cluster has this hash.
    ///
    /// # Errors
    /// [`JoinError::Joined`] when the membership belongs to another cluster.
    pub fn require_cluster(self, hash: &CaHash) -> Result<Self, JoinError> {
        self.files.check_cluster(hash).map(|()| self)
    }

    /// An API client as this node. It switches to the new certificate after each renewal. Must be called within a
    /// tokio runtime.
    #[must_use]
    pub fn client(&self) -> Client {
        self.current.client()
    }

    /// The serving certificate of the kubelet API, looked up at each handshake. None until the cluster has issued it.
    #[must_use]
    pub fn serving(&self) -> Arc<dyn ResolvesServerCert> {
        self.serving.clone()
    }

    /// The file with the authority whose clients may call the kubelet API.
    #[must_use]
    pub fn client_ca(&self) -> PathBuf {
        self.files.authority_path()
    }

    /// The client certificate and the serving certificate.
    pub(crate) fn renewals(&self) -> [Renewal; 2] {
        let client = Renewal {
            until: Some(self.current.identity().not_after()),
            failures: self.current.failures.load(Relaxed),
        };
        [client, self.serving.renewal()]
    }

    /// Renews both certificates when they are due. Runs until dropped. The serving certificate follows the node's
    /// addresses.
    pub async fn keep(&self, addresses: watch::Receiver<Vec<IpAddr>>) {
        let file = self.files.serving();
        tokio::join!(
            rotate::client(&self.current, &self.files, &self.node),
            rotate::serving(|| self.current.client(), &file, &self.serving, &self.node, addresses),
        );
    }
}

impl std::fmt::Debug for Membership {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Keys are not printed.
        f.debug_struct("Membership").field("node", &self.node).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, KeyPair, date_time_ymd};

    use super::*;
    use request::Identity;

    #[test]
    fn a_machine_with_an_expired_certificate_may_join_the_same_cluster_again_under_its_name() {
        let dir = tempfile::tempdir().unwrap();
        let files = Files::new(dir.path());
        let (key, authority) = (KeyPair::generate().unwrap(), KeyPair::generate().unwrap());
        let mut params = CertificateParams::default();
        (params.not_before, params.not_after) = (date_time_ymd(2020, 1, 1), date_time_ymd(2021, 1, 1));
        let over = params.self_signed(&key).unwrap().pem();
        let authority = CertificateParams::default().self_signed(&authority).unwrap().pem();
        files.write_client(&Identity::new(over, key.serialize_pem()).unwrap()).unwrap();
        files.write_authority(&authority).unwrap();
        let endpoint = "https://192.0.2.1:6443".parse().unwrap();
        files.write_kubeconfig(&endpoint, &authority, "a").unwrap();
        assert!(matches!(resume(dir.path(), "a"), Err(JoinError::Expired { .. })));
        assert!(matches!(resume(dir.path(), "b"), Err(JoinError::Joined { .. })));
        assert!(may_rejoin(dir.path(), &CaHash::of(&authority).unwrap()).is_ok());
        let other = CertificateParams::default().self_signed(&key).unwrap().pem();
        let other = may_rejoin(dir.path(), &CaHash::of(&other).unwrap());
        assert!(matches!(other, Err(JoinError::Joined { .. })));
    }
}

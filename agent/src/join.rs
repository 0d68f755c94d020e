//! How a machine becomes a node: it finds the control plane, makes sure of it, asks for certificates of its own, and
//! renews them while it runs.
//!
//! ```text
//! --join URL --token id.secret --ca-hash sha256:…
//!   cluster-info, from whoever answers there ── authority has the hash? token has signed it?
//!   └─► request for a client certificate, as the token's bootstrapper ── approved, signed
//!       └─► join/client.pem, join/ca.crt, then join/kubeconfig: from here on it has joined
//!           └─► request for a serving certificate, as the node ── approved for the Node's addresses
//! both are renewed at 70 to 90 % of their time, with the certificate that there is
//! ```
//! The last file written makes the machine joined: one that dies before joins anew, one that dies after needs no
//! token. A key never leaves the machine; it is written with its certificate, in one file, or not at all, but for that
//! of the first request: as long as nobody has answered that, another try goes on with it.

mod client;
mod cluster;
mod files;
mod own_serving;
mod request;
mod rotate;
mod serving;
mod token;

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use kube::Client;
use rustls::server::ResolvesServerCert;
use tokio::sync::watch;

use client::Current;
use files::Files;
use request::Wanted;
use serving::Serving;

pub use cluster::Endpoint;
pub use own_serving::{RequestedServing, self_signed};
pub use token::{CaHash, Token};

/// How long approval and signature may take while somebody waits for the machine to join: the cluster's controllers
/// take milliseconds.
const PATIENCE: Duration = Duration::from_secs(60);

/// Why a machine cannot join, or cannot go on as the node that it is.
#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    /// The setting is not what it should be.
    #[error("{0}")]
    Setting(String),
    /// The control plane does not answer.
    #[error("cannot reach the control plane at {server}: {reason}")]
    Unreachable {
        /// Where.
        server: String,
        /// What was said.
        reason: String,
    },
    /// Whoever answers is not the cluster that the hash is of.
    #[error("{server} is not the cluster that is meant: its authority has the hash {found}, not {wanted}")]
    OtherAuthority {
        /// Where.
        server: String,
        /// The hash that was given.
        wanted: CaHash,
        /// The hash of what answered.
        found: CaHash,
    },
    /// The cluster has no such token.
    #[error(
        "the cluster does not know the token {id}: it is wrong, expired or deleted; `coracle token create` makes one"
    )]
    UnknownToken {
        /// Its public part.
        id: String,
    },
    /// The cluster has a token of this id with another secret.
    #[error("the secret of token {id} is wrong")]
    WrongSecret {
        /// Its public part.
        id: String,
    },
    /// What the cluster says of itself cannot be used.
    #[error("the cluster says nothing usable of itself: {0}")]
    ClusterInfo(String),
    /// The certificate was refused.
    #[error("the cluster gives no certificate for {user}: {reason}")]
    Refused {
        /// For whom.
        user: String,
        /// Why.
        reason: String,
    },
    /// Nobody decided about the certificate in time.
    #[error("nobody approved the certificate request {name} within {seconds} s")]
    Unanswered {
        /// The request.
        name: String,
        /// How long we waited.
        seconds: u64,
    },
    /// A key or certificate cannot be made or used.
    #[error("cannot make or use a certificate: {0}")]
    Certificate(String),
    /// A file cannot be read or written.
    #[error("cannot use {path}: {reason}")]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// Another machine is the node of this name.
    #[error(
        "node {node} is there already, and Ready: delete it, or give this machine another name by --node-name"
    )]
    NodeExists {
        /// The name.
        node: String,
    },
    /// The machine belongs to another cluster, or is another node of it.
    #[error("this machine has joined already, {found}, not {wanted}; `coracle down --purge` makes it leave")]
    Joined {
        /// What it is.
        found: String,
        /// What is asked.
        wanted: String,
    },
    /// Its certificate was not renewed in time.
    #[error(
        "the certificate of node {node} has expired at {at}: `coracle token create` where the control plane runs prints \
         the command to join again"
    )]
    Expired {
        /// Which node.
        node: String,
        /// When.
        at: String,
    },
}

/// A machine that has joined: its way to the API, and its certificates.
pub struct Membership {
    node: String,
    files: Files,
    current: Arc<Current>,
    serving: Arc<Serving>,
}

/// Joins a cluster as the node of this name, keeping all that is needed under `state_dir`; for a machine that has not
/// joined one ([`resume`]), or may come back ([`may_return`]).
///
/// # Errors
/// [`JoinError`]; nothing is left then but, in the cluster, a request that is removed by itself, and the key of one
/// that nobody has answered. What was there before is as it was.
pub async fn join(
    state_dir: &Path,
    node: &str,
    endpoint: &Endpoint,
    (token, hash): (&Token, &CaHash),
) -> Result<Membership, JoinError> {
    let authority = cluster::authority(endpoint, token, hash).await?;
    let bootstrap = client::with_token(endpoint, &authority, token).await?;
    if cluster::has_ready_node(&bootstrap, node).await.map_err(|error| error.at(endpoint))? {
        return Err(JoinError::NodeExists { node: node.to_owned() });
    }
    let wanted = Wanted::client(node);
    let files = Files::new(state_dir);
    let key = files.pending_key()?;
    let identity = match request::certificate(&bootstrap, &wanted, &key, PATIENCE).await {
        Ok(identity) => identity,
        Err(error) => {
            // One that nobody has answered yet is still there when this is tried again.
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
    tracing::info!(node, server = %endpoint, "joined");
    resume(state_dir, node)?.ok_or_else(|| JoinError::Certificate("what was just written is gone".to_owned()))
}

/// The membership of a machine that has joined before; nothing when it has not.
///
/// # Errors
/// [`JoinError`] when it has joined as another node, its certificate is over, or files cannot be used.
pub fn resume(state_dir: &Path, node: &str) -> Result<Option<Membership>, JoinError> {
    let files = Files::new(state_dir);
    let Some((endpoint, known)) = files.kubeconfig()? else { return Ok(None) };
    if known != node {
        let (found, wanted) = (format!("as node {known}"), format!("as {node}"));
        return Err(JoinError::Joined { found, wanted });
    }
    let identity = files.client()?;
    if identity.is_over(jiff::Timestamp::now()) {
        return Err(JoinError::Expired { node: node.to_owned(), at: identity.until().to_string() });
    }
    let current = Current::new(endpoint, files.authority()?, identity)?;
    let serving = Serving::new(files.serving().read()?)?;
    let node = node.to_owned();
    Ok(Some(Membership { node, files, current: Arc::new(current), serving: Arc::new(serving) }))
}

/// Whether a machine whose certificate is over ([`JoinError::Expired`]) may join anew over what it has: only in the
/// cluster that it was in, of which it has pods and volumes.
///
/// # Errors
/// [`JoinError::Joined`] when it was in another.
pub fn may_return(state_dir: &Path, hash: &CaHash) -> Result<(), JoinError> {
    Files::new(state_dir).is_of(hash)
}

// === impl Membership ===

impl Membership {
    /// Itself, if it is in the cluster whose authority has this hash.
    ///
    /// # Errors
    /// [`JoinError::Joined`] when it is in another.
    pub fn of(self, hash: &CaHash) -> Result<Self, JoinError> {
        self.files.is_of(hash).map(|()| self)
    }

    /// A client of the API as this node, which goes on when the certificate is renewed. Must be called within a tokio
    /// runtime.
    #[must_use]
    pub fn client(&self) -> Client {
        self.current.client()
    }

    /// The certificate of the node's own API, as of each handshake; there is none until the cluster gives it.
    #[must_use]
    pub fn serving(&self) -> Arc<dyn ResolvesServerCert> {
        self.serving.clone()
    }

    /// The file of the authority whose clients may call the node's API.
    #[must_use]
    pub fn client_ca(&self) -> PathBuf {
        self.files.authority_path()
    }

    /// Renews both certificates when they are due, for ever; the serving one is for the node's name and its addresses,
    /// as they change.
    pub async fn keep(&self, addresses: watch::Receiver<Vec<IpAddr>>) {
        let file = self.files.serving();
        tokio::join!(
            rotate::client(&self.current, &self.files, &self.node),
            rotate::serving(|| self.current.client(), &file, (&self.serving, &self.node), addresses),
        );
    }
}

impl std::fmt::Debug for Membership {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Keys are nobody's to print.
        f.debug_struct("Membership").field("node", &self.node).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, KeyPair, date_time_ymd};

    use super::*;
    use request::Identity;

    #[test]
    fn who_was_away_for_too_long_may_come_back_to_the_same_cluster_by_the_same_name() {
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
        assert!(may_return(dir.path(), &CaHash::of(&authority).unwrap()).is_ok());
        let other = CertificateParams::default().self_signed(&key).unwrap().pem();
        let other = may_return(dir.path(), &CaHash::of(&other).unwrap());
        assert!(matches!(other, Err(JoinError::Joined { .. })));
    }
}

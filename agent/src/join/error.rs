//! Errors of joining a cluster, and of renewing certificates.

use std::path::PathBuf;

/// The reason why a machine cannot join a cluster, or cannot continue as its node.
#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    /// A setting is invalid.
    #[error("{0}")]
    Setting(String),
    /// The control plane does not answer.
    #[error("cannot reach the control plane at {server}: {reason}")]
    Unreachable {
        /// URL of the API server.
        server: String,
        /// Cause.
        reason: String,
    },
    /// The authority of the server's cluster has another hash than the expected hash.
    #[error(
        "{server} is another cluster: its authority has the hash {found}, not {wanted}; check --join and --ca-hash"
    )]
    OtherAuthority {
        /// URL of the API server.
        server: String,
        /// The expected hash.
        wanted: String,
        /// The hash of the server's authority.
        found: String,
    },
    /// The cluster has no such token.
    #[error(
        "the cluster does not know the token {id}: it is wrong, expired or deleted; `coracle token create` makes one"
    )]
    UnknownToken {
        /// Public part of the token.
        id: String,
    },
    /// The cluster has a token with this id and another secret.
    #[error("the secret of token {id} is wrong")]
    WrongSecret {
        /// Public part of the token.
        id: String,
    },
    /// The config map `cluster-info` cannot be used.
    #[error("cannot use the cluster's config map cluster-info: {0}")]
    ClusterInfo(String),
    /// The certificate request was denied or failed.
    #[error("the cluster denied a certificate for {user}: {reason}")]
    Refused {
        /// User of the requested certificate.
        user: String,
        /// Reason that the cluster gave.
        reason: String,
    },
    /// The certificate request was not answered in time.
    #[error(
        "the certificate request {name} was not approved within {seconds} s: `kubectl certificate approve {name}` approves it"
    )]
    Unanswered {
        /// Name of the request.
        name: String,
        /// Limit in seconds.
        seconds: u64,
    },
    /// A key or certificate cannot be created or used.
    #[error("cannot make or use a certificate: {0}")]
    Certificate(String),
    /// A file cannot be read or written.
    #[error("cannot use {path}: {reason}")]
    File {
        /// The file.
        path: PathBuf,
        /// Cause.
        reason: String,
    },
    /// Another machine is the node of this name, and Ready.
    #[error(
        "node {node} exists already and is Ready: delete it, or give this machine another name by --node-name"
    )]
    NodeExists {
        /// Name of the node.
        node: String,
    },
    /// The machine has joined another cluster, or this cluster under another node name.
    #[error("this machine has already joined {found}, not {wanted}; `coracle down --purge` makes it leave")]
    Joined {
        /// The cluster or node that it has joined.
        found: String,
        /// The requested cluster or node.
        wanted: String,
    },
    /// The node's certificate was not renewed in time.
    #[error(
        "the certificate of node {node} has expired at {at}: `coracle token create` where the control plane runs prints \
         the command to join again"
    )]
    Expired {
        /// Name of the node.
        node: String,
        /// End of the certificate.
        at: String,
    },
}

//! Authenticated encryption of data at rest with the keys of a file.
//!
//! Start reading at [`Keys`], which encrypts Secrets and the checkpoint of a node without further configuration. The
//! crate `coracle-encryption` encrypts any resource, with the providers of kube-apiserver's `EncryptionConfiguration`.
//!
//! The cipher is AES-256-GCM with a random nonce. The caller's context, such as the object's key in the store, is the
//! associated data. So a sealed value cannot be moved to another object.
//!
//! A value that [`Keys`] seals is `k8s:enc:aesgcm:v1:`, the key's id, `:`, the nonce (12 bytes), the ciphertext and its
//! tag (16 bytes). The prefix and the order are the same as in the AES-GCM provider of kube-apiserver.
//!
//! Invariants:
//! - The first key of the file encrypts. Every key of the file decrypts.
//! - A key file that other users can read is refused.
//! - A key file that exists is never changed.

mod file;
mod keys;
pub mod private_file;

use std::path::PathBuf;

pub use keys::{Keys, is_sealed};

/// A failed operation on a key file or a sealed value.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The key file cannot be created.
    #[error("cannot create the key file {path}")]
    Create {
        /// The key file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// The key file cannot be read.
    #[error("cannot read the key file {path}")]
    Read {
        /// The key file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// The key file belongs to another user, other users have access to it, or it is not a regular file.
    #[error(
        "refused to use the key file {path}: mode {mode:04o}, owner {owner}; it must be a regular file with mode 0600 \
         that belongs to user {user}"
    )]
    Exposed {
        /// The key file.
        path: PathBuf,
        /// The permission bits of the file.
        mode: u32,
        /// The owner of the file.
        owner: u32,
        /// The user that this process runs as.
        user: u32,
    },
    /// A line of the key file is not a key.
    #[error("cannot read line {line} of the key file {path}: {detail}")]
    Malformed {
        /// The key file.
        path: PathBuf,
        /// Line number, from 1.
        line: usize,
        /// The defect.
        detail: &'static str,
    },
    /// The key file has no key.
    #[error("cannot use the key file {path}: it has no key")]
    Empty {
        /// The key file.
        path: PathBuf,
    },
    /// The value was sealed with a key that the key file does not have.
    #[error("cannot decrypt: the key \"{id}\" is not in the key file {path}; restore the file from a backup")]
    UnknownKey {
        /// The id in the sealed value.
        id: String,
        /// The key file.
        path: PathBuf,
    },
    /// The value does not start with the prefix of a sealed value.
    #[error("cannot decrypt: the value is not encrypted")]
    NotSealed,
    /// The value was changed, or was sealed with another context or key.
    #[error("cannot decrypt with the key \"{id}\": the value is damaged, or belongs to another object")]
    Damaged {
        /// The key's id.
        id: String,
    },
    /// The encryption configuration is invalid.
    #[error("cannot use the encryption configuration {path}: {reason}")]
    Configuration {
        /// The file.
        path: PathBuf,
        /// The invalid field.
        reason: String,
    },
    /// No provider of the encryption configuration has the prefix and the key of the value.
    #[error(
        "cannot decrypt: no provider of the encryption configuration has the key; add the former key to it"
    )]
    UnknownProvider,
    /// A key management service failed.
    #[error("the key management service {name:?} failed: {reason}")]
    Kms {
        /// The name of the service in the configuration.
        name: String,
        /// The cause.
        reason: String,
    },
    /// The cipher or the kernel's random numbers failed.
    #[error("cannot encrypt: the cipher failed")]
    Cipher,
}

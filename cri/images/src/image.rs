//! What this crate hands out: images, their configuration, sizes; and what it is given to pull them.

use std::collections::HashMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::SystemTime;

use oci_spec::image::ImageConfiguration;

/// An image that is completely on disk.
#[derive(Debug, Clone)]
pub struct Image {
    /// The digest of the image's configuration, `sha256:…`: what Kubernetes calls the image id.
    pub id: String,
    /// Normalised names with a tag, as `docker.io/library/nginx:latest`.
    pub tags: Vec<String>,
    /// Normalised names with a digest, as `docker.io/library/nginx@sha256:…`.
    pub digests: Vec<String>,
    /// Compressed size of configuration and layers, as registries count it.
    pub size: u64,
    /// The configuration document.
    pub config: Arc<ImageConfiguration>,
    /// Unpacked layers, topmost first: the order of overlayfs' `lowerdir`. Never empty, and never with one
    /// directory twice (overlayfs refuses that).
    pub layers: Vec<PathBuf>,
    /// Not to be collected as unused: a name of it is [pinned](crate::ImagesConfig::pinned).
    pub pinned: bool,
}

/// Credentials for a registry.
#[derive(Clone, PartialEq, Eq, Hash)]
pub enum Auth {
    /// User name and password; used for basic authentication and to get tokens.
    Basic {
        /// The user's name.
        username: String,
        /// The password, or an access token in its place.
        password: String,
    },
    /// A refresh token, exchanged for access tokens at the registry's token service.
    IdentityToken(String),
    /// A bearer token, sent to the registry as it is.
    RegistryToken(String),
}

/// Credentials, and whose they are.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Login {
    /// What is shown.
    pub auth: Auth,
    /// To whom: a host, with its port if it has one of its own, as it is or in a URL. When empty, the registry of the
    /// image's name. No other host is shown anything, mirrors of the registry included.
    pub address: String,
}

/// How far a pull is.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PullProgress {
    /// Compressed bytes that this image consists of; 0 until the manifest is known.
    pub bytes_total: u64,
    /// Compressed bytes of the layers that are here or arrived so far.
    pub bytes_done: u64,
    /// Layers of the image.
    pub layers_total: usize,
    /// Layers that are complete.
    pub layers_done: usize,
}

/// What of an image decides whether it may go, and what that would free.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Standing {
    /// When it was last pulled or imported.
    pub pulled: SystemTime,
    /// When it was last held, pulled or imported; after a restart up to an hour before that.
    pub used: SystemTime,
    /// Whether somebody holds it.
    pub held: bool,
    /// Bytes that each of its layers takes unpacked, in the order of [`Image::layers`].
    pub layer_bytes: Vec<u64>,
}

/// What the store takes of its file system.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Bytes that the unpacked layers take.
    pub bytes: u64,
    /// Inodes that the unpacked layers take.
    pub inodes: u64,
}

// === impl Image ===

impl Image {
    /// `USER` of the image, empty when it sets none.
    #[must_use]
    pub fn user(&self) -> &str {
        self.process().and_then(|c| c.user().as_deref()).unwrap_or_default()
    }

    /// Environment as `NAME=value`.
    #[must_use]
    pub fn env(&self) -> &[String] {
        self.process().and_then(|c| c.env().as_deref()).unwrap_or_default()
    }

    /// `ENTRYPOINT` of the image.
    #[must_use]
    pub fn entrypoint(&self) -> &[String] {
        self.process().and_then(|c| c.entrypoint().as_deref()).unwrap_or_default()
    }

    /// `CMD` of the image.
    #[must_use]
    pub fn cmd(&self) -> &[String] {
        self.process().and_then(|c| c.cmd().as_deref()).unwrap_or_default()
    }

    /// Working directory, empty when the image sets none.
    #[must_use]
    pub fn working_dir(&self) -> &str {
        self.process().and_then(|c| c.working_dir().as_deref()).unwrap_or_default()
    }

    /// The signal that stops the image's process, empty when the image sets none.
    #[must_use]
    pub fn stop_signal(&self) -> &str {
        self.process().and_then(|c| c.stop_signal().as_deref()).unwrap_or_default()
    }

    /// Paths that the image declares as volumes.
    #[must_use]
    pub fn volumes(&self) -> &[String] {
        self.process().and_then(|c| c.volumes().as_deref()).unwrap_or_default()
    }

    /// Labels of the image.
    #[must_use]
    pub fn labels(&self) -> Option<&HashMap<String, String>> {
        self.process().and_then(|c| c.labels().as_ref())
    }

    fn process(&self) -> Option<&oci_spec::image::Config> {
        self.config.config().as_ref()
    }
}

// === impl Login ===

impl From<Auth> for Login {
    fn from(auth: Auth) -> Login {
        Login { auth, address: String::new() }
    }
}

// === impl Auth ===

impl fmt::Debug for Auth {
    /// Never shows a secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Auth::Basic { username, .. } => write!(f, "Basic({username})"),
            Auth::IdentityToken(_) => f.write_str("IdentityToken"),
            Auth::RegistryToken(_) => f.write_str("RegistryToken"),
        }
    }
}

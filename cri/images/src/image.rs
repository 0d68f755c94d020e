//! Public data types: images, their configuration and sizes; credentials and progress of a pull.

use std::collections::HashMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::SystemTime;

use oci_spec::image::ImageConfiguration;

/// An image that is complete on disk.
#[derive(Debug, Clone)]
pub struct Image {
    /// The digest of the image's configuration, `sha256:…`; Kubernetes calls it the image id.
    pub id: String,
    /// Normalised names with a tag, such as `docker.io/library/nginx:latest`.
    pub tags: Vec<String>,
    /// Normalised names with a digest, such as `docker.io/library/nginx@sha256:…`.
    pub digests: Vec<String>,
    /// Compressed bytes of configuration and layers, as registries report them.
    pub size: u64,
    /// The configuration document.
    pub config: Arc<ImageConfiguration>,
    /// Directories of the unpacked layers, topmost first: the order of overlayfs' `lowerdir`. Never empty,
    /// and without duplicates, which overlayfs refuses.
    pub layers: Vec<PathBuf>,
    /// Whether one of its names is [pinned](crate::ImagesConfig::pinned). Garbage collection keeps pinned images.
    pub pinned: bool,
}

/// Credentials for a registry.
#[derive(Clone, PartialEq, Eq, Hash)]
pub enum Auth {
    /// User name and password; used for basic authentication and to get tokens.
    Basic {
        /// The user's name.
        username: String,
        /// The password, or an access token instead.
        password: String,
    },
    /// A refresh token, exchanged for access tokens at the registry's token service.
    IdentityToken(String),
    /// A bearer token, sent to the registry unchanged.
    RegistryToken(String),
}

/// Credentials and the host that they are for.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Login {
    /// The credentials.
    pub auth: Auth,
    /// A host or a URL with the host, and with a port unless it is the default port. If the address is empty, the
    /// credentials are for the registry in the image's name. No other host gets the credentials, not even a mirror of
    /// the registry.
    pub address: String,
}

/// Callback for the progress of a pull, an import or an export. Called from the task that awaits the pull, or from the
/// threads that read the layers.
pub type ProgressFn = Arc<dyn Fn(&PullProgress) + Send + Sync>;

/// Progress of a pull, an import or an export.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PullProgress {
    /// Compressed bytes of the image, or bytes of the layers in the archive; 0 until the manifest is known.
    pub bytes_total: u64,
    /// The part of `bytes_total` that is present, or that has arrived or been copied.
    pub bytes_done: u64,
    /// Number of the image's layers.
    pub layers_total: usize,
    /// Number of complete layers.
    pub layers_done: usize,
}

/// Age, use and size of an image, for garbage collection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageGcInfo {
    /// Time of the last pull or import.
    pub pulled: SystemTime,
    /// Time of the last use: held, pulled or imported. After a restart the time may be up to an hour too early, because
    /// it is written at most once an hour.
    pub used: SystemTime,
    /// Whether a [`ImageHold`](crate::ImageHold) exists.
    pub held: bool,
    /// Unpacked bytes of each of its layers, in the order of [`Image::layers`].
    pub layer_bytes: Vec<u64>,
}

/// Disk usage of the store.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Bytes of the unpacked layers.
    pub bytes: u64,
    /// Inodes of the unpacked layers.
    pub inodes: u64,
}

// === impl Image ===

impl Image {
    /// `USER` of the image. Empty if the image sets no user.
    #[must_use]
    pub fn user(&self) -> &str {
        self.process().and_then(|c| c.user().as_deref()).unwrap_or_default()
    }

    /// Environment, as `NAME=value`.
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

    /// Working directory. Empty if the image sets no directory.
    #[must_use]
    pub fn working_dir(&self) -> &str {
        self.process().and_then(|c| c.working_dir().as_deref()).unwrap_or_default()
    }

    /// The signal that stops the container. Empty if the image sets no signal.
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
    /// The output leaves out the secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Auth::Basic { username, .. } => write!(f, "Basic({username})"),
            Auth::IdentityToken(_) => f.write_str("IdentityToken"),
            Auth::RegistryToken(_) => f.write_str("RegistryToken"),
        }
    }
}

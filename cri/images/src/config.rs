//! Where images are kept, for which machine, and what they may cost.

use std::path::PathBuf;
use std::time::Duration;

use crate::pin::PinPattern;

/// Where and how images are kept.
#[derive(Debug, Clone)]
pub struct ImagesConfig {
    /// The state directory; this crate owns `images/` in it.
    pub root: PathBuf,
    /// Mirrors in containerd's layout: `<dir>/<host[:port]>/hosts.toml`.
    pub registry_config_dir: Option<PathBuf>,
    /// Images that are not to be collected as unused.
    pub pinned: Vec<PinPattern>,
    /// Which platform's images to choose from an index.
    pub platform: Platform,
    /// What a layer may cost.
    pub limits: Limits,
    /// A registry that sends no byte for so long is given up (and tried again from where it stopped).
    pub stall_timeout: Duration,
    /// A registry of which next to nothing comes in all this time, whatever it does instead, is given up for good. Only
    /// the time counts in which something is waited for.
    pub progress_timeout: Duration,
    /// Layers of at least so many compressed bytes are taken up where they broke off also by a later pull, for which
    /// what arrives is kept on disk until the layer is complete.
    pub resume_from: u64,
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

// === impl ImagesConfig ===

impl ImagesConfig {
    /// The defaults for a state directory: this host's platform, no mirrors.
    #[must_use]
    pub fn new(root: impl Into<PathBuf>) -> ImagesConfig {
        ImagesConfig {
            root: root.into(),
            registry_config_dir: None,
            pinned: Vec::new(),
            platform: Platform::host(),
            limits: Limits::default(),
            stall_timeout: Duration::from_secs(30),
            // As containerd's image_pull_progress_timeout.
            progress_timeout: Duration::from_secs(300),
            resume_from: 4 << 20,
            parallel_layers: 3,
        }
    }
}

// === impl Limits ===

impl Default for Limits {
    fn default() -> Limits {
        // Disks for virtual machines are images too, and mostly zeros.
        Limits { layer_bytes: 64 << 30, layer_entries: 4_000_000, ratio: 250, ratio_from: 16 << 30 }
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

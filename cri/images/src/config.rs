//! Configuration of the image store.

use std::path::PathBuf;
use std::time::Duration;

use crate::pin::PinPattern;

/// Configuration of the image store. Users can set the public fields. The others are constants that only tests change.
#[derive(Debug, Clone)]
pub struct ImagesConfig {
    /// The state directory. This crate owns `images/` in it.
    pub root: PathBuf,
    /// Directory of registry settings in containerd's layout: `<dir>/<host[:port]>/hosts.toml`.
    pub registry_config_dir: Option<PathBuf>,
    /// Images that are never collected as unused.
    pub pinned: Vec<PinPattern>,
    /// Platform to select from an index.
    pub(crate) platform: Platform,
    /// Limits of unpacked layers.
    pub limits: Limits,
    /// Timeout for the next byte from a registry. After the timeout, the fetch of a blob resumes after the last
    /// received byte, and a manifest is requested from the next host.
    pub(crate) stall_timeout: Duration,
    /// Timeout for progress. A pull fails if a registry sends almost no data for this long, even in many responses.
    /// Only time spent waiting for the registry counts.
    pub progress_timeout: Duration,
    /// Time after which the fetch of a layer gives its slot to another owner's fetch, if that owner fetches fewer
    /// layers.
    pub(crate) fetch_time_slice: Duration,
    /// Minimum compressed size in bytes of a layer whose fetch a later pull can resume. The data of such a layer is
    /// kept on disk until the layer is complete.
    pub(crate) resume_from: u64,
    /// Maximum number of layers that one pull fetches at a time.
    pub parallel_layers: usize,
}

/// Operating system and processor, in Go's names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Platform {
    /// Operating system, such as `linux`.
    pub(crate) os: String,
    /// Processor architecture, such as `amd64`.
    pub(crate) architecture: String,
    /// Variant of the architecture, such as `v7` for 32-bit ARM. Empty if the architecture has no variants.
    pub(crate) variant: String,
}

/// Limits of an unpacked layer, against decompression bombs. Users can set the public fields.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Maximum bytes of one unpacked layer.
    pub layer_bytes: u64,
    /// Maximum number of entries (files, directories, links, devices) of one layer.
    pub layer_entries: u64,
    /// Maximum unpacked bytes per compressed byte. Applies from [`Limits::ratio_from`] on.
    pub(crate) ratio: u64,
    /// Unpacked bytes up to which the ratio is not checked.
    pub(crate) ratio_from: u64,
    /// Binary logarithm of the largest zstd window in bytes, which the decoder keeps in memory.
    pub(crate) zstd_window_log: u32,
}

// === impl ImagesConfig ===

impl ImagesConfig {
    /// Default values for a state directory: this host's platform, no mirrors.
    #[must_use]
    pub fn new(root: impl Into<PathBuf>) -> ImagesConfig {
        ImagesConfig {
            root: root.into(),
            registry_config_dir: None,
            pinned: Vec::new(),
            platform: Platform::host(),
            limits: Limits::default(),
            stall_timeout: Duration::from_secs(30),
            // containerd's default of image_pull_progress_timeout.
            progress_timeout: Duration::from_secs(300),
            fetch_time_slice: Duration::from_secs(30),
            resume_from: 4 << 20,
            parallel_layers: 3,
        }
    }
}

// === impl Limits ===

impl Default for Limits {
    fn default() -> Limits {
        // Virtual machine disks in images consist mostly of zeros, so large ratios are legitimate.
        Limits {
            layer_bytes: 64 << 30,
            layer_entries: 4_000_000,
            ratio: 250,
            ratio_from: 16 << 30,
            // `zstd --long`
            zstd_window_log: 27,
        }
    }
}

// === impl Platform ===

impl Platform {
    /// The platform that this binary was built for.
    pub(crate) fn host() -> Platform {
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

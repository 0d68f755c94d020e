//! How many descriptors the node may have open: some for each pod, so that the usual soft limit of 1024 is that of some
//! three hundred pods. Pods themselves keep that limit: programs that use select(2), or close every descriptor that they
//! may have, count on it.

use std::sync::OnceLock;

use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// The soft limit that this process began with.
static BEFORE: OnceLock<u64> = OnceLock::new();

/// Lets this process have as many descriptors open as it may ask for. Its pods begin with what it had until now.
///
/// # Errors
/// When the kernel refuses.
pub fn raise_open_files() -> std::io::Result<()> {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?;
    BEFORE.get_or_init(|| soft);
    Ok(())
}

/// The soft limit of pods; 0 when it is our own.
pub(crate) fn of_pods() -> u64 {
    BEFORE.get().copied().unwrap_or_default()
}

//! Mounts an overlay with mount(2), for kernels whose overlayfs does not support `lowerdir+`.
//!
//! All options are one string of at most a page. Layers are named relative to their common directory, so the number of
//! layers that fit does not depend on the length of the state directory's path.

use std::io;
use std::path::{Component, Path, PathBuf};

use coracle_proto::shim::Overlay;
use nix::mount::MsFlags;

use crate::selinux;

/// Maximum bytes of options on every architecture, including the terminating NUL.
const PAGE: usize = 4096;
/// Avoids a flush of the upper file system at every unmount; since Linux 5.10.
const VOLATILE: &str = ",volatile";

/// Mounts the overlay at `target`. The caller must be single-threaded, because the function changes the working
/// directory until it returns.
pub(super) fn mount(overlay: &Overlay, target: &Path, label: Option<&str>) -> io::Result<()> {
    let here = std::fs::File::open(".")?;
    let base = common(overlay);
    nix::unistd::chdir(&base)?;
    let mounted = mount_from(&base, overlay, target, label);
    nix::unistd::fchdir(&here)?;
    mounted
}

fn mount_from(base: &Path, overlay: &Overlay, target: &Path, label: Option<&str>) -> io::Result<()> {
    let flags = if overlay.upper.is_empty() { MsFlags::MS_RDONLY } else { MsFlags::empty() };
    let overlayfs = Some("overlay");
    let options = selinux::with_context(&options(base, overlay), label);
    // The kernel would silently use only the first page, and the root file system would lack layers.
    if options.len() + VOLATILE.len() >= PAGE {
        return Err(io::Error::from_raw_os_error(libc::E2BIG));
    }
    if !overlay.upper.is_empty() {
        let fast = format!("{options}{VOLATILE}");
        match nix::mount::mount(overlayfs, target, overlayfs, flags, Some(fast.as_str())) {
            Err(nix::Error::EINVAL) => {}
            result => return Ok(result?),
        }
    }
    Ok(nix::mount::mount(overlayfs, target, overlayfs, flags, Some(options.as_str()))?)
}

/// The options of mount(2), with paths relative to `base`.
fn options(base: &Path, overlay: &Overlay) -> String {
    let name = |path: &str| {
        let path = Path::new(path);
        escape(&path.strip_prefix(base).unwrap_or(path).to_string_lossy())
    };
    let lower: Vec<String> = overlay.lower.iter().map(|layer| name(layer).replace(':', "\\:")).collect();
    let mut options = format!("lowerdir={}", lower.join(":"));
    if !overlay.upper.is_empty() {
        let (upper, work) = (name(&overlay.upper), name(&overlay.work));
        options.push_str(&format!(",upperdir={upper},workdir={work}"));
    }
    options
}

/// Escapes a path for the options, which commas separate.
fn escape(path: &str) -> String {
    path.replace('\\', "\\\\").replace(',', "\\,")
}

/// The deepest directory that contains all paths of an overlay.
fn common(overlay: &Overlay) -> PathBuf {
    let paths = overlay.lower.iter().chain([&overlay.upper, &overlay.work]).filter(|path| !path.is_empty());
    let mut parents = paths.filter_map(|path| Path::new(path).parent());
    let mut common: Vec<Component<'_>> =
        parents.next().map(|first| first.components().collect()).unwrap_or_default();
    for parent in parents {
        let same = common.iter().zip(parent.components()).take_while(|(one, other)| **one == *other).count();
        common.truncate(same);
    }
    common.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn overlay(lower: &[&str], upper: &str) -> Overlay {
        Overlay {
            lower: lower.iter().map(|&layer| layer.to_owned()).collect(),
            upper: upper.to_owned(),
            work: if upper.is_empty() { String::new() } else { format!("{upper}-work") },
            ..Overlay::default()
        }
    }

    #[test]
    fn paths_are_relative_to_their_common_directory() {
        let overlay = overlay(&["/state/layers/a/fs", "/state/layers/b/fs"], "/state/pods/p/upper");
        assert_eq!(common(&overlay), Path::new("/state"));
        assert_eq!(
            options(&common(&overlay), &overlay),
            "lowerdir=layers/a/fs:layers/b/fs,upperdir=pods/p/upper,workdir=pods/p/upper-work"
        );
    }

    #[test]
    fn options_longer_than_a_page_are_refused() {
        let layers: Vec<String> = (0..200).map(|layer| format!("/state/layers/{layer:016}/fs")).collect();
        let layers: Vec<&str> = layers.iter().map(String::as_str).collect();
        let refused =
            mount_from(Path::new("/state"), &overlay(&layers, "/state/upper"), Path::new("/absent"), None);
        assert_eq!(refused.unwrap_err().raw_os_error(), Some(libc::E2BIG));
    }

    #[test]
    fn separators_of_options_and_layers_are_escaped() {
        let overlay = overlay(&["/state/a:b,c", "/state/d"], "");
        assert_eq!(options(&common(&overlay), &overlay), "lowerdir=a\\:b\\,c:d");
    }
}

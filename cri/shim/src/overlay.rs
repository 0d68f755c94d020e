//! A container's root: image layers below, its own directory on top.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use coracle_proto::shim::Overlay;
use nix::mount::{MntFlags, MsFlags, mount, umount2};

use crate::kernel;

mod classic;

/// The step of mounting that failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum OverlayError {
    #[error("make the mount point {}", .path.display())]
    Target { path: PathBuf, source: io::Error },
    #[error("bind {} at {}", .layer.display(), .target.display())]
    Bind { layer: PathBuf, target: PathBuf, source: nix::Error },
    #[error("configure an overlay of {layers} layers")]
    Configure { layers: usize, source: io::Error },
    #[error("attach the overlay at {}", .target.display())]
    Attach { target: PathBuf, source: io::Error },
}

/// Mounts it at its target, in the caller's mount namespace; all files have the SELinux label, if there is one.
pub(crate) fn mount_at_target(overlay: &Overlay, label: Option<&str>) -> Result<(), OverlayError> {
    let target = Path::new(&overlay.target);
    std::fs::create_dir_all(target)
        .map_err(|source| OverlayError::Target { path: target.to_owned(), source })?;
    match (overlay.lower.as_slice(), label) {
        // One layer and nothing above: overlayfs wants two, and a bind is enough.
        ([layer], None) if overlay.upper.is_empty() => bind_read_only(Path::new(layer), target),
        // But a bind takes no label. The second layer is the mount point, which is empty.
        ([layer], Some(_)) if overlay.upper.is_empty() => {
            let lower = vec![layer.clone(), overlay.target.clone()];
            mount_at_target(&Overlay { lower, ..overlay.clone() }, label)
        }
        (layers, _) => match configure(layers, overlay, label) {
            Ok(mounted) => kernel::attach_mount(&mounted, target)
                .map_err(|source| OverlayError::Attach { target: target.to_owned(), source }),
            // An overlayfs older than Linux 6.7 does not know `lowerdir+`, and says so only at the end.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                classic::mount(overlay, target, label)
                    .map_err(|source| OverlayError::Configure { layers: layers.len(), source })
            }
            Err(source) => Err(OverlayError::Configure { layers: layers.len(), source }),
        },
    }
}

/// The new mount API takes one layer a call, so that no number of layers is too long; the string
/// of mount(2) ends at a page.
fn configure(layers: &[String], overlay: &Overlay, label: Option<&str>) -> io::Result<OwnedFd> {
    let fs = kernel::fs_open(c"overlay")?;
    add_layers(&fs, layers)?;
    if !overlay.upper.is_empty() {
        kernel::fs_set(&fs, c"upperdir", Path::new(&overlay.upper))?;
        kernel::fs_set(&fs, c"workdir", Path::new(&overlay.work))?;
        // Without it every unmount writes the whole upper file system's dirty pages to the disk.
        // Nothing is lost: a container's own layer ends with the container, and so with the boot.
        // A kernel before 5.10 does not know it and is merely slow.
        let _ = kernel::fs_set_flag(&fs, c"volatile");
    }
    kernel::fs_label(&fs, label)?;
    kernel::fs_create(&fs)?;
    // A root that is read-only for its container stays writable here: mount points are still to be
    // made in it. The container library makes it read-only by the spec's `root.readonly`.
    kernel::fs_mount(&fs, overlay.upper.is_empty())
}

fn add_layers(fs: &OwnedFd, layers: &[String]) -> io::Result<()> {
    layers.iter().try_for_each(|layer| kernel::fs_set(fs, c"lowerdir+", Path::new(layer)))
}

fn bind_read_only(layer: &Path, target: &Path) -> Result<(), OverlayError> {
    let none = None::<&str>;
    let failed = |source| OverlayError::Bind { layer: layer.to_owned(), target: target.to_owned(), source };
    mount(Some(layer), target, none, MsFlags::MS_BIND, none).map_err(failed)?;
    let flags = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
    mount(none, target, none, flags, none).map_err(failed)
}

/// Takes the mount away at once; what still uses it keeps it until it ends. Absent is unmounted.
pub(crate) fn unmount(target: &Path) -> nix::Result<()> {
    loop {
        match umount2(target, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW) {
            // There may be one above another.
            Ok(()) => {}
            Err(nix::Error::EINVAL | nix::Error::ENOENT) => return Ok(()),
            Err(error) => return Err(error),
        }
    }
}

//! A container's root file system: image layers, and the container's own directory on top.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use coracle_proto::shim::Overlay;
use nix::mount::{MntFlags, MsFlags, mount, umount2};

use crate::kernel;

mod classic;

/// The failed step of a mount.
#[derive(Debug, thiserror::Error)]
pub(crate) enum OverlayError {
    #[error("cannot make the mount point {}", .path.display())]
    Target { path: PathBuf, source: io::Error },
    #[error("cannot bind {} at {}", .layer.display(), .target.display())]
    Bind { layer: PathBuf, target: PathBuf, source: nix::Error },
    #[error("cannot configure an overlay of {layers} layers")]
    Configure { layers: usize, source: io::Error },
    #[error("cannot attach the overlay at {}", .target.display())]
    Attach { target: PathBuf, source: io::Error },
}

/// Mounts the overlay at its target, in the caller's mount namespace. `label` is the SELinux label of all
/// files.
pub(crate) fn mount_at_target(overlay: &Overlay, label: Option<&str>) -> Result<(), OverlayError> {
    let target = Path::new(&overlay.target);
    std::fs::create_dir_all(target)
        .map_err(|source| OverlayError::Target { path: target.to_owned(), source })?;
    match (overlay.lower.as_slice(), label) {
        // overlayfs needs two layers. One layer without an upper directory is bind-mounted.
        ([layer], None) if overlay.upper.is_empty() => bind_read_only(Path::new(layer), target),
        // A bind mount takes no label. The empty mount point serves as the second layer.
        ([layer], Some(_)) if overlay.upper.is_empty() => {
            let lower = vec![layer.clone(), overlay.target.clone()];
            mount_at_target(&Overlay { lower, ..overlay.clone() }, label)
        }
        (layers, _) => match configure(layers, overlay, label) {
            Ok(mounted) => kernel::attach_mount(&mounted, target)
                .map_err(|source| OverlayError::Attach { target: target.to_owned(), source }),
            // overlayfs before Linux 6.7 does not support `lowerdir+`, and reports this only at the end of the
            // configuration.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                classic::mount(overlay, target, label)
                    .map_err(|source| OverlayError::Configure { layers: layers.len(), source })
            }
            Err(source) => Err(OverlayError::Configure { layers: layers.len(), source }),
        },
    }
}

/// Configures the overlay through the new mount API, with one call per layer. So the number of layers is not
/// limited by the options string of mount(2), which has one page.
fn configure(layers: &[String], overlay: &Overlay, label: Option<&str>) -> io::Result<OwnedFd> {
    let fs = kernel::fs_open(c"overlay")?;
    add_layers(&fs, layers)?;
    if !overlay.upper.is_empty() {
        kernel::fs_set(&fs, c"upperdir", Path::new(&overlay.upper))?;
        kernel::fs_set(&fs, c"workdir", Path::new(&overlay.work))?;
        // Without `volatile` every unmount flushes the upper file system to the disk. `volatile` is safe, because a
        // container's own layer is not used after a reboot. Kernels before 5.10 do not support `volatile` and are only
        // slower.
        let _ = kernel::fs_set_flag(&fs, c"volatile");
    }
    kernel::fs_label(&fs, label)?;
    kernel::fs_create(&fs)?;
    // The mount stays writable even for a container with a read-only root: mount points are still made in it.
    // The spec's `root.readonly` makes it read-only later.
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

/// Detaches all mounts at the target (MNT_DETACH). Open files in these mounts stay usable. An absent mount is a
/// success.
pub(crate) fn unmount(target: &Path) -> nix::Result<()> {
    loop {
        match umount2(target, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW) {
            // Several mounts may be stacked.
            Ok(()) => {}
            Err(nix::Error::EINVAL | nix::Error::ENOENT) => return Ok(()),
            Err(error) => return Err(error),
        }
    }
}

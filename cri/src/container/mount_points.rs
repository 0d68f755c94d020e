//! The mount points that most containers need, as layers below the layers of their images.
//!
//! Most images have no `/etc/hosts`. Without these layers each container's own layer would get the file and a copy of
//! its `/etc` directory. These files would be created at every start and removed at every end. This is slow on a file
//! system with recent removals: ext4 skips the entries removed in the last seconds one by one.
//!
//! Most pods have a token at `/var/run/secrets/kubernetes.io/serviceaccount`. In most images `/var/run` is a link to
//! `/run`. So one layer has the token's mount point below `/run`, another below `/var/run`. A container with a token
//! gets one of these layers.

use std::fs::{self, OpenOptions, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use oci_spec::runtime::Mount;

use crate::error::Error;

/// Directories of the layers, parents before children.
const DIRECTORIES: [&str; 5] = ["", "dev", "etc", "proc", "sys"];
const FILES: [&str; 3] = ["etc/hostname", "etc/hosts", "etc/resolv.conf"];

/// Path at which the service account token is mounted in containers.
const TOKEN: &str = "/var/run/secrets/kubernetes.io/serviceaccount";
const BELOW_RUN: [&str; 5] =
    ["", "run", "run/secrets", "run/secrets/kubernetes.io", "run/secrets/kubernetes.io/serviceaccount"];
const BELOW_VAR_RUN: [&str; 6] = [
    "",
    "var",
    "var/run",
    "var/run/secrets",
    "var/run/secrets/kubernetes.io",
    "var/run/secrets/kubernetes.io/serviceaccount",
];

/// The layers for a container with these mounts. `root` is the runtime's root directory, `run_link` the target of the link
/// `/var/run` of the container's image.
///
/// A mount point that is not in these layers is made in the container's own layer.
pub(crate) fn layers(root: &Path, run_link: Option<&str>, mounts: &[Mount]) -> Vec<PathBuf> {
    let has_token = mounts.iter().any(|mount| mount.destination() == Path::new(TOKEN));
    let token = has_token.then(|| token_layer(root, run_link)).flatten();
    token.into_iter().chain([layer(root)]).collect()
}

/// The layer with the mount point of a token. `None` if `/var/run` is a link to another directory than `/run`.
fn token_layer(root: &Path, run_link: Option<&str>) -> Option<PathBuf> {
    match run_link {
        None => Some(below_var_run(root)),
        Some("/run" | "../run") => Some(below_run(root)),
        Some(_) => None,
    }
}

fn layer(root: &Path) -> PathBuf {
    root.join("mount-points")
}

fn below_run(root: &Path) -> PathBuf {
    root.join("mount-points-token/run")
}

fn below_var_run(root: &Path) -> PathBuf {
    root.join("mount-points-token/var-run")
}

/// Creates the missing parts of the layers.
pub(crate) fn make(root: &Path) -> Result<(), Error> {
    let layer = layer(root);
    let token = BELOW_RUN.map(|name| below_run(root).join(name)).into_iter();
    let token = token.chain(BELOW_VAR_RUN.map(|name| below_var_run(root).join(name)));
    for path in DIRECTORIES.map(|name| layer.join(name)).into_iter().chain(token) {
        fs::create_dir_all(&path).map_err(Error::file("create directory", &path))?;
        set_mode(&path, 0o755)?;
    }
    for path in FILES.map(|name| layer.join(name)) {
        let made = OpenOptions::new().create(true).truncate(false).write(true).open(&path);
        made.map_err(Error::file("create", &path))?;
        set_mode(&path, 0o644)?;
    }
    Ok(())
}

/// Sets the mode independent of the umask, because containers see these files as their own.
fn set_mode(path: &Path, mode: u32) -> Result<(), Error> {
    fs::set_permissions(path, Permissions::from_mode(mode)).map_err(Error::file("set the mode of", path))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::user;

    #[test]
    fn the_mount_point_of_a_token_is_in_the_target_directory_of_var_run() {
        let root = tempfile::tempdir().expect("directory");
        let root = root.path();
        make(root).expect("layers");
        let mount =
            |at: &str| oci_spec::runtime::MountBuilder::default().destination(at).build().expect("mount");
        let image = |name: &str, target: Option<&str>| {
            let layer = root.join(name);
            fs::create_dir_all(layer.join("var")).expect("directory");
            if let Some(target) = target {
                std::os::unix::fs::symlink(target, layer.join("var/run")).expect("link");
            }
            layer
        };
        let plain = image("plain", None);
        let found = |image: &[PathBuf]| {
            let run_link = user::link_target(image, "var/run").expect("searched");
            layers(root, run_link.as_deref(), &[mount("/data"), mount(TOKEN)])
        };
        assert_eq!(found(std::slice::from_ref(&plain)), [below_var_run(root), layer(root)]);
        for (name, target) in [("absolute", "/run"), ("relative", "../run")] {
            let linked = image(name, Some(target));
            assert_eq!(found(&[plain.clone(), linked]), [below_run(root), layer(root)]);
        }
        assert_eq!(found(&[image("other", Some("/tmp"))]), [layer(root)]);
        assert_eq!(layers(root, None, &[mount("/data")]), [layer(root)]);
        assert!(below_var_run(root).join(TOKEN.trim_start_matches('/')).is_dir());
        assert!(below_run(root).join("run/secrets/kubernetes.io/serviceaccount").is_dir());
    }

    #[test]
    fn missing_parts_of_the_layer_are_created_again() {
        let root = tempfile::tempdir().expect("directory");
        make(root.path()).expect("layer");
        let hosts = layer(root.path()).join("etc/hosts");
        assert_eq!(fs::metadata(&hosts).expect("file").permissions().mode() & 0o777, 0o644);
        fs::remove_file(&hosts).expect("remove");
        make(root.path()).expect("layer");
        assert!(hosts.is_file() && layer(root.path()).join("proc").is_dir());
    }
}

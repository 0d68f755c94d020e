//! NFS exports, mounted by the kernel's own client: no `mount.nfs` is needed for version 4.
//!
//! A server that does not answer blocks a mount in the kernel. Each mount has its own process, which is killed after a
//! timeout. So such a server delays only the pods that use it.

mod process;

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nix::mount::{MntFlags, MsFlags, umount2};
use tokio::sync::oneshot;

use super::error::SetUpError;
use super::mounts;
use crate::resolver;

pub use process::{COMMAND as MOUNT_COMMAND, main as mount_main};

pub(super) const PLUGIN: &str = "kubernetes.io~nfs";
/// Maximum time of one attempt.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Versions that are tried in this order, unless the options name a version.
const VERSIONS: [&str; 3] = ["4.2", "4.1", "4.0"];

/// Mount points with an attempt in progress.
static IN_PROGRESS: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

/// An export of a server.
#[derive(Clone, Debug)]
pub(super) struct Export {
    pub(super) server: String,
    pub(super) path: String,
    pub(super) read_only: bool,
    pub(super) options: Vec<String>,
}

/// Arguments of the mount call.
#[derive(Debug, PartialEq, Eq)]
struct Arguments {
    source: String,
    flags: MsFlags,
    /// Options for each version to try.
    options: Vec<String>,
}

/// Mounts an export for a pod of the namespace, unless it is mounted already.
pub(super) async fn mount(namespace: &str, export: &Export, at: &Path) -> Result<(), SetUpError> {
    let failed = |why: String| SetUpError::Nfs { export: source_of(export), reason: why };
    super::make_parent(at).map_err(SetUpError::io("create the directory", at))?;
    let attempt = Attempt::begin(at).map_err(failed)?;
    if attempt.is_mounted().map_err(SetUpError::io("read the mounts of", at))? {
        return Ok(());
    }
    std::fs::create_dir_all(at).map_err(SetUpError::io("create the directory", at))?;
    let address = tokio::time::timeout(TIMEOUT, resolve(namespace, &export.server)).await;
    let address =
        address.map_err(|_elapsed| failed("the server's name was not resolved in time".to_owned()))?;
    let arguments = arguments(export, address.map_err(failed)?).map_err(failed)?;
    let (done, result) = oneshot::channel();
    start(&arguments, attempt, done).map_err(failed)?;
    result.await.unwrap_or_else(|_dropped| Err("the mount was interrupted".to_owned())).map_err(failed)
}

fn source_of(export: &Export) -> String {
    if export.server.contains(':') && !export.server.starts_with('[') {
        format!("[{}]:{}", export.server, export.path)
    } else {
        format!("{}:{}", export.server, export.path)
    }
}

/// The first address of a server that a pod of the namespace uses.
async fn resolve(namespace: &str, server: &str) -> Result<IpAddr, String> {
    let server = server.trim_start_matches('[').trim_end_matches(']');
    let found = resolver::resolve(namespace, server, 2049).await.map_err(|error| error.to_string())?;
    let first = found.first().map(SocketAddr::ip);
    first.ok_or_else(|| "the server's name has no address".to_owned())
}

/// Starts the process that mounts.
fn start(
    arguments: &Arguments,
    attempt: Attempt,
    mut done: oneshot::Sender<Result<(), String>>,
) -> Result<(), String> {
    let mut child = process::command(arguments, &attempt.at).spawn().map_err(|error| error.to_string())?;
    coracle_threads::spawn(async move {
        let must_unmount = match process::wait(&mut child, TIMEOUT, &mut done).await {
            Some(ended) => {
                let result = process::outcome(ended);
                let is_mounted = result.is_ok();
                done.send(result).is_err() && is_mounted
            }
            None => {
                let why = format!("the server did not answer in {} seconds", TIMEOUT.as_secs());
                let _receiver_gone = done.send(Err(why));
                // Waits until the kernel has ended the mount, which may have succeeded.
                let _ended = child.kill().await;
                true
            }
        };
        if must_unmount {
            // The pod may be gone, or its attempt has failed. Its next attempt mounts again.
            let unmount = move || umount2(&attempt.at, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW);
            let _not_mounted = coracle_threads::spawn_blocking(unmount).await;
        }
    });
    Ok(())
}

/// An attempt in progress: no other attempt begins at the mount point before this value is dropped.
struct Attempt {
    at: PathBuf,
}

impl Attempt {
    fn begin(at: &Path) -> Result<Self, String> {
        let is_first = in_progress().insert(at.to_owned());
        let refused = || "the server has not answered an earlier attempt yet".to_owned();
        if is_first { Ok(Self { at: at.to_owned() }) } else { Err(refused()) }
    }

    /// Whether the export is mounted. Only the current attempt may check this: an earlier attempt may still unmount its
    /// mount, and the pod would then write to the disk of the node.
    fn is_mounted(&self) -> std::io::Result<bool> {
        mounts::is_mount_point(&self.at)
    }
}

impl Drop for Attempt {
    fn drop(&mut self) {
        in_progress().remove(&self.at);
    }
}

fn in_progress() -> MutexGuard<'static, BTreeSet<PathBuf>> {
    IN_PROGRESS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The arguments of the mount call. Options that a mount program would handle are refused.
fn arguments(export: &Export, address: IpAddr) -> Result<Arguments, String> {
    let mut flags = MsFlags::empty();
    flags.set(MsFlags::MS_RDONLY, export.read_only);
    let mut rest: Vec<&str> = Vec::new();
    let mut version = None;
    for option in export.options.iter().flat_map(|list| list.split(',')).filter(|option| !option.is_empty()) {
        match option.split_once('=') {
            Some(("vers" | "nfsvers", named)) => version = Some(named),
            Some(("addr" | "clientaddr", _)) => {
                return Err(format!("mount option {option} is set by the node"));
            }
            _ => match flag(option) {
                Some((known, set)) => flags.set(known, set),
                None => rest.push(option),
            },
        }
    }
    if version.is_some_and(|version| !version.starts_with('4')) {
        let why = "is not supported: this node mounts NFS version 4 without a mount program";
        return Err(format!("NFS version {} {why}", version.unwrap_or_default()));
    }
    let versions = version.map_or_else(|| VERSIONS.to_vec(), |version| vec![version]);
    let client = if address.is_ipv4() { "0.0.0.0" } else { "::" };
    let options = versions.into_iter().map(|version| {
        let own = [format!("vers={version}"), format!("addr={address}"), format!("clientaddr={client}")];
        own.into_iter().chain(rest.iter().map(|option| (*option).to_owned())).collect::<Vec<_>>().join(",")
    });
    Ok(Arguments { source: source_of(export), flags, options: options.collect() })
}

/// Options that are flags of the mount call.
fn flag(option: &str) -> Option<(MsFlags, bool)> {
    Some(match option {
        "ro" => (MsFlags::MS_RDONLY, true),
        "rw" => (MsFlags::empty(), true),
        "nosuid" => (MsFlags::MS_NOSUID, true),
        "nodev" => (MsFlags::MS_NODEV, true),
        "noexec" => (MsFlags::MS_NOEXEC, true),
        "noatime" => (MsFlags::MS_NOATIME, true),
        "nodiratime" => (MsFlags::MS_NODIRATIME, true),
        "relatime" => (MsFlags::MS_RELATIME, true),
        "sync" => (MsFlags::MS_SYNCHRONOUS, true),
        "defaults" | "_netdev" | "auto" | "noauto" | "bg" | "fg" => (MsFlags::empty(), true),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    fn export(options: &[&str]) -> Export {
        let options = options.iter().map(|option| (*option).to_owned()).collect();
        Export { server: "files".to_owned(), path: "/data".to_owned(), read_only: false, options }
    }

    #[tokio::test]
    async fn slow_names_of_servers_of_one_namespace_do_not_delay_the_mounts_of_others() {
        // No host can have a name with an empty label, so the look-up asks no name server.
        const INVALID: &str = "a..b";
        let held = resolver::occupy("nfs-eve").await;
        assert!(resolve("nfs-eve", INVALID).now_or_never().is_none(), "three look-ups of one namespace");
        assert!(resolve("nfs-bob", INVALID).await.is_err());
        drop(held);
        assert!(resolve("nfs-eve", INVALID).await.is_err());
    }

    #[test]
    fn options_become_flags_and_one_text_for_each_version() {
        let address = IpAddr::from([10, 0, 0, 5]);
        let found = arguments(&export(&["ro,nosuid", "hard"]), address).expect("arguments");
        assert_eq!(found.source, "files:/data");
        assert_eq!(found.flags, MsFlags::MS_RDONLY | MsFlags::MS_NOSUID);
        assert_eq!(found.options.len(), 3);
        assert_eq!(found.options[0], "vers=4.2,addr=10.0.0.5,clientaddr=0.0.0.0,hard");
        let named = arguments(&export(&["nfsvers=4.1"]), address).expect("arguments");
        assert_eq!(named.options, ["vers=4.1,addr=10.0.0.5,clientaddr=0.0.0.0"]);
    }

    #[test]
    fn version_three_and_the_nodes_own_options_are_refused() {
        let address = IpAddr::from([10, 0, 0, 5]);
        assert!(arguments(&export(&["vers=3"]), address).expect_err("version 3").contains("version 4"));
        assert!(arguments(&export(&["addr=1.2.3.4"]), address).is_err());
    }

    #[test]
    fn an_ipv6_server_is_in_brackets() {
        let server = Export { server: "fd00::1".to_owned(), ..export(&[]) };
        assert_eq!(source_of(&server), "[fd00::1]:/data");
    }

    #[tokio::test]
    async fn a_mount_that_an_earlier_attempt_may_undo_does_not_count() {
        let at = Path::new("/proc");
        let earlier = Attempt::begin(at).expect("the earlier attempt");
        assert!(earlier.is_mounted().expect("the mounts"));
        let error = mount("team", &export(&[]), at).await.expect_err("it may be unmounted");
        assert!(matches!(error, SetUpError::Nfs { .. }), "{error}");
    }

    #[test]
    fn one_attempt_at_a_mount_point_is_in_progress() {
        let at = Path::new("/one/attempt");
        let first = Attempt::begin(at).expect("the first attempt");
        assert!(Attempt::begin(at).is_err());
        drop(first);
        assert!(Attempt::begin(at).is_ok());
    }
}

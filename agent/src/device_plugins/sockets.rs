//! Sockets of the node for plugins and monitoring agents, below the kubelet's directory.

use std::fs::{self, DirBuilder, Permissions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use coracle_cri::UnixClient;
use futures::stream::{BoxStream, StreamExt, unfold};
use tokio::net::UnixListener;
use tokio::sync::Semaphore;

use crate::dra::open_socket;

/// Name of each socket, the same as with a kubelet.
const NAME: &str = "kubelet.sock";
/// Directory of device plugins and their registration socket, below the kubelet's directory.
pub(crate) const DEVICE_PLUGINS: &str = "device-plugins";
/// Directory of the socket of the pod resources API, below the kubelet's directory.
pub(crate) const POD_RESOURCES: &str = "pod-resources";
/// Maximum clients of a socket at a time. Further clients wait until one disconnects, so that they cannot use up the
/// descriptors that the agent may open.
const CLIENTS_MAX: usize = 128;
/// Delay after a failed accept: the agent or the machine has no free descriptor.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_secs(1);
/// Maximum files that are examined in the directory.
const FILES_MAX: usize = 4096;

/// Listens on the socket `kubelet.sock` in a directory, which is created if it is absent. Only the node's user can
/// connect.
///
/// # Errors
/// If the directory or the socket cannot be created, or other users can write the directory and so could replace the
/// socket.
pub(crate) fn listen(dir: &Path) -> io::Result<UnixListener> {
    // 0750 is the mode of the kubelet's directories.
    DirBuilder::new().recursive(true).mode(0o750).create(dir)?;
    check_owner(dir)?;
    let path = dir.join(NAME);
    coracle_tree::remove_file(&path)?;
    let listener = UnixListener::bind(&path)?;
    restrict(dir)?;
    Ok(listener)
}

/// Lets only the node's user connect to the socket. Symlinks are not followed: containers of plugins can change the
/// directory, and a symlink could lead chmod(2) to any file of the host.
fn restrict(dir: &Path) -> io::Result<()> {
    let socket = open_socket(dir, Path::new(NAME))?;
    // fchmod(2) does not accept an O_PATH descriptor; chmod(2) of its path in /proc does.
    fs::set_permissions(format!("/proc/self/fd/{}", socket.as_raw_fd()), Permissions::from_mode(0o600))
}

/// A stream of the clients that connect. It never ends and has no errors, because the server would end after an error.
pub(crate) fn clients(listener: UnixListener) -> BoxStream<'static, io::Result<UnixClient>> {
    accepted(listener, CLIENTS_MAX)
}

fn accepted(listener: UnixListener, max: usize) -> BoxStream<'static, io::Result<UnixClient>> {
    let places = Arc::new(Semaphore::new(max));
    let next = |(listener, places): (UnixListener, Arc<Semaphore>)| async move {
        // The semaphore is never closed.
        let Ok(place) = Arc::clone(&places).acquire_owned().await else { return None };
        loop {
            match listener.accept().await {
                Ok((client, _address)) => {
                    let client = UnixClient::new(client).with_permit(place);
                    return Some((io::Result::Ok(client), (listener, places)));
                }
                Err(error) => tracing::warn!(%error, "cannot accept a client"),
            }
            tokio::time::sleep(ACCEPT_RETRY_DELAY).await;
        }
    };
    unfold((listener, places), next).boxed()
}

/// Removes all sockets in the directory. As with a kubelet, plugins notice the removal, and register again. An absent
/// directory has no sockets.
pub(super) fn remove_all(dir: &Path) -> io::Result<()> {
    let entries = match fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries?,
    };
    check_owner(dir)?;
    for entry in entries.take(FILES_MAX).flatten() {
        // This is the type of the entry itself: symlinks are not followed.
        if entry.file_type().is_ok_and(|found| found.is_socket()) {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

/// Removes the sockets of the node and of device plugins beside the registration directory of drivers. Also removes the
/// directories of the sockets that are empty then.
///
/// # Errors
/// The first error of readdir(3) or unlink(2). An error does not stop the removal.
pub fn remove(registry: &Path) -> io::Result<()> {
    let Some(root) = registry.parent() else { return Ok(()) };
    let mut result = Ok(());
    for dir in [DEVICE_PLUGINS, POD_RESOURCES].map(|name| root.join(name)) {
        result = result.and(remove_all(&dir));
        // A directory with other files stays.
        let _ = fs::remove_dir(dir);
    }
    let _ = fs::remove_dir(root);
    result
}

fn check_owner(dir: &Path) -> io::Result<()> {
    let found = fs::metadata(dir)?;
    if found.mode() & 0o022 != 0 || found.uid() != rustix::process::geteuid().as_raw() {
        let dir = dir.display();
        let message = format!("{dir} must belong to the node's user and be writable for that user only");
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, message));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use tokio::net::UnixStream;

    use super::*;

    #[tokio::test]
    async fn a_socket_is_private_and_replaces_that_of_an_earlier_agent() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("a/device-plugins");
        assert!(remove_all(&dir).is_ok());
        let first = listen(&dir).unwrap();
        drop(first);
        let _second = listen(&dir).unwrap();
        assert_eq!(fs::metadata(dir.join(NAME)).unwrap().mode() & 0o777, 0o600);
        fs::write(dir.join("file"), "").unwrap();
        let _plugin = UnixListener::bind(dir.join("plugin.sock")).unwrap();
        remove_all(&dir).unwrap();
        let left: Vec<_> = fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left, ["file"]);
        let registry = root.path().join("a/plugins_registry");
        remove(&registry).unwrap();
        assert!(dir.exists(), "it has a file");
        fs::remove_file(dir.join("file")).unwrap();
        remove(&registry).unwrap();
        assert!(!root.path().join("a").exists());
        let _third = listen(&dir).unwrap();
        fs::set_permissions(&dir, Permissions::from_mode(0o777)).unwrap();
        assert_eq!(listen(&dir).unwrap_err().kind(), io::ErrorKind::PermissionDenied);
    }

    #[tokio::test]
    async fn the_permissions_of_a_file_that_a_symlink_names_stay() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("device-plugins");
        let _listener = listen(&dir).unwrap();
        let file = root.path().join("file");
        fs::write(&file, "").unwrap();
        fs::set_permissions(&file, Permissions::from_mode(0o644)).unwrap();
        fs::remove_file(dir.join(NAME)).unwrap();
        std::os::unix::fs::symlink(&file, dir.join(NAME)).unwrap();
        assert!(restrict(&dir).is_err());
        assert_eq!(fs::metadata(&file).unwrap().mode() & 0o777, 0o644);
        // The link itself is replaced by the next agent.
        let _next = listen(&dir).unwrap();
        assert_eq!(fs::metadata(&file).unwrap().mode() & 0o777, 0o644);
    }

    #[tokio::test]
    async fn a_directory_of_another_owner_does_not_stop_the_removal_of_the_others() {
        let root = tempfile::tempdir().unwrap();
        let [plugins, resources] = [DEVICE_PLUGINS, POD_RESOURCES].map(|name| root.path().join(name));
        let _listeners = (listen(&plugins).unwrap(), listen(&resources).unwrap());
        fs::set_permissions(&plugins, Permissions::from_mode(0o777)).unwrap();
        let error = remove(&root.path().join("plugins_registry")).unwrap_err();
        assert!(error.to_string().contains(&plugins.display().to_string()), "{error}");
        assert!(plugins.join(NAME).exists() && !resources.exists());
    }

    #[tokio::test]
    async fn a_client_beyond_the_limit_is_accepted_when_another_one_has_ended() {
        let dir = tempfile::tempdir().unwrap();
        let mut clients = accepted(listen(dir.path()).unwrap(), 1);
        let path = dir.path().join(NAME);
        let _connected =
            [UnixStream::connect(&path).await.unwrap(), UnixStream::connect(&path).await.unwrap()];
        let first = clients.next().await.unwrap().unwrap();
        let second = tokio::spawn(async move { clients.next().await.unwrap().map(drop) });
        // Give the second task time in which it could accept the other client.
        for _ in 0..1000 {
            tokio::task::yield_now().await;
        }
        assert!(!second.is_finished());
        drop(first);
        second.await.unwrap().unwrap();
    }
}

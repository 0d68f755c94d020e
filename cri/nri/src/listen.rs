//! The socket at which plugins connect. An idle listener has no cost.

use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;

use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tracing::warn;

/// Maximum plugins that register at the same time.
const MAX_REGISTERING: usize = 16;

/// Binds the socket. A stale socket is replaced. The socket of another running runtime is not replaced.
pub(crate) async fn bind(path: &Path) -> io::Result<UnixListener> {
    if let Some(dir) = path.parent() {
        std::fs::create_dir_all(dir)?;
    }
    match UnixStream::connect(path).await {
        Ok(_other_runtime) => return Err(io::Error::from(io::ErrorKind::AddrInUse)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(_stale) => std::fs::remove_file(path)?,
    }
    let listener = UnixListener::bind(path)?;
    // Plugins can change any container, so only root may connect.
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}

/// Accepts plugins until `end` is cancelled or `join` returns `None`. `join` returns the registration of a connected
/// plugin, which runs in its own task.
pub(crate) async fn serve<J, R>(listener: UnixListener, end: CancellationToken, join: J)
where
    J: Fn(UnixStream) -> Option<R>,
    R: Future<Output = ()> + Send + 'static,
{
    let permits = Arc::new(Semaphore::new(MAX_REGISTERING));
    let accept = async {
        // The semaphore is never closed.
        while let Ok(permit) = Arc::clone(&permits).acquire_owned().await {
            match listener.accept().await {
                Ok((stream, _)) => {
                    let Some(registration) = join(stream) else { return };
                    tokio::spawn(async move {
                        let _permit = permit;
                        registration.await;
                    });
                }
                Err(error) => {
                    warn!(%error, "cannot accept NRI plugins");
                    // The process probably has no free descriptors, so the next attempt is delayed.
                    tokio::time::sleep(std::time::Duration::from_secs(1)).await;
                }
            }
        }
    };
    end.run_until_cancelled(accept).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_stale_socket_is_replaced_and_a_live_one_is_not() {
        let dir = tempfile::tempdir().expect("directory");
        let path = dir.path().join("nri/nri.sock");
        let first = bind(&path).await.expect("new");
        let mode = std::fs::metadata(&path).expect("socket").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        assert_eq!(bind(&path).await.expect_err("in use").kind(), io::ErrorKind::AddrInUse);
        drop(first);
        bind(&path).await.expect("stale");
    }
}

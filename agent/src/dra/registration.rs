//! Registration of drivers: each has a socket in the registration directory, as for the kubelet's plugin watcher.
//!
//! A task for each socket asks the plugin for its driver and endpoint, connects to the endpoint, and waits until that
//! connection ends. It starts again after a pause, until the socket is removed.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::future::Future;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use coracle_cni::DirectoryWatch;
use coracle_error_chain::chain;
use coracle_events::{MESSAGE_MAX, printable};
use coracle_proto::plugin_registration as api;
use coracle_proto::plugin_registration::registration_client::RegistrationClient;
use coracle_values::names::dns1123_subdomain;
use rustix::fs::{CWD, FileType, Mode, OFlags, ResolveFlags, fstat, open, openat2};
use tokio_util::task::AbortOnDropHandle;
use tonic::Status;

use super::driver::{Caller, Link, Version, origin};
use super::drivers::{Drivers, Registered};

/// Timeout of a call. The kubelet's is one second, which a driver on a loaded machine exceeds.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum bytes of an answer.
const ANSWER_MAX: usize = 64 << 10;
/// Maximum sockets in the directory. More are ignored.
const SOCKETS_MAX: usize = 64;
/// Maximum files that are examined in the directory.
const FILES_MAX: usize = 1024;
/// Maximum length of a driver's name (`DriverNameMaxLength` of resource.k8s.io).
const DRIVER_NAME_MAX: usize = 63;
/// Pause before a failed registration is repeated; doubled up to [`MAX_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const MAX_PAUSE: Duration = Duration::from_secs(120);
/// Pause before the directory is read again after an error.
const READ_PAUSE: Duration = Duration::from_secs(10);

/// Why a plugin is not registered.
#[derive(Debug, thiserror::Error)]
pub(super) enum RegistrationError {
    #[error("cannot connect to the socket {path}")]
    Connect {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{call}: the plugin did not answer within {} seconds", CALL_TIMEOUT.as_secs())]
    Late { call: &'static str },
    #[error("{call}: {message}")]
    Call { call: &'static str, message: String },
    #[error("no handler for plugins of the type {0:?}: this node supports DRAPlugin only")]
    Type(String),
    #[error("{0:?} is not the name of a driver")]
    Name(String),
    #[error("driver {0}: none of the plugin's services is supported: v1.DRAPlugin, v1beta1.DRAPlugin")]
    Services(String),
    #[error("driver {driver}: the endpoint {endpoint} is not a path below {base}")]
    Endpoint { driver: String, endpoint: String, base: PathBuf },
    #[error("driver {driver}: another plugin has registered the endpoint {endpoint}")]
    Taken { driver: String, endpoint: PathBuf },
}

/// The registration directory.
#[derive(Clone, Debug)]
pub(super) struct Registry {
    dir: PathBuf,
    drivers: Arc<Drivers>,
}

/// Identity of a socket file. A driver that starts again makes another one.
type Identity = (u64, i64, i64);

// === impl Registry ===

impl Registry {
    pub(super) fn new(dir: PathBuf, drivers: Arc<Drivers>) -> Self {
        Self { dir, drivers }
    }

    /// Registers the plugins of the sockets in the directory, until dropped.
    pub(super) async fn run(self) {
        let mut tasks: HashMap<OsString, (Identity, AbortOnDropHandle<()>)> = HashMap::new();
        let mut watch = match DirectoryWatch::on(&self.dir) {
            Ok(watch) => watch,
            Err(error) => {
                tracing::warn!(%error, dir = %self.dir.display(), "cannot watch the registration directory of drivers");
                return std::future::pending().await;
            }
        };
        loop {
            let found = match sockets(&self.dir) {
                Ok(found) => found,
                Err(error) => {
                    tracing::warn!(%error, dir = %self.dir.display(), "cannot read the registration directory of drivers");
                    // Others may have made the sockets. After any other error the registered drivers stay.
                    if error.kind() == io::ErrorKind::PermissionDenied {
                        tasks.clear();
                    }
                    tokio::time::sleep(READ_PAUSE).await;
                    continue;
                }
            };
            let gone = tasks.extract_if(|name, (identity, _)| found.get(name) != Some(&*identity));
            let ended = gone.map(|(_, (_, task))| {
                task.abort();
                task
            });
            // The endpoint of a plugin that starts again is free only after its earlier task has ended.
            futures::future::join_all(ended).await;
            for (name, identity) in found {
                tasks.entry(name.clone()).or_insert_with(|| {
                    let keep = self.clone().keep(name);
                    (identity, AbortOnDropHandle::new(tokio::spawn(keep)))
                });
            }
            if let Err(error) = watch.changed().await {
                tracing::warn!(%error, dir = %self.dir.display(), "cannot watch the registration directory of drivers");
                return std::future::pending().await;
            }
        }
    }

    /// Keeps the plugin of a socket registered, until dropped.
    async fn keep(self, socket: OsString) {
        let mut pause = FIRST_PAUSE;
        loop {
            match self.register(&socket).await {
                Ok((registered, mut link)) => {
                    link.closed().await;
                    drop(registered);
                    tracing::info!(socket = %socket.display(), "the connection to a driver has ended");
                    pause = FIRST_PAUSE;
                }
                Err(error) => {
                    let error = chain(&error);
                    tracing::warn!(error, socket = %socket.display(), "cannot register a plugin");
                }
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(MAX_PAUSE);
        }
    }

    async fn register(&self, name: &OsStr) -> Result<(Registered, Link), RegistrationError> {
        let path = self.dir.join(name);
        let socket = open_socket(&self.dir, Path::new(name));
        let link = connect(&path, socket).await?;
        let client = RegistrationClient::with_origin(link.caller(Version::V1), origin());
        let mut client = client.max_decoding_message_size(ANSWER_MAX);
        let info = within("GetInfo", client.get_info(api::InfoRequest {})).await?;
        let result = self.accept(&path, info).await;
        let error = result.as_ref().err().map(|error| chain(error)).unwrap_or_default();
        let status = api::RegistrationStatus { plugin_registered: result.is_ok(), error };
        let notified = within("NotifyRegistrationStatus", client.notify_registration_status(status)).await;
        if let Err(error) = notified {
            tracing::debug!(error = chain(&error), path = %path.display(), "cannot notify a plugin");
        }
        result
    }

    /// Checks a plugin, connects to its endpoint and adds it to the table.
    async fn accept(
        &self,
        socket: &Path,
        info: api::PluginInfo,
    ) -> Result<(Registered, Link), RegistrationError> {
        let shown = |text: &str| printable(text, MESSAGE_MAX / 8);
        if info.r#type != "DRAPlugin" {
            return Err(RegistrationError::Type(shown(&info.r#type)));
        }
        let driver = info.name;
        if driver.len() > DRIVER_NAME_MAX || !dns1123_subdomain(&driver).is_empty() {
            return Err(RegistrationError::Name(shown(&driver)));
        }
        let version = Version::newest(&info.supported_versions);
        let version = version.ok_or_else(|| RegistrationError::Services(driver.clone()))?;
        let base = self.dir.parent().unwrap_or(Path::new("/"));
        let endpoint = if info.endpoint.is_empty() { socket } else { Path::new(&info.endpoint) };
        let Ok(inside) = endpoint.strip_prefix(base) else {
            let endpoint = shown(&info.endpoint);
            return Err(RegistrationError::Endpoint { driver, endpoint, base: base.to_owned() });
        };
        let link = connect(endpoint, open_socket(base, inside)).await?;
        let caller: Caller = link.caller(version);
        let Some(registered) = self.drivers.add(&driver, endpoint, caller) else {
            return Err(RegistrationError::Taken { driver, endpoint: endpoint.to_owned() });
        };
        tracing::info!(driver, endpoint = %endpoint.display(), ?version, "driver registered");
        Ok((registered, link))
    }
}

/// Opens a socket below a directory. No symlink is followed, so a plugin cannot lead the node to another socket.
pub(crate) fn open_socket(base: &Path, path: &Path) -> io::Result<OwnedFd> {
    let base = open(base, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let within = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    let socket = openat2(&base, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty(), within)?;
    if FileType::from_raw_mode(fstat(&socket)?.st_mode) != FileType::Socket {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a socket"));
    }
    Ok(socket)
}

async fn connect(path: &Path, socket: io::Result<OwnedFd>) -> Result<Link, RegistrationError> {
    let failed = |source| RegistrationError::Connect { path: path.to_owned(), source };
    let socket = socket.map_err(failed)?;
    match tokio::time::timeout(CALL_TIMEOUT, Link::open(&socket)).await {
        Ok(link) => link.map_err(failed),
        Err(_elapsed) => Err(failed(io::ErrorKind::TimedOut.into())),
    }
}

async fn within<T>(
    call: &'static str,
    answer: impl Future<Output = Result<tonic::Response<T>, Status>>,
) -> Result<T, RegistrationError> {
    match tokio::time::timeout(CALL_TIMEOUT, answer).await {
        Ok(Ok(answer)) => Ok(answer.into_inner()),
        Ok(Err(status)) => {
            let message = printable(status.message(), MESSAGE_MAX / 2);
            Err(RegistrationError::Call { call, message })
        }
        Err(_elapsed) => Err(RegistrationError::Late { call }),
    }
}

/// The sockets in the directory. Others than the node's user must not be able to make one.
fn sockets(dir: &Path) -> io::Result<HashMap<OsString, Identity>> {
    let opened =
        match rustix::fs::openat(CWD, dir, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
        {
            Ok(opened) => opened,
            Err(rustix::io::Errno::NOENT | rustix::io::Errno::NOTDIR) => return Ok(HashMap::new()),
            Err(errno) => return Err(errno.into()),
        };
    let stat = fstat(&opened)?;
    if stat.st_mode & 0o022 != 0 || stat.st_uid != rustix::process::geteuid().as_raw() {
        let message = "it must belong to the node's user and be writable for that user only";
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, message));
    }
    let files = std::fs::read_dir(dir)?.take(FILES_MAX).flatten();
    let sockets = files.filter_map(|file| {
        let name = file.file_name();
        let is_hidden = name.as_encoded_bytes().starts_with(b".");
        // Of the entry itself: symlinks are not followed.
        let found = file.metadata().ok().filter(|found| !is_hidden && found.file_type().is_socket())?;
        Some((name, (found.ino(), found.ctime(), found.ctime_nsec())))
    });
    Ok(sockets.take(SOCKETS_MAX).collect())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn sockets_of_a_private_directory_are_found_and_links_are_not() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        assert!(sockets(&at("absent")).unwrap().is_empty());
        let _socket = UnixListener::bind(at("a-reg.sock")).unwrap();
        let _hidden = UnixListener::bind(at(".hidden.sock")).unwrap();
        std::fs::write(at("file"), "").unwrap();
        symlink(at("a-reg.sock"), at("link.sock")).unwrap();
        let found = sockets(dir.path()).unwrap();
        assert_eq!(found.keys().collect::<Vec<_>>(), ["a-reg.sock"]);
        std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o777)).unwrap();
        assert_eq!(sockets(dir.path()).unwrap_err().kind(), io::ErrorKind::PermissionDenied);
    }

    #[test]
    fn no_path_of_a_plugin_leads_out_of_the_directory() {
        let dir = tempfile::tempdir().unwrap();
        let base = dir.path().join("base");
        std::fs::create_dir_all(base.join("plugins")).unwrap();
        let _outside = UnixListener::bind(dir.path().join("outside")).unwrap();
        let _inside = UnixListener::bind(base.join("plugins/in")).unwrap();
        symlink(dir.path().join("outside"), base.join("link")).unwrap();
        symlink(dir.path(), base.join("up")).unwrap();
        std::fs::write(base.join("file"), "").unwrap();
        assert!(open_socket(&base, Path::new("plugins/in")).is_ok());
        for bad in ["link", "up/outside", "../outside", "/etc/passwd", "file", "absent"] {
            assert!(open_socket(&base, Path::new(bad)).is_err(), "{bad}");
        }
    }
}

//! Registration of drivers and device plugins. Each has a socket in the registration directory or in a directory below
//! it, as for the kubelet's plugin watcher.
//!
//! A task for each socket asks the plugin for its driver and endpoint, connects to the endpoint, and waits until that
//! connection ends. The task starts again after a back-off, until the socket is removed.

use std::collections::{BTreeSet, HashMap};
use std::ffi::{OsStr, OsString};
use std::future::Future;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use coracle_backoff::Backoff;
use coracle_cni::DirectoryWatch;
use coracle_error_chain::chain;
use coracle_events::{MESSAGE_MAX, printable};
use coracle_proto::plugin_registration as api;
use coracle_proto::plugin_registration::registration_client::RegistrationClient;
use coracle_values::names::dns1123_subdomain;
use rustix::fs::{CWD, FileType, Mode, OFlags, ResolveFlags, fstat, open, openat2};
use tokio_util::task::AbortOnDropHandle;
use tonic::Status;

use super::device_plugin::{DevicePluginHandler, PluginEnd, WatchedPlugin};
use super::driver::{Caller, Link, Version, origin};
use super::drivers::{Drivers, Registered};
use super::health::HealthTable;

/// Timeout of a call. The kubelet's timeout is one second, which a driver on a loaded machine exceeds.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum bytes of an answer.
const ANSWER_MAX: usize = 64 << 10;
/// Maximum sockets in the directory. Further sockets are ignored.
const SOCKETS_MAX: usize = 64;
/// Maximum files that are examined in the directory and below it.
const FILES_MAX: usize = 1024;
/// Maximum number and maximum depth of the directories below the registration directory. Further directories are
/// ignored.
const DIRS_MAX: usize = 64;
const DEPTH_MAX: usize = 4;
/// Maximum length of a driver's name (`DriverNameMaxLength` of resource.k8s.io).
const DRIVER_NAME_MAX: usize = 63;
/// First back-off after a registration failed or ended. It doubles up to [`MAX_BACKOFF`].
const FIRST_BACKOFF: Duration = Duration::from_secs(1);
const MAX_BACKOFF: Duration = Duration::from_secs(120);
/// Delay before the directory is read again after an error.
const READ_RETRY: Duration = Duration::from_secs(10);

/// The reason why a plugin is not registered.
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
    #[error("no handler for plugins of the type {0:?}: this node supports DRAPlugin and DevicePlugin")]
    Type(String),
    #[error("{0:?} is not the name of a driver")]
    Name(String),
    #[error("driver {0}: none of the plugin's services is supported: v1.DRAPlugin, v1beta1.DRAPlugin")]
    Services(String),
    #[error("driver {driver}: the endpoint {endpoint} is not an absolute path")]
    Endpoint { driver: String, endpoint: String },
    #[error("driver {driver}: another plugin has registered the endpoint {endpoint}")]
    Taken { driver: String, endpoint: PathBuf },
    #[error("{0}")]
    DevicePlugin(String),
}

/// The registration directory.
#[derive(Clone)]
pub(super) struct Registry {
    dir: PathBuf,
    handlers: Handlers,
}

/// The parts of the agent to which plugins are passed.
#[derive(Clone)]
pub(super) struct Handlers {
    pub(super) drivers: Arc<Drivers>,
    pub(super) health: Arc<HealthTable>,
    pub(super) device_plugins: Arc<dyn DevicePluginHandler>,
}

/// A registered plugin.
enum Accepted {
    Driver(Registered, Link),
    DevicePlugin(PluginEnd),
}

/// The content of the registration directory.
#[derive(Debug, Default)]
struct Found {
    /// Sockets by their paths relative to the registration directory.
    sockets: HashMap<OsString, Identity>,
    /// The directories below the registration directory.
    dirs: BTreeSet<PathBuf>,
}

/// Identity of a socket file. A driver that starts again makes a new file.
#[derive(Debug, PartialEq)]
struct Identity {
    inode: u64,
    /// Seconds of the time of the last change of the inode.
    changed: i64,
    /// Nanoseconds of that time.
    changed_nanos: i64,
}

// === impl Registry ===

impl Registry {
    pub(super) fn new(dir: PathBuf, handlers: Handlers) -> Self {
        Self { dir, handlers }
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
                    // After this error, the sockets may belong to other users. After any other error the registered
                    // drivers stay.
                    if error.kind() == io::ErrorKind::PermissionDenied {
                        tasks.clear();
                    }
                    tokio::time::sleep(READ_RETRY).await;
                    continue;
                }
            };
            // A socket may have been made before its directory was watched.
            if watch.watch_also(&found.dirs) {
                continue;
            }
            let found = found.sockets;
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
                    (identity, AbortOnDropHandle::new(coracle_threads::spawn(keep)))
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
        let mut backoff = Backoff::new(FIRST_BACKOFF, MAX_BACKOFF);
        loop {
            match self.register(&socket).await {
                Ok(Accepted::Driver(registered, mut link)) => {
                    self.follow(&registered, &mut link).await;
                    drop(registered);
                    tracing::info!(socket = %socket.display(), "the connection to a driver has ended");
                    backoff.reset();
                }
                // The back-off is not reset. Otherwise two plugins that register for the same resource would replace
                // each other all the time.
                Ok(Accepted::DevicePlugin(ended)) => ended.await,
                Err(error) => {
                    let error = chain(&error);
                    tracing::warn!(error, socket = %socket.display(), "cannot register a plugin");
                }
            }
            tokio::time::sleep(backoff.next_delay()).await;
        }
    }

    /// Follows the health of a driver's devices until its connection ends.
    async fn follow(&self, registered: &Registered, link: &mut Link) {
        let caller = link.caller(Version::V1);
        let health = async {
            self.handlers.health.follow(registered.driver(), &caller).await;
            std::future::pending::<()>().await;
        };
        tokio::select! {
            () = link.closed() => {}
            () = health => {}
        }
    }

    async fn register(&self, name: &OsStr) -> Result<Accepted, RegistrationError> {
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

    /// Checks a plugin, connects to its endpoint and registers it.
    async fn accept(&self, socket: &Path, info: api::PluginInfo) -> Result<Accepted, RegistrationError> {
        match info.r#type.as_str() {
            "DRAPlugin" => self.accept_driver(socket, info).await,
            "DevicePlugin" => self.accept_device_plugin(socket, info).await,
            other => Err(RegistrationError::Type(shown(other))),
        }
    }

    async fn accept_driver(
        &self,
        socket: &Path,
        info: api::PluginInfo,
    ) -> Result<Accepted, RegistrationError> {
        let driver = info.name.as_str();
        if driver.len() > DRIVER_NAME_MAX || !dns1123_subdomain(driver).is_empty() {
            return Err(RegistrationError::Name(shown(driver)));
        }
        let version = Version::newest(&info.supported_versions);
        let version = version.ok_or_else(|| RegistrationError::Services(driver.to_owned()))?;
        let (endpoint, link) = self.connect_endpoint(socket, &info).await?;
        let caller: Caller = link.caller(version);
        let Some(registered) = self.handlers.drivers.add(driver, endpoint, caller) else {
            let (driver, endpoint) = (driver.to_owned(), endpoint.to_owned());
            return Err(RegistrationError::Taken { driver, endpoint });
        };
        tracing::info!(driver, endpoint = %endpoint.display(), ?version, "driver registered");
        Ok(Accepted::Driver(registered, link))
    }

    async fn accept_device_plugin(
        &self,
        socket: &Path,
        info: api::PluginInfo,
    ) -> Result<Accepted, RegistrationError> {
        let (_, link) = self.connect_endpoint(socket, &info).await?;
        let plugin = WatchedPlugin { resource: info.name, versions: info.supported_versions, link };
        let registered = self.handlers.device_plugins.register_watched(plugin).await;
        registered.map(Accepted::DevicePlugin).map_err(RegistrationError::DevicePlugin)
    }

    /// Connects to the endpoint of a plugin. Without an endpoint, the plugin serves at its registration socket.
    async fn connect_endpoint<'a>(
        &self,
        socket: &'a Path,
        info: &'a api::PluginInfo,
    ) -> Result<(&'a Path, Link), RegistrationError> {
        let base = self.dir.parent().unwrap_or(Path::new("/"));
        let endpoint = if info.endpoint.is_empty() { socket } else { Path::new(&info.endpoint) };
        if !endpoint.is_absolute() {
            let (driver, endpoint) = (shown(&info.name), shown(&info.endpoint));
            return Err(RegistrationError::Endpoint { driver, endpoint });
        }
        let opened = match endpoint.strip_prefix(base) {
            Ok(inside) => open_socket(base, inside),
            Err(_outside) => open_foreign(endpoint),
        };
        Ok((endpoint, connect(endpoint, opened).await?))
    }
}

/// A text from a plugin, shortened and made printable for messages.
fn shown(text: &str) -> String {
    printable(text, MESSAGE_MAX / 8)
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

/// Opens a socket outside of the node's directories. The socket must belong to the node's user: otherwise another user
/// could replace the socket in that user's own directory.
fn open_foreign(path: &Path) -> io::Result<OwnedFd> {
    let socket = open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    let stat = fstat(&socket)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::Socket {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a socket"));
    }
    if stat.st_uid != rustix::process::geteuid().as_raw() {
        let message = "the socket does not belong to the node's user";
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, message));
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

/// The sockets in the directory and below it. Directories that other users can write are left out, because these users
/// could make sockets there.
fn sockets(dir: &Path) -> io::Result<Found> {
    let mut found = Found::default();
    if !is_private(dir)? {
        return Ok(found);
    }
    let (mut pending, mut files_left) = (vec![(PathBuf::new(), 0)], FILES_MAX);
    while let Some((below, depth)) = pending.pop() {
        let files = match std::fs::read_dir(dir.join(&below)) {
            Ok(files) => files,
            Err(error) if depth == 0 => return Err(error),
            Err(_removed) => continue,
        };
        for file in files.take(files_left).flatten() {
            files_left = files_left.saturating_sub(1);
            let path = below.join(file.file_name());
            // This is the metadata of the entry itself: symlinks are not followed.
            let Ok(entry) = file.metadata() else { continue };
            if file.file_name().as_encoded_bytes().starts_with(b".") {
                continue;
            }
            if entry.file_type().is_socket() && found.sockets.len() < SOCKETS_MAX {
                let (changed, changed_nanos) = (entry.ctime(), entry.ctime_nsec());
                let identity = Identity { inode: entry.ino(), changed, changed_nanos };
                found.sockets.insert(path.into(), identity);
            } else if entry.is_dir() && depth < DEPTH_MAX && found.dirs.len() < DIRS_MAX {
                let full = dir.join(&path);
                if is_private(&full).is_ok_and(|is_private| is_private) {
                    found.dirs.insert(full);
                    pending.push((path, depth + 1));
                }
            }
        }
    }
    Ok(found)
}

/// Whether a directory exists. An existing directory must be private to the node's user.
///
/// # Errors
/// If the directory cannot be examined, or another user owns it or can write it.
fn is_private(dir: &Path) -> io::Result<bool> {
    let opened =
        match rustix::fs::openat(CWD, dir, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
        {
            Ok(opened) => opened,
            Err(rustix::io::Errno::NOENT | rustix::io::Errno::NOTDIR) => return Ok(false),
            Err(errno) => return Err(errno.into()),
        };
    let stat = fstat(&opened)?;
    if stat.st_mode & 0o022 != 0 || stat.st_uid != rustix::process::geteuid().as_raw() {
        let message = "it must belong to the node's user and be writable for that user only";
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, message));
    }
    Ok(true)
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
        assert!(sockets(&at("absent")).unwrap().sockets.is_empty());
        let _socket = UnixListener::bind(at("a-reg.sock")).unwrap();
        let _hidden = UnixListener::bind(at(".hidden.sock")).unwrap();
        std::fs::write(at("file"), "").unwrap();
        symlink(at("a-reg.sock"), at("link.sock")).unwrap();
        let found = sockets(dir.path()).unwrap();
        assert_eq!(found.sockets.keys().collect::<Vec<_>>(), ["a-reg.sock"]);
        std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o777)).unwrap();
        assert_eq!(sockets(dir.path()).unwrap_err().kind(), io::ErrorKind::PermissionDenied);
    }

    #[test]
    fn sockets_of_private_directories_below_are_found() {
        let dir = tempfile::tempdir().unwrap();
        let made = |name: &str, mode: u32| {
            let below = dir.path().join(name);
            std::fs::create_dir_all(&below).unwrap();
            std::fs::set_permissions(&below, PermissionsExt::from_mode(mode)).unwrap();
            UnixListener::bind(below.join("reg.sock")).unwrap()
        };
        let deep = "1/2/3/4";
        let _sockets = [made("a", 0o755), made("b", 0o777), made(".c", 0o755), made(deep, 0o755)];
        let _too_deep = made(&format!("{deep}/5"), 0o755);
        symlink(dir.path().join("a"), dir.path().join("link")).unwrap();
        let found = sockets(dir.path()).unwrap();
        let mut names: Vec<OsString> = found.sockets.into_keys().collect();
        names.sort();
        assert_eq!(names, ["1/2/3/4/reg.sock", "a/reg.sock"]);
        assert!(open_socket(dir.path(), Path::new("a/reg.sock")).is_ok());
        assert!(found.dirs.contains(&dir.path().join("a")) && found.dirs.len() == 5);
    }

    #[test]
    fn a_limited_number_of_sockets_and_directories_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let socket = |number: usize| UnixListener::bind(dir.path().join(format!("{number}.sock"))).unwrap();
        let _sockets: Vec<_> = (0..SOCKETS_MAX + 3).map(socket).collect();
        for number in 0..DIRS_MAX + 3 {
            let below = dir.path().join(format!("d{number}"));
            std::fs::create_dir(&below).unwrap();
            std::fs::set_permissions(&below, PermissionsExt::from_mode(0o700)).unwrap();
        }
        let found = sockets(dir.path()).unwrap();
        assert_eq!((found.sockets.len(), found.dirs.len()), (SOCKETS_MAX, DIRS_MAX));
    }

    #[tokio::test(start_paused = true)]
    async fn a_plugin_that_does_not_answer_is_not_registered() {
        let began = tokio::time::Instant::now();
        let never = std::future::pending::<Result<tonic::Response<()>, Status>>();
        let late = tokio::time::timeout(CALL_TIMEOUT * 2, within("GetInfo", never)).await;
        assert!(matches!(late, Ok(Err(RegistrationError::Late { .. }))));
        assert!(began.elapsed() >= CALL_TIMEOUT);
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

//! Starts the parts of the control plane.

mod own_address;
mod part_config;

use std::{
    convert::Infallible,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    path::{Path, PathBuf},
    sync::Arc,
};

use coracle_apiserver::{Apiserver, EncryptionHealth, ServiceRange, User};
use coracle_controllers::ControllersConfig;
use coracle_encryption::Encryption;
use coracle_token_signer::TokenSigner;
use futures::FutureExt as _;
use futures::future::LocalBoxFuture;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    clients::{Clients, component_metrics},
    config::ControlPlaneConfig,
    error::Error,
    host_name::host_name,
    kubeconfig,
    pki::{self, Leaf, Pki, PkiError, Usage},
    serving::ServingCertificates,
    store::{self, Opened},
    tls::{self, TlsError},
};
use own_address::own_address;
use part_config::{apiserver_config, controllers_config, reserved_ranges, service_ranges};

const LOOPBACK: [IpAddr; 2] = [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)];

/// A running control plane.
pub struct ControlPlane {
    api: Apiserver,
    pki: Pki,
    address: SocketAddr,
    kubeconfig: PathBuf,
    tasks: TaskTracker,
    /// The lock of the state directory. `None` with the embedded store, which has its own lock.
    _lock: Option<std::fs::File>,
}

/// The credentials of the node in this process.
#[derive(Clone)]
pub struct NodeIdentity {
    /// In-process client with the user `system:node:<name>`.
    pub client: kube::Client,
    /// Serving certificate of the node's kubelet API.
    pub serving_cert: PathBuf,
    /// The key of the serving certificate.
    pub serving_key: PathBuf,
    /// The CA whose clients may call the kubelet API.
    pub client_ca: PathBuf,
    /// Kubeconfig for a node in a separate process.
    pub kubeconfig: PathBuf,
}

/// Starts the control plane. When this returns, the API server accepts requests. Cancelling `shutdown` stops it.
///
/// The future is boxed, because the crate of the caller would otherwise compile the tasks of the control plane.
///
/// # Errors
/// [`Error`]. After an error no part of the control plane runs.
pub fn start(
    config: ControlPlaneConfig,
    shutdown: CancellationToken,
) -> LocalBoxFuture<'static, Result<ControlPlane, Error>> {
    Box::pin(start_parts(config, shutdown))
}

async fn start_parts(config: ControlPlaneConfig, shutdown: CancellationToken) -> Result<ControlPlane, Error> {
    // The store's lock comes first: only the process with the lock may write into the state directory.
    let Opened { store, lock, encryption } = store::open(&config).await.map_err(Error::Store)?;
    let pki = Pki::open(&config.state_dir.join("pki")).map_err(Error::Pki)?;
    store::check_cluster(&*store, &pki, encryption.as_deref()).await.map_err(Error::Store)?;
    let failed = |source| Error::Listen { address: config.listen, source };
    let listener = TcpListener::bind(config.listen).await.map_err(failed)?;
    let bound = listener.local_addr().map_err(failed)?;
    let address = SocketAddr::new(
        config.advertise.unwrap_or_else(|| {
            own_address(bound.ip(), &reserved_ranges(&config), config.service_cidr.is_ipv6())
        }),
        bound.port(),
    );
    let leaf = serving_leaf(&config, address);
    let (certificates, tls) = serving_tls(&pki, &leaf, &config)?;
    let stopped = shutdown.child_token();
    let mut settings = apiserver_config(&config, &pki, address)?;
    if let Some(endpoint) = &config.token_signer {
        let signer = TokenSigner::connect(endpoint, stopped.clone()).await;
        settings.token_signer = Some(signer.map_err(Error::TokenSigner)?);
    }
    let controllers = controllers_config(&config, &pki, address, leaf)?;
    settings.component_metrics = Some(component_metrics(&controllers, &config));
    settings.encryption_health = encryption_health(encryption.as_ref(), &config);
    let api = Apiserver::open(settings, store, stopped.clone()).await;
    let api = api.inspect_err(|_| stopped.cancel()).map_err(Error::Apiserver)?;
    let kubeconfig = config.state_dir.join("admin.kubeconfig");
    let local = local_server(bound);
    write_client_kubeconfigs(&pki, &kubeconfig, &local).map_err(Error::Pki)?;
    let tasks = TaskTracker::new();
    tasks.spawn(api.clone().serve(listener, tls).boxed());
    certificates.follow(&tasks, &stopped);
    if let Some(encryption) =
        encryption.filter(|_| config.encryption_config.as_ref().is_some_and(|file| file.reload))
    {
        tasks.spawn(follow_encryption(encryption, stopped.clone()).boxed());
    }
    let plane = ControlPlane { api, pki, address: bound, kubeconfig, tasks, _lock: lock };
    plane.start_clients(controllers, config, &stopped);
    Ok(plane)
}

/// TLS settings that accept client certificates of the cluster's authority and of the authenticating proxy's authority.
/// The API server determines the authority that signed a certificate.
fn serving_tls(
    pki: &Pki,
    leaf: &Leaf,
    config: &ControlPlaneConfig,
) -> Result<(Arc<ServingCertificates>, Arc<rustls::ServerConfig>), Error> {
    let pair = pki.pair("apiserver", leaf).map_err(Error::Pki)?;
    let mut authorities = pki.authority_pem().to_owned();
    if let Some(path) = config.request_header.as_ref().map(|proxy| &proxy.client_ca_file) {
        let failed = |source| Error::ClientAuthority { path: path.clone(), source };
        authorities.push('\n');
        authorities += &std::fs::read_to_string(path).map_err(failed)?;
    }
    let certificates = ServingCertificates::open(&pair, &config.serving_tls).map_err(Error::Tls)?;
    let certificates = Arc::new(certificates);
    let invalid = |why| Error::Tls(TlsError::Options(why));
    let cryptography = config.serving_tls.provider().map_err(invalid)?;
    let versions = config.serving_tls.versions().map_err(invalid)?;
    let tls = tls::server(certificates.clone(), &authorities, cryptography, versions).map_err(Error::Tls)?;
    Ok((certificates, tls))
}

/// The state of the key management services. `None` if the configuration has no service and a reload cannot add a
/// service.
fn encryption_health(
    encryption: Option<&Arc<Encryption>>,
    config: &ControlPlaneConfig,
) -> Option<EncryptionHealth> {
    let reloads = config.encryption_config.as_ref().is_some_and(|file| file.reload);
    let encryption = encryption.filter(|encryption| reloads || encryption.uses_services())?.clone();
    Some(EncryptionHealth(Arc::new(move || encryption.health().map_err(|error| error.to_string()))))
}

/// Reads the encryption configuration again when its file changes.
async fn follow_encryption(encryption: Arc<Encryption>, shutdown: CancellationToken) {
    let path = encryption.path().to_owned();
    let reload = move || match encryption.reload() {
        Ok(()) => {
            tracing::info!("encryption configuration reloaded");
            true
        }
        Err(error) => {
            tracing::error!(%error, "cannot use the changed encryption configuration; keeping the current one");
            false
        }
    };
    coracle_apiserver::follow_file(path, shutdown, reload).await;
}

fn serving_leaf(config: &ControlPlaneConfig, address: SocketAddr) -> Leaf {
    let (mut names, mut addresses) = (Vec::new(), LOOPBACK.to_vec());
    addresses.push(address.ip());
    addresses.extend(service_ranges(config).iter().filter_map(ServiceRange::own));
    for name in &config.serving_names {
        match name.parse() {
            Ok(address) => addresses.push(address),
            Err(_name) => names.push(name.clone()),
        }
    }
    names.extend(host_name());
    if !config.listen.ip().is_unspecified() {
        addresses.push(config.listen.ip());
    }
    pki::apiserver_leaf(&names, &addresses)
}

/// Writes the administrator's kubeconfig, and creates a certificate for an external scheduler.
fn write_client_kubeconfigs(pki: &Pki, path: &Path, server: &str) -> Result<(), PkiError> {
    pki.pair("scheduler", &Leaf::client("system:kube-scheduler", None))?;
    let admin = pki.pair("admin", &Leaf::client("kubernetes-admin", Some("system:masters")))?;
    let text = kubeconfig::text(server, pki.authority_pem(), "kubernetes-admin", &admin);
    write_if_changed(path, &text)
}

fn write_if_changed(path: &Path, text: &str) -> Result<(), PkiError> {
    if std::fs::read_to_string(path).is_ok_and(|old| old == text) {
        return Ok(());
    }
    Pki::write_secret(path, text)
}

/// The API server's URL for clients on this machine.
fn local_server(bound: SocketAddr) -> String {
    let ip = if bound.ip().is_unspecified() { IpAddr::V4(Ipv4Addr::LOCALHOST) } else { bound.ip() };
    format!("https://{}", SocketAddr::new(ip, bound.port()))
}

// === impl ControlPlane ===

impl ControlPlane {
    /// Starts controllers and scheduler.
    fn start_clients(
        &self,
        controllers: ControllersConfig,
        config: ControlPlaneConfig,
        shutdown: &CancellationToken,
    ) {
        let is_shared = config.etcd.is_some();
        let clients = Clients {
            controllers: (!controllers.selection.is_none())
                .then(|| (self.client_as(User::controllers()), controllers)),
            scheduler: config
                .run_scheduler
                .then(|| (self.client("system:kube-scheduler", &[]), config.scheduler)),
            leases: self.client_as(User::controllers()),
        };
        clients.start(is_shared.then_some(config.election), &self.tasks, shutdown);
    }

    /// An in-process client with any user. Must be called within a tokio runtime.
    #[must_use]
    pub fn client(&self, user: &str, groups: &[&str]) -> kube::Client {
        self.client_as(User::new(user, groups))
    }

    fn client_as(&self, user: User) -> kube::Client {
        let api = self.api.clone();
        let service = tower::service_fn(move |request: http::Request<kube::client::Body>| {
            let (api, user) = (api.clone(), user.clone());
            async move { Ok::<_, Infallible>(api.handle(request, Some(user)).await) }
        });
        kube::Client::new(service, "default")
    }

    /// The cluster's keys and certificates.
    #[must_use]
    pub fn pki(&self) -> &Pki {
        &self.pki
    }

    /// The address on which the API server listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Receives the revision of the store after each change.
    #[must_use]
    pub fn revisions(&self) -> watch::Receiver<u64> {
        self.api.revisions()
    }

    /// The path of the administrator's kubeconfig.
    #[must_use]
    pub fn kubeconfig(&self) -> &Path {
        &self.kubeconfig
    }

    /// The credentials of the node with this name and these addresses.
    ///
    /// # Errors
    /// [`PkiError`] if its certificates cannot be created or written.
    pub fn node_identity(&self, name: &str, addresses: &[IpAddr]) -> Result<NodeIdentity, PkiError> {
        let user = format!("system:node:{name}");
        let mut all = addresses.to_vec();
        all.extend(LOOPBACK);
        let serving = Leaf {
            common_name: user.clone(),
            organization: Some("system:nodes".to_owned()),
            usage: Usage::Server,
            names: vec![name.to_owned(), "localhost".to_owned()],
            addresses: all,
        };
        let serving = self.pki.pair("kubelet", &serving)?;
        let client = self.pki.pair("kubelet-client", &Leaf::client(&user, Some("system:nodes")))?;
        let kubeconfig = self.kubeconfig.with_file_name("kubelet.kubeconfig");
        let text = kubeconfig::text(&local_server(self.address), self.pki.authority_pem(), &user, &client);
        write_if_changed(&kubeconfig, &text)?;
        Ok(NodeIdentity {
            client: self.client(&user, &["system:nodes"]),
            serving_cert: serving.certificate_path,
            serving_key: serving.key_path,
            client_ca: self.pki.authority_path(),
            kubeconfig,
        })
    }

    /// Waits until all tasks have ended after the shutdown.
    pub async fn stopped(self) {
        self.tasks.close();
        self.tasks.wait().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_metrics_of_the_scheduler_are_served_where_it_runs() {
        let mut config = ControlPlaneConfig::new(Path::new("/nonexistent"));
        let text =
            |config: &ControlPlaneConfig| (component_metrics(&ControllersConfig::default(), config).0)();
        assert!(text(&config).contains("scheduler_pending_pods{queue=\"active\"} 0\n"));
        config.run_scheduler = false;
        assert_eq!(text(&config), "");
        config.feature_metrics = "feature 1\n".into();
        assert_eq!(text(&config), "feature 1\n");
    }
}

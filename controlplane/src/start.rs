//! Starts the parts of the control plane.

use std::{
    convert::Infallible,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    path::{Path, PathBuf},
    sync::Arc,
};

use coracle_apiserver::{
    Apiserver, ApiserverConfig, EncryptionHealth, FrontProxy, KubeletTls, ServiceRange, ServiceRanges, User,
};
use coracle_controllers::{AccountTokenSigner, ControllersConfig, Signer};
use coracle_encryption::Encryption;
use coracle_token_signer::TokenSigner;
use futures::FutureExt as _;
use futures::future::LocalBoxFuture;
use ipnetwork::IpNetwork;
use nix::net::if_::InterfaceFlags;
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

const DOMAIN: &str = "cluster.local";
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
    let address =
        SocketAddr::new(config.advertise.unwrap_or_else(|| own_address(bound.ip(), &config)), bound.port());
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
/// The API server determines which authority signed a certificate.
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

fn service_ranges(config: &ControlPlaneConfig) -> ServiceRanges {
    ServiceRanges::new(config.service_cidr, config.secondary_service_cidr)
}

/// The ranges of pods and services.
fn reserved_ranges(config: &ControlPlaneConfig) -> Vec<IpNetwork> {
    let services = [config.service_cidr].into_iter().chain(config.secondary_service_cidr);
    config.cluster_cidrs.iter().copied().chain(services).collect()
}

fn apiserver_config(
    config: &ControlPlaneConfig,
    pki: &Pki,
    address: SocketAddr,
) -> Result<ApiserverConfig, Error> {
    let leaf = Leaf::client("kube-apiserver-kubelet-client", Some("system:masters"));
    let pair = pki.pair("apiserver-kubelet-client", &leaf).map_err(Error::Pki)?;
    Ok(ApiserverConfig {
        advertise: address,
        service_ranges: service_ranges(config),
        service_account_key: pki.service_account_key().map_err(Error::Pki)?,
        token_signer: None,
        issuer: format!("https://kubernetes.default.svc.{DOMAIN}"),
        password_file: config.password_file.clone(),
        token_file: config.token_file.clone(),
        authentication_file: config.authentication_file.clone(),
        oidc: config.oidc.clone(),
        token_webhook: config.token_webhook.clone(),
        request_header: config.request_header.clone(),
        anonymous_auth: config.anonymous_auth,
        authorization: config.authorization.clone(),
        kubelet: KubeletTls(tls::client(&pair, pki.authority_pem()).map_err(Error::Tls)?),
        admission_file: config.admission_file.clone(),
        admission_plugins: config.admission_plugins.clone(),
        initial_resources: config.initial_resources,
        runtime_config: config.runtime_config.clone(),
        features: config.features,
        options: config.options.clone(),
        audit: config.audit.clone(),
        front_proxy: front_proxy(pki).map_err(Error::Pki)?,
        request_timeout: config.request_timeout,
        max_in_flight: config.max_in_flight,
        flags: config.flags.clone(),
        component_metrics: None,
        encryption_health: None,
        own_components: own_components(config),
        shutdown_delay: config.shutdown_delay,
    })
}

/// The parts of the control plane that run in this process, by the names of component statuses.
fn own_components(config: &ControlPlaneConfig) -> Vec<&'static str> {
    let parts = [("controller-manager", !config.controllers.is_none()), ("scheduler", config.run_scheduler)];
    parts.into_iter().filter(|(_, runs)| *runs).map(|(name, _)| name).collect()
}

/// The client certificate for requests to aggregated servers. Its authority signs no other certificate, because a
/// server that trusts the authority accepts any user name in the request headers.
fn front_proxy(pki: &Pki) -> Result<FrontProxy, PkiError> {
    let own = Pki::open(&pki.directory().join("front-proxy"))?;
    let pair = own.pair("front-proxy-client", &Leaf::client("front-proxy-client", None))?;
    Ok(FrontProxy {
        certificate: pair.certificate,
        key: pair.key,
        authority: own.authority_pem().to_owned(),
        client_authority: pki.authority_pem().to_owned(),
    })
}

fn controllers_config(
    config: &ControlPlaneConfig,
    pki: &Pki,
    address: SocketAddr,
    leaf: Leaf,
) -> Result<ControllersConfig, Error> {
    let key = pki.authority_key().map_err(Error::Pki)?;
    let signer = Signer::new(pki.authority_pem(), &key, config.signing_duration).map_err(Error::Signer)?;
    // An API server with an external signer does not accept tokens that are signed with its own key.
    let own_key = config.token_signer.is_none().then(|| pki.service_account_key().map_err(Error::Pki));
    let account_tokens = own_key.transpose()?.and_then(|key| AccountTokenSigner::new(&key));
    Ok(ControllersConfig {
        // The API server writes the status of quotas itself.
        selection: config.controllers.clone().never("resourcequota-controller"),
        cluster_cidrs: config.cluster_cidrs.clone(),
        node_mask_v4: config.node_masks[0],
        node_mask_v6: config.node_masks[1],
        root_ca_pem: Some(pki.authority_pem().to_owned()),
        account_tokens,
        token_clean_up_period: config.token_clean_up_period,
        server: Some(format!("https://{address}")),
        reserved_ranges: reserved_ranges(config),
        server_names: leaf.names,
        server_addresses: leaf.addresses,
        own_node: config.own_node.clone(),
        signer: Some(signer),
        node_balancers: config.node_balancers,
        node_ports: config.options.node_ports.clone(),
        max_finished_pods: config.max_finished_pods,
        load_balancer_pool: config.load_balancer_pool.clone(),
        node_monitor_grace: config.node_monitor_grace,
        autoscaler: config.autoscaler,
        ..ControllersConfig::default()
    })
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

/// The source address that this machine would use to reach other machines. No packet is sent. The address family of
/// services is preferred, because the API server is a service. Without a default route, the first usable address of an
/// interface is returned. If no interface has a usable address, the loopback address is returned.
fn own_address(listen: IpAddr, config: &ControlPlaneConfig) -> IpAddr {
    if !listen.is_unspecified() {
        return listen;
    }
    let routed = |any: IpAddr, far: IpAddr| {
        let socket = UdpSocket::bind((any, 0)).ok()?;
        socket.connect((far, 9)).ok()?;
        Some(socket.local_addr().ok()?.ip())
    };
    // Documentation addresses (RFC 5737, RFC 3849): they are routed like any remote address.
    let v4 = || routed(Ipv4Addr::UNSPECIFIED.into(), Ipv4Addr::new(192, 0, 2, 1).into());
    let v6 = || routed(Ipv6Addr::UNSPECIFIED.into(), Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1).into());
    let v6_first = config.service_cidr.is_ipv6();
    let found = if v6_first { v6().or_else(v4) } else { v4().or_else(v6) };
    if let Some(found) = found.filter(|found| !found.is_loopback()) {
        return found;
    }
    interface_address(&interface_addresses(), &reserved_ranges(config), v6_first).unwrap_or_else(|| {
        tracing::warn!("this machine has no address but loopback: pods cannot reach the API server");
        IpAddr::V4(Ipv4Addr::LOCALHOST)
    })
}

/// The first address that other machines can reach. Addresses of pods and services are skipped. `choose` in the agent
/// selects the same address if there is no default route.
fn interface_address(all: &[IpAddr], reserved: &[IpNetwork], v6_first: bool) -> Option<IpAddr> {
    let is_usable = |ip: &IpAddr| {
        let is_local = match ip {
            IpAddr::V4(ip) => ip.is_link_local(),
            IpAddr::V6(ip) => ip.is_unicast_link_local(),
        };
        !is_local
            && !ip.is_loopback()
            && !ip.is_unspecified()
            && !reserved.iter().any(|network| network.contains(*ip))
    };
    all.iter().copied().filter(is_usable).min_by_key(|ip| ip.is_ipv6() != v6_first)
}

/// The addresses of all interfaces that are up, except bridges and tunnels, which usually belong to a pod network.
fn interface_addresses() -> Vec<IpAddr> {
    let all = match nix::ifaddrs::getifaddrs() {
        Ok(all) => all,
        Err(error) => {
            tracing::warn!(%error, "cannot list the machine's addresses");
            return Vec::new();
        }
    };
    all.filter(|one| one.flags.contains(InterfaceFlags::IFF_UP))
        .filter(|one| !is_virtual(Path::new("/sys/class/net"), &one.interface_name))
        .filter_map(|one| {
            let address = one.address?;
            let v4 = address.as_sockaddr_in().map(|address| IpAddr::V4(address.ip()));
            v4.or_else(|| address.as_sockaddr_in6().map(|address| IpAddr::V6(address.ip())))
        })
        .collect()
}

/// Whether an interface is a bridge or a tunnel. `sys` is `/sys/class/net`.
fn is_virtual(sys: &Path, interface: &str) -> bool {
    let directory = sys.join(interface);
    let uevent = std::fs::read_to_string(directory.join("uevent")).unwrap_or_default();
    let kind = uevent.lines().find_map(|line| line.strip_prefix("DEVTYPE="));
    matches!(kind, Some("bridge" | "vxlan" | "wireguard")) || directory.join("tun_flags").exists()
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
    fn without_a_default_route_an_interface_has_the_address() {
        let all = |list: &[&str]| list.iter().map(|ip| ip.parse().unwrap()).collect::<Vec<IpAddr>>();
        let reserved = ["10.42.0.0/16".parse().unwrap(), "10.43.0.0/16".parse().unwrap()];
        let chosen = |list: &[&str], v6_first: bool| {
            interface_address(&all(list), &reserved, v6_first).map(|ip| ip.to_string()).unwrap_or_default()
        };
        let machine = [
            "127.0.0.1",
            "::1",
            "169.254.1.1",
            "fe80::1",
            "10.42.0.1",
            "10.43.0.1",
            "2001:db8::1",
            "192.0.2.7",
        ];
        assert_eq!(chosen(&machine, false), "192.0.2.7");
        assert_eq!(chosen(&machine, true), "2001:db8::1");
        assert_eq!(chosen(&machine[..7], false), "2001:db8::1");
        assert_eq!(chosen(&machine[..6], false), "");
    }

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

    #[test]
    fn bridges_and_tunnels_are_virtual() {
        let sys = tempfile::tempdir().unwrap();
        let device = |name: &str, uevent: &str| {
            std::fs::create_dir(sys.path().join(name)).unwrap();
            std::fs::write(sys.path().join(name).join("uevent"), uevent).unwrap();
            is_virtual(sys.path(), name)
        };
        assert!(device("br0", "DEVTYPE=bridge\nINTERFACE=br0\nIFINDEX=4\n"));
        assert!(device("vx0", "DEVTYPE=vxlan\nINTERFACE=vx0\n"));
        assert!(!device("eth0", "INTERFACE=eth0\nIFINDEX=2\n"));
    }
}

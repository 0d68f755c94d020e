//! Tests of the server with TLS connections to a port of its own.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::thread::ThreadId;

use futures::FutureExt as _;
use k8s_openapi::api::core::v1::{NodeSystemInfo, PodStatus};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use rcgen::{BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_rustls::client::TlsStream;

use super::*;
use crate::certificate_files::CertificateFiles;
use crate::node::MachineProperties;
use crate::runtime::{Proxy, Remote};
use crate::tls_options::TlsOptions;
use crate::volume::ClaimUsage;

struct Pods {
    pods: Vec<Arc<Pod>>,
    /// The thread of the executor.
    executor: ThreadId,
}

impl PodView for Pods {
    fn pods(&self) -> Vec<Arc<Pod>> {
        self.pods.clone()
    }

    fn status(&self, _uid: &str) -> Option<PodStatus> {
        assert_ne!(std::thread::current().id(), self.executor, "a list of pods is made by the executor");
        None
    }

    fn probes(&self) -> String {
        assert_ne!(std::thread::current().id(), self.executor, "the counts are written by the executor");
        "prober_probe_total 1\n".to_owned()
    }
}

/// A machine with 2 processors and 1 MiB of memory.
pub(super) fn properties() -> MachineProperties {
    let capacity = [("cpu", "2"), ("memory", "1Mi")];
    MachineProperties {
        name: "n1".to_owned(),
        ips: Vec::new(),
        capacity: capacity.map(|(name, value)| (name.to_owned(), Quantity(value.to_owned()))).into(),
        allocatable: BTreeMap::new(),
        memory_of_pods: 0,
        local_volume_kib: None,
        info: NodeSystemInfo {
            boot_id: "b".to_owned(),
            machine_id: "m".to_owned(),
            system_uuid: "s".to_owned(),
            ..NodeSystemInfo::default()
        },
    }
}

/// An API server that allows the token `good` to get `nodes/pods`, and the certificate of `scraper` to get
/// `nodes/metrics`.
fn reviews() -> kube::Client {
    let service = tower::service_fn(|request: http::Request<kube::client::Body>| async move {
        let body = request.into_body().collect_bytes().await.expect("body");
        let mut review: serde_json::Value = serde_json::from_slice(&body).expect("json");
        let (spec, asked) = (&review["spec"], &review["spec"]["resourceAttributes"]["subresource"]);
        review["status"] = match review["kind"].as_str() {
            Some("TokenReview") => {
                json!({"authenticated": spec["token"] == "good", "user": {"username": "robot"}})
            }
            _ => {
                json!({"allowed": spec["user"] == "robot" && asked == "pods" || spec["user"] == "scraper" && asked == "metrics"})
            }
        };
        let answer = http::Response::new(kube::client::Body::from(review.to_string().into_bytes()));
        Ok::<_, Infallible>(answer)
    });
    kube::Client::new(service, "default")
}

struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
    der: CertificateDer<'static>,
}

struct Identity {
    pem: String,
    key_pem: String,
    der: CertificateDer<'static>,
    key: PrivateKeyDer<'static>,
}

impl Authority {
    fn new() -> Authority {
        let key = KeyPair::generate().expect("key");
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, "test CA");
        let cert = params.self_signed(&key).expect("certificate");
        Authority { pem: cert.pem(), der: cert.der().clone(), issuer: Issuer::new(params, key) }
    }

    fn issue(&self, user: &str, group: &str) -> Identity {
        let key = KeyPair::generate().expect("key");
        let mut params = CertificateParams::new(vec!["127.0.0.1".to_owned()]).expect("names");
        params.distinguished_name.push(DnType::CommonName, user);
        params.distinguished_name.push(DnType::OrganizationName, group);
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ClientAuth, ExtendedKeyUsagePurpose::ServerAuth];
        let cert = params.signed_by(&key, &self.issuer).expect("certificate");
        let key_der = PrivateKeyDer::try_from(key.serialize_der()).expect("key");
        Identity { pem: cert.pem(), key_pem: key.serialize_pem(), der: cert.der().clone(), key: key_der }
    }
}

struct Running {
    address: SocketAddr,
    authority: Authority,
    shutdown: CancellationToken,
    dir: PathBuf,
}

fn config(dir: &Path, authority: &Authority) -> ServerConfig {
    std::fs::create_dir_all(dir).expect("temp dir");
    let node = authority.issue("system:node:n1", "system:nodes");
    let path = |name: &str, text: &str| {
        std::fs::write(dir.join(name), text).expect("file");
        dir.join(name)
    };
    ServerConfig {
        listen: SocketAddr::from(([127, 0, 0, 1], 0)),
        certificate: Certificate::Files(CertificateFiles {
            certificate: path("cert", &node.pem),
            key: path("key", &node.key_pem),
        }),
        client_ca: Some(path("ca", &authority.pem)),
        tls: TlsOptions::default(),
        handlers: ApiHandlers::default(),
    }
}

#[test]
fn handlers_that_are_switched_off_do_not_respond() {
    let off = |debugging, system_log, path| {
        disabled(ApiHandlers { debugging, system_log }, &Route::of(path).expect("a path"))
    };
    let refused = |text| Some((StatusCode::METHOD_NOT_ALLOWED, text));
    for path in ["/exec/ns/p/c", "/containerLogs/ns/p/c", "/logs/", "/runningpods"] {
        assert_eq!(off(false, true, path), refused("Debug endpoints are disabled.\n"), "{path}");
        assert_eq!(off(true, true, path), None, "{path}");
    }
    for path in ["/configz", "/checkpoint/ns/p/c", "/statusz", "/flagz"] {
        assert_eq!(off(false, true, path), Some((StatusCode::NOT_FOUND, NOT_FOUND)), "{path}");
        assert_eq!(off(true, false, path), None, "{path}");
    }
    for path in ["/pods", "/metrics", "/stats/summary", "/healthz"] {
        assert_eq!(off(false, false, path), None, "{path}");
    }
    assert_eq!(off(true, false, "/logs/syslog"), refused("logs endpoint is disabled.\n"));
    assert_eq!(off(true, false, "/containerLogs/ns/p/c"), None);
}

impl Running {
    async fn start(name: &str, pods: Vec<serde_json::Value>) -> Running {
        Running::start_with(name, pods, Share::KubeletConnections.limits()).await
    }

    async fn start_with(name: &str, pods: Vec<serde_json::Value>, connections: Limits) -> Running {
        Running::start_configured(name, pods, |_config| {}, connections).await
    }

    async fn start_configured(
        name: &str,
        pods: Vec<serde_json::Value>,
        configure: impl FnOnce(&mut ServerConfig),
        connections: Limits,
    ) -> Running {
        let dir = std::env::temp_dir().join(format!("coracle-server-{}-{name}", std::process::id()));
        let authority = Authority::new();
        let mut config = config(&dir, &authority);
        configure(&mut config);
        let server = Server::bind(&config).await.expect("bind");
        assert_eq!(server.connections, Share::KubeletConnections.limits());
        let server = Server { connections, ..server };
        let address = server.address().expect("address");
        let pods = pods.into_iter().map(|pod| Arc::new(serde_json::from_value(pod).expect("pod"))).collect();
        // These requests never reach the runtime: nothing listens on this port.
        let nowhere = tonic::transport::Endpoint::from_static("http://127.0.0.1:1").connect_lazy();
        let backend = Backend {
            pods: Arc::new(Pods { pods, executor: std::thread::current().id() }),
            runtime: Arc::new(Remote::new(nowhere)),
            streams: Arc::new(Proxy),
            access: Arc::new(Access::new(reviews(), "n1")),
            configuration: Arc::new(serde_json::json!({"kind": "KubeletConfiguration", "maxPods": 110})),
            pages: Arc::new(ComponentPages::new([("max-pods".to_owned(), "110".to_owned())].into())),
            logs: LogWatches::open(),
            ends: Arc::default(),
            metrics: Arc::default(),
            claims: ClaimUsage::new(dir.join("pods")),
            identity: crate::config::Identity::Files(CertificateFiles::default()),
            network: None,
            properties: Arc::new(properties()),
            state_dir: dir.clone(),
            log_dir: dir.clone(),
            disk_usages: None,
            cgroups: None,
            dns: None,
        };
        let shutdown = CancellationToken::new();
        tokio::spawn(server.run(backend, shutdown.clone()));
        Running { address, authority, shutdown, dir }
    }

    /// Status line and body of a request. None if the handshake failed.
    async fn get(&self, path: &str, identity: Option<Identity>) -> Option<(String, String)> {
        self.get_with(path, identity, "").await
    }

    /// Like [`Self::get`], with an additional header line.
    async fn get_with(
        &self,
        path: &str,
        identity: Option<Identity>,
        header: &str,
    ) -> Option<(String, String)> {
        let mut stream = self.connect(identity).await?;
        let request = format!("GET {path} HTTP/1.1\r\nHost: n1\r\n{header}Connection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.ok()?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await.ok()?;
        let answer = String::from_utf8(answer).expect("text");
        let (head, body) = answer.split_once("\r\n\r\n")?;
        Some((head.lines().next()?.to_owned(), body.to_owned()))
    }

    /// A TLS connection. None if the handshake failed.
    async fn connect(&self, identity: Option<Identity>) -> Option<TlsStream<TcpStream>> {
        self.connect_by(identity, rustls::ALL_VERSIONS).await
    }

    /// Like [`Self::connect`], by one of these versions of TLS.
    async fn connect_by(
        &self,
        identity: Option<Identity>,
        versions: &[&'static rustls::SupportedProtocolVersion],
    ) -> Option<TlsStream<TcpStream>> {
        let mut roots = rustls::RootCertStore::empty();
        roots.add(self.authority.der.clone()).expect("CA");
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let client = rustls::ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(versions)
            .expect("versions");
        let client = client.with_root_certificates(roots);
        let client = match identity {
            Some(identity) => {
                client.with_client_auth_cert(vec![identity.der], identity.key).expect("identity")
            }
            None => client.with_no_client_auth(),
        };
        let stream = TcpStream::connect(self.address).await.expect("connect");
        let name = ServerName::try_from("127.0.0.1").expect("name");
        tokio_rustls::TlsConnector::from(Arc::new(client)).connect(name, stream).await.ok()
    }

    async fn status(&self, path: &str, identity: Option<Identity>) -> Option<String> {
        let (line, _) = self.get(path, identity).await?;
        line.split(' ').nth(1).map(str::to_owned)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.shutdown.cancel();
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

#[tokio::test]
async fn only_the_clusters_own_parts_get_an_answer() {
    let server = Running::start("callers", Vec::new()).await;
    let own = |user: &str, group: &str| Some(server.authority.issue(user, group));
    assert_eq!(server.status("/healthz", None).await.as_deref(), Some("401"));
    assert_eq!(server.status("/healthz", own("root", "system:masters")).await.as_deref(), Some("200"));
    assert_eq!(server.status("/pods", None).await.as_deref(), Some("401"));
    assert_eq!(server.status("/configz", None).await.as_deref(), Some("401"));
    assert_eq!(server.status("/pods", own("system:node:n2", "system:nodes")).await.as_deref(), Some("403"));
    assert_eq!(
        server.status("/pods", own("kube-apiserver-kubelet-client", "x")).await.as_deref(),
        Some("200")
    );
    assert_eq!(server.status("/pods", own("root", "system:masters")).await.as_deref(), Some("200"));
    let stranger = Authority::new().issue("root", "system:masters");
    assert_eq!(server.status("/pods", Some(stranger)).await, None);
}

#[tokio::test]
async fn tokens_and_other_certificates_are_reviewed() {
    let server = Running::start("tokens", Vec::new()).await;
    let bearer = async |path: &str, token: &str| {
        let header = format!("Authorization: Bearer {token}\r\n");
        let (line, _) = server.get_with(path, None, &header).await.expect("an answer");
        line.split(' ').nth(1).map(str::to_owned).expect("a status")
    };
    assert_eq!(bearer("/pods", "good").await, "200");
    assert_eq!(bearer("/pods", "bad").await, "401");
    assert_eq!(bearer("/stats/summary", "good").await, "403");
    assert_eq!(bearer("/configz", "good").await, "403");
    assert_eq!(bearer("/healthz", "good").await, "403");
    assert_eq!(bearer("/exec/ns/p/c?command=id&output=1", "good").await, "403");
    let scraper = |path: &'static str| server.status(path, Some(server.authority.issue("scraper", "x")));
    assert_eq!(scraper("/pods").await.as_deref(), Some("403"));
    assert_ne!(scraper("/metrics/resource").await.as_deref(), Some("403"));
    assert_ne!(scraper("/metrics/cadvisor").await.as_deref(), Some("403"));
    assert_eq!(bearer("/metrics/probes", "good").await, "403");
    let probes = server.get("/metrics/probes", Some(server.authority.issue("scraper", "x"))).await;
    assert_eq!(probes.expect("an answer").1, "prober_probe_total 1\n");
}

#[tokio::test]
async fn more_silent_connections_than_the_limit_are_refused() {
    let limits = Limits { total: 2, per_source: 2, unauthenticated: 2, unauthenticated_per_source: 2 };
    let server = Running::start_with("silent", Vec::new(), limits).await;
    let mut first = server.connect(None).await.expect("a connection");
    let _second = server.connect(None).await.expect("a connection");
    assert!(server.connect(None).await.is_none(), "a third connection is served");
    let closed = tokio::time::timeout(Duration::from_secs(30), first.read(&mut [0])).await;
    assert!(matches!(closed, Ok(Ok(0) | Err(_))), "the oldest connection is not closed");
}

#[tokio::test]
async fn a_client_without_a_certificate_sends_short_headers() {
    let server = Running::start("headers", Vec::new()).await;
    let mut stream = server.connect(None).await.expect("a connection");
    let mut head = "GET /pods HTTP/1.1\r\nHost: n1\r\nA: ".to_owned();
    head.push_str(&"x".repeat(UNCERTIFIED_HEADER - head.len()));
    stream.write_all(head.as_bytes()).await.expect("sent");
    let mut status = [0; 12];
    stream.read_exact(&mut status).await.expect("an answer before the header's end");
    assert_eq!(&status, b"HTTP/1.1 431");
    let status = async |identity: Option<Identity>, header: String| {
        let answer = server.get_with("/pods", identity, &header).await;
        answer.and_then(|(line, _)| line.split(' ').nth(1).map(str::to_owned))
    };
    let of_a_token = format!("Authorization: Bearer good\r\nA: {}\r\n", "x".repeat(48 << 10));
    assert_eq!(status(None, of_a_token).await.as_deref(), Some("200"));
    let administrator = Some(server.authority.issue("root", "system:masters"));
    let long = format!("A: {}\r\n", "x".repeat(300 << 10));
    assert_eq!(status(administrator, long).await.as_deref(), Some("200"));
}

#[tokio::test]
async fn unread_responses_share_a_bounded_memory() {
    let size = 20 << 20;
    let metadata = json!({"name": "p", "namespace": "n", "uid": "u", "annotations": {"a": "x".repeat(size)}});
    let server = Running::start("unread", vec![json!({ "metadata": metadata })]).await;
    let begin = async || {
        let administrator = server.authority.issue("root", "system:masters");
        let mut stream = server.connect(Some(administrator)).await.expect("a connection");
        let request = b"GET /pods HTTP/1.1\r\nHost: n1\r\nConnection: close\r\n\r\n";
        stream.write_all(request).await.expect("sent");
        let mut status = [0; 12];
        stream.read_exact(&mut status).await.expect("an answer");
        assert_eq!(&status, b"HTTP/1.1 200");
        stream
    };
    let (mut first, mut second) = (begin().await, begin().await);
    let (mut of_first, mut of_second) = (Vec::new(), Vec::new());
    // The connection of the first response was closed for the second response.
    let _error = first.read_to_end(&mut of_first).await;
    second.read_to_end(&mut of_second).await.expect("a complete answer");
    assert!(of_first.len() < size && of_second.len() > size, "{} {}", of_first.len(), of_second.len());
}

#[tokio::test]
async fn metrics_are_served_while_the_runtime_fails_and_count_all_requests() {
    let server = Running::start("metrics", Vec::new()).await;
    assert_eq!(server.status("/pods", None).await.as_deref(), Some("401"));
    assert_eq!(server.status("/unknown/text", None).await.as_deref(), Some("401"));
    let scraped = server.get("/metrics", Some(server.authority.issue("scraper", "x"))).await;
    let text = scraped.expect("an answer").1;
    let count = |path: &str| {
        let labels =
            format!("long_running=\"false\",method=\"GET\",path=\"{path}\",server_type=\"readwrite\"");
        text.contains(&format!("\nkubelet_http_requests_total{{{labels}}} 1\n"))
    };
    assert!(count("pods") && count("other"), "{text}");
    assert!(text.contains("\nkubelet_node_name{node=\"n1\"} 1\n"), "{text}");
    assert!(text.contains("\nprocess_start_time_seconds "), "{text}");
    let checks = server.get("/metrics/slis", Some(server.authority.issue("scraper", "x"))).await;
    let checks = checks.expect("an answer").1;
    assert!(checks.ends_with("\nkubernetes_healthcheck{name=\"ping\",type=\"healthz\"} 1\n"), "{checks}");
    assert!(!text.contains("unknown/text") && !text.contains("kubelet_running_pods"), "{text}");
}

#[tokio::test]
async fn errors_are_those_of_the_kubelet() {
    let pod = json!({"metadata": {"name": "p", "namespace": "ns", "uid": "u"}, "spec": {"containers": [{"name": "c"}]}});
    let server = Running::start("absent", vec![pod]).await;
    let get = async |path: &str| {
        server.get(path, Some(server.authority.issue("root", "system:masters"))).await.expect("an answer")
    };
    let (_, pods) = get("/pods").await;
    assert_eq!(
        serde_json::from_str::<serde_json::Value>(&pods).expect("json")["items"][0]["metadata"]["name"],
        "p"
    );
    let (_, configuration) = get("/configz").await;
    let configuration: serde_json::Value = serde_json::from_str(&configuration).expect("json");
    assert_eq!(configuration["kubeletconfig"]["maxPods"], 110);
    assert!(get("/nowhere").await.0.contains("404"));
    assert_eq!(get("/healthz/log").await.1, "ok");
    assert!(get("/healthz?verbose").await.1.ends_with("[+]syncloop ok\nhealthz check passed\n"));
    assert!(get("/checkpoint/ns/p/c").await.0.contains("405"));
    assert!(get("/containerLogs/ns/other/c").await.1.contains("pod \"other\" does not exist"));
    assert!(get("/containerLogs/ns/p/x").await.1.contains("container \"x\" not found in pod \"p\""));
    assert!(get("/containerLogs/ns/p/c?tailLines=x").await.0.contains("422"));
    assert!(get("/exec/ns/other/c?command=ls&output=1").await.1.contains("pod does not exist"));
    assert!(get("/portForward/ns/other").await.0.contains("404"));
    assert!(get("/runningpods/").await.0.contains("500"), "the runtime does not answer");
}

#[tokio::test]
async fn the_pages_of_the_kubelet_are_text_or_objects() {
    let server = Running::start("pages", Vec::new()).await;
    let get = async |path: &str, accept: &str| {
        let identity = server.authority.issue("root", "system:masters");
        let header = format!("Accept: {accept}\r\n");
        server.get_with(path, Some(identity), &header).await.expect("an answer")
    };
    let (_, text) = get("/statusz", "*/*").await;
    assert!(
        text.contains("\nkubelet statusz\n") && text.contains("\nBinary version: 1.36.0+coracle."),
        "{text}"
    );
    assert!(get("/flagz", "text/plain").await.1.contains("\nmax-pods=110\n"));
    let accept = "application/json;as=Flagz;g=config.k8s.io;v=v1beta1";
    let flags: serde_json::Value = serde_json::from_str(&get("/flagz", accept).await.1).expect("json");
    assert_eq!(flags["flags"], json!({"max-pods": "110"}));
    assert!(get("/statusz", "application/json").await.0.contains("406"));
    let stranger = |path: &'static str| server.status(path, Some(server.authority.issue("scraper", "x")));
    assert_eq!(stranger("/statusz").await.as_deref(), Some("403"));
    assert_eq!(stranger("/flagz").await.as_deref(), Some("403"));
}

#[tokio::test]
async fn the_minimum_version_of_tls_and_its_cipher_suites_apply_to_handshakes() {
    use rustls::version::{TLS12, TLS13};
    let start = async |name: &str, tls: TlsOptions| {
        let limits = Share::KubeletConnections.limits();
        Running::start_configured(name, Vec::new(), |config| config.tls = tls, limits).await
    };
    let both = start("tls-all", TlsOptions::default()).await;
    assert!(both.connect_by(None, &[&TLS12]).await.is_some());
    let only_13 = start("tls-13", TlsOptions { requires_tls13: true, ..TlsOptions::default() }).await;
    assert!(only_13.connect_by(None, &[&TLS12]).await.is_none());
    assert!(only_13.connect_by(None, &[&TLS13]).await.is_some());
    let suite = "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256".to_owned();
    let chosen = start("tls-suite", TlsOptions { cipher_suites: vec![suite], ..TlsOptions::default() }).await;
    let connection = chosen.connect_by(None, &[&TLS12]).await.expect("a connection");
    let used = connection.get_ref().1.negotiated_cipher_suite().map(|suite| suite.suite());
    assert_eq!(used, Some(rustls::CipherSuite::TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256));
}

#[tokio::test]
async fn a_server_without_debugging_handlers_serves_pods_and_no_logs() {
    let off = ApiHandlers { debugging: false, system_log: true };
    let (pods, limits) = (Vec::new(), Share::KubeletConnections.limits());
    let server = Running::start_configured("handlers", pods, |config| config.handlers = off, limits).await;
    let status =
        |path: &'static str| server.status(path, Some(server.authority.issue("root", "system:masters")));
    assert_eq!(status("/containerLogs/ns/p/c").await.as_deref(), Some("405"));
    assert_eq!(status("/configz").await.as_deref(), Some("404"));
    assert_eq!(status("/pods").await.as_deref(), Some("200"));
}

#[tokio::test]
async fn a_taken_port_and_a_bad_certificate_are_one_sentence() {
    let dir = std::env::temp_dir().join(format!("coracle-server-{}-bad", std::process::id()));
    let good = config(&dir, &Authority::new());
    let first = Server::bind(&good).await.expect("bind");
    let taken = ServerConfig { listen: first.address().expect("address"), ..good.clone() };
    let error = Server::bind(&taken).await.err().expect("taken");
    assert!(chain(&error).starts_with("cannot listen on 127.0.0.1:"), "{error}");
    let bad = ServerConfig { client_ca: Some(dir.join("key")), ..good };
    assert!(matches!(Server::bind(&bad).await.err(), Some(ServerError::Certificate { .. })));
    std::fs::remove_dir_all(&dir).expect("clean up");
}

#[tokio::test]
async fn few_responses_with_the_usage_of_all_pods_are_made_at_once() {
    let mut permits = Vec::new();
    for path in ["/stats/summary", "/metrics/resource", "/metrics/cadvisor", "/stats/summary"] {
        permits.push(measuring(&Route::of(path).expect("path")).await.expect("measured"));
    }
    assert_eq!(permits.len(), MEASUREMENTS);
    assert!(measuring(&Route::StatsSummary).now_or_never().is_none(), "it waits");
    assert!(measuring(&Route::Metrics).now_or_never().is_some_and(|permit| permit.is_none()));
}

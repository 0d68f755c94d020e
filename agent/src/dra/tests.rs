//! Tests of dynamic resource allocation with a driver that serves gRPC on unix sockets.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::Mutex;
use std::time::Duration;

use coracle_proto::dra as api;
use coracle_proto::dra::dra_plugin_server::{DraPlugin, DraPluginServer};
use coracle_proto::dra_health as health_api;
use coracle_proto::dra_health::dra_resource_health_server::{DraResourceHealth, DraResourceHealthServer};
use coracle_proto::plugin_registration as registration_api;
use coracle_proto::plugin_registration::registration_server::{Registration, RegistrationServer};
use coracle_testing::until;
use futures::StreamExt as _;
use futures::future::{BoxFuture, FutureExt};
use futures::stream::{self, BoxStream};
use http::Request;
use serde_json::{Value, json};
use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::task::AbortOnDropHandle;
use tonic::{Response, Status};

use super::*;

const DRIVER: &str = "gpu.example.com";
const LIMIT: Duration = Duration::from_secs(60);

/// The API server: claims by path, and the requests that it got.
#[derive(Clone, Default)]
struct Server {
    claims: Arc<Mutex<BTreeMap<String, Value>>>,
    requests: Arc<Mutex<Vec<String>>>,
}

impl Server {
    fn put(&self, name: &str, pods: &[&str], driver: &str) {
        let reserved: Vec<Value> =
            pods.iter().map(|uid| json!({"resource": "pods", "name": uid, "uid": uid})).collect();
        let results = json!([{"driver": driver, "pool": "n", "device": "0", "request": "r"}]);
        let claim = json!({"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
            "metadata": {"name": name, "namespace": "ns", "uid": format!("uid-{name}")}, "spec": {},
            "status": {"reservedFor": reserved, "allocation": {"devices": {"results": results}}}});
        self.claims.lock().unwrap().insert(name.to_owned(), claim);
    }

    fn client(&self) -> Client {
        let server = self.clone();
        let service = tower::service_fn(move |request: Request<kube::client::Body>| {
            let path = request.uri().path().to_owned();
            server.requests.lock().unwrap().push(format!("{} {}", request.method(), request.uri()));
            let found =
                path.rsplit('/').next().and_then(|name| server.claims.lock().unwrap().get(name).cloned());
            let missing = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 404,
                "reason": "NotFound", "message": "not found"});
            let deleted = json!({"kind": "Status", "apiVersion": "v1", "status": "Success", "code": 200});
            let (status, body) = match found {
                Some(claim) => (200, claim),
                None if request.method() == http::Method::DELETE => (200, deleted),
                None => (404, missing),
            };
            let body = http_body_util::Full::new(bytes::Bytes::from(body.to_string()));
            let response = http::Response::builder().status(status).body(body).unwrap();
            async move { Ok::<_, std::convert::Infallible>(response) }
        });
        Client::new(service, "ns")
    }
}

/// A driver: the calls that it got, and how it answers.
#[derive(Clone, Default)]
struct Plugin {
    calls: Arc<Mutex<Vec<String>>>,
    fails: Arc<Mutex<Option<String>>>,
    /// Calls wait for a permit of this semaphore. None if they do not wait.
    gate: Option<Arc<tokio::sync::Semaphore>>,
    info: registration_api::PluginInfo,
    notified: Arc<tokio::sync::watch::Sender<Option<registration_api::RegistrationStatus>>>,
}

impl Plugin {
    fn note(&self, call: &str, claims: &[api::Claim]) -> String {
        let names: Vec<&str> = claims.iter().map(|claim| claim.name.as_str()).collect();
        self.calls.lock().unwrap().push(format!("{call} {}", names.join(",")));
        self.fails.lock().unwrap().clone().unwrap_or_default()
    }

    fn calls(&self) -> Vec<String> {
        std::mem::take(&mut self.calls.lock().unwrap())
    }
}

#[tonic::async_trait]
impl DraPlugin for Plugin {
    async fn node_prepare_resources(
        &self,
        request: tonic::Request<api::NodePrepareResourcesRequest>,
    ) -> Result<Response<api::NodePrepareResourcesResponse>, Status> {
        let claims = request.into_inner().claims;
        let error = self.note("prepare", &claims);
        if let Some(gate) = &self.gate {
            gate.acquire().await.unwrap().forget();
        }
        let device = |claim: &api::Claim| api::Device {
            request_names: vec!["r".to_owned()],
            pool_name: "n".to_owned(),
            device_name: "0".to_owned(),
            cdi_device_ids: vec![format!("example.com/gpu={}", claim.name)],
        };
        let results = claims.iter().map(|claim| {
            let devices = vec![device(claim)];
            (claim.uid.clone(), api::NodePrepareResourceResponse { devices, error: error.clone() })
        });
        let claims: HashMap<_, _> = results.collect();
        Ok(Response::new(api::NodePrepareResourcesResponse { claims }))
    }

    async fn node_unprepare_resources(
        &self,
        request: tonic::Request<api::NodeUnprepareResourcesRequest>,
    ) -> Result<Response<api::NodeUnprepareResourcesResponse>, Status> {
        let claims = request.into_inner().claims;
        let error = self.note("unprepare", &claims);
        let results = claims
            .iter()
            .map(|claim| (claim.uid.clone(), api::NodeUnprepareResourceResponse { error: error.clone() }));
        let claims: HashMap<_, _> = results.collect();
        Ok(Response::new(api::NodeUnprepareResourcesResponse { claims }))
    }
}

#[tonic::async_trait]
impl Registration for Plugin {
    async fn get_info(
        &self,
        _request: tonic::Request<registration_api::InfoRequest>,
    ) -> Result<Response<registration_api::PluginInfo>, Status> {
        Ok(Response::new(self.info.clone()))
    }

    async fn notify_registration_status(
        &self,
        request: tonic::Request<registration_api::RegistrationStatus>,
    ) -> Result<Response<registration_api::RegistrationStatusResponse>, Status> {
        self.notified.send_replace(Some(request.into_inner()));
        Ok(Response::new(registration_api::RegistrationStatusResponse {}))
    }
}

/// Reports the device `0` of the pool `n` as unhealthy.
struct UnhealthyDevice;

#[tonic::async_trait]
impl DraResourceHealth for UnhealthyDevice {
    type NodeWatchResourcesStream =
        BoxStream<'static, Result<health_api::NodeWatchResourcesResponse, Status>>;

    async fn node_watch_resources(
        &self,
        _request: tonic::Request<health_api::NodeWatchResourcesRequest>,
    ) -> Result<Response<Self::NodeWatchResourcesStream>, Status> {
        let device = health_api::DeviceIdentifier { pool_name: "n".to_owned(), device_name: "0".to_owned() };
        let health = health_api::DeviceHealth {
            device: Some(device),
            health: health_api::HealthStatus::Unhealthy.into(),
            last_updated_time: 0,
            health_check_timeout_seconds: 3600,
            message: "hot".to_owned(),
        };
        let report = health_api::NodeWatchResourcesResponse { devices: vec![health] };
        Ok(Response::new(stream::iter([Ok(report)]).chain(stream::pending()).boxed()))
    }
}

/// Accepts the device plugins of one resource.
struct DevicePlugins;

impl DevicePluginHandler for DevicePlugins {
    fn register_watched(&self, plugin: WatchedPlugin) -> BoxFuture<'static, Result<PluginEnd, String>> {
        let WatchedPlugin { resource, versions, mut link } = plugin;
        let result = if (resource.as_str(), versions.as_slice()) == ("x.io/a", &["v1beta1".to_owned()][..]) {
            Ok(async move { link.closed().await }.boxed())
        } else {
            Err(format!("no plugin of {resource}"))
        };
        std::future::ready(result).boxed()
    }
}

/// A node with its directories.
struct Node {
    dir: tempfile::TempDir,
    server: Server,
}

impl Node {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(dir.path().join("plugins_registry")).unwrap();
        std::fs::create_dir_all(dir.path().join("plugins")).unwrap();
        Self { dir, server: Server::default() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// An agent, after a boot of this name. It runs until it is dropped.
    fn agent(&self, boot: &str) -> (Dra, AbortOnDropHandle<()>) {
        let config = DraConfig {
            node: "n".to_owned(),
            registry: self.path("plugins_registry"),
            records: self.path("claims"),
        };
        let dra = Dra::open(config, self.server.client(), ApiHealth::default(), boot);
        let running = AbortOnDropHandle::new(tokio::spawn(dra.clone().run(Arc::new(DevicePlugins))));
        (dra, running)
    }

    /// A driver that serves at both sockets until it is dropped, and its registration.
    fn driver(&self, info: registration_api::PluginInfo) -> (Plugin, AbortOnDropHandle<()>) {
        self.serve(Plugin { info, ..Plugin::default() })
    }

    fn serve(&self, plugin: Plugin) -> (Plugin, AbortOnDropHandle<()>) {
        let endpoint = serve(&self.path("plugins/gpu.sock"), plugin.clone());
        let registration = serve(&self.path("plugins_registry/gpu-reg.sock"), plugin.clone());
        let serving = async move {
            tokio::join!(endpoint, registration);
        };
        (plugin, AbortOnDropHandle::new(tokio::spawn(serving)))
    }

    fn info(&self) -> registration_api::PluginInfo {
        registration_api::PluginInfo {
            r#type: "DRAPlugin".to_owned(),
            name: DRIVER.to_owned(),
            endpoint: self.path("plugins/gpu.sock").to_string_lossy().into_owned(),
            supported_versions: vec!["v1.DRAPlugin".to_owned()],
        }
    }
}

fn serve(path: &Path, plugin: Plugin) -> BoxFuture<'static, ()> {
    let _ = std::fs::remove_file(path);
    let incoming = UnixListenerStream::new(UnixListener::bind(path).unwrap());
    let services = tonic::transport::Server::builder()
        .add_service(DraPluginServer::new(plugin.clone()))
        .add_service(RegistrationServer::new(plugin));
    async move { services.serve_with_incoming(incoming).await.unwrap() }.boxed()
}

/// The answer to the plugin's registration.
async fn notified(plugin: &Plugin) -> registration_api::RegistrationStatus {
    let mut notified = plugin.notified.subscribe();
    let notified =
        tokio::time::timeout(LIMIT, notified.wait_for(Option::is_some)).await.expect("registered").unwrap();
    notified.clone().unwrap()
}

fn pod(uid: &str, claim: &str) -> Pod {
    let container = json!({"name": "c", "resources": {"claims": [{"name": "a", "request": "r"}]}});
    serde_json::from_value(json!({"metadata": {"name": uid, "namespace": "ns", "uid": uid}, "spec":
        {"containers": [container], "resourceClaims": [{"name": "a", "resourceClaimName": claim}]}}))
    .unwrap()
}

fn devices(dra: &Dra, pod: &Pod) -> Result<Vec<String>, ClaimError> {
    dra.devices(pod, &pod.spec.as_ref().unwrap().containers[0])
}

#[tokio::test]
async fn claims_are_prepared_once_given_to_containers_and_unprepared_after_the_last_pod() {
    let node = Node::new();
    node.server.put("c", &["p", "q"], DRIVER);
    let (dra, _running) = node.agent("boot");
    let (plugin, _serving) = node.driver(node.info());
    assert_eq!(notified(&plugin).await.error, "");
    let (first, second) = (pod("p", "c"), pod("q", "c"));
    assert!(matches!(devices(&dra, &first), Err(ClaimError::NotPrepared { .. })));
    for pod in [&first, &first, &second] {
        dra.prepare(pod).await.unwrap();
        assert_eq!(devices(&dra, pod).unwrap(), ["example.com/gpu=c"]);
    }
    assert_eq!(plugin.calls(), ["prepare c"]);
    dra.unprepare("p").await.unwrap();
    assert_eq!((plugin.calls().len(), dra.holds("p"), dra.holds("q")), (0, false, true));
    *plugin.fails.lock().unwrap() = Some("busy".to_owned());
    let error = coracle_error_chain::chain(&dra.unprepare("q").await.unwrap_err());
    assert!(error.contains("ResourceClaim c: busy") && dra.holds("q"), "{error}");
    *plugin.fails.lock().unwrap() = None;
    dra.unprepare("q").await.unwrap();
    dra.unprepare("q").await.unwrap();
    assert_eq!(plugin.calls(), ["unprepare c", "unprepare c"]);
    assert!(!dra.holds("q") && std::fs::read_dir(node.path("claims")).unwrap().next().is_none());
}

#[tokio::test]
async fn the_end_of_a_pod_waits_for_the_preparation_of_a_shared_claim() {
    let node = Node::new();
    node.server.put("c", &["p", "q"], DRIVER);
    let (dra, _running) = node.agent("boot");
    let gate = Arc::new(tokio::sync::Semaphore::new(0));
    let slow = Plugin { info: node.info(), gate: Some(Arc::clone(&gate)), ..Plugin::default() };
    let (plugin, _serving) = node.serve(slow);
    notified(&plugin).await;
    let prepare = |uid: &'static str| {
        let dra = dra.clone();
        AbortOnDropHandle::new(tokio::spawn(async move { dra.prepare(&pod(uid, "c")).await }))
    };
    let first = prepare("p");
    until("the plugin is called", 10, || plugin.calls.lock().unwrap().len() == 1).await;
    let second = prepare("q");
    // The second pod waits for the first one. Then it is deleted.
    let waits = || Arc::strong_count(&dra.shared.claims.of(&Key::new("ns", "c"))) > 2;
    until("the second pod waits", 10, waits).await;
    drop(second);
    let unprepared = dra.unprepare("q");
    gate.add_permits(1);
    unprepared.await.unwrap();
    first.await.unwrap().unwrap();
    assert!(!dra.holds("q") && dra.holds("p"));
    dra.unprepare("p").await.unwrap();
    assert_eq!(plugin.calls(), ["prepare c", "unprepare c"]);
}

#[tokio::test]
async fn a_restart_neither_loses_nor_repeats_and_a_reboot_prepares_again() {
    let node = Node::new();
    node.server.put("c", &["p"], DRIVER);
    let (plugin, _serving) = node.driver(node.info());
    let pod = pod("p", "c");
    {
        let (dra, _running) = node.agent("boot");
        notified(&plugin).await;
        *plugin.fails.lock().unwrap() = Some("no device".to_owned());
        let error = coracle_error_chain::chain(&dra.prepare(&pod).await.unwrap_err());
        assert!(error.contains("NodePrepareResources failed for ResourceClaim c: no device"), "{error}");
        assert!(dra.holds("p"), "the driver may have prepared a part");
        *plugin.fails.lock().unwrap() = None;
    }
    plugin.calls();
    for (boot, calls) in [("boot", 1), ("boot", 0), ("another", 1)] {
        plugin.notified.send_replace(None);
        let (dra, _running) = node.agent(boot);
        assert_eq!(dra.pods(), ["p"]);
        notified(&plugin).await;
        dra.prepare(&pod).await.unwrap();
        assert_eq!(devices(&dra, &pod).unwrap(), ["example.com/gpu=c"]);
        assert_eq!(plugin.calls().len(), calls, "{boot}");
    }
    node.server.claims.lock().unwrap().clear();
    plugin.notified.send_replace(None);
    let (dra, _running) = node.agent("another");
    notified(&plugin).await;
    dra.prepare(&pod).await.expect("a prepared claim needs no API server");
    dra.unprepare("p").await.unwrap();
    assert_eq!(plugin.calls(), ["unprepare c"], "the claim was deleted meanwhile");
}

#[tokio::test]
async fn a_pod_without_right_or_driver_leaves_no_record() {
    let node = Node::new();
    node.server.put("other", &["q"], DRIVER);
    node.server.put("foreign", &["p"], "absent.example.com");
    let (dra, _running) = node.agent("boot");
    let (plugin, _serving) = node.driver(node.info());
    notified(&plugin).await;
    for (claim, expected) in [
        ("other", "not reserved for the pod"),
        ("foreign", "DRA driver absent.example.com is not registered"),
        ("absent", "cannot get ResourceClaim absent"),
    ] {
        let error = coracle_error_chain::chain(&dra.prepare(&pod("p", claim)).await.unwrap_err());
        assert!(error.contains(expected), "{error}");
    }
    assert!(!dra.holds("p") && plugin.calls().is_empty());
    dra.unprepare("p").await.unwrap();
    node.server.put("c", &["p"], DRIVER);
    dra.prepare(&pod("p", "c")).await.unwrap();
    let uid = node.server.claims.lock().unwrap()["c"]["metadata"]["uid"].as_str().unwrap().to_owned();
    node.server.claims.lock().unwrap().get_mut("c").unwrap()["metadata"]["uid"] = "another".into();
    node.server.claims.lock().unwrap().get_mut("c").unwrap()["status"]["reservedFor"][0]["uid"] = "q".into();
    let old = dra.prepare(&pod("q", "c")).await.unwrap_err();
    let message = format!("old ResourceClaim with same name c and different UID {uid} still exists");
    assert_eq!(old.to_string(), message);
}

#[tokio::test]
async fn a_plugin_of_another_kind_or_with_a_foreign_endpoint_is_refused_with_the_reason() {
    let node = Node::new();
    let (_dra, _running) = node.agent("boot");
    let up = node.path("plugins/../../socket").to_string_lossy().into_owned();
    for (change, expected) in [
        (json!({"type": "CSIPlugin"}), "supports DRAPlugin and DevicePlugin"),
        (json!({"type": "DevicePlugin"}), "no plugin of gpu.example.com"),
        (json!({"name": "../x"}), "is not the name of a driver"),
        (json!({"versions": ["v1alpha4.Node"]}), "none of the plugin's services"),
        (json!({"endpoint": "plugins/gpu.sock"}), "is not an absolute path"),
        (json!({"endpoint": "/etc/passwd"}), "not a socket"),
        (json!({"endpoint": up}), "cannot connect to the socket"),
    ] {
        let mut info = node.info();
        let text = |field: &str| change[field].as_str().map(str::to_owned);
        info.r#type = text("type").unwrap_or(info.r#type);
        info.name = text("name").unwrap_or(info.name);
        info.endpoint = text("endpoint").unwrap_or(info.endpoint);
        if change["versions"].is_array() {
            info.supported_versions = vec!["v1alpha4.Node".to_owned()];
        }
        let (plugin, _serving) = node.driver(info);
        let status = notified(&plugin).await;
        assert!(!status.plugin_registered && status.error.contains(expected), "{}", status.error);
    }
}

#[tokio::test]
async fn device_plugins_are_given_to_their_handler() {
    let node = Node::new();
    let (_dra, _running) = node.agent("boot");
    let info = registration_api::PluginInfo {
        r#type: "DevicePlugin".to_owned(),
        name: "x.io/a".to_owned(),
        supported_versions: vec!["v1beta1".to_owned()],
        ..node.info()
    };
    let (plugin, _serving) = node.driver(info);
    let status = notified(&plugin).await;
    assert!(status.plugin_registered, "{}", status.error);
}

#[tokio::test]
async fn a_driver_that_starts_again_is_used_again_and_slices_are_deleted_at_the_start() {
    let node = Node::new();
    for claim in ["c", "d"] {
        node.server.put(claim, &["p"], DRIVER);
    }
    let (dra, _running) = node.agent("boot");
    for claim in ["c", "d"] {
        let (plugin, _serving) = node.driver(node.info());
        notified(&plugin).await;
        dra.prepare(&pod("p", claim)).await.unwrap();
        assert_eq!(plugin.calls(), [format!("prepare {claim}")]);
    }
    let deletions = || -> Vec<String> {
        let requests = node.server.requests.lock().unwrap();
        requests.iter().filter(|request| request.starts_with("DELETE")).cloned().collect()
    };
    until("slices are deleted", 10, || !deletions().is_empty()).await;
    let [deletion] = &deletions()[..] else { panic!("{:?}", deletions()) };
    assert!(deletion.contains("/apis/resource.k8s.io/v1/resourceslices"), "{deletion}");
    assert!(deletion.contains("fieldSelector=spec.nodeName%3Dn"), "{deletion}");
}

#[tokio::test]
async fn a_driver_may_register_in_a_directory_below_and_have_its_endpoint_elsewhere() {
    let node = Node::new();
    let outside = tempfile::tempdir().unwrap();
    let (_dra, _running) = node.agent("boot");
    let endpoint = outside.path().join("gpu.sock");
    let info =
        registration_api::PluginInfo { endpoint: endpoint.to_string_lossy().into_owned(), ..node.info() };
    let plugin = Plugin { info, ..Plugin::default() };
    let below = node.path("plugins_registry/gpu");
    std::fs::create_dir(&below).unwrap();
    let servers = [serve(&endpoint, plugin.clone()), serve(&below.join("reg.sock"), plugin.clone())];
    let _serving = AbortOnDropHandle::new(tokio::spawn(futures::future::join_all(servers)));
    assert_eq!(notified(&plugin).await.error, "");
}

#[tokio::test]
async fn the_health_of_a_pods_devices_is_known_while_the_driver_is_registered() {
    let node = Node::new();
    node.server.put("c", &["p"], DRIVER);
    let (dra, _running) = node.agent("boot");
    let plugin = Plugin { info: node.info(), ..Plugin::default() };
    let socket = node.path("plugins/gpu.sock");
    let incoming = UnixListenerStream::new(UnixListener::bind(socket).unwrap());
    let services = tonic::transport::Server::builder()
        .add_service(DraPluginServer::new(plugin.clone()))
        .add_service(DraResourceHealthServer::new(UnhealthyDevice));
    let registry = serve(&node.path("plugins_registry/gpu-reg.sock"), plugin.clone());
    let _serving = AbortOnDropHandle::new(tokio::spawn(async move {
        tokio::join!(async { services.serve_with_incoming(incoming).await.unwrap() }, registry);
    }));
    notified(&plugin).await;
    let pod = pod("p", "c");
    dra.prepare(&pod).await.unwrap();
    let health = || {
        let status = json!({"containerStatuses": [{"name": "c", "image": "", "imageID": "", "ready": true,
            "restartCount": 0}]});
        let mut status = serde_json::from_value(status).unwrap();
        dra.report_health(&pod, &mut status);
        let container = &status.container_statuses.unwrap()[0];
        serde_json::to_value(&container.allocated_resources_status).unwrap()
    };
    let expected = |health: &str| {
        let mut resource = json!({"health": health, "resourceID": "example.com/gpu=c"});
        if health == "Unhealthy" {
            resource["message"] = "hot".into();
        }
        json!([{"name": "claim:a/r", "resources": [resource]}])
    };
    until("the device is unhealthy", 10, || health() == expected("Unhealthy")).await;
    dra.shared.health_of_devices.forget_changes();
    std::fs::remove_file(node.path("plugins_registry/gpu-reg.sock")).unwrap();
    until("the health is unknown", 10, || health() == expected("Unknown")).await;
    let changed = tokio::time::timeout(LIMIT, dra.next_health_changes()).await.unwrap();
    assert_eq!(changed.into_iter().collect::<Vec<_>>(), ["p"]);
}

#[tokio::test]
async fn a_response_of_a_driver_that_is_too_large_is_refused() {
    let node = Node::new();
    node.server.put("c", &["p"], DRIVER);
    let (dra, _running) = node.agent("boot");
    let (plugin, _serving) = node.driver(node.info());
    notified(&plugin).await;
    *plugin.fails.lock().unwrap() = Some("x".repeat(driver::ANSWER_MAX));
    let error = coracle_error_chain::chain(&dra.prepare(&pod("p", "c")).await.unwrap_err());
    assert!(error.contains("message length too large"), "{error:.300}");
    *plugin.fails.lock().unwrap() = None;
    dra.prepare(&pod("p", "c")).await.unwrap();
}

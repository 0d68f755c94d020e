//! Tests of a node with device plugins that serve gRPC on unix sockets.

use std::path::Path;

use coracle_proto::device_plugin as api;
use coracle_proto::device_plugin::device_plugin_server::{DevicePlugin, DevicePluginServer};
use coracle_proto::device_plugin::registration_client::RegistrationClient;
use coracle_testing::eventually_async;
use futures::StreamExt;
use futures::stream::BoxStream;
use k8s_openapi::api::core::v1::{ContainerStatus, PodStatus};
use serde_json::json;
use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{Request as Call, Response, Status};

use super::*;
use crate::dra::{DevicePluginHandler, Version, WatchedPlugin, open_socket, origin};
use crate::kubelet_metrics::Current;
use crate::node::DeviceCount;

const NAME: &str = "example.com/dongle";
const LIMIT: Duration = Duration::from_secs(60);

/// A plugin: its devices, the calls that it got, and its answer to Allocate.
#[derive(Clone)]
struct Dongles {
    /// Ids and health. None ends the list.
    devices: watch::Sender<Option<Vec<(String, bool)>>>,
    calls: Arc<Mutex<Vec<String>>>,
    /// Devices that the plugin prefers.
    preferred: Vec<String>,
    fails: Arc<Mutex<bool>>,
}

impl Dongles {
    fn new(devices: &[(&str, bool)]) -> Self {
        let this = Self {
            devices: watch::channel(None).0,
            calls: Arc::default(),
            preferred: Vec::new(),
            fails: Arc::default(),
        };
        this.set(devices);
        this
    }

    fn set(&self, devices: &[(&str, bool)]) {
        let devices = devices.iter().map(|(id, is_healthy)| ((*id).to_owned(), *is_healthy)).collect();
        self.devices.send_replace(Some(devices));
    }

    fn end(&self) {
        self.devices.send_replace(None);
    }

    fn note(&self, call: &str, ids: &[String]) {
        self.calls.lock().unwrap().push(format!("{call} {}", ids.join(",")));
    }

    fn calls(&self) -> Vec<String> {
        std::mem::take(&mut self.calls.lock().unwrap())
    }

    /// Serves at a socket in the directory until the result is dropped.
    fn serve(&self, dir: &Path, socket: &str) -> AbortOnDropHandle<()> {
        let listener = UnixListener::bind(dir.join(socket)).unwrap();
        let server = tonic::transport::Server::builder().add_service(DevicePluginServer::new(self.clone()));
        let serving = server.serve_with_incoming(UnixListenerStream::new(listener));
        AbortOnDropHandle::new(tokio::spawn(async move { serving.await.unwrap() }))
    }
}

#[tonic::async_trait]
impl DevicePlugin for Dongles {
    type ListAndWatchStream = BoxStream<'static, Result<api::ListAndWatchResponse, Status>>;

    async fn get_device_plugin_options(
        &self,
        _request: Call<api::Empty>,
    ) -> Result<Response<api::DevicePluginOptions>, Status> {
        Ok(Response::new(api::DevicePluginOptions {
            pre_start_required: true,
            get_preferred_allocation_available: !self.preferred.is_empty(),
        }))
    }

    async fn list_and_watch(
        &self,
        _request: Call<api::Empty>,
    ) -> Result<Response<Self::ListAndWatchStream>, Status> {
        let mut devices = self.devices.subscribe();
        devices.mark_changed();
        let lists = futures::stream::unfold(devices, |mut devices| async move {
            devices.changed().await.ok()?;
            let device = |(id, is_healthy): &(String, bool)| api::Device {
                id: id.clone(),
                health: String::from(if *is_healthy { "Healthy" } else { "Unhealthy" }),
                topology: None,
            };
            let list = devices.borrow_and_update().as_ref()?.iter().map(device).collect();
            Some((Ok(api::ListAndWatchResponse { devices: list }), devices))
        });
        Ok(Response::new(lists.boxed()))
    }

    async fn get_preferred_allocation(
        &self,
        request: Call<api::PreferredAllocationRequest>,
    ) -> Result<Response<api::PreferredAllocationResponse>, Status> {
        let request = &request.into_inner().container_requests[0];
        self.note("prefer", &request.available_device_ids);
        let answer = api::ContainerPreferredAllocationResponse { device_ids: self.preferred.clone() };
        Ok(Response::new(api::PreferredAllocationResponse { container_responses: vec![answer] }))
    }

    async fn allocate(
        &self,
        request: Call<api::AllocateRequest>,
    ) -> Result<Response<api::AllocateResponse>, Status> {
        let ids = request.into_inner().container_requests.remove(0).device_ids;
        self.note("allocate", &ids);
        if *self.fails.lock().unwrap() {
            return Err(Status::unknown("broken"));
        }
        let answer = api::ContainerAllocateResponse {
            envs: HashMap::from([("DONGLES".to_owned(), ids.join(","))]),
            ..api::ContainerAllocateResponse::default()
        };
        Ok(Response::new(api::AllocateResponse { container_responses: vec![answer] }))
    }

    async fn pre_start_container(
        &self,
        request: Call<api::PreStartContainerRequest>,
    ) -> Result<Response<api::PreStartContainerResponse>, Status> {
        self.note("start", &request.into_inner().device_ids);
        Ok(Response::new(api::PreStartContainerResponse {}))
    }
}

/// An agent. It runs until it is dropped.
struct Agent {
    devices: DevicePlugins,
    changed: mpsc::UnboundedReceiver<String>,
    counts: watch::Receiver<DeviceCounts>,
    metrics: Arc<KubeletMetrics>,
    _running: AbortOnDropHandle<()>,
}

impl Agent {
    /// An agent after a boot of this name.
    fn start(dir: &Path, boot: &str) -> Self {
        // Clients wait for the socket of this agent, not of an earlier agent.
        let _ = std::fs::remove_file(dir.join("device-plugins/kubelet.sock"));
        let config =
            DevicePluginConfig { sockets: dir.join("device-plugins"), records: dir.join("state/devices") };
        let (sender, counts) = watch::channel(DeviceCounts::new());
        let metrics = Arc::<KubeletMetrics>::default();
        let (devices, changed) = DevicePlugins::open(config, boot, sender, Arc::clone(&metrics));
        let _running = AbortOnDropHandle::new(tokio::spawn(devices.clone().run()));
        Self { devices, changed, counts, metrics, _running }
    }

    async fn register(&self, dir: &Path, resource: &str) -> Result<(), Status> {
        let sockets = dir.join("device-plugins");
        let link = eventually_async("a socket", 10, async || {
            let socket = open_socket(&sockets, Path::new("kubelet.sock")).ok()?;
            Link::open(&socket).await.ok()
        })
        .await;
        let mut client = RegistrationClient::with_origin(link.caller(Version::V1), origin());
        let request = api::RegisterRequest {
            version: "v1beta1".to_owned(),
            endpoint: "dongle.sock".to_owned(),
            resource_name: resource.to_owned(),
            options: None,
        };
        client.register(request).await.map(drop)
    }

    /// Waits until the node has these numbers of devices.
    async fn has(&mut self, capacity: usize, allocatable: usize) {
        let expected = DeviceCount { capacity, allocatable };
        let counts = self.counts.wait_for(|counts| counts.get(NAME) == Some(&expected));
        tokio::time::timeout(LIMIT, counts).await.expect("the numbers").expect("the agent");
    }

    /// The health of the devices of the container `c0`.
    fn health(&self, uid: &str) -> serde_json::Value {
        let container = ContainerStatus { name: "c0".to_owned(), ..ContainerStatus::default() };
        let mut status = PodStatus { container_statuses: Some(vec![container]), ..PodStatus::default() };
        self.devices.report_health(uid, &mut status);
        serde_json::to_value(&status).unwrap()["containerStatuses"][0]["allocatedResourcesStatus"].clone()
    }

    /// The variable that the plugin sets for its devices.
    async fn env(&self, pod: &Pod, container: usize) -> String {
        let container = &pod.spec.as_ref().unwrap().containers[container];
        let options = self.devices.container_options(pod, container).await.unwrap();
        options.env.get("DONGLES").cloned().unwrap_or_default()
    }
}

/// A pod whose init container and containers request these numbers of devices.
fn pod(uid: &str, init: &str, counts: &[&str]) -> Pod {
    let container =
        |name: String, count: &str| json!({"name": name, "resources": {"limits": {NAME: count, "cpu": "1"}}});
    let containers: Vec<_> =
        counts.iter().enumerate().map(|(index, count)| container(format!("c{index}"), count)).collect();
    let spec = json!({"initContainers": [container("init".to_owned(), init)], "containers": containers});
    serde_json::from_value(json!({"metadata": {"uid": uid, "name": uid, "namespace": "ns"}, "spec": spec}))
        .unwrap()
}

/// A directory with the sockets' directory.
fn dir() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

fn reason(result: Result<(), DeviceError>) -> String {
    match result {
        Err(DeviceError::Reject(reason)) => reason,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_check_of_free_devices_counts_reused_ones_once_and_keeps_none() {
    let dir = dir();
    let config =
        DevicePluginConfig { sockets: dir.path().join("sockets"), records: dir.path().join("records") };
    let (devices, _changed) =
        DevicePlugins::open(config, "boot", watch::channel(DeviceCounts::new()).0, Arc::default());
    {
        let mut state = devices.state();
        let number = state.table.connect(NAME);
        let device = table::Device { is_healthy: true, ..table::Device::default() };
        let list = ["a", "b"].map(|id| (id.to_owned(), device.clone()));
        state.table.list(NAME, number, BTreeMap::from(list)).unwrap();
    }
    let two = pod("p", "1", &["1", "1"]);
    assert_eq!(devices.check_free(&two), Ok(()), "the init container's device is used again");
    assert_eq!(devices.check_free(&two), Ok(()), "nothing stays reserved");
    let error = devices.check_free(&pod("q", "1", &["1", "2"])).unwrap_err();
    let expected =
        "requested number of devices unavailable for example.com/dongle. Requested: 2, Available: 1";
    assert_eq!(error, expected);
    assert!(devices.pods().is_empty());
}

#[tokio::test]
async fn a_registration_that_is_too_large_is_not_decoded() {
    let dir = dir();
    let agent = Agent::start(dir.path(), "boot");
    let refused = agent.register(dir.path(), &"x".repeat(17 << 10)).await.unwrap_err();
    assert_eq!(refused.code(), tonic::Code::OutOfRange, "{refused}");
}

#[tokio::test]
async fn a_pod_gets_healthy_devices_and_its_init_containers_devices_are_reused() {
    let dir = dir();
    let mut agent = Agent::start(dir.path(), "boot");
    let dongles = Dongles {
        preferred: vec!["c".to_owned()],
        ..Dongles::new(&[("a", true), ("b", false), ("c", true)])
    };
    // The socket's directory exists after the agent's start.
    assert!(agent.register(dir.path(), NAME).await.is_err(), "the plugin does not serve");
    let _serving = dongles.serve(&dir.path().join("device-plugins"), "dongle.sock");
    let invalid = agent.register(dir.path(), "dongle").await.unwrap_err();
    assert_eq!(invalid.message(), "the ResourceName \"dongle\" is invalid");
    agent.register(dir.path(), NAME).await.unwrap();
    agent.has(3, 2).await;
    assert!(agent.devices.manages(NAME) && !agent.devices.manages("example.com/other"));
    let first = pod("p", "1", &["1", "1"]);
    agent.devices.allocate(&first).await.unwrap();
    assert_eq!(dongles.calls(), ["prefer a,c", "allocate c", "allocate c", "prefer a", "allocate a"]);
    assert_eq!((agent.env(&first, 0).await, agent.env(&first, 1).await), ("c".to_owned(), "a".to_owned()));
    assert_eq!(dongles.calls(), ["start c", "start a"]);
    agent.devices.allocate(&first).await.unwrap();
    assert!(dongles.calls().is_empty(), "a second allocation changes nothing");
    let error = reason(agent.devices.allocate(&pod("q", "0", &["1"])).await);
    let expected =
        "requested number of devices unavailable for example.com/dongle. Requested: 1, Available: 0";
    assert_eq!(error, expected);
    assert!(agent.devices.holds("p") && !agent.devices.holds("q"));
    agent.devices.release("p").await;
    *dongles.fails.lock().unwrap() = true;
    let error = reason(agent.devices.allocate(&pod("q", "0", &["1"])).await);
    assert_eq!(error, "rpc error: code = Unknown desc = broken");
    assert!(agent.devices.pods().is_empty());
    let metrics = agent.metrics.text(&Current::default());
    for line in [
        "kubelet_device_plugin_registration_total{resource_name=\"example.com/dongle\"} 1",
        "kubelet_device_plugin_alloc_duration_seconds_count{resource_name=\"example.com/dongle\"} 4",
    ] {
        assert!(metrics.lines().any(|other| other == line), "no {line} in\n{metrics}");
    }
}

#[tokio::test]
async fn changed_health_is_reported_in_the_statuses_of_containers() {
    let dir = dir();
    let mut agent = Agent::start(dir.path(), "boot");
    let dongles = Dongles::new(&[("a", true)]);
    assert!(agent.register(dir.path(), NAME).await.is_err());
    let _serving = dongles.serve(&dir.path().join("device-plugins"), "dongle.sock");
    agent.register(dir.path(), NAME).await.unwrap();
    agent.has(1, 1).await;
    let first = pod("p", "0", &["1"]);
    agent.devices.allocate(&first).await.unwrap();
    let expected =
        |health: &str| json!([{"name": NAME, "resources": [{"resourceID": "a", "health": health}]}]);
    assert_eq!(agent.health("p"), expected("Healthy"));
    dongles.set(&[("a", false)]);
    let changed = tokio::time::timeout(LIMIT, agent.changed.recv()).await.expect("a change");
    assert_eq!(changed.as_deref(), Some("p"));
    assert_eq!(agent.health("p"), expected("Unhealthy"));
    // After the end of the plugin the node still has the device, but pods cannot get it.
    dongles.end();
    agent.has(1, 0).await;
    let container = &first.spec.as_ref().unwrap().containers[0];
    eventually_async("a start without PreStartContainer fails", 10, async || {
        let options = agent.devices.container_options(&first, container).await;
        // A call while the plugin ends can fail with another reason.
        matches!(&options, Err(DeviceError::Wait(reason)) if reason.ends_with("the plugin has ended"))
    })
    .await;
    agent.devices.release("p").await;
    let error = reason(agent.devices.allocate(&pod("q", "0", &["1"])).await);
    assert_eq!(error, "no healthy devices present; cannot allocate unhealthy devices example.com/dongle");
}

#[tokio::test]
async fn pods_keep_their_devices_across_restarts_of_the_agent() {
    let dir = dir();
    let mut agent = Agent::start(dir.path(), "boot");
    let dongles = Dongles::new(&[("a", true), ("b", true)]);
    assert!(agent.register(dir.path(), NAME).await.is_err());
    let sockets = dir.path().join("device-plugins");
    let serving = dongles.serve(&sockets, "dongle.sock");
    agent.register(dir.path(), NAME).await.unwrap();
    agent.has(2, 2).await;
    let first = pod("p", "0", &["1"]);
    agent.devices.allocate(&first).await.unwrap();
    let env = agent.env(&first, 0).await;
    drop((agent, serving));
    let mut agent = Agent::start(dir.path(), "boot");
    // Until the plugin registers again, the node has no devices, and containers restart with the devices that they had.
    agent.has(0, 0).await;
    assert_eq!((agent.devices.pods(), agent.env(&first, 0).await), (vec!["p".to_owned()], env.clone()));
    dongles.calls();
    assert!(agent.register(dir.path(), NAME).await.is_err(), "the agent has removed the plugin's socket");
    assert!(!sockets.join("dongle.sock").exists());
    let serving = dongles.serve(&sockets, "dongle.sock");
    agent.register(dir.path(), NAME).await.unwrap();
    agent.has(2, 2).await;
    agent.devices.allocate(&first).await.unwrap();
    let second = pod("q", "0", &["1"]);
    agent.devices.allocate(&second).await.unwrap();
    let other = agent.env(&second, 0).await;
    assert_ne!(env, other);
    assert_eq!(dongles.calls()[0], format!("allocate {other}"));
    drop((agent, serving));
    // After a reboot the plugin is called again for the same device.
    let mut agent = Agent::start(dir.path(), "next");
    assert!(matches!(agent.devices.allocate(&first).await, Err(DeviceError::Wait(_))));
    assert!(agent.register(dir.path(), NAME).await.is_err());
    let _serving = dongles.serve(&sockets, "dongle.sock");
    agent.register(dir.path(), NAME).await.unwrap();
    agent.has(2, 2).await;
    dongles.calls();
    agent.devices.allocate(&first).await.unwrap();
    assert_eq!(dongles.calls(), [format!("allocate {env}")]);
    agent.devices.release("p").await;
    agent.devices.release("q").await;
    assert!(Agent::start(dir.path(), "next").devices.pods().is_empty());
}

#[tokio::test]
async fn a_plugin_of_the_registration_directory_is_followed_until_it_ends() {
    let dir = dir();
    let mut agent = Agent::start(dir.path(), "boot");
    let dongles = Dongles::new(&[("a", true)]);
    let _serving = dongles.serve(dir.path(), "dongle.sock");
    let refused = agent.devices.register_watched(watched(dir.path(), "v1").await).await.err();
    let expected = "manager version, v1beta1, is not among plugin supported versions [v1]";
    assert_eq!(refused.as_deref(), Some(expected));
    let registered = agent.devices.register_watched(watched(dir.path(), "v1beta1").await).await;
    agent.has(1, 1).await;
    dongles.end();
    let ended = registered.unwrap_or_else(|error| panic!("{error}"));
    tokio::time::timeout(LIMIT, ended).await.expect("the end of the plugin");
    agent.has(1, 0).await;
}

/// A plugin of the registration directory, with this version of its API.
async fn watched(dir: &Path, version: &str) -> WatchedPlugin {
    let socket = open_socket(dir, Path::new("dongle.sock")).unwrap();
    let link = Link::open(&socket).await.unwrap();
    WatchedPlugin { resource: NAME.to_owned(), versions: vec![version.to_owned()], link }
}

#[tokio::test]
async fn the_last_of_several_registrations_is_followed_in_any_order_of_arrival() {
    let dir = dir();
    let mut agent = Agent::start(dir.path(), "boot");
    let [first, last] = [Dongles::new(&[("a", true)]), Dongles::new(&[("a", true), ("b", true)])];
    let _serving = (first.serve(dir.path(), "first.sock"), last.serve(dir.path(), "last.sock"));
    let mut connected = Vec::new();
    for socket in ["first.sock", "last.sock"] {
        let link = Link::open(&open_socket(dir.path(), Path::new(socket)).unwrap()).await.unwrap();
        let plugin = Plugin::open(&link).await.unwrap();
        connected.push(agent.devices.add(NAME, plugin, link));
    }
    for connected in connected.into_iter().rev() {
        agent.devices.shared.connected.send(connected).await.unwrap_or_else(|error| panic!("{error}"));
    }
    agent.has(2, 2).await;
}

#[tokio::test]
async fn plugins_that_do_not_answer_do_not_delay_the_registration_of_others() {
    let dir = dir();
    let mut agent = Agent::start(dir.path(), "boot");
    let dongles = Dongles::new(&[("a", true)]);
    // The connections wait in the backlog of this socket.
    let _silent = UnixListener::bind(dir.path().join("silent.sock")).unwrap();
    let _serving = dongles.serve(dir.path(), "dongle.sock");
    let mut waiting = Vec::new();
    for number in 0..=CONNECTED_MAX {
        let link = Link::open(&open_socket(dir.path(), Path::new("silent.sock")).unwrap()).await.unwrap();
        let (resource, versions) = (format!("x.io/{number}"), vec!["v1beta1".to_owned()]);
        let mut registering = agent.devices.register_watched(WatchedPlugin { resource, versions, link });
        assert!(futures::poll!(&mut registering).is_pending());
        waiting.push(registering);
    }
    let registering = agent.devices.register_watched(watched(dir.path(), "v1beta1").await);
    let registered = tokio::time::timeout(LIMIT, registering).await.expect("an answer");
    assert!(registered.is_ok());
    agent.has(1, 1).await;
    drop(waiting);
}

#[tokio::test]
async fn an_answer_that_is_too_large_for_records_is_refused() {
    let dir = dir();
    let mut agent = Agent::start(dir.path(), "boot");
    // The size of the plugin's answer grows with the ids of the devices.
    let ids: Vec<String> = (0..1200).map(|number| format!("{number:0>250}")).collect();
    let devices: Vec<_> = ids.iter().map(|id| (id.as_str(), true)).collect();
    let _serving = Dongles::new(&devices).serve(dir.path(), "dongle.sock");
    let registered = agent.devices.register_watched(watched(dir.path(), "v1beta1").await).await;
    agent.has(1200, 1200).await;
    let error = reason(agent.devices.allocate(&pod("p", "0", &["1200"])).await);
    assert!(error.contains("code = OutOfRange"), "{error}");
    assert!(!agent.devices.holds("p"));
    agent.devices.allocate(&pod("p", "0", &["600"])).await.unwrap();
    assert!(registered.is_ok());
}

#[tokio::test]
async fn a_container_does_not_start_before_its_devices_are_recorded() {
    let dir = dir();
    let mut agent = Agent::start(dir.path(), "boot");
    let _serving = Dongles::new(&[("a", true)]).serve(dir.path(), "dongle.sock");
    let _registered = agent.devices.register_watched(watched(dir.path(), "v1beta1").await).await;
    agent.has(1, 1).await;
    // A file is in the place of the directory of records, so no record can be written.
    let records = dir.path().join("state/devices");
    std::fs::create_dir_all(dir.path().join("state")).unwrap();
    std::fs::write(&records, "").unwrap();
    let pod = pod("p", "0", &["1"]);
    let container = &pod.spec.as_ref().unwrap().containers[0];
    for _ in 0..2 {
        let refused = agent.devices.container_options(&pod, container).await;
        assert!(matches!(refused, Err(DeviceError::Record(_))), "{refused:?}");
    }
    std::fs::remove_file(&records).unwrap();
    assert_eq!(agent.env(&pod, 0).await, "a");
    assert!(records.join("p.json").exists());
}

#[tokio::test]
async fn an_ended_plugin_without_pods_is_forgotten_after_the_grace_period() {
    let dir = dir();
    let mut agent = Agent::start(dir.path(), "boot");
    let dongles = Dongles::new(&[("a", true)]);
    let _serving = dongles.serve(dir.path(), "dongle.sock");
    let _registered = agent.devices.register_watched(watched(dir.path(), "v1beta1").await).await;
    agent.has(1, 1).await;
    dongles.end();
    agent.has(1, 0).await;
    // The plugin requires PreStartContainer, so it stays in the table until the grace period ends.
    let number = agent.devices.state().plugins.get(NAME).map(|(number, _)| *number).unwrap();
    tokio::time::pause();
    agent.devices.clone().expire(NAME.to_owned(), number).await;
    assert!(!agent.devices.state().plugins.contains_key(NAME));
}

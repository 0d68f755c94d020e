//! Device plugins: a plugin in this process, and pods that get its device.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use coracle_integration::{Cluster, Machine, eventually};
use coracle_proto::device_plugin as api;
use coracle_proto::device_plugin::device_plugin_server::{DevicePlugin, DevicePluginServer};
use coracle_proto::device_plugin::registration_client::RegistrationClient;
use coracle_proto::pod_resources::ListPodResourcesRequest;
use coracle_proto::pod_resources::pod_resources_lister_client::PodResourcesListerClient;
use serde_json::{Value, json};
use tokio::net::UnixListener;
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::{ReceiverStream, UnixListenerStream};
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Request, Response, Status};

/// A plugin with one device.
#[derive(Clone)]
struct Dongle {
    resource: String,
    is_healthy: watch::Sender<bool>,
    /// Whether PreStartContainer never returns.
    hangs: watch::Sender<bool>,
    calls: Arc<Mutex<Vec<&'static str>>>,
}

impl Dongle {
    /// Serves at a socket in the directory, and registers at the node, until the process ends.
    fn serve(&self, dir: PathBuf) {
        let dongle = self.clone();
        std::thread::spawn(move || {
            runtime().block_on(async {
                let incoming = UnixListenerStream::new(UnixListener::bind(dir.join("dongle.sock")).unwrap());
                let request = api::RegisterRequest {
                    version: "v1beta1".to_owned(),
                    endpoint: "dongle.sock".to_owned(),
                    resource_name: dongle.resource.clone(),
                    options: None,
                };
                let serving = Server::builder().add_service(DevicePluginServer::new(dongle));
                let registering = async {
                    let mut client = RegistrationClient::new(connect(&dir.join("kubelet.sock")).await);
                    client.register(request).await.unwrap();
                };
                let (served, ()) = tokio::join!(serving.serve_with_incoming(incoming), registering);
                served.unwrap();
            });
        });
    }

    fn record_call(&self, call: &'static str) {
        self.calls.lock().unwrap().push(call);
    }
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

async fn connect(socket: &Path) -> Channel {
    Endpoint::try_from(format!("unix://{}", socket.display())).unwrap().connect().await.unwrap()
}

#[tonic::async_trait]
impl DevicePlugin for Dongle {
    type ListAndWatchStream = ReceiverStream<Result<api::ListAndWatchResponse, Status>>;

    async fn get_device_plugin_options(
        &self,
        _request: Request<api::Empty>,
    ) -> Result<Response<api::DevicePluginOptions>, Status> {
        Ok(Response::new(api::DevicePluginOptions {
            pre_start_required: true,
            get_preferred_allocation_available: true,
        }))
    }

    async fn list_and_watch(
        &self,
        _request: Request<api::Empty>,
    ) -> Result<Response<Self::ListAndWatchStream>, Status> {
        let mut health = self.is_healthy.subscribe();
        let (lists, received) = mpsc::channel(1);
        tokio::spawn(async move {
            loop {
                let word = if *health.borrow_and_update() { "Healthy" } else { "Unhealthy" };
                let device = api::Device { id: "one".to_owned(), health: word.to_owned(), topology: None };
                let list = api::ListAndWatchResponse { devices: vec![device] };
                if lists.send(Ok(list)).await.is_err() || health.changed().await.is_err() {
                    return;
                }
            }
        });
        Ok(Response::new(ReceiverStream::new(received)))
    }

    async fn get_preferred_allocation(
        &self,
        request: Request<api::PreferredAllocationRequest>,
    ) -> Result<Response<api::PreferredAllocationResponse>, Status> {
        self.record_call("prefer");
        let requests = request.into_inner().container_requests.into_iter();
        let answers = requests.map(|request| api::ContainerPreferredAllocationResponse {
            device_ids: request.available_device_ids,
        });
        Ok(Response::new(api::PreferredAllocationResponse { container_responses: answers.collect() }))
    }

    async fn allocate(
        &self,
        _request: Request<api::AllocateRequest>,
    ) -> Result<Response<api::AllocateResponse>, Status> {
        self.record_call("allocate");
        let device = api::DeviceSpec {
            container_path: "/dev/dongle".to_owned(),
            host_path: "/dev/zero".to_owned(),
            permissions: "r".to_owned(),
        };
        let answer = api::ContainerAllocateResponse {
            envs: HashMap::from([("DONGLE".to_owned(), "one".to_owned())]),
            devices: vec![device],
            ..api::ContainerAllocateResponse::default()
        };
        Ok(Response::new(api::AllocateResponse { container_responses: vec![answer] }))
    }

    async fn pre_start_container(
        &self,
        _request: Request<api::PreStartContainerRequest>,
    ) -> Result<Response<api::PreStartContainerResponse>, Status> {
        self.record_call("start");
        if *self.hangs.borrow() {
            std::future::pending::<()>().await;
        }
        Ok(Response::new(api::PreStartContainerResponse {}))
    }
}

/// With a grace period of zero, the API server would remove a deleted pod before the node has freed its device.
fn pod(name: &str, node: Option<&str>, resource: &str) -> Value {
    let container = json!({"name": "c", "image": "busybox", "command": ["sleep", "100000"],
        "resources": {"limits": {resource: "1"}}});
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": {
        "terminationGracePeriodSeconds": 1, "containers": [container], "nodeName": node}})
}

/// A pod gets the device of a plugin, another pod is rejected, and the health of the device is reported.
pub(crate) fn a_pod_gets_the_device_of_a_plugin(machine: &Machine, cluster: &Cluster) {
    let resource = format!("{}.example.com/dongle", machine.name());
    let (is_healthy, hangs) = (watch::channel(true).0, watch::channel(false).0);
    let dongle = Dongle { resource: resource.clone(), is_healthy, hangs, calls: Arc::default() };
    dongle.serve(machine.path("state/device-plugins"));
    let allocatable = || cluster.get(&["node", "node-1"])["status"]["allocatable"][&resource].clone();
    eventually("the node to have the device", 60, || allocatable() == "1");
    cluster.apply(&pod("dongle", None, &resource).to_string());
    let status = || cluster.get(&["pod", "dongle"])["status"].clone();
    eventually("the pod with a device to run", 120, || status()["phase"] == "Running");
    let check = "echo $DONGLE; test -c /dev/dongle && head -c 1 /dev/dongle | wc -c";
    let shown = cluster.kubectl(&["exec", "dongle", "--", "sh", "-c", check]);
    assert_eq!(shown.split_whitespace().collect::<Vec<_>>(), ["one", "1"]);
    assert_eq!(*dongle.calls.lock().unwrap(), ["prefer", "allocate", "start"]);
    // The pod names its node, because the scheduler would not bind it.
    cluster.apply(&pod("other", Some("node-1"), &resource).to_string());
    let other = || cluster.get(&["pod", "other"])["status"].clone();
    eventually("the other pod to be rejected", 60, || other()["phase"] == "Failed");
    assert_eq!(other()["reason"], "UnexpectedAdmissionError");
    let listed = runtime().block_on(async {
        let socket = machine.path("state/pod-resources/kubelet.sock");
        let mut client = PodResourcesListerClient::new(connect(&socket).await);
        client.list(ListPodResourcesRequest {}).await.unwrap().into_inner().pod_resources
    });
    let metrics = cluster.kubectl(&["get", "--raw", "/api/v1/nodes/node-1/proxy/metrics"]);
    let calls = "\nkubelet_pod_resources_endpoint_requests_list{server_api_version=\"v1\"} 1\n";
    assert!(metrics.contains(calls), "{metrics}");
    let found = listed.iter().find(|pod| pod.name == "dongle").expect("the pod");
    let device = &found.containers[0].devices[0];
    assert_eq!(
        (device.resource_name.as_str(), device.device_ids.as_slice()),
        (&*resource, &["one".to_owned()][..])
    );
    let health = || {
        let reported = status()["containerStatuses"][0]["allocatedResourcesStatus"][0].clone();
        assert_eq!(reported["name"], *resource);
        reported["resources"].clone()
    };
    assert_eq!(health(), json!([{"resourceID": "one", "health": "Healthy"}]));
    dongle.is_healthy.send_replace(false);
    let unhealthy = json!([{"resourceID": "one", "health": "Unhealthy"}]);
    eventually("the health of the device to change", 60, || health() == unhealthy && allocatable() == "0");
    cluster.kubectl(&["delete", "pod", "dongle", "other", "--timeout=120s"]);
    dongle.is_healthy.send_replace(true);
    eventually("the device to be healthy", 60, || allocatable() == "1");
    a_pod_ends_while_its_plugin_does_not_answer(cluster, &dongle);
}

fn a_pod_ends_while_its_plugin_does_not_answer(cluster: &Cluster, dongle: &Dongle) {
    dongle.hangs.send_replace(true);
    dongle.calls.lock().unwrap().clear();
    cluster.apply(&pod("hangs", None, &dongle.resource).to_string());
    eventually("the plugin to be called", 120, || dongle.calls.lock().unwrap().contains(&"start"));
    cluster.kubectl(&["delete", "pod", "hangs", "--timeout=120s"]);
    let events = cluster.kubectl(&["get", "events", "-o", "jsonpath={.items[*].message}"]);
    assert!(!events.contains("did not answer in time"), "{events}");
    assert!(!events.contains("the pod is ending"), "an interrupted start is no failure: {events}");
}

//! Dynamic resource allocation: a driver in this process, and a pod that gets its device.

use std::collections::HashMap;
use std::fs;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use coracle_integration::{Cluster, Machine, eventually};
use coracle_proto::dra::dra_plugin_server::{DraPlugin, DraPluginServer};
use coracle_proto::dra::{
    Claim, Device, NodePrepareResourceResponse, NodePrepareResourcesRequest, NodePrepareResourcesResponse,
    NodeUnprepareResourceResponse, NodeUnprepareResourcesRequest, NodeUnprepareResourcesResponse,
};
use coracle_proto::plugin_registration::registration_server::{Registration, RegistrationServer};
use coracle_proto::plugin_registration::{
    InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse,
};
use serde_json::json;
use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Server;
use tonic::{Request, Response, Status};

/// A driver with one device.
#[derive(Clone)]
struct Driver {
    name: String,
    endpoint: PathBuf,
    calls: Arc<Mutex<Vec<&'static str>>>,
}

impl Driver {
    fn note(&self, call: &'static str, claims: Vec<Claim>) -> impl Iterator<Item = String> + use<> {
        self.calls.lock().unwrap().push(call);
        claims.into_iter().map(|claim| claim.uid)
    }

    fn calls(&self) -> Vec<&'static str> {
        self.calls.lock().unwrap().clone()
    }

    /// Serves at the endpoint and at the registration socket, until the process ends.
    fn serve(&self, registration: PathBuf) {
        let driver = self.clone();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let at = |path| UnixListenerStream::new(UnixListener::bind(path).unwrap());
                let calls = Server::builder().add_service(DraPluginServer::new(driver.clone()));
                let calls = calls.serve_with_incoming(at(driver.endpoint.clone()));
                let registrations = Server::builder().add_service(RegistrationServer::new(driver.clone()));
                tokio::try_join!(calls, registrations.serve_with_incoming(at(registration))).unwrap();
            });
        });
    }
}

#[tonic::async_trait]
impl DraPlugin for Driver {
    async fn node_prepare_resources(
        &self,
        request: Request<NodePrepareResourcesRequest>,
    ) -> Result<Response<NodePrepareResourcesResponse>, Status> {
        let device = Device {
            request_names: Vec::new(),
            pool_name: "node-1".to_owned(),
            device_name: "one".to_owned(),
            cdi_device_ids: vec![format!("{}/device=one", self.name)],
        };
        let uids = self.note("prepare", request.into_inner().claims);
        let results = uids.map(|uid| {
            (uid, NodePrepareResourceResponse { devices: vec![device.clone()], error: String::new() })
        });
        let claims: HashMap<_, _> = results.collect();
        Ok(Response::new(NodePrepareResourcesResponse { claims }))
    }

    async fn node_unprepare_resources(
        &self,
        request: Request<NodeUnprepareResourcesRequest>,
    ) -> Result<Response<NodeUnprepareResourcesResponse>, Status> {
        let uids = self.note("unprepare", request.into_inner().claims);
        let claims = uids.map(|uid| (uid, NodeUnprepareResourceResponse::default())).collect();
        Ok(Response::new(NodeUnprepareResourcesResponse { claims }))
    }
}

#[tonic::async_trait]
impl Registration for Driver {
    async fn get_info(&self, _request: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        Ok(Response::new(PluginInfo {
            r#type: "DRAPlugin".to_owned(),
            name: self.name.clone(),
            endpoint: self.endpoint.to_string_lossy().into_owned(),
            supported_versions: vec!["v1.DRAPlugin".to_owned()],
        }))
    }

    async fn notify_registration_status(
        &self,
        request: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        let status = request.into_inner();
        assert!(status.plugin_registered, "{}", status.error);
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}

/// The driver's description of its device for the runtime. Removed when it is dropped.
struct CdiFile(PathBuf);

impl CdiFile {
    fn of(driver: &str) -> Self {
        let edits = json!({"env": [format!("DEVICE={driver}")]});
        let file = json!({"cdiVersion": "0.6.0", "kind": format!("{driver}/device"),
            "devices": [{"name": "one", "containerEdits": edits}]});
        let path = PathBuf::from(format!("/var/run/cdi/{driver}.json"));
        fs::create_dir_all("/var/run/cdi").unwrap();
        fs::write(&path, file.to_string()).unwrap();
        Self(path)
    }
}

impl Drop for CdiFile {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// The pod's claim is allocated by the scheduler, prepared by the driver, given to the container, and unprepared.
pub(crate) fn a_pod_gets_the_device_of_its_claim(machine: &Machine, cluster: &Cluster) {
    for dir in ["state/plugins", "state/plugins_registry"] {
        fs::create_dir_all(machine.path(dir)).unwrap();
    }
    let driver = Driver {
        name: format!("{}.example.com", machine.name()),
        endpoint: machine.path("state/plugins/driver.sock"),
        calls: Arc::default(),
    };
    let _cdi = CdiFile::of(&driver.name);
    driver.serve(machine.path("state/plugins_registry/driver-reg.sock"));
    let selector = json!({"cel": {"expression": format!("device.driver == '{}'", driver.name)}});
    let requests = json!([{"name": "r", "exactly": {"deviceClassName": "test"}}]);
    let slice = json!({"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": {"name": "test"},
        "spec": {"driver": driver.name, "nodeName": "node-1", "devices": [{"name": "one"}],
            "pool": {"name": "node-1", "generation": 1, "resourceSliceCount": 1}}});
    let container = json!({"name": "c", "image": "busybox", "command": ["sleep", "100000"],
        "resources": {"claims": [{"name": "a", "request": "r"}]}});
    for object in [
        json!({"apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": {"name": "test"},
            "spec": {"selectors": [selector], "extendedResourceName": extended_resource(&driver)}}),
        json!({"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaimTemplate",
            "metadata": {"name": "test"}, "spec": {"spec": {"devices": {"requests": requests}}}}),
        json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "device"}, "spec": {
            "terminationGracePeriodSeconds": 0, "containers": [container],
            "resourceClaims": [{"name": "a", "resourceClaimTemplateName": "test"}]}}),
    ] {
        cluster.apply(&object.to_string());
    }
    eventually("the pod with a device to run", 120, || {
        // A node that has just started deletes the slices of earlier drivers.
        cluster.apply(&slice.to_string());
        cluster.get(&["pod", "device"])["status"]["phase"] == "Running"
    });
    let device = cluster.kubectl(&["exec", "device", "--", "sh", "-c", "echo $DEVICE"]);
    assert_eq!(device.trim(), driver.name);
    assert_eq!(driver.calls(), ["prepare"]);
    cluster.kubectl(&["delete", "pod", "device", "--timeout=120s"]);
    eventually("the claim to be unprepared", 60, || driver.calls() == ["prepare", "unprepare"]);
    a_pod_gets_the_device_of_an_extended_resource(cluster, &driver);
    a_pod_waits_for_the_conditions_of_its_device(cluster, &driver);
}

/// The extended resource that the class provides.
fn extended_resource(driver: &Driver) -> String {
    format!("{}/device", driver.name)
}

/// The scheduler creates a claim for the resource. The claim is deleted with the pod.
fn a_pod_gets_the_device_of_an_extended_resource(cluster: &Cluster, driver: &Driver) {
    let resource = extended_resource(driver);
    let container = json!({"name": "c", "image": "busybox", "command": ["sleep", "100000"],
        "resources": {"limits": {&resource: "1"}}});
    let spec = json!({"terminationGracePeriodSeconds": 0, "containers": [container]});
    let metadata = json!({"name": "extended"});
    cluster
        .apply(&json!({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}).to_string());
    let pod = || cluster.get(&["pod", "extended"]);
    eventually("the pod with an extended resource to run", 120, || pod()["status"]["phase"] == "Running");
    let device = cluster.kubectl(&["exec", "extended", "--", "sh", "-c", "echo $DEVICE"]);
    assert_eq!(device.trim(), driver.name);
    let status = &pod()["status"]["extendedResourceClaimStatus"];
    let mapping =
        json!({"containerName": "c", "resourceName": resource, "requestName": "container-0-request-0"});
    assert_eq!(status["requestMappings"], json!([mapping]));
    let claim = cluster.get(&["resourceclaim", status["resourceClaimName"].as_str().unwrap()]);
    assert_eq!(claim["status"]["reservedFor"][0]["name"], "extended");
    cluster.kubectl(&["delete", "pod", "extended", "--timeout=120s"]);
    eventually("the claim to be deleted", 60, || claims(cluster).is_empty());
}

fn claims(cluster: &Cluster) -> Vec<serde_json::Value> {
    cluster.get(&["resourceclaims"])["items"].as_array().unwrap().clone()
}

/// The pod has no node until the driver sets the binding condition of the device. A taint evicts it.
fn a_pod_waits_for_the_conditions_of_its_device(cluster: &Cluster, driver: &Driver) {
    cluster.kubectl(&["delete", "resourceslice", "test"]);
    let device =
        json!({"name": "two", "bindingConditions": ["ready"], "bindingFailureConditions": ["broken"]});
    let pool = json!({"name": "conditional", "generation": 1, "resourceSliceCount": 1});
    let spec = json!({"driver": driver.name, "nodeName": "node-1", "pool": pool, "devices": [device]});
    let container = json!({"name": "c", "image": "busybox", "command": ["sleep", "100000"],
        "resources": {"claims": [{"name": "a"}]}});
    for object in [
        json!({"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": {"name": "conditional"},
            "spec": spec}),
        json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "waits"}, "spec": {
            "terminationGracePeriodSeconds": 0, "containers": [container],
            "resourceClaims": [{"name": "a", "resourceClaimTemplateName": "test"}]}}),
    ] {
        cluster.apply(&object.to_string());
    }
    let allocated = || claims(cluster).into_iter().find(|claim| claim["status"]["allocation"].is_object());
    eventually("the claim to be allocated", 60, || allocated().is_some());
    let claim = allocated().unwrap();
    assert_eq!(claim["status"]["allocation"]["devices"]["results"][0]["bindingConditions"], json!(["ready"]));
    assert!(
        cluster.get(&["pod", "waits"])["spec"]["nodeName"].is_null(),
        "the pod is scheduled before the driver is ready"
    );
    let condition = json!({"type": "ready", "status": "True", "reason": "Attached", "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z"});
    let device =
        json!({"driver": driver.name, "pool": "conditional", "device": "two", "conditions": [condition]});
    let patch = json!({"status": {"devices": [device]}}).to_string();
    let name = claim["metadata"]["name"].as_str().unwrap();
    cluster.kubectl(&["patch", "resourceclaim", name, "--subresource=status", "--type=merge", "-p", &patch]);
    eventually("the pod to run", 60, || cluster.get(&["pod", "waits"])["status"]["phase"] == "Running");
    // A pod is evicted from a device with a taint that its claim does not tolerate.
    let taint = json!({"key": "broken", "effect": "NoExecute"});
    let device = json!({"name": "two", "bindingConditions": ["ready"], "bindingFailureConditions": ["broken"],
        "taints": [taint]});
    let pool = json!({"name": "conditional", "generation": 2, "resourceSliceCount": 1});
    let spec = json!({"driver": driver.name, "nodeName": "node-1", "pool": pool, "devices": [device]});
    let metadata = json!({"name": "conditional"});
    let slice = json!({"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": metadata, "spec": spec});
    cluster.apply(&slice.to_string());
    eventually("the pod to be evicted", 60, || {
        !cluster.try_kubectl(&["get", "pod", "waits"]).status.success()
    });
}

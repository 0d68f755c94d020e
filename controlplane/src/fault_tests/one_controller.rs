//! One controller that is killed at its writes. Writes of other controllers do not count, so each killed process was
//! killed at a write of the tested controller.

use std::collections::BTreeSet;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use http::Method;
use rcgen::{CertificateParams, DistinguishedName, DnType, KeyPair};
use serde_json::{Value, json};

use super::cluster::Cluster;
use super::{APPS, CORE, create_namespace, differs, template, workload};

const CLAIMS: &str = "/apis/resource.k8s.io/v1/namespaces/n/resourceclaims";
const AUTOSCALERS: &str = "/apis/autoscaling/v2/namespaces/n/horizontalpodautoscalers";
const REQUESTS: &str = "/apis/certificates.k8s.io/v1/certificatesigningrequests";
const MIGRATIONS: &str = "/apis/storagemigration.k8s.io/v1beta1/storageversionmigrations";
const NODE_A: &str = "/api/v1/nodes/node-a";
const NOT_READY: &str = "node.kubernetes.io/not-ready";

/// Creates three devices of the node `node-a`, their class, and a template of claims of one device.
async fn create_devices(cluster: &Cluster) {
    let devices: Vec<Value> = (0..3).map(|number| json!({"name": format!("gpu-{number}")})).collect();
    let requests = json!([{"name": "gpu", "exactly": {"deviceClassName": "gpu"}}]);
    let object = |kind: &str, spec: Value| {
        let metadata = json!({"name": "gpu"});
        json!({"apiVersion": "resource.k8s.io/v1", "kind": kind, "metadata": metadata, "spec": spec})
    };
    let slice = json!({"driver": "gpu.example.com", "nodeName": "node-a", "devices": devices,
        "pool": {"name": "node-a", "generation": 1, "resourceSliceCount": 1}});
    let claim = json!({"spec": {"devices": {"requests": requests}}});
    for (path, object) in [
        ("deviceclasses", object("DeviceClass", json!({}))),
        ("resourceslices", object("ResourceSlice", slice)),
        ("namespaces/n/resourceclaimtemplates", object("ResourceClaimTemplate", claim)),
    ] {
        cluster.create(&format!("/apis/resource.k8s.io/v1/{path}"), object).await;
    }
}

/// Describes the first pod that does not run, or the claims if not each pod has one claim with its own device.
async fn without_device(cluster: &Cluster, pods: &[String]) -> Option<String> {
    for name in pods {
        let pod = cluster.get(&format!("{CORE}/pods/{name}")).await;
        if pod["status"]["phase"] != "Running" {
            return Some(format!("pod {name} has {}", pod["status"]));
        }
    }
    let claims = cluster.list(CLAIMS).await;
    let device = |claim: &Value| claim["status"]["allocation"]["devices"]["results"][0]["device"].to_string();
    let devices: BTreeSet<String> = claims.iter().map(device).collect();
    let users = claims.iter().map(|claim| claim["status"]["reservedFor"].as_array().map_or(0, Vec::len));
    let counts = [claims.len(), devices.len(), users.sum()];
    (counts != [pods.len(); 3]).then(|| format!("claims, devices and users: {counts:?}"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_controllers_create_one_claim_for_each_pod_and_release_its_device() {
    let dir = tempfile::tempdir().expect("a directory");
    // The claim is created, gets its finalizer and its devices, is released and is deleted. With fewer steps, a
    // controller could remove the finalizer of a killed scheduler again and again.
    let cluster = Cluster::start_at(dir.path(), 5, 4, |_, path| path.contains("/resourceclaims")).await;
    create_namespace(&cluster).await;
    create_devices(&cluster).await;
    // In the second round, all devices must be free again.
    for round in 0..2 {
        let names: Vec<String> = (0..3).map(|number| format!("p{round}{number}")).collect();
        for name in &names {
            let mut pod = template(name, "1", "Always");
            pod["metadata"]["name"] = name.as_str().into();
            pod["spec"]["resourceClaims"] = json!([{"name": "gpu", "resourceClaimTemplateName": "gpu"}]);
            cluster.create(&format!("{CORE}/pods"), pod).await;
        }
        cluster.until(async |cluster: &Cluster| without_device(cluster, &names).await).await;
        for name in &names {
            cluster.delete(&format!("{CORE}/pods/{name}")).await;
        }
        cluster
            .until(async |cluster: &Cluster| {
                let claims = cluster.list(CLAIMS).await;
                (!claims.is_empty()).then(|| format!("claims {claims:?}"))
            })
            .await;
    }
    cluster.assert_killed(0).await;
    cluster.stop().await;
}

/// Describes the deployment `web` or its autoscaler, if they do not have these replicas.
async fn not_scaled(cluster: &Cluster, replicas: u64) -> Option<String> {
    let web = cluster.get(&format!("{APPS}/deployments/web")).await;
    let expected = json!({"replicas": replicas, "readyReplicas": replicas});
    let scaler = cluster.get(&format!("{AUTOSCALERS}/web")).await;
    let expected_of_scaler = json!({"currentReplicas": replicas});
    differs("the deployment", &web["status"], &expected)
        .or_else(|| differs("the autoscaler", &scaler["status"], &expected_of_scaler))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_autoscaler_sets_the_replicas_and_writes_them_into_its_status() {
    let dir = tempfile::tempdir().expect("a directory");
    let cluster = Cluster::start_at(dir.path(), 6, 2, |_, path| {
        path.ends_with("/scale") || path.contains("/horizontalpodautoscalers/")
    })
    .await;
    create_namespace(&cluster).await;
    cluster
        .create(&format!("{APPS}/deployments"), workload("Deployment", "web", json!({"replicas": 1})))
        .await;
    // The metric does not exist, so only the limits of the autoscaler set the replicas.
    let target = json!({"type": "Value", "value": "1"});
    let metric = json!({"type": "External", "external": {"metric": {"name": "m"}, "target": target}});
    let scaled = json!({"apiVersion": "apps/v1", "kind": "Deployment", "name": "web"});
    let spec = json!({"scaleTargetRef": scaled, "minReplicas": 3, "maxReplicas": 5, "metrics": [metric]});
    let scaler = json!({"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": "web"}, "spec": spec});
    cluster.create(AUTOSCALERS, scaler).await;
    cluster.until(async |cluster: &Cluster| not_scaled(cluster, 3).await).await;
    let limits = json!({"spec": {"minReplicas": 1, "maxReplicas": 2}});
    cluster.patch(&format!("{AUTOSCALERS}/web"), limits).await;
    cluster.until(async |cluster: &Cluster| not_scaled(cluster, 2).await).await;
    cluster.assert_killed(0).await;
    cluster.stop().await;
}

/// Describes the first node with a taint.
async fn tainted(cluster: &Cluster) -> Option<String> {
    let nodes = cluster.list("/api/v1/nodes").await;
    let tainted =
        nodes.iter().find(|node| node["spec"]["taints"].as_array().is_some_and(|all| !all.is_empty()));
    tainted.map(|node| format!("node {} has {}", node["metadata"]["name"], node["spec"]["taints"]))
}

/// Describes the deployment `web`, if it does not have three ready pods.
async fn not_ready(cluster: &Cluster) -> Option<String> {
    let web = cluster.get(&format!("{APPS}/deployments/web")).await;
    differs("the deployment", &web["status"], &json!({"replicas": 3, "readyReplicas": 3}))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_controller_evicts_all_pods_of_a_tainted_node() {
    let dir = tempfile::tempdir().expect("a directory");
    let cluster = Cluster::start_at(dir.path(), 7, 3, |method, path| {
        path.contains("/pods/") && (*method == Method::DELETE || path.ends_with("/status"))
    })
    .await;
    create_namespace(&cluster).await;
    // Otherwise the scheduler writes the reason why it refuses the pods.
    cluster.until(tainted).await;
    cluster
        .create(&format!("{APPS}/deployments"), workload("Deployment", "web", json!({"replicas": 3})))
        .await;
    cluster.until(not_ready).await;
    let on_node =
        |pods: &[Value], node: &str| pods.iter().filter(|pod| pod["spec"]["nodeName"] == node).count();
    let pods = cluster.list(&format!("{CORE}/pods")).await;
    // The node has at least two pods, so the controller has at least four writes.
    let node = if on_node(&pods, "node-a") > 1 { "node-a" } else { "node-b" };
    let killed = cluster.killed();
    let taints = json!({"spec": {"taints": [{"key": "k", "effect": "NoExecute"}]}});
    cluster.patch(&format!("/api/v1/nodes/{node}"), taints).await;
    cluster
        .until(async |cluster: &Cluster| {
            let pods = cluster.list(&format!("{CORE}/pods")).await;
            let counts = (pods.len(), on_node(&pods, node));
            (counts != (3, 0)).then(|| format!("pods, and pods of {node}: {counts:?}"))
        })
        .await;
    cluster.until(not_ready).await;
    cluster.assert_killed(killed).await;
    cluster.stop().await;
}

/// A certificate signing request of a node.
fn signing_request(name: &str) -> Value {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::OrganizationName, "system:nodes");
    params.distinguished_name.push(DnType::CommonName, "system:node:node-c");
    let key = KeyPair::generate().expect("a key");
    let request = params.serialize_request(&key).and_then(|request| request.pem()).expect("a request");
    let spec = json!({"request": BASE64_STANDARD.encode(request), "usages": ["digital signature", "client auth"],
        "signerName": "kubernetes.io/kube-apiserver-client-kubelet"});
    json!({"apiVersion": "certificates.k8s.io/v1", "kind": "CertificateSigningRequest",
        "metadata": {"name": name}, "spec": spec})
}

/// Describes the first request without a certificate.
async fn unsigned(cluster: &Cluster) -> Option<String> {
    let requests = cluster.list(REQUESTS).await;
    let unsigned = requests.iter().find(|request| !request["status"]["certificate"].is_string());
    unsigned.map(|request| format!("request {} has {}", request["metadata"]["name"], request["status"]))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_controllers_approve_and_sign_each_request_once() {
    let dir = tempfile::tempdir().expect("a directory");
    let is_step = |_: &Method, path: &str| path.contains("/certificatesigningrequests/");
    let cluster = Cluster::start_at(dir.path(), 8, 2, is_step).await;
    for name in ["one", "two", "three"] {
        cluster.create(REQUESTS, signing_request(name)).await;
    }
    cluster.until(unsigned).await;
    for request in cluster.list(REQUESTS).await {
        let conditions = request["status"]["conditions"].as_array().map_or(0, Vec::len);
        assert_eq!((conditions, &request["status"]["conditions"][0]["type"]), (1, &json!("Approved")));
    }
    cluster.assert_killed(0).await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_controller_writes_tokens_of_service_accounts_and_deletes_them() {
    let dir = tempfile::tempdir().expect("a directory");
    let cluster = Cluster::start_at(dir.path(), 9, 2, |_, path| path.contains("/secrets/")).await;
    create_namespace(&cluster).await;
    let account = json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "robot"}});
    cluster.create(&format!("{CORE}/serviceaccounts"), account).await;
    for name in ["one", "two", "three"] {
        let annotations = json!({"kubernetes.io/service-account.name": "robot"});
        let secret = json!({"apiVersion": "v1", "kind": "Secret", "type": "kubernetes.io/service-account-token",
            "metadata": {"name": name, "annotations": annotations}});
        cluster.create(&format!("{CORE}/secrets"), secret).await;
    }
    cluster
        .until(async |cluster: &Cluster| {
            let secrets = cluster.list(&format!("{CORE}/secrets")).await;
            let filled = secrets.iter().filter(|secret| secret["data"]["token"].is_string()).count();
            (filled != 3).then(|| format!("{filled} tokens"))
        })
        .await;
    cluster.delete(&format!("{CORE}/serviceaccounts/robot")).await;
    cluster
        .until(async |cluster: &Cluster| {
            let left = cluster.list(&format!("{CORE}/secrets")).await.len();
            (left > 0).then(|| format!("{left} secrets"))
        })
        .await;
    cluster.assert_killed(0).await;
    cluster.stop().await;
}

/// Describes the node `node-a` until the controllers have written its pod range and its annotation.
async fn incomplete_node(cluster: &Cluster) -> Option<String> {
    let node = cluster.get(NODE_A).await;
    let is_done = node["spec"]["podCIDR"].is_string()
        && node["metadata"]["annotations"]["node.alpha.kubernetes.io/ttl"].is_string();
    (!is_done).then(|| format!("the node is {node}"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_controller_taints_a_node_that_is_not_ready_until_it_is_ready() {
    let dir = tempfile::tempdir().expect("a directory");
    let is_step = |_: &Method, path: &str| path == NODE_A;
    let cluster = Cluster::start_at(dir.path(), 10, 2, is_step).await;
    cluster.until(incomplete_node).await;
    cluster.until(tainted).await;
    let killed = cluster.killed();
    let set_ready = async |status: &str| {
        let ready = json!({"type": "Ready", "status": status, "reason": "Test", "message": ""});
        cluster.patch(&format!("{NODE_A}/status"), json!({"status": {"conditions": [ready]}})).await;
    };
    set_ready("False").await;
    cluster
        .until(async |cluster: &Cluster| {
            let node = cluster.get(NODE_A).await;
            let mut taints = node["spec"]["taints"].as_array().into_iter().flatten();
            let has = taints.any(|taint| taint["key"] == NOT_READY && taint["effect"] == "NoSchedule");
            (!has).then(|| format!("the node has {}", node["spec"]["taints"]))
        })
        .await;
    set_ready("True").await;
    cluster.until(tainted).await;
    cluster.assert_killed(killed).await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_migration_of_stored_objects_continues_and_ends() {
    let dir = tempfile::tempdir().expect("a directory");
    let is_step = |_: &Method, path: &str| path.contains("/storageversionmigrations/");
    let cluster = Cluster::start_at(dir.path(), 11, 2, is_step).await;
    create_namespace(&cluster).await;
    let settings = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "settings"}});
    cluster.create(&format!("{CORE}/configmaps"), settings).await;
    let migration = json!({"apiVersion": "storagemigration.k8s.io/v1beta1", "kind": "StorageVersionMigration",
        "metadata": {"name": "m"}, "spec": {"resource": {"group": "", "resource": "configmaps"}}});
    cluster.create(MIGRATIONS, migration).await;
    cluster
        .until(async |cluster: &Cluster| {
            let status = cluster.get(&format!("{MIGRATIONS}/m")).await["status"].clone();
            let is = |kind: &str, value: &str| {
                let mut conditions = status["conditions"].as_array().into_iter().flatten();
                conditions.any(|condition| condition["type"] == kind && condition["status"] == value)
            };
            let has_ended = is("Succeeded", "True") && is("Running", "False");
            (!has_ended).then(|| format!("the migration has {status}"))
        })
        .await;
    cluster.assert_killed(0).await;
    cluster.stop().await;
}

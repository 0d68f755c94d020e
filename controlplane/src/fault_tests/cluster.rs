//! A control plane whose controllers and scheduler are killed at their writes, with simulated nodes.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use coracle_controllers::{AccountTokenSigner, ControllersConfig, Signer};
use coracle_testing::eventually_async;
use futures::{StreamExt as _, TryStreamExt as _};
use http::{Method, Request, header};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{WatchEvent, WatchParams};
use kube::{Api, Client, ResourceExt as _};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use super::fault::{Fault, IsStep, Point};
use super::rng::Rng;
use crate::{
    AutoscalerOptions, ControlPlane, ControlPlaneConfig, ControllerSelection, RuntimeConfig, SchedulerConfig,
};

/// Grace period for node heartbeats. It is long, because the simulated nodes write no heartbeats.
const HOUR: Duration = Duration::from_secs(3600);

/// The uids of all pods that were created, including deleted pods, by namespace and controller (`Kind/name`).
type Created = Arc<Mutex<BTreeMap<(String, String), BTreeSet<String>>>>;

/// An API server, two simulated nodes, and a control plane that is repeatedly killed and started.
pub(super) struct Cluster {
    admin: Client,
    created: Created,
    killed: Arc<AtomicUsize>,
    /// Each process is killed at a random write among its first `steps` writes.
    steps: Arc<AtomicU64>,
    shutdown: CancellationToken,
    plane: ControlPlane,
    _tasks: Vec<AbortOnDropHandle<()>>,
}

// === impl Cluster ===

impl Cluster {
    /// Starts the API server, the nodes and the processes. A process is killed at one of its first `steps` writes.
    pub(super) async fn start(dir: &Path, seed: u64, steps: u64) -> Self {
        Self::start_at(dir, seed, steps, |_, _| true).await
    }

    /// As [`start`](Self::start), but only the writes of `is_step` count. A process that needs fewer of these writes is
    /// not killed.
    pub(super) async fn start_at(dir: &Path, seed: u64, steps: u64, is_step: IsStep) -> Self {
        let mut config = ControlPlaneConfig::new(dir);
        config.listen = ([127, 0, 0, 1], 0).into();
        config.controllers = ControllerSelection::parse(vec!["-*".to_owned()]).expect("no controller");
        config.run_scheduler = false;
        let migrations = vec!["storagemigration.k8s.io/v1beta1=true".to_owned()];
        config.runtime_config = RuntimeConfig::parse(&migrations).expect("a version");
        let shutdown = CancellationToken::new();
        let plane = crate::start(config, shutdown.clone()).await.expect("the API server starts");
        let admin = plane.client("admin", &["system:masters"]);
        let (created, killed) = (Created::default(), Arc::new(AtomicUsize::new(0)));
        let steps = Arc::new(AtomicU64::new(steps));
        let nodes = run_nodes(admin.clone(), Arc::clone(&created));
        let processes = Processes {
            admin: admin.clone(),
            rng: Rng::new(seed),
            steps: Arc::clone(&steps),
            is_step,
            killed: Arc::clone(&killed),
            signer: signer(&plane),
            account_tokens: account_tokens(&plane),
        };
        let tasks = vec![
            AbortOnDropHandle::new(tokio::spawn(nodes)),
            AbortOnDropHandle::new(tokio::spawn(processes.run())),
        ];
        let cluster = Self { admin, created, killed, steps, shutdown, plane, _tasks: tasks };
        for name in ["node-a", "node-b"] {
            cluster.create("/api/v1/nodes", node(name)).await;
        }
        cluster
    }

    /// Sets the number of writes of the next processes, as in [`start`](Self::start).
    pub(super) fn set_steps(&self, steps: u64) {
        self.steps.store(steps, SeqCst);
    }

    /// Number of killed processes.
    pub(super) fn killed(&self) -> usize {
        self.killed.load(SeqCst)
    }

    /// Asserts that more than `before` processes are killed. The effect of a write may be seen before its process is
    /// counted.
    pub(super) async fn assert_killed(&self, before: usize) {
        eventually_async("a process is killed", 10, async || self.killed() > before).await;
    }

    /// Number of pods that this owner (`Kind/name`) ever had.
    pub(super) fn created_of(&self, namespace: &str, owner: &str) -> usize {
        let created = self.created.lock().unwrap_or_else(PoisonError::into_inner);
        created.get(&(namespace.to_owned(), owner.to_owned())).map_or(0, BTreeSet::len)
    }

    pub(super) async fn create(&self, path: &str, object: Value) {
        call(&self.admin, Method::POST, path, Some(object)).await.expect("the object is valid");
    }

    /// Applies a merge patch.
    pub(super) async fn patch(&self, path: &str, patch: Value) {
        call(&self.admin, Method::PATCH, path, Some(patch)).await.expect("the patch is valid");
    }

    pub(super) async fn delete(&self, path: &str) {
        call(&self.admin, Method::DELETE, path, None).await.expect("the object exists");
    }

    /// The object, or null.
    pub(super) async fn get(&self, path: &str) -> Value {
        match call(&self.admin, Method::GET, path, None).await {
            Ok(found) => found,
            Err(kube::Error::Api(status)) if status.code == 404 => Value::Null,
            Err(error) => panic!("cannot get {path}: {error}"),
        }
    }

    pub(super) async fn list(&self, path: &str) -> Vec<Value> {
        self.get(path).await["items"].as_array().cloned().unwrap_or_default()
    }

    /// Waits until the check finds no difference.
    pub(super) async fn until(&self, check: impl AsyncFn(&Self) -> Option<String>) {
        let expected = eventually_async("the expected state", 100, async || match check(self).await {
            Some(difference) => Err(format!("after {} killed processes: {difference}", self.killed())),
            None => Ok(()),
        });
        expected.await;
    }

    pub(super) async fn stop(self) {
        self.shutdown.cancel();
        self.plane.stopped().await;
    }
}

fn node(name: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "Node",
    "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name},
        "annotations": {"coracle.dev/local-volumes": "/data"}},
    "status": {
        "capacity": {"cpu": "64", "memory": "64Gi", "pods": "500"},
        "allocatable": {"cpu": "64", "memory": "64Gi", "pods": "500"},
        "conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady", "message": ""}],
    }})
}

async fn call(
    client: &Client,
    method: Method,
    path: &str,
    body: Option<Value>,
) -> Result<Value, kube::Error> {
    let kind = if method == Method::PATCH { "application/merge-patch+json" } else { "application/json" };
    let body = body.map(|body| body.to_string().into_bytes()).unwrap_or_default();
    let request = Request::builder().method(method).uri(path).header(header::CONTENT_TYPE, kind).body(body);
    client.request(request.expect("a valid request")).await
}

/// Signs certificates with the authority of the control plane.
fn signer(plane: &ControlPlane) -> Signer {
    let key = plane.pki().authority_key().expect("the key of the authority");
    Signer::new(plane.pki().authority_pem(), &key, HOUR).expect("an authority")
}

/// Signs the tokens of service accounts with the key of the API server.
fn account_tokens(plane: &ControlPlane) -> AccountTokenSigner {
    let key = plane.pki().service_account_key().expect("the key of service accounts");
    AccountTokenSigner::new(&key).expect("a P-256 key")
}

/// Controllers and scheduler, which are repeatedly killed and started.
struct Processes {
    admin: Client,
    rng: Rng,
    steps: Arc<AtomicU64>,
    is_step: IsStep,
    killed: Arc<AtomicUsize>,
    signer: Signer,
    account_tokens: AccountTokenSigner,
}

// === impl Processes ===

impl Processes {
    /// Runs controllers and scheduler. Each process is killed at one of its first writes. Then the next process starts.
    async fn run(mut self) {
        loop {
            let fault = Fault::new(self.next_point(), self.is_step);
            let client = fault.client(&self.admin);
            let token = CancellationToken::new();
            let controllers = coracle_controllers::run(client.clone(), self.config(), token.clone());
            let scheduler = coracle_scheduler::run(client, SchedulerConfig::default(), token.clone());
            tokio::select! {
                _ended = async { tokio::join!(controllers, scheduler) } => panic!("a process ended by itself"),
                () = fault.died() => {}
            }
            self.killed.fetch_add(1, SeqCst);
        }
    }

    /// The point at which the next process is killed.
    fn next_point(&mut self) -> Point {
        let step = usize::try_from(self.rng.below(self.steps.load(SeqCst))).unwrap_or_default() + 1;
        // A process that is killed before its first write would make no progress.
        let is_before = step > 1 && self.rng.below(2) == 0;
        if is_before { Point::Before(step) } else { Point::After(step) }
    }

    fn config(&self) -> ControllersConfig {
        ControllersConfig {
            selection: ControllerSelection::default().without("resourcequota-controller"),
            node_monitor_grace: HOUR,
            node_startup_grace: HOUR,
            cluster_cidrs: vec!["10.42.0.0/16".parse().expect("a range")],
            root_ca_pem: Some("authority".to_owned()),
            signer: Some(self.signer.clone()),
            account_tokens: Some(self.account_tokens.clone()),
            autoscaler: AutoscalerOptions {
                sync_period: Duration::from_secs(1),
                ..AutoscalerOptions::default()
            },
            ..ControllersConfig::default()
        }
    }
}

/// Simulates the kubelets: pods of jobs succeed, all other pods run until they are deleted.
async fn run_nodes(admin: Client, created: Created) {
    let pods: Api<Pod> = Api::all(admin.clone());
    let mut number = 0_u16;
    loop {
        let Ok(events) = pods.watch(&WatchParams::default(), "0").await else {
            tokio::time::sleep(Duration::from_millis(50)).await;
            continue;
        };
        let mut events = events.boxed();
        while let Ok(Some(event)) = events.try_next().await {
            let (WatchEvent::Added(pod) | WatchEvent::Modified(pod)) = event else { continue };
            record(&created, &pod);
            number = number.wrapping_add(1);
            advance(&admin, &pod, number).await;
        }
    }
}

fn record(created: &Created, pod: &Pod) {
    let owner = pod.owner_references().iter().find(|owner| owner.controller == Some(true));
    let owner = owner.map(|owner| format!("{}/{}", owner.kind, owner.name)).unwrap_or_default();
    let of = (pod.namespace().unwrap_or_default(), owner);
    let mut created = created.lock().unwrap_or_else(PoisonError::into_inner);
    created.entry(of).or_default().insert(pod.uid().unwrap_or_default());
}

/// The next step of a pod on its node.
async fn advance(admin: &Client, pod: &Pod, number: u16) {
    let path = format!("/api/v1/namespaces/{}/pods/{}", pod.namespace().unwrap_or_default(), pod.name_any());
    if pod.spec.as_ref().is_none_or(|spec| spec.node_name.is_none()) {
        return;
    }
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or("Pending");
    // The object may be deleted or have another uid by now.
    if pod.metadata.deletion_timestamp.is_some() {
        let now = json!({"apiVersion": "v1", "kind": "DeleteOptions", "gracePeriodSeconds": 0,
            "preconditions": {"uid": pod.uid()}});
        let _ = call(admin, Method::DELETE, &path, Some(now)).await;
    } else if phase == "Pending" {
        let is_of_job = pod.owner_references().iter().any(|owner| owner.kind == "Job");
        let status = status(is_of_job, number);
        let patch = json!({"metadata": {"uid": pod.uid()}, "status": status});
        let _ = call(admin, Method::PATCH, &format!("{path}/status"), Some(patch)).await;
    }
}

fn status(is_of_job: bool, number: u16) -> Value {
    let now = jiff::Timestamp::from_second(jiff::Timestamp::now().as_second()).expect("a time").to_string();
    let state = if is_of_job {
        json!({"terminated": {"exitCode": 0, "reason": "Completed", "startedAt": now, "finishedAt": now}})
    } else {
        json!({"running": {"startedAt": now}})
    };
    let ready = if is_of_job { "False" } else { "True" };
    let condition =
        |kind: &str, status: &str| json!({"type": kind, "status": status, "lastTransitionTime": now});
    let [high, low] = number.to_be_bytes();
    let ip = format!("10.42.{high}.{low}");
    json!({
        "phase": if is_of_job { "Succeeded" } else { "Running" },
        "podIP": ip, "podIPs": [{"ip": ip}], "startTime": now,
        "conditions": [condition("PodScheduled", "True"), condition("Initialized", "True"),
            condition("ContainersReady", ready), condition("Ready", ready)],
        "containerStatuses": [{"name": "c", "image": "i", "imageID": "i", "restartCount": 0,
            "ready": !is_of_job, "started": !is_of_job, "state": state}],
    })
}

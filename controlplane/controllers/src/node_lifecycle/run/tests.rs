//! The controller against a simulated API that refuses a write.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::sync::{Mutex, MutexGuard, PoisonError};

use http::{Request, Response};
use serde_json::Value;

use super::*;
use crate::config::ControllersConfig;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An API that accepts all status patches, except that the first patch of one pod conflicts.
#[derive(Clone, Default)]
struct Api {
    objects: Arc<Mutex<BTreeMap<String, Value>>>,
    refuses: Arc<Mutex<BTreeSet<String>>>,
}

impl Api {
    fn put(&self, path: &str, object: &Value) {
        lock(&self.objects).insert(path.to_owned(), object.clone());
    }

    async fn answer(&self, request: Request<kube::client::Body>) -> Response<String> {
        let (head, body) = request.into_parts();
        let path = head.uri.path().trim_end_matches("/status").to_owned();
        if lock(&self.refuses).remove(&path) {
            let conflict = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 409,
                "reason": "Conflict", "message": "the object has been modified"});
            let mut response = Response::new(conflict.to_string());
            *response.status_mut() = http::StatusCode::CONFLICT;
            return response;
        }
        let patch: Value = serde_json::from_slice(&body.collect_bytes().await.unwrap()).unwrap();
        let mut objects = lock(&self.objects);
        let object = objects.get_mut(&path).unwrap();
        for part in ["spec", "status"] {
            for (name, value) in patch[part].as_object().into_iter().flatten() {
                object[part][name] = value.clone();
            }
        }
        let version: u64 = object["metadata"]["resourceVersion"].as_str().unwrap().parse().unwrap();
        object["metadata"]["resourceVersion"] = json!((version + 100).to_string());
        Response::new(object.to_string())
    }

    fn context(&self, config: ControllersConfig) -> Context {
        let api = self.clone();
        let service = tower::service_fn(move |request| {
            let api = api.clone();
            async move { Ok::<_, Infallible>(api.answer(request).await) }
        });
        let client = kube::Client::new(service, "default");
        let recorder = coracle_events::recorder(client.clone(), "").0;
        Context::new(client, recorder, config)
    }

    fn ready(&self, path: &str) -> String {
        lock(&self.objects)[path]["status"]["conditions"][0]["status"].as_str().unwrap().to_owned()
    }
}

fn of(kind: &str, name: &str, version: u64) -> Value {
    json!({"apiVersion": "v1", "kind": kind, "spec": {"nodeName": "n"},
        "metadata": {"name": name, "uid": name, "resourceVersion": version.to_string()},
        "status": {"conditions": [{"type": "Ready", "status": "True"}]}})
}

#[tokio::test]
async fn every_pod_of_a_lost_node_becomes_not_ready_even_if_a_write_conflicts() {
    let api = Api::default();
    let context = api.context(ControllersConfig {
        node_monitor_grace: Duration::ZERO,
        node_startup_grace: Duration::ZERO,
        ..ControllersConfig::default()
    });
    let node = of("Node", "n", 1);
    api.put("/api/v1/nodes/n", &node);
    context.caches.nodes.written(serde_json::from_value(node).unwrap());
    let paths = ["a", "b", "c"].map(|name| format!("/api/v1/namespaces/default/pods/{name}"));
    for (version, (name, path)) in (2..).zip(["a", "b", "c"].iter().zip(&paths)) {
        let mut pod = of("Pod", name, version);
        pod["metadata"]["namespace"] = json!("default");
        api.put(path, &pod);
        context.caches.pods.written(serde_json::from_value(pod).unwrap());
    }
    lock(&api.refuses).insert(paths[1].clone());
    let (lifecycle, key) = (Lifecycle::new(Default::default()), Key::new("", "n"));
    assert!(reconcile(&context, &lifecycle, key.clone()).await.is_err_and(|error| error.is_conflict()));
    assert_eq!(api.ready("/api/v1/nodes/n"), "Unknown");
    // The queue retries a failed reconcile.
    assert!(reconcile(&context, &lifecycle, key).await.is_ok());
    assert_eq!(paths.map(|path| api.ready(&path)), ["False", "False", "False"]);
}

/// Nodes that are reconciled every second, as if each had its own timer.
struct Cluster {
    api: Api,
    context: Context,
    lifecycle: Lifecycle,
    nodes: Vec<Value>,
    versions: u64,
}

impl Cluster {
    fn new() -> Self {
        let api = Api::default();
        // The test itself sets which nodes are lost.
        let hour = Duration::from_secs(3600);
        let grace = ControllersConfig { node_monitor_grace: hour, ..ControllersConfig::default() };
        let context = api.context(grace);
        Self { api, context, lifecycle: Lifecycle::new(Default::default()), nodes: Vec::new(), versions: 1 }
    }

    fn add(mut self, zone: &str, ready: usize, lost: usize) -> Self {
        for number in 0..ready + lost {
            let mut node = of("Node", &format!("{zone}-{number}"), 0);
            node["metadata"]["labels"] = json!({"topology.kubernetes.io/zone": zone});
            self.nodes.push(node);
            self.say(self.nodes.len() - 1, if number < ready { "True" } else { "Unknown" });
        }
        self
    }

    /// Sets the status of the node's condition Ready.
    fn say(&mut self, node: usize, ready: &str) {
        let path = format!("/api/v1/nodes/{}", self.nodes[node]["metadata"]["name"].as_str().unwrap());
        self.versions += 1000;
        let mut node = lock(&self.api.objects).get(&path).unwrap_or(&self.nodes[node]).clone();
        node["metadata"]["resourceVersion"] = json!(self.versions.to_string());
        node["status"]["conditions"][0]["status"] = json!(ready);
        self.api.put(&path, &node);
        self.context.caches.nodes.written(serde_json::from_value(node).unwrap());
    }

    fn waits(&self, node: usize) -> bool {
        let key = Key::new("", self.nodes[node]["metadata"]["name"].as_str().unwrap());
        let node = self.context.caches.nodes.get(&key).unwrap();
        plan::evicting(&node).is_some() && !plan::is_evicting(&node)
    }

    fn given_up(&self, zone: &str) -> usize {
        let nodes = self.context.caches.nodes.all();
        nodes.iter().filter(|node| zone::name(node) == format!("/{zone}") && plan::is_evicting(node)).count()
    }

    /// Reconciles all nodes every second, for this many seconds. Returns how many nodes of the zone are tainted then.
    async fn after(&self, seconds: u64, zone: &str) -> usize {
        for second in 0..=seconds {
            for node in self.context.caches.nodes.all() {
                reconcile(&self.context, &self.lifecycle, node.key()).await.unwrap();
            }
            if second < seconds {
                tokio::time::advance(Duration::from_secs(1)).await;
            }
        }
        self.given_up(zone)
    }
}

#[tokio::test(start_paused = true)]
async fn one_node_of_a_zone_is_tainted_every_ten_seconds() {
    let cluster = Cluster::new().add("a", 6, 4).add("b", 0, 2);
    assert_eq!(
        (cluster.after(0, "a").await, cluster.given_up("b")),
        (1, 1),
        "each zone has a limit of its own"
    );
    assert_eq!(cluster.after(9, "a").await, 1);
    assert_eq!((cluster.after(2, "a").await, cluster.given_up("b")), (2, 2), "a zone that is all lost, too");
    assert_eq!(cluster.after(60, "a").await, 4);
    let metrics = cluster.context.config.zone_metrics.text();
    for line in [
        "evictions_total{zone=\":\0:a\"} 4\n",
        "zone_size{zone=\":\0:a\"} 10\n",
        "zone_health{zone=\":\0:a\"} 60\n",
        "unhealthy_nodes_in_zone{zone=\":\0:a\"} 4\n",
    ] {
        assert!(metrics.contains(&format!("node_collector_{line}")), "no {line} in {metrics}");
    }
}

#[tokio::test(start_paused = true)]
async fn nodes_of_a_large_mostly_lost_zone_are_tainted_slowly_until_it_recovers() {
    let mut cluster = Cluster::new().add("a", 23, 28).add("b", 1, 0);
    for node in 0..2 {
        cluster.say(node, "Unknown");
    }
    // 30 of 51 nodes are lost. The first taint does not wait.
    assert_eq!(cluster.after(0, "a").await, 1);
    assert_eq!(cluster.after(98, "a").await, 1);
    assert_eq!(cluster.after(3, "a").await, 2);
    // 27 of 51 nodes are lost, less than 55 %: the next taint follows ten seconds later.
    let waiting: Vec<usize> = (0..51).filter(|node| cluster.waits(*node)).take(3).collect();
    for node in waiting {
        cluster.say(node, "True");
    }
    assert_eq!(cluster.after(9, "a").await, 2);
    assert_eq!(cluster.after(2, "a").await, 3);
}

#[tokio::test(start_paused = true)]
async fn a_small_zone_that_is_mostly_lost_keeps_its_pods() {
    let mut cluster = Cluster::new().add("a", 9, 11);
    assert_eq!(cluster.after(600, "a").await, 0);
    cluster.say(19, "True");
    assert_eq!(cluster.after(9, "a").await, 0);
    assert_eq!(cluster.after(2, "a").await, 1);
}

#[tokio::test(start_paused = true)]
async fn when_all_nodes_are_lost_none_is_tainted_and_after_a_return_all_get_a_grace_period() {
    let mut cluster = Cluster::new().add("a", 1, 1).add("b", 1, 0);
    assert_eq!(cluster.after(0, "a").await, 1);
    cluster.say(0, "Unknown");
    cluster.say(2, "Unknown");
    assert_eq!(cluster.after(600, "a").await, 0, "also those that were given up before");
    cluster.say(0, "True");
    assert_eq!((cluster.after(9, "a").await, cluster.given_up("b")), (0, 0), "they may be about to say so");
    assert_eq!((cluster.after(2, "a").await, cluster.given_up("b")), (1, 1));
}

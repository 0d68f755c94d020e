//! Tests of the node with a small API and a real network in a network namespace of the test.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Mutex;

use bytes::Bytes;
use coracle_cni::{Network, NetworkConfig};
use coracle_testing::{in_new_namespace_async, ip, until};
use futures::StreamExt;
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Frame;
use serde_json::{Value, json};
use tokio::sync::broadcast;
use tokio_stream::wrappers::BroadcastStream;

use super::*;

type Frames = futures::stream::BoxStream<'static, Result<Frame<Bytes>, Infallible>>;

/// A label that the agent does not have.
const FENCE: &str = "example.com/fence";

/// One node and one lease, with all writes.
#[derive(Clone)]
struct Api {
    objects: Arc<Mutex<BTreeMap<String, Value>>>,
    writes: Arc<Mutex<Vec<(Method, String, Value)>>>,
    events: broadcast::Sender<Value>,
}

impl Api {
    fn new() -> Api {
        Api { objects: Arc::default(), writes: Arc::default(), events: broadcast::channel(16).0 }
    }

    fn client(&self) -> kube::Client {
        let api = self.clone();
        let service = tower::service_fn(move |request| {
            let api = api.clone();
            async move { Ok::<_, Infallible>(api.answer(request).await) }
        });
        kube::Client::new(service, "default")
    }

    async fn answer(&self, request: Request<kube::client::Body>) -> Response<StreamBody<Frames>> {
        let (head, body) = request.into_parts();
        let body = body.collect().await.expect("body").to_bytes();
        let (path, query) = (head.uri.path().to_owned(), head.uri.query().unwrap_or_default().to_owned());
        if query.contains("watch=") {
            let events = BroadcastStream::new(self.events.subscribe()).filter_map(async |event| event.ok());
            let lines = events.map(|event| Ok(Frame::data(Bytes::from(format!("{event}\n")))));
            return Response::new(StreamBody::new(lines.boxed()));
        }
        let (status, value) = if head.method == Method::GET {
            self.read(&path, &query)
        } else {
            self.write(&head.method, &path, &body)
        };
        let frame = Ok(Frame::data(Bytes::from(value.to_string())));
        let mut response = Response::new(StreamBody::new(futures::stream::iter([frame]).boxed()));
        *response.status_mut() = status;
        response
    }

    fn read(&self, path: &str, query: &str) -> (StatusCode, Value) {
        let objects = self.objects.lock().expect("objects");
        if query.contains("fieldSelector") {
            let items: Vec<&Value> = objects.get("/api/v1/nodes/n1").into_iter().collect();
            return (
                StatusCode::OK,
                json!({"kind": "NodeList", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}, "items": items}),
            );
        }
        objects.get(path).map_or_else(absent, |found| (StatusCode::OK, found.clone()))
    }

    fn write(&self, method: &Method, path: &str, body: &[u8]) -> (StatusCode, Value) {
        let body: Value = serde_json::from_slice(body).expect("json");
        let path = path.trim_end_matches("/status").to_owned();
        let mut objects = self.objects.lock().expect("objects");
        let (at, made) = if *method == Method::POST {
            let mut made = body.clone();
            made["metadata"]["uid"] = json!("u1");
            (format!("{path}/n1"), made)
        } else {
            let Some(mut found) = objects.get(&path).cloned() else { return absent() };
            merge(&mut found, &body);
            (path.clone(), found)
        };
        self.writes.lock().expect("writes").push((method.clone(), path, body));
        objects.insert(at.clone(), made.clone());
        if at.contains("/nodes/") {
            let _ = self.events.send(json!({"type": "MODIFIED", "object": made}));
        }
        (StatusCode::OK, made)
    }

    /// Assigns the range, as the controller does.
    fn give_range(&self) {
        let patch = json!({"spec": {"podCIDR": "10.99.0.0/24", "podCIDRs": ["10.99.0.0/24"]}}).to_string();
        self.write(&Method::PATCH, "/api/v1/nodes/n1", patch.as_bytes());
    }

    fn node(&self) -> Option<Value> {
        self.objects.lock().expect("objects").get("/api/v1/nodes/n1").cloned()
    }

    fn ready(&self) -> Option<String> {
        self.ready_condition()?["status"].as_str().map(str::to_owned)
    }

    fn ready_condition(&self) -> Option<Value> {
        let node = self.node()?;
        node["status"]["conditions"].as_array()?.iter().find(|c| c["type"] == "Ready").cloned()
    }

    async fn until_ready(&self, wanted: &str) {
        until(wanted, 10, || self.ready().as_deref() == Some(wanted)).await;
    }

    async fn until_address(&self, wanted: &str) {
        until(wanted, 10, || {
            self.node().is_some_and(|node| {
                let addresses = node["status"]["addresses"].as_array().cloned().unwrap_or_default();
                addresses.iter().any(|a| a["type"] == "InternalIP" && a["address"] == wanted)
            })
        })
        .await;
    }

    /// Changes a label, and waits until the agent has received the change. The agent handles changes one after the
    /// other, so the agent has handled the earlier changes.
    async fn fence(&self, node: &watch::Receiver<Option<Arc<Node>>>, value: &str) {
        until("the agent watches its node", 10, || self.events.receiver_count() > 0).await;
        let patch = json!({"metadata": {"labels": {FENCE: value}}}).to_string();
        self.write(&Method::PATCH, "/api/v1/nodes/n1", patch.as_bytes());
        let label = || Some(node.borrow().as_ref()?.metadata.labels.as_ref()?.get(FENCE)?.clone());
        until("the change of a label", 10, || label().as_deref() == Some(value)).await;
    }

    /// The writes without the writes of [`Api::fence`].
    fn writes(&self) -> Vec<(Method, String, Value)> {
        let all = self.writes.lock().expect("writes").clone();
        let is_fence = |body: &Value| body["metadata"]["labels"].get(FENCE).is_some();
        all.into_iter().filter(|(.., body)| !is_fence(body)).collect()
    }
}

fn absent() -> (StatusCode, Value) {
    (
        StatusCode::NOT_FOUND,
        json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404, "message": ""}),
    )
}

/// A merge patch, sufficient for these objects: lists are replaced.
fn merge(into: &mut Value, patch: &Value) {
    match patch.as_object() {
        Some(fields) => fields.iter().for_each(|(key, value)| merge(&mut into[key], value)),
        None => *into = patch.clone(),
    }
    if let Some(elements) = into.as_array_mut() {
        elements.retain(|element| element.get("$patch").is_none());
    }
}

fn agent(api: &Api, network: Network, dir: &std::path::Path) -> NodeAgent {
    agent_at(vec!["192.0.2.1".parse().expect("address")], api, network, dir)
}

fn agent_at(ips: Vec<IpAddr>, api: &Api, network: Network, dir: &std::path::Path) -> NodeAgent {
    let (client, recorder) = recording(api);
    NodeAgent::new(config(ips, dir), client, recorder, PodNetwork::Cni(network)).expect("properties")
}

/// A client, and a recorder that never sends its events, so that they do not count as writes.
fn recording(api: &Api) -> (kube::Client, Recorder) {
    (api.client(), crate::event_recorder::channel(api.client(), "n1").0)
}

fn config(ips: Vec<IpAddr>, dir: &std::path::Path) -> NodeConfig {
    NodeConfig { ips, ..NodeConfig::for_test(dir) }
}

async fn network(dir: &std::path::Path) -> Network {
    let config = NetworkConfig {
        conf_dir: Some(dir.join("net.d")),
        bin_dirs: vec![dir.join("bin")],
        ..NetworkConfig::of_default_network(
            dir.join("cni"),
            dir.join("lasting"),
            "coracletest0",
            "coracletest",
        )
    };
    Network::open(config).await.expect("network")
}

#[test]
fn a_node_registers_gets_its_range_becomes_ready_and_then_sends_no_requests() {
    in_new_namespace_async(async || {
        let dir = std::env::temp_dir().join(format!("coracle-node-{}", std::process::id()));
        std::fs::create_dir_all(&dir).expect("temp dir");
        let (api, shutdown) = (Api::new(), CancellationToken::new());
        let agent_of = |network| agent(&api, network, &dir);
        let first = agent_of(network(&dir).await);
        let received = first.node();
        let running = tokio::spawn(first.run(shutdown.clone()));
        api.until_ready("False").await;
        let node = api.node().expect("node");
        assert_eq!(node["metadata"]["labels"]["kubernetes.io/hostname"], "n1");
        assert_eq!(node["status"]["daemonEndpoints"]["kubeletEndpoint"]["Port"], 10250);
        // The watch begins after the node exists, as with a real API.
        until("the agent watches its node", 10, || api.events.receiver_count() > 0).await;
        api.give_range();
        api.until_ready("True").await;
        let lease = || {
            let objects = api.objects.lock().expect("objects");
            objects.get("/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/n1").cloned()
        };
        until("a lease", 10, || lease().is_some()).await;
        assert_eq!(lease().expect("a lease")["metadata"]["ownerReferences"][0]["uid"], "u1");
        until("all writes", 10, || api.writes().len() >= 4).await;
        api.fence(&received, "1").await;
        api.fence(&received, "2").await;
        let written = api.writes();
        assert_eq!(written.len(), 4, "node, lease, range, status: {written:?}");
        shutdown.cancel();
        running.await.expect("join");

        // A restarted agent uses the stored range and writes nothing.
        let (again, shutdown) = (network(&dir).await, CancellationToken::new());
        let second = agent_of(again.clone());
        let received = second.node();
        let running = tokio::spawn(second.run(shutdown.clone()));
        until("its range", 10, || again.ready().is_ok()).await;
        api.fence(&received, "3").await;
        api.fence(&received, "4").await;
        let writes = api.writes()[written.len()..].to_vec();
        assert!(writes.iter().all(|(_, path, _)| path.contains("leases")), "{writes:?}");
        shutdown.cancel();
        running.await.expect("join");
        std::fs::remove_dir_all(&dir).expect("clean up");
    });
}

/// An external plugin that rejects pods while the file `busy` exists.
fn plugin(dir: &std::path::Path) {
    use std::os::unix::fs::PermissionsExt;
    let text = format!(
        "#!/bin/sh\ncat >/dev/null\necho $CNI_COMMAND >>{dir}/log\n\
         if [ -e {dir}/busy ] && [ $CNI_COMMAND != DEL ]; then echo '{{\"code\": 50, \"msg\": \"no uplink\"}}'; exit 1; fi\n",
        dir = dir.display()
    );
    std::fs::create_dir_all(dir.join("bin")).expect("directory");
    std::fs::create_dir_all(dir.join("net.d")).expect("directory");
    std::fs::write(dir.join("new"), text).expect("plugin");
    std::fs::set_permissions(dir.join("new"), std::fs::Permissions::from_mode(0o755)).expect("mode");
    std::fs::rename(dir.join("new"), dir.join("bin/theirs")).expect("plugin");
    let list = json!({"cniVersion": "1.1.0", "name": "theirs", "plugins": [{"type": "theirs"}]});
    std::fs::write(dir.join("net.d/1.conflist"), list.to_string()).expect("list");
}

#[test]
fn a_node_is_ready_when_its_network_plugins_are_ready() {
    in_new_namespace_async(async || {
        let dir = tempfile::tempdir().expect("directory");
        plugin(dir.path());
        std::fs::write(dir.path().join("busy"), "").expect("busy");
        let (api, shutdown, network) = (Api::new(), CancellationToken::new(), network(dir.path()).await);
        let ips: Vec<IpAddr> = vec!["192.0.2.1".parse().expect("address")];
        // With this lease duration, the plugin is polled once a second.
        let config = NodeConfig { lease_seconds: 4, ..self::config(ips.clone(), dir.path()) };
        let (client, recorder) = recording(&api);
        let network_of_pods = PodNetwork::Cni(network.clone());
        let agent = NodeAgent::new(config, client, recorder, network_of_pods).expect("properties");
        let running = tokio::spawn(agent.run(shutdown.clone()));
        let message = "container runtime network not ready: NetworkReady=false reason:NetworkPluginNotReady \
                    message:plugin theirs: no uplink (code 50)";
        let refused = || api.ready_condition().is_some_and(|is| is["message"] == message);
        until(message, 10, refused).await;
        let condition = api.ready_condition().expect("a condition");
        assert_eq!(
            (&condition["status"], &condition["reason"]),
            (&json!("False"), &json!("KubeletNotReady"))
        );
        std::fs::remove_file(dir.path().join("busy")).expect("busy");
        api.until_ready("True").await;
        shutdown.cancel();
        running.await.expect("join");

        // A failed attachment triggers STATUS at once; the timer's period is hours here.
        let asked = || {
            let log = std::fs::read_to_string(dir.path().join("log")).expect("log");
            log.lines().filter(|line| *line == "STATUS").count()
        };
        let (before, shutdown) = (asked(), CancellationToken::new());
        let config = NodeConfig { lease_seconds: 40_000, ..self::config(ips, dir.path()) };
        let (client, recorder) = recording(&api);
        let network_of_pods = PodNetwork::Cni(network.clone());
        let agent = NodeAgent::new(config, client, recorder, network_of_pods).expect("properties");
        let running = tokio::spawn(agent.run(shutdown.clone()));
        until("the first question", 10, || asked() > before).await;
        api.until_ready("True").await;
        std::fs::write(dir.path().join("busy"), "").expect("busy");
        let pod = coracle_cni::Attachment {
            id: "a".to_owned(),
            netns: "/proc/self/ns/net".into(),
            ifname: "eth7".to_owned(),
            ..coracle_cni::Attachment::default()
        };
        network.add(&pod).await.expect_err("busy");
        until(message, 10, refused).await;
        // An invalid list is reported as such.
        std::fs::write(dir.path().join("net.d/1.conflist"), "{").expect("list");
        until("a broken list", 10, || {
            api.ready_condition()
                .is_some_and(|is| is["message"].as_str().is_some_and(|m| m.contains("1.conflist")))
        })
        .await;
        std::fs::remove_file(dir.path().join("net.d/1.conflist")).expect("list");
        network
            .set_pod_cidrs(vec!["10.99.0.0/24".parse().expect("range")])
            .await
            .expect("the default network");
        api.until_ready("True").await;
        shutdown.cancel();
        running.await.expect("join");
    });
}

#[test]
fn a_node_without_an_overlay_follows_its_addresses_too() {
    in_new_namespace_async(async || {
        let dir = std::env::temp_dir().join(format!("coracle-moving-{}", std::process::id()));
        std::fs::create_dir_all(&dir).expect("temp dir");
        let (api, shutdown) = (Api::new(), CancellationToken::new());
        // The interface that is created first is listed first.
        ip("link add eth0 type veth peer name end0");
        ip("link add eth1 type veth peer name end1");
        ip("addr add 192.0.2.1/24 dev eth0");
        let agent = agent_at(Vec::new(), &api, network(&dir).await, &dir);
        let running = tokio::spawn(agent.run(shutdown.clone()));
        api.until_address("192.0.2.1").await;
        // First the address changes. Then another interface gets the default route.
        ip("addr del 192.0.2.1/24 dev eth0");
        ip("addr add 192.0.2.2/24 dev eth0");
        api.until_address("192.0.2.2").await;
        ip("addr add 198.51.100.1/24 dev eth1");
        ip("link set end1 up");
        ip("link set eth1 up");
        ip("route add default via 198.51.100.9 dev eth1");
        api.until_address("198.51.100.1").await;
        shutdown.cancel();
        running.await.expect("join");
        std::fs::remove_dir_all(&dir).expect("clean up");
    });
}

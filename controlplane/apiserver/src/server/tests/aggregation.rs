//! API services, and requests to servers in the cluster.

use std::convert::Infallible;

use coracle_any_certificate::AnyCertificate;
use http_body::Frame;
use http_body_util::StreamBody;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::*;

const API_SERVICES: &str = "/apis/apiregistration.k8s.io/v1/apiservices";
const PODS: &str = "/api/v1/namespaces/default/pods";

impl Fixture {
    /// Waits until the condition Available has a reason.
    async fn until_available_is(&self, name: &str, reason: &str) -> Value {
        eventually_async(&format!("{name} is {reason}"), 10, async || {
            let found = self.get(&format!("{API_SERVICES}/{name}")).await.body;
            let condition = &found["status"]["conditions"][0];
            (condition["reason"] == reason).then(|| condition.clone())
        })
        .await
    }
}

const DEFINITIONS: &str = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";

/// The definition of `things` in a group.
fn definition(group: &str) -> Value {
    json!({"metadata": {"name": format!("things.{group}")}, "spec": {"group": group, "scope": "Namespaced",
        "names": {"plural": "things", "singular": "thing", "kind": "Thing"},
        "versions": [{"name": "v1", "served": true, "storage": true,
            "schema": {"openAPIV3Schema": {"type": "object"}}}]}})
}

#[tokio::test]
async fn group_versions_of_this_server_are_registered_and_available() {
    let server = Fixture::new().await;
    for name in ["v1.", "v1.apps", "v2.autoscaling", "v1.apiextensions.k8s.io"] {
        assert_eq!(server.until_available_is(name, "Local").await["status"], "True");
    }
    assert_eq!(server.post(DEFINITIONS, definition("example.com")).await.code, 201);
    server.until_available_is("v1.example.com", "Local").await;
    let path = format!("{API_SERVICES}/v1.example.com");
    assert_eq!(server.delete(&path, json!({})).await.code, 200);
    server.until_available_is("v1.example.com", "Local").await;
    assert_eq!(server.merge(&path, json!({"spec": {"versionPriority": 7}})).await.code, 200);
    eventually_async("the API service of a definition has its priority again", 10, async || {
        server.get(&path).await.body["spec"]["versionPriority"] == 100
    })
    .await;
    assert_eq!(server.delete(&format!("{DEFINITIONS}/things.example.com"), json!({})).await.code, 200);
    eventually_async("the API service of a removed definition is deleted", 10, async || {
        server.get(&format!("{API_SERVICES}/v1.example.com")).await.code == 404
    })
    .await;
}

/// Another server may serve a new definition first, and create the API service.
#[tokio::test]
async fn the_api_service_of_a_group_version_that_was_never_served_here_stays() {
    let server = Fixture::new().await;
    let reconciled = async || {
        let path = format!("{API_SERVICES}/v1.example.com");
        assert_eq!(server.delete(&path, json!({})).await.code, 200);
        server.until_available_is("v1.example.com", "Local").await;
    };
    assert_eq!(server.post(DEFINITIONS, definition("example.com")).await.code, 201);
    server.until_available_is("v1.example.com", "Local").await;
    // After this point, the server deletes no API services that an earlier server has left.
    reconciled().await;
    let mut object = server.get(&format!("{API_SERVICES}/v1.example.com")).await.body;
    let label = "kube-aggregator.kubernetes.io/automanaged";
    object["metadata"] = json!({"name": "v1.new.example.com", "labels": {label: "true"}});
    object["spec"]["group"] = "new.example.com".into();
    let made = server.post(API_SERVICES, object).await;
    assert_eq!(made.code, 201, "{}", made.body);
    assert_eq!(server.post(DEFINITIONS, definition("later.example.com")).await.code, 201);
    server.until_available_is("v1.later.example.com", "Local").await;
    reconciled().await;
    assert_eq!(server.get(&format!("{API_SERVICES}/v1.new.example.com")).await.code, 200);
}

#[tokio::test]
async fn a_group_version_of_another_server_is_unavailable_until_that_responds() {
    let server = Fixture::new().await;
    let spec = json!({"group": "far.example.com", "version": "v1", "groupPriorityMinimum": 100, "versionPriority": 10,
        "insecureSkipTLSVerify": true, "service": {"namespace": "default", "name": "far"}});
    let made =
        server.post(API_SERVICES, json!({"metadata": {"name": "v1.far.example.com"}, "spec": spec})).await;
    assert_eq!(made.code, 201, "{}", made.body);
    assert_eq!(server.until_available_is("v1.far.example.com", "ServiceNotFound").await["status"], "False");
    let answer = server.get("/apis/far.example.com/v1/things").await;
    assert_eq!((answer.code, answer.body["message"].as_str()), (503, Some("service unavailable")));
    let groups = server.get("/apis").await.body;
    assert!(groups["groups"].as_array().unwrap().iter().any(|group| group["name"] == "far.example.com"));
    let accept = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList";
    let request = Request::get("/apis").header("accept", accept).body(Full::default()).unwrap();
    let list = server.send(admin(), request).await.body;
    let far =
        list["items"].as_array().unwrap().iter().find(|item| item["metadata"]["name"] == "far.example.com");
    assert_eq!(far.unwrap()["versions"], json!([{"version": "v1", "freshness": "Stale"}]));
    let stranger = User::new("eve", &[]);
    assert_eq!(server.get_as(stranger, "/apis/far.example.com/v1/things").await.code, 403);
    server.until_available_is("v1.apps", "Local").await;
    let metrics = server.get("/metrics").await.body;
    for (name, value) in [("v1.far.example.com", 1), ("v1.apps", 0)] {
        let line = format!("aggregator_unavailable_apiservice{{name=\"{name}\"}} {value}\n");
        assert!(metrics.as_str().unwrap().contains(&line), "{line}");
    }
}

#[tokio::test]
async fn each_change_of_the_service_of_another_server_is_checked() {
    const SERVICES: &str = "/api/v1/namespaces/default/services";
    const SLICES: &str = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices";
    let (server, name) = (Fixture::new().await, "v1.far.example.com");
    let spec = json!({"group": "far.example.com", "version": "v1", "groupPriorityMinimum": 100, "versionPriority": 10,
        "insecureSkipTLSVerify": true, "service": {"namespace": "default", "name": "far"}});
    let made = server.post(API_SERVICES, json!({"metadata": {"name": name}, "spec": spec})).await;
    assert_eq!(made.code, 201, "{}", made.body);
    server.until_available_is(name, "ServiceNotFound").await;
    let service = json!({"metadata": {"name": "far"}, "spec": {"ports": [{"name": "web", "port": 8443}]}});
    assert_eq!(server.post(SERVICES, service).await.code, 201);
    server.until_available_is(name, "ServicePortError").await;
    let port = json!({"spec": {"service": {"port": 8443}}});
    assert_eq!(server.merge(&format!("{API_SERVICES}/{name}"), port).await.code, 200);
    server.until_available_is(name, "EndpointsNotFound").await;
    let slice = json!({"metadata": {"name": "far-1", "labels": {"kubernetes.io/service-name": "far"}},
        "addressType": "IPv4", "ports": [{"name": "other", "port": 8443}],
        "endpoints": [{"addresses": ["10.1.2.3"]}]});
    let made = server.post(SLICES, slice).await;
    assert_eq!(made.code, 201, "{}", made.body);
    let condition = server.until_available_is(name, "MissingEndpoints").await;
    let expect = "endpointslices for service/far in \"default\" have no addresses with port name \"web\"";
    assert_eq!(condition["message"], expect);
    assert_eq!(server.delete(&format!("{SLICES}/far-1"), json!({})).await.code, 200);
    server.until_available_is(name, "EndpointsNotFound").await;
    // An APIService without a service is local.
    let local = json!({"spec": {"service": null, "insecureSkipTLSVerify": null}});
    let changed = server.merge(&format!("{API_SERVICES}/{name}"), local).await;
    assert_eq!(changed.code, 200, "{}", changed.body);
    assert_eq!(server.until_available_is(name, "Local").await["status"], "True");
}

#[tokio::test]
async fn proxies_do_not_reach_this_machine() {
    let server = Fixture::new().await;
    assert_eq!(server.post(PODS, pod("p")).await.code, 201);
    assert_eq!(server.get(&format!("{PODS}/p/proxy/")).await.code, 400, "no address yet");
    let status = json!({"status": {"podIP": "127.0.0.1", "podIPs": [{"ip": "127.0.0.1"}]}});
    assert_eq!(server.merge(&format!("{PODS}/p/status"), status).await.code, 200);
    for name in ["p", "p:6443", "https:p:6443"] {
        let answer = server.get(&format!("{PODS}/{name}/proxy/healthz")).await;
        assert_eq!(
            (answer.code, answer.body["message"].as_str()),
            (400, Some("address not allowed")),
            "{name}"
        );
    }
    let answer = server.get(&format!("{PODS}/p/proxy?a=b")).await;
    assert_eq!(
        (answer.code, answer.headers["location"].to_str().unwrap()),
        (301, &*format!("{PODS}/p/proxy/?a=b"))
    );
    let missing = server.get("/api/v1/namespaces/default/services/https:kubernetes:none/proxy/").await;
    let expect = "no endpoints available for service \"https:kubernetes:none\"";
    assert_eq!((missing.code, missing.body["message"].as_str()), (503, Some(expect)));
    let services = "/api/v1/namespaces/default/services/kubernetes:https/proxy/version";
    assert_eq!(server.get(services).await.code, 503, "nothing listens at the address of this test");
    let stranger = User::new("eve", &[]);
    assert_eq!(server.get_as(stranger, &format!("{PODS}/p/proxy/x")).await.code, 403);
}

/// Starts a kubelet at 127.0.0.1 that redirects every request. Returns its port.
async fn redirecting_kubelet() -> u16 {
    let (acceptor, _certificate) = crate::test_tls::acceptor();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let Ok(mut stream) = acceptor.accept(stream).await else { continue };
            let _ = stream.read(&mut [0; 16 << 10]).await;
            let head = "HTTP/1.1 302 Found\r\nlocation: https://other.example/\r\ncontent-length: 0\r\n\r\n";
            let _ = stream.write_all(head.as_bytes()).await;
            let _ = stream.shutdown().await;
        }
    });
    port
}

/// A server with the node `n`, whose kubelet has a port of 127.0.0.1.
async fn with_kubelet(port: u16) -> Fixture {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let tls = rustls::ClientConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .unwrap()
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(AnyCertificate::new(provider)))
        .with_no_client_auth();
    let server = Fixture::new().await.again_with(|config| config.kubelet = KubeletTls(Arc::new(tls))).await;
    let status = json!({"addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
        "daemonEndpoints": {"kubeletEndpoint": {"Port": port}}});
    let made = server.post("/api/v1/nodes", json!({"metadata": {"name": "n"}, "status": status})).await;
    assert_eq!(made.code, 201, "{}", made.body);
    server
}

/// Starts a kubelet at 127.0.0.1 that answers each request with the length of its body. Returns its port.
async fn counting_kubelet() -> u16 {
    let (acceptor, _certificate) = crate::test_tls::acceptor();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let service = service_fn(|request: Request<hyper::body::Incoming>| async move {
        let (mut body, mut length) = (request.into_body(), 0);
        while let Some(frame) = body.frame().await {
            length += frame?.into_data().map_or(0, |data| data.len());
        }
        Ok::<_, hyper::Error>(http::Response::new(Full::new(Bytes::from(length.to_string()))))
    });
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let Ok(stream) = acceptor.accept(stream).await else { continue };
            let server = hyper::server::conn::http1::Builder::new();
            let _ended = server.serve_connection(TokioIo::new(stream), service).await;
        }
    });
    port
}

#[tokio::test]
async fn a_body_of_any_length_passes_through_a_proxy() {
    const PIECE: usize = 64 << 10;
    const LENGTH: usize = 20 << 20;
    let server = with_kubelet(counting_kubelet().await).await;
    let piece = |_at| Ok::<_, Infallible>(Frame::data(Bytes::from(vec![b'x'; PIECE])));
    let body = StreamBody::new(futures::stream::iter((0..LENGTH / PIECE).map(piece)));
    let request = Request::post("/api/v1/nodes/n/proxy/upload").body(body).unwrap();
    let answer = server.api.handle(request, Some(admin())).await;
    assert_eq!(answer.status(), 200);
    let counted = answer.into_body().collect().await.unwrap().to_bytes();
    assert_eq!(String::from_utf8_lossy(&counted), LENGTH.to_string());
    let other = server.get("/api/v1/nodes/n:1/proxy/").await;
    assert_eq!((other.code, other.body["message"].as_str()), (400, Some("address not allowed")));
}

/// CVE-2018-1002102, CVE-2020-8559: a client followed a redirect of a kubelet with its credentials.
#[tokio::test]
async fn redirects_of_a_kubelet_do_not_reach_the_client() {
    let server = with_kubelet(redirecting_kubelet().await).await;
    let mut bound = pod("p");
    bound["spec"]["nodeName"] = "n".into();
    let made = server.post(PODS, bound).await;
    assert_eq!(made.code, 201, "{}", made.body);
    for path in ["log", "exec?command=id&stdout=1", "attach?stdout=1", "portforward?ports=80"] {
        let answer = server.get(&format!("{PODS}/p/{path}")).await;
        let message = answer.body["message"].as_str().unwrap_or_default();
        assert!(answer.code == 500 && message.contains("attempted to redirect"), "{path}: {}", answer.body);
        assert!(!answer.headers.contains_key("location"), "{path}");
    }
}

#[tokio::test]
async fn autoscalers_of_both_versions_are_one_object() {
    let server = Fixture::new().await;
    let path =
        |version: &str| format!("/apis/autoscaling/{version}/namespaces/default/horizontalpodautoscalers");
    let spec = json!({"maxReplicas": 3, "targetCPUUtilizationPercentage": 60,
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "d"}});
    let made = server.post(&path("v1"), json!({"metadata": {"name": "a"}, "spec": spec})).await;
    assert_eq!(made.code, 201, "{}", made.body);
    let found = server.get(&format!("{}/a", path("v2"))).await.body;
    assert_eq!(found["spec"]["metrics"][0]["resource"]["target"]["averageUtilization"], 60);
    let wrong = json!({"spec": {"maxReplicas": 0}});
    assert_eq!(server.merge(&format!("{}/a", path("v1")), wrong).await.code, 422);
}

//! Addresses and node ports of services, under concurrent requests.

use std::collections::HashSet;

use super::{custom_resources::Breakable, *};

const SERVICES: &str = "/api/v1/namespaces/default/services";

fn service(name: &str, spec: Value) -> Value {
    json!({"metadata": {"name": name}, "spec": spec})
}

fn external() -> Value {
    json!({"type": "ExternalName", "externalName": "example.com"})
}

async fn spec_of(fixture: &Fixture, name: &str) -> Value {
    fixture.get(&format!("{SERVICES}/{name}")).await.body["spec"].clone()
}

/// Updates services at the same time, all with this change, and returns how many succeeded.
async fn update_all(fixture: &Fixture, count: usize, change: &Value) -> usize {
    let one = async |n: usize| fixture.merge(&format!("{SERVICES}/s{n}"), json!({"spec": change})).await.code;
    let codes = futures::future::join_all((0..count).map(one)).await;
    codes.into_iter().filter(|code| *code == 200).count()
}

#[tokio::test]
async fn concurrent_updates_never_share_an_address_or_a_node_port() {
    let fixture = Fixture::new().await;
    for n in 0..20 {
        let made = fixture.post(SERVICES, service(&format!("s{n}"), external())).await;
        assert_eq!(made.code, 201, "{}", made.body);
    }
    let ports = json!([{"port": 80, "nodePort": 30080}]);
    let fixed = json!({"type": "NodePort", "externalName": null, "clusterIP": "10.43.0.77", "ports": ports});
    assert_eq!(update_all(&fixture, 20, &fixed).await, 1, "several services got one address");
    let any = json!({"type": "NodePort", "externalName": null, "ports": [{"port": 80}]});
    assert_eq!(update_all(&fixture, 20, &any).await, 20);
    let (mut addresses, mut node_ports) = (HashSet::new(), HashSet::new());
    for n in 0..20 {
        let spec = spec_of(&fixture, &format!("s{n}")).await;
        addresses.insert(spec["clusterIP"].to_string());
        node_ports.insert(spec["ports"][0]["nodePort"].to_string());
    }
    assert_eq!((addresses.len(), node_ports.len()), (20, 20));
}

#[tokio::test]
async fn a_client_that_disconnects_does_not_give_its_address_to_another_service() {
    let fixture = Fixture::new().await;
    for n in 0..40 {
        let spec = json!({"clusterIP": format!("10.43.1.{n}"), "ports": [{"port": 80}]});
        let mut first = Box::pin(fixture.post(SERVICES, service(&format!("first-{n}"), spec.clone())));
        // Poll the request a few times on its way to the commit, then disconnect.
        for _ in 0..n % 8 {
            if futures::poll!(first.as_mut()).is_ready() {
                break;
            }
            tokio::task::yield_now().await;
        }
        drop(first);
        fixture.post(SERVICES, service(&format!("second-{n}"), spec)).await;
    }
    let list = fixture.get(SERVICES).await.body;
    let addresses: Vec<_> =
        list["items"].as_array().unwrap().iter().map(|item| item["spec"]["clusterIP"].to_string()).collect();
    assert!(addresses.len() >= 40);
    let distinct: HashSet<_> = addresses.iter().collect();
    assert_eq!(distinct.len(), addresses.len(), "two services have one address: {addresses:?}");
}

#[tokio::test]
async fn a_full_store_is_an_internal_error_with_the_reason() {
    let error =
        crate::error::ApiError::from(coracle_store::Error::Full { path: "/var/lib/coracle/store".into() });
    let status = error.status();
    assert_eq!((status["code"].as_u64(), status["reason"].as_str()), (Some(500), Some("InternalError")));
    assert!(status["message"].as_str().unwrap().contains("database space exceeded"), "{status}");
}

const CIDRS: &str = "/apis/networking.k8s.io/v1/servicecidrs";

#[tokio::test]
async fn the_default_range_is_an_object_with_a_status() {
    let fixture = Fixture::new().await;
    let path = format!("{CIDRS}/kubernetes");
    let object = fixture.get(&path).await.body;
    assert_eq!(object["spec"], json!({"cidrs": ["10.43.0.0/16"]}), "{object}");
    let ready = &object["status"]["conditions"][0];
    assert_eq!((&ready["type"], &ready["status"]), (&json!("Ready"), &json!("True")));
    assert_eq!(ready["message"], "Kubernetes Service CIDR is ready");
    let status = format!("{path}/status");
    let found = fixture.get(&status).await.body;
    assert_eq!(
        (&found["kind"], &found["metadata"]["uid"]),
        (&json!("ServiceCIDR"), &object["metadata"]["uid"])
    );
    let other = json!({"type": "Other", "status": "False", "reason": "Test", "message": "m",
        "lastTransitionTime": "2026-01-01T00:00:00Z"});
    let patched = fixture.merge(&status, json!({"status": {"conditions": [ready, other]}})).await;
    assert_eq!((patched.code, &patched.body["status"]["conditions"][1]), (200, &other), "{}", patched.body);
    let mut back = patched.body;
    back["status"] = object["status"].clone();
    let put = fixture.put(&status, back).await;
    assert_eq!((put.code, &put.body["status"]), (200, &object["status"]), "{}", put.body);
    let again = fixture.again().await;
    assert_eq!(again.get(&path).await.body, put.body, "a restart writes nothing");
}

#[tokio::test]
async fn a_ready_service_cidr_extends_the_range_and_other_managers_addresses_are_taken() {
    let fixture = Fixture::new().await;
    let with = |name: &str, ip: &str| service(name, json!({"clusterIP": ip, "ports": [{"port": 80}]}));
    let body = json!({"metadata": {"name": "more"}, "spec": {"cidrs": ["203.0.113.0/24"]}});
    assert_eq!(fixture.post(CIDRS, body).await.code, 201);
    let early = fixture.post(SERVICES, with("a", "203.0.113.10")).await;
    assert_eq!(early.code, 422, "the range is not ready: {}", early.body);
    let ready = json!({"type": "Ready", "status": "True", "reason": "", "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z"});
    let status =
        fixture.merge(&format!("{CIDRS}/more/status"), json!({"status": {"conditions": [ready]}})).await;
    assert_eq!(status.code, 200, "{}", status.body);
    let made = fixture.post(SERVICES, with("a", "203.0.113.10")).await;
    assert_eq!((made.code, &made.body["spec"]["clusterIP"]), (201, &json!("203.0.113.10")), "{}", made.body);
    let parent = json!({"resource": "gateways", "group": "example.com", "name": "g"});
    let held = json!({"metadata": {"name": "203.0.113.11"}, "spec": {"parentRef": parent}});
    assert_eq!(fixture.post("/apis/networking.k8s.io/v1/ipaddresses", held).await.code, 201);
    let refused = fixture.post(SERVICES, with("b", "203.0.113.11")).await;
    assert!(refused.body["message"].as_str().unwrap().contains("already allocated"), "{}", refused.body);
    let finalizer = json!({"metadata": {"finalizers": ["example.com/wait"]}});
    assert_eq!(fixture.merge(&format!("{CIDRS}/more"), finalizer).await.code, 200);
    fixture.delete(&format!("{CIDRS}/more"), json!({})).await;
    let late = fixture.post(SERVICES, with("c", "203.0.113.12")).await;
    assert_eq!(late.code, 422, "the range is being deleted: {}", late.body);
}

#[tokio::test]
async fn services_get_addresses_of_both_families_when_the_cluster_becomes_dual_stack() {
    let fixture = Fixture::new().await;
    let body = service("early", json!({"ipFamilyPolicy": "PreferDualStack", "ports": [{"port": 80}]}));
    let early = fixture.post(SERVICES, body).await.body;
    assert_eq!(early["spec"]["ipFamilies"], json!(["IPv4"]), "{early}");
    let required = service("b", json!({"ipFamilyPolicy": "RequireDualStack", "ports": [{"port": 80}]}));
    assert_eq!(fixture.post(SERVICES, required.clone()).await.code, 422);
    let both = ServiceRanges::new("10.43.0.0/16".parse().unwrap(), Some("fd43::/112".parse().unwrap()));
    let fixture = fixture.again_with(|config| config.service_ranges = both).await;
    let cidr = fixture.get(&format!("{CIDRS}/kubernetes")).await.body;
    assert_eq!(cidr["spec"]["cidrs"], json!(["10.43.0.0/16", "fd43::/112"]));
    let made = fixture.post(SERVICES, required).await;
    let ips = made.body["spec"]["clusterIPs"].clone();
    assert!(made.code == 201 && ips[1].as_str().unwrap().starts_with("fd43::"), "{}", made.body);
    let labels = json!({"metadata": {"labels": {"a": "b"}}});
    let same = fixture.merge(&format!("{SERVICES}/early"), labels).await.body;
    assert_eq!(same["spec"], early["spec"], "a changed preference has no effect");
    let require = json!({"spec": {"ipFamilyPolicy": "RequireDualStack"}});
    let upgraded = fixture.merge(&format!("{SERVICES}/early"), require).await.body;
    assert_eq!(upgraded["spec"]["clusterIPs"][0], early["spec"]["clusterIP"]);
    assert_eq!(upgraded["spec"]["clusterIPs"].as_array().unwrap().len(), 2, "{upgraded}");
    let single = json!({"spec": {"ipFamilyPolicy": "SingleStack"}});
    let downgraded = fixture.merge(&format!("{SERVICES}/b"), single).await;
    assert_eq!(downgraded.body["spec"]["clusterIPs"], json!([ips[0]]), "{}", downgraded.body);
    let other =
        service("c", json!({"ipFamilyPolicy": "SingleStack", "clusterIP": ips[1], "ports": [{"port": 80}]}));
    let released = fixture.post(SERVICES, other).await;
    assert_eq!((released.code, &released.body["spec"]["ipFamilies"]), (201, &json!(["IPv6"])));
}

#[tokio::test]
async fn an_allocation_reads_no_other_service() {
    let fixture = Fixture::new().await;
    let any = json!({"type": "NodePort", "ports": [{"port": 80}]});
    for n in 0..20 {
        fixture.post(SERVICES, service(&format!("s{n}"), any.clone())).await;
    }
    let before = crate::cache::parses::so_far();
    fixture.post(SERVICES, service("one", any.clone())).await;
    let few = crate::cache::parses::so_far() - before;
    for n in 20..80 {
        fixture.post(SERVICES, service(&format!("s{n}"), any.clone())).await;
    }
    let before = crate::cache::parses::so_far();
    fixture.post(SERVICES, service("two", any)).await;
    let many = crate::cache::parses::so_far() - before;
    assert!(many < few + 20, "{few} objects are read with 20 services, {many} with 80");
}

#[tokio::test]
async fn a_health_check_port_is_allocated_kept_and_released() {
    let fixture = Fixture::new().await;
    let local = json!({"type": "LoadBalancer", "externalTrafficPolicy": "Local", "ports": [{"port": 80}]});
    let made = fixture.post(SERVICES, service("a", local.clone())).await;
    let port = made.body["spec"]["healthCheckNodePort"].as_u64().unwrap();
    assert!(made.code == 201 && (30000..=32767).contains(&port), "{}", made.body);
    let path = format!("{SERVICES}/a");
    let mut body = fixture.get(&path).await.body;
    body["spec"]["healthCheckNodePort"] = 0.into();
    assert_eq!(fixture.put(&path, body).await.body["spec"]["healthCheckNodePort"], port);
    let other = if port == 30000 { 30001 } else { 30000 };
    let moved = fixture.merge(&path, json!({"spec": {"healthCheckNodePort": other}})).await;
    assert!(moved.body["message"].as_str().unwrap().contains("immutable"), "{}", moved.body);
    let class = fixture.merge(&path, json!({"spec": {"loadBalancerClass": "example.com/a"}})).await;
    assert!(class.body["message"].as_str().unwrap().contains("may not change"), "{}", class.body);
    let node_port = json!({"type": "NodePort", "ports": [{"port": 80, "nodePort": port}]});
    assert_eq!(fixture.post(SERVICES, service("b", node_port.clone())).await.code, 422);
    let cluster = json!({"spec": {"externalTrafficPolicy": "Cluster"}});
    assert!(fixture.merge(&path, cluster).await.body["spec"]["healthCheckNodePort"].is_null());
    assert_eq!(fixture.post(SERVICES, service("b", node_port)).await.code, 201);
    let mut none = local;
    none["externalTrafficPolicy"] = "Cluster".into();
    none["healthCheckNodePort"] = 30500.into();
    assert_eq!(fixture.post(SERVICES, service("c", none)).await.code, 422);
}

#[tokio::test]
async fn node_ports_and_tolerations_follow_the_options() {
    let directory = tempfile::tempdir().unwrap();
    let api = open_with(directory.path(), |config| {
        config.options.node_ports = 40000..=40000;
        config.options.toleration_seconds = crate::TolerationSeconds { not_ready: 20, unreachable: 30 };
    })
    .await;
    let server = Fixture { api, directory };
    let with_port = |name: &str, port: Value| {
        service(name, json!({"type": "NodePort", "ports": [{"port": 80, "nodePort": port}]}))
    };
    let made = server.post(SERVICES, with_port("a", json!(null))).await.body;
    assert_eq!(made["spec"]["ports"][0]["nodePort"], 40000, "{made}");
    let refused = server.post(SERVICES, with_port("b", json!(30000))).await.body;
    let message = refused["message"].as_str().unwrap();
    assert!(message.contains("The range of valid ports is 40000-40000"), "{message}");
    let account = json!({"metadata": {"name": "default"}});
    server.post("/api/v1/namespaces/default/serviceaccounts", account).await;
    let made = server.post(PODS, pod("p")).await.body;
    let tolerations = made["spec"]["tolerations"].as_array().unwrap();
    let seconds: Vec<_> = tolerations.iter().map(|one| one["tolerationSeconds"].as_i64()).collect();
    assert_eq!(seconds, [Some(20), Some(30)]);
}

#[tokio::test]
async fn the_service_of_the_server_comes_back() {
    let server = Fixture::new().await;
    let address = spec_of(&server, "kubernetes").await["clusterIP"].clone();
    for path in [
        format!("{SERVICES}/kubernetes"),
        "/api/v1/namespaces/default/endpoints/kubernetes".to_owned(),
        "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices/kubernetes".to_owned(),
    ] {
        let first = server.get(&path).await.body["metadata"]["uid"].clone();
        assert!(first.is_string(), "{path}");
        assert_eq!(server.delete(&path, json!({})).await.code, 200, "{path}");
        eventually_async("the object is created again", 20, async || {
            let found = server.get(&path).await;
            found.code == 200 && found.body["metadata"]["uid"] != first
        })
        .await;
    }
    assert_eq!(spec_of(&server, "kubernetes").await["clusterIP"], address);
}

#[tokio::test]
async fn the_ports_of_the_servers_service_are_restored_at_the_next_start() {
    let server = Fixture::new().await;
    let ports = spec_of(&server, "kubernetes").await["ports"].clone();
    let changed =
        json!({"spec": {"ports": [{"name": "other", "port": 444, "protocol": "TCP", "targetPort": 1}]}});
    let changed = server.merge(&format!("{SERVICES}/kubernetes"), changed).await;
    assert_eq!(changed.code, 200, "{}", changed.body);
    let server = server.again().await;
    assert_eq!(spec_of(&server, "kubernetes").await["ports"], ports);
}

#[tokio::test]
async fn the_default_range_comes_back() {
    let server = Fixture::new().await;
    let path = format!("{CIDRS}/kubernetes");
    let first = server.get(&path).await.body;
    assert_eq!(server.delete(&path, json!({})).await.code, 200);
    eventually_async("the range is created again", 20, async || {
        let found = server.get(&path).await.body;
        let is_new = found["metadata"]["uid"] != first["metadata"]["uid"] && found["spec"] == first["spec"];
        is_new && found["status"]["conditions"][0]["status"] == "True"
    })
    .await;
}

#[tokio::test]
async fn servers_on_one_store_do_not_restore_their_authorities_in_turn() {
    const MAP: &str = "/api/v1/namespaces/kube-system/configmaps/extension-apiserver-authentication";
    let own_service = format!("{SERVICES}/kubernetes");
    for (is_shared, expect) in [(false, "own"), (true, "other")] {
        let directory = tempfile::tempdir().unwrap();
        let store = Embedded::open(&directory.path().join("store"), EmbeddedOptions::default()).unwrap();
        let store = Breakable { store, is_broken: Arc::default(), is_full: Arc::default(), is_shared };
        let configure = |config: &mut ApiserverConfig| config.front_proxy.authority = "own".to_owned();
        let server = Fixture { api: open_on(Arc::new(store), directory.path(), configure).await, directory };
        let authority = async || server.get(MAP).await.body["data"]["requestheader-client-ca-file"].clone();
        assert_eq!(authority().await, "own");
        let changed = server.merge(MAP, json!({"data": {"requestheader-client-ca-file": "other"}})).await;
        assert_eq!(changed.code, 200, "{}", changed.body);
        // The service is restored before the config map. The second pass begins after the end of the first one.
        for _ in 0..2 {
            assert_eq!(server.delete(&own_service, json!({})).await.code, 200);
            eventually_async("the service is created again", 20, async || {
                server.get(&own_service).await.code == 200
            })
            .await;
        }
        assert_eq!(authority().await, expect);
        assert_eq!(server.delete(MAP, json!({})).await.code, 200);
        eventually_async("the config map is created again", 20, async || authority().await == "own").await;
    }
}

#[tokio::test]
async fn a_server_on_a_full_etcd_starts_again_and_deletes_objects() {
    const MAPS: &str = "/api/v1/namespaces/default/configmaps";
    let directory = tempfile::tempdir().unwrap();
    let store = Embedded::open(&directory.path().join("store"), EmbeddedOptions::default()).unwrap();
    let is_full = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let store = Breakable { store, is_broken: Arc::default(), is_full: is_full.clone(), is_shared: true };
    let store: Arc<dyn Store> = Arc::new(store);
    let first = tempfile::tempdir().unwrap();
    let api = open_on(store.clone(), first.path(), |_config| {}).await;
    let server = Fixture { api, directory: first };
    assert_eq!(server.post(MAPS, json!({"metadata": {"name": "a"}})).await.code, 201);
    is_full.store(true, std::sync::atomic::Ordering::SeqCst);
    let api = open_on(store, directory.path(), |_config| {}).await;
    let server = Fixture { api, directory };
    let refused = server.post(MAPS, json!({"metadata": {"name": "b"}})).await;
    assert_eq!(refused.code, 500, "{}", refused.body);
    assert_eq!(server.delete(&format!("{MAPS}/a"), json!({})).await.code, 200);
}

#[tokio::test]
async fn external_ips_that_nodes_ignore_have_warnings() {
    let ranges = vec!["192.0.2.0/24".parse().unwrap()];
    let fixture = Fixture::new().await.again_with(|config| config.options.external_ips = Some(ranges)).await;
    let warned = |answer: &Answer| {
        let mut values = answer.headers.get_all("warning").iter();
        values.any(|value| value.to_str().unwrap().contains("nodes ignore 203.0.113.1"))
    };
    let spec = |address: &str| json!({"ports": [{"port": 80}], "externalIPs": [address]});
    let made = fixture.post(SERVICES, service("s", spec("203.0.113.1"))).await;
    assert_eq!((made.code, warned(&made)), (201, true), "{}", made.body);
    let path = format!("{SERVICES}/s");
    let labels = json!({"metadata": {"labels": {"a": "b"}}});
    assert!(warned(&fixture.merge(&path, labels).await), "updates have the warning, too");
    let changed = fixture.merge(&path, json!({"spec": spec("192.0.2.1")})).await;
    assert_eq!((changed.code, warned(&changed)), (200, false), "{}", changed.body);
    // Without these ranges the server does not know which external IPs the nodes permit, so it does not warn.
    let fixture = fixture.again().await;
    let made = fixture.post(SERVICES, service("t", spec("203.0.113.1"))).await;
    assert_eq!((made.code, warned(&made)), (201, false), "{}", made.body);
}

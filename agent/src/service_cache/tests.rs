//! Caches with and without an API server that answers.

use serde_json::json;

use super::*;
use crate::checkpoint::references;

fn service(namespace: &str, name: &str, ip: &str) -> Service {
    serde_json::from_value(json!({"metadata": {"namespace": namespace, "name": name, "resourceVersion": "7"},
        "spec": {"clusterIP": ip}}))
    .unwrap()
}

/// A cache whose API server never answers.
fn cache(dir: &std::path::Path) -> ServiceCache {
    cache_of(dir, crate::client::silent())
}

fn cache_of(dir: &std::path::Path, client: Client) -> ServiceCache {
    let checkpoint = Checkpoint::open(&dir.join("agent"), &dir.join("sealing.key")).unwrap();
    let pod =
        serde_json::from_value(json!({"metadata": {"namespace": "ns"}, "spec": {"containers": []}})).unwrap();
    checkpoint.own("u", references(&pod));
    ServiceCache::new(client, checkpoint, ApiHealth::default())
}

fn list(cache: &ServiceCache, services: Vec<Service>) {
    let mut listed = Vec::new();
    cache.apply_event(Event::Init, &mut listed);
    services.into_iter().for_each(|service| cache.apply_event(Event::InitApply(service), &mut listed));
    cache.apply_event(Event::InitDone, &mut listed);
}

/// A cache after a restart, with the stored services `kubernetes` and `a`.
async fn restarted(dir: &std::path::Path) -> ServiceCache {
    let first = cache(dir);
    list(&first, vec![service("default", "kubernetes", "10.0.0.1"), service("ns", "a", "10.0.0.2")]);
    first.environment(Some("ns")).await.unwrap();
    assert!(!first.shared.checkpoint.flush());
    cache(dir)
}

fn names(services: &[Arc<Service>]) -> Vec<String> {
    services.iter().map(|service| service.metadata.name.clone().unwrap()).collect()
}

#[tokio::test(start_paused = true)]
async fn a_refused_watch_is_retried_with_growing_pauses() {
    use std::sync::atomic::{AtomicUsize, Ordering};
    let requests = Arc::new(AtomicUsize::new(0));
    let counter = requests.clone();
    let refusing = tower::service_fn(move |_request: http::Request<kube::client::Body>| {
        counter.fetch_add(1, Ordering::Relaxed);
        let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Forbidden",
            "message": "no", "code": 403});
        let body = kube::client::Body::from(status.to_string().into_bytes());
        let response = http::Response::builder().status(403).body(body).unwrap();
        std::future::ready(Ok::<_, std::convert::Infallible>(response))
    });
    let dir = tempfile::tempdir().unwrap();
    let watching = cache_of(dir.path(), Client::new(refusing, "default")).run(false);
    tokio::time::timeout(std::time::Duration::from_secs(60), watching).await.unwrap_err();
    // Pauses of 0.1 s to 6.4 s, each twice the former one, and then of 10 s.
    let count = requests.load(Ordering::Relaxed);
    assert!((8..=14).contains(&count), "{count} requests");
}

#[tokio::test(start_paused = true)]
async fn an_environment_has_the_services_of_its_namespace_and_the_api_servers_own() {
    let dir = tempfile::tempdir().unwrap();
    let cache = cache(dir.path());
    let all = [("default", "kubernetes"), ("default", "other"), ("ns", "a"), ("ns", "b"), ("z", "far")];
    list(&cache, all.map(|(namespace, name)| service(namespace, name, "10.0.0.1")).into());
    assert_eq!(names(&cache.environment(Some("ns")).await.unwrap()), ["kubernetes", "a", "b"]);
    assert_eq!(names(&cache.environment(Some("default")).await.unwrap()), ["kubernetes", "other"]);
    assert_eq!(names(&cache.environment(None).await.unwrap()), ["kubernetes"]);
    let revision = cache.changes().borrow().revision;
    cache.apply_event(Event::Delete(service("ns", "a", "")), &mut Vec::new());
    cache.apply_event(Event::Apply(service("ns", "c", "10.0.0.2")), &mut Vec::new());
    assert_eq!(names(&cache.of("ns")), ["b", "c"]);
    assert_eq!(cache.changes().borrow().revision, revision + 2);
}

#[tokio::test(start_paused = true)]
async fn after_a_restart_stored_services_are_used_until_the_api_server_answers() {
    let dir = tempfile::tempdir().unwrap();
    let next = restarted(dir.path()).await;
    let began = tokio::time::Instant::now();
    assert_eq!(names(&next.environment(Some("ns")).await.unwrap()), ["kubernetes", "a"]);
    assert_eq!(began.elapsed(), LIST_TIMEOUT_WITH_COPY);
    next.shared.health.failed();
    let began = tokio::time::Instant::now();
    assert_eq!(names(&next.environment(Some("ns")).await.unwrap()), ["kubernetes", "a"]);
    assert!(began.elapsed().is_zero(), "the API server is known to be unreachable");
    list(&next, vec![service("ns", "b", "10.0.0.3")]);
    assert_eq!(names(&next.environment(Some("ns")).await.unwrap()), ["b"]);
}

#[tokio::test(start_paused = true)]
async fn stored_services_are_in_the_tables_while_the_api_server_does_not_answer() {
    let dir = tempfile::tempdir().unwrap();
    let next = restarted(dir.path()).await;
    next.shared.health.failed();
    next.use_stored().await;
    assert_eq!(names(&next.of("ns")), ["a"]);
    assert!(!next.read(Tables::is_complete));
    list(&next, vec![service("ns", "b", "10.0.0.3")]);
    next.use_stored().await;
    assert_eq!(names(&next.of("ns")), ["b"]);
}

fn list_slices(cache: &ServiceCache, slices: Vec<serde_json::Value>) {
    let mut listed = Vec::new();
    cache.apply_slice_event(Event::Init, &mut listed);
    for slice in slices {
        cache.apply_slice_event(Event::InitApply(serde_json::from_value(slice).unwrap()), &mut listed);
    }
    cache.apply_slice_event(Event::InitDone, &mut listed);
}

#[tokio::test(start_paused = true)]
async fn after_a_boot_without_the_api_server_services_have_the_new_addresses_of_this_nodes_pods() {
    let dir = tempfile::tempdir().unwrap();
    let slice = |own: &str| {
        let labels = json!({"kubernetes.io/service-name": "web"});
        json!({"metadata": {"namespace": "ns", "name": "s", "labels": labels}, "addressType": "IPv4",
            "endpoints": [{"addresses": [own]}, {"addresses": ["10.42.1.2"]}], "ports": [{"port": 80}]})
    };
    let report = |cache: &ServiceCache, address: &str| {
        let addresses = vec![address.parse().unwrap()];
        cache.report_pod(&LocalPod { uid: "u", addresses, is_ready: true, is_attached: true });
    };
    let first = cache(dir.path());
    list(&first, vec![service("ns", "web", "10.43.0.1")]);
    list_slices(&first, vec![slice("10.42.0.2")]);
    report(&first, "10.42.0.2");
    first.environment(Some("ns")).await.unwrap();
    first.store_changed_slices();
    assert!(!first.shared.checkpoint.flush());

    let next = cache(dir.path());
    next.shared.health.failed();
    next.use_stored().await;
    assert!(*next.has_stored().borrow());
    let key = ObjectKey::new("ns", "web");
    let addresses = || -> Vec<String> {
        let slices = next.state(&key).unwrap().slices;
        let all = slices.iter().flat_map(|slice| &slice.endpoints);
        all.map(|endpoint| endpoint.address.unwrap().to_string()).collect()
    };
    assert_eq!(addresses(), ["10.42.1.2"], "the node's pod has not started");
    let changes = next.subscribe();
    report(&next, "10.42.0.7");
    assert_eq!(changes.take(), [key.clone()].into());
    assert_eq!(addresses(), ["10.42.0.7", "10.42.1.2"]);
    list(&next, vec![service("ns", "web", "10.43.0.1")]);
    list_slices(&next, vec![slice("10.42.0.9")]);
    report(&next, "10.42.0.8");
    assert_eq!(addresses(), ["10.42.0.9", "10.42.1.2"], "the list is newer");
}

#[tokio::test]
async fn slices_are_stored_only_after_the_first_lists_and_where_pods_are() {
    let dir = tempfile::tempdir().unwrap();
    let cache = cache(dir.path());
    let slice = |namespace: &str| {
        let labels = json!({"kubernetes.io/service-name": "web"});
        json!({"metadata": {"namespace": namespace, "name": "s", "labels": labels}, "addressType": "IPv4",
            "endpoints": [{"addresses": ["10.42.1.2"]}], "ports": [{"port": 80}]})
    };
    list_slices(&cache, vec![slice("ns"), slice("z")]);
    cache.store_changed_slices();
    assert!(!cache.shared.checkpoint.has(&Key::slices("ns")), "the services are not listed");
    list(&cache, vec![service("ns", "web", "10.43.0.1"), service("z", "web", "10.43.0.2")]);
    cache.store_changed_slices();
    let stored: Vec<serde_json::Value> = cache.shared.checkpoint.get(&Key::slices("ns")).unwrap();
    assert_eq!(stored.len(), 1);
    assert!(!cache.shared.checkpoint.has(&Key::slices("z")));
}

#[tokio::test]
async fn the_record_of_slices_has_pods_that_are_reported_after_their_endpoints() {
    let dir = tempfile::tempdir().unwrap();
    let cache = cache(dir.path());
    list(&cache, vec![service("ns", "web", "10.43.0.1")]);
    let labels = json!({"kubernetes.io/service-name": "web"});
    let slice = json!({"metadata": {"namespace": "ns", "name": "s", "labels": labels}, "addressType": "IPv4",
        "endpoints": [{"addresses": ["10.42.0.2"]}], "ports": [{"port": 80}]});
    list_slices(&cache, vec![slice]);
    cache.store_changed_slices();
    let addresses = vec!["10.42.0.2".parse().unwrap()];
    cache.report_pod(&LocalPod { uid: "u", addresses, is_ready: true, is_attached: true });
    cache.store_changed_slices();
    let stored: Vec<serde_json::Value> = cache.shared.checkpoint.get(&Key::slices("ns")).unwrap();
    assert_eq!(stored[0]["pods"], json!({"10.42.0.2": "u"}));
}

#[tokio::test]
async fn stored_services_replace_no_table_with_all_services() {
    let dir = tempfile::tempdir().unwrap();
    let first = cache(dir.path());
    assert!(!first.take_stored(true));
    assert!(first.take_stored(false));
    let next = cache(dir.path());
    assert!(next.take_stored(true), "the table was made from stored services");
    list(&next, Vec::new());
    list_slices(&next, Vec::new());
    next.end_stored();
    assert!(!next.take_stored(true));
    assert!(next.take_stored(false) && !next.take_stored(true), "the table gets all services");
}

#[tokio::test]
async fn the_next_agent_knows_whether_a_killed_one_used_stored_services() {
    const TEST: &str = "service_cache::tests::the_next_agent_knows_whether_a_killed_one_used_stored_services";
    if let Some(dir) = coracle_testing::killed_dir() {
        let cache = cache(&dir);
        assert!(cache.take_stored(false));
        list(&cache, Vec::new());
        list_slices(&cache, Vec::new());
        return cache.end_stored();
    }
    for (point, is_replaced) in [("services.stored-marked", true), ("services.stored-unmarked", false)] {
        let dir = tempfile::tempdir().unwrap();
        coracle_testing::run_until_killed_in(TEST, point, dir.path());
        assert_eq!(cache(dir.path()).take_stored(true), is_replaced, "the table after {point}");
    }
}

#[test]
fn stored_services_have_what_the_proxy_reads() {
    let whole = json!({"metadata": {"namespace": "ns", "name": "a", "uid": "u",
        "creationTimestamp": "2026-01-01T00:00:00Z", "labels": {PROXY_NAME: "mesh", "other": "x"}},
        "spec": {"clusterIP": "10.43.0.1"},
        "status": {"loadBalancer": {"ingress": [{"ip": "192.0.2.1"}]}, "conditions": []}});
    let cached = without_unread_fields(serde_json::from_value(whole).unwrap());
    let stored = stored_fields(&cached);
    assert!(has_other_proxy(&stored));
    assert_eq!(stored.metadata.uid.as_deref(), Some("u"));
    assert_eq!(stored.metadata.creation_timestamp, cached.metadata.creation_timestamp);
    let (stored, cached) = (stored.status.unwrap(), cached.status.unwrap());
    assert_eq!((stored.load_balancer, stored.conditions), (cached.load_balancer, None));
}

#[tokio::test(start_paused = true)]
async fn without_a_list_and_without_a_copy_a_container_waits() {
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(cache(dir.path()).environment(Some("ns")).await, Err(NotListed));
}

#[tokio::test(start_paused = true)]
async fn a_burst_of_changes_is_stored_once_and_only_where_pods_are() {
    let dir = tempfile::tempdir().unwrap();
    let cache = cache(dir.path());
    list(&cache, Vec::new());
    let storing = tokio::spawn({
        let cache = cache.clone();
        async move { cache.store(false).await }
    });
    for number in 0..100 {
        cache.apply_event(Event::Apply(service("ns", &format!("s{number}"), "10.0.0.1")), &mut Vec::new());
        cache.apply_event(Event::Apply(service("z", &format!("s{number}"), "10.0.0.1")), &mut Vec::new());
    }
    tokio::time::sleep(STORE_AFTER * 2).await;
    let stored: Vec<Service> = cache.shared.checkpoint.get(&Key::services("ns")).unwrap();
    assert_eq!(stored.len(), 100);
    assert!(!cache.shared.checkpoint.has(&Key::services("z")));
    storing.abort();
}

#[tokio::test]
async fn services_are_cached_without_unused_fields() {
    let dir = tempfile::tempdir().unwrap();
    let cache = cache(dir.path());
    let mut large = service("ns", "a", "10.0.0.1");
    let text = |key: &str| Some([(key.to_owned(), "x".repeat(1000))].into());
    (large.metadata.annotations, large.metadata.labels) = (text("a"), text("b"));
    let mut other = large.clone();
    other.metadata.name = Some("b".to_owned());
    other.metadata.labels = Some([(PROXY_NAME.to_owned(), "mesh".to_owned())].into());
    list(&cache, vec![large, other]);
    let all = cache.of("ns");
    assert_eq!(*all[0], service("ns", "a", "10.0.0.1"));
    assert_eq!((has_other_proxy(&all[0]), has_other_proxy(&all[1])), (false, true));
}

#[tokio::test]
async fn a_pod_of_this_node_that_is_not_ready_leaves_its_services_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let cache = cache(dir.path());
    let mut web = service("ns", "web", "10.43.0.1");
    web.spec.as_mut().unwrap().selector = Some([("app".to_owned(), "web".to_owned())].into());
    list(&cache, vec![web]);
    let slice = json!({"metadata": {"namespace": "ns", "name": "s", "labels": {"kubernetes.io/service-name": "web"}},
        "addressType": "IPv4", "endpoints": [{"addresses": ["10.42.0.2"]}], "ports": [{"port": 80}]});
    cache.apply_slice_event(Event::Apply(serde_json::from_value(slice).unwrap()), &mut Vec::new());
    let (key, changes) = (ObjectKey::new("ns", "web"), cache.subscribe());
    let is_ready = || cache.state(&key).unwrap().slices[0].endpoints[0].conditions.is_ready();
    let pod = |is_ready| LocalPod {
        uid: "u",
        addresses: vec!["10.42.0.2".parse().unwrap()],
        is_ready,
        is_attached: true,
    };
    cache.report_pod(&pod(true));
    assert!(is_ready() && changes.take().is_empty());
    cache.report_pod(&pod(false));
    assert!(!is_ready());
    assert_eq!(changes.take(), [key.clone()].into());
    cache.remove_pod("u");
    assert!(is_ready());
    assert_eq!(changes.take(), [key.clone()].into());
}

#[tokio::test(start_paused = true)]
async fn services_stay_for_hours_without_the_api_server_and_follow_the_pods_of_this_node() {
    let dir = tempfile::tempdir().unwrap();
    let client = crate::client::unreachable_after_lists(|path| match path.rsplit('/').next() {
        Some("services") => json!([{"metadata": {"namespace": "ns", "name": "web"},
            "spec": {"selector": {"app": "web"}, "clusterIP": "10.43.0.1"}}]),
        Some("endpointslices") => json!([{"metadata": {"namespace": "ns", "name": "s",
            "labels": {"kubernetes.io/service-name": "web"}}, "addressType": "IPv4",
            "endpoints": [{"addresses": ["10.42.0.2"]}], "ports": [{"port": 80}]}]),
        _ => json!([]),
    });
    let cache = cache_of(dir.path(), client);
    let mut progress = cache.changes();
    let watching = tokio::spawn(cache.clone().run(true));
    progress.wait_for(|progress| progress.listed && progress.slices_listed).await.unwrap();
    let key = ObjectKey::new("ns", "web");
    for hours in 1..=3 {
        tokio::time::sleep(Duration::from_secs(3600)).await;
        for is_ready in [false, true] {
            let addresses = vec!["10.42.0.2".parse().unwrap()];
            cache.report_pod(&LocalPod { uid: "u", addresses, is_ready, is_attached: true });
            let slices = cache.state(&key).expect("the service").slices;
            assert_eq!(slices[0].endpoints[0].conditions.is_ready(), is_ready, "after {hours} hours");
        }
    }
    assert!(cache.read(Tables::is_complete), "cluster DNS answers from the tables");
    watching.abort();
}

#[tokio::test]
async fn slices_with_the_headless_label_take_no_traffic() {
    let dir = tempfile::tempdir().unwrap();
    let cache = cache(dir.path());
    list(&cache, vec![service("ns", "web", "10.43.0.1")]);
    let key = ObjectKey::new("ns", "web");
    let count = |labels: serde_json::Value| {
        let slice = json!({"metadata": {"namespace": "ns", "name": "s", "labels": labels}, "addressType": "IPv4",
            "endpoints": [{"addresses": ["10.42.0.2"]}], "ports": [{"port": 80}]});
        cache.apply_slice_event(Event::Apply(serde_json::from_value(slice).unwrap()), &mut Vec::new());
        (cache.state(&key).unwrap().slices.len(), cache.read(|tables| tables.slices(&key).len()))
    };
    assert_eq!(count(json!({"kubernetes.io/service-name": "web"})), (1, 1));
    let headless = json!({"kubernetes.io/service-name": "web", "service.kubernetes.io/headless": ""});
    assert_eq!(count(headless), (0, 1), "DNS reads it");
}

#[tokio::test]
async fn cluster_dns_counts_changes_of_endpoints_by_the_kind_of_their_service() {
    let dir = tempfile::tempdir().unwrap();
    let cache = cache(dir.path());
    let metrics = Arc::new(coracle_dns::Metrics::default());
    cache.measure_dns(Arc::clone(&metrics));
    list(&cache, vec![service("ns", "web", "10.43.0.1"), service("ns", "db", "None")]);
    for of in ["web", "db", "db", "unknown"] {
        let metadata = json!({"namespace": "ns", "name": of, "labels": {"kubernetes.io/service-name": of},
            "annotations": {"endpoints.kubernetes.io/last-change-trigger-time": "9000-01-01T00:00:00Z"}});
        let slice = json!({"metadata": metadata, "addressType": "IPv4", "ports": [{"port": 80}],
            "endpoints": [{"addresses": ["10.42.0.2"]}]});
        cache.apply_slice_event(Event::Apply(serde_json::from_value(slice).unwrap()), &mut Vec::new());
    }
    let text = metrics.render();
    let name = "coredns_kubernetes_dns_programming_duration_seconds_count";
    for (kind, count) in [("cluster_ip", 1), ("headless_with_selector", 2)] {
        let line = format!("{name}{{service_kind=\"{kind}\"}} {count}");
        assert!(text.lines().any(|found| found == line), "{line}\n{text}");
    }
}

#[tokio::test(start_paused = true)]
async fn after_a_restart_dns_knows_the_names_of_all_services() {
    let dir = tempfile::tempdir().unwrap();
    let first = cache(dir.path());
    list(&first, vec![service("ns", "a", "10.0.0.2"), service("z", "far", "10.0.0.9")]);
    first.store_all_names();
    assert!(!first.shared.checkpoint.flush());
    let next = cache(dir.path());
    next.shared.health.failed();
    next.use_stored().await;
    let address = |cache: &ServiceCache| {
        cache.read(|tables| tables.named("z", "far").and_then(|service| service.spec.clone()?.cluster_ip))
    };
    assert_eq!(address(&next).as_deref(), Some("10.0.0.9"));
    assert!(next.of("z").is_empty(), "the service proxy does not know its endpoints");
    list(&next, vec![service("ns", "a", "10.0.0.2")]);
    assert_eq!(address(&next), None, "the list is newer");
    next.store_all_names();
    assert!(!next.shared.checkpoint.flush());
    let stored: Vec<Vec<Service>> = next.shared.checkpoint.all(Kind::ServiceNames);
    assert_eq!(stored.len(), 1, "the record of a namespace without services is removed");
}

#[tokio::test(start_paused = true)]
async fn names_of_services_are_written_only_if_they_change() {
    let dir = tempfile::tempdir().unwrap();
    let cache = cache(dir.path());
    let of_port = |port: u16| {
        let mut service = service("z", "far", "10.0.0.9");
        let port = json!({"port": port, "targetPort": port, "nodePort": 30_000});
        service.spec.as_mut().unwrap().ports = Some(vec![serde_json::from_value(port).unwrap()]);
        service
    };
    // Each record is encrypted with another nonce, so two writes of the same content differ.
    let written = |service: Service| {
        list(&cache, vec![service]);
        cache.store_all_names();
        assert!(!cache.shared.checkpoint.flush());
        let files = std::fs::read_dir(dir.path().join("agent/checkpoint/servicenames")).unwrap();
        let all: Vec<_> = files.map(|file| std::fs::read(file.unwrap().path()).unwrap()).collect();
        assert_eq!(all.len(), 1);
        all
    };
    let before = written(of_port(80));
    let mut selecting = of_port(80);
    selecting.spec.as_mut().unwrap().selector = Some([("app".to_owned(), "web".to_owned())].into());
    assert_eq!(written(selecting), before);
    assert_ne!(written(of_port(81)), before);
}

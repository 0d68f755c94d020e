//! `/metrics`.

use super::{custom_resources::Breakable, *};

async fn metrics(server: &Fixture) -> String {
    let answer = server.get("/metrics").await;
    assert_eq!(answer.code, 200);
    answer.body.as_str().unwrap().to_owned()
}

/// The value of the metric with these labels, in any order.
fn value(text: &str, name: &str, labels: &[&str]) -> Option<f64> {
    let mut lines = text.lines().filter(|line| line.starts_with(&format!("{name}{{")));
    let line = lines.find(|line| labels.iter().all(|label| line.contains(label)))?;
    line.rsplit(' ').next()?.parse().ok()
}

#[tokio::test]
async fn impersonations_are_counted_by_mode_and_decision() {
    let server = Fixture::new().await;
    let ask = async |groups: &[&str], wanted: &str| {
        let request = Request::get(PODS).header("impersonate-user", wanted).body(Full::default()).unwrap();
        server.send(User::new("ann", groups), request).await.code
    };
    // The impersonated user has no permission to list pods.
    assert_eq!(ask(&["system:masters"], "ben").await, 403);
    assert_eq!(ask(&[], "ben").await, 403);
    let text = metrics(&server).await;
    let count = |name: &str, mode: &str, decision: &str| {
        let labels = [format!("mode=\"{mode}\""), format!("decision=\"{decision}\"")];
        value(&text, &format!("apiserver_impersonation_{name}"), &[&labels[0], &labels[1]])
    };
    for attempts in ["attempts_total", "attempts_duration_seconds_count"] {
        assert_eq!(count(attempts, "user-info", "allowed"), Some(1.0), "{attempts}");
        assert_eq!(count(attempts, "", "denied"), Some(1.0), "{attempts}");
    }
    for checks in ["authorization_attempts_total", "authorization_attempts_duration_seconds_count"] {
        assert_eq!(count(checks, "user-info", "allowed"), Some(2.0), "the request and the user: {checks}");
        assert_eq!(count(checks, "user-info", "denied"), Some(1.0), "{checks}");
        assert_eq!(count(checks, "legacy", "denied"), Some(1.0), "{checks}");
    }
}

#[tokio::test]
async fn etcd_has_a_size_for_each_member_and_counts_of_objects_can_be_omitted() {
    let directory = tempfile::tempdir().unwrap();
    let store = Embedded::open(&directory.path().join("store"), EmbeddedOptions::default()).unwrap();
    let store = Breakable { store, is_broken: Arc::default(), is_full: Arc::default(), is_shared: true };
    let configure = |config: &mut ApiserverConfig| config.options.store.has_object_counts = false;
    let server = Fixture { api: open_on(Arc::new(store), directory.path(), configure).await, directory };
    let text = metrics(&server).await;
    let size = |name: &str, label: &str| value(&text, name, &[label]);
    assert_eq!(size("apiserver_storage_size_bytes", "storage_cluster_id=\"etcd-0\""), Some(5.0));
    for (endpoint, bytes) in [("a", -1.0), ("b", 5.0)] {
        let label = format!("endpoint=\"http://{endpoint}:2379\"");
        assert_eq!(size("apiserver_storage_db_total_size_in_bytes", &label), Some(bytes), "{endpoint}");
    }
    for name in ["apiserver_storage_objects", "apiserver_resource_objects"] {
        assert!(!text.contains(name), "{name}");
    }
}

#[tokio::test]
async fn requests_and_objects_are_counted_with_upstreams_names() {
    let server = Fixture::new().await;
    server.post(PODS, pod("p")).await;
    server.get(&format!("{PODS}/p")).await;
    server.get(&format!("{PODS}/q")).await;
    server.get(PODS).await;
    let text = metrics(&server).await;
    let count = |labels: &[&str]| value(&text, "apiserver_request_total", labels);
    let of_pods = |verb, scope, code| count(&["version=\"v1\"", "resource=\"pods\"", verb, scope, code]);
    assert_eq!(of_pods("verb=\"POST\"", "scope=\"namespace\"", "code=\"201\""), Some(1.0));
    assert_eq!(of_pods("verb=\"GET\"", "scope=\"resource\"", "code=\"200\""), Some(1.0));
    assert_eq!(of_pods("verb=\"GET\"", "scope=\"resource\"", "code=\"404\""), Some(1.0));
    assert_eq!(of_pods("verb=\"LIST\"", "scope=\"namespace\"", "code=\"200\""), Some(1.0));
    let took =
        value(&text, "apiserver_request_duration_seconds_count", &["verb=\"GET\"", "resource=\"pods\""]);
    assert_eq!(took, Some(2.0));
    assert_eq!(value(&text, "apiserver_storage_objects", &["resource=\"pods\""]), Some(1.0));
    assert!(value(&text, "apiserver_storage_objects", &["resource=\"deployments.apps\""]).is_some());
    let own =
        value(&text, "apiserver_request_sli_duration_seconds_count", &["verb=\"GET\"", "resource=\"pods\""]);
    assert_eq!(own, Some(2.0));
    let version = server.get("/version").await.body["gitVersion"].as_str().unwrap().to_owned();
    assert_eq!(value(&text, "kubernetes_build_info", &[&format!("git_version=\"{version}\"")]), Some(1.0));
    assert_eq!(value(&text, "apiserver_resource_objects", &["group=\"\"", "resource=\"pods\""]), Some(1.0));
    let events =
        value(&text, "apiserver_storage_events_received_total", &["group=\"\"", "resource=\"pods\""]);
    assert_eq!(events, Some(1.0));
    let size = value(&text, "apiserver_storage_size_bytes", &["storage_cluster_id=\"embedded-0\""]);
    assert!(size.is_some_and(|bytes| bytes > 0.0), "{text}");
    let sizes = |verb| value(&text, "apiserver_response_sizes_count", &[verb, "resource=\"pods\""]);
    assert_eq!(
        (sizes("verb=\"GET\""), sizes("verb=\"LIST\""), sizes("verb=\"POST\"")),
        (Some(2.0), Some(1.0), None)
    );
    assert!(text.contains("process_resident_memory_bytes "), "{text}");
    assert_eq!(
        value(&text, "apiserver_current_inflight_requests", &["request_kind=\"readOnly\""]),
        Some(0.0)
    );
}

#[tokio::test]
async fn steps_of_admission_and_deprecated_apis_are_counted() {
    let server = Fixture::new().await;
    let refused = server.get_as(User::new("eve", &[]), "/api/v1/namespaces/default/endpoints").await;
    assert_eq!(refused.code, 403);
    let before = metrics(&server).await;
    let step = |text: &str, kind: &str, rejected: &str| {
        let name = "apiserver_admission_step_admission_duration_seconds_count";
        value(text, name, &["operation=\"CREATE\"", kind, rejected]).unwrap_or(0.0)
    };
    let endpoints = ["resource=\"endpoints\"", "version=\"v1\"", "removed_release=\"\""];
    assert_eq!(value(&before, "apiserver_requested_deprecated_apis", &endpoints), None);
    server.post(PODS, pod("p")).await;
    server.get("/api/v1/namespaces/default/endpoints").await;
    let after = metrics(&server).await;
    let counted = |kind: &str, rejected: &str| step(&after, kind, rejected) - step(&before, kind, rejected);
    assert!(counted("type=\"admit\"", "rejected=\"false\"") >= 1.0, "{after}");
    assert!(counted("type=\"validate\"", "rejected=\"false\"") >= 1.0, "{after}");
    assert_eq!(value(&after, "apiserver_requested_deprecated_apis", &endpoints), Some(1.0));
}

#[tokio::test]
async fn admission_plugins_are_counted_in_the_steps_that_they_implement() {
    let server = Fixture::new().await;
    server.post(PODS, pod("p")).await;
    let refused =
        server.post("/api/v1/namespaces/absent/configmaps", json!({"metadata": {"name": "c"}})).await;
    assert_eq!(refused.code, 404, "{}", refused.body);
    let text = metrics(&server).await;
    let count = |plugin: &str, kind: &str, rejected: &str| {
        let name = "apiserver_admission_controller_admission_duration_seconds_count";
        let labels =
            [format!("name=\"{plugin}\""), format!("type=\"{kind}\""), format!("rejected=\"{rejected}\"")];
        let [plugin, kind, rejected] = &labels;
        value(&text, name, &[plugin, kind, rejected, "operation=\"CREATE\""])
    };
    assert!(count("PodSecurity", "validate", "false").is_some_and(|count| count >= 1.0), "{text}");
    assert!(count("DefaultTolerationSeconds", "admit", "false").is_some_and(|count| count >= 1.0), "{text}");
    assert!(count("NamespaceLifecycle", "validate", "true").is_some_and(|count| count >= 1.0), "{text}");
    assert_eq!(count("NamespaceLifecycle", "admit", "false"), None, "{text}");
    let without_name = "apiserver_admission_controller_admission_duration_seconds_count{name=\"\"";
    assert!(!text.contains(without_name), "members without a name are no plugins");
}

#[tokio::test]
async fn the_remaining_validity_of_client_certificates_is_counted() {
    let server = Fixture::new().await;
    let key = KeyPair::generate().unwrap();
    let mut params = rcgen::CertificateParams::default();
    params.not_after = rcgen::date_time_ymd(2020, 1, 1);
    let certificate = params.self_signed(&key).unwrap();
    let mut request = Request::get("/api").body(Full::<Bytes>::default()).unwrap();
    request
        .extensions_mut()
        .insert(server.api.state.authenticators.peer(&[certificate.der().clone()]).unwrap());
    server.api.handle(request, None).await;
    let expired = "apiserver_client_certificate_expiration_seconds_bucket{le=\"0\"} 1";
    let text = metrics(&server).await;
    assert!(text.lines().any(|line| line == expired), "{text}");
}

#[tokio::test]
async fn long_running_requests_and_those_that_a_limit_ended_are_counted() {
    let server = Fixture::new().await.again_with(|config| config.max_in_flight = [1, 1]).await;
    let request = Request::get(format!("{PODS}?watch=1")).header("authorization", "Bearer secret");
    let watch = server.api.handle(request.body(Full::<Bytes>::default()).unwrap(), None).await;
    assert_eq!(watch.status(), 200);
    let labels = ["verb=\"WATCH\"", "resource=\"pods\""];
    let running = async || value(&metrics(&server).await, "apiserver_longrunning_requests", &labels);
    assert_eq!(running().await, Some(1.0));
    drop(watch);
    assert_eq!(running().await, Some(0.0));
    let list = async || {
        let request = Request::get(PODS).body(Full::<Bytes>::default()).unwrap();
        server.api.handle(request, None).await
    };
    // A request is in flight until its response is dropped.
    let first = list().await;
    assert_eq!((first.status().as_u16(), list().await.status().as_u16()), (403, 429));
    let labels = ["resource=\"pods\"", "verb=\"LIST\"", "code=\"429\""];
    let text = metrics(&server).await;
    assert_eq!(value(&text, "apiserver_request_terminations_total", &labels), Some(1.0));
    assert!(text.lines().any(|line| line == "apiserver_tls_handshake_errors_total 0"), "{text}");
    server.api.state.metrics.serving.failed_handshake();
    let text = metrics(&server).await;
    assert!(text.lines().any(|line| line == "apiserver_tls_handshake_errors_total 1"), "{text}");
}

#[tokio::test]
async fn authentications_decisions_and_the_events_of_watches_are_counted() {
    let server = Fixture::new().await;
    server.post(PODS, pod("p")).await;
    let request = Request::get(format!("{PODS}?watch=1")).header("authorization", "Bearer secret");
    let watch = server.api.handle(request.body(Full::<Bytes>::default()).unwrap(), None).await;
    let mut events = watch.into_body();
    let event = events.frame().await.unwrap().unwrap().into_data().unwrap();
    let refused = Request::get(PODS).header("authorization", "Bearer other");
    let refused = server.api.handle(refused.body(Full::<Bytes>::default()).unwrap(), None).await;
    assert_eq!(refused.status(), 401);
    let text = metrics(&server).await;
    let times = |name: &str, result: &str| {
        value(&text, &format!("{name}_duration_seconds_count"), &[&format!("result=\"{result}\"")])
    };
    assert_eq!(times("authentication", "success"), Some(1.0));
    assert_eq!(times("authentication", "failure"), Some(1.0));
    let allowed = value(&text, "authorization_attempts_total", &["result=\"allowed\""]);
    assert!(allowed.is_some_and(|count| count >= 2.0), "{text}");
    assert_eq!(times("authorization", "allowed"), allowed);
    let labels = ["group=\"\"", "version=\"v1\"", "resource=\"pods\""];
    assert_eq!(value(&text, "apiserver_watch_events_total", &labels), Some(1.0));
    #[expect(clippy::cast_precision_loss, reason = "the event is short")]
    let size = event.len() as f64;
    assert_eq!(value(&text, "apiserver_watch_events_sizes_sum", &labels), Some(size));
}

#[tokio::test]
async fn requests_and_limits_of_pods_have_a_path_of_their_own() {
    let server = Fixture::new().await;
    let mut pod = pod("p");
    pod["spec"]["containers"][0]["resources"] = json!({"requests": {"cpu": "250m"}, "limits": {"cpu": "1"}});
    assert_eq!(server.post(PODS, pod).await.code, 201);
    let answer = server.get("/metrics/resources").await;
    let text = answer.body.as_str().unwrap();
    let labels = ["namespace=\"default\"", "pod=\"p\"", "resource=\"cpu\"", "unit=\"cores\""];
    assert_eq!(value(text, "kube_pod_resource_request", &labels), Some(0.25));
    assert_eq!(value(text, "kube_pod_resource_limit", &labels), Some(1.0));
    assert!(!metrics(&server).await.contains("kube_pod_resource"), "the samples grow with the pods");
    let anonymous = User::new("system:anonymous", &["system:unauthenticated"]);
    assert_eq!(server.get_as(anonymous, "/metrics/resources").await.code, 403);
}

#[tokio::test]
async fn a_request_cannot_make_labels_and_anonymous_clients_read_none() {
    let server = Fixture::new().await;
    for path in ["/apis/evil.example/v1/evils/a", "/api/v1/namespaces/default/pods/a/evil", "/evil"] {
        server.get(path).await;
    }
    assert!(!metrics(&server).await.contains("evil"));
    let anonymous = User::new("system:anonymous", &["system:unauthenticated"]);
    assert_eq!(server.get_as(anonymous, "/metrics").await.code, 403);
}

/// CVE-2022-21698, CVE-2023-45142: each unknown method made a label value, which stayed in memory.
#[tokio::test]
async fn cve_2022_21698_unknown_methods_make_no_labels() {
    let server = Fixture::new().await;
    let ask = async |method: &str| {
        for path in [PODS, "/api/v1/namespaces/default/pods/a", "/version", "/absent"] {
            server.call(method, path, "", None).await;
        }
    };
    let series = async || {
        let text = metrics(&server).await;
        assert!(!text.to_lowercase().contains("odd-method"), "{text}");
        text.lines().filter(|line| line.starts_with("apiserver_request_total{")).count()
    };
    ask("ODD-METHOD").await;
    // The requests for the metrics are counted, too.
    series().await;
    let before = series().await;
    for number in 0..50 {
        ask(&format!("ODD-METHOD-{number}")).await;
    }
    assert_eq!(series().await, before);
}

#[tokio::test]
async fn metrics_of_other_components_of_the_process_follow() {
    let component = || "# TYPE x counter\nx 7\n".to_owned();
    let configure = |config: &mut ApiserverConfig| {
        config.component_metrics = Some(crate::ComponentMetrics(Arc::new(component)))
    };
    let server = Fixture::new().await.again_with(configure).await;
    let text = metrics(&server).await;
    assert!(text.ends_with("\n# TYPE x counter\nx 7\n") && text.contains("kubernetes_build_info"), "{text}");
}

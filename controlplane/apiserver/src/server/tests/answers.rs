//! Responses that must be equal to upstream's responses, because clients depend on them.

use std::io::Read as _;

use super::*;

const SERVICES: &str = "/api/v1/namespaces/default/services";
const MAPS: &str = "/api/v1/namespaces/default/configmaps";

fn accepting(method: &str, path: &str, accept: &str, body: Value) -> Request<Full<Bytes>> {
    let request = Request::builder().method(method).uri(path).header("accept", accept);
    request.header("content-type", "application/json").body(Full::from(body.to_string())).unwrap()
}

#[tokio::test]
async fn caches_store_only_the_documents_about_tokens() {
    let server = Fixture::new().await;
    let rule = async |path: &str| server.get(path).await.headers["cache-control"].clone();
    for path in [PODS, "/version", "/nope", "/livez"] {
        assert_eq!(rule(path).await, "no-cache, private", "{path}");
    }
    for path in ["/.well-known/openid-configuration", "/openid/v1/jwks"] {
        assert_eq!(rule(path).await, "public, max-age=3600", "{path}");
    }
}

#[tokio::test]
async fn people_get_indented_json() {
    let server = Fixture::new().await;
    let lines = async |path: &str, agent: &str| {
        let request = Request::get(path).header("user-agent", agent).body(Full::default()).unwrap();
        let answer = server.api.handle(request, Some(admin())).await;
        let bytes = answer.into_body().collect().await.unwrap().to_bytes();
        serde_json::from_slice::<Value>(&bytes).unwrap();
        String::from_utf8_lossy(&bytes).lines().count()
    };
    for path in [PODS, "/apis", "/api/v1/namespaces/default/pods/none"] {
        assert!(lines(path, "curl/8.5.0").await > 5, "{path}");
        assert_eq!(lines(path, "kubectl/v1.36.0").await, 1, "{path}");
    }
    assert!(lines("/version", "kubectl/v1.36.0").await > 5);
}

#[tokio::test]
async fn the_root_lists_groups_and_the_version_has_its_compatibility() {
    let server = Fixture::new().await;
    let paths = server.get("/").await.body["paths"].clone();
    for path in ["/apis/apps", "/apis/apps/v1", "/metrics", "/readyz", "/readyz/shutdown", "/livez/ping"] {
        assert!(paths.as_array().unwrap().contains(&json!(path)), "{path}: {paths}");
    }
    let version = server.get("/version").await.body;
    assert_eq!(version["emulationMinor"], version["minor"]);
    assert_eq!(version["gitVersion"], "v1.36.0+coracle");
    let minor = |field: &str| version[field].as_str().unwrap().parse::<u32>().unwrap();
    assert_eq!(minor("minCompatibilityMinor") + 1, minor("minor"));
}

#[tokio::test]
async fn deletion_answers_with_the_object_where_upstream_does() {
    let server = Fixture::new().await;
    let service = json!({"metadata": {"name": "s"}, "spec": {"ports": [{"port": 80}]}});
    server.post(SERVICES, service).await;
    let account = "/api/v1/namespaces/default/serviceaccounts";
    server.post(account, json!({"metadata": {"name": "a"}})).await;
    server.post(PODS, pod("p")).await;
    server.post(MAPS, config_map("m", json!({}))).await;
    let classes = "/apis/storage.k8s.io/v1/storageclasses";
    server.post(classes, json!({"metadata": {"name": "c"}, "provisioner": "example.com/p"})).await;
    let devices = "/apis/resource.k8s.io/v1/deviceclasses";
    server.post(devices, json!({"metadata": {"name": "d"}, "spec": {}})).await;
    for (path, kind) in [
        (format!("{classes}/c"), "StorageClass"),
        (format!("{devices}/d"), "DeviceClass"),
        (format!("{SERVICES}/s"), "Service"),
        (format!("{account}/a"), "ServiceAccount"),
        (format!("{PODS}/p"), "Pod"),
        (format!("{MAPS}/m"), "Status"),
    ] {
        let gone = server.call("DELETE", &path, "", None).await;
        assert_eq!((gone.code, gone.body["kind"].as_str()), (200, Some(kind)), "{path}");
        if kind != "Status" {
            assert!(gone.body["metadata"]["uid"].is_string(), "{path}");
        }
    }
}

#[tokio::test]
async fn a_service_becomes_an_external_name() {
    let server = Fixture::new().await;
    for (name, kind) in [("a", "ClusterIP"), ("b", "NodePort"), ("c", "LoadBalancer")] {
        let service = json!({"metadata": {"name": name}, "spec": {"type": kind, "ports": [{"port": 80}]}});
        let mut made = server.post(SERVICES, service).await.body;
        assert!(made["spec"]["clusterIP"].is_string());
        made["spec"]["type"] = "ExternalName".into();
        made["spec"]["externalName"] = "example.com".into();
        let path = format!("{SERVICES}/{name}");
        let changed = server.put(&path, made).await;
        assert_eq!(changed.code, 200, "{}", changed.body);
        let spec = &changed.body["spec"];
        for gone in ["clusterIP", "clusterIPs", "ipFamilies", "ipFamilyPolicy", "externalTrafficPolicy"] {
            assert!(spec[gone].is_null(), "{name}: {gone}");
        }
        assert!(spec["ports"][0]["nodePort"].is_null());
        let back = server.merge(&path, json!({"spec": {"type": "ClusterIP", "externalName": null}})).await;
        assert!(back.code == 200 && back.body["spec"]["clusterIP"].is_string(), "{}", back.body);
    }
}

#[tokio::test]
async fn an_update_without_the_default_tolerations_gets_them() {
    let server = Fixture::new().await;
    let mut made = server.post(PODS, pod("p")).await.body;
    assert_eq!(made["spec"]["tolerations"].as_array().unwrap().len(), 2);
    made["spec"].as_object_mut().unwrap().remove("tolerations");
    let changed = server.put(&format!("{PODS}/p"), made).await;
    assert_eq!(changed.code, 200, "{}", changed.body);
    assert_eq!(changed.body["spec"]["tolerations"].as_array().unwrap().len(), 2);
}

#[tokio::test]
async fn a_binding_takes_accounts_of_its_own_namespace() {
    let server = Fixture::new().await;
    let rbac = "/apis/rbac.authorization.k8s.io/v1";
    let reader = json!({"metadata": {"name": "r"},
        "rules": [{"verbs": ["list"], "apiGroups": [""], "resources": ["pods"]}]});
    server.post(&format!("{rbac}/namespaces/default/roles"), reader).await;
    let role = json!({"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "r"});
    let binding = json!({"metadata": {"name": "b"}, "roleRef": role,
        "subjects": [{"kind": "ServiceAccount", "name": "default"}]});
    let made = server.post(&format!("{rbac}/namespaces/default/rolebindings"), binding.clone()).await;
    assert_eq!(made.code, 201, "{}", made.body);
    let account = |namespace: &str| User::new(&format!("system:serviceaccount:{namespace}:default"), &[]);
    assert_eq!(server.get_as(account("default"), PODS).await.code, 200);
    assert_eq!(server.get_as(account("kube-system"), PODS).await.code, 403);
    let mut cluster = binding;
    cluster["roleRef"]["kind"] = "ClusterRole".into();
    assert_eq!(server.post(&format!("{rbac}/clusterrolebindings"), cluster).await.code, 422);
}

#[tokio::test]
async fn resources_do_not_support_head() {
    let server = Fixture::new().await;
    for path in [MAPS, "/api/v1/namespaces/default", "/api/v1/namespaces/default/status"] {
        assert_eq!(server.get(path).await.code, 200, "{path}");
        let head = server.call("HEAD", path, "", None).await;
        assert_eq!((head.code, &head.body["reason"]), (405, &json!("MethodNotAllowed")), "{path}");
    }
    assert_eq!(server.call("HEAD", "/api/v1/namespaces/default/nothing", "", None).await.code, 404);
}

#[tokio::test]
async fn connect_is_refused() {
    let server = Fixture::new().await;
    let proxy = "/api/v1/namespaces/default/services/kubernetes/proxy/";
    for target in ["/", "/version", "/healthz", "/metrics", "/api", MAPS, proxy, "example.org:443"] {
        let answer = server.call("CONNECT", target, "", None).await;
        assert_eq!((answer.code, &answer.body["reason"]), (405, &json!("MethodNotAllowed")), "{target}");
    }
    let request = Request::builder().method("CONNECT").uri("example.org:443").body(Full::default()).unwrap();
    assert_eq!(server.send(User::new("ann", &[]), request).await.code, 403, "authorization is first");
}

#[tokio::test]
async fn responses_may_be_yaml() {
    let server = Fixture::new().await;
    server.post(MAPS, config_map("m", json!({"a": "yes"}))).await;
    let map = format!("{MAPS}/m");
    for (path, accept, expect) in [
        (&*map, "application/yaml", "application/yaml"),
        (&*map, "application/yaml,application/json", "application/yaml"),
        (&*map, "application/json,application/yaml", "application/json"),
        (&*map, "application/yaml;as=Table;v=v1;g=meta.k8s.io", "application/yaml"),
        (MAPS, "application/yaml", "application/yaml"),
        ("/api/v1", "application/yaml", "application/yaml"),
    ] {
        let answer = server.send(admin(), accepting("GET", path, accept, json!({}))).await;
        let media = answer.headers["content-type"].to_str().unwrap();
        assert_eq!((answer.code, media), (200, expect), "{path} {accept}");
    }
    let watch = format!("{MAPS}?watch=1");
    let refused = server.send(admin(), accepting("GET", &watch, "application/yaml", json!({}))).await;
    let message = refused.body["message"].as_str().unwrap();
    assert_eq!((refused.code, message.contains("application/json;stream=watch")), (406, true), "{message}");
}

#[tokio::test]
async fn a_client_that_accepts_no_form_of_the_response_changes_nothing() {
    let server = Fixture::new().await;
    server.post(MAPS, config_map("m", json!({}))).await;
    let map = format!("{MAPS}/m");
    let one = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1";
    let list = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1";
    let watch = format!("{MAPS}?watch=1");
    for (method, path, accept) in [
        ("GET", MAPS, one),
        ("GET", &*map, list),
        ("GET", &*watch, list),
        ("POST", MAPS, list),
        ("POST", MAPS, "text/html"),
        ("DELETE", &*map, list),
        ("DELETE", &*map, "text/html"),
        ("DELETE", MAPS, one),
        ("DELETE", MAPS, "text/html"),
    ] {
        let body = if method == "POST" { config_map("n", json!({})) } else { json!({}) };
        let refused = server.send(admin(), accepting(method, path, accept, body)).await;
        let found = (refused.code, &refused.body["reason"]);
        assert_eq!(found, (406, &json!("NotAcceptable")), "{method} {path} {accept}");
    }
    assert_eq!(server.get(&map).await.code, 200);
    assert_eq!(server.get(&format!("{MAPS}/n")).await.code, 404);
    let metadata = server.send(admin(), accepting("GET", MAPS, list, json!({}))).await;
    assert_eq!((metadata.code, &metadata.body["kind"]), (200, &json!("PartialObjectMetadataList")));
}

#[tokio::test]
async fn deprecated_and_ignored_fields_have_warnings() {
    let server = Fixture::new().await;
    let mut labelled = pod("p");
    labelled["spec"]["nodeSelector"] = json!({"beta.kubernetes.io/os": "linux"});
    let warnings = |answer: &Answer| {
        let values = answer.headers.get_all("warning").iter();
        values.map(|value| value.to_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    let made = server.post(PODS, labelled).await;
    let expect = "299 - \"spec.nodeSelector[beta.kubernetes.io/os]: deprecated since v1.14; use \\\"kubernetes.io/os\\\" instead\"";
    assert_eq!((made.code, warnings(&made)), (201, vec![expect.to_owned()]), "{}", made.body);
    let labels = json!({"metadata": {"labels": {"a": "b"}}});
    assert_eq!(warnings(&server.merge(&format!("{PODS}/p"), labels).await), [""; 0]);
    let service = json!({"metadata": {"name": "s"}, "spec": {"ports": [{"port": 80}], "trafficDistribution": "PreferClose"}});
    let made = server.post(SERVICES, service).await;
    let expect =
        ["299 - \"spec.trafficDistribution: \\\"PreferClose\\\" is deprecated; use \\\"PreferSameZone\\\"\""];
    assert_eq!(warnings(&made), expect, "{}", made.body);
    let changed = server.merge(&format!("{SERVICES}/s"), json!({"metadata": {"labels": {"a": "b"}}})).await;
    assert_eq!(warnings(&changed), expect, "updates have the warnings, too");
    let plain = server.post(PODS, pod("q")).await;
    assert_eq!((plain.code, warnings(&plain)), (201, vec![]));
}

#[tokio::test]
async fn errors_list_the_accepted_media_types() {
    let server = Fixture::new().await;
    let objects = "application/json, application/yaml, application/vnd.kubernetes.protobuf";
    let refused = server.send(admin(), accepting("GET", MAPS, "text/html", json!({}))).await;
    let expect = format!("only the following media types are accepted: {objects}");
    assert_eq!((refused.code, &refused.body["message"]), (406, &json!(expect)));
    let unknown = "the body of the request was in an unknown format - accepted media types include:";
    for media in ["text/plain", "application/merge-patch+json"] {
        let refused = server.call("POST", MAPS, media, Some(config_map("m", json!({})))).await;
        let expect = format!("{unknown} {objects}");
        assert_eq!((refused.code, &refused.body["message"]), (415, &json!(expect)), "{media}");
    }
    for media in ["", "text/plain", "application/json", "application/apply-patch+cbor"] {
        let refused = server.call("PATCH", &format!("{MAPS}/m"), media, Some(json!({}))).await;
        let expect = format!(
            "{unknown} application/json-patch+json, application/merge-patch+json, \
             application/strategic-merge-patch+json, application/apply-patch+yaml"
        );
        assert_eq!((refused.code, &refused.body["message"]), (415, &json!(expect)), "{media}");
    }
}

#[tokio::test]
async fn a_review_cannot_be_a_table() {
    let server = Fixture::new().await;
    let path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews";
    let body = || json!({"spec": {"nonResourceAttributes": {"verb": "get", "path": "/"}}});
    for (accept, code) in [
        ("application/json;as=Table;v=v1;g=meta.k8s.io", 406),
        ("application/json;as=Table;v=v1;g=meta.k8s.io,application/json", 201),
        ("application/json", 201),
    ] {
        let answer = server.send(admin(), accepting("POST", path, accept, body())).await;
        assert_eq!(answer.code, code, "{accept}");
    }
}

#[tokio::test]
async fn parameters_are_read_strictly() {
    let server = Fixture::new().await;
    for (query, code) in
        [("limit=abc", 400), ("limit=", 400), ("timeoutSeconds=1s", 400), ("limit=5", 200), ("limit=-1", 200)]
    {
        assert_eq!(server.get(&format!("{MAPS}?{query}")).await.code, code, "{query}");
    }
    assert_eq!(server.get(&format!("{MAPS}?watch=maybe&timeoutSeconds=x")).await.code, 400);
    server.post(MAPS, config_map("m", json!({}))).await;
    let event = server.first_event(&format!("{MAPS}?watch=yes")).await;
    assert_eq!(event["type"], "ADDED");
    for off in ["0", "false", "False"] {
        let listed = server.get(&format!("{MAPS}?watch={off}")).await;
        assert_eq!((listed.code, &listed.body["kind"]), (200, &json!("ConfigMapList")), "{off}");
    }
    let both = json!({"propagationPolicy": "Background", "orphanDependents": false});
    let refused = server.delete(&format!("{MAPS}/m"), both).await;
    assert_eq!(refused.code, 422, "{}", refused.body);
    let path = format!("{MAPS}/m?propagationPolicy=Orphan&orphanDependents=true");
    assert_eq!(server.call("DELETE", &path, "", None).await.code, 422);
    assert_eq!(server.get(&format!("{MAPS}/m")).await.code, 200);
}

#[tokio::test]
async fn a_status_begins_with_its_kind_and_ends_with_a_newline() {
    let server = Fixture::new().await;
    server.post(MAPS, config_map("m", json!({}))).await;
    for (method, path) in
        [("GET", format!("{MAPS}/none")), ("DELETE", format!("{MAPS}/m")), ("PUT", MAPS.to_owned())]
    {
        let request = Request::builder().method(method).uri(&path).body(Full::<Bytes>::default()).unwrap();
        let answer = server.api.handle(request, Some(admin())).await;
        let bytes = answer.into_body().collect().await.unwrap().to_bytes();
        let text = std::str::from_utf8(&bytes).unwrap();
        assert!(text.starts_with("{\"kind\":\"Status\",\"apiVersion\":\"v1\",\"metadata\":{}"), "{text}");
        assert!(text.ends_with("}\n"), "{text}");
    }
}

#[tokio::test]
async fn the_openapi_document_comes_as_protobuf_or_json() {
    let server = Fixture::new().await;
    let protobuf = "application/com.github.proto-openapi.spec.v2.v1.0+protobuf";
    // kubectl accepts this media type. It cannot parse the same name in a response.
    let of_client_go = "application/com.github.proto-openapi.spec.v2@v1.0+protobuf";
    for (accept, media) in [
        (protobuf, protobuf),
        (of_client_go, protobuf),
        ("application/json", "application/json"),
        ("*/*", "application/json"),
    ] {
        let answer = server.send(admin(), accepting("GET", "/openapi/v2", accept, json!({}))).await;
        assert_eq!((answer.code, answer.headers["content-type"].to_str().unwrap()), (200, media));
        let mut again = accepting("GET", "/openapi/v2", accept, json!({}));
        again.headers_mut().insert("if-none-match", answer.headers["etag"].clone());
        assert_eq!(server.send(admin(), again).await.code, 304);
    }
    let other = server.send(admin(), accepting("GET", "/openapi/v2", "text/html", json!({}))).await;
    assert_eq!(other.code, 406);
}

#[tokio::test]
async fn openapi_documents_are_the_same_with_and_without_gzip() {
    let server = Fixture::new().await;
    let get = async |path: &str, accept: &str, coding: &str| {
        let request = Request::get(path).header("accept", accept).header("accept-encoding", coding);
        let request = request.body(Full::<Bytes>::default()).unwrap();
        let (parts, body) = server.api.handle(request, Some(admin())).await.into_parts();
        let is_compressed = parts.headers.contains_key("content-encoding");
        let body = body.collect().await.unwrap().to_bytes();
        let mut text = Vec::new();
        if is_compressed {
            flate2::read::GzDecoder::new(&*body).read_to_end(&mut text).unwrap();
        } else {
            text.extend_from_slice(&body);
        }
        (parts.headers["etag"].clone(), is_compressed, text)
    };
    let json = "application/json";
    for (path, is_large) in
        [("/openapi/v2", true), ("/openapi/v3/api/v1", true), ("/openapi/v3/apis/apps", false)]
    {
        let (plain, packed) = (get(path, json, "identity").await, get(path, json, "gzip").await);
        assert_eq!((plain.1, packed.1), (false, is_large), "{path}");
        assert!(plain.0 == packed.0 && plain.2 == packed.2, "{path}");
        let plain: Value = serde_json::from_slice(&plain.2).unwrap();
        for coding in ["identity", "gzip"] {
            // YAML in flow style is JSON.
            let yaml = get(path, "application/yaml", coding).await;
            assert!(serde_json::from_slice::<Value>(&yaml.2).unwrap() == plain, "{path} {coding}");
        }
    }
    assert_eq!(server.get("/openapi/v3/apis/none").await.code, 404);
}

#[tokio::test]
async fn strict_errors_follow_the_document() {
    let server = Fixture::new().await;
    let body = r#"{"metadata": {"name": "d"}, "spec": {"unknownField": 1, "replicas": 1, "replicas": 2, "alsoUnknown": 1}}"#;
    let request = Request::post("/apis/apps/v1/namespaces/default/deployments?fieldValidation=Strict");
    let refused = server.send(admin(), request.body(Full::from(body)).unwrap()).await;
    let message = refused.body["message"].as_str().unwrap();
    let expect = "strict decoding error: unknown field \"spec.unknownField\", duplicate field \"spec.replicas\", \
        unknown field \"spec.alsoUnknown\"";
    assert!(message.ends_with(expect), "{message}");
}

#[tokio::test]
async fn invalid_parameters_have_causes() {
    let server = Fixture::new().await;
    let map = || config_map("m", json!({}));
    for (answer, options, field) in [
        (server.post(&format!("{MAPS}?dryRun=Some"), map()).await, "CreateOptions", "dryRun"),
        (server.post(&format!("{MAPS}?fieldValidation=x"), map()).await, "CreateOptions", "fieldValidation"),
        (server.merge(&format!("{MAPS}/m?force=true"), json!({})).await, "PatchOptions", "force"),
        (
            server.get(&format!("{MAPS}?resourceVersionMatch=Exact")).await,
            "ListOptions",
            "resourceVersionMatch",
        ),
        (
            server.call("DELETE", &format!("{MAPS}/m?propagationPolicy=x"), "", None).await,
            "DeleteOptions",
            "propagationPolicy",
        ),
    ] {
        let details = &answer.body["details"];
        assert_eq!(answer.code, 422, "{options} {field}");
        assert_eq!((&details["kind"], &details["group"]), (&json!(options), &json!("meta.k8s.io")));
        assert_eq!(details["causes"][0]["field"], field);
    }
    let kind = server.delete(&format!("{MAPS}/m"), json!({"kind": "ConfigMap"})).await;
    assert_eq!(kind.code, 400);
}

#[tokio::test]
async fn the_pages_of_the_server_are_text_or_objects() {
    let server = Fixture::new().await;
    let get = async |path: &str, accept: &str| {
        let request = Request::get(path).header("accept", accept).body(Full::default()).unwrap();
        server.send(admin(), request).await
    };
    let text = get("/statusz", "*/*").await;
    assert!(text.body.as_str().unwrap().contains("\napiserver statusz\n"), "{}", text.body);
    assert_eq!(text.headers["content-type"], "text/plain; charset=utf-8");
    let flags = get("/flagz", "application/json;as=Flagz;g=config.k8s.io;v=v1alpha1").await;
    assert_eq!(flags.body["flags"], json!({"listen": "0.0.0.0:6443"}));
    assert!(flags.headers.contains_key("warning"), "the version is deprecated");
    let refused = get("/statusz", "application/json").await;
    assert_eq!((refused.code, &refused.body["reason"]), (406, &json!("NotAcceptable")));
    assert_eq!(server.get_as(User::new("eve", &[]), "/flagz").await.code, 403);
}

#[tokio::test]
async fn a_patch_keeps_the_identity_and_ends_in_a_valid_object() {
    let server = Fixture::new().await;
    server.post(MAPS, config_map("m", json!({}))).await;
    let path = format!("{MAPS}/m");
    let renamed = server.merge(&path, json!({"metadata": {"name": "n"}})).await;
    assert_eq!(renamed.body["message"], "the name of the object (n) does not match the name on the URL (m)");
    let other = server.merge(&path, json!({"metadata": {"uid": "x"}})).await;
    assert_eq!((other.code, &other.body["details"]["causes"][0]["field"]), (422, &json!("metadata.uid")));
    let wrong = server.merge(&path, json!({"data": 5})).await;
    assert_eq!((wrong.code, &wrong.body["details"]["causes"][0]["field"]), (422, &json!("patch")));
}

#[tokio::test]
async fn a_review_of_a_namespace_asks_about_this_namespace() {
    let server = Fixture::new().await;
    let path = "/apis/authorization.k8s.io/v1/namespaces/default/localsubjectaccessreviews";
    let asked = |namespace: &str| {
        let attributes = json!({"verb": "get", "resource": "secrets", "namespace": namespace});
        json!({"spec": {"user": "u", "resourceAttributes": attributes}})
    };
    assert_eq!(server.post(path, asked("default")).await.code, 201);
    assert_eq!(server.post(path, asked("kube-system")).await.code, 422);
    let token = server.post("/apis/authentication.k8s.io/v1/tokenreviews", json!({"spec": {}})).await;
    assert_eq!(token.code, 400);
}

#[tokio::test]
async fn a_binding_names_its_pod() {
    let server = Fixture::new().await;
    server.post(PODS, pod("p")).await;
    let binding = |name: &str| json!({"metadata": {"name": name}, "target": {"kind": "Node", "name": "n"}});
    assert_eq!(server.post(&format!("{PODS}/p/binding"), binding("q")).await.code, 400);
    assert_eq!(server.post(&format!("{PODS}/p/binding"), binding("p")).await.code, 201);
}

#[tokio::test]
async fn a_pod_with_scheduling_gates_is_not_bound() {
    let server = Fixture::new().await;
    let mut gated = pod("p");
    gated["spec"]["schedulingGates"] = json!([{"name": "example.com/wait"}]);
    assert_eq!(server.post(PODS, gated).await.code, 201);
    let binding = json!({"metadata": {"name": "p"}, "target": {"kind": "Node", "name": "n"}});
    let refused = server.post(&format!("{PODS}/p/binding"), binding.clone()).await;
    let expect =
        "Operation cannot be fulfilled on pods/binding \"p\": pod p has non-empty .spec.schedulingGates";
    assert_eq!((refused.code, &refused.body["message"]), (409, &json!(expect)));
    let open = json!({"spec": {"schedulingGates": null}});
    assert_eq!(server.merge(&format!("{PODS}/p"), open).await.code, 200);
    assert_eq!(server.post(&format!("{PODS}/p/binding"), binding).await.code, 201);
}

#[tokio::test]
async fn the_resource_bindings_does_the_same_as_that_of_the_pod() {
    const BINDINGS: &str = "/api/v1/namespaces/default/bindings";
    let server = Fixture::new().await;
    server.post(PODS, pod("p")).await;
    let binding = |name: &str| json!({"metadata": {"name": name}, "target": {"kind": "Node", "name": "n"}});
    assert_eq!(server.get(BINDINGS).await.code, 405);
    assert_eq!(server.get(&format!("{BINDINGS}/p")).await.code, 404);
    assert_eq!(server.post("/api/v1/bindings", binding("p")).await.code, 404);
    let reviews = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews";
    assert_eq!(server.get(reviews).await.code, 405);
    assert_eq!(server.get(&format!("{reviews}/a")).await.code, 404);
    assert_eq!(server.post(BINDINGS, json!({"target": {"name": "n"}})).await.code, 400);
    assert_eq!(server.post(BINDINGS, json!({"metadata": {"name": "p"}, "target": {}})).await.code, 422);
    let missing = server.post(BINDINGS, binding("q")).await;
    assert_eq!((missing.code, &missing.body["details"]["kind"]), (404, &json!("pods")));
    let nowhere = server.post("/api/v1/namespaces/none/bindings", binding("p")).await;
    assert_eq!((nowhere.code, &nowhere.body["details"]["kind"]), (404, &json!("namespaces")));
    assert_eq!(server.post(&format!("{BINDINGS}?dryRun=All"), binding("p")).await.code, 201);
    assert_eq!(server.post(BINDINGS, binding("p")).await.code, 201);
    assert_eq!(server.get(&format!("{PODS}/p")).await.body["spec"]["nodeName"], "n");
    let again = server.post(BINDINGS, binding("p")).await;
    assert_eq!((again.code, &again.body["details"]["kind"]), (409, &json!("pods/binding")));
}

#[tokio::test]
async fn component_statuses_follow_from_the_process_and_from_leases() {
    const PATH: &str = "/api/v1/componentstatuses";
    let server = Fixture::new().await;
    let healthy = |status: &Value| status["conditions"][0]["status"].clone();
    assert_eq!(healthy(&server.get(&format!("{PATH}/scheduler")).await.body), "True");
    assert_eq!(healthy(&server.get(&format!("{PATH}/etcd-0")).await.body), "True");
    assert_eq!(healthy(&server.get(&format!("{PATH}/controller-manager")).await.body), "False");
    let now = jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%S%.6fZ").to_string();
    let lease = json!({"metadata": {"name": "kube-controller-manager"},
        "spec": {"holderIdentity": "a", "leaseDurationSeconds": 3600, "renewTime": now}});
    let leases = "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases";
    assert_eq!(server.post(leases, lease).await.code, 201);
    let list = server.get(PATH).await.body;
    let all: Vec<Value> = list["items"].as_array().unwrap().iter().map(healthy).collect();
    assert_eq!((&list["kind"], all), (&json!("ComponentStatusList"), vec![json!("True"); 3]));
    let one = server.get(&format!("{PATH}?fieldSelector=metadata.name%3Detcd-0")).await.body;
    assert_eq!(one["items"].as_array().map(Vec::len), Some(1));
    assert_eq!(server.get(&format!("{PATH}?watch=1")).await.code, 405);
    let none = server.get(&format!("{PATH}/none")).await;
    assert_eq!((none.code, &none.body["details"]["kind"]), (404, &json!("componentstatus")));
}

#[tokio::test]
async fn the_status_of_a_pod_is_validated() {
    let server = Fixture::new().await;
    server.post(PODS, pod("p")).await;
    let status =
        async |status: Value| server.merge(&format!("{PODS}/p/status"), json!({"status": status})).await;
    let first = status(json!({"podIP": "10.0.0.1"})).await;
    assert_eq!(first.body["status"]["podIPs"], json!([{"ip": "10.0.0.1"}]));
    assert_eq!(status(json!({"podIP": "x"})).await.code, 422);
    assert_eq!(status(json!({"qosClass": "Guaranteed"})).await.code, 422);
}

#[tokio::test]
async fn unknown_paths_below_built_in_groups_are_a_status() {
    let server = Fixture::new().await;
    for path in ["/api/v1/nope", "/apis/apps/v9", "/apis/apps/v1/nopes/a", "/api/v1/namespaces/default/nodes"]
    {
        let answer = server.get(path).await;
        assert_eq!((answer.code, &answer.body["reason"]), (404, &json!("NotFound")), "{path}");
    }
    for path in ["/nope", "/apis/nope.example/v1/a", "/api/v2/pods", "/apis/nope"] {
        let answer = server.get(path).await;
        assert_eq!((answer.code, answer.body.as_str()), (404, Some("404 page not found\n")), "{path}");
    }
}

#[tokio::test]
async fn an_update_without_a_version_is_for_the_kinds_of_upstream() {
    let server = Fixture::new().await;
    let account = "/api/v1/namespaces/default/serviceaccounts/default";
    assert_eq!(server.put(account, json!({"metadata": {"name": "default"}})).await.code, 200);
    let hooks = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations";
    server.post(hooks, json!({"metadata": {"name": "h"}})).await;
    assert_eq!(server.put(&format!("{hooks}/h"), json!({"metadata": {"name": "h"}})).await.code, 422);
}

#[tokio::test]
async fn a_pod_can_be_replaced_by_its_original_manifest() {
    let server = Fixture::new().await;
    let whole = || {
        let mut pod = pod("p");
        pod["spec"]["serviceAccountName"] = "default".into();
        pod["spec"]["automountServiceAccountToken"] = false.into();
        pod["spec"]["tolerations"] = json!([{"operator": "Exists"}]);
        pod
    };
    assert_eq!(server.post(PODS, whole()).await.code, 201);
    let replaced = server.put(&format!("{PODS}/p"), whole()).await;
    assert_eq!((replaced.code, &replaced.body["spec"]["priority"]), (200, &json!(0)), "{}", replaced.body);
}

#[tokio::test]
async fn an_apply_that_creates_needs_a_name() {
    let server = Fixture::new().await;
    let config = |name: Value| json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}});
    let path = format!("{MAPS}/m?fieldManager=x");
    let apply = async |name: Value| {
        let body = Some(config(name));
        server.call("PATCH", &path, "application/apply-patch+yaml", body).await
    };
    let refused = apply(Value::Null).await;
    let text = "the name of the object (m based on URL) was undeterminable: name must be provided";
    assert_eq!((refused.code, &refused.body["message"]), (400, &json!(text)));
    assert_eq!(apply("m".into()).await.code, 201);
    assert_eq!(apply(Value::Null).await.code, 200);
}

#[tokio::test]
async fn a_new_object_is_validated_before_its_revision() {
    let server = Fixture::new().await;
    let map = |name: &str| json!({"metadata": {"name": name, "resourceVersion": "1"}});
    assert_eq!(server.post(MAPS, map("A b")).await.code, 422);
    let refused = server.post(MAPS, map("m")).await;
    let text = "resourceVersion should not be set on objects to be created";
    assert_eq!((refused.code, &refused.body["message"]), (400, &json!(text)));
    assert_eq!(server.post(MAPS, json!({"metadata": {"name": "m", "resourceVersion": ""}})).await.code, 201);
}

#[tokio::test]
async fn errors_of_events_have_the_core_group() {
    let server = Fixture::new().await;
    let path = "/apis/events.k8s.io/v1/namespaces/default/events";
    let refused = server.post(path, json!({"metadata": {"name": "e"}})).await;
    assert_eq!((refused.code, &refused.body["details"]["group"]), (422, &Value::Null), "{}", refused.body);
    assert!(
        refused.body["message"].as_str().unwrap().starts_with("Event \"e\" is invalid"),
        "{}",
        refused.body
    );
}

#[tokio::test]
async fn an_update_creates_objects_of_some_kinds() {
    let server = Fixture::new().await;
    let leases = "/apis/coordination.k8s.io/v1/namespaces/default/leases";
    let lease = |name: &str, more: Value| {
        let mut lease = json!({"metadata": {"name": name}, "spec": {"holderIdentity": "h"}});
        lease["metadata"].as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        lease
    };
    let made = server.put(&format!("{leases}/a"), lease("a", json!({"resourceVersion": "5"}))).await;
    assert_eq!((made.code, &made.body["spec"]["holderIdentity"]), (201, &json!("h")), "{}", made.body);
    assert_eq!(made.body["metadata"]["managedFields"][0]["operation"], "Update");
    assert_eq!(server.put(&format!("{leases}/a"), made.body).await.code, 200);
    // The uid is from a lease that no longer exists.
    let deleted = server.put(&format!("{leases}/b"), lease("b", json!({"uid": "u"}))).await;
    assert_eq!((deleted.code, &deleted.body["reason"]), (409, &json!("Conflict")), "{}", deleted.body);
    let dry = server.put(&format!("{leases}/b?dryRun=All"), lease("b", json!({}))).await;
    assert_eq!((dry.code, server.get(&format!("{leases}/b")).await.code), (201, 404));
    let map = server.put(&format!("{MAPS}/none"), json!({"metadata": {"name": "none"}})).await;
    assert_eq!(map.code, 404, "{}", map.body);
}

#[tokio::test]
async fn an_update_that_creates_needs_the_permission_to_create() {
    let server = Fixture::new().await;
    let group = "rbac.authorization.k8s.io";
    let roles = format!("/apis/{group}/v1/namespaces/default");
    let role = |verbs: Value| {
        let rules = json!([{"apiGroups": [""], "resources": ["services"], "verbs": verbs}]);
        json!({"metadata": {"name": "r"}, "rules": rules})
    };
    assert_eq!(server.post(&format!("{roles}/roles"), role(json!(["update"]))).await.code, 201);
    let binding = json!({"metadata": {"name": "b"}, "subjects": [{"kind": "User", "name": "u", "apiGroup": group}],
        "roleRef": {"apiGroup": group, "kind": "Role", "name": "r"}});
    assert_eq!(server.post(&format!("{roles}/rolebindings"), binding).await.code, 201);
    let service = json!({"metadata": {"name": "s"}, "spec": {"ports": [{"port": 80}]}}).to_string();
    let put = async || {
        let request = Request::put(format!("{SERVICES}/s")).header("content-type", "application/json");
        let request = request.body(Full::from(service.clone())).unwrap();
        server.send(User::new("u", &["system:authenticated"]), request).await
    };
    let refused = put().await;
    assert_eq!((refused.code, &refused.body["reason"]), (403, &json!("Forbidden")), "{}", refused.body);
    assert_eq!(server.put(&format!("{roles}/roles/r"), role(json!(["update", "create"]))).await.code, 200);
    let made = put().await;
    assert_eq!(made.code, 201, "{}", made.body);
    assert!(made.body["spec"]["clusterIP"].is_string(), "{}", made.body);
}

#[tokio::test]
async fn managers_own_fields_in_all_versions_of_a_kind() {
    let server = Fixture::new().await;
    let apply = async |version: &str, manager: &str, least: i64| {
        let path = format!(
            "/apis/autoscaling/{version}/namespaces/default/horizontalpodautoscalers/h?fieldManager={manager}"
        );
        let target = json!({"apiVersion": "apps/v1", "kind": "Deployment", "name": "d"});
        let config = json!({"apiVersion": format!("autoscaling/{version}"), "kind": "HorizontalPodAutoscaler",
            "metadata": {"name": "h"}, "spec": {"minReplicas": least, "maxReplicas": 5, "scaleTargetRef": target}});
        server.call("PATCH", &path, "application/apply-patch+yaml", Some(config)).await
    };
    let made = apply("v2", "a", 2).await;
    assert_eq!(made.code, 201, "{}", made.body);
    let refused = apply("v1", "b", 3).await;
    assert_eq!(refused.code, 409, "{}", refused.body);
    assert_eq!(refused.body["details"]["causes"][0]["field"], ".spec.minReplicas");
    let shared = apply("v1", "b", 2).await;
    assert_eq!(shared.code, 200, "{}", shared.body);
    let entries = shared.body["metadata"]["managedFields"].as_array().unwrap();
    for (manager, version) in [("a", "autoscaling/v2"), ("b", "autoscaling/v1")] {
        let entry = entries.iter().find(|entry| entry["manager"] == manager).unwrap();
        assert_eq!(entry["apiVersion"], version, "{}", shared.body);
    }
}

#[tokio::test]
async fn a_name_in_use_of_an_object_with_a_prefix_may_be_tried_again() {
    let server = Fixture::new().await;
    let map = || json!({"metadata": {"name": "m", "generateName": "m-"}});
    assert_eq!(server.post(MAPS, map()).await.code, 201);
    for path in [MAPS.to_owned(), format!("{MAPS}?dryRun=All")] {
        let refused = server.post(&path, map()).await;
        assert_eq!((refused.code, &refused.body["reason"]), (409, &json!("AlreadyExists")), "{path}");
        let text = "configmaps \"m\" already exists, the server was not able to generate a unique name for the object";
        assert_eq!(refused.body["message"], text, "{path}");
        assert_eq!(refused.body["details"]["retryAfterSeconds"], 1, "{path}");
    }
}

#[tokio::test]
async fn a_writer_of_a_status_owns_no_labels_of_the_deployment() {
    let server = Fixture::new().await;
    let deployments = "/apis/apps/v1/namespaces/default/deployments";
    let labels = json!({"a": "b"});
    let template =
        json!({"metadata": {"labels": labels}, "spec": {"containers": [{"name": "c", "image": "i"}]}});
    let spec = json!({"selector": {"matchLabels": labels}, "template": template});
    let made = server.post(deployments, json!({"metadata": {"name": "d"}, "spec": spec})).await;
    assert_eq!(made.code, 201, "{}", made.body);
    let config = json!({"apiVersion": "apps/v1", "kind": "Deployment",
        "metadata": {"name": "d", "labels": {"x": "y"}}, "status": {"observedGeneration": 1}});
    let path = format!("{deployments}/d/status?fieldManager=m");
    let applied = server.call("PATCH", &path, "application/apply-patch+yaml", Some(config)).await;
    assert_eq!(applied.code, 200, "{}", applied.body);
    assert!(applied.body["metadata"]["labels"].is_null(), "{}", applied.body);
    let entries = applied.body["metadata"]["managedFields"].as_array().unwrap();
    let entry = entries.iter().find(|entry| entry["manager"] == "m").unwrap();
    assert_eq!(entry["fieldsV1"], json!({"f:status": {"f:observedGeneration": {}}}));
}

//! Parameters and bodies of requests, as upstream reads them. scripts/differential compares the messages.

use super::*;

const MAPS: &str = "/api/v1/namespaces/default/configmaps";
const DEPLOYMENTS: &str = "/apis/apps/v1/namespaces/default/deployments";

impl Fixture {
    async fn apply(&self, path: &str, body: Value) -> Answer {
        self.call("PATCH", path, "application/apply-patch+yaml", Some(body)).await
    }

    async fn json_patch(&self, path: &str, body: Value) -> Answer {
        self.call("PATCH", path, "application/json-patch+json", Some(body)).await
    }

    async fn raw(&self, method: &str, path: &str, body: &str) -> Answer {
        let request = Request::builder().method(method).uri(path).header("content-type", "application/json");
        self.send(admin(), request.body(Full::new(body.to_owned().into())).unwrap()).await
    }
}

fn deployment(name: &str) -> Value {
    json!({"metadata": {"name": name}, "spec": {"replicas": 2, "selector": {"matchLabels": {"a": "b"}},
        "strategy": {"type": "Recreate"}, "template": {"metadata": {"labels": {"a": "b"}},
        "spec": {"containers": [{"name": "c", "image": "x"}]}}}})
}

fn message(answer: &Answer) -> &str {
    answer.body["message"].as_str().unwrap_or_default()
}

#[tokio::test]
async fn reads_check_the_revision_and_the_place_in_a_list() {
    let server = Fixture::new().await;
    let made = server.post(MAPS, config_map("a", json!({}))).await.body;
    server.post(MAPS, config_map("b", json!({}))).await;
    let since = made["metadata"]["resourceVersion"].as_str().unwrap();
    for (query, code) in [
        ("/a?resourceVersion=0", 200),
        (&format!("/a?resourceVersion={since}"), 200),
        ("/a?resourceVersion=99999999", 504),
        ("/a?resourceVersion=x", 400),
        ("?continue=!!!", 400),
        ("?continue=e30", 400),
        ("?sendInitialEvents=true", 422),
        ("?watch=1&sendInitialEvents=false", 422),
        ("?labelSelector=n%3E4", 200),
    ] {
        assert_eq!(server.get(&format!("{MAPS}{query}")).await.code, code, "{query}");
    }
    let page = server.get(&format!("{MAPS}?limit=1")).await;
    let next = page.body["metadata"]["continue"].as_str().unwrap();
    assert_eq!(server.get(&format!("{MAPS}?continue={next}&resourceVersion=0")).await.code, 200);
    let both = server.get(&format!("{MAPS}?continue={next}&resourceVersion={since}")).await;
    assert_eq!(
        (both.code, message(&both)),
        (400, "specifying resource version is not allowed when using continue")
    );
    // A request for one name is a get, even with `watch=1`.
    assert_eq!(server.get(&format!("{MAPS}/a?watch=1")).await.body["kind"], "ConfigMap");
}

#[tokio::test]
async fn a_collection_is_deleted_as_of_a_revision() {
    let server = Fixture::new().await;
    let made = server.post(MAPS, config_map("a", json!({}))).await.body;
    server.post(MAPS, config_map("b", json!({}))).await;
    let since = made["metadata"]["resourceVersion"].as_str().unwrap();
    let wrong = server.call("DELETE", &format!("{MAPS}?resourceVersionMatch=Exact"), "", None).await;
    assert_eq!(wrong.code, 422, "{}", wrong.body);
    let path = format!("{MAPS}?resourceVersion={since}&resourceVersionMatch=Exact");
    let gone = server.call("DELETE", &path, "", None).await;
    assert_eq!(gone.body["items"].as_array().unwrap().len(), 1, "{}", gone.body);
    assert_eq!(server.get(&format!("{MAPS}/b")).await.code, 200);
}

#[tokio::test]
async fn options_of_a_deletion_are_checked() {
    let server = Fixture::new().await;
    server.post(MAPS, config_map("a", json!({}))).await;
    let path = format!("{MAPS}/a");
    for (options, code) in [
        (json!({"dryRun": ["x"]}), 422),
        (json!({"preconditions": {"uid": "x"}}), 409),
        (json!({"preconditions": {"resourceVersion": ""}}), 409),
    ] {
        let refused = server.delete(&path, options.clone()).await;
        assert_eq!(refused.code, code, "{options}: {}", refused.body);
        assert!(code == 422 || refused.body["details"]["kind"] == "ConfigMap", "{}", refused.body);
    }
    for query in ["dryRun=", "dryRun=All&dryRun=x"] {
        assert_eq!(server.call("DELETE", &format!("{path}?{query}"), "", None).await.code, 422, "{query}");
    }
    assert_eq!(server.raw("DELETE", &path, "null").await.code, 200);
    server.post(PODS, pod("p")).await;
    let gone = server.delete(&format!("{PODS}/p"), json!({"gracePeriodSeconds": 0})).await.body;
    assert_eq!(
        (&gone["metadata"]["deletionGracePeriodSeconds"], &gone["metadata"]["generation"]),
        (&0.into(), &2.into())
    );
    let namespaces = "/api/v1/namespaces";
    server.post(namespaces, json!({"metadata": {"name": "n"}})).await;
    let ending = server.delete(&format!("{namespaces}/n"), json!({})).await.body["metadata"].clone();
    assert!(
        ending["deletionTimestamp"].is_string() && ending["deletionGracePeriodSeconds"].is_null(),
        "{ending}"
    );
}

#[tokio::test]
async fn the_body_of_a_deletion_replaces_its_query() {
    let server = Fixture::new().await;
    server.post(MAPS, config_map("a", json!({}))).await;
    let path = format!("{MAPS}/a");
    assert_eq!(server.call("DELETE", &format!("{path}?dryRun=All"), "", None).await.code, 200);
    assert_eq!(server.delete(&path, json!({"dryRun": ["All"]})).await.code, 200);
    assert_eq!(server.get(&path).await.code, 200, "both were dry runs");
    let deleted = server.delete(&format!("{path}?dryRun=All&gracePeriodSeconds=x"), json!({})).await;
    assert_eq!(deleted.code, 200, "{}", deleted.body);
    assert_eq!(server.get(&path).await.code, 404);
}

#[tokio::test]
async fn the_query_of_a_deletion_has_preconditions() {
    let server = Fixture::new().await;
    let made = server.post(MAPS, config_map("a", json!({}))).await.body;
    let of = |key: &str| made["metadata"][key].as_str().unwrap().to_owned();
    let delete = async |query: &str| server.call("DELETE", &format!("{MAPS}/a?{query}"), "", None).await.code;
    assert_eq!((delete("uid=x").await, delete("resourceVersion=1").await), (409, 409));
    assert_eq!(server.get(&format!("{MAPS}/a")).await.code, 200);
    let query = format!("uid={}&resourceVersion={}", of("uid"), of("resourceVersion"));
    assert_eq!(delete(&query).await, 200);
}

#[tokio::test]
async fn bodies_are_read_as_upstream_does() {
    let server = Fixture::new().await;
    let unnamed = server.raw("POST", MAPS, "null").await;
    assert_eq!(
        (unnamed.code, &unnamed.body["details"]["causes"][0]["field"]),
        (422, &"metadata.name".into())
    );
    for (body, end) in [("{", "({)"), ("", "(<empty>)")] {
        let broken = server.raw("POST", MAPS, body).await;
        let expect = format!(
            "the object provided is unrecognized (must be of type ConfigMap): couldn't get version/kind; json parse \
             error: unexpected end of JSON input {end}"
        );
        assert_eq!((broken.code, message(&broken)), (400, expect.as_str()));
    }
}

#[tokio::test]
async fn patches_are_checked_as_upstream_does() {
    let server = Fixture::new().await;
    server.post(MAPS, config_map("a", json!({}))).await;
    let path = format!("{MAPS}/a");
    assert_eq!(server.merge(&format!("{path}?dryRun=x"), json!({})).await.code, 422);
    let unnamed = server.merge(&path, json!({"metadata": {"name": null}})).await;
    let expect = "the name of the object (a based on URL) was undeterminable: name must be provided";
    assert_eq!((unnamed.code, message(&unnamed)), (400, expect));
    let broken = server.call("PATCH", &path, "application/merge-patch+json", None).await;
    assert_eq!(message(&broken), "error decoding patch: unexpected end of JSON input");
    let strict = server.merge(&format!("{path}?fieldValidation=Strict"), json!({"x": 1})).await;
    assert_eq!((strict.code, &strict.body["details"]["causes"][0]["field"]), (422, &"patch".into()));
    let labels = json!([{"op": "add", "path": "/metadata/labels", "value": {"a": "b"}, "extra": 1}]);
    let warned = server.json_patch(&path, labels.clone()).await;
    let expect = r#"299 - "json patch unknown field \"[0].extra\"""#;
    assert_eq!((warned.code, warned.headers["warning"].to_str().unwrap()), (200, expect));
    assert_eq!(server.json_patch(&format!("{path}?fieldValidation=Strict"), labels).await.code, 422);
}

#[tokio::test]
async fn a_configuration_has_the_kind_and_the_fields_of_its_object() {
    let server = Fixture::new().await;
    server.post(MAPS, config_map("a", json!({}))).await;
    let path = format!("{MAPS}/a?fieldManager=m");
    let other = server.apply(&path, json!({"apiVersion": "v1", "kind": "Secret"})).await;
    assert_eq!((other.code, message(&other)), (400, "invalid object type: /v1, Kind=Secret"));
    let unknown = server.apply(&path, json!({"apiVersion": "v1", "kind": "ConfigMap", "x": 1})).await;
    let expect =
        "failed to create typed patch object (/; /v1, Kind=ConfigMap): .x: field not declared in schema";
    assert_eq!((unknown.code, message(&unknown)), (500, expect));
}

#[tokio::test]
async fn a_scale_is_shown_as_a_table() {
    let server = Fixture::new().await;
    server.post(DEPLOYMENTS, deployment("d")).await;
    let read = async |form: &str| {
        let accept = format!("application/json;as={form};v=v1;g=meta.k8s.io");
        let request = Request::get(format!("{DEPLOYMENTS}/d/scale")).header("accept", accept);
        server.send(admin(), request.body(Full::default()).unwrap()).await.body
    };
    let table = read("Table").await;
    assert_eq!(table["columnDefinitions"][1]["name"], "Desired");
    assert_eq!(table["rows"][0]["cells"].as_array().unwrap()[..3], [json!("d"), json!(2), json!(0)]);
    assert_eq!(read("PartialObjectMetadata").await["kind"], "PartialObjectMetadata");
}

#[tokio::test]
async fn a_scale_is_applied() {
    let server = Fixture::new().await;
    let made = server.post(DEPLOYMENTS, deployment("d")).await;
    assert_eq!(made.code, 201, "{}", made.body);
    let scale = |replicas: i64| json!({"apiVersion": "autoscaling/v1", "kind": "Scale", "spec": {"replicas": replicas}});
    let path = |manager: &str| format!("{DEPLOYMENTS}/d/scale?fieldManager={manager}");
    let conflict = server.apply(&path("a"), scale(3)).await;
    assert_eq!(conflict.code, 409, "{}", conflict.body);
    let applied = server.apply(&format!("{}&force=true", path("a")), scale(3)).await;
    assert_eq!((applied.code, &applied.body["spec"]["replicas"]), (200, &3.into()), "{}", applied.body);
    let owners = server.get(&format!("{DEPLOYMENTS}/d")).await.body["metadata"]["managedFields"].clone();
    let owner = &owners[0];
    assert_eq!(
        (&owner["manager"], &owner["subresource"], &owner["operation"]),
        (&"a".into(), &"scale".into(), &"Apply".into())
    );
    assert_eq!(owner["fieldsV1"], json!({"f:spec": {"f:replicas": {}}}));
    assert!(owner["time"].is_null(), "as upstream, a scale has no time: {owner}");
    assert!(owners[1]["time"].is_string(), "the time of the creation is kept: {owners}");
    assert_eq!(server.apply(&path("b"), scale(4)).await.code, 409);
    let mut wrong = scale(3);
    wrong["metadata"] = json!({"name": "e"});
    assert_eq!(server.apply(&path("a"), wrong).await.code, 400);
    let negative = server.apply(&path("a"), scale(-1)).await;
    assert_eq!(
        (negative.code, &negative.body["details"]["kind"]),
        (422, &"Scale".into()),
        "{}",
        negative.body
    );
    assert_eq!(server.apply(&format!("{DEPLOYMENTS}/d/scale"), scale(3)).await.code, 422);
    let stopped = server.apply(&path("a"), scale(0)).await;
    assert_eq!((stopped.code, &stopped.body["spec"]["replicas"]), (200, &0.into()), "{}", stopped.body);
    assert_eq!(server.apply(&path("b"), scale(1)).await.code, 409);
    assert_eq!(server.apply(&path("a"), scale(2)).await.body["spec"]["replicas"], 2);
    // If the only owner of the replicas gives them up, they become 0, as upstream.
    let empty = json!({"apiVersion": "autoscaling/v1", "kind": "Scale"});
    assert_eq!(server.apply(&path("a"), empty).await.body["spec"]["replicas"], 0);
}

#[tokio::test]
async fn a_written_scale_belongs_to_its_path() {
    let server = Fixture::new().await;
    server.post(DEPLOYMENTS, deployment("d")).await;
    let path = format!("{DEPLOYMENTS}/d/scale");
    for (metadata, code) in [
        (json!({}), 400),
        (json!({"name": "e"}), 400),
        (json!({"name": "d", "namespace": "other"}), 400),
        (json!({"name": "d", "uid": "x"}), 409),
        (json!({"name": "d"}), 200),
    ] {
        let answer = server.put(&path, json!({"metadata": metadata, "spec": {"replicas": 3}})).await;
        assert_eq!(answer.code, code, "{metadata}: {}", answer.body);
    }
    let warned = server.merge(&path, json!({"x": 1})).await;
    assert_eq!(warned.headers["warning"].to_str().unwrap(), r#"299 - "unknown field \"x\"""#);
}

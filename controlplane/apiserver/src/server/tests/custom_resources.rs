//! Definitions, and the resources that they define.

use std::convert::Infallible;
use std::sync::atomic::{AtomicBool, Ordering};

use coracle_store::{Backup, Entry, Expect, Health, MemberSize, Page, Range, Tier, Watch, Write};
use futures::future::BoxFuture;
use http_body::Frame;
use http_body_util::StreamBody;

use super::*;
use crate::cache::{encode, key_of};

const DEFINITIONS: &str = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";
const FOOS: &str = "/apis/example.com/v1/namespaces/default/foos";

pub(super) fn definition(plural: &str, kind: &str) -> Value {
    json!({"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": format!("{plural}.example.com")},
        "spec": {"group": "example.com", "scope": "Namespaced", "names": {"plural": plural, "kind": kind, "shortNames": ["x"]},
            "versions": [{"name": "v1", "served": true, "storage": true,
                "subresources": {"status": {}, "scale": {"specReplicasPath": ".spec.replicas", "statusReplicasPath": ".status.replicas"}},
                "additionalPrinterColumns": [{"name": "Size", "type": "string", "jsonPath": ".spec.size"}],
                "selectableFields": [{"jsonPath": ".spec.size"}],
                "schema": {"openAPIV3Schema": {"type": "object", "properties": {
                    "spec": {"type": "object", "properties": {
                        "size": {"type": "string", "default": "S", "enum": ["S", "M"]},
                        "replicas": {"type": "integer", "default": 1},
                        "ports": {"type": "array", "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["port"],
                            "items": {"type": "object", "required": ["port"], "properties": {
                                "port": {"type": "integer"}, "name": {"type": "string"}}}}},
                        "x-kubernetes-validations": [{"rule": "self.replicas <= 5", "message": "too many"}]},
                    "status": {"type": "object", "properties": {"replicas": {"type": "integer"}}}}}}}]}})
}

async fn until(server: &Fixture, path: &str, holds: impl Fn(&Value) -> bool) -> Value {
    eventually_async(path, 10, async || Some(server.get(path).await.body).filter(|body| holds(body))).await
}

fn is_true(definition: &Value, condition: &str) -> bool {
    let list = definition["status"]["conditions"].as_array().cloned().unwrap_or_default();
    list.iter().any(|entry| entry["type"] == condition && entry["status"] == "True")
}

pub(super) async fn established(server: &Fixture, body: Value) -> String {
    let created = server.post(DEFINITIONS, body).await;
    assert_eq!(created.code, 201, "{}", created.body);
    let path = format!("{DEFINITIONS}/{}", created.body["metadata"]["name"].as_str().unwrap());
    until(server, &path, |definition| is_true(definition, "Established")).await;
    path
}

#[tokio::test]
async fn rules_in_cel_are_measured() {
    let server = Fixture::new().await;
    established(&server, definition("foos", "Foo")).await;
    let foo = json!({"apiVersion": "example.com/v1", "kind": "Foo", "metadata": {"name": "a"}, "spec": {}});
    assert_eq!(server.post(FOOS, foo).await.code, 201);
    let metrics = server.get("/metrics").await.body;
    // The counts belong to the process: other tests may add to them.
    for work in ["compilation", "evaluation"] {
        let (text, count) =
            (metrics.as_str().unwrap(), format!("\napiserver_cel_{work}_duration_seconds_count "));
        assert!(text.contains(&count) && !text.contains(&format!("{count}0\n")), "{count}");
    }
}

#[tokio::test]
async fn a_definition_is_served_until_it_is_deleted() {
    let server = Fixture::new().await;
    let path = established(&server, definition("foos", "Foo")).await;
    let stored = server.get(&path).await.body;
    assert_eq!(stored["status"]["storedVersions"], json!(["v1"]));
    assert_eq!(stored["status"]["acceptedNames"]["listKind"], "FooList");

    let foo =
        json!({"apiVersion": "example.com/v1", "kind": "Foo", "metadata": {"name": "a"}, "spec": {"odd": 1}});
    let created = server.post(FOOS, foo.clone()).await;
    assert_eq!(
        (created.code, &created.body["spec"]),
        (201, &json!({"size": "S", "replicas": 1})),
        "{}",
        created.body
    );
    assert_eq!(created.body["metadata"]["generation"], 1);
    let strict = server.post(&format!("{FOOS}?fieldValidation=Strict"), foo).await;
    assert_eq!(strict.code, 400);
    assert!(
        strict.body["message"].as_str().unwrap().contains("unknown field \"spec.odd\""),
        "{}",
        strict.body
    );

    let untyped = server.post(FOOS, json!({"apiVersion": "example.com/v1", "metadata": {"name": "b"}})).await;
    let why = "the object provided is unrecognized (must be of type Foo): Object 'Kind' is missing";
    assert_eq!((untyped.code, &untyped.body["message"]), (400, &json!(why)));
    let bad = server.merge(&format!("{FOOS}/a"), json!({"spec": {"size": "L"}})).await;
    assert_eq!(bad.code, 422);
    let message = bad.body["message"].as_str().unwrap();
    assert!(
        message.contains("spec.size: Unsupported value: \"L\": supported values: \"S\", \"M\""),
        "{message}"
    );
    let bad = server.merge(&format!("{FOOS}/a"), json!({"spec": {"replicas": 9}})).await;
    assert_eq!(bad.body["message"], "Foo.example.com \"a\" is invalid: spec: Invalid value: too many");

    let scaled = server.merge(&format!("{FOOS}/a/scale"), json!({"spec": {"replicas": 3}})).await;
    assert_eq!((scaled.code, &scaled.body["spec"]["replicas"]), (200, &json!(3)), "{}", scaled.body);
    let status = server
        .merge(&format!("{FOOS}/a/status"), json!({"status": {"replicas": 3}, "spec": {"size": "M"}}))
        .await;
    assert_eq!((&status.body["status"]["replicas"], &status.body["spec"]["size"]), (&json!(3), &json!("S")));
    let whole = server.merge(&format!("{FOOS}/a"), json!({"spec": {"replicas": 3.0}})).await;
    assert_eq!(whole.body["spec"]["replicas"], 3, "{}", whole.body);
    let listed = server.get(FOOS).await.body["items"][0].clone();
    assert_eq!((&listed["apiVersion"], &listed["kind"]), (&json!("example.com/v1"), &json!("Foo")));
    let selected = server.get(&format!("{FOOS}?fieldSelector=spec.size%3DM")).await.body;
    assert_eq!(selected["items"], json!([]));

    let is_counted = |text: &Value| text.as_str().unwrap().contains("resource=\"foos\"");
    assert!(is_counted(&server.get("/metrics").await.body));
    let deleted = server.call("DELETE", &path, "application/json", None).await;
    assert_eq!(deleted.code, 200);
    until(&server, &path, |body| body["code"] == 404).await;
    // Metrics of a custom resource are removed with its definition.
    until(&server, "/metrics", |text| !is_counted(text)).await;
    until(&server, "/apis/example.com/v1", |body| {
        body.is_null() || body["code"] == 404 || body["resources"].is_null()
    })
    .await;
    established(&server, definition("foos", "Foo")).await;
    assert_eq!(server.get(FOOS).await.body["items"], json!([]));
}

#[tokio::test]
async fn nothing_is_created_while_the_definition_is_being_deleted() {
    let server = Fixture::new().await;
    let path = established(&server, definition("foos", "Foo")).await;
    let foo = |name: &str| json!({"apiVersion": "example.com/v1", "kind": "Foo", "metadata": {"name": name}});
    let mut kept = foo("a");
    kept["metadata"]["finalizers"] = json!(["example.com/keep"]);
    let made = server.post(FOOS, kept).await;
    assert_eq!(made.code, 201, "{}", made.body);
    assert_eq!(server.call("DELETE", &path, "application/json", None).await.code, 200);
    let verbs = |body: &Value| body["resources"][0]["verbs"].clone();
    let read_only = json!(["delete", "deletecollection", "get", "list", "watch"]);
    let sorted = |verbs: Value| {
        let mut verbs = verbs.as_array().cloned().unwrap_or_default();
        verbs.sort_by_key(ToString::to_string);
        Value::Array(verbs)
    };
    until(&server, "/apis/example.com/v1", |body| sorted(verbs(body)) == read_only).await;
    let apply = "application/apply-patch+yaml";
    for refused in [
        server.post(FOOS, foo("b")).await,
        server.call("PATCH", &format!("{FOOS}/b?fieldManager=m"), apply, Some(foo("b"))).await,
    ] {
        let message = "foos.example.com \"b\" is forbidden: create not allowed while custom resource definition \
            is terminating";
        assert_eq!((refused.code, &refused.body["message"]), (403, &json!(message)));
    }
    // The remaining object can be changed, which ends the deletion.
    let released = server.merge(&format!("{FOOS}/a"), json!({"metadata": {"finalizers": null}})).await;
    assert_eq!(released.code, 200, "{}", released.body);
    until(&server, &path, |body| body["code"] == 404).await;
}

#[tokio::test]
async fn a_request_that_began_before_the_deletion_of_a_definition_creates_nothing() {
    let server = Fixture::new().await;
    let path = established(&server, definition("foos", "Foo")).await;
    let foo = json!({"apiVersion": "example.com/v1", "kind": "Foo", "metadata": {"name": "a"}});
    let (send, sent) = tokio::sync::oneshot::channel::<()>();
    let body = futures::stream::once(async move {
        let _ = sent.await;
        Ok::<_, Infallible>(Frame::data(Bytes::from(foo.to_string())))
    });
    let request = Request::post(FOOS).header("content-type", "application/json");
    let request = request.body(StreamBody::new(body)).unwrap();
    let mut late = Box::pin(server.api.handle(request, Some(User::new("ann", &["system:masters"]))));
    assert!(futures::poll!(late.as_mut()).is_pending());
    assert_eq!(server.call("DELETE", &path, "application/json", None).await.code, 200);
    until(&server, &path, |body| body["code"] == 404).await;
    send.send(()).unwrap();
    assert_eq!(late.await.status(), 403);
    established(&server, definition("foos", "Foo")).await;
    assert_eq!(server.get(FOOS).await.body["items"], json!([]));
}

#[tokio::test]
async fn an_object_that_appears_during_the_deletion_of_a_definition_is_deleted() {
    let server = Fixture::new().await;
    let path = established(&server, definition("foos", "Foo")).await;
    let foo = |metadata: Value| json!({"apiVersion": "example.com/v1", "kind": "Foo", "metadata": metadata});
    let kept = foo(json!({"name": "a", "finalizers": ["example.com/keep"]}));
    assert_eq!(server.post(FOOS, kept).await.code, 201);
    assert_eq!(server.call("DELETE", &path, "application/json", None).await.code, 200);
    let is_deleted = |body: &Value| !body["metadata"]["deletionTimestamp"].is_null();
    until(&server, &format!("{FOOS}/a"), is_deleted).await;
    // Another server has not received the deletion of the definition yet.
    let state = &server.api.state;
    let kind = state.registry.load().find_stored("example.com", "foos").cloned().unwrap();
    let late = foo(json!({"name": "b", "namespace": "default", "uid": "late"}));
    let (key, value) = (key_of(&kind, "default", "b").into(), Some(encode(&kind, &late)));
    let write = Write { key, expect: Expect::Absent, value, tier: Tier::Durable, guard: None };
    state.store.write(write).await.unwrap();
    let released = server.merge(&format!("{FOOS}/a"), json!({"metadata": {"finalizers": null}})).await;
    assert_eq!(released.code, 200, "{}", released.body);
    until(&server, &path, |body| body["code"] == 404).await;
}

#[tokio::test]
async fn documents_have_the_subresources_and_the_lists_of_a_custom_resource() {
    let server = Fixture::new().await;
    established(&server, definition("foos", "Foo")).await;
    let known = |root: &Value| !root["paths"]["apis/example.com/v1"].is_null();
    until(&server, "/openapi/v3", known).await;
    let document = server.get("/openapi/v3/apis/example.com/v1").await.body;
    assert_eq!(document["info"]["title"], "Kubernetes CRD Swagger");
    let (paths, schemas) = (&document["paths"], &document["components"]["schemas"]);
    let base = "/apis/example.com/v1/namespaces/{namespace}/foos";
    let own = json!({"group": "example.com", "kind": "Foo", "version": "v1"});
    for (sub, schema) in [("status", "com.example.v1.Foo"), ("scale", "io.k8s.api.autoscaling.v1.Scale")] {
        let item = &paths[&format!("{base}/{{name}}/{sub}")];
        for method in ["get", "put", "patch"] {
            let found = &item[method]["responses"]["200"]["content"]["application/json"]["schema"]["$ref"];
            assert_eq!(*found, format!("#/components/schemas/{schema}"), "{sub} {method}");
            assert_eq!(item[method]["x-kubernetes-group-version-kind"], own, "{sub} {method}");
        }
        assert!(schemas.get(schema).is_some(), "{schema}");
        let bodies = item["patch"]["requestBody"]["content"].as_object().unwrap();
        assert!(!bodies.contains_key("application/strategic-merge-patch+json"), "{sub}");
    }
    let list = "#/components/schemas/com.example.v1.FooList";
    for path in ["/apis/example.com/v1/foos", base] {
        let found = &paths[path]["get"]["responses"]["200"]["content"]["application/json"]["schema"]["$ref"];
        assert_eq!(found, list, "{path}");
    }
    let object = &paths[&format!("{base}/{{name}}")];
    assert_eq!(object["get"]["parameters"][0]["name"], "resourceVersion");
    assert_eq!(object["get"]["tags"], json!(["exampleCom_v1"]));
    let bodies = object["put"]["requestBody"]["content"].as_object().unwrap();
    assert!(bodies.keys().eq(["application/json", "application/yaml"]), "{bodies:?}");
    assert!(paths[base]["delete"].get("requestBody").is_none());
    assert!(paths.get("/apis/example.com/v1/watch/foos").is_none());
    let list = &schemas["com.example.v1.FooList"];
    assert_eq!(list["properties"]["items"]["items"]["$ref"], "#/components/schemas/com.example.v1.Foo");
    assert_eq!(list["x-kubernetes-group-version-kind"][0]["kind"], "FooList");
    assert_eq!(list["x-kubernetes-selectable-fields"], json!([{"fieldPath": "spec.size"}]));
    assert!(list["properties"]["kind"]["description"].as_str().unwrap().starts_with("Kind is a string"));

    let old = server.get("/openapi/v2").await.body;
    let list = &old["definitions"]["com.example.v1.FooList"]["properties"];
    assert_eq!(list["items"]["items"]["$ref"], "#/definitions/com.example.v1.Foo");
    assert_eq!(list["metadata"]["$ref"], "#/definitions/io.k8s.apimachinery.pkg.apis.meta.v1.ListMeta");
    assert!(old["paths"][&format!("{base}/{{name}}/status")]["patch"].is_object());
    assert_eq!(old["paths"][base]["post"]["consumes"], json!(["application/json", "application/yaml"]));
}

#[tokio::test]
async fn definitions_and_objects_survive_a_restart() {
    let server = Fixture::new().await;
    established(&server, definition("foos", "Foo")).await;
    let foo = json!({"apiVersion": "example.com/v1", "kind": "Foo", "metadata": {"name": "a"}, "spec": {"size": "M"}});
    assert_eq!(server.post(FOOS, foo).await.code, 201);
    let server = server.again().await;
    assert_eq!(server.get(&format!("{FOOS}/a")).await.body["spec"]["size"], "M");
}

#[tokio::test]
async fn a_name_that_is_in_use_is_refused_until_it_is_free() {
    let server = Fixture::new().await;
    let first = established(&server, definition("foos", "Foo")).await;
    let second = server.post(DEFINITIONS, definition("bars", "Foo")).await;
    assert_eq!(second.code, 201);
    let path = format!("{DEFINITIONS}/bars.example.com");
    let refused = |body: &Value| {
        body["status"]["conditions"].as_array().is_some_and(|list| {
            list.iter().any(|entry| entry["type"] == "NamesAccepted" && entry["status"] == "False")
        })
    };
    let body = until(&server, &path, refused).await;
    assert!(!is_true(&body, "Established"));
    server.call("DELETE", &first, "application/json", None).await;
    until(&server, &path, |body| is_true(body, "Established")).await;
}

#[tokio::test]
async fn new_defaults_apply_to_stored_objects() {
    let server = Fixture::new().await;
    let path = established(&server, definition("foos", "Foo")).await;
    let foo = json!({"apiVersion": "example.com/v1", "kind": "Foo", "metadata": {"name": "a"}});
    assert_eq!(server.post(FOOS, foo).await.code, 201);
    assert!(server.get(&format!("{FOOS}/a")).await.body["spec"].is_null());
    let patch = json!([{"op": "add", "path": "/spec/versions/0/schema/openAPIV3Schema/properties/spec/default", "value": {"size": "M"}}]);
    let patched = server.call("PATCH", &path, "application/json-patch+json", Some(patch)).await;
    assert_eq!(patched.code, 200, "{}", patched.body);
    until(&server, &format!("{FOOS}/a"), |body| body["spec"]["size"] == "M").await;
    // The history has the new object, too.
    let superseded = &server.api.state.cache.superseded;
    eventually_async("no superseded object", 10, async || (superseded.bytes() == 0).then_some(())).await;
}

#[tokio::test]
async fn elements_of_a_keyed_list_have_owners() {
    let server = Fixture::new().await;
    established(&server, definition("foos", "Foo")).await;
    let apply = async |manager: &str, port: i64| {
        let body = json!({"apiVersion": "example.com/v1", "kind": "Foo", "metadata": {"name": "a"},
            "spec": {"ports": [{"port": port, "name": manager}]}});
        let path = format!("{FOOS}/a?fieldManager={manager}");
        server.call("PATCH", &path, "application/apply-patch+yaml", Some(body)).await
    };
    assert_eq!(apply("one", 1).await.code, 201);
    let both = apply("two", 2).await;
    assert_eq!(both.code, 200, "{}", both.body);
    assert_eq!(both.body["spec"]["ports"].as_array().unwrap().len(), 2);
    assert_eq!(apply("two", 1).await.code, 409);
}

/// Converts objects between v1, which has the field `pair`, and v2, which has the fields `left` and `right`.
fn convert(request: &Value) -> Value {
    let to = request["desiredAPIVersion"].clone();
    let objects = request["objects"].as_array().cloned().unwrap_or_default();
    let converted = objects.into_iter().map(|mut object| {
        let map = object.as_object_mut().unwrap();
        map.insert("apiVersion".to_owned(), to.clone());
        if to == "example.com/v2" {
            let pair = map.remove("pair").unwrap_or_default();
            let (left, right) = pair.as_str().unwrap_or_default().split_once(':').unwrap_or_default();
            map.insert("left".to_owned(), left.into());
            map.insert("right".to_owned(), right.into());
        } else {
            let mut take = |name: &str| map.remove(name).and_then(|side| side.as_str().map(str::to_owned));
            let pair = format!("{}:{}", take("left").unwrap_or_default(), take("right").unwrap_or_default());
            map.insert("pair".to_owned(), pair.into());
        }
        object
    });
    json!({"convertedObjects": converted.collect::<Vec<_>>(), "result": {"status": "Success"}})
}

#[tokio::test]
async fn a_webhook_converts_between_versions() {
    let server = Fixture::new().await;
    let webhook = super::webhook::Webhook::start(convert).await;
    let version = |name: &str, storage: bool, fields: &[&str]| {
        let properties: Value = fields
            .iter()
            .map(|field| ((*field).to_owned(), json!({"type": "string"})))
            .collect::<serde_json::Map<_, _>>()
            .into();
        let selectable: Vec<Value> =
            fields.iter().map(|field| json!({"jsonPath": format!(".{field}")})).collect();
        json!({"name": name, "served": true, "storage": storage, "selectableFields": selectable,
            "schema": {"openAPIV3Schema": {"type": "object", "properties": properties}}})
    };
    let client = json!({"url": webhook.url, "caBundle": webhook.ca_bundle});
    let body = json!({"metadata": {"name": "pairs.example.com"}, "spec": {
        "group": "example.com", "scope": "Namespaced", "names": {"plural": "pairs", "kind": "Pair"},
        "conversion": {"strategy": "Webhook", "webhook": {"clientConfig": client, "conversionReviewVersions": ["v1"]}},
        "versions": [version("v1", true, &["pair"]), version("v2", false, &["left", "right"])]}});
    let path = established(&server, body).await;
    let at = |version: &str| format!("/apis/example.com/{version}/namespaces/default/pairs");
    let made = server.post(&at("v2"), json!({"apiVersion": "example.com/v2", "kind": "Pair", "metadata": {"name": "a"}, "left": "l", "right": "r"})).await;
    assert_eq!((made.code, &made.body["left"]), (201, &json!("l")), "{}", made.body);
    assert_eq!(server.get(&format!("{}/a", at("v1"))).await.body["pair"], "l:r");
    let old =
        json!({"apiVersion": "example.com/v1", "kind": "Pair", "metadata": {"name": "b"}, "pair": "x:y"});
    assert_eq!(server.post(&at("v1"), old).await.code, 201);
    let list = server.get(&at("v2")).await.body;
    let lefts: Vec<&Value> = list["items"].as_array().unwrap().iter().map(|item| &item["left"]).collect();
    assert_eq!(lefts, ["l", "x"], "{list}");
    // After a change of the stored version, the list has objects that are stored in both versions.
    let mut changed = server.get(&path).await.body;
    changed["spec"]["versions"][0]["storage"] = false.into();
    changed["spec"]["versions"][1]["storage"] = true.into();
    let changed = server.put(&path, changed).await;
    assert_eq!(changed.body["status"]["storedVersions"], json!(["v1", "v2"]), "{}", changed.body);
    until(&server, &at("v2"), |list| list["items"].as_array().is_some_and(|items| items.len() == 2)).await;
    let new = json!({"apiVersion": "example.com/v2", "kind": "Pair", "metadata": {"name": "c"}, "left": "m", "right": "n"});
    assert_eq!(server.post(&at("v2"), new).await.code, 201);
    let list = until(&server, &at("v1"), |list| list["items"][2]["pair"] == "m:n").await;
    assert_eq!(list["items"][0]["pair"], "l:r", "{list}");
    for (version, fields, names) in [
        ("v2", "left=l", vec!["a"]),
        ("v1", "pair=m:n", vec!["c"]),
        ("v1", "pair=x:y", vec!["b"]),
        ("v2", "right!=r", vec!["b", "c"]),
    ] {
        let found = server.get(&format!("{}?fieldSelector={fields}", at(version))).await.body;
        let items = found["items"].as_array().unwrap();
        let found: Vec<&str> = items.iter().map(|item| item["metadata"]["name"].as_str().unwrap()).collect();
        assert_eq!(found, names, "{version} {fields}");
    }
    let events = server.existing(&at("v2"), "left%3Dx").await;
    assert_eq!((events.len(), &events[0]["object"]["right"]), (1, &json!("y")));
    let events = server.existing(&at("v2"), "").await;
    let lefts: Vec<&Value> = events.iter().map(|event| &event["object"]["left"]).collect();
    assert_eq!(lefts, ["l", "x", "m"]);
}

type Stored<'a, T> = BoxFuture<'a, std::result::Result<T, coracle_store::Error>>;

/// A store that a test can break. While it is broken, it does not list custom resources, and refuses probes and queries
/// for the newest revision. While it is also full, it does not respond to these queries.
pub(super) struct Breakable {
    pub(super) store: Embedded,
    pub(super) is_broken: Arc<AtomicBool>,
    /// Whether all writes except deletions are refused.
    pub(super) is_full: Arc<AtomicBool>,
    /// Whether the store reports that other servers write to it.
    pub(super) is_shared: bool,
}

impl Store for Breakable {
    fn get<'a>(&'a self, key: &'a str) -> Stored<'a, Option<Entry>> {
        Store::get(&self.store, key)
    }

    fn list(&self, range: Range) -> Stored<'_, Page> {
        if range.prefix.starts_with("example.com/") && self.is_broken.load(Ordering::SeqCst) {
            let error = coracle_store::Error::Unavailable { detail: "a test".to_owned() };
            return Box::pin(async { Err(error) });
        }
        Store::list(&self.store, range)
    }

    fn write(&self, write: Write) -> Stored<'_, u64> {
        if write.value.is_some() && self.is_full.load(Ordering::SeqCst) {
            return Box::pin(async { Err(coracle_store::Error::Quota) });
        }
        self.store.write(write)
    }

    fn watch<'a>(&'a self, prefix: &'a str, after: u64) -> Stored<'a, Watch> {
        self.store.watch(prefix, after)
    }

    fn compact(&self, revision: u64) -> Stored<'_, ()> {
        self.store.compact(revision)
    }

    fn revision(&self) -> Stored<'_, u64> {
        if self.is_broken.load(Ordering::SeqCst) {
            if self.is_full.load(Ordering::SeqCst) {
                return Box::pin(std::future::pending());
            }
            let error = coracle_store::Error::Unavailable { detail: "a test".to_owned() };
            return Box::pin(async { Err(error) });
        }
        self.store.revision()
    }

    fn health(&self) -> Health {
        self.store.health()
    }

    fn is_shared(&self) -> bool {
        self.is_shared
    }

    fn probe(&self, _timeout: Duration) -> Stored<'_, ()> {
        let is_broken = self.is_broken.load(Ordering::SeqCst);
        let error = coracle_store::Error::Unavailable { detail: "a test".to_owned() };
        Box::pin(std::future::ready(if is_broken { Err(error) } else { Ok(()) }))
    }

    fn member_sizes(&self) -> BoxFuture<'_, Vec<MemberSize>> {
        let size = |endpoint: &str, bytes| MemberSize { endpoint: endpoint.to_owned(), bytes };
        let sizes = vec![size("http://a:2379", None), size("http://b:2379", Some(5))];
        Box::pin(std::future::ready(sizes))
    }

    fn is_current<'a>(&'a self, key: &'a str) -> Stored<'a, bool> {
        self.store.is_current(key)
    }

    fn backup(&self) -> std::result::Result<Backup, coracle_store::Error> {
        self.store.backup()
    }
}

#[tokio::test]
async fn a_definition_whose_objects_cannot_be_loaded_is_served_later() {
    let directory = tempfile::tempdir().unwrap();
    let store = Embedded::open(&directory.path().join("store"), EmbeddedOptions::default()).unwrap();
    let is_broken = Arc::new(AtomicBool::new(true));
    let store = Breakable { store, is_broken: is_broken.clone(), is_full: Arc::default(), is_shared: false };
    let api = open_on(Arc::new(store), directory.path(), |_config| {}).await;
    let server = Fixture { api, directory };
    let created = server.post(DEFINITIONS, definition("foos", "Foo")).await;
    assert_eq!(created.code, 201, "{}", created.body);
    let path = format!("{DEFINITIONS}/foos.example.com");
    let waiting = until(&server, &path, |definition| is_true(definition, "NamesAccepted")).await;
    let established = &waiting["status"]["conditions"][1];
    assert_eq!(
        (&established["type"], &established["status"], &established["message"]),
        (&json!("Established"), &json!("False"), &json!("cannot load the objects of foos.example.com"))
    );
    assert_eq!(server.get(FOOS).await.code, 404);
    is_broken.store(false, Ordering::SeqCst);
    until(&server, &path, |definition| is_true(definition, "Established")).await;
    assert_eq!(server.get(FOOS).await.code, 200);
}

#[tokio::test]
async fn a_finalizer_without_a_domain_causes_a_warning_when_it_is_added() {
    let server = Fixture::new().await;
    established(&server, definition("foos", "Foo")).await;
    let foo = json!({"apiVersion": "example.com/v1", "kind": "Foo",
        "metadata": {"name": "a", "finalizers": ["plain.example.com", "example.com/good", "kubernetes"]}});
    let made = server.post(FOOS, foo).await;
    let warning = "299 - \"metadata.finalizers: \\\"plain.example.com\\\": prefer a domain-qualified finalizer name \
                   including a path (/) to avoid accidental conflicts with other finalizer writers\"";
    assert_eq!((made.code, made.headers["warning"].to_str().unwrap()), (201, warning), "{}", made.body);
    let labelled = server.merge(&format!("{FOOS}/a"), json!({"metadata": {"labels": {"a": "b"}}})).await;
    assert_eq!((labelled.code, labelled.headers.get("warning")), (200, None), "{}", labelled.body);
}

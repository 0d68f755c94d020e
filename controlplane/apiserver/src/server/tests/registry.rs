//! Resources that come, change and go while the server runs.

use coracle_kinds::{
    resource::{ConversionError, Convert, Converting, ResourceNames, SelectableField, Strategy},
    schema::{FieldValidation, Parsed, SchemaError},
    validate::{Causes, Path},
};
use coracle_managed_fields::{Schema, TypeId};

use super::*;

const WIDGETS: &str = "/apis/example.com/v1/namespaces/default/widgets";

/// Widgets: `spec.size` has a default and a maximum; `spec.secret` is pruned.
struct Widgets;

impl Strategy for Widgets {
    fn decode(
        &self,
        mut parsed: Parsed,
        _: FieldValidation,
    ) -> std::result::Result<(Value, Vec<String>), SchemaError> {
        if let Some(spec) = parsed.value["spec"].as_object_mut() {
            spec.remove("secret");
        }
        Ok((parsed.value, Vec::new()))
    }

    fn default(&self, object: &mut Value) {
        if object["spec"].is_object() && object["spec"]["size"].is_null() {
            object["spec"]["size"] = 1.into();
        }
    }

    fn prepare_create(&self, _: &mut Value) {}

    fn validate(&self, causes: &mut Causes, new: &Value, _: Option<&Value>) {
        if new["spec"]["size"].as_i64() > Some(9) {
            causes.invalid(&Path::root("spec").field("size"), &new["spec"]["size"], "must be at most 9");
        }
    }

    fn validate_status(&self, _: &mut Causes, _: &Value, _: &Value) {}

    fn cells(&self, object: &Value, _: jiff::Timestamp) -> Vec<Value> {
        vec![object["metadata"]["name"].clone(), object["spec"]["size"].clone()]
    }

    fn ownership(&self) -> Option<(&Schema, TypeId)> {
        None
    }
}

/// `spec.size` of v1 is `spec.length` of v2.
struct Rename;

impl Convert for Rename {
    fn convert<'a>(&'a self, objects: Vec<Value>, to: &'a Resource) -> Converting<'a> {
        let (from, into) = if to.version == "v2" { ("size", "length") } else { ("length", "size") };
        let converted = objects.into_iter().map(|mut object| {
            if object["metadata"]["annotations"]["broken"].is_string() {
                return Err(ConversionError { to: to.api_version().to_owned(), reason: "broken".to_owned() });
            }
            let size = object["spec"].as_object_mut().and_then(|spec| spec.remove(from));
            object["spec"][into] = size.unwrap_or_default();
            object["apiVersion"] = to.api_version().into();
            Ok(object)
        });
        Box::pin(std::future::ready(converted.collect()))
    }
}

fn widgets(version: &'static str) -> Resource {
    let schema = format!("com.example.{version}.Widget");
    let names = ResourceNames {
        group: "example.com".into(),
        version: version.into(),
        kind: "Widget".into(),
        plural: "widgets".into(),
    };
    let mut resource = Resource::new(names, schema, Arc::new(Widgets));
    resource.definition = Some(Arc::new(json!({"type": "object", "description": "A widget."})));
    resource.columns = json!([
        {"name": "Name", "type": "string", "format": "name", "priority": 0, "description": ""},
        {"name": "Size", "type": "integer", "format": "", "priority": 0, "description": ""},
    ]);
    resource.fields.push(SelectableField::at_path("spec.size"));
    resource
}

fn widget(name: &str, size: i64) -> Value {
    json!({"apiVersion": "example.com/v1", "kind": "Widget", "metadata": {"name": name}, "spec": {"size": size}})
}

#[tokio::test]
async fn an_added_resource_is_served_and_a_removed_one_is_not() {
    let server = Fixture::new().await;
    assert_eq!(server.get(WIDGETS).await.code, 404);
    let mut sets = server.api.resources();
    server.api.add_resource(&[Arc::new(widgets("v1"))]).await.unwrap();
    assert!(sets.has_changed().unwrap());
    assert!(sets.borrow_and_update().find("example.com", "v1", "widgets").is_some());

    let secret = json!({"apiVersion": "example.com/v1", "kind": "Widget", "metadata": {"name": "a"}, "spec": {"secret": "x"}});
    let created = server.post(WIDGETS, secret).await;
    assert_eq!((created.code, &created.body["spec"]), (201, &json!({"size": 1})), "{}", created.body);
    assert_eq!(
        (&created.body["apiVersion"], &created.body["kind"]),
        (&json!("example.com/v1"), &json!("Widget"))
    );
    assert_eq!(created.body["metadata"]["managedFields"][0]["apiVersion"], "example.com/v1");
    let refused = server.post(WIDGETS, widget("b", 10)).await;
    assert_eq!(refused.body["details"]["causes"][0]["field"], "spec.size", "{}", refused.body);
    assert_eq!(server.post(WIDGETS, widget("b", 7)).await.code, 201);
    let selected = server.get(&format!("{WIDGETS}?fieldSelector=spec.size%3D7")).await;
    assert_eq!(selected.body["kind"], "WidgetList");
    assert_eq!(selected.body["items"][0]["metadata"]["name"], "b");
    assert_eq!(selected.body["items"].as_array().unwrap().len(), 1);
    let patched = server.merge(&format!("{WIDGETS}/b"), json!({"spec": {"size": 8}})).await;
    assert_eq!(patched.body["spec"]["size"], 8, "{}", patched.body);
    let strategic = format!("{WIDGETS}/b");
    let strategic =
        server.call("PATCH", &strategic, "application/strategic-merge-patch+json", Some(json!({}))).await;
    assert_eq!(strategic.code, 415);

    server.api.remove_resource("example.com", "widgets").await;
    assert_eq!(server.get(WIDGETS).await.code, 404);
    assert!(server.api.state.cache.of(&widgets("v1")).is_err(), "the collection is dropped");
    assert!(sets.borrow_and_update().find("example.com", "v1", "widgets").is_none());
}

#[tokio::test]
async fn documents_follow_the_resources() {
    let server = Fixture::new().await;
    let hash = |root: &Value, path: &str| root["paths"][path]["serverRelativeURL"].clone();
    let before = server.get("/openapi/v3").await.body;
    let tag = server.get("/openapi/v2").await.headers["etag"].clone();
    server.api.add_resource(&[Arc::new(widgets("v1"))]).await.unwrap();
    let list = server.get("/apis/example.com/v1").await.body;
    assert_eq!(list["resources"][0]["name"], "widgets");
    assert_eq!(server.get("/apis/example.com").await.body["preferredVersion"]["version"], "v1");
    let after = server.get("/openapi/v3").await.body;
    assert_eq!(hash(&before, "apis/apps/v1"), hash(&after, "apis/apps/v1"));
    let document = server.get(hash(&after, "apis/example.com/v1").as_str().unwrap()).await.body;
    assert_eq!(document["components"]["schemas"]["com.example.v1.Widget"]["description"], "A widget.");
    let v2 = server.get("/openapi/v2").await;
    assert_ne!(v2.headers["etag"], tag);
    let v2 = v2.body;
    assert_eq!(v2["definitions"]["com.example.v1.Widget"]["description"], "A widget.");
    server.api.remove_resource("example.com", "widgets").await;
    assert_eq!(server.get("/apis/example.com/v1").await.code, 404);
    assert_eq!(server.get("/apis/example.com").await.code, 404);
    assert_eq!(server.get("/openapi/v3").await.body, before);
    assert_eq!(server.get("/openapi/v2").await.headers["etag"], tag);
}

#[tokio::test]
async fn a_watch_sees_the_objects_and_ends_with_its_resource() {
    let server = Fixture::new().await;
    server.api.add_resource(&[Arc::new(widgets("v1"))]).await.unwrap();
    let request = Request::get(format!("{WIDGETS}?watch=1")).body(Full::<Bytes>::default()).unwrap();
    let events = server.api.handle(request, Some(admin())).await.into_body();
    assert_eq!(server.post(WIDGETS, widget("a", 1)).await.code, 201);
    server.api.remove_resource("example.com", "widgets").await;
    let limit = std::time::Duration::from_secs(120);
    let text =
        tokio::time::timeout(limit, events.collect()).await.expect("the watch ends").unwrap().to_bytes();
    let events: Vec<Value> =
        text.split(|byte| *byte == b'\n').filter_map(|line| serde_json::from_slice(line).ok()).collect();
    assert_eq!(events.len(), 1);
    assert_eq!(
        (&events[0]["type"], &events[0]["object"]["metadata"]["name"]),
        (&json!("ADDED"), &json!("a"))
    );
}

#[tokio::test]
async fn roles_apply_to_an_added_resource() {
    let server = Fixture::new().await;
    server.api.add_resource(&[Arc::new(widgets("v1"))]).await.unwrap();
    let ann = User::new("ann", &[]);
    assert_eq!(server.get_as(ann.clone(), WIDGETS).await.code, 403);
    permit_widgets(&server, "list", "ann").await;
    assert_eq!(server.get_as(ann, WIDGETS).await.code, 200);
}

/// Permits a user one verb on the widgets of the namespace `default`.
async fn permit_widgets(server: &Fixture, verb: &str, user: &str) {
    let rules = json!([{"verbs": [verb], "apiGroups": ["example.com"], "resources": ["widgets"]}]);
    let rbac = "/apis/rbac.authorization.k8s.io/v1/namespaces/default";
    let role = json!({"metadata": {"name": "w"}, "rules": rules});
    assert_eq!(server.post(&format!("{rbac}/roles"), role).await.code, 201);
    let role = json!({"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "w"});
    let subjects = json!([{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": user}]);
    let binding = json!({"metadata": {"name": "w"}, "roleRef": role, "subjects": subjects});
    assert_eq!(server.post(&format!("{rbac}/rolebindings"), binding).await.code, 201);
}

#[tokio::test]
async fn stored_objects_are_there_again_after_a_restart_and_a_change() {
    let server = Fixture::new().await;
    server.api.add_resource(&[Arc::new(widgets("v1"))]).await.unwrap();
    server.post(WIDGETS, widget("a", 3)).await;
    let server = server.again().await;
    assert_eq!(server.get(WIDGETS).await.code, 404);
    server.api.add_resource(&[Arc::new(widgets("v1"))]).await.unwrap();
    assert_eq!(server.get(&format!("{WIDGETS}/a")).await.body["spec"]["size"], 3);

    // Another version is stored now: the object keeps its version until it is written.
    let stored = Arc::new(with_conversion("v2", None));
    let served = with_conversion("v1", Some(stored.clone()));
    server.api.add_resource(&[stored, Arc::new(served)]).await.unwrap();
    assert_eq!(server.get(&format!("{WIDGETS}/a")).await.body["spec"], json!({"size": 3}));
    let v2 = WIDGETS.replace("/v1/", "/v2/");
    assert_eq!(server.get(&v2).await.body["items"][0]["spec"], json!({"length": 3}));
}

fn with_conversion(version: &'static str, storage: Option<Arc<Resource>>) -> Resource {
    let mut resource = widgets(version);
    resource.convert = Some(Arc::new(Rename));
    resource.storage = storage;
    resource
}

#[tokio::test]
async fn versions_of_a_resource_are_one_set_of_objects() {
    let server = Fixture::new().await;
    let stored = Arc::new(with_conversion("v1", None));
    let served = Arc::new(with_conversion("v2", Some(stored.clone())));
    server.api.add_resource(&[stored, served]).await.unwrap();
    let v2 = WIDGETS.replace("/v1/", "/v2/");
    let long = json!({"apiVersion": "example.com/v2", "kind": "Widget", "metadata": {"name": "a"}, "spec": {"length": 4}});
    let created = server.post(&v2, long).await;
    assert_eq!(created.code, 201, "{}", created.body);
    assert_eq!(created.body["spec"]["length"], 4);
    let old = server.get(&format!("{WIDGETS}/a")).await.body;
    assert_eq!((&old["apiVersion"], &old["spec"]["size"]), (&json!("example.com/v1"), &json!(4)), "{old}");
    let patched = server.merge(&format!("{v2}/a"), json!({"spec": {"length": 5}})).await;
    assert_eq!(
        (&patched.body["apiVersion"], &patched.body["spec"]["length"]),
        (&json!("example.com/v2"), &json!(5))
    );
    let events = server.watch(&format!("{v2}?resourceVersion=0")).await;
    assert_eq!(events[0]["object"]["spec"]["length"], 5, "{events:?}");
    assert_eq!(server.get(&format!("{WIDGETS}/a")).await.body["spec"]["size"], 5);
    server.merge(&format!("{WIDGETS}/a"), json!({"metadata": {"annotations": {"broken": "1"}}})).await;
    let failed = server.get(&format!("{v2}/a")).await;
    assert_eq!((failed.code, &failed.body["reason"]), (500, &json!("InternalError")));
}

/// Writes the owner of the request into the converted objects.
struct Owned;

impl Convert for Owned {
    fn convert<'a>(&'a self, mut objects: Vec<Value>, to: &'a Resource) -> Converting<'a> {
        for object in &mut objects {
            object["apiVersion"] = to.api_version().into();
            object["spec"]["owner"] = Value::from(&*request_owner::current());
        }
        Box::pin(std::future::ready(Ok(objects)))
    }
}

/// A user who may impersonate others does not get the webhook calls of several owners.
#[tokio::test]
async fn conversions_for_a_watch_belong_to_the_caller_who_impersonates_a_user() {
    let server = Fixture::new().await;
    let owned = |version: &'static str, storage: Option<Arc<Resource>>| {
        let mut resource = with_conversion(version, storage);
        resource.convert = Some(Arc::new(Owned));
        Arc::new(resource)
    };
    let stored = owned("v1", None);
    let served = owned("v2", Some(stored.clone()));
    server.api.add_resource(&[stored, served]).await.unwrap();
    permit_widgets(&server, "watch", "bob").await;
    assert_eq!(server.post(WIDGETS, widget("a", 1)).await.code, 201);
    let path = format!("{}?watch=1&resourceVersion=0&timeoutSeconds=1", WIDGETS.replace("/v1/", "/v2/"));
    let request = Request::get(path).header("impersonate-user", "bob").body(Full::default()).unwrap();
    let answer = server.send(admin(), request).await;
    assert_eq!((answer.code, &answer.body["type"]), (200, &json!("ADDED")), "{}", answer.body);
    assert_eq!(answer.body["object"]["spec"]["owner"], "", "members of system:masters have no limits");
}

#[tokio::test]
async fn a_built_in_resource_stays() {
    let server = Fixture::new().await;
    let names =
        ResourceNames { group: "".into(), version: "v1".into(), kind: "Pod".into(), plural: "pods".into() };
    let pods = Resource::new(names, "x", Arc::new(Widgets));
    assert!(server.api.add_resource(&[Arc::new(pods)]).await.is_err());
    assert!(server.api.add_resource(&[]).await.is_err());
    server.api.remove_resource("", "pods").await;
    assert_eq!(server.get("/api/v1/pods").await.code, 200);
}

#[tokio::test]
async fn events_have_two_forms_and_one_store() {
    let server = Fixture::new().await;
    let events = "/apis/events.k8s.io/v1/namespaces/default/events";
    let event = json!({
        "metadata": {"name": "e"}, "eventTime": "2026-01-01T00:00:00.000000Z", "action": "a", "reason": "r",
        "type": "Normal", "note": "n", "reportingController": "example.com/c", "reportingInstance": "i",
        "regarding": {"kind": "Pod", "name": "p", "namespace": "default"},
    });
    let made = server.post(events, event).await;
    assert_eq!((made.code, &made.body["note"]), (201, &json!("n")), "{}", made.body);
    let core = server.get("/api/v1/namespaces/default/events/e").await.body;
    assert_eq!((&core["message"], &core["involvedObject"]["name"]), (&json!("n"), &json!("p")), "{core}");
    for (selector, count) in [("regarding.name%3Dp", 1), ("regarding.name%3Dx", 0), ("reason%3Dr", 1)] {
        let list = server.get(&format!("{events}?fieldSelector={selector}")).await.body;
        assert_eq!(list["items"].as_array().unwrap().len(), count, "{selector}");
    }
    let watched = server.watch(&format!("{events}?resourceVersion=0")).await;
    assert_eq!(watched[0]["object"]["regarding"]["name"], "p", "{watched:?}");
    let refused = server.post(events, json!({"metadata": {"name": "f"}, "note": "n"})).await;
    assert_eq!(refused.code, 422, "{}", refused.body);
    assert_eq!(server.delete(&format!("{events}/e"), json!({})).await.code, 200);
    assert_eq!(server.get("/api/v1/namespaces/default/events/e").await.code, 404);
}

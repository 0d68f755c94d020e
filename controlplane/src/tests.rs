//! Tests of the API server and a controller in one process.

use coracle_testing::eventually_async;
use kube::api::{Api, ApiResource, DynamicObject, Patch, PatchParams, PostParams};
use kube::core::GroupVersionKind;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use crate::{ControlPlane, ControlPlaneConfig, ControllerSelection, RuntimeConfig, start};

fn api(plane: &ControlPlane, group: &str, version: &str, kind: &str, plural: &str) -> Api<DynamicObject> {
    let kind = ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(group, version, kind), plural);
    Api::all_with(plane.client("admin", &["system:masters"]), &kind)
}

/// A definition with the versions v1 and v2. `stored` is the version in which its objects are stored.
fn definition(stored: &str) -> Value {
    let version = |name: &str| {
        let schema = json!({"type": "object", "x-kubernetes-preserve-unknown-fields": true});
        json!({"name": name, "served": true, "storage": name == stored, "schema": {"openAPIV3Schema": schema}})
    };
    json!({
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": "widgets.example.com"},
        "spec": {
            "group": "example.com",
            "scope": "Cluster",
            "names": {"plural": "widgets", "singular": "widget", "kind": "Widget", "listKind": "WidgetList"},
            "versions": [version("v1"), version("v2")],
        },
    })
}

async fn create(api: &Api<DynamicObject>, object: &Value) -> Option<DynamicObject> {
    let object = serde_json::from_value(object.clone()).unwrap();
    api.create(&PostParams::default(), &object).await.ok()
}

fn holds(migration: &Value, type_: &str) -> bool {
    let mut conditions = migration["status"]["conditions"].as_array().into_iter().flatten();
    conditions.any(|condition| condition["type"] == type_ && condition["status"] == "True")
}

#[tokio::test]
async fn a_namespace_is_deleted_with_one_deletion_for_each_kind_that_it_has() {
    let directory = tempfile::tempdir().unwrap();
    let mut config = ControlPlaneConfig::new(directory.path());
    config.listen = "127.0.0.1:0".parse().unwrap();
    config.run_scheduler = false;
    config.controllers = ControllerSelection::parse(vec!["namespace-controller".to_owned()]).unwrap();
    let shutdown = CancellationToken::new();
    let plane = start(config, shutdown.clone()).await.unwrap();
    let client = plane.client("admin", &["system:masters"]);
    let namespaces = api(&plane, "", "v1", "Namespace", "namespaces");
    let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "full"}});
    create(&namespaces, &namespace).await.unwrap();
    let kind = ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk("", "v1", "ConfigMap"), "configmaps");
    let maps: Api<DynamicObject> = Api::namespaced_with(client.clone(), "full", &kind);
    let map = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}});
    create(&maps, &map).await.unwrap();
    namespaces.delete("full", &Default::default()).await.unwrap();
    eventually_async("the namespace is deleted", 20, async || {
        namespaces.get_opt("full").await.ok()?.is_none().then_some(())
    })
    .await;
    let request = http::Request::get("/metrics").body(Vec::new()).unwrap();
    let metrics = client.request_text(request).await.unwrap();
    let deletions = metrics.lines().filter(|line| {
        line.starts_with("apiserver_request_total{") && line.contains("verb=\"DELETECOLLECTION\"")
    });
    let deletions: Vec<&str> = deletions.collect();
    assert_eq!(deletions.len(), 1, "{deletions:?}");
    assert!(deletions[0].contains("resource=\"configmaps\""), "{deletions:?}");
    shutdown.cancel();
    plane.stopped().await;
}

#[tokio::test]
async fn a_migration_writes_the_objects_in_the_stored_version_and_ends() {
    let directory = tempfile::tempdir().unwrap();
    let mut config = ControlPlaneConfig::new(directory.path());
    config.listen = "127.0.0.1:0".parse().unwrap();
    config.run_scheduler = false;
    let migrator = vec!["storage-version-migrator-controller".to_owned()];
    config.controllers = ControllerSelection::parse(migrator).unwrap();
    config.runtime_config = RuntimeConfig::parse(&["api/beta=true".to_owned()]).unwrap();
    let shutdown = CancellationToken::new();
    let plane = start(config, shutdown.clone()).await.unwrap();

    let definitions =
        api(&plane, "apiextensions.k8s.io", "v1", "CustomResourceDefinition", "customresourcedefinitions");
    let widgets = api(&plane, "example.com", "v1", "Widget", "widgets");
    create(&definitions, &definition("v1")).await.unwrap();
    let widget = json!({"apiVersion": "example.com/v1", "kind": "Widget", "metadata": {"name": "w"}});
    let before =
        eventually_async("the widget is created", 20, async || create(&widgets, &widget).await).await;
    let patch = Patch::Merge(json!({"spec": definition("v2")["spec"]}));
    definitions.patch("widgets.example.com", &PatchParams::default(), &patch).await.unwrap();
    let stored = |definition: DynamicObject| json!(definition)["status"]["storedVersions"].clone();
    eventually_async("both versions are stored", 20, async || {
        let definition = definitions.get("widgets.example.com").await.ok()?;
        (stored(definition) == json!(["v1", "v2"])).then_some(())
    })
    .await;

    let migrations = api(
        &plane,
        "storagemigration.k8s.io",
        "v1beta1",
        "StorageVersionMigration",
        "storageversionmigrations",
    );
    let migration = |name: &str, resource: &str| {
        json!({"apiVersion": "storagemigration.k8s.io/v1beta1", "kind": "StorageVersionMigration",
            "metadata": {"name": name}, "spec": {"resource": {"group": "example.com", "resource": resource}}})
    };
    create(&migrations, &migration("m", "widgets")).await.unwrap();
    let ended = eventually_async("the migration ends", 20, async || {
        let found = json!(migrations.get("m").await.ok()?);
        let has_ended = holds(&found, "Succeeded") || holds(&found, "Failed");
        (has_ended && !holds(&found, "Running")).then_some(found)
    })
    .await;
    assert!(holds(&ended, "Succeeded"), "{ended}");
    assert_ne!(ended["status"]["resourceVersion"], "");
    let after = widgets.get("w").await.unwrap();
    assert_ne!(
        after.metadata.resource_version, before.metadata.resource_version,
        "the widget is written again"
    );
    assert_eq!(stored(definitions.get("widgets.example.com").await.unwrap()), json!(["v2"]));
    // A second migration finds nothing to write.
    create(&migrations, &migration("n", "widgets")).await.unwrap();
    eventually_async("the second migration succeeds", 20, async || {
        holds(&json!(migrations.get("n").await.ok()?), "Succeeded").then_some(())
    })
    .await;
    let again = widgets.get("w").await.unwrap();
    assert_eq!(again.metadata.resource_version, after.metadata.resource_version);
    shutdown.cancel();
    plane.stopped().await;
}

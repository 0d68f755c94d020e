//! The subresource `resize` of pods.

use super::*;

const STRATEGIC: &str = "application/strategic-merge-patch+json";

fn sized(name: &str, resources: Value) -> Value {
    let mut pod = pod(name);
    pod["spec"]["containers"][0]["resources"] = resources;
    pod
}

/// A patch of the resources of the container of [`sized`].
fn patch(resources: Value) -> Option<Value> {
    let name = pod("p")["spec"]["containers"][0]["name"].clone();
    Some(json!({"spec": {"containers": [{"name": name, "resources": resources}]}}))
}

impl Fixture {
    async fn resize(&self, pod: &str, resources: Value) -> Answer {
        self.call("PATCH", &format!("{PODS}/{pod}/resize"), STRATEGIC, patch(resources)).await
    }
}

#[tokio::test]
async fn resources_change_through_the_subresource_only() {
    let server = Fixture::new().await;
    let made = server.post(PODS, sized("p", json!({"requests": {"cpu": "100m"}}))).await;
    assert_eq!((made.code, &made.body["metadata"]["generation"]), (201, &json!(1)), "{}", made.body);
    let bigger = json!({"requests": {"cpu": "200m"}, "limits": {"memory": "64Mi"}});
    let ordinary = server.call("PATCH", &format!("{PODS}/p"), STRATEGIC, patch(bigger.clone())).await;
    assert_eq!((ordinary.code, &ordinary.body["reason"]), (422, &json!("Invalid")));
    let resized = server.resize("p", bigger.clone()).await;
    assert_eq!(resized.code, 200, "{}", resized.body);
    assert_eq!(resized.body["metadata"]["generation"], 2);
    let expect = json!({"requests": {"cpu": "200m", "memory": "64Mi"}, "limits": {"memory": "64Mi"}});
    assert_eq!(resized.body["spec"]["containers"][0]["resources"], expect);
    let entries = resized.body["metadata"]["managedFields"].as_array().unwrap().clone();
    assert!(entries.iter().any(|entry| entry["subresource"] == "resize"), "{entries:?}");
    let found = server.get(&format!("{PODS}/p/resize")).await;
    assert_eq!((found.code, &found.body), (200, &server.get(&format!("{PODS}/p")).await.body));
    let mut whole = found.body;
    whole["spec"]["containers"][0]["resources"]["requests"]["cpu"] = "300m".into();
    whole["metadata"]["labels"] = json!({"other": "label"});
    let put = server.put(&format!("{PODS}/p/resize"), whole).await;
    assert_eq!((put.code, &put.body["metadata"]["generation"]), (200, &json!(3)), "{}", put.body);
    assert_ne!(put.body["metadata"]["labels"], json!({"other": "label"}));
    let removed = server.resize("p", json!({"requests": {"cpu": null}})).await;
    assert!(removed.body["message"].as_str().unwrap().contains("resource requests cannot be removed"));
}

#[tokio::test]
async fn apply_may_resize() {
    let server = Fixture::new().await;
    server.post(PODS, sized("p", json!({"requests": {"cpu": "100m"}}))).await;
    let mut config = patch(json!({"requests": {"cpu": "150m"}})).unwrap();
    // Fields that a resize cannot set have no effect and no owner.
    config["metadata"] = json!({"labels": {"a": "b"}});
    config["spec"]["containers"][0]["image"] = "other".into();
    config["apiVersion"] = "v1".into();
    config["kind"] = "Pod".into();
    let path = format!("{PODS}/p/resize?fieldManager=tuner&force=true");
    let applied = server.call("PATCH", &path, "application/apply-patch+yaml", Some(config)).await;
    assert_eq!(applied.code, 200, "{}", applied.body);
    assert_eq!(applied.body["spec"]["containers"][0]["resources"]["requests"]["cpu"], "150m");
    let entries = applied.body["metadata"]["managedFields"].as_array().unwrap().clone();
    let own = entries.iter().find(|entry| entry["manager"] == "tuner").unwrap();
    assert_eq!((&own["operation"], &own["subresource"]), (&json!("Apply"), &json!("resize")));
    let fields = own["fieldsV1"].to_string();
    assert!(!fields.contains("f:image") && !fields.contains("f:labels"), "{fields}");
    assert_eq!(applied.body["spec"]["containers"][0]["image"], "busybox");
}

#[tokio::test]
async fn quotas_and_limit_ranges_hold_for_resizes() {
    let server = Fixture::new().await;
    let namespace = "/api/v1/namespaces/default";
    let quota = json!({"metadata": {"name": "q"}, "spec": {"hard": {"cpu": "800m", "memory": "800Mi"}}});
    server.post(&format!("{namespace}/resourcequotas"), quota).await;
    let both = |cpu: &str, memory: &str| {
        let list = json!({"cpu": cpu, "memory": memory});
        json!({"requests": list, "limits": list})
    };
    for name in ["p", "q"] {
        assert_eq!(server.post(PODS, sized(name, both("300m", "300Mi"))).await.code, 201);
    }
    let refused = server.resize("p", both("600m", "750Mi")).await;
    let end = "exceeded quota: q, requested: cpu=300m,memory=450Mi, used: cpu=600m,memory=600Mi, \
               limited: cpu=800m,memory=800Mi";
    let message = refused.body["message"].as_str().unwrap();
    assert_eq!((refused.code, message.ends_with(end)), (403, true), "{message}");
    let range = json!({"metadata": {"name": "r"}, "spec": {"limits": [{"type": "Container", "max": {"cpu": "350m"},
        "min": {"cpu": "50m"}, "default": {"cpu": "100m"}, "defaultRequest": {"cpu": "100m"}}]}});
    assert_eq!(server.post(&format!("{namespace}/limitranges"), range).await.code, 201);
    let refused = server.resize("p", both("400m", "300Mi")).await;
    let message = refused.body["message"].as_str().unwrap();
    let end = "forbidden: maximum cpu usage per Container is 350m, but limit is 400m";
    assert_eq!((refused.code, message.contains(end)), (403, true), "{message}");
    let fine = server.resize("p", both("350m", "300Mi")).await;
    assert_eq!(fine.code, 200, "{}", fine.body);
    let again = server.resize("q", both("451m", "300Mi")).await;
    assert_eq!(again.code, 403);
}

#[tokio::test]
async fn a_resize_must_fit_the_node() {
    let server = Fixture::new().await;
    let node = json!({"metadata": {"name": "n"}, "status": {"allocatable": {"cpu": "2", "memory": "1Gi"}}});
    server.post("/api/v1/nodes", node).await;
    let mut bound = sized("p", json!({"requests": {"cpu": "1"}}));
    bound["spec"]["nodeName"] = "n".into();
    let made = server.post(PODS, bound).await;
    assert_eq!(made.code, 201, "{}", made.body);
    let refused = server.resize("p", json!({"requests": {"cpu": "3"}})).await;
    assert_eq!((refused.code, &refused.body["reason"]), (403, &json!("Forbidden")));
    let message = refused.body["message"].as_str().unwrap();
    let end = "node didn't have enough allocatable resources: cpu, requested: 3000, allocatable: 2000";
    assert!(message.ends_with(end), "{message}");
    assert_eq!(refused.body["details"]["causes"][0]["reason"], "NodeCapacity");
    assert_eq!(server.resize("p", json!({"requests": {"cpu": "2"}})).await.code, 200);
}

//! Evictions under disruption budgets.

use super::*;

const BUDGETS: &str = "/apis/policy/v1/namespaces/default/poddisruptionbudgets";
const PODS: &str = "/api/v1/namespaces/default/pods";

impl Fixture {
    /// A pod that runs on a node and is ready.
    async fn running(&self, name: &str) {
        let mut made = pod(name);
        made["metadata"]["labels"] = json!({"app": "a"});
        made["spec"]["nodeName"] = "n1".into();
        assert_eq!(self.post(PODS, made).await.code, 201);
        let status =
            json!({"status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}});
        assert_eq!(self.merge(&format!("{PODS}/{name}/status"), status).await.code, 200);
    }

    /// A budget with this many allowed disruptions.
    async fn budget(&self, name: &str, allowed: i64) {
        let budget = json!({"metadata": {"name": name}, "spec": {"minAvailable": 1,
            "selector": {"matchLabels": {"app": "a"}}}, "status": {"disruptionsAllowed": 9}});
        let made = self.post(BUDGETS, budget).await;
        assert_eq!(made.code, 201, "{}", made.body);
        let none =
            json!({"currentHealthy": 0, "desiredHealthy": 0, "disruptionsAllowed": 0, "expectedPods": 0});
        assert_eq!((&made.body["status"], &made.body["metadata"]["generation"]), (&none, &json!(1)));
        let status = json!({"status": {"observedGeneration": 1, "disruptionsAllowed": allowed}});
        assert_eq!(self.merge(&format!("{BUDGETS}/{name}/status"), status).await.code, 200);
    }

    async fn evict(&self, pod: &str, options: Value) -> Answer {
        let eviction = json!({"metadata": {"name": pod}, "deleteOptions": options});
        self.post(&format!("{PODS}/{pod}/eviction"), eviction).await
    }
}

#[tokio::test]
async fn concurrent_evictions_do_not_exceed_the_budget() {
    let server = Fixture::new().await;
    let names = ["p0", "p1", "p2", "p3", "p4"];
    for name in names {
        server.running(name).await;
    }
    server.budget("b", 2).await;
    let answers = futures::future::join_all(names.map(|name| server.evict(name, Value::Null))).await;
    let codes = |code: u16| answers.iter().filter(|answer| answer.code == code).count();
    assert_eq!((codes(201), codes(429)), (2, 3));
    let left = server.get(&format!("{BUDGETS}/b")).await.body["status"].clone();
    assert_eq!(left["disruptionsAllowed"], 0);
    let spent: Vec<&String> = left["disruptedPods"].as_object().unwrap().keys().collect();
    for (name, answer) in names.iter().zip(&answers) {
        let pod = server.get(&format!("{PODS}/{name}")).await.body;
        let deleted = pod["metadata"]["deletionTimestamp"].is_string();
        let marked = pod["status"]["conditions"].to_string().contains("EvictionByEvictionAPI");
        let passed = answer.code == 201;
        assert_eq!(
            (deleted, marked, spent.contains(&&(*name).to_owned())),
            (passed, passed, passed),
            "{name}"
        );
    }
    let refused = answers.iter().find(|answer| answer.code == 429).unwrap();
    assert_eq!(refused.body["reason"], "TooManyRequests");
    assert_eq!(refused.body["details"]["causes"][0]["reason"], "DisruptionBudget");
    assert!(!refused.headers.contains_key("retry-after"));
}

#[tokio::test]
async fn an_eviction_is_refused_with_its_reason_and_then_nothing_is_changed() {
    let server = Fixture::new().await;
    server.running("p").await;
    server.budget("b", 1).await;
    let tried = server.evict("p", json!({"dryRun": ["All"]})).await;
    assert_eq!(tried.code, 201, "{}", tried.body);
    let eviction = json!({"metadata": {"name": "p"}, "deleteOptions": {"gracePeriodSeconds": 0}});
    let tried = server.post(&format!("{PODS}/p/eviction?dryRun=All"), eviction).await;
    assert_eq!(tried.code, 201, "{}", tried.body);
    // The disruption controller has not processed this change of the budget yet.
    let change = json!({"spec": {"minAvailable": 2}});
    assert_eq!(server.merge(&format!("{BUDGETS}/b"), change).await.body["metadata"]["generation"], 2);
    let refused = server.evict("p", Value::Null).await;
    assert_eq!((refused.code, refused.headers["retry-after"].to_str().unwrap()), (429, "10"));
    let counted = json!({"status": {"observedGeneration": 2}});
    assert_eq!(server.merge(&format!("{BUDGETS}/b/status"), counted).await.code, 200);
    server.budget("c", 1).await;
    let refused = server.evict("p", Value::Null).await;
    assert_eq!(refused.code, 500);
    assert!(refused.body["message"].as_str().unwrap().contains("more than one PodDisruptionBudget"));
    let pod = server.get(&format!("{PODS}/p")).await.body;
    assert!(pod["metadata"]["deletionTimestamp"].is_null());
    assert!(!pod.to_string().contains("DisruptionTarget"));
    assert_eq!(server.delete(&format!("{BUDGETS}/c"), json!({})).await.code, 200);
    let other = json!({"preconditions": {"uid": "other"}});
    assert_eq!(server.evict("p", other).await.code, 409);
    let budget = server.get(&format!("{BUDGETS}/b")).await.body;
    assert_eq!(
        (&budget["status"]["disruptionsAllowed"], budget["status"].get("disruptedPods")),
        (&json!(1), None)
    );
    let eviction = json!({"metadata": {"name": "q"}});
    assert_eq!(server.post(&format!("{PODS}/p/eviction"), eviction).await.code, 400);
    assert_eq!(server.evict("q", Value::Null).await.code, 404);
}

#[tokio::test]
async fn an_eviction_without_the_right_to_delete_changes_no_budget() {
    let server = Fixture::new().await;
    server.running("p").await;
    let path = format!("{PODS}/p/eviction");
    let evict_as = async |user: User| {
        let body = json!({"metadata": {"name": "p"}}).to_string();
        server.send(user, Request::post(path.as_str()).body(Full::from(body)).unwrap()).await.code
    };
    // The server refuses the eviction, both without a budget and with a budget.
    assert_eq!(evict_as(node("n2")).await, 403);
    server.budget("b", 1).await;
    assert_eq!(evict_as(node("n2")).await, 403);
    assert!(!server.get(&format!("{PODS}/p")).await.body.to_string().contains("DisruptionTarget"));
    assert_eq!(server.get(&format!("{BUDGETS}/b")).await.body["status"]["disruptionsAllowed"], 1);
    assert_eq!(evict_as(node("n1")).await, 201);
    assert_eq!(server.get(&format!("{BUDGETS}/b")).await.body["status"]["disruptionsAllowed"], 0);
}

#[tokio::test]
async fn pods_that_do_not_run_are_evicted_although_the_budget_allows_no_disruption() {
    let server = Fixture::new().await;
    let mut pending = pod("p");
    pending["metadata"]["labels"] = json!({"app": "a"});
    assert_eq!(server.post(PODS, pending).await.code, 201);
    server.budget("b", 0).await;
    let revision = server.get(&format!("{PODS}/p")).await.body["metadata"]["resourceVersion"].clone();
    let options = json!({"preconditions": {"resourceVersion": revision}});
    let gone = server.evict("p", options).await;
    assert_eq!(gone.code, 201, "{}", gone.body);
    assert_eq!(server.get(&format!("{PODS}/p")).await.code, 404);
}

#[tokio::test]
async fn a_budget_has_columns_and_is_validated() {
    let server = Fixture::new().await;
    server.budget("b", 3).await;
    let request = Request::get(format!("{BUDGETS}/b"))
        .header("accept", "application/json;as=Table;g=meta.k8s.io;v=v1,application/json");
    let answer = server.send(admin(), request.body(Full::default()).unwrap()).await;
    let columns = answer.body["columnDefinitions"].as_array().unwrap().iter();
    let columns: Vec<&str> = columns.map(|column| column["name"].as_str().unwrap()).collect();
    assert_eq!(columns, ["Name", "Min Available", "Max Unavailable", "Allowed Disruptions", "Age"]);
    let cells = answer.body["rows"][0]["cells"].as_array().unwrap();
    assert_eq!(cells[..4], [json!("b"), json!("1"), json!("N/A"), json!(3)]);
    let both = json!({"metadata": {"name": "c"}, "spec": {"minAvailable": 1, "maxUnavailable": 1}});
    assert_eq!(server.post(BUDGETS, both).await.code, 422);
    let wrong = json!({"status": {"disruptionsAllowed": -1}});
    assert_eq!(server.merge(&format!("{BUDGETS}/b/status"), wrong).await.code, 422);
}

#[tokio::test]
async fn the_options_of_an_eviction_are_validated_as_those_of_a_deletion() {
    let server = Fixture::new().await;
    server.running("p").await;
    let ignore = "ignoreStoreReadErrorWithClusterBreakingPotential";
    for (options, fields) in [
        (json!({"dryRun": ["Some"]}), vec!["dryRun"]),
        (json!({"propagationPolicy": "x"}), vec!["propagationPolicy"]),
        (
            json!({"propagationPolicy": "x", "orphanDependents": true}),
            vec!["propagationPolicy", "propagationPolicy"],
        ),
        (
            json!({(ignore): true, "gracePeriodSeconds": 0, "preconditions": {"uid": "u"}}),
            vec![ignore, ignore],
        ),
    ] {
        let refused = server.evict("p", options).await;
        assert_eq!(refused.code, 422, "{}", refused.body);
        let details = &refused.body["details"];
        assert_eq!((&details["kind"], &details["group"]), (&json!("DeleteOptions"), &json!("meta.k8s.io")));
        let causes = details["causes"].as_array().unwrap();
        assert_eq!(causes.iter().map(|cause| &cause["field"]).collect::<Vec<_>>(), fields);
    }
    // A deletion has the option only with a feature gate that is off.
    let options = json!({(ignore): true, "dryRun": ["All"]});
    assert_eq!(server.delete(&format!("{PODS}/p"), options).await.code, 200);
    let path = format!("{PODS}/p/eviction?fieldValidation=Strict");
    let eviction = |version: &str, options: Value| json!({"apiVersion": version, "kind": "Eviction", "metadata": {"name": "p"}, "deleteOptions": options});
    let unknown = eviction("policy/v1", json!({"gracePeriod": 3}));
    let refused = server.post(&path, unknown).await;
    assert!(
        refused.body["message"].as_str().unwrap().contains("deleteOptions.gracePeriod"),
        "{}",
        refused.body
    );
    assert_eq!(server.post(&path, eviction("policy/v2", Value::Null)).await.code, 400);
    let evicted = server.post(&path, eviction("policy/v1beta1", json!({(ignore): false}))).await;
    assert_eq!(evicted.code, 201, "{}", evicted.body);
}

//! Resource quotas.

use super::{custom_resources::Breakable, *};
use crate::quota_locks::slot;

const QUOTAS: &str = "/api/v1/namespaces/default/resourcequotas";
const PODS: &str = "/api/v1/namespaces/default/pods";
const MAPS: &str = "/api/v1/namespaces/default/configmaps";

impl Fixture {
    async fn quota(&self, name: &str, spec: Value) {
        let made = self.post(QUOTAS, json!({"metadata": {"name": name}, "spec": spec})).await;
        assert_eq!(made.code, 201, "{}", made.body);
    }

    /// Waits until the status has this amount in use.
    async fn until_used(&self, quota: &str, name: &str, amount: &str) {
        let path = format!("{QUOTAS}/{quota}");
        eventually_async(&format!("{amount} of {name} are used"), 10, async || {
            self.get(&path).await.body["status"]["used"][name] == amount
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_hundred_creators_at_once_do_not_exceed_a_quota() {
    let server = Fixture::new().await;
    server.quota("q", json!({"hard": {"configmaps": "7", "count/configmaps": "9"}})).await;
    let maps = (0..100).map(|number| json!({"metadata": {"name": format!("m{number}")}}));
    let answers = futures::future::join_all(maps.map(|map| server.post(MAPS, map))).await;
    let refused: Vec<&Answer> = answers.iter().filter(|answer| answer.code == 403).collect();
    assert_eq!((refused.len(), answers.iter().filter(|answer| answer.code == 201).count()), (93, 7));
    let message = refused[0].body["message"].as_str().unwrap();
    let end =
        "is forbidden: exceeded quota: q, requested: configmaps=1, used: configmaps=7, limited: configmaps=7";
    assert!(message.starts_with("configmaps \"m") && message.ends_with(end), "{message}");
    server.until_used("q", "configmaps", "7").await;
    let kept = answers.iter().find(|answer| answer.code == 201).unwrap();
    let name = kept.body["metadata"]["name"].as_str().unwrap();
    assert_eq!(server.delete(&format!("{MAPS}/{name}"), json!({})).await.code, 200);
    server.until_used("q", "count/configmaps", "6").await;
    // The count is correct after a restart.
    let server = server.again().await;
    for (name, code) in [("a", 201), ("b", 403)] {
        assert_eq!(server.post(MAPS, json!({"metadata": {"name": name}})).await.code, code);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn creators_on_two_servers_do_not_exceed_a_quota() {
    let directory = tempfile::tempdir().unwrap();
    let store = Embedded::open(&directory.path().join("store"), EmbeddedOptions::default()).unwrap();
    let (is_broken, is_full) = (Arc::default(), Arc::default());
    let store: Arc<dyn Store> = Arc::new(Breakable { store, is_broken, is_full, is_shared: true });
    let api = open_on(store.clone(), directory.path(), |_config| {}).await;
    let one = Fixture { api, directory };
    let directory = tempfile::tempdir().unwrap();
    let api = open_on(store.clone(), directory.path(), |_config| {}).await;
    let other = Fixture { api, directory };
    one.quota("q", json!({"hard": {"count/configmaps": "9"}})).await;
    other.until_used("q", "count/configmaps", "0").await;
    let create = |number: usize| {
        let server = if number.is_multiple_of(2) { &one } else { &other };
        async move { server.post(MAPS, json!({"metadata": {"name": format!("m{number}")}})).await.code }
    };
    let codes = futures::future::join_all((0..100).map(create)).await;
    let of = |wanted: u16| codes.iter().filter(|code| **code == wanted).count();
    assert_eq!((of(201), of(403)), (9, 91));
    // Each of these writes has updated the guard. So a server that has not received the last write cannot commit.
    let guard = format!("quotas-{}", slot("default"));
    assert!(store.get(&guard).await.unwrap().is_some());
}

#[tokio::test]
async fn an_object_that_no_quota_counts_does_not_wait_for_others() {
    let server = Fixture::new().await;
    server.quota("q", json!({"hard": {"pods": "1"}})).await;
    let _commit = server.api.state.quota_locks.lock("default").await;
    let map = server.post(MAPS, json!({"metadata": {"name": "m"}}));
    assert_eq!(tokio::time::timeout(Duration::from_secs(20), map).await.unwrap().code, 201);
}

#[tokio::test]
async fn a_pod_whose_node_is_lost_is_not_charged_after_its_grace_period() {
    let server = Fixture::new().await;
    server.quota("q", json!({"hard": {"pods": "1", "count/pods": "5"}})).await;
    let mut bound = pod("p");
    bound["spec"]["nodeName"] = "lost".into();
    assert_eq!(server.post(PODS, bound).await.code, 201);
    server.until_used("q", "pods", "1").await;
    assert_eq!(server.post(PODS, pod("q")).await.code, 403);
    let deleted = server.delete(&format!("{PODS}/p"), json!({"gracePeriodSeconds": 1})).await;
    assert_eq!(deleted.code, 200, "{}", deleted.body);
    // No request and no other change of an object triggers the count.
    server.until_used("q", "pods", "0").await;
    assert_eq!(server.get(&format!("{QUOTAS}/q")).await.body["status"]["used"]["count/pods"], "1");
    assert_eq!(server.post(PODS, pod("q")).await.code, 201);
}

#[tokio::test]
async fn pods_are_charged_for_their_requests_in_their_scope() {
    let server = Fixture::new().await;
    server.quota("all", json!({"hard": {"requests.cpu": "1", "pods": "5"}})).await;
    server.quota("ends", json!({"hard": {"pods": "0"}, "scopes": ["Terminating"]})).await;
    let requesting = |name: &str, cpu: &str| {
        let mut made = pod(name);
        made["spec"]["containers"][0]["resources"] = json!({"requests": {"cpu": cpu}});
        made
    };
    let refused = server.post(PODS, pod("p")).await;
    let message = refused.body["message"].as_str().unwrap();
    assert!(message.contains("forbidden: failed quota: all: must specify requests.cpu for: "), "{message}");
    assert_eq!(server.post(PODS, requesting("p", "600m")).await.code, 201);
    let refused = server.post(PODS, requesting("q", "600m")).await;
    let end =
        "exceeded quota: all, requested: requests.cpu=600m, used: requests.cpu=600m, limited: requests.cpu=1";
    assert!(refused.body["message"].as_str().unwrap().ends_with(end), "{}", refused.body);
    let deadline = json!({"spec": {"activeDeadlineSeconds": 9}});
    assert_eq!(server.merge(&format!("{PODS}/p"), deadline).await.code, 403, "now in the scope Terminating");
    server.until_used("all", "requests.cpu", "600m").await;
    let ended = json!({"status": {"phase": "Succeeded"}});
    assert_eq!(server.merge(&format!("{PODS}/p/status"), ended).await.code, 200);
    server.until_used("all", "pods", "0").await;
    assert_eq!(server.post(PODS, requesting("q", "600m")).await.code, 201);
}

#[tokio::test]
async fn a_claim_is_charged_unless_its_pod_requests_the_devices() {
    let server = Fixture::new().await;
    let limited = "requests.deviceclass.resource.kubernetes.io/gpu";
    server.quota("q", json!({"hard": {limited: "2"}})).await;
    let mut requesting = pod("p");
    let amounts = json!({"deviceclass.resource.kubernetes.io/gpu": "2"});
    requesting["spec"]["containers"][0]["resources"] = json!({"requests": amounts, "limits": amounts});
    let made = server.post(PODS, requesting.clone()).await;
    assert_eq!(made.code, 201, "{}", made.body);
    let claim = |name: &str, uid: &Value, count: u32| {
        let owner = json!({"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": uid, "controller": true});
        let annotations = json!({"resource.kubernetes.io/extended-resource-claim": "true"});
        let exactly = json!({"deviceClassName": "gpu", "allocationMode": "ExactCount", "count": count});
        json!({"metadata": {"name": name, "annotations": annotations, "ownerReferences": [owner]},
            "spec": {"devices": {"requests": [{"name": "r", "exactly": exactly}]}}})
    };
    let claims = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims";
    let uid = &made.body["metadata"]["uid"];
    let other = json!("another");
    for (name, uid, count, code) in
        [("large", uid, 3, 403), ("own", uid, 2, 201), ("second", uid, 1, 403), ("foreign", &other, 1, 403)]
    {
        let answer = server.post(claims, claim(name, uid, count)).await;
        assert_eq!(answer.code, code, "{name}: {}", answer.body);
    }
    server.until_used("q", limited, "2").await;
    assert_eq!(server.delete(&format!("{PODS}/p"), json!({"gracePeriodSeconds": 0})).await.code, 200);
    requesting["metadata"]["name"] = "q".into();
    assert_eq!(server.post(PODS, requesting).await.code, 403, "the claim counts without its pod");
    // The deletion subtracts the amount that the ledger has added.
    assert_eq!(server.delete(&format!("{claims}/own"), json!({})).await.code, 200);
    server.until_used("q", limited, "0").await;
}

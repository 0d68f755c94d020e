//! Lists and watches.

use std::sync::atomic::{AtomicBool, Ordering};

use super::{custom_resources::Breakable, *};

#[tokio::test]
async fn lists_are_filtered_and_later_pages_have_the_revision_of_the_first() {
    let server = Fixture::new().await;
    for name in ["a", "b", "c", "d"] {
        let even = json!({"even": (name == "b" || name == "d").to_string()});
        server.post(CONFIG_MAPS, config_map(name, even)).await;
    }
    let names = |list: &Value| -> Vec<String> {
        let items = list["items"].as_array().unwrap().iter();
        items.map(|item| item["metadata"]["name"].as_str().unwrap().to_owned()).collect()
    };
    let even = server.get(&format!("{CONFIG_MAPS}?labelSelector=even%3Dtrue")).await.body;
    assert_eq!(names(&even), ["b", "d"]);
    assert_eq!(even["kind"], "ConfigMapList");
    assert!(even["items"][0]["kind"].is_null());
    let one = server.get(&format!("{CONFIG_MAPS}?fieldSelector=metadata.name%3Dc")).await.body;
    assert_eq!(names(&one), ["c"]);
    let first = server.get(&format!("{CONFIG_MAPS}?limit=3")).await.body;
    assert_eq!(
        (names(&first), &first["metadata"]["remainingItemCount"]),
        (vec!["a".into(), "b".into(), "c".into()], &json!(1))
    );
    server.delete(&format!("{CONFIG_MAPS}/d"), json!({})).await;
    server.post(CONFIG_MAPS, config_map("e", json!({}))).await;
    let token = first["metadata"]["continue"].as_str().unwrap();
    let rest = server.get(&format!("{CONFIG_MAPS}?limit=3&continue={token}")).await.body;
    assert_eq!(names(&rest), ["d"]);
    assert_eq!(rest["metadata"]["resourceVersion"], first["metadata"]["resourceVersion"]);
    assert_eq!(server.get(&format!("{CONFIG_MAPS}?fieldSelector=spec.x%3Dy")).await.code, 400);
    let all = server.get(&format!("{CONFIG_MAPS}?limit=1&resourceVersion=0")).await.body;
    assert_eq!(names(&all), ["a", "b", "c", "e"]);
    assert!(all["metadata"]["continue"].is_null(), "{}", all["metadata"]);
    let since = first["metadata"]["resourceVersion"].as_str().unwrap();
    let past = server.get(&format!("{CONFIG_MAPS}?limit=4&resourceVersion={since}")).await.body;
    assert_eq!(names(&past), ["a", "b", "c", "d"], "a list has exactly the requested revision");
}

#[tokio::test]
async fn a_token_outlives_more_changes_than_the_history_has() {
    let server = Fixture::new().await;
    for name in ["a", "b", "c"] {
        server.post(CONFIG_MAPS, config_map(name, json!({}))).await;
    }
    let first = server.get(&format!("{CONFIG_MAPS}?limit=1")).await.body;
    let token = first["metadata"]["continue"].as_str().unwrap();
    for letter in ["u", "v", "w", "x", "y", "z"] {
        let patch = json!({"data": {"key": letter.repeat(900 << 10)}});
        assert_eq!(server.merge(&format!("{CONFIG_MAPS}/c"), patch).await.code, 200);
    }
    server.delete(&format!("{CONFIG_MAPS}/b"), json!({})).await;
    let rest = server.get(&format!("{CONFIG_MAPS}?limit=5&continue={token}")).await;
    assert_eq!(rest.code, 200, "{}", rest.body);
    let items = rest.body["items"].as_array().unwrap().iter();
    let data: Vec<&str> = items.map(|item| item["data"]["key"].as_str().unwrap()).collect();
    assert_eq!(data, ["b", "c"], "the objects of the first page's revision");
    assert_eq!(rest.body["metadata"]["resourceVersion"], first["metadata"]["resourceVersion"]);
}

#[tokio::test]
async fn without_etcd_only_watches_and_reads_of_a_known_or_any_age_are_answered() {
    let directory = tempfile::tempdir().unwrap();
    let store = Embedded::open(&directory.path().join("store"), EmbeddedOptions::default()).unwrap();
    let is_broken = Arc::<AtomicBool>::default();
    let store = Breakable { store, is_broken: is_broken.clone(), is_full: Arc::default(), is_shared: true };
    let server = Fixture { api: open_on(Arc::new(store), directory.path(), |_config| {}).await, directory };
    let map = server.post(CONFIG_MAPS, config_map("a", json!({}))).await.body;
    let revision = map["metadata"]["resourceVersion"].as_str().unwrap();
    is_broken.store(true, Ordering::SeqCst);
    for path in [CONFIG_MAPS, "/api/v1/namespaces/default/configmaps/a"] {
        let refused = server.get(path).await;
        assert_eq!((refused.code, &refused.body["reason"]), (504, &json!("Timeout")), "{}", refused.body);
        assert_eq!(refused.headers["retry-after"], "1");
        assert!(refused.body["message"].as_str().unwrap().contains("etcd"), "{}", refused.body);
        for known in ["0", revision] {
            assert_eq!(
                server.get(&format!("{path}?resourceVersion={known}")).await.code,
                200,
                "{path} {known}"
            );
        }
    }
    assert_eq!(server.get(&format!("{CONFIG_MAPS}?limit=1")).await.code, 504);
    let event = server.first_event(&format!("{CONFIG_MAPS}?watch=1")).await;
    assert_eq!(event["object"]["metadata"]["name"], "a");
    assert_eq!(server.get("/api/v1/componentstatuses").await.code, 200, "they are not stored");
    is_broken.store(false, Ordering::SeqCst);
    assert_eq!(server.get(CONFIG_MAPS).await.code, 200);
}

#[tokio::test]
async fn a_token_with_a_future_revision_is_refused() {
    use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD};

    let server = Fixture::new().await;
    for name in ["a", "b"] {
        server.post(CONFIG_MAPS, config_map(name, json!({}))).await;
    }
    let first = server.get(&format!("{CONFIG_MAPS}?limit=1")).await.body;
    let token = first["metadata"]["continue"].as_str().unwrap();
    let mut forged: Value = serde_json::from_slice(&BASE64_URL_SAFE_NO_PAD.decode(token).unwrap()).unwrap();
    forged["rv"] = (forged["rv"].as_u64().unwrap() + 1_000_000).into();
    let forged = BASE64_URL_SAFE_NO_PAD.encode(forged.to_string());
    let query = format!("{CONFIG_MAPS}?limit=1&continue={forged}");
    for answer in [server.get(&query).await, server.delete(&query, json!({})).await] {
        assert_eq!((answer.code, &answer.body["reason"]), (504, &json!("Timeout")), "{}", answer.body);
        assert_eq!(answer.body["details"]["causes"][0]["reason"], "ResourceVersionTooLarge");
    }
    let rest = server.get(&format!("{CONFIG_MAPS}?limit=1&continue={token}")).await.body;
    assert_eq!(rest["items"][0]["metadata"]["name"], "b");
}

#[tokio::test]
async fn a_deletion_with_a_limit_deletes_a_page() {
    let server = Fixture::new().await;
    for name in ["a", "b", "c", "d", "e"] {
        let even = json!({"even": (name == "b" || name == "d").to_string()});
        server.post(CONFIG_MAPS, config_map(name, even)).await;
    }
    let mut query = "limit=2&labelSelector=even%3Dfalse".to_owned();
    let mut pages = Vec::new();
    loop {
        let page = server.delete(&format!("{CONFIG_MAPS}?{query}"), json!({})).await.body;
        pages.push(page["items"].as_array().unwrap().len());
        let Some(token) = page["metadata"]["continue"].as_str() else { break };
        query = format!("limit=2&labelSelector=even%3Dfalse&continue={token}");
    }
    assert_eq!(pages, [2, 1]);
    let left = server.get(CONFIG_MAPS).await.body;
    assert_eq!(left["items"].as_array().unwrap().len(), 2, "{left}");
}

#[tokio::test]
async fn deprecated_paths_of_watches_are_served() {
    let server = Fixture::new().await;
    for name in ["a", "b"] {
        server.post(CONFIG_MAPS, config_map(name, json!({}))).await;
    }
    for (path, name) in [
        ("namespaces/default/configmaps", "a"),
        ("namespaces/default/configmaps/b", "b"),
        ("namespaces/default/configmaps?fieldSelector=metadata.name%3Db", "b"),
        ("namespaces/kube-system", "kube-system"),
    ] {
        let event = server.first_event(&format!("/api/v1/watch/{path}")).await;
        assert_eq!(event["type"], "ADDED", "{path}: {event}");
        assert_eq!(event["object"]["metadata"]["name"], name, "{path}");
    }
    for path in ["configmaps/b", "pods/p"] {
        let answer = server.get(&format!("/api/v1/watch/{path}")).await;
        assert_eq!((answer.code, &answer.body["reason"]), (404, &json!("NotFound")), "{path}");
    }
}

#[tokio::test]
async fn the_selectors_of_a_deletion_are_compared_with_current_objects() {
    let server = Fixture::new().await;
    let made = server.post(CONFIG_MAPS, config_map("a", json!({"owner": "ann"}))).await.body;
    let before = made["metadata"]["resourceVersion"].as_str().unwrap();
    let path = format!("{CONFIG_MAPS}/a");
    let given = json!({"metadata": {"labels": {"owner": "bob"}}});
    assert_eq!(server.merge(&path, given).await.code, 200);
    let at_revision = format!("resourceVersion={before}&resourceVersionMatch=Exact");
    for (owner, left) in [("ann", 200), ("bob", 404)] {
        let collection = format!("{CONFIG_MAPS}?labelSelector=owner%3D{owner}&{at_revision}");
        // The empty options in the body replace the query: its revision is not a precondition for each object.
        let deleted = server.delete(&collection, json!({})).await;
        assert_eq!(deleted.code, 200, "{}", deleted.body);
        assert_eq!(server.get(&path).await.code, left, "{owner}");
    }
}

#[tokio::test]
async fn watches_report_objects_that_enter_change_in_or_leave_their_selection() {
    let server = Fixture::new().await;
    let list = server.get(CONFIG_MAPS).await.body;
    let since = list["metadata"]["resourceVersion"].as_str().unwrap().to_owned();
    let path = format!("{CONFIG_MAPS}/a");
    server.post(CONFIG_MAPS, config_map("a", json!({"on": "no"}))).await;
    server.merge(&path, json!({"metadata": {"labels": {"on": "yes"}}})).await;
    server.merge(&path, json!({"data": {"key": "2"}})).await;
    server.merge(&path, json!({"metadata": {"labels": {"on": "no"}}})).await;
    server.merge(&path, json!({"metadata": {"labels": {"on": "yes"}}})).await;
    server.delete(&path, json!({})).await;
    let events = server.watch(&format!("{CONFIG_MAPS}?labelSelector=on%3Dyes&resourceVersion={since}")).await;
    let types: Vec<_> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    assert_eq!(types, ["ADDED", "MODIFIED", "DELETED", "ADDED", "DELETED"]);
    let last = &events[2]["object"];
    assert_eq!((&last["metadata"]["labels"]["on"], &last["data"]["key"]), (&json!("yes"), &json!("2")));
    let revisions: Vec<u64> = events
        .iter()
        .map(|event| event["object"]["metadata"]["resourceVersion"].as_str().unwrap().parse().unwrap())
        .collect();
    assert!(revisions.is_sorted_by(|a, b| a < b), "{revisions:?}");
}

#[tokio::test]
async fn a_watch_can_begin_with_existing_objects_and_marks_their_end() {
    let server = Fixture::new().await;
    server.post(CONFIG_MAPS, config_map("a", json!({}))).await;
    let query = "sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true";
    let events = server.watch(&format!("{CONFIG_MAPS}?{query}")).await;
    let types: Vec<_> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    assert_eq!(types, ["ADDED", "BOOKMARK", "BOOKMARK"], "the last one is sent before the end of the watch");
    assert!(events[2]["object"]["metadata"].get("annotations").is_none(), "{}", events[2]);
    let end = &events[1]["object"];
    assert_eq!(end["metadata"]["annotations"]["k8s.io/initial-events-end"], "true");
    assert_eq!(end["kind"], "ConfigMap");
    let metrics = server.get("/metrics").await.body.as_str().unwrap().to_owned();
    let labels = "group=\"\",resource=\"configmaps\",scope=\"namespace\",version=\"v1\"";
    let line = format!("apiserver_watch_list_duration_seconds_count{{{labels}}} 1");
    assert!(metrics.lines().any(|other| other == line), "no {line} in\n{metrics}");
    assert_eq!(server.get(&format!("{CONFIG_MAPS}?watch=1&sendInitialEvents=true")).await.code, 422);
}

#[tokio::test]
async fn bookmarks_keep_a_quiet_watch_current_and_a_watch_waits_for_a_future_revision() {
    let server = Fixture::new().await;
    let leases = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases";
    let made = server.post(leases, json!({"metadata": {"name": "n"}})).await;
    let since = made.body["metadata"]["resourceVersion"].as_str().unwrap().to_owned();
    let query =
        format!("resourceVersion={since}&fieldSelector=metadata.name%3Dother&allowWatchBookmarks=true");
    let churn = async {
        for n in 0..1100 {
            let renewed = json!({"spec": {"holderIdentity": n.to_string()}});
            assert_eq!(server.merge(&format!("{leases}/n"), renewed).await.code, 200);
        }
    };
    let quiet = format!("{leases}?watch=1&{query}");
    let (event, ()) = futures::future::join(server.first_event(&quiet), churn).await;
    assert_eq!((&event["type"], &event["object"]["kind"]), (&json!("BOOKMARK"), &json!("Lease")));
    let past = server.get(&format!("{leases}?watch=1&timeoutSeconds=1&resourceVersion={since}")).await;
    assert_eq!((past.code, &past.body["type"]), (200, &json!("ERROR")));
    assert_eq!(
        (&past.body["object"]["code"], &past.body["object"]["reason"]),
        (&json!(410), &json!("Expired"))
    );
    let future = server.get(&format!("{leases}?watch=1&timeoutSeconds=1&resourceVersion=99999999")).await;
    assert_eq!((future.code, &future.body), (200, &json!("")), "as upstream, it waits for that revision");
    let initial = "sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true";
    let future = server.get(&format!("{leases}?watch=1&{initial}&resourceVersion=99999999")).await;
    assert_eq!((future.code, &future.body["type"]), (200, &json!("ERROR")));
    let status = &future.body["object"];
    assert_eq!((&status["code"], &status["reason"]), (&json!(504), &json!("Timeout")));
    assert_eq!(status["details"]["causes"][0]["reason"], "ResourceVersionTooLarge");
    let listed = server.get(&format!("{leases}?resourceVersion=99999999")).await;
    assert_eq!(listed.code, 504);
}

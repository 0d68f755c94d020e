//! A start while the key management service of some stored objects does not respond.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use coracle_store::{
    Backup, Entry, Error as StoreError, Expect, Health, Page, Range, ReadablePage, Tier, Unreadable,
    UnreadableEntry, Watch, Write,
};
use futures::future::BoxFuture;

use super::*;

const SECRETS: &str = "/api/v1/namespaces/default/secrets";
const QUOTA: &str = "/api/v1/namespaces/default/resourcequotas/q";
const FOOS: &str = "/apis/example.com/v1/namespaces/default/foos";
const OPTION: &str = "ignoreStoreReadErrorWithClusterBreakingPotential";

type Outcome<'a, T> = BoxFuture<'a, std::result::Result<T, StoreError>>;

/// A store that cannot decrypt the entries under a prefix while their key management service does not respond.
struct Encrypted {
    store: Embedded,
    prefix: &'static str,
    is_away: Arc<AtomicBool>,
    /// Number of calls of [`Store::list`].
    lists: AtomicUsize,
    /// Number of calls of [`Store::get`].
    gets: AtomicUsize,
    /// Whether the store reports that other servers write to it.
    is_shared: bool,
    /// Whether entries that cannot be decrypted may be deleted.
    allows_deletions: bool,
    /// Whether lists omit the entries that cannot be decrypted, as if another server writes them after the start.
    hides_entries: bool,
}

impl Encrypted {
    fn new(store: Embedded, prefix: &'static str, is_away: Arc<AtomicBool>) -> Self {
        let [lists, gets] = [(); 2].map(|()| AtomicUsize::new(0));
        let (is_shared, allows_deletions, hides_entries) = (false, false, false);
        Self { store, prefix, is_away, lists, gets, is_shared, allows_deletions, hides_entries }
    }

    fn failure(&self, key: &str) -> Option<StoreError> {
        let is_unreadable = key.starts_with(self.prefix) && self.is_away.load(Ordering::SeqCst);
        let source = coracle_sealing::Error::Kms { name: "vault".to_owned(), reason: "away".to_owned() };
        is_unreadable.then(|| StoreError::Sealed { key: key.to_owned(), source })
    }
}

impl Store for Encrypted {
    fn get<'a>(&'a self, key: &'a str) -> Outcome<'a, Option<Entry>> {
        Box::pin(async move {
            self.gets.fetch_add(1, Ordering::SeqCst);
            let found = Store::get(&self.store, key).await?;
            match self.failure(key).filter(|_| found.is_some()) {
                Some(error) => Err(error),
                None => Ok(found),
            }
        })
    }

    fn revision_of<'a>(&'a self, key: &'a str) -> Outcome<'a, Option<u64>> {
        self.store.revision_of(key)
    }

    fn list(&self, range: Range) -> Outcome<'_, Page> {
        Box::pin(async move {
            self.lists.fetch_add(1, Ordering::SeqCst);
            let ReadablePage { page, unreadable } = self.list_readable(range).await?;
            unreadable.into_iter().next().map_or(Ok(page), |first| Err(first.error))
        })
    }

    fn list_readable(&self, range: Range) -> Outcome<'_, ReadablePage> {
        Box::pin(async move {
            let mut page = Store::list(&self.store, range).await?;
            let mut unreadable = Vec::new();
            for entry in std::mem::take(&mut page.entries) {
                match self.failure(&entry.key) {
                    Some(_) if self.hides_entries => {}
                    Some(error) => {
                        unreadable.push(Unreadable { key: entry.key, modified: entry.modified, error });
                    }
                    None => page.entries.push(entry),
                }
            }
            Ok(ReadablePage { page, unreadable })
        })
    }

    fn write(&self, write: Write) -> Outcome<'_, u64> {
        // A client may try to create an object whose stored entry is unreadable.
        let is_new = write.expect == Expect::Absent && !self.prefix.ends_with('/');
        let is_deletion = self.allows_deletions && write.value.is_none();
        assert!(
            is_new || is_deletion || self.failure(&write.key).is_none(),
            "a write of {} while its resource is unreadable",
            write.key
        );
        self.store.write(write)
    }

    fn watch<'a>(&'a self, prefix: &'a str, after: u64) -> Outcome<'a, Watch> {
        self.store.watch(prefix, after)
    }

    fn compact(&self, revision: u64) -> Outcome<'_, ()> {
        self.store.compact(revision)
    }

    fn revision(&self) -> Outcome<'_, u64> {
        self.store.revision()
    }

    fn health(&self) -> Health {
        self.store.health()
    }

    fn is_shared(&self) -> bool {
        self.is_shared
    }

    fn is_current<'a>(&'a self, key: &'a str) -> Outcome<'a, bool> {
        self.store.is_current(key)
    }

    fn backup(&self) -> std::result::Result<Backup, StoreError> {
        self.store.backup()
    }
}

/// Restarts a server while the key management service of the entries under a prefix does not respond. The service
/// responds again when the flag is false.
async fn restarted_without(prefix: &'static str, server: Fixture) -> (Fixture, Arc<AtomicBool>) {
    let (store, directory) = server.close().await;
    let is_away = Arc::new(AtomicBool::new(true));
    let store = Arc::new(Encrypted::new(store, prefix, is_away.clone()));
    let responds = crate::EncryptionHealth(Arc::new(|| Ok::<(), String>(())));
    let api = open_on(store, directory.path(), |config| config.encryption_health = Some(responds)).await;
    (Fixture { api, directory }, is_away)
}

/// Restarts a server that cannot decrypt the entries under a prefix, with unsafe deletions and an audit log.
async fn restarted_with_unsafe_deletions(prefix: &'static str, server: Fixture) -> Fixture {
    let (store, directory) = server.close().await;
    let encrypted = Encrypted::new(store, prefix, Arc::new(AtomicBool::new(true)));
    let store = Arc::new(Encrypted { allows_deletions: true, ..encrypted });
    let audit = audit::config_of(directory.path(), "[{level: Metadata}]");
    let configure = |config: &mut ApiserverConfig| {
        config.features.unsafe_deletion = true;
        config.audit = Some(audit);
    };
    Fixture { api: open_on(store, directory.path(), configure).await, directory }
}

/// A server that cannot decrypt an object, because another server has written it after the start.
async fn with_unreadable(collection: &str, object: Value, key: &'static str) -> Fixture {
    let server = Fixture::new().await;
    let made = server.post(collection, object).await;
    assert_eq!(made.code, 201, "{}", made.body);
    let (store, directory) = server.close().await;
    let encrypted = Encrypted::new(store, key, Arc::new(AtomicBool::new(true)));
    let store = Arc::new(Encrypted { allows_deletions: true, hides_entries: true, ..encrypted });
    let configure = |config: &mut ApiserverConfig| config.features.unsafe_deletion = true;
    let server = Fixture { api: open_on(store, directory.path(), configure).await, directory };
    let state = &server.api.state;
    let modified = state.store.revision_of(key).await.unwrap().unwrap();
    state.cache.note_unreadable(UnreadableEntry { key: key.into(), modified, service: Some("vault".into()) });
    server
}

async fn assert_metric(server: &Fixture, line: &str) {
    let metrics = server.get("/metrics").await.body;
    assert!(metrics.as_str().unwrap().lines().any(|one| one == line), "no {line} in\n{metrics}");
}

fn secret(name: &str) -> Value {
    json!({"metadata": {"name": name}, "stringData": {"key": name}})
}

fn assert_unreadable(answer: &Answer, resource: &str, what: &str) {
    assert_eq!(
        (answer.code, &answer.body["reason"]),
        (500, &json!("InternalError")),
        "{what} {}",
        answer.body
    );
    let message = answer.body["message"].as_str().unwrap();
    let expect = format!("Internal error occurred: unable to transform {resource} from storage");
    assert!(message.starts_with(&expect), "{what}: {message}");
}

async fn used_secrets(server: &Fixture) -> Value {
    server.get(QUOTA).await.body["status"]["used"]["secrets"].clone()
}

#[tokio::test]
async fn other_resources_work_while_secrets_cannot_be_decrypted_and_secrets_return_later() {
    let server = Fixture::new().await;
    let quota = json!({"metadata": {"name": "q"}, "spec": {"hard": {"secrets": "2", "configmaps": "9"}}});
    assert_eq!(server.post("/api/v1/namespaces/default/resourcequotas", quota).await.code, 201);
    let made = server.post(SECRETS, secret("a")).await;
    assert_eq!(made.code, 201, "{}", made.body);
    eventually_async("the quota counts", 20, async || used_secrets(&server).await == "1").await;
    let (server, is_away) = restarted_without("/secrets/", server).await;
    assert_eq!(server.post(CONFIG_MAPS, config_map("m", json!({}))).await.code, 201);
    assert_eq!(server.get(&format!("{CONFIG_MAPS}/m")).await.code, 200);
    let (one, absent) = (format!("{SECRETS}/a"), format!("{SECRETS}/absent"));
    for path in ["/api/v1/secrets", SECRETS, &one, &absent, &format!("{SECRETS}?watch=1")] {
        assert_unreadable(&server.get(path).await, "secrets", path);
    }
    let created = server.post(SECRETS, secret("absent")).await;
    assert_unreadable(&created, "secrets", "create");
    assert_unreadable(&server.put(&one, secret("a")).await, "secrets", "update");
    assert_unreadable(&server.merge(&one, json!({"data": {}})).await, "secrets", "patch");
    assert_unreadable(&server.delete(&one, json!({})).await, "secrets", "delete");
    assert_unreadable(&server.delete(SECRETS, json!({})).await, "secrets", "delete all");
    let bound = json!({"spec": {"boundObjectRef": {"apiVersion": "v1", "kind": "Secret", "name": "absent"}}});
    let token = server.post("/api/v1/namespaces/default/serviceaccounts/default/token", bound).await;
    assert_unreadable(&token, "secrets", "bound token");
    assert_eq!(server.get("/readyz").await.code, 200, "the services respond");
    for metric in ["apiserver_resource_objects", "coracle_undecryptable_objects"] {
        assert_metric(&server, &format!("{metric}{{group=\"\",resource=\"secrets\"}} -1")).await;
    }
    assert_eq!(used_secrets(&server).await, "1");
    is_away.store(false, Ordering::SeqCst);
    eventually_async("the Secret is readable", 60, async || server.get(&one).await.code == 200).await;
    assert_eq!(server.get(&one).await.body["metadata"]["uid"], made.body["metadata"]["uid"]);
    assert_eq!(server.post(SECRETS, secret("b")).await.code, 201);
    assert_eq!(server.post(SECRETS, secret("c")).await.code, 403, "the quota counts the first Secret");
    eventually_async("the quota counts", 20, async || used_secrets(&server).await == "2").await;
}

#[tokio::test]
async fn a_custom_resource_that_cannot_be_decrypted_has_its_own_error_and_returns_later() {
    let server = Fixture::new().await;
    custom_resources::established(&server, custom_resources::definition("foos", "Foo")).await;
    let foo = |name: &str| json!({"apiVersion": "example.com/v1", "kind": "Foo", "metadata": {"name": name}});
    let made = server.post(FOOS, foo("a")).await;
    assert_eq!((made.code, server.post(FOOS, foo("b")).await.code), (201, 201), "{}", made.body);
    let (server, is_away) = restarted_without("example.com/foos/default/a", server).await;
    let (one, other) = (format!("{FOOS}/a"), format!("{FOOS}/b"));
    assert_eq!(server.get(&other).await.code, 200);
    assert_eq!(server.get(&format!("{FOOS}/absent")).await.code, 404);
    let named = |name: &str| format!("{FOOS}?fieldSelector=metadata.name%3D{name}");
    assert_eq!(server.get(&named("b")).await.body["items"].as_array().map(Vec::len), Some(1));
    assert_eq!(server.get("/apis/example.com/v1/namespaces/other/foos").await.code, 200);
    for path in [&*one, FOOS, &named("a"), &format!("{FOOS}?watch=1"), "/apis/example.com/v1/foos"] {
        assert_unreadable(&server.get(path).await, "foos.example.com", path);
    }
    let refused = [
        ("update", server.put(&one, made.body.clone()).await),
        ("patch", server.merge(&one, json!({"metadata": {"labels": {"a": "b"}}})).await),
        ("delete", server.delete(&one, json!({})).await),
        ("delete all", server.delete(FOOS, json!({})).await),
    ];
    for (what, answer) in &refused {
        assert_unreadable(answer, "foos.example.com", what);
    }
    let taken = server.post(FOOS, foo("a")).await;
    assert_eq!((taken.code, &taken.body["reason"]), (409, &json!("AlreadyExists")));
    assert_eq!(server.post(FOOS, foo("c")).await.code, 201);
    assert_eq!(server.get("/readyz").await.code, 200, "the services respond");
    let metric = "coracle_undecryptable_objects{group=\"example.com\",resource=\"foos\"}";
    assert_metric(&server, &format!("{metric} 1")).await;
    is_away.store(false, Ordering::SeqCst);
    eventually_async("the object is readable", 60, async || server.get(&one).await.code == 200).await;
    let found = server.get(&one).await.body;
    for field in ["uid", "resourceVersion"] {
        assert_eq!(found["metadata"][field], made.body["metadata"][field], "{field}");
    }
    assert_eq!(server.get(FOOS).await.body["items"].as_array().map(Vec::len), Some(3));
    let labeled = server.merge(&one, json!({"metadata": {"labels": {"a": "b"}}})).await;
    assert_eq!(labeled.code, 200, "{}", labeled.body);
}

#[tokio::test]
async fn a_custom_resource_that_cannot_be_decrypted_counts_for_a_quota() {
    let server = Fixture::new().await;
    custom_resources::established(&server, custom_resources::definition("foos", "Foo")).await;
    let quota = json!({"metadata": {"name": "q"}, "spec": {"hard": {"count/foos.example.com": "3"}}});
    assert_eq!(server.post("/api/v1/namespaces/default/resourcequotas", quota).await.code, 201);
    let foo = |name: &str| json!({"apiVersion": "example.com/v1", "kind": "Foo", "metadata": {"name": name}});
    for name in ["a", "b"] {
        assert_eq!(server.post(FOOS, foo(name)).await.code, 201);
    }
    let (server, is_away) = restarted_without("example.com/foos/default/a", server).await;
    assert_eq!(server.post(FOOS, foo("c")).await.code, 201);
    let refused = server.post(FOOS, foo("d")).await;
    assert_eq!(refused.code, 403, "{}", refused.body);
    is_away.store(false, Ordering::SeqCst);
    let one = format!("{FOOS}/a");
    eventually_async("the object is readable", 60, async || server.get(&one).await.code == 200).await;
    assert_eq!(server.post(FOOS, foo("d")).await.code, 403, "it counts once");
    assert_eq!(server.delete(&one, json!({})).await.code, 200);
    assert_eq!(server.post(FOOS, foo("d")).await.code, 201);
}

#[tokio::test]
async fn a_watch_of_one_object_works_while_another_one_cannot_be_decrypted() {
    let server = Fixture::new().await;
    custom_resources::established(&server, custom_resources::definition("foos", "Foo")).await;
    for name in ["a", "b"] {
        let foo = json!({"apiVersion": "example.com/v1", "kind": "Foo", "metadata": {"name": name}});
        assert_eq!(server.post(FOOS, foo).await.code, 201);
    }
    let (server, _is_away) = restarted_without("example.com/foos/default/a", server).await;
    let path = |name: &str| format!("{FOOS}?watch=1&timeoutSeconds=1&fieldSelector=metadata.name%3D{name}");
    let events = server.watch(&path("b")).await;
    assert_eq!(events[0]["object"]["metadata"]["name"], "b", "{events:?}");
    assert_unreadable(&server.get(&path("a")).await, "foos.example.com", "watch");
}

/// A call of a key management service that does not respond lasts up to its timeout.
#[tokio::test]
async fn single_objects_are_read_again_with_one_call_of_a_failed_service() {
    let server = Fixture::new().await;
    for name in ["a", "b", "c"] {
        assert_eq!(server.post(SECRETS, secret(name)).await.code, 201);
    }
    let (store, _directory) = server.close().await;
    let store = Encrypted::new(store, "/secrets/default/", Arc::new(AtomicBool::new(false)));
    let (cache, _watch) = crate::cache::Cache::load(&store).await.unwrap();
    let revision = cache.revision();
    assert!(!cache.read_again(&store).await.unwrap());
    assert_eq!(store.gets.load(Ordering::SeqCst), 0, "no object is unreadable");
    store.is_away.store(true, Ordering::SeqCst);
    let entry = |name: &str| UnreadableEntry {
        key: format!("/secrets/default/{name}").into(),
        modified: revision + 1,
        service: Some("vault".into()),
    };
    let page = Page { entries: Vec::new(), revision: revision + 1, more: false };
    cache.resync(page, &["a", "b", "c"].map(entry));
    assert!(!cache.read_again(&store).await.unwrap());
    assert_eq!(store.gets.load(Ordering::SeqCst), 1);
    assert!(cache.has_unreadable_objects());
}

/// A service may refuse the key of one object for ever, and decrypt others.
#[tokio::test]
async fn an_object_that_a_service_refuses_does_not_hide_others_of_the_service() {
    let server = Fixture::new().await;
    for name in ["a", "b"] {
        assert_eq!(server.post(SECRETS, secret(name)).await.code, 201);
    }
    let (store, _directory) = server.close().await;
    let store = Encrypted::new(store, "/secrets/default/a", Arc::new(AtomicBool::new(false)));
    let (cache, _watch) = crate::cache::Cache::load(&store).await.unwrap();
    store.is_away.store(true, Ordering::SeqCst);
    let mut lost = Vec::new();
    for key in ["/secrets/default/a", "/secrets/default/b"] {
        let modified = store.revision_of(key).await.unwrap().unwrap();
        lost.push(UnreadableEntry { key: key.into(), modified, service: Some("vault".into()) });
    }
    let revision = cache.revision() + 1;
    cache.resync(Page { entries: Vec::new(), revision, more: false }, &lost);
    assert!(!cache.read_again(&store).await.unwrap(), "the pass ends at the first failure of the service");
    assert!(cache.read_again(&store).await.unwrap(), "the next pass begins after it");
}

/// A server with two custom resources, whose user `bob` may delete them.
async fn with_objects_and_a_deleter() -> Fixture {
    let server = Fixture::new().await;
    custom_resources::established(&server, custom_resources::definition("foos", "Foo")).await;
    for name in ["a", "b"] {
        let foo = json!({"apiVersion": "example.com/v1", "kind": "Foo", "metadata": {"name": name}});
        assert_eq!(server.post(FOOS, foo).await.code, 201);
    }
    let rbac = "/apis/rbac.authorization.k8s.io/v1";
    let rules = json!([{"apiGroups": ["example.com"], "resources": ["foos"], "verbs": ["delete"]}]);
    let role = json!({"metadata": {"name": "deleter"}, "rules": rules});
    assert_eq!(server.post(&format!("{rbac}/clusterroles"), role).await.code, 201);
    let binding = json!({"metadata": {"name": "deleter"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "deleter"},
        "subjects": [{"kind": "User", "name": "bob", "apiGroup": "rbac.authorization.k8s.io"}]});
    assert_eq!(server.post(&format!("{rbac}/clusterrolebindings"), binding).await.code, 201);
    server
}

#[tokio::test]
async fn an_unsafe_deletion_needs_a_right_of_its_own_and_removes_only_unreadable_objects() {
    let server = with_objects_and_a_deleter().await;
    let server = restarted_with_unsafe_deletions("example.com/foos/default/a", server).await;
    let (one, other, option) = (format!("{FOOS}/a"), format!("{FOOS}/b"), json!({(OPTION): true}));
    let key = "example.com/foos/default/a";
    let corrupt = format!("StorageError: corrupt object, Code: 7, Key: {key}, ");
    let list = server.get(FOOS).await;
    let details = &list.body["details"];
    assert_eq!((list.code, &list.body["reason"]), (500, &json!("StorageReadError")));
    assert_eq!((&details["name"], &details["causes"][0]["field"]), (&json!("list"), &json!(key)));
    let query = format!("{other}?{OPTION}=true");
    let refused = [
        (server.delete(&one, json!({})).await, 500, &*corrupt),
        (
            server.delete(&one, json!({(OPTION): true, "gracePeriodSeconds": 0})).await,
            422,
            "together with .grace",
        ),
        (server.delete(FOOS, option.clone()).await, 422, "is not allowed with DELETECOLLECTION"),
        (server.call("DELETE", &query, "", None).await, 422, "foos.example.com \"b\" is invalid: "),
        (server.delete(&other, option.clone()).await, 422, "is exclusively used to delete corrupt object(s)"),
        (
            server.delete("/api/v1/namespaces/default", option.clone()).await,
            500,
            "no unsafe deleter provided",
        ),
    ];
    for (answer, code, part) in &refused {
        let message = answer.body["message"].as_str().unwrap();
        assert!(answer.code == *code && message.contains(part), "{part}: {}", answer.body);
    }
    let request = Request::builder().method("DELETE").uri(&one).header("content-type", "application/json");
    let request = request.body(Full::new(option.to_string().into())).unwrap();
    let answer = server.send(User::new("bob", &[]), request).await;
    let why = "is forbidden: not permitted to do \"unsafe-delete-ignore-read-errors\", reason: ";
    assert!(answer.code == 403 && answer.body["message"].as_str().unwrap().contains(why), "{}", answer.body);
    assert_eq!(server.get(&one).await.code, 500);
    let deleted = server.delete(&one, option).await;
    assert_eq!((deleted.code, &deleted.body["details"]), (200, &json!({"name": "a", "kind": "Foo"})));
    assert_eq!(server.get(&one).await.code, 404);
    assert_eq!(server.get(FOOS).await.body["items"].as_array().map(Vec::len), Some(1));
    let events = audit::events(&server, &one, 5).await;
    let is_annotated = |event: &Value| {
        let annotation = &event["annotations"]["apiserver.k8s.io/unsafe-delete-ignore-read-error"];
        event["verb"] == "delete" && *annotation == ""
    };
    // One request of bob and one of the administrator. The other requests lack the option, or their options are
    // invalid.
    assert_eq!(events.iter().filter(|event| is_annotated(event)).count(), 2);
}

#[tokio::test]
async fn an_unsafe_deletion_of_a_secret_whose_key_is_lost_makes_the_others_available() {
    let server = Fixture::new().await;
    for name in ["a", "b"] {
        assert_eq!(server.post(SECRETS, secret(name)).await.code, 201);
    }
    let server = restarted_with_unsafe_deletions("/secrets/default/a", server).await;
    let (one, other) = (format!("{SECRETS}/a"), format!("{SECRETS}/b"));
    assert_unreadable(&server.get(&other).await, "secrets", "get");
    let option = json!({(OPTION): true});
    assert_eq!(server.delete(&other, option.clone()).await.code, 422, "it can be decrypted");
    assert_eq!(server.delete(&one, option).await.code, 200);
    eventually_async("the other Secret is available", 60, async || server.get(&other).await.code == 200)
        .await;
    assert_eq!(server.get(&one).await.code, 404);
}

#[tokio::test]
async fn without_the_feature_gate_the_option_of_an_unsafe_deletion_has_no_effect() {
    let server = Fixture::new().await;
    assert_eq!(server.post(CONFIG_MAPS, config_map("m", json!({}))).await.code, 201);
    let option = json!({(OPTION): true, "gracePeriodSeconds": 0});
    assert_eq!(server.delete(&format!("{CONFIG_MAPS}/m"), option).await.code, 200);
}

#[tokio::test]
async fn the_server_writes_its_config_maps_when_they_can_be_decrypted() {
    let tracking =
        "/api/v1/namespaces/kube-system/configmaps/kube-apiserver-legacy-service-account-token-tracking";
    let server = Fixture::new().await;
    assert_eq!(server.delete(tracking, json!({})).await.code, 200);
    assert_eq!(server.post(CONFIG_MAPS, config_map("a", json!({}))).await.code, 201);
    let (server, is_away) = restarted_without("/configmaps/", server).await;
    assert_unreadable(&server.get(tracking).await, "configmaps", "get");
    assert_eq!(server.post(SECRETS, secret("a")).await.code, 201);
    is_away.store(false, Ordering::SeqCst);
    eventually_async("the config map exists", 60, async || server.get(tracking).await.code == 200).await;
    assert_eq!(server.get(&format!("{CONFIG_MAPS}/a")).await.code, 200);
}

#[tokio::test]
async fn a_server_writes_its_new_authorities_into_a_shared_store_later() {
    const MAP: &str = "/api/v1/namespaces/kube-system/configmaps/extension-apiserver-authentication";
    let server = Fixture::new().await;
    let server = server.again_with(|config| config.front_proxy.authority = "old".to_owned()).await;
    let authority =
        async |server: &Fixture| server.get(MAP).await.body["data"]["requestheader-client-ca-file"].clone();
    assert_eq!(authority(&server).await, "old");
    let (store, directory) = server.close().await;
    let is_away = Arc::new(AtomicBool::new(true));
    let store = Encrypted { is_shared: true, ..Encrypted::new(store, "/configmaps/", is_away.clone()) };
    let configure = |config: &mut ApiserverConfig| config.front_proxy.authority = "new".to_owned();
    let server = Fixture { api: open_on(Arc::new(store), directory.path(), configure).await, directory };
    assert_unreadable(&server.get(MAP).await, "configmaps", "get");
    is_away.store(false, Ordering::SeqCst);
    let is_new = async || authority(&server).await == "new";
    eventually_async("the config map has the new authority", 60, is_new).await;
}

#[tokio::test]
async fn a_policy_fails_while_its_parameters_cannot_be_decrypted() {
    let server = Fixture::new().await;
    assert_eq!(server.post(CONFIG_MAPS, config_map("params", json!({}))).await.code, 201);
    let rules = json!([{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"],
        "resources": ["secrets"]}]);
    let policy = json!({"metadata": {"name": "p"}, "spec": {
        "paramKind": {"apiVersion": "v1", "kind": "ConfigMap"},
        "matchConstraints": {"resourceRules": rules},
        "validations": [{"expression": "true"}],
    }});
    let binding = json!({"metadata": {"name": "b"}, "spec": {"policyName": "p", "validationActions": ["Deny"],
        "paramRef": {"name": "params", "namespace": "default", "parameterNotFoundAction": "Allow"}}});
    let group = "/apis/admissionregistration.k8s.io/v1";
    for (resource, object) in
        [("validatingadmissionpolicies", policy), ("validatingadmissionpolicybindings", binding)]
    {
        let made = server.post(&format!("{group}/{resource}"), object).await;
        assert_eq!(made.code, 201, "{}", made.body);
    }
    let (server, is_away) = restarted_without("/configmaps/", server).await;
    let refused = server.post(SECRETS, secret("a")).await;
    let message = refused.body["message"].as_str().unwrap();
    let expect = "paramKind kind `v1, Kind=ConfigMap` not yet synced to use for admission";
    assert!(refused.code == 422 && message.contains(expect), "{}", refused.body);
    is_away.store(false, Ordering::SeqCst);
    let is_created = async || server.post(SECRETS, secret("a")).await.code == 201;
    eventually_async("the policy has its parameters", 60, is_created).await;
}

#[tokio::test]
async fn a_webhook_that_cannot_be_decrypted_denies_requests_until_it_is_deleted() {
    const HOOKS: &str = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations";
    let configuration = |name: &str| json!({"metadata": {"name": name}});
    let key = "admissionregistration.k8s.io/validatingwebhookconfigurations/lost";
    let server = with_unreadable(HOOKS, configuration("lost"), key).await;
    let resource = "validatingwebhookconfigurations.admissionregistration.k8s.io";
    let map = config_map("m", json!({}));
    assert_unreadable(&server.post(CONFIG_MAPS, map.clone()).await, resource, "config map");
    assert_unreadable(&server.post(PODS, pod("p")).await, resource, "pod");
    // Admission does not stop requests for configurations, so that an administrator can repair them.
    assert_eq!(server.post(HOOKS, configuration("other")).await.code, 201);
    assert_eq!(server.delete(&format!("{HOOKS}/other"), json!({})).await.code, 200);
    let deleted = server.delete(&format!("{HOOKS}/lost"), json!({(OPTION): true})).await;
    assert_eq!(deleted.code, 200, "{}", deleted.body);
    assert_eq!(server.post(CONFIG_MAPS, map).await.code, 201);
    assert_eq!(server.post(PODS, pod("p")).await.code, 201);
}

#[tokio::test]
async fn a_policy_binding_that_cannot_be_decrypted_denies_requests_until_it_is_deleted() {
    const BINDINGS: &str = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings";
    let binding = |name: &str| json!({"metadata": {"name": name}, "spec": {"policyName": "p", "validationActions": ["Deny"]}});
    let key = "admissionregistration.k8s.io/validatingadmissionpolicybindings/lost";
    let server = with_unreadable(BINDINGS, binding("lost"), key).await;
    let resource = "validatingadmissionpolicybindings.admissionregistration.k8s.io";
    let map = config_map("m", json!({}));
    assert_unreadable(&server.post(CONFIG_MAPS, map.clone()).await, resource, "config map");
    assert_unreadable(&server.post(PODS, pod("p")).await, resource, "pod");
    assert_eq!(server.post(BINDINGS, binding("other")).await.code, 201);
    assert_eq!(server.delete(&format!("{BINDINGS}/other"), json!({})).await.code, 200);
    let deleted = server.delete(&format!("{BINDINGS}/lost"), json!({(OPTION): true})).await;
    assert_eq!(deleted.code, 200, "{}", deleted.body);
    assert_eq!(server.post(CONFIG_MAPS, map).await.code, 201);
}

#[tokio::test]
async fn a_limit_range_that_cannot_be_decrypted_denies_pods_until_it_is_deleted() {
    const RANGES: &str = "/api/v1/namespaces/default/limitranges";
    let range = json!({"metadata": {"name": "lost"},
        "spec": {"limits": [{"type": "Container", "max": {"cpu": "1"}}]}});
    let server = with_unreadable(RANGES, range, "/limitranges/default/lost").await;
    assert_unreadable(&server.post(PODS, pod("p")).await, "limitranges", "pod");
    assert_eq!(server.post(CONFIG_MAPS, config_map("m", json!({}))).await.code, 201);
    let deleted = server.delete(&format!("{RANGES}/lost"), json!({(OPTION): true})).await;
    assert_eq!(deleted.code, 200, "{}", deleted.body);
    assert_eq!(server.post(PODS, pod("p")).await.code, 201);
}

#[tokio::test]
async fn the_server_does_not_start_without_roles() {
    let server = Fixture::new().await;
    let (store, _directory) = server.close().await;
    let store = Encrypted::new(store, "rbac.authorization.k8s.io/", Arc::new(AtomicBool::new(true)));
    let refused = crate::cache::Cache::load(&store).await.err().unwrap();
    assert!(refused.is_of_service(), "{refused}");
}

/// An attempt reads one object before it lists all objects. If that object no longer existed, each attempt would list
/// all objects.
#[tokio::test]
async fn an_attempt_to_load_reads_an_object_that_still_exists() {
    let server = Fixture::new().await;
    for name in ["a", "b"] {
        assert_eq!(server.post(SECRETS, secret(name)).await.code, 201);
    }
    let (store, _directory) = server.close().await;
    let store = Encrypted::new(store, "/secrets/", Arc::new(AtomicBool::new(true)));
    let (cache, _watch) = crate::cache::Cache::load(&store).await.unwrap();
    let secrets = cache.unreadable().remove(0);
    // Another server deletes the Secret.
    let key = "/secrets/default/a";
    let found = Store::get(&store.store, key).await.unwrap().unwrap();
    let expect = Expect::Revision(found.modified);
    let deletion = Write { key: key.into(), expect, value: None, tier: Tier::Durable, guard: None };
    store.store.write(deletion).await.unwrap();
    for _ in 0..3 {
        let error = cache.load_unreadable(&store, &secrets).await.unwrap_err();
        assert!(error.is_of_service(), "{error}");
    }
    assert_eq!(store.lists.load(Ordering::SeqCst), 1, "later attempts read the other Secret only");
    store.is_away.store(false, Ordering::SeqCst);
    cache.load_unreadable(&store, &secrets).await.unwrap();
    assert!(cache.unreadable().is_empty());
}

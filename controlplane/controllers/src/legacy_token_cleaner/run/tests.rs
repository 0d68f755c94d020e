//! The controller against a simulated API.

use std::convert::Infallible;
use std::sync::{Mutex, PoisonError};

use http::{Method, Response};

use super::*;
use crate::config::ControllersConfig;

/// An API with one ConfigMap, two pages of pods and a log of the writes.
#[derive(Clone)]
struct Api {
    since: &'static str,
    writes: Arc<Mutex<Vec<Value>>>,
}

impl Api {
    fn new(since: &'static str) -> Self {
        Self { since, writes: Arc::default() }
    }

    async fn answer(&self, request: http::Request<kube::client::Body>) -> Response<String> {
        let (head, body) = request.into_parts();
        let path = head.uri.path().to_owned();
        let pod = |secret: &str| json!({"spec": {"volumes": [{"secret": {"secretName": secret}}]}});
        let is_second = head.uri.query().unwrap_or_default().contains("continue=rest");
        if head.method == Method::GET {
            let answer = match path.rsplit('/').next().unwrap() {
                TRACKING => json!({"metadata": {"name": TRACKING}, "data": {"since": self.since}}),
                "pods" if is_second => json!({"metadata": {}, "items": [pod("mounted")]}),
                "pods" => json!({"metadata": {"continue": "rest"}, "items": [pod("other")]}),
                other => panic!("GET {other}"),
            };
            return Response::new(answer.to_string());
        }
        let name = path.rsplit('/').next().unwrap().to_owned();
        let body: Value = serde_json::from_slice(&body.collect_bytes().await.unwrap()).unwrap();
        let mut writes = self.writes.lock().unwrap_or_else(PoisonError::into_inner);
        writes.push(json!([head.method.as_str(), name, body]));
        let mut answer = secret(&name, "2000-01-01T00:00:00Z", &json!({}));
        answer["metadata"]["resourceVersion"] = json!((100 + writes.len()).to_string());
        let deleted = json!({"kind": "Status", "apiVersion": "v1", "status": "Success"});
        Response::new(if head.method == Method::DELETE { deleted } else { answer }.to_string())
    }

    fn context(&self) -> Context {
        let api = self.clone();
        let service = tower::service_fn(move |request| {
            let api = api.clone();
            async move { Ok::<_, Infallible>(api.answer(request).await) }
        });
        let client = kube::Client::new(service, "default");
        let recorder = coracle_events::recorder(client.clone(), "").0;
        Context::new(client, recorder, ControllersConfig::default())
    }
}

fn secret(name: &str, created: &str, labels: &Value) -> Value {
    let annotations = json!({"kubernetes.io/service-account.name": "a"});
    json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name, "namespace": "n", "uid": name,
        "resourceVersion": "7", "creationTimestamp": created, "labels": labels, "annotations": annotations}})
}

/// A context with Secrets and a service account, which lists all of these Secrets except `manual`.
fn filled(api: &Api) -> Context {
    let context = api.context();
    let old = "2000-01-01T00:00:00Z";
    let today = day(Timestamp::now());
    let all = [
        secret("unused", old, &json!({})),
        secret("mounted", old, &json!({})),
        secret("manual", old, &json!({})),
        secret("new", &Timestamp::now().to_string(), &json!({})),
        secret("used", old, &json!({"kubernetes.io/legacy-token-last-used": today})),
        secret("marked", old, &json!({INVALID_SINCE: today})),
        secret("ended", old, &json!({INVALID_SINCE: "2010-01-01"})),
    ];
    let names: Vec<_> =
        ["unused", "mounted", "new", "used", "marked", "ended"].map(|name| json!({"name": name})).into();
    let account = json!({"metadata": {"name": "a", "namespace": "n", "uid": "1", "resourceVersion": "1"}, "secrets": names});
    context.caches.service_accounts.written(serde_json::from_value(account).unwrap());
    for secret in all {
        context.caches.account_tokens.written(serde_json::from_value(secret).unwrap());
    }
    context
}

#[tokio::test]
async fn an_unused_generated_token_is_marked_and_one_that_was_marked_long_ago_is_deleted() {
    let api = Api::new("2001-01-01");
    let context = filled(&api);
    let next = reconcile(&context, Key::new("", "n")).await.unwrap();
    assert!(matches!(next, Next::After(wait) if wait == RECHECK), "the mounted Secret is considered again");
    let writes = api.writes.lock().unwrap().clone();
    let names: Vec<_> =
        writes.iter().map(|write| (write[0].as_str().unwrap(), write[1].as_str().unwrap())).collect();
    assert_eq!(names, [("DELETE", "ended"), ("PATCH", "unused")]);
    assert_eq!(writes[0][2]["preconditions"], json!({"uid": "ended", "resourceVersion": "7"}));
    let patched = &writes[1][2]["metadata"];
    assert_eq!(patched["labels"], json!({INVALID_SINCE: day(Timestamp::now())}));
    assert_eq!(patched["resourceVersion"], "7");
}

#[tokio::test]
async fn nothing_is_marked_before_uses_were_recorded_for_the_period() {
    let recent = day(Timestamp::now()).leak();
    for (since, expect) in [(&*recent, 365..=366), ("", 1..=1)] {
        let api = Api::new(since);
        let next = reconcile(&filled(&api), Key::new("", "n")).await.unwrap();
        let Next::After(wait) = next else { panic!("no timer") };
        assert!(expect.contains(&wait.as_secs().div_ceil(24 * 3600)), "{since:?}: {wait:?}");
        assert!(api.writes.lock().unwrap().is_empty());
    }
}

#[tokio::test(start_paused = true)]
async fn a_secret_is_queued_when_it_is_due_and_a_changed_one_a_day_later_at_the_earliest() {
    let context = Api::new("").context();
    let queue = Arc::new(Queue::new());
    listen(&context, &queue);
    let start = tokio::time::Instant::now();
    let (sender, mut queued) = tokio::sync::mpsc::unbounded_channel();
    let worker = queue.clone();
    tokio::spawn(async move {
        worker
            .work("test", |key: Key| {
                sender.send((key, start.elapsed())).unwrap();
                async { Ok(Next::Wait) }
            })
            .await;
    });
    let put = |version: &str, labels: &Value| {
        let mut secret = secret("s", "2000-01-01T00:00:00Z", labels);
        secret["metadata"]["resourceVersion"] = version.into();
        context.caches.account_tokens.written(serde_json::from_value(secret).unwrap());
    };
    put("1", &json!({}));
    let (key, at) = queued.recv().await.unwrap();
    assert_eq!((key, at.as_secs()), (Key::new("", "n"), 0));
    put("2", &json!({"other": "label"}));
    put("3", &json!({"kubernetes.io/legacy-token-last-used": "2001-01-01"}));
    let (_, at) = queued.recv().await.unwrap();
    assert!(at >= RECHECK && at < 2 * RECHECK, "{at:?}");
}

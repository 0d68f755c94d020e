use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use super::*;
use crate::extender::Extender;
use crate::fixture;

type Requests = Arc<Mutex<Vec<(String, Value)>>>;

/// An HTTP server with one response for each path, and the log of its requests. It does not answer a path whose
/// response is empty.
async fn server(responses: Vec<(&'static str, String)>) -> (String, Requests) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/below/", listener.local_addr().unwrap());
    let requests = Requests::default();
    let seen = requests.clone();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(serve(stream, responses.clone(), seen.clone()));
        }
    });
    (url, requests)
}

async fn serve(mut stream: TcpStream, responses: Vec<(&'static str, String)>, seen: Requests) {
    let mut bytes = Vec::new();
    loop {
        let end = loop {
            if let Some(end) = bytes.windows(4).position(|four| four == b"\r\n\r\n") {
                break end + 4;
            }
            if stream.read_buf(&mut bytes).await.unwrap_or(0) == 0 {
                return;
            }
        };
        let head = String::from_utf8_lossy(&bytes[..end]).to_lowercase();
        let length = head.split("content-length:").nth(1).and_then(|rest| rest.lines().next());
        let length: usize = length.map_or(0, |length| length.trim().parse().unwrap());
        while bytes.len() < end + length {
            stream.read_buf(&mut bytes).await.unwrap();
        }
        let path = head.split(' ').nth(1).unwrap_or_default().to_owned();
        let body = serde_json::from_slice(&bytes[end..end + length]).unwrap();
        bytes.drain(..end + length);
        let response = responses.iter().find(|(known, _)| *known == path).map(|(_, body)| body.clone());
        seen.lock().unwrap().push((path, body));
        let (status, body) = response.map_or((404, "null".to_owned()), |body| (200, body));
        if body.is_empty() {
            return std::future::pending().await;
        }
        let head = format!("HTTP/1.1 {status} x\r\ncontent-length: {}\r\n\r\n", body.len());
        let _ = stream.write_all(format!("{head}{body}").as_bytes()).await;
    }
}

/// An API server with the pods p and low, and the nodes a, b and c.
fn api() -> Client {
    let service = tower::service_fn(|request: http::Request<kube::client::Body>| async move {
        let path = request.uri().path().to_owned();
        let object = match path.rsplit('/').next() {
            Some("nodes") => {
                let items = ["a", "b", "c"].map(|name| json!({"metadata": {"name": name}}));
                json!({"items": items})
            }
            Some(name) => json!({"metadata": {"name": name, "uid": name, "labels": {"whole": "yes"}}}),
            None => Value::Null,
        };
        let body = kube::client::Body::from(object.to_string().into_bytes());
        Ok::<_, std::convert::Infallible>(http::Response::new(body))
    });
    Client::new(service, "")
}

fn remote(url: &str, change: impl FnOnce(&mut Extender)) -> Remote {
    let verb = |verb: &str| Some(verb.to_owned());
    let mut extender = Extender {
        url: url.to_owned(),
        filter: verb("filter"),
        prioritize: verb("score"),
        weight: 2,
        timeout: Duration::from_secs(600),
        knows_nodes: true,
        ..Extender::default()
    };
    change(&mut extender);
    Remote::new(extender).unwrap()
}

async fn ask(remotes: &[Remote]) -> Result<ExtenderResult, String> {
    let names = ["a", "b", "c"].map(str::to_owned).to_vec();
    nodes(&api(), remotes, &fixture::pod("p", json!({})), names, &SchedulerMetrics::default()).await
}

#[tokio::test]
async fn extenders_filter_the_nodes_in_order_and_score_those_that_are_left() {
    let filtered =
        json!({"NodeNames": ["a", "b"], "FailedNodes": {"c": "no\u{1b}room"}, "Error": "", "Nodes": null});
    let scores = json!([{"Host": "a", "Score": 7}, {"Host": "b", "Score": 1}, {"Host": "other", "Score": 9}]);
    let (url, requests) = server(vec![
        ("/below/filter", filtered.to_string()),
        ("/below/score", scores.to_string()),
        (
            "/below/lists",
            json!({"nodes": {"items": [{"metadata": {"name": "b"}}, {"metadata": {"name": "a"}}]}})
                .to_string(),
        ),
    ])
    .await;
    let second = remote(&url, |one| {
        (one.filter, one.prioritize, one.knows_nodes) = (Some("lists".to_owned()), None, false);
    });
    let advice = ask(&[remote(&url, |_| {}), second]).await.unwrap();
    assert_eq!(advice.scores, [("a".to_owned(), 140), ("b".to_owned(), 20)].into());
    let refused = &advice.refused["c"];
    assert_eq!((refused.reasons.as_slice(), refused.resolvable), (&["no\u{fffd}room".to_owned()][..], true));
    let requests = requests.lock().unwrap();
    assert_eq!(requests[0].1["NodeNames"], json!(["a", "b", "c"]));
    assert_eq!(requests[0].1["Pod"]["metadata"]["labels"], json!({"whole": "yes"}), "the whole pod is sent");
    assert_eq!(requests[1].1["NodeNames"], Value::Null);
    assert_eq!(
        requests[1].1["Nodes"]["items"],
        json!([{"metadata": {"name": "a"}}, {"metadata": {"name": "b"}}])
    );
}

#[tokio::test]
async fn a_failed_extender_is_an_error_unless_it_is_ignorable() {
    let too_long = format!("{{\"Error\": \"{}\"}}", "x".repeat(17 << 20));
    let (url, _) = server(vec![
        ("/below/error", json!({"Error": "no licence"}).to_string()),
        ("/below/foreign", json!({"NodeNames": ["a", "z"]}).to_string()),
        ("/below/silent", String::new()),
        ("/below/long", too_long),
        ("/below/invalid", "{".to_owned()),
    ])
    .await;
    let with = |verb: &'static str, ignorable: bool| {
        remote(&url, |one| {
            (one.filter, one.prioritize, one.ignorable) = (Some(verb.to_owned()), None, ignorable);
            if verb == "silent" {
                one.timeout = Duration::from_millis(50);
            }
        })
    };
    let cases = [
        ("error", "no licence"),
        ("foreign", "\"z\", which is not in the request"),
        ("silent", "no complete response within 50ms"),
        ("long", "length limit exceeded"),
        ("invalid", "invalid response"),
        ("missing", "status 404"),
    ];
    for (verb, expected) in cases {
        let error = ask(&[with(verb, false)]).await.unwrap_err();
        assert!(error.contains(expected) && error.contains(&url), "{verb}: {error}");
        let advice = ask(&[with(verb, true)]).await.unwrap();
        assert_eq!(advice.scores.len(), 3, "{verb}");
    }
    let failed = |one: &mut Extender| (one.filter, one.prioritize) = (None, Some("error".to_owned()));
    assert_eq!(ask(&[remote(&url, failed)]).await.unwrap().scores["a"], 0, "as upstream it has no scores");
}

#[tokio::test]
async fn an_extender_changes_the_victims_of_a_preemption() {
    let chosen = json!({"NodeNameToMetaVictims": {"a": {"Pods": [{"UID": "other"}], "NumPDBViolations": 0}}});
    let foreign = json!({"NodeNameToMetaVictims": {"a": {"Pods": [{"UID": "system"}]}}});
    let (url, requests) = server(vec![
        ("/below/chosen", chosen.to_string()),
        ("/below/foreign", foreign.to_string()),
        ("/below/none", json!({"NodeNameToMetaVictims": {}}).to_string()),
    ])
    .await;
    let spec = |priority: i32, cpu: &str| json!({"priority": priority, "containers": [{"resources": {"requests": {"cpu": cpu}}}]});
    let mut snapshot = fixture::snapshot(&[fixture::node("a", json!({})), fixture::node("b", json!({}))]);
    for (name, priority, cpu, node) in
        [("low", 1, "2", "a"), ("other", 2, "2", "a"), ("system", 90, "4", "b")]
    {
        snapshot.place(&fixture::pod(name, spec(priority, cpu)), node);
    }
    let pod = fixture::pod("p", spec(10, "2"));
    let profile = crate::config::Profile::default();
    let all = ["a".to_owned(), "b".to_owned()].into();
    let first = crate::preempt::search(&pod, &profile, &mut snapshot, &all).unwrap();
    let removable = crate::preempt::removable(&pod, &snapshot, &first);
    let found = || {
        let again =
            first.iter().map(|one| Preemption { node: one.node.clone(), victims: one.victims.clone() });
        again.collect()
    };
    let ask = async |verb: &str, knows_nodes: bool| {
        let remote =
            remote(&url, |one| (one.preempt, one.knows_nodes) = (Some(verb.to_owned()), knows_nodes));
        preemption(&api(), &[remote], &pod, found(), &removable).await
    };
    let names = |found: Vec<Preemption>| -> Vec<String> {
        found.into_iter().flat_map(|one| one.victims).map(|victim| victim.name).collect()
    };
    assert_eq!(names(ask("chosen", true).await.unwrap()), ["other"]);
    assert_eq!(names(ask("chosen", false).await.unwrap()), ["other"]);
    assert!(ask("none", true).await.unwrap().is_empty());
    let error = ask("foreign", true).await.unwrap_err();
    assert!(error.contains("no pod of lower priority with the uid \"system\""), "{error}");
    let requests = requests.lock().unwrap();
    assert_eq!(requests[0].1["NodeNameToMetaVictims"]["a"]["Pods"], json!([{"UID": "low"}]));
    let whole = &requests[1].1["NodeNameToVictims"]["a"];
    assert_eq!(
        (&whole["Pods"][0]["metadata"]["uid"], &whole["NumPDBViolations"]),
        (&json!("low"), &json!(0))
    );
}

#[tokio::test]
async fn an_extender_binds_the_pod() {
    let (url, requests) = server(vec![
        ("/below/bind", "{}".to_owned()),
        ("/below/refuse", json!({"error": "taken"}).to_string()),
    ])
    .await;
    let permits = Semaphore::new(1);
    let pod = fixture::pod("p", json!({}));
    let with = |verb: Option<&str>, ignorable: bool| {
        [remote(&url, |one| (one.bind, one.ignorable) = (verb.map(str::to_owned), ignorable))]
    };
    assert_eq!(bind(&with(None, false), &pod, "a", &permits).await, None);
    assert_eq!(bind(&with(Some("bind"), false), &pod, "a", &permits).await, Some(Ok(())));
    let expected = json!({"PodName": "p", "PodNamespace": "d", "PodUID": "p", "Node": "a"});
    assert_eq!(requests.lock().unwrap()[0].1, expected);
    let error = bind(&with(Some("refuse"), false), &pod, "a", &permits).await.unwrap().unwrap_err();
    assert!(error.contains("taken"), "{error}");
    assert_eq!(bind(&with(Some("refuse"), true), &pod, "a", &permits).await, None, "the scheduler binds it");
}

#[tokio::test]
async fn an_extender_that_scores_nodes_is_a_running_task() {
    let filtered = json!({"NodeNames": ["a", "b"], "FailedNodes": null, "Error": "", "Nodes": null});
    let (url, requests) =
        server(vec![("/below/filter", filtered.to_string()), ("/below/score", String::new())]).await;
    let (metrics, api, pod) = (SchedulerMetrics::default(), api(), fixture::pod("p", json!({})));
    let is_running = |count: u8| {
        let line = format!("scheduler_goroutines{{operation=\"prioritizing_extender\"}} {count}\n");
        metrics.text().contains(&line)
    };
    let remotes = [remote(&url, |_| {})];
    let names = ["a", "b"].map(str::to_owned).to_vec();
    let mut calls = Box::pin(nodes(&api, &remotes, &pod, names, &metrics));
    let is_scoring = async {
        while !requests.lock().unwrap().iter().any(|(path, _)| path.ends_with("/score")) {
            tokio::task::yield_now().await;
        }
    };
    tokio::select! {
        _ = &mut calls => unreachable!("the extender does not respond"),
        () = is_scoring => {}
    }
    assert!(is_running(1));
    drop(calls);
    assert!(is_running(0));
}

//! Tests with an HTTP server on the loopback interface, and with a paused clock.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures::{FutureExt, StreamExt};
use http_body::Frame;
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper_util::client::legacy::Client as HttpClient;
use hyper_util::rt::TokioExecutor;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::Client;
use kube::api::PartialObjectMeta;
use kube::client::Body;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::*;

/// A response of the server. Each part is a chunk of the body.
struct Reply {
    code: u16,
    parts: Vec<String>,
    end: End,
}

enum End {
    Complete,
    /// The connection ends before the response.
    Cut,
    /// The response never ends.
    Open,
}

/// A server that sends the replies in the order of the requests.
struct Server {
    client: Client,
    heads: mpsc::UnboundedReceiver<String>,
}

fn reply<T: Into<String>>(parts: impl IntoIterator<Item = T>) -> Reply {
    Reply { code: 200, parts: parts.into_iter().map(Into::into).collect(), end: End::Complete }
}

impl Reply {
    fn code(self, code: u16) -> Self {
        Self { code, ..self }
    }

    fn end(self, end: End) -> Self {
        Self { end, ..self }
    }

    /// Fails if the client has closed the connection.
    async fn write(&self, stream: &mut TcpStream) -> std::io::Result<()> {
        let head =
            format!("HTTP/1.1 {} x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n", self.code);
        stream.write_all(head.as_bytes()).await?;
        for part in &self.parts {
            let chunk = format!("{:x}\r\n{part}\r\n", part.len());
            stream.write_all(chunk.as_bytes()).await?;
        }
        if matches!(self.end, End::Complete) {
            stream.write_all(b"0\r\n\r\n").await?;
        }
        Ok(())
    }
}

impl Server {
    async fn start(replies: impl IntoIterator<Item = Reply>) -> Self {
        let replies: Vec<Reply> = replies.into_iter().collect();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (sender, heads) = mpsc::unbounded_channel();
        tokio::spawn(async move {
            let mut open = Vec::new();
            for reply in replies {
                let (mut stream, _) = listener.accept().await.unwrap();
                let mut head = Vec::new();
                while !head.ends_with(b"\r\n\r\n") {
                    head.push(stream.read_u8().await.unwrap());
                }
                sender.send(String::from_utf8(head).unwrap()).unwrap();
                let _ = reply.write(&mut stream).await;
                if matches!(reply.end, End::Open) {
                    open.push(stream);
                }
            }
            std::future::pending::<()>().await;
        });
        let http = HttpClient::builder(TokioExecutor::new()).build_http::<Body>();
        let service = tower::service_fn(move |mut request: http::Request<Body>| {
            *request.uri_mut() = format!("http://{address}{}", request.uri()).parse().unwrap();
            http.request(request)
        });
        Self { client: Client::new(service, "default"), heads }
    }

    fn watch(&self) -> Watch<ConfigMap> {
        let config = Config::default().backoff(Duration::from_millis(1), Duration::from_millis(2));
        watch(Api::all(self.client.clone()), config)
    }

    /// The head of the next request: its first line, and its headers.
    async fn head(&mut self) -> String {
        self.heads.recv().await.unwrap()
    }

    /// Discards requests.
    async fn skip(&mut self, count: usize) {
        for _ in 0..count {
            self.head().await;
        }
    }
}

fn map(name: &str, version: &str) -> String {
    format!(r#"{{"metadata":{{"name":"{name}","resourceVersion":"{version}"}}}}"#)
}

fn list(version: &str, names: &[&str]) -> Reply {
    let items: Vec<String> = names.iter().map(|name| map(name, "1")).collect();
    reply([format!(r#"{{"metadata":{{"resourceVersion":"{version}"}},"items":[{}]}}"#, items.join(","))])
}

fn line(kind: &str, object: &str) -> String {
    format!("{{\"type\":\"{kind}\",\"object\":{object}}}\n")
}

fn describe(event: Result<Event<ConfigMap>, Error>) -> String {
    let name = |object: ConfigMap| object.metadata.name.unwrap();
    match event {
        Ok(Event::Init) => "init".to_owned(),
        Ok(Event::InitDone) => "done".to_owned(),
        Ok(Event::InitApply(object)) => format!("listed {}", name(object)),
        Ok(Event::Apply(object)) => format!("set {}", name(object)),
        Ok(Event::Delete(object)) => format!("deleted {}", name(object)),
        Err(error) => match error.code() {
            Some(code) => code.to_string(),
            None => error.to_string(),
        },
    }
}

async fn read(events: &mut Watch<ConfigMap>, count: usize) -> Vec<String> {
    events.take(count).map(describe).collect().await
}

#[tokio::test]
async fn pages_are_listed_and_then_watched_from_their_version() {
    let first =
        format!(r#"{{"metadata":{{"resourceVersion":"5","continue":"next"}},"items":[{}]}}"#, map("a", "1"));
    let text = [line("ADDED", &map("c", "7")), line("DELETED", &map("a", "8"))].concat();
    let (begin, end) = text.split_at(20);
    let mut server = Server::start([
        reply([first]),
        list("5", &["b"]),
        reply([begin, end, &line("BOOKMARK", &map("", "12")), "\n"]),
        reply([line("MODIFIED", &map("b", "13"))]).end(End::Open),
    ])
    .await;
    let config = Config::default().labels("app=x").fields("metadata.name!=y").timeout(77);
    let mut events = watch(Api::all(server.client.clone()), config);
    let expected = ["init", "listed a", "listed b", "done", "set c", "deleted a", "set b"];
    assert_eq!(read(&mut events, 7).await, expected);
    let selectors = "fieldSelector=metadata.name%21%3Dy&labelSelector=app%3Dx";
    let list = format!("GET /api/v1/configmaps?&{selectors}&limit=500 ");
    assert!(server.head().await.starts_with(&list));
    assert!(server.head().await.contains("&limit=500&continue=next "));
    let watch = format!(
        "GET /api/v1/configmaps?&watch=true&timeoutSeconds=77&{selectors}&allowWatchBookmarks=true&resourceVersion="
    );
    assert!(server.head().await.starts_with(&format!("{watch}5 ")));
    assert!(server.head().await.starts_with(&format!("{watch}12 ")), "the version of the bookmark");
}

#[tokio::test]
async fn objects_are_listed_again_when_their_version_or_kind_is_gone() {
    let gone = r#"{"kind":"Status","code":410,"message":"too old","reason":"Expired"}"#;
    let mut server = Server::start([
        list("5", &["a"]),
        reply([line("ADDED", &map("b", "6")), line("ERROR", gone)]).end(End::Open),
        list("9", &["b"]),
        reply([gone]).code(410),
        list("10", &["b"]),
        reply([r#"{"code":404}"#]).code(404),
        list("10", &["b"]),
        reply([line("ADDED", &map("c", "11"))]).end(End::Open),
    ])
    .await;
    let mut events = server.watch();
    let expected = [
        "init", "listed a", "done", "set b", "410", "init", "listed b", "done", "410", "init", "listed b",
        "done", "404", "init", "listed b", "done", "set c",
    ];
    assert_eq!(read(&mut events, 17).await, expected);
    server.skip(2).await;
    assert!(!server.head().await.contains("watch=true"));
}

#[tokio::test]
async fn after_an_invalid_line_and_after_an_error_the_watch_continues_from_its_last_version() {
    let broken = r#"{"kind":"Status","code":500,"message":"broken"}"#;
    let invalid = "a response of the API server is invalid";
    let mut server = Server::start([
        list("5", &[]),
        reply([line("ADDED", &map("a", "6")), "garbage\n".to_owned(), line("ADDED", &map("b", "7"))]),
        reply([line("ADDED", &map("b", "7")), line("ERROR", broken), line("ADDED", &map("c", "8"))]),
        reply([line("UNKNOWN", &map("b", "7"))]),
        reply(["<html>bad gateway</html>"]).code(502),
        reply([line("ADDED", &map("c", "8"))]).end(End::Open),
    ])
    .await;
    let mut events = server.watch();
    let expected = ["init", "done", "set a", invalid, "set b", "500", invalid, "502", "set c"];
    assert_eq!(read(&mut events, 9).await, expected);
    server.skip(2).await;
    for version in [6, 7, 7, 7] {
        assert!(server.head().await.contains(&format!("resourceVersion={version} ")), "{version}");
    }
}

#[tokio::test]
async fn the_form_of_a_line_does_not_change_its_event() {
    let added = |object: &str, rest: &str| format!("{{\"type\":\"ADDED\",\"object\":{object}{rest}\n");
    let nested =
        r#"{"type":"DELETED","object":{"metadata":{}},"metadata":{"name":"nested","resourceVersion":"6"}}"#;
    let server = Server::start([
        list("5", &[]),
        reply([
            line("ADDED", nested),
            added(&map("spaces", "7"), " }  \r"),
            added(&map("more", "8"), r#","more":{"type":"DELETED","object":{}}}"#),
            format!("{{\"object\":{},\"type\":\"DELETED\"}}\n", map("first", "9")),
            line("BOOKMARK", r#"{"type":"DELETED","metadata":{"resourceVersion":"10"}}"#),
            added(&map("a", "11"), ""),
        ]),
        reply([added(&map("a", "11"), r#","object":{"metadata":{"name":"b","resourceVersion":"12"}}}"#)]),
        reply([added(&map("a", "11"), r#","type":"DELETED"}"#)]),
        reply([line("ADDED", &map("end", "11"))]).end(End::Open),
    ])
    .await;
    let invalid = "a response of the API server is invalid";
    let expected = [
        "init",
        "done",
        "set nested",
        "set spaces",
        "set more",
        "deleted first",
        invalid,
        invalid,
        invalid,
        "set end",
    ];
    assert_eq!(read(&mut server.watch(), 10).await, expected);
}

#[tokio::test]
async fn a_connection_that_ends_early_is_no_error() {
    let mut server = Server::start([
        list("5", &[]),
        reply([line("ADDED", &map("a", "6")), r#"{"type":"ADDED","obj"#.to_owned()]).end(End::Cut),
        // The last line has no end.
        reply([line("ADDED", &map("b", "7")).trim_end()]),
        reply([line("ADDED", &map("c", "8"))]).end(End::Open),
    ])
    .await;
    assert_eq!(read(&mut server.watch(), 5).await, ["init", "done", "set a", "set b", "set c"]);
    server.skip(2).await;
    assert!(server.head().await.contains("resourceVersion=6 "));
    assert!(server.head().await.contains("resourceVersion=7 "));
}

#[tokio::test]
async fn a_refused_list_begins_again() {
    let refused = |code| reply([format!(r#"{{"kind":"Status","code":{code}}}"#)]).code(code);
    let server = Server::start([
        refused(404),
        refused(403),
        reply([r#"{"items":[]}"#]),
        reply(["[1"]),
        list("5", &["a"]),
    ])
    .await;
    let (no_version, invalid) =
        ("a response of the API server has no resource version", "a response of the API server is invalid");
    let expected =
        ["init", "404", "init", "403", "init", no_version, "init", invalid, "init", "listed a", "done"];
    assert_eq!(read(&mut server.watch(), 11).await, expected);
}

#[tokio::test]
async fn an_object_of_another_type_is_an_error_and_later_objects_are_delivered() {
    let wrong = r#"{"metadata":{"name":"x","resourceVersion":"6"},"data":7}"#;
    let server = Server::start([
        reply([format!(
            r#"{{"metadata":{{"resourceVersion":"5"}},"items":[{},{wrong},{}]}}"#,
            map("a", "1"),
            map("b", "2")
        )]),
        list("5", &["a"]),
        reply([line("ADDED", wrong), line("ADDED", &map("b", "7")), line("ADDED", &map("c", ""))])
            .end(End::Open),
        list("9", &["c"]),
    ])
    .await;
    let error = "cannot decode an object";
    let no_version = "a response of the API server has no resource version";
    let expected = [
        "init", "listed a", error, "init", "listed a", "done", error, "set b", no_version, "init",
        "listed c", "done",
    ];
    assert_eq!(read(&mut server.watch(), 12).await, expected);
}

#[tokio::test]
async fn a_large_page_is_requested_with_fewer_objects_and_a_long_line_is_not_kept() {
    let filler = "x".repeat(3000);
    let mut server = Server::start([
        list("5", &["a", &filler]),
        list("5", &["a"]),
        reply([&*format!("{{\"type\":\"ADDED\",\"object\":\"{filler}"), &filler]).end(End::Open),
        list("6", &["b"]),
        reply([line("ADDED", &map("c", "7"))]).end(End::Open),
    ])
    .await;
    let mut config = Config::default().backoff(Duration::from_millis(1), Duration::from_millis(2));
    (config.page_limit, config.line_limit) = (2000, 5000);
    let mut events = watch(Api::all(server.client.clone()), config);
    let too_large = "a response of the API server has more than 5000 bytes";
    let expected = ["init", "listed a", "done", too_large, "init", "listed b", "done", "set c"];
    assert_eq!(read(&mut events, 8).await, expected);
    assert!(server.head().await.contains("limit=500 "));
    assert!(server.head().await.contains("limit=125 "));
    server.skip(1).await;
    assert!(server.head().await.contains("limit=250 "), "pages grow again");
}

#[tokio::test]
async fn a_list_after_two_expired_lists_has_large_pages() {
    let first = || {
        let items = map("a", "1");
        reply([format!(r#"{{"metadata":{{"resourceVersion":"5","continue":"next"}},"items":[{items}]}}"#)])
    };
    let gone = || reply([r#"{"kind":"Status","code":410}"#]).code(410);
    let mut server = Server::start([first(), gone(), first(), gone(), list("9", &["a"])]).await;
    let expired = ["init", "listed a", "410"];
    let expected = [expired, expired, ["init", "listed a", "done"]].concat();
    assert_eq!(read(&mut server.watch(), 9).await, expected);
    server.skip(2).await;
    assert!(server.head().await.contains("limit=500 "));
    server.skip(1).await;
    assert!(server.head().await.contains("limit=8000 "));
}

#[tokio::test]
async fn an_error_response_is_read_up_to_a_limit() {
    let (text, huge) = ("x".repeat(400), vec!["x".repeat(1 << 16); 17]);
    let server = Server::start([reply([text]).code(500), reply(huge).code(503)]).await;
    let errors: Vec<Error> =
        server.watch().filter_map(|event| std::future::ready(event.err())).take(2).collect().await;
    let described = errors.into_iter().map(|error| match error {
        Error::List(kube::Error::Api(status)) => (status.code, status.message.len()),
        other => panic!("{other}"),
    });
    assert_eq!(described.collect::<Vec<_>>(), [(500, 300), (503, 0)]);
}

#[tokio::test]
async fn one_object_is_watched() {
    let server = Server::start([
        list("5", &[]),
        reply([line("ADDED", &map("a", "6")), line("DELETED", &map("a", "7"))]),
        reply([r#"{"code":410}"#]).code(410),
        list("8", &["a"]),
        reply([line("MODIFIED", &map("a", "9"))]).end(End::Open),
    ])
    .await;
    let states = watch_object::<ConfigMap>(Api::all(server.client.clone()), "a");
    let states: Vec<_> = states.take(6).map(|state| state.map(|object| object.is_some())).collect().await;
    let states: Vec<_> = states.into_iter().map(|state| state.map_err(|error| error.code())).collect();
    assert_eq!(states, [Ok(false), Ok(true), Ok(false), Err(Some(410)), Ok(true), Ok(true)]);
}

#[tokio::test]
async fn metadata_is_requested_alone() {
    let mut server = Server::start([list("5", &["a"]), reply([line("ADDED", &map("b", "6"))])]).await;
    let api: Api<PartialObjectMeta<ConfigMap>> = Api::all(server.client.clone());
    let events: Vec<_> = watch(api, Config::default()).take(4).collect().await;
    assert!(events.iter().all(Result::is_ok));
    assert!(server.head().await.contains("as=PartialObjectMetadataList;"));
    assert!(server.head().await.contains("as=PartialObjectMetadata;"));
}

#[tokio::test]
async fn a_request_continues_after_its_waiting_future_is_dropped() {
    let server = Server::start([list("5", &["a"])]).await;
    let mut events = server.watch();
    assert_eq!(read(&mut events, 1).await, ["init"]);
    for _ in 0..3 {
        assert!(events.next().now_or_never().is_none());
        tokio::task::yield_now().await;
    }
    assert_eq!(read(&mut events, 2).await, ["listed a", "done"], "the server has one list only");
}

type ResponseBody = BoxBody<Bytes, Infallible>;

fn text(text: String) -> ResponseBody {
    Full::new(Bytes::from(text)).boxed()
}

/// A body that never has data.
fn silent() -> ResponseBody {
    BodyExt::boxed(StreamBody::new(futures::stream::pending::<Result<Frame<Bytes>, Infallible>>()))
}

/// A client whose server sends the bodies in order, and does not respond to further requests. Returns the client and
/// the number of requests.
fn client_of(bodies: Vec<ResponseBody>) -> (Client, Arc<AtomicUsize>) {
    let requests = Arc::new(AtomicUsize::new(0));
    let (counter, mut bodies) = (requests.clone(), bodies.into_iter());
    let service = tower::service_fn(move |_: http::Request<Body>| {
        counter.fetch_add(1, Ordering::Relaxed);
        let body = bodies.next();
        async move {
            match body {
                Some(body) => Ok::<_, Infallible>(http::Response::new(body)),
                None => std::future::pending().await,
            }
        }
    });
    (Client::new(service, "default"), requests)
}

#[tokio::test(start_paused = true)]
async fn a_watch_without_events_that_ends_at_once_counts_as_failed() {
    let (listed, changed) = (list("5", &[]).parts.concat(), line("ADDED", &map("a", "6")));
    let (client, _requests) = client_of(vec![text(listed), text(String::new()), text(changed)]);
    let mut events = watch(Api::<ConfigMap>::all(client), Config::default());
    let short = "the API server ended a watch within a second";
    assert_eq!(read(&mut events, 4).await, ["init", "done", short, "set a"]);
}

#[tokio::test(start_paused = true)]
async fn a_silent_watch_is_replaced_after_its_timeout() {
    let (listed, changed) = (list("5", &[]).parts.concat(), line("ADDED", &map("a", "6")));
    let (client, requests) = client_of(vec![text(listed), silent(), text(changed)]);
    let mut events = watch(Api::<ConfigMap>::all(client), Config::default().timeout(1500));
    let start = Instant::now();
    assert_eq!(read(&mut events, 3).await, ["init", "done", "set a"]);
    assert_eq!(start.elapsed().as_secs(), 1505);
    assert_eq!(requests.load(Ordering::Relaxed), 3);
}

#[tokio::test(start_paused = true)]
async fn a_server_that_does_not_respond_is_an_error_and_pauses_grow() {
    let (client, _requests) = client_of(Vec::new());
    let mut events = watch(Api::<ConfigMap>::all(client), Config::default());
    let start = Instant::now();
    let late = "the API server did not respond within 120 s";
    assert_eq!(read(&mut events, 6).await, ["init", late, "init", late, "init", late]);
    let pauses = start.elapsed() - Duration::from_secs(360);
    assert!(pauses >= Duration::from_millis(300) && pauses < Duration::from_millis(500), "{pauses:?}");
}

#[tokio::test(start_paused = true)]
async fn pauses_grow_although_there_is_an_event_before_each_invalid_line() {
    let broken = [line("ADDED", &map("a", "6")), "garbage\n".to_owned()].concat();
    let bodies = [list("5", &[]).parts.concat()].into_iter().chain(vec![broken; 4]);
    let (client, _requests) = client_of(bodies.map(text).collect());
    let mut events = watch(Api::<ConfigMap>::all(client), Config::default());
    assert_eq!(read(&mut events, 2).await, ["init", "done"]);
    let start = Instant::now();
    let round = ["set a", "a response of the API server is invalid"];
    assert_eq!(read(&mut events, 8).await, round.repeat(4));
    let pauses = start.elapsed();
    assert!(pauses >= Duration::from_millis(700) && pauses < Duration::from_millis(1200), "{pauses:?}");
}

#[tokio::test(start_paused = true)]
async fn pauses_grow_until_a_watch_lasts_although_lists_succeed() {
    let (listed, gone) = (list("5", &[]).parts.concat(), line("ERROR", r#"{"kind":"Status","code":410}"#));
    let rounds = (0..4).flat_map(|_| [text(listed.clone()), text(gone.clone())]);
    let (client, _requests) =
        client_of(rounds.chain([text(listed.clone()), silent(), text(gone.clone())]).collect());
    let mut events = watch(Api::<ConfigMap>::all(client), Config::default());
    let start = Instant::now();
    assert_eq!(read(&mut events, 12).await, ["init", "done", "410"].repeat(4));
    let pauses = start.elapsed();
    assert!(pauses >= Duration::from_millis(700) && pauses < Duration::from_millis(1200), "{pauses:?}");
    // The second-to-last watch lasts until its timeout.
    assert_eq!(read(&mut events, 3).await, ["init", "done", "410"]);
    let start = Instant::now();
    assert_eq!(read(&mut events, 1).await, ["init"]);
    let pause = start.elapsed();
    assert!(pause >= Duration::from_millis(100) && pause < Duration::from_millis(200), "{pause:?}");
}

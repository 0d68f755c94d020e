//! Queries to upstream servers on loopback.

use std::sync::Weak;
use std::sync::atomic::{AtomicUsize, Ordering};

use coracle_testing::until_yielding;
use hickory_proto::op::MessageType;
use hickory_proto::rr::rdata::{A, NULL};
use hickory_proto::rr::{Name, RData, Record, RecordType};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, UdpSocket};

use super::*;
use crate::limit::Limit;

/// A server on loopback that answers every question with its own address, and counts the questions.
struct LoopbackServer {
    address: SocketAddr,
    asked: Arc<AtomicUsize>,
    is_silent: watch::Sender<bool>,
}

impl LoopbackServer {
    async fn start(ttl: u32) -> Self {
        let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let (address, asked) = (socket.local_addr().unwrap(), Arc::new(AtomicUsize::new(0)));
        let (is_silent, mut silent) = watch::channel(false);
        let count = Arc::clone(&asked);
        tokio::spawn(async move {
            let mut buffer = [0; 4096];
            loop {
                let (size, client) = socket.recv_from(&mut buffer).await.unwrap();
                let query = Message::from_vec(&buffer[..size]).unwrap();
                let question = query.queries[0].clone();
                if question.query_type != RecordType::A {
                    continue;
                }
                count.fetch_add(1, Ordering::SeqCst);
                silent.wait_for(|silent| !silent).await.unwrap();
                let mut answer = Message::response(query.metadata.id, OpCode::Query);
                answer.metadata.message_type = MessageType::Response;
                answer.add_query(question.clone());
                answer.add_answer(Record::from_rdata(question.name, ttl, RData::A(A([1, 2, 3, 4].into()))));
                socket.send_to(&answer.to_vec().unwrap(), client).await.unwrap();
            }
        });
        Self { address, asked, is_silent }
    }

    fn upstream(&self) -> Arc<Upstream> {
        let stub = StubDomain { domain: "example.".to_owned(), servers: vec![self.address] };
        Arc::new(Upstream::new("/nonexistent".into(), Vec::new(), &[stub], Arc::default()))
    }

    fn asked(&self) -> usize {
        self.asked.load(Ordering::SeqCst)
    }
}

/// A permit of a limit that no test reaches.
fn permit() -> Permit {
    Limit::new(64, 64).take(IpAddr::from([10, 0, 0, 1])).unwrap()
}

/// The server with this maximum of concurrent queries.
fn with_max_pending(server: &LoopbackServer, max_pending: usize) -> Arc<Upstream> {
    let stub = StubDomain { domain: "example.".to_owned(), servers: vec![server.address] };
    let upstream = Upstream::new("/nonexistent".into(), Vec::new(), &[stub], Arc::default());
    Arc::new(Upstream { max_pending, ..upstream })
}

fn question(name: &str) -> Question {
    Question { name: Name::from_ascii(name).unwrap(), kind: RecordType::A }
}

#[tokio::test]
async fn equal_questions_at_the_same_time_are_one_query() {
    let other = LoopbackServer::start(60).await;
    let upstream = other.upstream();
    other.is_silent.send_replace(true);
    let all: Vec<_> = (0..20)
        .map(|_| {
            tokio::spawn({
                let upstream = Arc::clone(&upstream);
                async move { upstream.resolve(question("a.example."), permit()).await }
            })
        })
        .collect();
    until_yielding("the first query", 10, || other.asked() > 0).await;
    other.is_silent.send_replace(false);
    for task in all {
        assert_eq!(task.await.unwrap().message().answers.len(), 1);
    }
    assert_eq!(other.asked(), 1);
    assert!(upstream.pending().is_empty());
    assert_eq!(upstream.cached(&question("a.example.")).unwrap().message().answers.len(), 1);
}

#[tokio::test]
async fn a_server_that_hangs_is_queried_last() {
    let (hanging, other) = (LoopbackServer::start(60).await, LoopbackServer::start(60).await);
    hanging.is_silent.send_replace(true);
    let servers = vec![hanging.address, other.address];
    let stub = StubDomain { domain: "example.".to_owned(), servers };
    let upstream = Arc::new(Upstream::new("/nonexistent".into(), Vec::new(), &[stub], Arc::default()));
    let order = || -> Vec<_> {
        let servers = upstream.servers.of(&question("a.example.").name);
        servers.iter().map(|server| server.address).collect()
    };
    assert_eq!(order(), [hanging.address, other.address]);
    let resolve = |name: &str| upstream.resolve(question(name), permit());
    // The queries run at the same time, because each of them waits for the server that hangs.
    let names = ["a.example.", "b.example.", "c.example.", "d.example."];
    let [a, b, c, d] = names.map(resolve);
    let answers: [ServerAnswer; 4] = tokio::join!(a, b, c, d).into();
    assert!(answers.iter().all(|answer| answer.message().answers.len() == 1));
    assert_eq!(order(), [other.address, hanging.address]);
}

#[tokio::test]
async fn queries_are_counted_by_server_and_while_all_servers_are_down() {
    let other = LoopbackServer::start(60).await;
    let upstream = other.upstream();
    upstream.metrics.show_forwarder(Arc::downgrade(&upstream) as Weak<dyn ForwarderState>);
    let counted = |line: &str| {
        let text = upstream.metrics.render();
        assert!(text.lines().any(|found| found == line), "{line}\n{text}");
    };
    let to = other.address;
    upstream.resolve(question("a.example."), permit()).await;
    counted(&format!("coredns_forward_requests_total{{to=\"{to}\"}} 1"));
    counted(&format!("coredns_forward_responses_total{{rcode=\"NOERROR\",to=\"{to}\"}} 1"));
    counted("coredns_forward_healthcheck_broken_total 0");
    let server = upstream.servers.of(&question("b.example.").name).remove(0);
    while server.is_up() {
        server.failed();
    }
    upstream.resolve(question("b.example."), permit()).await;
    counted(&format!("coredns_forward_requests_total{{to=\"{to}\"}} 2"));
    counted("coredns_forward_healthcheck_broken_total 1");
}

#[tokio::test]
async fn without_servers_the_answer_is_a_failure() {
    let upstream = LoopbackServer::start(60).await.upstream();
    let answer = upstream.resolve(question("other."), permit()).await;
    assert_eq!(answer.code(), ResponseCode::ServFail);
}

#[tokio::test]
async fn an_expired_answer_is_used_while_the_server_does_not_respond() {
    let other = LoopbackServer::start(1).await;
    let upstream = other.upstream();
    let new = upstream.resolve(question("a.example."), permit()).await.message();
    assert_eq!(new.answers[0].ttl, 1);
    other.is_silent.send_replace(true);
    upstream.cache().age(Duration::from_secs(5));
    assert!(upstream.cached(&question("a.example.")).is_none());
    let stale = upstream.resolve(question("a.example."), permit()).await.message();
    assert_eq!((stale.answers.len(), stale.answers[0].ttl), (1, 30));
    other.is_silent.send_replace(false);
    let is_cached = || upstream.cached(&question("a.example.")).is_some();
    until_yielding("the new answer", 10, is_cached).await;
}

#[tokio::test]
async fn a_used_cache_entry_is_queried_again_before_it_expires() {
    let other = LoopbackServer::start(100).await;
    let upstream = other.upstream();
    upstream.resolve(question("a.example."), permit()).await;
    upstream.cache().age(Duration::from_secs(95));
    for _ in 0..2 {
        assert!(upstream.cached(&question("a.example.")).unwrap().message().answers[0].ttl <= 5);
    }
    let is_new = || upstream.cached(&question("a.example.")).unwrap().message().answers[0].ttl >= 90;
    until_yielding("the new answer", 10, is_new).await;
    assert_eq!(other.asked(), 2);
}

#[tokio::test]
async fn questions_above_the_limit_are_not_asked() {
    let other = LoopbackServer::start(60).await;
    other.is_silent.send_replace(true);
    let stub = StubDomain { domain: "example.".to_owned(), servers: vec![other.address] };
    let upstream = Upstream::new("/nonexistent".into(), Vec::new(), &[stub], Arc::default());
    assert_eq!(upstream.max_pending, Share::DnsQuestions.count());
    let upstream = Arc::new(Upstream { max_pending: 1, ..upstream });
    let pending = upstream.query(&question("a.example."), &mut Some(permit()));
    assert!(
        pending.is_some() && upstream.query(&question("a.example."), &mut Some(permit())).is_some(),
        "equal questions share one query"
    );
    assert!(upstream.query(&question("b.example."), &mut Some(permit())).is_none());
    other.is_silent.send_replace(false);
    assert_eq!(wait(pending).await.unwrap().message().answers.len(), 1);
    assert!(upstream.query(&question("b.example."), &mut Some(permit())).is_some());
}

#[tokio::test]
async fn renewals_leave_room_for_the_questions_of_clients() {
    let other = LoopbackServer::start(100).await;
    let upstream = with_max_pending(&other, 16);
    let names = ["a.example.", "b.example.", "c.example.", "d.example."];
    for name in names {
        upstream.resolve(question(name), permit()).await;
    }
    upstream.cache().age(Duration::from_secs(95));
    other.is_silent.send_replace(true);
    for name in names.iter().chain(&names) {
        assert!(upstream.cached(&question(name)).is_some());
    }
    assert_eq!(upstream.pending().len(), 2, "an eighth of the queries");
    assert!(upstream.query(&question("new.example."), &mut Some(permit())).is_some());
    assert_eq!(upstream.max_of_clients(), 14);
}

#[tokio::test]
async fn a_query_counts_for_its_client_until_it_ends() {
    let other = LoopbackServer::start(1).await;
    let upstream = other.upstream();
    let (limit, client) = (Limit::new(2, 1), IpAddr::from([10, 0, 0, 1]));
    upstream.resolve(question("a.example."), limit.take(client).unwrap()).await;
    upstream.cache().age(Duration::from_secs(5));
    other.is_silent.send_replace(true);
    // While all servers are down, an expired answer is used at once.
    let server = upstream.servers.of(&question("a.example.").name).remove(0);
    while server.is_up() {
        server.failed();
    }
    let stale = upstream.resolve(question("a.example."), limit.take(client).unwrap()).await;
    assert_eq!(stale.message().answers[0].ttl, 30);
    assert!(limit.take(client).is_none(), "the client has a permit while its query runs");
    assert_eq!(upstream.expired(&question("a.example.")).unwrap().message().answers[0].ttl, 30);
    assert!(upstream.expired(&question("b.example.")).is_none());
    other.is_silent.send_replace(false);
    until_yielding("the end of the query", 10, || limit.take(client).is_some()).await;
}

/// Sockets for TCP and UDP with the same port.
async fn bind_both() -> (TcpListener, UdpSocket) {
    loop {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        // Another process may have the UDP port of this number.
        if let Ok(socket) = UdpSocket::bind(listener.local_addr().unwrap()).await {
            return (listener, socket);
        }
    }
}

/// A server that changes its answers by UDP, counts them, and closes connections by TCP.
async fn server_by_udp(
    change: impl Fn(&mut Message, &Message) + Send + 'static,
) -> (Arc<Upstream>, Arc<AtomicUsize>) {
    let (listener, socket) = bind_both().await;
    let (address, asked) = (socket.local_addr().unwrap(), Arc::new(AtomicUsize::new(0)));
    tokio::spawn(async move { while listener.accept().await.is_ok() {} });
    let count = Arc::clone(&asked);
    tokio::spawn(async move {
        let mut buffer = [0; 4096];
        loop {
            let (size, client) = socket.recv_from(&mut buffer).await.unwrap();
            let query = Message::from_vec(&buffer[..size]).unwrap();
            let mut answer = Message::response(query.metadata.id, OpCode::Query);
            answer.queries.clone_from(&query.queries);
            if query.queries[0].query_type == RecordType::A {
                count.fetch_add(1, Ordering::SeqCst);
                change(&mut answer, &query);
            }
            socket.send_to(&answer.to_vec().unwrap(), client).await.unwrap();
        }
    });
    let stub = StubDomain { domain: "example.".to_owned(), servers: vec![address] };
    (Arc::new(Upstream::new("/nonexistent".into(), Vec::new(), &[stub], Arc::default())), asked)
}

#[tokio::test]
async fn a_truncated_answer_is_used_if_the_server_does_not_answer_by_tcp() {
    let change = |answer: &mut Message, query: &Message| {
        answer.metadata.truncation = true;
        let name = query.queries[0].name.clone();
        answer.add_answer(Record::from_rdata(name, 60, RData::A(A([1, 2, 3, 4].into()))));
    };
    let (upstream, asked) = server_by_udp(change).await;
    for number in 1..3 {
        let answer = upstream.resolve(question("a.example."), permit()).await.message();
        assert!(answer.metadata.truncation && answer.answers.len() == 1);
        assert_eq!(asked.load(Ordering::SeqCst), number, "a truncated answer is not cached");
    }
    assert!(upstream.servers.of(&question("a.example.").name)[0].is_up());
}

#[tokio::test]
async fn a_late_truncated_answer_is_used_if_a_firewall_drops_tcp() {
    // The kernel accepts the connection. The server sends no byte.
    let (_listener, socket) = bind_both().await;
    let address = socket.local_addr().unwrap();
    tokio::spawn(async move {
        let mut buffer = [0; 4096];
        loop {
            let (size, client) = socket.recv_from(&mut buffer).await.unwrap();
            let query = Message::from_vec(&buffer[..size]).unwrap();
            if query.queries[0].query_type != RecordType::A {
                continue;
            }
            let mut answer = Message::response(query.metadata.id, OpCode::Query);
            answer.queries.clone_from(&query.queries);
            tokio::time::sleep(Duration::from_millis(800)).await;
            socket.send_to(&answer.truncate().to_vec().unwrap(), client).await.unwrap();
        }
    });
    let stub = StubDomain { domain: "example.".to_owned(), servers: vec![address] };
    let upstream = Arc::new(Upstream::new("/nonexistent".into(), Vec::new(), &[stub], Arc::default()));
    let server = upstream.servers.of(&question("a.example.").name).remove(0);
    // One more failure makes the server count as failing.
    server.failed();
    let answer = upstream.resolve(question("a.example."), permit()).await;
    assert_eq!(answer.code(), ResponseCode::NoError);
    assert!(answer.message().metadata.truncation);
    assert!(server.is_up());
}

#[tokio::test]
async fn the_failure_of_a_server_is_used_for_some_seconds() {
    let change = |answer: &mut Message, _: &Message| answer.metadata.response_code = ResponseCode::ServFail;
    let (upstream, asked) = server_by_udp(change).await;
    upstream.resolve(question("a.example."), permit()).await;
    assert_eq!(upstream.cached(&question("a.example.")).unwrap().code(), ResponseCode::ServFail);
    upstream.cache().age(Duration::from_secs(5));
    assert!(upstream.cached(&question("a.example.")).is_none());
    upstream.resolve(question("a.example."), permit()).await;
    assert_eq!(asked.load(Ordering::SeqCst), 2);
}

#[tokio::test]
async fn a_server_without_edns_is_queried_without_it() {
    let change = |answer: &mut Message, query: &Message| {
        if query.edns.is_some() {
            answer.metadata.response_code = ResponseCode::FormErr;
            answer.queries.clear();
        } else {
            let name = query.queries[0].name.clone();
            answer.add_answer(Record::from_rdata(name, 60, RData::A(A([1, 2, 3, 4].into()))));
        }
    };
    let (upstream, asked) = server_by_udp(change).await;
    let answer = upstream.resolve(question("a.example."), permit()).await;
    assert_eq!(answer.message().answers.len(), 1);
    assert_eq!(asked.load(Ordering::SeqCst), 2);
}

/// A server that answers one question by TCP, with the records that `add` adds to the answer. Returns its address, and
/// the task that ends when the answer is sent.
async fn server_by_tcp(
    add: impl FnOnce(&mut Message, &Name) + Send + 'static,
) -> (SocketAddr, tokio::task::JoinHandle<()>) {
    let (listener, socket) = bind_both().await;
    let address = socket.local_addr().unwrap();
    let task = tokio::spawn(async move {
        let mut buffer = [0; 4096];
        let (size, client) = socket.recv_from(&mut buffer).await.unwrap();
        let query = Message::from_vec(&buffer[..size]).unwrap();
        let mut answer = Message::response(query.metadata.id, OpCode::Query);
        answer.queries.clone_from(&query.queries);
        socket.send_to(&answer.truncate().to_vec().unwrap(), client).await.unwrap();
        let (mut stream, _) = listener.accept().await.unwrap();
        let length = stream.read_u16().await.unwrap();
        stream.read_exact(&mut buffer[..usize::from(length)]).await.unwrap();
        add(&mut answer, &query.queries[0].name);
        let bytes = answer.to_vec().unwrap();
        let length = u16::try_from(bytes.len()).unwrap();
        stream.write_all(&[&length.to_be_bytes()[..], &bytes].concat()).await.unwrap();
    });
    (address, task)
}

/// Adds 1,000 addresses to an answer.
fn add_addresses(answer: &mut Message, name: &Name) {
    let record = |number: u32| Record::from_rdata(name.clone(), 60, RData::A(A(number.into())));
    answer.add_answers((0..1000).map(record));
}

/// Adds a record to an answer. The data of the record are compression pointers. Each pointer points to the previous
/// pointer.
fn add_chain_of_pointers(answer: &mut Message, name: &Name) {
    let record = |data| Record::from_rdata(name.clone(), 60, RData::NULL(NULL::with(data)));
    let mut alone = answer.clone();
    alone.add_answer(record(vec![0]));
    let start = u16::try_from(alone.to_vec().unwrap().len() - 1).unwrap();
    let data = (0..100).flat_map(|number| (0xc000 | (start + 2 * number)).to_be_bytes());
    // The first two bytes are no pointer.
    answer.add_answer(record([0, 0].into_iter().chain(data).collect()));
}

#[tokio::test]
async fn a_truncated_answer_is_used_if_the_answer_by_tcp_is_not_decoded() {
    let (address, sent) = server_by_tcp(add_chain_of_pointers).await;
    let stub = StubDomain { domain: "example.".to_owned(), servers: vec![address] };
    let upstream = Arc::new(Upstream::new("/nonexistent".into(), Vec::new(), &[stub], Arc::default()));
    let server = upstream.servers.of(&question("a.example.").name).remove(0);
    // One more failure makes the server count as failing.
    server.failed();
    let answer = upstream.resolve(question("a.example."), permit()).await;
    sent.await.unwrap();
    assert_eq!(answer.code(), ResponseCode::NoError);
    assert!(answer.message().metadata.truncation);
    assert!(upstream.cached(&question("a.example.")).is_none());
    assert!(server.is_up());
}

/// Answers are received without a turn. Otherwise a client with many large answers could delay clients that wait for
/// the same answer.
#[tokio::test]
async fn a_large_answer_is_received_and_cached_without_a_turn() {
    let (address, sent) = server_by_tcp(add_addresses).await;
    let stub = StubDomain { domain: "example.".to_owned(), servers: vec![address] };
    let upstream = Arc::new(Upstream::new("/nonexistent".into(), Vec::new(), &[stub], Arc::default()));
    let _held = upstream.large.hold().await;
    let outcome = upstream.query(&question("a.example."), &mut Some(permit())).unwrap();
    sent.await.unwrap();
    let (one, two) = tokio::join!(wait(Some(outcome.clone())), wait(Some(outcome)));
    for waiting in [one, two] {
        let waiting = waiting.unwrap();
        assert!(matches!(waiting, ServerAnswer::Large(_)), "the answer is decoded");
        assert_eq!(waiting.message().answers.len(), 1000);
    }
    // The server answers only one query, so this answer comes from the cache.
    let cached = upstream.cached(&question("a.example.")).unwrap();
    assert_eq!(cached.message().answers.len(), 1000);
}

#[tokio::test]
async fn codes_of_edns_are_not_sent_to_clients() {
    let change = |answer: &mut Message, _: &Message| {
        answer.set_edns(hickory_proto::op::Edns::new());
        answer.metadata.response_code = ResponseCode::BADCOOKIE;
    };
    let (upstream, _asked) = server_by_udp(change).await;
    let answer = upstream.resolve(question("a.example."), permit()).await;
    assert_eq!(answer.code(), ResponseCode::ServFail);
}

#[tokio::test]
async fn without_memory_for_the_answer_the_truncated_answer_is_used() {
    let (address, _sent) = server_by_tcp(add_addresses).await;
    let stub = StubDomain { domain: "example.".to_owned(), servers: vec![address] };
    let upstream = Arc::new(Upstream::new("/nonexistent".into(), Vec::new(), &[stub], Arc::default()));
    let client = permit().client();
    let whole = usize::from(u16::MAX);
    let mut memory: Vec<_> = std::iter::from_fn(|| upstream.large.reserve(client, whole)).collect();
    memory.extend(std::iter::from_fn(|| upstream.large.reserve(client, 1000)));
    let server = upstream.servers.of(&question("a.example.").name).remove(0);
    // One more failure makes the server count as failing.
    server.failed();
    let answer = upstream.resolve(question("a.example."), permit()).await;
    assert!(answer.message().metadata.truncation);
    assert!(server.is_up());
    let other = IpAddr::from([10, 0, 0, 2]);
    assert!(upstream.large.reserve(other, whole).is_some(), "another client has memory");
}

//! Hostile clients of the API server and of the kubelet port.

use std::fmt;
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use coracle_integration::Cluster;
use serde_json::json;

use crate::client::{self, Address, EVE, Tls};
use crate::pods::{self, HOSTILE};

/// An administrator, a tenant with the role `edit` in the hostile namespace, and a user without permissions.
pub(crate) const TOKENS: &str =
    "admin-token,admin,1,\"system:masters\"\nmallory-token,mallory,4\neve-token,eve,2\n";
const MALLORY: &str = "authorization: Bearer mallory-token";
/// A request that every user may make.
const REVIEWS: &str = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews";

/// Number of silent connections to each port.
const SILENT: usize = 800;
/// Number of source addresses of the silent connections.
const SOURCES: u8 = 20;
/// Number of objects of one megabyte in the unread list.
const LARGE: usize = 10;

/// The attacking clients, and their number of requests.
pub(crate) struct Attack {
    ends: Arc<AtomicBool>,
    requests: Arc<AtomicU64>,
    clients: std::sync::Mutex<Vec<JoinHandle<()>>>,
}

/// State of one client.
#[derive(Clone)]
struct Client {
    address: Address,
    ends: Arc<AtomicBool>,
    requests: Arc<AtomicU64>,
}

impl Attack {
    pub(crate) fn begin(address: &Address, cluster: &Cluster) -> Self {
        cluster.kubectl(&[
            "create",
            "rolebinding",
            "mallory",
            "-n",
            HOSTILE,
            "--clusterrole=edit",
            "--user=mallory",
        ]);
        let (ends, requests) = (Arc::<AtomicBool>::default(), Arc::<AtomicU64>::default());
        let first = Client { address: address.clone(), ends: ends.clone(), requests: requests.clone() };
        first.make_objects();
        let attacks: [fn(&Client); 9] = [
            Client::stay_silent,
            Client::send_slowly,
            Client::nest_yaml,
            Client::nest_json,
            Client::nest_protobuf,
            Client::copy_by_patches,
            Client::leave_lists_unread,
            Client::leave_watches_unread,
            Client::make_and_remove_pods,
        ];
        let begin = |(number, attack): (u8, fn(&Client))| {
            let source = Ipv4Addr::new(127, 0, 2, number);
            let client = Client { address: address.with_source(source), ..first.clone() };
            thread::spawn(move || attack(&client))
        };
        let clients = (1..).zip(attacks).map(begin).collect();
        Self { ends, requests, clients: std::sync::Mutex::new(clients) }
    }

    /// Waits until all clients have closed their connections.
    pub(crate) fn end(&self) {
        self.ends.store(true, Ordering::SeqCst);
        for client in self.clients.lock().unwrap().drain(..) {
            client.join().expect("a client that attacks");
        }
    }
}

impl fmt::Display for Attack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} hostile requests", self.requests.load(Ordering::SeqCst))
    }
}

impl Client {
    /// Counts a request and sleeps. Returns whether to continue.
    fn next(&self, pause: Duration) -> bool {
        self.requests.fetch_add(1, Ordering::Relaxed);
        let until = Instant::now() + pause;
        while Instant::now() < until && !self.ends.load(Ordering::SeqCst) {
            thread::sleep(Duration::from_millis(20).min(pause));
        }
        !self.ends.load(Ordering::SeqCst)
    }

    fn post(&self, user: &str, media: &str, body: impl AsRef<[u8]>) {
        self.address.by(user).send("POST", REVIEWS, media, body);
    }

    /// Sends a request and leaves its response unread.
    fn open(&self, user: &str, path: &str) -> Option<Tls> {
        let mut connection = self.address.try_connect(&[]).ok()?;
        let request = format!("GET {path} HTTP/1.1\r\nhost: a\r\n{user}\r\n\r\n");
        connection.write_all(request.as_bytes()).and_then(|()| connection.flush()).ok()?;
        Some(connection)
    }

    fn make_objects(&self) {
        for number in 0..LARGE {
            let map = json!({"metadata": {"name": format!("large-{number}")}, "data": {"a": "x".repeat(1_000_000)}});
            self.create("configmaps", &map.to_string());
        }
    }

    fn create(&self, resource: &str, object: &str) -> u16 {
        let path = format!("/api/v1/namespaces/{HOSTILE}/{resource}");
        self.address.by(client::ADMIN).send("POST", &path, "application/json", object).0
    }

    /// Keeps connections open that send nothing. If the server closes a connection, the client opens another one.
    fn stay_silent(&self) {
        let mut open: Vec<TcpStream> = Vec::new();
        loop {
            open.retain(|connection| {
                connection.set_nonblocking(true).is_ok()
                    && matches!((&mut &*connection).read(&mut [0]), Err(error) if error.kind() == std::io::ErrorKind::WouldBlock)
            });
            for number in open.len()..2 * SILENT {
                let source = u8::try_from(number % usize::from(SOURCES)).unwrap() + 1;
                let address = self.address.with_source(Ipv4Addr::new(127, 0, 3, source));
                open.extend(address.try_tcp(if number % 2 == 0 { 6443 } else { 10250 }));
            }
            if !self.next(Duration::from_secs(1)) {
                return;
            }
        }
    }

    /// Sends request bodies at one byte per second.
    fn send_slowly(&self) {
        let head = format!(
            "POST {REVIEWS} HTTP/1.1\r\nhost: a\r\n{EVE}\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n\r\n"
        );
        let mut open: Vec<Tls> = Vec::new();
        while self.next(Duration::from_secs(1)) {
            while open.len() < 150 {
                let Ok(mut connection) = self.address.try_connect(&[]) else { break };
                if connection.write_all(head.as_bytes()).is_ok() {
                    open.push(connection);
                }
                if !self.next(Duration::from_millis(5)) {
                    return;
                }
            }
            open.retain_mut(|connection| {
                connection.write_all(b" ").and_then(|()| connection.flush()).is_ok()
            });
        }
    }

    fn nest_yaml(&self) {
        let bodies = ["[".repeat(120_000), "a: ".repeat(2_000), format!("a: {}", "{b: ".repeat(10_000))];
        for body in bodies.iter().cycle() {
            self.post(EVE, "application/yaml", body);
            if !self.next(Duration::from_millis(500)) {
                return;
            }
        }
    }

    fn nest_json(&self) {
        let bodies = [
            "[".repeat(3_000_000),
            "{\"a\":".repeat(500_000),
            format!("{{\"a\":\"{}\"}}", "\\u0000".repeat(400_000)),
        ];
        for body in bodies.iter().cycle() {
            self.post(EVE, "application/json", body);
            if !self.next(Duration::from_secs(1)) {
                return;
            }
        }
    }

    fn nest_protobuf(&self) {
        let body = client::nested_protobuf(50_000);
        while self.next(Duration::from_secs(1)) {
            self.post(EVE, "application/vnd.kubernetes.protobuf", &body);
        }
    }

    /// Sends JSON patches in which each copy contains the previous one.
    fn copy_by_patches(&self) {
        let copy = |at| json!({"op": "copy", "from": "/data", "path": format!("/data/b{at}")});
        let patch = (0..30).map(copy).collect::<serde_json::Value>().to_string();
        let path = format!("/api/v1/namespaces/{HOSTILE}/configmaps/large-0");
        while self.next(Duration::from_millis(500)) {
            self.address.by(MALLORY).send("PATCH", &path, "application/json-patch+json", &patch);
        }
    }

    fn leave_lists_unread(&self) {
        let path = format!("/api/v1/namespaces/{HOSTILE}/configmaps");
        loop {
            let _unread: Vec<_> = (0..30).filter_map(|_| self.open(MALLORY, &path)).collect();
            if !self.next(Duration::from_secs(30)) {
                return;
            }
        }
    }

    /// Leaves watches unread while an object changes.
    fn leave_watches_unread(&self) {
        let path = format!("/api/v1/namespaces/{HOSTILE}/configmaps");
        loop {
            let _unread: Vec<_> = (0..30)
                .filter_map(|_| self.open(MALLORY, &format!("{path}?watch=1&resourceVersion=0")))
                .collect();
            for round in 0..30 {
                let patch = json!({"data": {"b": format!("{round}").repeat(50_000)}}).to_string();
                let one = format!("{path}/large-1");
                self.address.by(MALLORY).send("PATCH", &one, "application/merge-patch+json", &patch);
                if !self.next(Duration::from_secs(1)) {
                    return;
                }
            }
        }
    }

    /// Creates and deletes pods that ignore SIGTERM, three at a time.
    fn make_and_remove_pods(&self) {
        for round in 0_u64.. {
            let name = format!("short-{round}");
            self.create("pods", &pods::short_lived(&name));
            if !self.next(Duration::from_secs(2)) {
                return;
            }
            let Some(earlier) = round.checked_sub(2) else { continue };
            let path = format!("/api/v1/namespaces/{HOSTILE}/pods/short-{earlier}");
            self.address.by(MALLORY).send("DELETE", &path, "application/json", "");
        }
    }
}

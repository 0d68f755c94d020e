//! The suite on a real etcd, and tests of interruptions. They are skipped if etcd is not built.

mod tls;

use std::{
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use coracle_sealing::Keys;
use coracle_testing::{eventually_async, skip};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{
        TcpSocket, TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::watch,
    time::timeout,
};

use super::{Etcd, EtcdOptions, compaction::CompactionState};
use crate::{
    Error, Event, Expect, Health, MemberSize, Range, Sealing, Store, Tier, Watch, Write,
    suite::{self, commit, put},
};

/// A port for etcd. As long as the socket exists, no other program gets the port by chance. etcd can listen on the
/// port, because the socket does not listen, and both sockets have `SO_REUSEADDR`.
fn reserved_port() -> TcpSocket {
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_reuseaddr(true).unwrap();
    socket.bind(([127, 0, 0, 1], 0).into()).unwrap();
    socket
}

/// A running etcd with its own directory.
struct Server {
    dir: tempfile::TempDir,
    ports: [u16; 2],
    _reserved: [TcpSocket; 2],
    /// The scheme of the client URL.
    scheme: &'static str,
    /// Additional flags of etcd.
    flags: Vec<String>,
    process: Option<Child>,
}

impl Server {
    /// Starts etcd; `None` if it is not built.
    fn start() -> Option<Self> {
        Self::start_with(&[])
    }

    fn start_with(flags: &[&str]) -> Option<Self> {
        Self::launch("http", flags.iter().map(|flag| (*flag).to_owned()).collect())
    }

    fn launch(scheme: &'static str, flags: Vec<String>) -> Option<Self> {
        let built = Self::built();
        if !built.exists() {
            return None;
        }
        let reserved = [(); 2].map(|()| reserved_port());
        let ports = reserved.each_ref().map(|socket| socket.local_addr().unwrap().port());
        let dir = tempfile::tempdir().unwrap();
        let mut server = Self { dir, ports, _reserved: reserved, scheme, flags, process: None };
        server.resume(&built);
        Some(server)
    }

    fn built() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/tools/etcd")
    }

    fn url(&self) -> String {
        format!("{}://127.0.0.1:{}", self.scheme, self.ports[0])
    }

    fn resume(&mut self, built: &Path) {
        let (client, peer) = (self.url(), format!("http://127.0.0.1:{}", self.ports[1]));
        let mut command = Command::new(built);
        command.arg("--data-dir").arg(self.dir.path().join("data"));
        for (flag, value) in [
            ("--listen-client-urls", client.as_str()),
            ("--advertise-client-urls", &client),
            ("--listen-peer-urls", &peer),
            ("--initial-advertise-peer-urls", &peer),
            ("--initial-cluster", &format!("default={peer}")),
            ("--log-level", "error"),
        ] {
            command.args([flag, value]);
        }
        command.args(&self.flags);
        let log = std::fs::File::create(self.dir.path().join("log")).unwrap();
        command.arg("--unsafe-no-fsync").stdout(Stdio::null()).stderr(log);
        self.process = Some(command.spawn().unwrap());
    }

    fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            process.kill().unwrap();
            process.wait().unwrap();
        }
    }

    fn signal(&self, signal: Signal) {
        let id = self.process.as_ref().unwrap().id();
        kill(Pid::from_raw(i32::try_from(id).unwrap()), signal).unwrap();
    }

    /// Stops all threads of the server. The kernel stops them one after the other.
    async fn stop(&self) {
        self.signal(Signal::SIGSTOP);
        let tasks = format!("/proc/{}/task", self.process.as_ref().unwrap().id());
        let is_stopped = |task: std::io::Result<std::fs::DirEntry>| {
            let stat = std::fs::read_to_string(task.unwrap().path().join("stat")).unwrap();
            stat.rsplit_once(") ").is_some_and(|(_, state)| state.starts_with('T'))
        };
        eventually_async("etcd to stop", 10, async || std::fs::read_dir(&tasks).unwrap().all(is_stopped))
            .await;
    }

    fn options(&self, prefix: &str) -> EtcdOptions {
        let (servers, prefix) = (vec![self.url()], prefix.to_owned());
        EtcdOptions { servers, prefix, tls: None, sealing: None, compaction: None, size_max_age: None }
    }

    async fn store(&self, prefix: &str) -> Etcd {
        Etcd::connect(self.options(prefix)).await.unwrap()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A member that can hang: a proxy of a server.
struct Proxy {
    url: String,
    hangs: watch::Sender<bool>,
}

impl Proxy {
    async fn start(port: u16) -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let hangs = watch::Sender::new(false);
        let sender = hangs.clone();
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let Ok(server) = TcpStream::connect(("127.0.0.1", port)).await else { continue };
                let ((client_in, client_out), (server_in, server_out)) =
                    (client.into_split(), server.into_split());
                tokio::spawn(Self::forward(client_in, server_out, sender.subscribe()));
                tokio::spawn(Self::forward(server_in, client_out, sender.subscribe()));
            }
        });
        Self { url, hangs }
    }

    async fn forward(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, mut hangs: watch::Receiver<bool>) {
        let mut buffer = vec![0; 1 << 16];
        while let Ok(count @ 1..) = from.read(&mut buffer).await {
            while *hangs.borrow_and_update() {
                if hangs.changed().await.is_err() {
                    return;
                }
            }
            if to.write_all(&buffer[..count]).await.is_err() {
                return;
            }
        }
    }
}

/// Events until the watch has reached a revision.
async fn until(watch: &mut Watch, revision: u64) -> Vec<Event> {
    let mut events = Vec::new();
    loop {
        let event = watch.next().await.unwrap();
        let reached = match &event {
            Event::Commit(commit) => commit.revision,
            Event::Progress(reached) => *reached,
            Event::Unreadable(entry) => panic!("cannot decrypt {}", entry.key),
            Event::Resync { page, .. } => page.revision,
        };
        events.push(event);
        if reached >= revision {
            return events;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn passes_the_suite() {
    let Some(server) = Server::start() else { skip!("etcd is not built: run scripts/etcd") };
    let count = AtomicU32::new(0);
    suite::all(async || {
        let prefix = format!("suite{}", count.fetch_add(1, Ordering::Relaxed));
        Arc::new(server.store(&prefix).await) as Arc<dyn Store>
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_servers_see_each_others_commits_and_any_revision_is_reached() {
    let Some(server) = Server::start() else { skip!("etcd is not built: run scripts/etcd") };
    let (one, two) = (server.store("shared").await, server.store("/shared/").await);
    let other = server.store("other").await;
    let mut watch = one.watch("", one.revision().await.unwrap()).await.unwrap();
    let revision = two.write(put("/a", Expect::Absent, "1", Tier::Durable)).await.unwrap();
    assert_eq!(commit(&mut watch).await.revision, revision);
    // A commit outside the prefix has no event.
    other.write(put("/b", Expect::Absent, "1", Tier::Durable)).await.unwrap();
    let newest = one.revision().await.unwrap();
    let events = until(&mut watch, newest).await;
    // `until` returns at least one event.
    assert!(events.iter().all(|event| matches!(event, Event::Progress(_))), "{events:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_watch_resumes_after_etcd_was_away() {
    let Some(mut server) = Server::start() else { skip!("etcd is not built: run scripts/etcd") };
    let store = server.store("p").await;
    let mut watch = store.watch("", store.revision().await.unwrap()).await.unwrap();
    let first = store.write(put("/a", Expect::Absent, "1", Tier::Durable)).await.unwrap();
    assert_eq!(commit(&mut watch).await.revision, first);
    server.kill();
    let refused = store.write(put("/b", Expect::Absent, "1", Tier::Durable)).await.unwrap_err();
    assert!(matches!(refused, Error::Unavailable { .. }), "{refused:?}");
    assert!(matches!(store.health(), Health::Failed(_)));
    server.resume(&Server::built());
    eventually_async("etcd to serve again", 20, async || store.revision().await.is_ok()).await;
    let second = store.write(put("/c", Expect::Absent, "1", Tier::Durable)).await.unwrap();
    assert_eq!(commit(&mut watch).await.revision, second);
    eventually_async("the store to be healthy", 10, async || store.health() == Health::Good).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stopped_etcd_is_unavailable_and_afterwards_each_event_comes_once() {
    let Some(server) = Server::start() else { skip!("etcd is not built: run scripts/etcd") };
    let store = server.store("p").await;
    let mut watch = store.watch("", store.revision().await.unwrap()).await.unwrap();
    // As with a broken network, connections stay open, and nothing is answered.
    server.stop().await;
    let refused = store.write(put("/a", Expect::Absent, "1", Tier::Durable)).await.unwrap_err();
    assert!(matches!(refused, Error::Unavailable { .. }), "{refused:?}");
    assert!(matches!(store.health(), Health::Failed(_)));
    server.signal(Signal::SIGCONT);
    eventually_async("etcd to serve again", 20, async || store.revision().await.is_ok()).await;
    let last = store.write(put("/b", Expect::Absent, "1", Tier::Durable)).await.unwrap();
    let events = until(&mut watch, last).await;
    let commits = events.iter().filter_map(|event| match event {
        Event::Commit(commit) => Some((&*commit.key, commit.revision)),
        Event::Progress(_) | Event::Unreadable(_) | Event::Resync { .. } => None,
    });
    let commits: Vec<_> = commits.collect();
    // The outcome of the refused write is unknown.
    let other = store.get("/a").await.unwrap().map(|entry| entry.modified).filter(|at| *at < last);
    let expected: Vec<_> = other.map(|at| ("/a", at)).into_iter().chain([("/b", last)]).collect();
    assert_eq!(commits, expected);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reads_and_watches_leave_a_member_that_hangs_at_once() {
    let Some(server) = Server::start() else { skip!("etcd is not built: run scripts/etcd") };
    let proxy = Proxy::start(server.ports[0]).await;
    let servers = vec![proxy.url.clone(), server.url()];
    let store = Etcd::connect(EtcdOptions { servers, ..server.options("p") }).await.unwrap();
    eventually_async("the proxy to be used", 10, async || {
        // While etcd started, the proxy counted as a member that does not respond.
        let index = store.shared.connection.member().index;
        if index != 0 {
            store.shared.connection.advance(index);
        }
        store.revision().await.is_ok() && store.shared.connection.member().index == 0
    })
    .await;
    let mut watch = store.watch("", store.revision().await.unwrap()).await.unwrap();
    let first = store.write(put("/a", Expect::Absent, "1", Tier::Durable)).await.unwrap();
    assert_eq!(commit(&mut watch).await.revision, first);
    proxy.hangs.send_replace(true);
    // A request times out after 8 s, and the pings of the watch after 15 s. On a busy machine, the check of the other
    // member can fail once. The next request checks again.
    eventually_async("a read to leave the member that hangs", 2, async || {
        matches!(timeout(Duration::from_secs(2), store.revision()).await, Ok(Ok(_)))
    })
    .await;
    let second = store.write(put("/b", Expect::Absent, "1", Tier::Durable)).await.unwrap();
    let next = timeout(Duration::from_secs(12), commit(&mut watch)).await.unwrap();
    assert_eq!((next.revision, store.health()), (second, Health::Good));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn probes_end_with_their_timeout() {
    let Some(server) = Server::start() else { skip!("etcd is not built: run scripts/etcd") };
    let store = server.store("p").await;
    store.probe(Duration::from_secs(10)).await.unwrap();
    server.stop().await;
    let timeout = Duration::from_millis(100);
    let error = store.probe(timeout).await.unwrap_err().to_string();
    assert!(error.contains("no response within 100ms"), "{error}");
    server.signal(Signal::SIGCONT);
    eventually_async("etcd to respond", 20, async || store.probe(Duration::from_secs(2)).await.is_ok()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sizes_are_requested_only_if_they_are_old() {
    let Some(mut server) = Server::start() else { skip!("etcd is not built: run scripts/etcd") };
    let connect = async |size_max_age| {
        Etcd::connect(EtcdOptions { size_max_age, ..server.options("p") }).await.unwrap()
    };
    let never = connect(None).await;
    let always = connect(Some(Duration::ZERO)).await;
    assert!(never.member_sizes().await.is_empty());
    // A busy etcd can respond after the time limit of one second. The store keeps that result, too.
    let (once, sizes) = eventually_async("a size in time", 10, async || {
        let once = connect(Some(Duration::from_secs(3600))).await;
        let sizes = once.member_sizes().await;
        sizes.iter().all(|size| size.bytes > Some(0)).then_some((once, sizes))
    })
    .await;
    assert_eq!(sizes.iter().map(|size| &*size.endpoint).collect::<Vec<_>>(), [server.url()]);
    server.kill();
    assert_eq!(once.member_sizes().await, sizes);
    assert_eq!(always.member_sizes().await, [MemberSize { endpoint: server.url(), bytes: None }]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_etcd_serves_reads_and_deletions() {
    let server = Server::start_with(&["--quota-backend-bytes=4194304"]);
    let Some(server) = server else { skip!("etcd is not built: run scripts/etcd") };
    let store = server.store("p").await;
    let mut written = Vec::new();
    let refused = loop {
        let key = format!("/{:02}", written.len());
        let large = put(&key, Expect::Absent, &"x".repeat(256 << 10), Tier::Durable);
        match store.write(large).await {
            Ok(revision) => written.push((key, revision)),
            Err(error) => break error,
        }
        assert!(written.len() < 64, "the quota has no effect");
    };
    assert!(matches!(refused, Error::Quota), "{refused:?}");
    assert!(matches!(store.health(), Health::Full { .. }));
    let found = store.list(Range::default()).await.unwrap().entries;
    let found: Vec<_> = found.iter().map(|entry| (entry.key.to_string(), entry.modified)).collect();
    assert_eq!(found, written);
    let (key, revision) = written.remove(0);
    let deletion = Write { value: None, ..put(&key, Expect::Revision(revision), "", Tier::Durable) };
    store.write(deletion).await.unwrap();
    assert!(store.get(&key).await.unwrap().is_none());
    assert!(matches!(store.health(), Health::Full { .. }), "a deletion does not show that there is space");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_etcd_whose_data_was_replaced_is_not_used() {
    let Some(mut server) = Server::start() else { skip!("etcd is not built: run scripts/etcd") };
    let store = server.store("p").await;
    let mut watch = store.watch("", store.revision().await.unwrap()).await.unwrap();
    let mut last = store.write(put("/a", Expect::Absent, "1", Tier::Durable)).await.unwrap();
    for n in 0..5 {
        last = store.write(put("/a", Expect::Revision(last), &n.to_string(), Tier::Durable)).await.unwrap();
    }
    until(&mut watch, last).await;
    // This store has no watch that notices it.
    let lister = server.store("p").await;
    assert!(lister.list(Range::default()).await.unwrap().revision >= last);
    server.kill();
    std::fs::remove_dir_all(server.dir.path().join("data")).unwrap();
    server.resume(&Server::built());
    let is_refused = async || matches!(store.health(), Health::Failed(text) if text.contains("was replaced"));
    eventually_async("the watch to notice the other data", 30, is_refused).await;
    let is_refused = async || {
        let listed = lister.list(Range::default()).await;
        listed.is_err_and(|error| error.to_string().contains("was replaced"))
    };
    eventually_async("the list to notice the other data", 30, is_refused).await;
    let refused = store.write(put("/b", Expect::Absent, "1", Tier::Durable)).await.unwrap_err();
    assert!(matches!(refused, Error::Unavailable { .. }), "{refused:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_watch_that_missed_compacted_commits_lists_again() {
    let Some(mut server) = Server::start() else { skip!("etcd is not built: run scripts/etcd") };
    let store = server.store("p").await;
    let mut watch = store.watch("/w/", store.revision().await.unwrap()).await.unwrap();
    let first = store.write(put("/w/a", Expect::Absent, "1", Tier::Durable)).await.unwrap();
    assert_eq!(commit(&mut watch).await.revision, first);
    // While the watch is disconnected, a second store compacts the commits that the watch has missed.
    server.kill();
    eventually_async("the watch to notice", 10, async || store.health() != Health::Good).await;
    let (port, other_port) = (server.ports[0], reserved_port());
    server.ports[0] = other_port.local_addr().unwrap().port();
    server.resume(&Server::built());
    let other = server.store("p").await;
    let second = other.write(put("/w/a", Expect::Revision(first), "2", Tier::Durable)).await.unwrap();
    let third = other.write(put("/w/b", Expect::Absent, "3", Tier::Durable)).await.unwrap();
    other.compact(third).await.unwrap();
    server.kill();
    server.ports[0] = port;
    server.resume(&Server::built());
    let events = until(&mut watch, third).await;
    let Some(Event::Resync { page, .. }) = events.last() else { panic!("{events:?}") };
    let found: Vec<_> = page.entries.iter().map(|entry| (&*entry.key, entry.modified)).collect();
    assert_eq!(found, [("/w/a", second), ("/w/b", third)]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn entries_with_a_time_to_live_expire() {
    let Some(server) = Server::start() else { skip!("etcd is not built: run scripts/etcd") };
    let store = server.store("p").await;
    let mut watch = store.watch("", store.revision().await.unwrap()).await.unwrap();
    let tier = Tier::Volatile { ttl: Some(Duration::from_secs(1)) };
    let first = store.write(put("/e", Expect::Absent, "1", tier)).await.unwrap();
    assert_eq!(commit(&mut watch).await.revision, first);
    let gone = commit(&mut watch).await;
    assert_eq!((&*gone.key, &gone.value), ("/e", &None));
    // The lease is gone too: the next write gets another lease.
    store.write(put("/e", Expect::Absent, "1", tier)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn secrets_are_encrypted_in_etcd() {
    let Some(server) = Server::start() else { skip!("etcd is not built: run scripts/etcd") };
    let keys = || Keys::load_or_create(&server.dir.path().join("keys")).unwrap();
    let sealing = || Some(Sealing { keys: keys(), prefixes: vec!["/secrets/".to_owned()], encryption: None });
    let store = Etcd::connect(EtcdOptions { sealing: sealing(), ..server.options("p") }).await.unwrap();
    let mut watch = store.watch("", store.revision().await.unwrap()).await.unwrap();
    store.write(put("/secrets/a", Expect::Absent, "hidden", Tier::Durable)).await.unwrap();
    assert_eq!(commit(&mut watch).await.value.as_deref(), Some(&b"hidden"[..]));
    assert_eq!(&*store.get("/secrets/a").await.unwrap().unwrap().value, b"hidden");
    let plain = server.store("p").await;
    let raw = plain.list(Range::default()).await.unwrap().entries.remove(0).value;
    assert!(!raw.windows(6).any(|bytes| bytes == b"hidden"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_server_compacts_in_each_interval_and_an_idle_cluster_is_not_written() {
    let Some(server) = Server::start() else { skip!("etcd is not built: run scripts/etcd") };
    let (one, two) = (server.store("p").await, server.store("p").await);
    let first = one.write(put("/a", Expect::Absent, "1", Tier::Durable)).await.unwrap();
    let mut states = [CompactionState::default(); 2];
    for round in 0..3 {
        one.write(put(&format!("/{round}"), Expect::Absent, "1", Tier::Durable)).await.unwrap();
        for (state, store) in states.iter_mut().zip([&one, &two]) {
            *state = store.shared.compact_once(*state).await.unwrap();
        }
    }
    assert!(matches!(one.watch("", first).await, Err(Error::Compacted { .. })));
    let before = one.revision().await.unwrap();
    for (state, store) in states.iter_mut().zip([&one, &two]) {
        *state = store.shared.compact_once(*state).await.unwrap();
    }
    assert!(one.revision().await.unwrap() <= before + 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lists_of_many_pages_are_of_one_revision() {
    let Some(server) = Server::start() else { skip!("etcd is not built: run scripts/etcd") };
    let store = server.store("p").await;
    let writes = (0..1100).map(|n| store.write(put(&format!("/{n:04}"), Expect::Absent, "v", Tier::Durable)));
    assert!(futures::future::join_all(writes).await.iter().all(Result::is_ok));
    let page = store.list(Range::default()).await.unwrap();
    assert_eq!((page.entries.len(), page.more), (1100, false));
    assert!(page.entries.is_sorted_by(|one, other| one.key < other.key));
    let part = store.list(Range { limit: 700, ..Range::default() }).await.unwrap();
    assert_eq!((part.entries.len(), part.more), (700, true));
    let large =
        Write { value: Some(vec![0; 2 << 20].into()), ..put("/l", Expect::Absent, "", Tier::Durable) };
    assert!(matches!(store.write(large).await, Err(Error::TooLarge)));
}

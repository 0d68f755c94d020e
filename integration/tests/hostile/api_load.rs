//! API clients that try to exhaust memory, descriptors, time or the log.

#[path = "api_load/audit.rs"]
mod audit;
#[path = "api_load/bodies.rs"]
mod bodies;
#[path = "api_load/client.rs"]
mod client;
#[path = "api_load/metrics.rs"]
mod metrics;

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use coracle_integration::{Cluster, Kubectl, Machine, eventually, on_a_machine};
use serde_json::json;

use client::{ADMIN, Address, EVE, Http2, Plane, raise_descriptors};

/// The beginning of a request whose body never arrives.
fn unfinished_post() -> String {
    format!(
        "POST /apis/authorization.k8s.io/v1/selfsubjectaccessreviews HTTP/1.1\r\nhost: a\r\n{EVE}\r\n\
         content-type: application/json\r\ncontent-length: 1000\r\n\r\n{{"
    )
}

fn config_map(plane: &Plane, name: &str, size: usize) {
    let object = json!({"metadata": {"name": name}, "data": {"a": "x".repeat(size)}}).to_string();
    let (code, answer) =
        plane.by(ADMIN).send("POST", "/api/v1/namespaces/default/configmaps", "application/json", object);
    assert_eq!(code, 201, "{}", &answer[..answer.floor_char_boundary(500)]);
}

/// Gives eve the role `edit` in the namespace `default`. Returns kubectl of the administrator.
fn make_eve_a_tenant(machine: &Machine) -> Kubectl {
    let kubectl = Kubectl::new(machine.path("state/admin.kubeconfig"));
    kubectl.kubectl(&["create", "rolebinding", "eve", "--clusterrole=edit", "--user=eve"]);
    kubectl
}

/// A JSON patch can copy an object into itself repeatedly. Without a limit, a request of 3 kB builds gigabytes.
#[test]
fn a_json_patch_cannot_multiply_an_object() {
    on_a_machine(|machine| {
        let plane = Plane::start(machine, None);
        config_map(&plane, "a", 1000);
        let double = |at| json!({"op": "copy", "from": "/data", "path": format!("/data/b{at}")});
        let before = plane.memory_peak();
        let patch = (0..17).map(double).collect::<serde_json::Value>().to_string();
        let path = "/api/v1/namespaces/default/configmaps/a";
        let (code, answer) = plane.by(ADMIN).send("PATCH", path, "application/json-patch+json", patch);
        assert_eq!((code, answer.contains("accumulated size increase of copy")), (413, true), "{answer}");
        // The largest intermediate object is three megabytes as text.
        let grown = plane.memory_peak() - before;
        assert!(grown < 100 << 20, "the patch took {grown} bytes");
    });
}

/// The YAML parser needs quadratic time for nested flow collections. It must not block the threads that also do TLS
/// handshakes.
#[test]
fn nested_yaml_does_not_block_other_clients() {
    on_a_machine(|machine| {
        let plane = Plane::start(machine, None);
        let posts: Vec<_> = (0..3)
            .map(|_| {
                let plane = plane.address();
                std::thread::spawn(move || {
                    let path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews";
                    // The parser reads the first body to its end. The second body is refused before it is parsed.
                    [5_000, 120_000].map(|levels| {
                        plane.by(EVE).send("POST", path, "application/yaml", "[".repeat(levels))
                    })
                })
            })
            .collect();
        for _ in 0..20 {
            assert_eq!(plane.get(EVE, "/version").0, 200);
        }
        for post in posts {
            let [(parsed, error), (refused, reason)] = post.join().unwrap();
            assert_eq!((parsed, error.contains("error converting YAML to JSON")), (400, true), "{error}");
            assert_eq!((refused, reason.contains("too many flow collections")), (413, true), "{reason}");
        }
    });
}

/// In an earlier version, connections that sent no data could use all descriptors.
#[test]
fn idle_connections_leave_descriptors_for_other_clients() {
    on_a_machine(|machine| {
        raise_descriptors();
        let plane = Plane::start(machine, Some(1024));
        let silent: Vec<TcpStream> =
            (0..1500).filter_map(|_| TcpStream::connect(plane.address().socket()).ok()).collect();
        assert!(silent.len() > 1000);
        eventually("other clients to be served", 20, || plane.get(EVE, "/version").0 == 200);
        assert_eq!(plane.get(ADMIN, "/api/v1/namespaces/default").0, 200);
        let open = plane.descriptors();
        assert!(open < 512, "{open} descriptors are open");
        let lines = plane.log_lines();
        assert!(lines < 50, "{lines} lines in the log");
    });
}

/// In an earlier version, each connection without TLS and each unknown token wrote a line to the log.
#[test]
fn anonymous_clients_write_few_lines_to_the_log() {
    on_a_machine(|machine| {
        let mirrors = machine.start_registry();
        let cluster = Cluster::up(machine, &mirrors);
        let address = Address::of(machine);
        let before = cluster.log().lines().count();
        for _ in 0..300 {
            // The server may have closed the connection already.
            for port in [6443, 10250] {
                address.try_tcp(port).unwrap().write_all(b"GET / HTTP/1.1\r\n\r\n").ok();
            }
            let (code, _) =
                address.by("authorization: Bearer unknown").send("GET", "/api", "application/json", "");
            assert!([401, 429].contains(&code), "{code}");
        }
        let log = cluster.log();
        let lines: Vec<&str> = log.lines().skip(before).collect();
        assert!(lines.len() < 60, "{} lines:\n{}", lines.len(), lines.join("\n"));
    });
}

/// With systemd's default limits, the API server allows as many watches as a large cluster needs. An ordinary user starts
/// them, each on a connection of its own.
#[test]
fn five_thousand_watches_work_with_the_usual_limits() {
    const WATCHES: usize = 5000;
    /// Number of connections if the machine does not permit systemd's hard limit. Each connection then has ten watches.
    const FEW_CONNECTIONS: usize = 500;
    const SYSTEMD_HARD_LIMIT: u64 = 524_288;
    /// Interval in which the clients answer pings. The server waits 20 s for an answer.
    const PING_ANSWERS: Duration = Duration::from_secs(10);
    on_a_machine(|machine| {
        let own_limit = raise_descriptors();
        let plane = Plane::start(machine, None);
        let path = "/apis/coordination.k8s.io/v1/namespaces/default/leases";
        permit_eve_to_watch_leases(&plane);
        eventually("the permission to take effect", 20, || plane.get(EVE, path).0 == 200);
        let is_usual = plane.descriptor_limit() >= SYSTEMD_HARD_LIMIT && own_limit > 6000;
        let count = if is_usual { WATCHES } else { FEW_CONNECTIONS };
        let before = plane.memory();
        let mut connections: Vec<Http2> = Vec::new();
        let (address, config) = (plane.address(), plane.address().client_config(&[b"h2"]));
        let mut last_pings = Instant::now();
        for _ in 0..count {
            // On a slow machine, the server sends pings to the first clients while the last ones connect.
            if last_pings.elapsed() > PING_ANSWERS {
                connections.iter_mut().for_each(Http2::answer_pings);
                last_pings = Instant::now();
            }
            let mut connection = Http2::connect_with(&address, Arc::clone(&config), "Bearer eve-token");
            (0..WATCHES / count).for_each(|_| connection.get(&format!("{path}?watch=1")));
            assert_eq!(connection.answers(WATCHES / count), WATCHES / count);
            connections.push(connection);
        }
        eventually("all watches to run", 20, || {
            connections.iter_mut().for_each(Http2::answer_pings);
            watches_of_leases(&plane) == WATCHES
        });
        let grown = plane.memory().saturating_sub(before);
        eprintln!("{WATCHES} watches on {count} connections: {} KiB", grown >> 10);
        assert_eq!(plane.get(EVE, "/version").0, 200);
    });
}

/// CVE-2023-44487, CVE-2023-39325: streams that are reset at once; CVE-2019-9514, CVE-2025-8671: streams that the server
/// must reset; CVE-2019-9512, CVE-2019-9513, CVE-2019-9515: pings, priorities and settings; CVE-2019-9518: empty frames;
/// CVE-2023-45288: headers without end; CVE-2019-9516: fields without name; CVE-2022-41723: a header in very many pieces.
#[test]
fn floods_of_http2_frames_take_bounded_memory_and_stop_no_other_client() {
    on_a_machine(|machine| {
        let plane = Plane::start(machine, None);
        let before = plane.memory();
        Http2::connect(&plane.address()).flood_by_resets(50_000);
        Http2::connect(&plane.address()).flood_by_settings(100_000);
        Http2::connect(&plane.address()).flood_by_empty_frames(100_000);
        assert!(
            Http2::connect(&plane.address()).flood_by_provoked_resets(50_000),
            "the server has reset all streams"
        );
        assert!(
            Http2::connect(&plane.address()).flood_by_empty_fields(10_000),
            "the server read all empty fields"
        );
        assert!(
            Http2::connect(&plane.address()).flood_by_headers(10_000),
            "the server read 160 MB of headers"
        );
        assert!(
            Http2::connect(&plane.address()).flood_by_pieces_of_a_header(1_000_000),
            "all pieces were read"
        );
        assert_eq!(plane.get(EVE, "/version").0, 200);
        let grown = plane.memory().saturating_sub(before);
        assert!(grown < 64 << 20, "{} KiB more", grown >> 10);
    });
}

/// In an earlier version, the server kept an encoded copy of the list for each client until the client had read it.
#[test]
fn unread_lists_share_the_encoded_objects() {
    on_a_machine(|machine| {
        let plane = Plane::start(machine, None);
        for number in 0..18 {
            config_map(&plane, &format!("large-{number}"), 1_000_000);
        }
        let before = plane.memory();
        let request =
            format!("GET /api/v1/namespaces/default/configmaps HTTP/1.1\r\nhost: a\r\n{ADMIN}\r\n\r\n");
        let mut unread: Vec<_> = (0..30)
            .map(|_| {
                let mut connection = plane.address().connect(&[]);
                connection.write_all(request.as_bytes()).unwrap();
                connection.flush().unwrap();
                connection
            })
            .collect();
        // Each response has started.
        unread.iter_mut().for_each(|connection| assert_eq!(client::status(connection), 200));
        let grown = plane.memory().saturating_sub(before);
        eprintln!("30 unread lists: {} KiB", grown >> 10);
        assert!(grown < 100 << 20, "30 unread lists of 18 MB take {grown} bytes");
    });
}

/// CVE-2019-9511, CVE-2019-9517: each stream had its own copy of the object. A client may let all streams begin and
/// read a few bytes of each.
#[test]
fn unread_streams_share_the_encoded_objects() {
    on_a_machine(|machine| {
        let plane = Plane::start(machine, None);
        config_map(&plane, "a", 1_000_000);
        let before = plane.memory();
        let mut connection = Http2::connect(&plane.address());
        connection.permit_two_bytes_of_each_stream();
        for _ in 0..120 {
            connection.get("/api/v1/namespaces/default/configmaps/a");
            connection.get("/api/v1/namespaces/default/configmaps?watch=1");
        }
        assert_eq!(connection.answers(240), 240);
        let grown = plane.memory().saturating_sub(before);
        eprintln!("240 unread streams: {} KiB", grown >> 10);
        assert!(grown < 60 << 20, "240 unread streams of 1 MB take {grown} bytes");
    });
}

/// In an earlier version, the process kept the memory of deleted objects.
#[test]
fn the_memory_of_deleted_objects_is_returned() {
    on_a_machine(|machine| {
        let plane = Plane::start(machine, None);
        let path = "/api/v1/namespaces/default/configmaps";
        let before = plane.memory();
        for number in 0..60 {
            config_map(&plane, &format!("large-{number}"), 1_000_000);
        }
        assert_eq!(plane.get(ADMIN, path).0, 200);
        let with_objects = plane.memory();
        // The objects have 60 MB, but meanwhile the process may have returned memory of its start.
        assert!(
            with_objects > before + (30 << 20),
            "{before} bytes without objects, {with_objects} with them"
        );
        assert_eq!(plane.by(ADMIN).send("DELETE", path, "application/json", "").0, 200);
        eventually("the memory to be returned", 60, || plane.memory() < before + (20 << 20));
    });
}

/// The number of requests in flight is limited, and one user cannot use all of them.
#[test]
fn unfinished_requests_of_one_user_do_not_block_other_users() {
    on_a_machine(|machine| {
        let plane = Plane::start(machine, None);
        let mut unfinished: Vec<_> = (0..110)
            .map(|_| {
                let mut connection = plane.address().connect(&[]);
                connection.write_all(unfinished_post().as_bytes()).unwrap();
                connection.flush().unwrap();
                connection
            })
            .collect();
        let path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews";
        let review = r#"{"spec":{"nonResourceAttributes":{"path":"/","verb":"get"}}}"#;
        eventually("a request to be refused", 10, || {
            let (code, answer) = plane.by(EVE).send("POST", path, "application/json", review);
            code == 429 && answer.contains("Too many requests")
        });
        let other = "authorization: Bearer bob-token";
        assert_eq!(plane.by(other).send("POST", path, "application/json", review).0, 201);
        assert_eq!(plane.get(EVE, "/version").0, 200);
        assert_eq!(client::status(&mut unfinished[109]), 429);
    });
}

/// Sends a text, then a byte of `rest` after each read, until the server closes the connection. A read without data
/// takes a second. Returns the number of reads until then, or `None` if the connection is still open after `limit`
/// reads.
fn reads_until_closed(mut connection: client::Tls, first: &str, rest: &str, limit: u64) -> Option<u64> {
    connection.sock.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
    let mut rest = rest.bytes();
    let mut sent = connection.write_all(first.as_bytes()).and_then(|()| connection.flush());
    for reads in 0..limit {
        let is_open = match connection.read(&mut [0; 4096]) {
            Ok(count) => count > 0,
            Err(error) => matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut),
        };
        if sent.is_err() || !is_open {
            return Some(reads);
        }
        sent = rest
            .next()
            .map_or(Ok(()), |byte| connection.write_all(&[byte]).and_then(|()| connection.flush()));
    }
    None
}

/// In an earlier version, the server never closed a connection that sent nothing after the handshake, or one byte each
/// second.
#[test]
fn silent_and_slow_clients_lose_their_connections() {
    // The API server waits 32 s for a header and 90 s for a request. A connection that is refused ends at once.
    const LIMIT: u64 = 240;
    const REFUSED: u64 = 2;
    on_a_machine(|machine| {
        let plane = Plane::start(machine, None);
        let slow = "x".repeat(1000);
        let clients = [
            ("silent", &[][..], String::new(), ""),
            ("silent HTTP/2", &[&b"h2"[..]], String::new(), ""),
            ("idle after a response", &[], format!("GET /version HTTP/1.1\r\nhost: a\r\n{EVE}\r\n\r\n"), ""),
            ("slow header", &[], "GET /version HTTP/1.1\r\nhost: a\r\nx: ".to_owned(), &slow),
            ("slow body", &[], unfinished_post(), &slow),
        ];
        std::thread::scope(|scope| {
            let waiting = clients.map(|(name, protocols, first, rest)| {
                let connection = plane.address().connect(protocols);
                (name, scope.spawn(move || reads_until_closed(connection, &first, rest, LIMIT)))
            });
            for (name, thread) in waiting {
                let reads = thread.join().unwrap();
                eprintln!("{name}: closed after {reads:?} reads");
                let reads = reads.unwrap_or_else(|| panic!("the connection of a client is open: {name}"));
                assert!(reads > REFUSED, "the connection of a client was refused: {name}, {reads} reads");
            }
        });
        assert_eq!(plane.get(EVE, "/version").0, 200);
    });
}

/// Deeply nested objects overflowed the decoder's stack, which ended the process.
#[test]
fn embedded_protobuf_objects_do_not_end_the_process() {
    on_a_machine(|machine| {
        let plane = Plane::start(machine, None);
        let body = client::nested_protobuf(50_000);
        let path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews";
        let (code, answer) = plane.by(EVE).send("POST", path, "application/vnd.kubernetes.protobuf", body);
        assert_eq!((code, answer.contains("nested too deeply")), (400, true), "{answer}");
        assert_eq!(plane.get(EVE, "/version").0, 200);
    });
}

/// Texts that responses truncate or repeat. Each of these caused a panic, which aborts a release build.
#[test]
fn odd_names_and_many_warnings_get_a_response() {
    on_a_machine(|machine| {
        let plane = Plane::start(machine, None);
        let path = "/api/v1/namespaces/default/configmaps";
        let name = format!("a{}", "é".repeat(40));
        let object = json!({"metadata": {"generateName": name}}).to_string();
        assert_eq!(plane.by(ADMIN).send("POST", path, "application/json", object).0, 422);
        let unknown: serde_json::Map<_, _> = (0..40_000).map(|at| (format!("f{at}"), json!(1))).collect();
        let mut object = json!({"metadata": {"name": "b"}});
        object.as_object_mut().unwrap().extend(unknown);
        assert_eq!(plane.by(ADMIN).send("POST", path, "application/json", object.to_string()).0, 201);
    });
}

/// Without a limit, the header of a request would be kept in memory until its end.
#[test]
fn long_headers_and_many_fields_are_refused() {
    on_a_machine(|machine| {
        let plane = Plane::start(machine, None);
        let long = format!("{EVE}\r\nx: {}", "x".repeat(8 << 20));
        let many: String = (0..150).map(|number| format!("x{number}: y\r\n")).collect();
        for header in [long, many + EVE] {
            // The code is 0 if the server closes the connection while the client is still sending.
            let (code, answer) = plane.get(&header, "/version");
            assert!([0, 431].contains(&code), "{code}: {answer}");
        }
        assert_eq!(plane.get(EVE, "/version").0, 200);
    });
}

/// CVE-2019-16276: a name with a space before the colon was read as the name without the space. A proxy in front of the
/// server does not remove such a header.
#[test]
fn cve_2019_16276_a_space_after_a_header_name_is_refused() {
    on_a_machine(|machine| {
        let plane = Plane::start(machine, None);
        for header in ["x-remote-user : admin", "impersonate-user : admin", "transfer-encoding : chunked"] {
            // The code is 0 if the server closes the connection before its response is read.
            let (code, answer) = plane.get(&format!("{EVE}\r\n{header}"), "/version");
            assert!([0, 400].contains(&code), "{header}: {code}: {answer}");
        }
        assert_eq!(plane.get(EVE, "/version").0, 200);
    });
}

/// A watch whose client does not read kept every version of every object, up to 4,096 versions.
#[test]
fn an_unread_watch_does_not_keep_all_versions() {
    let grown = unread_watches(1);
    assert!(grown < 60 << 20, "an unread watch keeps {grown} bytes");
}

/// Each unread watch has its own buffers, but they share the objects.
#[test]
fn unread_watches_share_the_encoded_objects() {
    let grown = unread_watches(30);
    assert!(grown < 100 << 20, "30 unread watches keep {grown} bytes");
}

/// The events are small and all watches share them, but each watch has them in its queue.
#[test]
fn small_events_of_many_unread_watches_take_bounded_memory() {
    const CONNECTIONS: usize = 10;
    const STREAMS: usize = 250;
    const AT_A_TIME: usize = 50;
    const WATCHES: usize = CONNECTIONS * STREAMS;
    /// The events of all four leases fit into the queue of a watch. Without a common limit, the queues of all watches
    /// would take about 200 MiB.
    const EVENTS_OF_EACH_LEASE: usize = 875;
    /// The limit of unread bytes of all watches, and the buffer of HTTP/2 for the response of each watch.
    const MAX_GROWTH: usize = (64 << 20) + WATCHES * (48 << 10);
    on_a_machine(|machine| {
        raise_descriptors();
        let plane = Plane::start(machine, None);
        let path = "/apis/coordination.k8s.io/v1/namespaces/default/leases";
        permit_eve_to_watch_leases(&plane);
        eventually("the permission to take effect", 20, || plane.get(EVE, path).0 == 200);
        let leases = ["a", "b", "c", "d"];
        for name in leases {
            let lease = json!({"metadata": {"name": name}}).to_string();
            assert_eq!(plane.by(ADMIN).send("POST", path, "application/json", lease).0, 201);
        }
        let connect = |_| Http2::connect_as(&plane.address(), "Bearer eve-token");
        let mut connections: Vec<Http2> = (0..CONNECTIONS).map(connect).collect();
        for connection in &mut connections {
            connection.permit_any_number_of_bytes();
            // With more requests at a time, requests would wait in the queue of their priority level, and some would be
            // refused.
            for _ in 0..STREAMS / AT_A_TIME {
                (0..AT_A_TIME).for_each(|_| connection.get(&format!("{path}?watch=1")));
                assert_eq!(connection.answers(AT_A_TIME), AT_A_TIME);
            }
        }
        eventually("all watches to run", 20, || watches_of_leases(&plane) == WATCHES);
        let before = plane.memory();
        std::thread::scope(|scope| {
            for name in leases {
                let (address, object) = (plane.address(), format!("{path}/{name}"));
                scope.spawn(move || {
                    for number in 0..EVENTS_OF_EACH_LEASE {
                        let patch = json!({"spec": {"holderIdentity": number.to_string()}}).to_string();
                        let media = "application/merge-patch+json";
                        let (code, answer) = address.by(ADMIN).send("PATCH", &object, media, patch);
                        assert_eq!(code, 200, "{answer}");
                    }
                });
            }
        });
        let grown = plane.memory_peak().saturating_sub(before);
        eprintln!("{WATCHES} unread watches: {} KiB, {} remain", grown >> 10, watches_of_leases(&plane));
        eventually("some watches to end", 20, || watches_of_leases(&plane) < WATCHES);
        assert!(grown < MAX_GROWTH, "{WATCHES} unread watches take {grown} bytes");
        assert_eq!(plane.get(EVE, "/version").0, 200);
        drop(connections);
    });
}

fn permit_eve_to_watch_leases(plane: &Plane) {
    let group = "rbac.authorization.k8s.io";
    let rules =
        json!([{"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["list", "watch"]}]);
    let objects = [
        ("clusterroles", json!({"metadata": {"name": "watcher"}, "rules": rules})),
        (
            "clusterrolebindings",
            json!({"metadata": {"name": "watcher"},
                "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": "watcher"},
                "subjects": [{"apiGroup": group, "kind": "User", "name": "eve"}]}),
        ),
    ];
    for (resource, object) in objects {
        let path = format!("/apis/{group}/v1/{resource}");
        let (code, answer) = plane.by(ADMIN).send("POST", &path, "application/json", object.to_string());
        assert_eq!(code, 201, "{answer}");
    }
}

/// Number of running watches of leases by clients from the network.
fn watches_of_leases(plane: &Plane) -> usize {
    let (_, text) = plane.get(ADMIN, "/metrics");
    let is_of_leases = |line: &&str| {
        line.starts_with("apiserver_longrunning_requests{")
            && line.contains("resource=\"leases\"")
            && line.contains("verb=\"WATCH\"")
    };
    let counts =
        text.lines().filter(is_of_leases).filter_map(|line| line.rsplit(' ').next()?.parse::<usize>().ok());
    counts.sum()
}

/// Growth of the API server in bytes, while objects of a megabyte change and watches are not read.
fn unread_watches(count: usize) -> usize {
    let (sender, receiver) = std::sync::mpsc::channel();
    on_a_machine(move |machine| {
        let plane = Plane::start(machine, None);
        // Leases are stored in memory only: only the watch keeps their old versions.
        let path = "/apis/coordination.k8s.io/v1/namespaces/default/leases";
        let lease = |holder: String| {
            json!({"metadata": {"name": "l"}, "spec": {"holderIdentity": holder}}).to_string()
        };
        let large = |round: usize| lease(format!("{round}{}", "x".repeat(1_000_000)));
        assert_eq!(plane.by(ADMIN).send("POST", path, "application/json", large(0)).0, 201);
        let object = format!("{path}/l");
        let update = |round| {
            let (code, _) =
                plane.by(ADMIN).send("PATCH", &object, "application/merge-patch+json", large(round));
            assert_eq!(code, 200);
        };
        (0..20).for_each(update);
        let request = format!("GET {path}?watch=1 HTTP/1.1\r\nhost: a\r\n{ADMIN}\r\n\r\n");
        let watches: Vec<_> = (0..count)
            .map(|_| {
                let mut watch = plane.address().connect(&[]);
                watch.write_all(request.as_bytes()).unwrap();
                watch.flush().unwrap();
                assert_eq!(client::status(&mut watch), 200);
                watch
            })
            .collect();
        let before = plane.memory();
        (0..80).for_each(update);
        let grown = plane.memory().saturating_sub(before);
        eprintln!("{count} unread watches: {} KiB", grown >> 10);
        drop(watches);
        sender.send(grown).unwrap();
    });
    receiver.recv().unwrap()
}

//! Latency of the API requests of an administrator and of a service account during the attack.

use std::fmt;
use std::io::{Read as _, Write as _};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::client::{ADMIN, Address, Tls};
use crate::pods::ORDINARY;

/// Time between two requests.
const REQUEST_INTERVAL: Duration = Duration::from_millis(50);

/// Duration and kind of all requests, sorted by duration.
#[derive(Debug)]
pub(crate) struct Latencies(Vec<(Duration, &'static str)>);

impl Latencies {
    /// Makes requests of an administrator and of another account at the same time, until `work` returns. The priority
    /// level of administrators (`system:masters`) has no queue, so their latency alone does not show long queues.
    pub(crate) fn sample(address: &Address, account: &str, work: impl FnOnce()) -> [Self; 2] {
        let mut of_account = None;
        let of_admin = Self::sample_user(address, ADMIN, || {
            of_account = Some(Self::sample_user(address, account, work));
        });
        [of_admin, of_account.unwrap()]
    }

    /// Makes requests of a user until `work` returns: reads, lists and durable writes over a persistent connection, and
    /// reads over new connections.
    fn sample_user(address: &Address, user: &str, work: impl FnOnce()) -> Self {
        let ends = AtomicBool::new(false);
        let mut all = thread::scope(|scope| {
            let sampler = scope.spawn(|| sample_until(address, user, &ends));
            work();
            ends.store(true, Ordering::SeqCst);
            sampler.join().unwrap()
        });
        all.sort_unstable();
        Self(all)
    }

    pub(crate) fn p99(&self) -> Duration {
        self.percentile(99).0
    }

    /// Duration and kind of the request at this percentile.
    fn percentile(&self, percent: usize) -> (Duration, &'static str) {
        self.0.get((self.0.len() * percent / 100).min(self.0.len() - 1)).copied().unwrap()
    }
}

impl fmt::Display for Latencies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [half, most, max] = [50, 99, 100].map(|percent| self.percentile(percent));
        write!(f, "p50 {:.1?}, p99 {:.1?}, max {:.1?} of {} requests", half.0, most.0, max, self.0.len())?;
        for kind in ["read", "list", "write", "new connection"] {
            let of: Vec<_> = self.0.iter().filter(|(_, name)| *name == kind).map(|(time, _)| *time).collect();
            write!(f, "; {kind} p99 {:.1?}", of[(of.len() * 99 / 100).min(of.len() - 1)])?;
        }
        Ok(())
    }
}

fn sample_until(address: &Address, user: &str, ends: &AtomicBool) -> Vec<(Duration, &'static str)> {
    let mut all = Vec::new();
    let mut connection = address.connect(&[]);
    let (pods, map) = (
        format!("/api/v1/namespaces/{ORDINARY}/pods"),
        format!("/api/v1/namespaces/{ORDINARY}/configmaps/kube-root-ca.crt"),
    );
    for round in 0_u64.. {
        if ends.load(Ordering::SeqCst) {
            break;
        }
        let began = Instant::now();
        let (kind, code) = match round % 4 {
            0 => (
                "read",
                request(&mut connection, user, "GET", &format!("{pods}/ordinary-{}", round % 50), ""),
            ),
            1 => ("list", request(&mut connection, user, "GET", &format!("{pods}?limit=50"), "")),
            2 => {
                let patch = format!(r#"{{"metadata":{{"annotations":{{"round":"{round}"}}}}}}"#);
                ("write", request(&mut connection, user, "PATCH", &map, &patch))
            }
            _ => ("new connection", Some(address.by(user).send("GET", "/version", "", "").0)),
        };
        all.push((began.elapsed(), kind));
        if code.is_none() {
            // The server closed the connection between two requests. Opening a new one is part of the latency.
            connection = address.connect(&[]);
            continue;
        }
        assert_eq!(code, Some(200), "{kind}");
        thread::sleep(REQUEST_INTERVAL);
    }
    all
}

/// One request over a persistent connection. Returns the status code, or None if the connection is closed.
fn request(connection: &mut Tls, user: &str, method: &str, path: &str, body: &str) -> Option<u16> {
    let length = body.len();
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: a\r\n{user}\r\ncontent-type: application/merge-patch+json\r\n\
         content-length: {length}\r\n\r\n{body}"
    );
    connection.write_all(head.as_bytes()).ok()?;
    connection.flush().ok()?;
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        read(connection, 1, &mut head)?;
    }
    let head = String::from_utf8(head).unwrap().to_ascii_lowercase();
    let length = head.lines().find_map(|line| line.strip_prefix("content-length:"));
    match length {
        Some(length) => read(connection, length.trim().parse().unwrap(), &mut Vec::new())?,
        None => read_chunks(connection)?,
    }
    head.split(' ').nth(1)?.parse().ok()
}

fn read_chunks(connection: &mut Tls) -> Option<()> {
    loop {
        let mut line = Vec::new();
        while !line.ends_with(b"\r\n") {
            read(connection, 1, &mut line)?;
        }
        let length = usize::from_str_radix(std::str::from_utf8(&line).unwrap().trim(), 16).unwrap();
        read(connection, length + 2, &mut Vec::new())?;
        if length == 0 {
            return Some(());
        }
    }
}

fn read(connection: &mut Tls, length: usize, into: &mut Vec<u8>) -> Option<()> {
    let from = into.len();
    into.resize(from + length, 0);
    connection.read_exact(into.get_mut(from..)?).ok()
}

//! Requests and watches of an API server: HTTP/1.1 over TLS.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use clap::Args;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned, crypto::ring};
use rustls_pki_types::{CertificateDer, pem::PemObject as _};
use serde_json::json;

use crate::{Limits, report, run};

/// A name in the certificates of every API server.
const NAME: &str = "kubernetes.default.svc";

/// How to reach an API server.
#[derive(Args)]
pub(crate) struct Server {
    /// Address and port.
    #[arg(long)]
    server: SocketAddr,
    /// File with the CA certificate of the API server.
    #[arg(long)]
    ca: PathBuf,
    /// Bearer token.
    #[arg(long)]
    token: String,
}

#[derive(Args)]
pub(crate) struct Requests {
    #[command(flatten)]
    server: Server,
    #[command(flatten)]
    limits: Limits,
    #[arg(long, default_value = "GET")]
    method: String,
    /// Path of the request. `{n}` is replaced by the number of the request.
    #[arg(long)]
    path: String,
    /// Body of the request. `{n}` is replaced here too.
    #[arg(long, default_value = "")]
    body: String,
    #[arg(long, default_value = "application/json")]
    media: String,
    /// Number of the first request.
    #[arg(long, default_value_t = 0)]
    first: usize,
    /// Number of requests after which the numbers begin again.
    #[arg(long, default_value_t = usize::MAX)]
    modulo: usize,
}

#[derive(Args)]
pub(crate) struct Watches {
    #[command(flatten)]
    server: Server,
    /// Number of watches, each on its own connection.
    #[arg(long)]
    count: usize,
    /// Path of the watch. `{n}` is replaced by the number of the watch.
    #[arg(long)]
    path: String,
    /// Path of an object that all watches include. Merge patches set its annotation `sequence`.
    #[arg(long)]
    object: Option<String>,
    /// Number of merge patches.
    #[arg(long, default_value_t = 50)]
    writes: usize,
}

/// An HTTP request.
pub(crate) struct Request<'a> {
    pub(crate) method: &'a str,
    pub(crate) path: &'a str,
    /// Media type of the body.
    pub(crate) media: &'a str,
    pub(crate) body: &'a str,
}

pub(crate) type Stream = BufReader<StreamOwned<ClientConnection, TcpStream>>;

impl<'a> Request<'a> {
    pub(crate) fn get(path: &'a str) -> Self {
        Self { method: "GET", path, media: "application/json", body: "" }
    }
}

impl Server {
    pub(crate) fn config(&self) -> Arc<ClientConfig> {
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_file_iter(&self.ca).unwrap() {
            // The file of a self-signed certificate may also contain a certificate that is not an authority.
            roots.add(certificate.unwrap()).ok();
        }
        let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
        let config = config.with_safe_default_protocol_versions().unwrap();
        Arc::new(config.with_root_certificates(roots).with_no_client_auth())
    }

    pub(crate) fn connect(&self, config: &Arc<ClientConfig>) -> Stream {
        let stream = TcpStream::connect(self.server).unwrap();
        stream.set_nodelay(true).unwrap();
        let client = ClientConnection::new(Arc::clone(config), NAME.try_into().unwrap()).unwrap();
        BufReader::with_capacity(1 << 16, StreamOwned::new(client, stream))
    }

    pub(crate) fn send(&self, stream: &mut Stream, request: &Request<'_>) {
        let Request { method, path, media, body } = request;
        let request = format!(
            "{method} {path} HTTP/1.1\r\nhost: {NAME}\r\nauthorization: Bearer {}\r\naccept: application/json\r\n\
             content-type: {media}\r\ncontent-length: {}\r\n\r\n{body}",
            self.token,
            body.len()
        );
        let tls = stream.get_mut();
        tls.write_all(request.as_bytes()).unwrap();
        tls.flush().unwrap();
    }
}

/// Status code of a response, and the length of its body unless it is in chunks.
pub(crate) fn head(stream: &mut Stream) -> (u16, Option<u64>) {
    let mut line = String::new();
    stream.read_line(&mut line).unwrap();
    let status = line.split(' ').nth(1).expect("an HTTP response").parse().unwrap();
    let mut length = Some(0);
    loop {
        line.clear();
        stream.read_line(&mut line).unwrap();
        let lower = line.trim().to_ascii_lowercase();
        if lower.is_empty() {
            return (status, length);
        } else if let Some(value) = lower.strip_prefix("content-length: ") {
            length = Some(value.parse().unwrap());
        } else if lower == "transfer-encoding: chunked" {
            length = None;
        }
    }
}

/// Reads a body of this length, or one in chunks.
pub(crate) fn body(stream: &mut Stream, length: Option<u64>) -> Vec<u8> {
    let mut content = Vec::new();
    if let Some(length) = length {
        stream.by_ref().take(length).read_to_end(&mut content).unwrap();
        return content;
    }
    loop {
        let mut line = String::new();
        stream.read_line(&mut line).unwrap();
        let size = u64::from_str_radix(line.trim(), 16).unwrap();
        stream.by_ref().take(size).read_to_end(&mut content).unwrap();
        stream.read_line(&mut line).unwrap();
        if size == 0 {
            return content;
        }
    }
}

pub(crate) fn requests(arguments: &Requests) -> serde_json::Value {
    let config = arguments.server.config();
    let reported = Mutex::new(false);
    run(arguments.limits, |_| {
        let mut stream = arguments.server.connect(&config);
        let (reported, method) = (&reported, arguments.method.as_str());
        move |operation| {
            let number = (arguments.first + operation % arguments.modulo).to_string();
            let path = arguments.path.replace("{n}", &number);
            let content = arguments.body.replace("{n}", &number);
            let request = Request { method, path: &path, media: &arguments.media, body: &content };
            arguments.server.send(&mut stream, &request);
            let (status, length) = head(&mut stream);
            let response = body(&mut stream, length);
            let succeeded = status < 300;
            if !succeeded && !std::mem::replace(&mut *reported.lock().unwrap(), true) {
                let text = String::from_utf8_lossy(&response);
                eprintln!("load: {method} {path}: {status} {text}");
            }
            succeeded
        }
    })
}

/// Opens the watches and prints `ready`. Without an object it keeps them until standard input closes.
pub(crate) fn watches(arguments: &Watches) {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard).unwrap();
    let config = arguments.server.config();
    let (events, received) = mpsc::channel();
    for number in 0..arguments.count {
        let mut stream = arguments.server.connect(&config);
        let path = arguments.path.replace("{n}", &number.to_string());
        arguments.server.send(&mut stream, &Request::get(&path));
        let (status, _) = head(&mut stream);
        assert_eq!(status, 200, "watch {path}");
        let events = events.clone();
        let thread = std::thread::Builder::new().stack_size(256 << 10);
        thread.spawn(move || follow(&mut stream, &events)).unwrap();
    }
    println!("ready");
    if let Some(object) = &arguments.object {
        println!("{}", write_and_wait(arguments, object, &received));
    } else {
        std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
    }
}

/// Reports the sequence number of each event with the time of its arrival.
fn follow(stream: &mut Stream, events: &mpsc::Sender<(usize, Instant)>) {
    let mut line = Vec::new();
    while stream.read_until(b'\n', &mut line).is_ok_and(|length| length > 0) {
        let now = Instant::now();
        if let Some(sequence) = sequence(&line)
            && events.send((sequence, now)).is_err()
        {
            return;
        }
        line.clear();
    }
}

/// The number in `"sequence":"…"`.
fn sequence(event: &[u8]) -> Option<usize> {
    let text = std::str::from_utf8(event).ok()?;
    let (_, rest) = text.split_once("\"sequence\":\"")?;
    rest.split('"').next()?.parse().ok()
}

/// The times of a write, measured from its request.
#[derive(Clone, Copy, Default)]
struct WriteTimes {
    number: usize,
    response: Duration,
    first_event: Duration,
    last_event: Duration,
}

/// Patches the object and reports the time from each patch until each watch has its event. The report also has the
/// times of the slowest write. These times show whether the write itself, or the delivery of its events, took long.
fn write_and_wait(
    arguments: &Watches,
    object: &str,
    events: &mpsc::Receiver<(usize, Instant)>,
) -> serde_json::Value {
    let config = arguments.server.config();
    let mut stream = arguments.server.connect(&config);
    let (mut samples, begin, mut late) = (Vec::new(), Instant::now(), 0);
    let mut slowest = WriteTimes::default();
    for write in 1..=arguments.writes {
        let patch = format!("{{\"metadata\":{{\"annotations\":{{\"sequence\":\"{write}\"}}}}}}");
        let media = "application/merge-patch+json";
        let sent = Instant::now();
        let request = Request { method: "PATCH", path: object, media, body: &patch };
        arguments.server.send(&mut stream, &request);
        let (status, length) = head(&mut stream);
        body(&mut stream, length);
        assert_eq!(status, 200, "PATCH {object}");
        let (response, before) = (sent.elapsed(), samples.len());
        let mut missing = arguments.count;
        while missing > 0 {
            let Ok((sequence, at)) = events.recv_timeout(Duration::from_secs(10)) else { break };
            if sequence == write {
                samples.push(at - sent);
                missing -= 1;
            }
        }
        late += missing;
        let times = samples.iter().skip(before).copied();
        let [first_event, last_event] = [times.clone().min(), times.max()].map(Option::unwrap_or_default);
        if last_event > slowest.last_event {
            slowest = WriteTimes { number: write, response, first_event, last_event };
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    let mut report = report(samples, begin.elapsed(), late);
    report["slowest"] = slowest.report();
    report
}

impl WriteTimes {
    /// The times in microseconds.
    fn report(self) -> serde_json::Value {
        let micros = |time: Duration| time.as_secs_f64() * 1e6;
        let (response, first, last) =
            (micros(self.response), micros(self.first_event), micros(self.last_event));
        json!({"number": self.number, "response": response, "first_event": first, "last_event": last})
    }
}

//! A control plane and low-level clients: hand-written HTTP/1.1 and HTTP/2 over TLS, which can send invalid data.

use std::fs;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpStream};
use std::os::fd::AsRawFd as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use coracle_integration::{Machine, eventually, process_status};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::{Signal, kill};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, SockaddrIn, bind, connect, socket};
use nix::unistd::Pid;
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned, crypto::ring};
use rustls_pki_types::{CertificateDer, pem::PemObject as _};

/// Headers of a member of `system:masters` and of a user without permissions.
pub(super) const ADMIN: &str = "authorization: Bearer admin-token";
pub(super) const EVE: &str = "authorization: Bearer eve-token";

pub(super) type Tls = StreamOwned<ClientConnection, TcpStream>;

/// Address and CA of a control plane, and the source address of clients.
#[derive(Clone)]
pub(super) struct Address {
    socket: SocketAddrV4,
    authority: PathBuf,
    source: Ipv4Addr,
}

/// A client whose requests have one header, which names its user.
pub(super) struct Client<'a> {
    address: &'a Address,
    header: &'a str,
}

/// A running `coracle controlplane`.
pub(super) struct Plane {
    process: Child,
    address: Address,
    log: PathBuf,
}

/// Raises the test's own limit of descriptors. Returns the new limit.
pub(super) fn raise_descriptors() -> u64 {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard).unwrap();
    hard
}

impl Plane {
    /// Starts the control plane with a limit of descriptors; the default is systemd's.
    pub(super) fn start(machine: &Machine, descriptors: Option<u32>) -> Self {
        Self::start_with(machine, descriptors, &[])
    }

    /// Like `start`, with more flags.
    pub(super) fn start_with(machine: &Machine, descriptors: Option<u32>, flags: &[&str]) -> Self {
        let tokens = machine.path("tokens.csv");
        fs::write(&tokens, "admin-token,admin,1,\"system:masters\"\neve-token,eve,2\nbob-token,bob,3\n")
            .unwrap();
        let log = machine.path("plane.log");
        let file = fs::File::create(&log).unwrap();
        let limit =
            descriptors.map_or("ulimit -Hn 524288; ulimit -Sn 1024".to_owned(), |n| format!("ulimit -n {n}"));
        let mut command = Command::new("sh");
        command.args(["-c", &format!("{limit} 2>&1; exec \"$@\""), "sh"]).arg(Machine::coracle());
        command.arg("controlplane").arg("--state-dir").arg(machine.path("state"));
        command.arg("--run-dir").arg(machine.path("run")).arg("--token-auth-file").arg(tokens);
        command.args(flags);
        command.stdin(Stdio::null()).stdout(file.try_clone().unwrap()).stderr(file);
        let process = command.spawn().unwrap();
        let plane = Self { process, address: Address::of(machine), log };
        eventually("the API", 60, || {
            let answers =
                plane.address.authority.exists() && TcpStream::connect(plane.address.socket).is_ok();
            answers && plane.get(ADMIN, "/api/v1/namespaces/default").0 == 200
        });
        plane
    }

    pub(super) fn address(&self) -> Address {
        self.address.clone()
    }

    pub(super) fn get(&self, header: &str, path: &str) -> (u16, String) {
        self.by(header).send("GET", path, "", "")
    }

    /// A client whose requests have this header.
    pub(super) fn by<'a>(&'a self, header: &'a str) -> Client<'a> {
        self.address.by(header)
    }

    /// Bytes of resident memory.
    pub(super) fn memory(&self) -> usize {
        self.status("VmRSS")
    }

    /// Peak resident memory in bytes.
    pub(super) fn memory_peak(&self) -> usize {
        self.status("VmHWM")
    }

    /// A size of `/proc/<pid>/status` in bytes.
    fn status(&self, field: &str) -> usize {
        usize::try_from(process_status(self.process.id(), field)).unwrap() << 10
    }

    pub(super) fn descriptors(&self) -> usize {
        fs::read_dir(format!("/proc/{}/fd", self.process.id())).unwrap().count()
    }

    /// The limit of descriptors of the process: [`Plane::start`] cannot exceed the machine's own hard limit without the
    /// capability to do so.
    pub(super) fn descriptor_limit(&self) -> u64 {
        let limits = fs::read_to_string(format!("/proc/{}/limits", self.process.id())).unwrap();
        let line = limits.lines().find(|line| line.starts_with("Max open files")).unwrap();
        line.split_whitespace().nth(3).unwrap().parse().unwrap()
    }

    pub(super) fn log_lines(&self) -> usize {
        fs::read_to_string(&self.log).unwrap().lines().count()
    }
}

impl Drop for Plane {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let log = fs::read_to_string(&self.log).unwrap_or_default();
            eprintln!("--- the log:\n{}", &log[log.floor_char_boundary(log.len().saturating_sub(4000))..]);
        }
        kill(Pid::from_raw(i32::try_from(self.process.id()).unwrap()), Signal::SIGKILL).ok();
        self.process.wait().ok();
    }
}

impl Address {
    /// The API server of this machine, for clients on the same machine.
    pub(super) fn of(machine: &Machine) -> Self {
        let socket = SocketAddrV4::new(Ipv4Addr::LOCALHOST, 6443);
        Self { socket, authority: machine.path("state/pki/ca.crt"), source: Ipv4Addr::LOCALHOST }
    }

    /// Like `of`, for clients with another loopback address.
    #[allow(dead_code, reason = "for the soak")]
    pub(super) fn with_source(&self, source: Ipv4Addr) -> Self {
        Self { source, ..self.clone() }
    }

    pub(super) fn socket(&self) -> SocketAddr {
        self.socket.into()
    }

    /// Opens a TLS connection with a read timeout.
    pub(super) fn connect(&self, protocols: &[&[u8]]) -> Tls {
        self.try_connect(protocols).unwrap()
    }

    pub(super) fn try_connect(&self, protocols: &[&[u8]]) -> std::io::Result<Tls> {
        self.try_tls(self.try_tcp(self.socket.port())?, self.client_config(protocols))
    }

    /// A connection that sends nothing, to any port of the machine.
    pub(super) fn try_tcp(&self, port: u16) -> std::io::Result<TcpStream> {
        let socket = socket(AddressFamily::Inet, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
        bind(socket.as_raw_fd(), &SockaddrIn::from(SocketAddrV4::new(self.source, 0)))?;
        connect(socket.as_raw_fd(), &SockaddrIn::from(SocketAddrV4::new(*self.socket.ip(), port)))?;
        Ok(socket.into())
    }

    /// The configuration of a client. Connections with the same configuration resume the TLS session of former ones, which
    /// takes less processor time.
    pub(super) fn client_config(&self, protocols: &[&[u8]]) -> Arc<ClientConfig> {
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_file_iter(&self.authority).unwrap() {
            roots.add(certificate.unwrap()).unwrap();
        }
        let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
        let config = config.with_safe_default_protocol_versions().unwrap().with_root_certificates(roots);
        let mut config = config.with_no_client_auth();
        config.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
        Arc::new(config)
    }

    fn try_tls(&self, stream: TcpStream, config: Arc<ClientConfig>) -> std::io::Result<Tls> {
        stream.set_read_timeout(Some(Duration::from_secs(60)))?;
        let client = ClientConnection::new(config, "localhost".try_into().unwrap()).unwrap();
        let mut tls = StreamOwned::new(client, stream);
        while tls.conn.is_handshaking() {
            tls.conn.complete_io(&mut tls.sock)?;
        }
        Ok(tls)
    }

    /// A client whose requests have this header.
    pub(super) fn by<'a>(&'a self, header: &'a str) -> Client<'a> {
        Client { address: self, header }
    }
}

impl Client<'_> {
    /// Sends one request on a new connection. Returns status code and body; code 0 if the connection breaks.
    pub(super) fn send(
        &self,
        method: &str,
        path: &str,
        media: &str,
        body: impl AsRef<[u8]>,
    ) -> (u16, String) {
        self.try_send(method, path, media, body.as_ref()).unwrap_or_default()
    }

    fn try_send(&self, method: &str, path: &str, media: &str, body: &[u8]) -> std::io::Result<(u16, String)> {
        let mut tls = self.address.try_connect(&[])?;
        let head = format!(
            "{method} {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n{}\r\ncontent-type: {media}\r\n\
             content-length: {}\r\n\r\n",
            self.header,
            body.len()
        );
        tls.write_all(head.as_bytes())?;
        tls.write_all(body)?;
        tls.flush()?;
        let mut answer = Vec::new();
        // The server may close the connection without a close_notify alert.
        let _ = tls.read_to_end(&mut answer);
        let answer = String::from_utf8_lossy(&answer).into_owned();
        let code = answer.split(' ').nth(1).and_then(|code| code.parse().ok()).unwrap_or(0);
        Ok((code, answer))
    }
}

/// Status code of the next HTTP/1.1 response.
pub(super) fn status(connection: &mut Tls) -> u16 {
    let mut head = [0; 12];
    connection.read_exact(&mut head).unwrap();
    std::str::from_utf8(&head[9..]).unwrap().parse().unwrap()
}

/// `depth` nested ControllerRevisions in protobuf.
pub(super) fn nested_protobuf(depth: usize) -> Vec<u8> {
    fn varint(mut number: usize) -> Vec<u8> {
        let mut out = Vec::new();
        while number >= 0x80 {
            out.push(u8::try_from(number & 0x7f).unwrap() | 0x80);
            number >>= 7;
        }
        out.push(u8::try_from(number).unwrap());
        out
    }
    let meta = b"\x0a\x18\x0a\x07apps/v1\x12\x12ControllerRevision".to_vec();
    let meta = [&meta[..1], &varint(meta.len() - 2), &meta[2..]].concat();
    // Each level contains the length of the inner levels. So the bytes are written in reverse order, from the innermost
    // level outwards. This takes linear time.
    let (mut backwards, mut length) = (Vec::new(), 0);
    let mut push = |bytes: &[u8], length: &mut usize| {
        backwards.extend(bytes.iter().rev());
        *length += bytes.len();
    };
    for level in 0..depth {
        if level > 0 {
            for tag in [0x0a, 0x12] {
                let head = [&[tag], &varint(length)[..]].concat();
                push(&head, &mut length);
            }
        }
        let head = [&[0x12], &varint(length)[..]].concat();
        push(&head, &mut length);
        push(&[b"k8s\0", &meta[..]].concat(), &mut length);
    }
    backwards.reverse();
    backwards
}

/// An HTTP/2 connection that sends requests and counts responses.
pub(super) struct Http2 {
    tls: Tls,
    next: u32,
    /// Value of the `authorization` header.
    credentials: &'static str,
}

impl Http2 {
    /// A connection of the administrator.
    pub(super) fn connect(address: &Address) -> Self {
        Self::connect_as(address, "Bearer admin-token")
    }

    pub(super) fn connect_as(address: &Address, credentials: &'static str) -> Self {
        Self::connect_with(address, address.client_config(&[b"h2"]), credentials)
    }

    /// A connection with a configuration that others can have, too. Its protocol is HTTP/2.
    pub(super) fn connect_with(
        address: &Address,
        config: Arc<ClientConfig>,
        credentials: &'static str,
    ) -> Self {
        let stream = address.try_tcp(address.socket.port()).unwrap();
        let mut tls = address.try_tls(stream, config).unwrap();
        tls.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").unwrap();
        let mut connection = Self { tls, next: 1, credentials };
        connection.frame(4, 0, 0, &[]);
        connection
    }

    fn frame(&mut self, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
        self.try_frame(kind, flags, stream, payload).unwrap();
    }

    fn try_frame(&mut self, kind: u8, flags: u8, stream: u32, payload: &[u8]) -> std::io::Result<()> {
        let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
        let head = [&length[1..], &[kind, flags], &stream.to_be_bytes()].concat();
        self.tls.write_all(&[&head, payload].concat())
    }

    /// Permits the server to send any number of bytes on the connection, and two bytes on each stream.
    pub(super) fn permit_two_bytes_of_each_stream(&mut self) {
        self.frame(4, 0, 0, &[0, 4, 0, 0, 0, 2]);
        self.permit_any_number_of_bytes();
    }

    /// Permits the server to send any number of bytes on the connection. Each stream keeps its limit.
    pub(super) fn permit_any_number_of_bytes(&mut self) {
        self.frame(8, 0, 0, &[0x7f, 0xff, 0, 0]);
    }

    /// Starts a GET request.
    pub(super) fn get(&mut self, path: &str) {
        self.try_get(path).unwrap();
    }

    /// Starts and resets requests without reading responses, until the connection ends or its buffers are full.
    pub(super) fn flood_by_resets(&mut self, count: usize) {
        self.limit_writes();
        let _ended = (0..count).try_for_each(|_| {
            let stream = self.next;
            self.try_get("/api/v1/pods")?;
            self.try_frame(3, 0, stream, &8_u32.to_be_bytes())
        });
    }

    /// Starts watches, and makes the server reset each of them by a window that is too large. Returns whether the server
    /// ended the connection.
    pub(super) fn flood_by_provoked_resets(&mut self, count: usize) -> bool {
        self.limit_writes();
        let ended = (0..count).find_map(|_| {
            let stream = self.next;
            let started = self.try_get("/api/v1/namespaces/default/configmaps?watch=1");
            started.and_then(|()| self.try_frame(8, 0, stream, &0x7fff_ffff_u32.to_be_bytes())).err()
        });
        ended.is_some_and(|error| error.kind() != std::io::ErrorKind::WouldBlock)
    }

    /// Sends a request whose body consists of frames without data, until the connection ends or its buffers are full.
    pub(super) fn flood_by_empty_frames(&mut self, count: usize) {
        self.limit_writes();
        let stream = self.next;
        let started = self.try_request("/api/v1/pods", 0x4);
        let _ended = started.and_then(|()| (0..count).try_for_each(|_| self.try_frame(0, 0, stream, &[])));
    }

    /// Sends settings, priorities, window updates and pings without reading answers, until the connection ends or its
    /// buffers are full.
    pub(super) fn flood_by_settings(&mut self, count: usize) {
        self.limit_writes();
        let _ended = (0..count).try_for_each(|_| {
            self.try_frame(4, 0, 0, &[0, 4, 0, 0, 255, 255])?;
            self.try_frame(2, 0, 1, &[0, 0, 0, 0, 16])?;
            self.try_frame(8, 0, 0, &1_u32.to_be_bytes())?;
            self.try_frame(6, 0, 0, &[0; 8])
        });
    }

    /// Sends header fields of one request without end. Returns whether the server ended the connection.
    pub(super) fn flood_by_headers(&mut self, count: usize) -> bool {
        let field = [&[0, 1, b'a', 0x7f, 0xe9, 0x06][..], &[b'x'; 1000]].concat();
        self.flood_by_continuations(&[], &field.repeat(16), count)
    }

    /// Sends header fields without name and value. Returns whether the server ended the connection.
    pub(super) fn flood_by_empty_fields(&mut self, count: usize) -> bool {
        self.flood_by_continuations(&[], &[0; 15_000], count)
    }

    /// Sends a header field of two megabytes in pieces of one byte, and not its end. A decoder that begins again with
    /// each piece takes quadratic time. Returns whether the server ended the connection.
    pub(super) fn flood_by_pieces_of_a_header(&mut self, count: usize) -> bool {
        self.flood_by_continuations(&[0, 1, b'a', 0x7f, 0xff, 0xff, 0x7f], b"x", count)
    }

    /// Sends the first frame of a request's header and frames that continue it.
    fn flood_by_continuations(&mut self, first: &[u8], next: &[u8], count: usize) -> bool {
        self.limit_writes();
        let stream = self.next;
        self.try_frame(1, 0, stream, first).unwrap();
        let ended = (0..count).find_map(|_| self.try_frame(9, 0, stream, next).err());
        ended.is_some_and(|error| error.kind() != std::io::ErrorKind::WouldBlock)
    }

    fn limit_writes(&self) {
        self.tls.sock.set_write_timeout(Some(std::time::Duration::from_secs(2))).unwrap();
    }

    fn try_get(&mut self, path: &str) -> std::io::Result<()> {
        self.try_request(path, 0x5)
    }

    /// Sends the header of a GET request. Flag 1 ends the request, flag 4 its header.
    fn try_request(&mut self, path: &str, flags: u8) -> std::io::Result<()> {
        let mut block = Vec::new();
        let fields = [
            (":method", "GET"),
            (":scheme", "https"),
            (":authority", "a"),
            (":path", path),
            ("authorization", self.credentials),
        ];
        for (name, value) in fields {
            // A literal field without indexing and without Huffman coding; all texts are short.
            block.push(0);
            for text in [name, value] {
                block.push(u8::try_from(text.len()).unwrap());
                block.extend_from_slice(text.as_bytes());
            }
        }
        let stream = self.next;
        self.next += 2;
        self.try_frame(1, flags, stream, &block)
    }

    /// Reads until `wanted` responses have started or the connection ends. Returns their number.
    pub(super) fn answers(&mut self, wanted: usize) -> usize {
        self.tls.flush().unwrap();
        let mut answers = 0;
        while answers < wanted {
            let Ok((head, _)) = self.read_frame() else { break };
            answers += usize::from(head[3] == 1);
        }
        answers
    }

    /// Answers the pings that have arrived. The server disconnects a client that leaves a ping without an answer.
    pub(super) fn answer_pings(&mut self) {
        self.tls.sock.set_nonblocking(true).unwrap();
        // The server sends each ping in one TLS record, so a read gets all of it or nothing.
        while let Ok((head, payload)) = self.read_frame() {
            if head[3..5] == [6, 0] {
                self.frame(6, 1, 0, &payload);
            }
        }
        self.tls.sock.set_nonblocking(false).unwrap();
    }

    /// Reads a frame. An error means that the connection has ended or that no frame has arrived.
    fn read_frame(&mut self) -> std::io::Result<([u8; 9], Vec<u8>)> {
        let mut head = [0; 9];
        self.tls.read_exact(&mut head)?;
        let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
        let mut payload = vec![0; usize::try_from(length).unwrap()];
        self.tls.read_exact(&mut payload)?;
        Ok((head, payload))
    }
}

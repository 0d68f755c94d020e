//! A cluster of several hosts: the control plane on one host, and one host for each agent.

use std::fs;
use std::net::SocketAddr;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::process::{Child, Output};

use coracle_testing::run;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::host::{Families, GATEWAY, GATEWAY_V6, make_bridge};
use crate::process::{end, print_end, start};
use crate::{Host, Kubectl, Machine, end_cgroup, eventually};

/// Host number of the control plane.
const PLANE: u8 = 2;

/// A control plane and its agents. Dereferences to kubectl for this cluster.
pub struct Nodes {
    /// Before `plane`, because fields are dropped in this order: agents stop before their control plane.
    agents: Vec<Agent>,
    plane: Plane,
    kubectl: Kubectl,
    dir: PathBuf,
    mirrors: PathBuf,
    name: String,
    families: Families,
}

struct Plane {
    host: Host,
    process: Option<Child>,
    dir: PathBuf,
    flags: Vec<String>,
}

/// `coracle agent` on its own host.
pub struct Agent {
    host: Host,
    name: String,
    process: Option<Child>,
    dir: PathBuf,
    flags: Vec<String>,
    cgroup: String,
    log: PathBuf,
}

// === impl Nodes ===

impl Nodes {
    /// Starts a control plane with the pod ranges `cidrs` and `count` nodes, and waits until they are Ready. Starts the
    /// machine's registry.
    ///
    /// # Panics
    /// When a node is not Ready in time.
    #[must_use]
    pub fn up(machine: &mut Machine, cidrs: &str, count: u8) -> Self {
        let mut nodes = Self::control_plane_only(machine, cidrs, &[]);
        (1..=count).for_each(|number| nodes.add(number, &[]));
        nodes.wait_ready();
        nodes
    }

    /// Starts a control plane with the pod ranges `cidrs` and more flags, without nodes. If all ranges are IPv6, the hosts
    /// have no IPv4 addresses.
    ///
    /// # Panics
    /// When the API server does not respond in time.
    #[must_use]
    pub fn control_plane_only(machine: &mut Machine, cidrs: &str, flags: &[&str]) -> Self {
        let of_v6 = cidrs.split(',').all(|cidr| cidr.contains(':'));
        let families = if of_v6 { Families::V6 } else { Families::Both };
        make_bridge(families);
        let mirrors = machine.start_registry_at(if of_v6 { GATEWAY_V6 } else { GATEWAY });
        let dir = machine.path("nodes");
        fs::create_dir_all(&dir).unwrap();
        let is_dual = !of_v6 && cidrs.contains(':');
        let services: &[&str] = if is_dual { &["--service-cidr", "10.43.0.0/16,fd43::/112"] } else { &[] };
        let flags = [&["--cluster-cidr", cidrs], services, flags].concat();
        let plane = Plane {
            host: Host::with(families, PLANE),
            process: None,
            dir: dir.join("plane"),
            flags: flags.into_iter().map(str::to_owned).collect(),
        };
        let mut nodes = Self {
            agents: Vec::new(),
            plane,
            kubectl: Kubectl::new(dir.join("admin.kubeconfig")),
            dir,
            mirrors,
            name: machine.name().to_owned(),
            families,
        };
        nodes.start_plane();
        nodes
    }

    /// Starts the control plane and waits until the API server responds.
    ///
    /// # Panics
    /// When it does not respond in time.
    pub fn start_plane(&mut self) {
        self.plane.start();
        let own = self.plane.dir.join("admin.kubeconfig");
        let text = eventually("the kubeconfig", 20, || fs::read_to_string(&own).ok());
        let text = text.replace("127.0.0.1:6443", &self.plane.server());
        fs::write(self.dir.join("admin.kubeconfig"), text).unwrap();
        eventually("the API", 20, || self.kubectl.try_kubectl(&["get", "--raw", "/readyz"]).status.success());
    }

    /// Address of the host of the control plane.
    #[must_use]
    pub fn plane_address(&self) -> String {
        self.plane.host.address()
    }

    /// Stops the control plane with SIGTERM.
    pub fn stop_plane(&mut self) {
        end(&mut self.plane.process, Signal::SIGTERM);
    }

    /// Adds `node-<number>`, with more flags for its agent. Does not wait until the node is Ready.
    pub fn add(&mut self, number: u8, flags: &[&str]) {
        let mut agent = self.new_agent(number, flags);
        let own = self.flags(&agent.host, &agent.name, &agent.dir);
        agent.flags.extend(own);
        agent.start();
        self.agents.push(agent);
    }

    /// Adds `node-<number>` on another container runtime. `start` starts the runtime on the node's host, in the node's
    /// directory and with the registry mirrors. It returns the runtime's socket. Does not wait until the node is
    /// Ready.
    pub fn add_on<T>(&mut self, number: u8, start: impl FnOnce(&Host, &Path, &Path) -> (PathBuf, T)) -> T {
        let mut agent = self.new_agent(number, &[]);
        let (socket, runtime) = start(&agent.host, &agent.dir, &self.mirrors);
        // The flags prevent evictions and image garbage collection: the test machine may have little free disk space. The
        // other runtime has its own registry settings.
        let flags = ["--disk-free-percent", "1", "--image-gc-high-threshold", "100"].map(str::to_owned);
        agent.flags = flags.into_iter().chain(self.flags(&agent.host, &agent.name, &agent.dir)).collect();
        agent.flags.push(format!("--container-runtime-endpoint=unix://{}", socket.display()));
        agent.start();
        self.agents.push(agent);
        runtime
    }

    /// An agent on a new host, not started. `flags` are for each of its starts.
    fn new_agent(&self, number: u8, flags: &[&str]) -> Agent {
        let name = format!("node-{number}");
        let dir = self.dir_of(&name);
        let registry = self.mirrors.to_str().unwrap();
        // These flags prevent evictions and image garbage collection: the test machine may have little free disk space.
        let disk = ["--disk-free-percent", "1", "--image-gc-high-threshold", "100"];
        let registry = ["--registry-config-dir", registry].into_iter().chain(disk).map(str::to_owned);
        Agent {
            flags: registry.chain(flags.iter().map(|flag| (*flag).to_owned())).collect(),
            host: self.host(10 + number),
            process: None,
            log: dir.join("agent.log"),
            dir,
            cgroup: format!("{}-{number}", self.name),
            name,
        }
    }

    /// Adds `node-<number>` with the command that `coracle token create` printed. Later starts of its agent do not use the
    /// token. Does not wait until the node is Ready.
    pub fn join(&mut self, number: u8, command: &str, flags: &[&str]) {
        let mut agent = self.new_agent(number, flags);
        agent.join(command);
        self.agents.push(agent);
    }

    /// Adds `node-1` to `node-<count>` with one token, and waits until they are Ready. Returns the command that joins a
    /// node.
    ///
    /// # Panics
    /// When a node is not Ready in time.
    pub fn join_all(&mut self, count: u8, flags: &[&str]) -> String {
        let token: &[&str] = if count == 1 { &["create"] } else { &["create", "--reusable"] };
        let command = self.token(token);
        (1..=count).for_each(|number| self.join(number, &command, flags));
        self.wait_ready();
        command
    }

    /// Runs an agent on a new host until it exits. Returns its output and the paths in its state directory.
    #[must_use]
    pub fn try_agent(&self, number: u8, arguments: &[String]) -> (Output, Vec<String>) {
        let agent = self.new_agent(number, &[]);
        let output = agent.run_once(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
        let left = fs::read_dir(agent.path("state")).into_iter().flatten().flatten();
        (output, left.map(|entry| entry.path().display().to_string()).collect())
    }

    /// Runs `coracle token …` on the host of the control plane and returns its standard output.
    ///
    /// # Panics
    /// When it fails.
    pub fn token(&self, arguments: &[&str]) -> String {
        let mut command = self.plane.host.command(Machine::coracle());
        command.arg("token").arg("--state-dir").arg(&self.plane.dir).args(arguments);
        let output = command.output().unwrap();
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    /// A new host with the address families of this cluster.
    pub(crate) fn host(&self, number: u8) -> Host {
        Host::with(self.families, number)
    }

    /// Creates the directory of a host.
    pub(crate) fn dir_of(&self, name: &str) -> PathBuf {
        let dir = self.dir.join(name);
        fs::create_dir_all(&dir).unwrap();
        dir
    }

    /// A kubeconfig whose user has these fields.
    pub(crate) fn kubeconfig(&self, user: &str) -> String {
        let (plane, authority) = (self.plane.server(), self.authority());
        format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: c\n\
             contexts: [{{name: c, context: {{cluster: c, user: c}}}}]\n\
             clusters: [{{name: c, cluster: {{server: 'https://{plane}', certificate-authority: {}}}}}]\n\
             users: [{{name: c, user: {{{user}}}}}]\n",
            authority.display()
        )
    }

    fn authority(&self) -> PathBuf {
        self.plane.dir.join("pki/ca.crt")
    }

    /// Directory of mirror settings that redirect registries to the machine's registry.
    pub(crate) fn mirrors(&self) -> &Path {
        &self.mirrors
    }

    /// Prefix of the names of the hosts' cgroups.
    pub(crate) fn cgroup(&self) -> &str {
        &self.name
    }

    /// Creates the credentials of a node: kubeconfig, serving certificate, its key, and the cluster's CA certificate.
    pub(crate) fn credentials(&self, host: &Host, name: &str, dir: &Path) -> [PathBuf; 4] {
        let addresses = [host.address(), host.address_v6()];
        let pki = self.plane.dir.join("pki");
        let pair = |kind: &str, extensions: &str| issue(&pki, dir, kind, name, extensions);
        let names = format!("subjectAltName=DNS:{name},IP:{},IP:{}", addresses[0], addresses[1]);
        let client = pair("client", "extendedKeyUsage=clientAuth");
        let serving = pair("serving", &format!("extendedKeyUsage=serverAuth\n{names}"));
        let kubeconfig = dir.join("kubeconfig");
        let user = format!("client-certificate: {}, client-key: {}", client.0.display(), client.1.display());
        fs::write(&kubeconfig, self.kubeconfig(&user)).unwrap();
        [kubeconfig, serving.0, serving.1, self.authority()]
    }

    fn flags(&self, host: &Host, name: &str, dir: &Path) -> Vec<String> {
        let flags = ["--kubeconfig", "--tls-cert-file", "--tls-private-key-file", "--client-ca-file"];
        let files = self.credentials(host, name, dir).map(|path| path.to_str().unwrap().to_owned());
        let files = flags.into_iter().zip(files).flat_map(|(flag, value)| [flag.to_owned(), value]);
        // By default, an agent with a kubeconfig serves neither DNS nor the addresses of services.
        files.chain(["--serve-dns=true", "--service-proxy=true"].map(str::to_owned)).collect()
    }

    /// Stops a node and removes its pods and state. The Node object stays.
    pub fn remove(&mut self, name: &str) {
        self.agents.retain(|agent| agent.name != name);
    }

    /// The node `name`.
    ///
    /// # Panics
    /// When it does not exist.
    pub fn agent(&mut self, name: &str) -> &mut Agent {
        self.agents.iter_mut().find(|agent| agent.name == name).unwrap()
    }

    /// The nodes that were added.
    #[must_use]
    pub fn agents(&self) -> &[Agent] {
        &self.agents
    }

    /// Waits until every added node is Ready and has no taint that keeps pods away.
    ///
    /// # Panics
    /// When a node is not Ready in time.
    pub fn wait_ready(&self) {
        for agent in &self.agents {
            eventually(&format!("{} to be Ready", agent.name), 30, || {
                let path = "jsonpath={.status.conditions[?(@.type==\"Ready\")].status} {.spec.taints[*].key}";
                let output = self.try_kubectl(&["get", "node", &agent.name, "-o", path]);
                let found = String::from_utf8_lossy(&output.stdout).into_owned();
                let is_tainted = ["not-ready", "unreachable"].iter().any(|taint| found.contains(taint));
                found.starts_with("True") && !is_tainted
            });
        }
    }
}

impl Deref for Nodes {
    type Target = Kubectl;

    fn deref(&self) -> &Kubectl {
        &self.kubectl
    }
}

impl Drop for Nodes {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for what in [&["get", "nodes,pods", "-o", "wide"][..], &["get", "events"], &["describe", "nodes"]]
            {
                eprintln!("{}", String::from_utf8_lossy(&self.try_kubectl(what).stdout));
            }
            self.agents.iter().for_each(|agent| print_end(&agent.name, &agent.log));
            print_end("the control plane", &self.plane.dir.with_extension("log"));
        }
        self.agents.clear();
        self.stop_plane();
    }
}

/// Issues a certificate for a node with openssl and the cluster's CA key. Returns the paths of certificate and key.
fn issue(pki: &Path, dir: &Path, kind: &str, node: &str, extensions: &str) -> (PathBuf, PathBuf) {
    let [certificate, key, request, more] =
        ["crt", "key", "csr", "ext"].map(|ending| dir.join(format!("{kind}.{ending}")));
    fs::write(&more, extensions).unwrap();
    let text = |path: &Path| path.to_str().unwrap().to_owned();
    let subject = format!("/O=system:nodes/CN=system:node:{node}");
    let request_flags =
        ["req", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", &subject];
    run("openssl", &[&request_flags[..], &["-keyout", &text(&key), "-out", &text(&request)]].concat());
    let (authority, signer) = (text(&pki.join("ca.crt")), text(&pki.join("ca.key")));
    let signed = ["x509", "-req", "-days", "2", "-CA", &authority, "-CAkey", &signer, "-in", &text(&request)]
        .map(str::to_owned);
    let signed: Vec<&str> = signed.iter().map(String::as_str).collect();
    run("openssl", &[&signed[..], &["-extfile", &text(&more), "-out", &text(&certificate)]].concat());
    (certificate, key)
}

// === impl Plane ===

impl Plane {
    fn start(&mut self) {
        let mut command = self.host.command(Machine::coracle());
        command.arg("controlplane").arg("--state-dir").arg(&self.dir);
        command.arg("--run-dir").arg(self.dir.with_extension("run"));
        command.args(["--advertise-address", &self.host.address()]);
        command.args(&self.flags);
        self.process = Some(start(command, &self.dir.with_extension("log")));
    }

    /// Address of the API server for other hosts.
    fn server(&self) -> String {
        SocketAddr::new(self.host.address().parse().unwrap(), 6443).to_string()
    }
}

// === impl Agent ===

impl Agent {
    /// Name of the node.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The host of the node.
    #[must_use]
    pub fn host(&self) -> &Host {
        &self.host
    }

    /// Process id of the agent; 0 if it is not running.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.process.as_ref().map_or(0, Child::id)
    }

    /// Current content of the agent's log.
    #[must_use]
    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// A process of the pod with this UID, if the pod runs on this node.
    #[must_use]
    pub fn process_of(&self, uid: &str) -> Option<u32> {
        let hierarchies = fs::read_dir("/sys/fs/cgroup").ok()?.flatten().map(|entry| entry.path());
        let roots = hierarchies.map(|root| root.join(&self.cgroup).join("kubepods"));
        roots.filter(|root| root.is_dir()).find_map(|root| process_below(&root, &format!("pod{uid}")))
    }

    /// A path in the directory of the host.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Starts the agent.
    pub fn start(&mut self) {
        self.start_with(&[]);
    }

    /// Starts the agent with the command that `coracle token create` printed.
    pub fn join(&mut self, command: &str) {
        let arguments = command.trim().trim_start_matches("coracle agent ");
        self.start_with(&arguments.split_whitespace().collect::<Vec<_>>());
    }

    fn start_with(&mut self, more: &[&str]) {
        assert!(self.process.is_none(), "the process is already running");
        let mut command = self.host.command(Machine::coracle());
        command.arg("agent").args(self.state_flags(more)).args(&self.flags).args(more);
        self.process = Some(start(command, &self.log));
    }

    /// Runs the agent until it exits by itself.
    ///
    /// # Panics
    /// When the process is already running.
    #[must_use]
    pub fn run_once(&self, more: &[&str]) -> Output {
        assert!(self.process.is_none(), "the process is already running");
        let mut command = self.host.command("timeout");
        command.arg("300").arg(Machine::coracle()).arg("agent");
        command.args(self.state_flags(more)).args(&self.flags).args(more).output().unwrap()
    }

    /// Sends a signal to the agent and waits until it exits. Its pods continue.
    pub fn end(&mut self, signal: Signal) {
        end(&mut self.process, signal);
    }

    /// Pauses the agent with SIGSTOP.
    pub fn pause(&self) {
        kill(Pid::from_raw(i32::try_from(self.pid()).unwrap()), Signal::SIGSTOP).unwrap();
    }

    /// Resumes the agent with SIGCONT.
    pub fn resume(&self) {
        kill(Pid::from_raw(i32::try_from(self.pid()).unwrap()), Signal::SIGCONT).unwrap();
    }

    /// Flags of `coracle agent` and `coracle down` that name directories, the cgroup and the node.
    fn state_flags(&self, more: &[&str]) -> Vec<String> {
        let in_dir = |name: &str| self.dir.join(name).to_str().unwrap().to_owned();
        let state_flags = [
            ("--state-dir", in_dir("state")),
            ("--run-dir", in_dir("run")),
            ("--pod-log-dir", in_dir("logs")),
            ("--cgroup-root", format!("/{}", self.cgroup)),
            ("--node-name", self.name.clone()),
        ];
        let state_flags = state_flags.into_iter().filter(|(flag, _)| !more.contains(flag));
        state_flags.flat_map(|(flag, value)| [flag.to_owned(), value]).collect()
    }
}

fn process_below(dir: &Path, pod: &str) -> Option<u32> {
    let children =
        || fs::read_dir(dir).into_iter().flatten().flatten().map(|e| e.path()).filter(|p| p.is_dir());
    if dir.to_str()?.contains(pod) {
        let text = fs::read_to_string(dir.join("cgroup.procs")).unwrap_or_default();
        if let Some(pid) = text.lines().find_map(|line| line.parse().ok()) {
            return Some(pid);
        }
    }
    children().find_map(|child| process_below(&child, pod))
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.end(Signal::SIGTERM);
        let mut command = self.host.command(Machine::coracle());
        let down = command.arg("down").args(self.state_flags(&[])).arg("--purge").output().unwrap();
        if !down.status.success() {
            eprintln!("coracle down of {}: {}", self.name, String::from_utf8_lossy(&down.stderr));
        }
        end_cgroup(&self.cgroup);
    }
}

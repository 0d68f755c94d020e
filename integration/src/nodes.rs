//! A cluster of several machines: the control plane on one, an agent on each of the others.

use std::fs;
use std::net::SocketAddr;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::host::{Families, GATEWAY, GATEWAY_V6, make_bridge};
use crate::machine::run;
use crate::{Host, Kubectl, Machine, end_cgroup, eventually};

/// The control plane's number on the bridge.
const PLANE: u8 = 2;

/// A control plane and the agents that were added to it, each on a host of its own.
pub struct Nodes {
    /// Agents first: they end before what they talk to.
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

/// `coracle agent` on a host of its own.
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
    /// A control plane with these ranges for pods, and so many nodes, all Ready. The registry that has the images
    /// is the machine's.
    ///
    /// # Panics
    /// When one does not become so.
    #[must_use]
    pub fn up(machine: &mut Machine, cidrs: &str, count: u8) -> Self {
        let mut nodes = Self::alone(machine, cidrs, &[]);
        (1..=count).for_each(|number| nodes.add(number, &[]));
        nodes.wait_ready();
        nodes
    }

    /// A control plane with these ranges for pods and more flags of its own, and no node yet. Where pods have IPv6
    /// alone, machines have.
    ///
    /// # Panics
    /// When it does not answer.
    #[must_use]
    pub fn alone(machine: &mut Machine, cidrs: &str, flags: &[&str]) -> Self {
        let of_v6 = cidrs.split(',').all(|cidr| cidr.contains(':'));
        let families = if of_v6 { Families::V6 } else { Families::Both };
        make_bridge(families);
        let mirrors = machine.start_registry_at(if of_v6 { GATEWAY_V6 } else { GATEWAY });
        let dir = machine.path("nodes");
        fs::create_dir_all(&dir).unwrap();
        let plane = Plane {
            host: Host::with(families, PLANE),
            process: None,
            dir: dir.join("plane"),
            flags: ["--cluster-cidr", cidrs].iter().chain(flags).map(|flag| (*flag).to_owned()).collect(),
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

    /// Starts the control plane, and waits until it answers.
    ///
    /// # Panics
    /// When it does not.
    pub fn start_plane(&mut self) {
        self.plane.start();
        let own = self.plane.dir.join("admin.kubeconfig");
        let text = eventually("the kubeconfig", 20, || fs::read_to_string(&own).ok());
        let text = text.replace("127.0.0.1:6443", &self.plane.server());
        fs::write(self.dir.join("admin.kubeconfig"), text).unwrap();
        eventually("the API", 20, || {
            self.kubectl.try_kubectl(&["get", "--raw", "/readyz"]).status.success().then_some(())
        });
    }

    /// Ends the control plane.
    pub fn stop_plane(&mut self) {
        end(&mut self.plane.process, Signal::SIGTERM);
    }

    /// Adds `node-<number>`, with more flags for its agent; it need not be Ready when this returns.
    pub fn add(&mut self, number: u8, flags: &[&str]) {
        let mut agent = self.machine(number, flags);
        let own = self.flags(&agent.host, &agent.name, &agent.dir);
        agent.flags.extend(own);
        agent.start();
        self.agents.push(agent);
    }

    /// A machine that has not joined yet; `flags` are for every start of its agent.
    fn machine(&self, number: u8, flags: &[&str]) -> Agent {
        let name = format!("node-{number}");
        let dir = self.dir_of(&name);
        let registry = self.mirrors.to_str().unwrap();
        // Whoever tests may have little disk left.
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

    /// Makes a machine `node-<number>` by the command that `coracle token create` printed; later starts of its agent
    /// go without it. It need not be Ready when this returns.
    pub fn join(&mut self, number: u8, command: &str, flags: &[&str]) {
        let mut agent = self.machine(number, flags);
        agent.join(command);
        self.agents.push(agent);
    }

    /// Runs an agent on a machine of its own to its end, which must come by itself; what it said, and what it left in
    /// its state directory.
    #[must_use]
    pub fn try_agent(&self, number: u8, arguments: &[String]) -> (Output, Vec<String>) {
        let agent = self.machine(number, &[]);
        let output = agent.run_once(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
        let left = fs::read_dir(agent.path("state")).into_iter().flatten().flatten();
        (output, left.map(|entry| entry.path().display().to_string()).collect())
    }

    /// `coracle token …` where the control plane runs; its standard output.
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

    /// A machine with addresses as these nodes have.
    pub(crate) fn host(&self, number: u8) -> Host {
        Host::with(self.families, number)
    }

    /// A directory of a machine's own.
    pub(crate) fn dir_of(&self, name: &str) -> PathBuf {
        let dir = self.dir.join(name);
        fs::create_dir_all(&dir).unwrap();
        dir
    }

    /// The text of a kubeconfig for the user that these fields tell.
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

    /// The settings of registries that lead to the machine's own.
    pub(crate) fn mirrors(&self) -> &Path {
        &self.mirrors
    }

    /// What the cgroups of machines begin with.
    pub(crate) fn cgroup(&self) -> &str {
        &self.name
    }

    /// Credentials for a node: its kubeconfig, the certificate and key that it serves with, and the authority's
    /// certificate.
    pub(crate) fn credentials(&self, host: &Host, name: &str, dir: &Path) -> [PathBuf; 4] {
        let addresses = [host.address(), host.address_v6()];
        let pki = self.plane.dir.join("pki");
        let pair = |kind: &str, extensions: &str| issue(&pki, dir, (kind, name), extensions);
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
        flags.into_iter().zip(files).flat_map(|(flag, value)| [flag.to_owned(), value]).collect()
    }

    /// Ends a node and removes it from its machine; its Node object stays.
    pub fn remove(&mut self, name: &str) {
        self.agents.retain(|agent| agent.name != name);
    }

    /// The node of that name.
    ///
    /// # Panics
    /// When there is none.
    pub fn agent(&mut self, name: &str) -> &mut Agent {
        self.agents.iter_mut().find(|agent| agent.name == name).unwrap()
    }

    /// All nodes.
    #[must_use]
    pub fn agents(&self) -> &[Agent] {
        &self.agents
    }

    /// Waits until every added node is Ready and takes pods.
    ///
    /// # Panics
    /// When one does not become so within 30 s.
    pub fn wait_ready(&self) {
        for agent in &self.agents {
            eventually(&format!("{} to be Ready", agent.name), 30, || {
                let path = "jsonpath={.status.conditions[?(@.type==\"Ready\")].status} {.spec.taints[*].key}";
                let output = self.try_kubectl(&["get", "node", &agent.name, "-o", path]);
                let said = String::from_utf8_lossy(&output.stdout).into_owned();
                let kept_away = ["not-ready", "unreachable"].iter().any(|taint| said.contains(taint));
                (said.starts_with("True") && !kept_away).then_some(())
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

pub(crate) fn print_end(name: &str, log: &Path) {
    let log = fs::read_to_string(log).unwrap_or_default();
    let tail: Vec<&str> = log.lines().rev().take(30).collect();
    eprintln!("--- the end of {name}'s log:");
    tail.iter().rev().for_each(|line| eprintln!("{line}"));
}

pub(crate) fn end(process: &mut Option<Child>, signal: Signal) {
    if let Some(mut process) = process.take() {
        let pid = Pid::from_raw(i32::try_from(process.id()).unwrap());
        kill(pid, signal).ok();
        // What is frozen ends when it is not.
        kill(pid, Signal::SIGCONT).ok();
        process.wait().unwrap();
    }
}

/// A certificate of the cluster's authority for a node, as somebody with the authority's key makes it.
fn issue(pki: &Path, dir: &Path, (kind, node): (&str, &str), extensions: &str) -> (PathBuf, PathBuf) {
    let [certificate, key, request, more] =
        ["crt", "key", "csr", "ext"].map(|ending| dir.join(format!("{kind}.{ending}")));
    fs::write(&more, extensions).unwrap();
    let text = |path: &Path| path.to_str().unwrap().to_owned();
    let subject = format!("/O=system:nodes/CN=system:node:{node}");
    let asked =
        ["req", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", &subject];
    run("openssl", &[&asked[..], &["-keyout", &text(&key), "-out", &text(&request)]].concat());
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
        let log = fs::File::options().create(true).append(true).open(self.dir.with_extension("log")).unwrap();
        let mut command = self.host.command(Machine::coracle());
        command.arg("controlplane").arg("--state-dir").arg(&self.dir);
        command.arg("--run-dir").arg(self.dir.with_extension("run"));
        command.args(["--advertise-address", &self.host.address()]);
        command.args(&self.flags);
        self.process = Some(started(command, log));
    }

    /// Where the API is for others.
    fn server(&self) -> String {
        SocketAddr::new(self.host.address().parse().unwrap(), 6443).to_string()
    }
}

pub(crate) fn started(mut command: Command, log: fs::File) -> Child {
    command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap()
}

// === impl Agent ===

impl Agent {
    /// The node's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The machine that it runs on.
    #[must_use]
    pub fn host(&self) -> &Host {
        &self.host
    }

    /// The agent's process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.process.as_ref().map_or(0, Child::id)
    }

    /// What the agent's log says so far.
    #[must_use]
    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// A process of the pod with that uid, if it runs here.
    #[must_use]
    pub fn process_of(&self, uid: &str) -> Option<u32> {
        let hierarchies = fs::read_dir("/sys/fs/cgroup").ok()?.flatten().map(|entry| entry.path());
        let roots = hierarchies.map(|root| root.join(&self.cgroup).join("kubepods"));
        roots.filter(|root| root.is_dir()).find_map(|root| process_below(&root, &format!("pod{uid}")))
    }

    /// A path in the machine's directory.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Starts the agent.
    pub fn start(&mut self) {
        self.start_with(&[]);
    }

    /// Starts the agent by the command that `coracle token create` printed.
    pub fn join(&mut self, command: &str) {
        let way = command.trim().trim_start_matches("coracle agent ");
        self.start_with(&way.split_whitespace().collect::<Vec<_>>());
    }

    fn start_with(&mut self, more: &[&str]) {
        assert!(self.process.is_none(), "it runs already");
        let log = fs::File::options().create(true).append(true).open(&self.log).unwrap();
        let mut command = self.host.command(Machine::coracle());
        command.arg("agent").args(self.places(more)).args(&self.flags).args(more);
        self.process = Some(started(command, log));
    }

    /// Runs the agent to its end, which must come by itself.
    ///
    /// # Panics
    /// When it runs already.
    #[must_use]
    pub fn run_once(&self, more: &[&str]) -> Output {
        assert!(self.process.is_none(), "it runs already");
        let mut command = self.host.command("timeout");
        command.arg("300").arg(Machine::coracle()).arg("agent");
        command.args(self.places(more)).args(&self.flags).args(more).output().unwrap()
    }

    /// Ends the agent with a signal; its pods go on.
    pub fn end(&mut self, signal: Signal) {
        end(&mut self.process, signal);
    }

    /// Stops the agent's process where it is (SIGSTOP).
    pub fn freeze(&self) {
        kill(Pid::from_raw(i32::try_from(self.pid()).unwrap()), Signal::SIGSTOP).unwrap();
    }

    /// Lets it go on.
    pub fn thaw(&self) {
        kill(Pid::from_raw(i32::try_from(self.pid()).unwrap()), Signal::SIGCONT).unwrap();
    }

    fn places(&self, more: &[&str]) -> Vec<String> {
        let in_dir = |name: &str| self.dir.join(name).to_str().unwrap().to_owned();
        let places = [
            ("--state-dir", in_dir("state")),
            ("--run-dir", in_dir("run")),
            ("--pod-log-dir", in_dir("logs")),
            ("--cgroup-root", format!("/{}", self.cgroup)),
            ("--node-name", self.name.clone()),
        ];
        let places = places.into_iter().filter(|(flag, _)| !more.contains(flag));
        places.flat_map(|(flag, value)| [flag.to_owned(), value]).collect()
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
        let down = command.arg("down").args(self.places(&[])).arg("--purge").output().unwrap();
        if !down.status.success() {
            eprintln!("coracle down of {}: {}", self.name, String::from_utf8_lossy(&down.stderr));
        }
        end_cgroup(&self.cgroup);
    }
}

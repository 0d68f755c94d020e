//! Two control planes on one etcd: both serve the same objects, one runs the controllers, and either may be
//! killed.

use std::fs;
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use coracle_integration::{Kubectl, Machine, eventually, on_a_machine, repository, skip, wait_for_exit};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

const ETCD: &str = "127.0.0.1:2379";
/// Short times of the leader election, so that a takeover takes seconds.
const ELECTION: [&str; 6] = [
    "--leader-elect-lease-duration=3s",
    "--leader-elect-renew-deadline=2s",
    "--leader-elect-retry-period=500ms",
    "--etcd-prefix=/test",
    "--etcd-servers",
    "http://127.0.0.1:2379",
];

/// A process that ends with the test.
struct Process(Child);

impl Process {
    fn start(command: &mut Command, log: &Path) -> Self {
        let log = fs::File::options().create(true).append(true).open(log).unwrap();
        let command = command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
        Self(command.spawn().unwrap())
    }

    fn end(mut self, signal: Signal) {
        kill(Pid::from_raw(i32::try_from(self.0.id()).unwrap()), signal).unwrap();
        wait_for_exit(&mut self.0);
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

fn etcd(program: &Path, machine: &Machine) -> Process {
    let mut command = Command::new(program);
    command.arg("--data-dir").arg(machine.path("etcd")).args(["--unsafe-no-fsync", "--log-level", "error"]);
    let process = Process::start(&mut command, &machine.path("etcd.log"));
    eventually("etcd", 20, || TcpStream::connect(ETCD).ok());
    process
}

/// A control plane with its own state directory and port.
pub(crate) struct Plane {
    flags: &'static [&'static str],
    process: Option<Process>,
    pub(crate) state: PathBuf,
    address: String,
    pub(crate) kubectl: Kubectl,
}

impl Plane {
    pub(crate) fn new(machine: &Machine, name: &str, address: &str, flags: &'static [&'static str]) -> Self {
        let state = machine.path(name);
        fs::create_dir(&state).unwrap();
        Self {
            flags,
            process: None,
            kubectl: Kubectl::new(state.join("admin.kubeconfig")),
            state,
            address: address.to_owned(),
        }
    }

    pub(crate) fn start(&mut self) {
        self.spawn();
        eventually("the API server", 30, || self.succeeds(&["get", "--raw", "/readyz"]));
    }

    /// Starts the control plane, which must end with an error. Returns its log.
    fn fails(&mut self) -> String {
        self.spawn();
        let mut process = self.process.take().unwrap();
        let status = eventually("the start to fail", 30, || process.0.try_wait().unwrap());
        assert!(!status.success());
        fs::read_to_string(self.state.with_extension("log")).unwrap()
    }

    fn spawn(&mut self) {
        let mut command = Command::new(Machine::coracle());
        command.arg("controlplane").args(self.flags).arg("--state-dir").arg(&self.state);
        command.arg("--run-dir").arg(self.state.with_extension("run"));
        command.arg("--listen").arg(&self.address);
        self.process = Some(Process::start(&mut command, &self.state.with_extension("log")));
    }

    pub(crate) fn end(&mut self, signal: Signal) {
        self.process.take().unwrap().end(signal);
    }

    fn succeeds(&self, arguments: &[&str]) -> bool {
        self.kubectl.try_kubectl(arguments).status.success()
    }

    fn holder(&self) -> String {
        let path = "jsonpath={.spec.holderIdentity}";
        self.kubectl.kubectl(&["get", "lease", "-n=kube-system", "kube-controller-manager", "-o", path])
    }

    /// Waits until a new deployment has its pod.
    fn controllers_act(&self, name: &str) {
        self.kubectl.kubectl(&["create", "deployment", name, "--image=none"]);
        let selector = format!("--selector=app={name}");
        eventually("a pod of the deployment", 20, || {
            !self.kubectl.kubectl(&["get", "pods", &selector, "-o", "name"]).is_empty()
        });
    }
}

#[test]
fn two_control_planes_share_an_etcd_and_either_may_be_killed() {
    let program = repository().join("target/tools/etcd");
    if !program.exists() {
        skip!("etcd is not built: run scripts/etcd");
    }
    on_a_machine(move |machine| {
        let server = etcd(&program, machine);
        let mut one = Plane::new(machine, "one", "127.0.0.1:6443", &ELECTION);
        one.start();
        let mut two = Plane::new(machine, "two", "127.0.0.2:6443", &ELECTION);
        let copy = |name: &str, to: &Path| {
            let copied = Command::new("cp").arg("-a").arg(one.state.join(name)).arg(to).status();
            assert!(copied.unwrap().success());
        };
        copy("pki", &two.state);
        let log = two.fails();
        assert!(log.contains("encrypted with another key"), "{log}");
        copy("sealing.key", &two.state);
        two.start();
        let endpoints = ["get", "endpoints", "kubernetes", "-o", "jsonpath={.subsets[*].addresses[*].ip}"];
        assert_eq!(one.kubectl.kubectl(&endpoints), "127.0.0.1 127.0.0.2");
        one.controllers_act("first");
        objects_are_shared(&one, &two);

        let leader = two.holder();
        one.end(Signal::SIGKILL);
        two.kubectl.kubectl(&["create", "configmap", "after", "--from-literal=a=b"]);
        two.controllers_act("second");
        assert_ne!(two.holder(), leader);

        one.start();
        let leader = one.holder();
        two.end(Signal::SIGTERM);
        one.controllers_act("third");
        assert_ne!(one.holder(), leader);

        drop(server);
        let cached = "/apis/apps/v1/namespaces/default/deployments/third?resourceVersion=0";
        assert!(one.succeeds(&["get", "--raw", cached]), "no response from the cache without etcd");
        // Without a time limit, kubectl repeats the read for up to 30 seconds, because the response has `Retry-After`.
        let current = "/apis/apps/v1/namespaces/default/deployments/third";
        let read = ["get", "--raw", current, "--request-timeout=5s", "-v=6"];
        let create = ["create", "configmap", "refused"];
        for (command, reason) in [(&read[..], "504 Gateway Timeout"), (&create[..], "etcd")] {
            let refused = one.kubectl.try_kubectl(command);
            let message = String::from_utf8_lossy(&refused.stderr).into_owned();
            assert!(!refused.status.success() && message.contains(reason), "{command:?}: {message}");
        }
        eventually("the readiness to fail", 10, || !one.succeeds(&["get", "--raw", "/readyz"]));
        // The result of the last probe of etcd counts for a second.
        eventually("the liveness to fail", 10, || !one.succeeds(&["get", "--raw", "/livez"]));
        assert!(one.succeeds(&["get", "--raw", "/livez?exclude=etcd"]));
        let _server = etcd(&program, machine);
        eventually("writes to be accepted", 20, || one.succeeds(&["create", "configmap", "accepted"]));
        // The result of the last probe of etcd counts for a second.
        eventually("the server to be ready", 10, || one.succeeds(&["get", "--raw", "/readyz"]));
        let metrics = one.kubectl.kubectl(&["get", "--raw", "/metrics"]);
        let size = "apiserver_storage_db_total_size_in_bytes{endpoint=\"http://127.0.0.1:2379\"} ";
        assert!(metrics.lines().any(|line| line.starts_with(size)), "{metrics}");
        one.controllers_act("fourth");
    });
}

/// Objects, revisions and allocated addresses that one server has acknowledged are visible at the other server.
fn objects_are_shared(one: &Plane, two: &Plane) {
    for round in 0..5 {
        let name = format!("m{round}");
        one.kubectl.kubectl(&["create", "configmap", &name, "--from-literal=a=b"]);
        let revision = "jsonpath={.metadata.resourceVersion}";
        let of = |plane: &Plane| plane.kubectl.kubectl(&["get", "configmap", &name, "-o", revision]);
        assert_eq!(of(one), of(two));
        two.kubectl.kubectl(&["patch", "configmap", &name, "--type=merge", "-p", r#"{"data":{"a":"c"}}"#]);
        assert_eq!(one.kubectl.kubectl(&["get", "configmap", &name, "-o", "jsonpath={.data.a}"]), "c");
    }
    let services = |plane: &Plane, prefix: &str| {
        let create = |n| format!("create service clusterip {prefix}{n} --tcp=80:80");
        (0..4).for_each(|n| {
            plane.kubectl.kubectl(&create(n).split(' ').collect::<Vec<_>>());
        });
    };
    std::thread::scope(|scope| {
        scope.spawn(|| services(one, "a"));
        scope.spawn(|| services(two, "b"));
    });
    let addresses = one.kubectl.kubectl(&["get", "services", "-o", "jsonpath={.items[*].spec.clusterIP}"]);
    let mut addresses: Vec<_> = addresses.split(' ').collect();
    assert_eq!(addresses.len(), 9);
    addresses.sort_unstable();
    addresses.dedup();
    assert_eq!(addresses.len(), 9);
    let secret = ["create", "secret", "generic", "s", "--from-literal=word=hush"];
    one.kubectl.kubectl(&secret);
    assert_eq!(two.kubectl.kubectl(&["get", "secret", "s", "-o", "jsonpath={.data.word}"]), "aHVzaA==");
}

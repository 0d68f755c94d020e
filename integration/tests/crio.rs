//! Our plugins as CRI-O runs them: the published CRI-O (`scripts/crio`), in places of its own. Run by
//! `scripts/test-crio`; building CRI-O takes minutes.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::disallowed_methods,
    clippy::print_stderr,
    reason = "a test panics, waits, and says what went wrong"
)]

use std::collections::BTreeSet;
use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use coracle_integration::{Machine, eventually, on_a_machine};
use serde_json::{Value, json};

const NODE: &str = "198.51.100.10";
const IMAGE: &str = "127.0.0.1:5005/library/busybox:latest";
const OK: &str = "HTTP/1.1 200 OK";

/// CRI-O, alone with what it starts in namespaces of mounts and processes: what it leaves goes with them.
struct Crio {
    /// unshare, which is the parent of the first process inside: that starts and ends CRI-O as it is told.
    process: Child,
    socket: String,
    log: PathBuf,
}

fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap();
    assert!(output.status.success(), "{program} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn list(machine: &Machine) -> Value {
    let places = json!({"table": "cni-test", "stateDir": machine.path("plugins")});
    let ranges = json!([[{"subnet": "10.77.0.0/24"}], [{"subnet": "fd77::/64"}]]);
    json!({"cniVersion": "1.1.0", "name": "web", "plugins": [
        {"type": "bridge", "bridge": "web0", "isGateway": true, "ipMasq": true, "hairpinMode": true,
         "coracle": places, "ipam": {"type": "host-local", "dataDir": machine.path("addresses"),
             "ranges": ranges, "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]}},
        {"type": "portmap", "capabilities": {"portMappings": true}, "coracle": places},
        {"type": "bandwidth", "capabilities": {"bandwidth": true}, "coracle": places},
        {"type": "firewall", "ingressPolicy": "same-bridge", "coracle": places}]})
}

/// All that can be told of CRI-O's places.
fn settings(machine: &Machine, tools: &Path) -> String {
    let path = |name: &str| machine.path(name).to_str().unwrap().to_owned();
    format!(
        "[crio]\nroot = '{root}'\nrunroot = '/run/storage'\nstorage_driver = 'overlay'\nlog_dir = '{logs}'\n\
         version_file = '/run/crio/version'\nversion_file_persist = '{root}.version'\n\
         clean_shutdown_file = '{root}.clean'\n\
         [crio.api]\nlisten = '{socket}'\n\
         [crio.runtime]\ncgroup_manager = 'cgroupfs'\nconmon_cgroup = 'pod'\ndefault_runtime = 'runc'\n\
         pinns_path = '{pinns}'\nnamespaces_dir = '/run/crio/ns'\nhooks_dir = []\n\
         container_exits_dir = '/run/crio/exits'\ncontainer_attach_socket_dir = '/run/crio/attach'\n\
         [crio.runtime.runtimes.runc]\nruntime_path = '/usr/sbin/runc'\nruntime_root = '/run/runc'\n\
         monitor_path = '/usr/bin/conmon'\nmonitor_cgroup = 'pod'\n\
         [crio.image]\npause_image = '{IMAGE}'\nsignature_policy = '{policy}'\n\
         [crio.network]\nnetwork_dir = '{lists}'\nplugin_dirs = ['{bin}']\n",
        root = path("root"),
        logs = path("logs"),
        socket = path("crio.sock"),
        pinns = tools.join("pinns").display(),
        policy = path("policy.json"),
        lists = path("net.d"),
        bin = path("bin"),
    )
}

// === impl Crio ===

impl Crio {
    /// Serves with our plugins for the network `web`, and has the images of the machine's registry.
    fn start(machine: &mut Machine) -> Self {
        machine.start_registry();
        let tools = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../target/tools/crio"));
        assert!(tools.join("crio").exists(), "run scripts/crio");
        let path = |name: &str| machine.path(name).to_str().unwrap().to_owned();
        run(Machine::coracle().to_str().unwrap(), &["cni", "install", &path("bin")]);
        for dir in ["net.d", "var", "none"] {
            fs::create_dir(machine.path(dir)).unwrap();
        }
        for (name, text) in [
            ("net.d/10-web.conflist", list(machine).to_string()),
            ("policy.json", json!({"default": [{"type": "insecureAcceptAnything"}]}).to_string()),
            ("registries.conf", "[[registry]]\nlocation = '127.0.0.1:5005'\ninsecure = true\n".to_owned()),
            ("crio.conf", settings(machine, &tools)),
        ] {
            fs::write(machine.path(name), text).unwrap();
        }
        let (socket, log) = (path("crio.sock"), machine.path("crio.log"));
        let inside = format!(
            "mount -t tmpfs tmpfs /run && mount --bind {} /var/lib || exit 1\n\
             start() {{ {}/crio --config {} --config-dir {} --log-level info & crio=$!; }}\n\
             start\n\
             while read -r signal; do kill -$signal $crio; wait $crio; start; done",
            path("var"),
            tools.display(),
            path("crio.conf"),
            path("none"),
        );
        let out = fs::File::create(&log).unwrap();
        let mut command = Command::new("unshare");
        command.args(["--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", &inside]);
        command.env("CONTAINERS_REGISTRIES_CONF", path("registries.conf"));
        // The first process inside ends, and all others with it, when its standard input does.
        command.stdin(Stdio::piped()).stdout(out.try_clone().unwrap()).stderr(out);
        let crio = Self { process: command.spawn().unwrap(), socket, log };
        crio.wait_ready();
        crio
    }

    /// Has it ended by a signal, and started again.
    fn restart(&mut self, signal: &str) {
        // Whoever answers from now on is the new one.
        fs::remove_file(&self.socket).unwrap();
        writeln!(self.process.stdin.as_mut().unwrap(), "{signal}").unwrap();
    }

    /// What it says of its network: whether it is ready, and why not.
    fn network(&self) -> Option<(bool, String)> {
        let info: Value = serde_json::from_slice(&self.try_crictl(&["info"]).stdout).ok()?;
        let conditions = info["status"]["conditions"].as_array()?;
        let network = conditions.iter().find(|condition| condition["type"] == "NetworkReady")?;
        Some((network["status"] == true, network["message"].as_str()?.to_owned()))
    }

    fn wait_ready(&self) {
        eventually("CRI-O's network", 60, || self.network().filter(|(ready, _)| *ready));
    }

    fn try_crictl(&self, arguments: &[&str]) -> Output {
        let endpoint = format!("unix://{}", self.socket);
        let mut command = Command::new(Machine::tool("crictl", "scripts/critest tools"));
        command.args(["--timeout", "120s", "--runtime-endpoint", &endpoint, "--image-endpoint", &endpoint]);
        command.args(arguments);
        command.stdin(Stdio::null()).output().unwrap()
    }

    fn crictl(&self, arguments: &[&str]) -> String {
        let output = self.try_crictl(arguments);
        assert!(output.status.success(), "crictl {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    }

    /// A pod that serves pages at port 80, which is the host's port, too; its id and addresses.
    fn pod(&self, machine: &Machine, name: &str, port: u16) -> (String, [String; 2]) {
        // Of a pod that shares its processes CRI-O keeps one of its own, less likely to be killed than we may say.
        let linux = json!({"cgroup_parent": format!("/{}", machine.name()),
            "security_context": {"namespace_options": {"pid": 1}}});
        let pod = json!({"metadata": {"name": name, "namespace": "default", "uid": name}, "linux": linux,
            "log_directory": machine.path("logs"),
            "annotations": {"kubernetes.io/ingress-bandwidth": "1G", "kubernetes.io/egress-bandwidth": "1G"},
            "port_mappings": [{"protocol": 0, "container_port": 80, "host_port": port}]});
        let container = json!({"metadata": {"name": "c"}, "image": {"image": IMAGE}, "log_path": "c.log",
            "command": ["httpd", "-f", "-p", "[::]:80", "-h", "/"],
            "linux": {"security_context": {"namespace_options": {"pid": 1}}}});
        let files = [("pod.json", pod), ("container.json", container)].map(|(name, text)| {
            fs::write(machine.path(name), text.to_string()).unwrap();
            machine.path(name).to_str().unwrap().to_owned()
        });
        let id = self.crictl(&["runp", &files[0]]);
        let made = self.crictl(&["create", &id, &files[1], &files[0]]);
        self.crictl(&["start", &made]);
        (id.clone(), self.addresses_of(&id))
    }

    fn addresses_of(&self, id: &str) -> [String; 2] {
        let told: Value = serde_json::from_str(&self.crictl(&["inspectp", id])).unwrap();
        let network = &told["status"]["network"];
        [&network["ip"], &network["additionalIps"][0]["ip"]].map(|ip| ip.as_str().unwrap().to_owned())
    }

    fn remove(&self, id: &str) {
        for container in self.crictl(&["ps", "--quiet", "--pod", id]).lines() {
            self.crictl(&["stop", "--timeout", "0", container]);
        }
        self.crictl(&["stopp", id]);
        self.crictl(&["rmp", id]);
    }
}

impl Drop for Crio {
    fn drop(&mut self) {
        self.process.kill().ok();
        self.process.wait().ok();
        if std::thread::panicking() {
            let log = fs::read_to_string(&self.log).unwrap_or_default();
            let lines: Vec<&str> = log.lines().rev().take(40).collect();
            eprintln!("--- the end of CRI-O's log:");
            lines.iter().rev().for_each(|line| eprintln!("{line}"));
        }
    }
}

/// The first line of what is answered there.
fn page(address: &str, port: u16) -> Option<String> {
    let mut stream = TcpStream::connect((address, port)).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    stream.write_all(b"GET /etc/hostname HTTP/1.0\r\n\r\n").ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    answer.lines().next().map(str::to_owned)
}

/// The addresses that are held.
fn held(machine: &Machine) -> BTreeSet<String> {
    let files = fs::read_dir(machine.path("addresses/web")).unwrap().flatten();
    let names = files.map(|entry| entry.file_name().into_string().unwrap());
    names.filter(|name| name.parse::<std::net::IpAddr>().is_ok()).collect()
}

/// An ADD that nobody asked CRI-O for: of a pod that it does not know any more, when it is ended before it told anybody.
fn add_unknown(machine: &Machine) {
    let list = list(machine);
    let mut conf = list["plugins"][0].clone();
    (conf["name"], conf["cniVersion"]) = (list["name"].clone(), list["cniVersion"].clone());
    let netns = "/proc/self/ns/net";
    let mut plugin = Command::new("unshare")
        .args(["--net", machine.path("bin/host-local").to_str().unwrap()])
        .envs([("CNI_COMMAND", "ADD"), ("CNI_CONTAINERID", "unknown"), ("CNI_IFNAME", "eth0")])
        .envs([("CNI_NETNS", netns), ("CNI_PATH", machine.path("bin").to_str().unwrap())])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    plugin.stdin.take().unwrap().write_all(conf.to_string().as_bytes()).unwrap();
    assert!(plugin.wait().unwrap().success());
}

#[test]
#[ignore = "needs CRI-O (scripts/test-crio)"]
fn crio_runs_pods_by_our_plugins_and_nothing_stays_of_them() {
    on_a_machine(|machine| {
        let mut crio = Crio::start(machine);
        let links = || run("ip", &["-o", "link"]).lines().count();
        let before = links();
        crio.crictl(&["pull", IMAGE]);
        let (a, of_a) = crio.pod(machine, "a", 8080);
        let (b, of_b) = crio.pod(machine, "b", 8081);
        assert_eq!(
            [&of_a[0], &of_a[1], &of_b[0], &of_b[1]],
            ["10.77.0.2", "fd77::2", "10.77.0.3", "fd77::3"]
        );
        let all: BTreeSet<String> = of_a.iter().chain(&of_b).cloned().collect();
        assert_eq!(held(machine), all);
        assert_eq!(links(), before + 5, "the bridge, and of each pod its end and its bucket");
        let reached = |crio: &Crio| {
            for address in &all {
                assert_eq!(eventually("the pod", 20, || page(address, 80)), OK, "{address}");
            }
            // CRI-O makes host ports itself, and lets other addresses than 127.0.0.1 use them.
            assert_eq!(page(NODE, 8080).as_deref(), Some(OK));
            let container = crio.crictl(&["ps", "--quiet", "--pod", &b]);
            for address in &of_a {
                let asked =
                    format!("printf 'GET /etc/hostname HTTP/1.0\\r\\n\\r\\n' | nc -w 20 {address} 80");
                let answer = crio.crictl(&["exec", &container, "sh", "-c", &asked]);
                assert!(answer.starts_with(OK), "{address}: {answer}");
            }
        };
        reached(&crio);
        let log = fs::read_to_string(&crio.log).unwrap();
        assert!(log.contains("Checking CNI network web (config version=1.1.0)"), "CHECK follows each ADD");
        assert!(run("nft", &["list", "table", "inet", "cni-test"]).contains("ip saddr 10.77.0.0/24"));

        // However it ends: its pods stay as they are, and what belongs to none of them is collected at its start.
        for signal in ["TERM", "KILL"] {
            add_unknown(machine);
            assert_eq!(held(machine).len(), 6);
            crio.restart(signal);
            crio.wait_ready();
            assert_eq!(held(machine), all, "after {signal}");
            assert_eq!((crio.addresses_of(&a), crio.addresses_of(&b)), (of_a.clone(), of_b.clone()));
            reached(&crio);
        }

        crio.remove(&a);
        assert_eq!(held(machine), of_b.iter().cloned().collect());
        assert_eq!(page(&of_b[0], 80).as_deref(), Some(OK));
        crio.remove(&b);
        assert_eq!(held(machine), BTreeSet::new());
        assert_eq!(links(), before + 1, "the bridge stays");
        assert!(!run("nft", &["list", "tables"]).contains("cni-test"));
        let claims = fs::read_dir(machine.path("plugins/firewall")).unwrap().flatten();
        assert_eq!(claims.map(|entry| entry.file_name()).collect::<Vec<_>>(), ["lock"]);

        // STATUS, which CRI-O asks until it is well once: a network that takes no pods is not ready, with our reason.
        run("ip", &["link", "del", "web0"]);
        run("ip", &["link", "add", "web0", "type", "veth", "peer", "name", "web1"]);
        crio.restart("TERM");
        let why = eventually("our reason", 60, || crio.network().filter(|(_, why)| why.contains("web0"))).1;
        assert!(why.contains("an interface named web0 exists and is not a bridge"), "{why}");
        run("ip", &["link", "del", "web0"]);
        crio.wait_ready();
    });
}

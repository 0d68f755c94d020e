//! The published CRI-O (`scripts/crio`) with our network plugins, in its own directories. `scripts/test-crio` runs it,
//! because building CRI-O takes minutes.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::disallowed_methods,
    clippy::print_stderr,
    reason = "a test panics, waits, and prints the logs"
)]

use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use coracle_integration::{Crictl, CrioSettings, Machine, eventually, http_get, on_a_machine};
use coracle_testing::run;
use serde_json::{Value, json};

const NODE: &str = "198.51.100.10";
const IMAGE: &str = "127.0.0.1:5005/library/busybox:latest";
const OK: &str = "HTTP/1.1 200 OK";

/// CRI-O in its own mount and pid namespaces, so that its processes and mounts end with this value.
struct Crio {
    /// `unshare`. Its child, process 1 of the namespace, restarts CRI-O after each signal name on standard input.
    process: Child,
    socket: String,
    crictl: Crictl,
    log: PathBuf,
}

fn list(machine: &Machine) -> Value {
    let settings = json!({"table": "cni-test", "stateDir": machine.path("plugins")});
    let ranges = json!([[{"subnet": "10.77.0.0/24"}], [{"subnet": "fd77::/64"}]]);
    json!({"cniVersion": "1.1.0", "name": "web", "plugins": [
        {"type": "bridge", "bridge": "web0", "isGateway": true, "ipMasq": true, "hairpinMode": true,
         "coracle": settings, "ipam": {"type": "host-local", "dataDir": machine.path("addresses"),
             "ranges": ranges, "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]}},
        {"type": "portmap", "capabilities": {"portMappings": true}, "coracle": settings},
        {"type": "bandwidth", "capabilities": {"bandwidth": true}, "coracle": settings},
        {"type": "firewall", "ingressPolicy": "same-bridge", "coracle": settings}]})
}

// === impl Crio ===

impl Crio {
    fn has_logged(&self, text: &str) -> bool {
        fs::read_to_string(&self.log).unwrap().contains(text)
    }

    /// Starts CRI-O with our plugins for the network `web` and the images of the machine's registry.
    fn start(machine: &mut Machine) -> Self {
        machine.start_registry();
        let path = |name: &str| machine.path(name).to_str().unwrap().to_owned();
        run(Machine::coracle().to_str().unwrap(), &["cni", "install", &path("bin")]);
        for dir in ["net.d", "var"] {
            fs::create_dir(machine.path(dir)).unwrap();
        }
        for (name, text) in [
            ("net.d/10-web.conflist", list(machine).to_string()),
            ("registries.conf", "[[registry]]\nlocation = '127.0.0.1:5005'\ninsecure = true\n".to_owned()),
        ] {
            fs::write(machine.path(name), text).unwrap();
        }
        // CRI-O has a tmpfs of its own at this path.
        let run_dir = Path::new("/run/crio");
        let (dir, plugins) = (machine.path(""), machine.path("bin"));
        let settings = CrioSettings { dir: &dir, run: run_dir, plugins: &plugins, sandbox_image: IMAGE };
        let command_line = settings.write().join(" ");
        let (socket, log) = (path("crio.sock"), machine.path("crio.log"));
        let inside = format!(
            "mount -t tmpfs tmpfs /run && mount --bind {} /var/lib || exit 1\n\
             start() {{ {command_line} & crio=$!; }}\n\
             start\n\
             while read -r signal; do kill -$signal $crio; wait $crio; start; done",
            path("var"),
        );
        let out = fs::File::create(&log).unwrap();
        let mut command = Command::new("unshare");
        command.args(["--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", &inside]);
        command.env("CONTAINERS_REGISTRIES_CONF", path("registries.conf"));
        // Process 1 exits when its standard input closes; the kernel then ends all others.
        command.stdin(Stdio::piped()).stdout(out.try_clone().unwrap()).stderr(out);
        let crio = Self {
            process: command.spawn().unwrap(),
            crictl: Crictl::new(&format!("unix://{socket}")),
            socket,
            log,
        };
        crio.wait_ready();
        crio
    }

    /// Ends CRI-O with a signal and starts it again.
    fn restart(&mut self, signal: &str) {
        // Without the socket of the old process, only the new one can respond.
        fs::remove_file(&self.socket).unwrap();
        writeln!(self.process.stdin.as_mut().unwrap(), "{signal}").unwrap();
    }

    /// The condition NetworkReady: status and message.
    fn network(&self) -> Option<(bool, String)> {
        let info: Value = serde_json::from_slice(&self.try_crictl(&["info"]).stdout).ok()?;
        let conditions = info["status"]["conditions"].as_array()?;
        let network = conditions.iter().find(|condition| condition["type"] == "NetworkReady")?;
        Some((network["status"] == true, network["message"].as_str()?.to_owned()))
    }

    fn wait_ready(&self) {
        eventually("CRI-O's network", 60, || self.network().filter(|(ready, _)| *ready));
    }

    /// Runs a pod with an HTTP server on port 80 and a host port. Returns its id and addresses.
    fn pod(&self, machine: &Machine, name: &str, port: u16) -> (String, [String; 2]) {
        // The containers do not share a pid namespace. If they did, CRI-O would start a pause process with an OOM score
        // that the test is not permitted to set.
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
        let created = self.crictl(&["create", &id, &files[1], &files[0]]);
        self.crictl(&["start", &created]);
        (id.clone(), self.addresses_of(&id))
    }

    fn addresses_of(&self, id: &str) -> [String; 2] {
        let inspection: Value = serde_json::from_str(&self.crictl(&["inspectp", id])).unwrap();
        let network = &inspection["status"]["network"];
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

impl Deref for Crio {
    type Target = Crictl;

    fn deref(&self) -> &Crictl {
        &self.crictl
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

/// First line of the HTTP response.
fn status_line(address: &str, port: u16) -> Option<String> {
    let response = http_get((address, port), "/etc/hostname")?;
    response.lines().next().map(str::to_owned)
}

/// The addresses that host-local has allocated.
fn held(machine: &Machine) -> BTreeSet<String> {
    let files = fs::read_dir(machine.path("addresses/web")).unwrap().flatten();
    let names = files.map(|entry| entry.file_name().into_string().unwrap());
    names.filter(|name| name.parse::<std::net::IpAddr>().is_ok()).collect()
}

/// Calls ADD for a pod that CRI-O does not know, as if CRI-O had been killed before it recorded the pod.
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
fn crio_runs_pods_with_our_plugins_and_leaves_nothing() {
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
        assert_eq!(links(), before + 5, "links: the bridge, and a veth and an ifb device of each pod");
        let reached = |crio: &Crio| {
            for address in &all {
                assert_eq!(eventually("the pod", 20, || status_line(address, 80)), OK, "{address}");
            }
            // CRI-O configures host ports itself, also for the node's address and not only for 127.0.0.1.
            assert_eq!(status_line(NODE, 8080).as_deref(), Some(OK));
            let container = crio.crictl(&["ps", "--quiet", "--pod", &b]);
            for address in &of_a {
                let script =
                    format!("printf 'GET /etc/hostname HTTP/1.0\\r\\n\\r\\n' | nc -w 20 {address} 80");
                let answer = crio.crictl(&["exec", &container, "sh", "-c", &script]);
                assert!(answer.starts_with(OK), "{address}: {answer}");
            }
        };
        reached(&crio);
        assert!(crio.has_logged("Checking CNI network web (config version=1.1.0)"), "no CHECK after ADD");
        assert!(run("nft", &["list", "table", "inet", "cni-test"]).contains("ip saddr 10.77.0.0/24"));

        // After SIGTERM and SIGKILL, the pods of CRI-O are unchanged. At its start, CRI-O calls GC, which removes
        // unknown attachments.
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
        assert_eq!(status_line(&of_b[0], 80).as_deref(), Some(OK));
        crio.remove(&b);
        assert_eq!(held(machine), BTreeSet::new());
        assert_eq!(links(), before + 1, "only the bridge remains");
        assert!(!run("nft", &["list", "tables"]).contains("cni-test"));
        let claims = fs::read_dir(machine.path("plugins/firewall")).unwrap().flatten();
        assert_eq!(claims.map(|entry| entry.file_name()).collect::<Vec<_>>(), ["lock"]);

        // CRI-O calls STATUS until it succeeds once. If no pod can join the network, CRI-O reports the reason of our
        // plugin.
        run("ip", &["link", "del", "web0"]);
        run("ip", &["link", "add", "web0", "type", "veth", "peer", "name", "web1"]);
        crio.restart("TERM");
        let why =
            eventually("the plugin's reason", 60, || crio.network().filter(|(_, why)| why.contains("web0")))
                .1;
        assert!(why.contains("an interface named web0 exists and is not a bridge"), "{why}");
        run("ip", &["link", "del", "web0"]);
        crio.wait_ready();
    });
}

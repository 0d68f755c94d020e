//! Debian's containerd with our network plugins, in its own directories.

use std::fs;
use std::ops::Deref;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use coracle_integration::{Crictl, Machine, eventually, http_get, on_a_machine};
use coracle_testing::run;
use serde_json::{Value, json};

use crate::plugins::addresses;

/// Host port of the pod's port 80, and the node's address.
const HOST_PORT: u16 = 8080;
const NODE: &str = "198.51.100.10";
const OK: &str = "HTTP/1.1 200 OK";

/// containerd in its own mount and pid namespaces, so that its processes and mounts end with this value.
struct Containerd {
    /// `unshare`, the parent of process 1 of the pid namespace.
    process: Child,
    crictl: Crictl,
    log: PathBuf,
}

// === impl Containerd ===

impl Containerd {
    /// Starts containerd with our plugins for the network `web` and the images of the machine's registry.
    fn start(machine: &mut Machine) -> Self {
        let mirrors = machine.start_registry();
        machine.push_sandbox_image();
        let path = |name: &str| machine.path(name).to_str().unwrap().to_owned();
        run(Machine::coracle().to_str().unwrap(), &["cni", "install", &path("bin")]);
        for dir in ["net.d", "run", "var"] {
            fs::create_dir(machine.path(dir)).unwrap();
        }
        fs::write(machine.path("net.d/10-web.conflist"), list(machine).to_string()).unwrap();
        let (socket, log) = (path("containerd.sock"), machine.path("containerd.log"));
        let config = format!(
            "version = 2\nroot = '{}'\nstate = '/run/containerd.state'\n[grpc]\n  address = '{socket}'\n\
             [plugins.'io.containerd.grpc.v1.cri']\n  restrict_oom_score_adj = true\n  \
             sandbox_image = 'docker.io/library/pause:latest'\n\
             [plugins.'io.containerd.grpc.v1.cri'.cni]\n  bin_dir = '{}'\n  conf_dir = '{}'\n\
             [plugins.'io.containerd.grpc.v1.cri'.registry]\n  config_path = '{}'\n",
            path("root"),
            path("bin"),
            path("net.d"),
            mirrors.display()
        );
        fs::write(machine.path("containerd.toml"), config).unwrap();
        // These paths are not configurable: sockets of shims, named network namespaces, libcni's cache.
        let inside = format!(
            "mount -t tmpfs tmpfs /run && mount --bind {} /var/lib && {{ containerd --config {} & read -r end; }}",
            path("var"),
            path("containerd.toml")
        );
        let out = fs::File::create(&log).unwrap();
        let mut command = Command::new("unshare");
        command.args(["--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", &inside]);
        // Process 1 exits when its standard input closes, also because the test is killed. The kernel then ends all
        // other processes.
        command.stdin(Stdio::piped()).stdout(out.try_clone().unwrap()).stderr(out);
        let process = command.spawn().expect("scripts/packages containerd");
        let containerd = Self { process, crictl: Crictl::new(&format!("unix://{socket}")), log };
        eventually("containerd's network", 30, || {
            let info = containerd.try_crictl(&["info"]).stdout;
            let info: Value = serde_json::from_slice(&info).ok()?;
            let conditions = info["status"]["conditions"].as_array()?.clone();
            conditions.iter().any(|c| c["type"] == "NetworkReady" && c["status"] == true).then_some(())
        });
        containerd
    }

    /// Runs a program in containerd's mount namespace and returns its output.
    fn inside(&self, arguments: &[&str]) -> String {
        let mounts = eventually("process 1 of the namespace", 10, || {
            let children = format!("/proc/{0}/task/{0}/children", self.process.id());
            let child = fs::read_to_string(children).ok()?;
            child.split_whitespace().next().map(|pid| format!("--mount=/proc/{pid}/ns/mnt"))
        });
        run("nsenter", &[&[mounts.as_str(), "--"], arguments].concat())
    }

    /// Runs a pod with the host port. Returns its id, or the error.
    fn pod(&self, machine: &Machine, name: &str) -> Result<String, String> {
        let pod = json!({"metadata": {"name": name, "namespace": "default", "uid": name},
            "log_directory": machine.path("logs"), "linux": {"cgroup_parent": format!("/{}", machine.name())},
            "port_mappings": [{"protocol": 0, "container_port": 80, "host_port": HOST_PORT}]});
        fs::write(machine.path("pod.json"), pod.to_string()).unwrap();
        let output = self.try_crictl(&["runp", machine.path("pod.json").to_str().unwrap()]);
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
        if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) }
    }
}

impl Deref for Containerd {
    type Target = Crictl;

    fn deref(&self) -> &Crictl {
        &self.crictl
    }
}

impl Drop for Containerd {
    fn drop(&mut self) {
        self.process.kill().ok();
        self.process.wait().ok();
        if std::thread::panicking() {
            let log = fs::read_to_string(&self.log).unwrap_or_default();
            eprintln!("--- the errors in containerd's log:");
            log.lines().filter(|line| line.contains("level=error")).for_each(|line| eprintln!("{line}"));
        }
    }
}

fn list(machine: &Machine) -> Value {
    let settings = json!({"table": "cni-test", "stateDir": machine.path("plugins")});
    json!({"cniVersion": "1.0.0", "name": "web", "plugins": [
        {"type": "bridge", "bridge": "web0", "isGateway": true, "ipMasq": true, "coracle": settings,
         "ipam": {"type": "host-local", "dataDir": machine.path("addresses"),
                  "ranges": [[{"subnet": "10.77.0.0/24"}]], "routes": [{"dst": "0.0.0.0/0"}]}},
        {"type": "portmap", "capabilities": {"portMappings": true}, "coracle": settings}]})
}

/// First line of the response of the host port at an address of the node.
fn status_line(address: &str) -> Option<String> {
    let response = http_get((address, HOST_PORT), "/etc/hostname")?;
    response.lines().next().map(str::to_owned)
}

#[test]
fn containerd_runs_pods_with_our_plugins_and_leaves_nothing() {
    on_a_machine(|machine| {
        let containerd = Containerd::start(machine);
        let links = || run("ip", &["-o", "link"]).lines().count();
        let before = links();
        let id = containerd.pod(machine, "web").unwrap();

        // Inside the pod: address, default route, and the namespace whose name containerd chose.
        let named = containerd.inside(&["ip", "netns", "list"]);
        let netns = named.split_whitespace().next().unwrap().to_owned();
        assert!(netns.starts_with("cni-"), "{named}");
        let ip = |what: &[&str]| -> Value {
            let all = [&["ip", "netns", "exec", &netns, "ip", "-j"], what].concat();
            serde_json::from_str(&containerd.inside(&all)).unwrap()
        };
        // The kernel reports the state a moment after both ends are up.
        let link = eventually("the interface to be up", 10, || {
            let link = ip(&["addr", "show", "eth0"])[0].clone();
            (link["operstate"] == "UP").then_some(link)
        });
        assert_eq!(link["addr_info"][0]["local"], "10.77.0.2");
        let routes = ip(&["route", "show", "default"]);
        assert_eq!((&routes[0]["gateway"], &routes[0]["dev"]), (&json!("10.77.0.1"), &json!("eth0")));
        assert!(
            ip(&["addr", "show", "lo"]).to_string().contains("127.0.0.1"),
            "the loopback plugin did not run"
        );
        let inspection: Value = serde_json::from_str(&containerd.crictl(&["inspectp", &id])).unwrap();
        assert_eq!(inspection["status"]["network"]["ip"], "10.77.0.2");
        let file = fs::read_to_string(machine.path("addresses/web/10.77.0.2")).unwrap();
        assert!(file.contains(&id), "{file}");
        assert_eq!(links(), before + 2, "links: the bridge and a veth");

        // The host port responds at the node's address and at loopback.
        containerd.crictl(&["pull", "docker.io/library/busybox:latest"]);
        let container = json!({"metadata": {"name": "c"}, "image": {"image": "docker.io/library/busybox:latest"},
            "command": ["httpd", "-f", "-p", "80", "-h", "/"], "log_path": "c.log", "linux": {}});
        fs::write(machine.path("container.json"), container.to_string()).unwrap();
        let files =
            ["container.json", "pod.json"].map(|name| machine.path(name).to_str().unwrap().to_owned());
        let created = containerd.crictl(&["create", &id, &files[0], &files[1]]);
        containerd.crictl(&["start", &created]);
        for address in [NODE, "127.0.0.1"] {
            let first = eventually("the host port", 20, || status_line(address));
            assert_eq!(first, OK, "{address}");
        }

        // The plugin's error reaches the client, and the failed pod leaves nothing.
        let refusal = containerd.pod(machine, "late").unwrap_err();
        assert!(refusal.contains(&format!("host port 8080/tcp is taken by sandbox {id}")), "{refusal}");
        assert_eq!(addresses(&machine.path("addresses/web")), ["10.77.0.2"]);
        assert_eq!(status_line(NODE).unwrap(), OK);
        containerd.crictl(&["stopp", &id]);
        assert_eq!(status_line(NODE), None);
        assert_eq!(addresses(&machine.path("addresses/web")), [""; 0]);
        assert_eq!(links(), before + 1, "only the bridge remains");
        assert_eq!(run("nft", &["list", "ruleset"]), "");
        let claims = fs::read_dir(machine.path("plugins/firewall")).unwrap().flatten();
        let claims: Vec<_> = claims.map(|entry| entry.file_name()).filter(|name| name != "lock").collect();
        assert!(claims.is_empty(), "{claims:?}");
        containerd.crictl(&["rmp", &id]);
        assert_eq!(containerd.inside(&["ip", "netns", "list"]), "");
    });
}

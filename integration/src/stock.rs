//! A node of Kubernetes' own: the published kubelet beside `coracle runtime`, on a host of its own.

use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Output, Stdio};

use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::nodes::{end, print_end, started};
use crate::{Host, Machine, Nodes, end_cgroup, eventually};

/// A node, and its pods. All end with this value; the Node object stays.
pub struct Stock {
    host: Host,
    name: String,
    dir: PathBuf,
    cgroup: String,
    mirrors: PathBuf,
    config: Value,
    tls: [PathBuf; 4],
    runtime: Option<Child>,
    kubelet: Option<Child>,
}

/// The port that the kubelet answers anybody on.
const READ_ONLY: u16 = 10255;

/// What a kubelet sets, and refuses to start without.
const KERNEL: [(&str, &str); 6] = [
    ("vm/overcommit_memory", "1"),
    ("vm/panic_on_oom", "0"),
    ("kernel/panic", "10"),
    ("kernel/panic_on_oops", "1"),
    ("kernel/keys/root_maxkeys", "1000000"),
    ("kernel/keys/root_maxbytes", "25000000"),
];

// === impl Stock ===

impl Stock {
    /// Makes `stock-<number>`, with more settings for its kubelet, and waits until it is Ready.
    ///
    /// # Panics
    /// When it does not become so.
    #[must_use]
    pub fn join(nodes: &Nodes, number: u8, settings: &Value) -> Self {
        let name = format!("stock-{number}");
        let dir = nodes.dir_of(&name);
        let host = nodes.host(10 + number);
        let tls = nodes.credentials(&host, &name, &dir);
        let cgroup = format!("{}-{name}", nodes.cgroup());
        make_cgroup(&cgroup);
        let mirrors = nodes.mirrors().to_owned();
        let config = Value::Null;
        let mut stock = Self { host, name, dir, cgroup, mirrors, config, tls, runtime: None, kubelet: None };
        stock.shield();
        stock.config = stock.settings();
        let own = stock.config.as_object_mut().unwrap();
        own.extend(settings.as_object().unwrap().clone());
        stock.start_runtime();
        stock.start_kubelet();
        eventually(&format!("{} to be Ready", stock.name), 60, || {
            let path = "jsonpath={.status.conditions[?(@.type==\"Ready\")].status} {.spec.taints[*].key}";
            let output = nodes.try_kubectl(&["get", "node", &stock.name, "-o", path]);
            let said = String::from_utf8_lossy(&output.stdout).into_owned();
            (said.starts_with("True") && !said.contains("not-ready")).then_some(())
        });
        stock
    }

    /// Keeps the kubelet from the machine's files: it has places of its own that no setting changes. As on a machine
    /// that systemd sets up, what it mounts the runtime sees.
    fn shield(&self) {
        let over = self.path("over");
        fs::create_dir_all(&over).unwrap();
        let text = |path: &Path| path.to_str().unwrap().to_owned();
        self.host.run("mount", &["--make-rshared", "/"]);
        self.host.run("mount", &["-t", "tmpfs", "none", &text(&over)]);
        for place in ["/var/lib", "/var/log"] {
            let [upper, work] = ["upper", "work"].map(|kind| text(&over.join(&place[1..]).join(kind)));
            self.host.run("mkdir", &["-p", &upper, &work]);
            let options = format!("lowerdir={place},upperdir={upper},workdir={work}");
            self.host.run("mount", &["-t", "overlay", "none", "-o", &options, place]);
        }
        for (name, value) in KERNEL {
            fs::write(self.path(&name.replace('/', "_")), value).unwrap();
        }
    }

    /// A shell's words that put files in the place of what the kubelet tells the kernel, for itself alone: where other
    /// processes see such, the kernel lets no user namespace have a /proc.
    fn instead_of_the_kernel(&self) -> String {
        let mut words = "mount --make-private /proc\n".to_owned();
        for (name, _) in KERNEL {
            let file = self.path(&name.replace('/', "_"));
            writeln!(words, "mount --bind {} /proc/sys/{name}", file.display()).unwrap();
        }
        words
    }

    /// What a kubelet's user sets for it to be a node here, on a machine with little disk left, and with cgroup v1.
    fn settings(&self) -> Value {
        let [_, certificate, key, authority] = &self.tls;
        json!({
            "apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
            "containerRuntimeEndpoint": self.socket(), "cgroupRoot": format!("/{}", self.cgroup),
            "staticPodPath": self.path("manifests"), "podLogsDir": self.path("logs"),
            "volumePluginDir": self.path("volume-plugins"),
            "tlsCertFile": certificate, "tlsPrivateKeyFile": key,
            "authentication": {"x509": {"clientCAFile": authority}},
            "failCgroupV1": false, "failSwapOn": false, "makeIPTablesUtilChains": false, "resolvConf": "",
            "evictionHard": {"memory.available": "50Mi", "nodefs.available": "0%", "imagefs.available": "0%",
                "nodefs.inodesFree": "0%", "imagefs.inodesFree": "0%"},
            "imageGCHighThresholdPercent": 100, "syncFrequency": "5s", "fileCheckFrequency": "1s",
            "nodeStatusUpdateFrequency": "2s", "readOnlyPort": READ_ONLY,
        })
    }

    /// Starts `coracle runtime` and waits until it answers.
    ///
    /// # Panics
    /// When it does not.
    pub fn start_runtime(&mut self) {
        assert!(self.runtime.is_none(), "it runs already");
        let log = fs::File::options().create(true).append(true).open(self.log("runtime")).unwrap();
        let mut command = self.host.command(Machine::coracle());
        command.args(["runtime", "--listen", &self.socket(), "--cni-conf-dir", ""]);
        command.arg("--root").arg(self.path("state")).arg("--state").arg(self.path("run"));
        command.arg("--registry-config-dir").arg(&self.mirrors);
        self.runtime = Some(started(command, log));
        eventually("the runtime", 20, || self.try_crictl(&["version"]).status.success().then_some(()));
    }

    /// Starts the kubelet.
    ///
    /// # Panics
    /// When it runs already, or is not built.
    pub fn start_kubelet(&mut self) {
        assert!(self.kubelet.is_none(), "it runs already");
        let file = self.path("kubelet.json");
        fs::write(&file, self.config.to_string()).unwrap();
        fs::create_dir_all(self.path("manifests")).unwrap();
        let log = fs::File::options().create(true).append(true).open(self.log("kubelet")).unwrap();
        let script = format!("set -e\n{}exec \"$0\" \"$@\"", self.instead_of_the_kernel());
        let mut command = self.host.command("unshare");
        command.args(["--mount", "--propagation", "unchanged", "sh", "-c", &script]);
        command.arg(Machine::tool("kubelet", "scripts/kubelet"));
        command.arg("--config").arg(file).arg("--kubeconfig").arg(&self.tls[0]);
        command.arg("--root-dir").arg(self.path("kubelet"));
        command.args(["--hostname-override", &self.name, "--node-ip", &self.host.address(), "--v", "2"]);
        self.kubelet = Some(started(command, log));
    }

    /// Ends the runtime with SIGKILL; its pods go on.
    pub fn kill_runtime(&mut self) {
        end(&mut self.runtime, Signal::SIGKILL);
    }

    /// Ends the kubelet with SIGKILL; its pods go on.
    pub fn kill_kubelet(&mut self) {
        end(&mut self.kubelet, Signal::SIGKILL);
    }

    /// Changes settings of the kubelet, for its next start.
    pub fn set(&mut self, settings: &Value) {
        self.config.as_object_mut().unwrap().extend(settings.as_object().unwrap().clone());
    }

    /// Runs the published crictl on the host, whatever comes of it.
    #[must_use]
    pub fn try_crictl(&self, arguments: &[&str]) -> Output {
        let mut command = self.host.command(Machine::tool("crictl", "scripts/critest tools"));
        let socket = self.socket();
        command.args(["-t", "60s", "-r", &socket, "-i", &socket]).args(arguments);
        command.stdin(Stdio::null()).output().unwrap()
    }

    /// Runs crictl, which must succeed; its standard output without the last line's end.
    ///
    /// # Panics
    /// When it fails.
    #[must_use]
    pub fn crictl(&self, arguments: &[&str]) -> String {
        let output = self.try_crictl(arguments);
        assert!(output.status.success(), "crictl {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).trim_end().to_owned()
    }

    /// What the kubelet answers to anybody on its read-only port; nothing when it does not.
    #[must_use]
    pub fn ask(&self, path: &str) -> Option<String> {
        let address = format!("http://{}:{READ_ONLY}{path}", self.host.address());
        let output = self.host.command("curl").args(["-sf", &address]).output().unwrap();
        output.status.success().then(|| String::from_utf8(output.stdout).unwrap())
    }

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

    /// A path in the node's directory.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// What the log of `kubelet` or `runtime` says so far.
    #[must_use]
    pub fn said(&self, what: &str) -> String {
        fs::read_to_string(self.log(what)).unwrap_or_default()
    }

    fn log(&self, what: &str) -> PathBuf {
        self.dir.join(what).with_extension("log")
    }

    fn socket(&self) -> String {
        format!("unix://{}", self.path("run/cri.sock").display())
    }
}

impl Drop for Stock {
    fn drop(&mut self) {
        if std::thread::panicking() {
            ["kubelet", "runtime"].iter().for_each(|what| print_end(what, &self.log(what)));
        }
        self.kill_kubelet();
        let mut down = self.host.command(Machine::coracle());
        // All pods are below the kubelet's root; what else the machine has is not ours to end.
        down.args(["down", "--purge", "--cgroup-root", &format!("/{}", self.cgroup)]);
        down.arg("--state-dir").arg(self.path("state"));
        let output = down.arg("--run-dir").arg(self.path("run")).output().unwrap();
        if !output.status.success() {
            eprintln!("coracle down: {}", String::from_utf8_lossy(&output.stderr));
        }
        self.kill_runtime();
        end_cgroup(&self.cgroup);
        // The runtime's own, beside what kubelets make. It stays while another runtime of the machine uses it.
        for hierarchy in hierarchies() {
            ["coracle/shims", "coracle"].iter().for_each(|group| drop(fs::remove_dir(hierarchy.join(group))));
        }
    }
}

/// Where the machine's cgroups begin.
fn hierarchies() -> Vec<PathBuf> {
    let root = PathBuf::from("/sys/fs/cgroup");
    if root.join("cgroup.controllers").exists() {
        return vec![root];
    }
    let entries = fs::read_dir(&root).unwrap().flatten().map(|entry| entry.path());
    entries.filter(|path| path.is_dir() && !path.is_symlink()).collect()
}

/// The cgroup that the kubelet is given, in every hierarchy. It makes none but those below.
fn make_cgroup(name: &str) {
    for hierarchy in hierarchies() {
        fs::create_dir_all(hierarchy.join(name)).unwrap();
        // A group without processors and memory takes no process.
        for file in ["cpuset.cpus", "cpuset.mems"] {
            if let Ok(all) = fs::read(hierarchy.join(file)) {
                fs::write(hierarchy.join(name).join(file), all).unwrap();
            }
        }
    }
}

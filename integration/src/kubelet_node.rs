//! A node with Kubernetes' kubelet and `coracle runtime`, on its own host.

use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Child;

use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::process::{end, print_end, start};
use crate::{Crictl, Host, Machine, Nodes, end_cgroup, eventually};

/// A node and its pods. Dropping it ends the processes; the Node object stays.
pub struct KubeletNode {
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

/// Port of the kubelet's API without authentication.
const READ_ONLY: u16 = 10255;

/// Sysctls that the kubelet sets. The kubelet does not start with other values.
const KERNEL: [(&str, &str); 6] = [
    ("vm/overcommit_memory", "1"),
    ("vm/panic_on_oom", "0"),
    ("kernel/panic", "10"),
    ("kernel/panic_on_oops", "1"),
    ("kernel/keys/root_maxkeys", "1000000"),
    ("kernel/keys/root_maxbytes", "25000000"),
];

// === impl KubeletNode ===

impl KubeletNode {
    /// Creates the node `node-<number>` and waits until it is Ready. `settings` are more fields of KubeletConfiguration.
    ///
    /// # Panics
    /// When the node is not Ready in time.
    #[must_use]
    pub fn join(nodes: &Nodes, number: u8, settings: &Value) -> Self {
        let name = format!("node-{number}");
        let dir = nodes.dir_of(&name);
        let host = nodes.host(10 + number);
        let tls = nodes.credentials(&host, &name, &dir);
        let cgroup = format!("{}-{name}", nodes.cgroup());
        make_cgroup(&cgroup);
        let mirrors = nodes.mirrors().to_owned();
        let config = Value::Null;
        let mut node = Self { host, name, dir, cgroup, mirrors, config, tls, runtime: None, kubelet: None };
        node.mount_overlays();
        node.config = node.settings();
        let own = node.config.as_object_mut().unwrap();
        own.extend(settings.as_object().unwrap().clone());
        node.start_runtime();
        node.start_kubelet();
        eventually(&format!("{} to be Ready", node.name), 60, || {
            let path = "jsonpath={.status.conditions[?(@.type==\"Ready\")].status} {.spec.taints[*].key}";
            let output = nodes.try_kubectl(&["get", "node", &node.name, "-o", path]);
            let found = String::from_utf8_lossy(&output.stdout).into_owned();
            found.starts_with("True") && !found.contains("not-ready")
        });
        node
    }

    /// Mounts overlays over /var/lib and /var/log. Some paths of the kubelet there are not configurable, and the
    /// kubelet must not change files of the test machine. Mounts are shared, as with systemd, so that the runtime sees
    /// mounts of the kubelet.
    fn mount_overlays(&self) {
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

    /// Shell commands that mount files over the sysctls that the kubelet writes. They run in the kubelet's mount
    /// namespace only. The kernel does not allow a new /proc in a user namespace if the visible /proc has such mounts.
    fn cover_sysctls(&self) -> String {
        let mut script = "mount --make-private /proc\n".to_owned();
        for (name, _) in KERNEL {
            let file = self.path(&name.replace('/', "_"));
            writeln!(script, "mount --bind {} /proc/sys/{name}", file.display()).unwrap();
        }
        script
    }

    /// KubeletConfiguration for a machine with little free disk space and cgroup v1.
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

    /// Starts `coracle runtime` and waits until it responds.
    ///
    /// # Panics
    /// When it does not respond in time.
    pub fn start_runtime(&mut self) {
        assert!(self.runtime.is_none(), "the process is already running");
        let mut command = self.host.command(Machine::coracle());
        command.args(["runtime", "--listen", &self.socket(), "--cni-conf-dir", ""]);
        command.arg("--root").arg(self.path("state")).arg("--state").arg(self.path("run"));
        command.arg("--registry-config-dir").arg(&self.mirrors);
        self.runtime = Some(start(command, &self.log("runtime")));
        eventually("the runtime", 20, || self.crictl().try_crictl(&["version"]).status.success());
    }

    /// Starts the kubelet.
    ///
    /// # Panics
    /// When it is already running, or is not built.
    pub fn start_kubelet(&mut self) {
        assert!(self.kubelet.is_none(), "the process is already running");
        let file = self.path("kubelet.json");
        fs::write(&file, self.config.to_string()).unwrap();
        fs::create_dir_all(self.path("manifests")).unwrap();
        let script = format!("set -e\n{}exec \"$0\" \"$@\"", self.cover_sysctls());
        let mut command = self.host.command("unshare");
        command.args(["--mount", "--propagation", "unchanged", "sh", "-c", &script]);
        command.arg(Machine::tool("kubelet", "scripts/kubelet"));
        command.arg("--config").arg(file).arg("--kubeconfig").arg(&self.tls[0]);
        command.arg("--root-dir").arg(self.path("kubelet"));
        command.args(["--hostname-override", &self.name, "--node-ip", &self.host.address(), "--v", "2"]);
        self.kubelet = Some(start(command, &self.log("kubelet")));
    }

    /// Kills the runtime with SIGKILL. Its pods continue.
    pub fn kill_runtime(&mut self) {
        end(&mut self.runtime, Signal::SIGKILL);
    }

    /// Kills the kubelet with SIGKILL. Its pods continue.
    pub fn kill_kubelet(&mut self) {
        end(&mut self.kubelet, Signal::SIGKILL);
    }

    /// Changes fields of KubeletConfiguration, for the next start of the kubelet.
    pub fn set(&mut self, settings: &Value) {
        self.config.as_object_mut().unwrap().extend(settings.as_object().unwrap().clone());
    }

    /// The published crictl on this host.
    #[must_use]
    pub fn crictl(&self) -> Crictl {
        Crictl::on(&self.host, &self.socket())
    }

    /// Response of the kubelet's read-only port; None after an error.
    #[must_use]
    pub fn read_only(&self, path: &str) -> Option<String> {
        let address = format!("http://{}:{READ_ONLY}{path}", self.host.address());
        let output = self.host.command("curl").args(["-sf", &address]).output().unwrap();
        output.status.success().then(|| String::from_utf8(output.stdout).unwrap())
    }

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

    /// A path in the directory of the node.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Current content of the log of `kubelet` or `runtime`.
    #[must_use]
    pub fn log_of(&self, what: &str) -> String {
        fs::read_to_string(self.log(what)).unwrap_or_default()
    }

    fn log(&self, what: &str) -> PathBuf {
        self.dir.join(what).with_extension("log")
    }

    fn socket(&self) -> String {
        format!("unix://{}", self.path("run/cri.sock").display())
    }
}

impl Drop for KubeletNode {
    fn drop(&mut self) {
        if std::thread::panicking() {
            ["kubelet", "runtime"].iter().for_each(|what| print_end(what, &self.log(what)));
        }
        self.kill_kubelet();
        let mut down = self.host.command(Machine::coracle());
        // Only cgroups below the kubelet's root are removed: other cgroups of the machine are not part of the test.
        down.args(["down", "--purge", "--cgroup-root", &format!("/{}", self.cgroup)]);
        down.arg("--state-dir").arg(self.path("state"));
        let output = down.arg("--run-dir").arg(self.path("run")).output().unwrap();
        if !output.status.success() {
            eprintln!("coracle down: {}", String::from_utf8_lossy(&output.stderr));
        }
        self.kill_runtime();
        end_cgroup(&self.cgroup);
        // The runtime's own cgroup, which is not below the kubelet's root. Removing it fails while another runtime uses it.
        for hierarchy in hierarchies() {
            // In hierarchies without controllers, each pod has its own cgroup there.
            let pods = fs::read_dir(hierarchy.join("coracle/shims")).into_iter().flatten().flatten();
            pods.for_each(|pod| drop(fs::remove_dir(pod.path())));
            ["coracle/shims", "coracle"].iter().for_each(|group| drop(fs::remove_dir(hierarchy.join(group))));
        }
    }
}

/// Root directories of the cgroup hierarchies.
fn hierarchies() -> Vec<PathBuf> {
    let root = PathBuf::from("/sys/fs/cgroup");
    if root.join("cgroup.controllers").exists() {
        return vec![root];
    }
    let entries = fs::read_dir(&root).unwrap().flatten().map(|entry| entry.path());
    entries.filter(|path| path.is_dir() && !path.is_symlink()).collect()
}

/// Creates the kubelet's root cgroup in every hierarchy: the kubelet creates only cgroups below it.
fn make_cgroup(name: &str) {
    for hierarchy in hierarchies() {
        fs::create_dir_all(hierarchy.join(name)).unwrap();
        // With cgroup v1, a cpuset without CPUs or memory nodes accepts no process.
        for file in ["cpuset.cpus", "cpuset.mems"] {
            if let Ok(all) = fs::read(hierarchy.join(file)) {
                fs::write(hierarchy.join(name).join(file), all).unwrap();
            }
        }
    }
}

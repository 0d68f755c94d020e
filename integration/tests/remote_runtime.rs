//! The agent with another container runtime over the CRI: Debian's containerd, and the published CRI-O.
//!
//! The test with CRI-O is ignored, because building CRI-O takes minutes: `scripts/test-crio` builds it and runs the test.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stderr, reason = "a test panics")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use coracle_integration::{
    Crictl, CrioSettings, Host, Machine, Nodes, checked_stdout, eventually, has_condition, on_a_machine,
};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

const NODE: &str = "node-1";
/// Address of the machine's registry for the nodes.
const REGISTRY: &str = "192.0.2.1:5005";

/// A container runtime on a node's host.
struct Runtime {
    process: Child,
    crictl: Crictl,
    dir: PathBuf,
}

/// A CNI list of Debian's plugins. Pods of this node get addresses of 10.77.0.0/24.
fn write_network(dir: &Path) {
    let ipam = json!({"type": "host-local", "dataDir": dir.join("addresses"),
        "ranges": [[{"subnet": "10.77.0.0/24"}]], "routes": [{"dst": "0.0.0.0/0"}]});
    let list = json!({"cniVersion": "1.0.0", "name": "web", "plugins": [
        {"type": "bridge", "bridge": "web0", "isGateway": true, "ipam": ipam}]});
    fs::create_dir_all(dir.join("net.d")).unwrap();
    fs::write(dir.join("net.d/10-web.conflist"), list.to_string()).unwrap();
}

// === impl Runtime ===

impl Runtime {
    /// Starts containerd in `dir`, with the registry and network of the test.
    fn containerd(host: &Host, dir: &Path, mirrors: &Path) -> (PathBuf, Self) {
        write_network(dir);
        let path = |name: &str| dir.join(name).to_str().unwrap().to_owned();
        // runc fails to lower the OOM score of a sandbox to -998 if this machine does not have CAP_SYS_RESOURCE.
        let config = format!(
            "version = 2\nroot = '{root}'\nstate = '{state}'\ndisabled_plugins = ['io.containerd.internal.v1.opt']\n\
             [grpc]\naddress = '{socket}'\n[ttrpc]\naddress = '{socket}.ttrpc'\n\
             [plugins.'io.containerd.grpc.v1.cri']\nsandbox_image = '{REGISTRY}/library/pause:latest'\n\
             restrict_oom_score_adj = true\n\
             [plugins.'io.containerd.grpc.v1.cri'.cni]\nbin_dir = '/usr/lib/cni'\nconf_dir = '{lists}'\n\
             [plugins.'io.containerd.grpc.v1.cri'.registry]\nconfig_path = '{mirrors}'\n",
            root = path("containerd"),
            state = path("containerd.run"),
            socket = path("containerd.sock"),
            lists = path("net.d"),
            mirrors = mirrors.display(),
        );
        let plain = mirrors.join(REGISTRY);
        fs::create_dir_all(&plain).unwrap();
        // containerd 1.6 requires a `host` table in hosts.toml.
        let hosts = format!("[host.'http://{REGISTRY}']\ncapabilities = ['pull', 'resolve']\n");
        fs::write(plain.join("hosts.toml"), hosts).unwrap();
        fs::write(dir.join("containerd.toml"), config).unwrap();
        let mut command = host.command("containerd");
        command.args(["--config", &path("containerd.toml")]);
        Self::started(host, dir, "containerd.sock", command)
    }

    /// Starts CRI-O in `dir`, with the registry and network of the test.
    fn crio(host: &Host, dir: &Path, _mirrors: &Path) -> (PathBuf, Self) {
        write_network(dir);
        let registries = format!(
            "unqualified-search-registries = ['docker.io']\n[[registry]]\nprefix = 'docker.io'\nlocation = '{REGISTRY}'\n\
             insecure = true\n[[registry]]\nlocation = '{REGISTRY}'\ninsecure = true\n"
        );
        // CRI-O has no setting for the path of registries.conf. It reads the file below the user's home.
        let containers = dir.join("home/.config/containers");
        fs::create_dir_all(&containers).unwrap();
        fs::write(containers.join("registries.conf"), registries).unwrap();
        let settings = CrioSettings {
            dir,
            run: &dir.join("crio.run"),
            plugins: Path::new("/usr/lib/cni"),
            sandbox_image: &format!("{REGISTRY}/library/pause:latest"),
        };
        let words = settings.write();
        let mut command = host.command(&words[0]);
        command.args(&words[1..]).env("HOME", dir.join("home"));
        Self::started(host, dir, "crio.sock", command)
    }

    fn started(host: &Host, dir: &Path, socket: &str, mut command: Command) -> (PathBuf, Self) {
        // The runtime must see the mounts that the agent makes for pods. systemd sets this up on other machines.
        host.run("mount", &["--make-rshared", "/"]);
        let log = fs::File::create(dir.join("runtime.log")).unwrap();
        command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
        let process = command.spawn().unwrap();
        let socket = dir.join(socket);
        let crictl = Crictl::on(host, &format!("unix://{}", socket.display()));
        let runtime = Self { process, crictl, dir: dir.to_owned() };
        let is_ready = || runtime.crictl.try_crictl(&["version"]).status.success();
        eventually("the runtime", 60, is_ready);
        (socket, runtime)
    }
}

impl Drop for Runtime {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let log = fs::read_to_string(self.dir.join("runtime.log")).unwrap_or_default();
            let lines: Vec<&str> = log.lines().rev().take(40).collect();
            eprintln!("--- the end of the runtime's log:");
            lines.iter().rev().for_each(|line| eprintln!("{line}"));
        }
        let _ = self.crictl.try_crictl(&["rmp", "--all", "--force"]);
        self.process.kill().ok();
        self.process.wait().ok();
    }
}

/// A busybox container that runs a shell script.
fn shell(name: &str, script: &str) -> Value {
    json!({"name": name, "image": "busybox", "imagePullPolicy": "IfNotPresent", "command": ["sh", "-c", script]})
}

fn pod(name: &str, spec: &Value) -> String {
    let mut spec = spec.clone();
    spec["terminationGracePeriodSeconds"] = 1.into();
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}).to_string()
}

fn ready(pod: &Value) -> Option<()> {
    has_condition(pod, "Ready", "True").then_some(())
}

fn pods_run_on(nodes: &mut Nodes, runtime: &Runtime, name: &str) {
    nodes.wait_ready();
    let version = nodes.get(&["node", NODE])["status"]["nodeInfo"]["containerRuntimeVersion"].clone();
    assert!(version.as_str().unwrap().starts_with(name), "{version}");
    a_pod_is_configured_probed_and_reached(nodes);
    containers_end_and_start_again(nodes);
    an_agent_that_restarts_finds_its_pods(nodes);
    usage_is_reported(nodes);
    let log = nodes.agents()[0].log();
    assert!(log.contains("another container runtime runs the pods"), "{log}");
    nodes.kubectl(&["delete", "pods", "--all"]);
    eventually("all to be removed", 60, || runtime.crictl.crictl(&["pods", "-q"]).is_empty());
}

/// Init containers, a secret in the environment, HTTP and exec probes, exec, logs and port-forward.
fn a_pod_is_configured_probed_and_reached(nodes: &Nodes) {
    nodes.kubectl(&["create", "secret", "generic", "s", "--from-literal=word=secret"]);
    let mut web = shell("web", "cp /made/page /tmp/; echo started; exec httpd -f -p 80 -h /tmp");
    web["volumeMounts"] = json!([{"name": "made", "mountPath": "/made"}, {"name": "s", "mountPath": "/s"}]);
    web["env"] = json!([{"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]);
    web["readinessProbe"] = json!({"httpGet": {"path": "/page", "port": 80}, "periodSeconds": 1});
    web["livenessProbe"] = json!({"exec": {"command": ["test", "-e", "/tmp/page"]}, "periodSeconds": 1});
    let mut init = shell("init", "echo hello > /made/page");
    init["volumeMounts"] = json!([{"name": "made", "mountPath": "/made"}]);
    let volumes = json!([{"name": "made", "emptyDir": {}}, {"name": "s", "secret": {"secretName": "s"}}]);
    nodes.apply(&pod("web", &json!({"initContainers": [init], "containers": [web], "volumes": volumes})));
    nodes.until_pod("web", "to be ready", ready);
    let ip = nodes.get(&["pod", "web"])["status"]["podIP"].as_str().unwrap().to_owned();
    assert!(ip.starts_with("10.77.0."), "{ip}");
    assert_eq!(
        nodes.kubectl(&["exec", "web", "--", "sh", "-c", "cat /s/word; echo :$IP"]),
        format!("secret:{ip}\n")
    );
    assert_eq!(nodes.try_kubectl(&["exec", "web", "--", "sh", "-c", "exit 7"]).status.code(), Some(7));
    assert_eq!(nodes.kubectl(&["logs", "web"]), "started\n");
    let terminal = nodes.in_a_terminal(&["exec", "-it", "web", "--", "tty"]);
    assert!(checked_stdout(&terminal).contains("/dev/pts/0"));
}

/// Exit codes, restarts after a failure, the log of the previous container, and a failed liveness probe.
fn containers_end_and_start_again(nodes: &Nodes) {
    nodes.apply(&pod(
        "job",
        &json!({"restartPolicy": "Never", "containers": [shell("c", "echo end; exit 3")]}),
    ));
    let code = nodes.until_pod("job", "to end", |pod| {
        (pod["status"]["phase"] == "Failed")
            .then(|| pod["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"].clone())
    });
    assert_eq!(code, 3);
    assert_eq!(nodes.kubectl(&["logs", "job"]), "end\n");
    let mut sick = shell("c", "echo life; sleep 1000");
    sick["livenessProbe"] =
        json!({"exec": {"command": ["false"]}, "periodSeconds": 1, "failureThreshold": 1});
    nodes.apply(&pod("sick", &json!({"containers": [sick]})));
    nodes.until_pod("sick", "to be restarted", |pod| {
        (pod["status"]["containerStatuses"][0]["restartCount"].as_i64()? > 0).then_some(())
    });
    assert_eq!(nodes.kubectl(&["logs", "--previous", "sick"]), "life\n");
    nodes.kubectl(&["delete", "pod", "sick"]);
}

fn an_agent_that_restarts_finds_its_pods(nodes: &mut Nodes) {
    let container = |nodes: &Nodes| nodes.get(&["pod", "web"])["status"]["containerStatuses"][0].clone();
    let before = container(nodes);
    nodes.agent(NODE).end(Signal::SIGKILL);
    nodes.agent(NODE).start();
    // A new pod shows that the new agent works.
    nodes.apply(&pod("later", &json!({"containers": [shell("c", "sleep 1000")]})));
    nodes.until_pod("later", "to be ready", ready);
    let after = container(nodes);
    assert_eq!((&before["containerID"], before["restartCount"].as_i64()), (&after["containerID"], Some(0)));
    assert_eq!(after["restartCount"], 0);
    assert_eq!(nodes.kubectl(&["exec", "web", "--", "cat", "/tmp/page"]), "hello\n");
}

fn usage_is_reported(nodes: &Nodes) {
    let path = format!("/api/v1/nodes/{NODE}/proxy/stats/summary");
    eventually("usage of the pod", 60, || {
        let output = nodes.try_kubectl(&["get", "--raw", &path]);
        let summary: Value = serde_json::from_slice(&output.stdout).ok()?;
        let pods = summary["pods"].as_array()?;
        let web = pods.iter().find(|pod| pod["podRef"]["name"] == "web")?;
        (web["containers"][0]["memory"]["workingSetBytes"].as_u64()? > 0).then_some(())
    });
}

#[test]
fn pods_run_on_containerd() {
    on_a_machine(|machine| {
        let mut nodes = Nodes::control_plane_only(machine, "10.42.0.0/16", &[]);
        machine.push_sandbox_image();
        let runtime = nodes.add_on(1, Runtime::containerd);
        pods_run_on(&mut nodes, &runtime, "containerd://");
    });
}

#[test]
#[ignore = "needs CRI-O (scripts/test-crio)"]
fn pods_run_on_crio() {
    on_a_machine(|machine| {
        let mut nodes = Nodes::control_plane_only(machine, "10.42.0.0/16", &[]);
        machine.push_sandbox_image();
        let runtime = nodes.add_on(1, Runtime::crio);
        pods_run_on(&mut nodes, &runtime, "cri-o://");
    });
}

#[test]
fn settings_that_another_runtime_ignores_are_rejected() {
    on_a_machine(|machine| {
        let agent = |flags: &[&str]| {
            let mut command = Command::new(Machine::coracle());
            command.args(["agent", "--kubeconfig", "/nonexistent"]);
            command.arg("--state-dir").arg(machine.path("state")).arg("--run-dir").arg(machine.path("run"));
            let output = command.arg("--container-runtime-endpoint").args(flags).output().unwrap();
            assert!(!output.status.success());
            String::from_utf8_lossy(&output.stderr).into_owned()
        };
        let error = agent(&["unix:///nonexistent.sock", "--bridge", "b0", "--container-log-max-files", "3"]);
        assert!(
            error.contains("bridge, container-log-max-files cannot be set with --container-runtime-endpoint"),
            "{error}"
        );
    });
}

/// An earlier version ignored the field `containerRuntimeEndpoint` of a KubeletConfiguration.
#[test]
fn another_runtime_is_refused_while_pods_of_the_built_in_runtime_run() {
    on_a_machine(|machine| {
        let (config, run_dir) = (machine.path("kubelet.yaml"), machine.path("run"));
        let fields = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n\
                      containerRuntimeEndpoint: unix:///run/containerd/containerd.sock\n";
        fs::write(&config, fields).unwrap();
        let agent = || {
            let mut command = Command::new(Machine::coracle());
            command.args(["agent", "--kubeconfig", "/nonexistent", "--config"]).arg(&config);
            command.arg("--state-dir").arg(machine.path("state")).arg("--run-dir").arg(&run_dir);
            let output = command.output().unwrap();
            assert!(!output.status.success());
            String::from_utf8_lossy(&output.stderr).into_owned()
        };
        // A program with the command line of the shim of a pod. It ends at the end of its input.
        fs::write(machine.path("shim"), "read line").unwrap();
        let mut shim = Command::new("sh");
        shim.args(["shim", "--dir"]).arg(run_dir.join("sandboxes/web")).stdin(Stdio::piped());
        let mut shim = shim.current_dir(machine.path("")).spawn().unwrap();
        fs::create_dir_all(run_dir.join("sandboxes")).unwrap();
        let error = agent();
        assert!(error.contains("cannot be set while pods of the built-in container runtime run"), "{error}");
        drop(shim.stdin.take());
        shim.wait().unwrap();
        let error = agent();
        assert!(!error.contains("built-in container runtime"), "{error}");
    });
}

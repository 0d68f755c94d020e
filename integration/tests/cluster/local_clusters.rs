//! `coracle cluster`: local clusters side by side, and what remains of them.

use std::fs;
use std::net::{SocketAddr, TcpStream};
use std::os::unix::process::ExitStatusExt as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use coracle_integration::{Kubectl, Machine, ResourceSnapshot, eventually, on_a_machine, repository};
use serde_json::Value;

const IMAGE: &str = "docker.io/library/busybox:latest";

/// The local clusters of a test's machine.
struct Clusters {
    state: PathBuf,
    run: PathBuf,
    kubeconfig: PathBuf,
}

impl Clusters {
    fn of(machine: &Machine) -> Self {
        Self {
            state: machine.path("clusters"),
            run: machine.path("run-clusters"),
            kubeconfig: machine.path("kubeconfig"),
        }
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(Machine::coracle());
        command.arg("cluster").arg("--state-dir").arg(&self.state).arg("--run-dir").arg(&self.run);
        command.args(arguments).env("KUBECONFIG", &self.kubeconfig).stdin(Stdio::null());
        command
    }

    /// Runs a subcommand and returns its standard output.
    fn run(&self, arguments: &[&str]) -> String {
        let output = self.command(arguments).output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "coracle cluster {arguments:?}: {errors}");
        String::from_utf8(output.stdout).unwrap()
    }

    fn list(&self) -> Value {
        serde_json::from_str(&self.run(&["list", "--output", "json"])).unwrap()
    }

    fn kubectl(&self, cluster: &str, arguments: &[&str]) -> Option<String> {
        let context = format!("coracle-{cluster}");
        let kubectl = Kubectl::new(self.kubeconfig.clone());
        let output = kubectl.try_kubectl(&[&["--context", &context], arguments].concat());
        output.status.success().then(|| String::from_utf8(output.stdout).unwrap())
    }

    /// Runs a pod with a web server on a node port, and requests its page from this machine.
    fn serve(&self, cluster: &str) {
        // Admission rejects pods without a service account.
        eventually("the service account", 20, || {
            self.kubectl(cluster, &["get", "serviceaccount", "default"])
        });
        let shell = "echo page >index.html; exec httpd -f -p 8080";
        let image = format!("--image={IMAGE}");
        let run = ["run", "web", &image, "--image-pull-policy=Never", "--", "sh", "-c", shell];
        self.kubectl(cluster, &run).unwrap();
        let ready = ["wait", "pod/web", "--for=condition=Ready", "--timeout=60s"];
        self.kubectl(cluster, &ready).unwrap();
        self.kubectl(cluster, &["expose", "pod/web", "--type=NodePort", "--port=8080"]).unwrap();
        let port =
            self.kubectl(cluster, &["get", "service", "web", "-o", "jsonpath={.spec.ports[0].nodePort}"]);
        let address = "jsonpath={.items[0].status.addresses[?(@.type==\"InternalIP\")].address}";
        let address = self.kubectl(cluster, &["get", "nodes", "-o", address]).unwrap();
        let at = SocketAddr::new(address.parse().unwrap(), port.unwrap().parse().unwrap());
        eventually("the page at the node port", 20, || {
            TcpStream::connect_timeout(&at, Duration::from_secs(1)).ok()
        });
    }
}

impl Drop for Clusters {
    /// Removes what a failed test leaves.
    fn drop(&mut self) {
        drop(self.command(&["delete", "--all"]).output());
    }
}

/// Cgroups of nodes of the cluster with this name.
fn cgroups(name: &str) -> Vec<PathBuf> {
    let top = PathBuf::from("/sys/fs/cgroup");
    let mut roots: Vec<PathBuf> = fs::read_dir(&top).unwrap().flatten().map(|entry| entry.path()).collect();
    roots.push(top);
    let nodes = (1..=2).map(|number| format!("coracle-cluster-{name}-{number}"));
    nodes
        .flat_map(|node| roots.iter().map(move |root| root.join(&node)))
        .filter(|path| path.exists())
        .collect()
}

/// A copy of the image's layout with the name of the image.
fn layout(machine: &Machine) -> String {
    let layout = machine.path("layout");
    let copy =
        Command::new("cp").arg("-r").arg(repository().join("target/images/busybox")).arg(&layout).status();
    assert!(copy.unwrap().success());
    let index = layout.join("index.json");
    let text = fs::read_to_string(&index).unwrap();
    assert!(text.contains("\"latest\""), "{text}");
    fs::write(&index, text.replace("\"latest\"", &format!("{IMAGE:?}"))).unwrap();
    layout.to_str().unwrap().to_owned()
}

/// Two clusters run side by side, each with a pod whose node port this machine reaches. A repeated `create` restarts
/// ended nodes and changes nothing else. `delete` removes everything of one cluster and nothing of the other.
#[test]
fn local_clusters_run_side_by_side_and_leave_nothing() {
    on_a_machine(|machine| {
        let before = ResourceSnapshot::of(machine);
        let clusters = Clusters::of(machine);
        let [first, second] = ["a", "b"].map(|letter| format!("t{}{letter}", std::process::id()));
        let layout = layout(machine);
        fs::write(&clusters.kubeconfig, "contexts: [{name: other, context: {cluster: other}}]\n").unwrap();
        let created = clusters.run(&["create", &first, "--image", &layout]);
        assert!(created.contains(clusters.kubeconfig.to_str().unwrap()), "{created}");
        clusters.run(&["create", &second, "--nodes", "2", "--ipv6"]);
        clusters.run(&["load-image", &second, "--image", &layout]);
        clusters.serve(&first);
        clusters.serve(&second);
        let nodes = clusters.kubectl(&second, &["get", "nodes", "-o", "name"]).unwrap();
        assert_eq!(nodes.lines().count(), 2, "{nodes}");

        // The printed kubeconfig has this cluster only.
        let printed = machine.path("printed");
        fs::write(&printed, clusters.run(&["kubeconfig", &second])).unwrap();
        assert_eq!(Kubectl::new(printed).kubectl(&["get", "nodes", "-o", "name"]), nodes);

        let wrong = clusters.command(&["create", &first, "--nodes", "3"]).output().unwrap();
        assert!(!wrong.status.success());
        let holder = clusters.run.join(&first).join("1/coracle.lock");
        let pid = fs::read_to_string(&holder).unwrap();
        nix::sys::signal::kill(
            nix::unistd::Pid::from_raw(pid.parse().unwrap()),
            nix::sys::signal::Signal::SIGKILL,
        )
        .unwrap();
        eventually("the end of the node", 10, || clusters.list()[0]["running"] == 0);
        clusters.run(&["create", &first]);
        let restarts = "jsonpath={.status.containerStatuses[0].restartCount}";
        assert_eq!(clusters.kubectl(&first, &["get", "pod", "web", "-o", restarts]).unwrap(), "0");
        assert_eq!(clusters.list()[0]["running"], 1);

        clusters.run(&["delete", &first]);
        assert_eq!(clusters.list().as_array().unwrap().len(), 1);
        assert_eq!(cgroups(&first), Vec::<PathBuf>::new());
        assert!(clusters.kubectl(&second, &["get", "pod", "web"]).is_some());
        clusters.run(&["delete", "--all"]);
        clusters.run(&["delete", &second]);
        assert_eq!(cgroups(&second), Vec::<PathBuf>::new());
        let left: Value = serde_json::from_str(&contexts(&clusters)).unwrap();
        assert_eq!(left["contexts"].as_array().unwrap().len(), 1, "{left}");
        assert!(!clusters.state.exists() && !clusters.run.exists());
        assert_eq!(ResourceSnapshot::of(machine).added_since(&before), Vec::<&str>::new());
    });
}

#[test]
fn twenty_clusters_in_a_row_leave_nothing() {
    on_a_machine(|machine| {
        let before = ResourceSnapshot::of(machine);
        let clusters = Clusters::of(machine);
        let name = format!("t{}r", std::process::id());
        for number in 1..=20 {
            clusters.run(&["create", &name, "--nodes", &(number % 3 + 1).to_string()]);
            clusters.run(&["delete", &name]);
            assert_eq!(
                ResourceSnapshot::of(machine).added_since(&before),
                Vec::<&str>::new(),
                "cluster {number}"
            );
            assert_eq!(cgroups(&name), Vec::<PathBuf>::new(), "cluster {number}");
            assert!(!clusters.state.exists() && !clusters.run.exists(), "cluster {number}");
        }
    });
}

fn contexts(clusters: &Clusters) -> String {
    let kubectl = Kubectl::new(clusters.kubeconfig.clone());
    let output = kubectl.try_kubectl(&["config", "view", "-o", "json"]);
    String::from_utf8(output.stdout).unwrap()
}

/// `delete` removes everything that a killed `create` has created, independent of the time of the kill.
#[test]
fn a_killed_create_is_removed_completely() {
    on_a_machine(|machine| {
        let before = ResourceSnapshot::of(machine);
        let clusters = Clusters::of(machine);
        let name = format!("t{}k", std::process::id());
        let remove = |killed: &str| {
            clusters.run(&["delete", &name]);
            assert_eq!(
                ResourceSnapshot::of(machine).added_since(&before),
                Vec::<&str>::new(),
                "killed {killed}"
            );
            assert_eq!(cgroups(&name), Vec::<PathBuf>::new(), "killed {killed}");
            assert!(!clusters.state.exists() && !clusters.run.exists(), "killed {killed}");
        };
        let create = || {
            let mut create = clusters.command(&["create", &name, "--nodes", "2"]);
            create.stdout(Stdio::null()).stderr(Stdio::null());
            create
        };
        for point in [
            "bridge.made",
            "virtual-host.bridge-marked",
            "virtual-host.bridge-addressed",
            "virtual-host.namespace-made:2",
            "virtual-host.interface-made",
        ] {
            let status = create().env("CORACLE_FAULT", point).status().unwrap();
            assert_eq!(status.signal(), Some(nix::libc::SIGABRT), "{point} was not reached");
            remove(&format!("at {point}"));
        }
        for millis in [5, 20, 60, 150, 400, 900] {
            let mut create = create().spawn().unwrap();
            std::thread::sleep(Duration::from_millis(millis));
            create.kill().unwrap();
            create.wait().unwrap();
            remove(&format!("after {millis} ms"));
        }
    });
}

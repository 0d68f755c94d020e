//! The roles of the binary: separate control plane and agent, images, help, preflight checks.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use coracle_integration::{
    Cluster, Machine, ResourceSnapshot, checked_stdout, eventually, on_a_machine, repository, wait_for_exit,
};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// A process that is killed when it is dropped.
struct Role(Child);

impl Role {
    fn start(machine: &Machine, name: &str, arguments: &[String]) -> Self {
        let log = std::fs::File::options().create(true).append(true).open(machine.path(name)).unwrap();
        let mut command = Command::new(Machine::coracle());
        command.args(arguments).stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
        Self(command.spawn().unwrap())
    }

    /// Waits until the process exits.
    fn exit_code(&mut self) -> Option<i32> {
        wait_for_exit(&mut self.0).code()
    }

    fn kill(&mut self) {
        self.0.kill().ok();
        self.0.wait().unwrap();
    }
}

impl Drop for Role {
    fn drop(&mut self) {
        self.kill();
    }
}

fn words(line: &str) -> Vec<String> {
    line.split_whitespace().map(str::to_owned).collect()
}

fn coracle(arguments: &[&str]) -> Output {
    Command::new(Machine::coracle()).args(arguments).output().unwrap()
}

#[test]
fn a_pod_survives_kills_of_control_plane_and_agent() {
    on_a_machine(|machine| {
        let before = ResourceSnapshot::of(machine);
        let dir = machine.path("");
        let dir = dir.to_str().unwrap().trim_end_matches('/').to_owned();
        let plane_words =
            words(&format!("controlplane --state-dir {dir}/plane --run-dir {dir}/run --issue-node node-1"));
        let node = format!(
            "--state-dir {dir}/state --run-dir {dir}/run --pod-log-dir {dir}/logs --cgroup-root /{} --disk-free-percent 1 \
             --image-gc-high-threshold 100",
            machine.name()
        );
        let mut plane = Role::start(machine, "plane.log", &plane_words);
        let line = eventually("the agent's command", 20, || {
            let log = std::fs::read_to_string(machine.path("plane.log")).ok()?;
            // The last line can be incomplete.
            let mut lines = log.split_inclusive('\n');
            lines.find(|l| l.starts_with("coracle agent") && l.ends_with('\n')).map(str::to_owned)
        });
        let agent_words = words(&format!("{} {node}", line.trim_start_matches("coracle ")));
        let mut agent = Role::start(machine, "agent.log", &agent_words);
        let layout = repository().join("target/images/busybox");
        let kubectl = |arguments: &str| {
            let output = Command::new(Machine::kubectl("1.37"))
                .args(words(arguments))
                .env("KUBECONFIG", machine.path("plane/admin.kubeconfig"))
                .env("HOME", machine.path(""))
                .output()
                .unwrap();
            (output.status.success(), String::from_utf8_lossy(&output.stdout).into_owned())
        };
        eventually("the node", 20, || kubectl("wait node/node-1 --for=condition=Ready --timeout=1s").0);
        // Admission rejects pods without a service account.
        eventually("the service account", 20, || kubectl("get serviceaccount default").0);
        import(&dir, &layout);
        let run = "run p --image=docker.io/library/busybox:latest --image-pull-policy=Never --command -- sleep 100000";
        assert!(kubectl(run).0);
        assert!(kubectl("wait pod/p --for=condition=Ready --timeout=300s").0);
        let id = "get pod p -o jsonpath={.status.containerStatuses[0].containerID}";
        let (_, container) = kubectl(id);
        agent.kill();
        agent = Role::start(machine, "agent.log", &agent_words);
        assert!(kubectl("wait pod/p --for=condition=Ready --timeout=300s").0);
        plane.kill();
        let plane = Role::start(machine, "plane.log", &plane_words);
        eventually("the API", 20, || kubectl("get --raw /readyz").0);
        assert!(kubectl("wait pod/p --for=condition=Ready --timeout=300s").0);
        assert_eq!(kubectl(id).1, container);
        // The agent connects to the new control plane: a new pod runs.
        assert!(kubectl("run q --image=docker.io/library/busybox:latest --image-pull-policy=Never --command -- sleep 100000").0);
        assert!(kubectl("wait pod/q --for=condition=Ready --timeout=300s").0);
        drop((agent, plane));
        checked_stdout(&coracle(
            &words(&format!("down {node}")).iter().map(String::as_str).collect::<Vec<_>>(),
        ));
        assert_eq!(ResourceSnapshot::of(machine).added_since(&before), Vec::<&str>::new());
    });
}

/// Settings of the kubelet's file and of flags, as kubectl shows them. The agent does not start while a setting is
/// wrong, and it names all wrong settings.
#[test]
fn a_kubelet_configuration_labels_and_taints_show_in_kubectl() {
    on_a_machine(|machine| {
        let file = machine.path("kubelet.yaml");
        let head = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n";
        let wrong = "volumePluginDir: /x\nmaxPodz: 5\nmaxPods: many\n";
        std::fs::write(&file, format!("{head}{wrong}")).unwrap();
        let file = file.to_str().unwrap();
        let output = coracle(&["agent", "--config", file, "--mtu", "big"]);
        let errors = String::from_utf8_lossy(&output.stderr);
        for part in ["volumePluginDir", "maxPodz: unknown field", "maxPods \"many\"", "flag --mtu \"big\""] {
            assert!(!output.status.success() && errors.contains(part), "{part} is not in: {errors}");
        }
        let taint = "registerWithTaints: [{key: gpu, value: \"yes\", effect: NoSchedule}]";
        let reserved = "systemReserved: {cpu: 100m}\nkubeReserved: {cpu: 150m}";
        std::fs::write(file, format!("{head}maxPods: 17\n{taint}\n{reserved}\n")).unwrap();
        let flags = [
            "--config",
            file,
            "--image-gc-high-threshold",
            "100",
            "--node-labels",
            "zone=a,example.com/rack=",
        ];
        let cluster = Cluster::up_with(machine, &machine.path("mirrors"), &flags);
        let shown =
            |path: &str| cluster.kubectl(&["get", "node", "node-1", "-o", &format!("jsonpath={{{path}}}")]);
        assert_eq!(shown(".metadata.labels.zone"), "a");
        assert!(shown(".metadata.labels").contains("\"example.com/rack\":\"\""));
        assert_eq!(
            shown(".spec.taints[?(@.key==\"gpu\")]"),
            "{\"effect\":\"NoSchedule\",\"key\":\"gpu\",\"value\":\"yes\"}"
        );
        assert_eq!(shown(".status.allocatable.pods"), "17");
        let millis = |text: String| match text.strip_suffix('m') {
            Some(millis) => millis.parse::<u32>().unwrap(),
            None => text.parse::<u32>().unwrap() * 1000,
        };
        let (capacity, allocatable) = (shown(".status.capacity.cpu"), shown(".status.allocatable.cpu"));
        assert_eq!(millis(capacity) - millis(allocatable), 250);
    });
}

fn import(dir: &str, layout: &Path) {
    let directories = [&format!("{dir}/state"), &format!("{dir}/run")];
    let name = ["--name", "docker.io/library/busybox:latest"];
    let mut all = vec![
        "image",
        "--state-dir",
        directories[0],
        "--run-dir",
        directories[1],
        "import",
        layout.to_str().unwrap(),
    ];
    all.extend(name);
    checked_stdout(&coracle(&all));
}

#[test]
fn images_are_imported_listed_and_removed_without_a_node() {
    on_a_machine(|machine| {
        let dir = machine.path("").to_str().unwrap().trim_end_matches('/').to_owned();
        let layout = repository().join("target/images/busybox");
        import(&dir, &layout);
        let directories = [format!("{dir}/state"), format!("{dir}/run")];
        let image = |verb: &[&str]| {
            let mut all = vec!["image", "--state-dir", &directories[0], "--run-dir", &directories[1]];
            all.extend(verb);
            checked_stdout(&coracle(&all))
        };
        assert!(image(&["list"]).contains("docker.io/library/busybox:latest"));
        // The exported image is the same after an import.
        let (listed, archive) = (image(&["list"]), format!("{}/busybox.tar", directories[0]));
        image(&["export", "busybox", &archive]);
        image(&["rm", "docker.io/library/busybox:latest"]);
        image(&["import", &archive]);
        assert_eq!(image(&["list"]).split_whitespace().nth(4), listed.split_whitespace().nth(4));
        image(&["rm", "docker.io/library/busybox:latest"]);
        assert!(!image(&["list"]).contains("busybox"));
        image(&["rm", "docker.io/library/busybox:latest"]);
        let absent = coracle(&[
            "image",
            "--state-dir",
            &directories[0],
            "--run-dir",
            &directories[1],
            "import",
            "/no/such",
        ]);
        let errors = String::from_utf8_lossy(&absent.stderr);
        assert_eq!(errors, "coracle: cannot import /no/such: No such file or directory\n");
    });
}

#[test]
fn every_role_has_help_and_preflight_checks_name_the_cause() {
    for role in ["up", "agent", "controlplane", "token", "runtime", "image", "check", "down", "version"] {
        let help = checked_stdout(&coracle(&[role, "--help"]));
        assert!(help.contains("Usage: coracle"), "{help}");
    }
    assert!(checked_stdout(&coracle(&["version"])).starts_with("coracle "));
    on_a_machine(|machine| {
        let path = |name: &str| -> PathBuf { machine.path(name) };
        let check = |format: &[&str]| {
            let mut command = Command::new(Machine::coracle());
            command.arg("check").arg("--state-dir").arg(path("state")).arg("--run-dir").arg(path("run"));
            checked_stdout(&command.args(format).output().unwrap())
        };
        let report = check(&[]);
        assert!(report.contains("ok       overlayfs\n"), "{report}");
        assert!(report.contains("ok       bridge, veth and nftables"), "{report}");
        let list: serde_json::Value = serde_json::from_str(&check(&["--output", "json"])).unwrap();
        let overlay = list.as_array().unwrap().iter().find(|row| row["feature"] == "overlayfs").unwrap();
        assert_eq!(overlay["state"], "ok");
    });
}

/// The statuses are those of the table in `docs/command-line.md`.
#[test]
fn exit_statuses_are_the_documented_ones() {
    for (arguments, status) in [
        (&["version"][..], 0),
        (&["up", "--nonsense"], 2),
        (&["nonsense"], 2),
        (&["image", "rm"], 2),
        (&["image", "import", "/no/such"], 1),
    ] {
        let output = coracle(arguments);
        assert_eq!(output.status.code(), Some(status), "{arguments:?}: {output:?}");
    }
    let wrong = Command::new(Machine::coracle()).arg("up").env("CORACLE_MAX_PODS", "many").output().unwrap();
    let errors = String::from_utf8_lossy(&wrong.stderr);
    assert_eq!(wrong.status.code(), Some(1), "{errors}");
    assert!(errors.lines().count() == 1 && errors.contains("CORACLE_MAX_PODS"), "{errors}");
    on_a_machine(|machine| {
        let [state, run] = ["state", "run"].map(|name| machine.path(name).to_str().unwrap().to_owned());
        let arguments = ["controlplane", "--state-dir", &state, "--run-dir", &run].map(str::to_owned);
        for signal in [Signal::SIGTERM, Signal::SIGINT] {
            let log = machine.path(&format!("{signal}.log"));
            let mut plane = Role::start(machine, &format!("{signal}.log"), &arguments);
            eventually("the API server", 30, || {
                std::fs::read_to_string(&log).is_ok_and(|log| log.contains("the API server is ready"))
            });
            kill(Pid::from_raw(i32::try_from(plane.0.id()).unwrap()), signal).unwrap();
            assert_eq!(plane.exit_code(), Some(0), "{signal}");
        }
    });
}

#[test]
fn a_second_signal_ends_a_control_plane_that_serves_requests_during_its_shutdown() {
    on_a_machine(|machine| {
        let [state, run] = ["state", "run"].map(|name| machine.path(name).to_str().unwrap().to_owned());
        let drain = ["--shutdown-delay-duration", "1h", "--shutdown-send-retry-after"];
        let arguments = [&["controlplane", "--state-dir", &state, "--run-dir", &run][..], &drain].concat();
        let mut plane =
            Role::start(machine, "plane.log", &arguments.into_iter().map(str::to_owned).collect::<Vec<_>>());
        let wait_for_log = |text: &str| {
            let log = machine.path("plane.log");
            eventually(text, 30, || std::fs::read_to_string(&log).is_ok_and(|log| log.contains(text)));
        };
        wait_for_log("the API server is ready");
        let terminate =
            || kill(Pid::from_raw(i32::try_from(plane.0.id()).unwrap()), Signal::SIGTERM).unwrap();
        terminate();
        wait_for_log("shutting down");
        terminate();
        assert_eq!(plane.exit_code(), Some(0));
    });
}

#[test]
fn down_without_a_node_reports_it_and_creates_nothing() {
    on_a_machine(|machine| {
        let (state, run) = (machine.path("state"), machine.path("run"));
        let directories = ["--state-dir", state.to_str().unwrap(), "--run-dir", run.to_str().unwrap()];
        let report = checked_stdout(&coracle(&[&["down"][..], &directories].concat()));
        assert!(report.contains("nothing to remove"), "{report}");
        assert!(!state.exists() && !run.exists());
    });
}

#[test]
fn describe_shows_a_nodes_events_and_reserved_resources() {
    on_a_machine(|machine| {
        let mirrors = machine.start_registry();
        let cluster = Cluster::up(machine, &mirrors);
        let wanted = [
            "Starting",
            "NodeHasSufficientMemory",
            "NodeHasNoDiskPressure",
            "NodeHasSufficientPID",
            "NodeReady",
            "RegisteredNode",
        ];
        eventually("the node's events", 60, || {
            let text = cluster.kubectl(&["describe", "node", "node-1"]);
            let events = text.split_once("\nEvents:")?.1.to_owned();
            wanted.iter().all(|reason| events.contains(reason)).then_some(())
        });
        cluster.kubectl(&["cordon", "node-1"]);
        eventually("the event NodeNotSchedulable", 60, || {
            cluster.kubectl(&["describe", "node", "node-1"]).contains("NodeNotSchedulable")
        });
        let node = cluster.get(&["node", "node-1"]);
        let kib = |list: &str, name: &str| {
            let text = node["status"][list][name].as_str().unwrap();
            text.strip_suffix("Ki").unwrap().parse::<u64>().unwrap()
        };
        let (all, free) = (kib("capacity", "memory"), kib("allocatable", "memory"));
        assert!(all - free >= 100 * 1024, "{all} {free}");
        let (all, free) = (kib("capacity", "ephemeral-storage"), kib("allocatable", "ephemeral-storage"));
        assert_eq!(all - free, all.div_ceil(100), "--disk-free-percent 1 reserves one percent");
    });
}

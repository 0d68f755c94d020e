//! The published crictl against `coracle runtime`: pod lifecycle, streams, logs, metrics.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test panics")]

use std::fs;
use std::io::Write;
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};

use coracle_integration::{
    Cri, Lines, Machine, ResourceSnapshot, eventually, http_get, on_a_machine, process_status,
};

const BUSYBOX: &str = "docker.io/library/busybox:latest";
const NGINX: &str = "docker.io/library/nginx:latest";

/// A crictl in the background, killed when it is dropped.
struct Running(Child);

impl Running {
    fn start(cri: &Cri, arguments: &[&str], output: Stdio) -> Self {
        let mut command = cri.command();
        command.args(arguments).stdin(Stdio::piped()).stdout(output).stderr(Stdio::null());
        Self(command.spawn().unwrap())
    }

    fn lines(&mut self) -> Lines {
        Lines::of(self.0.stdout.take().unwrap())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

/// Writes the configurations of a pod and its containers. Returns a function from names to their paths.
fn configs(machine: &Machine) -> impl Fn(&str) -> String {
    let path = |name: &str| machine.path(name).to_str().unwrap().to_owned();
    let logs = path("logs");
    let pod = format!(
        r#"{{"metadata": {{"name": "web", "namespace": "default", "uid": "1"}}, "hostname": "web",
            "log_directory": "{logs}", "labels": {{"app": "web"}}, "linux": {{}}}}"#
    );
    let shell = format!(
        r#"{{"metadata": {{"name": "shell"}}, "image": {{"image": "{BUSYBOX}"}}, "log_path": "shell.log",
            "command": ["sh", "-c", "echo one; echo two >&2; while read word; do echo heard $word; done; exec sleep 1000"],
            "stdin": true, "labels": {{"app": "web"}},
            "linux": {{"resources": {{"memory_limit_in_bytes": 67108864, "cpu_shares": 512}}}}}}"#
    );
    let nginx = format!(
        r#"{{"metadata": {{"name": "nginx"}}, "image": {{"image": "{NGINX}"}}, "log_path": "nginx.log", "linux": {{}}}}"#
    );
    for (name, text) in [("pod.json", pod), ("shell.json", shell), ("nginx.json", nginx)] {
        fs::write(path(name), text).unwrap();
    }
    move |name| format!("{}/{name}.json", logs.trim_end_matches("/logs"))
}

/// Runs a test with a runtime and a registry, and checks that nothing is left at the end.
fn on_a_runtime(test: impl FnOnce(&Machine, &Cri) + Send + 'static) {
    on_a_machine(|machine| {
        let mirrors = machine.start_registry();
        let before = ResourceSnapshot::of(machine);
        let cri = Cri::runtime(machine, &mirrors);
        test(machine, &cri);
        cri.down();
        fs::remove_dir_all(machine.path("logs")).ok();
        assert_eq!(ResourceSnapshot::of(machine).added_since(&before), Vec::<&str>::new());
    });
}

/// Pulls the image, runs the pod, creates and starts one container. Returns the ids of pod and container.
fn start(cri: &Cri, path: impl Fn(&str) -> String, image: &str, container: &str) -> (String, String) {
    cri.crictl(&["pull", image]);
    let pod = cri.crictl(&["runp", &path("pod")]);
    let id = cri.crictl(&["create", &pod, &path(container), &path("pod")]);
    assert_eq!(cri.json(&["inspect", &id])["status"]["state"], "CONTAINER_CREATED");
    assert_eq!(cri.crictl(&["start", &id]), id);
    (pod, id)
}

fn limits_change_and_metrics_appear(cri: &Cri, pod: &str, id: &str) {
    let status = cri.json(&["inspect", id]);
    assert_eq!(status["status"]["resources"]["linux"]["memoryLimitInBytes"], "67108864");
    cri.crictl(&["update", "--memory", "134217728", id]);
    let status = cri.json(&["inspect", id]);
    assert_eq!(status["status"]["resources"]["linux"]["memoryLimitInBytes"], "134217728");
    let metrics = cri.json(&["metricsp"]);
    assert_eq!(metrics["podMetrics"][0]["podSandboxId"], pod);
    assert!(metrics["podMetrics"][0]["containerMetrics"][0]["metrics"].as_array().unwrap().len() > 30);
}

#[test]
fn inspect_has_the_fields_that_scripts_read_from_other_runtimes() {
    on_a_runtime(|machine, cri| {
        let (pod, id) = start(cri, configs(machine), BUSYBOX, "shell");
        let inspection = cri.json(&["inspectp", &pod]);
        let info = &inspection["info"];
        assert_eq!(info["config"]["metadata"]["name"], "web");
        assert_eq!(info["config"]["labels"]["app"], "web");
        let address = &info["cniResult"]["Interfaces"]["eth0"]["IPConfigs"][0]["IP"];
        assert_eq!((address, address.is_string()), (&inspection["status"]["network"]["ip"], true));
        assert_eq!(info["netNamespaceClosed"], false);
        let info = cri.json(&["inspect", &id])["info"].clone();
        assert_eq!(info["config"]["linux"]["resources"]["memory_limit_in_bytes"], 67_108_864);
        let sets = info["runtimeSpec"]["process"]["capabilities"].as_object().unwrap().clone();
        assert!(sets["bounding"].as_array().unwrap().len() > 1);
        for (name, set) in sets {
            assert!(
                set.as_array().unwrap().is_sorted_by_key(|one| one.as_str().map(str::to_owned)),
                "{name}: {set}"
            );
        }
        cri.crictl(&["stopp", &pod]);
        let info = cri.json(&["inspectp", &pod])["info"].clone();
        assert_eq!((&info["netNamespaceClosed"], info["cniResult"].is_null()), (&true.into(), true));
        cri.crictl(&["rmp", "-f", &pod]);
    });
}

#[test]
fn a_pod_runs_and_is_removed() {
    on_a_runtime(|machine, cri| {
        assert!(cri.crictl(&["version"]).contains("RuntimeName:  coracle"));
        let info = cri.json(&["info"]);
        let conditions = info["status"]["conditions"].as_array().unwrap();
        assert!(conditions.len() >= 2 && conditions.iter().all(|c| c["status"] == true), "{info}");
        assert!(cri.crictl(&["runtime-config"]).contains("CGROUPFS"));
        let mut events = Running::start(cri, &["events"], Stdio::piped());
        let (pod, id) = start(cri, configs(machine), BUSYBOX, "shell");

        let image = cri.json(&["inspecti", BUSYBOX]);
        assert_eq!(image["status"]["repoTags"][0], BUSYBOX);
        assert_eq!(cri.crictl(&["images", "-q"]), image["status"]["id"].as_str().unwrap());
        let used = cri.json(&["imagefsinfo"]);
        let bytes = used["status"]["imageFilesystems"][0]["usedBytes"]["value"].as_str().unwrap();
        assert!(bytes.parse::<u64>().unwrap() > 500_000, "{used}");
        assert_eq!(
            cri.crictl(&["pods", "-q", "--name", "web", "--state", "ready", "--label", "app=web"]),
            pod
        );
        assert_eq!(cri.crictl(&["pods", "-q", "--label", "app=other"]), "");
        assert!(
            cri.json(&["inspectp", &pod])["status"]["network"]["ip"].as_str().unwrap().starts_with("10.88.")
        );
        assert_eq!(cri.crictl(&["ps", "-q", "--state", "running", "--pod", &pod]), id);

        for words in [["stats", "--id", &id], ["statsp", "--id", &pod]] {
            let figures = cri.json(&[words.as_slice(), &["-o", "json"]].concat());
            let of = &figures["stats"][0];
            let of = if of["linux"].is_null() { of } else { &of["linux"] };
            let used = of["cpu"]["usageCoreNanoSeconds"]["value"].as_str().unwrap();
            assert!(used.parse::<u64>().unwrap() > 0, "{figures}");
        }
        limits_change_and_metrics_appear(cri, &pod, &id);
        assert_eq!(cri.crictl(&["stop", "-t", "1", &id]), id);
        let ended = cri.json(&["inspect", &id]);
        assert_eq!(ended["status"]["state"], "CONTAINER_EXITED");
        assert_eq!(ended["status"]["exitCode"], 143);
        assert_eq!(cri.crictl(&["ps", "-q"]), "");
        assert_eq!(cri.crictl(&["rm", &id]), id);
        cri.crictl(&["stopp", &pod]);
        assert_eq!(cri.crictl(&["pods", "-q", "--state", "notready"]), pod);
        cri.crictl(&["rmp", &pod]);
        assert_eq!(cri.crictl(&["pods", "-q"]), "");
        cri.crictl(&["rmi", BUSYBOX]);
        assert_eq!(cri.crictl(&["images", "-q"]), "");

        let mut of_container = Vec::new();
        let mut mine = false;
        for line in events.lines() {
            if line.starts_with("  \"containerId\":") {
                mine = line.contains(&id);
            } else if let Some(kind) = line.strip_prefix("  \"containerEventType\":").filter(|_| mine) {
                of_container.push(kind.trim().trim_matches(['"', ',']).to_owned());
                if kind.contains("DELETED") {
                    break;
                }
            }
        }
        let kinds =
            ["CREATED", "STARTED", "STOPPED", "DELETED"].map(|kind| format!("CONTAINER_{kind}_EVENT"));
        assert_eq!(of_container, kinds);
    });
}

fn exec<'a>(transport: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    [&["exec", "--transport", transport], more].concat()
}

#[test]
fn exec_attach_and_logs_work() {
    on_a_runtime(|machine, cri| {
        let (_, id) = start(cri, configs(machine), BUSYBOX, "shell");
        for transport in ["spdy", "websocket"] {
            assert_eq!(cri.crictl(&exec(transport, &[&id, "hostname"])), "web");
            assert_eq!(
                cri.crictl_with(&exec(transport, &["-i", &id, "tr", "a-z", "A-Z"]), "loud\n"),
                "LOUD\n"
            );
            let failed = cri.try_crictl(&exec(transport, &[&id, "sh", "-c", "echo why >&2; exit 3"]));
            let errors = String::from_utf8_lossy(&failed.stderr).into_owned();
            assert!(errors.contains("why") && errors.contains("exit code 3"), "{errors}");
        }
        assert_eq!(cri.crictl(&["exec", "-s", &id, "echo", "at once"]), "at once");
        let late = cri.try_crictl(&["exec", "-s", "--timeout", "1", &id, "sleep", "100"]);
        assert!(String::from_utf8_lossy(&late.stderr).contains("timed out"));
        eventually("the timed-out command to be killed", 10, || {
            !cri.crictl(&["exec", &id, "ps"]).contains("sleep 100\n")
        });

        // `script` gives crictl a terminal. crictl sends its size when the command may already be running.
        let program = "tty; until stty size 2>/dev/null | grep -v ^0; do sleep 0.1; done";
        let crictl = format!("{:?} exec -i -t {id} sh -c '{program}'", cri.command()).replace('"', "");
        let inner = format!("stty rows 33 cols 99; {crictl}");
        let output = Command::new("script").args(["-qec", &inner, "/dev/null"]).stdin(Stdio::null()).output();
        let screen = String::from_utf8_lossy(&output.unwrap().stdout).into_owned();
        assert!(screen.contains("/dev/pts/0") && screen.contains("33 99"), "{screen}");

        assert_eq!(cri.crictl(&["logs", &id]), "one");
        let both = cri.try_crictl(&["logs", "--tail", "1", "--since", "1h", &id]);
        assert_eq!((both.stdout.as_slice(), both.stderr.as_slice()), (b"".as_slice(), b"two\n".as_slice()));
        let mut follow = Running::start(cri, &["logs", "-f", &id], Stdio::piped());
        let mut lines = follow.lines();
        assert_eq!(lines.next().as_deref(), Some("one"));
        let mut attached = Running::start(cri, &["attach", "-i", &id], Stdio::piped());
        attached.0.stdin.as_mut().unwrap().write_all(b"you\n").unwrap();
        assert_eq!(attached.lines().next().as_deref(), Some("heard you"));
        assert_eq!(lines.next().as_deref(), Some("heard you"));
    });
}

#[test]
fn ports_are_forwarded_and_rmp_force_removes_everything() {
    on_a_runtime(|machine, cri| {
        let path = configs(machine);
        let (pod, _) = start(cri, &path, NGINX, "nginx");
        // A refused connection ends crictl's port-forward.
        let ip = cri.json(&["inspectp", &pod])["status"]["network"]["ip"].as_str().unwrap().to_owned();
        eventually("nginx listens", 10, || TcpStream::connect((ip.as_str(), 80)).ok());
        for (transport, port) in [("spdy", 18080), ("websocket", 18081)] {
            let ports = format!("{port}:80");
            let words = ["port-forward", "--transport", transport, &pod, &ports];
            let _forward = Running::start(cri, &words, Stdio::null());
            let page = |port: u16| http_get(("127.0.0.1", port), "/");
            let answer = eventually("the page", 10, || page(port));
            assert!(answer.contains("Welcome to nginx!"), "{answer}");
            for _ in 0..20 {
                assert!(page(port).unwrap().contains("Welcome to nginx!"));
            }
        }
        cri.crictl(&["rmp", "-f", &pod]);
        // Pod and container with one command, then removal with --force.
        let id = cri.crictl(&["run", &path("shell"), &path("pod")]);
        assert_eq!(cri.crictl(&["ps", "-q"]), id);
        cri.crictl(&["rmp", "-f", "-a"]);
        assert_eq!(cri.crictl(&["ps", "-a", "-q"]), "");
        cri.crictl(&["rmi", "--prune"]);
        assert_eq!(cri.crictl(&["images", "-q"]), "");
    });
}

#[test]
fn runtime_config_metrics_and_checkpoints_work() {
    on_a_runtime(|machine, cri| {
        cri.crictl(&["update-runtime-config", "--pod-cidr", "10.99.0.0/24"]);
        let (pod, id) = start(cri, configs(machine), BUSYBOX, "shell");
        let address = cri.json(&["inspectp", &pod])["status"]["network"]["ip"].clone();
        assert!(address.as_str().unwrap().starts_with("10.99.0."), "{address}");
        let bad = cri.try_crictl(&["update-runtime-config", "--pod-cidr", "nowhere"]);
        assert!(String::from_utf8_lossy(&bad.stderr).contains("nowhere"));

        let described = cri.json(&["metricdescs"]);
        let described = described["descriptors"].as_array().unwrap();
        let names: Vec<_> = described.iter().filter_map(|one| one["name"].as_str()).collect();
        let metrics = cri.json(&["metricsp"]);
        let used = metrics["podMetrics"][0]["containerMetrics"][0]["metrics"].as_array().unwrap();
        assert!(!used.is_empty(), "{metrics}");
        assert!(used.iter().all(|one| names.contains(&one["name"].as_str().unwrap())), "{names:?}");

        let archive = machine.path("checkpoint.tar");
        let export = format!("--export={}", archive.display());
        let output = cri.try_crictl(&["checkpoint", &export, &id]);
        // CRIU does not support every kernel. If it fails, its error is reported.
        if output.status.success() {
            assert!(fs::metadata(&archive).unwrap().len() > 0);
        } else {
            let errors = String::from_utf8_lossy(&output.stderr).to_lowercase();
            assert!(errors.contains("criu"), "{errors}");
        }
        assert_eq!(cri.crictl(&["ps", "-q", "--state", "running"]), id);
    });
}

#[test]
fn missing_objects_are_reported() {
    on_a_runtime(|machine, cri| {
        let path = configs(machine);
        let error = |arguments: &[&str]| {
            let output = cri.try_crictl(arguments);
            assert!(!output.status.success(), "{arguments:?}");
            String::from_utf8_lossy(&output.stderr).into_owned()
        };
        assert!(error(&["pull", "docker.io/library/absent:1"]).contains("docker.io/library/absent:1"));
        for verb in ["inspect", "inspectp", "start", "logs"] {
            assert!(error(&[verb, "0123456789ab"]).contains("0123456789ab"), "{verb}");
        }
        let pod = cri.crictl(&["runp", &path("pod")]);
        assert!(error(&["create", &pod, &path("shell"), &path("pod")]).contains(BUSYBOX));
        assert!(error(&["runp", &path("pod")]).contains("web"));
        assert_eq!(cri.crictl(&["pods", "-q"]), pod);
    });
}

#[test]
fn an_idle_runtime_drops_pages_of_its_executable() {
    on_a_runtime(|machine, cri| {
        // The runtime may have dropped some pages before the first measurement.
        let mut most = 0;
        let mut wait_for_dropped_pages = |what: &str| {
            eventually(what, 20, || {
                let now = process_status(cri.pid(), "RssFile");
                most = now.max(most);
                now < most / 2
            });
        };
        wait_for_dropped_pages("the runtime to drop the pages of its start");
        let (pod, _id) = start(cri, configs(machine), BUSYBOX, "shell");
        wait_for_dropped_pages("the runtime to drop the pages of the pod's start");
        cri.crictl(&["rmp", "-f", &pod]);
    });
}

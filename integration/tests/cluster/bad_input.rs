//! Invalid input is rejected with an error in Kubernetes' format and leaves no partial state.

use std::fs;
use std::process::{Command, Output};

use coracle_integration::{Cluster, Machine, Trace, eventually, on_a_machine};

fn with_cluster(test: impl FnOnce(&mut Machine, &mut Cluster) + Send + 'static) {
    on_a_machine(|machine| {
        let mirrors = machine.start_registry();
        let mut cluster = Cluster::up(machine, &mirrors);
        test(machine, &mut cluster);
    });
}

fn refused(cluster: &Cluster, manifest: &str, says: &[&str]) {
    let output = cluster.kubectl_of("1.37", &["create", "-f", "-"], manifest);
    let errors = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success(), "accepted: {manifest}");
    for text in says {
        assert!(errors.contains(text), "{text:?} is not in: {errors}");
    }
}

fn pod(spec: &str) -> String {
    format!(r#"{{"apiVersion":"v1","kind":"Pod","metadata":{{"name":"p"}},"spec":{spec}}}"#)
}

/// Waits until the pod's container waits with this reason.
fn waits_for(cluster: &Cluster, pod: &str, reason: &str) {
    eventually(&format!("{pod} to wait with {reason}"), 60, || {
        let status = cluster.get(&["pod", pod]);
        let waiting = &status["status"]["containerStatuses"][0]["state"]["waiting"];
        waiting["reason"] == reason
    });
}

fn event(cluster: &Cluster, reason: &str, says: &str) {
    eventually(&format!("an event {reason} with {says:?}"), 30, || {
        let events = cluster.get(&["events"]);
        events["items"]
            .as_array()
            .unwrap()
            .iter()
            .any(|e| e["reason"] == reason && e["message"].as_str().is_some_and(|m| m.contains(says)))
    });
}

#[test]
fn invalid_manifests_are_rejected_with_field_paths_and_not_stored() {
    with_cluster(|_, cluster| {
        refused(cluster, &pod(r#"{"containers":[{"name":"c"}],"hostNetwork":"yes"}"#), &["hostNetwork"]);
        refused(
            cluster,
            &pod(r#"{"containers":[{"name":"c","image":"i","imgae":"x"}]}"#),
            &["unknown field", "imgae"],
        );
        refused(cluster, &pod(r#"{"containers":[]}"#), &["spec.containers", "Required value"]);
        refused(
            cluster,
            &pod(r#"{"containers":[{"name":"C_","image":"i","ports":[{"containerPort":70000}]}]}"#),
            &["spec.containers[0].name", "Invalid value", "spec.containers[0].ports[0].containerPort"],
        );
        assert_eq!(cluster.kubectl(&["get", "pods", "-o", "name"]), "");

        cluster.kubectl(&["create", "deployment", "d", "--image=busybox", "--replicas=0"]);
        let patch = r#"{"spec":{"selector":{"matchLabels":{"app":"other"}}}}"#;
        let output = cluster.try_kubectl(&["patch", "deployment", "d", "-p", patch]);
        let errors = String::from_utf8(output.stderr).unwrap();
        assert!(errors.contains("field is immutable"), "{errors}");
    });
}

#[test]
fn image_errors_end_in_back_off_with_their_reason() {
    with_cluster(|machine, cluster| {
        cluster.kubectl(&["run", "absent", "--image=nosuchimage:1"]);
        // Not `kubectl run`: it rejects the reference before the API server sees it.
        cluster.apply(
            r#"{"apiVersion":"v1","kind":"Pod","metadata":{"name":"badname"},"spec":{"containers":[{"name":"c","image":"UPPER//case"}]}}"#,
        );
        cluster.kubectl(&["run", "never", "--image=nginx", "--image-pull-policy=Never"]);
        waits_for(cluster, "absent", "ImagePullBackOff");
        waits_for(cluster, "badname", "InvalidImageName");
        waits_for(cluster, "never", "ErrImageNeverPull");
        event(cluster, "Failed", "nosuchimage:1");
        machine.stop_registry();
        cluster.kubectl(&["run", "down", "--image=nginx"]);
        waits_for(cluster, "down", "ImagePullBackOff");
        assert_eq!(fs::read_dir(machine.path("state/images/layers")).map_or(0, Iterator::count), 0);
    });
}

#[test]
fn container_errors_have_the_states_and_reasons_of_kubernetes() {
    with_cluster(|_, cluster| {
        cluster.kubectl(&["run", "nocommand", "--image=busybox", "--command", "--", "/no/such"]);
        cluster.kubectl(&["run", "crash", "--image=busybox", "--command", "--", "sh", "-c", "exit 3"]);
        cluster.kubectl(&["run", "done", "--image=busybox", "--restart=Never", "--command", "--", "true"]);
        cluster.apply(
            r#"{"apiVersion":"v1","kind":"Pod","metadata":{"name":"novolume"},"spec":{"containers":[{"name":"c","image":"busybox",
            "volumeMounts":[{"name":"v","mountPath":"/v"}]}],"volumes":[{"name":"v","configMap":{"name":"absent"}}]}}"#,
        );
        cluster.kubectl(&["run", "toobig", "--image=busybox", "--overrides",
            r#"{"spec":{"containers":[{"name":"toobig","image":"busybox","resources":{"requests":{"cpu":"9999"}}}]}}"#]);
        event(cluster, "FailedMount", "configmap \"absent\" not found");
        event(cluster, "FailedScheduling", "0/1 nodes are available: 1 Insufficient cpu");
        waits_for(cluster, "crash", "CrashLoopBackOff");
        eventually("the pod `done` to succeed", 30, || {
            cluster.get(&["pod", "done"])["status"]["phase"] == "Succeeded"
        });
        let crash = cluster.get(&["pod", "crash"]);
        assert_eq!(crash["status"]["containerStatuses"][0]["lastState"]["terminated"]["exitCode"], 3);
        eventually("the start error", 30, || {
            let status = cluster.get(&["pod", "nocommand"])["status"]["containerStatuses"][0].clone();
            status.to_string().contains("/no/such")
        });
    });
}

#[test]
fn a_pod_waits_for_a_handler_that_the_runtime_does_not_have() {
    with_cluster(|_, cluster| {
        cluster.apply(
            r#"{"apiVersion":"node.k8s.io/v1","kind":"RuntimeClass","metadata":{"name":"other"},"handler":"sandboxed"}"#,
        );
        let of_other = r#"{"spec":{"runtimeClassName":"other"}}"#;
        cluster.kubectl(&["run", "waits", "--image=busybox", "--overrides", of_other]);
        event(cluster, "FailedCreatePodSandBox", "runtime handler \"sandboxed\" does not exist");
        assert_eq!(cluster.get(&["pod", "waits"])["status"]["phase"], "Pending");
        let of_absent = r#"{"spec":{"runtimeClassName":"absent"}}"#;
        let absent = cluster.try_kubectl(&["run", "absent", "--image=busybox", "--overrides", of_absent]);
        let errors = String::from_utf8_lossy(&absent.stderr);
        assert!(!absent.status.success() && errors.contains("RuntimeClass \"absent\" not found"), "{errors}");
    });
}

#[test]
fn unauthenticated_and_unauthorized_requests_are_rejected() {
    with_cluster(|_, cluster| {
        let output = cluster.try_kubectl(&["get", "pods", "--as=jane"]);
        assert!(!output.status.success());
        let output = cluster.try_kubectl(&["get", "pods", "--token=nonsense", "--kubeconfig=/dev/null"]);
        assert!(!output.status.success());
    });
}

fn up(machine: &Machine, more: &[&str]) -> Output {
    let path = |name: &str| machine.path(name).to_str().unwrap().to_owned();
    Command::new(Machine::coracle())
        .args([
            "up",
            "--state-dir",
            &path("state"),
            "--run-dir",
            &path("run"),
            "--pod-log-dir",
            &path("logs"),
        ])
        .args(["--cgroup-root", &format!("/{}", machine.name())])
        .args(more)
        .output()
        .unwrap()
}

/// Asserts a failure with one line on standard error that contains all of `says`.
fn one_sentence(output: &Output, says: &[&str]) {
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{errors}");
    let sentence = errors.lines().last().unwrap_or_default();
    assert!(sentence.starts_with("coracle: "), "{errors}");
    for text in says {
        assert!(sentence.contains(text), "{text:?} is not in: {sentence}");
    }
}

#[test]
fn a_failed_start_reports_the_cause_and_leaves_nothing() {
    on_a_machine(|machine| {
        let before = Trace::of(machine);
        let taken = std::net::TcpListener::bind("0.0.0.0:6443").unwrap();
        one_sentence(&up(machine, &[]), &["6443", "in use"]);
        drop(taken);
        let file = machine.path("wrong.toml");
        fs::write(&file, "[node]\nbrigde = \"x\"\n").unwrap();
        one_sentence(&up(machine, &["--config", file.to_str().unwrap()]), &["wrong.toml", "brigde"]);
        for (cidr, says) in [
            ("10.42.0.0/28", ["cluster-cidr 10.42.0.0/28 is smaller", "a /24 (node-cidr-mask-size-ipv4)"]),
            ("fd42::/72", ["cluster-cidr fd42::/72 is smaller", "a /64 (node-cidr-mask-size-ipv6)"]),
            (
                "10.0.0.0/8",
                ["cluster-cidr 10.0.0.0/8 and service-cidr 10.43.0.0/16 overlap", "address of a service"],
            ),
        ] {
            one_sentence(&up(machine, &["--cluster-cidr", cidr]), &says);
        }
        let left: Vec<String> = Trace::of(machine).since(&before).into_iter().map(str::to_owned).collect();
        assert!(left.iter().all(|l| l.starts_with("file ")), "{left:?}");
    });
}

#[test]
fn a_foreign_bridge_with_the_same_name_is_refused_and_unchanged() {
    on_a_machine(|machine| {
        let ip = |arguments: &[&str]| {
            let output = Command::new("ip").args(arguments).output().unwrap();
            assert!(output.status.success(), "ip {arguments:?}");
            String::from_utf8(output.stdout).unwrap()
        };
        ip(&["link", "add", "theirs0", "address", "0a:00:00:00:00:01", "type", "bridge"]);
        ip(&["addr", "add", "192.0.2.1/24", "dev", "theirs0"]);
        ip(&["link", "set", "theirs0", "up"]);
        let before = ip(&["addr"]);
        let path = |name: &str| machine.path(name).to_str().unwrap().to_owned();
        let listen = format!("unix://{}", path("cri.sock"));
        let places =
            ["--bridge", "theirs0", "--cgroup-root", &format!("/{}", machine.name())].map(str::to_owned);
        let output = Command::new(Machine::coracle())
            .args(["runtime", "--root", &path("state"), "--state", &path("run"), "--listen", &listen])
            .args(["--cni-conf-dir", ""])
            .args(&places)
            .output()
            .unwrap();
        one_sentence(
            &output,
            &["theirs0 exists and was not made by coracle", "--bridge", "ip link delete theirs0"],
        );
        assert_eq!(ip(&["addr"]), before);
        let down = Command::new(Machine::coracle())
            .args(["down", "--state-dir", &path("state"), "--run-dir", &path("run")])
            .args(&places)
            .output()
            .unwrap();
        assert!(down.status.success(), "{}", String::from_utf8_lossy(&down.stderr));
        assert_eq!(ip(&["addr"]), before);
    });
}

#[test]
fn a_second_node_with_the_same_bridge_is_refused() {
    with_cluster(|machine, _cluster| {
        let path = |name: &str| machine.path(name).to_str().unwrap().to_owned();
        let output = Command::new(Machine::coracle())
            .args(["runtime", "--root", &path("second"), "--state", &path("second-run")])
            .args(["--listen", &format!("unix://{}", path("second.sock")), "--cni-conf-dir", ""])
            .args(["--cgroup-root", &format!("/{}", machine.name()), "--nft-table", "second"])
            .output()
            .unwrap();
        one_sentence(&output, &["the bridge coracle0 is in use by another runtime or agent", "--bridge"]);
    });
}

#[test]
fn a_second_node_on_the_same_directories_is_refused() {
    with_cluster(|machine, cluster| {
        one_sentence(&up(machine, &[]), &["in use by process", &cluster.pid().to_string()]);
    });
}

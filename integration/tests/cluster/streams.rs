//! `kubectl logs`, `exec`, `attach`, `cp` and `port-forward`, through the API server to the node.

use std::fs;
use std::io::{Read, Write};
use std::process::{Command, Stdio};

use coracle_integration::{Cluster, Lines, Machine, eventually, http_get, on_a_machine};

const PODS: &str = r#"
{"apiVersion":"v1","kind":"Pod","metadata":{"name":"web"},"spec":{"containers":[{"name":"c","image":"nginx"}]}}
---
{"apiVersion":"v1","kind":"Pod","metadata":{"name":"cat"},"spec":{"terminationGracePeriodSeconds":0,"containers":[
 {"name":"c","image":"busybox","stdin":true,"command":["cat"]}]}}
---
{"apiVersion":"v1","kind":"Pod","metadata":{"name":"count"},"spec":{"terminationGracePeriodSeconds":0,"containers":[
 {"name":"c","image":"busybox","command":["sh","-c","echo one; echo two; echo three; if [ ! -e /m/x ]; then touch /m/x; exit 1; fi; sleep 1; echo four; sleep 1000"],
  "volumeMounts":[{"name":"m","mountPath":"/m"}]}],"volumes":[{"name":"m","emptyDir":{}}]}}"#;

fn with_pods(test: impl FnOnce(&mut Machine, &Cluster) + Send + 'static) {
    on_a_machine(|machine| {
        let mirrors = machine.start_registry();
        let cluster = Cluster::up(machine, &mirrors);
        cluster.apply(PODS);
        cluster.kubectl(&["wait", "pod/web", "pod/cat", "--for=condition=Ready", "--timeout=300s"]);
        test(machine, &cluster);
    });
}

#[test]
fn exec_carries_input_output_errors_and_exit_codes() {
    with_pods(|_, cluster| {
        let echoed = cluster.kubectl_of("1.37", &["exec", "-i", "web", "--", "cat"], "through\nand back\n");
        assert_eq!(String::from_utf8(echoed.stdout).unwrap(), "through\nand back\n");
        let both = cluster.try_kubectl(&["exec", "web", "--", "sh", "-c", "echo out; echo err >&2; exit 9"]);
        assert_eq!(both.stdout, b"out\n");
        assert!(String::from_utf8_lossy(&both.stderr).starts_with("err\n"));
        assert_eq!(both.status.code(), Some(9));
        let large =
            cluster.kubectl(&["exec", "web", "--", "sh", "-c", "head -c 3000000 /dev/zero | tr '\\0' x"]);
        assert_eq!(large.len(), 3_000_000);
        let missing = cluster.try_kubectl(&["exec", "web", "--", "/no/such"]);
        assert!(!missing.status.success());
        for version in ["1.32", "1.35"] {
            let output = cluster.kubectl_of(version, &["exec", "web", "--", "echo", "hello"], "");
            assert_eq!(output.stdout, b"hello\n", "kubectl {version}");
        }
    });
}

#[test]
fn exec_with_tty_has_a_terminal() {
    with_pods(|_, cluster| {
        let script = "'test -t 0 && test -t 1 && echo terminal; exit 4'";
        let output = cluster.in_a_terminal(&["exec", "-it", "web", "--", "sh", "-c", script]);
        assert!(String::from_utf8_lossy(&output.stdout).contains("terminal"), "{output:?}");
        assert_eq!(output.status.code(), Some(4));
    });
}

#[test]
fn debug_adds_a_container_with_the_targets_processes() {
    with_pods(|machine, cluster| {
        let image = ["--image=busybox", "--image-pull-policy=IfNotPresent"];
        let look = [&["debug", "web"][..], &image, &["--target=c", "-c", "look", "--", "ps"]].concat();
        cluster.kubectl(&look);
        let processes = eventually("the output of the ephemeral container", 60, || {
            let output = cluster.try_kubectl(&["logs", "web", "-c", "look"]);
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            text.contains("nginx").then_some(text)
        });
        assert!(processes.lines().any(|line| line.contains("ps")), "{processes}");
        let ended = eventually("the ephemeral container to terminate", 60, || {
            let pod = &cluster.get(&["pod", "web"]);
            let status = pod["status"]["ephemeralContainerStatuses"][0].clone();
            status["state"]["terminated"].is_object().then_some((status, pod["status"].clone()))
        });
        assert_eq!(
            (&ended.0["name"], &ended.0["state"]["terminated"]["exitCode"]),
            (&"look".into(), &0.into())
        );
        assert_eq!(ended.1["containerStatuses"][0]["restartCount"], 0);

        // An interactive shell: `script` gives kubectl a terminal, which buffers the input until the shell reads it.
        let command =
            format!("{} debug -it web {} --target=c", Machine::kubectl("1.37").display(), image.join(" "));
        let mut child = Command::new("script")
            .args(["-qec", &command, "/dev/null"])
            .env("KUBECONFIG", machine.path("state/admin.kubeconfig"))
            .env("HOME", machine.path(""))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut input = child.stdin.take().unwrap();
        writeln!(input, "test -t 0 && cat /proc/1/comm && exit 5").unwrap();
        let mut printed = String::new();
        child.stdout.take().unwrap().read_to_string(&mut printed).unwrap();
        drop(input);
        child.wait().unwrap();
        assert!(printed.lines().any(|line| line.trim() == "nginx"), "{printed}");
        let codes = eventually("both containers to terminate", 60, || {
            let pod = cluster.get(&["pod", "web"]);
            let all = pod["status"]["ephemeralContainerStatuses"].as_array()?.clone();
            let codes = all.iter().map(|one| one["state"]["terminated"]["exitCode"].as_i64());
            codes.collect::<Option<Vec<_>>>().filter(|codes| codes.len() == 2)
        });
        assert_eq!(codes, [0, 5]);

        let missing =
            [&["debug", "cat"][..], &image, &["--target=missing", "-c", "late", "--", "true"]].concat();
        let refused = cluster.try_kubectl(&missing);
        let error = String::from_utf8_lossy(&refused.stderr);
        assert!(error.contains("targetContainerName: Not found: \"missing\""), "{error}");
    });
}

#[test]
fn attach_reaches_the_containers_process() {
    with_pods(|machine, _| {
        let mut child = Command::new(Machine::kubectl("1.37"))
            .args(["attach", "-i", "cat"])
            .env("KUBECONFIG", machine.path("state/admin.kubeconfig"))
            .env("HOME", machine.path(""))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut input = child.stdin.take().unwrap();
        writeln!(input, "marco").unwrap();
        let mut lines = Lines::of(child.stdout.take().unwrap());
        assert!(lines.any(|line| line.contains("marco")), "attach ended without output");
        drop(input);
        child.kill().ok();
        child.wait().unwrap();
    });
}

#[test]
fn cp_copies_in_both_directions() {
    with_pods(|machine, cluster| {
        let (there, back) = (machine.path("there"), machine.path("back"));
        let content: Vec<u8> = (0..200_000u32).flat_map(u32::to_le_bytes).collect();
        fs::write(&there, &content).unwrap();
        cluster.kubectl(&["cp", there.to_str().unwrap(), "web:/tmp/file"]);
        cluster.kubectl(&["cp", "web:/tmp/file", back.to_str().unwrap()]);
        assert_eq!(fs::read(&back).unwrap(), content);
    });
}

#[test]
fn ports_are_forwarded() {
    with_pods(|machine, _| {
        let mut child = Command::new(Machine::kubectl("1.37"))
            .args(["port-forward", "pod/web", "8090:80"])
            .env("KUBECONFIG", machine.path("state/admin.kubeconfig"))
            .env("HOME", machine.path(""))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        for _ in 0..3 {
            let text = eventually("the forwarded page", 10, || http_get("127.0.0.1:8090", "/"));
            assert!(text.contains("Welcome to nginx"), "{text}");
        }
        child.kill().ok();
        child.wait().unwrap();
    });
}

#[test]
fn logs_support_follow_tail_previous_and_timestamps() {
    with_pods(|_, cluster| {
        let none = cluster.try_kubectl(&["logs", "web", "--previous"]);
        let errors = String::from_utf8_lossy(&none.stderr).into_owned();
        assert!(
            errors.contains("previous terminated container") && errors.contains("(BadRequest)"),
            "{errors}"
        );
        eventually("the second run", 60, || {
            let pod = cluster.get(&["pod", "count"]);
            let status = &pod["status"]["containerStatuses"][0];
            status["restartCount"] == 1 && !status["state"]["running"].is_null()
        });
        assert_eq!(cluster.kubectl(&["logs", "count", "--previous"]), "one\ntwo\nthree\n");
        eventually("the last line", 10, || cluster.kubectl(&["logs", "count"]).ends_with("four\n"));
        assert_eq!(cluster.kubectl(&["logs", "count", "--tail=2"]), "three\nfour\n");
        assert_eq!(cluster.kubectl(&["logs", "count", "--tail=1", "--since=1h"]), "four\n");
        let stamped = cluster.kubectl(&["logs", "count", "--timestamps", "--tail=1"]);
        assert!(stamped.starts_with("20") && stamped.ends_with("Z four\n"), "{stamped}");
    });
}

#[test]
fn following_a_log_ends_with_the_container() {
    with_pods(|_, cluster| {
        let manifest = r#"{"apiVersion":"v1","kind":"Pod","metadata":{"name":"short"},"spec":{"restartPolicy":"Never",
            "containers":[{"name":"c","image":"busybox","command":["sh","-c","for i in 1 2 3 4 5; do echo $i; sleep 0.3; done"]}]}}"#;
        cluster.apply(manifest);
        eventually("the container to start", 30, || cluster.try_kubectl(&["logs", "short"]).status.success());
        assert_eq!(cluster.kubectl(&["logs", "-f", "short"]), "1\n2\n3\n4\n5\n");
    });
}

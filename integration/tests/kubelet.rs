//! Kubernetes' published kubelet with `coracle runtime`, as a node of our control plane.
//!
//! `scripts/test-kubelet` builds the kubelet, which takes minutes, and runs these tests.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test panics")]

use std::collections::BTreeSet;
use std::io::Read;
use std::process::Child;

use coracle_integration::{
    KubeletNode, Lines, Machine, Nodes, checked_stdout, eventually, has_condition, http_get, on_a_machine,
};
use serde_json::{Value, json};

/// Runs a test with a control plane and one node with Kubernetes' kubelet.
fn on_a_kubelet_node(settings: Value, test: impl FnOnce(&Nodes, &mut KubeletNode) + Send + 'static) {
    on_a_machine(move |machine: &mut Machine| {
        let nodes = Nodes::control_plane_only(machine, "10.42.0.0/16", &[]);
        let mut node = KubeletNode::join(&nodes, 1, &settings);
        test(&nodes, &mut node);
    });
}

/// A pod with these fields and a short grace period.
fn pod(name: &str, spec: &Value) -> String {
    let mut spec = spec.clone();
    spec["terminationGracePeriodSeconds"] = 1.into();
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}).to_string()
}

/// A busybox container that runs a shell script.
fn shell(name: &str, script: &str) -> Value {
    json!({"name": name, "image": "busybox", "imagePullPolicy": "IfNotPresent", "command": ["sh", "-c", script]})
}

fn ready(pod: &Value) -> Option<()> {
    has_condition(pod, "Ready", "True").then_some(())
}

fn state(pod: &Value, container: usize) -> &Value {
    &pod["status"]["containerStatuses"][container]["state"]
}

#[test]
#[ignore = "needs Kubernetes' kubelet: scripts/test-kubelet builds it and runs this"]
fn the_kubelet_runs_pods_as_specified() {
    // The kubelet reads all metrics from the runtime.
    let settings = json!({"featureGates": {"PodAndContainerStatsFromCRI": true}});
    on_a_kubelet_node(settings, |nodes, node| {
        let object = nodes.get(&["node", node.name()]);
        assert_eq!(object["status"]["nodeInfo"]["containerRuntimeVersion"], "coracle://0.1.0");
        a_deployment_serves_requests(nodes);
        containers_start_and_stop_in_order(nodes);
        terminations_are_reported(nodes);
        a_pod_in_a_user_namespace_has_its_volumes(nodes);
        metrics_appear(nodes, node);
        // The kubelet removes dead containers once a minute.
        eventually("all to be removed", 120, || node.crictl().crictl(&["pods", "-q"]).is_empty());
    });
}

/// HTTP readiness probe, TCP liveness probe, logs, exec, port-forward, and an address in the node's pod CIDR.
fn a_deployment_serves_requests(nodes: &Nodes) {
    let container = json!({"name": "nginx", "image": "nginx", "imagePullPolicy": "IfNotPresent",
        "ports": [{"containerPort": 80}],
        "readinessProbe": {"httpGet": {"path": "/", "port": 80}, "periodSeconds": 1},
        "livenessProbe": {"tcpSocket": {"port": 80}, "periodSeconds": 1}});
    let template = json!({"metadata": {"labels": {"app": "web"}}, "spec": {"containers": [container]}});
    let spec = json!({"replicas": 2, "selector": {"matchLabels": {"app": "web"}}, "template": template});
    let web =
        json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "web"}, "spec": spec});
    nodes.apply(&web.to_string());
    nodes.kubectl(&["rollout", "status", "deployment", "web", "--timeout=240s"]);
    let pods = nodes.get(&["pods", "-l", "app=web"]);
    for pod in pods["items"].as_array().unwrap() {
        assert!(pod["status"]["podIP"].as_str().unwrap().starts_with("10.42."), "{pod}");
    }
    let name = pods["items"][0]["metadata"]["name"].as_str().unwrap();
    assert_eq!(nodes.kubectl(&["exec", name, "--", "echo", "hello"]), "hello\n");
    let ended = nodes.try_kubectl(&["exec", name, "--", "sh", "-c", "exit 7"]);
    assert_eq!(ended.status.code(), Some(7));
    let terminal = nodes.in_a_terminal(&["exec", "-it", name, "--", "tty"]);
    assert!(checked_stdout(&terminal).contains("/dev/pts/0"));
    let forward = Forward::to(nodes, name);
    assert!(forward.get("/").contains("200 OK"));
    eventually("the request in the log", 20, || {
        nodes.kubectl(&["logs", name]).contains("GET / HTTP/1.0\" 200")
    });
    nodes.kubectl(&["delete", "deployment", "web"]);
}

/// `kubectl port-forward`, killed when it is dropped.
struct Forward {
    process: Child,
    /// Output of kubectl. kubectl exits if its output is not read.
    _lines: Lines,
    port: u16,
}

impl Forward {
    fn to(nodes: &Nodes, pod: &str) -> Self {
        let mut process = nodes.start(&["port-forward", pod, ":80"]);
        let mut lines = Lines::of(process.stdout.take().unwrap());
        let line = lines.find(|line| line.contains("127.0.0.1:")).expect("an address of port-forward");
        let address = line.split_whitespace().find_map(|word| word.strip_prefix("127.0.0.1:"));
        let port = address.unwrap().parse().unwrap();
        Self { process, _lines: lines, port }
    }

    fn get(&self, path: &str) -> String {
        http_get(("127.0.0.1", self.port), path).unwrap()
    }
}

impl Drop for Forward {
    fn drop(&mut self) {
        self.process.kill().ok();
        self.process.wait().ok();
    }
}

/// Init containers, a sidecar, lifecycle hooks, an exec startup probe and an ephemeral container.
fn containers_start_and_stop_in_order(nodes: &Nodes) {
    let mount = json!([{"name": "work", "mountPath": "/work"}]);
    let with = |mut container: Value, more: &[(&str, Value)]| {
        container["volumeMounts"] = mount.clone();
        more.iter().for_each(|(field, value)| container[*field] = value.clone());
        container
    };
    let hook = |words: &str| json!({"exec": {"command": ["sh", "-c", words]}});
    let first = with(shell("first", "echo first >/work/order"), &[]);
    let side = with(
        shell("side", "echo side >>/work/order; exec sleep 1000"),
        &[("restartPolicy", "Always".into())],
    );
    let hooks =
        json!({"postStart": hook("echo hook >/work/hook"), "preStop": hook("echo bye >/proc/1/fd/1")});
    let probe = json!({"exec": {"command": ["cat", "/work/hook"]}, "periodSeconds": 1});
    let main = with(
        shell("main", "echo main >>/work/order; trap 'exit 0' TERM; while true; do sleep 0.1; done"),
        &[("lifecycle", hooks), ("startupProbe", probe)],
    );
    let spec = json!({"initContainers": [first, side], "containers": [main],
        "volumes": [{"name": "work", "emptyDir": {}}]});
    nodes.apply(&pod("order", &spec));
    nodes.until_pod("order", "to be Ready", ready);
    let order = nodes.kubectl(&["exec", "order", "-c", "main", "--", "cat", "/work/order"]);
    assert_eq!(order, "first\nside\nmain\n");

    let looking = [
        "debug",
        "order",
        "--image=busybox",
        "--image-pull-policy=IfNotPresent",
        "--target=main",
        "-c",
        "look",
    ];
    nodes.kubectl(&[&looking[..], &["--", "sh", "-c", "ps; exec sleep 1000"]].concat());
    eventually("the output of the ephemeral container", 60, || {
        let output = nodes.try_kubectl(&["logs", "order", "-c", "look"]);
        String::from_utf8_lossy(&output.stdout).contains("/work/order")
    });
    let mut log = nodes.start(&["logs", "-f", "order", "-c", "main"]);
    nodes.kubectl(&["delete", "pod", "order"]);
    let mut text = String::new();
    log.stdout.take().unwrap().read_to_string(&mut text).unwrap();
    log.wait().unwrap();
    assert!(text.contains("bye"), "no hook before the end: {text:?}");
}

/// Termination messages, exit codes, restarts, a failed probe, OOM kills, and the error for a log that does not exist yet.
fn terminations_are_reported(nodes: &Nodes) {
    let fails = shell("c", "echo why >/dev/termination-log; exit 3");
    nodes.apply(&pod("fails", &json!({"restartPolicy": "OnFailure", "containers": [fails]})));
    let terminated = nodes.until_pod("fails", "a restart", |pod| {
        let status = &pod["status"]["containerStatuses"][0];
        let before = status["lastState"]["terminated"].clone();
        (status["restartCount"].as_u64()? > 0 && before.is_object()).then_some(before)
    });
    assert_eq!(
        (&terminated["exitCode"], &terminated["message"]),
        (&json!(3), &json!("why\n")),
        "{terminated}"
    );

    let mut greedy = shell("c", "head -c 200m /dev/zero | tail");
    greedy["resources"] = json!({"limits": {"memory": "20Mi"}});
    nodes.apply(&pod("greedy", &json!({"restartPolicy": "Never", "containers": [greedy]})));
    let terminated = nodes.until_pod("greedy", "its end", |pod| {
        Some(state(pod, 0)["terminated"].clone()).filter(Value::is_object)
    });
    assert_eq!(
        (&terminated["exitCode"], &terminated["reason"]),
        (&json!(137), &json!("OOMKilled")),
        "{terminated}"
    );

    let mut ill = shell("c", "exec sleep 1000");
    ill["livenessProbe"] = json!({"exec": {"command": ["false"]}, "periodSeconds": 1, "failureThreshold": 1});
    nodes.apply(&pod("ill", &json!({"containers": [ill]})));
    nodes.until_pod("ill", "a restart after its probe", |pod| {
        (pod["status"]["containerStatuses"][0]["restartCount"].as_u64()? > 0).then_some(())
    });

    let missing = json!({"name": "c", "image": "busybox:none"});
    nodes.apply(&pod("missing", &json!({"containers": [missing]})));
    nodes.until_pod("missing", "its image not to be found", |pod| {
        let why = state(pod, 0)["waiting"]["reason"].as_str()?;
        ["ErrImagePull", "ImagePullBackOff"].contains(&why).then_some(())
    });
    let refused = nodes.try_kubectl(&["logs", "missing"]);
    let errors = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(errors.contains("is waiting to start"), "{errors}");
    nodes.kubectl(&["delete", "pod", "fails", "greedy", "ill", "missing"]);
}

/// A user namespace with a volume, a service account token and an image volume.
fn a_pod_in_a_user_namespace_has_its_volumes(nodes: &Nodes) {
    let mut container = shell("c", "touch /data/mine && exec sleep 1000");
    container["volumeMounts"] =
        json!([{"name": "data", "mountPath": "/data"}, {"name": "image", "mountPath": "/image"}]);
    let volumes = json!([{"name": "data", "emptyDir": {}},
        {"name": "image", "image": {"reference": "docker.io/library/nginx:latest", "pullPolicy": "IfNotPresent"}}]);
    nodes.apply(&pod("apart", &json!({"hostUsers": false, "containers": [container], "volumes": volumes})));
    nodes.until_pod("apart", "to be Ready", ready);
    let script = "cat /proc/self/uid_map; stat -c %u /data/mine; ls /image/usr/sbin/nginx; cd /var/run/secrets; \
                  head -c 3 kubernetes.io/serviceaccount/token";
    let output = nodes.kubectl(&["exec", "apart", "--", "sh", "-c", script]);
    let words: Vec<&str> = output.split_whitespace().collect();
    let [inside, outside, length, owner, image, token] = words.as_slice() else { panic!("{output}") };
    assert_eq!((*inside, *length, *owner), ("0", "65536", "0"), "{output}");
    assert!(outside.parse::<u32>().unwrap() >= 65536, "{output}");
    assert_eq!((*image, *token), ("/image/usr/sbin/nginx", "eyJ"), "{output}");
    nodes.kubectl(&["delete", "pod", "apart"]);
}

/// `/stats/summary` and `/metrics/cadvisor`, which the kubelet builds from the runtime's metrics.
fn metrics_appear(nodes: &Nodes, node: &KubeletNode) {
    let mut busy = shell("c", "dd if=/dev/zero of=/file bs=1k count=100; while true; do :; done");
    busy["resources"] = json!({"limits": {"cpu": "100m", "memory": "64Mi"}});
    nodes.apply(&pod("busy", &json!({"containers": [busy]})));
    nodes.until_pod("busy", "to be Ready", ready);
    eventually("the pod's metrics", 60, || {
        let summary: Value = serde_json::from_str(&node.read_only("/stats/summary")?).ok()?;
        let pod = summary["pods"].as_array()?.iter().find(|pod| pod["podRef"]["name"] == "busy")?;
        let container = &pod["containers"][0];
        let all = [
            &pod["cpu"]["usageNanoCores"],
            &pod["memory"]["workingSetBytes"],
            &pod["process_stats"]["process_count"],
            &container["cpu"]["usageCoreNanoSeconds"],
            &container["memory"]["workingSetBytes"],
            &container["rootfs"]["usedBytes"],
        ];
        all.iter().all(|value| value.as_u64().is_some_and(|value| value > 0)).then_some(())
    });
    let metrics = node.read_only("/metrics/cadvisor").unwrap();
    for name in [
        "container_cpu_usage_seconds_total",
        "container_memory_working_set_bytes",
        "container_network_receive_bytes_total",
    ] {
        let has = metrics.lines().any(|line| line.starts_with(name) && line.contains("pod=\"busy\""));
        assert!(has, "no {name} of the pod in\n{metrics}");
    }
    nodes.kubectl(&["delete", "pod", "busy"]);
}

#[test]
#[ignore = "needs Kubernetes' kubelet: scripts/test-kubelet builds it and runs this"]
fn pods_continue_while_kubelet_and_runtime_are_killed() {
    // CRI events instead of polling (EventedPLEG).
    let settings = json!({"featureGates": {"EventedPLEG": true}});
    on_a_kubelet_node(settings, |nodes, node| {
        nodes.apply(&pod("stays", &json!({"containers": [shell("c", "exec sleep 100000")]})));
        let brief = shell("c", "while [ ! -e /tmp/end ]; do sleep 0.1; done; exit 4");
        nodes.apply(&pod("brief", &json!({"restartPolicy": "Never", "containers": [brief]})));
        ["stays", "brief"].iter().for_each(|name| nodes.until_pod(name, "to be Ready", ready));
        let before = running(node);
        assert_eq!(before.len(), 2);

        node.kill_kubelet();
        node.kill_runtime();
        node.start_runtime();
        node.start_kubelet();
        eventually("the kubelet to answer", 60, || {
            nodes.try_kubectl(&["exec", "brief", "--", "true"]).status.success()
        });
        assert_eq!(running(node), before, "containers were created again");

        node.kill_runtime();
        node.start_runtime();
        eventually("the runtime to answer", 60, || {
            nodes.try_kubectl(&["exec", "brief", "--", "touch", "/tmp/end"]).status.success()
        });
        let terminated = nodes.until_pod("brief", "its end", |pod| {
            Some(state(pod, 0)["terminated"].clone()).filter(Value::is_object)
        });
        assert_eq!(terminated["exitCode"], 4);
        assert_eq!(nodes.get(&["pod", "stays"])["status"]["containerStatuses"][0]["restartCount"], 0);
        nodes.kubectl(&["delete", "pod", "stays", "brief"]);
    });
}

/// Ids of running containers.
fn running(node: &KubeletNode) -> BTreeSet<String> {
    node.crictl().crictl(&["ps", "-q"]).lines().map(str::to_owned).collect()
}

#[test]
#[ignore = "needs Kubernetes' kubelet: scripts/test-kubelet builds it and runs this"]
fn logs_are_rotated_and_unused_images_removed() {
    let settings = json!({"containerLogMaxSize": "10Ki", "containerLogMaxFiles": 3,
        "containerLogMonitorInterval": "3s"});
    on_a_kubelet_node(settings, |nodes, node| {
        let words = "i=0; while true; do i=$((i+1)); echo line $i of many; sleep 0.01; done";
        nodes.apply(&pod("writes", &json!({"containers": [shell("c", words)]})));
        nodes.until_pod("writes", "to be Ready", ready);
        let uid = nodes.get(&["pod", "writes"])["metadata"]["uid"].as_str().unwrap().to_owned();
        let directory = node.path(&format!("logs/default_writes_{uid}/c"));
        let files = || -> Vec<String> {
            let entries = std::fs::read_dir(&directory).into_iter().flatten().flatten();
            entries.map(|entry| entry.file_name().into_string().unwrap()).collect()
        };
        // The kubelet compresses the second newest log file after a rotation and keeps three files.
        eventually("a compressed log", 60, || files().iter().any(|name| name.ends_with(".gz")));
        assert!(files().len() <= 4, "{:?}", files());
        assert!(nodes.kubectl(&["logs", "writes", "--tail=1"]).contains("of many"));

        nodes.apply(&pod(
            "once",
            &json!({"restartPolicy": "Never", "containers": [
            {"name": "c", "image": "nginx", "imagePullPolicy": "IfNotPresent", "command": ["true"]}]}),
        ));
        nodes.until_pod("once", "its end", |pod| (pod["status"]["phase"] == "Succeeded").then_some(()));
        nodes.kubectl(&["delete", "pod", "once"]);
        assert!(node.crictl().crictl(&["images"]).contains("nginx"));
        node.kill_kubelet();
        // The threshold is 0 % now: the kubelet removes unused images.
        let short = json!({"nodefs.available": "99%", "imagefs.available": "99%"});
        node.set(&json!({"evictionHard": short, "imageMinimumGCAge": "1s"}));
        node.start_kubelet();
        eventually("the unused image to be removed", 120, || {
            !node.crictl().crictl(&["images"]).contains("nginx")
        });
        let status = nodes.until_pod("writes", "to be evicted", |pod| {
            (pod["status"]["phase"] == "Failed").then(|| pod["status"].clone())
        });
        assert_eq!(status["reason"], "Evicted", "{status}");
    });
}

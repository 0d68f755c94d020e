//! Pods that fill the node's disk, and commands that fill the node's memory with their output.

use coracle_integration::{Cluster, eventually, on_a_cluster, process_status};
use coracle_testing::skip;
use serde_json::{Value, json};

use super::store::{has_project_quotas, on_disk, with_ext4, with_project_quotas};

/// Creates a pod with one container that runs the script, with more fields of the pod and of the container.
fn create(cluster: &Cluster, name: &str, script: &str, pod: &Value, container: &Value) {
    let mut first = json!({"name": "c", "image": "busybox", "command": ["sh", "-c", script]});
    first.as_object_mut().unwrap().extend(container.as_object().unwrap().clone());
    let mut spec = json!({"containers": [first]});
    spec.as_object_mut().unwrap().extend(pod.as_object().unwrap().clone());
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec});
    cluster.apply(&pod.to_string());
}

/// Waits until the pod is evicted. Returns the status of the pod.
fn evicted(cluster: &Cluster, name: &str) -> Value {
    eventually(&format!("{name} to be evicted"), 90, || {
        let status = cluster.get(&["pod", name])["status"].clone();
        (status["phase"] == "Failed" && status["reason"] == "Evicted").then_some(status)
    })
}

#[test]
fn a_pod_that_fills_the_disk_beyond_its_limits_is_evicted() {
    on_a_cluster(|_, cluster| {
        let limits = json!({"resources": {"limits": {"ephemeral-storage": "4Mi"}}});
        let write = |path: &str| format!("dd if=/dev/zero of={path} bs=1M count=8; sleep 1000");
        let volume = |limit: Value| json!({"volumes": [{"name": "v", "emptyDir": limit}]});
        let mounted = json!({"volumeMounts": [{"name": "v", "mountPath": "/v"}]});
        let both = |one: &Value, other: &Value| {
            let mut both = one.clone();
            both.as_object_mut().unwrap().extend(other.as_object().unwrap().clone());
            both
        };
        create(cluster, "layer", &write("/file"), &json!({}), &limits);
        create(cluster, "hosts", &write("/etc/hosts"), &json!({}), &limits);
        create(cluster, "resolver", &write("/etc/resolv.conf"), &json!({}), &limits);
        create(cluster, "name", &write("/etc/hostname"), &json!({}), &limits);
        create(cluster, "message", &write("/dev/termination-log"), &json!({}), &limits);
        create(cluster, "volume", &write("/v/file"), &volume(json!({"sizeLimit": "4Mi"})), &mounted);
        create(cluster, "sum", &write("/v/file"), &volume(json!({})), &both(&mounted, &limits));
        create(cluster, "free", &write("/v/file"), &volume(json!({})), &mounted);
        create(cluster, "within", "echo x > /file; sleep 1000", &json!({}), &limits);
        let pod = "Pod ephemeral local storage usage exceeds the total limit of containers 4Mi. ";
        for (name, message) in [
            ("layer", pod),
            // CVE-2020-8557: the size of these files counts as disk usage of the pod.
            ("hosts", pod),
            ("resolver", pod),
            ("name", pod),
            ("message", pod),
            ("volume", "Usage of EmptyDir volume \"v\" exceeds the limit \"4Mi\". "),
            ("sum", pod),
        ] {
            let status = evicted(cluster, name);
            assert_eq!(status["message"], message, "{name}");
            let events =
                ["events", "--field-selector", &format!("involvedObject.name={name},reason=Evicted")];
            let events = eventually("the event", 30, || {
                let events = cluster.get(&events)["items"].clone();
                (!events.as_array().unwrap().is_empty()).then_some(events)
            });
            assert_eq!((&events[0]["type"], &events[0]["message"]), (&json!("Warning"), &json!(message)));
        }
        for name in ["free", "within"] {
            assert_eq!(cluster.get(&["pod", name])["status"]["phase"], "Running", "{name}");
        }
    });
}

/// An `emptyDir` without a limit is on the disk of the store, so a pod can fill this disk.
#[test]
fn a_pod_that_fills_the_disk_of_the_store_is_evicted_and_the_store_recovers_without_a_restart() {
    on_disk(with_ext4, |machine| {
        let mirrors = machine.start_registry();
        let flags = ["--image-gc-high-threshold", "100", "--eviction-hard", "nodefs.available<15%"];
        let cluster = Cluster::up_with(machine, &mirrors, &flags);
        create(&cluster, "calm", "sleep 100000", &json!({}), &json!({}));
        let before = eventually("the calm pod to run", 120, || {
            let status = cluster.get(&["pod", "calm"])["status"].clone();
            (status["phase"] == "Running").then_some(status)
        });
        // The container writes until the disk is full, and then takes all space that others free.
        let write = "while true; do cat /dev/zero >> /v/file; sleep 1; done";
        let volume = json!({"volumes": [{"name": "v", "emptyDir": {}}]});
        let mounted = json!({"volumeMounts": [{"name": "v", "mountPath": "/v"}]});
        create(&cluster, "greedy", write, &volume, &mounted);
        let status = eventually("greedy to be evicted", 300, || {
            let status = cluster.get(&["pod", "greedy"])["status"].clone();
            (status["phase"] == "Failed" && status["reason"] == "Evicted").then_some(status)
        });
        let message = status["message"].as_str().unwrap_or_default();
        let begin = "The node was low on resource: ephemeral-storage. Threshold quantity: ";
        assert!(message.starts_with(begin), "{message}");
        eventually("a create", 120, || {
            cluster.try_kubectl(&["create", "configmap", "after", "--from-literal=a=b"]).status.success()
        });
        eventually("the readiness", 120, || {
            cluster.try_kubectl(&["get", "--raw", "/readyz"]).status.success()
        });
        let after = cluster.get(&["pod", "calm"])["status"].clone();
        assert_eq!(after["phase"], "Running", "{after}");
        let containers =
            [&before, &after].map(|status| status["containerStatuses"][0]["containerID"].clone());
        assert_eq!(containers[0], containers[1], "the calm pod was restarted");
        assert_eq!(after["containerStatuses"][0]["restartCount"], 0, "{after}");
    });
}

/// With project quotas, a pod fills the disk only up to the reserve, so the store accepts all writes.
#[test]
fn a_pod_with_many_volumes_does_not_fill_the_disk_of_the_store_if_it_has_project_quotas() {
    if !has_project_quotas() {
        skip!("the kernel has no project quotas of ext4");
    }
    on_disk(with_project_quotas, |machine| {
        let mirrors = machine.start_registry();
        let flags = ["--image-gc-high-threshold", "100", "--eviction-hard", "nodefs.available<15%"];
        let cluster = Cluster::up_with(machine, &mirrors, &flags);
        let write = "while true; do cat /dev/zero >> /v/file; cat /dev/zero >> /w/file; sleep 1; done";
        let volumes = json!({"volumes": [{"name": "v", "emptyDir": {}},
            {"name": "w", "emptyDir": {"sizeLimit": "1Ti"}}]});
        let mounted =
            json!({"volumeMounts": [{"name": "v", "mountPath": "/v"}, {"name": "w", "mountPath": "/w"}]});
        create(&cluster, "greedy", write, &volumes, &mounted);
        let mut created = 0;
        eventually("greedy to be evicted", 300, || {
            let made = cluster.try_kubectl(&["create", "configmap", &format!("during-{created}")]);
            let error = String::from_utf8_lossy(&made.stderr);
            assert!(!error.contains("database space exceeded"), "{error}");
            created += usize::from(made.status.success());
            let status = cluster.get(&["pod", "greedy"])["status"].clone();
            (status["phase"] == "Failed" && status["reason"] == "Evicted").then_some(())
        });
        assert!(created > 0);
    });
}

/// Number of containers of the pod `loud` with a probe whose output the runtime refused.
fn refused(cluster: &Cluster) -> usize {
    let output = cluster.try_kubectl(&["get", "--raw", "/api/v1/nodes/node-1/proxy/metrics/probes"]);
    let text = String::from_utf8_lossy(&output.stdout);
    let parts = ["prober_probe_total{", "pod=\"loud\"", "result=\"unknown\""];
    text.lines().filter(|line| parts.iter().all(|part| line.contains(part))).count()
}

#[test]
fn the_outputs_of_many_commands_at_once_take_bounded_memory() {
    on_a_cluster(|_, cluster| {
        // Twenty probes of one pod that write 15 MiB each and do not end: 300 MiB without a limit.
        let exec = json!({"exec": {"command": ["sh", "-c", "echo >/started; head -c 15728640 /dev/zero; sleep 60"]},
            "periodSeconds": 1, "timeoutSeconds": 50, "failureThreshold": 100});
        let loud = |number: usize| {
            json!({"name": format!("c{number}"), "image": "busybox", "command": ["sleep", "1000"],
                "livenessProbe": exec})
        };
        let containers: Vec<Value> = (0..20).map(loud).collect();
        let spec = json!({"terminationGracePeriodSeconds": 0, "containers": containers});
        let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "loud"}, "spec": spec});
        let before = process_status(cluster.pid(), "VmHWM");
        cluster.apply(&pod.to_string());
        eventually("the pod to run", 120, || {
            (cluster.get(&["pod", "loud"])["status"]["phase"] == "Running").then_some(())
        });
        for number in 0..20 {
            eventually(&format!("a probe of container {number}"), 120, || {
                let test = ["exec", "loud", "-c", &format!("c{number}"), "--", "test", "-e", "/started"];
                cluster.try_kubectl(&test).status.success()
            });
        }
        // The memory for the outputs of one pod is full with two of them, until their commands exceed the timeout.
        eventually("the outputs of the other commands to be refused", 120, || refused(cluster) >= 18);
        let grown = process_status(cluster.pid(), "VmHWM") - before;
        assert!(grown < 150 << 10, "the memory of the node grew by {grown} kB");
        // Another pod's small probes are not affected.
        let ready = json!({"readinessProbe": {"exec": {"command": ["echo", "ok"]}, "periodSeconds": 1}});
        create(cluster, "calm", "sleep 1000", &json!({}), &ready);
        eventually("the calm pod to be ready", 60, || {
            let status = cluster.get(&["pod", "calm"])["status"].clone();
            (status["containerStatuses"][0]["ready"] == true).then_some(())
        });
    });
}

/// In an earlier version, the agent read files of the container without a size limit.
#[test]
fn files_of_any_size_in_a_container_take_bounded_memory_of_the_node() {
    on_a_cluster(|_, cluster| {
        let before = process_status(cluster.pid(), "VmHWM");
        // The files have holes, so that they take no space on the disk.
        let script =
            "truncate -s 2G /etc/hosts /etc/passwd /etc/group /dev/termination-log && sleep 8 && exit 3";
        create(cluster, "large", script, &json!({}), &json!({}));
        // Each exec looks for the home directory of its user in /etc/passwd.
        eventually("an exec", 60, || {
            cluster.try_kubectl(&["exec", "large", "--", "test", "-s", "/etc/passwd"]).status.success()
        });
        let status = eventually("a second run", 60, || {
            let status = cluster.get(&["pod", "large"])["status"]["containerStatuses"][0].clone();
            (status["restartCount"].as_u64() > Some(0)).then_some(status)
        });
        let message = status["lastState"]["terminated"]["message"].as_str().unwrap_or_default();
        assert!(message.len() <= 4096, "a message of {} bytes", message.len());
        let grown = process_status(cluster.pid(), "VmHWM") - before;
        assert!(grown < 100 << 10, "the memory of the node grew by {grown} kB");
    });
}

//! Claims of the default storage class: data outlives pods and the node's process, and is removed with its claim.

use std::path::{Path, PathBuf};

use coracle_integration::{Cluster, eventually, on_a_machine};
use serde_json::{Value, json};

fn database() -> String {
    let script = "date +%s%N >> /data/starts; cat /data/starts; sleep 100000";
    let container = json!({"name": "c", "image": "busybox", "command": ["sh", "-c", script],
        "volumeMounts": [{"name": "data", "mountPath": "/data"}]});
    let claim = json!({"metadata": {"name": "data"}, "spec": {"accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": "16Mi"}}}});
    json!({"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": "db"}, "spec": {
        "serviceName": "db", "replicas": 1, "selector": {"matchLabels": {"app": "db"}},
        "template": {"metadata": {"labels": {"app": "db"}}, "spec": {
            "terminationGracePeriodSeconds": 0, "containers": [container],
            "securityContext": {"runAsUser": 1000, "fsGroup": 2000}}},
        "volumeClaimTemplates": [claim]}})
    .to_string()
}

/// The lines that the pod's starts have written.
fn starts(cluster: &Cluster, expected: usize) -> Vec<String> {
    eventually(&format!("{expected} starts in the volume"), 120, || {
        let output = cluster.try_kubectl(&["exec", "db-0", "--", "cat", "/data/starts"]);
        let lines: Vec<String> = String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect();
        (output.status.success() && lines.len() == expected).then_some(lines)
    })
}

fn volume(cluster: &Cluster) -> (String, PathBuf) {
    let claim = cluster.get(&["pvc", "data-db-0"]);
    assert_eq!(
        (&claim["status"]["phase"], &claim["spec"]["storageClassName"]),
        (&json!("Bound"), &json!("local-path"))
    );
    let name = claim["spec"]["volumeName"].as_str().unwrap().to_owned();
    let volume = cluster.get(&["pv", &name]);
    let path = Path::new(volume["spec"]["local"]["path"].as_str().unwrap()).to_owned();
    (name, path)
}

#[test]
fn a_stateful_set_keeps_its_data_until_its_claim_is_deleted() {
    on_a_machine(|machine| {
        let mirrors = machine.start_registry();
        let mut cluster = Cluster::up(machine, &mirrors);
        let classes = cluster.kubectl(&["get", "storageclass", "--no-headers"]);
        assert!(classes.starts_with("local-path (default)"), "{classes}");
        cluster.apply(&database());
        let first = starts(&cluster, 1);
        let (name, path) = volume(&cluster);
        let metrics = cluster.kubectl(&["get", "--raw", "/api/v1/nodes/node-1/proxy/metrics"]);
        for name in
            ["capacity_bytes", "available_bytes", "used_bytes", "inodes", "inodes_free", "inodes_used"]
        {
            let labels = "namespace=\"default\",persistentvolumeclaim=\"data-db-0\"";
            let sample = format!("kubelet_volume_stats_{name}{{{labels}}} ");
            assert!(metrics.lines().any(|line| line.starts_with(&sample)), "no {sample} in\n{metrics}");
        }
        cluster.kubectl(&["delete", "pod", "db-0"]);
        assert_eq!(starts(&cluster, 2)[0], first[0]);

        cluster.down();
        cluster.start();
        assert_eq!(starts(&cluster, 3)[0], first[0]);
        assert_eq!(volume(&cluster).0, name);

        let larger = json!({"spec": {"resources": {"requests": {"storage": "32Mi"}}}}).to_string();
        cluster.kubectl(&["patch", "pvc", "data-db-0", "-p", &larger]);
        eventually("the claim and its volume to have the new size", 60, || {
            let size = |object: &Value, part: &str| object[part]["capacity"]["storage"] == "32Mi";
            size(&cluster.get(&["pvc", "data-db-0"]), "status") && size(&cluster.get(&["pv", &name]), "spec")
        });
        a_pod_has_an_ephemeral_volume(&cluster);

        cluster.kubectl(&["delete", "pvc", "data-db-0", "--wait=false"]);
        let protected = cluster.get(&["pvc", "data-db-0"]);
        assert!(
            protected["metadata"]["deletionTimestamp"].is_string(),
            "the claim is not protected by the pod that uses it"
        );
        cluster.kubectl(&["delete", "statefulset", "db"]);
        eventually("the volume and its directory to be removed", 120, || {
            let gone = |kind: &str| cluster.get(&[kind])["items"] == Value::Array(Vec::new());
            (gone("pvc") && gone("pv") && !path.exists()).then_some(())
        });
    });
}

/// The claim of an ephemeral volume exists as long as its pod.
fn a_pod_has_an_ephemeral_volume(cluster: &Cluster) {
    let mut pod = user_of("scratch");
    let template = json!({"spec": claim("", "local-path")["spec"]});
    pod["spec"]["volumes"] = json!([{"name": "data", "ephemeral": {"volumeClaimTemplate": template}}]);
    cluster.apply(&pod.to_string());
    cluster.kubectl(&["wait", "pod/scratch", "--for=condition=Ready", "--timeout=120s"]);
    assert_eq!(cluster.get(&["pvc", "scratch-data"])["status"]["phase"], "Bound");
    cluster.kubectl(&["delete", "pod", "scratch", "--timeout=120s"]);
    eventually("the claim of the ephemeral volume to be deleted", 60, || {
        !cluster.try_kubectl(&["get", "pvc", "scratch-data"]).status.success()
    });
}

/// A pod that runs as long as its volume is mounted.
fn user_of(claim: &str) -> Value {
    let container = json!({"name": "c", "image": "busybox", "command": ["sleep", "100000"],
        "volumeMounts": [{"name": "data", "mountPath": "/data"}]});
    let volume = json!({"name": "data", "persistentVolumeClaim": {"claimName": claim}});
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": claim},
        "spec": {"terminationGracePeriodSeconds": 0, "containers": [container], "volumes": [volume]}})
}

fn claim(name: &str, class: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name}, "spec": {
        "storageClassName": class, "accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "16Mi"}}}})
}

#[test]
fn pods_wait_for_a_dead_provisioner_and_others_do_not() {
    on_a_machine(|machine| {
        let mirrors = machine.start_registry();
        let cluster = Cluster::up(machine, &mirrors);
        let class = |name: &str, mode: &str| {
            json!({"apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": {"name": name},
                "provisioner": "example.com/dead", "volumeBindingMode": mode})
        };
        let of_class = |name: &str, class: &str| [claim(name, class), user_of(name)];
        let objects = [
            &[class("at-once", "Immediate"), class("with-pod", "WaitForFirstConsumer")][..],
            &of_class("early", "at-once"),
            &of_class("late", "with-pod"),
            &of_class("other", "local-path"),
        ];
        cluster.apply(&objects.concat().iter().map(Value::to_string).collect::<Vec<_>>().join("\n---\n"));
        cluster.kubectl(&["wait", "pod/other", "--for=condition=Ready", "--timeout=120s"]);
        for name in ["early", "late"] {
            eventually(&format!("an event of {name}"), 60, || {
                cluster
                    .kubectl(&["describe", "pvc", name])
                    .contains("the external provisioner 'example.com/dead'")
            });
            assert_eq!(cluster.get(&["pod", name])["status"]["phase"], "Pending");
        }
        let selected = &cluster.get(&["pvc", "late"])["metadata"]["annotations"];
        assert_eq!(selected["volume.kubernetes.io/selected-node"], "node-1", "{selected}");

        // A waiting pod and its claim can be deleted. The other pod starts when a provisioner creates its volume.
        cluster.kubectl(&["delete", "pod/early", "pvc/early", "--timeout=120s"]);
        let uid = &cluster.get(&["pvc", "late"])["metadata"]["uid"];
        let volume = json!({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": "v"}, "spec": {
            "capacity": {"storage": "16Mi"}, "accessModes": ["ReadWriteOnce"], "storageClassName": "with-pod",
            "persistentVolumeReclaimPolicy": "Retain", "hostPath": {"path": machine.path("volume"), "type": "DirectoryOrCreate"},
            "claimRef": {"namespace": "default", "name": "late", "uid": uid}}});
        cluster.apply(&volume.to_string());
        cluster.kubectl(&["wait", "pod/late", "--for=condition=Ready", "--timeout=120s"]);
    });
}

#[test]
fn a_volume_has_the_mount_options_of_its_class() {
    on_a_machine(|machine| {
        let mirrors = machine.start_registry();
        let cluster = Cluster::up(machine, &mirrors);
        let class = |name: &str, options: Value| {
            json!({"apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": {"name": name},
                "provisioner": "coracle.dev/local-path", "volumeBindingMode": "WaitForFirstConsumer",
                "mountOptions": options})
        };
        let objects = [
            class("strict", json!(["noexec", "noatime"])),
            claim("strict", "strict"),
            user_of("strict"),
            class("wrong", json!(["size=1G"])),
            claim("wrong", "wrong"),
            user_of("wrong"),
        ];
        cluster.apply(&objects.iter().map(Value::to_string).collect::<Vec<_>>().join("\n---\n"));
        cluster.kubectl(&["wait", "pod/strict", "--for=condition=Ready", "--timeout=120s"]);
        let mounts = cluster.kubectl(&["exec", "strict", "--", "grep", " /data ", "/proc/mounts"]);
        let options = mounts.split_whitespace().nth(3).unwrap_or_default();
        for option in ["noexec", "noatime"] {
            assert!(options.split(',').any(|found| found == option), "{mounts}");
        }
        eventually("an event that names the option", 60, || {
            cluster
                .kubectl(&["describe", "pod", "wrong"])
                .contains("mount option \"size=1G\" is not possible")
        });
    });
}

#[test]
fn data_of_a_retained_volume_is_used_again_after_a_new_installation() {
    on_a_machine(|machine| {
        let mirrors = machine.start_registry();
        let dir = machine.path("kept").to_str().unwrap().to_owned();
        let flags = ["--image-gc-high-threshold", "100", "--local-volume-dir", dir.as_str()];
        let cluster = Cluster::up_with(machine, &mirrors, &flags);
        let class = json!({"apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": {"name": "kept"},
            "provisioner": "coracle.dev/local-path", "volumeBindingMode": "WaitForFirstConsumer",
            "reclaimPolicy": "Retain"});
        let objects = [class, claim("data", "kept"), user_of("data")];
        cluster.apply(&objects.iter().map(Value::to_string).collect::<Vec<_>>().join("\n---\n"));
        cluster.kubectl(&["wait", "pod/data", "--for=condition=Ready", "--timeout=120s"]);
        cluster.kubectl(&["exec", "data", "--", "sh", "-c", "echo kept > /data/mark"]);
        let name = cluster.get(&["pvc", "data"])["spec"]["volumeName"].as_str().unwrap().to_owned();
        cluster.kubectl(&["delete", "pod/data", "pvc/data", "--timeout=120s"]);
        let volume = eventually("the volume to be released", 60, || {
            let volume = cluster.get(&["pv", &name]);
            (volume["status"]["phase"] == "Released").then_some(volume)
        });
        let path = Path::new(volume["spec"]["local"]["path"].as_str().unwrap()).to_owned();
        assert!(path.starts_with(&dir), "{}", path.display());

        // This runs `coracle down --purge`.
        drop(cluster);
        assert_eq!(std::fs::read_to_string(path.join("mark")).unwrap(), "kept\n");
        let cluster = Cluster::up_with(machine, &mirrors, &flags);
        let of_node = json!({"key": "kubernetes.io/hostname", "operator": "In", "values": ["node-1"]});
        let volume = json!({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": "again"}, "spec": {
            "capacity": {"storage": "16Mi"}, "accessModes": ["ReadWriteOnce"], "local": {"path": path},
            "persistentVolumeReclaimPolicy": "Retain",
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [of_node]}]}}}});
        let objects = [volume, claim("data", ""), user_of("data")];
        cluster.apply(&objects.iter().map(Value::to_string).collect::<Vec<_>>().join("\n---\n"));
        cluster.kubectl(&["wait", "pod/data", "--for=condition=Ready", "--timeout=120s"]);
        assert_eq!(cluster.kubectl(&["exec", "data", "--", "cat", "/data/mark"]).trim(), "kept");
    });
}

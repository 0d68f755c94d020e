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

        cluster.kubectl(&["delete", "pvc", "data-db-0", "--wait=false"]);
        let protected = cluster.get(&["pvc", "data-db-0"]);
        assert!(protected["metadata"]["deletionTimestamp"].is_string(), "a pod uses the claim");
        cluster.kubectl(&["delete", "statefulset", "db"]);
        eventually("the volume and its directory to be removed", 120, || {
            let gone = |kind: &str| cluster.get(&[kind])["items"] == Value::Array(Vec::new());
            (gone("pvc") && gone("pv") && !path.exists()).then_some(())
        });
    });
}

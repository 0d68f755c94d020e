//! Cases for rows.

use super::*;
use crate::kind::by_kind;

fn now() -> Timestamp {
    "2024-01-01T01:00:00Z".parse().unwrap()
}

/// Status, ready and restarts of a pod.
fn check_pod(spec: Value, status: Value, deleted: bool, expect: [&str; 3]) {
    let mut pod = json!({"metadata": {"name": "p", "creationTimestamp": "2024-01-01T00:00:00Z"}, "spec": spec, "status": status});
    if deleted {
        pod["metadata"]["deletionTimestamp"] = "2024-01-01T00:59:00Z".into();
    }
    let cells = pod::cells(&pod, now());
    assert_eq!([&cells[2], &cells[1], &cells[3]], expect, "for {pod}");
}

#[test]
fn the_status_of_a_pod_is_derived_from_its_containers() {
    let one = || json!({"containers": [{"name": "a"}]});
    let two = || json!({"containers": [{"name": "a"}, {"name": "b"}]});
    let running = || json!({"ready": true, "state": {"running": {}}});
    check_pod(one(), json!({"phase": "Pending"}), false, ["Pending", "0/1", "0"]);
    check_pod(
        one(),
        json!({"phase": "Running", "containerStatuses": [running()]}),
        false,
        ["Running", "1/1", "0"],
    );
    check_pod(
        one(),
        json!({"phase": "Running", "containerStatuses": [running()]}),
        true,
        ["Terminating", "1/1", "0"],
    );
    let waiting = |reason: &str| json!({"phase": "Pending", "containerStatuses": [{"state": {"waiting": {"reason": reason}}}]});
    check_pod(one(), waiting("ContainerCreating"), false, ["ContainerCreating", "0/1", "0"]);
    check_pod(one(), waiting("ImagePullBackOff"), false, ["ImagePullBackOff", "0/1", "0"]);
    let crashed = json!({"phase": "Running", "containerStatuses": [{"restartCount": 3, "state": {"waiting": {"reason": "CrashLoopBackOff"}},
        "lastState": {"terminated": {"finishedAt": "2024-01-01T00:55:00Z"}}}]});
    check_pod(one(), crashed, false, ["CrashLoopBackOff", "0/1", "3 (5m ago)"]);
    let ended = |terminated: Value| json!({"phase": "Succeeded", "containerStatuses": [{"state": {"terminated": terminated}}]});
    check_pod(one(), ended(json!({"exitCode": 0, "reason": "Completed"})), false, ["Completed", "0/1", "0"]);
    check_pod(one(), ended(json!({"exitCode": 3})), false, ["ExitCode:3", "0/1", "0"]);
    check_pod(one(), ended(json!({"exitCode": 137, "signal": 9})), false, ["Signal:9", "0/1", "0"]);
    check_pod(one(), ended(json!({"reason": "Completed"})), true, ["Completed", "0/1", "0"]);
    let half = json!({"phase": "Running", "containerStatuses": [{"state": {"terminated": {"reason": "Completed"}}}, running()]});
    check_pod(two(), half, false, ["NotReady", "1/2", "0"]);
    check_pod(one(), json!({"phase": "Failed", "reason": "Evicted"}), false, ["Evicted", "0/1", "0"]);
    check_pod(one(), json!({"phase": "Running", "reason": "NodeLost"}), true, ["Unknown", "0/1", "0"]);
}

#[test]
fn init_containers_show_how_far_they_are() {
    let spec = || json!({"initContainers": [{"name": "i"}, {"name": "j"}], "containers": [{"name": "a"}]});
    let with = |statuses: Value| json!({"phase": "Pending", "initContainerStatuses": statuses});
    let done = || json!({"name": "i", "state": {"terminated": {"exitCode": 0}}});
    check_pod(
        spec(),
        with(json!([{"name": "i", "state": {"running": {}}}])),
        false,
        ["Init:0/2", "0/1", "0"],
    );
    check_pod(
        spec(),
        with(json!([done(), {"name": "j", "state": {"waiting": {"reason": "PodInitializing"}}}])),
        false,
        ["Init:1/2", "0/1", "0"],
    );
    check_pod(
        spec(),
        with(json!([{"name": "i", "restartCount": 2, "state": {"waiting": {"reason": "CrashLoopBackOff"}}}])),
        false,
        ["Init:CrashLoopBackOff", "0/1", "2"],
    );
    check_pod(
        spec(),
        with(json!([{"name": "i", "state": {"terminated": {"exitCode": 1, "reason": "Error"}}}])),
        false,
        ["Init:Error", "0/1", "0"],
    );
    let sidecar =
        json!({"initContainers": [{"name": "s", "restartPolicy": "Always"}], "containers": [{"name": "a"}]});
    let status = json!({"phase": "Running", "initContainerStatuses": [{"name": "s", "started": true, "ready": true, "state": {"running": {}}}],
        "containerStatuses": [{"ready": true, "state": {"running": {}}}]});
    check_pod(sidecar, status, false, ["Running", "2/2", "0"]);
}

fn check_row(api_version: &str, kind: &str, object: Value, expect: Value) {
    let kind = by_kind(api_version, kind).unwrap();
    let options = Options {
        content: Content { include: Include::None, version: MetaVersion::V1 },
        headers: false,
        now: now(),
    };
    let table = render(kind, [&object], Value::Null, options);
    assert_eq!(table["rows"][0]["cells"], expect);
}

#[test]
fn other_kinds_have_upstreams_columns() {
    let meta = || json!({"name": "x", "creationTimestamp": "2024-01-01T00:00:00Z"});
    check_row(
        "apps/v1",
        "Deployment",
        json!({"metadata": meta(), "spec": {"replicas": 3, "selector": {"matchLabels": {"app": "x"}},
            "template": {"spec": {"containers": [{"name": "a", "image": "i"}, {"name": "b", "image": "j"}]}}},
            "status": {"readyReplicas": 2, "updatedReplicas": 3}}),
        json!(["x", "2/3", 3, 0, "60m", "a,b", "i,j", "app=x"]),
    );
    check_row(
        "v1",
        "Node",
        json!({"metadata": {"name": "n", "creationTimestamp": "2024-01-01T00:59:50Z", "labels": {"node-role.kubernetes.io/control-plane": ""}},
            "spec": {"unschedulable": true}, "status": {"conditions": [{"type": "Ready", "status": "True"}],
            "addresses": [{"type": "InternalIP", "address": "10.0.0.1"}], "nodeInfo": {"kubeletVersion": "v1.37.0", "osImage": "Debian"}}}),
        json!([
            "n",
            "Ready,SchedulingDisabled",
            "control-plane",
            "10s",
            "v1.37.0",
            "10.0.0.1",
            "<none>",
            "Debian",
            "<unknown>",
            "<unknown>"
        ]),
    );
    check_row(
        "v1",
        "Service",
        json!({"metadata": meta(), "spec": {"type": "NodePort", "clusterIP": "10.43.0.1", "selector": {"b": "2", "a": "1"},
            "ports": [{"port": 80, "nodePort": 30080, "protocol": "TCP"}, {"port": 53, "protocol": "UDP"}]}}),
        json!(["x", "NodePort", "10.43.0.1", "<none>", "80:30080/TCP,53/UDP", "60m", "a=1,b=2"]),
    );
    check_row(
        "v1",
        "Event",
        json!({"metadata": {"name": "e"}, "involvedObject": {"kind": "Pod", "name": "p"}, "type": "Warning", "reason": "Failed",
            "message": "no\n", "source": {"component": "kubelet", "host": "n"}, "count": 4,
            "firstTimestamp": "2024-01-01T00:00:00Z", "lastTimestamp": "2024-01-01T00:59:55Z"}),
        json!(["5s", "Warning", "Failed", "pod/p", "", "kubelet, n", "no", "60m", 4, "e"]),
    );
    check_row(
        "v1",
        "ConfigMap",
        json!({"metadata": meta(), "data": {"a": ""}, "binaryData": {"b": ""}}),
        json!(["x", 2, "60m"]),
    );
}

#[test]
fn a_table_carries_columns_metadata_and_objects() {
    let kind = by_kind("v1", "Namespace").unwrap();
    let object = json!({"metadata": {"name": "a", "labels": {"x": "y"}}, "status": {"phase": "Active"}});
    let options = Options {
        content: Content { include: Include::Metadata, version: MetaVersion::V1 },
        headers: true,
        now: now(),
    };
    let table = render(kind, [&object], json!({"resourceVersion": "7"}), options);
    assert_eq!(table["metadata"]["resourceVersion"], "7");
    assert_eq!(table["columnDefinitions"][0]["format"], "name");
    assert_eq!(table["rows"][0]["object"]["kind"], "PartialObjectMetadata");
    assert_eq!(table["rows"][0]["object"]["metadata"]["labels"]["x"], "y");
    let options = Options {
        content: Content { include: Include::Object, version: MetaVersion::V1 },
        headers: false,
        now: now(),
    };
    let table = render(kind, [&object], Value::Null, options);
    assert_eq!(table["columnDefinitions"], Value::Null);
    assert_eq!(table["rows"][0]["object"]["kind"], "Namespace");
}

/// Rows of bookmarks have such objects.
#[test]
fn the_name_of_an_object_without_a_name_is_empty() {
    check_row("v1", "ConfigMap", json!({"metadata": {}}), json!(["", 0, "<unknown>"]));
    let cells = created_at(&json!({"metadata": {"resourceVersion": "7"}}), now());
    assert_eq!(cells, ["", "0001-01-01T00:00:00Z"]);
}

#[test]
fn nodes_show_the_architecture_beside_the_kernel() {
    let kernel = |info: Value| {
        let node = json!({"metadata": {"name": "n"}, "status": {"nodeInfo": info}});
        node::cells(&node, now())[8].clone()
    };
    assert_eq!(kernel(json!({"kernelVersion": "6.1.0", "architecture": "arm64"})), "6.1.0 (arm64)");
    assert_eq!(kernel(json!({"kernelVersion": "6.1.0", "architecture": ""})), "6.1.0");
    assert_eq!(kernel(json!({"architecture": "arm64"})), "<unknown> (arm64)");
    assert_eq!(kernel(json!({})), "<unknown>");
}

#[test]
fn a_scale_has_its_own_columns() {
    let metadata = json!({"name": "d", "resourceVersion": "7", "creationTimestamp": "2024-01-01T00:00:00Z"});
    let scale = json!({"kind": "Scale", "apiVersion": "autoscaling/v1", "metadata": metadata,
        "spec": {"replicas": 5}, "status": {"replicas": 3}});
    let content = Content { include: Include::Object, version: MetaVersion::V1 };
    let table = super::scale(&scale, Options { content, headers: true, now: now() });
    let columns: Vec<&str> =
        items(&table["columnDefinitions"]).map(|column| column["name"].as_str().unwrap()).collect();
    assert_eq!(columns, ["Name", "Desired", "Available", "Age"]);
    let row = json!({"cells": ["d", 5, 3, "60m"], "object": scale});
    assert_eq!((&table["rows"], &table["metadata"]), (&json!([row]), &json!({"resourceVersion": "7"})));
}

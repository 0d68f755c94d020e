//! Pod annotations for addresses, and network plugins that report not ready.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use coracle_integration::{Cluster, Crictl, Machine, eventually, on_a_machine};

fn with_cluster(
    prepare: impl FnOnce(&Machine) -> Vec<String> + Send + 'static,
    test: impl FnOnce(&mut Machine, &mut Cluster) + Send + 'static,
) {
    on_a_machine(|machine| {
        let mirrors = machine.start_registry();
        let mut flags = prepare(machine);
        // Disables image garbage collection by disk usage: the test machine may have little free disk space.
        flags.extend(["--image-gc-high-threshold", "100"].map(str::to_owned));
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        let mut cluster = Cluster::up_with(machine, &mirrors, &flags);
        test(machine, &mut cluster);
    });
}

fn without_flags(_: &Machine) -> Vec<String> {
    Vec::new()
}

/// A pod with annotations for these addresses.
fn asking(name: &str, ips: &str, mac: &str) -> String {
    format!(
        r#"{{"apiVersion":"v1","kind":"Pod","metadata":{{"name":"{name}","annotations":{{"cni.coracle/ips":"{ips}",
        "cni.coracle/mac":"{mac}"}}}},"spec":{{"terminationGracePeriodSeconds":0,
        "containers":[{{"name":"c","image":"busybox","command":["sleep","100000"]}}]}}}}"#
    )
}

fn wait_ready(cluster: &Cluster, pod: &str) {
    cluster.kubectl(&["wait", &format!("pod/{pod}"), "--for=condition=Ready", "--timeout=240s"]);
}

/// Waits for an event of the pod that contains `expected`.
fn event(cluster: &Cluster, pod: &str, expected: &str) {
    eventually(&format!("an event of {pod} with {expected:?}"), 60, || {
        let events = cluster.get(&["events", "--field-selector", &format!("involvedObject.name={pod}")]);
        let mut events = events["items"].as_array().unwrap().iter();
        events.any(|e| e["message"].as_str().is_some_and(|m| m.contains(expected)))
    });
}

#[test]
fn a_pod_gets_the_addresses_in_its_annotations_and_its_successor_too() {
    with_cluster(without_flags, |_, cluster| {
        let range = cluster.kubectl(&["get", "node", "node-1", "-o", "jsonpath={.spec.podCIDR}"]);
        let address = |last: u8| {
            let (network, _) = range.rsplit_once('.').unwrap();
            format!("{network}.{last}")
        };
        let (ip, mac) = (address(200), "0a:00:00:00:02:00");
        cluster.apply(&asking("a", &ip, mac));
        wait_ready(cluster, "a");
        let has = |pod: &str| {
            assert_eq!(cluster.get(&["pod", pod])["status"]["podIP"], ip.as_str());
            let inside = cluster.kubectl(&["exec", pod, "--", "ip", "addr", "show", "eth0"]);
            assert!(inside.contains(&format!("inet {ip}/24")) && inside.contains(mac), "{inside}");
        };
        has("a");
        cluster.apply(&asking("b", &ip, mac));
        cluster.apply(&asking("c", "192.0.2.7", "0a:00:00:00:02:01"));
        cluster.apply(&asking("d", &address(201), "01:00:00:00:02:01"));
        let refused = "Failed to create pod sandbox: annotations: ";
        event(cluster, "b", &format!("{refused}hardware address {mac} is used by the pod default/a"));
        event(cluster, "c", &format!("{refused}ips: 192.0.2.7 is in no range of the network: {range}"));
        event(cluster, "d", &format!("{refused}cni.coracle/mac: 01:00:00:00:02:01 is a multicast address"));
        cluster.kubectl(&["delete", "pod", "a", "c", "d", "--now"]);
        wait_ready(cluster, "b");
        has("b");
    });
}

/// A network with a third-party plugin that takes no pods while the file `busy` exists.
fn with_their_network(machine: &Machine) -> Vec<String> {
    let path = |name: &str| machine.path(name).to_str().unwrap().to_owned();
    for dir in ["net.d", "bin"] {
        fs::create_dir_all(path(dir)).unwrap();
    }
    let text = format!(
        "#!/bin/sh\ncat >/dev/null\n[ $CNI_COMMAND = STATUS ] && [ -e {} ] && \
         {{ echo '{{\"code\": 50, \"msg\": \"no uplink\"}}'; exit 1; }}\nexit 0\n",
        path("busy")
    );
    fs::write(path("bin/theirs"), text).unwrap();
    fs::set_permissions(path("bin/theirs"), fs::Permissions::from_mode(0o755)).unwrap();
    let list = r#"{"cniVersion": "1.1.0", "name": "theirs", "plugins": [{"type": "theirs"}]}"#;
    fs::write(path("net.d/1.conflist"), list).unwrap();
    ["--cni-conf-dir", &path("net.d"), "--cni-bin-dir", &path("bin")].map(str::to_owned).into()
}

#[test]
fn a_node_is_not_ready_while_a_network_plugin_reports_not_ready() {
    with_cluster(with_their_network, |machine, cluster| {
        let is_ready_with = |status: &str, reason: &str, expected: &str| {
            eventually(&format!("the node to be Ready={status}"), 60, || {
                let node = cluster.get(&["node", "node-1"]);
                let mut conditions = node["status"]["conditions"].as_array().unwrap().iter();
                let ready = conditions.find(|condition| condition["type"] == "Ready").unwrap();
                let condition = (ready["status"].as_str().unwrap(), ready["reason"].as_str().unwrap());
                let message = ready["message"].as_str().unwrap();
                condition == (status, reason) && message == expected
            });
        };
        fs::write(machine.path("busy"), "").unwrap();
        is_ready_with(
            "False",
            "KubeletNotReady",
            "container runtime network not ready: NetworkReady=false reason:NetworkPluginNotReady \
             message:plugin theirs: no uplink (code 50)",
        );
        let socket = format!("unix://{}", machine.path("run/cri.sock").display());
        let info = Crictl::new(&socket).crictl(&["info"]);
        assert!(info.contains("plugin theirs: no uplink (code 50)"), "{info}");
        eventually("the taint", 30, || {
            let taints = cluster.get(&["node", "node-1"])["spec"]["taints"].to_string();
            taints.contains("node.kubernetes.io/not-ready")
        });
        fs::remove_file(machine.path("busy")).unwrap();
        is_ready_with("True", "KubeletReady", "kubelet is posting ready status");
    });
}

//! An IPv6-only cluster: nodes, pods, services and joining.

use coracle_integration::{Agent, Nodes, eventually, on_a_machine};
use serde_json::Value;

use super::pods::{Pod, all_reach_all, source_address, with_nginx};
use super::{MTU, condition};

/// A pod whose readiness probe connects to the pod's IPv6 address.
const PROBED: &str = r#"{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "probed"}, "spec": {
    "terminationGracePeriodSeconds": 0, "nodeName": "node-2", "containers": [{"name": "c", "image": "busybox",
    "command": ["httpd", "-f", "-p", "8080", "-h", "/etc"],
    "readinessProbe": {"httpGet": {"path": "/passwd", "port": 8080}, "periodSeconds": 1}}]}}"#;

/// Addresses in a list of the API.
fn all<'a>(list: &'a Value, field: &str) -> Vec<&'a str> {
    list.as_array().unwrap().iter().map(|each| each[field].as_str().unwrap()).collect()
}

/// Tunnel endpoint and number of routes to the other node in a node's kernel. None if the VXLAN device does not exist.
fn known(agent: &Agent) -> Option<(Vec<String>, usize)> {
    let host = agent.host();
    let fdb = host.try_json("bridge", &["-j", "fdb", "show", "dev", "coracle.1-v6"])?;
    let routes = host.ip(&["-6", "route", "show", "proto", "67"]);
    Some((all(&fdb, "dst").into_iter().map(str::to_owned).collect(), routes.as_array().unwrap().len()))
}

fn statuses_are_of_v6(nodes: &Nodes, pods: &[Pod]) {
    for agent in nodes.agents() {
        let node = nodes.get(&["node", agent.name()]);
        let addresses = node["status"]["addresses"].as_array().unwrap();
        let ips: Vec<&Value> = addresses.iter().filter(|a| a["type"] == "InternalIP").collect();
        assert_eq!((ips.len(), ips[0]["address"].as_str()), (1, Some(agent.host().address_v6().as_str())));
        eventually("PodNetworkImpaired=False", 30, || {
            condition(nodes, agent.name(), "PodNetworkImpaired") == "False"
        });
    }
    assert!(pods.iter().all(|pod| pod.ips[0].starts_with("fd42:")), "{pods:?}");
    let hosts: Vec<String> = nodes.agents().iter().map(|agent| agent.host().address_v6()).collect();
    for pod in nodes.get(&["pods"])["items"].as_array().unwrap() {
        let status = &pod["status"];
        assert_eq!(all(&status["podIPs"], "ip"), [status["podIP"].as_str().unwrap()]);
        assert!(hosts.iter().any(|host| all(&status["hostIPs"], "ip") == [host]), "{status}");
    }
}

fn services_are_of_v6(nodes: &Nodes) {
    nodes.kubectl(&["expose", "deployment", "nginx", "--port=80"]);
    for name in ["kubernetes", "nginx"] {
        let spec = &nodes.get(&["service", name])["spec"];
        assert!(spec["clusterIP"].as_str().unwrap().starts_with("fd43::"), "{spec}");
        assert_eq!(
            (spec["clusterIPs"][0].as_str(), spec["ipFamilies"][0].as_str()),
            (spec["clusterIP"].as_str(), Some("IPv6"))
        );
    }
    let endpoints = eventually("the service's endpoints", 20, || {
        let endpoints = nodes.get(&["endpoints", "nginx"]);
        endpoints["subsets"][0]["addresses"].as_array().cloned()
    });
    assert!(endpoints.iter().all(|each| each["ip"].as_str().unwrap().starts_with("fd42:")), "{endpoints:?}");
    let own = nodes.get(&["endpoints", "kubernetes"]);
    assert_eq!(own["subsets"][0]["addresses"][0]["ip"], "2001:db8:1::2");
}

#[test]
fn an_ipv6_only_cluster_has_joined_nodes_pods_services_and_streams() {
    on_a_machine(|machine| {
        let mut nodes = Nodes::control_plane_only(machine, "fd42::/48", &[]);
        for number in 1..=2 {
            let command = nodes.token(&["create"]);
            assert!(command.contains("--join https://[2001:db8:1::2]:6443 "), "{command}");
            nodes.join(number, &command, &[]);
        }
        nodes.wait_ready();
        let pods = with_nginx(&nodes, 2);
        nodes.apply(PROBED);
        for (agent, other) in nodes.agents().iter().zip(nodes.agents().iter().rev()) {
            let expected = (vec![other.host().address_v6()], 1);
            eventually("the kernel to know the other node", 20, || (known(agent)? == expected).then_some(()));
            let v4 = agent.host().ip(&["-4", "addr", "show", "scope", "global"]);
            assert!(
                v4.as_array().unwrap().iter().all(|link| link["addr_info"] == Value::Array(vec![])),
                "{v4}"
            );
        }
        all_reach_all(&nodes, &pods, MTU);
        assert_eq!(source_address(&pods[0], &pods[1], &pods[1].ips[0]), pods[0].ips[0]);

        nodes.kubectl(&["wait", "pod/probed", "--for=condition=Ready", "--timeout=300s"]);
        let output = nodes.kubectl(&["exec", "probed", "--", "sh", "-c", "echo $KUBERNETES_SERVICE_HOST"]);
        assert_eq!(output, "fd43::1\n");
        let query =
            ["exec", "probed", "--", "nslookup", "-type=aaaa", "kubernetes.default.svc.cluster.local"];
        eventually("an answer of cluster DNS", 30, || {
            String::from_utf8_lossy(&nodes.try_kubectl(&query).stdout).contains("fd43::1\n")
        });
        let names = nodes.kubectl(&["get", "pods", "-l", "app=nginx", "-o", "name"]);
        assert_eq!(names.lines().count(), pods.len(), "{names}");
        for name in names.lines() {
            assert_eq!(nodes.kubectl(&["exec", name, "--", "echo", "hello"]), "hello\n");
            eventually("the first line of nginx's log", 20, || {
                nodes.kubectl(&["logs", name]).contains("nginx/")
            });
        }
        statuses_are_of_v6(&nodes, &pods);
        services_are_of_v6(&nodes);
    });
}

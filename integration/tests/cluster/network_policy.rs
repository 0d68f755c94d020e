//! NetworkPolicies between real pods of one node, whose packets pass its bridge.

use std::process::Command;

use coracle_integration::{Cluster, eventually, has_condition, on_a_machine};

const PORTS: &str = r#""ports":[{"name":"web","containerPort":8080},{"name":"other","containerPort":8081}]"#;

/// The definition of the kind ClusterNetworkPolicy. Unlike upstream's definition, it has no schema of the fields.
const CLUSTER_POLICY_KIND: &str = r#"{"apiVersion":"apiextensions.k8s.io/v1","kind":"CustomResourceDefinition",
    "metadata":{"name":"clusternetworkpolicies.policy.networking.k8s.io",
      "annotations":{"api-approved.kubernetes.io":"https://github.com/kubernetes-sigs/network-policy-api/pull/347"}},
    "spec":{"group":"policy.networking.k8s.io","scope":"Cluster",
      "names":{"kind":"ClusterNetworkPolicy","listKind":"ClusterNetworkPolicyList","plural":"clusternetworkpolicies",
        "singular":"clusternetworkpolicy","shortNames":["cnp"]},
      "versions":[{"name":"v1alpha2","served":true,"storage":true,"subresources":{"status":{}},
        "schema":{"openAPIV3Schema":{"type":"object","x-kubernetes-preserve-unknown-fields":true}}}]}}"#;

/// A pod that serves HTTP on the ports 8080 and 8081 of both families.
fn server(namespace: &str, name: &str) -> String {
    format!(
        r#"{{"apiVersion":"v1","kind":"Pod","metadata":{{"namespace":"{namespace}","name":"{name}","labels":{{"app":"{name}"}}}},
        "spec":{{"terminationGracePeriodSeconds":0,"containers":[{{"name":"c","image":"busybox",{PORTS},
        "command":["sh","-c","mkdir /w; echo {name} > /w/index.html; httpd -p [::]:8081 -h /w; exec httpd -f -p [::]:8080 -h /w"],
        "readinessProbe":{{"httpGet":{{"path":"/","port":8080}},"periodSeconds":1}}}}]}}}}"#
    )
}

fn policy(namespace: &str, name: &str, spec: &str) -> String {
    format!(
        r#"{{"apiVersion":"networking.k8s.io/v1","kind":"NetworkPolicy","metadata":{{"namespace":"{namespace}","name":"{name}"}},"spec":{spec}}}"#
    )
}

/// Namespace and name of a pod.
#[derive(Clone, Copy)]
struct PodName {
    namespace: &'static str,
    name: &'static str,
}

const WEB: PodName = PodName { namespace: "default", name: "web" };
const FRIEND: PodName = PodName { namespace: "default", name: "friend" };
const GUEST: PodName = PodName { namespace: "red", name: "guest" };

fn address(cluster: &Cluster, pod: PodName) -> String {
    let pod = cluster.get(&["pod", "-n", pod.namespace, pod.name]);
    pod["status"]["podIP"].as_str().unwrap().to_owned()
}

/// Whether a pod gets a response from a port of another pod.
fn reaches(cluster: &Cluster, from: PodName, ip: &str, port: u16) -> bool {
    let script = format!(r"printf 'GET / HTTP/1.0\r\n\r\n' | nc -w 1 {ip} {port} 2>&1; true");
    let answer = cluster.kubectl(&["exec", "-n", from.namespace, from.name, "--", "sh", "-c", &script]);
    answer.contains("200 OK")
}

#[test]
fn policies_restrict_pods_of_one_node() {
    on_a_machine(|machine| {
        let mirrors = machine.start_registry();
        let cluster = Cluster::up_with(machine, &mirrors, &["--image-gc-high-threshold", "100"]);
        cluster.kubectl(&["create", "namespace", "red"]);
        cluster.kubectl(&["label", "namespace", "red", "team=x"]);
        let (web, friend, guest) = (WEB, FRIEND, GUEST);
        for PodName { namespace, name } in [web, friend, guest] {
            cluster.apply(&server(namespace, name));
        }
        for namespace in ["default", "red"] {
            let ready = ["wait", "-n", namespace, "pod", "--all", "--for=condition=Ready", "--timeout=240s"];
            cluster.kubectl(&ready);
        }
        let ip = address(&cluster, web);
        let can_reach = |from, port| reaches(&cluster, from, &ip, port);
        assert!(can_reach(friend, 8080) && can_reach(guest, 8080), "denied without a policy");
        cluster.apply(&policy("default", "deny", r#"{"podSelector":{"matchLabels":{"app":"web"}}}"#));
        eventually("all to be denied", 20, || !can_reach(friend, 8080) && !can_reach(guest, 8080));
        assert!(can_reach(web, 8080), "the pod does not reach itself");
        flush_tables();
        eventually("all to be denied after a flush", 20, || {
            !can_reach(friend, 8080) && !can_reach(guest, 8080)
        });
        let by_label = r#"{"podSelector":{"matchLabels":{"app":"web"}},"ingress":[{"ports":[{"port":"web"}],
            "from":[{"namespaceSelector":{"matchLabels":{"team":"x"}},"podSelector":{"matchLabels":{"app":"guest"}}}]}]}"#;
        cluster.apply(&policy("default", "by-label", by_label));
        eventually("the pod of the other namespace to be allowed", 20, || can_reach(guest, 8080));
        assert!(
            !can_reach(guest, 8081) && !can_reach(friend, 8080),
            "another port or another pod is allowed"
        );
        cluster.kubectl(&["label", "namespace", "red", "team=y", "--overwrite"]);
        eventually("the namespace with another label to be denied", 20, || !can_reach(guest, 8080));
        let by_block = format!(
            r#"{{"podSelector":{{}},"policyTypes":["Egress"],"egress":[{{"to":[{{"ipBlock":{{"cidr":"0.0.0.0/0","except":["{ip}/32"]}}}}]}}]}}"#
        );
        cluster.kubectl(&["delete", "networkpolicy", "deny", "by-label"]);
        cluster.apply(&policy("default", "by-block", &by_block));
        eventually("the excepted address to be out of reach", 20, || {
            !can_reach(friend, 8080) && can_reach(guest, 8080)
        });
        assert!(
            reaches(&cluster, friend, &address(&cluster, guest), 8080),
            "another address of the block is denied"
        );
        assert!(
            has_condition(&cluster.get(&["pod", "web"]), "Ready", "True"),
            "probes of the node are denied"
        );
        cluster.kubectl(&["delete", "networkpolicy", "by-block"]);
        eventually("everything to be allowed again", 20, || can_reach(friend, 8080));
        cluster_policies_precede(&cluster, &ip);
    });
}

/// Removes all tables of nftables, as another process may do.
fn flush_tables() {
    assert!(Command::new("nft").args(["flush", "ruleset"]).status().unwrap().success());
}

/// Policies of the whole cluster: their kind is installed while the node runs, and removed with its objects.
fn cluster_policies_precede(cluster: &Cluster, ip: &str) {
    let (friend, guest) = (FRIEND, GUEST);
    let can_reach = |from, port| reaches(cluster, from, ip, port);
    cluster.apply(CLUSTER_POLICY_KIND);
    let definition = "crd/clusternetworkpolicies.policy.networking.k8s.io";
    cluster.kubectl(&["wait", definition, "--for=condition=Established", "--timeout=60s"]);
    cluster.apply(
        r#"{"apiVersion":"policy.networking.k8s.io/v1alpha2","kind":"ClusterNetworkPolicy","metadata":{"name":"tenants"},
        "spec":{"tier":"Admin","priority":3,"subject":{"namespaces":{"matchLabels":{"kubernetes.io/metadata.name":"default"}}},
        "ingress":[{"action":"Deny","from":[{"namespaces":{"matchLabels":{"team":"y"}}}]},
          {"action":"Accept","from":[{"planets":{}}]}]}}"#,
    );
    eventually("the other namespace to be denied", 30, || !can_reach(guest, 8080) && can_reach(friend, 8080));
    let allow = r#"{"podSelector":{},"ingress":[{}]}"#;
    cluster.apply(&policy("default", "allow-all", allow));
    // Nodes receive `deny` after `allow-all`, so the effect of `deny` shows that both are enforced.
    cluster.apply(&policy("red", "deny", r#"{"podSelector":{}}"#));
    let of_guest = address(cluster, guest);
    eventually("the tenants' policies to be enforced", 30, || {
        !reaches(cluster, friend, &of_guest, 8080) && can_reach(friend, 8080)
    });
    assert!(!can_reach(guest, 8080), "the policy of a tenant allows what the cluster policy denies");
    eventually("the invalid rule to be reported", 30, || {
        let events = cluster.kubectl(&["get", "events", "--field-selector", "reason=PolicyNotEnforced"]);
        events.contains("clusternetworkpolicy/tenants")
            && events.contains("ingress rule 1: unknown variant `planets`")
    });
    cluster.kubectl(&["delete", definition]);
    eventually("the policies to end with their kind", 30, || can_reach(guest, 8080));
}

//! Vulnerabilities in a node's network.

use std::fs;
use std::io::Read as _;
use std::net::TcpStream;
use std::time::Duration;

use coracle_integration::{eventually, on_a_cluster};
use serde_json::json;

use super::{run_pod, sh, sleeper};

/// Values of a sysctl for all interfaces in this test's network namespace.
fn settings(family: &str, name: &str) -> Vec<(String, String)> {
    let directory = format!("/proc/thread-self/net/../../../sys/net/{family}/conf");
    let directory =
        if fs::exists(&directory).unwrap() { directory } else { format!("/proc/sys/net/{family}/conf") };
    let interfaces = fs::read_dir(directory).unwrap().flatten();
    let read = interfaces.filter_map(|entry| {
        let value = fs::read_to_string(entry.path().join(name)).ok()?;
        Some((entry.file_name().into_string().unwrap(), value.trim().to_owned()))
    });
    read.collect()
}

/// CVE-2020-8558: neighbours reached ports on the node's loopback address.
#[test]
fn cve_2020_8558_a_pod_reaches_no_loopback_address_of_the_node() {
    on_a_cluster(|_, cluster| {
        // A host port on 127.0.0.1 opens the bridge for packets of 127.0.0.0/8.
        let container = json!({"ports": [{"containerPort": 80, "hostPort": 8085}], "securityContext": {"privileged": true}});
        run_pod(cluster, "p", &sleeper("p", &json!({}), &container));
        assert!(TcpStream::connect("127.0.0.1:5005").is_ok(), "no registry listens on the node");
        let gateway = sh(cluster, "p", "ip route | sed -n 's/^default via \\([^ ]*\\).*/\\1/p'");
        let gateway = gateway.trim();
        let attack = format!(
            "for name in all eth0; do echo 1 >/proc/sys/net/ipv4/conf/$name/route_localnet; done
             ip addr del 127.0.0.1/8 dev lo
             ip route add 127.0.0.1/32 via {gateway} && ip route get 127.0.0.1
             wget -T 3 -q -O - http://127.0.0.1:5005/v2/ && echo reached"
        );
        let output = sh(cluster, "p", &attack);
        assert!(
            output.contains(&format!("127.0.0.1 via {gateway}")),
            "the packets did not leave the pod: {output}"
        );
        assert!(!output.contains("reached"), "{output}");
    });
}

/// CVE-2019-9946, CVE-2025-67499: a host port took connections to the same port of other addresses.
#[test]
fn cve_2025_67499_a_host_port_takes_connections_to_the_node_only() {
    on_a_cluster(|_, cluster| {
        let server = |text: &str, port: u16| {
            let script = format!("while :; do echo {text} | nc -l -p {port}; done");
            json!({"command": ["sh", "-c", script], "ports": [{"containerPort": port}]})
        };
        let mut of_host_port = server("of-host-port", 8080);
        of_host_port["ports"][0]["hostPort"] = json!(8086);
        run_pod(cluster, "thief", &sleeper("thief", &json!({}), &of_host_port));
        run_pod(cluster, "own", &sleeper("own", &json!({}), &server("of-pod", 8086)));
        run_pod(cluster, "client", &sleeper("client", &json!({}), &json!({})));
        let own = cluster.get(&["pod", "own"])["status"]["podIP"].as_str().unwrap().to_owned();
        let node = cluster.get(&["pod", "own"])["status"]["hostIP"].as_str().unwrap().to_owned();
        let answers = |address: &str, text: &str| {
            let attempt = format!("echo | nc -w 3 {address} 8086");
            eventually(&format!("an answer of {address}"), 30, || {
                sh(cluster, "client", &attempt).contains(text)
            });
        };
        answers(&node, "of-host-port");
        answers(&own, "of-pod");
        eventually("an answer to the node", 30, || {
            let stream = TcpStream::connect((own.as_str(), 8086)).ok()?;
            stream.set_read_timeout(Some(Duration::from_secs(3))).ok()?;
            let mut text = String::new();
            stream.take(6).read_to_string(&mut text).ok()?;
            (text == "of-pod").then_some(())
        });
    });
}

/// CVE-2020-10749: a pod announced itself to the host as an IPv6 router.
#[test]
fn cve_2020_10749_the_bridge_ignores_router_advertisements() {
    on_a_cluster(|_, cluster| {
        run_pod(cluster, "p", &sleeper("p", &json!({}), &json!({})));
        let differs = |setting, prefix: &str, expected: &str| {
            let mut all = settings("ipv6", setting);
            all.retain(|(name, _)| name.starts_with(prefix));
            assert!(!all.is_empty(), "there is no interface {prefix}*");
            all.retain(|(_, value)| value != expected);
            all
        };
        assert_eq!(differs("accept_ra", "coracle", "0"), []);
        // IPv6 is disabled on the host ends of the pods' veth pairs.
        assert_eq!(differs("disable_ipv6", "veth", "1"), []);
    });
}

/// CVE-2020-15257: containers in the host's network reached the shim by its abstract socket.
#[test]
fn cve_2020_15257_no_socket_of_the_node_is_abstract() {
    on_a_cluster(|_, cluster| {
        run_pod(cluster, "p", &sleeper("p", &json!({"hostNetwork": true}), &json!({})));
        let sockets = sh(cluster, "p", "cat /proc/net/unix");
        assert!(sockets.contains("cri.sock"), "the pod does not see the sockets of the node: {sockets}");
        let abstract_ones = sockets.lines().filter(|line| line.contains(" @"));
        assert_eq!(abstract_ones.collect::<Vec<_>>(), Vec::<&str>::new());
    });
}

/// CVE-2025-0426, CVE-2019-11248, CVE-2025-46599: ports of the kubelet without authentication.
#[test]
fn cve_2025_0426_the_kubelet_api_requires_credentials() {
    on_a_cluster(|_, _| {
        // Without IPv6 in the kernel, the table `tcp6` does not exist.
        let tables =
            ["tcp", "tcp6"].map(|table| fs::read_to_string(format!("/proc/thread-self/net/{table}")));
        let listening = tables.into_iter().flatten().collect::<String>();
        assert!(!listening.contains(&format!(":{:04X} ", 10255)), "a read-only port is open");
        let is_open = |host: &&str| TcpStream::connect(format!("{host}:10250")).is_ok();
        let hosts: Vec<_> = ["127.0.0.1", "[::1]"].into_iter().filter(is_open).collect();
        assert!(!hosts.is_empty(), "the kubelet API does not listen: {listening}");
        let paths = ["checkpoint/default/p/c", "pods", "debug/pprof/profile", "metrics", "run/default/p/c"];
        for (host, path) in hosts.iter().flat_map(|host| paths.map(|path| (host, path))) {
            let url = format!("https://{host}:10250/{path}");
            for method in ["GET", "POST"] {
                let code = ["-gks", "-o", "/dev/null", "-w", "%{http_code}", "-X", method, &url];
                let output = std::process::Command::new("curl").args(code).output().unwrap();
                let code = String::from_utf8(output.stdout).unwrap();
                assert!(["401", "403", "404", "405"].contains(&code.as_str()), "{method} {url}: {code}");
                assert!(
                    path.starts_with("debug") || code.starts_with("40") && code != "404",
                    "{method} {url}: {code}"
                );
            }
        }
    });
}

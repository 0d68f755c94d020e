//! Services and cluster DNS: real pods as servers and clients.

use std::process::Command;

use coracle_integration::{Cluster, eventually, on_a_machine};

/// A pod that answers HTTP on port 8080 with its name.
fn server(name: &str) -> String {
    format!(
        r#"{{"apiVersion":"v1","kind":"Pod","metadata":{{"name":"{name}","labels":{{"app":"web"}}}},
        "spec":{{"terminationGracePeriodSeconds":0,"hostname":"{name}","subdomain":"headless",
        "containers":[{{"name":"c","image":"busybox","command":["sh","-c",
        "mkdir /w; echo {name} > /w/index.html; exec httpd -f -p 8080 -h /w"],
        "readinessProbe":{{"httpGet":{{"path":"/","port":8080}},"periodSeconds":1}}}}]}}}}"#
    )
}

fn client() -> &'static str {
    r#"{"apiVersion":"v1","kind":"Pod","metadata":{"name":"client"},"spec":{"terminationGracePeriodSeconds":0,
    "containers":[{"name":"c","image":"busybox","command":["sleep","100000"]}]}}"#
}

fn service(name: &str, spec: &str) -> String {
    format!(r#"{{"apiVersion":"v1","kind":"Service","metadata":{{"name":"{name}"}},"spec":{spec}}}"#)
}

/// Defines `ask HOST PORT`: one HTTP request from a pod. A host that is not an address is a service of its namespace.
const ASK: &str = r#"ask() { case $1 in *.*) ip=$1;; *) ip=$(nslookup -type=a $1.default.svc.cluster.local | sed -n 's/^Address: //p' | tail -1);; esac
    printf 'GET / HTTP/1.0\r\n\r\n' | nc -w 5 ${ip:-unknown} $2 2>&1 | tail -1; }"#;

fn ask(pod: &str, cluster: &Cluster, host: &str, port: &str, times: u32) -> Vec<String> {
    let script = format!("{ASK}; for i in $(seq {times}); do ask {host} {port}; done");
    let output = cluster.kubectl(&["exec", pod, "--", "sh", "-c", &script]);
    let mut all: Vec<String> = output.lines().map(str::to_owned).collect();
    all.sort();
    all.dedup();
    all
}

/// The answers of several requests from the client pod, sorted and without repetitions.
fn answers(cluster: &Cluster, host: &str, times: u32) -> Vec<String> {
    ask("client", cluster, host, "80", times)
}

fn lookup(cluster: &Cluster, kind: &str, name: &str) -> String {
    let script = format!("nslookup -type={kind} {name} 2>&1; true");
    cluster.kubectl(&["exec", "client", "--", "sh", "-c", &script])
}

fn prepare(cluster: &Cluster) {
    for name in ["one", "two"] {
        cluster.apply(&server(name));
    }
    cluster.apply(client());
    let ports = r#""ports":[{"name":"http","port":80,"targetPort":8080}]"#;
    cluster.apply(&service("web", &format!(r#"{{"selector":{{"app":"web"}},"type":"NodePort",{ports}}}"#)));
    let sticky = r#""sessionAffinity":"ClientIP""#;
    cluster.apply(&service("sticky", &format!(r#"{{"selector":{{"app":"web"}},{sticky},{ports}}}"#)));
    cluster.apply(&service(
        "headless",
        &format!(r#"{{"selector":{{"app":"web"}},"clusterIP":"None",{ports}}}"#),
    ));
    cluster.apply(&service("empty", &format!(r#"{{"selector":{{"app":"none"}},{ports}}}"#)));
    cluster
        .apply(&service("away", r#"{"type":"ExternalName","externalName":"web.default.svc.cluster.local"}"#));
    cluster.kubectl(&["wait", "pod", "--all", "--for=condition=Ready", "--timeout=240s"]);
}

#[test]
fn pods_reach_services_by_name_address_and_node_port() {
    on_a_machine(|machine| {
        let mirrors = machine.start_registry();
        let cluster = Cluster::up_with(machine, &mirrors, &["--image-gc-high-threshold", "100"]);
        prepare(&cluster);
        eventually("both endpoints to answer by name", 60, || answers(&cluster, "web", 10) == ["one", "two"]);
        let web = cluster.get(&["service", "web"]);
        let ip = web["spec"]["clusterIP"].as_str().unwrap().to_owned();
        assert_eq!(answers(&cluster, &ip, 20), ["one", "two"]);
        let node = cluster.get(&["node", "node-1"])["status"]["addresses"][0]["address"].clone();
        let port = web["spec"]["ports"][0]["nodePort"].to_string();
        let by_node_port = ask("client", &cluster, node.as_str().unwrap(), &port, 20);
        assert_eq!(by_node_port, ["one", "two"]);
        assert_eq!(answers(&cluster, "sticky", 20).len(), 1);
        let own = ask("one", &cluster, "web", "80", 20);
        assert_eq!(own, ["one", "two"], "pods of the service that a pod of the service reaches");
        let flushed = Command::new("nft").args(["flush", "ruleset"]).status().unwrap();
        assert!(flushed.success());
        eventually("the service after another process has removed all tables", 60, || {
            answers(&cluster, &ip, 20) == ["one", "two"]
        });
        add_route();
        let refused = answers(&cluster, "empty", 1);
        assert!(refused[0].contains("refused"), "{refused:?}");
        names(&cluster, &ip);
        cluster.kubectl(&["delete", "pod", "one", "--now"]);
        eventually("the last endpoint alone to answer", 60, || answers(&cluster, "web", 10) == ["two"]);
        assert_eq!(answers(&cluster, "sticky", 10), ["two"]);
        cluster.kubectl(&["delete", "service", "web"]);
        eventually("the name to end", 30, || {
            lookup(&cluster, "a", "web.default.svc.cluster.local").contains("NXDOMAIN")
        });
    });
}

/// Routes cluster IPs to the machine's uplink, as a default route does. Without a route, a packet to an address without
/// endpoints would not reach the filters.
fn add_route() {
    let words = ["route", "add", "10.43.0.0/16", "dev", "uplink0"];
    assert!(Command::new("ip").args(words).status().unwrap().success());
}

fn names(cluster: &Cluster, ip: &str) {
    let pod_ip = cluster.get(&["pod", "two"])["status"]["podIP"].as_str().unwrap().to_owned();
    let of = |kind: &str, name: &str| lookup(cluster, kind, name);
    assert!(of("a", "web.default.svc.cluster.local").contains(ip));
    assert!(of("a", "two.headless.default.svc.cluster.local").contains(&pod_ip));
    assert!(of("a", &format!("{}.default.pod.cluster.local", pod_ip.replace('.', "-"))).contains(&pod_ip));
    assert!(of("a", "away.default.svc.cluster.local").contains(ip));
    assert!(
        of("srv", "_http._tcp.web.default.svc.cluster.local").contains("80 web.default.svc.cluster.local")
    );
    let reversed = ip.rsplit('.').collect::<Vec<_>>().join(".");
    let name = of("ptr", &format!("{reversed}.in-addr.arpa"));
    assert!(name.contains("web.default.svc.cluster.local"), "{name}");
    assert!(of("a", "none.default.svc.cluster.local").contains("NXDOMAIN"));
    let dns = cluster.get(&["service", "kube-dns", "-n", "kube-system"]);
    assert_eq!(dns["spec"]["clusterIP"], "10.43.0.10");
}

const BALANCER: &str = r#""selector":{"app":"web"},"type":"LoadBalancer""#;

/// A LoadBalancer service with one port.
fn balancer(name: &str, port: u16, more: &str) -> String {
    service(
        name,
        &format!(r#"{{{BALANCER}{more},"ports":[{{"name":"http","port":{port},"targetPort":8080}}]}}"#),
    )
}

/// The addresses in a service's status.
fn ingress(cluster: &Cluster, name: &str) -> Vec<String> {
    let service = cluster.get(&["service", name]);
    let list = service["status"]["loadBalancer"]["ingress"].as_array().cloned().unwrap_or_default();
    list.iter().map(|entry| entry["ip"].as_str().unwrap().to_owned()).collect()
}

/// Whether an event about a service has this reason and text.
fn has_event(cluster: &Cluster, name: &str, reason: &str, text: &str) -> bool {
    let selector = format!("involvedObject.name={name},reason={reason}");
    let events = cluster.get(&["events", "--field-selector", &selector]);
    events["items"].as_array().unwrap().iter().any(|event| event["message"].as_str().unwrap().contains(text))
}

#[test]
fn nodes_serve_load_balancers_at_their_addresses_but_never_their_own_ports() {
    on_a_machine(|machine| {
        let mirrors = machine.start_registry();
        let cluster = Cluster::up_with(machine, &mirrors, &["--image-gc-high-threshold", "100"]);
        prepare(&cluster);
        let node = cluster.get(&["node", "node-1"])["status"]["addresses"][0]["address"].clone();
        let node = node.as_str().unwrap().to_owned();
        // A program of the machine listens on a port of the node.
        let listener = std::net::TcpListener::bind(("0.0.0.0", 8082)).unwrap();
        cluster.apply(&balancer("lb", 8081, ""));
        eventually("the node's address", 60, || ingress(&cluster, "lb") == [node.clone()]);
        let entry = cluster.get(&["service", "lb"])["status"]["loadBalancer"]["ingress"][0].clone();
        assert_eq!(
            (entry["ipMode"].as_str(), entry["ports"][0]["port"].as_u64()),
            (Some("Proxy"), Some(8081))
        );
        eventually("both endpoints to answer", 60, || {
            ask("client", &cluster, &node, "8081", 10) == ["one", "two"]
        });
        cluster.apply(&balancer("late", 8081, ""));
        cluster.apply(&balancer("ssh", 22, ""));
        cluster.apply(&balancer("used", 8082, ""));
        cluster.apply(&balancer("foreign", 8083, r#","loadBalancerClass":"example.com/other""#));
        eventually("the refusals", 60, || {
            has_event(&cluster, "late", "LoadBalancerRefused", "default/lb")
                && has_event(&cluster, "ssh", "LoadBalancerRefused", "reserved")
                && has_event(&cluster, "used", "LoadBalancerPortInUse", "8082/TCP")
        });
        for name in ["late", "ssh", "used", "foreign"] {
            eventually("no address", 30, || ingress(&cluster, name).is_empty());
        }
        std::net::TcpStream::connect((node.as_str(), 8082)).unwrap();
        drop(listener);
        let finalizers = |name: &str| cluster.get(&["service", name])["metadata"]["finalizers"].to_string();
        let cleanup = r#"["service.kubernetes.io/load-balancer-cleanup"]"#;
        assert_eq!((finalizers("lb").as_str(), finalizers("foreign").as_str()), (cleanup, "null"));
        cluster.kubectl(&["delete", "service", "lb"]);
        eventually("the next service to get the port", 60, || ingress(&cluster, "late") == [node.clone()]);
        assert_eq!(finalizers("late"), cleanup);
        cluster.kubectl(&["patch", "service", "late", "-p", r#"{"spec":{"type":"ClusterIP"}}"#]);
        eventually("the service without finalizer", 60, || !finalizers("late").contains("cleanup"));
        health_check(&cluster, &node);
    });
}

/// For a service with `externalTrafficPolicy: Local`, the node answers health checks of a load balancer. The answer has
/// the number of local endpoints.
fn health_check(cluster: &Cluster, node: &str) {
    cluster.apply(&balancer("local", 8084, r#","externalTrafficPolicy":"Local""#));
    let port = cluster.get(&["service", "local"])["spec"]["healthCheckNodePort"].to_string();
    let has_local_endpoints = |count: u8| {
        let found = ask("client", cluster, node, &port, 1);
        found.first().is_some_and(|answer| answer.contains(&format!(r#""localEndpoints":{count}"#)))
    };
    eventually("two local endpoints", 60, || has_local_endpoints(2));
    cluster.kubectl(&["delete", "pod", "one", "two", "--now"]);
    eventually("no local endpoint", 60, || has_local_endpoints(0));
    eventually("no address", 60, || ingress(cluster, "local").is_empty());
}

#[test]
fn a_further_range_gives_addresses_and_stays_while_they_are_used() {
    on_a_machine(|machine| {
        let mirrors = machine.start_registry();
        let cluster = Cluster::up_with(machine, &mirrors, &["--image-gc-high-threshold", "100"]);
        prepare(&cluster);
        let ready = |name: &str| {
            let range = cluster.get(&["servicecidr", name]);
            range["status"]["conditions"][0]["status"].as_str().unwrap_or_default().to_owned()
        };
        assert_eq!(ready("kubernetes"), "True");
        cluster.apply(
            r#"{"apiVersion":"networking.k8s.io/v1","kind":"ServiceCIDR","metadata":{"name":"more"},
            "spec":{"cidrs":["203.0.113.0/24"]}}"#,
        );
        eventually("the range to be ready", 30, || ready("more") == "True");
        let port = r#""ports":[{"port":80,"targetPort":8080}]"#;
        let spec = format!(r#"{{"selector":{{"app":"web"}},"clusterIP":"203.0.113.10",{port}}}"#);
        cluster.apply(&service("further", &spec));
        eventually("both endpoints to answer", 60, || {
            answers(&cluster, "203.0.113.10", 10) == ["one", "two"]
        });
        let address = |name: &str| cluster.try_kubectl(&["get", "ipaddress", name]).status.success();
        eventually("the addresses as objects", 30, || address("203.0.113.10") && address("10.43.0.1"));
        let parent = cluster.get(&["ipaddress", "203.0.113.10"])["spec"]["parentRef"].clone();
        assert_eq!(
            (parent["resource"].as_str(), parent["name"].as_str()),
            (Some("services"), Some("further"))
        );
        cluster.kubectl(&["delete", "servicecidr", "more", "--wait=false"]);
        eventually("the range to be kept", 30, || ready("more") == "False");
        cluster.kubectl(&["delete", "service", "further"]);
        eventually("the object of the address to end", 30, || !address("203.0.113.10"));
        eventually("the range to end", 60, || {
            !cluster.try_kubectl(&["get", "servicecidr", "more"]).status.success()
        });
    });
}

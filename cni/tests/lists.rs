//! Configuration lists with our plugins, which run in process, and with the reference's executables (Debian's
//! containernetworking-plugins). The tests check the state of the kernel, and need root.

#![allow(
    clippy::disallowed_methods,
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test may wait and panic"
)]

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use coracle_cni::{Attached, Attachment, Network, NetworkConfig};
use coracle_testing::{eventually, eventually_async, in_new_namespace_async, ip, run, within};
use serde_json::{Value, json};

const REFERENCE: &str = "/usr/lib/cni";

/// A host in its own network namespace, which ends with its thread.
struct Host {
    dir: tempfile::TempDir,
}

/// A process in its own network namespace, which represents a sandbox.
struct Sandbox(Child);

/// Runs the test in a new network namespace.
fn on_a_host(test: impl AsyncFnOnce(Host) + Send + 'static) {
    in_new_namespace_async(async move || {
        ip("link set lo up");
        test(Host { dir: tempfile::tempdir().unwrap() }).await;
    });
}

impl Host {
    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn configure(&self, list: &Value) {
        std::fs::create_dir_all(self.path("conf")).unwrap();
        std::fs::write(self.path("conf/10-net.new"), list.to_string()).unwrap();
        std::fs::rename(self.path("conf/10-net.new"), self.path("conf/10-net.conflist")).unwrap();
    }

    async fn open(&self) -> Network {
        let config = NetworkConfig {
            conf_dir: Some(self.path("conf")),
            bin_dirs: vec![self.path("bin"), REFERENCE.into()],
            ..NetworkConfig::of_default_network(self.path("state"), self.path("root"), "coracle0", "coracle")
        };
        Network::open(config).await.unwrap()
    }

    /// The allocated addresses in a directory of host-local.
    fn allocated(&self, network: &str) -> Vec<String> {
        let entries = std::fs::read_dir(self.path("addresses").join(network)).into_iter().flatten();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut allocated: Vec<_> = names.filter(|name| name.parse::<std::net::IpAddr>().is_ok()).collect();
        allocated.sort();
        allocated
    }
}

impl Sandbox {
    fn new() -> Self {
        let mut child =
            Command::new("unshare").args(["--net", "sleep", "1000"]).stdin(Stdio::null()).spawn().unwrap();
        let own = std::fs::read_link("/proc/thread-self/ns/net").unwrap();
        let path = format!("/proc/{}/ns/net", child.id());
        eventually("a network namespace", 10, || {
            assert!(child.try_wait().unwrap().is_none());
            std::fs::read_link(&path).is_ok_and(|ns| ns != own)
        });
        Self(child)
    }

    fn netns(&self) -> PathBuf {
        format!("/proc/{}/ns/net", self.0.id()).into()
    }

    fn run(&self, arguments: &[&str]) -> String {
        let netns = format!("--net={}", self.netns().display());
        run("nsenter", &[&[netns.as_str()], arguments].concat())
    }

    /// Whether a host responds within some seconds.
    fn reaches(&self, to: &str) -> bool {
        self.reaches_port(to, 9)
    }

    fn reaches_port(&self, to: &str, port: u16) -> bool {
        within(10, || self.refuses_connection(to, port)).is_some()
    }

    /// Whether a host refuses a connection. A refusal shows that the host is reachable.
    fn refuses_connection(&self, to: &str, port: u16) -> bool {
        let netns = format!("--net={}", self.netns().display());
        let script = format!("echo >/dev/tcp/{to}/{port}");
        let connect = Command::new("nsenter").args([&netns, "timeout", "2", "bash", "-c", &script]).output();
        String::from_utf8_lossy(&connect.unwrap().stderr).contains("Connection refused")
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

fn attachment(id: &str, sandbox: &Sandbox) -> Attachment {
    Attachment {
        id: id.into(),
        netns: sandbox.netns(),
        ifname: "eth0".into(),
        args: vec![("IgnoreUnknown".into(), "1".into()), ("K8S_POD_NAME".into(), id.into())],
        ..Attachment::default()
    }
}

fn text(attached: &Attached) -> Vec<String> {
    attached.addresses.iter().map(ToString::to_string).collect()
}

fn links() -> usize {
    run("ip", &["-o", "link"]).lines().count()
}

fn ipam(host: &Host, ranges: &Value) -> Value {
    json!({"type": "host-local", "dataDir": host.path("addresses"), "ranges": ranges,
        "routes": [{"dst": "0.0.0.0/0"}]})
}

#[test]
fn third_party_plugins_run_beside_our_own() {
    on_a_host(async |host| {
        // ptp and its host-local are executables; portmap and tuning are our plugins, in process.
        host.configure(&json!({"cniVersion": "1.0.0", "name": "mixed", "plugins": [
            {"type": "ptp", "ipMasq": false, "ipam": ipam(&host, &json!([[{"subnet": "10.77.0.0/24"}]]))},
            {"type": "portmap", "capabilities": {"portMappings": true}},
            {"type": "tuning", "dataDir": host.path("tuning"), "sysctl": {"net.ipv4.conf.IFNAME.arp_filter": "1"},
             "mtu": 1400}]}));
        let network = host.open().await;
        network.status().await.unwrap();
        let (before, sandbox) = (links(), Sandbox::new());
        let mut at = attachment("a1", &sandbox);
        at.ports =
            serde_json::from_value(json!([{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}]))
                .unwrap();
        let attached = network.add(&at).await.unwrap();
        assert_eq!(text(&attached), ["10.77.0.2/24"]);
        network.check("a1").await.unwrap();
        assert!(sandbox.run(&["ip", "link", "show", "eth0"]).contains("mtu 1400"));
        assert_eq!(sandbox.run(&["cat", "/proc/sys/net/ipv4/conf/eth0/arp_filter"]).trim(), "1");
        assert!(run("nft", &["list", "table", "inet", "coracle"]).contains("tcp . 8080 : 10.77.0.2 . 80"));
        sandbox.run(&["ip", "link", "set", "eth0", "mtu", "1300"]);
        assert!(network.check("a1").await.unwrap_err().to_string().contains("eth0"));
        network.release("a1").await.unwrap();
        network.del("a1").await.unwrap();
        assert_eq!((links(), host.allocated("mixed")), (before, Vec::new()));
        assert_eq!(run("nft", &["list", "ruleset"]), "");
    });
}

/// Simulates a reboot: removes the volatile state, and gives the other records an earlier boot ID. After a reboot, the
/// inode number of a former namespace may be reused.
fn simulate_reboot(host: &Host) {
    std::fs::remove_dir_all(host.path("state")).unwrap();
    for entry in std::fs::read_dir(host.path("root/results")).unwrap() {
        let path = entry.unwrap().path();
        let mut record: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        record["boot"] = json!("an earlier boot");
        std::fs::write(&path, record.to_string()).unwrap();
    }
}

#[test]
fn addresses_of_third_party_plugins_are_freed_after_a_boot() {
    on_a_host(async |host| {
        // Version 0.4.0 has no GC.
        host.configure(&json!({"cniVersion": "0.4.0", "name": "shared", "plugins": [
            {"type": "ptp", "ipam": ipam(&host, &json!([[{"subnet": "10.87.0.0/24"}]]))}]}));
        let network = host.open().await;
        let (a, b) = (Sandbox::new(), Sandbox::new());
        for (id, sandbox) in [("a1", &a), ("b1", &b)] {
            network.add(&attachment(id, sandbox)).await.unwrap();
        }
        // Another runtime uses the same directory.
        let foreign = host.path("addresses/shared/10.87.0.77");
        std::fs::write(&foreign, "0123456789abcdef\r\neth0").unwrap();
        drop(network);
        simulate_reboot(&host);
        let network = host.open().await;
        network.reconcile(&[]).await.unwrap();
        eventually_async("the DELs", 20, async || host.allocated("shared") == ["10.87.0.77"]).await;
        assert!(
            a.run(&["ip", "link"]).contains("eth0"),
            "the namespace with a reused inode number is not changed"
        );
        let records = host.path("root/results");
        eventually_async("no records", 20, async || std::fs::read_dir(&records).unwrap().count() == 0).await;
        assert_eq!(text(&network.add(&attachment("c1", &Sandbox::new())).await.unwrap()), ["10.87.0.4/24"]);
    });
}

#[test]
fn the_removal_of_a_node_waits_for_dels_of_executables() {
    on_a_host(async |host| {
        host.configure(&json!({"cniVersion": "0.4.0", "name": "shared", "plugins": [
            {"type": "ptp", "ipam": ipam(&host, &json!([[{"subnet": "10.88.0.0/24"}]]))}]}));
        let (network, before, sandbox) = (host.open().await, links(), Sandbox::new());
        network.add(&attachment("a1", &sandbox)).await.unwrap();
        assert_eq!(host.allocated("shared").len(), 1);
        network.remove().await.unwrap();
        assert_eq!((links(), host.allocated("shared")), (before, Vec::new()));
    });
}

#[test]
fn a_list_with_disable_gc_is_shared_with_other_runtimes() {
    on_a_host(async |host| {
        let mut list = bridge(&host, &json!([[{"subnet": "10.88.0.0/24"}]]), &json!({}));
        list["disableGC"] = json!(true);
        host.configure(&list);
        let network = host.open().await;
        let sandbox = Sandbox::new();
        network.add(&attachment("a1", &sandbox)).await.unwrap();
        std::fs::write(host.path("addresses/own/10.88.0.77"), "0123456789abcdef\r\neth0").unwrap();
        drop((network, sandbox));
        simulate_reboot(&host);
        host.open().await.reconcile(&[]).await.unwrap();
        assert_eq!(host.allocated("own"), ["10.88.0.77"]);
    });
}

#[test]
fn macvlan_and_host_local_of_the_reference_are_run_checked_and_removed() {
    on_a_host(async |host| {
        run("ip", &["link", "add", "up0", "type", "veth", "peer", "name", "up1"]);
        run("ip", &["link", "set", "up0", "up"]);
        // macvlan and the host-local that it calls are executables of the reference.
        host.configure(&json!({"cniVersion": "0.4.0", "name": "mac", "type": "macvlan", "master": "up0",
            "ipam": ipam(&host, &json!([[{"subnet": "10.78.0.0/24"}]]))}));
        let network = host.open().await;
        let (before, sandbox) = (links(), Sandbox::new());
        let attached = network.add(&attachment("m1", &sandbox)).await.unwrap();
        assert_eq!(text(&attached), ["10.78.0.2/24"]);
        assert!(sandbox.run(&["ip", "-d", "link", "show", "eth0"]).contains("macvlan"));
        network.check("m1").await.unwrap();
        network.del("m1").await.unwrap();
        assert!(!sandbox.run(&["ip", "link"]).contains("eth0"));
        assert_eq!((links(), host.allocated("mac")), (before, Vec::new()));
    });
}

fn bridge(host: &Host, ranges: &Value, more: &Value) -> Value {
    let mut plugin = json!({"type": "bridge", "bridge": "br0", "isDefaultGateway": true, "ipMasq": true,
        "ipam": ipam(host, ranges)});
    plugin["ipam"].as_object_mut().unwrap().remove("routes");
    plugin.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    json!({"cniVersion": "1.1.0", "name": "own", "plugins": [plugin,
        {"type": "bandwidth", "capabilities": {"bandwidth": true}},
        {"type": "firewall", "ingressPolicy": "same-bridge"}]})
}

#[test]
fn a_dual_stack_pod_is_wired_limited_and_checked() {
    on_a_host(async |host| {
        let ranges = json!([[{"subnet": "10.79.0.0/24"}], [{"subnet": "fd79::/64"}]]);
        host.configure(&bridge(
            &host,
            &ranges,
            &json!({"mtu": 1400, "macspoofchk": true, "promiscMode": true}),
        ));
        let network = host.open().await;
        let (a, b) = (Sandbox::new(), Sandbox::new());
        let mut at = attachment("a1", &a);
        let limits = json!({"ingressRate": 8_000_000, "ingressBurst": 800_000, "egressRate": 4_000_000, "egressBurst": 400_000});
        at.capabilities.insert("bandwidth".into(), limits);
        let attached = network.add(&at).await.unwrap();
        assert_eq!(text(&attached), ["10.79.0.2/24", "fd79::2/64"]);
        network.add(&attachment("b1", &b)).await.unwrap();
        for to in ["10.79.0.1", "10.79.0.3", "fd79::1", "fd79::3"] {
            assert!(a.reaches(to), "{to}");
        }
        let (host_end, device) = (&attached.host_interfaces[1], &attached.host_interfaces[2]);
        assert!(run("tc", &["qdisc", "show", "dev", host_end]).contains("rate 8Mbit burst 100000b"));
        assert!(run("tc", &["qdisc", "show", "dev", device]).contains("rate 4Mbit burst 50000b"));
        assert!(run("ip", &["-d", "link", "show", "br0"]).contains("promiscuity 1"));
        network.check("a1").await.unwrap();
        network.check("b1").await.unwrap();
        // Frames with a foreign hardware address are dropped.
        a.run(&["ip", "link", "set", "eth0", "address", "0a:00:00:00:00:99"]);
        b.run(&["ip", "neigh", "replace", "10.79.0.2", "lladdr", "0a:00:00:00:00:99", "dev", "eth0"]);
        assert!(!a.refuses_connection("10.79.0.3", 9));
        let refused = async || network.check("a1").await.unwrap_err().to_string();
        assert!(refused().await.contains("hardware address"));
        a.run(&["ip", "link", "set", "eth0", "address", &attached.mac]);
        for (broken, mended, what) in [
            ("link set eth0 mtu 1300", "link set eth0 mtu 1400", "MTU"),
            ("route replace default via 10.79.0.3", "route replace default via 10.79.0.1", "0.0.0.0/0"),
        ] {
            network.check("a1").await.unwrap();
            let ip = |line: &str| a.run(&[&["ip"][..], &line.split(' ').collect::<Vec<_>>()].concat());
            ip(broken);
            assert!(refused().await.contains(what), "{what}");
            ip(mended);
        }
        run("tc", &["qdisc", "del", "dev", host_end, "root"]);
        assert!(network.check("a1").await.unwrap_err().to_string().contains("bandwidth"));
        for id in ["a1", "b1"] {
            network.del(id).await.unwrap();
        }
        assert_eq!((links(), host.allocated("own")), (2, Vec::new()), "lo and the bridge");
        assert_eq!(run("nft", &["list", "ruleset"]), "");
    });
}

#[test]
fn devices_of_limits_are_removed_without_a_record() {
    on_a_host(async |host| {
        host.configure(&bridge(&host, &json!([[{"subnet": "10.90.0.0/24"}]]), &json!({})));
        let network = host.open().await;
        let limited = |id: &str, sandbox: &Sandbox| {
            let mut at = attachment(id, sandbox);
            let limits = json!({"egressRate": 4_000_000, "egressBurst": 400_000});
            at.capabilities.insert("bandwidth".into(), limits);
            at
        };
        let (a, b) = (Sandbox::new(), Sandbox::new());
        let kept = network.add(&limited("a1", &a)).await.unwrap().host_interfaces[2].clone();
        let removed = network.add(&limited("b1", &b)).await.unwrap().host_interfaces[2].clone();
        // Another implementation uses the same names.
        run("ip", &["link", "add", "bwp0123456789ab", "type", "ifb"]);
        drop(network);
        std::fs::remove_dir_all(host.path("state")).unwrap();
        drop(b);
        eventually_async("the end of the pair", 20, async || {
            run("ip", &["-o", "link", "show", "type", "veth"]).lines().count() == 1
        })
        .await;
        host.open().await.reconcile(&[limited("a1", &a)]).await.unwrap();
        let links = run("ip", &["link"]);
        assert!(
            links.contains(&kept) && links.contains("bwp0123456789ab") && !links.contains(&removed),
            "{links}"
        );
    });
}

#[test]
fn an_address_of_another_host_is_detected() {
    on_a_host(async |host| {
        let ranges = json!([[{"subnet": "fd80::/64"}]]);
        host.configure(&bridge(&host, &ranges, &json!({"enabledad": true})));
        let network = host.open().await;
        let (a, b) = (Sandbox::new(), Sandbox::new());
        network.add(&attachment("a1", &a)).await.unwrap();
        a.run(&["ip", "addr", "add", "fd80::3/64", "dev", "eth0", "nodad"]);
        let error = network.add(&attachment("b1", &b)).await.unwrap_err();
        assert_eq!(error.to_string(), "the address fd80::3 is in use by another host of the network");
        assert_eq!(host.allocated("own"), ["fd80::2"]);
        assert!(!b.run(&["ip", "link"]).contains("eth0"));
        assert_eq!(text(&network.add(&attachment("b1", &b)).await.unwrap()), ["fd80::4/64"]);
    });
}

#[test]
fn neighbours_learn_a_new_owner_of_an_address_at_once() {
    on_a_host(async |host| {
        let ranges = json!([[{"subnet": "10.81.0.0/24"}], [{"subnet": "fd81::/64"}]]);
        let mut list = bridge(&host, &ranges, &json!({}));
        list["plugins"][0]["capabilities"] = json!({"mac": true, "ips": true});
        host.configure(&list);
        let network = host.open().await;
        let (a, b) = (Sandbox::new(), Sandbox::new());
        network.add(&attachment("a1", &a)).await.unwrap();
        for address in ["10.81.0.9", "fd81::9"] {
            a.run(&[
                "ip",
                "neigh",
                "replace",
                address,
                "lladdr",
                "0a:00:00:00:00:01",
                "dev",
                "eth0",
                "nud",
                "stale",
            ]);
        }
        // The kernel ignores a second ARP reply within a second (neigh/locktime).
        let age = || {
            let entries = a.run(&["ip", "-s", "-j", "neigh", "show", "10.81.0.9"]);
            serde_json::from_str::<Value>(&entries).unwrap()[0]["updated"].as_u64()
        };
        eventually_async("an older entry", 10, async || age().is_some_and(|seconds| seconds >= 2)).await;
        let mut at = attachment("b1", &b);
        at.capabilities.insert("mac".into(), json!("0a:00:00:00:00:02"));
        at.capabilities.insert("ips".into(), json!(["10.81.0.9/24", "fd81::9"]));
        let attached = network.add(&at).await.unwrap();
        assert_eq!(
            (text(&attached), attached.mac.as_str()),
            (vec!["10.81.0.9/24".into(), "fd81::9/64".into()], "0a:00:00:00:00:02")
        );
        for address in ["10.81.0.9", "fd81::9"] {
            eventually_async(address, 20, async || {
                a.run(&["ip", "neigh", "show", address]).contains("0a:00:00:00:00:02")
            })
            .await;
        }
    });
}

/// Makes an executable plugin: a shell script with its configuration on standard input.
fn script(host: &Host, name: &str, text: &str) {
    std::fs::create_dir_all(host.path("bin")).unwrap();
    let (new, path) = (host.path("bin/new"), host.path("bin").join(name));
    std::fs::write(&new, format!("#!/bin/sh\n{text}\n")).unwrap();
    std::fs::set_permissions(&new, std::fs::Permissions::from_mode(0o755)).unwrap();
    std::fs::rename(&new, path).unwrap();
}

#[test]
fn requested_addresses_reach_the_plugins_and_must_be_assigned() {
    on_a_host(async |host| {
        // The plugin always returns this interface and address, independent of the request.
        let answer = json!({"cniVersion": "1.0.0", "ips": [{"address": "10.86.0.9/24", "interface": 0}],
            "interfaces": [{"name": "eth0", "mac": "0a:00:00:00:00:01", "sandbox": "/x"}]});
        let record = host.path("configuration");
        script(
            &host,
            "theirs",
            &format!(
                "case $CNI_COMMAND in\nADD) cat >{}; nsenter --net=$CNI_NETNS ip link add eth0 type bridge; \
                 echo '{answer}';;\nDEL) nsenter --net=$CNI_NETNS ip link del eth0 2>/dev/null; true;;\nesac",
                record.display()
            ),
        );
        let list = |capabilities: Value| {
            json!({"cniVersion": "1.0.0", "name": "asked", "plugins": [
                {"type": "theirs", "capabilities": capabilities},
                {"type": "tuning", "dataDir": host.path("tuning"), "capabilities": {"mac": true}}]})
        };
        host.configure(&list(json!({"ips": true})));
        let (network, sandbox) = (host.open().await, Sandbox::new());
        let mut at = attachment("a1", &sandbox);
        at.capabilities.insert("ips".into(), json!(["10.86.0.9"]));
        at.capabilities.insert("mac".into(), json!("0A-00-00-00-00-02"));
        network.check_requested(&at).await.unwrap();
        let attached = network.add(&at).await.unwrap();
        assert_eq!(
            (text(&attached), attached.mac.as_str()),
            (vec!["10.86.0.9/24".into()], "0a:00:00:00:00:02")
        );
        assert!(sandbox.run(&["ip", "link", "show", "eth0"]).contains("0a:00:00:00:00:02"));
        let received: Value = serde_json::from_slice(&std::fs::read(&record).unwrap()).unwrap();
        assert_eq!(received["runtimeConfig"], json!({"ips": ["10.86.0.9"]}), "only the declared capability");
        network.del("a1").await.unwrap();
        let is_undone =
            || !sandbox.run(&["ip", "link"]).contains("eth0") && !host.path("root/results/a1.json").exists();
        assert!(is_undone());
        at.capabilities.insert("ips".into(), json!(["10.86.0.10"]));
        let error = network.add(&at).await.unwrap_err().to_string();
        let expected = "the network asked did not assign 10.86.0.10 although it declares the capability ips";
        assert!(error == expected && is_undone(), "{error}");
        host.configure(&list(json!({"portMappings": true})));
        let expected =
            "no plugin of the network asked declares the capability ips, which the sandbox requests";
        eventually_async("the other list", 20, async || {
            network.check_requested(&at).await.is_err_and(|error| error.to_string() == expected)
        })
        .await;
        std::fs::remove_file(&record).unwrap();
        assert_eq!(network.add(&at).await.unwrap_err().to_string(), expected);
        assert!(is_undone() && !record.exists(), "no plugin was run");
    });
}

#[test]
fn the_network_follows_the_configuration_directory() {
    on_a_host(async |host| {
        let network = host.open().await;
        assert_eq!(network.ready().unwrap_err(), "no pod address range is set");
        network.set_pod_cidrs(vec!["10.82.0.0/24".parse().unwrap()]).await.unwrap();
        assert!(network.status().await.is_ok());
        let (a, b) = (Sandbox::new(), Sandbox::new());
        assert_eq!(text(&network.add(&attachment("a1", &a)).await.unwrap()), ["10.82.0.2/24"]);
        network.reconcile(&[attachment("a1", &a)]).await.unwrap();
        // An address file of a removed container, in the directory of a network that is configured later.
        std::fs::create_dir_all(host.path("addresses/own")).unwrap();
        std::fs::write(host.path("addresses/own/10.83.0.9"), "gone\r\neth0").unwrap();
        host.configure(&bridge(&host, &json!([[{"subnet": "10.83.0.0/24"}]]), &json!({})));
        eventually_async("the address", 20, async || host.allocated("own").is_empty()).await;
        eventually_async("the list", 20, async || {
            let added = network.add(&attachment("b1", &b)).await;
            added.is_ok_and(|attached| text(&attached) == ["10.83.0.2/24"]) || {
                network.del("b1").await.unwrap();
                false
            }
        })
        .await;
        std::fs::write(host.path("conf/10-net.conflist"), "{").unwrap();
        eventually_async("the error", 20, async || {
            network.ready().is_err_and(|why| why.contains("10-net.conflist"))
        })
        .await;
        assert!(network.add(&attachment("c1", &b)).await.is_err());
        host.configure(&json!({"cniVersion": "1.0.0", "name": "n", "plugins": [{"type": "absent"}]}));
        eventually_async("the plugin", 20, async || {
            network.ready().is_err_and(|why| why.contains("cannot find the plugin absent"))
        })
        .await;
        // The plugin is installed after its list.
        std::fs::create_dir_all(host.path("bin")).unwrap();
        std::fs::write(host.path("bin/absent"), "#!/bin/sh\n").unwrap();
        std::fs::set_permissions(host.path("bin/absent"), std::fs::Permissions::from_mode(0o755)).unwrap();
        assert_eq!(network.ready(), Ok(()));
        std::fs::remove_dir_all(host.path("conf")).unwrap();
        eventually_async("the default", 20, async || network.ready().is_ok()).await;
        // Each DEL uses the list of its ADD.
        network.del("a1").await.unwrap();
        network.del("b1").await.unwrap();
        assert_eq!(host.allocated("own"), Vec::<String>::new());
        assert!(!run("ip", &["-o", "link"]).contains("veth"));
    });
}

#[test]
fn a_plugin_gets_status_and_gc() {
    on_a_host(async |host| {
        std::fs::create_dir_all(host.path("bin")).unwrap();
        let plugin = host.path("bin/witness");
        let log = host.path("log");
        let script = format!(
            "#!/bin/sh\nc=$(cat)\necho \"$CNI_COMMAND $CNI_CONTAINERID $CNI_ARGS $c\" >>{log}\n\
             [ \"$CNI_COMMAND\" = STATUS ] && [ -e {log}.busy ] && {{ echo '{{\"code\":50,\"msg\":\"busy\"}}'; exit 1; }}\n\
             [ \"$CNI_COMMAND\" = ADD ] && echo '{{\"cniVersion\":\"1.1.0\",\"ips\":[{{\"address\":\"10.1.1.1/32\"}}]}}'\nexit 0\n",
            log = log.display()
        );
        std::fs::write(&plugin, script).unwrap();
        std::fs::set_permissions(&plugin, std::fs::Permissions::from_mode(0o755)).unwrap();
        host.configure(
            &json!({"cniVersion": "1.1.0", "name": "n", "plugins": [{"type": "witness", "x": {"y": 1}}]}),
        );
        let network = host.open().await;
        network.status().await.unwrap();
        std::fs::write(format!("{}.busy", log.display()), "").unwrap();
        assert_eq!(network.status().await.unwrap_err(), "plugin witness: busy (code 50)");
        let (a, b) = (Sandbox::new(), Sandbox::new());
        for (id, sandbox) in [("a1", &a), ("b1", &b)] {
            network.add(&attachment(id, sandbox)).await.unwrap();
        }
        std::fs::write(&log, "").unwrap();
        drop(network);
        let again = host.open().await;
        again.reconcile(&[attachment("a1", &a)]).await.unwrap();
        // DEL and GC run in the background, and `reconcile` does not wait for them.
        let read_log = async || std::fs::read_to_string(&log).unwrap();
        eventually_async("the DEL", 20, async || read_log().await.lines().count() == 2).await;
        let text = read_log().await;
        let mut lines: Vec<_> = text.lines().collect();
        lines.sort_by_key(|line| !line.starts_with("GC "));
        assert!(
            lines[0].contains(r#""cni.dev/valid-attachments":[{"containerID":"a1","ifname":"eth0"}]"#),
            "{lines:?}"
        );
        assert!(lines[1].starts_with("DEL b1 IgnoreUnknown=1;K8S_POD_NAME=b1 "), "{lines:?}");
        assert!(lines[1].contains(r#""prevResult":{"#) && lines[1].contains(r#""x":{"y":1}"#), "{lines:?}");
        assert_eq!(lines.len(), 2);
    });
}

#[test]
fn an_executable_that_hangs_blocks_nothing_else() {
    on_a_host(async |host| {
        std::fs::create_dir_all(host.path("bin")).unwrap();
        let (plugin, log) = (host.path("bin/slow"), host.path("log"));
        let script = format!(
            "#!/bin/sh\ncat >{log}.input.$$\necho \"$CNI_COMMAND $CNI_CONTAINERID\" >>{log}\n\
             [ \"$CNI_COMMAND$CNI_CONTAINERID\" = ADDh1 ] && while [ ! -e {log}.go ]; do sleep 0.05; done\n\
             [ \"$CNI_COMMAND\" = GC ] && while [ ! -e {log}.go ]; do sleep 0.05; done\n\
             [ \"$CNI_COMMAND\" = ADD ] && echo '{{\"cniVersion\":\"1.1.0\",\"ips\":[{{\"address\":\"10.1.1.1/32\"}}]}}'\nexit 0\n",
            log = log.display()
        );
        std::fs::write(&plugin, script).unwrap();
        std::fs::set_permissions(&plugin, std::fs::Permissions::from_mode(0o755)).unwrap();
        host.configure(&json!({"cniVersion": "1.1.0", "name": "n", "plugins": [{"type": "slow"}]}));
        let network = host.open().await;
        let read_log = || std::fs::read_to_string(&log).unwrap_or_default();
        let (a, b) = (Sandbox::new(), Sandbox::new());
        let (hanging, other) = (attachment("h1", &a), attachment("b1", &b));
        let other_calls = async {
            eventually_async("the ADD", 20, async || read_log().contains("ADD h1")).await;
            network.set_mtu(None).await.unwrap();
            network.set_mtu(Some(1300)).await.unwrap();
            network.set_unmasqueraded(vec!["10.2.0.0/16".parse().unwrap()]).await.unwrap();
            network.add(&other).await.unwrap();
            network.check("b1").await.unwrap();
            network.reconcile(&[hanging.clone(), other.clone()]).await.unwrap();
            eventually_async("the GC", 20, async || read_log().contains("GC ")).await;
            network.set_mtu(Some(1400)).await.unwrap();
            network.del("b1").await.unwrap();
            std::fs::write(format!("{}.go", log.display()), "").unwrap();
        };
        // This limit is far below the timeout of a plugin.
        let other_calls = tokio::time::timeout(Duration::from_secs(40), other_calls);
        let (added, other_calls) = tokio::join!(network.add(&hanging), other_calls);
        other_calls.expect("another call waited for the executable");
        added.unwrap();
        network.del("h1").await.unwrap();
    });
}

/// A third-party plugin that assigns an address and whose GC hangs until it is killed.
fn make_hanging_plugin(host: &Host) {
    script(
        host,
        "hangs",
        &format!(
            "cat >/dev/null\necho \"$CNI_COMMAND $CNI_CONTAINERID $$\" >>{log}\n\
             [ $CNI_COMMAND = GC ] && [ ! -e {log}.go ] && sleep 1000\n[ $CNI_COMMAND = ADD ] && sleep 0.2 && \
             echo '{{\"cniVersion\":\"1.1.0\",\"ips\":[{{\"address\":\"10.1.1.1/32\"}}]}}'\nexit 0",
            log = host.path("log").display()
        ),
    );
    host.configure(&json!({"cniVersion": "1.1.0", "name": "n", "plugins": [
        {"type": "hangs", "capabilities": {"mac": true}}]}));
}

#[test]
fn a_hanging_gc_is_killed_when_a_pod_waits_and_is_retried() {
    on_a_host(async |host| {
        make_hanging_plugin(&host);
        let (network, sandbox) = (host.open().await, Sandbox::new());
        let gc_pids = || {
            let text = std::fs::read_to_string(host.path("log")).unwrap_or_default();
            let gcs = text.lines().filter(|line| line.starts_with("GC "));
            gcs.map(|line| line.split(' ').nth(2).unwrap().to_owned()).collect::<Vec<_>>()
        };
        network.reconcile(&[]).await.unwrap();
        eventually_async("the GC", 20, async || gc_pids().len() == 1).await;
        // The timeout of a plugin is one minute.
        let at = attachment("a1", &sandbox);
        let added = tokio::time::timeout(Duration::from_secs(40), network.add(&at));
        added.await.expect("the pod waited").unwrap();
        let of_first = |stat: &str| stat.split(' ').nth(4) == Some(gc_pids()[0].as_str());
        let processes =
            || std::fs::read_dir("/proc").unwrap().flatten().map(|entry| entry.path().join("stat"));
        let is_alive =
            || processes().filter_map(|stat| std::fs::read_to_string(stat).ok()).any(|s| of_first(&s));
        eventually_async("the end of the GC and of its children", 20, async || !is_alive()).await;
        std::fs::write(host.path("log.go"), "").unwrap();
        eventually_async("another GC", 20, async || gc_pids().len() == 2).await;
        network.del("a1").await.unwrap();
    });
}

#[test]
fn an_attachment_uses_the_list_that_is_current_when_it_is_recorded() {
    on_a_host(async |host| {
        make_hanging_plugin(&host);
        let (network, sandbox) = (host.open().await, Sandbox::new());
        network.reconcile(&[]).await.unwrap();
        let read_log = || std::fs::read_to_string(host.path("log")).unwrap_or_default();
        eventually_async("the GC", 20, async || read_log().contains("GC ")).await;
        let replaced = async {
            let mut status_changes = network.status_changes();
            host.configure(&bridge(&host, &json!([[{"subnet": "10.91.0.0/24"}]]), &json!({})));
            status_changes.changed().await.unwrap();
            std::fs::write(host.path("log.go"), "").unwrap();
        };
        let at = attachment("a1", &sandbox);
        // ADD waits for the GC of the old list. The GC ends after the list was replaced.
        let (added, ()) = tokio::join!(biased; network.add(&at), replaced);
        assert_eq!(text(&added.unwrap()), ["10.91.0.2/24"]);
        assert!(!read_log().contains("ADD"), "{}", read_log());
        drop(network);
        let network = host.open().await;
        network.del("a1").await.unwrap();
        assert!(!read_log().contains("DEL"), "{}", read_log());
        assert_eq!(host.allocated("own"), Vec::<String>::new());
    });
}

#[test]
fn a_requested_hardware_address_is_unique() {
    on_a_host(async |host| {
        make_hanging_plugin(&host);
        std::fs::write(host.path("log.go"), "").unwrap();
        let (network, a, b) = (host.open().await, Sandbox::new(), Sandbox::new());
        let requesting = |id: &str, sandbox: &Sandbox| {
            let mut at = attachment(id, sandbox);
            at.capabilities.insert("mac".into(), json!("0a:00:00:00:00:02"));
            at
        };
        let (first, second) = (requesting("a1", &a), requesting("b1", &b));
        let (first, second) = tokio::join!(network.add(&first), network.add(&second));
        let errors: Vec<_> =
            [first.err(), second.err()].into_iter().flatten().map(|e| e.to_string()).collect();
        assert!(errors.len() == 1 && errors[0].contains("0a:00:00:00:00:02"), "{errors:?}");
    });
}

#[test]
fn a_foreign_flush_is_repaired() {
    on_a_host(async |host| {
        let network = host.open().await;
        network.set_pod_cidrs(vec!["10.84.0.0/24".parse().unwrap()]).await.unwrap();
        let sandbox = Sandbox::new();
        let mut at = attachment("a1", &sandbox);
        at.ports = serde_json::from_value(json!([{"hostPort": 8080, "containerPort": 80}])).unwrap();
        network.add(&at).await.unwrap();
        let ruleset = || run("nft", &["list", "ruleset"]);
        let before = ruleset();
        assert!(before.contains("8080"));
        // A pod reaches itself by its own host port, which needs hairpin mode and masquerading.
        assert!(sandbox.reaches_port("10.84.0.1", 8080));
        for foreign in [
            &["flush", "ruleset"][..],
            &["delete", "table", "inet", "coracle"],
            &["flush", "chain", "inet", "coracle", "hostports"],
        ] {
            run("nft", foreign);
            eventually_async("the repair", 20, async || ruleset() == before).await;
        }
        // A table of another program is not changed.
        run("nft", &["add", "table", "inet", "other"]);
        run("nft", &["delete", "table", "inet", "other"]);
        assert_eq!(ruleset(), before);
    });
}

#[test]
fn lost_records_are_restored_from_running_sandboxes() {
    on_a_host(async |host| {
        let network = host.open().await;
        network
            .set_pod_cidrs(vec!["10.85.0.0/24".parse().unwrap(), "fd85::/64".parse().unwrap()])
            .await
            .unwrap();
        let (a, b, c) = (Sandbox::new(), Sandbox::new(), Sandbox::new());
        for (id, sandbox) in [("a1", &a), ("b1", &b)] {
            network.add(&attachment(id, sandbox)).await.unwrap();
        }
        drop(network);
        std::fs::remove_dir_all(host.path("state")).unwrap();
        let network = host.open().await;
        // The ranges are set after the first reconcile, as on a node.
        network.reconcile(&[attachment("a1", &a)]).await.unwrap();
        network
            .set_pod_cidrs(vec!["10.85.0.0/24".parse().unwrap(), "fd85::/64".parse().unwrap()])
            .await
            .unwrap();
        let allocated = |host: &Host| {
            let entries = std::fs::read_dir(host.path("state/networks/coracle")).unwrap();
            let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
            let mut allocated: Vec<_> =
                names.filter(|name| name.parse::<std::net::IpAddr>().is_ok()).collect();
            allocated.sort();
            allocated
        };
        assert_eq!(allocated(&host), ["10.85.0.2", "fd85::2"]);
        assert_eq!(run("ip", &["-o", "link"]).matches("veth").count(), 1, "no attachment uses b1's port");
        assert_eq!(text(&network.add(&attachment("c1", &c)).await.unwrap()), ["10.85.0.3/24", "fd85::3/64"]);
        assert!(c.reaches("10.85.0.2"));
        network.del("a1").await.unwrap();
        network.del("c1").await.unwrap();
        assert_eq!(allocated(&host), Vec::<String>::new());
        assert!(!run("ip", &["-o", "link"]).contains("veth"));
    });
}

/// The kernel's firewall, and the claims from which it is derived.
fn firewall(host: &Host) -> (String, BTreeMap<String, String>) {
    let files = std::fs::read_dir(host.path("state/firewall")).unwrap().map(|entry| entry.unwrap().path());
    let claims = files.map(|path| {
        (path.file_name().unwrap().to_str().unwrap().to_owned(), std::fs::read_to_string(&path).unwrap())
    });
    (run("nft", &["list", "table", "inet", "coracle"]), claims.collect())
}

#[test]
fn a_lost_firewall_is_restored_from_running_sandboxes() {
    on_a_host(async |host| {
        let mut list =
            bridge(&host, &json!([[{"subnet": "10.89.0.0/24"}], [{"subnet": "fd89::/64"}]]), &json!({}));
        let portmap = json!({"type": "portmap", "capabilities": {"portMappings": true}});
        list["plugins"].as_array_mut().unwrap().insert(1, portmap);
        host.configure(&list);
        let network = host.open().await;
        let (a, b) = (Sandbox::new(), Sandbox::new());
        let ports = |number: u16| {
            let at = attachment(&format!("pod{number}"), if number == 8080 { &a } else { &b });
            let ports = json!([{"hostPort": number, "containerPort": 80}]);
            Attachment { ports: serde_json::from_value(ports).unwrap(), ..at }
        };
        network.add(&ports(8080)).await.unwrap();
        let one_pod = firewall(&host);
        network.add(&ports(8081)).await.unwrap();
        let two_pods = firewall(&host);
        assert_eq!(two_pods.1.len(), 6, "masquerading, ports and isolation of each pod: {two_pods:?}");
        // A running network would repair the table itself.
        drop(network);
        for lost in ["none", "firewall", ""] {
            std::fs::create_dir_all(host.path("state/none")).unwrap();
            std::fs::remove_dir_all(host.path("state").join(lost)).unwrap();
            run("nft", &["flush", "ruleset"]);
            let network = host.open().await;
            network.reconcile(&[ports(8080), ports(8081)]).await.unwrap();
            assert_eq!(firewall(&host), two_pods, "{lost}");
            for id in ["pod8080", "pod8081"] {
                network.check(id).await.unwrap();
            }
        }
        let network = host.open().await;
        network.reconcile(&[ports(8080)]).await.unwrap();
        assert_eq!(firewall(&host), one_pod);
        network.del("pod8080").await.unwrap();
        assert_eq!((run("nft", &["list", "ruleset"]), host.allocated("own")), (String::new(), Vec::new()));
    });
}

#[test]
fn a_full_range_is_reported_and_recovers() {
    on_a_host(async |host| {
        let network = host.open().await;
        network.set_pod_cidrs(vec!["10.86.0.0/30".parse().unwrap()]).await.unwrap();
        let (a, b) = (Sandbox::new(), Sandbox::new());
        network.add(&attachment("a1", &a)).await.unwrap();
        let error = network.add(&attachment("b1", &b)).await.unwrap_err();
        assert_eq!(error.to_string(), "no address is free in 10.86.0.0/30: all 1 are in use");
        // The node stays Ready while a range is full.
        network.status().await.unwrap();
        assert!(!b.run(&["ip", "link"]).contains("eth0"));
        // The next ADD does not wait for the sweep of a released sandbox.
        network.release("a1").await.unwrap();
        assert_eq!(text(&network.add(&attachment("b1", &b)).await.unwrap()), ["10.86.0.2/30"]);
    });
}

#[test]
fn plugins_of_old_versions_get_no_unknown_command() {
    on_a_host(async |host| {
        let conf = |version: &str| {
            json!({"cniVersion": version, "name": "net", "plugins": [{"type": "bridge", "bridge": "br0",
                "ipam": {"type": "static", "addresses": [{"address": "10.91.0.2/24"}]}}]})
        };
        host.configure(&conf("1.0.0"));
        let network = host.open().await;
        network.status().await.unwrap();
        network.reconcile(&[]).await.unwrap();
        let sandbox = Sandbox::new();
        assert_eq!(text(&network.add(&attachment("a1", &sandbox)).await.unwrap()), ["10.91.0.2/24"]);
        network.del("a1").await.unwrap();
        // Version 1.1.0 has STATUS. The call fails here.
        host.configure(&conf("1.1.0"));
        eventually_async("the failed STATUS", 20, async || network.status().await.is_err()).await;
    });
}

#[test]
fn a_pod_may_have_two_addresses_of_one_family() {
    on_a_host(async |host| {
        let ranges = json!([[{"subnet": "10.92.0.0/24"}], [{"subnet": "10.93.0.0/24"}]]);
        host.configure(&bridge(&host, &ranges, &json!({})));
        let network = host.open().await;
        let (a, b) = (Sandbox::new(), Sandbox::new());
        assert_eq!(
            text(&network.add(&attachment("a1", &a)).await.unwrap()),
            ["10.92.0.2/24", "10.93.0.2/24"]
        );
        network.add(&attachment("b1", &b)).await.unwrap();
        for to in ["10.92.0.1", "10.93.0.1", "10.92.0.2", "10.93.0.2"] {
            assert!(b.reaches(to), "{to}");
        }
        network.check("a1").await.unwrap();
        network.del("a1").await.unwrap();
        assert_eq!(host.allocated("own"), ["10.92.0.3", "10.93.0.3"]);
        network.del("b1").await.unwrap();
        assert_eq!(host.allocated("own"), Vec::<String>::new());
    });
}

#[test]
fn changes_beside_an_absent_directory_have_no_effect() {
    on_a_host(async |host| {
        let network = host.open().await;
        network.set_pod_cidrs(vec!["10.94.0.0/24".parse().unwrap()]).await.unwrap();
        // The handle changes when the table is recreated.
        let table = || {
            let tables: Value = serde_json::from_str(&run("nft", &["-j", "list", "tables"])).unwrap();
            tables["nftables"][1]["table"]["handle"].as_u64().unwrap()
        };
        let before = table();
        assert_eq!(network.ready(), Ok(()));
        for number in 0..30 {
            std::fs::write(host.path(&format!("passwd{number}")), "").unwrap();
            // The network may see each change by itself.
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        // An invalid list does not change the table. Its notification comes after those of the other changes.
        host.configure(&json!("no list"));
        eventually_async("the invalid list", 20, async || network.ready().is_err()).await;
        assert_eq!(table(), before, "the table was recreated");
        // The directory is still watched.
        host.configure(&bridge(&host, &json!([[{"subnet": "10.95.0.0/24"}]]), &json!({})));
        let sandbox = Sandbox::new();
        eventually_async("the list", 20, async || {
            let added = network.add(&attachment("a1", &sandbox)).await;
            added.is_ok_and(|attached| text(&attached) == ["10.95.0.2/24"])
        })
        .await;
    });
}

#[test]
fn records_of_tuning_are_removed_with_the_attachment() {
    on_a_host(async |host| {
        let mut list = bridge(&host, &json!([[{"subnet": "10.96.0.0/24"}]]), &json!({}));
        let tuning = json!({"type": "tuning", "dataDir": host.path("tuning"), "mtu": 1400});
        list["plugins"].as_array_mut().unwrap().push(tuning);
        host.configure(&list);
        let network = host.open().await;
        let (a, b) = (Sandbox::new(), Sandbox::new());
        network.add(&attachment("a1", &a)).await.unwrap();
        network.add(&attachment("b1", &b)).await.unwrap();
        // Files of another network and of another program.
        std::fs::write(host.path("tuning/c1_eth0.json"), r#"{"network":"other","mtu":1500}"#).unwrap();
        std::fs::write(host.path("tuning/d1_eth0.json"), r#"{"mtu":1500}"#).unwrap();
        // The record of `a1` is lost, so `a1` gets no DEL.
        drop(network);
        std::fs::remove_file(host.path("state/results/a1.json")).unwrap();
        let network = host.open().await;
        network.reconcile(&[attachment("b1", &b)]).await.unwrap();
        let mut left: Vec<_> = std::fs::read_dir(host.path("tuning"))
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        left.sort();
        assert_eq!(left, ["b1_eth0.json", "c1_eth0.json", "d1_eth0.json"]);
        network.del("b1").await.unwrap();
        assert!(!host.path("tuning/b1_eth0.json").exists());
    });
}

#[test]
fn an_unknown_sysctl_is_not_taken_for_a_missing_sandbox() {
    on_a_host(async |host| {
        let mut list = bridge(&host, &json!([[{"subnet": "10.97.0.0/24"}]]), &json!({}));
        let tuning = json!({"type": "tuning", "sysctl": {"net.core.no_such_parameter": "1"}});
        list["plugins"].as_array_mut().unwrap().push(tuning);
        host.configure(&list);
        let error = host.open().await.add(&attachment("a1", &Sandbox::new())).await.unwrap_err();
        // After error code 3 a runtime does not have to call DEL.
        assert_eq!(error.code(), 5, "{}", error.chain());
        assert!(error.chain().contains("/proc/sys/net/core/no_such_parameter"), "{}", error.chain());
    });
}

/// Checks that the reference plugins are installed at the paths that the test uses.
#[test]
fn the_reference_is_installed() {
    assert!(Path::new(REFERENCE).join("ptp").exists(), "run scripts/packages containernetworking-plugins");
}

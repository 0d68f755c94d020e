//! A node with flannel: the published flanneld on its own host, with the RBAC rules of its published manifest. The
//! reference CNI plugins attach its pods, called as flannel's plugin calls them.

use std::fs;
use std::io::Write;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};

use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::process::{end, print_end, start};
use crate::{Host, Machine, Nodes, eventually};

const NAMESPACE: &str = "kube-flannel";
/// Directory of the reference plugins in Debian.
const PLUGINS: &str = "/usr/lib/cni";

/// A node and its pods. Dropping it ends the processes; the Node object stays.
pub struct Flannel {
    host: Host,
    name: String,
    dir: PathBuf,
    process: Option<Child>,
    /// Processes that keep the network namespaces of the pods alive.
    pods: Vec<Child>,
}

// === impl Flannel ===

impl Flannel {
    /// Creates the node `flannel-<number>` and waits until flanneld is ready. `cidrs` has at most one range per family.
    /// `backend` is the field of that name in flannel's configuration.
    ///
    /// # Panics
    /// When flanneld does not become ready.
    #[must_use]
    pub fn join(nodes: &Nodes, number: u8, cidrs: &str, backend: &Value) -> Self {
        let name = format!("flannel-{number}");
        let dir = nodes.dir_of(&name);
        let text = fs::read_to_string(Machine::tool("kube-flannel.yml", "scripts/flanneld")).unwrap();
        // The test has no image of flannel. So it leaves out the DaemonSet, and creates the pod that represents
        // flanneld itself.
        let manifest: Vec<&str> = text.split("---\n").filter(|part| !part.contains("DaemonSet")).collect();
        nodes.apply(&manifest.join("---\n"));
        nodes.apply(&json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}).to_string());
        let container = json!({"name": "kube-flannel", "image": "ghcr.io/flannel-io/flannel"});
        let spec = json!({"nodeName": name, "serviceAccountName": "flannel", "hostNetwork": true,
            "containers": [container]});
        let metadata = json!({"name": name, "namespace": NAMESPACE});
        nodes.apply(
            &json!({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}).to_string(),
        );
        eventually("spec.podCIDRs of the node", 10, || {
            nodes.get(&["node", &name])["spec"]["podCIDRs"].is_array()
        });
        let token = nodes.kubectl(&["create", "token", "flannel", "-n", NAMESPACE]);
        fs::write(dir.join("kubeconfig"), nodes.kubeconfig(&format!("token: '{}'", token.trim()))).unwrap();
        fs::write(dir.join("net-conf.json"), net_conf(nodes, cidrs, backend)).unwrap();
        let host = nodes.host(10 + number);
        // iptables needs a writable /run for its lock.
        host.run("mount", &["-t", "tmpfs", "none", "/run"]);
        let mut flannel = Self { host, name, dir, process: None, pods: Vec::new() };
        flannel.start();
        flannel
    }

    /// Starts flanneld with the arguments of its manifest and waits until it is ready.
    ///
    /// # Panics
    /// When it does not become ready.
    pub fn start(&mut self) {
        fs::remove_file(self.dir.join("subnet.env")).ok();
        let mut command = self.host.command(Machine::tool("flanneld", "scripts/flanneld"));
        let path = |name: &str| self.dir.join(name).into_os_string();
        command.args(["--ip-masq", "--kube-subnet-mgr", "--iface=eth0"]);
        command.arg("--kubeconfig-file").arg(path("kubeconfig"));
        command.arg("--net-config-path").arg(path("net-conf.json"));
        command.arg("--subnet-file").arg(path("subnet.env"));
        command.env("POD_NAME", &self.name).env("POD_NAMESPACE", NAMESPACE).env("EVENT_QUEUE_DEPTH", "5000");
        self.process = Some(start(command, &self.log()));
        let path = self.dir.join("subnet.env");
        eventually("flanneld to write subnet.env", 30, || path.exists());
    }

    /// Stops flanneld. Its kernel state stays.
    pub fn stop(&mut self) {
        end(&mut self.process, Signal::SIGTERM);
    }

    /// Attaches a pod and returns a process in its network namespace, and its addresses.
    ///
    /// # Panics
    /// When the bridge plugin fails.
    pub fn attach(&mut self) -> (u32, Vec<String>) {
        let mut command = self.host.command("unshare");
        command.args(["--net", "cat"]).stdin(Stdio::piped()).stdout(Stdio::null());
        let pod = command.spawn().unwrap();
        let (process, number) = (pod.id(), self.pods.len());
        self.pods.push(pod);
        let of = |process: u32| fs::read_link(format!("/proc/{process}/ns/net")).ok();
        let outside = of(self.host.pid());
        eventually("the pod's namespace", 10, || {
            let program = fs::read_link(format!("/proc/{process}/exe")).ok()?;
            (program.ends_with("cat") && of(process) != outside).then_some(())
        });
        let netns = format!("/proc/{process}/ns/net");
        // This replaces the loopback plugin.
        self.host.run("nsenter", &[&format!("--net={netns}"), "ip", "link", "set", "lo", "up"]);
        let mut command = self.host.command(format!("{PLUGINS}/bridge"));
        command.env("CNI_COMMAND", "ADD").env("CNI_CONTAINERID", format!("pod-{number}"));
        command.env("CNI_NETNS", netns).env("CNI_IFNAME", "eth0");
        command.env("CNI_PATH", PLUGINS).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut plugin = command.spawn().unwrap();
        plugin.stdin.take().unwrap().write_all(self.delegate().to_string().as_bytes()).unwrap();
        let output = plugin.wait_with_output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "the bridge plugin: {text}");
        let result: Value = serde_json::from_str(&text).unwrap();
        let address = |ip: &Value| ip["address"].as_str().unwrap().split('/').next().unwrap().to_owned();
        (process, result["ips"].as_array().unwrap().iter().map(address).collect())
    }

    /// The configuration that flannel's plugin passes to the bridge plugin: the manifest's `delegate`, with the values of
    /// `subnet.env`.
    fn delegate(&self) -> Value {
        let text = fs::read_to_string(self.dir.join("subnet.env")).unwrap();
        let value = |key: &str| text.lines().find_map(|line| line.strip_prefix(&format!("{key}=")));
        let families =
            [("FLANNEL_SUBNET", "FLANNEL_NETWORK"), ("FLANNEL_IPV6_SUBNET", "FLANNEL_IPV6_NETWORK")];
        let found: Vec<_> = families.into_iter().filter_map(|(s, n)| Some((value(s)?, value(n)?))).collect();
        let ranges: Vec<Value> = found.iter().map(|(subnet, _)| json!([{"subnet": range(subnet)}])).collect();
        let routes: Vec<Value> = found.iter().map(|(_, network)| json!({"dst": network})).collect();
        json!({
            "name": "cbr0", "cniVersion": "1.0.0", "type": "bridge", "hairpinMode": true, "isDefaultGateway": true,
            "isGateway": true, "ipMasq": value("FLANNEL_IPMASQ") != Some("true"),
            "mtu": value("FLANNEL_MTU").unwrap().parse::<u32>().unwrap(),
            "ipam": {"type": "host-local", "dataDir": self.dir.join("addresses"), "ranges": ranges, "routes": routes},
        })
    }

    /// The node's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The host of the node.
    #[must_use]
    pub fn host(&self) -> &Host {
        &self.host
    }

    fn log(&self) -> PathBuf {
        self.dir.join("flanneld.log")
    }
}

/// The subnet of an address with a prefix length.
fn range(address: &str) -> String {
    let (ip, length) = address.split_once('/').unwrap();
    let length: u32 = length.parse().unwrap();
    let first: IpAddr = match ip.parse().unwrap() {
        IpAddr::V4(ip) => Ipv4Addr::from_bits(ip.to_bits() & (u32::MAX << (32 - length))).into(),
        IpAddr::V6(ip) => Ipv6Addr::from_bits(ip.to_bits() & (u128::MAX << (128 - length))).into(),
    };
    format!("{first}/{length}")
}

/// The manifest's `net-conf.json` with the ranges and the backend of the test.
fn net_conf(nodes: &Nodes, cidrs: &str, backend: &Value) -> String {
    let map = nodes.get(&["configmap", "kube-flannel-cfg", "-n", NAMESPACE]);
    let mut conf: Value = serde_json::from_str(map["data"]["net-conf.json"].as_str().unwrap()).unwrap();
    assert!(
        conf["Network"].is_string() && conf["Backend"]["Type"] == "vxlan",
        "unexpected net-conf.json in the manifest: {conf}"
    );
    conf["EnableIPv4"] = cidrs.split(',').any(|cidr| !cidr.contains(':')).into();
    for cidr in cidrs.split(',') {
        if cidr.contains(':') {
            conf["EnableIPv6"] = true.into();
            conf["IPv6Network"] = cidr.into();
        } else {
            conf["Network"] = cidr.into();
        }
    }
    // The iptables mode needs the module br_netfilter, which not every machine has loaded.
    conf["EnableNFTables"] = (!Path::new("/proc/sys/net/bridge/bridge-nf-call-iptables").exists()).into();
    conf["Backend"].clone_from(backend);
    conf.to_string()
}

impl Drop for Flannel {
    fn drop(&mut self) {
        if std::thread::panicking() {
            print_end(&self.name, &self.log());
        }
        self.stop();
        for pod in &mut self.pods {
            pod.kill().ok();
            pod.wait().ok();
        }
    }
}

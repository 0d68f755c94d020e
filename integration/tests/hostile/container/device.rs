//! Devices of the node that a container did not request, and frames with foreign addresses.

use std::process::Command;

use coracle_integration::eventually;
use nix::sys::signal::{Signal, kill};
use nix::sys::stat::{Mode, SFlag, makedev, mknod};
use nix::unistd::Pid;
use serde_json::json;

use super::{Attacker, Pids, on_a_runtime, on_an_attacker};

/// Only a container with the device /dev/net/tun may create TUN interfaces.
#[test]
fn a_container_without_the_tun_device_cannot_create_one() {
    on_a_runtime(|machine, cri| {
        let open = "rm -f /tun; mknod /tun c 10 200; (: <>/tun) 2>&1 || true";
        let attacker = Attacker::new(machine, cri, Pids::Container, |_| {});
        let output = attacker.sh(open);
        assert!(output.contains("Operation not permitted"), "{output:?}");
        assert_eq!(attacker.sh("mknod /zero c 1 5; head -c 1 /zero | wc -c"), "1");
        cri.crictl(&["rmp", "-f", &attacker.pod]);

        let node = machine.path("tun");
        mknod(&node, SFlag::S_IFCHR, Mode::from_bits_truncate(0o666), makedev(10, 200)).unwrap();
        let devices = json!([{ "container_path": "/dev/net/tun", "host_path": node, "permissions": "rwm" }]);
        let with_device = Attacker::new(machine, cri, Pids::Container, |config| config["devices"] = devices);
        let output = with_device.sh(open);
        assert!(!output.contains("not permitted"), "{output:?}");
    });
}

/// A script that sends gratuitous ARP replies for an address.
const CLAIM: &str = r#"
import socket, struct, sys, time
link = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
link.bind(("eth0", 0x0806))
own, claimed = link.getsockname()[4], socket.inet_aton(sys.argv[1])
arp = struct.pack("!HHBBH", 1, 0x0800, 6, 4, 2) + own + claimed + b"\xff" * 6 + claimed
for _ in range(4):
    time.sleep(1)
    link.send(b"\xff" * 6 + own + b"\x08\x06" + arp)
"#;

/// Pods of a node share a bridge, and have CAP_NET_RAW by default. So a pod can send ARP packets for other addresses.
#[test]
fn a_pod_cannot_claim_the_address_of_the_gateway() {
    on_an_attacker(Pids::Container, |attacker| {
        let gateway = attacker.sh("ip route | sed -n 's/^default via \\([^ ]*\\).*/\\1/p'");
        let victim = start_victim(attacker);
        let [own, of_victim] = [&attacker.id, &victim.id].map(|id| attacker.pid(id).to_string());
        let inside = |pid: &str, command: &[&str]| {
            Command::new("nsenter").args(["-t", pid, "-n"]).args(command).output().unwrap()
        };
        let entry = || {
            let shown = inside(&of_victim, &["ip", "neigh", "show", gateway.as_str()]);
            String::from_utf8(shown.stdout).unwrap()
        };
        // CAP_NET_RAW allows gratuitous replies. The kernel ignores one within a second (neigh/locktime) of the true reply.
        let claim = || inside(&own, &["python3", "-c", CLAIM, gateway.as_str()]).status.success();
        let address = |entry: &str| entry.split_whitespace().nth(4).map(str::to_owned);
        let before = eventually("the gateway's ARP entry", 10, || {
            victim.sh(&format!("ping -c 1 -W 1 {gateway} >/dev/null; true"));
            Some(entry()).filter(|entry| entry.contains("lladdr"))
        });
        assert!(claim());
        let after = entry();
        assert_eq!(address(&after), address(&before), "{after}");
        // The frames are valid: without the rules the first one has its effect before the last one is sent. The runtime
        // is stopped, because it restores the rules.
        let runtime = Pid::from_raw(attacker.cri.pid().cast_signed());
        kill(runtime, Signal::SIGSTOP).unwrap();
        let flushed = Command::new("nft").args(["flush", "chain", "bridge", "coracle", "ports"]).status();
        let (claimed, without_rules) = (claim(), entry());
        kill(runtime, Signal::SIGCONT).unwrap();
        assert!(flushed.unwrap().success() && claimed);
        assert_ne!(address(&without_rules), address(&before), "{without_rules}");
    });
}

/// Starts a container in another pod, `victim`.
pub(super) fn start_victim<'a>(attacker: &Attacker<'a>) -> Attacker<'a> {
    let mut pod = super::pod_config(attacker.machine, Pids::Container);
    pod["metadata"]["name"] = "victim".into();
    pod["metadata"]["uid"] = "2".into();
    let path = super::write(attacker.machine, "victim", &pod);
    let mut config = super::container_config(Pids::Container);
    config["metadata"]["name"] = "victim".into();
    let container = super::write(attacker.machine, "victim-container", &config);
    let pod = attacker.cri.crictl(&["runp", &path]);
    let id = attacker.cri.crictl(&["create", &pod, &container, &path]);
    attacker.cri.crictl(&["start", &id]);
    Attacker { machine: attacker.machine, cri: attacker.cri, pod, id }
}

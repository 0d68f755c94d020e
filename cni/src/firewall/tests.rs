//! Tests of claims and of the table that follows from them.

use super::*;
use crate::portmap::condition::Condition;
use crate::ports::PortMapping;
use crate::ports::Protocol;

fn port(host_ip: Option<&str>, host_port: u16) -> PortMapping {
    let host_ip = host_ip.map(|ip| ip.parse().unwrap());
    PortMapping { host_ip, host_port, container_port: 80, protocol: Protocol::Tcp }
}

fn claim(id: &str, ports: Vec<PortMapping>) -> Claim {
    let to = ["10.1.0.5/16", "fd00::5/64"].map(|to| to.parse().unwrap()).to_vec();
    Claim { id: id.into(), ports, to, hairpin: true, ..Claim::default() }
}

#[test]
fn ports_lead_to_addresses_of_their_family() {
    let wanted = claim("a", vec![port(None, 1), port(Some("192.0.2.1"), 2), port(Some("::"), 3)]);
    let plan = plan(std::iter::once(&wanted));
    let mapped: Vec<_> = plan.mappings.iter().map(|m| (m.host_port, m.host_ip, m.to.is_ipv4())).collect();
    let one = Some("192.0.2.1".parse().unwrap());
    assert_eq!(mapped, [(1, None, true), (1, None, false), (3, None, false), (2, one, true)]);
    let networks: Vec<_> = plan.hairpin.iter().map(ToString::to_string).collect();
    assert_eq!(networks, ["10.1.0.0/16", "fd00::/64"]);
}

#[test]
fn ports_with_conditions_and_without_translation_of_senders_are_apart() {
    let condition =
        Condition { subject: crate::portmap::condition::Subject::By("eth0".into()), negated: false };
    let conditions = [vec![condition], Vec::new()];
    let wanted = Claim { hairpin: false, conditions, ..claim("a", vec![port(None, 1)]) };
    let plan = plan(std::iter::once(&wanted));
    assert!(plan.mappings.iter().all(|mapping| mapping.to.is_ipv6()) && plan.mappings.len() == 1);
    assert!(plan.conditional.iter().all(|(mapping, _)| mapping.to.is_ipv4()) && plan.conditional.len() == 1);
    assert!(plan.hairpin.is_empty() && !plan.loopback && plan.untouched.len() == 2);
}

#[test]
fn a_port_is_given_once_for_each_address() {
    let held = claim("a", vec![port(Some("192.0.2.1"), 1)]);
    assert!(check_ports(&claim("b", vec![port(Some("192.0.2.2"), 1)]), [&held].into_iter()).is_ok());
    for ip in [None, Some("0.0.0.0"), Some("192.0.2.1")] {
        let error = check_ports(&claim("b", vec![port(ip, 1)]), [&held].into_iter()).unwrap_err();
        assert_eq!(error.to_string(), "host port 1/tcp is taken by sandbox a");
    }
}

#[test]
fn networks_are_masqueraded_once_for_all_their_members() {
    let member = |id: &str| Claim {
        id: id.into(),
        masquerade: vec!["10.1.0.0/16".parse().unwrap()],
        ..Claim::default()
    };
    assert_eq!(plan([&member("a"), &member("b")].into_iter()).masquerade.len(), 1);
}

/// What the kernel has of a table, in a network namespace of this thread's own.
fn listed(table: &str) -> String {
    let output = std::process::Command::new("nft").args(["list", "table", "inet", table]).output().unwrap();
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn a_change_of_a_killed_process_is_completed_by_the_next() {
    let thread = std::thread::spawn(|| {
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).expect("this test needs root");
        let dir = tempfile::tempdir().unwrap();
        let process = || Firewall::open("t", dir.path(), true).unwrap();
        let of_network =
            |id: &str| Claim { masquerade: vec!["10.1.0.0/16".parse().unwrap()], ..claim(id, Vec::new()) };
        process().put(&claim("a", vec![port(None, 1)])).unwrap();
        // Killed when its claim is written, it never comes to the table.
        let killed = process();
        let (state, lock) = killed.lock().unwrap();
        killed.mark().unwrap();
        killed.write(&of_network("b").key(), &of_network("b")).unwrap();
        drop((state, lock));
        assert!(!process().holds(&of_network("b")).unwrap());
        // Nor does the claim of the same network change what it says.
        process().put(&of_network("c")).unwrap();
        assert!(listed("t").contains("10.1.0.0/16 ip daddr"), "{}", listed("t"));
        assert!(process().holds(&of_network("b")).unwrap());
        // Killed when a claim is removed, it leaves the port behind.
        let (state, lock) = killed.lock().unwrap();
        killed.mark().unwrap();
        remove(&killed.path(&claim("a", Vec::new()).key())).unwrap();
        drop((state, lock));
        assert!(listed("t").contains("tcp . 1 : 10.1.0.5 . 80"));
        process().remove(&claim("a", Vec::new())).unwrap();
        assert!(!listed("t").contains("10.1.0.5"), "{}", listed("t"));
    });
    thread.join().unwrap();
}

#[test]
fn a_claim_file_that_cannot_be_removed_is_an_error_until_it_is_removed() {
    let thread = std::thread::spawn(|| {
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).expect("this test needs root");
        let dir = tempfile::tempdir().unwrap();
        let firewall = Firewall::open("t", dir.path(), false).unwrap();
        let claim = claim("a", vec![port(None, 1)]);
        firewall.put(&claim).unwrap();
        let path = firewall.path(&claim.key());
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        for _ in 0..2 {
            assert!(firewall.remove(&claim).is_err());
        }
        assert!(!listed("t").contains("10.1.0.5"));
        fs::remove_dir(&path).unwrap();
        fs::write(&path, "{}").unwrap();
        firewall.remove(&claim).unwrap();
        assert!(!path.exists());
    });
    thread.join().unwrap();
}

#[test]
fn a_bridge_that_an_earlier_version_opened_closes_with_its_last_claim() {
    let thread = std::thread::spawn(|| {
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).expect("this test needs root");
        let ip = |line: &str| {
            assert!(std::process::Command::new("ip").args(line.split(' ')).status().unwrap().success());
        };
        ip("link add br0 type bridge");
        ip("addr add 10.1.0.1/16 dev br0");
        ip("link set br0 up");
        let opened = Path::new("/proc/sys/net/ipv4/conf/br0/route_localnet");
        let is_open = || fs::read_to_string(opened).unwrap().trim() == "1";
        for shared in [false, true] {
            let dir = tempfile::tempdir().unwrap();
            fs::create_dir(dir.path().join("firewall")).unwrap();
            for id in ["a", "b"] {
                let claim = claim(id, vec![port(None, id.as_bytes()[0].into())]);
                let mut text = serde_json::to_value(&claim).unwrap();
                text.as_object_mut().unwrap().remove("opened");
                let path = dir.path().join(format!("firewall/{}.json", claim.key()));
                fs::write(path, text.to_string()).unwrap();
            }
            fs::write(opened, "1").unwrap();
            let firewall = Firewall::open("t", dir.path(), shared).unwrap();
            firewall.remove(&claim("a", Vec::new())).unwrap();
            assert!(is_open(), "the other one's port needs it");
            firewall.remove(&claim("b", Vec::new())).unwrap();
            assert!(!is_open(), "shared: {shared}");
        }
    });
    thread.join().unwrap();
}

#[test]
fn a_claim_that_cannot_be_had_leaves_the_one_before() {
    let thread = std::thread::spawn(|| {
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).expect("this test needs root");
        let dir = tempfile::tempdir().unwrap();
        let except = |ranges: &[&str]| Claim {
            masquerade: vec!["10.1.0.0/16".parse().unwrap()],
            except: ranges.iter().map(|range| range.parse().unwrap()).collect(),
            ..Claim::default()
        };
        // The kernel takes no name that is as long as this table's.
        let long = "t".repeat(70000);
        let firewall = Firewall::open(&long, dir.path(), false).unwrap();
        assert!(firewall.put(&except(&["10.2.0.0/16"])).is_err());
        assert_eq!(firewall.get(&Claim::default()), None);
        let first = except(&["10.2.0.0/16"]);
        Firewall::open("t", dir.path(), false).unwrap().put(&first).unwrap();
        let firewall = Firewall::open(&long, dir.path(), false).unwrap();
        assert!(firewall.put(&except(&["10.3.0.0/16"])).is_err());
        assert_eq!(firewall.get(&first), Some(first.clone()));
        let again = Firewall::open("t", dir.path(), false).unwrap();
        assert_eq!(again.get(&first), Some(first));
    });
    thread.join().unwrap();
}

//! Tests of claims and of the table that follows from them.

use coracle_testing::{in_new_namespace, ip};

use super::claim::{check_ports, plan};
use super::*;
use crate::nft::Plan;
use crate::port_condition::Condition;
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
fn ports_with_conditions_are_planned_apart() {
    let condition = Condition { subject: crate::port_condition::Subject::By("eth0".into()), negated: false };
    let conditions = [vec![condition], Vec::new()];
    let wanted = Claim { hairpin: false, conditions, ..claim("a", vec![port(None, 1)]) };
    let plan = plan(std::iter::once(&wanted));
    assert!(plan.mappings.iter().all(|mapping| mapping.to.is_ipv6()) && plan.mappings.len() == 1);
    assert!(plan.conditional.iter().all(|(mapping, _)| mapping.to.is_ipv4()) && plan.conditional.len() == 1);
    assert!(plan.hairpin.is_empty() && !plan.loopback && plan.untouched.len() == 2);
}

#[test]
fn a_port_is_given_once_for_each_address() {
    let existing = claim("a", vec![port(Some("192.0.2.1"), 1)]);
    assert!(check_ports(&claim("b", vec![port(Some("192.0.2.2"), 1)]), [&existing].into_iter()).is_ok());
    for ip in [None, Some("0.0.0.0"), Some("192.0.2.1")] {
        let error = check_ports(&claim("b", vec![port(ip, 1)]), [&existing].into_iter()).unwrap_err();
        assert_eq!(error.to_string(), "host port 1/tcp is taken by sandbox a");
    }
}

#[test]
fn very_many_ports_are_compared_in_linear_time() {
    let all = |ip: &str| -> Vec<PortMapping> { (1..60_000).map(|number| port(Some(ip), number)).collect() };
    let existing = claim("a", all("192.0.2.1"));
    assert!(check_ports(&claim("b", all("192.0.2.2")), [&existing].into_iter()).is_ok());
    let of_many = |last: u8| -> Vec<PortMapping> {
        let addresses = (0..60_000).map(|at| format!("10.{}.{}.{last}", at / 256, at % 256));
        addresses.map(|address| port(Some(address.as_str()), 1)).collect()
    };
    let existing = claim("a", of_many(1));
    assert!(check_ports(&claim("b", of_many(2)), [&existing].into_iter()).is_ok());
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

#[test]
fn a_claim_that_cannot_be_read_is_an_error_and_stays() {
    let dir = tempfile::tempdir().unwrap();
    let claims = dir.path().join("firewall");
    fs::create_dir(&claims).unwrap();
    // A link to itself: reading it fails with ELOOP.
    let path = claims.join("a.json");
    std::os::unix::fs::symlink("a.json", &path).unwrap();
    assert!(Firewall::open("t", dir.path(), false).is_err());
    assert!(fs::symlink_metadata(&path).is_ok());
}

/// The table as nft lists it, in the network namespace of this thread.
fn listed(table: &str) -> String {
    let output = std::process::Command::new("nft").args(["list", "table", "inet", table]).output().unwrap();
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn a_change_of_a_killed_process_is_completed_by_the_next() {
    in_new_namespace(|| {
        let dir = tempfile::tempdir().unwrap();
        let process = || Firewall::open("t", dir.path(), true).unwrap();
        let of_network =
            |id: &str| Claim { masquerade: vec!["10.1.0.0/16".parse().unwrap()], ..claim(id, Vec::new()) };
        process().put(&claim("a", vec![port(None, 1)])).unwrap();
        // This process is killed after it has written the claim, so the claim is not in the table.
        let killed = process();
        let (state, lock) = killed.lock().unwrap();
        killed.mark().unwrap();
        killed.write(&of_network("b").key(), &of_network("b")).unwrap();
        drop((state, lock));
        assert!(!process().is_applied(&of_network("b")).unwrap());
        // A claim of the same network. Its ranges are added to the table, although the file of `b` already has these
        // ranges.
        process().put(&of_network("c")).unwrap();
        assert!(listed("t").contains("10.1.0.0/16 ip daddr"), "{}", listed("t"));
        assert!(process().is_applied(&of_network("b")).unwrap());
        // This process is killed after it has removed the claim's file, so the table still has the port.
        let (state, lock) = killed.lock().unwrap();
        killed.mark().unwrap();
        remove_file(&killed.path(&claim("a", Vec::new()).key())).unwrap();
        drop((state, lock));
        assert!(listed("t").contains("tcp . 1 : 10.1.0.5 . 80"));
        process().remove(&claim("a", Vec::new())).unwrap();
        assert!(!listed("t").contains("10.1.0.5"), "{}", listed("t"));
    });
}

#[test]
fn a_claim_file_that_cannot_be_removed_is_an_error_until_it_is_removed() {
    in_new_namespace(|| {
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
}

#[test]
fn a_bridge_that_an_earlier_version_opened_closes_with_its_last_claim() {
    in_new_namespace(|| {
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
            assert!(is_open(), "the port of the other claim needs the setting");
            firewall.remove(&claim("b", Vec::new())).unwrap();
            assert!(!is_open(), "shared: {shared}");
        }
    });
}

#[test]
fn a_failed_claim_keeps_the_previous_claim() {
    in_new_namespace(|| {
        let dir = tempfile::tempdir().unwrap();
        let except = |ranges: &[&str]| Claim {
            masquerade: vec!["10.1.0.0/16".parse().unwrap()],
            except: ranges.iter().map(|range| range.parse().unwrap()).collect(),
            ..Claim::default()
        };
        // The kernel refuses the name of a table of this length.
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
}

/// Claims of ten sandboxes in three networks, of all kinds.
fn any_claim(random: &mut u32) -> Claim {
    let mut below = |count: u32| {
        *random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (*random >> 16) % count
    };
    let (number, network, plugin) = (below(10), below(3), below(2));
    let to = [format!("10.{network}.0.{number}/24"), format!("fd0{network}::{number}/64")];
    let first = u16::try_from(1 + number * 100 + network * 10).unwrap();
    let count = if plugin == 0 { below(4) } else { 0 };
    let except: Vec<_> = (0..below(3)).map(|other| format!("10.9{other}.0.0/16").parse().unwrap()).collect();
    let condition = Condition { subject: crate::port_condition::Subject::By("eth0".into()), negated: false };
    let conditions = if below(4) == 0 { vec![condition] } else { Vec::new() };
    Claim {
        plugin: ["portmap", "bridge"][plugin as usize].into(),
        network: format!("net{network}"),
        id: format!("pod{number}"),
        ports: (first..first + u16::try_from(count).unwrap()).map(|number| port(None, number)).collect(),
        to: to.iter().map(|to| to.parse().unwrap()).collect(),
        conditions: [conditions, Vec::new()],
        hairpin: below(2) == 0,
        masquerade_all: below(3) == 0,
        masquerade: (0..below(2)).map(|_| format!("10.{network}.0.0/24").parse().unwrap()).collect(),
        except,
        isolated: (below(4) == 0).then(|| format!("br{network}")),
        ..Claim::default()
    }
}

#[test]
fn the_content_after_changes_is_that_of_all_claims() {
    let (mut index, mut random, mut known) = (Index::default(), 1, Plan::default());
    for round in 0..3000 {
        let claim = any_claim(&mut random);
        match random % 2 {
            0 => drop(index.put(claim.key(), claim)),
            _ => drop(index.remove(&claim.key())),
        }
        let wanted = plan(index.all().map(|(_, claim)| claim));
        assert_eq!(index.ledger.full_plan(), wanted, "round {round}");
        assert!(index.ledger.is_changed() || wanted == known, "round {round}");
        assert_eq!(index.ledger.is_empty(), wanted == Plan::default());
        if random % 3 == 0 {
            let [before, now] = index.ledger.change();
            assert_eq!(index.ledger.have_ports(), [known.has_ports(), wanted.has_ports()], "round {round}");
            let elements = &(&known.mappings - &before.mappings) | &now.mappings;
            assert_eq!(elements, wanted.mappings, "round {round}");
            assert_eq!(&(&known.untouched - &before.untouched) | &now.untouched, wanted.untouched);
            let is_rules = before.masquerade != now.masquerade || before.isolated != now.isolated;
            assert!(
                !is_rules || (&before.masquerade, &now.masquerade) == (&known.masquerade, &wanted.masquerade)
            );
            assert!(!is_rules || (&before.isolated, &now.isolated) == (&known.isolated, &wanted.isolated));
            index.ledger.mark_committed();
            known = wanted;
        }
    }
}

#[test]
fn a_change_of_one_sandbox_visits_its_own_content() {
    let of = |number: u16| Claim {
        masquerade_all: true,
        opened: Some("br0".into()),
        to: vec![format!("10.1.{}.{}/16", number / 250, 1 + number % 250).parse().unwrap()],
        ..claim(&format!("pod{number}"), vec![port(None, number)])
    };
    let mut index = Index::default();
    (1..=2000).for_each(|number| drop(index.put(of(number).key(), of(number))));
    index.ledger.mark_committed();
    let visited = |index: &mut Index| {
        let [before, now] = index.ledger.change();
        index.ledger.mark_committed();
        let elements = |plan: &Plan| plan.mappings.len() + plan.masquerade_all.len();
        (elements(&before), elements(&now), before.hairpin.len() + now.hairpin.len() + now.opened.len())
    };
    index.remove(&of(1000).key());
    assert_eq!(visited(&mut index), (2, 0, 0));
    index.put(of(1000).key(), of(1000));
    assert_eq!(visited(&mut index), (0, 2, 0));
    assert_eq!(index.of_sandbox("pod7").len(), 1);
    index.check_ports("other", &claim("other", vec![port(None, 5000)])).unwrap();
    assert!(index.check_ports("other", &claim("other", vec![port(None, 7)])).is_err());
    index.check_ports(&of(7).key(), &of(7)).unwrap();
}

/// The first line of nft's list, and the table's content in a fixed order. The line has the table's handle,
/// which differs after the table is made again.
fn content_of(table: &str) -> (String, Vec<String>, Vec<String>) {
    let output =
        std::process::Command::new("nft").args(["-a", "list", "table", "inet", table]).output().unwrap();
    let first = String::from_utf8(output.stdout).unwrap().lines().next().unwrap_or_default().to_owned();
    let text = listed(table);
    let (sets, chains) = text.split_once("\tchain ").unwrap();
    let mut words: Vec<_> = sets.split([',', '{', '}', '\n']).map(|word| word.trim().to_owned()).collect();
    let mut chains: Vec<_> =
        chains.split("\tchain ").map(|chain| chain.trim_end_matches(['}', '\n']).to_owned()).collect();
    words.retain(|word| !word.is_empty());
    words.sort();
    chains.sort();
    (first, words, chains)
}

#[test]
fn the_table_is_changed_by_differences_and_equals_a_new_table() {
    in_new_namespace(|| {
        let dir = tempfile::tempdir().unwrap();
        let firewall = Firewall::open("t", dir.path(), false).unwrap();
        firewall.put(&claim("stays", vec![port(None, 5000)])).unwrap();
        let (handle, ..) = content_of("t");
        let mut random = 7;
        for round in 0..150 {
            let claim = any_claim(&mut random);
            match random % 3 {
                0 => firewall.remove(&claim).unwrap(),
                1 => firewall.remove_sandbox(&claim.id).unwrap(),
                _ => firewall.put(&claim).unwrap(),
            }
            if round % 10 != 9 {
                continue;
            }
            let changed = content_of("t");
            assert_eq!(changed.0, handle, "the table was not replaced");
            let again = tempfile::tempdir().unwrap();
            let other = Firewall::open("other", again.path(), false).unwrap();
            let claims: Vec<Claim> =
                firewall.state.lock().unwrap().claims.all().map(|(_, claim)| claim.clone()).collect();
            other.ensure(claims).unwrap();
            let new = content_of("other");
            let name = |words: &[String]| {
                words.iter().filter(|word| !word.starts_with("table ")).cloned().collect::<Vec<_>>()
            };
            assert_eq!((name(&changed.1), changed.2), (name(&new.1), new.2), "round {round}");
            other.clear().unwrap();
        }
    });
}

#[test]
fn ports_with_conditions_have_a_chain_each() {
    in_new_namespace(|| {
        let dir = tempfile::tempdir().unwrap();
        let firewall = Firewall::open("t", dir.path(), false).unwrap();
        let conditional = |id: &str, number: u16, link: &str| {
            let subject = crate::port_condition::Subject::By(link.to_owned());
            let conditions = [vec![Condition { subject, negated: false }], Vec::new()];
            Claim { conditions, ..claim(id, vec![port(None, number)]) }
        };
        let has = |text: &str| listed("t").contains(text);
        firewall.put(&conditional("a", 1, "eth0")).unwrap();
        firewall.put(&conditional("b", 2, "eth1")).unwrap();
        assert!(
            has("tcp . 1 : goto conditional-6-1") && has("tcp . 2 : goto conditional-6-2"),
            "{}",
            listed("t")
        );
        assert!(has("\"eth0\"") && has("\"eth1\""), "{}", listed("t"));
        firewall.put(&conditional("b", 2, "eth2")).unwrap();
        assert!(has("\"eth0\"") && has("\"eth2\"") && !has("\"eth1\""), "{}", listed("t"));
        firewall.remove(&claim("a", Vec::new())).unwrap();
        assert!(!has("conditional-6-1") && has("conditional-6-2"), "{}", listed("t"));
    });
}

//! Host ports with conditions. Elements of maps cannot have conditions, so each port has a chain with its rules, and a
//! map leads to the chains.

use std::collections::{BTreeMap, BTreeSet};

use coracle_nft::{
    DataType, Element, Header, INET_PROTO, INET_SERVICE, Key, Meta, R0, Rule, SetSpec, Value, Verdict, octets,
};
use ipnetwork::IpNetwork;

use super::family::family;
use super::packet_match::of_family;
use super::{Mapping, Table};
use crate::port_condition::Condition;
use crate::ports::Protocol;

/// The map from protocols and ports to the chains.
pub(super) const PORTS: &str = "conditional";

/// A port with its conditions.
type Conditional = (Mapping, Vec<Condition>);

/// A protocol and a number. The ports of several host addresses can have both in common.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct PortNumber {
    protocol: Protocol,
    number: u16,
}

/// The ports by protocol and number.
fn by_number(all: &BTreeSet<Conditional>) -> BTreeMap<PortNumber, Vec<&Conditional>> {
    let mut ports: BTreeMap<PortNumber, Vec<&Conditional>> = BTreeMap::new();
    for conditional in all {
        let mapping = &conditional.0;
        let number = PortNumber { protocol: mapping.protocol, number: mapping.host_port };
        ports.entry(number).or_default().push(conditional);
    }
    ports
}

fn rule((mapping, conditions): &Conditional) -> Rule {
    let network = IpNetwork::from(mapping.to);
    let family = family(network);
    let mut rule = of_family(network);
    for condition in conditions {
        rule = condition.compared(rule);
    }
    if let Some(ip) = mapping.host_ip {
        rule = rule.to(ip.into(), false);
    }
    let registers = family.address.length / 4;
    let rule = rule.meta(Meta::Transport, R0).equal(R0, &[mapping.protocol.number()]);
    let rule = rule.payload(Header::Transport, 2, 2, R0);
    let rule = rule.equal(R0, &mapping.host_port.to_be_bytes());
    let rule = rule.immediate(R0, &octets(mapping.to));
    let rule = rule.immediate(R0 + registers, &mapping.to_port.to_be_bytes());
    rule.destination_nat(family.number, registers)
}

// === impl PortNumber ===

impl PortNumber {
    fn chain(self) -> String {
        format!("conditional-{}-{}", self.protocol.number(), self.number)
    }

    fn key(self) -> Key {
        Key::default().protocol(self.protocol.number()).port(self.number)
    }
}

// === impl Table ===

impl Table<'_> {
    pub(super) fn conditional_map(&mut self) {
        let key = DataType::concatenated(&[INET_PROTO, INET_SERVICE], 8);
        self.0.make_set(&SetSpec { name: PORTS, key, verdicts: true, ..SetSpec::default() });
    }

    /// Changes the chains of the ports that differ. A chain is made before its element, and deleted after it.
    pub(super) fn conditional_ports(
        &mut self,
        present: &BTreeSet<Conditional>,
        wanted: &BTreeSet<Conditional>,
    ) {
        let (present, wanted) = (by_number(present), by_number(wanted));
        for port in present.keys().filter(|port| !wanted.contains_key(*port)) {
            self.0.remove(PORTS, &[Element::member(port.key())]);
            self.0.flush_chain(&port.chain());
            self.0.delete_chain(&port.chain());
        }
        for (port, all) in wanted.iter().filter(|(port, all)| present.get(*port) != Some(*all)) {
            let (chain, is_new) = (port.chain(), !present.contains_key(port));
            match is_new {
                true => self.0.make_chain(&chain),
                false => self.0.flush_chain(&chain),
            }
            all.iter().for_each(|conditional| self.rule(&chain, &rule(conditional)));
            if is_new {
                self.0.add(PORTS, &[Element::pair(port.key(), Value::Verdict(Verdict::Goto(chain)))]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{HostPortJumps, Plan, change};
    use super::*;
    use crate::port_condition::Subject;

    #[test]
    fn a_change_of_one_port_has_messages_only_for_its_chain() {
        let conditional = |host_port: u16, link: &str| {
            let to = [10, 0, 0, 2].into();
            let mapping = Mapping { host_ip: None, host_port, protocol: Protocol::Tcp, to, to_port: 80 };
            (mapping, vec![Condition { subject: Subject::By(link.to_owned()), negated: false }])
        };
        let plan = |ports: &[u16], link: &str| -> Plan {
            let others = ports.iter().map(|port| conditional(*port, "eth0"));
            let first = conditional(9999, link);
            Plan { conditional: others.chain([first]).collect(), ..Plan::default() }
        };
        let count = |present: &Plan, wanted: &Plan| {
            let batch = change(
                "t",
                present,
                wanted,
                &HostPortJumps { ports: [present, wanted].map(Plan::has_ports), served: &[] },
            );
            coracle_nft::messages(batch.as_bytes()).count()
        };
        let all: Vec<u16> = (1..=1000).collect();
        let (many, few) = (plan(&all, "eth0"), plan(&[1, 2], "eth0"));
        assert_eq!(count(&many, &many), 1, "only the message that begins the batch");
        assert_eq!(
            count(&many, &plan(&all[1..], "eth0")),
            count(&few, &plan(&[2], "eth0")),
            "a removed port"
        );
        assert_eq!(count(&plan(&all[1..], "eth0"), &many), count(&plan(&[2], "eth0"), &few), "an added port");
        assert_eq!(count(&many, &plan(&all, "eth1")), 3, "the chain is flushed, and has one rule");
    }
}

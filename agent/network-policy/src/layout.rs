//! The fixed part of the table, and the conversion of lines to rules.
//!
//! ```text
//! forward ─► egress  ─ of a forbidden connection                   ─► drop
//!                    ─ established, neighbour discovery, to itself ─► accept
//!                    ─ link-local, multicast, broadcast            ─► drop
//!                    ─ from an isolated pod of this node           ─► group ─► policies: accept, else drop
//!         ─► ingress ─ the same for packets to an isolated pod
//! ```
//!
//! The two base chains follow each other at one hook, so a packet that the first chain accepts enters the second chain.
//!
//! While there are policies of administrators, a base chain `egress-admin` precedes `egress`, and `ingress-admin`
//! precedes `ingress`. A packet that such a policy accepts gets a mark, with which it skips the next chain. A packet
//! with the action Pass gets no mark. A `goto` to the chains of NetworkPolicies would need no mark. But the kernel
//! validates every path through the chains. The number of paths would be the product of the numbers of pods and
//! policies of both tiers. At the end of `egress` and `ingress`, packets of a pod that no NetworkPolicy selects enter
//! the group of the pod's baseline policies. Base chains at the hook `input` filter packets of pods to their own node,
//! see [`own_node`].

mod own_node;

use std::collections::BTreeSet;
use std::net::{Ipv4Addr, Ipv6Addr};

use coracle_nft::{
    AnonymousMap, BaseChain, DataType, Element, Header, Hook, INET_PROTO, INET_SERVICE, IPV6_ADDR, Interval,
    Key, Meta, R0, Rule, SetSpec, Transaction, Value, Verb, Verdict,
};

use crate::connections::FORBIDDEN;
use crate::program::{Chain, Line, Lines, Peer, Ports, Program, RuleAction, Set};
use crate::rules::{Direction, Tier};
pub use own_node::OwnNode;

/// Tiers and directions of the base chains, in the order of their evaluation. The chain of a direction for the tier
/// [`Tier::Namespaced`] serves the tier [`Tier::Baseline`], too.
const BASE_CHAINS: [(Tier, Direction); 4] = [
    (Tier::Admin, Direction::Egress),
    (Tier::Namespaced, Direction::Egress),
    (Tier::Admin, Direction::Ingress),
    (Tier::Namespaced, Direction::Ingress),
];
/// Priority of the first base chain. The next base chains follow it, before the filters of Services (-50) and of the
/// network (0) at the same hook.
const FIRST_PRIORITY: i32 = -64;
/// Bit of a packet's mark between two base chains: a policy of administrators accepts the packet.
const ALLOWED: u32 = 0x1000_0000;
const ICMPV6: u8 = 58;
/// First and last ICMPv6 type of neighbour solicitation and advertisement. conntrack does not track these
/// packets.
const NEIGHBOURS: (u8, u8) = (135, 136);

/// Name of the base chain of a direction.
pub(crate) fn base(tier: Tier, direction: Direction) -> &'static str {
    match (tier, direction) {
        (Tier::Admin, Direction::Ingress) => "ingress-admin",
        (Tier::Admin, Direction::Egress) => "egress-admin",
        (_, Direction::Ingress) => "ingress",
        (_, Direction::Egress) => "egress",
    }
}

/// The first and the last link-local address, fe80::/10.
const LINK_LOCAL: (Ipv6Addr, Ipv6Addr) = (
    Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 0),
    Ipv6Addr::new(0xfebf, 0xffff, 0xffff, 0xffff, 0xffff, 0xffff, 0xffff, 0xffff),
);

/// The first and the last multicast address of IPv4 and IPv6. The range of IPv4 extends to the broadcast address
/// 255.255.255.255.
const GROUPS_V4: (Ipv4Addr, Ipv4Addr) = (Ipv4Addr::new(224, 0, 0, 0), Ipv4Addr::BROADCAST);
const GROUPS_V6: (Ipv6Addr, Ipv6Addr) = (
    Ipv6Addr::new(0xff00, 0, 0, 0, 0, 0, 0, 0),
    Ipv6Addr::new(0xffff, 0xffff, 0xffff, 0xffff, 0xffff, 0xffff, 0xffff, 0xffff),
);

/// Makes the fixed sets, the base chains and their rules. With `is_tiered`, it also makes the sets and chains for
/// policies of administrators. These also filter packets to the node itself.
pub(crate) fn make(transaction: &mut Transaction<'_>, is_tiered: bool, own_node: &OwnNode) {
    for is_ipv4 in [true, false] {
        make_set(transaction, Set::Enforced(is_ipv4));
    }
    for ((tier, direction), priority) in BASE_CHAINS.into_iter().zip(FIRST_PRIORITY..) {
        if tier == Tier::Admin && !is_tiered {
            continue;
        }
        let name = base(tier, direction);
        transaction.make_base_chain(BaseChain { name, hook: Hook::Forward, priority, kind: "filter" });
        add_first_rules(transaction, name);
        if tier == Tier::Admin {
            // The bit is cleared first, because another program may use it.
            transaction.rule(name, &Rule::default().clear_mark(ALLOWED));
            add_dispatch(transaction, Tier::Admin, direction);
            continue;
        }
        if is_tiered {
            transaction.rule(name, &Rule::default().marked(ALLOWED).clear_mark(ALLOWED).accept());
        }
        for is_ipv4 in [true, false] {
            let itself = Set::Itself(direction, is_ipv4);
            make_set(transaction, itself);
            let ends =
                Rule::of_family(is_ipv4).source(is_ipv4, R0).destination(is_ipv4, R0 + registers(is_ipv4));
            transaction.rule(name, &ends.in_set(&set_name(itself)).accept());
        }
        add_dispatch(transaction, Tier::Namespaced, direction);
        if is_tiered {
            add_dispatch(transaction, Tier::Baseline, direction);
        }
    }
    if is_tiered {
        own_node.make(transaction);
    }
}

/// The rules at the start of each base chain.
fn add_first_rules(transaction: &mut Transaction<'_>, name: &str) {
    transaction.rule(name, &Rule::default().connection_marked(FORBIDDEN).drop());
    transaction.rule(name, &Rule::default().established_or_related().accept());
    transaction.rule(name, &neighbour_discovery().accept());
    // No policy matches link-local addresses, so a pod could bypass policies with such addresses. Packets with these
    // addresses are dropped.
    for address in [Rule::of_family(false).source(false, R0), Rule::of_family(false).destination(false, R0)] {
        let address = address.between(R0, &LINK_LOCAL.0.octets(), &LINK_LOCAL.1.octets());
        transaction.rule(name, &address.verdict(&Verdict::Drop));
    }
    to_groups().iter().for_each(|rule| transaction.rule(name, rule));
}

/// Rules that drop multicast and broadcast between pods. Every pod of a bridge receives such packets. Policies would
/// not apply to them, because a pod's policies are found by its own address.
fn to_groups() -> [Rule; 3] {
    let [to_v4, to_v6] = [true, false].map(|is_ipv4| Rule::of_family(is_ipv4).destination(is_ipv4, R0));
    [
        to_v4.between(R0, &GROUPS_V4.0.octets(), &GROUPS_V4.1.octets()).drop(),
        to_v6.between(R0, &GROUPS_V6.0.octets(), &GROUPS_V6.1.octets()).drop(),
        Rule::of_family(true).destination_is_broadcast().drop(),
    ]
}

/// Matches neighbour discovery between pods of one bridge: IPv6 with hop limit 255. A router decrements the hop limit
/// of packets that it forwards, and receivers ignore messages with a smaller hop limit (RFC 4861, section 7.1). So a
/// pod cannot use these ICMPv6 types to send data to other nodes.
fn neighbour_discovery() -> Rule {
    const HOP_LIMIT: u32 = 7;
    let link = Rule::of_family(false).payload(Header::Network, HOP_LIMIT, 1, R0).equal(R0, &[u8::MAX]);
    let kind = link.meta(Meta::Transport, R0).equal(R0, &[ICMPV6]).payload(Header::Transport, 0, 1, R0);
    kind.between(R0, &[NEIGHBOURS.0], &[NEIGHBOURS.1])
}

/// Makes the maps of a tier, and the rules that send packets of its pods to their groups.
fn add_dispatch(transaction: &mut Transaction<'_>, tier: Tier, direction: Direction) {
    for is_ipv4 in [true, false] {
        let isolated = Set::Isolated(tier, direction, is_ipv4);
        make_set(transaction, isolated);
        let pod = match direction {
            Direction::Ingress => Rule::of_family(is_ipv4).destination(is_ipv4, R0),
            Direction::Egress => Rule::of_family(is_ipv4).source(is_ipv4, R0),
        };
        transaction.rule(base(tier, direction), &pod.lookup_verdict(&set_name(isolated)));
    }
}

/// Makes a set with its ranges, if the set has ranges.
pub(crate) fn add_set(transaction: &mut Transaction<'_>, set: Set, program: &Program) {
    make_set(transaction, set);
    let ranges = program.sets.get(&set).into_iter().flatten();
    let intervals = ranges.map(|(first, last)| Interval::new(*first, *last, set.is_ipv4()).elements());
    transaction.elements(Verb::NewElements, &set_name(set), intervals);
}

/// An element of a set.
pub(crate) fn element(key: Key, group: Option<u64>) -> Element {
    match group {
        Some(group) => Element::pair(key, Value::Verdict(Verdict::Goto(chain_name(Chain::Group(group))))),
        None => Element::member(key),
    }
}

fn make_set(transaction: &mut Transaction<'_>, set: Set) {
    let DataType { kind, length } = DataType::address(set.is_ipv4());
    let (types, length): (&[u32], u32) = match set {
        Set::Isolated(..) | Set::Addresses(..) | Set::Blocks(..) => (&[kind], length),
        Set::Itself(..) => (&[kind, kind], 2 * length),
        Set::Enforced(_) => (&[kind, IPV6_ADDR], length + 16),
        Set::NamedPorts(..) => (&[kind, INET_PROTO, INET_SERVICE], length + 8),
    };
    transaction.make_set(&SetSpec {
        name: &set_name(set),
        key: DataType::concatenated(types, length),
        verdicts: matches!(set, Set::Isolated(..)),
        intervals: matches!(set, Set::Blocks(..)),
        ..SetSpec::default()
    });
}

/// Converts a line of a chain to an nftables rule.
pub(crate) fn rule(line: &Line, chain: &Lines) -> Rule {
    let mut rule = line.peer.map_or_else(Rule::default, |peer| of_peer(peer, chain.direction));
    if let Some(ports) = &line.ports {
        rule = with_ports(rule, ports);
    }
    match line.then {
        RuleAction::Accept if chain.tier == Tier::Admin => rule.set_mark(ALLOWED).accept(),
        // A packet without the mark enters the base chain of the next tier.
        RuleAction::Accept | RuleAction::Pass => rule.accept(),
        RuleAction::Drop => rule.drop(),
        RuleAction::Jump(chain) => rule.jump(&chain_name(chain)),
    }
}

/// Matches packets of a peer: by their source for ingress, by their destination for egress.
fn of_peer(peer: Peer, direction: Direction) -> Rule {
    let address = |is_ipv4| match direction {
        Direction::Ingress => Rule::of_family(is_ipv4).source(is_ipv4, R0),
        Direction::Egress => Rule::of_family(is_ipv4).destination(is_ipv4, R0),
    };
    match peer {
        Peer::In(set) => address(set.is_ipv4()).in_set(&set_name(set)),
        Peer::Range((first, last), is_ipv4) => {
            let unused = if is_ipv4 { 12 } else { 0 };
            let octets = |bits: u128| bits.to_be_bytes().into_iter().skip(unused).collect::<Vec<u8>>();
            match first == last {
                true => address(is_ipv4).equal(R0, &octets(first)),
                false => address(is_ipv4).between(R0, &octets(first), &octets(last)),
            }
        }
    }
}

fn with_ports(rule: Rule, ports: &Ports) -> Rule {
    let of_protocol = |protocol: u8| rule.clone().meta(Meta::Transport, R0).equal(R0, &[protocol]);
    let port_of = |protocol: u8| of_protocol(protocol).payload(Header::Transport, 2, 2, R0);
    match ports {
        Ports::Protocol(protocol) => of_protocol(*protocol),
        Ports::Range(protocol, first, last) => {
            port_of(*protocol).between(R0, &first.to_be_bytes(), &last.to_be_bytes())
        }
        Ports::Single(all) => match all.first() {
            // A single port needs no anonymous set, which would be one more set of the table.
            Some((protocol, port)) if all.len() == 1 => port_of(*protocol).equal(R0, &port.to_be_bytes()),
            _ => rule.protocol_and_port(R0).in_anonymous_set(set_of_ports(all)),
        },
        Ports::Named(set) => {
            let is_ipv4 = set.is_ipv4();
            let rule = rule.family(if is_ipv4 { 2 } else { 10 }).destination(is_ipv4, R0);
            rule.protocol_and_port(R0 + registers(is_ipv4)).in_set(&set_name(*set))
        }
    }
}

fn set_of_ports(ports: &BTreeSet<(u8, u16)>) -> AnonymousMap {
    let key = |(protocol, port): &(u8, u16)| Key::default().protocol(*protocol).port(*port);
    let elements = ports.iter().map(|port| Element::member(key(port))).collect();
    AnonymousMap { key: DataType::concatenated(&[INET_PROTO, INET_SERVICE], 8), value: None, elements }
}

fn registers(is_ipv4: bool) -> u32 {
    DataType::address(is_ipv4).length / 4
}

fn direction_name(direction: Direction) -> &'static str {
    match direction {
        Direction::Ingress => "in",
        Direction::Egress => "out",
    }
}

fn tier_name(tier: Tier) -> &'static str {
    match tier {
        Tier::Admin => "admin",
        Tier::Namespaced => "isolated",
        Tier::Baseline => "baseline",
    }
}

pub(crate) fn chain_name(chain: Chain) -> String {
    match chain {
        Chain::Group(number) => format!("group{number}"),
        Chain::Policy(number, direction) => format!("policy{number}-{}", direction_name(direction)),
        Chain::Ports(number, direction, position) => {
            format!("policy{number}-{}-ports{position}", direction_name(direction))
        }
    }
}

pub(crate) fn set_name(set: Set) -> String {
    let family = if set.is_ipv4() { 4 } else { 6 };
    match set {
        Set::Isolated(tier, direction, _) => {
            format!("{}-{}-{family}", tier_name(tier), direction_name(direction))
        }
        Set::Itself(direction, _) => format!("itself-{}-{family}", direction_name(direction)),
        Set::Enforced(_) => format!("enforced-{family}"),
        Set::Addresses(number, _) => format!("pods{number}-{family}"),
        Set::NamedPorts(number, _) => format!("ports{number}-{family}"),
        Set::Blocks(number, direction, position, _) => {
            format!("policy{number}-{}-blocks{position}-{family}", direction_name(direction))
        }
    }
}

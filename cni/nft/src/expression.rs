//! Expressions of rules, and their registers.
//!
//! All registers have 32 bits (`NFT_REG32_00` = 8 and up), so that the parts of concatenated keys are adjacent.

use ipnetwork::IpNetwork;

use crate::data::{DataType, Verdict, octets, value, verdict_data};
use crate::element::{Element, Key};
use crate::message::Attributes;

/// The first 32-bit register.
pub const R0: u32 = 8;
/// The register that takes verdicts.
const VERDICT: u32 = 0;
// `NFTA_FIB_F_SADDR` and `NFTA_FIB_F_DADDR` of linux/netfilter/nf_tables.h.
const FIB_SOURCE: u32 = 1;
const FIB_DESTINATION: u32 = 2;
// Types of addresses, of linux/rtnetlink.h.
const RTN_LOCAL: u32 = 2;
const RTN_BROADCAST: u32 = 3;

/// A rule's expressions, in order.
#[derive(Debug, Default, Clone, PartialEq, Eq, Hash)]
pub struct Rule(pub(crate) Vec<Part>);

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum Part {
    Expression(Attributes),
    /// A lookup in a set that belongs to the rule.
    Anonymous {
        set: AnonymousMap,
        into: Option<u32>,
    },
}

/// A set or map that belongs to one rule, and lives as long as the rule.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct AnonymousMap {
    /// Type of the keys.
    pub key: DataType,
    /// Type of the values. `None` for verdicts.
    pub value: Option<DataType>,
    /// The elements.
    pub elements: Vec<Element>,
}

/// Base of packet offsets.
#[derive(Debug, Clone, Copy)]
pub enum Header {
    /// The Ethernet header.
    Link = 0,
    /// The IP header.
    Network = 1,
    /// The TCP, UDP or SCTP header.
    Transport = 2,
}

/// A property of a packet (`NFT_META_*`).
#[derive(Debug, Clone, Copy)]
pub enum Meta {
    /// Packet mark, in host byte order.
    Mark = 3,
    /// Name of the incoming interface.
    InInterface = 6,
    /// Name of the outgoing interface.
    OutInterface = 7,
    /// Address family.
    Family = 15,
    /// Transport protocol.
    Transport = 16,
}

/// Hooks of the families `inet`, `ip` and `ip6`.
#[derive(Debug, Clone, Copy)]
pub enum Hook {
    /// Before routing.
    Prerouting = 0,
    /// To this machine.
    Input = 1,
    /// Through this machine.
    Forward = 2,
    /// From this machine.
    Output = 3,
    /// After routing.
    Postrouting = 4,
}

// === impl Rule ===

impl Rule {
    fn push(mut self, name: &str, data: Attributes) -> Self {
        self.0.push(Part::Expression(Attributes::default().text(1, name).nest(2, data)));
        self
    }

    /// Loads a property of the packet.
    #[must_use]
    pub fn meta(self, key: Meta, into: u32) -> Self {
        self.push("meta", Attributes::default().number(1, into).number(2, key as u32))
    }

    /// Matches packets of IPv4 or IPv6.
    #[must_use]
    pub fn of_family(is_ipv4: bool) -> Self {
        Self::default().family(if is_ipv4 { 2 } else { 10 })
    }

    /// Matches packets of the address family: `NFPROTO_IPV4` or `NFPROTO_IPV6`.
    #[must_use]
    pub fn family(self, number: u8) -> Self {
        self.meta(Meta::Family, R0).equal(R0, &[number])
    }

    /// Loads bytes of the packet.
    #[must_use]
    pub fn payload(self, header: Header, offset: u32, length: u32, into: u32) -> Self {
        let data = Attributes::default().number(1, into).number(2, header as u32);
        self.push("payload", data.number(3, offset).number(4, length))
    }

    /// Clears the bits of a register that are not in the mask.
    #[must_use]
    pub fn mask(self, register: u32, mask: &[u8]) -> Self {
        self.bitwise(register, mask, &vec![0; mask.len()])
    }

    fn bitwise(self, register: u32, mask: &[u8], xor: &[u8]) -> Self {
        let length = u32::try_from(mask.len()).unwrap_or_default();
        let data = Attributes::default().number(1, register).number(2, register).number(3, length);
        self.push("bitwise", data.nest(4, value(mask)).nest(5, value(xor)))
    }

    /// Sets these bits of the packet's mark.
    #[must_use]
    pub fn set_mark(self, bits: u32) -> Self {
        let rule = self.meta(Meta::Mark, R0);
        let rule = rule.bitwise(R0, &(!bits).to_ne_bytes(), &bits.to_ne_bytes());
        rule.store_mark()
    }

    /// Clears these bits of the packet's mark.
    #[must_use]
    pub fn clear_mark(self, bits: u32) -> Self {
        self.meta(Meta::Mark, R0).mask(R0, &(!bits).to_ne_bytes()).store_mark()
    }

    fn store_mark(self) -> Self {
        self.push("meta", Attributes::default().number(2, Meta::Mark as u32).number(3, R0))
    }

    /// Matches packets whose mark has one of these bits.
    #[must_use]
    pub fn marked(self, bits: u32) -> Self {
        self.meta(Meta::Mark, R0).mask(R0, &bits.to_ne_bytes()).unequal(R0, &0u32.to_ne_bytes())
    }

    /// Matches if the register has this value.
    #[must_use]
    pub fn equal(self, register: u32, wanted: &[u8]) -> Self {
        self.compare(register, 0, wanted)
    }

    /// Matches if the register has another value.
    #[must_use]
    pub fn unequal(self, register: u32, unwanted: &[u8]) -> Self {
        self.compare(register, 1, unwanted)
    }

    fn compare(self, register: u32, operator: u32, data: &[u8]) -> Self {
        self.push("cmp", Attributes::default().number(1, register).number(2, operator).nest(3, value(data)))
    }

    /// Loads the source address.
    #[must_use]
    pub fn source(self, is_ipv4: bool, into: u32) -> Self {
        let (offset, length) = if is_ipv4 { (12, 4) } else { (8, 16) };
        self.payload(Header::Network, offset, length, into)
    }

    /// Loads the destination address.
    #[must_use]
    pub fn destination(self, is_ipv4: bool, into: u32) -> Self {
        let (offset, length) = if is_ipv4 { (16, 4) } else { (24, 16) };
        self.payload(Header::Network, offset, length, into)
    }

    /// Loads transport protocol and destination port, as the fields of a key.
    #[must_use]
    pub fn protocol_and_port(self, into: u32) -> Self {
        self.meta(Meta::Transport, into).payload(Header::Transport, 2, 2, into + 1)
    }

    /// Matches packets whose source is inside the network. If `negated`, matches packets whose source is outside the
    /// network.
    #[must_use]
    pub fn from(self, network: IpNetwork, negated: bool) -> Self {
        self.source(network.is_ipv4(), R0).within(network, negated)
    }

    /// Matches packets whose destination is inside the network. If `negated`, matches packets whose destination is
    /// outside the network.
    #[must_use]
    pub fn to(self, network: IpNetwork, negated: bool) -> Self {
        self.destination(network.is_ipv4(), R0).within(network, negated)
    }

    fn within(self, network: IpNetwork, negated: bool) -> Self {
        let (mask, address) = (octets(network.mask()), octets(network.network()));
        let rule = self.mask(R0, &mask);
        if negated { rule.unequal(R0, &address) } else { rule.equal(R0, &address) }
    }

    /// Matches packets whose destination is an address of this machine (`fib daddr type local`).
    #[must_use]
    pub fn destination_is_local(self) -> Self {
        self.address_type(FIB_DESTINATION, RTN_LOCAL)
    }

    /// Matches packets to 255.255.255.255, and to the broadcast address of a network of this machine
    /// (`fib daddr type broadcast`).
    #[must_use]
    pub fn destination_is_broadcast(self) -> Self {
        self.address_type(FIB_DESTINATION, RTN_BROADCAST)
    }

    /// Matches packets whose source is an address of this machine (`fib saddr type local`).
    #[must_use]
    pub fn source_is_local(self) -> Self {
        self.address_type(FIB_SOURCE, RTN_LOCAL)
    }

    fn address_type(self, address: u32, wanted: u32) -> Self {
        const ADDRESS_TYPE: u32 = 3;
        let data = Attributes::default().number(1, R0).number(2, ADDRESS_TYPE).number(3, address);
        self.push("fib", data).equal(R0, &wanted.to_ne_bytes())
    }

    /// Matches packets of connections whose destination was translated (`ct status dnat`).
    #[must_use]
    pub fn translated(self) -> Self {
        self.status().mask(R0, &0x20u32.to_ne_bytes()).unequal(R0, &0u32.to_ne_bytes())
    }

    /// Matches packets without an established or related connection (`ct state`).
    #[must_use]
    pub fn new_connections(self) -> Self {
        self.state().equal(R0, &0u32.to_ne_bytes())
    }

    /// Matches the first packet of each connection (`ct state new`, `ct status ! confirmed`). Until a reply arrives,
    /// later packets also have the state `new`, but their connection is confirmed.
    #[must_use]
    pub fn begins_connection(self) -> Self {
        const NEW: u32 = 0x8;
        const CONFIRMED: u32 = 0x8;
        let rule = self.state_of(NEW).unequal(R0, &0u32.to_ne_bytes());
        rule.status().mask(R0, &CONFIRMED.to_ne_bytes()).equal(R0, &0u32.to_ne_bytes())
    }

    fn status(self) -> Self {
        const STATUS: u32 = 2;
        self.push("ct", Attributes::default().number(1, R0).number(2, STATUS))
    }

    /// Matches packets of established and related connections (`ct state`).
    #[must_use]
    pub fn established_or_related(self) -> Self {
        self.state().unequal(R0, &0u32.to_ne_bytes())
    }

    /// Matches errors and other packets that relate to a connection (`ct state related`).
    #[must_use]
    pub fn related(self) -> Self {
        const RELATED: u32 = 0x4;
        self.state_of(RELATED).unequal(R0, &0u32.to_ne_bytes())
    }

    /// Matches replies: packets to the client of their connection (`ct direction reply`).
    #[must_use]
    pub fn replies(self) -> Self {
        const DIRECTION: u32 = 1;
        const REPLY: u8 = 1;
        let rule = self.push("ct", Attributes::default().number(1, R0).number(2, DIRECTION));
        rule.equal(R0, &[REPLY])
    }

    /// Matches packets of connections whose mark has one of the bits (`ct mark`).
    #[must_use]
    pub fn connection_marked(self, bits: u32) -> Self {
        const MARK: u32 = 3;
        let rule = self.push("ct", Attributes::default().number(1, R0).number(2, MARK));
        rule.mask(R0, &bits.to_ne_bytes()).unequal(R0, &0u32.to_ne_bytes())
    }

    fn state(self) -> Self {
        const ESTABLISHED_OR_RELATED: u32 = 0x2 | 0x4;
        self.state_of(ESTABLISHED_OR_RELATED)
    }

    fn state_of(self, bits: u32) -> Self {
        const STATE: u32 = 0;
        let rule = self.push("ct", Attributes::default().number(1, R0).number(2, STATE));
        rule.mask(R0, &bits.to_ne_bytes())
    }

    /// Matches if the register is between the two values of equal length, in network byte order.
    #[must_use]
    pub fn between(self, register: u32, first: &[u8], last: &[u8]) -> Self {
        const AT_MOST: u32 = 3;
        const AT_LEAST: u32 = 5;
        self.compare(register, AT_LEAST, first).compare(register, AT_MOST, last)
    }

    /// Looks up the key in the registers from `R0`, and loads the value into these registers.
    #[must_use]
    pub fn lookup(self, map: &str) -> Self {
        self.push("lookup", Attributes::default().text(1, map).number(2, R0).number(3, R0))
    }

    /// Looks up the key in the registers from `R0` in a map of verdicts, and executes the verdict.
    #[must_use]
    pub fn lookup_verdict(self, map: &str) -> Self {
        self.push("lookup", Attributes::default().text(1, map).number(2, R0).number(3, VERDICT))
    }

    /// Matches packets whose key, in the registers from `R0`, is in the set.
    #[must_use]
    pub fn in_set(self, set: &str) -> Self {
        self.push("lookup", Attributes::default().text(1, set).number(2, R0))
    }

    /// Matches packets whose key, in the registers from `R0`, is not in the set.
    #[must_use]
    pub fn not_in_set(self, set: &str) -> Self {
        const INVERTED: u32 = 1;
        self.push("lookup", Attributes::default().text(1, set).number(2, R0).number(5, INVERTED))
    }

    /// Looks up the key in the registers from `R0` in an anonymous map, and loads the value into these registers or
    /// executes the verdict.
    #[must_use]
    pub fn lookup_in(mut self, set: AnonymousMap) -> Self {
        let into = Some(if set.value.is_some() { R0 } else { VERDICT });
        self.0.push(Part::Anonymous { set, into });
        self
    }

    /// Matches packets whose key, in the registers from `R0`, is in an anonymous set.
    #[must_use]
    pub fn in_anonymous_set(mut self, set: AnonymousMap) -> Self {
        self.0.push(Part::Anonymous { set, into: None });
        self
    }

    /// Adds the key in the registers from `R0` to the set, or renews its timeout.
    #[must_use]
    pub fn update(self, set: &str) -> Self {
        const UPDATE: u32 = 1;
        self.push("dynset", Attributes::default().text(1, set).number(3, UPDATE).number(4, R0))
    }

    /// Matches a packet whose connection exceeds the limit of `max` connections with the same key. The key is in the
    /// registers from `R0`. The set has an element for each key, which counts the connections (`ct count over`).
    #[must_use]
    pub fn more_connections_than(self, set: &str, max: u32) -> Self {
        const ADD: u32 = 0;
        const OVER: u32 = 1;
        let count = Attributes::default().number(1, max).number(2, OVER);
        let count = Attributes::default().text(1, "connlimit").nest(2, count);
        self.push("dynset", Attributes::default().text(1, set).number(3, ADD).number(4, R0).nest(7, count))
    }

    /// Matches packets that exceed the rate of their key: `rate` packets per second, after a burst of `burst` packets.
    /// The key is in the registers from `R0`. The set has an element for each key, which measures the rate (`limit rate
    /// over`).
    #[must_use]
    pub fn more_packets_than(self, set: &str, rate: u64, burst: u32) -> Self {
        const UPDATE: u32 = 1;
        const PACKETS: u32 = 0;
        const OVER: u32 = 1;
        const SECOND: u64 = 1;
        let limit = Attributes::default().bytes(1, &rate.to_be_bytes()).bytes(2, &SECOND.to_be_bytes());
        let limit = limit.number(3, burst).number(4, PACKETS).number(5, OVER);
        let limit = Attributes::default().text(1, "limit").nest(2, limit);
        self.push("dynset", Attributes::default().text(1, set).number(3, UPDATE).number(4, R0).nest(7, limit))
    }

    /// Counts the packets that reach this part of the rule, and their bytes. `nft list table` shows the numbers.
    #[must_use]
    pub fn count_packets(self) -> Self {
        self.push("counter", Attributes::default())
    }

    /// Loads a random number below `modulus`, in host byte order.
    #[must_use]
    pub fn random(self, modulus: u32, into: u32) -> Self {
        const RANDOM: u32 = 1;
        let data = Attributes::default().number(1, into).number(2, modulus).number(3, RANDOM);
        self.push("numgen", data.number(4, 0))
    }

    /// Loads a hash (`jhash`) of `length` bytes in the registers from `of`: a number below `modulus`, in host byte
    /// order. `modulus` is at least 2. Equal bytes have equal hashes in all rules.
    #[must_use]
    pub fn hash(self, of: u32, length: u32, modulus: u32, into: u32) -> Self {
        const JENKINS: u32 = 0;
        // Without this seed the kernel chooses a different seed for each rule.
        const SEED: u32 = 1;
        let data = Attributes::default().number(1, of).number(2, into).number(3, length);
        self.push("hash", data.number(4, modulus).number(5, SEED).number(7, JENKINS))
    }

    /// Translates the destination to the address in the registers from `R0`, and the port in the register after the
    /// address.
    #[must_use]
    pub fn destination_nat(self, family: u8, address_registers: u32) -> Self {
        let data = Attributes::default().number(1, 1).number(2, u32::from(family));
        self.push("nat", data.number(3, R0).number(5, R0 + address_registers))
    }

    /// Replaces the source by an address of the outgoing interface.
    #[must_use]
    pub fn masquerade(self) -> Self {
        self.push("masq", Attributes::default())
    }

    /// Like [`masquerade`](Self::masquerade), with a random source port: concurrent connections do not collide.
    #[must_use]
    pub fn masquerade_randomly(self) -> Self {
        const RANDOM_FULLY: u32 = 16;
        self.push("masq", Attributes::default().number(1, RANDOM_FULLY))
    }

    /// Puts a value into a register.
    #[must_use]
    pub fn immediate(self, register: u32, data: &[u8]) -> Self {
        self.push("immediate", Attributes::default().number(1, register).nest(2, value(data)))
    }

    /// Rejects the packet with an ICMP error "port unreachable".
    #[must_use]
    pub fn reject(self) -> Self {
        const ICMPX_UNREACHABLE: u32 = 2;
        const PORT: u8 = 1;
        self.push("reject", Attributes::default().number(1, ICMPX_UNREACHABLE).bytes(2, &[PORT]))
    }

    /// Ends the rule with a verdict.
    #[must_use]
    pub fn verdict(self, verdict: &Verdict) -> Self {
        self.push("immediate", Attributes::default().number(1, VERDICT).nest(2, verdict_data(verdict)))
    }

    /// Accepts the packet: ends the evaluation of the base chain.
    #[must_use]
    pub fn accept(self) -> Self {
        self.verdict(&Verdict::Accept)
    }

    /// Discards the packet.
    #[must_use]
    pub fn drop(self) -> Self {
        self.verdict(&Verdict::Drop)
    }

    /// Evaluates the chain, then the next rule.
    #[must_use]
    pub fn jump(self, chain: &str) -> Self {
        self.verdict(&Verdict::Jump(chain.to_owned()))
    }

    /// Evaluates the chain instead of the next rules.
    #[must_use]
    pub fn goto(self, chain: &str) -> Self {
        self.verdict(&Verdict::Goto(chain.to_owned()))
    }
}

// === impl AnonymousMap ===

impl AnonymousMap {
    /// A map from the numbers 0, 1, 2 and so on to the values. A rule chooses a value by a random number.
    #[must_use]
    pub fn choice(value: Option<DataType>, values: impl IntoIterator<Item = crate::Value>) -> Self {
        /// `TYPE_INTEGER` of the nft tool.
        const INTEGER: u32 = 4;
        let numbered = (0u32..).zip(values);
        let elements =
            numbered.map(|(number, value)| Element::pair(Key::of_bytes(&number.to_ne_bytes()), value));
        Self { key: DataType { kind: INTEGER, length: 4 }, value, elements: elements.collect() }
    }
}

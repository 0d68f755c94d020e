//! Data of expressions and elements: types, values and verdicts.

use std::net::IpAddr;

use crate::message::Attributes;

/// `TYPE_IPADDR`: the nft tool uses such types to print the keys and values of a set.
pub const IPV4_ADDR: u32 = 7;
/// `TYPE_IP6ADDR`.
pub const IPV6_ADDR: u32 = 8;
/// `TYPE_INET_PROTOCOL`.
pub const INET_PROTO: u32 = 12;
/// `TYPE_INET_SERVICE`.
pub const INET_SERVICE: u32 = 13;
/// `TYPE_MARK`: a number in host byte order.
pub const MARK: u32 = 19;

/// A verdict on a packet (nft(8), "Verdict statement").
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Verdict {
    /// Ends the evaluation of the base chain. Other base chains still see the packet.
    Accept,
    /// Discards the packet.
    Drop,
    /// Continues after the jump in the calling chain.
    Return,
    /// Evaluates this chain, then the next rule.
    Jump(String),
    /// Evaluates this chain instead of the next rules.
    Goto(String),
}

/// Type of the keys or values of a set or map.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct DataType {
    /// Type for the nft tool, such as `TYPE_IPADDR`. The kernel does not use it.
    pub kind: u32,
    /// Length in bytes.
    pub length: u32,
}

// === impl DataType ===

impl DataType {
    /// The type of an address of IPv4 or IPv6.
    #[must_use]
    pub const fn address(is_ipv4: bool) -> Self {
        if is_ipv4 { Self { kind: IPV4_ADDR, length: 4 } } else { Self { kind: IPV6_ADDR, length: 16 } }
    }

    /// The type of concatenated fields. Each field is padded to a multiple of four bytes; `length` includes the
    /// padding.
    #[must_use]
    pub fn concatenated(kinds: &[u32], length: u32) -> Self {
        Self { kind: kinds.iter().fold(0, |all, kind| (all << 6) | kind), length }
    }
}

/// The attribute `NFTA_DATA_VALUE` with these bytes.
pub(crate) fn value(bytes: &[u8]) -> Attributes {
    Attributes::default().bytes(1, bytes)
}

/// The attribute `NFTA_DATA_VERDICT` with the verdict.
pub(crate) fn verdict_data(verdict: &Verdict) -> Attributes {
    let coded = |code: i32| Attributes::default().number(1, u32::from_ne_bytes(code.to_ne_bytes()));
    let verdict = match verdict {
        Verdict::Drop => coded(0),
        Verdict::Accept => coded(1),
        Verdict::Jump(chain) => coded(-3).text(2, chain),
        Verdict::Goto(chain) => coded(-4).text(2, chain),
        Verdict::Return => coded(-5),
    };
    Attributes::default().nest(2, verdict)
}

/// The bytes of an address in network byte order.
#[must_use]
pub fn octets(ip: IpAddr) -> Vec<u8> {
    match ip {
        IpAddr::V4(ip) => ip.octets().to_vec(),
        IpAddr::V6(ip) => ip.octets().to_vec(),
    }
}

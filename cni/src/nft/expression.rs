//! nftables expressions used by our rules, and their registers.
//!
//! Registers are the 32-bit ones (`NFT_REG32_00` = 8 and up), so that the parts of concatenated keys are adjacent.

use super::message::Attributes;

/// The first 32-bit register.
pub(crate) const R0: u32 = 8;

/// A rule's expressions, in order.
#[derive(Default, Clone)]
pub(crate) struct Rule(Attributes);

/// Base of packet offsets.
#[derive(Clone, Copy)]
pub(crate) enum Header {
    Network = 1,
    Transport = 2,
}

/// `NFT_META_*`.
#[derive(Clone, Copy)]
pub(crate) enum Meta {
    InInterface = 6,
    OutInterface = 7,
    Family = 15,
    Transport = 16,
}

impl Rule {
    fn push(self, name: &str, data: Attributes) -> Self {
        Self(self.0.nest(1, Attributes::default().text(1, name).nest(2, data)))
    }

    pub(crate) fn finish(self) -> Attributes {
        self.0
    }

    pub(crate) fn meta(self, key: Meta, into: u32) -> Self {
        self.push("meta", Attributes::default().number(1, into).number(2, key as u32))
    }

    pub(crate) fn payload(self, header: Header, offset: u32, length: u32, into: u32) -> Self {
        let data = Attributes::default().number(1, into).number(2, header as u32);
        self.push("payload", data.number(3, offset).number(4, length))
    }

    pub(crate) fn mask(self, register: u32, mask: &[u8]) -> Self {
        let length = u32::try_from(mask.len()).unwrap_or_default();
        let data = Attributes::default().number(1, register).number(2, register).number(3, length);
        self.push("bitwise", data.nest(4, value(mask)).nest(5, value(&vec![0; mask.len()])))
    }

    pub(crate) fn equal(self, register: u32, wanted: &[u8]) -> Self {
        self.compare(register, 0, wanted)
    }

    pub(crate) fn unequal(self, register: u32, unwanted: &[u8]) -> Self {
        self.compare(register, 1, unwanted)
    }

    fn compare(self, register: u32, operator: u32, data: &[u8]) -> Self {
        self.push("cmp", Attributes::default().number(1, register).number(2, operator).nest(3, value(data)))
    }

    /// The packet's destination is an address of this machine (`fib daddr type local`).
    pub(crate) fn destination_is_local(self) -> Self {
        let data = Attributes::default().number(1, R0).number(2, 3).number(3, 2);
        self.push("fib", data).equal(R0, &2u32.to_ne_bytes())
    }

    /// The connection's destination was translated (`ct status dnat`).
    pub(crate) fn translated(self) -> Self {
        let rule = self.push("ct", Attributes::default().number(1, R0).number(2, 2));
        rule.mask(R0, &0x20u32.to_ne_bytes()).unequal(R0, &0u32.to_ne_bytes())
    }

    /// The connection is neither established nor related (`ct state`).
    pub(crate) fn unasked(self) -> Self {
        const STATE: u32 = 0;
        const ESTABLISHED_OR_RELATED: u32 = 0x2 | 0x4;
        let rule = self.push("ct", Attributes::default().number(1, R0).number(2, STATE));
        rule.mask(R0, &ESTABLISHED_OR_RELATED.to_ne_bytes()).equal(R0, &0u32.to_ne_bytes())
    }

    pub(crate) fn lookup(self, map: &str) -> Self {
        self.push("lookup", Attributes::default().text(1, map).number(2, R0).number(3, R0))
    }

    /// Matches packets whose first register is not in the set.
    pub(crate) fn outside(self, set: &str) -> Self {
        const INVERTED: u32 = 1;
        self.push("lookup", Attributes::default().text(1, set).number(2, R0).number(5, INVERTED))
    }

    /// Translates the destination to the address in `R0` and the port in the register after it.
    pub(crate) fn destination_nat(self, family: u8, address_registers: u32) -> Self {
        let data = Attributes::default().number(1, 1).number(2, u32::from(family));
        self.push("nat", data.number(3, R0).number(5, R0 + address_registers))
    }

    pub(crate) fn masquerade(self) -> Self {
        self.push("masq", Attributes::default())
    }

    /// Puts a value into a register.
    pub(crate) fn immediate(self, register: u32, data: &[u8]) -> Self {
        self.push("immediate", Attributes::default().number(1, register).nest(2, value(data)))
    }

    /// Ends the chain for the packet.
    pub(crate) fn accept(self) -> Self {
        self.verdict(Attributes::default().number(1, 1))
    }

    pub(crate) fn drop(self) -> Self {
        self.verdict(Attributes::default().number(1, 0))
    }

    pub(crate) fn jump(self, chain: &str) -> Self {
        const JUMP: u32 = -3i32 as u32;
        self.verdict(Attributes::default().number(1, JUMP).text(2, chain))
    }

    fn verdict(self, verdict: Attributes) -> Self {
        let data = Attributes::default().nest(2, verdict);
        self.push("immediate", Attributes::default().number(1, 0).nest(2, data))
    }
}

/// `NFTA_DATA_VALUE`.
pub(crate) fn value(bytes: &[u8]) -> Attributes {
    Attributes::default().bytes(1, bytes)
}

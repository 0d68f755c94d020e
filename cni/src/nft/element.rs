//! Converts host ports and their conditions to elements and expressions of nftables.

use coracle_nft::{Element, Key, Meta, R0, Rule, Value};

use super::Mapping;
use super::packet_match::{compared, interface};
use crate::port_condition::{Condition, Subject};
use crate::ports::Protocol;

// === impl Condition ===

impl Condition {
    /// Matches packets for which the condition holds.
    pub(super) fn compared(&self, rule: Rule) -> Rule {
        let by = |rule: Rule, name: &[u8]| compared(rule.meta(Meta::InInterface, R0), name, self.negated);
        match &self.subject {
            Subject::From(network) => rule.from(*network, self.negated),
            Subject::To(network) => rule.to(*network, self.negated),
            Subject::By(name) => by(rule, &interface(name)),
            Subject::ByAny(head) => by(rule, head.as_bytes()),
        }
    }
}

// === impl Mapping ===

impl Mapping {
    /// The mapping's element in the map of host ports. With `valued` it has a value, otherwise only a key.
    pub(super) fn element(&self, valued: bool) -> Element {
        let key = self.host_ip.map_or_else(Key::default, |ip| Key::default().address(ip));
        let key = key.protocol(self.protocol.number()).port(self.host_port);
        if valued { Element::pair(key, Value::Target(self.to, self.to_port)) } else { Element::member(key) }
    }
}

impl Protocol {
    /// Number of the protocol in IP headers.
    pub(crate) fn number(self) -> u8 {
        match self {
            Self::Tcp => 6,
            Self::Udp => 17,
            Self::Sctp => 132,
        }
    }
}

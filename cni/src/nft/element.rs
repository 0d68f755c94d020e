//! Host ports and their conditions in the kernel's form.

use std::net::IpAddr;

use super::expression::{Meta, R0, Rule, value};
use super::message::Attributes;
use super::{Mapping, compared, destined, interface, sent};
use crate::portmap::condition::{Condition, Subject};
use crate::ports::Protocol;

// === impl Condition ===

impl Condition {
    /// Matches packets for which the condition holds.
    pub(super) fn compared(&self, rule: Rule) -> Rule {
        let by = |rule: Rule, name: &[u8]| compared(rule.meta(Meta::InInterface, R0), name, self.negated);
        match &self.subject {
            Subject::From(network) => sent(rule, *network, self.negated),
            Subject::To(network) => destined(rule, *network, self.negated),
            Subject::By(name) => by(rule, &interface(name)),
            Subject::ByAny(head) => by(rule, head.as_bytes()),
        }
    }
}

// === impl Mapping ===

impl Mapping {
    /// Key of the element in the map.
    pub(super) fn key(&self) -> Attributes {
        let mut key = self.host_ip.map(octets).unwrap_or_default();
        key.extend_from_slice(&[self.protocol.number(), 0, 0, 0]);
        key.extend_from_slice(&padded(self.host_port));
        Attributes::default().nest(1, value(&key))
    }

    /// Value of the element in the map.
    pub(super) fn element(&self) -> Attributes {
        let mut target = octets(self.to);
        target.extend_from_slice(&padded(self.to_port));
        self.key().nest(2, value(&target))
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

fn padded(port: u16) -> [u8; 4] {
    let [high, low] = port.to_be_bytes();
    [high, low, 0, 0]
}

pub(super) fn octets(ip: IpAddr) -> Vec<u8> {
    match ip {
        IpAddr::V4(ip) => ip.octets().to_vec(),
        IpAddr::V6(ip) => ip.octets().to_vec(),
    }
}

//! Elements of sets and maps: keys of concatenated fields, and what a map assigns to them.

use std::net::IpAddr;
use std::time::Duration;

use crate::data::{Verdict, octets, value, verdict_data};
use crate::message::Attributes;

/// Key of an element. Each field of a concatenation is padded to four bytes.
#[derive(Debug, Default, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key(Vec<u8>);

/// The value of a key in a map.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Value {
    /// A verdict on the packet.
    Verdict(Verdict),
    /// Address and port, in this order.
    Target(IpAddr, u16),
}

/// An element of a set, or of a map if it has a value.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Element {
    /// The key.
    pub key: Key,
    /// The value, for maps.
    pub value: Option<Value>,
    /// Time until the kernel removes the element, in sets with timeouts.
    pub expires: Option<Duration>,
}

// === impl Key ===

impl Key {
    /// Appends an address.
    #[must_use]
    pub fn address(mut self, address: IpAddr) -> Self {
        self.0.extend_from_slice(&octets(address));
        self
    }

    /// Appends a protocol number.
    #[must_use]
    pub fn protocol(mut self, number: u8) -> Self {
        self.0.extend_from_slice(&[number, 0, 0, 0]);
        self
    }

    /// Appends a port.
    #[must_use]
    pub fn port(mut self, port: u16) -> Self {
        self.0.extend_from_slice(&padded(port));
        self
    }

    /// Appends a number in host byte order.
    #[must_use]
    pub fn number(mut self, number: u32) -> Self {
        self.0.extend_from_slice(&number.to_ne_bytes());
        self
    }

    /// Appends an interface name.
    #[must_use]
    pub fn interface(mut self, name: &str) -> Self {
        let mut bytes = [0; 16];
        bytes.iter_mut().zip(name.bytes().take(15)).for_each(|(to, from)| *to = from);
        self.0.extend_from_slice(&bytes);
        self
    }

    /// Appends an Ethernet address.
    #[must_use]
    pub fn ethernet(mut self, address: [u8; 6]) -> Self {
        self.0.extend_from_slice(&address);
        self.0.extend_from_slice(&[0; 2]);
        self
    }

    /// A key of these bytes, as read from the kernel.
    #[must_use]
    pub fn of_bytes(bytes: &[u8]) -> Self {
        Self(bytes.to_vec())
    }

    /// The bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

// === impl Element ===

impl Element {
    /// An element of a set.
    #[must_use]
    pub fn member(key: Key) -> Self {
        Self { key, value: None, expires: None }
    }

    /// An element of a map.
    #[must_use]
    pub fn pair(key: Key, value: Value) -> Self {
        Self { key, value: Some(value), expires: None }
    }

    pub(crate) fn encoded(&self) -> Attributes {
        let key = Attributes::default().nest(1, value(&self.key.0));
        let with_value = match &self.value {
            None => key,
            Some(Value::Verdict(verdict)) => key.nest(2, verdict_data(verdict)),
            Some(Value::Target(address, port)) => {
                let mut target = octets(*address);
                target.extend_from_slice(&padded(*port));
                key.nest(2, value(&target))
            }
        };
        match self.expires {
            None => with_value,
            Some(left) => {
                let millis = u64::try_from(left.as_millis()).unwrap_or(u64::MAX);
                with_value.bytes(5, &millis.to_be_bytes())
            }
        }
    }
}

fn padded(port: u16) -> [u8; 4] {
    let [high, low] = port.to_be_bytes();
    [high, low, 0, 0]
}

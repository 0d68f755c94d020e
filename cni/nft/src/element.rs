//! Elements of sets and maps: keys of concatenated fields and, in maps, their values.

use std::net::IpAddr;
use std::time::Duration;

use crate::data::{Verdict, octets, verdict_data};
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

    /// Appends the element to a list, without a copy: a table has tens of thousands of elements.
    pub(crate) fn append_to(&self, list: Attributes) -> Attributes {
        list.nest_with(1, |element| self.encode(element))
    }

    fn encode(&self, element: Attributes) -> Attributes {
        let key = element.nest_with(1, |key| key.bytes(1, &self.key.0));
        let with_value = match &self.value {
            None => key,
            Some(Value::Verdict(verdict)) => key.nest(2, verdict_data(verdict)),
            Some(Value::Target(address, port)) => {
                let mut target = [0; 20];
                let length = match address {
                    IpAddr::V4(ip) => fill(&mut target, &[&ip.octets(), &padded(*port)]),
                    IpAddr::V6(ip) => fill(&mut target, &[&ip.octets(), &padded(*port)]),
                };
                key.nest_with(2, |value| value.bytes(1, target.get(..length).unwrap_or_default()))
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

/// Copies the parts to the start of the target. Returns their length.
fn fill(target: &mut [u8], parts: &[&[u8]]) -> usize {
    let bytes = parts.iter().flat_map(|part| part.iter());
    target.iter_mut().zip(bytes).map(|(to, from)| *to = *from).count()
}

fn padded(port: u16) -> [u8; 4] {
    let [high, low] = port.to_be_bytes();
    [high, low, 0, 0]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::value;

    #[test]
    fn elements_written_in_place_have_the_bytes_of_nested_attributes() {
        for (address, target) in [
            ("10.0.0.1", vec![10, 0, 0, 1, 0x1f, 0x90, 0, 0]),
            ("::1", [&[0; 15][..], &[1, 0x1f, 0x90, 0, 0]].concat()),
        ] {
            let key = Key::default().address(address.parse().unwrap()).protocol(6).port(80);
            let element = Element::pair(key.clone(), Value::Target(address.parse().unwrap(), 8080));
            let nested = Attributes::default().nest(1, value(key.as_bytes())).nest(2, value(&target));
            let nested = Attributes::default().text(9, "before").nest(1, nested);
            assert_eq!(element.append_to(Attributes::default().text(9, "before")), nested);
        }
    }
}

//! Ethernet hardware addresses.

pub(crate) fn format_mac(mac: &[u8]) -> String {
    mac.iter().map(|byte| format!("{byte:02x}")).collect::<Vec<_>>().join(":")
}

/// Parses a unicast hardware address, whose bytes are separated by `:` or `-`. `None` if the text is no such address.
pub(crate) fn parse_mac(text: &str) -> Option<[u8; 6]> {
    let mut mac = [0; 6];
    let mut parts = text.split([':', '-']);
    for byte in &mut mac {
        let part = parts.next().filter(|p| p.len() == 2 && p.bytes().all(|b| b.is_ascii_hexdigit()))?;
        *byte = u8::from_str_radix(part, 16).ok()?;
    }
    (parts.next().is_none() && mac[0] & 1 == 0 && mac != [0; 6]).then_some(mac)
}

/// First bytes of our random hardware addresses.
pub(super) const OUR_PREFIX: u8 = 0x0a;

/// A random, locally administered hardware address.
pub(crate) fn random_mac() -> [u8; 6] {
    use std::hash::{BuildHasher, RandomState};
    // Each `RandomState` has its own keys, derived from random numbers of the kernel.
    let [a, b, c, d, e, ..] = RandomState::new().hash_one(std::process::id()).to_ne_bytes();
    [OUR_PREFIX, a, b, c, d, e]
}

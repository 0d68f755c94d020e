//! IP blocks with exceptions as ranges of addresses.

use std::net::IpAddr;

use ipnetwork::IpNetwork;

/// Addresses of one family: first and last, as numbers.
pub(crate) type Range = (u128, u128);

/// A block of addresses without its exceptions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Block {
    pub(crate) network: IpNetwork,
    pub(crate) except: Vec<IpNetwork>,
}

/// An address as a number.
pub(crate) fn number(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(address) => address.to_bits().into(),
        IpAddr::V6(address) => address.to_bits(),
    }
}

/// Whether the address is in a range of its family.
pub(crate) fn is_within((first, last): Range, address: IpAddr) -> bool {
    (first..=last).contains(&number(address))
}

/// The addresses of the blocks in one family, as ranges that neither overlap nor touch.
pub(crate) fn ranges(blocks: &[Block], is_ipv4: bool) -> Vec<Range> {
    let of_family = blocks.iter().filter(|block| block.network.is_ipv4() == is_ipv4);
    let mut all: Vec<Range> = of_family.flat_map(Block::ranges).collect();
    all.sort_unstable();
    let mut merged: Vec<Range> = Vec::with_capacity(all.len());
    for (first, last) in all {
        match merged.last_mut() {
            Some(before) if first <= before.1.saturating_add(1) => before.1 = before.1.max(last),
            _ => merged.push((first, last)),
        }
    }
    merged
}

/// The first and the last address of a network.
fn range_of(network: IpNetwork) -> Range {
    match network {
        IpNetwork::V4(network) => (network.network().to_bits().into(), network.broadcast().to_bits().into()),
        IpNetwork::V6(network) => (network.network().to_bits(), network.broadcast().to_bits()),
    }
}

// === impl Block ===

impl Block {
    fn ranges(&self) -> Vec<Range> {
        let (mut next, last) = range_of(self.network);
        let mut excepted: Vec<Range> = self
            .except
            .iter()
            .filter(|other| other.is_ipv4() == self.network.is_ipv4())
            .map(|other| range_of(*other))
            .collect();
        excepted.sort_unstable();
        let mut ranges = Vec::new();
        for (from, to) in excepted {
            if to < next || from > last {
                continue;
            }
            if from > next {
                ranges.push((next, from - 1));
            }
            match to.checked_add(1) {
                Some(after) if after <= last => next = after,
                _ => return ranges,
            }
        }
        ranges.push((next, last));
        ranges
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(blocks: &[(&str, &[&str])], is_ipv4: bool) -> Vec<Range> {
        let block = |(network, except): &(&str, &[&str])| Block {
            network: network.parse().unwrap(),
            except: except.iter().map(|text| text.parse().unwrap()).collect(),
        };
        ranges(&blocks.iter().map(block).collect::<Vec<_>>(), is_ipv4)
    }

    fn ip(text: &str) -> u128 {
        number(text.parse().unwrap())
    }

    #[test]
    fn exceptions_cut_their_own_block_only() {
        let cut = of(&[("10.0.0.0/24", &["10.0.0.0/26", "10.0.0.128/32"])], true);
        assert_eq!(cut, [(ip("10.0.0.64"), ip("10.0.0.127")), (ip("10.0.0.129"), ip("10.0.0.255"))]);
        let other = of(&[("10.0.0.0/24", &["10.0.0.0/26"]), ("10.0.0.0/25", &[])], true);
        assert_eq!(other, [(ip("10.0.0.0"), ip("10.0.0.255"))]);
        assert_eq!(of(&[("10.0.0.0/24", &["10.0.0.0/24"])], true), []);
        assert_eq!(of(&[("10.0.0.0/24", &["10.0.0.0/8"])], true), []);
    }

    #[test]
    fn ranges_with_the_first_or_last_address_do_not_overflow() {
        assert_eq!(of(&[("::/0", &["ffff::/16"])], false), [(0, ip("ffff::") - 1)]);
        assert_eq!(of(&[("::/0", &[])], false), [(0, u128::MAX)]);
        assert_eq!(of(&[("::/0", &[])], true), []);
        assert_eq!(of(&[("0.0.0.0/0", &["255.255.255.255/32"])], true), [(0, u128::from(u32::MAX) - 1)]);
    }
}

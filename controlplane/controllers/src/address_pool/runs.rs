//! Taken addresses as runs of adjacent addresses, so that the first free address of a range takes one look-up.

use std::collections::BTreeMap;
use std::net::IpAddr;

use ipnetwork::IpNetwork;

/// The number of an address, with its family: `true` means IPv4.
type Number = (bool, u128);

/// Taken addresses. Two runs are never adjacent: the address after a run is free.
#[derive(Debug, Default)]
pub(super) struct Runs {
    /// The last address of each run, by its first address.
    last: BTreeMap<Number, u128>,
}

// === impl Runs ===

impl Runs {
    /// Adds an address. A taken address is not an error.
    pub(super) fn add(&mut self, address: IpAddr) {
        let (is_ipv4, number) = number(address);
        let (mut first, mut last) = (number, number);
        if let Some((start, end)) = self.at_or_before((is_ipv4, number)) {
            if end >= number {
                return;
            }
            if end + 1 == number {
                first = start;
            }
        }
        if let Some(next) = number.checked_add(1)
            && let Some(end) = self.last.remove(&(is_ipv4, next))
        {
            last = end;
        }
        self.last.insert((is_ipv4, first), last);
    }

    /// Removes an address. A free address is not an error.
    pub(super) fn remove(&mut self, address: IpAddr) {
        let (is_ipv4, number) = number(address);
        let Some((first, last)) = self.at_or_before((is_ipv4, number)).filter(|(_, last)| *last >= number)
        else {
            return;
        };
        match first == number {
            true => drop(self.last.remove(&(is_ipv4, first))),
            false => drop(self.last.insert((is_ipv4, first), number - 1)),
        }
        if last > number {
            self.last.insert((is_ipv4, number + 1), last);
        }
    }

    /// The lowest address of the range that is not taken.
    pub(super) fn first_free(&self, range: &IpNetwork) -> Option<IpAddr> {
        let (is_ipv4, first) = number(range.network());
        let (_, last) = number(range.broadcast());
        let free = match self.at_or_before((is_ipv4, first)) {
            Some((_, end)) if end >= first => end.checked_add(1)?,
            _ => first,
        };
        (free <= last).then(|| address(is_ipv4, free))?
    }

    /// The last run that starts at or before the address.
    fn at_or_before(&self, (is_ipv4, number): Number) -> Option<(u128, u128)> {
        let mut before = self.last.range((is_ipv4, 0)..=(is_ipv4, number));
        before.next_back().map(|((_, first), last)| (*first, *last))
    }
}

fn number(address: IpAddr) -> Number {
    match address {
        IpAddr::V4(v4) => (true, v4.to_bits().into()),
        IpAddr::V6(v6) => (false, v6.to_bits()),
    }
}

fn address(is_ipv4: bool, number: u128) -> Option<IpAddr> {
    match is_ipv4 {
        true => u32::try_from(number).ok().map(|bits| IpAddr::V4(bits.into())),
        false => Some(IpAddr::V6(number.into())),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn a_full_range_of_any_size_is_one_run() {
        let (mut runs, range) = (Runs::default(), "10.0.0.0/15".parse::<IpNetwork>().unwrap());
        for number in 0..1 << 17 {
            let free = runs.first_free(&range).unwrap();
            assert_eq!(free, IpAddr::V4((0x0a00_0000 + number).into()));
            runs.add(free);
            assert_eq!(runs.last.len(), 1, "the next look-up visits one run");
        }
        assert_eq!(runs.first_free(&range), None);
        runs.remove(ip("10.1.2.3"));
        assert_eq!((runs.first_free(&range), runs.last.len()), (Some(ip("10.1.2.3")), 2));
        runs.add(ip("10.1.2.3"));
        assert_eq!((runs.first_free(&range), runs.last.len()), (None, 1));
    }

    #[test]
    fn ranges_to_the_last_address_of_a_family_end() {
        let mut runs = Runs::default();
        for (last, range) in [
            ("255.255.255.255", "255.255.255.255/32"),
            ("ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff/128"),
        ] {
            let range = range.parse().unwrap();
            assert_eq!(runs.first_free(&range), Some(ip(last)));
            runs.add(ip(last));
            assert_eq!(runs.first_free(&range), None);
        }
        assert_eq!(runs.first_free(&"0.0.0.0/0".parse().unwrap()), Some(ip("0.0.0.0")));
    }

    #[test]
    fn runs_have_the_addresses_of_a_set() {
        let (mut runs, mut set, mut random) = (Runs::default(), BTreeSet::new(), 1u32);
        let range: IpNetwork = "10.0.0.16/28".parse().unwrap();
        let number = |number: u32| IpAddr::V4((0x0a00_0000 + number).into());
        for _ in 0..20_000 {
            random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let address = number((random >> 16) % 64);
            if (random >> 24) % 3 > 0 {
                runs.add(address);
                set.insert(address);
            } else {
                runs.remove(address);
                set.remove(&address);
            }
            let free = (16..32).map(number).find(|address| !set.contains(address));
            assert_eq!(runs.first_free(&range), free);
        }
    }
}

//! Interface names and hardware addresses that are derived from attachments, so that they are found without a record.

use std::net::IpAddr;

/// Name of the host's end of an attachment's veth pair: `veth` and eleven letters derived from id and interface. It
/// has the maximum length of the kernel, 15 bytes.
pub(crate) fn host_interface(id: &str, ifname: &str) -> String {
    const LETTERS: &[u8; 32] = b"abcdefghijklmnopqrstuvwxyz234567";
    let hash = hash(id.bytes().chain([b'/']).chain(ifname.bytes()));
    let letters = (0..11).map(|place| char::from(LETTERS[(hash >> (place * 5) & 31) as usize]));
    format!("veth{}", letters.collect::<String>())
}

/// FNV-1a, 64 bits.
fn hash(bytes: impl Iterator<Item = u8>) -> u64 {
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

/// First bytes of hardware addresses that are derived from IP addresses.
pub(crate) const DERIVED: [u8; 2] = [0x0a, 0x58];

/// A locally administered hardware address derived from the IP address. Cached entries of neighbours stay valid when
/// the next sandbox gets the address. All bytes of an IPv6 address count: ranges of one bridge may differ only in
/// their prefixes.
pub(crate) fn hardware_address(address: IpAddr) -> [u8; 6] {
    let tail = match address {
        IpAddr::V4(ip) => ip.octets(),
        IpAddr::V6(ip) => {
            let [a, b, c, d, e, f, g, h] = hash(ip.octets().into_iter()).to_be_bytes();
            [a ^ e, b ^ f, c ^ g, d ^ h]
        }
    };
    let [a, b] = DERIVED;
    [a, b, tail[0], tail[1], tail[2], tail[3]]
}

#[cfg(test)]
mod tests {
    use super::super::format_mac;
    use super::*;

    #[test]
    fn interface_names_fit_the_kernel_and_follow_from_the_attachment() {
        let name = host_interface("0123456789abcdef", "eth0");
        assert_eq!(name.len(), 15);
        assert_eq!(name, host_interface("0123456789abcdef", "eth0"));
        assert_ne!(name, host_interface("0123456789abcdef", "eth1"));
        assert_ne!(name, host_interface("0123456789abcdee", "eth0"));
    }

    #[test]
    fn the_hardware_address_follows_from_the_ip() {
        assert_eq!(format_mac(&hardware_address("10.42.0.7".parse().unwrap())), "0a:58:0a:2a:00:07");
        let of = |text: &str| hardware_address(text.parse().unwrap());
        assert_eq!(of("fd00::7"), of("fd00::7"));
        assert_ne!(of("fd00::7"), of("fd01::7"), "two ranges on one bridge");
        assert_ne!(of("fd00::7"), of("fd00::8"));
    }
}

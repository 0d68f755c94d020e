//! Addresses and ranges that are not in the standard form. Source: `GetWarningsForIP` and `GetWarningsForCIDR` of
//! `k8s.io/apimachinery`.

use std::net::{IpAddr, Ipv4Addr};

use super::Found;

/// Warns about an address.
pub(super) fn address(found: &mut Found, path: impl FnOnce() -> String, text: &str) {
    found.add_at(path, of_address(text));
}

/// Warns about a range.
pub(super) fn ranges(found: &mut Found, path: impl Fn() -> String, text: &str) {
    for warning in of_range(text) {
        found.add_at(&path, Some(warning));
    }
}

fn of_address(text: &str) -> Option<String> {
    let (address, is_standard) = parse(text)?;
    if !is_standard {
        return Some(format!("non-standard IP address {text:?} is invalid: use \"{address}\""));
    }
    let is_canonical = address.is_ipv4() || address.to_string() == text;
    (!is_canonical)
        .then(|| format!("IPv6 address {text:?} should be in RFC 5952 canonical format (\"{address}\")"))
}

fn of_range(text: &str) -> Vec<String> {
    let Some((address, length)) = text.split_once('/') else { return Vec::new() };
    let (Some((address, is_standard)), Ok(number)) = (parse(address), length.parse::<u8>()) else {
        return Vec::new();
    };
    // The prefix of a mapped address counts from the start of the IPv6 address.
    let mapped = if is_mapped(text) { 96 } else { 0 };
    let Some(number) = number.checked_sub(mapped) else { return Vec::new() };
    let bits = if address.is_ipv4() { 32 } else { 128 };
    if number > bits {
        return Vec::new();
    }
    let first = first_of(address, number);
    let mut warnings = Vec::new();
    if first != address {
        warnings.push(format!(
            "CIDR value {text:?} is ambiguous in this context (should be \"{first}/{number}\" or \"{address}/{bits}\"?)"
        ));
    }
    if !is_standard || has_leading_zero(length) {
        warnings.push(format!("non-standard CIDR value {text:?} is invalid: use \"{first}/{number}\""));
    }
    let canonical = format!("{address}/{number}");
    if warnings.is_empty() && address.is_ipv6() && canonical != text {
        warnings
            .push(format!("IPv6 CIDR value {text:?} should be in RFC 5952 canonical format ({canonical:?})"));
    }
    warnings
}

/// The address of a text, and whether the text has the standard form. Other forms are leading zeros in numbers, and
/// IPv4 addresses in IPv6 notation.
fn parse(text: &str) -> Option<(IpAddr, bool)> {
    if let Ok(address) = text.parse::<IpAddr>() {
        let canonical = address.to_canonical();
        return Some((canonical, canonical == address));
    }
    let mut parts = text.split('.').map(|part| match part.bytes().all(|byte| byte.is_ascii_digit()) {
        true => part.parse::<u8>().ok(),
        false => None,
    });
    let numbers = [parts.next()??, parts.next()??, parts.next()??, parts.next()??];
    parts.next().is_none().then(|| (Ipv4Addr::from(numbers).into(), false))
}

fn is_mapped(range: &str) -> bool {
    let address = range.split('/').next().and_then(|text| text.parse::<IpAddr>().ok());
    address.is_some_and(|address| address.is_ipv6() && address.to_canonical().is_ipv4())
}

/// The first address of a range.
fn first_of(address: IpAddr, length: u8) -> IpAddr {
    match address {
        IpAddr::V4(address) => {
            let mask = u32::MAX.checked_shl(32 - u32::from(length)).unwrap_or(0);
            Ipv4Addr::from_bits(address.to_bits() & mask).into()
        }
        IpAddr::V6(address) => {
            let mask = u128::MAX.checked_shl(128 - u32::from(length)).unwrap_or(0);
            std::net::Ipv6Addr::from_bits(address.to_bits() & mask).into()
        }
    }
}

fn has_leading_zero(number: &str) -> bool {
    number.len() > 1 && number.starts_with('0')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_in_other_forms_are_reported() {
        for (text, expect) in [
            ("192.0.2.1", None),
            ("2001:db8::1", None),
            ("192.0.2.010", Some("non-standard IP address \"192.0.2.010\" is invalid: use \"192.0.2.10\"")),
            (
                "::ffff:192.0.2.1",
                Some("non-standard IP address \"::ffff:192.0.2.1\" is invalid: use \"192.0.2.1\""),
            ),
            (
                "2001:DB8:0::1",
                Some(
                    "IPv6 address \"2001:DB8:0::1\" should be in RFC 5952 canonical format (\"2001:db8::1\")",
                ),
            ),
            ("", None),
            ("1.2.3", None),
            ("1.2.3.+4", None),
            ("x", None),
        ] {
            assert_eq!(of_address(text).as_deref(), expect, "{text}");
        }
    }

    #[test]
    fn ranges_in_other_forms_are_reported() {
        for (text, expect) in [
            ("10.0.0.0/8", vec![]),
            ("0.0.0.0/0", vec![]),
            ("::/0", vec![]),
            ("2001:db8::/32", vec![]),
            (
                "10.0.0.1/8",
                vec![
                    "CIDR value \"10.0.0.1/8\" is ambiguous in this context (should be \"10.0.0.0/8\" or \"10.0.0.1/32\"?)",
                ],
            ),
            ("010.0.0.0/8", vec!["non-standard CIDR value \"010.0.0.0/8\" is invalid: use \"10.0.0.0/8\""]),
            ("10.0.0.0/08", vec!["non-standard CIDR value \"10.0.0.0/08\" is invalid: use \"10.0.0.0/8\""]),
            (
                "::ffff:10.0.0.0/104",
                vec!["non-standard CIDR value \"::ffff:10.0.0.0/104\" is invalid: use \"10.0.0.0/8\""],
            ),
            (
                "2001:DB8::/32",
                vec![
                    "IPv6 CIDR value \"2001:DB8::/32\" should be in RFC 5952 canonical format (\"2001:db8::/32\")",
                ],
            ),
            ("10.0.0.0/33", vec![]),
            ("10.0.0.0", vec![]),
            ("::ffff:10.0.0.0/8", vec![]),
        ] {
            assert_eq!(of_range(text), expect, "{text}");
        }
    }
}

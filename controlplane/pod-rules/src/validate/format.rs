//! Formats of ports and addresses, and the name checks of [`coracle_values::names`].

use std::net::IpAddr;

use ipnetwork::IpNetwork;

pub use coracle_values::names::{
    config_key, dns1035_label, dns1123_label, dns1123_subdomain, env_name, label_value, masked_prefix,
    path_segment, port_name, qualified_name,
};

/// The problem `text` if `is_wrong`. Otherwise the list is empty.
fn problem(is_wrong: bool, text: &str) -> Vec<String> {
    if is_wrong { vec![text.to_owned()] } else { Vec::new() }
}

/// Checks a search domain of DNS: a subdomain that may have underscores.
pub(super) fn search_domain(name: &str) -> Vec<String> {
    const TEXT: &str = "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '_', '-' or '.', and must start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is '_?[a-z0-9]([-_a-z0-9]*[a-z0-9])?(\\._?[a-z0-9]([-_a-z0-9]*[a-z0-9])?)*')";
    let plain: Vec<String> =
        name.split('.').map(|label| label.strip_prefix('_').unwrap_or(label).replace('_', "-")).collect();
    subdomain(name, is_subdomain(&plain.join(".")), TEXT)
}

/// Checks a DNS name with `*.` before a subdomain. Source: `IsWildcardDNS1123Subdomain`.
pub(super) fn wildcard_subdomain(name: &str) -> Vec<String> {
    const TEXT: &str = "a wildcard DNS-1123 subdomain must start with '*.', followed by a valid DNS subdomain, which must consist of lower case alphanumeric characters, '-' or '.' and end with an alphanumeric character (e.g. '*.example.com', regex used for validation is '\\*\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')";
    subdomain(name, name.strip_prefix("*.").is_some_and(is_subdomain), TEXT)
}

/// Checks a DNS name that may have a wildcard.
pub fn host_pattern(name: &str) -> Vec<String> {
    if name.contains('*') { wildcard_subdomain(name) } else { dns1123_subdomain(name) }
}

/// The problems of a name: the name is too long, or `has_form` is false. `text` is the message about the form.
fn subdomain(name: &str, has_form: bool, text: &str) -> Vec<String> {
    let too_long = problem(name.len() > 253, "must be no more than 253 characters");
    too_long.into_iter().chain(problem(!has_form, text)).collect()
}

/// Whether a name, of any length, has the form of a subdomain.
fn is_subdomain(name: &str) -> bool {
    !dns1123_subdomain(name).iter().any(|text| text.starts_with("a lowercase"))
}

/// Checks a port number.
pub fn port_number(number: i64) -> Vec<String> {
    problem(!(1..=65_535).contains(&number), "must be between 1 and 65535, inclusive")
}

const LEADING_ZEROS: &str = "must not have leading 0s";
const ZEROS_IN_PREFIX: &str = "must not have leading 0s in IP or prefix length";
const MAPPED: &str = "must not be an IPv4-mapped IPv6 address";
const MAPPED_PREFIX: &str = "must not have an IPv4-mapped IPv6 address";
const HOST_BITS: &str = "must not have bits set beyond the prefix length";

/// Whether a message refuses an address or a prefix in a form that earlier versions accepted.
pub fn is_about_old_form(message: &str) -> bool {
    [LEADING_ZEROS, ZEROS_IN_PREFIX, MAPPED, MAPPED_PREFIX, HOST_BITS]
        .iter()
        .any(|detail| message.ends_with(detail))
}

/// Checks an IP address. Forms that programs read differently are refused: an IPv4 address in an IPv6 address, and
/// leading zeros, which some programs read as octal numbers. Source: `parseIP` with strict validation.
pub fn ip(text: &str) -> Vec<String> {
    let problem = match text.parse::<IpAddr>() {
        Ok(address) if is_mapped(address) => MAPPED,
        Ok(_) => return Vec::new(),
        Err(_) if without_leading_zeros(text).parse::<IpAddr>().is_ok() => LEADING_ZEROS,
        Err(_) => "must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)",
    };
    vec![problem.to_owned()]
}

/// Whether a text is an address, even in a form that [`ip`] refuses.
pub fn is_address(text: &str) -> bool {
    without_leading_zeros(text).parse::<IpAddr>().is_ok()
}

/// Checks that a text is an IP address in canonical form. Source: `IsValidIP`.
pub fn canonical_ip(text: &str) -> Vec<String> {
    let problems = ip(text);
    let form = text.parse::<IpAddr>().map(|address| address.to_string());
    match form {
        Ok(form) if problems.is_empty() && form != text => {
            vec![format!("must be in canonical form ({form:?})")]
        }
        _ => problems,
    }
}

/// Checks that a text is an IP prefix in canonical form. Source: `IsValidCIDR`.
pub fn canonical_cidr(text: &str) -> Vec<String> {
    let problems = cidr(text);
    let form = prefix(text).map(|network| network.to_string());
    match form {
        Some(form) if problems.is_empty() && form != text => {
            vec![format!("must be in canonical form ({form:?})")]
        }
        _ => problems,
    }
}

/// Whether this is an IPv4 address in the form of IPv6.
fn is_mapped(address: IpAddr) -> bool {
    matches!(address, IpAddr::V6(address) if address.to_ipv4_mapped().is_some())
}

/// The text without leading zeros of its numbers.
fn without_leading_zeros(text: &str) -> String {
    let mut plain = String::new();
    let mut is_first = true;
    for (index, letter) in text.char_indices() {
        let rest = &text[index + letter.len_utf8()..];
        if is_first && letter == '0' && rest.starts_with(|next: char| next.is_ascii_hexdigit()) {
            continue;
        }
        plain.push(letter);
        is_first = matches!(letter, '.' | ':' | '/');
    }
    plain
}

/// Checks that an address can belong to another machine: it is not unspecified, loopback or link-local. [`ip`] reports
/// texts that are not addresses.
pub fn endpoint_ip(text: &str) -> Vec<String> {
    let Ok(address) = text.parse::<IpAddr>() else { return Vec::new() };
    let is_link_local = match address {
        IpAddr::V4(address) => address.is_link_local(),
        IpAddr::V6(address) => address.is_unicast_link_local(),
    };
    let is_local_group = match address {
        IpAddr::V4(address) => address.octets()[..3] == [224, 0, 0],
        IpAddr::V6(address) => address.segments()[0] & 0xff0f == 0xff02,
    };
    [
        (address.is_unspecified(), format!("may not be unspecified ({text})")),
        (address.is_loopback(), "may not be in the loopback range (127.0.0.0/8, ::1/128)".to_owned()),
        (is_link_local, "may not be in the link-local range (169.254.0.0/16, fe80::/10)".to_owned()),
        (is_local_group, "may not be in the link-local multicast range (224.0.0.0/24, ff02::/10)".to_owned()),
    ]
    .into_iter()
    .filter_map(|(is_wrong, text)| is_wrong.then_some(text))
    .collect()
}

/// Checks an IP prefix. Source: `parseCIDR` with strict validation.
pub fn cidr(text: &str) -> Vec<String> {
    let problem = match prefix(text) {
        Some(network) if is_mapped(network.ip()) => MAPPED_PREFIX,
        Some(network) if network.ip() != network.network() => HOST_BITS,
        Some(_) => return Vec::new(),
        None if prefix(&without_leading_zeros(text)).is_some() => ZEROS_IN_PREFIX,
        None => "must be a valid CIDR value, (e.g. 10.9.8.0/24 or 2001:db8::/64)",
    };
    vec![problem.to_owned()]
}

/// Checks an address of a network interface with the length of its prefix. Source: `IsValidInterfaceAddress`.
pub fn interface_address(text: &str) -> Vec<String> {
    let Some(network) = prefix(&without_leading_zeros(text)) else {
        return vec!["must be a valid address in CIDR form, (e.g. 10.9.8.7/24 or 2001:db8::1/64)".to_owned()];
    };
    let mapped = match network.ip() {
        IpAddr::V6(address) => address.to_ipv4_mapped(),
        IpAddr::V4(_) => None,
    };
    let form = match mapped {
        Some(address) if network.prefix() > 32 => {
            format!("{address}/{}", network.prefix().saturating_sub(96))
        }
        Some(address) => format!("{address}/{}", network.prefix()),
        None => format!("{}/{}", network.ip(), network.prefix()),
    };
    problem(form != text, &format!("must be in canonical form ({form:?})"))
}

fn prefix(text: &str) -> Option<IpNetwork> {
    let (_, length) = text.split_once('/')?;
    let is_plain = length == "0" || !length.starts_with('0');
    if is_plain && coracle_values::names::has_prefix_length(text) { text.parse().ok() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_and_prefixes_are_distinguished_from_other_texts() {
        for (text, is_ip, is_cidr) in [
            ("10.0.0.1", true, false),
            ("::1", true, false),
            ("10.0.0.0/8", false, true),
            ("fd00::/64", false, true),
            ("10.0.0.0/33", false, false),
            ("10.0.0.0/255.0.0.0", false, false),
            ("10.0.0.0/+8", false, false),
            ("10.0.0", false, false),
            ("x", false, false),
            ("", false, false),
        ] {
            assert_eq!((ip(text).is_empty(), cidr(text).is_empty()), (is_ip, is_cidr), "for {text:?}");
        }
    }

    #[test]
    fn ambiguous_addresses_and_prefixes_are_refused() {
        for (text, problem) in [
            ("010.0.0.1", "must not have leading 0s"),
            ("10.0.0.001", "must not have leading 0s"),
            ("::ffff:10.0.0.1", "must not be an IPv4-mapped IPv6 address"),
            ("2001:0db8::1", ""),
            ("2001:00db8::1", "must not have leading 0s"),
            ("0.0.0.0", ""),
        ] {
            assert_eq!(ip(text).concat(), problem, "for {text:?}");
        }
        for (text, problem) in [
            ("10.0.0.0/08", "must not have leading 0s in IP or prefix length"),
            ("010.0.0.0/8", "must not have leading 0s in IP or prefix length"),
            ("::ffff:10.0.0.0/104", "must not have an IPv4-mapped IPv6 address"),
            ("10.0.0.1/8", "must not have bits set beyond the prefix length"),
            ("fd00::1/64", "must not have bits set beyond the prefix length"),
            ("0.0.0.0/0", ""),
        ] {
            assert_eq!(cidr(text).concat(), problem, "for {text:?}");
        }
    }

    #[test]
    fn a_wildcard_stands_for_the_first_label() {
        for (name, is_good) in [
            ("*.a.b", true),
            ("a.b", true),
            ("*.*.a", false),
            ("a.*.b", false),
            ("*", false),
            ("*a.b", false),
        ] {
            assert_eq!(host_pattern(name).is_empty(), is_good, "for {name:?}");
        }
        assert!(host_pattern("*").concat().starts_with("a wildcard DNS-1123 subdomain must start with '*.'"));
    }

    #[test]
    fn canonical_addresses_and_prefixes_have_the_shortest_form() {
        for (text, problem) in
            [("fd00::1", ""), ("10.0.0.1", ""), ("fd00:0::1", "must be in canonical form (\"fd00::1\")")]
        {
            assert_eq!(canonical_ip(text).concat(), problem, "for {text:?}");
        }
        for (text, problem) in [("fd00::/64", ""), ("FD00::/64", "must be in canonical form (\"fd00::/64\")")]
        {
            assert_eq!(canonical_cidr(text).concat(), problem, "for {text:?}");
        }
        assert!(is_address("010.0.0.1") && is_address("::1") && !is_address("10.0.0.1.nip.io"));
    }

    #[test]
    fn addresses_of_interfaces_have_a_prefix_and_their_shortest_form() {
        for (text, problem) in [
            ("10.0.0.1/24", ""),
            ("fd00::1/64", ""),
            ("10.0.0.1", "must be a valid address in CIDR form, (e.g. 10.9.8.7/24 or 2001:db8::1/64)"),
            ("10.0.0.01/24", "must be in canonical form (\"10.0.0.1/24\")"),
            ("::ffff:10.0.0.1/120", "must be in canonical form (\"10.0.0.1/24\")"),
        ] {
            assert_eq!(interface_address(text).concat(), problem, "for {text:?}");
        }
    }
}

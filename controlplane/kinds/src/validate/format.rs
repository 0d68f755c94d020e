//! Formats of ports and addresses, and the name checks of [`coracle_values::names`].

pub(crate) use coracle_values::names::{
    config_key, dns1035_label, dns1123_label, dns1123_subdomain, env_name, label_value, path_segment,
    port_name, qualified_name,
};

/// The text, if the value is wrong.
fn problem(is_wrong: bool, text: &str) -> Vec<String> {
    if is_wrong { vec![text.to_owned()] } else { Vec::new() }
}

/// Checks a search domain of DNS: a subdomain that may have underscores.
pub(crate) fn search_domain(name: &str) -> Vec<String> {
    const TEXT: &str = "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '_', '-' or '.', and must start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is '_?[a-z0-9]([-_a-z0-9]*[a-z0-9])?(\\._?[a-z0-9]([-_a-z0-9]*[a-z0-9])?)*')";
    let plain: Vec<String> =
        name.split('.').map(|label| label.strip_prefix('_').unwrap_or(label).replace('_', "-")).collect();
    let is_subdomain =
        !dns1123_subdomain(&plain.join(".")).iter().any(|text| text.starts_with("a lowercase"));
    let too_long = problem(name.len() > 253, "must be no more than 253 characters");
    too_long.into_iter().chain(problem(!is_subdomain, TEXT)).collect()
}

/// Checks a port number.
pub(crate) fn port_number(number: i64) -> Vec<String> {
    problem(!(1..=65_535).contains(&number), "must be between 1 and 65535, inclusive")
}

/// Checks an IP address.
pub(crate) fn ip(text: &str) -> Vec<String> {
    let is_address = text.parse::<std::net::IpAddr>().is_ok();
    problem(!is_address, "must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)")
}

/// Checks that an address can belong to another machine: it is not unspecified, loopback or link-local. [`ip`] reports
/// texts that are not addresses.
pub(crate) fn endpoint_ip(text: &str) -> Vec<String> {
    let Ok(address) = text.parse::<std::net::IpAddr>() else { return Vec::new() };
    let is_link_local = match address {
        std::net::IpAddr::V4(address) => address.is_link_local(),
        std::net::IpAddr::V6(address) => address.is_unicast_link_local(),
    };
    let is_local_group = match address {
        std::net::IpAddr::V4(address) => address.octets()[..3] == [224, 0, 0],
        std::net::IpAddr::V6(address) => address.segments()[0] & 0xff0f == 0xff02,
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

/// Checks an IP prefix.
pub(crate) fn cidr(text: &str) -> Vec<String> {
    let is_prefix =
        coracle_values::names::has_prefix_length(text) && text.parse::<ipnetwork::IpNetwork>().is_ok();
    problem(!is_prefix, "must be a valid CIDR value, (e.g. 10.9.8.0/24 or 2001:db8::/64)")
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
}

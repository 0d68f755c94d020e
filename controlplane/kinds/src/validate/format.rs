//! Formats of ports and addresses, and the name checks of [`coracle_values::names`].

pub(crate) use coracle_values::names::{
    config_key, dns1035_label, dns1123_label, dns1123_subdomain, env_name, label_value, path_segment,
    port_name, qualified_name,
};

/// The text, if the value is wrong.
fn problem(is_wrong: bool, text: &str) -> Vec<String> {
    if is_wrong { vec![text.to_owned()] } else { Vec::new() }
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

/// Checks an IP prefix.
pub(crate) fn cidr(text: &str) -> Vec<String> {
    let is_prefix = text.contains('/') && text.parse::<ipnetwork::IpNetwork>().is_ok();
    problem(!is_prefix, "must be a valid CIDR value, (e.g. 10.9.8.0/24 or 2001:db8::/64)")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_and_prefixes_are_told_from_other_texts() {
        for (text, is_ip, is_cidr) in [
            ("10.0.0.1", true, false),
            ("::1", true, false),
            ("10.0.0.0/8", false, true),
            ("fd00::/64", false, true),
            ("10.0.0.0/33", false, false),
            ("10.0.0", false, false),
            ("x", false, false),
            ("", false, false),
        ] {
            assert_eq!((ip(text).is_empty(), cidr(text).is_empty()), (is_ip, is_cidr), "for {text:?}");
        }
    }
}

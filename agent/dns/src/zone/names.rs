//! The forms of names in the zone.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use coracle_services::Endpoint;
use hickory_proto::rr::Name;

/// The meaning of a name in the zone.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Owner<'a> {
    /// The domain itself.
    Apex,
    /// `dns-version`.
    Version,
    /// `ns.dns`: the server.
    Server,
    /// An empty non-terminal (RFC 8499): a name without records that has names below it, such as `svc`, `pod` and
    /// `dns`.
    Branch,
    /// `namespace.svc` or `namespace.pod`, without records of its own.
    Namespace(&'a str),
    /// `service.namespace.svc`.
    Service {
        name: &'a str,
        namespace: &'a str,
    },
    /// `_port._protocol.service.namespace.svc`.
    Port {
        port: &'a str,
        protocol: &'a str,
        name: &'a str,
        namespace: &'a str,
    },
    /// `host.service.namespace.svc`.
    Endpoint {
        host: &'a str,
        name: &'a str,
        namespace: &'a str,
    },
    /// `10-42-0-1.namespace.pod`.
    Pod {
        address: IpAddr,
        namespace: &'a str,
    },
    Unknown,
}

/// Parses a lower-case name below a domain with `labels` labels.
pub(super) fn parse(name: &Name, labels: u8) -> Owner<'_> {
    let count = usize::from(name.num_labels()).saturating_sub(usize::from(labels));
    let texts: Option<Vec<&str>> =
        name.iter().take(count).map(|label| std::str::from_utf8(label).ok()).collect();
    let Some(texts) = texts else { return Owner::Unknown };
    match texts[..] {
        [] => Owner::Apex,
        ["dns-version"] => Owner::Version,
        ["ns", "dns"] => Owner::Server,
        ["svc" | "pod" | "dns"] => Owner::Branch,
        [namespace, "svc" | "pod"] => Owner::Namespace(namespace),
        [name, namespace, "svc"] => Owner::Service { name, namespace },
        [host, name, namespace, "svc"] => Owner::Endpoint { host, name, namespace },
        [port, protocol, name, namespace, "svc"] => {
            // As in CoreDNS, the underscores may be missing.
            let [port, protocol] = [port, protocol].map(|label| label.strip_prefix('_').unwrap_or(label));
            Owner::Port { port, protocol, name, namespace }
        }
        [address, namespace, "pod"] => {
            parse_dashed_address(address).map_or(Owner::Unknown, |address| Owner::Pod { address, namespace })
        }
        _ => Owner::Unknown,
    }
}

/// Parses an address with dashes instead of dots or colons.
fn parse_dashed_address(text: &str) -> Option<IpAddr> {
    let v4: Result<Ipv4Addr, _> = text.replace('-', ".").parse();
    let v6 = || text.replace('-', ":").parse::<Ipv6Addr>();
    v4.map(IpAddr::V4).or_else(|_| v6().map(IpAddr::V6)).ok()
}

/// A label that may name an endpoint.
pub(super) struct EndpointLabel<'a> {
    text: &'a str,
    /// The address in the label.
    address: Option<IpAddr>,
}

impl<'a> EndpointLabel<'a> {
    pub(super) fn parse(text: &'a str) -> Self {
        Self { text, address: parse_dashed_address(text) }
    }

    /// Whether the endpoint has this name. A query compares all endpoints of a service. So the name of an endpoint is
    /// built only if its address equals the address in the label.
    pub(super) fn names(&self, endpoint: &Endpoint) -> bool {
        match &endpoint.hostname {
            Some(name) if !name.is_empty() => name.eq_ignore_ascii_case(self.text),
            _ => {
                let may_be = self.address.is_some() && self.address == endpoint.address;
                may_be && endpoint_name(endpoint).eq_ignore_ascii_case(self.text)
            }
        }
    }
}

/// Label of an endpoint below its service: its host name, or its address with dashes.
pub(super) fn endpoint_name(endpoint: &Endpoint) -> String {
    match (&endpoint.hostname, endpoint.address) {
        (Some(name), _) if !name.is_empty() => name.to_lowercase(),
        (_, Some(address)) => {
            let name = address.to_string().replace(['.', ':'], "-");
            // A host name cannot end with a dash, so an address such as `fd00::` gets a zero at its end, as in CoreDNS.
            if name.ends_with('-') { name + "0" } else { name }
        }
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_without_a_host_name_are_named_by_their_address() {
        let of = |address: &str, hostname: &str| {
            let hostname = Some(hostname.into());
            endpoint_name(&Endpoint { address: address.parse().ok(), hostname, ..Endpoint::default() })
        };
        assert_eq!([of("10.42.0.7", ""), of("10.42.0.7", "Db-0")], ["10-42-0-7", "db-0"]);
        assert_eq!([of("fd00::7", ""), of("fd00::", "")], ["fd00--7", "fd00--0"]);
    }

    #[test]
    fn labels_name_endpoints_by_the_same_rules() {
        let names = |label: &str, address: &str, hostname: &str| {
            let hostname = Some(hostname.into());
            let endpoint = Endpoint { address: address.parse().ok(), hostname, ..Endpoint::default() };
            EndpointLabel::parse(label).names(&endpoint)
        };
        for (label, address, hostname) in [
            ("10-42-0-7", "10.42.0.7", ""),
            ("db-0", "10.42.0.7", "Db-0"),
            ("fd00--7", "fd00::7", ""),
            ("fd00--0", "fd00::", ""),
        ] {
            assert!(names(label, address, hostname), "{label}");
        }
        assert!(!names("10-42-0-7", "10.42.0.7", "db-0") && !names("fd00-0-0-0-0-0-0-7", "fd00::7", ""));
        assert!(!names("10-42-0-8", "10.42.0.7", "") && !names("", "", ""));
    }
}

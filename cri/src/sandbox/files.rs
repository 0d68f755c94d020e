//! Files that every container of a pod sees: host name, hosts, resolver. Pure; the caller writes them to the sandbox's
//! directory.

use coracle_proto::cri::DnsConfig;

/// Names of the files in the sandbox's directory. In a container they are in `/etc`.
pub(crate) const POD_FILES: [&str; 3] = ["hosts", "hostname", "resolv.conf"];

/// `/etc/resolv.conf` for a DNS configuration. `None` for an empty configuration: the node's file is used.
pub(crate) fn resolv_conf(dns: &DnsConfig) -> Option<String> {
    if dns.servers.is_empty() && dns.searches.is_empty() && dns.options.is_empty() {
        return None;
    }
    let mut text = String::new();
    if !dns.searches.is_empty() {
        text.push_str(&format!("search {}\n", dns.searches.join(" ")));
    }
    for server in &dns.servers {
        text.push_str(&format!("nameserver {server}\n"));
    }
    if !dns.options.is_empty() {
        text.push_str(&format!("options {}\n", dns.options.join(" ")));
    }
    Some(text)
}

/// `/etc/hosts` of a pod with its own network.
pub(crate) fn hosts(hostname: &str, addresses: &[String]) -> String {
    let mut text = String::from(
        "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\nfe00::0\tip6-localnet\n\
         fe00::0\tip6-mcastprefix\nfe00::1\tip6-allnodes\nfe00::2\tip6-allrouters\n",
    );
    for address in addresses {
        text.push_str(&format!("{address}\t{hostname}\n"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dns_configuration_becomes_a_resolver_file() {
        let dns = DnsConfig {
            servers: vec!["10.43.0.10".into(), "1.1.1.1".into()],
            searches: vec!["default.svc.cluster.local".into(), "svc.cluster.local".into()],
            options: vec!["ndots:5".into()],
        };
        assert_eq!(
            resolv_conf(&dns).as_deref(),
            Some(
                "search default.svc.cluster.local svc.cluster.local\nnameserver 10.43.0.10\n\
                 nameserver 1.1.1.1\noptions ndots:5\n"
            )
        );
        assert_eq!(resolv_conf(&DnsConfig::default()), None);
    }
}

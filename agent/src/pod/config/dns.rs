//! Resolver configuration of a pod, from its policy, the cluster and the node.

use std::net::IpAddr;

use coracle_proto::cri::DnsConfig;
use k8s_openapi::api::core::v1::PodSpec;

/// The cluster's DNS service, if there is one.
pub(crate) struct Cluster<'a> {
    pub(crate) servers: &'a [IpAddr],
    pub(crate) domain: &'a str,
    pub(crate) namespace: &'a str,
}

/// A resolver configuration, and whether the policy needs a cluster DNS that does not exist.
pub(crate) struct Resolved {
    pub(crate) config: DnsConfig,
    pub(crate) cluster_missing: bool,
}

/// Parses a `resolv.conf`: servers, the last search line, all options.
pub(crate) fn parse(text: &str) -> DnsConfig {
    let mut config = DnsConfig::default();
    for line in text.lines() {
        let mut words = line.split_whitespace();
        match words.next() {
            Some("nameserver") => config.servers.extend(words.next().map(str::to_owned)),
            Some("search") => config.searches = words.map(str::to_owned).collect(),
            Some("options") => config.options = words.map(str::to_owned).collect(),
            _ => {}
        }
    }
    config
}

/// Applies `dnsPolicy` and `dnsConfig`.
pub(crate) fn resolve(spec: &PodSpec, host: &DnsConfig, cluster: &Cluster<'_>) -> Resolved {
    let host_network = spec.host_network == Some(true);
    let wants_cluster = match spec.dns_policy.as_deref() {
        Some("Default" | "None") => false,
        Some("ClusterFirstWithHostNet") => true,
        _ => !host_network,
    };
    let cluster_missing = wants_cluster && cluster.servers.is_empty();
    let mut config = match spec.dns_policy.as_deref() {
        Some("None") => DnsConfig::default(),
        _ if wants_cluster && !cluster_missing => cluster_first(host, cluster),
        _ => host.clone(),
    };
    if let Some(own) = &spec.dns_config {
        add(&mut config.servers, own.nameservers.iter().flatten());
        add(&mut config.searches, own.searches.iter().flatten());
        for option in own.options.iter().flatten() {
            let Some(name) = &option.name else { continue };
            config.options.retain(|o| o.split(':').next() != Some(name));
            config.options.push(match &option.value {
                Some(value) => format!("{name}:{value}"),
                None => name.clone(),
            });
        }
    }
    Resolved { config, cluster_missing }
}

fn cluster_first(host: &DnsConfig, cluster: &Cluster<'_>) -> DnsConfig {
    let (domain, namespace) = (cluster.domain, cluster.namespace);
    let mut searches = vec![format!("{namespace}.svc.{domain}"), format!("svc.{domain}"), domain.to_owned()];
    add(&mut searches, host.searches.iter());
    DnsConfig {
        servers: cluster.servers.iter().map(ToString::to_string).collect(),
        searches,
        options: vec!["ndots:5".to_owned()],
    }
}

fn add<'a>(list: &mut Vec<String>, more: impl Iterator<Item = &'a String>) {
    for item in more {
        if !list.contains(item) {
            list.push(item.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn resolved(spec: serde_json::Value, servers: &[IpAddr]) -> Resolved {
        let spec: PodSpec = serde_json::from_value(spec).unwrap();
        let host = parse("# x\nnameserver 9.9.9.9\nsearch a b\noptions ndots:1 rotate\n");
        resolve(&spec, &host, &Cluster { servers, domain: "cluster.local", namespace: "ns" })
    }

    #[test]
    fn cluster_first_without_a_cluster_dns_is_the_hosts_with_a_remark() {
        let got = resolved(json!({"containers": []}), &[]);
        assert!(got.cluster_missing);
        assert_eq!(got.config.servers, ["9.9.9.9"]);
        assert!(!resolved(json!({"containers": [], "dnsPolicy": "Default"}), &[]).cluster_missing);
        assert!(!resolved(json!({"containers": [], "hostNetwork": true}), &[]).cluster_missing);
    }

    #[test]
    fn a_cluster_dns_has_the_clusters_search_domains() {
        let got = resolved(json!({"containers": []}), &["10.43.0.10".parse().unwrap()]).config;
        assert_eq!(got.servers, ["10.43.0.10"]);
        assert_eq!(got.searches, ["ns.svc.cluster.local", "svc.cluster.local", "cluster.local", "a", "b"]);
        assert_eq!(got.options, ["ndots:5"]);
    }

    #[test]
    fn a_pods_own_configuration_is_added_and_its_options_replace() {
        let own = json!({"nameservers": ["1.1.1.1"], "options": [{"name": "ndots", "value": "3"}]});
        let none = resolved(json!({"containers": [], "dnsPolicy": "None", "dnsConfig": own}), &[]).config;
        assert_eq!((none.servers, none.options), (vec!["1.1.1.1".to_owned()], vec!["ndots:3".to_owned()]));
        let added = resolved(json!({"containers": [], "dnsPolicy": "Default", "dnsConfig": own}), &[]).config;
        assert_eq!(added.options, ["rotate", "ndots:3"]);
    }
}

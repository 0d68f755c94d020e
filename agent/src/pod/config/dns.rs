//! Resolver configuration of a pod, from its policy, the cluster and the node.

use std::collections::{BTreeMap, HashSet};
use std::net::IpAddr;

use coracle_proto::cri::DnsConfig;
use coracle_values::CollectMap;
use k8s_openapi::api::core::v1::PodSpec;

/// Maximum servers. Resolvers ignore further servers.
const SERVERS_MAX: usize = 3;
/// Maximum search domains, and maximum bytes of the line with the domains: the API's limits for `dnsConfig`.
const SEARCHES_MAX: usize = 32;
const SEARCH_LINE_MAX: usize = 2048;
/// Maximum bytes of a search domain. Some resolvers abort the program if a domain is longer.
const SEARCH_MAX: usize = 253;

/// The cluster's DNS service, if there is one.
pub(crate) struct Cluster<'a> {
    pub(crate) servers: &'a [IpAddr],
    pub(crate) domain: &'a str,
    pub(crate) namespace: &'a str,
}

/// A resolver configuration.
pub(crate) struct Resolved {
    pub(crate) config: DnsConfig,
    /// Whether the policy needs a cluster DNS that does not exist.
    pub(crate) cluster_missing: bool,
    /// Messages about servers and domains that are left out. The texts are the kubelet's.
    pub(crate) omitted: Vec<String>,
}

/// Parses a `resolv.conf`: servers, the last search line without final dots, and the last option of each name in all
/// lines. Source: `parseResolvConf`.
pub(crate) fn parse(text: &str) -> DnsConfig {
    let mut config = DnsConfig::default();
    let mut options: Vec<&str> = Vec::new();
    for line in text.lines() {
        let mut words = line.split_whitespace();
        match words.next() {
            Some("nameserver") => config.servers.extend(words.next().map(str::to_owned)),
            Some("search") => {
                let domains = words.filter(|domain| *domain != ".");
                let domains = domains.map(|domain| domain.strip_suffix('.').unwrap_or(domain).to_owned());
                config.searches = domains.collect();
            }
            Some("options") => options.extend(words),
            _ => {}
        }
    }
    let mut names = HashSet::new();
    let last = options.into_iter().rev().filter(|&option| names.insert(option_name(option)));
    config.options = last.map(str::to_owned).collect();
    config.options.reverse();
    config
}

/// The name of an option such as `ndots:5`.
fn option_name(option: &str) -> &str {
    option.split(':').next().unwrap_or_default()
}

/// The configuration that pods can use. Pods do not reach servers on the node's loopback, such as the stub of
/// systemd-resolved. If there are no other servers, the configuration `behind` the stub is used, as kubeadm sets it for
/// the kubelet.
pub(crate) fn reachable(own: DnsConfig, behind: impl FnOnce() -> DnsConfig) -> DnsConfig {
    let is_local = |server: &String| server.parse::<IpAddr>().is_ok_and(|address| address.is_loopback());
    let has_others = |config: &DnsConfig| !config.servers.iter().all(is_local);
    if own.servers.is_empty() || has_others(&own) {
        return own;
    }
    Some(behind()).filter(has_others).unwrap_or(own)
}

/// The text of a `resolv.conf`. Empty for an empty configuration.
pub(crate) fn text(config: &DnsConfig) -> String {
    let mut text = String::new();
    if !config.searches.is_empty() {
        text.push_str(&format!("search {}\n", config.searches.join(" ")));
    }
    for server in &config.servers {
        text.push_str(&format!("nameserver {server}\n"));
    }
    if !config.options.is_empty() {
        text.push_str(&format!("options {}\n", config.options.join(" ")));
    }
    text
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
        // This takes linear time, because the number of options is not limited. The last option with a name counts.
        let named =
            own.options.iter().flatten().filter_map(|o| Some((o.name.as_deref()?, o.value.as_deref())));
        let last: BTreeMap<&str, usize> =
            named.clone().enumerate().map(|(at, (name, _))| (name, at)).collect_map();
        config.options.retain(|o| !last.contains_key(option_name(o)));
        for (at, (name, value)) in named.enumerate() {
            if last.get(name) == Some(&at) {
                config.options.push(value.map_or_else(|| name.to_owned(), |value| format!("{name}:{value}")));
            }
        }
    }
    let omitted = fit(&mut config);
    Resolved { config, cluster_missing, omitted }
}

/// Leaves out servers and search domains that exceed the limits. Source: `formDNSConfigFitsLimits`.
fn fit(config: &mut DnsConfig) -> Vec<String> {
    let mut omitted = Vec::new();
    if config.servers.len() > SERVERS_MAX {
        config.servers.truncate(SERVERS_MAX);
        let line = config.servers.join(" ");
        omitted.push(format!(
            "Nameserver limits were exceeded, some nameservers have been omitted, the applied nameserver line is: {line}"
        ));
    }
    let count = config.searches.len();
    config.searches.truncate(SEARCHES_MAX);
    config.searches.retain(|domain| domain.len() <= SEARCH_MAX);
    let mut length = 0;
    let fitting = config.searches.iter().take_while(|domain| {
        // Each domain counts with a space after it. There is no space after the last domain.
        length += domain.len() + 1;
        length - 1 <= SEARCH_LINE_MAX
    });
    let fitting = fitting.count();
    config.searches.truncate(fitting);
    if config.searches.len() < count {
        let line = config.searches.join(" ");
        omitted.push(format!(
            "Search Line limits were exceeded, some search paths have been omitted, the applied search line is: {line}"
        ));
    }
    omitted
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
    let known: HashSet<String> = list.iter().cloned().collect();
    let mut new = HashSet::new();
    list.extend(more.filter(|item| !known.contains(*item) && new.insert(*item)).cloned());
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
    fn pods_use_the_servers_behind_a_stub_on_loopback() {
        let used = |own: &str, behind: &str| text(&reachable(parse(own), || parse(behind)));
        let (stub, real) = ("nameserver 127.0.0.53\n", "search lan\nnameserver 192.0.2.1\n");
        assert_eq!(used(stub, real), real);
        assert_eq!(used("nameserver ::1\nnameserver 127.0.0.1\n", real), real);
        assert_eq!(used(stub, ""), stub, "without systemd-resolved");
        assert_eq!(used(stub, "nameserver 127.0.0.1\n"), stub);
        for own in ["nameserver 127.0.0.53\nnameserver 192.0.2.9\n", "nameserver 192.0.2.9\n", ""] {
            assert_eq!(used(own, real), own);
        }
    }

    #[test]
    fn the_text_of_a_configuration_is_parsed_to_the_same_configuration() {
        let config = resolved(json!({"containers": []}), &["10.43.0.10".parse().unwrap()]).config;
        let lines =
            "search ns.svc.cluster.local svc.cluster.local cluster.local a b\nnameserver 10.43.0.10\n";
        assert_eq!(text(&config), format!("{lines}options ndots:5\n"));
        assert_eq!(parse(&text(&config)), config);
        assert_eq!(text(&DnsConfig::default()), "");
    }

    #[test]
    fn options_of_all_lines_count_and_domains_have_no_final_dot() {
        let config = parse("options ndots:1 rotate\nsearch x\nsearch a. . b\noptions ndots:2 edns0\n");
        assert_eq!(config.searches, ["a", "b"]);
        assert_eq!(config.options, ["rotate", "ndots:2", "edns0"]);
    }

    #[test]
    fn cluster_first_without_a_cluster_dns_uses_the_hosts_and_reports_it() {
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
    fn a_pods_own_configuration_is_added_and_its_options_take_precedence() {
        let own = json!({"nameservers": ["1.1.1.1"], "options": [{"name": "ndots", "value": "3"}]});
        let none = resolved(json!({"containers": [], "dnsPolicy": "None", "dnsConfig": own}), &[]).config;
        assert_eq!((none.servers, none.options), (vec!["1.1.1.1".to_owned()], vec!["ndots:3".to_owned()]));
        let added = resolved(json!({"containers": [], "dnsPolicy": "Default", "dnsConfig": own}), &[]).config;
        assert_eq!(added.options, ["rotate", "ndots:3"]);
        let twice = json!({"searches": ["b", "c", "c"], "options": [{"name": "x", "value": "1"}, {"name": "rotate"},
            {"name": "x", "value": "2"}]});
        let config =
            resolved(json!({"containers": [], "dnsPolicy": "Default", "dnsConfig": twice}), &[]).config;
        assert_eq!(
            (config.searches, config.options),
            (
                ["a", "b", "c"].map(str::to_owned).to_vec(),
                ["ndots:1", "rotate", "x:2"].map(str::to_owned).to_vec(),
            )
        );
    }

    /// If the time grew with the square of the number, this test would take minutes.
    #[test]
    fn many_options_and_domains_take_linear_time() {
        let options: Vec<_> = (0..150_000).map(|at| json!({"name": format!("o{at}")})).collect();
        let searches: Vec<_> = (0..150_000).map(|at| format!("s{at}")).collect();
        let own = json!({"options": options, "searches": searches});
        let got = resolved(json!({"containers": [], "dnsPolicy": "None", "dnsConfig": own}), &[]).config;
        assert_eq!((got.options.len(), got.searches.len()), (150_000, SEARCHES_MAX));
    }

    #[test]
    fn servers_and_domains_beyond_the_limits_are_left_out_with_a_message() {
        let with = |own| resolved(json!({"containers": [], "dnsPolicy": "None", "dnsConfig": own}), &[]);
        let servers = with(json!({"nameservers": ["1.1.1.1", "2.2.2.2", "3.3.3.3", "4.4.4.4"]}));
        assert_eq!(servers.config.servers, ["1.1.1.1", "2.2.2.2", "3.3.3.3"]);
        assert!(servers.omitted.len() == 1 && servers.omitted[0].ends_with("is: 1.1.1.1 2.2.2.2 3.3.3.3"));
        let left = |domains: Vec<String>| {
            let got = with(json!({"searches": domains}));
            (got.config.searches.len(), got.omitted.len())
        };
        let domains = |count: usize, length: usize| -> Vec<String> {
            (0..count).map(|number| format!("{number:0length$}")).collect()
        };
        assert_eq!([left(domains(32, 3)), left(domains(33, 3))], [(32, 0), (32, 1)]);
        assert_eq!([left(domains(1, 253)), left(domains(1, 254))], [(1, 0), (0, 1)]);
        // Nine domains and eight spaces have 2,024 bytes.
        assert_eq!([left(domains(9, 224)), left(domains(10, 224))], [(9, 0), (9, 1)]);
    }
}

//! Tests of the sources of settings and their order.

use clap::{Args as _, FromArgMatches as _};

use super::feature_gates::FeatureGates;
use super::field::ValueKind;
use super::file::FileValue;
use super::value::Value as _;
use super::*;

/// Settings of a node from keys of the file.
pub(super) fn node_settings(text: &str) -> Result<NodeSettings, String> {
    let mut sources = sources_of(&format!("[node]\n{text}"));
    let node = Flags::<NodeSettings>::default().resolve(&mut sources);
    sources.check().map_err(|problems| problems.to_string())?;
    Ok(node.unwrap())
}

impl Settings {
    /// The settings of a KubeletConfiguration, without flags and environment.
    pub(crate) fn of_kubelet_file(fields: &str) -> Self {
        let head = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n";
        let text = kubelet::Text { place: "k.yaml".to_owned(), text: format!("{head}{fields}") };
        let mut sources = Sources { file: kubelet::parse(&[text]).unwrap(), ..Sources::default() };
        let settings = Self::resolve(AllFlags::default(), &mut sources);
        sources.check().unwrap();
        settings.unwrap().1
    }
}

fn sources_of(toml: &str) -> Sources {
    Sources { file: File::parse_toml(toml, "f.toml", TABLES).unwrap(), ..Sources::default() }
}

fn node_flags(words: &[&str]) -> Flags<NodeSettings> {
    let command = Flags::<NodeSettings>::augment_args(clap::Command::new("agent"));
    let words = std::iter::once("agent").chain(words.iter().copied());
    Flags::from_arg_matches(&command.get_matches_from(words)).unwrap()
}

fn with_environment(variables: &[(&str, &str)], toml: &str) -> Sources {
    let variables = variables.iter().map(|(name, value)| (name.into(), value.into()));
    Sources { file: sources_of(toml).file, ..Sources::new(variables) }
}

#[test]
fn a_flag_overrides_the_environment_the_file_and_the_default() {
    let toml = "[node]\nbridge = \"fromfile\"\nmtu = 1300\nmax-pods = 7\ncluster-domain = \"file.local\"";
    let mut sources = with_environment(&[("CORACLE_BRIDGE", "fromenv"), ("CORACLE_MTU", "1400")], toml);
    let node = node_flags(&["--bridge", "fromflag"]).resolve(&mut sources).unwrap();
    assert_eq!((node.bridge.as_str(), node.mtu, node.max_pods), ("fromflag", Some(1400), 7));
    assert_eq!((node.cluster_domain.as_str(), node.cgroup_root.as_str()), ("file.local", "/"));
    assert!(sources.check().is_ok());
}

#[test]
fn the_service_proxy_has_the_settings_of_kube_proxy() {
    let of = |text: &str| {
        let proxy = node_settings(text).unwrap().proxy();
        (proxy.healthz.map(|address| address.port()), proxy.status.map(|address| address.to_string()))
    };
    assert_eq!(of(""), (Some(10256), Some("127.0.0.1:10249".to_owned())));
    let none = "service-proxy-healthz = \"0.0.0.0:0\"\nservice-proxy-status = \"127.0.0.1:0\"";
    assert_eq!(of(none), (None, None));
    let ranges =
        node_settings("node-port-addresses = [\"192.0.2.0/24\"]").unwrap().proxy().node_port_addresses;
    assert_eq!(ranges, ["192.0.2.0/24".parse().unwrap()]);
}

#[test]
fn all_invalid_settings_are_reported_with_their_source() {
    let toml = "[node]\nbrigde = \"x\"\nmtu = \"big\"\ncluster-dns = \"10.43.0.10\"\n[control-plane]\nlisten = \"6443\"";
    let mut sources = with_environment(&[("CORACLE_NODE_LEASE_SECONDS", "0")], toml);
    let node = node_flags(&["--max-pods", "many", "--register-with-taints", "a=b:Never"]);
    let flags = AllFlags { node, ..AllFlags::default() };
    assert!(Settings::resolve(flags, &mut sources).is_none());
    let error = sources.check().unwrap_err().to_string();
    for part in [
        "flag --max-pods \"many\": expected a whole number from 0 to 4294967295",
        "flag --register-with-taints \"a=b:Never\": \"Never\" is not NoSchedule, PreferNoSchedule or NoExecute",
        "environment variable CORACLE_NODE_LEASE_SECONDS \"0\": expected a whole number from 1 to 65535",
        "f.toml node.brigde: unknown key; did you mean bridge?",
        "f.toml node.mtu \"big\": expected a whole number",
        "f.toml node.cluster-dns: expected an array",
        "f.toml control-plane.listen \"6443\": expected an IP address and a port",
    ] {
        assert!(error.contains(part), "{part} is not in: {error}");
    }
}

#[test]
fn contradicting_settings_are_reported_together() {
    let mut sources = sources_of(
        "[node]\ntls-cert-file = \"/c\"\nimage-credential-provider-config = \"/p\"\noverlay-vni = 0\n\
         [control-plane]\ncluster-cidr = [\"10.43.0.0/16\"]",
    );
    assert!(Settings::resolve(AllFlags::default(), &mut sources).is_none());
    let error = sources.check().unwrap_err().to_string();
    for part in ["tls-private-key-file", "image-credential-provider-bin-dir", "overlay-vni", "overlap"] {
        assert!(error.contains(part), "{part} is not in: {error}");
    }
}

#[test]
fn every_default_is_valid() {
    let mut sources = Sources::default();
    assert!(Settings::resolve(AllFlags::default(), &mut sources).is_some());
    assert!(sources.check().is_ok());
}

#[test]
fn the_settings_in_effect_are_shown_as_texts() {
    let toml = "[node]\nmtu = 1300\nnode-labels = { a = \"b\", c = \"d\" }";
    let mut sources = sources_of(toml);
    let flags = AllFlags { node: node_flags(&["--max-pods", "7"]), ..AllFlags::default() };
    let (_log, settings) = Settings::resolve(flags, &mut sources).unwrap();
    let node = settings.node().shown.flags;
    let shown = |name: &str| node.get(name).map(String::as_str);
    assert_eq!((shown("max-pods"), shown("mtu")), (Some("7"), Some("1300")));
    assert_eq!((shown("node-labels"), shown("state-dir")), (Some("a=b,c=d"), Some("/var/lib/coracle")));
    assert_eq!((shown("node-name"), shown("service-cidr")), (Some(""), None), "unset, and of another table");
}

#[test]
fn lists_and_maps_are_written_with_commas_or_as_arrays_and_tables() {
    let words = ["--node-labels", "a=b,c=", "--node-labels", "d=e", "--cluster-dns", "10.43.0.10,fd43::a"];
    let flag = node_flags(&words).resolve(&mut Sources::default()).unwrap();
    let file = node_settings(
        "node-labels = { a = \"b\", c = \"\", d = \"e\" }\ncluster-dns = [\"10.43.0.10\", \"fd43::a\"]",
    );
    let file = file.unwrap();
    assert_eq!((flag.node_labels.len(), flag.cluster_dns.len()), (3, 2));
    assert_eq!((flag.node_labels, flag.cluster_dns), (file.node_labels, file.cluster_dns));
    assert!(node_settings("system-reserved = { cpu = \"500m\", memory = \"1Gi\" }").is_ok());
    assert!(node_settings("system-reserved = { pid = \"100\" }").is_ok());
    assert!(node_settings("system-reserved = { gpu = \"1\" }").is_err());
}

#[test]
fn taints_are_written_as_for_the_kubelet() {
    let words = ["--register-with-taints", "gpu=yes:NoSchedule,spot:NoExecute"];
    let taints = node_flags(&words).resolve(&mut Sources::default()).unwrap().register_with_taints;
    let taints: Vec<_> =
        taints.iter().map(|t| (t.key.as_str(), t.value.as_deref(), t.effect.as_str())).collect();
    assert_eq!(taints, [("gpu", Some("yes"), "NoSchedule"), ("spot", None, "NoExecute")]);
}

#[test]
fn a_range_of_ports_has_a_first_and_a_last_one_or_a_length() {
    let parse = |text: &str| value::PortRange::parse(&[text.to_owned()]).map(|range| range.0);
    assert_eq!(parse("30000-32767"), Ok(30000..=32767));
    assert_eq!(parse("30000+2767"), Ok(30000..=32767));
    assert_eq!(parse("80"), Ok(80..=80));
    for invalid in ["", "0-1", "2-1", "65535+1", "1-2-3", "1+2-3", "-5", "x"] {
        assert!(parse(invalid).is_err(), "{invalid}");
    }
}

#[test]
fn a_certificate_for_server_names_has_two_files() {
    let found =
        <Vec<value::SniCertKey>>::parse(&["/c,/k:a.test, *.b.test".to_owned(), "/d,/l".to_owned()]).unwrap();
    assert_eq!(found[0].names, ["a.test", "*.b.test"]);
    assert_eq!((found[1].certificate.to_str(), found[1].key.to_str()), (Some("/d"), Some("/l")));
    assert!(found[1].names.is_empty());
    for invalid in ["/c", "/c,", ",/k", "/c,/k,/l", "/c:a"] {
        assert!(<Vec<value::SniCertKey>>::parse(&[invalid.to_owned()]).is_err(), "{invalid}");
    }
}

#[cfg(feature = "controlplane")]
#[test]
fn the_certificate_of_the_api_server_has_upstreams_name_unless_the_nodes_one_has_it() {
    let args = |command: clap::Command| {
        let command = Flags::<ControlPlaneSettings>::augment_args(command);
        let words =
            ["x", "--tls-cert-file", "/c", "--tls-sni-cert-key", "/a,/b:n", "--tls-sni-cert-key", "/d,/e"];
        let matches = command.try_get_matches_from(words).unwrap();
        Flags::<ControlPlaneSettings>::from_arg_matches(&matches).unwrap()
    };
    let alone = args(clap::Command::new("x")).resolve(&mut Sources::default()).unwrap();
    assert_eq!(alone.apiserver_cert_file.as_deref().and_then(std::path::Path::to_str), Some("/c"));
    assert_eq!(alone.tls_sni_cert_key.len(), 2);
    let both = args(Flags::<NodeSettings>::augment_args(clap::Command::new("x")));
    assert_eq!(both.resolve(&mut Sources::default()).unwrap().apiserver_cert_file, None);
}

#[test]
fn a_switch_needs_no_value() {
    let of = |words: &[&str]| node_flags(words).resolve(&mut Sources::default()).unwrap();
    assert!(of(&["--server-tls-bootstrap"]).server_tls_bootstrap);
    assert!(!of(&["--register-node=false"]).register_node);
    assert!(of(&["--overlay-direct-routing", "true"]).overlay_direct_routing);
}

#[test]
fn a_setting_with_two_names_is_given_once() {
    assert_eq!(node_settings("log-max-size = 1024").unwrap().container_log_max_size.0, 1024);
    assert_eq!(node_settings("container-log-max-size = \"1Ki\"").unwrap().container_log_max_size.0, 1024);
    assert!(node_settings("log-max-size = 1024\ncontainer-log-max-size = 1").is_err());
    let mut sources = with_environment(&[("CORACLE_LOG_MAX_FILES", "3")], "");
    assert_eq!(
        node_flags(&["--log-max-size", "7"]).resolve(&mut sources).unwrap().container_log_max_files,
        3
    );
}

#[test]
fn unknown_environment_variables_are_found() {
    let sources =
        with_environment(&[("CORACLE_MAXPODS", "1"), ("CORACLE_MAX_PODS", "1"), ("CORACLE_FAULT", "")], "");
    let tables: Vec<_> = TABLES.iter().map(|(_, fields)| *fields).collect();
    assert_eq!(sources.unknown_variables(&tables).collect::<Vec<_>>(), ["CORACLE_MAXPODS"]);
}

#[test]
fn names_in_one_table_are_unique() {
    for (table, fields) in TABLES {
        let names: Vec<_> = fields.iter().flat_map(|field| field.names()).collect();
        let unique: std::collections::BTreeSet<_> = names.iter().collect();
        assert_eq!(names.len(), unique.len(), "{table}");
    }
    assert_eq!(<Vec<String>>::VALUE_KIND, ValueKind::List);
    assert_ne!(FileValue::Single(String::new()), FileValue::List(Vec::new()));
}

#[cfg(feature = "controlplane")]
#[test]
fn a_pool_of_load_balancers_that_the_node_ignores_is_found() {
    let ignored = |permitted: &str| {
        let toml = format!(
            "[node]\nservice-load-balancer-ips = [{permitted}]\n[control-plane]\nload-balancer-pool = [\"192.0.2.0/28\"]"
        );
        let mut sources = sources_of(&toml);
        let (_, settings) = Settings::resolve(AllFlags::default(), &mut sources).unwrap();
        settings.ignored_pools()
    };
    assert_eq!(ignored("\"198.51.100.0/24\""), ["192.0.2.0/28".parse().unwrap()]);
    assert!(ignored("\"192.0.2.0/24\"").is_empty() && ignored("").is_empty());
}

#[cfg(feature = "controlplane")]
#[test]
fn the_drain_of_an_api_server_has_the_time_of_its_delay_and_its_requests() {
    let of = |toml: &str| {
        let mut sources = sources_of(&format!("[control-plane]\n{toml}"));
        let (_, settings) = Settings::resolve(AllFlags::default(), &mut sources).unwrap();
        settings.control_plane().drain_limit().as_secs()
    };
    let (delay, retry) = ("shutdown-delay-duration = \"10s\"", "shutdown-send-retry-after = true");
    assert_eq!((of(""), of(delay), of(retry)), (0, 10, 60));
    assert_eq!(of("shutdown-watch-termination-grace-period = \"20s\""), 20);
    assert_eq!(of(&format!("{delay}\n{retry}\nrequest-timeout = \"90s\"")), 100);
}

#[cfg(feature = "controlplane")]
#[test]
fn autoscalers_have_the_options_of_kube_controller_manager() {
    let of = |toml: &str| {
        let mut sources = sources_of(toml);
        let settings = Settings::resolve(AllFlags::default(), &mut sources);
        settings.map(|(_, settings)| settings.control_plane().autoscaler)
    };
    assert_eq!(of(""), Some(coracle_controlplane::AutoscalerOptions::default()));
    let key =
        |name: &str, value: &str| format!("[control-plane]\nhorizontal-pod-autoscaler-{name} = {value}");
    assert_eq!(of(&key("tolerance", "\"0.25\"")).unwrap().tolerance.to_string(), "0.25");
    let window = of(&key("downscale-stabilization", "\"10m\"")).unwrap().downscale_stabilization;
    assert_eq!(window.as_secs(), 600);
    for (name, invalid) in [("tolerance", "\"-1\""), ("tolerance", "\"NaN\""), ("sync-period", "\"500ms\"")] {
        assert_eq!(of(&key(name, invalid)), None, "{name}");
    }
}

#[cfg(feature = "controlplane")]
#[test]
fn the_server_knows_the_external_ips_that_its_node_permits() {
    let known = |toml: &str| {
        let (_, settings) = Settings::resolve(AllFlags::default(), &mut sources_of(toml)).unwrap();
        settings.external_ips()
    };
    assert_eq!(known(""), Some(Vec::new()));
    let set = "[node]\nservice-external-ips = [\"192.0.2.0/24\"]";
    assert_eq!(known(set), Some(vec!["192.0.2.0/24".parse().unwrap()]));
    assert_eq!(known("[node]\nservice-proxy = false"), None);
}

#[test]
fn a_node_of_another_control_plane_serves_services_only_if_configured() {
    let node = |toml: &str| {
        let mut sources = sources_of(toml);
        let (_, settings) = Settings::resolve(AllFlags::default(), &mut sources).unwrap();
        settings.node()
    };
    let shown = |node: &Node| {
        assert_eq!(node.network_policy_table.is_some(), node.service_proxy.is_some());
        (node.dns.is_served, node.service_proxy.is_some(), node.dns.addresses.len())
    };
    let mut default = node("");
    assert_eq!(shown(&default), (true, true, 1), "a joined node");
    default.disable_cluster_services();
    assert_eq!(shown(&default), (false, false, 0));
    let mut explicit = node("[node]\nserve-dns = true\nservice-proxy = true\nnetwork-policy = true");
    explicit.disable_cluster_services();
    assert_eq!(shown(&explicit), (true, true, 1));
    let own = node("[node]\nserve-dns = true\ncluster-dns = [\"10.96.0.10\"]");
    assert_eq!(shown(&own), (true, true, 1), "the node serves DNS at this address");
    let mut configured = node("[node]\ncluster-dns = [\"10.96.0.10\"]");
    assert_eq!(shown(&configured), (false, true, 1), "another program serves DNS");
    configured.disable_cluster_services();
    assert_eq!(shown(&configured), (false, false, 1));
}

#[test]
fn drivers_register_in_the_kubelets_directory_unless_the_machine_has_other_nodes() {
    let registry = |state: &str, text: &str| {
        let dirs = Dirs { state: state.into(), run: "/run/x".into() };
        let node = node_settings(text)
            .unwrap()
            .decide(&dirs, &FeatureGates::default(), &mut Sources::default())
            .unwrap();
        node.plugin_registry_dir
    };
    assert_eq!(registry("/var/lib/coracle", ""), Path::new("/var/lib/kubelet/plugins_registry"));
    assert_eq!(registry("/var/lib/other", ""), Path::new("/var/lib/other/plugins_registry"));
    assert_eq!(registry("/var/lib/other", "plugin-registry-dir = \"/plugins\""), Path::new("/plugins"));
}

#[test]
fn a_configuration_file_that_is_too_large_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("coracle.toml");
    let text = format!("[node]\nmtu = 1300\n# {}\n", "x".repeat(1 << 20));
    std::fs::write(&path, &text).unwrap();
    let error = format!("{:#}", read(Some(&path), None).err().unwrap());
    assert!(error.contains("larger than"), "{error}");
    std::fs::write(&path, &text[..1000]).unwrap();
    assert!(read(Some(&path), None).is_ok());
}

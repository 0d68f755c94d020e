//! Tests of the kubelet's configuration file.

use coracle_agent::{ShutdownPeriod, ShutdownPeriods};

use super::super::tests::node_settings;
use super::super::{AllFlags, Settings, Sources};
use super::*;

const HEAD: &str = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n";

fn load(yaml: &str) -> Result<Settings, String> {
    load_all(&[("k.yaml", yaml)])
}

/// Loads files, each with its place and its text.
fn load_all(files: &[(&str, &str)]) -> Result<Settings, String> {
    let texts = files.iter().map(|(place, yaml)| text_of(place, &format!("{HEAD}{yaml}")));
    let file = parse(&texts.collect::<Vec<_>>()).map_err(|error| format!("{error:#}"))?;
    let mut sources = Sources { file, ..Sources::default() };
    let settings = Settings::resolve(AllFlags::default(), &mut sources);
    sources.check().map_err(|problems| problems.to_string())?;
    Ok(settings.unwrap().1)
}

fn text_of(place: &str, text: &str) -> Text {
    Text { place: place.to_owned(), text: text.to_owned() }
}

#[test]
fn honoured_fields_are_settings() {
    let node = load(
        "address: 127.0.0.1\nport: 10350\nmaxPods: 7\npodPidsLimit: 100\nclusterDNS: [10.43.0.10]\n\
         clusterDomain: example.org\nregisterNode: false\nregisterWithTaints: [{key: gpu, value: a, effect: NoSchedule}]\n\
         systemReserved: {cpu: 100m}\nkubeReserved: {memory: 64Mi}\nevictionHard: {memory.available: 5%}\n\
         evictionMinimumReclaim: {memory.available: 10Mi}\nevictionPressureTransitionPeriod: 30s\n\
         containerLogMaxSize: 1Mi\ncontainerLogMaxFiles: 3\nimageMinimumGCAge: 5m\nstreamingConnectionIdleTimeout: 1h\n\
         nodeLeaseDurationSeconds: 20\ncgroupDriver: systemd\ncgroupRoot: /x\nresolvConf: /r\npodLogsDir: /l\nstaticPodPath: /m\n\
         authentication: {x509: {clientCAFile: /ca}, webhook: {cacheTTL: 0s}}\nserverTLSBootstrap: true\n\
         logging: {format: json}\nfeatureGates: {RotateKubeletServerCertificate: true, SidecarContainers: true}\n",
    );
    let node = node.unwrap().node();
    assert_eq!(node.kubelet_listen.to_string(), "127.0.0.1:10350");
    assert_eq!((node.max_pods, node.pod_pids_limit, node.lease_seconds), (7, Some(100), 20));
    assert_eq!(
        (node.dns.addresses.len(), node.dns.domain.as_str(), node.register),
        (1, "example.org", false)
    );
    assert_eq!((node.taints[0].key.as_str(), node.taints[0].effect.as_str()), ("gpu", "NoSchedule"));
    assert_eq!(
        (node.system_reserved["cpu"].as_str(), node.kube_reserved["memory"].as_str()),
        ("100m", "64Mi")
    );
    assert_eq!(node.eviction.memory_available, coracle_agent::Threshold::percent(5));
    let reclaim = node.eviction.minimum_reclaim.memory_available;
    assert_eq!(
        (reclaim, node.eviction.pressure_transition.as_secs()),
        (coracle_agent::Threshold::Amount(10 << 20), 30)
    );
    assert_eq!((node.log_max_size, node.log_max_files), (1 << 20, 3));
    assert_eq!(node.stream_idle_limit.unwrap().as_secs(), 3600);
    assert_eq!((node.cgroup_root.as_str(), node.pod_log_dir), ("/x", "/l".into()));
    assert_eq!(node.static_pods.path, Some("/m".into()));
    assert_eq!((node.serving.client_ca, node.serving.bootstrap), (Some("/ca".into()), true));
}

#[test]
fn settings_of_all_pods_have_the_kubelets_fields() {
    let node = load(
        "seccompDefault: true\nallowedUnsafeSysctls: [net.core.somaxconn, \"kernel.msg*\"]\nserializeImagePulls: false\n\
         maxParallelImagePulls: 4\ncrashLoopBackOff: {maxContainerRestartPeriod: 30s}\npodsPerCore: 0\n\
         providerID: vendor://a\nmergeDefaultEvictionSettings: true\nevictionHard: {memory.available: 1Gi}\n\
         logging: {verbosity: 4}\ntlsMinVersion: VersionTLS13\nrotateCertificates: true\n\
         tlsCipherSuites: [TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256]\nhairpinMode: hairpin-veth\n\
         makeIPTablesUtilChains: false\ncpuCFSQuota: false\nenableSystemLogHandler: false\nenableProfilingHandler: false\n",
    );
    let node = node.unwrap().node();
    let policy = &node.pod_policy;
    assert!(policy.seccomp_default && !policy.cpu_quota && policy.allowed_sysctls.len() == 2);
    assert_eq!((policy.max_restart_wait.as_secs(), node.max_pods), (30, 110));
    assert_eq!(node.provider_id.as_deref(), Some("vendor://a"));
    let expected = coracle_agent::EvictionThresholds::default();
    assert_eq!(node.eviction.nodefs_available, expected.nodefs_available);
    assert!(node.serving.tls.requires_tls13 && node.serving.rotates);
    assert_eq!(node.serving.tls.cipher_suites.len(), 1);
    assert!(node.serving.handlers.debugging && !node.serving.handlers.system_log);
    assert_eq!(node.shown.flags["log-level"], "debug");
    let policy = load("seccompDefault: false\nserializeImagePulls: true").unwrap().node().pod_policy;
    assert!(!policy.seccomp_default && policy.allowed_sysctls.is_empty());
    assert!(load("podsPerCore: 1\nmaxPods: 4294967295").unwrap().node().max_pods < u32::MAX);
}

/// The values are refused by upstream's `ValidateKubeletConfiguration`.
#[test]
fn values_that_the_kubelet_refuses_are_refused_in_one_error() {
    let error = load(
        "maxParallelImagePulls: 0\ncontainerLogMaxFiles: 1\npodLogsDir: /var/../log\nallowedUnsafeSysctls: [vm.swappiness]\n\
         registerWithTaints: [{key: \"a b\", effect: NoSchedule}]\ntlsMinVersion: VersionTLS10\n\
         crashLoopBackOff: {maxContainerRestartPeriod: 1h}\n",
    );
    let error = error.err().unwrap();
    for part in [
        "k.yaml maxParallelImagePulls \"0\": expected a whole number from 1",
        "k.yaml containerLogMaxFiles: the number must be greater than 1",
        "k.yaml podLogsDir: the path must not have empty names",
        "k.yaml allowedUnsafeSysctls \"vm.swappiness\": the sysctl has no namespace",
        "k.yaml registerWithTaints \"a b=:NoSchedule\": \"a b\" is not the key of a taint",
        "k.yaml tlsMinVersion \"VersionTLS10\": expected one of VersionTLS12, VersionTLS13",
    ] {
        assert!(error.contains(part), "{part} is not in: {error}");
    }
    let error =
        load("crashLoopBackOff: {maxContainerRestartPeriod: 1h}\ntlsCipherSuites: [X]").err().unwrap();
    for part in ["max-container-restart-period must be from 1s to 5m", "cipher suite \"X\" is not supported"]
    {
        assert!(error.contains(part), "{part} is not in: {error}");
    }
    let error = load("serializeImagePulls: true\nmaxParallelImagePulls: 2").err().unwrap();
    assert!(error.contains("max-parallel-image-pulls must be 1 with serialize-image-pulls"), "{error}");
}

#[test]
fn further_files_are_merged_and_errors_name_the_file_of_the_field() {
    let settings = load_all(&[
        ("k.yaml", "maxPods: 5\nevictionHard: {memory.available: 1Gi}\nclusterDNS: [10.43.0.10]\n"),
        ("10.conf", "maxPods: 6\nevictionHard: {pid.available: 7%}\n"),
        ("20.conf", "clusterDNS: null\n"),
    ]);
    let node = settings.unwrap().node();
    assert_eq!(node.max_pods, 6);
    assert_eq!(node.eviction.memory_available, coracle_agent::Threshold::Amount(1 << 30));
    assert_eq!(node.eviction.pid_available, coracle_agent::Threshold::percent(7));
    let error = load_all(&[("k.yaml", "maxPods: many"), ("10.conf", "port: 1\nmaxPodz: 1")]).err().unwrap();
    assert!(error.contains("k.yaml maxPods \"many\"") && error.contains("10.conf maxPodz"), "{error}");
    let without_kind = [text_of("k.yaml", HEAD), text_of("10.conf", "maxPods: 6")];
    let error = parse(&without_kind).unwrap_err().to_string();
    assert!(error.contains("10.conf is not a KubeletConfiguration"), "{error}");
    assert!(load_all(&[]).is_ok());
}

/// Fields that kubeadm, k3s and Talos write into each file, except the container runtime's socket and cgroups of daemons.
#[test]
fn files_of_distributions_are_accepted() {
    let access = "authentication: {anonymous: {enabled: false}, webhook: {cacheTTL: 0s, enabled: true}, \
                  x509: {clientCAFile: /ca.crt}}\nauthorization: {mode: Webhook, webhook: \
                  {cacheAuthorizedTTL: 0s, cacheUnauthorizedTTL: 0s}}\n";
    let kubeadm = "cgroupDriver: systemd\nclusterDNS: [10.96.0.10]\nclusterDomain: cluster.local\n\
        containerRuntimeEndpoint: \"\"\ncpuManagerReconcilePeriod: 0s\ncrashLoopBackOff: {}\n\
        evictionPressureTransitionPeriod: 0s\nfileCheckFrequency: 0s\nhealthzBindAddress: 127.0.0.1\n\
        healthzPort: 10248\nhttpCheckFrequency: 0s\nimageMaximumGCAge: 0s\nimageMinimumGCAge: 0s\n\
        memorySwap: {}\nnodeStatusReportFrequency: 0s\nnodeStatusUpdateFrequency: 0s\n\
        rotateCertificates: true\nruntimeRequestTimeout: 0s\nshutdownGracePeriod: 0s\n\
        shutdownGracePeriodCriticalPods: 0s\nstaticPodPath: /m\nstreamingConnectionIdleTimeout: 0s\n\
        syncFrequency: 0s\nvolumeStatsAggPeriod: 0s\n";
    let k3s = "serializeImagePulls: false\nfailSwapOn: false\nevictionHard: {imagefs.available: 5%, \
        nodefs.available: 5%}\nevictionMinimumReclaim: {imagefs.available: 10%, nodefs.available: 10%}\n\
        allowedUnsafeSysctls: [net.ipv4.ip_forward, net.ipv6.conf.all.forwarding]\ncpuCFSQuota: false\n\
        logging: {flushFrequency: 5s, format: text, verbosity: 1, options: {json: {infoBufferSize: \"0\"}, \
        text: {infoBufferSize: \"0\"}}}\nresolvConf: /r\ntlsCertFile: /c\ntlsPrivateKeyFile: /k\n";
    let talos = "address: 0.0.0.0\nport: 10250\nseccompDefault: true\nserializeImagePulls: false\n\
        failSwapOn: false\ncgroupRoot: /\ntlsMinVersion: VersionTLS13\nlogging: {format: json}\n\
        streamingConnectionIdleTimeout: 5m\nrotateCertificates: true\nshutdownGracePeriod: 30s\n\
        shutdownGracePeriodCriticalPods: 10s\nenableSystemLogHandler: false\n";
    for file in [kubeadm, k3s, talos] {
        let loaded = load(&format!("{access}{file}"));
        assert!(loaded.is_ok(), "{:?}", loaded.err());
    }
}

#[test]
fn a_refused_value_comes_with_what_to_do() {
    for (field, part) in [
        ("readOnlyPort: 10255", "leave it unset; clients authenticate at the port of kubelet-listen"),
        (
            "imageServiceEndpoint: unix:///x",
            "leave it unset; the socket of containerRuntimeEndpoint also serves images",
        ),
        ("kubeAPIQPS: 10", "the minimum is 50; the API server limits the requests of nodes"),
        ("nodeStatusUpdateFrequency: 4s", "the minimum is 10s; changes are reported at once"),
        ("nodeStatusReportFrequency: often", "the minimum is 5m"),
        ("memorySwap: {swapBehavior: LimitedSwap}", "the only value is NoSwap; containers use no swap"),
    ] {
        let error = load(field).err().unwrap();
        assert!(error.contains(part), "{part} is not in: {error}");
    }
    for (path, _) in fields::ADVICE {
        assert!(FIELDS.iter().any(|field| field.path == *path), "{path}");
    }
}

#[test]
fn rates_and_reports_have_the_kubelets_fields() {
    let settings = load(
        "registryPullQPS: 2\nregistryBurst: 4\neventRecordQPS: 10\neventBurst: 20\nnodeStatusMaxImages: -1\n\
         kubeAPIQPS: 100\nkubeAPIBurst: 100\nnodeStatusUpdateFrequency: 20s\nnodeStatusReportFrequency: 300s\n\
         systemReserved: {pid: \"1000\"}\nkubeReserved: {pid: 500}\n\
         containerRuntimeEndpoint: unix:///run/containerd/containerd.sock\n",
    );
    let settings = settings.unwrap();
    let endpoint = settings.container_runtime_endpoint();
    assert_eq!(endpoint, Some("unix:///run/containerd/containerd.sock"));
    let node = settings.node();
    let rate = node.reports.event_rate.map(|rate| (rate.per_second.get(), rate.burst.get()));
    assert_eq!((rate, node.reports.max_images), (Some((10, 20)), None));
    assert_eq!((node.system_reserved["pid"].as_str(), node.kube_reserved["pid"].as_str()), ("1000", "500"));
    let defaults = load("containerRuntimeEndpoint: \"\"\nregistryBurst: 0\neventBurst: 0").unwrap();
    assert_eq!(defaults.container_runtime_endpoint(), None);
    let error = load("nodeStatusMaxImages: -2").err().unwrap();
    assert!(
        error.contains("k.yaml nodeStatusMaxImages \"-2\": expected -1 or a larger whole number"),
        "{error}"
    );
}

#[test]
fn managers_of_resources_have_the_kubelets_fields() {
    let node = load(
        "cpuManagerPolicy: static\ncpuManagerPolicyOptions: {full-pcpus-only: \"true\"}\nreservedSystemCPUs: 0-1\n\
         memoryManagerPolicy: Static\nreservedMemory: [{numaNode: 1, limits: {memory: 1Gi}}]\n\
         topologyManagerPolicy: restricted\ntopologyManagerScope: pod\n\
         topologyManagerPolicyOptions: {max-allowable-numa-nodes: \"9\"}\ncpuManagerReconcilePeriod: 0s\n",
    );
    let node = node.unwrap().node();
    let managers = node.resource_managers;
    assert!(managers.cpu.is_some() && managers.topology.aligns_pods);
    assert_eq!((managers.topology.policy.name(), managers.topology.max_nodes), ("restricted", 9));
    assert_eq!(managers.memory.unwrap().0[&1]["memory"], 1 << 30);
    assert_eq!(node.system_reserved["cpu"], "2");
    let error = load("reservedMemory: [{node: 1}]").err().unwrap();
    assert!(error.contains("k.yaml reservedMemory: expected an array of objects"), "{error}");
    let error =
        load("cpuManagerPolicy: static\ncpuManagerPolicyOptions: {align-by-socket: \"true\"}").err().unwrap();
    assert!(error.contains("CPUManagerPolicyAlphaOptions"), "{error}");
    let gate = "featureGates: {CPUManagerPolicyAlphaOptions: true}";
    let options = "cpuManagerPolicy: static\ncpuManagerPolicyOptions: {align-by-socket: \"true\"}";
    assert!(load(&format!("{gate}\n{options}")).is_ok());
}

#[test]
fn the_periods_of_a_shutdown_have_the_kubelets_fields() {
    let periods = |text: &str| load(text).map(|settings| settings.node().shutdown_periods);
    let total = periods("shutdownGracePeriod: 30s\nshutdownGracePeriodCriticalPods: 10s\n");
    assert_eq!(total.unwrap(), ShutdownPeriods::of_total(30, 10));
    assert!(periods("shutdownGracePeriod: 0s\nshutdownGracePeriodByPodPriority: []\n").unwrap().is_empty());
    let list = "shutdownGracePeriodByPodPriority: [{priority: 1000, shutdownGracePeriodSeconds: 20}, \
                {shutdownGracePeriodSeconds: 60}]";
    let period = |priority, seconds| ShutdownPeriod { priority, seconds };
    let expected = ShutdownPeriods::by_priority(vec![period(0, 60), period(1000, 20)]);
    assert_eq!(periods(list).unwrap(), expected);
    let error = periods(&format!("shutdownGracePeriod: 30s\n{list}")).err().unwrap();
    assert!(error.contains("shutdown-grace-period-by-pod-priority"), "{error}");
    let error = periods("shutdownGracePeriodByPodPriority: [{seconds: 5}]").err().unwrap();
    assert!(
        error.contains("k.yaml shutdownGracePeriodByPodPriority: expected an array of objects"),
        "{error}"
    );
}

#[test]
fn the_url_of_static_pods_has_the_kubelets_fields() {
    let headers = "staticPodURLHeader: {Authorization: [Bearer secret], X: [a, b]}";
    let url = "staticPodURL: https://h/pods?token=secret";
    let settings = load(&format!("{url}\nhttpCheckFrequency: 0s\n{headers}")).unwrap();
    let node = settings.node();
    assert!(node.static_pods.url.is_some());
    assert_eq!(node.shown.flags["manifest-url-header"], "<hidden>");
    assert_eq!(node.shown.flags["manifest-url"], "https://h/pods?<hidden>");
    assert!(!format!("{node:?}").contains("secret"));
    assert!(load("").unwrap().node().static_pods.url.is_none());
    let error = load("staticPodURL: h/pods\nstaticPodURLHeader: {X: a}").err().unwrap();
    assert!(
        error.contains("k.yaml staticPodURLHeader: expected an object with an array of values"),
        "{error}"
    );
}

#[test]
fn zero_values_are_unset_unless_the_kubelet_keeps_them() {
    // kubeadm writes such values into every file.
    let node = load(
        "syncFrequency: 0s\nmaxPods: 0\nmemorySwap: {}\nclusterDomain: \"\"\nlogging: {flushFrequency: 0, verbosity: 0, \
         options: {json: {infoBufferSize: \"0\"}}}\nauthorization: {mode: Webhook, webhook: {cacheAuthorizedTTL: 0s}}\n\
         failSwapOn: null\nhealthzPort: 10248\nhealthzBindAddress: 127.0.0.1\nevictionPressureTransitionPeriod: 5m0s\n",
    );
    let node = node.unwrap().node();
    assert_eq!((node.max_pods, node.healthz), (110, Some("127.0.0.1:10248".parse().unwrap())));
    assert_eq!(load("healthzPort: 0").unwrap().node().healthz, None);
    assert!(load("memorySwap: {swapBehavior: NoSwap}").is_ok());
    let limited = load("memorySwap: {swapBehavior: LimitedSwap}").err().unwrap();
    assert!(
        limited.contains("memorySwap.swapBehavior: this field is not supported; the only value is NoSwap")
    );
    assert!(load("kubeAPIQPS: 0").err().unwrap().contains("k.yaml kubeAPIQPS: this field is not supported"));
    // Without a limit.
    let unlimited = load("eventRecordQPS: 0\nregistryPullQPS: 0").unwrap().node();
    assert_eq!(unlimited.reports.event_rate, None);
    let none = load("imageGCHighThresholdPercent: 0").err().unwrap();
    assert!(none.contains("image-gc-high-threshold 0"), "{none}");
}

#[test]
fn fields_without_effect_and_unknown_fields_are_named() {
    let error = load(
        "podCIDR: x\nmaxPodz: 5\nmaxPods: many\nauthentication: {anonymous: {enabled: true}, \
         token: {}}\nfeatureGates: {X: true}\nenforceNodeAllocatable: [pods, system-reserved]\nevictionHard: 5\n\
         registerWithTaints: [{key: a, effect: NoSchedule, timeAdded: now}]\nsystemReserved: {pods: \"5\"}\n\
         defaultPodSysctls: {}\n",
    );
    let error = error.err().unwrap();
    for part in [
        "k.yaml podCIDR: this field is not supported; leave it unset",
        "k.yaml maxPodz: unknown field; did you mean maxPods?",
        "k.yaml maxPods \"many\": expected a whole number",
        "k.yaml authentication.anonymous.enabled: this field is not supported; the only value is false",
        "k.yaml authentication.token: unknown field",
        // A field of Kubernetes 1.37.
        "k.yaml defaultPodSysctls: unknown field",
        "k.yaml featureGates \"X=true\": unrecognized feature gate: X",
        "k.yaml enforceNodeAllocatable: this field is not supported; the only value is pods",
        "k.yaml evictionHard: expected a table",
        "k.yaml registerWithTaints: expected an array of taints",
        "k.yaml systemReserved \"pods=5\": \"pods\" cannot be reserved",
    ] {
        assert!(error.contains(part), "{part} is not in: {error}");
    }
}

#[test]
fn a_machine_without_a_property_is_refused_if_the_file_demands_the_property() {
    for (field, demand) in [
        ("failCgroupV1", Demand::CgroupV2),
        ("failSwapOn", Demand::NoSwap),
        ("protectKernelDefaults", Demand::KernelDefaults),
    ] {
        let unmet = demand.unmet(Path::new("/proc"), Path::new("/sys/fs/cgroup"));
        let error = load(&format!("{field}: true")).err();
        assert_eq!(error.is_some(), unmet.is_some(), "{error:?}");
        if let (Some(error), Some(why)) = (error, unmet) {
            assert!(error.contains(&format!("k.yaml {field}: {why}")), "{error}");
        }
        assert!(load(&format!("{field}: false")).is_ok());
        let error = load(&format!("{field}: 1")).err().unwrap();
        assert!(error.contains(&format!("k.yaml {field}: expected true or false")), "{error}");
    }
}

#[test]
fn other_files_are_refused() {
    let pod = parse(&[text_of("k.yaml", "kind: Pod\napiVersion: v1")]).unwrap_err().to_string();
    assert!(pod.contains("not a KubeletConfiguration"), "{pod}");
    assert!(load("maxPods: 1\nmaxPods: 2").err().unwrap().contains("duplicate"));
    assert!(parse(&[text_of("k.yaml", "[node]")]).is_err());
}

#[test]
fn every_setting_of_a_field_exists() {
    assert!(node_settings("").is_ok());
    for field in FIELDS {
        if let Support::Setting(table, name) = field.support {
            let known = super::super::TABLES.iter().filter(|(key, _)| *key == table);
            let known: Vec<_> = known.flat_map(|(_, fields)| fields.iter()).collect();
            assert!(known.iter().any(|setting| setting.name == name), "{}", field.path);
        }
    }
}

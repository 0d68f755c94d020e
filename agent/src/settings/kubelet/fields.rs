//! All fields of `KubeletConfiguration` (Kubernetes 1.36), with their support by this program.
//!
//! Names and defaults are those of `SetDefaults_KubeletConfiguration` in Kubernetes' `pkg/kubelet/apis/config/v1beta1`.

use super::machine::Demand;

/// A field of the kubelet's configuration.
pub(super) struct KubeletField {
    /// Path of the field, with dots.
    pub(super) path: &'static str,
    /// Whether the kubelet replaces a zero value by the default. Pointers in its Go type keep a zero value.
    pub(super) zero_is_unset: bool,
    pub(super) support: Support,
}

/// The support for a field of KubeletConfiguration.
pub(super) enum Support {
    /// The field is the setting of this table with this name.
    Setting(&'static str, &'static str),
    /// The field is the address of `kubelet-listen`.
    Address,
    /// The field is the port of `kubelet-listen`.
    Port,
    /// The field is the setting `register-with-taints`.
    Taints,
    /// An array of reservations, for the setting `reserved-memory`.
    ReservedMemory,
    /// An array of periods by priority, for the setting `shutdown-grace-period-by-pod-priority`.
    ShutdownPeriods,
    /// An object with arrays of values, for the setting `manifest-url-header`.
    Headers,
    /// The verbosity of klog, for the setting `log-level`.
    Verbosity,
    /// `true` requires that the machine has this property.
    Demand(Demand),
    /// The field has no effect. It may be unset, or have at least this number or duration.
    AtLeast(&'static str),
    /// The field has no effect, and may only be unset or have one of these values.
    Only(&'static [&'static str]),
}

const fn pointer(path: &'static str, support: Support) -> KubeletField {
    KubeletField { path, zero_is_unset: false, support }
}

const fn value(path: &'static str, support: Support) -> KubeletField {
    KubeletField { path, zero_is_unset: true, support }
}

#[rustfmt::skip]
pub(super) const FIELDS: &[KubeletField] = &[
    pointer("enableServer", Support::Only(&["true"])),
    value("staticPodPath", Support::Setting("node", "pod-manifest-path")),
    value("podLogsDir", Support::Setting("node", "pod-log-dir")),
    value("syncFrequency", Support::Only(&["1m"])),
    value("fileCheckFrequency", Support::Only(&["20s"])),
    value("httpCheckFrequency", Support::Setting("node", "http-check-frequency")),
    value("staticPodURL", Support::Setting("node", "manifest-url")),
    value("staticPodURLHeader", Support::Headers),
    value("address", Support::Address),
    value("port", Support::Port),
    value("readOnlyPort", Support::Only(&[])),
    value("tlsCertFile", Support::Setting("node", "tls-cert-file")),
    value("tlsPrivateKeyFile", Support::Setting("node", "tls-private-key-file")),
    value("tlsCipherSuites", Support::Setting("node", "kubelet-tls-cipher-suites")),
    value("tlsCurvePreferences", Support::Only(&[])),
    value("tlsMinVersion", Support::Setting("node", "kubelet-tls-min-version")),
    value("rotateCertificates", Support::Setting("node", "rotate-certificates")),
    value("serverTLSBootstrap", Support::Setting("node", "server-tls-bootstrap")),
    value("authentication.x509.clientCAFile", Support::Setting("node", "client-ca-file")),
    pointer("authentication.webhook.enabled", Support::Only(&["true"])),
    value("authentication.webhook.cacheTTL", Support::Only(&["2m"])),
    pointer("authentication.anonymous.enabled", Support::Only(&["false"])),
    value("authorization.mode", Support::Only(&["Webhook"])),
    value("authorization.webhook.cacheAuthorizedTTL", Support::Only(&["5m"])),
    value("authorization.webhook.cacheUnauthorizedTTL", Support::Only(&["30s"])),
    pointer("registryPullQPS", Support::Setting("node", "registry-qps")),
    value("registryBurst", Support::Setting("node", "registry-burst")),
    value("imagePullCredentialsVerificationPolicy", Support::Setting("node", "image-pull-credentials-verification-policy")),
    value("preloadedImagesVerificationAllowlist", Support::Setting("node", "preloaded-images-verification-allowlist")),
    pointer("eventRecordQPS", Support::Setting("node", "event-qps")),
    value("eventBurst", Support::Setting("node", "event-burst")),
    pointer("enableDebuggingHandlers", Support::Setting("node", "enable-debugging-handlers")),
    value("enableContentionProfiling", Support::Only(&[])),
    pointer("healthzPort", Support::Setting("node", "healthz-port")),
    value("healthzBindAddress", Support::Only(&["127.0.0.1"])),
    pointer("oomScoreAdj", Support::Only(&["-999"])),
    value("clusterDomain", Support::Setting("node", "cluster-domain")),
    value("clusterDNS", Support::Setting("node", "cluster-dns")),
    value("streamingConnectionIdleTimeout", Support::Setting("node", "streaming-connection-idle-timeout")),
    value("nodeStatusUpdateFrequency", Support::AtLeast("10s")),
    value("nodeStatusReportFrequency", Support::AtLeast("5m")),
    value("nodeLeaseDurationSeconds", Support::Setting("node", "node-lease-seconds")),
    value("imageMinimumGCAge", Support::Setting("node", "image-minimum-gc-age")),
    value("imageMaximumGCAge", Support::Setting("node", "image-maximum-gc-age")),
    pointer("imageGCHighThresholdPercent", Support::Setting("node", "image-gc-high-threshold")),
    pointer("imageGCLowThresholdPercent", Support::Setting("node", "image-gc-low-threshold")),
    value("volumeStatsAggPeriod", Support::Only(&["1m"])),
    value("kubeletCgroups", Support::Only(&[])),
    value("systemCgroups", Support::Only(&[])),
    value("cgroupRoot", Support::Setting("node", "cgroup-root")),
    pointer("cgroupsPerQOS", Support::Only(&["true"])),
    value("cgroupDriver", Support::Setting("node", "cgroup-driver")),
    value("cpuManagerPolicy", Support::Setting("node", "cpu-manager-policy")),
    pointer("singleProcessOOMKill", Support::Only(&[])),
    value("cpuManagerPolicyOptions", Support::Setting("node", "cpu-manager-policy-options")),
    value("cpuManagerReconcilePeriod", Support::Only(&["10s"])),
    value("memoryManagerPolicy", Support::Setting("node", "memory-manager-policy")),
    value("topologyManagerPolicy", Support::Setting("node", "topology-manager-policy")),
    value("topologyManagerScope", Support::Setting("node", "topology-manager-scope")),
    value("topologyManagerPolicyOptions", Support::Setting("node", "topology-manager-policy-options")),
    value("qosReserved", Support::Only(&[])),
    value("runtimeRequestTimeout", Support::Only(&["2m"])),
    value("hairpinMode", Support::Only(&["promiscuous-bridge", "hairpin-veth", "none"])),
    value("maxPods", Support::Setting("node", "max-pods")),
    value("podCIDR", Support::Only(&[])),
    pointer("podPidsLimit", Support::Setting("node", "pod-max-pids")),
    pointer("resolvConf", Support::Setting("node", "resolv-conf")),
    value("runOnce", Support::Only(&[])),
    pointer("cpuCFSQuota", Support::Setting("node", "cpu-cfs-quota")),
    pointer("cpuCFSQuotaPeriod", Support::Only(&["100ms"])),
    pointer("nodeStatusMaxImages", Support::Setting("node", "node-status-max-images")),
    value("maxOpenFiles", Support::Only(&["1000000"])),
    value("contentType", Support::Only(&["application/vnd.kubernetes.protobuf"])),
    pointer("kubeAPIQPS", Support::AtLeast("50")),
    value("kubeAPIBurst", Support::AtLeast("100")),
    pointer("serializeImagePulls", Support::Setting("node", "serialize-image-pulls")),
    pointer("maxParallelImagePulls", Support::Setting("node", "max-parallel-image-pulls")),
    value("evictionHard", Support::Setting("node", "eviction-hard")),
    value("evictionSoft", Support::Setting("node", "eviction-soft")),
    value("evictionSoftGracePeriod", Support::Setting("node", "eviction-soft-grace-period")),
    value("evictionPressureTransitionPeriod", Support::Setting("node", "eviction-pressure-transition-period")),
    value("evictionMaxPodGracePeriod", Support::Setting("node", "eviction-max-pod-grace-period")),
    value("evictionMinimumReclaim", Support::Setting("node", "eviction-minimum-reclaim")),
    pointer("mergeDefaultEvictionSettings", Support::Setting("node", "merge-default-eviction-settings")),
    value("podsPerCore", Support::Setting("node", "pods-per-core")),
    pointer("enableControllerAttachDetach", Support::Only(&["true"])),
    value("protectKernelDefaults", Support::Demand(Demand::KernelDefaults)),
    pointer("makeIPTablesUtilChains", Support::Only(&["true", "false"])),
    pointer("iptablesMasqueradeBit", Support::Only(&["14"])),
    pointer("iptablesDropBit", Support::Only(&["15"])),
    value("featureGates", Support::Setting("", "feature-gates")),
    pointer("failSwapOn", Support::Demand(Demand::NoSwap)),
    value("memorySwap.swapBehavior", Support::Only(&["NoSwap"])),
    value("containerLogMaxSize", Support::Setting("node", "container-log-max-size")),
    pointer("containerLogMaxFiles", Support::Setting("node", "container-log-max-files")),
    pointer("containerLogMaxWorkers", Support::Only(&["1"])),
    pointer("containerLogMonitorInterval", Support::Only(&["10s"])),
    value("configMapAndSecretChangeDetectionStrategy", Support::Only(&["Watch"])),
    value("systemReserved", Support::Setting("node", "system-reserved")),
    value("kubeReserved", Support::Setting("node", "kube-reserved")),
    value("reservedSystemCPUs", Support::Setting("node", "reserved-cpus")),
    value("showHiddenMetricsForVersion", Support::Only(&[])),
    value("systemReservedCgroup", Support::Only(&[])),
    value("kubeReservedCgroup", Support::Only(&[])),
    pointer("enforceNodeAllocatable", Support::Only(&["pods"])),
    value("allowedUnsafeSysctls", Support::Setting("node", "allowed-unsafe-sysctls")),
    value("volumePluginDir", Support::Only(&["/usr/libexec/kubernetes/kubelet-plugins/volume/exec/"])),
    value("providerID", Support::Setting("node", "provider-id")),
    value("kernelMemcgNotification", Support::Only(&[])),
    value("logging.format", Support::Setting("", "log-format")),
    value("logging.flushFrequency", Support::Only(&["5s", "5000000000"])),
    value("logging.verbosity", Support::Verbosity),
    value("logging.vmodule", Support::Only(&[])),
    value("logging.options.text.splitStream", Support::Only(&[])),
    value("logging.options.text.infoBufferSize", Support::Only(&["0"])),
    value("logging.options.json.splitStream", Support::Only(&[])),
    value("logging.options.json.infoBufferSize", Support::Only(&["0"])),
    pointer("enableSystemLogHandler", Support::Setting("node", "enable-system-log-handler")),
    pointer("enableSystemLogQuery", Support::Only(&["false"])),
    value("shutdownGracePeriod", Support::Setting("node", "shutdown-grace-period")),
    value("shutdownGracePeriodCriticalPods", Support::Setting("node", "shutdown-grace-period-critical-pods")),
    value("shutdownGracePeriodByPodPriority", Support::ShutdownPeriods),
    pointer("crashLoopBackOff.maxContainerRestartPeriod", Support::Setting("node", "max-container-restart-period")),
    value("reservedMemory", Support::ReservedMemory),
    pointer("enableProfilingHandler", Support::Only(&["true", "false"])),
    pointer("enableDebugFlagsHandler", Support::Only(&["true", "false"])),
    pointer("seccompDefault", Support::Setting("node", "seccomp-default")),
    pointer("memoryThrottlingFactor", Support::Only(&["0.9"])),
    value("memoryReservationPolicy", Support::Only(&["None"])),
    value("registerWithTaints", Support::Taints),
    pointer("registerNode", Support::Setting("node", "register-node")),
    pointer("tracing.endpoint", Support::Only(&[])),
    pointer("tracing.samplingRatePerMillion", Support::Only(&["0"])),
    pointer("localStorageCapacityIsolation", Support::Only(&["true"])),
    value("containerRuntimeEndpoint", Support::Setting("node", "container-runtime-endpoint")),
    value("imageServiceEndpoint", Support::Only(&[])),
    pointer("failCgroupV1", Support::Demand(Demand::CgroupV2)),
    pointer("userNamespaces.idsPerPod", Support::Only(&["65536"])),
];

/// Advice for values that are not supported, by the path of the field.
pub(super) const ADVICE: &[(&str, &str)] = &[
    (
        "nodeStatusUpdateFrequency",
        "changes are reported at once; nodeLeaseDurationSeconds says how soon a lost node is noticed",
    ),
    (
        "nodeStatusReportFrequency",
        "changes are reported at once; nodeLeaseDurationSeconds says how soon a lost node is noticed",
    ),
    ("kubeAPIQPS", "the API server limits the requests of nodes by priority and fairness"),
    ("kubeAPIBurst", "the API server limits the requests of nodes by priority and fairness"),
    ("readOnlyPort", "clients authenticate at the port of kubelet-listen"),
    ("authentication.webhook.enabled", "clients authenticate by a certificate or a token"),
    ("authentication.anonymous.enabled", "clients authenticate by a certificate or a token"),
    ("authorization.mode", "the API server authorizes each request by a SubjectAccessReview"),
    ("healthzBindAddress", "the health check is served on loopback only"),
    ("kubeletCgroups", "start the node in the cgroup, for example by Slice= of its systemd unit"),
    ("systemCgroups", "move the processes by another program, for example by units of systemd"),
    ("podCIDR", "the node uses spec.podCIDR of its Node object"),
    ("runOnce", "run the pods by staticPodPath"),
    ("memorySwap.swapBehavior", "containers use no swap"),
    (
        "enforceNodeAllocatable",
        "set limits of other cgroups by another program, for example by units of systemd",
    ),
    ("systemReservedCgroup", "systemReserved reserves the resources without a limit of the cgroup"),
    ("kubeReservedCgroup", "kubeReserved reserves the resources without a limit of the cgroup"),
    ("volumePluginDir", "drivers of volumes are CSI drivers"),
    ("enableControllerAttachDetach", "the controller attaches volumes"),
    ("configMapAndSecretChangeDetectionStrategy", "the node watches ConfigMaps and Secrets"),
    ("tracing.endpoint", "spans are not exported"),
    ("logging.vmodule", "set the levels of single modules by log-level, such as info,coracle_cri=debug"),
    ("localStorageCapacityIsolation", "a pod without a limit of ephemeral-storage is not limited"),
    ("imageServiceEndpoint", "the socket of containerRuntimeEndpoint also serves images"),
    ("oomScoreAdj", "set OOMScoreAdjust= of the systemd unit"),
    ("maxOpenFiles", "set LimitNOFILE= of the systemd unit"),
];

/// Advice for a value that is not supported.
pub(super) fn advice(path: &str) -> Option<&'static str> {
    ADVICE.iter().find(|(known, _)| *known == path).map(|(_, advice)| *advice)
}

//! Names and defaults of the feature gates of Kubernetes 1.36. All components have the same gates.
//!
//! Source: `test/compatibility_lifecycle/reference/versioned_feature_list.yaml` of Kubernetes.

/// Gates that users can switch, and that are on by default.
pub(super) const SWITCHES_ON_BY_DEFAULT: &[&str] =
    &["APIResponseCompression", "ConstrainedImpersonation", "WatchList"];

/// Gates that users can switch, and that are off by default.
pub(super) const SWITCHES_OFF_BY_DEFAULT: &[&str] =
    &["AllowUnsafeMalformedObjectDeletion", "CPUManagerPolicyAlphaOptions"];

/// Gates that accept any value, without an effect. The setting `runtime-config` enables the APIs of three of these
/// gates. EventedPLEG has no effect, because the agent always follows the events of containers.
pub(super) const WITHOUT_EFFECT: &[&str] =
    &["EventedPLEG", "GangScheduling", "GenericWorkload", "StorageVersionMigrator"];

/// Gates that upstream disables by default. Their behaviour is always enabled in this program.
pub(super) const ALWAYS_ON: &[&str] = &["MaxUnavailableStatefulSet"];

/// Gates that are locked to true.
#[rustfmt::skip]
pub(super) const LOCKED_ON: &[&str] = &[
    "APIServerTracing", "AggregatedDiscoveryRemoveBetaType", "AnonymousAuthConfigurableEndpoints",
    "AnyVolumeDataSource", "AuthorizeNodeWithSelectors", "AuthorizeWithSelectors", "BtreeWatchCache",
    "CPUManagerPolicyOptions", "CRDValidationRatcheting", "CSIServiceAccountTokenSecrets",
    "ConsistentListFromCache", "CustomResourceFieldSelectors", "DRAAdminAccess", "DeclarativeValidation",
    "DisableAllocatorDualWrite", "DisableNodeKubeProxyVersion", "DynamicResourceAllocation",
    "ExecProbeTimeout", "ExternalServiceAccountTokenSigner", "ImageMaximumGCAge", "ImageVolume",
    "InPlacePodVerticalScaling", "JobBackoffLimitPerIndex", "JobManagedBy", "JobPodReplacementPolicy",
    "JobSuccessPolicy", "KubeletCgroupDriverFromCRI", "KubeletFineGrainedAuthz", "KubeletPSI",
    "KubeletPodResourcesDynamicResources", "KubeletPodResourcesGet", "KubeletTracing",
    "LogarithmicScaleDown", "MatchLabelKeysInPodAffinity", "MultiCIDRServiceAllocator",
    "MutableCSINodeAllocatableCount", "NFTablesProxyMode", "NodeInclusionPolicyInPodTopologySpread",
    "NodeLogQuery", "NodeSwap", "OrderedNamespaceDeletion", "PodLifecycleSleepAction",
    "PodLifecycleSleepActionAllowZero", "PodObservedGenerationTracking", "PodSchedulingReadiness",
    "PreferSameTrafficDistribution", "ProcMountType", "RecoverVolumeExpansionFailure",
    "RecursiveReadOnlyMounts", "RelaxedDNSSearchValidation", "RelaxedEnvironmentVariableValidation",
    "ResilientWatchCacheInitialization", "RetryGenerateName", "SELinuxChangePolicy",
    "SELinuxMountReadWriteOncePod", "SchedulerQueueingHints", "SeparateTaintEvictionController",
    "ServiceAccountTokenJTI", "ServiceAccountTokenNodeBinding", "ServiceAccountTokenNodeBindingValidation",
    "ServiceAccountTokenPodNodeInfo", "SidecarContainers", "StreamingCollectionEncodingToJSON",
    "StreamingCollectionEncodingToProtobuf", "StructuredAuthenticationConfiguration",
    "SupplementalGroupsPolicy", "SystemdWatchdog", "TopologyManagerPolicyOptions", "UserNamespacesSupport",
    "VolumeAttributesClass", "WinDSR", "WinOverlay",
];

/// Gates that are locked to false.
#[rustfmt::skip]
pub(super) const LOCKED_OFF: &[&str] = &[
    "AllowOverwriteTerminationGracePeriodSeconds", "GitRepoVolumeDriver", "SeparateCacheWatchRPC",
];

/// Gates that are on by default and cannot be switched here.
#[rustfmt::skip]
pub(super) const ON: &[&str] = &[
    "APIServerIdentity", "AllowParsingUserUIDFromCertAuth", "AllowServiceExternalIPs",
    "AuthorizePodWebsocketUpgradeCreatePermission", "CPUManagerPolicyBetaOptions",
    "CRDObservedGenerationTracking", "ClearingNominatedNodeNameAfterBinding", "ComponentFlagz",
    "ComponentStatusz", "ContainerCheckpoint", "ContainerRestartRules",
    "ContextualLogging", "CustomCPUCFSQuotaPeriod", "DRAConsumableCapacity", "DRADeviceBindingConditions",
    "DRADeviceTaints", "DRAExtendedResource", "DRAPartitionableDevices", "DRAPrioritizedList",
    "DRAResourceClaimDeviceStatus", "DRAResourceClaimGranularStatusAuthorization", "DRASchedulerFilterTimeout",
    "DeclarativeValidationBeta",
    "DeploymentReplicaSetTerminatingReplicas", "DetectCacheInconsistency",
    "DisableCPUQuotaWithExclusiveCPUs", "EnvFiles", "ExtendWebSocketsToKubelet", "GracefulNodeShutdown",
    "GracefulNodeShutdownBasedOnPodPriority", "HPAConfigurableTolerance", "HostnameOverride",
    "InPlacePodLevelResourcesVerticalScaling", "InPlacePodVerticalScalingInitContainers",
    "KubeletCrashLoopBackOffMax", "KubeletEnsureSecretPulledImages", "KubeletPodResourcesListUseActivePods",
    "KubeletSeparateDiskGC", "KubeletServiceAccountTokenForCredentialProviders", "ListFromCacheSnapshot",
    "LoggingBetaOptions", "MatchLabelKeysInPodTopologySpread",
    "MatchLabelKeysInPodTopologySpreadSelectorMerge", "MutablePodResourcesForSuspendedJobs",
    "MutableSchedulingDirectivesForSuspendedJobs", "MutatingAdmissionPolicy", "NodeDeclaredFeatures",
    "NominatedNodeNameForExpectation", "OpenAPIEnums", "OpportunisticBatching", "PLEGOnDemandRelist",
    "PodDeletionCost", "PodLevelResources", "PodReadyToStartContainersCondition",
    "PodTopologyLabelsAdmission", "PortForwardWebsockets", "PreventStaticPodAPIReferences",
    "RelaxedServiceNameValidation", "ReloadKubeletClientCAFile", "ReloadKubeletServerCertificateFile",
    "RemoteRequestHeaderUID", "ResourceHealthStatus", "ResourceHealthStatusMessage",
    "RestartAllContainersOnContainerExits", "RotateKubeletServerCertificate", "SchedulerAsyncPreemption",
    "SchedulerPopFromBackoffQ", "ServiceAccountNodeAudienceRestriction", "ServiceCIDRStatusFieldWiping",
    "SizeBasedListCostEstimate", "StaleControllerConsistencyDaemonSet", "StaleControllerConsistencyJob",
    "StaleControllerConsistencyReplicaSet", "StaleControllerConsistencyStatefulSet",
    "StatefulSetSemanticRevisionComparison", "StorageNamespaceIndex", "StorageVersionHash",
    "StrictIPCIDRValidation", "StructuredAuthenticationConfigurationEgressSelector",
    "StructuredAuthenticationConfigurationJWKSMetrics", "TokenRequestServiceAccountUIDValidation",
    "TopologyManagerPolicyBetaOptions", "TranslateStreamCloseWebsocketRequests",
    "UnauthenticatedHTTP2DOSMitigation", "UnknownVersionInteroperabilityProxy",
    "WatchCacheInitializationPostStartHook", "WindowsGracefulNodeShutdown",
];

/// Gates that are off by default and cannot be switched here. `AllAlpha` stands for all alpha gates.
#[rustfmt::skip]
pub(super) const OFF: &[&str] = &[
    "APIServingWithRoutine", "AllAlpha", "AllowDNSOnlyNodeCSR",
    "AllowInsecureKubeletCertificateSigningRequests",
    "CBORServingAndStorage", "CRIListStreaming", "CSIVolumeHealth",
    "ChangeContainerStatusOnKubeletRestart", "CloudControllerManagerWatchBasedRoutesReconciliation",
    "CloudControllerManagerWebhook", "ClusterTrustBundle", "ClusterTrustBundleProjection",
    "ConcurrentWatchObjectDecode", "ContainerStopSignals",
    "ControllerManagerReleaseLeaderElectionLockOnExit", "CoordinatedLeaderElection",
    "CrossNamespaceVolumeDataSource", "DRADeviceTaintRules", "DRAListTypeAttributes",
    "DRANodeAllocatableResources", "DRAResourcePoolStatus", "DRAWorkloadResourceClaims",
    "DeclarativeValidationTakeover", "HPAScaleToZero", "ImageVolumeWithDigest",
    "InPlacePodVerticalScalingExclusiveCPUs", "InPlacePodVerticalScalingExclusiveMemory", "KMSv1",
    "KubeletInUserNamespace", "KubeletRegistrationGetOnExistsOnly",
    "LocalStorageCapacityIsolationFSQuotaMonitoring", "LoggingAlphaOptions",
    "ManifestBasedAdmissionControlConfig", "MemoryQoS", "MutablePVNodeAffinity", "NativeHistograms",
    "PersistentVolumeClaimUnusedSinceTime", "PodAndContainerStatsFromCRI", "PodCertificateRequest",
    "PodLevelResourceManagers", "PodLogsQuerySplitStreams", "PodsAPI", "QOSReserved",
    "ReduceDefaultCrashLoopBackOffDecay", "RuntimeClassInImageCriApi", "SELinuxMount",
    "SchedulerAsyncAPICalls", "ShardedListAndWatch", "StorageCapacityScoring", "StorageVersionAPI",
    "TaintTolerationComparisonOperators", "TopologyAwareWorkloadScheduling",
    "TopologyManagerPolicyAlphaOptions", "UserNamespacesHostNetworkSupport", "VolumeLimitScaling",
    "WindowsCPUAndMemoryAffinity", "WindowsHostNetwork", "WorkloadAwarePreemption", "WorkloadWithJob",
];

/// Gates whose stage differs from the stage of their list in the metric (`LISTS` in `metrics.rs`).
#[rustfmt::skip]
pub(super) const STAGES: &[(&str, &[&str])] = &[
    ("", &[
        "AllowServiceExternalIPs", "CustomCPUCFSQuotaPeriod", "DRAPrioritizedList", "MutatingAdmissionPolicy",
    ]),
    ("BETA", &[
        "ClusterTrustBundle", "ClusterTrustBundleProjection", "ConcurrentWatchObjectDecode",
        "CoordinatedLeaderElection", "DRADeviceTaintRules", "LocalStorageCapacityIsolationFSQuotaMonitoring",
        "PodCertificateRequest", "SELinuxMount", "SchedulerAsyncAPICalls", "StorageVersionMigrator",
    ]),
    ("DEPRECATED", &[
        "AggregatedDiscoveryRemoveBetaType", "AllowDNSOnlyNodeCSR",
        "AllowInsecureKubeletCertificateSigningRequests", "ChangeContainerStatusOnKubeletRestart",
        "DeclarativeValidationTakeover", "DisableCPUQuotaWithExclusiveCPUs", "DisableNodeKubeProxyVersion",
        "KMSv1", "KubeletPodResourcesListUseActivePods", "KubeletRegistrationGetOnExistsOnly",
        "ServiceCIDRStatusFieldWiping", "StorageNamespaceIndex", "WindowsHostNetwork",
    ]),
];

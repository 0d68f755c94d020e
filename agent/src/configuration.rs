//! The agent's settings in the form of a `KubeletConfiguration`, for `/configz` of the kubelet API.
//!
//! Only fields that hold for this agent are present. No field contains a secret.

use std::num::NonZero;
use std::time::Duration;

use serde_json::{Value, json};

use crate::config::{AgentConfig, Identity};
use crate::image_verification::AllowedImages;
use crate::node::Threshold;
use crate::pod_policy::{AllowedSysctl, PullSlots};
use crate::request_rate::RequestRate;
use crate::source::StaticPodSources;

/// The configuration as clients of the kubelet expect it (`kubelet.config.k8s.io/v1beta1`).
pub(crate) fn shown(config: &AgentConfig) -> Value {
    let managers = &config.resource_managers;
    let mut shown = json!({
        "kind": "KubeletConfiguration",
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "enableServer": true,
        "address": config.kubelet_listen.ip(),
        "port": config.kubelet_listen.port(),
        "readOnlyPort": 0,
        "healthzPort": config.healthz.map_or(0, |address| address.port()),
        "authentication": {
            "anonymous": {"enabled": false},
            "webhook": {"enabled": true, "cacheTTL": "2m0s"},
            "x509": {},
        },
        "authorization": {
            "mode": "Webhook",
            "webhook": {"cacheAuthorizedTTL": "5m0s", "cacheUnauthorizedTTL": "30s"},
        },
        "registerNode": config.register_node,
        "clusterDomain": config.cluster_domain,
        "clusterDNS": config.cluster_dns,
        "resolvConf": config.resolv_conf,
        "maxPods": config.max_pods,
        "podsPerCore": config.pods_per_core,
        "rotateCertificates": rotates(&config.identity),
        "podPidsLimit": config.pod_pids_limit.unwrap_or(-1),
        "cgroupRoot": config.cgroup_root,
        "cgroupDriver": config.cgroup_driver.to_string(),
        "podLogsDir": config.pod_log_dir,
        "nodeLeaseDurationSeconds": config.lease_seconds,
        "evictionHard": {
            "memory.available": threshold(config.eviction.memory_available),
            "nodefs.available": threshold(config.eviction.nodefs_available),
            "nodefs.inodesFree": threshold(config.eviction.nodefs_inodes_free),
            "pid.available": threshold(config.eviction.pid_available),
        },
        "systemReserved": config.system_reserved,
        "kubeReserved": config.kube_reserved,
        "cpuManagerPolicy": if managers.cpu.is_some() { "static" } else { "none" },
        "memoryManagerPolicy": if managers.memory.is_some() { "Static" } else { "None" },
        "topologyManagerPolicy": managers.topology.policy.name(),
        "topologyManagerScope": if managers.topology.aligns_pods { "pod" } else { "container" },
    });
    add_images(config, &mut shown);
    add_pod_policy(config, &mut shown);
    add_pulls(&config.pod_policy.pull_slots, &mut shown);
    add_shutdown_periods(config, &mut shown);
    add_static_pods(&config.static_pods, &mut shown);
    if let Some(client_ca) = &config.client_ca {
        shown["authentication"]["x509"]["clientCAFile"] = json!(client_ca);
    }
    shown
}

/// Adds the settings of image garbage collection and of image verification.
fn add_images(config: &AgentConfig, shown: &mut Value) {
    let seconds = |time: Duration| json!(format!("{}s", time.as_secs()));
    let policy = &config.image_gc;
    shown["imageGCHighThresholdPercent"] = json!(policy.high_threshold);
    shown["imageGCLowThresholdPercent"] = json!(policy.low_threshold);
    shown["imageMinimumGCAge"] = seconds(policy.minimum_age);
    shown["imageMaximumGCAge"] = seconds(policy.maximum_age);
    shown["imagePullCredentialsVerificationPolicy"] = json!(config.image_verification.name());
    let allowed = config.image_verification.allowed();
    if !allowed.is_empty() {
        let allowed: Vec<&str> = allowed.iter().map(AllowedImages::as_str).collect();
        shown["preloadedImagesVerificationAllowlist"] = json!(allowed);
    }
}

/// Adds the settings that apply to all pods, and those of the kubelet API and of the Node object.
fn add_pod_policy(config: &AgentConfig, shown: &mut Value) {
    let policy = &config.pod_policy;
    let wait = format!("{}s", policy.max_restart_wait.as_secs_f64());
    shown["seccompDefault"] = json!(policy.seccomp_default);
    shown["enableDebuggingHandlers"] = json!(config.handlers.debugging);
    shown["enableSystemLogHandler"] = json!(config.handlers.system_log);
    shown["cpuCFSQuota"] = json!(policy.cpu_quota);
    shown["crashLoopBackOff"] = json!({"maxContainerRestartPeriod": wait});
    if !policy.allowed_sysctls.is_empty() {
        let allowed: Vec<&str> = policy.allowed_sysctls.iter().map(AllowedSysctl::as_str).collect();
        shown["allowedUnsafeSysctls"] = json!(allowed);
    }
    if !config.tls.cipher_suites.is_empty() {
        shown["tlsCipherSuites"] = json!(config.tls.cipher_suites);
    }
    shown["tlsMinVersion"] = json!(if config.tls.requires_tls13 { "VersionTLS13" } else { "VersionTLS12" });
    if let Some(id) = &config.provider_id {
        shown["providerID"] = json!(id);
    }
    shown["nodeStatusMaxImages"] = config.reports.max_images.map_or(json!(-1), |max| json!(max));
    add_rate(shown, "eventRecordQPS", "eventBurst", config.reports.event_rate);
    add_rate(shown, "registryPullQPS", "registryBurst", policy.pull_rate.rate());
}

/// Adds the limit of image pulls at the same time. A limit of 1 is `serializeImagePulls`. Without a limit
/// `maxParallelImagePulls` is absent.
fn add_pulls(slots: &PullSlots, shown: &mut Value) {
    let limit = slots.limit();
    shown["serializeImagePulls"] = json!(limit == Some(NonZero::<u32>::MIN));
    if let Some(limit) = limit {
        shown["maxParallelImagePulls"] = json!(limit.get());
    }
}

/// Whether the agent renews the node's client certificate.
fn rotates(identity: &Identity) -> bool {
    matches!(identity, Identity::Joined(_))
}

/// Adds a rate limit under the names of its two fields. As in the kubelet, 0 requests per second means no limit.
fn add_rate(shown: &mut Value, per_second: &str, burst: &str, rate: Option<RequestRate>) {
    shown[per_second] = json!(rate.map_or(0, |rate| rate.per_second.get()));
    if let Some(rate) = rate {
        shown[burst] = json!(rate.burst.get());
    }
}

/// Adds the sources of static pods. Headers of requests, which may be secrets, are left out.
fn add_static_pods(sources: &StaticPodSources, shown: &mut Value) {
    if let Some(path) = &sources.path {
        shown["staticPodPath"] = json!(path);
    }
    if let Some(url) = &sources.url {
        shown["staticPodURL"] = json!(url.shown());
        shown["httpCheckFrequency"] = json!(format!("{}s", url.interval().as_secs()));
    }
}

/// Adds the periods of pods at a shutdown of the machine. Without periods the field is absent.
fn add_shutdown_periods(config: &AgentConfig, shown: &mut Value) {
    if !config.shutdown_periods.is_empty() {
        let periods = config.shutdown_periods.all().iter();
        let periods = periods
            .map(|period| json!({"priority": period.priority, "shutdownGracePeriodSeconds": period.seconds}));
        shown["shutdownGracePeriodByPodPriority"] = periods.collect();
    }
}

/// A threshold as the kubelet writes it: a quantity or a percentage.
fn threshold(threshold: Threshold) -> String {
    match threshold {
        Threshold::Amount(amount) => amount.to_string(),
        Threshold::BasisPoints(points) if points % 100 == 0 => format!("{}%", points / 100),
        Threshold::BasisPoints(points) => format!("{}.{:02}%", points / 100, points % 100),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::certificate_files::CertificateFiles;

    #[test]
    fn pulls_are_serialized_by_a_limit_of_one() {
        let of = |limit: u32| {
            let mut shown = json!({});
            add_pulls(&PullSlots::new(NonZero::new(limit)), &mut shown);
            shown
        };
        assert_eq!(of(0), json!({"serializeImagePulls": false}));
        assert_eq!(of(1), json!({"serializeImagePulls": true, "maxParallelImagePulls": 1}));
        assert_eq!(of(7), json!({"serializeImagePulls": false, "maxParallelImagePulls": 7}));
    }

    #[test]
    fn certificates_in_files_are_not_renewed() {
        assert!(!rotates(&Identity::Files(CertificateFiles::default())));
    }

    #[test]
    fn thresholds_are_quantities_or_percentages() {
        assert_eq!(threshold(Threshold::Amount(100)), "100");
        assert_eq!(threshold(Threshold::percent(10)), "10%");
        assert_eq!(threshold(Threshold::BasisPoints(1205)), "12.05%");
    }
}

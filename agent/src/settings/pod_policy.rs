//! Settings that apply to all pods. Names and rules are those of the kubelet.

use std::num::NonZero;
use std::ops::RangeInclusive;
use std::time::Duration;

use coracle_agent::{PodPolicy, PullSlots, RateLimit, RequestRate};

use super::NodeSettings;

/// Valid values of `max-container-restart-period`, as in upstream's `ValidateKubeletConfiguration`.
const RESTART_WAITS: RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_secs(300);

/// Checks the settings.
pub(super) fn decide(node: &NodeSettings) -> anyhow::Result<PodPolicy> {
    let max_restart_wait = node.max_container_restart_period.0;
    let pulls = parallel_pulls(node.serialize_image_pulls, node.max_parallel_image_pulls);
    let problems: Vec<&str> = [
        pulls.as_ref().err().copied(),
        (!RESTART_WAITS.contains(&max_restart_wait))
            .then_some("max-container-restart-period must be from 1s to 5m"),
    ]
    .into_iter()
    .flatten()
    .collect();
    anyhow::ensure!(problems.is_empty(), "{}", problems.join("; "));
    Ok(PodPolicy {
        seccomp_default: node.seccomp_default,
        allowed_sysctls: node.allowed_unsafe_sysctls.clone(),
        cpu_quota: node.cpu_cfs_quota,
        pull_slots: PullSlots::new(pulls.unwrap_or_default()),
        pull_rate: RateLimit::new(pull_rate(node)),
        max_restart_wait,
    })
}

/// Maximum number of pulls at the same time. `None`: no limit.
fn parallel_pulls(
    is_serial: bool,
    limit: Option<NonZero<u32>>,
) -> Result<Option<NonZero<u32>>, &'static str> {
    match limit {
        Some(limit) if is_serial && limit.get() > 1 => {
            Err("max-parallel-image-pulls must be 1 with serialize-image-pulls")
        }
        None if is_serial => Ok(Some(NonZero::<u32>::MIN)),
        limit => Ok(limit),
    }
}

/// Maximum rate of image pulls. `None`: no limit.
fn pull_rate(node: &NodeSettings) -> Option<RequestRate> {
    NonZero::new(node.registry_qps).map(|per_second| RequestRate { per_second, burst: node.registry_burst })
}

/// Maximum number of pods of a node with this number of CPUs.
pub(super) fn max_pods(max_pods: u32, per_core: u32, cpus: u32) -> u32 {
    match per_core {
        0 => max_pods,
        per_core => max_pods.min(per_core.saturating_mul(cpus)),
    }
}

/// Number of online CPUs, which is the CPU capacity of the Node object.
pub(super) fn cpus() -> u32 {
    let online = nix::unistd::sysconf(nix::unistd::SysconfVar::_NPROCESSORS_ONLN).ok().flatten();
    online.and_then(|online| u32::try_from(online).ok()).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::super::tests::node_settings;
    use super::*;

    fn of(text: &str) -> Result<PodPolicy, String> {
        decide(&node_settings(text)?).map_err(|error| error.to_string())
    }

    #[test]
    fn containers_are_unconfined_and_pulls_are_parallel_by_default() {
        let policy = of("").unwrap();
        assert!(!policy.seccomp_default && policy.allowed_sysctls.is_empty() && policy.cpu_quota);
        assert_eq!(policy.max_restart_wait, Duration::from_secs(300));
        assert_eq!(pull_rate(&node_settings("").unwrap()), None);
        let rate = pull_rate(&node_settings("registry-qps = 2").unwrap()).unwrap();
        assert_eq!((rate.per_second.get(), rate.burst.get()), (2, 10));
        assert_eq!(parallel_pulls(false, None), Ok(None));
        assert_eq!(parallel_pulls(true, None), Ok(NonZero::new(1)));
        assert_eq!(parallel_pulls(true, NonZero::new(1)), Ok(NonZero::new(1)));
        assert_eq!(parallel_pulls(false, NonZero::new(7)), Ok(NonZero::new(7)));
    }

    #[test]
    fn values_that_the_kubelet_refuses_are_refused_together() {
        let text = "serialize-image-pulls = true\nmax-parallel-image-pulls = 2\nmax-container-restart-period = \"6m\"";
        let error = of(text).unwrap_err();
        for part in ["max-parallel-image-pulls must be 1 with serialize-image-pulls", "must be from 1s to 5m"]
        {
            assert!(error.contains(part), "{part} is not in: {error}");
        }
        for wrong in [
            "max-container-restart-period = \"999ms\"",
            "max-parallel-image-pulls = 0",
            "allowed-unsafe-sysctls = [\"kernel.core_pattern\"]",
            "allowed-unsafe-sysctls = [\"*\"]",
        ] {
            assert!(of(wrong).is_err(), "{wrong}");
        }
        assert!(of("max-container-restart-period = \"1s\"").is_ok());
    }

    #[test]
    fn the_number_of_pods_is_limited_by_the_cpus() {
        assert_eq!(max_pods(110, 0, 2), 110);
        assert_eq!(max_pods(110, 10, 2), 20);
        assert_eq!(max_pods(110, 100, 2), 110);
        assert_eq!(max_pods(u32::MAX, u32::MAX, 2), u32::MAX);
        assert!(cpus() > 0);
    }
}

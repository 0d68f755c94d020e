//! Settings of the node that apply to all pods. Pure, except the limits of pulls.

use std::num::NonZero;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::request_rate::RateLimit;

/// Maximum length of a sysctl's name, as upstream.
const SYSCTL_MAX: usize = 253;
const SYSCTL_FORM: &str =
    "expected the name of a sysctl such as net.core.somaxconn, or the start of names with * at its end";
const NOT_NAMESPACED: &str =
    "the sysctl has no namespace; use kernel.shm*, kernel.msg*, kernel.sem, fs.mqueue.* or net.*";

/// Settings of the node that apply to all pods. Each field names its setting of KubeletConfiguration.
#[derive(Clone, Debug)]
pub struct PodPolicy {
    /// Whether containers without a seccomp profile have the runtime's default profile: `seccompDefault`.
    pub seccomp_default: bool,
    /// Unsafe sysctls that pods may set: `allowedUnsafeSysctls`.
    pub allowed_sysctls: Vec<AllowedSysctl>,
    /// Whether CPU limits are enforced by quotas: `cpuCFSQuota`.
    pub cpu_quota: bool,
    /// Limit of concurrent image pulls: `serializeImagePulls` and `maxParallelImagePulls`.
    pub pull_slots: PullSlots,
    /// Maximum rate of image pulls: `registryPullQPS` and `registryBurst`. A pull above it fails.
    pub pull_rate: RateLimit,
    /// Maximum wait before a container that has crashed starts again: `crashLoopBackOff.maxContainerRestartPeriod`.
    pub max_restart_wait: Duration,
}

/// An entry of `allowedUnsafeSysctls`, with dots as separators: the name of a sysctl, or a prefix of names and `*`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AllowedSysctl(String);

/// The namespace of a sysctl.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SysctlNamespace {
    Ipc,
    Network,
}

/// Limit of concurrent image pulls. Clones share the limit.
#[derive(Clone, Debug, Default)]
pub struct PullSlots {
    limit: Option<NonZero<u32>>,
    slots: Option<Arc<Semaphore>>,
}

// === impl AllowedSysctl ===

impl AllowedSysctl {
    /// The entry as text.
    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether a pod may set the sysctl with this name, which has dots as separators.
    pub(crate) fn permits(&self, name: &str) -> bool {
        // An empty part, as in `a..b`, could lead out of the namespace's directory in /proc/sys.
        let is_inside = name.split(['.', '/']).all(|part| !part.is_empty());
        is_inside
            && match self.0.strip_suffix('*') {
                Some(start) => name.starts_with(start),
                None => name == self.0,
            }
    }
}

impl FromStr for AllowedSysctl {
    type Err = String;

    /// Refuses a sysctl without a namespace, as `NewAllowlist` of upstream's `pkg/kubelet/sysctl`.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let start = text.strip_suffix('*').unwrap_or(text);
        let is_plain =
            |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-_./".contains(&byte);
        if start.is_empty() || text.len() > SYSCTL_MAX || !start.bytes().all(is_plain) {
            return Err(SYSCTL_FORM.to_owned());
        }
        let name = with_dots(text);
        match SysctlNamespace::of(name.strip_suffix('*').unwrap_or(&name)) {
            Some(_) => Ok(Self(name)),
            None => Err(NOT_NAMESPACED.to_owned()),
        }
    }
}

// === impl SysctlNamespace ===

impl SysctlNamespace {
    /// The namespace of a sysctl, or of all sysctls with a prefix. `None` for sysctls without a namespace. Source:
    /// `NamespacedBy` of upstream's `component-helpers/node/util/sysctl`.
    pub(crate) fn of(name: &str) -> Option<Self> {
        let starts = |starts: &[&str]| starts.iter().any(|start| name.starts_with(start));
        if name == "kernel.sem" || starts(&["kernel.shm", "kernel.msg", "fs.mqueue."]) {
            return Some(Self::Ipc);
        }
        starts(&["net."]).then_some(Self::Network)
    }
}

/// Converts the name of a sysctl to dots as separators. In a name whose first separator is a slash, slashes and dots
/// are swapped.
pub(crate) fn with_dots(name: &str) -> String {
    let slash_first = name.find('/').is_some_and(|slash| name.find('.').is_none_or(|dot| slash < dot));
    if !slash_first {
        return name.to_owned();
    }
    let swap = |c| match c {
        '/' => '.',
        '.' => '/',
        other => other,
    };
    name.chars().map(swap).collect()
}

// === impl PullSlots ===

impl PullSlots {
    /// At most `limit` pulls run at the same time. `None`: no limit.
    #[must_use]
    pub fn new(limit: Option<NonZero<u32>>) -> Self {
        let slots = |limit: NonZero<u32>| {
            usize::try_from(limit.get()).unwrap_or(usize::MAX).min(Semaphore::MAX_PERMITS)
        };
        Self { limit, slots: limit.map(|limit| Arc::new(Semaphore::new(slots(limit)))) }
    }

    /// Maximum number of pulls at the same time. None means no limit.
    pub(crate) fn limit(&self) -> Option<NonZero<u32>> {
        self.limit
    }

    /// Waits until fewer pulls than the limit run. Pulls start in the order of their calls. The pull counts until the
    /// returned permit is dropped. `None` without a limit.
    pub(crate) async fn take(&self) -> Option<OwnedSemaphorePermit> {
        // The semaphore is never closed.
        Arc::clone(self.slots.as_ref()?).acquire_owned().await.ok()
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    fn allowed(text: &str) -> AllowedSysctl {
        text.parse().unwrap()
    }

    #[test]
    fn an_unsafe_sysctl_is_allowed_by_its_name_or_the_start_of_its_name() {
        let forward = allowed("net.ipv4.ip_forward");
        assert!(forward.permits("net.ipv4.ip_forward") && !forward.permits("net.ipv4.ip_forward2"));
        assert_eq!(allowed("net/ipv4/ip_forward"), forward);
        let messages = allowed("kernel.msg*");
        assert!(messages.permits("kernel.msgmax") && !messages.permits("kernel.shmmax"));
        assert!(allowed("net.*").permits("net.core.somaxconn"));
    }

    #[test]
    fn a_name_that_leads_out_of_a_namespace_is_not_allowed() {
        for name in ["net/../kernel/core_pattern", "net/ipv4/../../kernel/core_pattern", "net..x", "net."] {
            assert!(!allowed("net.*").permits(&with_dots(name)), "{name}");
        }
    }

    #[test]
    fn sysctls_of_the_whole_machine_cannot_be_allowed() {
        for text in
            ["kernel.core_pattern", "kernel.*", "vm.swappiness", "*", "", "net*", "fs.*", "kernel.sem2"]
        {
            assert!(text.parse::<AllowedSysctl>().is_err(), "{text}");
        }
        for text in ["net.core.*.x", "NET.core", "net.core.somaxconn\n"] {
            let error = text.parse::<AllowedSysctl>().unwrap_err();
            assert!(error.starts_with("expected the name of a sysctl"), "{text}: {error}");
        }
        assert!("kernel.sem".parse::<AllowedSysctl>().is_ok());
    }

    #[test]
    fn pulls_beyond_the_limit_wait_for_the_end_of_another_pull() {
        let slots = PullSlots::new(NonZero::new(2));
        let first = slots.take().now_or_never().flatten();
        let second = slots.clone().take().now_or_never().flatten();
        assert!(first.is_some() && second.is_some());
        assert!(slots.take().now_or_never().is_none(), "a third pull waits");
        drop(first);
        assert!(slots.take().now_or_never().is_some());
        let unlimited = PullSlots::default();
        assert!(unlimited.take().now_or_never().is_some_and(|slot| slot.is_none()));
        // More slots than a semaphore can have.
        assert!(PullSlots::new(NonZero::new(u32::MAX)).take().now_or_never().flatten().is_some());
    }
}

//! Checks sysctls. A sysctl must be safe, or allowed by the node's settings. The pod must have its own namespace for
//! the sysctl.

use super::input::{AdmissionInput, refuse};
use crate::pod::state::Verdict;
use crate::pod_policy::{AllowedSysctl, SysctlNamespace, with_dots};

/// Upstream's safe sysctls: namespaced, without effect on other pods.
const SAFE: [&str; 12] = [
    "kernel.shm_rmid_forced",
    "net.ipv4.ip_local_port_range",
    "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.ping_group_range",
    "net.ipv4.tcp_fin_timeout",
    "net.ipv4.tcp_keepalive_intvl",
    "net.ipv4.tcp_keepalive_probes",
    "net.ipv4.tcp_keepalive_time",
    "net.ipv4.tcp_rmem",
    "net.ipv4.tcp_syncookies",
    "net.ipv4.tcp_wmem",
];

pub(super) fn check(input: &AdmissionInput<'_>) -> Result<(), Verdict> {
    let Some(spec) = &input.pod.spec else { return Ok(()) };
    let sysctls = spec.security_context.iter().flat_map(|c| c.sysctls.iter().flatten());
    for sysctl in sysctls {
        let name = with_dots(&sysctl.name);
        let forbidden = |why: &str| {
            let message = format!("Pod was rejected: forbidden sysctl: {name:?} {why}");
            refuse("SysctlForbidden", message)
        };
        if !SAFE.contains(&name.as_str()) && !is_allowed(input.allowed_sysctls, &name) {
            return Err(forbidden("not allowlisted"));
        }
        let namespace = SysctlNamespace::of(&name);
        if spec.host_network == Some(true) && namespace == Some(SysctlNamespace::Network) {
            return Err(forbidden("not allowed with host net enabled"));
        }
        if spec.host_ipc == Some(true) && namespace == Some(SysctlNamespace::Ipc) {
            return Err(forbidden("not allowed with host ipc enabled"));
        }
    }
    Ok(())
}

fn is_allowed(allowed: &[AllowedSysctl], name: &str) -> bool {
    allowed.iter().any(|allowed| allowed.permits(name))
}

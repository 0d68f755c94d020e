//! Checks sysctls: only sysctls that are namespaced and safe are accepted.

use super::input::{AdmissionInput, refuse};
use crate::pod::state::Verdict;

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
        let name = dotted(&sysctl.name);
        let forbidden = |why: &str| {
            let message = format!("Pod was rejected: forbidden sysctl: {name:?} {why}");
            refuse("SysctlForbidden", message)
        };
        if !SAFE.contains(&name.as_str()) {
            return Err(forbidden("not allowlisted"));
        }
        if spec.host_network == Some(true) && name.starts_with("net.") {
            return Err(forbidden("not allowed with host net enabled"));
        }
        if spec.host_ipc == Some(true) && name.starts_with("kernel.shm") {
            return Err(forbidden("not allowed with host ipc enabled"));
        }
    }
    Ok(())
}

/// Normalizes a name to dots as separators. Names with slashes are accepted.
fn dotted(name: &str) -> String {
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

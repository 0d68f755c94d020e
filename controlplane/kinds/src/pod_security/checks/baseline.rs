//! Checks of the baseline: namespaces, capabilities, ports, probes, sysctls.

use serde_json::Value;

use super::{Pod, SortedTexts, Violation, listed, plural, quoted, setters, violation};

const CAPABILITIES: &[&str] = &[
    "AUDIT_WRITE",
    "CHOWN",
    "DAC_OVERRIDE",
    "FOWNER",
    "FSETID",
    "KILL",
    "MKNOD",
    "NET_BIND_SERVICE",
    "SETFCAP",
    "SETGID",
    "SETPCAP",
    "SETUID",
    "SYS_CHROOT",
];

/// The allowed sysctls. Each version adds the sysctls of its row.
const SYSCTLS: &[(u32, &[&str])] = &[
    (
        0,
        &[
            "kernel.shm_rmid_forced",
            "net.ipv4.ip_local_port_range",
            "net.ipv4.tcp_syncookies",
            "net.ipv4.ping_group_range",
            "net.ipv4.ip_unprivileged_port_start",
        ],
    ),
    (27, &["net.ipv4.ip_local_reserved_ports"]),
    (
        29,
        &[
            "net.ipv4.tcp_keepalive_time",
            "net.ipv4.tcp_fin_timeout",
            "net.ipv4.tcp_keepalive_intvl",
            "net.ipv4.tcp_keepalive_probes",
        ],
    ),
    (32, &["net.ipv4.tcp_rmem", "net.ipv4.tcp_wmem"]),
];

pub(super) fn capabilities(pod: &Pod<'_>) -> Option<Violation> {
    let mut wrong = SortedTexts::new();
    let names = pod.named(|container| {
        let added = container["securityContext"]["capabilities"]["add"].as_array().into_iter().flatten();
        let added = added.filter_map(Value::as_str).filter(|name| !CAPABILITIES.contains(name));
        let added: Vec<String> = added.map(str::to_owned).collect();
        wrong.extend(added.iter().cloned());
        !added.is_empty()
    });
    if names.is_empty() {
        return None;
    }
    let detail =
        format!("{} must not include {} in securityContext.capabilities.add", listed(&names), quoted(&wrong));
    violation("non-default capabilities", detail)
}

pub(super) fn host_namespaces(pod: &Pod<'_>) -> Option<Violation> {
    let fields = ["hostNetwork", "hostPID", "hostIPC"];
    let set = fields.iter().filter(|field| pod.spec[**field] == true);
    let set: Vec<String> = set.map(|field| format!("{field}=true")).collect();
    if set.is_empty() { None } else { violation("host namespaces", set.join(", ")) }
}

pub(super) fn host_ports(pod: &Pod<'_>) -> Option<Violation> {
    let mut ports = SortedTexts::new();
    let names = pod.named(|container| {
        let all = container["ports"].as_array().into_iter().flatten();
        let used = all.filter_map(|port| port["hostPort"].as_i64()).filter(|port| *port != 0);
        let used: Vec<String> = used.map(|port| port.to_string()).collect();
        ports.extend(used.iter().cloned());
        !used.is_empty()
    });
    if names.is_empty() {
        return None;
    }
    let detail = format!(
        "{} {} {} {}",
        listed(&names),
        plural(names.len(), "uses", "use"),
        plural(ports.len(), "hostPort", "hostPorts"),
        ports.iter().map(String::as_str).collect::<Vec<_>>().join(", ")
    );
    violation("hostPort", detail)
}

/// Checks the field `host` of probes and lifecycle hooks. With `host`, the node connects to any address.
pub(super) fn host_probes(pod: &Pod<'_>) -> Option<Violation> {
    let mut hosts = SortedTexts::new();
    let names = pod.named(|container| {
        let lifecycle = &container["lifecycle"];
        let handlers = [
            &container["livenessProbe"],
            &container["readinessProbe"],
            &container["startupProbe"],
            &lifecycle["postStart"],
            &lifecycle["preStop"],
        ];
        let used = handlers.iter().flat_map(|handler| {
            ["httpGet", "tcpSocket"].into_iter().filter_map(|action| handler[action]["host"].as_str())
        });
        let used: Vec<String> = used.filter(|host| !host.is_empty()).map(str::to_owned).collect();
        hosts.extend(used.iter().cloned());
        !used.is_empty()
    });
    if names.is_empty() {
        return None;
    }
    let names: Vec<String> = names.into_iter().collect::<SortedTexts>().into_iter().collect();
    let detail = format!(
        "{} {} {} {}",
        listed(&names),
        plural(names.len(), "uses", "use"),
        plural(hosts.len(), "probe or lifecycle host", "probe or lifecycle hosts"),
        quoted(&hosts)
    );
    violation("probe or lifecycle host", detail)
}

pub(super) fn privileged(pod: &Pod<'_>) -> Option<Violation> {
    let names = pod.named(|container| container["securityContext"]["privileged"] == true);
    if names.is_empty() {
        return None;
    }
    violation("privileged", format!("{} must not set securityContext.privileged=true", listed(&names)))
}

pub(super) fn proc_mount(pod: &Pod<'_>) -> Option<Violation> {
    let mut types = SortedTexts::new();
    let names = pod.named(|container| {
        let mount = &container["securityContext"]["procMount"];
        let wrong = !mount.is_null() && mount != "Default";
        if wrong {
            types.insert(mount.as_str().unwrap_or_default().to_owned());
        }
        wrong
    });
    if names.is_empty() {
        return None;
    }
    let detail = format!("{} must not set securityContext.procMount to {}", listed(&names), quoted(&types));
    violation("procMount", detail)
}

pub(super) fn proc_mount_1_35(pod: &Pod<'_>) -> Option<Violation> {
    if pod.has_user_namespace() { None } else { proc_mount(pod) }
}

pub(super) fn sysctls(pod: &Pod<'_>) -> Option<Violation> {
    sysctls_at(pod, 0)
}

pub(super) fn sysctls_1_27(pod: &Pod<'_>) -> Option<Violation> {
    sysctls_at(pod, 27)
}

pub(super) fn sysctls_1_29(pod: &Pod<'_>) -> Option<Violation> {
    sysctls_at(pod, 29)
}

pub(super) fn sysctls_1_32(pod: &Pod<'_>) -> Option<Violation> {
    sysctls_at(pod, 32)
}

fn sysctls_at(pod: &Pod<'_>, minor: u32) -> Option<Violation> {
    let allowed = |name: &str| SYSCTLS.iter().any(|(first, names)| *first <= minor && names.contains(&name));
    let all = pod.spec["securityContext"]["sysctls"].as_array().into_iter().flatten();
    let names = all.map(|sysctl| sysctl["name"].as_str().unwrap_or_default());
    let wrong: Vec<&str> = names.filter(|name| !allowed(name)).collect();
    if wrong.is_empty() { None } else { violation("forbidden sysctls", wrong.join(", ")) }
}

pub(super) fn host_process(pod: &Pod<'_>) -> Option<Violation> {
    let is_set = |object: &Value| object["securityContext"]["windowsOptions"]["hostProcess"] == true;
    let who = setters(is_set(pod.spec), &pod.named(is_set));
    if who.is_empty() {
        return None;
    }
    violation("hostProcess", format!("{who} must not set securityContext.windowsOptions.hostProcess=true"))
}

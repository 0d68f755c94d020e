//! Validation of a pod's sysctls: only sysctls of namespaces that the pod owns. Pure.
//!
//! The shim writes them with the node's privileges, so sysctls of the whole machine must be refused here. runc allows the
//! same sysctls, except the numbers of the next objects of System V IPC. Names are accepted with dots or slashes, as in
//! sysctl(8).

/// Sysctls of System V IPC that the kernel keeps for each IPC namespace. Source: `ipc/ipc_sysctl.c` of the kernel. It
/// ignores writes to `auto_msgmni`, which is left out.
const IPC: [&str; 11] = [
    "kernel/msg_next_id",
    "kernel/msgmax",
    "kernel/msgmnb",
    "kernel/msgmni",
    "kernel/sem",
    "kernel/sem_next_id",
    "kernel/shm_next_id",
    "kernel/shmall",
    "kernel/shmmax",
    "kernel/shmmni",
    "kernel/shm_rmid_forced",
];

/// The namespaces that a pod owns.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OwnNamespaces {
    pub(crate) network: bool,
    pub(crate) ipc: bool,
}

/// Refuses a sysctl that affects more than the pod.
pub(crate) fn check(name: &str, own: OwnNamespaces) -> Result<(), String> {
    let path = path(name);
    let inside = !path.starts_with('/') && path.split('/').all(|part| !matches!(part, "" | "." | ".."));
    if !inside {
        return Err(format!("{name:?} is not a sysctl"));
    }
    if IPC.contains(&path.as_str()) || path.starts_with("fs/mqueue/") {
        return allowed(name, own.ipc, "ipc");
    }
    if path.starts_with("net/") {
        return allowed(name, own.network, "network");
    }
    if path == "kernel/domainname" {
        // A pod with its own network has its own uts namespace.
        return allowed(name, own.network, "uts");
    }
    Err(format!("{name:?} is not in a namespace: it would change the whole node"))
}

fn allowed(name: &str, own: bool, namespace: &str) -> Result<(), String> {
    if own { Ok(()) } else { Err(format!("{name:?} needs the pod's own {namespace} namespace")) }
}

/// The path in /proc/sys. In a name whose first separator is a dot, dots and slashes are swapped, as in sysctl(8).
fn path(name: &str) -> String {
    let dots = name.find('.').is_some_and(|dot| name.find('/').is_none_or(|slash| dot < slash));
    let swap = |c| match c {
        '.' => '/',
        '/' => '.',
        other => other,
    };
    if dots { name.chars().map(swap).collect() } else { name.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sysctls_stay_in_the_pods_namespaces() {
        let (all, none) =
            (OwnNamespaces { network: true, ipc: true }, OwnNamespaces { network: false, ipc: false });
        for name in ["net.ipv4.ip_forward", "net/ipv4/ip_forward", "kernel.shmmax", "fs.mqueue.msg_max"] {
            assert!(check(name, all).is_ok(), "{name}");
            assert!(check(name, none).is_err(), "{name}");
        }
        assert!(check("net.ipv4.conf.eth0/1.forwarding", all).is_ok());
        // Those that an agent permits by `kernel.msg*`, `kernel.shm*` and `kernel.sem`.
        for name in ["msg_next_id", "msgmax", "msgmnb", "msgmni", "sem", "shm_next_id", "shm_rmid_forced"] {
            let name = format!("kernel.{name}");
            assert!(check(&name, all).is_ok() && check(&name, none).is_err(), "{name}");
        }
        for name in [
            "kernel.core_pattern",
            "kernel/core_pattern",
            "kernel.auto_msgmni",
            "kernel.msgx",
            "vm.swappiness",
            "net.../x",
            "net/../vm",
            "/net",
            "",
        ] {
            assert!(check(name, all).is_err(), "{name}");
        }
    }
}

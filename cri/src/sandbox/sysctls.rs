//! Which kernel parameters a pod may set: those of the namespaces that are its own. Pure.
//!
//! The shim writes them with the node's rights, so that a parameter of the whole machine must be stopped
//! here. The list is runc's, and sysctl(8)'s two spellings are one.

/// System V IPC, by their names below `kernel.`.
const IPC: [&str; 8] = [
    "kernel/msgmax",
    "kernel/msgmnb",
    "kernel/msgmni",
    "kernel/sem",
    "kernel/shmall",
    "kernel/shmmax",
    "kernel/shmmni",
    "kernel/shm_rmid_forced",
];

/// What a pod has of its own.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Own {
    pub(crate) network: bool,
    pub(crate) ipc: bool,
}

/// Refuses a parameter that reaches beyond the pod.
pub(crate) fn check(name: &str, own: Own) -> Result<(), String> {
    let path = path(name);
    let inside = !path.starts_with('/') && path.split('/').all(|part| !matches!(part, "" | "." | ".."));
    if !inside {
        return Err(format!("{name:?} is no kernel parameter"));
    }
    if IPC.contains(&path.as_str()) || path.starts_with("fs/mqueue/") {
        return allowed(name, own.ipc, "ipc");
    }
    if path.starts_with("net/") {
        return allowed(name, own.network, "network");
    }
    if path == "kernel/domainname" {
        // The pod has a uts namespace of its own when it has a network of its own.
        return allowed(name, own.network, "uts");
    }
    Err(format!("{name:?} is not in a namespace: it would change the whole node"))
}

fn allowed(name: &str, own: bool, namespace: &str) -> Result<(), String> {
    if own { Ok(()) } else { Err(format!("{name:?} needs a {namespace} namespace of the pod's own")) }
}

/// The path below /proc/sys: with dots as separators slashes stand for dots, and the other way round.
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
    fn parameters_stay_in_the_pods_own_namespaces() {
        let (all, none) = (Own { network: true, ipc: true }, Own { network: false, ipc: false });
        for name in ["net.ipv4.ip_forward", "net/ipv4/ip_forward", "kernel.shmmax", "fs.mqueue.msg_max"] {
            assert!(check(name, all).is_ok(), "{name}");
            assert!(check(name, none).is_err(), "{name}");
        }
        assert!(check("net.ipv4.conf.eth0/1.forwarding", all).is_ok());
        for name in [
            "kernel.core_pattern",
            "kernel/core_pattern",
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

//! Which namespaces a pod has of its own. Pure.

use coracle_proto::cri::{LinuxSandboxSecurityContext, NamespaceMode, NamespaceOption, PodSandboxConfig};

/// The pod's namespace options; all its own by default.
pub(crate) fn options(config: &PodSandboxConfig) -> NamespaceOption {
    security(config).and_then(|context| context.namespace_options.clone()).unwrap_or_default()
}

/// The sandbox's security context.
pub(crate) fn security(config: &PodSandboxConfig) -> Option<&LinuxSandboxSecurityContext> {
    config.linux.as_ref()?.security_context.as_ref()
}

/// Whether the pod has a network of its own.
pub(crate) fn own_network(config: &PodSandboxConfig) -> bool {
    options(config).network() != NamespaceMode::Node
}

/// Host name that the pod's processes see.
pub(crate) fn hostname(config: &PodSandboxConfig, node: &str) -> String {
    if own_network(config) && !config.hostname.is_empty() { config.hostname.clone() } else { node.to_owned() }
}

/// Whether the pod has System V IPC and message queues of its own.
pub(crate) fn own_ipc(config: &PodSandboxConfig) -> bool {
    options(config).ipc() != NamespaceMode::Node
}

/// Whose processes a container sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pids {
    Own,
    /// Of the pod's one namespace.
    Pods,
    Nodes,
    /// Of another container.
    Targets,
}

/// What a container asks for, in its pod. The pod's is the node's where the pod has that, as with containerd. Who says
/// nothing in a pod whose containers have their own has its own.
pub(crate) fn pids(pod: &NamespaceOption, asked: Option<&NamespaceOption>) -> Pids {
    match asked.map(NamespaceOption::pid).unwrap_or_default() {
        NamespaceMode::Container => Pids::Own,
        NamespaceMode::Target => Pids::Targets,
        NamespaceMode::Node => Pids::Nodes,
        NamespaceMode::Pod => match pod.pid() {
            NamespaceMode::Pod => Pids::Pods,
            NamespaceMode::Node => Pids::Nodes,
            NamespaceMode::Container | NamespaceMode::Target => Pids::Own,
        },
    }
}

/// Whether all containers share one pid namespace that is the pod's.
pub(crate) fn share_pid(config: &PodSandboxConfig) -> bool {
    options(config).pid() == NamespaceMode::Pod
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pods_processes_are_the_nodes_where_the_pod_has_those() {
        let with = |mode: NamespaceMode| NamespaceOption { pid: mode.into(), ..Default::default() };
        use NamespaceMode::{Container, Node, Pod, Target};
        for (pod, asked, seen) in [
            (Pod, Some(Pod), Pids::Pods),
            (Pod, None, Pids::Pods),
            (Pod, Some(Container), Pids::Own),
            (Pod, Some(Node), Pids::Nodes),
            (Pod, Some(Target), Pids::Targets),
            (Container, Some(Container), Pids::Own),
            (Container, None, Pids::Own),
            (Container, Some(Target), Pids::Targets),
            (Node, Some(Pod), Pids::Nodes),
            (Node, None, Pids::Nodes),
            (Node, Some(Container), Pids::Own),
        ] {
            assert_eq!(pids(&with(pod), asked.map(with).as_ref()), seen, "{asked:?} in {pod:?}");
        }
    }
}

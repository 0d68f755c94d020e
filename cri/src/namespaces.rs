//! The namespaces of a pod. Pure.

use coracle_proto::cri::{LinuxSandboxSecurityContext, NamespaceMode, NamespaceOption, PodSandboxConfig};

/// The pod's namespace options. By default all namespaces are the pod's own.
pub(crate) fn options(config: &PodSandboxConfig) -> NamespaceOption {
    security(config).and_then(|context| context.namespace_options.clone()).unwrap_or_default()
}

/// The sandbox's security context.
pub(crate) fn security(config: &PodSandboxConfig) -> Option<&LinuxSandboxSecurityContext> {
    config.linux.as_ref()?.security_context.as_ref()
}

/// Whether the pod has its own network.
pub(crate) fn own_network(config: &PodSandboxConfig) -> bool {
    options(config).network() != NamespaceMode::Node
}

/// Host name that the pod's processes see.
pub(crate) fn hostname(config: &PodSandboxConfig, node: &str) -> String {
    if own_network(config) && !config.hostname.is_empty() { config.hostname.clone() } else { node.to_owned() }
}

/// Whether the pod has its own System V IPC and message queues.
pub(crate) fn own_ipc(config: &PodSandboxConfig) -> bool {
    options(config).ipc() != NamespaceMode::Node
}

/// Owner of the pid namespace of a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PidNamespace {
    /// The container itself.
    Container,
    /// The pod: its containers share the namespace.
    Pod,
    /// The node.
    Node,
    /// Another container of the pod.
    Target,
}

/// The pid namespace of a container in its pod. The default, `POD`, means the node's namespace if the pod uses the
/// node's namespace, as in containerd. In a pod without a shared namespace, `POD` means the container's own namespace.
pub(crate) fn pids(pod: &NamespaceOption, requested: Option<&NamespaceOption>) -> PidNamespace {
    match requested.map(NamespaceOption::pid).unwrap_or_default() {
        NamespaceMode::Container => PidNamespace::Container,
        NamespaceMode::Target => PidNamespace::Target,
        NamespaceMode::Node => PidNamespace::Node,
        NamespaceMode::Pod => match pod.pid() {
            NamespaceMode::Pod => PidNamespace::Pod,
            NamespaceMode::Node => PidNamespace::Node,
            NamespaceMode::Container | NamespaceMode::Target => PidNamespace::Container,
        },
    }
}

/// Whether all containers share a pid namespace of the pod.
pub(crate) fn share_pid(config: &PodSandboxConfig) -> bool {
    options(config).pid() == NamespaceMode::Pod
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pid_namespaces_of_containers_follow_the_pod() {
        let with = |mode: NamespaceMode| NamespaceOption { pid: mode.into(), ..Default::default() };
        use NamespaceMode::{Container, Node, Pod, Target};
        for (pod, requested, expected) in [
            (Pod, Some(Pod), PidNamespace::Pod),
            (Pod, None, PidNamespace::Pod),
            (Pod, Some(Container), PidNamespace::Container),
            (Pod, Some(Node), PidNamespace::Node),
            (Pod, Some(Target), PidNamespace::Target),
            (Container, Some(Container), PidNamespace::Container),
            (Container, None, PidNamespace::Container),
            (Container, Some(Target), PidNamespace::Target),
            (Node, Some(Pod), PidNamespace::Node),
            (Node, None, PidNamespace::Node),
            (Node, Some(Container), PidNamespace::Container),
        ] {
            assert_eq!(pids(&with(pod), requested.map(with).as_ref()), expected, "{requested:?} in {pod:?}");
        }
    }
}

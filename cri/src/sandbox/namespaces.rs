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

/// Whether the pod has System V IPC and message queues of its own.
pub(crate) fn own_ipc(config: &PodSandboxConfig) -> bool {
    options(config).ipc() != NamespaceMode::Node
}

/// Whether all containers share one pid namespace that is the pod's.
pub(crate) fn share_pid(config: &PodSandboxConfig) -> bool {
    options(config).pid() == NamespaceMode::Pod
}

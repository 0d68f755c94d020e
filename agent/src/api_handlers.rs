//! Handlers of the kubelet API that can be switched off.

/// Which handlers of the kubelet API respond. The names are those of KubeletConfiguration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ApiHandlers {
    /// Logs of containers and of the node, exec, attach, port-forward, checkpoints and settings:
    /// `enableDebuggingHandlers`.
    pub debugging: bool,
    /// Logs of the node: `enableSystemLogHandler`.
    pub system_log: bool,
}

impl Default for ApiHandlers {
    fn default() -> Self {
        Self { debugging: true, system_log: true }
    }
}

//! Handlers of the kubelet API that can be switched off.

/// Enabled handlers of the kubelet API. Each field names its setting of KubeletConfiguration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ApiHandlers {
    /// `enableDebuggingHandlers`: logs of containers and of the node, exec, attach, port-forward, running pods,
    /// checkpoints, `/configz`, `/statusz` and `/flagz`.
    pub debugging: bool,
    /// `enableSystemLogHandler`: logs of the node.
    pub system_log: bool,
}

impl Default for ApiHandlers {
    fn default() -> Self {
        Self { debugging: true, system_log: true }
    }
}

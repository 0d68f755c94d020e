//! Classes of owners of unread bytes, and their shares of the limit.

use super::MAX_BYTES;

/// Classes of owners. Tenants cannot be owners of the first two classes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Class {
    /// Scheduler, controller manager, and service accounts of `kube-system`.
    Components,
    /// Kubelets and service proxies.
    Nodes,
    /// All other owners.
    Others,
}

// === impl Class ===

impl Class {
    pub(super) const ALL: [Self; 3] = [Self::Components, Self::Nodes, Self::Others];

    pub(super) fn of(owner: &str) -> Self {
        match owner {
            "system:kube-scheduler" | "system:kube-controller-manager" => Self::Components,
            "system:kube-proxy" => Self::Nodes,
            _ if owner.starts_with("system:serviceaccount:kube-system:") => Self::Components,
            _ if owner.starts_with("system:node:") => Self::Nodes,
            _ => Self::Others,
        }
    }

    /// Bytes that other classes cannot take from this class. The sum of the shares is the limit.
    pub(super) fn share(self) -> usize {
        match self {
            Self::Components => MAX_BYTES / 2,
            Self::Nodes | Self::Others => MAX_BYTES / 4,
        }
    }
}

//! The version that the node reports.

/// The version of the kubelet that the agent corresponds to; its own version follows the plus.
pub(crate) const KUBELET_VERSION: &str = concat!("v1.36.0+coracle.", env!("CARGO_PKG_VERSION"));

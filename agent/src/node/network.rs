//! Readiness of the pod network, by the CNI operation STATUS: a node whose network cannot take pods is not Ready.
//!
//! External plugins are polled once in each renewal interval of the lease, as a kubelet polls a runtime. Built-in
//! plugins are called when the result may have changed: after a failed attachment, after a change of the network, and
//! while they reject pods.

use std::sync::Arc;
use std::time::Duration;

use coracle_cni::Network;
use coracle_proto::cri;
use ipnetwork::IpNetwork;
use k8s_openapi::api::core::v1::Node;
use tokio::sync::watch;

use crate::runtime::{Runtime, RuntimeError};
use coracle_error_chain::chain;

/// Minimum time between two STATUS calls: many attachments may fail at the same time.
const MIN_POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Timeout of the first STATUS call.
const FIRST_TIMEOUT: Duration = Duration::from_secs(3);

/// The network of the node's pods.
#[derive(Clone)]
pub enum PodNetwork {
    /// This process runs the CNI plugins.
    Cni(Network),
    /// The container runtime runs the CNI plugins, from a CNI configuration of its own.
    Runtime(RuntimeNetwork),
}

/// A network that the container runtime sets up.
#[derive(Clone)]
pub struct RuntimeNetwork {
    runtime: Arc<dyn Runtime>,
    /// Never sent: the CRI has no such notification.
    status_changes: watch::Sender<()>,
}

/// Result of the last STATUS call. None before the first.
pub(super) type LastStatus = Option<Result<(), String>>;

/// The first result, if it comes within the limit.
pub(super) async fn first_status(network: &PodNetwork) -> LastStatus {
    if network.ready().is_err() || !network.is_polled().await {
        return Some(Ok(()));
    }
    tokio::time::timeout(FIRST_TIMEOUT, network.status()).await.ok()
}

/// Whether the network takes pods. After a restart of the agent the Node's last condition counts until the first
/// result.
pub(super) fn is_ready(status: &LastStatus, node: Option<&Node>) -> Result<(), String> {
    status.clone().unwrap_or_else(|| {
        let conditions = node.and_then(|node| node.status.as_ref()?.conditions.as_ref());
        let ready = conditions.into_iter().flatten().find(|condition| condition.type_ == "Ready");
        let was_ready = ready.is_some_and(|ready| ready.status == "True");
        if was_ready { Ok(()) } else { Err("its plugins have not answered yet".to_owned()) }
    })
}

/// Keeps the result up to date until dropped. A network that is not configured is not called.
pub(super) async fn poll(
    network: PodNetwork,
    mut heartbeats: watch::Receiver<()>,
    status: watch::Sender<LastStatus>,
) {
    let mut status_changes = network.status_changes();
    let mut may_have_changed = true;
    loop {
        let takes_pods = matches!(*status.borrow(), Some(Ok(())));
        if may_have_changed || !takes_pods || network.is_polled().await {
            let answer = Some(if network.ready().is_ok() { network.status().await } else { Ok(()) });
            status.send_if_modified(|before| {
                // The network may have been replaced, so an equal result is reported too.
                let is_reported = may_have_changed || *before != answer;
                *before = answer;
                is_reported
            });
            tokio::time::sleep(MIN_POLL_INTERVAL).await;
        }
        // Cancel-safe: a change stays marked as unseen when the other arm completes first.
        may_have_changed = tokio::select! {
            changed = status_changes.changed() => if changed.is_ok() { true } else { return },
            changed = heartbeats.changed() => if changed.is_ok() { false } else { return },
        };
    }
}

// === impl PodNetwork ===

impl PodNetwork {
    /// The network that this runtime sets up.
    #[must_use]
    pub fn of_runtime(runtime: Arc<dyn Runtime>) -> Self {
        Self::Runtime(RuntimeNetwork { runtime, status_changes: watch::channel(()).0 })
    }

    /// The network that this process sets up. Only such a network can be part of the overlay.
    pub(super) fn cni(&self) -> Option<&Network> {
        match self {
            Self::Cni(network) => Some(network),
            Self::Runtime(_) => None,
        }
    }

    /// The number of packets that the limit on the connections of pods has dropped. None without a limit of this
    /// process. Blocks while the kernel answers.
    pub(crate) fn dropped_by_connection_limit(&self) -> Option<u64> {
        self.cni()?.dropped_by_connection_limit()
    }

    /// Whether the network is configured. The reason if not.
    pub(super) fn ready(&self) -> Result<(), String> {
        match self {
            Self::Cni(network) => network.ready(),
            Self::Runtime(_) => Ok(()),
        }
    }

    /// Whether pods can be attached now. The reason if not.
    async fn status(&self) -> Result<(), String> {
        match self {
            Self::Cni(network) => network.status().await,
            Self::Runtime(network) => network.status().await,
        }
    }

    /// Whether the status must be polled, because nothing notifies of its changes.
    async fn is_polled(&self) -> bool {
        match self {
            Self::Cni(network) => network.has_executable_plugins().await,
            Self::Runtime(_) => true,
        }
    }

    /// Changes when the status may have changed.
    fn status_changes(&self) -> watch::Receiver<()> {
        match self {
            Self::Cni(network) => network.status_changes(),
            Self::Runtime(network) => network.status_changes.subscribe(),
        }
    }

    /// Sets the address ranges of the node's pods.
    pub(super) async fn set_pod_cidrs(&self, cidrs: Vec<IpNetwork>) -> Result<(), String> {
        match self {
            Self::Cni(network) => network.set_pod_cidrs(cidrs).await.map_err(|error| chain(&error)),
            Self::Runtime(network) => network.set_pod_cidrs(&cidrs).await,
        }
    }
}

// === impl RuntimeNetwork ===

impl RuntimeNetwork {
    /// The runtime's conditions: both must be true, as in the kubelet.
    async fn status(&self) -> Result<(), String> {
        let status = self.runtime.status(cri::StatusRequest { verbose: false }).await;
        let status = status.map_err(|error| error.message().to_owned())?.status.unwrap_or_default();
        for type_ in ["RuntimeReady", "NetworkReady"] {
            match status.conditions.iter().find(|condition| condition.r#type == type_) {
                Some(condition) if condition.status => {}
                Some(condition) => return Err(format!("{}: {}", condition.reason, condition.message)),
                None => return Err(format!("the container runtime does not report {type_}")),
            }
        }
        Ok(())
    }

    /// containerd fills its CNI template (`conf_template`) with the ranges; CRI-O ignores them.
    async fn set_pod_cidrs(&self, cidrs: &[IpNetwork]) -> Result<(), String> {
        let cidrs: Vec<String> = cidrs.iter().map(ToString::to_string).collect();
        let config =
            cri::RuntimeConfig { network_config: Some(cri::NetworkConfig { pod_cidr: cidrs.join(",") }) };
        let request = cri::UpdateRuntimeConfigRequest { runtime_config: Some(config) };
        match self.runtime.update_runtime_config(request).await {
            Ok(_) | Err(RuntimeError::Unsupported(_)) => Ok(()),
            Err(error) => Err(error.message().to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::{NodeCondition, NodeStatus};

    use super::*;

    #[test]
    fn a_node_keeps_its_readiness_until_the_first_status() {
        let node = |ready: &str| {
            let (type_, status) = ("Ready".to_owned(), ready.to_owned());
            let conditions = Some(vec![NodeCondition { type_, status, ..NodeCondition::default() }]);
            Node { status: Some(NodeStatus { conditions, ..NodeStatus::default() }), ..Node::default() }
        };
        assert_eq!(is_ready(&None, Some(&node("True"))), Ok(()));
        for other in [None, Some(&node("False")), Some(&node("Unknown"))] {
            assert!(is_ready(&None, other).is_err_and(|why| why.contains("not answered")));
        }
        let refused = Err("no uplink".to_owned());
        assert_eq!(is_ready(&Some(refused.clone()), Some(&node("True"))), refused);
        assert_eq!(is_ready(&Some(Ok(())), None), Ok(()));
    }
}

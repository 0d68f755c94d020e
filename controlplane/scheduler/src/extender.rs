//! Extenders: HTTP servers that participate in scheduling. Source: upstream's `extender.go` and `extender/v1`.
//!
//! An extender filters the nodes that the scheduler's filters accept, scores them, chooses victims of a preemption, or
//! binds the pod. It is called outside of the scheduling task (`consult.rs`), because it may be slow.

pub(crate) mod client;
pub(crate) mod result;
pub(crate) mod wire;

use std::collections::BTreeSet;
use std::time::Duration;

use k8s_openapi::api::core::v1::ResourceRequirements;

use crate::object::Pod;

/// An extender of the configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Extender {
    /// The URL to which the paths of the verbs are appended. It identifies the extender in messages.
    pub(crate) url: String,
    /// The path of each verb. `None` if the extender does not support it.
    pub(crate) filter: Option<String>,
    pub(crate) prioritize: Option<String>,
    pub(crate) preempt: Option<String>,
    pub(crate) bind: Option<String>,
    /// The weight of the extender's scores. Above 0 if `prioritize` is set.
    pub(crate) weight: i64,
    pub(crate) tls: Tls,
    /// Maximum duration of a request including the response.
    pub(crate) timeout: Duration,
    /// Whether the extender gets the names of the nodes instead of the nodes.
    pub(crate) knows_nodes: bool,
    /// The extender is called only for pods that request one of these resources. If it is empty, the extender is called
    /// for all pods.
    pub(crate) resources: BTreeSet<String>,
    /// Whether pods are scheduled without the extender while it fails.
    pub(crate) ignorable: bool,
}

/// TLS settings of an extender. The certificates and the key are PEM.
#[derive(Clone, Default, PartialEq, Eq)]
pub(crate) struct Tls {
    /// Whether the server's certificate is not verified.
    pub(crate) insecure: bool,
    /// The name in the server's certificate. `None` means the host of the URL.
    pub(crate) server_name: Option<String>,
    /// The certificate authorities of the server. `None` means the authorities of the machine.
    pub(crate) authorities: Option<Vec<u8>>,
    /// The certificate and the key of the scheduler.
    pub(crate) identity: Option<(Vec<u8>, Vec<u8>)>,
}

impl std::fmt::Debug for Tls {
    /// Omits the key and the certificates.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tls")
            .field("insecure", &self.insecure)
            .field("server_name", &self.server_name)
            .finish()
    }
}

impl Extender {
    /// Whether the extender is called for a pod.
    pub(crate) fn is_interested(&self, pod: &Pod) -> bool {
        let names = |list: &Option<ResourceRequirements>| {
            let maps = list.iter().flat_map(|one| [&one.requests, &one.limits]);
            maps.flatten().any(|amounts| amounts.keys().any(|name| self.resources.contains(name)))
        };
        let mut containers = pod.spec.containers.iter().chain(pod.spec.init_containers.iter().flatten());
        self.resources.is_empty() || containers.any(|container| names(&container.resources))
    }

    /// Whether the extender participates in the choice of the node.
    pub(crate) fn chooses(&self) -> bool {
        self.filter.is_some() || self.prioritize.is_some()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::fixture;

    #[test]
    fn an_extender_with_resources_gets_only_pods_that_request_them() {
        let pod = |resources| fixture::pod("p", json!({"containers": [{"resources": resources}]}));
        let plain = pod(json!({"requests": {"cpu": "1"}}));
        let all = Extender::default();
        assert!(all.is_interested(&plain));
        let one = Extender { resources: ["x.io/gpu".to_owned()].into(), ..Extender::default() };
        assert!(!one.is_interested(&plain));
        assert!(one.is_interested(&pod(json!({"limits": {"x.io/gpu": "1"}}))));
        let of_init = json!({"initContainers": [{"resources": {"requests": {"x.io/gpu": "1"}}}]});
        assert!(one.is_interested(&fixture::pod("p", of_init)));
    }
}

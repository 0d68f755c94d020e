//! Small admission plugins, most of which are disabled by default. Each plugin has its own file.

mod always;
mod always_pull_images;
mod default_ingress_class;
mod deny_service_external_ips;
mod event_rate_limit;
mod extended_resource_toleration;
mod hard_anti_affinity;
mod image_policy;
mod initial_resources;
mod namespaces;
mod node_declared_features;
mod owner_references;
mod pod_node_selector;
mod pod_toleration_restriction;
mod pod_topology_labels;
mod security_context_deny;

pub(super) use always::{AlwaysAdmit, AlwaysDeny};
pub(super) use always_pull_images::AlwaysPullImages;
pub(super) use default_ingress_class::DefaultIngressClass;
pub(super) use deny_service_external_ips::DenyServiceExternalIps;
pub(super) use event_rate_limit::EventRateLimit;
pub(super) use extended_resource_toleration::ExtendedResourceToleration;
pub(super) use hard_anti_affinity::HardAntiAffinity;
pub(super) use image_policy::ImagePolicyWebhook;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use image_policy::fuzz as fuzz_image_review;
pub(super) use initial_resources::InitialResources;
pub(super) use namespaces::{NamespaceAutoProvision, NamespaceExists};
pub(super) use node_declared_features::NodeDeclaredFeatures;
pub(super) use owner_references::OwnerReferences;
pub(super) use pod_node_selector::PodNodeSelector;
pub(super) use pod_toleration_restriction::PodTolerationRestriction;
pub(super) use pod_topology_labels::PodTopologyLabels;
pub(super) use security_context_deny::SecurityContextDeny;

use serde_json::Value;

use super::{Attributes, Operation};
use crate::error::ApiError;

/// Fields of a pod's spec that contain containers.
const CONTAINERS: [&str; 3] = ["initContainers", "containers", "ephemeralContainers"];

/// A container in a pod's spec.
struct PodContainer<'a> {
    /// One of [`CONTAINERS`].
    field: &'static str,
    /// Index in the list of this field.
    index: usize,
    value: &'a Value,
}

/// All containers of a pod's spec.
fn containers(spec: &Value) -> impl Iterator<Item = PodContainer<'_>> {
    CONTAINERS.into_iter().flat_map(move |field| {
        let list = spec[field].as_array().into_iter().flatten();
        list.enumerate().map(move |(index, value)| PodContainer { field, index, value })
    })
}

/// Whether a pod is created or updated.
fn writes_pod(attributes: &Attributes<'_>) -> bool {
    attributes.is(Operation::Create, "Pod") || attributes.is(Operation::Update, "Pod")
}

fn forbidden(attributes: &Attributes<'_>, why: impl std::fmt::Display) -> ApiError {
    ApiError::forbidden_object(attributes.kind, attributes.name, why)
}

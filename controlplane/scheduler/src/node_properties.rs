//! The properties of a node that filters and scores read.

use std::collections::BTreeMap;

use coracle_values::Quantity;
use coracle_values::pod_resources::Resources;
use k8s_openapi::api::core::v1::Taint;

/// The fields of a node that filters and scores read.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct NodeProperties {
    pub(crate) name: String,
    pub(crate) labels: BTreeMap<String, String>,
    pub(crate) taints: Vec<Taint>,
    pub(crate) unschedulable: bool,
    pub(crate) allocatable: Resources,
    /// Features that the node declares.
    pub(crate) declared_features: Vec<String>,
    /// The size in bytes of the disk with local volumes, if the node reports it.
    pub(crate) local_volumes_disk: Option<Quantity>,
}

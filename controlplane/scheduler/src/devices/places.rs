//! The nodes that can use a device. Source: `NodeMatches` of `dynamic-resource-allocation/structured`.

use coracle_values::node_selector::term_matches;
use k8s_openapi::api::core::v1::NodeSelector;

use super::object::{Device, Slice};
use super::slices::node_of;
use crate::node_properties::NodeProperties;

/// The nodes of a slice, or of one device of a slice with `perDeviceNodeSelection`.
pub(super) struct Places<'a> {
    /// Name of the only node.
    pub(super) node: Option<&'a str>,
    pub(super) selector: Option<&'a NodeSelector>,
    all_nodes: bool,
}

impl<'a> Places<'a> {
    fn of_slice(slice: &'a Slice) -> Self {
        let spec = &slice.spec;
        let all_nodes = spec.all_nodes == Some(true);
        Self { node: node_of(slice), selector: spec.node_selector.as_ref(), all_nodes }
    }

    /// The nodes of a device.
    pub(super) fn of(slice: &'a Slice, device: &'a Device) -> Self {
        if !is_per_device(slice) {
            return Self::of_slice(slice);
        }
        let node = device.node_name.as_deref().filter(|name| !name.is_empty());
        let all_nodes = device.all_nodes == Some(true);
        Self { node, selector: device.node_selector.as_ref(), all_nodes }
    }

    fn include(&self, node: &NodeProperties) -> bool {
        match (self.node, self.selector) {
            (Some(name), _) => name == node.name,
            (None, Some(selector)) => is_reachable(Some(selector), node),
            (None, None) => self.all_nodes,
        }
    }
}

/// Whether the node can use devices of the slice.
pub(super) fn is_of_node(slice: &Slice, node: &NodeProperties) -> bool {
    if is_per_device(slice) {
        slice.spec.devices.iter().any(|device| Places::of(slice, device).include(node))
    } else {
        Places::of_slice(slice).include(node)
    }
}

/// Whether the node can use a device of a slice. [`is_of_node`] is true for the slice and the node.
pub(super) fn may_use(slice: &Slice, device: &Device, node: &NodeProperties) -> bool {
    !is_per_device(slice) || Places::of(slice, device).include(node)
}

/// Whether the selector, if there is one, selects the node.
pub(super) fn is_reachable(selector: Option<&NodeSelector>, node: &NodeProperties) -> bool {
    selector.is_none_or(|selector| {
        selector.node_selector_terms.iter().any(|term| term_matches(term, &node.labels, &node.name))
    })
}

/// Whether each device has its own nodes. A node that publishes a slice cannot give its devices to other nodes.
fn is_per_device(slice: &Slice) -> bool {
    slice.spec.per_device_node_selection == Some(true) && node_of(slice).is_none()
}

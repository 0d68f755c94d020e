//! Distribution of endpoints over slices, with as few changed slices as possible. No I/O.

use std::collections::BTreeMap;
use std::sync::Arc;

use coracle_values::CollectMap;
use k8s_openapi::api::discovery::v1::{Endpoint, EndpointPort};

use crate::endpoints::port_lists::PortLists;
use crate::object::EndpointSlice;

/// Maximum number of endpoints of a slice, as upstream's default.
pub(crate) const SLICE_MAX: usize = 100;

/// The address type (`IPv4` or `IPv6`) and the ports of a slice.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct SliceKey {
    pub(crate) address_type: &'static str,
    pub(crate) ports: Vec<EndpointPort>,
}

/// Endpoints with a common address type and ports.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Group {
    pub(crate) slice_key: SliceKey,
    pub(crate) endpoints: Vec<Endpoint>,
}

/// Changes of slices.
#[derive(Debug, Default)]
pub(crate) struct Changes {
    pub(crate) create: Vec<Group>,
    /// Slices with their new endpoints.
    pub(crate) update: Vec<(Arc<EndpointSlice>, Vec<Endpoint>)>,
    /// Slices whose endpoints do not change. Their labels may still differ.
    pub(crate) keep: Vec<Arc<EndpointSlice>>,
    pub(crate) delete: Vec<Arc<EndpointSlice>>,
    /// Number of endpoints that are not in a slice yet.
    pub(crate) added: usize,
    /// Number of endpoints that slices of the groups lose. As upstream, endpoints of other slices do not count.
    pub(crate) removed: usize,
}

/// Compares the groups with the slices. No two groups have the same key.
pub(crate) fn pack(groups: Vec<Group>, slices: &[Arc<EndpointSlice>]) -> Changes {
    let (mut changes, mut lists) = (Changes::default(), PortLists::default());
    for (place, group) in groups.iter().enumerate() {
        lists.add(lists.of_slice(&group.slice_key.ports), place);
    }
    let mut slices_of: Vec<Vec<Arc<EndpointSlice>>> = vec![Vec::new(); groups.len()];
    for slice in slices {
        let ports = slice.ports.as_deref().unwrap_or_default();
        let has_shape = |place: usize| {
            let slice_key = &groups[place].slice_key;
            slice.address_type == slice_key.address_type && ports == slice_key.ports
        };
        match lists.find(&lists.of_slice(ports), has_shape) {
            Some(place) => slices_of[place].push(slice.clone()),
            None => changes.delete.push(slice.clone()),
        }
    }
    for (group, own) in groups.into_iter().zip(slices_of) {
        pack_group(group, own, &mut changes);
    }
    changes
}

/// Number of slices of a group if all slices except the last are full. An empty group has one slice.
pub(crate) fn full_slices(group: &Group) -> usize {
    group.endpoints.len().div_ceil(SLICE_MAX).max(1)
}

/// A slice with the endpoints that it keeps.
struct KeptSlice {
    slice: Arc<EndpointSlice>,
    endpoints: Vec<Endpoint>,
    is_changed: bool,
}

fn pack_group(group: Group, slices: Vec<Arc<EndpointSlice>>, changes: &mut Changes) {
    let Group { slice_key, endpoints } = group;
    let mut missing: BTreeMap<String, Endpoint> =
        endpoints.into_iter().map(|endpoint| (identity(&endpoint), endpoint)).collect_map();
    let former: usize = slices.iter().map(|slice| slice.endpoints.len()).sum();
    let mut all: Vec<KeptSlice> = slices.into_iter().map(|slice| keep(slice, &mut missing)).collect();
    let kept: usize = all.iter().map(|kept| kept.endpoints.len()).sum();
    changes.added += missing.len();
    changes.removed += former.saturating_sub(kept);
    // Slices that change anyway take endpoints first, then slices with room.
    all.sort_by_key(|kept| !kept.is_changed);
    let mut missing = missing.into_values();
    for kept in &mut all {
        let room = SLICE_MAX.saturating_sub(kept.endpoints.len());
        let taken: Vec<Endpoint> = missing.by_ref().take(room).collect();
        kept.is_changed |= !taken.is_empty();
        kept.endpoints.extend(taken);
    }
    let mut left: Vec<Endpoint> = missing.collect();
    while !left.is_empty() {
        let rest = left.split_off(left.len().min(SLICE_MAX));
        changes
            .create
            .push(Group { slice_key: slice_key.clone(), endpoints: std::mem::replace(&mut left, rest) });
    }
    let occupied = all.iter().filter(|kept| !kept.endpoints.is_empty()).count() + changes.create.len();
    let mut is_placeholder_needed = occupied == 0;
    for kept in all {
        // One empty slice is kept. It shows that the service was processed.
        if kept.endpoints.is_empty() && !std::mem::take(&mut is_placeholder_needed) {
            changes.delete.push(kept.slice);
        } else if kept.is_changed {
            changes.update.push((kept.slice, kept.endpoints));
        } else {
            changes.keep.push(kept.slice);
        }
    }
    if is_placeholder_needed {
        changes.create.push(Group { slice_key, endpoints: Vec::new() });
    }
}

/// Keeps the slice's endpoints that are desired, with their desired content, and removes them from `missing`.
fn keep(slice: Arc<EndpointSlice>, missing: &mut BTreeMap<String, Endpoint>) -> KeptSlice {
    let before = &slice.endpoints;
    let endpoints: Vec<Endpoint> =
        before.iter().filter_map(|endpoint| missing.remove(&identity(endpoint))).collect();
    let is_changed = !endpoints.iter().eq(before.iter().map(|endpoint| &**endpoint));
    KeptSlice { slice, endpoints, is_changed }
}

/// Address and pod of an endpoint. Both are compared, because a new pod may get the address of a deleted pod.
fn identity(endpoint: &Endpoint) -> String {
    let pod = endpoint.target_ref.as_ref().and_then(|target| target.uid.as_deref()).unwrap_or_default();
    format!("{}/{pod}", endpoint.addresses.join(","))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn slice_key(port: i32) -> SliceKey {
        let ports = vec![EndpointPort { port: Some(port), ..EndpointPort::default() }];
        SliceKey { address_type: "IPv4", ports }
    }

    fn endpoints(numbers: std::ops::Range<usize>) -> Vec<Endpoint> {
        let endpoint =
            |number| Endpoint { addresses: vec![format!("10.0.0.{number}")], ..Endpoint::default() };
        numbers.map(endpoint).collect()
    }

    fn slice(name: &str, port: i32, endpoints: Vec<Endpoint>) -> Arc<EndpointSlice> {
        let value = json!({"metadata": {"name": name}, "addressType": "IPv4", "ports": [{"port": port}],
            "endpoints": endpoints});
        Arc::new(serde_json::from_value(value).unwrap())
    }

    fn group(port: i32, numbers: std::ops::Range<usize>) -> Group {
        Group { slice_key: slice_key(port), endpoints: endpoints(numbers) }
    }

    #[test]
    fn many_endpoints_fill_slices_of_a_hundred() {
        let changes = pack(vec![group(80, 0..250)], &[]);
        let sizes: Vec<_> = changes.create.iter().map(|group| group.endpoints.len()).collect();
        assert_eq!(sizes, [100, 100, 50]);
        assert_eq!((full_slices(&group(80, 0..250)), full_slices(&group(80, 0..0))), (3, 1));
    }

    #[test]
    fn one_changed_endpoint_changes_one_slice() {
        let slices = [slice("a", 80, endpoints(0..100)), slice("b", 80, endpoints(100..150))];
        let changes = pack(vec![group(80, 0..151)], &slices);
        assert!(changes.create.is_empty() && changes.delete.is_empty());
        assert_eq!((changes.update[0].1.len(), changes.keep.len()), (51, 1));
        assert_eq!((changes.added, changes.removed), (1, 0));
        let mut without = group(80, 0..150);
        without.endpoints.remove(3);
        let changes = pack(vec![without], &slices);
        assert_eq!((changes.update.len(), changes.update[0].1.len(), changes.keep.len()), (1, 99, 1));
        assert_eq!((changes.added, changes.removed), (0, 1));
        let same = pack(vec![group(80, 0..150)], &slices);
        assert_eq!((same.update.len(), same.keep.len()), (0, 2));
    }

    #[test]
    fn a_service_without_endpoints_has_one_empty_slice() {
        let none = || vec![group(80, 0..0)];
        assert_eq!(pack(none(), &[]).create, none());
        let changes = pack(none(), &[slice("a", 80, endpoints(0..2)), slice("b", 80, endpoints(2..4))]);
        assert_eq!((changes.update.len(), changes.delete.len()), (1, 1));
        assert_eq!(pack(none(), &[slice("a", 80, Vec::new())]).keep.len(), 1);
    }

    #[test]
    fn other_ports_are_other_slices() {
        let changes = pack(vec![group(81, 0..1)], &[slice("a", 80, endpoints(0..1))]);
        assert_eq!((changes.create.len(), changes.delete.len(), changes.update.len()), (1, 1, 0));
    }
}

//! Choice of devices for a container, and topology hints. Pure.
//!
//! Source: `devicesToAllocate`, `filterByAffinity` and `generateDeviceTopologyHints` of
//! `pkg/kubelet/cm/devicemanager`.

use std::collections::{BTreeMap, BTreeSet};

/// NUMA nodes of devices, by the ids of the devices. A device without topology has no nodes.
pub(super) type Devices = BTreeMap<String, Vec<i64>>;

/// Maximum NUMA nodes of which all combinations are tried, as upstream (`maxAllowableNUMANodes`).
const HINT_NODES_MAX: usize = 8;

/// The request of a container for one resource.
#[derive(Clone, Debug, Default)]
pub(super) struct DeviceRequest {
    /// Name of the resource.
    pub(super) resource: String,
    /// Number of devices.
    pub(super) count: usize,
    /// Devices of the pod's init containers that have ended when this container starts.
    pub(super) reusable: BTreeSet<String>,
    /// NUMA nodes to prefer, by the topology manager. Bit n is node n. None means no preference.
    pub(super) affinity: Option<u64>,
}

/// The devices of a `GetPreferredAllocation` request.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Options {
    /// The devices from which the plugin may choose.
    pub(super) available: Vec<String>,
    /// The devices that the choice of the plugin must include.
    pub(super) included: Vec<String>,
}

/// A choice of devices before its last step. The last step can follow the preference of the plugin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Choice {
    /// Devices that are already chosen.
    chosen: BTreeSet<String>,
    /// Number of devices that are still to be chosen.
    missing: usize,
    /// Groups of free devices. All devices of a group are taken before the devices of the next group.
    groups: Vec<Vec<String>>,
    /// Devices among which the plugin may express a preference.
    open: BTreeSet<String>,
}

/// A topology hint: NUMA nodes from which the devices can be allocated. Bit n of the mask is node n.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DeviceHint {
    pub(crate) nodes: u64,
    /// Whether no smaller set of nodes has enough devices.
    pub(crate) preferred: bool,
}

// === impl Choice ===

impl Choice {
    /// Begins the choice among the healthy devices that no pod has.
    ///
    /// # Errors
    /// When there are too few devices. The message is upstream's.
    pub(super) fn begin(want: &DeviceRequest, free: &Devices) -> Result<Self, String> {
        let mut chosen: BTreeSet<String> = want.reusable.iter().take(want.count).cloned().collect();
        let mut missing = want.count - chosen.len();
        if missing == 0 {
            return Ok(Self { chosen, missing, groups: Vec::new(), open: BTreeSet::new() });
        }
        if free.len() < missing {
            return Err(format!(
                "requested number of devices unavailable for {}. Requested: {missing}, Available: {}",
                want.resource,
                free.len()
            ));
        }
        let [aligned, unaligned, unbound] = by_affinity(want.affinity, free);
        if missing < aligned.len() {
            let open = aligned.iter().cloned().collect();
            return Ok(Self { chosen, missing, groups: vec![aligned], open });
        }
        missing -= aligned.len();
        chosen.extend(aligned);
        let open = unaligned.iter().chain(&unbound).cloned().collect();
        Ok(Self { chosen, missing, groups: vec![unaligned, unbound], open })
    }

    /// The options of the plugin. None if no further device is needed.
    pub(super) fn options(&self) -> Option<Options> {
        let available = self.open.union(&self.chosen).cloned().collect();
        (self.missing > 0).then(|| Options { available, included: self.chosen.iter().cloned().collect() })
    }

    /// Ends the choice. Preferred devices that are not in `open` are ignored.
    pub(super) fn finish(self, preferred: &[String]) -> BTreeSet<String> {
        let Self { mut chosen, missing, groups, open } = self;
        let target = chosen.len() + missing;
        let preferred = preferred.iter().filter(|id| open.contains(*id)).cloned();
        for id in preferred.chain(groups.into_iter().flatten()) {
            if chosen.len() >= target {
                break;
            }
            chosen.insert(id);
        }
        chosen
    }
}

/// Devices of the preferred NUMA nodes, of other NUMA nodes, and without NUMA node. A device of several nodes is
/// aligned if one of its nodes is preferred.
fn by_affinity(affinity: Option<u64>, free: &Devices) -> [Vec<String>; 3] {
    let Some(mask) = affinity else { return [Vec::new(), Vec::new(), free.keys().cloned().collect()] };
    let (mut aligned, mut unaligned, mut unbound) = (Vec::new(), Vec::new(), Vec::new());
    for (id, nodes) in free {
        let group = match nodes.as_slice() {
            [] => &mut unbound,
            nodes if nodes.iter().any(|node| is_set(mask, *node)) => &mut aligned,
            _ => &mut unaligned,
        };
        group.push(id.clone());
    }
    [aligned, unaligned, unbound]
}

fn is_set(mask: u64, node: i64) -> bool {
    u32::try_from(node).ok().and_then(|node| 1_u64.checked_shl(node)).is_some_and(|bit| mask & bit != 0)
}

/// Devices of one resource, as inputs of [`hints`].
#[derive(Clone, Copy, Debug)]
pub(super) struct HintInputs<'a> {
    /// All devices of the resource.
    pub(super) all: &'a Devices,
    /// Healthy devices that no pod has.
    pub(super) free: &'a Devices,
    /// Devices of the pod's init containers.
    pub(super) reusable: &'a BTreeSet<String>,
}

/// The topology hints of a request for `count` devices, on a machine with these NUMA nodes. None if the devices have no
/// topology, so all nodes are equally good. Empty if no set of nodes has enough devices.
pub(super) fn hints(count: usize, machine: &[u32], inputs: HintInputs<'_>) -> Option<Vec<DeviceHint>> {
    let HintInputs { all, free, reusable } = inputs;
    if all.values().all(Vec::is_empty) {
        return None;
    }
    // As upstream, nodes without devices are left out: there are machines with dozens of nodes that have memory only.
    let has_devices = |node: &u32| all.values().flatten().any(|id| *id == i64::from(*node));
    let nodes = machine.iter().copied().filter(|node| *node < 64 && has_devices(node));
    let nodes: Vec<u32> = nodes.take(HINT_NODES_MAX).collect();
    let within = |of: &[i64], mask: u64| of.iter().any(|node| is_set(mask, *node));
    let mut smallest = u32::try_from(nodes.len()).unwrap_or(u32::MAX);
    let mut found = Vec::new();
    for subset in 1_u64..(1 << nodes.len()) {
        let members = nodes.iter().enumerate().filter(|(place, _)| subset & (1_u64 << *place) != 0);
        let mask = members.fold(0_u64, |mask, (_, node)| mask | (1_u64 << node));
        if all.values().filter(|of| within(of, mask)).count() >= count {
            smallest = smallest.min(mask.count_ones());
        }
        // All devices that are reused must be within the mask, except those without topology.
        let reused = reusable.iter().filter_map(|id| all.get(id)).filter(|of| !of.is_empty());
        if reused.clone().any(|of| !within(of, mask)) {
            continue;
        }
        let kept = reused.count();
        let available = free.iter().filter(|(id, of)| !reusable.contains(*id) && within(of, mask)).count();
        if kept + available >= count {
            found.push(mask);
        }
    }
    let hint = |nodes: u64| DeviceHint { nodes, preferred: nodes.count_ones() == smallest };
    Some(found.into_iter().map(hint).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn devices(list: &[(&str, &[i64])]) -> Devices {
        list.iter().map(|(id, nodes)| ((*id).to_owned(), nodes.to_vec())).collect()
    }

    fn want(count: usize, reusable: &[&str], affinity: Option<u64>) -> DeviceRequest {
        let reusable = reusable.iter().map(|id| (*id).to_owned()).collect();
        DeviceRequest { resource: "x.io/a".to_owned(), count, reusable, affinity }
    }

    fn chosen(want: &DeviceRequest, free: &Devices, preferred: &[&str]) -> Vec<String> {
        let preferred: Vec<String> = preferred.iter().map(|id| (*id).to_owned()).collect();
        Choice::begin(want, free).unwrap().finish(&preferred).into_iter().collect()
    }

    #[test]
    fn devices_of_init_containers_are_reused_first() {
        let free = devices(&[("b", &[]), ("c", &[])]);
        assert_eq!(chosen(&want(1, &["a"], None), &free, &["b"]), ["a"]);
        assert_eq!(chosen(&want(2, &["a"], None), &free, &[]), ["a", "b"]);
        assert_eq!(chosen(&want(2, &["a"], None), &free, &["c"]), ["a", "c"]);
        let error = Choice::begin(&want(4, &["a"], None), &free).unwrap_err();
        let text = "requested number of devices unavailable for x.io/a. Requested: 3, Available: 2";
        assert_eq!(error, text);
    }

    #[test]
    fn the_plugin_chooses_among_the_open_devices() {
        let free = devices(&[("a", &[]), ("b", &[]), ("c", &[])]);
        let choice = Choice::begin(&want(2, &[], None), &free).unwrap();
        let all = ["a", "b", "c"].map(str::to_owned).to_vec();
        assert_eq!(choice.options(), Some(Options { available: all, included: Vec::new() }));
        // Unknown and superfluous devices of the answer are ignored.
        assert_eq!(chosen(&want(2, &[], None), &free, &["x", "c", "b", "a"]), ["b", "c"]);
        let reused = Choice::begin(&want(1, &["a"], None), &free).unwrap();
        assert_eq!(reused.options(), None);
    }

    #[test]
    fn devices_of_preferred_nodes_are_allocated_first() {
        let free = devices(&[("a", &[1]), ("b", &[0]), ("c", &[0]), ("d", &[]), ("e", &[0, 1])]);
        let on_0 = Some(0b01);
        assert_eq!(chosen(&want(2, &[], on_0), &free, &["a"]), ["b", "c"]);
        assert_eq!(chosen(&want(2, &[], on_0), &free, &["e", "c"]), ["c", "e"]);
        assert_eq!(chosen(&want(4, &[], on_0), &free, &[]), ["a", "b", "c", "e"]);
        assert_eq!(chosen(&want(4, &[], on_0), &free, &["d"]), ["b", "c", "d", "e"]);
        let aligned = Choice::begin(&want(4, &[], on_0), &free).unwrap().options().unwrap();
        assert_eq!(aligned.included, ["b", "c", "e"], "the plugin must include the aligned devices");
    }

    #[test]
    fn hints_have_only_nodes_with_devices() {
        let all = devices(&[("a", &[9]), ("b", &[12]), ("c", &[70])]);
        let machine: Vec<u32> = (0..36).collect();
        let none = BTreeSet::new();
        let found = hints(1, &machine, HintInputs { all: &all, free: &all, reusable: &none }).unwrap();
        let hint = |nodes, preferred| DeviceHint { nodes, preferred };
        assert_eq!(found, [hint(1 << 9, true), hint(1 << 12, true), hint((1 << 9) | (1 << 12), false)]);
    }

    #[test]
    fn hints_name_the_smallest_sets_of_nodes_with_enough_devices() {
        let all = devices(&[("a", &[0]), ("b", &[1]), ("c", &[1])]);
        let hint = |nodes, preferred| DeviceHint { nodes, preferred };
        let found = |count: usize, free: &Devices, reusable: &[&str]| {
            let reusable = reusable.iter().map(|id| (*id).to_owned()).collect();
            hints(count, &[0, 1], HintInputs { all: &all, free, reusable: &reusable }).unwrap()
        };
        let one = [hint(0b01, true), hint(0b10, true), hint(0b11, false)];
        assert_eq!(found(1, &all, &[]), one);
        assert_eq!(found(2, &all, &[]), [hint(0b10, true), hint(0b11, false)]);
        // The free devices need two nodes, though one node has enough devices.
        let free = devices(&[("a", &[0]), ("b", &[1])]);
        assert_eq!(found(2, &free, &[]), [hint(0b11, false)]);
        assert!(found(3, &free, &[]).is_empty());
        assert_eq!(found(1, &free, &["c"]), [hint(0b10, true), hint(0b11, false)]);
        let plain = devices(&[("a", &[])]);
        let none = BTreeSet::new();
        assert_eq!(hints(1, &[0], HintInputs { all: &plain, free: &plain, reusable: &none }), None);
    }
}

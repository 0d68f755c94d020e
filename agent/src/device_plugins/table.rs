//! Resources of device plugins, and the devices that pods have. Pure.

mod health;
mod hints;

use std::collections::{BTreeMap, BTreeSet, HashMap};

use coracle_values::CollectMap;
use serde::{Deserialize, Serialize};

use super::choose::{Choice, DeviceRequest, Devices};
use super::{edits::Edits, requests::Request, used::UsedDevices};
use crate::node::{DeviceCount, DeviceCounts};

/// Maximum resources of plugins. Each has a connection and a task.
pub(super) const RESOURCES_MAX: usize = 256;
/// Maximum resources that the table forgets before the agent's next start: metrics keep their names.
const FORGOTTEN_MAX: usize = 4096;
/// Maximum number of the devices of all resources plus the number of their NUMA nodes. Each takes about 100 bytes of
/// memory.
const TOTAL_MAX: usize = 1 << 18;

/// A device in the list of a plugin.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Device {
    pub(super) is_healthy: bool,
    /// Its NUMA nodes.
    pub(super) nodes: Vec<i64>,
}

/// The devices of a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct PodDevices {
    pub(super) uid: String,
    /// By container and resource.
    pub(super) containers: BTreeMap<String, BTreeMap<String, Allocation>>,
}

/// Devices of one resource that a container has.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Allocation {
    pub(super) devices: Devices,
    /// The plugin's answer. None if the plugin has not answered yet.
    pub(super) edits: Option<Edits>,
    /// The boot in which the plugin answered.
    pub(super) boot: String,
    /// NUMA nodes near which the devices were reserved. Until the plugin answers, it may prefer other devices there.
    #[serde(skip)]
    pub(super) affinity: Option<u64>,
}

/// A container of a pod.
#[derive(Clone, Copy, Debug)]
pub(super) struct Owner<'a> {
    pub(super) uid: &'a str,
    pub(super) container: &'a str,
}

/// The next step of an allocation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// No step is left: the container has its devices.
    Done,
    /// The container has these devices, and the plugin must be called for them.
    Call(Vec<String>),
    /// Devices must be chosen.
    Choose(Choice),
}

/// The reason why a container does not get its devices. The messages are upstream's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// The pod is rejected.
    Reject(String),
    /// The devices that the container had before the reboot are not available yet.
    Wait(String),
}

/// All resources and pods.
#[derive(Debug, Default)]
pub(super) struct Table {
    resources: BTreeMap<String, Resource>,
    pods: HashMap<String, PodDevices>,
    used: UsedDevices,
    /// Number of the last registration.
    last: u64,
    /// Number of resources forgotten since the agent's start.
    forgotten: usize,
}

/// A resource of a plugin.
#[derive(Debug, Default)]
struct Resource {
    devices: BTreeMap<String, Device>,
    /// Whether the plugin is connected and has listed its devices. Otherwise no device is allocatable.
    is_listed: bool,
    /// Whether the plugin did not come back within the grace period. The node reports no device then.
    is_removed: bool,
    /// Number of the plugin's registration.
    number: u64,
}

// === impl Table ===

impl Table {
    /// Adds a resource of an earlier agent, whose plugin is not connected yet.
    pub(super) fn restore_resource(&mut self, name: &str) {
        self.resources.entry(name.to_owned()).or_default();
    }

    /// Adds the devices that a pod got from an earlier agent.
    pub(super) fn restore_pod(&mut self, pod: PodDevices) {
        for (resource, allocation) in pod.containers.values().flatten() {
            self.used.hold(&pod.uid, resource, allocation.devices.keys());
        }
        self.pods.insert(pod.uid.clone(), pod);
    }

    /// Registers the plugin of a resource. The number identifies the registration. The devices of its earlier plugin
    /// stay until the new one lists its own.
    pub(super) fn connect(&mut self, name: &str) -> u64 {
        self.last += 1;
        let resource = self.resources.entry(name.to_owned()).or_default();
        (resource.number, resource.is_removed) = (self.last, false);
        self.last
    }

    /// Replaces the devices of a resource. Returns the uids of pods with a device whose health has changed. None if
    /// another plugin has registered for the resource.
    pub(super) fn list(
        &mut self,
        name: &str,
        number: u64,
        devices: BTreeMap<String, Device>,
    ) -> Option<BTreeSet<String>> {
        let resource = self.resources.get_mut(name).filter(|resource| resource.number == number)?;
        let before = std::mem::replace(&mut resource.devices, devices);
        resource.is_listed = true;
        let Some(used) = self.used.of(name) else { return Some(BTreeSet::new()) };
        // A device that the plugin does not list counts as healthy, as upstream.
        let health = |list: &BTreeMap<String, Device>, id: &str| list.get(id).is_none_or(|d| d.is_healthy);
        let is_changed = |id: &str| health(&before, id) != health(&resource.devices, id);
        Some(used.iter().filter(|(id, _)| is_changed(id)).flat_map(|(_, uids)| uids.clone()).collect())
    }

    /// Records that the plugin of a resource has ended: its devices are not allocatable. Returns whether it was the
    /// current plugin.
    pub(super) fn disconnect(&mut self, name: &str, number: u64) -> bool {
        let resource = self.resources.get_mut(name).filter(|resource| resource.number == number);
        resource.map(|resource| resource.is_listed = false).is_some()
    }

    /// Ends the grace period of a resource, if no plugin has registered since. The table keeps the health of devices
    /// that pods have, as upstream.
    pub(super) fn expire(&mut self, name: &str, number: u64) {
        let resource = self.resources.get_mut(name);
        if let Some(resource) = resource.filter(|r| r.number == number && !r.is_listed) {
            resource.is_removed = true;
            let used = self.used.of(name);
            resource.devices.retain(|id, _| used.is_some_and(|used| used.contains_key(id)));
        }
    }

    /// Names of the node's resources, except resources whose plugin did not register again.
    pub(super) fn names(&self) -> Vec<String> {
        let present = self.resources.iter().filter(|(_, resource)| !resource.is_removed);
        present.map(|(name, _)| name.clone()).collect()
    }

    /// Whether another resource can be added. A full table forgets removed resources first. The Node keeps listing them
    /// with zero devices.
    pub(super) fn make_room(&mut self) -> bool {
        let before = self.resources.len();
        if before >= RESOURCES_MAX && self.forgotten < FORGOTTEN_MAX {
            self.resources.retain(|_, resource| !resource.is_removed);
            self.forgotten += before - self.resources.len();
        }
        self.resources.len() < RESOURCES_MAX
    }

    /// Whether the devices of a resource fit into the limit of all resources.
    pub(super) fn has_room_for(&self, name: &str, devices: &BTreeMap<String, Device>) -> bool {
        let size = |devices: &BTreeMap<String, Device>| -> usize {
            devices.values().map(|device| 1 + device.nodes.len()).sum()
        };
        let others = self.resources.iter().filter(|(other, _)| *other != name);
        others.map(|(_, resource)| size(&resource.devices)).sum::<usize>() + size(devices) <= TOTAL_MAX
    }

    /// Whether there is a resource of this name.
    pub(super) fn has(&self, name: &str) -> bool {
        self.resources.contains_key(name)
    }

    /// Numbers of devices. As in the kubelet, a resource whose plugin did not come back has zero devices. The zero
    /// distinguishes such a resource from resources of the cluster, which the node does not report.
    pub(super) fn counts(&self) -> DeviceCounts {
        let count = |resource: &Resource| {
            let capacity = if resource.is_removed { 0 } else { resource.devices.len() };
            DeviceCount { capacity, allocatable: resource.healthy().count() }
        };
        self.resources.iter().map(|(name, resource)| (name.clone(), count(resource))).collect_map()
    }

    /// Whether devices of the resource are allocated here.
    pub(super) fn manages(&self, name: &str) -> bool {
        self.resources.get(name).is_some_and(|resource| !resource.is_removed) || self.used.of(name).is_some()
    }

    /// Whether there is neither a resource nor a pod with devices.
    pub(super) fn is_empty(&self) -> bool {
        self.resources.is_empty() && self.pods.is_empty()
    }

    /// The next step of an allocation.
    ///
    /// # Errors
    /// When the devices are not available.
    pub(super) fn step(&self, owner: Owner<'_>, want: &DeviceRequest, boot: &str) -> Result<Step, Refusal> {
        let DeviceRequest { resource: name, count, .. } = want;
        let present = self.resources.get(name).filter(|resource| !resource.is_removed);
        let Some(allocation) = self.allocation(owner, name) else {
            let Some(resource) = present else {
                return Err(Refusal::Reject(format!("cannot allocate unregistered device {name}")));
            };
            if resource.healthy().next().is_none() {
                let message = "no healthy devices present; cannot allocate unhealthy devices";
                return Err(Refusal::Reject(format!("{message} {name}")));
            }
            return Choice::begin(want, &self.free(name)).map(Step::Choose).map_err(Refusal::Reject);
        };
        if allocation.devices.len() != *count {
            let Owner { uid, container } = owner;
            let before = allocation.devices.len();
            return Err(Refusal::Reject(format!(
                "pod {uid:?} container {container:?} changed request for resource {name:?} from {before} to {count}"
            )));
        }
        if allocation.is_answered() && allocation.boot == boot {
            return Ok(Step::Done);
        }
        if !allocation.is_answered() && allocation.affinity.is_some() {
            let (want, open) = self.open(owner, want);
            return Choice::begin(&want, &open).map(Step::Choose).map_err(Refusal::Reject);
        }
        let is_available = |id: &String| {
            present.is_some_and(|r| r.is_listed && r.devices.get(id).is_some_and(|device| device.is_healthy))
        };
        if allocation.devices.keys().all(is_available) {
            return Ok(Step::Call(allocation.devices.keys().cloned().collect()));
        }
        let message = "previously allocated devices are no longer healthy; cannot allocate unhealthy devices";
        Err(Refusal::Wait(format!("{message} {name}")))
    }

    /// Devices that a container can take over. These are the devices of init containers that end before the container
    /// starts, except devices that a later container keeps.
    pub(super) fn reusable(
        &self,
        owner: Owner<'_>,
        resource: &str,
        requests: &[Request],
    ) -> BTreeSet<String> {
        let before = requests.iter().take_while(|request| request.container != owner.container);
        let mut reusable = BTreeSet::new();
        for request in before {
            if reusable.is_empty() && !request.ends_first {
                continue;
            }
            let owner = Owner { container: &request.container, ..owner };
            let ids =
                self.allocation(owner, resource).into_iter().flat_map(|allocation| allocation.devices.keys());
            for id in ids {
                if request.ends_first {
                    reusable.insert(id.clone());
                } else {
                    reusable.remove(id);
                }
            }
        }
        reusable
    }

    /// Allocates devices to a container, in place of the devices that were reserved for it. The plugin must be called
    /// for them.
    ///
    /// # Errors
    /// When other pods have taken the devices meanwhile.
    pub(super) fn reserve(
        &mut self,
        owner: Owner<'_>,
        want: &DeviceRequest,
        preferred: &[String],
    ) -> Result<Vec<String>, Refusal> {
        let (want, open) = self.open(owner, want);
        let choice = Choice::begin(&want, &open).map_err(Refusal::Reject)?;
        let ids: Vec<String> = choice.finish(preferred).into_iter().collect();
        self.end_reservation(owner, &want.resource);
        let known = self.resources.get(&want.resource);
        let nodes = |id: &String| {
            known.and_then(|resource| resource.devices.get(id)).map(|d| d.nodes.clone()).unwrap_or_default()
        };
        let devices: Devices = ids.iter().map(|id| (id.clone(), nodes(id))).collect_map();
        self.used.hold(owner.uid, &want.resource, &ids);
        let pod = self.pods.entry(owner.uid.to_owned()).or_default();
        pod.uid = owner.uid.to_owned();
        let allocation = Allocation { devices, affinity: want.affinity, ..Allocation::default() };
        let container = pod.containers.entry(owner.container.to_owned()).or_default();
        container.insert(want.resource, allocation);
        Ok(ids)
    }

    /// Frees the devices of a container, except the devices that another container of its pod also has.
    fn end_reservation(&mut self, owner: Owner<'_>, resource: &str) {
        let Some(pod) = self.pods.get_mut(owner.uid) else { return };
        let container = pod.containers.get_mut(owner.container);
        let Some(old) = container.and_then(|container| container.remove(resource)) else { return };
        let others = pod.containers.values().filter_map(|container| container.get(resource));
        let kept: BTreeSet<&String> = others.flat_map(|allocation| allocation.devices.keys()).collect();
        self.used.release(owner.uid, resource, old.devices.keys().filter(|id| !kept.contains(id)));
    }

    /// Stores the plugin's answer for devices that a container has. Returns false if the pod was released meanwhile.
    pub(super) fn answer(&mut self, owner: Owner<'_>, resource: &str, edits: Edits, boot: &str) -> bool {
        let pod = self.pods.get_mut(owner.uid);
        let container = pod.and_then(|pod| pod.containers.get_mut(owner.container));
        let Some(allocation) = container.and_then(|container| container.get_mut(resource)) else {
            return false;
        };
        (allocation.edits, allocation.boot) = (Some(edits), boot.to_owned());
        true
    }

    /// Frees devices of a pod for which the plugin has not answered.
    pub(super) fn cancel(&mut self, uid: &str) {
        let Some(mut pod) = self.remove(uid) else { return };
        for container in pod.containers.values_mut() {
            container.retain(|_, allocation| allocation.is_answered());
        }
        pod.containers.retain(|_, resources| !resources.is_empty());
        if !pod.containers.is_empty() {
            self.restore_pod(pod);
        }
    }

    /// Releases the devices of a pod. None if the pod has no devices. A device that another pod also has stays
    /// allocated. Two pods have the same device if the agent ends before it removes the record of the first pod. The
    /// next agent reads both records.
    pub(super) fn remove(&mut self, uid: &str) -> Option<PodDevices> {
        let pod = self.pods.remove(uid)?;
        for (resource, allocation) in pod.containers.values().flatten() {
            self.used.release(uid, resource, allocation.devices.keys());
        }
        Some(pod)
    }

    /// The devices of a pod.
    pub(super) fn pod(&self, uid: &str) -> Option<&PodDevices> {
        self.pods.get(uid)
    }

    /// The uids of all pods with devices.
    pub(super) fn pods(&self) -> Vec<String> {
        self.pods.keys().cloned().collect()
    }

    /// The devices of one resource that a container has.
    pub(super) fn allocation(&self, owner: Owner<'_>, resource: &str) -> Option<&Allocation> {
        self.pods.get(owner.uid)?.containers.get(owner.container)?.get(resource)
    }

    /// Returns the request with the affinity of the container's reservation. Also returns the healthy devices that are
    /// free or reserved for the container, without those that the container reuses.
    fn open(&self, owner: Owner<'_>, want: &DeviceRequest) -> (DeviceRequest, Devices) {
        let mut open = self.free(&want.resource);
        let Some(allocation) = self.allocation(owner, &want.resource) else { return (want.clone(), open) };
        let healthy = self.resources.get(&want.resource).into_iter().flat_map(Resource::healthy);
        let reserved =
            healthy.filter(|(id, _)| allocation.devices.contains_key(*id) && !want.reusable.contains(*id));
        open.extend(reserved.map(own));
        (DeviceRequest { affinity: want.affinity.or(allocation.affinity), ..want.clone() }, open)
    }

    /// The healthy devices of a resource that no pod has.
    fn free(&self, name: &str) -> Devices {
        let used = self.used.of(name);
        let is_free = |id: &String| used.is_none_or(|used| !used.contains_key(id));
        let healthy = self.resources.get(name).into_iter().flat_map(Resource::healthy);
        healthy.filter(|(id, _)| is_free(id)).map(own).collect_map()
    }
}

// === impl Allocation ===

impl Allocation {
    /// Whether the plugin has answered.
    pub(super) fn is_answered(&self) -> bool {
        self.edits.is_some()
    }
}

// === impl Resource ===

impl Resource {
    fn healthy(&self) -> impl Iterator<Item = (&String, &Device)> {
        self.devices.iter().filter(move |(_, device)| self.is_listed && device.is_healthy)
    }
}

fn own((id, device): (&String, &Device)) -> (String, Vec<i64>) {
    (id.clone(), device.nodes.clone())
}

#[cfg(test)]
mod tests {
    use super::super::choose::DeviceHint;
    use super::health::HEALTH_MAX;
    use super::*;

    const NAME: &str = "x.io/a";

    fn devices(list: &[(&str, bool)]) -> BTreeMap<String, Device> {
        let device = |is_healthy| Device { is_healthy, nodes: vec![0] };
        list.iter().map(|(id, is_healthy)| ((*id).to_owned(), device(*is_healthy))).collect()
    }

    fn want(count: usize) -> DeviceRequest {
        DeviceRequest { resource: NAME.to_owned(), count, ..DeviceRequest::default() }
    }

    fn at<'a>(uid: &'a str, container: &'a str) -> Owner<'a> {
        Owner { uid, container }
    }

    /// A table with these devices.
    fn table(list: &[(&str, bool)]) -> (Table, u64) {
        let mut table = Table::default();
        let number = table.connect(NAME);
        table.list(NAME, number, devices(list)).unwrap();
        (table, number)
    }

    fn count(table: &Table) -> (usize, usize) {
        let count = table.counts()[NAME];
        (count.capacity, count.allocatable)
    }

    fn give(table: &mut Table, owner: Owner<'_>, count: usize) -> Vec<String> {
        let ids = table.reserve(owner, &want(count), &[]).unwrap();
        assert!(table.answer(owner, NAME, Edits::default(), "boot"));
        ids
    }

    #[test]
    fn capacity_counts_all_devices_and_allocatable_the_healthy_ones_of_a_connected_plugin() {
        let (mut table, number) = table(&[("a", true), ("b", false)]);
        assert_eq!(count(&table), (2, 1));
        assert!(table.disconnect(NAME, number));
        assert_eq!(count(&table), (2, 0));
        table.expire(NAME, number);
        assert_eq!(count(&table), (0, 0));
        assert!(!table.manages(NAME) && table.names().is_empty() && table.has(NAME));
        let again = table.connect(NAME);
        assert!(table.manages(NAME) && !table.disconnect(NAME, number));
        assert_eq!(table.list(NAME, number, devices(&[])), None, "of an earlier plugin");
        table.list(NAME, again, devices(&[("c", true)])).unwrap();
        table.expire(NAME, again);
        assert_eq!(count(&table), (1, 1), "the plugin is connected");
    }

    #[test]
    fn a_device_belongs_to_one_pod() {
        let (mut table, _) = table(&[("a", true), ("b", true), ("c", false)]);
        let first = give(&mut table, at("p", "c"), 1);
        assert_eq!(table.step(at("p", "c"), &want(1), "boot"), Ok(Step::Done));
        let second = give(&mut table, at("q", "c"), 1);
        assert_ne!(first, second);
        let text = "requested number of devices unavailable for x.io/a. Requested: 1, Available: 0";
        let refused = Err(Refusal::Reject(text.to_owned()));
        assert_eq!(table.step(at("r", "c"), &want(1), "boot"), refused);
        assert!(table.remove("p").is_some() && table.remove("p").is_none());
        assert_eq!(table.reserve(at("r", "c"), &want(1), &[]), Ok(first));
        table.cancel("r");
        assert_eq!(table.pods(), ["q"], "the plugin has not answered for the devices of r");
    }

    #[test]
    fn a_device_in_the_records_of_two_pods_stays_with_the_other_pod() {
        let (mut before, _) = table(&[("a", true)]);
        give(&mut before, at("ended", "c"), 1);
        let ended = before.remove("ended").unwrap();
        give(&mut before, at("new", "c"), 1);
        let new = before.remove("new").unwrap();
        for records in [[&ended, &new], [&new, &ended]] {
            let (mut after, _) = table(&[("a", true)]);
            records.into_iter().for_each(|record| after.restore_pod(record.clone()));
            assert!(after.remove("ended").is_some());
            assert_eq!(after.free(NAME).len(), 0, "the device of the new pod");
            assert!(after.remove("new").is_some());
            assert_eq!(after.free(NAME).len(), 1);
        }
    }

    #[test]
    fn requests_without_devices_are_rejected_with_the_messages_of_the_kubelet() {
        let (mut table, number) = table(&[("a", true)]);
        let step = |table: &Table, name: &str, count| {
            let want = DeviceRequest { resource: name.to_owned(), ..want(count) };
            table.step(at("p", "c"), &want, "boot").unwrap_err()
        };
        let rejected = |text: &str| Refusal::Reject(text.to_owned());
        assert_eq!(step(&table, "x.io/b", 1), rejected("cannot allocate unregistered device x.io/b"));
        give(&mut table, at("p", "c"), 1);
        let changed = "pod \"p\" container \"c\" changed request for resource \"x.io/a\" from 1 to 2";
        assert_eq!(step(&table, NAME, 2), rejected(changed));
        table.remove("p");
        table.disconnect(NAME, number);
        let none = "no healthy devices present; cannot allocate unhealthy devices x.io/a";
        assert_eq!(step(&table, NAME, 1), rejected(none));
    }

    #[test]
    fn after_a_reboot_a_pod_waits_for_its_devices_and_the_plugin_is_called_again() {
        let (mut before, _) = table(&[("a", true), ("b", true)]);
        let ids = give(&mut before, at("p", "c"), 1);
        let mut after = Table::default();
        after.restore_resource(NAME);
        after.restore_pod(before.pod("p").unwrap().clone());
        let step = |table: &Table| table.step(at("p", "c"), &want(1), "next");
        assert!(matches!(step(&after), Err(Refusal::Wait(_))));
        assert_eq!(count(&after), (0, 0));
        let number = after.connect(NAME);
        after.list(NAME, number, devices(&[("a", true), ("b", true)])).unwrap();
        assert_eq!(step(&after), Ok(Step::Call(ids)));
        assert_eq!(after.free(NAME).len(), 1);
        assert!(after.answer(at("p", "c"), NAME, Edits::default(), "next"));
        assert_eq!(step(&after), Ok(Step::Done));
    }

    #[test]
    fn of_many_devices_only_the_unhealthy_ones_are_in_the_status() {
        let ids: Vec<String> = (0..=HEALTH_MAX).map(|number| format!("{number:04}")).collect();
        let listed = |is_healthy| ids.iter().map(|id| (id.as_str(), is_healthy)).collect::<Vec<_>>();
        let (mut table, number) = table(&listed(true));
        let count = |table: &Table| table.health(at("p", "c"))[0].resources.as_ref().unwrap().len();
        give(&mut table, at("p", "c"), HEALTH_MAX);
        assert_eq!(count(&table), HEALTH_MAX);
        table.remove("p");
        give(&mut table, at("p", "c"), HEALTH_MAX + 1);
        assert_eq!(count(&table), 0);
        table.list(NAME, number, devices(&listed(false))).unwrap();
        assert_eq!(count(&table), HEALTH_MAX);
    }

    #[test]
    fn the_plugin_can_prefer_other_devices_of_the_nodes_of_a_reservation() {
        let (mut table, number) = table(&[]);
        let on = |node| Device { is_healthy: true, nodes: vec![node] };
        let list = [("a", 0), ("b", 1), ("c", 1)].map(|(id, node)| (id.to_owned(), on(node)));
        table.list(NAME, number, BTreeMap::from(list)).unwrap();
        let with_affinity = DeviceRequest { affinity: Some(0b10), ..want(1) };
        let reusing = |id: &str| DeviceRequest { reusable: BTreeSet::from([id.to_owned()]), ..want(1) };
        let ids = |id: &str| Ok(vec![id.to_owned()]);
        assert_eq!(table.reserve(at("p", "init"), &with_affinity, &[]), ids("b"));
        assert_eq!(
            table.reserve(
                at("p", "c"),
                &DeviceRequest { affinity: with_affinity.affinity, ..reusing("b") },
                &[]
            ),
            ids("b")
        );
        let available = match table.step(at("p", "init"), &want(1), "boot") {
            Ok(Step::Choose(choice)) => choice.options().unwrap().available,
            other => panic!("{other:?}"),
        };
        assert_eq!(available, ["b", "c"]);
        let free = |table: &Table| table.free(NAME).into_keys().collect::<String>();
        assert_eq!(table.reserve(at("p", "init"), &want(1), &["c".to_owned()]), ids("c"));
        assert_eq!(free(&table), "a", "the other container has b");
        assert_eq!(table.reserve(at("p", "c"), &reusing("c"), &[]), ids("c"));
        assert_eq!(free(&table), "ab");
        assert!(table.answer(at("p", "c"), NAME, Edits::default(), "boot"));
        assert_eq!(table.step(at("p", "c"), &want(1), "boot"), Ok(Step::Done));
    }

    #[test]
    fn a_pod_keeps_its_devices_in_its_topology_hints() {
        let (mut table, _) = table(&[("a", true), ("b", true)]);
        let hint = Some(vec![DeviceHint { nodes: 0b1, preferred: true }]);
        assert_eq!(table.pod_hints("p", NAME, 2, &[0]), hint);
        give(&mut table, at("p", "c"), 2);
        assert_eq!(table.pod_hints("p", NAME, 2, &[0]), hint);
        assert_eq!(table.hints(at("p", "c"), &want(2), &[0]), hint);
        assert_eq!(table.pod_hints("q", NAME, 1, &[0]), Some(Vec::new()));
        assert_eq!(table.pod_hints("q", "x.io/other", 1, &[0]), None);
    }

    #[test]
    fn the_topology_hints_of_a_pod_with_all_its_devices_are_for_these() {
        let (mut table, number) = table(&[]);
        let on = |node| Device { is_healthy: true, nodes: vec![node] };
        let devices = BTreeMap::from([("a".to_owned(), on(0)), ("b".to_owned(), on(1))]);
        table.list(NAME, number, devices).unwrap();
        assert_eq!(give(&mut table, at("p", "c"), 1), ["a"]);
        let hint = |nodes, preferred| DeviceHint { nodes, preferred };
        let found = table.pod_hints("p", NAME, 1, &[0, 1]).unwrap();
        assert_eq!(found, [hint(0b01, true), hint(0b11, false)]);
    }

    #[test]
    fn an_unhealthy_device_of_a_pod_stays_unhealthy_without_its_plugin() {
        let (mut table, number) = table(&[("a", true), ("b", true)]);
        let owner = at("p", "c");
        assert_eq!(give(&mut table, owner, 1), ["a"]);
        table.list(NAME, number, devices(&[("a", false), ("b", true)])).unwrap();
        table.disconnect(NAME, number);
        table.expire(NAME, number);
        assert_eq!(count(&table), (0, 0));
        assert_eq!(table.hints(at("q", "c"), &want(1), &[0]), None);
        let health = table.health(owner).remove(0).resources.unwrap().remove(0).health;
        assert_eq!(health.as_deref(), Some("Unhealthy"));
        // The new plugin does not list the device, so it counts as healthy.
        let again = table.connect(NAME);
        let changed = table.list(NAME, again, devices(&[("b", true)])).unwrap();
        assert_eq!(changed, BTreeSet::from(["p".to_owned()]));
        assert_eq!(count(&table), (1, 1));
    }

    #[test]
    fn changes_of_health_are_reported_to_the_pods_that_have_the_device() {
        let (mut table, number) = table(&[("a", true), ("b", true)]);
        let id = give(&mut table, at("p", "c"), 1).remove(0);
        let health = |table: &Table| {
            let status = table.health(at("p", "c")).remove(0);
            let resource = status.resources.unwrap().remove(0);
            assert_eq!((status.name.as_str(), &resource.resource_id), (NAME, &id));
            resource.health.unwrap()
        };
        assert_eq!(health(&table), "Healthy");
        let list = |ok| devices(&[(id.as_str(), ok), ("z", false)]);
        let changed = table.list(NAME, number, list(false)).unwrap();
        assert_eq!(changed, BTreeSet::from(["p".to_owned()]));
        assert_eq!(health(&table), "Unhealthy");
        assert!(table.list(NAME, number, list(false)).unwrap().is_empty());
        let record = PodDevices { uid: "q".to_owned(), ..table.pod("p").unwrap().clone() };
        table.restore_pod(record);
        let both = BTreeSet::from(["p", "q"].map(str::to_owned));
        assert_eq!(table.list(NAME, number, devices(&[])).unwrap(), both);
        assert_eq!(health(&table), "Healthy");
        assert!(table.health(at("p", "other")).is_empty());
    }

    #[test]
    fn all_resources_together_have_a_limit_of_devices() {
        let (mut table, number) = table(&[("a", true)]);
        let many = |nodes: usize| -> BTreeMap<String, Device> {
            let device = Device { is_healthy: true, nodes: vec![0; nodes] };
            (0..TOTAL_MAX / 4).map(|id| (id.to_string(), device.clone())).collect()
        };
        assert!(table.has_room_for(NAME, &many(3)), "its present devices are replaced");
        assert!(!table.has_room_for("x.io/b", &many(3)));
        assert!(!table.has_room_for(NAME, &many(4)));
        table.list(NAME, number, BTreeMap::new()).unwrap();
        assert!(table.has_room_for("x.io/b", &many(3)));
    }

    #[test]
    fn removed_resources_make_room_for_others() {
        let (mut table, number) = table(&[("a", true)]);
        let names: Vec<String> = (1..RESOURCES_MAX).map(|number| format!("x.io/other{number}")).collect();
        names.iter().for_each(|name| table.restore_resource(name));
        assert!(!table.make_room() && table.has(NAME));
        table.disconnect(NAME, number);
        table.expire(NAME, number);
        assert!(table.make_room() && !table.has(NAME) && table.has(&names[0]));
        assert_eq!(table.forgotten, 1);
        table.restore_resource(NAME);
        table.expire(NAME, 0);
        table.forgotten = FORGOTTEN_MAX;
        assert!(!table.make_room() && table.has(NAME), "names do not add up without end");
    }
}

//! Reports the health of a pod's devices in the status of its containers. Source: `UpdateAllocatedResourcesStatus` of
//! `pkg/kubelet/cm/dra`.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::{Container, Pod, PodStatus, ResourceHealth, ResourceStatus};

use super::Dra;
use super::claim::{is_for, resolve};
use super::health::{Device as DeviceId, DeviceHealth};
use super::record::{Device, Key, Record};

impl Dra {
    /// Reports the health of the pod's devices in the statuses of its containers, except init containers, as upstream.
    pub(crate) fn report_health(&self, pod: &Pod, status: &mut PodStatus) {
        if !self.holds(pod.metadata.uid.as_deref().unwrap_or_default()) {
            return;
        }
        let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
        for container in status.container_statuses.iter_mut().flatten() {
            let own = containers.clone().find(|own| own.name == container.name);
            let health = own.map(|own| self.health_of(pod, own)).unwrap_or_default();
            if !health.is_empty() {
                let reported = container.allocated_resources_status.get_or_insert_default();
                reported.retain(|old| health.iter().all(|new| new.name != old.name));
                reported.extend(health);
            }
        }
    }

    /// Waits until the health of any device of a pod has changed. Returns the uids of these pods. Cancel-safe.
    pub(crate) async fn next_health_changes(&self) -> BTreeSet<String> {
        loop {
            let changed = self.shared.health_of_devices.next_changes().await;
            let pods = self.shared.records.with(|records| pods_of(records, &changed));
            if !pods.is_empty() {
                return pods;
            }
        }
    }

    /// The health of a container's devices, by its claims.
    fn health_of(&self, pod: &Pod, container: &Container) -> Vec<ResourceStatus> {
        let table = &self.shared.health_of_devices;
        let health = |driver: &str, device: &DeviceId| table.get(driver, device);
        self.shared.records.with(|records| statuses(pod, container, records, health))
    }
}

/// The pods with one of these devices: driver, pool and name.
fn pods_of(records: &BTreeMap<Key, Record>, changed: &BTreeSet<(String, DeviceId)>) -> BTreeSet<String> {
    let has_changed = |record: &&Record| {
        record.drivers.iter().any(|(driver, devices)| {
            let mut ids = devices.iter().map(|one| (driver.clone(), (one.pool.clone(), one.device.clone())));
            ids.any(|id| changed.contains(&id))
        })
    };
    records.values().filter(has_changed).flat_map(|record| record.pods.iter().cloned()).collect()
}

/// The health of a container's devices, by its claims. Claims without prepared devices are left out.
fn statuses(
    pod: &Pod,
    container: &Container,
    records: &BTreeMap<Key, Record>,
    health: impl Fn(&str, &DeviceId) -> DeviceHealth,
) -> Vec<ResourceStatus> {
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    let claims = container.resources.iter().flat_map(|resources| resources.claims.iter().flatten());
    let mut found = Vec::new();
    for claim in claims {
        let Ok(Some(used)) = resolve(pod, &claim.name) else { continue };
        let Some(record) = records.get(&Key::new(namespace, &used.name)) else { continue };
        let request = claim.request.as_deref().unwrap_or_default();
        let mut resources: BTreeMap<String, ResourceHealth> = BTreeMap::new();
        for (driver, devices) in &record.drivers {
            for device in devices.iter().filter(|device| is_for(device, request)) {
                let of_device = health(driver, &(device.pool.clone(), device.device.clone()));
                let id = resource_id(driver, device);
                resources.entry(id.clone()).or_insert_with(|| ResourceHealth {
                    health: Some(of_device.health.name().to_owned()),
                    message: Some(of_device.message).filter(|message| !message.is_empty()),
                    resource_id: id,
                });
            }
        }
        if resources.is_empty() {
            continue;
        }
        let name = match request {
            "" => format!("claim:{}", claim.name),
            request => format!("claim:{}/{request}", claim.name),
        };
        found.push(ResourceStatus { name, resources: Some(resources.into_values().collect()) });
    }
    found
}

/// The id of a device: its first CDI id, or its name if the device has no CDI id.
fn resource_id(driver: &str, device: &Device) -> String {
    let own = || format!("{driver}/{}/{}", device.pool, device.device);
    device.cdi.first().cloned().unwrap_or_else(own)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::health::Health;
    use super::*;

    fn record() -> BTreeMap<Key, Record> {
        let device = |request: &str, device: &str, cdi: &[&str]| Device {
            requests: vec![request.to_owned()],
            pool: "p".to_owned(),
            device: device.to_owned(),
            cdi: cdi.iter().map(|id| (*id).to_owned()).collect(),
        };
        let devices = vec![device("r", "a", &["v/c=a"]), device("r", "b", &["v/c=a"]), device("s", "c", &[])];
        let record = Record {
            namespace: "ns".to_owned(),
            name: "c".to_owned(),
            uid: "uid".to_owned(),
            pods: BTreeSet::from(["pod".to_owned()]),
            drivers: BTreeMap::from([("d".to_owned(), devices)]),
            skips_unprepare: BTreeSet::new(),
            prepared: None,
        };
        BTreeMap::from([(record.key(), record)])
    }

    #[test]
    fn each_claim_of_a_container_has_the_health_of_its_devices_once() {
        let claims = json!([{"name": "x"}, {"name": "x", "request": "r"}, {"name": "absent"}]);
        let pod: Pod = serde_json::from_value(json!({"metadata": {"namespace": "ns"}, "spec": {
            "resourceClaims": [{"name": "x", "resourceClaimName": "c"}, {"name": "absent", "resourceClaimName": "e"}],
            "containers": [{"name": "a", "resources": {"claims": claims}}]}}))
        .unwrap();
        let health = |_: &str, (_, name): &DeviceId| match name.as_str() {
            "a" => DeviceHealth { health: Health::Unhealthy, message: "hot".to_owned() },
            _ => DeviceHealth::default(),
        };
        let container = &pod.spec.as_ref().unwrap().containers[0];
        let found = statuses(&pod, container, &record(), health);
        let expected = json!([
            {"name": "claim:x", "resources": [{"health": "Unknown", "resourceID": "d/p/c"},
                {"health": "Unhealthy", "message": "hot", "resourceID": "v/c=a"}]},
            {"name": "claim:x/r", "resources": [{"health": "Unhealthy", "message": "hot", "resourceID": "v/c=a"}]},
        ]);
        assert_eq!(serde_json::to_value(found).unwrap(), expected);
    }

    #[test]
    fn the_pods_of_a_changed_device_are_found() {
        let changed = |driver: &str, name: &str| {
            BTreeSet::from([(driver.to_owned(), ("p".to_owned(), name.to_owned()))])
        };
        assert_eq!(pods_of(&record(), &changed("d", "b")), BTreeSet::from(["pod".to_owned()]));
        assert!(pods_of(&record(), &changed("d", "z")).is_empty());
        assert!(pods_of(&record(), &changed("e", "b")).is_empty());
    }
}

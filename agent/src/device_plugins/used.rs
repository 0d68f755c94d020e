//! The devices that pods have. Pure.

use std::collections::{BTreeMap, HashMap};

/// Uids of the pods that have a device. Two pods have the same device only after a crash of the agent.
type Owners = Vec<String>;

/// The owners of devices, by resource and device.
#[derive(Debug, Default)]
pub(super) struct UsedDevices(BTreeMap<String, HashMap<String, Owners>>);

// === impl UsedDevices ===

impl UsedDevices {
    /// The devices of a resource that pods have, with their owners. None if pods have no device of the resource.
    pub(super) fn of(&self, resource: &str) -> Option<&HashMap<String, Owners>> {
        self.0.get(resource)
    }

    /// Adds a pod to the owners of devices.
    pub(super) fn hold<'a>(&mut self, uid: &str, resource: &str, ids: impl IntoIterator<Item = &'a String>) {
        let devices = self.0.entry(resource.to_owned()).or_default();
        for id in ids {
            let owners = devices.entry(id.clone()).or_default();
            if !owners.iter().any(|owner| owner == uid) {
                owners.push(uid.to_owned());
            }
        }
    }

    /// Removes a pod from the owners of devices. A device without owners is free.
    pub(super) fn release<'a>(
        &mut self,
        uid: &str,
        resource: &str,
        ids: impl IntoIterator<Item = &'a String>,
    ) {
        let Some(devices) = self.0.get_mut(resource) else { return };
        for id in ids {
            let Some(owners) = devices.get_mut(id) else { continue };
            owners.retain(|owner| owner != uid);
            if owners.is_empty() {
                devices.remove(id);
            }
        }
        if devices.is_empty() {
            self.0.remove(resource);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_of_two_pods_is_free_when_both_have_released_it() {
        let ids = ["a", "b"].map(str::to_owned);
        let mut used = UsedDevices::default();
        used.hold("u", "x.io/a", &ids);
        used.hold("u", "x.io/a", &ids);
        used.hold("v", "x.io/a", &ids[..1]);
        used.release("u", "x.io/a", &ids);
        let left = HashMap::from([("a".to_owned(), vec!["v".to_owned()])]);
        assert_eq!(used.of("x.io/a"), Some(&left));
        used.release("u", "x.io/a", &ids);
        assert_eq!(used.of("x.io/a"), Some(&left), "not its device");
        used.release("v", "x.io/a", &ids);
        assert_eq!(used.of("x.io/a"), None);
    }
}

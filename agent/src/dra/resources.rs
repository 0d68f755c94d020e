//! The claims of a container in the pod resources API. Pure.

use coracle_proto::pod_resources as api;
use k8s_openapi::api::core::v1::{Container, Pod};

use super::claim;
use super::record::{Device, Key, Record};

/// The prepared claims of a container. As upstream, each claim is listed with all its devices, including those of
/// requests that the container does not use.
pub(super) fn of_container<'a>(
    pod: &Pod,
    container: &Container,
    record: impl Fn(&Key) -> Option<&'a Record>,
) -> Vec<api::DynamicResource> {
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    // A container with a claim that does not exist yet has no devices.
    let claims = claim::requests(pod, container).unwrap_or_default();
    let records = claims.keys().filter_map(|name| record(&Key::new(namespace, name)));
    records.filter(|record| record.prepared.is_some()).map(resource).collect()
}

fn resource(record: &Record) -> api::DynamicResource {
    let devices = record.drivers.iter().flat_map(|(driver, devices)| {
        devices.iter().map(move |device: &Device| api::ClaimResource {
            cdi_devices: device.cdi.iter().map(|name| api::CdiDevice { name: name.clone() }).collect(),
            driver_name: driver.clone(),
            pool_name: device.pool.clone(),
            device_name: device.device.clone(),
            share_id: None,
        })
    });
    api::DynamicResource {
        claim_name: record.name.clone(),
        claim_namespace: record.namespace.clone(),
        claim_resources: devices.collect(),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use serde_json::json;

    use super::*;

    #[test]
    fn a_container_has_the_devices_of_its_prepared_claims() {
        let pod: Pod = serde_json::from_value(json!({"metadata": {"namespace": "ns"}, "spec": {
            "resourceClaims": [{"name": "a", "resourceClaimName": "c"}], "containers": [
                {"name": "one", "resources": {"claims": [{"name": "a"}]}}, {"name": "plain"}]}}))
        .unwrap();
        let device = Device {
            pool: "p".to_owned(),
            device: "0".to_owned(),
            cdi: vec!["v/c=0".to_owned()],
            ..Device::default()
        };
        let mut record = Record {
            namespace: "ns".to_owned(),
            name: "c".to_owned(),
            uid: "u".to_owned(),
            pods: BTreeSet::new(),
            drivers: BTreeMap::from([("d".to_owned(), vec![device])]),
            prepared: None,
            skips_unprepare: BTreeSet::new(),
        };
        let containers = &pod.spec.as_ref().unwrap().containers;
        let found = |record: &Record, index: usize| {
            of_container(&pod, &containers[index], |key| (*key == record.key()).then_some(record))
        };
        assert!(found(&record, 0).is_empty());
        record.prepared = Some("boot".to_owned());
        let claims = found(&record, 0);
        assert_eq!((claims[0].claim_name.as_str(), claims[0].claim_namespace.as_str()), ("c", "ns"));
        let device = &claims[0].claim_resources[0];
        assert_eq!((device.driver_name.as_str(), device.cdi_devices[0].name.as_str()), ("d", "v/c=0"));
        assert!(found(&record, 1).is_empty());
    }
}

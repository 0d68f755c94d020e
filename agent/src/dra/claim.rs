//! The ResourceClaims of a pod: their names, whether the pod may use them, and the devices of its containers. Pure.

use std::collections::{BTreeMap, BTreeSet};

use coracle_values::CollectMap;
use k8s_openapi::api::core::v1::{Container, Pod, PodExtendedResourceClaimStatus};
use k8s_openapi::api::resource::v1::{DeviceRequestAllocationResult, ResourceClaim};

use super::record::{Device, Key, Record};

/// Maximum length of a claim's uid, which is the name of its record's file.
const UID_MAX: usize = 64;

/// The reason why a pod cannot use a claim. Upstream's messages
/// (`staging/src/k8s.io/dynamic-resource-allocation/resourceclaim`).
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ClaimError {
    #[error("pod claim {0}: the ResourceClaim has not been created from the template yet")]
    NotCreated(String),
    #[error("ResourceClaim {0} was not created for the pod (pod is not owner)")]
    NotOwner(String),
    #[error("the pod is not allowed to use ResourceClaim {0}: it is not reserved for the pod")]
    NotReserved(String),
    #[error("ResourceClaim {0}: not allocated")]
    NotAllocated(String),
    #[error("ResourceClaim {0}: invalid uid")]
    Uid(String),
    #[error("container {container}: ResourceClaim {claim} is not prepared")]
    NotPrepared { container: String, claim: String },
}

/// A claim that a pod uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Used {
    pub(super) name: String,
    /// Whether the claim was made for the pod from a template: the pod must be its owner.
    pub(super) must_be_owned: bool,
}

/// The claims of a pod: named in its spec, made from templates, or made for its extended resources. An entry whose
/// template needs no claim is left out.
pub(super) fn used(pod: &Pod) -> Result<Vec<Used>, ClaimError> {
    let mut found = Vec::new();
    for claim in pod.spec.iter().flat_map(|spec| spec.resource_claims.iter().flatten()) {
        found.extend(resolve(pod, &claim.name)?);
    }
    let extended = extended(pod).map(|status| status.resource_claim_name.clone());
    found.extend(extended.map(|name| Used { name, must_be_owned: true }));
    Ok(found)
}

/// The claim of an entry of `spec.resourceClaims`. None if the entry needs no claim.
pub(super) fn resolve(pod: &Pod, entry: &str) -> Result<Option<Used>, ClaimError> {
    let mut entries = pod.spec.iter().flat_map(|spec| spec.resource_claims.iter().flatten());
    let Some(claim) = entries.find(|claim| claim.name == entry) else { return Ok(None) };
    if let Some(name) = &claim.resource_claim_name {
        return Ok(Some(Used { name: name.clone(), must_be_owned: false }));
    }
    if claim.resource_claim_template_name.is_none() {
        return Err(ClaimError::NotCreated(entry.to_owned()));
    }
    let mut statuses = pod.status.iter().flat_map(|status| status.resource_claim_statuses.iter().flatten());
    let status = statuses.find(|status| status.name == entry);
    let status = status.ok_or_else(|| ClaimError::NotCreated(entry.to_owned()))?;
    Ok(status.resource_claim_name.clone().map(|name| Used { name, must_be_owned: true }))
}

fn extended(pod: &Pod) -> Option<&PodExtendedResourceClaimStatus> {
    pod.status.as_ref()?.extended_resource_claim_status.as_ref()
}

/// Checks that the pod may use the claim. Returns the claim's record before its preparation.
pub(super) fn admit(pod: &Pod, used: &Used, claim: &ResourceClaim) -> Result<Record, ClaimError> {
    let name = used.name.clone();
    let pod_uid = pod.metadata.uid.as_deref().unwrap_or_default();
    let mut owners = claim.metadata.owner_references.iter().flatten();
    if used.must_be_owned && !owners.any(|owner| owner.controller == Some(true) && owner.uid == pod_uid) {
        return Err(ClaimError::NotOwner(name));
    }
    let status = claim.status.as_ref();
    let mut reserved = status.iter().flat_map(|status| status.reserved_for.iter().flatten());
    if !reserved.any(|consumer| consumer.resource == "pods" && consumer.uid == pod_uid) {
        return Err(ClaimError::NotReserved(name));
    }
    let allocation = status.and_then(|status| status.allocation.as_ref());
    let Some(allocation) = allocation else { return Err(ClaimError::NotAllocated(name)) };
    let uid = claim.metadata.uid.clone().filter(|uid| is_file_name(uid));
    let Some(uid) = uid else { return Err(ClaimError::Uid(name)) };
    let results = allocation.devices.iter().flat_map(|devices| devices.results.iter().flatten());
    let prepare = drivers(results.clone(), "NodePrepareResources");
    let unprepare = drivers(results, "NodeUnprepareResources");
    Ok(Record {
        namespace: pod.metadata.namespace.clone().unwrap_or_default(),
        name,
        uid,
        pods: BTreeSet::new(),
        skips_unprepare: prepare.difference(&unprepare).cloned().collect(),
        drivers: prepare.into_iter().map(|driver| (driver, Vec::new())).collect_map(),
        prepared: None,
    })
}

/// The drivers that must be called for an operation. A driver is not called if all its devices in the claim skip the
/// operation (`skipNodeOperations`, since Kubernetes 1.37).
fn drivers<'a>(
    results: impl Iterator<Item = &'a DeviceRequestAllocationResult>,
    operation: &str,
) -> BTreeSet<String> {
    let skips = |result: &DeviceRequestAllocationResult| {
        result.skip_node_operations.iter().flatten().any(|skipped| skipped == "*" || skipped == operation)
    };
    results.filter(|result| !skips(result)).map(|result| result.driver.clone()).collect()
}

fn is_file_name(uid: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
    !uid.is_empty() && uid.len() <= UID_MAX && uid.bytes().all(plain)
}

/// The claims that a container uses, each with the requests whose devices it gets. An empty request means all requests.
pub(super) fn requests(
    pod: &Pod,
    container: &Container,
) -> Result<BTreeMap<String, Vec<String>>, ClaimError> {
    let mut found: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for claim in container.resources.iter().flat_map(|resources| resources.claims.iter().flatten()) {
        if let Some(used) = resolve(pod, &claim.name)? {
            found.entry(used.name).or_default().push(claim.request.clone().unwrap_or_default());
        }
    }
    if let Some(status) = extended(pod) {
        let wanted = container.resources.as_ref().and_then(|resources| resources.requests.as_ref());
        let wants = |resource: &str| wanted.is_some_and(|wanted| wanted.contains_key(resource));
        let mappings = status.request_mappings.iter();
        let own = mappings.filter(|m| m.container_name == container.name && wants(&m.resource_name));
        for mapping in own {
            let requests = found.entry(status.resource_claim_name.clone()).or_default();
            requests.push(mapping.request_name.clone());
        }
    }
    Ok(found)
}

/// The CDI ids of the devices that a container gets, without duplicates.
pub(super) fn devices<'a>(
    pod: &Pod,
    container: &Container,
    record: impl Fn(&Key) -> Option<&'a Record>,
) -> Result<Vec<String>, ClaimError> {
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    let mut ids: Vec<String> = Vec::new();
    let mut known = BTreeSet::new();
    for (claim, requests) in requests(pod, container)? {
        let record = record(&Key::new(namespace, &claim)).filter(|record| record.prepared.is_some());
        let Some(record) = record else {
            return Err(ClaimError::NotPrepared { container: container.name.clone(), claim });
        };
        for request in requests {
            let given = record.drivers.values().flatten().filter(|device| is_for(device, &request));
            let new = given.flat_map(|device| &device.cdi).filter(|id| known.insert((*id).clone()));
            ids.extend(new.cloned());
        }
    }
    Ok(ids)
}

/// Whether the request got the device. A device of `request/subrequest` belongs to the request.
pub(super) fn is_for(device: &Device, request: &str) -> bool {
    let main = |name: &str| name.split_once('/').is_some_and(|(main, _)| main == request);
    request.is_empty()
        || device.requests.is_empty()
        || device.requests.iter().any(|name| name == request || main(name))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn pod(spec: Value, status: Value) -> Pod {
        let metadata = json!({"name": "p", "namespace": "ns", "uid": "pod-uid"});
        serde_json::from_value(json!({"metadata": metadata, "spec": spec, "status": status})).unwrap()
    }

    fn claim(fields: Value) -> ResourceClaim {
        let mut claim = json!({"metadata": {"name": "c", "namespace": "ns", "uid": "claim-uid"},
            "spec": {}, "status": {"reservedFor": [{"resource": "pods", "name": "p", "uid": "pod-uid"}],
            "allocation": {"devices": {"results": [
                {"driver": "d.example.com", "pool": "n", "device": "0", "request": "r"}]}}}});
        for (path, value) in fields.as_object().unwrap() {
            *claim.pointer_mut(path).unwrap() = value.clone();
        }
        serde_json::from_value(claim).unwrap()
    }

    #[test]
    fn claims_are_named_made_from_templates_or_for_extended_resources() {
        let spec = json!({"containers": [], "resourceClaims": [
            {"name": "a", "resourceClaimName": "named"}, {"name": "b", "resourceClaimTemplateName": "t"},
            {"name": "none", "resourceClaimTemplateName": "t"}]});
        let status = json!({"extendedResourceClaimStatus": {"resourceClaimName": "ext", "requestMappings": []},
            "resourceClaimStatuses": [{"name": "b", "resourceClaimName": "p-b-x"}, {"name": "none"}]});
        let names = |used: Vec<Used>| -> Vec<_> {
            used.into_iter().map(|used| (used.name, used.must_be_owned)).collect()
        };
        let expected = [("named", false), ("p-b-x", true), ("ext", true)];
        let found = names(used(&pod(spec.clone(), status)).unwrap());
        assert_eq!(found, expected.map(|(name, owned)| (name.to_owned(), owned)));
        assert_eq!(used(&pod(spec, json!({}))), Err(ClaimError::NotCreated("b".to_owned())));
    }

    #[test]
    fn a_claim_must_be_allocated_and_reserved_for_the_pod() {
        let pod = pod(json!({"containers": []}), json!({}));
        let named = Used { name: "c".to_owned(), must_be_owned: false };
        let admitted = admit(&pod, &named, &claim(json!({}))).unwrap();
        assert_eq!((admitted.uid.as_str(), admitted.drivers.len()), ("claim-uid", 1));
        let refused = |used: &Used, fields: Value| admit(&pod, used, &claim(fields)).unwrap_err();
        let name = "c".to_owned();
        for other in [json!([]), json!([{"resource": "pods", "name": "p", "uid": "other"}])] {
            let fields = json!({"/status/reservedFor": other});
            assert_eq!(refused(&named, fields), ClaimError::NotReserved(name.clone()));
        }
        let unallocated = json!({"/status/allocation": null});
        assert_eq!(refused(&named, unallocated), ClaimError::NotAllocated(name.clone()));
        let traversal = json!({"/metadata/uid": "../../x"});
        assert_eq!(refused(&named, traversal), ClaimError::Uid(name.clone()));
        let owned = Used { must_be_owned: true, ..named };
        assert_eq!(refused(&owned, json!({})), ClaimError::NotOwner(name));
    }

    #[test]
    fn a_driver_is_called_unless_all_its_devices_skip_the_call() {
        let result = |driver: &str, skipped: &[&str]| json!({"driver": driver, "pool": "n", "device": "0", "request": "r", "skipNodeOperations": skipped});
        let both = ["NodePrepareResources", "NodeUnprepareResources"];
        let results = json!([
            result("all", &["*"]),
            result("both", &both),
            result("none", &["Other"]),
            result("part", &["*"]),
            result("part", &[]),
            result("unprepare", &both[1..])
        ]);
        let claim = claim(json!({"/status/allocation/devices/results": results}));
        let named = Used { name: "c".to_owned(), must_be_owned: false };
        let record = admit(&pod(json!({"containers": []}), json!({})), &named, &claim).unwrap();
        assert_eq!(record.drivers.into_keys().collect::<Vec<_>>(), ["none", "part", "unprepare"]);
        assert_eq!(record.skips_unprepare.into_iter().collect::<Vec<_>>(), ["unprepare"]);
    }

    #[test]
    fn a_container_gets_the_devices_of_its_requests_once() {
        let device = |request: &str, cdi: &str| Device {
            requests: if request.is_empty() { Vec::new() } else { vec![request.to_owned()] },
            cdi: vec![cdi.to_owned()],
            ..Device::default()
        };
        let spec = json!({"resourceClaims": [{"name": "a", "resourceClaimName": "c"}], "containers": [
            {"name": "all", "resources": {"claims": [{"name": "a"}, {"name": "a", "request": "r"}]}},
            {"name": "one", "resources": {"claims": [{"name": "a", "request": "r"}]}},
            {"name": "ext", "resources": {"requests": {"example.com/gpu": "1"}}},
            {"name": "plain"}]});
        let mapping = json!({"containerName": "ext", "requestName": "q", "resourceName": "example.com/gpu"});
        let status = json!({"extendedResourceClaimStatus":
            {"resourceClaimName": "c", "requestMappings": [mapping]}});
        let pod = pod(spec, status);
        let used = Used { name: "c".to_owned(), must_be_owned: false };
        let mut record = admit(&pod, &used, &claim(json!({}))).unwrap();
        let devices_of = |record: &Record, index: usize| {
            let container = &pod.spec.as_ref().unwrap().containers[index];
            devices(&pod, container, |key| (*key == record.key()).then_some(record))
        };
        assert!(matches!(devices_of(&record, 0), Err(ClaimError::NotPrepared { .. })));
        record.prepared = Some("boot".to_owned());
        let given = vec![device("r/sub", "v/c=r"), device("q", "v/c=q"), device("", "v/c=both")];
        record.drivers.insert("d.example.com".to_owned(), given);
        assert_eq!(devices_of(&record, 0).unwrap(), ["v/c=r", "v/c=q", "v/c=both"]);
        assert_eq!(devices_of(&record, 1).unwrap(), ["v/c=r", "v/c=both"]);
        assert_eq!(devices_of(&record, 2).unwrap(), ["v/c=q", "v/c=both"]);
        assert_eq!(devices_of(&record, 3).unwrap(), Vec::<String>::new());
    }
}

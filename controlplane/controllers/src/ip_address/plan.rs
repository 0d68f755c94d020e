//! Compares the service of an address with the address's IPAddress. No I/O. Upstream's API server writes the IPAddress
//! before the service. Here the IPAddress is created from the service.

use std::net::IpAddr;
use std::sync::Arc;

use serde_json::{Value, json};

use crate::object::{IPAddress, Key, ObjectExt, Service};

/// Label of an IPAddress with the name of its manager.
const MANAGED_BY: &str = "ipaddress.kubernetes.io/managed-by";
/// The manager of the addresses of services, as upstream.
const MANAGER: &str = "ipallocator.k8s.io";
/// Label of an IPAddress with its family.
const FAMILY: &str = "ipaddress.kubernetes.io/ip-family";

/// The action for the IPAddress of one address.
#[derive(Debug)]
pub(crate) enum Action {
    Create(Value),
    /// The reference of an IPAddress is immutable: an IPAddress with a wrong reference is deleted, then created again.
    Delete(Arc<IPAddress>),
    /// Another program has created the IPAddress of a service's address.
    Foreign(Arc<IPAddress>, Arc<Service>),
}

/// Whether an IPAddress belongs to this controller.
pub(crate) fn is_ours(address: &IPAddress) -> bool {
    let labels = address.metadata.labels.as_ref();
    labels.and_then(|labels| labels.get(MANAGED_BY)).is_some_and(|manager| manager == MANAGER)
}

/// The next action for an address. After each action the address is planned again.
pub(crate) fn plan(
    address: IpAddr,
    service: Option<Arc<Service>>,
    observed: Option<Arc<IPAddress>>,
) -> Option<Action> {
    match (service, observed) {
        (None, None) => None,
        (Some(service), None) => Some(Action::Create(desired(address, &service.key()))),
        (service, Some(observed)) if is_ours(&observed) => {
            let is_right = service.is_some_and(|service| refers_to(&observed, &service.key()));
            (!is_right && !observed.is_being_deleted()).then_some(Action::Delete(observed))
        }
        (Some(service), Some(observed)) => Some(Action::Foreign(observed, service)),
        (None, Some(_foreign)) => None,
    }
}

fn refers_to(address: &IPAddress, service: &Key) -> bool {
    let parent = &address.spec.parent_ref;
    parent.group.as_deref().unwrap_or_default().is_empty()
        && parent.resource == "services"
        && parent.namespace.as_deref() == Some(&service.namespace)
        && parent.name == service.name
}

fn desired(address: IpAddr, service: &Key) -> Value {
    let family = if address.is_ipv4() { "IPv4" } else { "IPv6" };
    json!({
        "metadata": {"name": address.to_string(), "labels": {MANAGED_BY: MANAGER, FAMILY: family}},
        "spec": {"parentRef": {"group": "", "resource": "services", "namespace": service.namespace,
            "name": service.name}},
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn service(name: &str) -> Option<Arc<Service>> {
        let value = json!({"metadata": {"namespace": "n", "name": name}, "spec": {}});
        Some(Arc::new(serde_json::from_value(value).unwrap()))
    }

    fn observed(of: &str, manager: &str) -> Option<Arc<IPAddress>> {
        let mut value = desired("10.0.0.1".parse().unwrap(), &Key::new("n", of));
        value["metadata"]["labels"][MANAGED_BY] = manager.into();
        Some(Arc::new(serde_json::from_value(value).unwrap()))
    }

    #[test]
    fn an_address_object_follows_its_service() {
        let address = "10.0.0.1".parse().unwrap();
        let Some(Action::Create(made)) = plan(address, service("a"), None) else { panic!() };
        assert_eq!(
            (&made["metadata"]["name"], &made["spec"]["parentRef"]["name"]),
            (&json!("10.0.0.1"), &json!("a"))
        );
        assert_eq!(made["metadata"]["labels"][FAMILY], "IPv4");
        assert!(plan(address, service("a"), observed("a", MANAGER)).is_none());
        assert!(plan(address, None, None).is_none());
        for wrong in [service("b"), None] {
            assert!(matches!(plan(address, wrong, observed("a", MANAGER)), Some(Action::Delete(_))));
        }
    }

    #[test]
    fn objects_of_other_managers_stay() {
        let address = "10.0.0.1".parse().unwrap();
        assert!(plan(address, None, observed("a", "x")).is_none());
        assert!(matches!(plan(address, service("a"), observed("a", "x")), Some(Action::Foreign(..))));
    }
}

//! Endpoints and EndpointSlices. Services with the same pods have equal endpoints, so each endpoint is stored once.

use std::sync::{Arc, LazyLock};

use coracle_values::object::without_managed_fields;
use coracle_values::resource;
use k8s_openapi::api::core::v1::{EndpointAddress, EndpointPort, EndpointSubset};
use k8s_openapi::api::discovery::v1::{self, Endpoint};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::{Deserialize, Deserializer};

use super::Object;
use super::shared::SharedValues;

static ENDPOINTS: LazyLock<SharedValues<Endpoint>> = LazyLock::new(SharedValues::new);
static ADDRESSES: LazyLock<SharedValues<EndpointAddress>> = LazyLock::new(SharedValues::new);

/// The endpoints of a service.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Endpoints {
    #[serde(deserialize_with = "without_managed_fields")]
    pub(crate) metadata: ObjectMeta,
    pub(crate) subsets: Option<Vec<Subset>>,
}

/// Addresses with common ports.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct Subset {
    #[serde(deserialize_with = "addresses")]
    pub(crate) addresses: Box<[Arc<EndpointAddress>]>,
    #[serde(deserialize_with = "addresses")]
    pub(crate) not_ready_addresses: Box<[Arc<EndpointAddress>]>,
    pub(crate) ports: Option<Vec<EndpointPort>>,
}

/// An endpoint slice.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct EndpointSlice {
    #[serde(deserialize_with = "without_managed_fields")]
    pub(crate) metadata: ObjectMeta,
    pub(crate) address_type: String,
    #[serde(deserialize_with = "endpoints")]
    pub(crate) endpoints: Box<[Arc<Endpoint>]>,
    pub(crate) ports: Option<Vec<v1::EndpointPort>>,
}

resource!(Endpoints, "", "endpoints", NamespaceResourceScope);
resource!(EndpointSlice, "discovery.k8s.io", "endpointslices", NamespaceResourceScope);

impl Object for Endpoints {}
impl Object for EndpointSlice {}

// === impl Subset ===

impl Subset {
    /// Whether the subset has exactly these addresses and ports.
    pub(crate) fn equals(&self, other: &EndpointSubset) -> bool {
        let equal = |own: &[Arc<EndpointAddress>], other: &Option<Vec<EndpointAddress>>| {
            own.iter().map(|address| &**address).eq(other.iter().flatten())
        };
        equal(&self.addresses, &other.addresses)
            && equal(&self.not_ready_addresses, &other.not_ready_addresses)
            && self.ports == other.ports
    }
}

fn endpoints<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Box<[Arc<Endpoint>]>, D::Error> {
    let all = Option::<Vec<Endpoint>>::deserialize(deserializer)?.unwrap_or_default();
    Ok(all.into_iter().map(|endpoint| ENDPOINTS.share(endpoint, hash_of_endpoint)).collect())
}

fn addresses<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Box<[Arc<EndpointAddress>]>, D::Error> {
    let all = Option::<Vec<EndpointAddress>>::deserialize(deserializer)?.unwrap_or_default();
    Ok(all.into_iter().map(|address| ADDRESSES.share(address, hash_of_address)).collect())
}

/// The hash of the fields in which endpoints of the same namespace differ.
fn hash_of_endpoint(endpoint: &Endpoint) -> u64 {
    let conditions = endpoint.conditions.as_ref();
    let conditions = conditions.map(|all| (all.ready, all.serving, all.terminating));
    let hints = endpoint.hints.as_ref();
    let zones = hints.and_then(|hints| hints.for_zones.as_ref()).into_iter().flatten();
    let nodes = hints.and_then(|hints| hints.for_nodes.as_ref()).into_iter().flatten();
    let hints: Vec<&str> = zones.map(|zone| &*zone.name).chain(nodes.map(|node| &*node.name)).collect();
    let place = (&endpoint.hostname, &endpoint.node_name, &endpoint.zone);
    let uid = endpoint.target_ref.as_ref().and_then(|target| target.uid.as_ref());
    ENDPOINTS.hash((&endpoint.addresses, uid, conditions, hints, place))
}

/// The hash of the fields in which addresses of the same namespace differ.
fn hash_of_address(address: &EndpointAddress) -> u64 {
    let uid = address.target_ref.as_ref().and_then(|target| target.uid.as_ref());
    ADDRESSES.hash((&address.ip, &address.hostname, &address.node_name, uid))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn slice(service: &str, ready: bool) -> EndpointSlice {
        let endpoint = json!({"addresses": ["10.7.0.1"], "conditions": {"ready": ready}, "nodeName": "n",
            "targetRef": {"kind": "Pod", "name": "p", "uid": "shared-endpoint"}});
        let slice = json!({"metadata": {"name": service}, "addressType": "IPv4", "endpoints": [endpoint]});
        serde_json::from_value(slice).unwrap()
    }

    #[test]
    fn the_slices_of_many_services_share_the_endpoint_of_a_pod() {
        let (one, other, unready) = (slice("a", true), slice("b", true), slice("c", false));
        assert!(Arc::ptr_eq(&one.endpoints[0], &other.endpoints[0]));
        assert!(!Arc::ptr_eq(&one.endpoints[0], &unready.endpoints[0]));
        assert_eq!(one.endpoints[0].conditions.as_ref().unwrap().ready, Some(true));
        assert_eq!(unready.endpoints[0].conditions.as_ref().unwrap().ready, Some(false));
        let none: EndpointSlice = serde_json::from_value(json!({"metadata": {}, "endpoints": null})).unwrap();
        assert!(none.endpoints.is_empty());
    }

    fn subset(ready: &Value, unready: &Value) -> Value {
        json!({"addresses": ready, "notReadyAddresses": unready, "ports": [{"port": 80}]})
    }

    #[test]
    fn endpoints_share_addresses_and_compare_all_of_them() {
        let address = |ip: &str| json!({"ip": ip, "targetRef": {"uid": "shared-address"}});
        let read = |value: &Value| -> Subset { serde_json::from_value(value.clone()).unwrap() };
        let desired = |value: &Value| -> EndpointSubset { serde_json::from_value(value.clone()).unwrap() };
        let one = subset(&json!([address("10.7.0.1")]), &json!([address("10.7.0.2")]));
        assert!(Arc::ptr_eq(&read(&one).addresses[0], &read(&one).addresses[0]));
        assert!(read(&one).equals(&desired(&one)));
        for other in [
            subset(&json!([address("10.7.0.1")]), &json!(null)),
            subset(&json!([address("10.7.0.1")]), &json!([address("10.7.0.3")])),
            subset(&json!([address("10.7.0.1"), address("10.7.0.4")]), &json!([address("10.7.0.2")])),
        ] {
            assert!(!read(&one).equals(&desired(&other)) && read(&other).equals(&desired(&other)));
        }
    }
}

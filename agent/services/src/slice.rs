//! A reduced EndpointSlice: only the fields that consumers read, with parsed addresses.

use std::net::IpAddr;
use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Label of a slice with the name of its service.
const SERVICE_NAME: &str = "kubernetes.io/service-name";
/// Label of a slice that proxies ignore, such as those of headless services.
const HEADLESS: &str = "service.kubernetes.io/headless";
/// Maximum endpoints of a slice. The API server enforces the same maximum.
const ENDPOINTS_MAX: usize = 1000;
/// Maximum ports of a slice; further ports are ignored. Upstream's validation allows 20000, far more than a service
/// has.
const PORTS_MAX: usize = 1000;

/// An EndpointSlice.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
#[serde(default, rename_all = "camelCase")]
pub struct EndpointSlice {
    /// Metadata. [`slim`](Self::slim) removes the metadata that consumers do not read.
    pub metadata: ObjectMeta,
    /// Name of the service. [`slim`](Self::slim) sets it, and removes the label with the name.
    #[serde(skip)]
    service: Option<Box<str>>,
    /// Whether proxies ignore the slice. [`slim`](Self::slim) sets it, and removes the label.
    #[serde(skip)]
    is_headless: bool,
    /// Address family of the endpoints.
    pub address_type: AddressType,
    /// The endpoints, at most 1000.
    #[serde(deserialize_with = "endpoints")]
    pub endpoints: Vec<Endpoint>,
    /// Ports of every endpoint.
    #[serde(deserialize_with = "ports")]
    pub ports: Vec<SlicePort>,
}

coracle_values::resource!(EndpointSlice, "discovery.k8s.io", "endpointslices", NamespaceResourceScope);

/// Address family of a slice.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
pub enum AddressType {
    /// IPv4 addresses.
    IPv4,
    /// IPv6 addresses.
    IPv6,
    /// Names, which no consumer uses.
    #[default]
    #[serde(other)]
    Other,
}

/// An endpoint.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
#[serde(default, rename_all = "camelCase")]
pub struct Endpoint {
    /// The first address. `None` if it is invalid: then the endpoint is ignored.
    #[serde(rename = "addresses", deserialize_with = "first_address", serialize_with = "as_list")]
    pub address: Option<IpAddr>,
    /// State of the endpoint.
    pub conditions: Conditions,
    /// Host name of the endpoint in the DNS domain of a headless service.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hostname: Option<Box<str>>,
    /// The node of the endpoint.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node_name: Option<Box<str>>,
    /// The consumers for which the endpoint is preferred.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hints: Option<Box<Hints>>,
}

/// State of an endpoint. Absent values have the meaning that the API defines.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
#[serde(default)]
pub struct Conditions {
    #[serde(skip_serializing_if = "Option::is_none")]
    ready: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    serving: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    terminating: Option<bool>,
}

/// Consumers for which an endpoint is preferred.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
#[serde(default, rename_all = "camelCase")]
pub struct Hints {
    /// Names of zones whose nodes are preferred.
    pub for_zones: Option<Vec<Named>>,
    /// Names of the preferred nodes.
    pub for_nodes: Option<Vec<Named>>,
}

/// A reference by name.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
#[serde(default)]
pub struct Named {
    /// The name.
    pub name: Box<str>,
}

/// A port of every endpoint of a slice.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
#[serde(default)]
pub struct SlicePort {
    /// Name of the service's port. Absent and empty mean the same.
    pub name: Option<Box<str>>,
    /// `TCP` if absent.
    pub protocol: Option<Box<str>>,
    /// The endpoint's port. Absent means all ports.
    pub port: Option<u16>,
}

// === impl EndpointSlice ===

impl EndpointSlice {
    /// The name of the slice's service.
    #[must_use]
    pub fn service(&self) -> Option<&str> {
        let label = || self.metadata.labels.as_ref()?.get(SERVICE_NAME).map(String::as_str);
        self.service.as_deref().or_else(label)
    }

    /// Whether service proxies ignore the slice: it has the label `service.kubernetes.io/headless`.
    #[must_use]
    pub fn is_headless(&self) -> bool {
        let label = || self.metadata.labels.as_ref().is_some_and(|labels| labels.contains_key(HEADLESS));
        self.is_headless || label()
    }

    /// Removes metadata that no consumer reads.
    #[must_use]
    pub fn slim(mut self) -> Arc<Self> {
        self.service = self.service().map(Box::from);
        self.is_headless = self.is_headless();
        self.metadata = ObjectMeta {
            name: self.metadata.name,
            namespace: self.metadata.namespace,
            ..ObjectMeta::default()
        };
        Arc::new(self)
    }

    /// A copy with the labels that [`slim`](Self::slim) has removed: the form in which a slice can be stored.
    #[must_use]
    pub fn with_labels(&self) -> Self {
        let service = self.service().map(|name| (SERVICE_NAME.to_owned(), name.to_owned()));
        let headless = self.is_headless().then(|| (HEADLESS.to_owned(), String::new()));
        let mut slice = self.clone();
        slice.metadata.labels = Some(service.into_iter().chain(headless).collect());
        slice
    }

    /// Whether at least one of the endpoints with a selected address takes traffic.
    pub(crate) fn serves(&self, is_selected: impl Fn(IpAddr) -> bool) -> bool {
        let mut selected =
            self.endpoints.iter().filter(|endpoint| endpoint.address.is_some_and(&is_selected));
        selected.any(|endpoint| endpoint.conditions.is_ready() || endpoint.conditions.is_serving())
    }

    /// A copy of this slice in which the endpoints with a selected address take no traffic.
    pub(crate) fn without(&self, is_selected: impl Fn(IpAddr) -> bool) -> Self {
        let mut slice = self.clone();
        let selected =
            slice.endpoints.iter_mut().filter(|endpoint| endpoint.address.is_some_and(&is_selected));
        selected.for_each(|endpoint| {
            (endpoint.conditions.ready, endpoint.conditions.serving) = (Some(false), Some(false));
        });
        slice
    }
}

// === impl Conditions ===

impl Conditions {
    /// Whether the endpoint takes traffic. An absent value means yes.
    #[must_use]
    pub fn is_ready(self) -> bool {
        self.ready.unwrap_or(true)
    }

    /// Whether the endpoint would be ready if it were not terminating. An absent value means
    /// [`is_ready`](Self::is_ready).
    #[must_use]
    pub fn is_serving(self) -> bool {
        self.serving.unwrap_or_else(|| self.is_ready())
    }

    /// Whether the endpoint is terminating. An absent value means no.
    #[must_use]
    pub fn is_terminating(self) -> bool {
        self.terminating.unwrap_or(false)
    }
}

// === impl SlicePort ===

impl SlicePort {
    /// The name; empty if absent.
    #[must_use]
    pub fn name(&self) -> &str {
        self.name.as_deref().unwrap_or_default()
    }

    /// The protocol.
    #[must_use]
    pub fn protocol(&self) -> &str {
        self.protocol.as_deref().unwrap_or("TCP")
    }
}

fn endpoints<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Endpoint>, D::Error> {
    let mut all = Option::<Vec<Endpoint>>::deserialize(deserializer)?.unwrap_or_default();
    all.retain(|endpoint| endpoint.address.is_some());
    all.truncate(ENDPOINTS_MAX);
    all.shrink_to_fit();
    Ok(all)
}

fn ports<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<SlicePort>, D::Error> {
    let mut all = Option::<Vec<SlicePort>>::deserialize(deserializer)?.unwrap_or_default();
    all.truncate(PORTS_MAX);
    Ok(all)
}

/// An address as a list, as in the API.
fn as_list<S: Serializer>(address: &Option<IpAddr>, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(address)
}

fn first_address<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<IpAddr>, D::Error> {
    let all = Option::<Vec<Box<str>>>::deserialize(deserializer)?.unwrap_or_default();
    let address = all.first().and_then(|address| address.parse().ok());
    Ok(address.filter(|address| may_be_an_endpoint(*address)))
}

/// Whether the address may be an endpoint. Upstream's validation rejects loopback, link-local and unspecified
/// addresses, because they would lead clients to services of the node itself. Multicast, broadcast and IPv4-mapped
/// addresses are also rejected, because they are not addresses of a single pod.
fn may_be_an_endpoint(address: IpAddr) -> bool {
    let special = match address {
        IpAddr::V4(ip) => ip.is_loopback() || ip.is_link_local() || ip.is_broadcast(),
        IpAddr::V6(ip) => ip.is_loopback() || ip.is_unicast_link_local() || ip.to_ipv4_mapped().is_some(),
    };
    !special && !address.is_unspecified() && !address.is_multicast()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn endpoints_with_invalid_addresses_are_dropped() {
        let addresses =
            ["10.0.0.1", "127.0.0.1", "169.254.169.254", "224.0.0.1", "x", "::1", "0.0.0.0", "fd00::1"];
        let endpoints: Vec<_> = addresses.iter().map(|address| json!({"addresses": [address]})).collect();
        let slice: EndpointSlice = serde_json::from_value(
            json!({"metadata": {}, "addressType": "IPv4", "endpoints": endpoints, "ports": null}),
        )
        .unwrap();
        let left: Vec<_> =
            slice.endpoints.iter().map(|endpoint| endpoint.address.unwrap().to_string()).collect();
        assert_eq!(left, ["10.0.0.1", "fd00::1"]);
    }

    #[test]
    fn endpoints_with_selected_addresses_take_no_traffic() {
        let slice: EndpointSlice = serde_json::from_value(json!({"metadata": {}, "addressType": "IPv4",
            "endpoints": [{"addresses": ["10.0.0.1"]}, {"addresses": ["10.0.0.2"]}], "ports": null}))
        .unwrap();
        let first = |address: IpAddr| address == IpAddr::from([10, 0, 0, 1]);
        assert!(slice.serves(first));
        let without = slice.without(first);
        assert!(!without.serves(first) && without.serves(|address| !first(address)));
    }

    #[test]
    fn the_headless_label_outlives_the_metadata() {
        let slice = |labels| {
            let slice = json!({"metadata": {"labels": labels}, "addressType": "IPv4", "ports": null});
            serde_json::from_value::<EndpointSlice>(slice).unwrap()
        };
        let labels = json!({"kubernetes.io/service-name": "a", "service.kubernetes.io/headless": ""});
        let slim = slice(labels).slim();
        assert!(slim.is_headless() && slim.metadata.labels.is_none());
        assert_eq!(slim.service(), Some("a"));
        assert!(!slice(json!({"kubernetes.io/service-name": "a"})).slim().is_headless());
    }

    #[test]
    fn a_stored_slice_is_read_back() {
        let labels = json!({"kubernetes.io/service-name": "a", "service.kubernetes.io/headless": ""});
        let endpoints = json!([{"addresses": ["10.0.0.1"], "conditions": {"ready": false, "serving": true},
            "hostname": "h", "nodeName": "n", "hints": {"forZones": [{"name": "z"}]}}, {"addresses": ["10.0.0.2"]}]);
        let slice: EndpointSlice =
            serde_json::from_value(json!({"addressType": "IPv4", "endpoints": endpoints,
            "metadata": {"namespace": "ns", "name": "s", "labels": labels},
            "ports": [{"name": "p", "protocol": "UDP", "port": 53}, {}]}))
            .unwrap();
        let slim = slice.slim();
        let stored = serde_json::to_value(slim.with_labels()).unwrap();
        assert_eq!(stored["endpoints"][1], json!({"addresses": ["10.0.0.2"], "conditions": {}}));
        let read = serde_json::from_value::<EndpointSlice>(stored).unwrap().slim();
        assert_eq!(read, slim);
        assert!(read.is_headless() && read.service() == Some("a"));
    }

    #[test]
    fn absent_conditions_have_the_meaning_of_the_api() {
        let read = |value| serde_json::from_value::<Conditions>(value).unwrap();
        let all = |c: Conditions| (c.is_ready(), c.is_serving(), c.is_terminating());
        assert_eq!(all(read(json!({}))), (true, true, false));
        assert_eq!(all(read(json!({"ready": false}))), (false, false, false));
        let ending = json!({"ready": false, "serving": true, "terminating": true});
        assert_eq!(all(read(ending)), (false, true, true));
    }
}

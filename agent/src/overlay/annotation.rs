//! Overlay annotations of Node objects, in flannel's form, so that our nodes and flannel's form one network.
//! <https://github.com/flannel-io/flannel/blob/master/Documentation/kubernetes.md>

use std::collections::BTreeMap;
use std::net::IpAddr;

use coracle_cni::{End, Mac, Peer, PeerKind};
use coracle_events::printable;
use coracle_values::CollectMap;
use k8s_openapi::api::core::v1::Node;
use serde::{Deserialize, Serialize};

const MANAGED: &str = "flannel.alpha.coreos.com/kube-subnet-manager";
const BACKEND: &str = "flannel.alpha.coreos.com/backend-type";

/// Maximum bytes of an invalid value in an error. All other nodes have the error in their status.
const SHOWN_MAX: usize = 64;

/// The annotations of one family of node addresses.
struct Family {
    ip: &'static str,
    overwrite: &'static str,
    data: &'static str,
}

const V4: Family = Family {
    ip: "flannel.alpha.coreos.com/public-ip",
    overwrite: "flannel.alpha.coreos.com/public-ip-overwrite",
    data: "flannel.alpha.coreos.com/backend-data",
};
const V6: Family = Family {
    ip: "flannel.alpha.coreos.com/public-ipv6",
    overwrite: "flannel.alpha.coreos.com/public-ipv6-overwrite",
    data: "flannel.alpha.coreos.com/backend-v6-data",
};

/// Flannel's data of a VXLAN device.
#[derive(Serialize, Deserialize)]
struct Vtep {
    #[serde(rename = "VNI")]
    vni: u32,
    #[serde(rename = "VtepMAC")]
    mac: String,
}

/// The node as a peer. None while it has no range or no annotations.
pub(super) fn peer(node: &Node) -> Option<Result<Peer, String>> {
    let annotations = node.metadata.annotations.as_ref()?;
    let backend = annotations.get(BACKEND)?;
    let cidrs = crate::node_object::pod_cidrs(node);
    if cidrs.is_empty() {
        return None;
    }
    let kind = match backend.as_str() {
        "vxlan" => PeerKind::Vxlan,
        "host-gw" => PeerKind::HostGw,
        "udp" => PeerKind::Udp,
        other => return Some(Err(format!("its backend {:?} is not vxlan, host-gw or udp", shown(other)))),
    };
    let ends = [V4, V6].iter().filter_map(|family| end(family, annotations).transpose());
    let ends: Result<Vec<End>, String> = ends.collect();
    let bridged = crate::node_object::is_ours(node);
    Some(ends.map(|ends| Peer { cidrs, kind, ends, bridged }))
}

fn end(family: &Family, annotations: &BTreeMap<String, String>) -> Result<Option<End>, String> {
    let Some(text) = annotations.get(family.ip) else { return Ok(None) };
    let ip = text
        .parse()
        .map_err(|_error| format!("its annotation {} is not an address: {:?}", family.ip, shown(text)))?;
    let vtep = match annotations.get(family.data).map(String::as_str) {
        None | Some("null" | "") => None,
        Some(text) => Some(
            vtep(text)
                .ok_or_else(|| format!("its annotation {} is invalid: {:?}", family.data, shown(text)))?,
        ),
    };
    Ok(Some(End { ip, vtep }))
}

/// An invalid value, shortened for an error.
fn shown(value: &str) -> String {
    printable(value, SHOWN_MAX)
}

fn vtep(text: &str) -> Option<(u32, Mac)> {
    let Vtep { vni, mac } = serde_json::from_str(text).ok()?;
    let mut bytes = Mac::default();
    let mut parts = mac.split(':');
    for byte in &mut bytes {
        *byte = u8::from_str_radix(parts.next()?, 16).ok()?;
    }
    parts.next().is_none().then_some((vni, bytes))
}

/// The annotations of this node that are missing or outdated. The value None removes an annotation.
pub(crate) fn patch(
    kind: PeerKind,
    ends: &[End],
    held: &BTreeMap<String, String>,
) -> BTreeMap<&'static str, Option<String>> {
    let mut want =
        BTreeMap::from([(MANAGED, Some("true".to_owned())), (BACKEND, Some(kind.name().to_owned()))]);
    for (family, v6) in [(V4, false), (V6, true)] {
        let end = ends.iter().find(|end| end.ip.is_ipv6() == v6);
        // A public address that an administrator has set takes precedence, for example the address of a NAT.
        let overwrite = held.get(family.overwrite).and_then(|text| text.parse::<IpAddr>().ok());
        want.insert(family.ip, end.map(|end| overwrite.unwrap_or(end.ip).to_string()));
        want.insert(family.data, end.map(data));
    }
    want.retain(|name, value| held.get(*name) != value.as_ref());
    want
}

/// The patch that removes the annotations of a node without an overlay.
pub(crate) fn removal(held: &BTreeMap<String, String>) -> BTreeMap<&'static str, Option<String>> {
    let all = [MANAGED, BACKEND, V4.ip, V4.data, V6.ip, V6.data];
    all.into_iter().filter(|name| held.contains_key(*name)).map(|name| (name, None)).collect_map()
}

fn data(end: &End) -> String {
    let written =
        end.vtep.map(|(vni, mac)| Vtep { vni, mac: mac.map(|byte| format!("{byte:02x}")).join(":") });
    serde_json::to_string(&written).unwrap_or_else(|_impossible| "null".to_owned())
}

/// Fuzz target: the overlay annotations of another node. The input has a line for the backend, the address and the data
/// of the device.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn fuzz(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let lines = text.splitn(3, '\n').map(str::to_owned);
    let names = [BACKEND, V4.ip, V4.data].map(str::to_owned);
    let mut node = Node::default();
    node.metadata.annotations = Some(names.into_iter().zip(lines).collect());
    let spec = node.spec.get_or_insert_default();
    spec.pod_cidr = Some("10.42.1.0/24".to_owned());
    match peer(&node) {
        Some(Ok(peer)) => assert!(peer.ends.len() <= 1, "the input has one address"),
        Some(Err(why)) => assert!(why.len() <= 1024, "{} bytes", why.len()),
        None => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(annotations: &[(&str, &str)]) -> Node {
        let pairs = annotations.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
        let mut node = Node::default();
        node.metadata.annotations = Some(pairs.collect());
        let ranges = vec!["10.42.1.0/24".to_owned(), "fd42::/64".to_owned()];
        node.spec =
            Some(k8s_openapi::api::core::v1::NodeSpec { pod_cidrs: Some(ranges), ..Default::default() });
        node
    }

    #[test]
    fn a_node_with_annotations_of_flannel_is_a_peer() {
        // flannel 0.27 writes these annotations.
        let node = node(&[
            (BACKEND, "vxlan"),
            (MANAGED, "true"),
            (V4.ip, "192.0.2.7"),
            (V4.data, r#"{"VNI":1,"VtepMAC":"3e:1b:6c:9d:2a:01"}"#),
            (V6.ip, "2001:db8::7"),
            (V6.data, r#"{"VNI":1,"VtepMAC":"3e:1b:6c:9d:2a:02"}"#),
        ]);
        let peer = peer(&node).unwrap().unwrap();
        assert_eq!((peer.kind, peer.cidrs.len()), (PeerKind::Vxlan, 2));
        let v4 = End { ip: "192.0.2.7".parse().unwrap(), vtep: Some((1, [0x3e, 0x1b, 0x6c, 0x9d, 0x2a, 1])) };
        assert_eq!((peer.ends.len(), peer.ends[0]), (2, v4));
    }

    #[test]
    fn a_node_without_annotations_is_not_a_peer_and_invalid_annotations_are_named() {
        assert!(peer(&node(&[])).is_none());
        let mut without_range = node(&[(BACKEND, "vxlan"), (V4.ip, "192.0.2.7")]);
        without_range.spec = None;
        assert!(peer(&without_range).is_none());
        let wrong = |pairs: &[(&str, &str)]| peer(&node(pairs)).unwrap().unwrap_err();
        assert!(wrong(&[(BACKEND, "wireguard")]).contains("wireguard"));
        assert!(
            wrong(&[(BACKEND, "vxlan"), (V4.ip, "here")]).contains("public-ip is not an address: \"here\"")
        );
        for data in ["{", r#"{"VNI":1,"VtepMAC":"3e:1b"}"#, r#"{"VNI":1,"VtepMAC":"3e:1b:6c:9d:2a:01:02"}"#] {
            let written = wrong(&[(BACKEND, "vxlan"), (V4.ip, "192.0.2.7"), (V4.data, data)]);
            assert!(written.contains("backend-data"), "{written}");
        }
    }

    #[test]
    fn errors_show_the_beginning_of_an_invalid_annotation() {
        let long = "\u{1}".repeat(200_000);
        let (long, backend, ip) = (long.as_str(), (BACKEND, "vxlan"), (V4.ip, "192.0.2.7"));
        for pairs in [vec![(BACKEND, long)], vec![backend, (V4.ip, long)], vec![backend, ip, (V4.data, long)]]
        {
            let error = peer(&node(&pairs)).unwrap().unwrap_err();
            assert!(error.len() < 500, "{} bytes", error.len());
        }
    }

    #[test]
    fn written_annotations_are_parsed_and_written_once() {
        let ends = [
            End { ip: "192.0.2.7".parse().unwrap(), vtep: Some((9, [2, 0, 0, 0, 0, 0xab])) },
            End { ip: "2001:db8::7".parse().unwrap(), vtep: Some((9, [2, 0, 0, 0, 0, 0xac])) },
        ];
        let written = patch(PeerKind::Vxlan, &ends, &BTreeMap::new());
        assert_eq!(written[V4.data].as_deref(), Some(r#"{"VNI":9,"VtepMAC":"02:00:00:00:00:ab"}"#));
        let held: Vec<_> =
            written.iter().filter_map(|(key, value)| Some((*key, value.as_deref()?))).collect();
        let there = node(&held);
        assert_eq!(peer(&there).unwrap().unwrap().ends, ends);
        let mut held = there.metadata.annotations.unwrap();
        assert!(patch(PeerKind::Vxlan, &ends, &held).is_empty());
        // An address is removed, and another is overwritten.
        held.insert(V4.overwrite.to_owned(), "203.0.113.1".to_owned());
        let change = patch(PeerKind::Vxlan, &ends[..1], &held);
        let expect = [(V4.ip, Some("203.0.113.1".to_owned())), (V6.data, None), (V6.ip, None)];
        assert_eq!(change, expect.into_iter().collect());
        let ends = [End { vtep: None, ..ends[0] }];
        assert_eq!(patch(PeerKind::HostGw, &ends, &BTreeMap::new())[V4.data].as_deref(), Some("null"));
    }
}

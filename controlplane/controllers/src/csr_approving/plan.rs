//! The decision on one certificate signing request, from the request and the known nodes.

use std::net::IpAddr;
use std::sync::Arc;

use super::reserved::Reserved;
use crate::certificate::{NODE_CLIENT, NODE_SERVING, RequestedCertificate};
use crate::object::{CertificateSigningRequest, Node, ObjectExt};

/// The decision.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Action {
    /// No decision: the request is for another signer, is already decided, or cannot be decided yet.
    Leave,
    /// Approve if the requester may `create` one of these subresources of requests. The subresources are tried in this
    /// order.
    Ask(Vec<&'static str>),
    Approve(&'static str),
    Deny(String),
    /// No decision: an administrator must decide. The text is the reason.
    LeaveToAdministrator(String),
}

/// Decides on a request.
pub(crate) fn plan(
    request: &CertificateSigningRequest,
    nodes: &[Arc<Node>],
    reserved: &Reserved<'_>,
) -> Action {
    if request.is_decided() || request.status.certificate.is_some() || request.is_being_deleted() {
        return Action::Leave;
    }
    let spec = &request.spec;
    let Ok(requested) = RequestedCertificate::read(&spec.request.0) else { return Action::Leave };
    if requested.refusal(&spec.signer_name, &spec.usages).is_some() {
        return Action::Leave;
    }
    match spec.signer_name.as_str() {
        NODE_CLIENT if requested.common_name == spec.username => {
            Action::Ask(vec!["selfnodeclient", "nodeclient"])
        }
        NODE_CLIENT => Action::Ask(vec!["nodeclient"]),
        NODE_SERVING => serving(request, &requested, nodes, reserved),
        _ => Action::Leave,
    }
}

/// A node may serve only under its own name and the addresses in its Node object. The Node object may get these
/// addresses later, so a request with other addresses waits. The node itself writes its addresses. So an address is
/// accepted only if it does not belong to another node, the API server, a pod or a service.
fn serving(
    request: &CertificateSigningRequest,
    requested: &RequestedCertificate,
    nodes: &[Arc<Node>],
    reserved: &Reserved<'_>,
) -> Action {
    let is_node = request.spec.groups.iter().any(|group| group == "system:nodes");
    if !is_node || request.spec.username != requested.common_name {
        return Action::Leave;
    }
    let Some(name) = requested.node() else { return Action::Leave };
    let Some(own) = nodes.iter().find(|node| node.name() == name) else { return Action::Leave };
    let others = || nodes.iter().filter(|node| node.name() != name);
    if let Some(address) =
        requested.addresses.iter().find(|address| others().any(|node| has_address(node, address)))
    {
        return Action::Deny(format!("the address {address} is that of another node"));
    }
    if let Some(taken) = requested.dns.iter().find(|dns| others().any(|node| node.name() == *dns)) {
        return Action::Deny(format!("{taken} is another node"));
    }
    let refusal = requested.addresses.iter().find_map(|address| reserved.refusal_of_address(name, address));
    let refusal =
        refusal.or_else(|| requested.dns.iter().find_map(|dns| reserved.refusal_of_name(name, dns)));
    if let Some(refusal) = refusal {
        return Action::LeaveToAdministrator(refusal);
    }
    // The node can write any name into its Node object. Only the node's own name is proven, by its client certificate.
    let fits = requested.addresses.iter().all(|address| has_address(own, address))
        && requested.dns.iter().all(|dns| dns == name);
    if fits {
        Action::Approve("Auto approving the serving certificate of a node for its own addresses.")
    } else {
        Action::Leave
    }
}

fn has_address(node: &Node, address: &IpAddr) -> bool {
    addresses(node, &["InternalIP", "ExternalIP"]).any(|reported| {
        reported.parse().is_ok_and(|reported: IpAddr| reported.to_canonical() == address.to_canonical())
    })
}

fn addresses<'a>(node: &'a Node, types: &'a [&str]) -> impl Iterator<Item = &'a str> {
    let all = node.status.addresses.iter().flatten();
    all.filter(|reported| types.contains(&reported.type_.as_str())).map(|reported| reported.address.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8s_openapi::ByteString;
    use rcgen::{CertificateParams, DnType, KeyPair};
    use serde_json::json;

    fn request(signer: &str, author: &str, names: &[&str]) -> CertificateSigningRequest {
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let mut params = CertificateParams::new(names).unwrap();
        params.distinguished_name = rcgen::DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, "system:node:a");
        params.distinguished_name.push(DnType::OrganizationName, "system:nodes");
        let pem = params.serialize_request(&KeyPair::generate().unwrap()).unwrap().pem().unwrap();
        let side = if signer == NODE_SERVING { "server auth" } else { "client auth" };
        let mut request = CertificateSigningRequest::default();
        request.spec.request = ByteString(pem.into_bytes());
        request.spec.signer_name = signer.to_owned();
        request.spec.usages = vec!["digital signature".to_owned(), side.to_owned()];
        request.spec.username = author.to_owned();
        request.spec.groups = vec!["system:nodes".to_owned()];
        request
    }

    const RESERVED: Reserved<'_> = Reserved { names: &[], addresses: &[], ranges: &[], own_node: None };

    fn node(name: &str, address: &str) -> Arc<Node> {
        let addresses = json!([{"type": "InternalIP", "address": address}]);
        Arc::new(
            serde_json::from_value(json!({"metadata": {"name": name}, "status": {"addresses": addresses}}))
                .unwrap(),
        )
    }

    #[test]
    fn client_certificates_need_a_permission() {
        let plan = |author| plan(&request(NODE_CLIENT, author, &[]), &[], &RESERVED);
        assert_eq!(plan("system:bootstrap:abcdef"), Action::Ask(vec!["nodeclient"]));
        assert_eq!(plan("system:node:a"), Action::Ask(vec!["selfnodeclient", "nodeclient"]));
        // The certificate of another node needs the permission for every node's certificate.
        assert_eq!(plan("system:node:b"), Action::Ask(vec!["nodeclient"]));
    }

    #[test]
    fn serving_certificates_are_for_the_nodes_own_addresses() {
        let nodes = [node("a", "192.0.2.1"), node("b", "192.0.2.2")];
        let of =
            |names: &[&str], author: &str| plan(&request(NODE_SERVING, author, names), &nodes, &RESERVED);
        assert!(matches!(of(&["a", "192.0.2.1"], "system:node:a"), Action::Approve(_)));
        assert_eq!(of(&["192.0.2.9"], "system:node:a"), Action::Leave);
        assert!(matches!(of(&["192.0.2.2"], "system:node:a"), Action::Deny(_)));
        assert!(matches!(of(&["b"], "system:node:a"), Action::Deny(_)));
        assert_eq!(of(&["a"], "system:node:b"), Action::Leave);
        assert_eq!(
            plan(&request(NODE_SERVING, "system:node:a", &["a"]), &[], &RESERVED),
            Action::Leave,
            "no such node yet"
        );
    }

    #[test]
    fn a_node_gets_no_certificate_for_foreign_names_and_addresses() {
        let said: Vec<_> = [
            ("InternalDNS", "kubernetes.default.svc"),
            ("Hostname", "web.example.com"),
            ("ExternalDNS", "api.example.com"),
            ("InternalIP", "192.0.2.1"),
            ("InternalIP", "192.0.2.250"),
            ("ExternalIP", "10.43.0.1"),
            ("InternalIP", "10.42.7.7"),
            ("InternalIP", "::ffff:192.0.2.250"),
            ("InternalIP", "127.0.0.1"),
        ]
        .map(|(type_, address)| json!({"type": type_, "address": address}))
        .into();
        let own = json!({"metadata": {"name": "a"}, "status": {"addresses": said}});
        let nodes = [Arc::new(serde_json::from_value(own).unwrap())];
        let (names, addresses) = (["api.example.com".to_owned()], ["192.0.2.250".parse().unwrap()]);
        let ranges = ["10.42.0.0/16".parse().unwrap(), "10.43.0.0/16".parse().unwrap()];
        let reserved = Reserved { names: &names, addresses: &addresses, ranges: &ranges, own_node: None };
        let of = |names: &[&str]| plan(&request(NODE_SERVING, "system:node:a", names), &nodes, &reserved);
        assert!(matches!(of(&["a", "192.0.2.1"]), Action::Approve(_)));
        assert_eq!(of(&["a", "web.example.com"]), Action::Leave, "not its own name");
        for wrong in [
            "kubernetes.default.svc",
            "api.example.com",
            "192.0.2.250",
            "10.43.0.1",
            "10.42.7.7",
            "::ffff:192.0.2.250",
            "127.0.0.1",
        ] {
            assert!(matches!(of(&["a", wrong]), Action::LeaveToAdministrator(_)), "{wrong}");
        }
        // A node on the API server's machine has that machine's addresses, but never a service's.
        let reserved = Reserved { own_node: Some("a"), ..reserved };
        let of = |names: &[&str]| plan(&request(NODE_SERVING, "system:node:a", names), &nodes, &reserved);
        assert!(matches!(of(&["a", "192.0.2.250"]), Action::Approve(_)));
        for wrong in ["kubernetes.default.svc", "10.43.0.1", "10.42.7.7", "127.0.0.1"] {
            assert!(matches!(of(&["a", wrong]), Action::LeaveToAdministrator(_)), "{wrong}");
        }
    }

    #[test]
    fn a_node_with_the_api_servers_name_is_left_to_administrators() {
        let nodes = [node("a", "192.0.2.1")];
        let names = ["a".to_owned()];
        let reserved = Reserved { names: &names, ..RESERVED };
        let of =
            |reserved: &Reserved<'_>| plan(&request(NODE_SERVING, "system:node:a", &["a"]), &nodes, reserved);
        assert!(matches!(of(&reserved), Action::LeaveToAdministrator(_)));
        assert!(matches!(of(&Reserved { own_node: Some("b"), ..reserved }), Action::LeaveToAdministrator(_)));
        assert!(matches!(of(&Reserved { own_node: Some("a"), ..reserved }), Action::Approve(_)));
    }

    #[test]
    fn decided_requests_and_other_signers_are_ignored() {
        let mut decided = request(NODE_CLIENT, "system:node:a", &[]);
        decided
            .status
            .conditions
            .push(serde_json::from_value(json!({"type": "Denied", "status": "True"})).unwrap());
        assert_eq!(plan(&decided, &[], &RESERVED), Action::Leave);
        assert_eq!(
            plan(&request(NODE_CLIENT, "x", &["a"]), &[], &RESERVED),
            Action::Leave,
            "names in a client certificate"
        );
        assert_eq!(plan(&request("example.com/x", "x", &[]), &[], &RESERVED), Action::Leave);
    }
}

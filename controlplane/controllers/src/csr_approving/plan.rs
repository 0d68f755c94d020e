//! A request, and the nodes that are there → whom to ask, or what to say.

use std::net::IpAddr;
use std::sync::Arc;

use crate::certificate::{Asked, NODE_CLIENT, NODE_SERVING};
use crate::object::{CertificateSigningRequest, Node, Object};

/// What to do.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Action {
    /// Somebody else's, decided already, or not to be decided yet.
    Leave,
    /// To be approved if its author may `create` one of these subresources of requests, in this order.
    Ask(Vec<&'static str>),
    Approve(&'static str),
    Deny(String),
}

/// Decides what to do.
pub(crate) fn plan(request: &CertificateSigningRequest, nodes: &[Arc<Node>]) -> Action {
    if request.is_decided() || request.status.certificate.is_some() || request.deleting() {
        return Action::Leave;
    }
    let spec = &request.spec;
    let Ok(asked) = Asked::read(&spec.request.0) else { return Action::Leave };
    if asked.refusal(&spec.signer_name, &spec.usages).is_some() {
        return Action::Leave;
    }
    match spec.signer_name.as_str() {
        NODE_CLIENT if asked.common_name == spec.username => {
            Action::Ask(vec!["selfnodeclient", "nodeclient"])
        }
        NODE_CLIENT => Action::Ask(vec!["nodeclient"]),
        NODE_SERVING => serving(request, &asked, nodes),
        _ => Action::Leave,
    }
}

/// A node may serve under its own name and the addresses that its Node object says, and under no other. The Node
/// may say them a moment later, so what does not fit yet waits for it.
fn serving(request: &CertificateSigningRequest, asked: &Asked, nodes: &[Arc<Node>]) -> Action {
    let is_node = request.spec.groups.iter().any(|group| group == "system:nodes");
    if !is_node || request.spec.username != asked.common_name {
        return Action::Leave;
    }
    let Some(name) = asked.node() else { return Action::Leave };
    let Some(own) = nodes.iter().find(|node| node.name() == name) else { return Action::Leave };
    let others = || nodes.iter().filter(|node| node.name() != name);
    if let Some(address) =
        asked.addresses.iter().find(|address| others().any(|node| has_address(node, address)))
    {
        return Action::Deny(format!("the address {address} is that of another node"));
    }
    if let Some(taken) = asked.dns.iter().find(|dns| others().any(|node| node.name() == *dns)) {
        return Action::Deny(format!("{taken} is another node"));
    }
    let named = |dns: &String| {
        let said = addresses(own, &["Hostname", "InternalDNS", "ExternalDNS"]).any(|said| said == dns);
        dns == name || said
    };
    let fits = asked.addresses.iter().all(|address| has_address(own, address)) && asked.dns.iter().all(named);
    if fits {
        Action::Approve("Auto approving the serving certificate of a node for its own addresses.")
    } else {
        Action::Leave
    }
}

fn has_address(node: &Node, address: &IpAddr) -> bool {
    addresses(node, &["InternalIP", "ExternalIP"])
        .any(|said| said.parse().is_ok_and(|said: IpAddr| said == *address))
}

fn addresses<'a>(node: &'a Node, types: &'a [&str]) -> impl Iterator<Item = &'a str> {
    let all = node.status.addresses.iter().flatten();
    all.filter(|said| types.contains(&said.type_.as_str())).map(|said| said.address.as_str())
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

    fn node(name: &str, address: &str) -> Arc<Node> {
        let addresses = json!([{"type": "InternalIP", "address": address}]);
        Arc::new(
            serde_json::from_value(json!({"metadata": {"name": name}, "status": {"addresses": addresses}}))
                .unwrap(),
        )
    }

    #[test]
    fn client_certificates_are_a_question_of_rights() {
        let plan = |author| plan(&request(NODE_CLIENT, author, &[]), &[]);
        assert_eq!(plan("system:bootstrap:abcdef"), Action::Ask(vec!["nodeclient"]));
        assert_eq!(plan("system:node:a"), Action::Ask(vec!["selfnodeclient", "nodeclient"]));
        // Another node's certificate: only who may have any node's certificate gets it.
        assert_eq!(plan("system:node:b"), Action::Ask(vec!["nodeclient"]));
    }

    #[test]
    fn serving_certificates_are_for_the_nodes_own_addresses() {
        let nodes = [node("a", "192.0.2.1"), node("b", "192.0.2.2")];
        let of = |names: &[&str], author: &str| plan(&request(NODE_SERVING, author, names), &nodes);
        assert!(matches!(of(&["a", "192.0.2.1"], "system:node:a"), Action::Approve(_)));
        assert_eq!(of(&["192.0.2.9"], "system:node:a"), Action::Leave);
        assert!(matches!(of(&["192.0.2.2"], "system:node:a"), Action::Deny(_)));
        assert!(matches!(of(&["b"], "system:node:a"), Action::Deny(_)));
        assert_eq!(of(&["a"], "system:node:b"), Action::Leave);
        assert_eq!(
            plan(&request(NODE_SERVING, "system:node:a", &["a"]), &[]),
            Action::Leave,
            "no such node yet"
        );
    }

    #[test]
    fn what_is_decided_or_not_ours_is_left_alone() {
        let mut decided = request(NODE_CLIENT, "system:node:a", &[]);
        decided
            .status
            .conditions
            .push(serde_json::from_value(json!({"type": "Denied", "status": "True"})).unwrap());
        assert_eq!(plan(&decided, &[]), Action::Leave);
        assert_eq!(
            plan(&request(NODE_CLIENT, "x", &["a"]), &[]),
            Action::Leave,
            "names in a client certificate"
        );
        assert_eq!(plan(&request("example.com/x", "x", &[]), &[]), Action::Leave);
    }
}

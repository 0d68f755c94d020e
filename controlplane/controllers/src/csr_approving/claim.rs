//! Checks whether a bootstrap token may be used for a node's certificate.
//!
//! By default a token of `coracle token create` is for one machine. The token's Secret marks such a token. Before the
//! first certificate of a node is approved, the node's name is written into the Secret. The write has the read resource
//! version as a precondition. If two machines use the token at the same time, one of the two writes conflicts. The
//! request of that machine is refused at the retry. kubeadm makes Secrets without the mark. Any number of machines can
//! use such a Secret.

use std::sync::Arc;

use crate::object::{CertificateSigningRequest, Key, Node, ObjectExt, Secret};

/// The key that marks a token for one machine.
const SINGLE: &str = "usage-single-node";
/// The key with the name of the node that used the token.
pub(crate) const USED_BY: &str = "used-by-node";

/// Whether a token may be used for a request.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Claim {
    /// The token may be used by this node, also repeatedly.
    Good,
    /// The token is unused. The node must be recorded in the token first.
    Take,
    /// The token must not be used for this node. The text is the reason.
    Refused(String),
}

/// Id and Secret of the bootstrap token that authenticated the request. `None` for other users.
pub(crate) fn token(request: &CertificateSigningRequest) -> Option<(&str, Key)> {
    let id = request.spec.username.strip_prefix("system:bootstrap:")?;
    Some((id, Key::new("kube-system", &format!("bootstrap-token-{id}"))))
}

/// Whether the token may be used for this node's certificate.
pub(crate) fn claim(id: &str, secret: Option<&Secret>, node: &str, nodes: &[Arc<Node>]) -> Claim {
    let Some(secret) = secret.filter(|secret| !secret.is_being_deleted()) else {
        return Claim::Refused(format!("token {id} was deleted; `coracle token create` makes another one"));
    };
    if secret.text(SINGLE) != Some("true") {
        return Claim::Good;
    }
    // A Ready node has its certificate already, so the request comes from another machine with the same name.
    let lives = |known: &Arc<Node>| {
        known.name() == node && known.condition("Ready").is_some_and(|ready| ready.status == "True")
    };
    match secret.text(USED_BY) {
        Some(other) if other != node => Claim::Refused(format!(
            "token {id} is for one machine only, and node {other} has used it; create another with `coracle token create`"
        )),
        _ if nodes.iter().any(lives) => Claim::Refused(format!("node {node} already exists and is Ready")),
        Some(_itself) => Claim::Good,
        None => Claim::Take,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8s_openapi::ByteString;
    use serde_json::json;

    fn secret(data: &[(&str, &str)]) -> Secret {
        let data = data.iter().map(|(key, text)| ((*key).to_owned(), ByteString(text.as_bytes().to_vec())));
        Secret { data: data.collect(), ..Secret::default() }
    }

    fn node(name: &str, ready: &str) -> Arc<Node> {
        let conditions = json!([{"type": "Ready", "status": ready}]);
        let node = json!({"metadata": {"name": name}, "status": {"conditions": conditions}});
        Arc::new(serde_json::from_value(node).unwrap())
    }

    #[test]
    fn the_first_node_takes_the_token_and_may_come_again() {
        let claim =
            |data: &[(&str, &str)]| claim("abcdef", Some(&secret(data)), "a", &[node("a", "Unknown")]);
        assert_eq!(claim(&[(SINGLE, "true")]), Claim::Take);
        assert_eq!(claim(&[(SINGLE, "true"), (USED_BY, "a")]), Claim::Good);
        let Claim::Refused(why) = claim(&[(SINGLE, "true"), (USED_BY, "b")]) else { panic!("b's") };
        assert!(
            why.contains("token abcdef") && why.contains("node b") && why.contains("coracle token create")
        );
    }

    #[test]
    fn a_token_without_a_mark_is_valid_for_all_machines() {
        for data in [&[][..], &[(SINGLE, "false")], &[(USED_BY, "b")]] {
            assert_eq!(claim("abcdef", Some(&secret(data)), "a", &[node("a", "True")]), Claim::Good);
        }
    }

    #[test]
    fn a_ready_node_and_a_deleted_token_are_refused() {
        let marked = secret(&[(SINGLE, "true")]);
        let used = secret(&[(SINGLE, "true"), (USED_BY, "a")]);
        for token in [&marked, &used] {
            let claim = claim("abcdef", Some(token), "a", &[node("a", "True"), node("b", "True")]);
            assert_eq!(claim, Claim::Refused("node a already exists and is Ready".to_owned()));
        }
        assert!(matches!(claim("abcdef", None, "a", &[]), Claim::Refused(_)));
    }

    #[test]
    fn the_token_is_read_from_the_request() {
        let mut request = CertificateSigningRequest::default();
        request.spec.username = "system:bootstrap:abcdef".to_owned();
        assert_eq!(token(&request), Some(("abcdef", Key::new("kube-system", "bootstrap-token-abcdef"))));
        request.spec.username = "system:node:a".to_owned();
        assert_eq!(token(&request), None);
    }
}

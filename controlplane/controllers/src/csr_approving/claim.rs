//! A bootstrap token, and what is asked with it → whether it still makes a node.
//!
//! By default a token of ours is good for one machine: its Secret is marked so, and the first node that gets a
//! certificate by it is written there before the certificate is approved, into exactly the version of the Secret that
//! was looked at. Two machines that race for it both try that, and one of them is told of the other. Secrets without the
//! mark, as kubeadm makes them, are for as many machines as come.

use std::sync::Arc;

use crate::object::{CertificateSigningRequest, Key, Node, Object, Secret};

/// Marks a token for one machine.
const SINGLE: &str = "usage-single-node";
/// Who has used it.
pub(crate) const USED_BY: &str = "used-by-node";

/// What a token is to a request.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Claim {
    /// It may be used by this node, now and again.
    Good,
    /// Nobody has used it: it becomes this node's.
    Take,
    /// It makes no node of this machine.
    Refused(String),
}

/// Id and Secret of the bootstrap token that the request was made with; nothing for other authors.
pub(crate) fn token(request: &CertificateSigningRequest) -> Option<(&str, Key)> {
    let id = request.spec.username.strip_prefix("system:bootstrap:")?;
    Some((id, Key::new("kube-system", &format!("bootstrap-token-{id}"))))
}

/// What the token with this Secret is to the node that asks for its certificate.
pub(crate) fn claim((id, secret): (&str, Option<&Secret>), node: &str, nodes: &[Arc<Node>]) -> Claim {
    let Some(secret) = secret.filter(|secret| !secret.deleting()) else {
        return Claim::Refused(format!("token {id} is gone; `coracle token create` makes another"));
    };
    if secret.text(SINGLE) != Some("true") {
        return Claim::Good;
    }
    // Who is Ready has its certificate; this is somebody else by the same name.
    let lives = |known: &Arc<Node>| {
        known.name() == node && known.condition("Ready").is_some_and(|ready| ready.status == "True")
    };
    match secret.text(USED_BY) {
        Some(other) if other != node => Claim::Refused(format!(
            "token {id} is good for one machine, and node {other} has used it; `coracle token create` makes another"
        )),
        _ if nodes.iter().any(lives) => Claim::Refused(format!("node {node} is there already, and Ready")),
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
            |data: &[(&str, &str)]| claim(("abcdef", Some(&secret(data))), "a", &[node("a", "Unknown")]);
        assert_eq!(claim(&[(SINGLE, "true")]), Claim::Take);
        assert_eq!(claim(&[(SINGLE, "true"), (USED_BY, "a")]), Claim::Good);
        let Claim::Refused(why) = claim(&[(SINGLE, "true"), (USED_BY, "b")]) else { panic!("b's") };
        assert!(
            why.contains("token abcdef") && why.contains("node b") && why.contains("coracle token create")
        );
    }

    #[test]
    fn an_unmarked_token_is_for_all() {
        for data in [&[][..], &[(SINGLE, "false")], &[(USED_BY, "b")]] {
            assert_eq!(claim(("abcdef", Some(&secret(data))), "a", &[node("a", "True")]), Claim::Good);
        }
    }

    #[test]
    fn nobody_becomes_a_node_that_lives_or_comes_by_a_token_that_is_gone() {
        let marked = secret(&[(SINGLE, "true")]);
        let used = secret(&[(SINGLE, "true"), (USED_BY, "a")]);
        for token in [&marked, &used] {
            let claim = claim(("abcdef", Some(token)), "a", &[node("a", "True"), node("b", "True")]);
            assert_eq!(claim, Claim::Refused("node a is there already, and Ready".to_owned()));
        }
        assert!(matches!(claim(("abcdef", None), "a", &[]), Claim::Refused(_)));
    }

    #[test]
    fn a_request_tells_the_token_it_was_made_with() {
        let mut request = CertificateSigningRequest::default();
        request.spec.username = "system:bootstrap:abcdef".to_owned();
        assert_eq!(token(&request), Some(("abcdef", Key::new("kube-system", "bootstrap-token-abcdef"))));
        request.spec.username = "system:node:a".to_owned();
        assert_eq!(token(&request), None);
    }
}

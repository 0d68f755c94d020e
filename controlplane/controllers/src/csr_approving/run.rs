//! Checks the permissions of requesters, and approves requests.

use std::sync::Arc;

use k8s_openapi::ByteString;
use k8s_openapi::api::authorization::v1::{ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec};
use kube::Api;
use kube::api::PostParams;
use serde_json::json;

use super::claim::{self, Claim};
use super::plan::{Action, plan};
use super::reserved::Reserved;
use crate::certificate::{NODE_PREFIX, NODE_SERVING, RequestedCertificate};
use crate::context::Context;
use crate::error::Error;
use crate::object::{CertificateSigningRequest, Key, Node, ObjectExt};
use crate::queue::{Next, OwnQueue, Queue, key_of_creator, pause_after};
use crate::write::Part;

/// Maximum number of undecided requests of a node that are queued when the addresses of the node change.
const MAX_WAITING: usize = 10;

/// Queues new requests, and nodes with changed addresses. The key of a node has no namespace.
///
/// A compromised node can create very many requests and change its addresses often. So the reconcile of the node finds
/// the requests: a handler of the cache would delay all readers of the nodes.
pub(crate) fn listen(context: &Context, queue: &Arc<Queue<Key>>, own_queue: &Arc<OwnQueue>) {
    // The value is not set yet, because this function is called only once.
    let _is_first = own_queue.set(queue.clone());
    let own = queue.clone();
    context.caches.signing_requests.on_change(move |change| {
        if let Some(request) = change.new.filter(|request| !request.is_decided()) {
            own.add(queue_key(request));
        }
    });
    let own = queue.clone();
    context.caches.nodes.on_change(move |change| {
        let addresses = |node: Option<&Arc<Node>>| node.map(|node| node.status.addresses.clone());
        let Some(node) = change.latest().filter(|_| addresses(change.old) != addresses(change.new)) else {
            return;
        };
        own.add(node.key());
    });
}

/// The key of a request in the queue. Its namespace stands for the requester ([`key_of_creator`]), so that the
/// requesters take turns.
fn queue_key(request: &CertificateSigningRequest) -> Key {
    key_of_creator(&request.spec.username, request.name())
}

/// Queues the newest undecided requests of a node. A kubelet waits only for its newest request.
fn queue_newest(context: &Context, own_queue: &OwnQueue, node: &str) -> Next {
    let requests = context.caches.signing_requests.all();
    let count = requests.len();
    let waiting = newest_waiting(requests, node);
    if let Some(queue) = own_queue.get() {
        waiting.iter().for_each(|request| queue.add(queue_key(request)));
    }
    pause_after(count)
}

/// The newest undecided requests of a node for serving certificates, at most [`MAX_WAITING`].
fn newest_waiting(
    mut requests: Vec<Arc<CertificateSigningRequest>>,
    node: &str,
) -> Vec<Arc<CertificateSigningRequest>> {
    let user = format!("{NODE_PREFIX}{node}");
    requests.retain(|request| {
        let spec = &request.spec;
        spec.username == user && spec.signer_name == NODE_SERVING && !request.is_decided()
    });
    requests.sort_by(|one, other| other.metadata.creation_timestamp.cmp(&one.metadata.creation_timestamp));
    requests.truncate(MAX_WAITING);
    requests
}

/// Reconciles one request, or one node with changed addresses.
pub(crate) async fn reconcile(context: &Context, own_queue: &OwnQueue, key: Key) -> Result<Next, Error> {
    if key.namespace.is_empty() {
        return Ok(queue_newest(context, own_queue, &key.name));
    }
    let key = Key::new("", &key.name);
    let Some(request) = context.caches.signing_requests.get(&key) else { return Ok(Next::Wait) };
    match plan(&request, &context.caches.nodes.all(), &Reserved::of(&context.config)) {
        Action::Leave => {}
        Action::LeaveToAdministrator(why) => {
            let request = request.name();
            tracing::warn!(
                request,
                why,
                "a node's serving certificate waits for `kubectl certificate approve`; --own-node names the control plane's own machine"
            );
        }
        Action::Ask(rights) => approve_if_allowed(context, &request, rights).await?,
        Action::Approve(message) => decide(context, &request, "Approved", "AutoApproved", message).await?,
        Action::Deny(message) => {
            decide(context, &request, "Denied", "AddressOfAnotherNode", &message).await?
        }
    }
    Ok(Next::Wait)
}

/// Approves the request if the requester has one of the permissions, and its bootstrap token (if any) allows it.
async fn approve_if_allowed(
    context: &Context,
    request: &CertificateSigningRequest,
    rights: Vec<&'static str>,
) -> Result<(), Error> {
    for right in rights {
        if !may(context, request, right).await? {
            continue;
        }
        if let Err(why) = claim_token(context, request).await? {
            return decide(context, request, "Denied", "TokenNotUsable", &why).await;
        }
        let own = if right == "selfnodeclient" { "self kubelet" } else { "kubelet" };
        let message = format!("Auto approving {own} client certificate after SubjectAccessReview.");
        return decide(context, request, "Approved", "AutoApproved", &message).await;
    }
    tracing::debug!(request = %request.key(), "the requester has no permission for the certificate");
    Ok(())
}

/// Records the node in the request's bootstrap token. If the token must not be used, returns the reason. A conflict
/// means that another machine has used the token first. The retry reads the name of that machine.
async fn claim_token(
    context: &Context,
    request: &CertificateSigningRequest,
) -> Result<Result<(), String>, Error> {
    let Some((id, key)) = claim::token(request) else { return Ok(Ok(())) };
    let requested = RequestedCertificate::read(&request.spec.request.0);
    let Some(node) = requested.as_ref().ok().and_then(RequestedCertificate::node) else { return Ok(Ok(())) };
    let writer = context.writer(&context.caches.tokens);
    let secret = writer.live(&key).await?;
    match claim::claim(id, secret.as_ref(), node, &context.caches.nodes.all()) {
        Claim::Refused(why) => return Ok(Err(why)),
        Claim::Good => {}
        Claim::Take => {
            let metadata = secret.unwrap_or_default().metadata;
            let patch = json!({
                "metadata": {"uid": metadata.uid, "resourceVersion": metadata.resource_version},
                "data": {claim::USED_BY: ByteString(node.as_bytes().to_vec())},
            });
            writer.merge(&key, Part::Main, patch).await?;
        }
    }
    Ok(Ok(()))
}

/// Whether the requester has the permission to create the subresource `right` of certificate signing requests.
async fn may(context: &Context, request: &CertificateSigningRequest, right: &str) -> Result<bool, Error> {
    let spec = &request.spec;
    let review = SubjectAccessReview {
        spec: SubjectAccessReviewSpec {
            user: Some(spec.username.clone()),
            uid: spec.uid.clone(),
            groups: Some(spec.groups.clone()),
            extra: Some(spec.extra.clone()),
            resource_attributes: Some(ResourceAttributes {
                group: Some("certificates.k8s.io".to_owned()),
                resource: Some("certificatesigningrequests".to_owned()),
                verb: Some("create".to_owned()),
                subresource: Some(right.to_owned()),
                version: Some("*".to_owned()),
                ..ResourceAttributes::default()
            }),
            ..SubjectAccessReviewSpec::default()
        },
        ..SubjectAccessReview::default()
    };
    let reviews: Api<SubjectAccessReview> = Api::all(context.client.clone());
    let failed = |source| {
        let object = format!("SubjectAccessReview for {}", request.key());
        Error::Request { verb: "create", object, source }
    };
    let answer = reviews.create(&PostParams::default(), &review).await.map_err(failed)?;
    Ok(answer.status.is_some_and(|status| status.allowed))
}

async fn decide(
    context: &Context,
    request: &CertificateSigningRequest,
    type_: &str,
    reason: &str,
    message: &str,
) -> Result<(), Error> {
    let mut conditions: Vec<_> = request.status.conditions.iter().map(|known| json!(known)).collect();
    conditions.push(json!({"type": type_, "status": "True", "reason": reason, "message": message}));
    let patch = json!({
        "metadata": {"uid": request.uid(), "resourceVersion": request.metadata.resource_version},
        "status": {"conditions": conditions},
    });
    let writer = context.writer(&context.caches.signing_requests);
    writer.merge(&request.key(), Part::Approval, patch).await.map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::queue::QueueKey as _;
    use crate::test_api::TestApi;

    fn put_request(api: &TestApi, name: &str, node: &str, second: usize) {
        let metadata = json!({"name": name, "uid": name, "resourceVersion": "1",
            "creationTimestamp": format!("2026-01-01T00:00:{second:02}Z")});
        let spec =
            json!({"request": "", "signerName": NODE_SERVING, "username": format!("system:node:{node}")});
        let request = serde_json::from_value(json!({"metadata": metadata, "spec": spec})).unwrap();
        api.context.caches.signing_requests.written(request);
    }

    /// The queued keys.
    async fn queued(queue: &Queue<Key>) -> Vec<String> {
        let keys = std::sync::Mutex::new(Vec::new());
        let work = queue.work("test", |key: Key| {
            keys.lock().unwrap().push(key.to_string());
            async { Ok(Next::Wait) }
        });
        assert!(tokio::time::timeout(std::time::Duration::from_secs(1), work).await.is_err());
        keys.into_inner().unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn changed_addresses_queue_the_newest_requests_of_the_node_and_requesters_take_turns() {
        let api = TestApi::new(&[]);
        let (queue, own_queue) = (Arc::new(Queue::new()), Arc::default());
        listen(&api.context, &queue, &own_queue);
        for number in 0..30 {
            put_request(&api, &format!("r{number:02}"), "a", number);
        }
        put_request(&api, "of-b", "b", 0);
        let all = queued(&queue).await;
        assert_eq!((all.len(), all[1].as_str()), (31, "/system:node:b/of-b"));
        let put_node = |name: &str| {
            let addresses = json!([{"type": "InternalIP", "address": "192.0.2.1"}]);
            let node = json!({"metadata": {"name": name, "uid": name, "resourceVersion": "1"},
                "status": {"addresses": addresses}});
            api.context.caches.nodes.written(serde_json::from_value(node).unwrap());
        };
        let newest: Vec<String> = (20..30).rev().map(|number| format!("/system:node:a/r{number}")).collect();
        for (node, expect) in [("a", newest), ("b", vec!["/system:node:b/of-b".to_owned()])] {
            put_node(node);
            assert_eq!(queued(&queue).await, [node], "a handler of the cache does not read the requests");
            let next = reconcile(&api.context, &own_queue, Key::new("", node)).await.unwrap();
            assert!(matches!(next, Next::Wait));
            assert_eq!(queued(&queue).await, expect);
        }
    }

    #[tokio::test]
    async fn a_node_rests_after_a_reconcile_that_reads_many_requests() {
        let api = TestApi::new(&[]);
        for number in 0..1000 {
            put_request(&api, &format!("r{number}"), "b", 0);
        }
        let next = reconcile(&api.context, &OwnQueue::new(), Key::new("", "a")).await;
        assert!(matches!(next, Ok(Next::Pause(_))));
    }

    #[tokio::test]
    async fn the_queue_key_of_a_request_finds_the_request() {
        let api = TestApi::new(&[]);
        put_request(&api, "r", "a", 0);
        let request = api.context.caches.signing_requests.get(&Key::new("", "r")).unwrap();
        assert_eq!(queue_key(&request).object(), "r", "messages of the log name the request");
        let mut approved = (*request).clone();
        approved.spec.request = ByteString(serving_request());
        approved.spec.usages = vec!["digital signature".to_owned(), "server auth".to_owned()];
        approved.spec.groups = vec!["system:nodes".to_owned()];
        approved.metadata.resource_version = Some("2".to_owned());
        let key = queue_key(&approved);
        api.context.caches.signing_requests.written(approved);
        let node = json!({"metadata": {"name": "a", "uid": "a", "resourceVersion": "1"}});
        api.context.caches.nodes.written(serde_json::from_value(node).unwrap());
        // The simulated API does not have the request, so the approval fails.
        assert!(reconcile(&api.context, &OwnQueue::new(), key).await.is_err());
        assert_eq!(api.writes().len(), 1);
    }

    /// A request for a serving certificate of the node `a` with the name of the node.
    fn serving_request() -> Vec<u8> {
        let mut params = rcgen::CertificateParams::new(vec!["a".to_owned()]).unwrap();
        params.distinguished_name = rcgen::DistinguishedName::new();
        params.distinguished_name.push(rcgen::DnType::CommonName, "system:node:a");
        params.distinguished_name.push(rcgen::DnType::OrganizationName, "system:nodes");
        let pem = params.serialize_request(&rcgen::KeyPair::generate().unwrap()).unwrap().pem().unwrap();
        pem.into_bytes()
    }
}

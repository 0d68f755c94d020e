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
use crate::certificate::{NODE_SERVING, RequestedCertificate};
use crate::context::Context;
use crate::error::Error;
use crate::object::{CertificateSigningRequest, Key, ObjectExt};
use crate::queue::{Next, Queue};
use crate::write::Part;

/// Queues new requests, and the requests that wait for the addresses of a changed node.
pub(crate) fn listen(context: &Context, queue: &Arc<Queue<Key>>) {
    let own = queue.clone();
    context.caches.signing_requests.on_change(move |change| {
        if let Some(request) = change.new.filter(|request| !request.is_decided()) {
            own.add(request.key());
        }
    });
    let (own, requests) = (queue.clone(), context.caches.signing_requests.clone());
    context.caches.nodes.on_change(move |change| {
        let addresses =
            |node: Option<&Arc<_>>| node.map(|node: &Arc<crate::object::Node>| node.status.addresses.clone());
        if addresses(change.old) != addresses(change.new) {
            let waiting = requests.all().into_iter();
            let waiting = waiting.filter(|one| one.spec.signer_name == NODE_SERVING && !one.is_decided());
            waiting.for_each(|request| own.add(request.key()));
        }
    });
}

/// Reconciles one request.
pub(crate) async fn reconcile(context: &Context, key: Key) -> Result<Next, Error> {
    let Some(request) = context.caches.signing_requests.get(&key) else { return Ok(Next::Wait) };
    match plan(&request, &context.caches.nodes.all(), &Reserved::of(&context.config)) {
        Action::Leave => {}
        Action::LeaveToPeople(why) => {
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
    tracing::debug!(request = %request.key(), "the author has no permission for the requested certificate");
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

//! Releases claims of pods that are deleted or finished.

use std::collections::HashSet;
use std::sync::Arc;

use kube::Api;
use kube::api::DeleteParams;
use serde_json::json;

use super::plan::{self, Release};
use crate::context::Context;
use crate::error::Error;
use crate::object::{Key, ObjectExt, Pod, ResourceClaim, controller_of};
use crate::queue::{Next, Queue};
use crate::queueing::queue_stored;
use crate::write::Part;

/// The functions at the path `run`, as in all controllers.
pub(crate) mod run {
    pub(crate) use super::{listen, reconcile};
}

/// Queues changed claims, and the claims of pods that no longer use them.
pub(crate) fn listen(context: &Context, queue: &Arc<Queue<Key>>) {
    queue_stored(&context.caches.resource_claims, queue);
    let own = queue.clone();
    context.caches.pods.on_change(move |change| {
        let Some(pod) = change.latest() else { return };
        if change.new.is_none() || plan::is_done(pod) {
            for claim in pod.claims() {
                own.add(Key::new(pod.namespace(), claim));
            }
        }
    });
}

/// Reconciles one claim.
pub(crate) async fn reconcile(context: &Context, key: Key) -> Result<Next, Error> {
    let caches = &context.caches;
    let Some(claim) = caches.resource_claims.get(&key) else { return Ok(Next::Wait) };
    let missing = missing_pods(context, &claim).await?;
    let uses = |name: &str, uid: &str| {
        let pod = caches.pods.get(&Key::new(&key.namespace, name)).filter(|pod| pod.uid() == uid);
        pod.map_or_else(|| !missing.contains(uid), |pod| !plan::is_done(&pod))
    };
    let writer = context.writer(&caches.resource_claims);
    // After a revision conflict, for example with the scheduler, the claim is reconciled again.
    let version = json!({"uid": claim.uid(), "resourceVersion": claim.metadata.resource_version});
    match plan::release(&claim, uses) {
        Release::Status(status) => {
            writer.merge(&key, Part::Status, json!({"metadata": version, "status": status})).await?;
        }
        Release::Finalizers(finalizers) => {
            let mut metadata = version;
            metadata["finalizers"] = finalizers.into();
            writer.merge(&key, Part::Main, json!({"metadata": metadata})).await?;
        }
        Release::Delete => {
            let failed =
                |source| Error::Request { verb: "delete", object: format!("ResourceClaim {key}"), source };
            writer.delete(&claim, DeleteParams::default()).await.map_err(failed)?;
        }
        Release::Nothing => {}
    }
    Ok(Next::Wait)
}

/// The uids of the claim's pods that do not exist. The function asks the API server, because the cache may lack a new
/// pod.
async fn missing_pods(context: &Context, claim: &ResourceClaim) -> Result<HashSet<String>, Error> {
    let users = claim
        .status
        .reserved_for
        .iter()
        .filter_map(|user| Some((user["name"].as_str()?.to_owned(), user["uid"].as_str()?.to_owned())));
    let owner = controller_of(&claim.metadata).filter(|owner| owner.kind == "Pod");
    let owner = owner.map(|owner| (owner.name.clone(), owner.uid.clone()));
    let pods: Api<Pod> = Api::namespaced(context.client.clone(), claim.namespace());
    let mut missing = HashSet::new();
    for (name, uid) in users.chain(owner) {
        let key = Key::new(claim.namespace(), &name);
        if context.caches.pods.get(&key).is_some_and(|pod| pod.uid() == uid) {
            continue;
        }
        let failed = |source| Error::Request { verb: "get", object: format!("Pod {key}"), source };
        if pods.get_opt(&name).await.map_err(failed)?.is_none_or(|pod| pod.uid() != uid) {
            missing.insert(uid);
        }
    }
    Ok(missing)
}

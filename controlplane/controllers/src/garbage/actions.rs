//! The requests that apply a plan to an object.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::api::{DeleteParams, Preconditions};
use serde_json::json;

use super::plan::{Action, FOREGROUND};
use crate::api_kind::ApiKind;
use crate::context::Context;
use crate::error::Error;
use crate::object::Key;

/// Applies the action for an object. `live` is the current metadata of the object.
pub(super) async fn apply(
    context: &Context,
    kind: &ApiKind,
    key: &Key,
    live: &ObjectMeta,
    action: Action,
) -> Result<(), Error> {
    match action {
        Action::Nothing | Action::AttemptDependents => Ok(()),
        Action::Finish => drop_finalizer(context, kind, key, live, FOREGROUND).await,
        Action::KeepOwners(owners) => set_owners(context, kind, key, live, &owners).await,
        Action::Delete { policy, unblock } => {
            if unblock {
                let mut owners = live.owner_references.clone().unwrap_or_default();
                owners.iter_mut().for_each(|owner| owner.block_owner_deletion = Some(false));
                set_owners(context, kind, key, live, &owners).await?;
            }
            // The resourceVersion is a precondition, because a newer version of the object may have another owner.
            let resource_version = if unblock { None } else { live.resource_version.clone() };
            let preconditions = Preconditions { uid: live.uid.clone(), resource_version };
            let params = DeleteParams {
                propagation_policy: Some(policy),
                preconditions: Some(preconditions),
                ..DeleteParams::default()
            };
            kind.delete(&context.client, key, &params).await
        }
    }
}

async fn set_owners(
    context: &Context,
    kind: &ApiKind,
    key: &Key,
    live: &ObjectMeta,
    owners: &[OwnerReference],
) -> Result<(), Error> {
    let metadata =
        json!({"uid": live.uid, "resourceVersion": live.resource_version, "ownerReferences": owners});
    kind.merge(&context.client, key, json!({"metadata": metadata})).await
}

/// Removes a finalizer of an object.
pub(super) async fn drop_finalizer(
    context: &Context,
    kind: &ApiKind,
    key: &Key,
    live: &ObjectMeta,
    finalizer: &str,
) -> Result<(), Error> {
    let left: Vec<_> = live.finalizers.iter().flatten().filter(|own| *own != finalizer).collect();
    let metadata = json!({"uid": live.uid, "resourceVersion": live.resource_version, "finalizers": left});
    kind.merge(&context.client, key, json!({"metadata": metadata})).await
}

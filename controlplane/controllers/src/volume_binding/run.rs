//! Applies the plans of claims and volumes.

use std::sync::Arc;

use super::IS_DEFAULT;
use super::plan::{self, Action, ObservedClaim};
use crate::context::Context;
use crate::error::Error;
use crate::object::{Claim, Key, ObjectExt, PersistentVolume, StorageClass};
use crate::queue::{Next, Queue};
use crate::write::if_unchanged;

const COMPONENT: &str = "persistentvolume-controller";

/// Queues changed claims and volumes, their counterparts, and the unbound claims of changed storage classes. The key of
/// a volume has no namespace.
pub(crate) fn listen(context: &Context, queue: &Arc<Queue<Key>>) {
    let (own, index) = (queue.clone(), context.volumes.clone());
    context.caches.volumes.on_change(move |change| {
        index.volume(change.old.map(|old| &**old), change.new.map(|new| &**new));
        for volume in [change.old, change.new].into_iter().flatten() {
            own.add(volume.key());
            match volume.claim() {
                Some(claim) => own.add(claim),
                None => index.pending(volume.class()).into_iter().for_each(|claim| own.add(claim)),
            }
        }
    });
    let (own, index) = (queue.clone(), context.volumes.clone());
    context.caches.claims.on_change(move |change| {
        index.claim(change.old.map(|old| &**old), change.new.map(|new| &**new));
        if let Some(claim) = change.latest() {
            own.add(claim.key());
            index.reserved(&claim.key()).iter().for_each(|volume| own.add(Key::new("", volume)));
        }
    });
    let (own, index) = (queue.clone(), context.volumes.clone());
    context.caches.storage_classes.on_change(move |change| {
        let Some(class) = change.latest() else { return };
        let named = index.pending(class.name());
        // Claims without a class wait for a default class.
        let unnamed = if is_default(class) { index.pending("") } else { Vec::new() };
        named.into_iter().chain(unnamed).for_each(|claim| own.add(claim));
    });
}

/// Reconciles one claim or one volume.
pub(crate) async fn reconcile(context: &Context, key: Key) -> Result<Next, Error> {
    if key.namespace.is_empty() {
        volume(context, &key).await?;
    } else {
        claim(context, &key).await?;
    }
    Ok(Next::Wait)
}

async fn claim(context: &Context, key: &Key) -> Result<(), Error> {
    let caches = &context.caches;
    let Some(claim) = caches.claims.get(key) else { return Ok(()) };
    let volume = |name: &str| caches.volumes.get(&Key::new("", name));
    let names = if claim.volume().is_empty() { context.volumes.candidates(&claim) } else { Vec::new() };
    let class = caches.storage_classes.get(&Key::new("", claim.class()));
    let pods = if plan::names_pods(&claim, class.as_deref()) {
        let all = caches.pods.in_namespace(&key.namespace).into_iter();
        all.filter(|pod| plan::is_pending_user(pod, &claim)).map(|pod| pod.name().to_owned()).collect()
    } else {
        Vec::new()
    };
    let steps = plan::claim(&ObservedClaim {
        claim: &claim,
        volume: volume(claim.volume()),
        class,
        default_class: default_class(&caches.storage_classes.all()),
        candidates: names.iter().filter_map(|name| volume(name)).collect(),
        pods,
    });
    for step in steps {
        apply(context, Some(&claim), None, step).await?;
    }
    Ok(())
}

async fn volume(context: &Context, key: &Key) -> Result<(), Error> {
    let Some(volume) = context.caches.volumes.get(key) else { return Ok(()) };
    let claim = match volume.claim() {
        None => None,
        Some(key) => match plan::cached_claim(&volume, context.caches.claims.get(&key)) {
            Some(claim) => Some(claim),
            // A volume is released only if the API server confirms that its claim does not exist any more.
            None => context.writer(&context.caches.claims).live(&key).await?.map(Arc::new),
        },
    };
    for step in plan::volume(&volume, claim.as_deref()) {
        match step {
            Action::WarnClaim(reason, message) => {
                if let Some(claim) = &claim {
                    context.record(&**claim, COMPONENT, plan::event(reason, true, message));
                }
            }
            step => apply(context, None, Some(&volume), step).await?,
        }
    }
    Ok(())
}

/// Applies one step of a claim or of a volume.
async fn apply(
    context: &Context,
    claim: Option<&Claim>,
    volume: Option<&PersistentVolume>,
    step: Action,
) -> Result<(), Error> {
    let caches = &context.caches;
    match step {
        Action::PatchClaim(part, patch) => {
            if let Some(claim) = claim {
                context.writer(&caches.claims).merge(&claim.key(), part, patch).await?;
            }
        }
        Action::PatchVolume { name, part, patch } => {
            context.writer(&caches.volumes).merge(&Key::new("", &name), part, patch).await?;
        }
        Action::DeleteVolume => {
            if let Some(volume) = volume {
                // A newer version may have the reclaim policy Retain, or another claim.
                let deleted = context.writer(&caches.volumes).delete(volume, if_unchanged(volume)).await;
                let object = format!("PersistentVolume {}", volume.name());
                deleted.map_err(|source| Error::Request { verb: "delete", object, source })?;
            }
        }
        Action::Record(reason, is_warning, message) => {
            let event = plan::event(reason, is_warning, message);
            match (claim, volume) {
                (Some(claim), _) => context.record(claim, COMPONENT, event),
                (None, Some(volume)) => context.record(volume, COMPONENT, event),
                (None, None) => {}
            }
        }
        // Only volumes have this step.
        Action::WarnClaim(..) => {}
    }
    Ok(())
}

fn is_default(class: &StorageClass) -> bool {
    let annotations = class.metadata.annotations.as_ref();
    let beta = "storageclass.beta.kubernetes.io/is-default-class";
    annotations
        .is_some_and(|all| [IS_DEFAULT, beta].iter().any(|name| all.get(*name).is_some_and(|v| v == "true")))
}

/// The newest default class, as upstream.
fn default_class(classes: &[Arc<StorageClass>]) -> Option<String> {
    let created = |class: &StorageClass| class.metadata.creation_timestamp.as_ref().map(|time| time.0);
    let defaults = classes.iter().filter(|class| is_default(class));
    let newest = defaults.max_by(|a, b| created(a).cmp(&created(b)).then_with(|| b.name().cmp(a.name())));
    newest.map(|class| class.name().to_owned())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::annotation::PROVISIONED_BY;
    use crate::local_volume::PROVISIONER_NAME;
    use crate::test_api::TestApi;

    #[tokio::test]
    async fn a_released_volume_is_not_deleted_if_its_reclaim_policy_becomes_retain() {
        let volume = |version: &str, phase: &str, policy: &str| {
            let reference = json!({"namespace": "n", "name": "c", "uid": "gone"});
            json!({"metadata": {"name": "v", "uid": "u", "resourceVersion": version,
                    "annotations": {PROVISIONED_BY: PROVISIONER_NAME}},
                "spec": {"claimRef": reference, "persistentVolumeReclaimPolicy": policy}, "status": {"phase": phase}})
        };
        // The administrator's change reached the API server, but not the cache.
        let api = TestApi::new(&[("/api/v1/persistentvolumes/v", volume("9", "Released", "Retain"))]);
        let key = Key::new("", "v");
        api.context.caches.volumes.written(serde_json::from_value(volume("7", "Bound", "Delete")).unwrap());
        for _ in 0..2 {
            reconcile(&api.context, key.clone()).await.unwrap();
        }
        let [write] = &api.writes()[..] else { panic!("{:?}", api.writes()) };
        assert_eq!((write.method.as_str(), &write.body["status"]["phase"]), ("PATCH", &json!("Released")));
        let api = TestApi::new(&[]);
        api.context
            .caches
            .volumes
            .written(serde_json::from_value(volume("7", "Released", "Delete")).unwrap());
        reconcile(&api.context, key).await.unwrap();
        let [write] = &api.writes()[..] else { panic!("{:?}", api.writes()) };
        assert_eq!(write.body["preconditions"], json!({"uid": "u", "resourceVersion": "7"}));
    }
}

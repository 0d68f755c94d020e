//! Adds the protection finalizer to VolumeAttributesClasses, and removes it from deleted classes that are not used.

use std::sync::Arc;
use std::time::Duration;

use super::plan;
use crate::context::Context;
use crate::error::Error;
use crate::live;
use crate::object::{Claim, Key, ObjectExt, PersistentVolume};
use crate::queue::{Next, Queue};
use crate::queueing::queue_stored;
use crate::volume_protection::plan::finalizers;
use crate::volume_protection::run::set;

/// Queues each changed class. A changed or deleted claim or volume queues the classes that it used before the change.
/// Few claims have a class, so most changes queue no class.
pub(crate) fn listen(context: &Context, queue: &Arc<Queue<Key>>) {
    queue_stored(&context.caches.attributes_classes, queue);
    let own = queue.clone();
    context.caches.claims.on_change(move |change| {
        let before = change.old.into_iter().flat_map(|claim| plan::classes_of_claim(claim));
        before.for_each(|class| own.add(Key::new("", class)));
    });
    let own = queue.clone();
    context.caches.volumes.on_change(move |change| {
        let before = change.old.and_then(|volume| plan::class_of_volume(volume));
        before.into_iter().for_each(|class| own.add(Key::new("", class)));
    });
}

/// Reconciles one class.
pub(crate) async fn reconcile(context: &Context, key: Key) -> Result<Next, Error> {
    let caches = &context.caches;
    let Some(class) = caches.attributes_classes.get(&key) else { return Ok(Next::Wait) };
    let in_use = || {
        caches.claims.all().iter().any(|claim| plan::classes_of_claim(claim).any(|name| name == key.name))
            || caches
                .volumes
                .all()
                .iter()
                .any(|volume| plan::class_of_volume(volume) == Some(key.name.as_str()))
    };
    let wanted = finalizers(&class.metadata, plan::FINALIZER, in_use);
    // A claim or a volume that was just created may not be in the cache yet. So the API server is asked before the
    // finalizer is removed.
    if wanted.is_some() && class.is_being_deleted() && is_used_now(context, &key.name).await? {
        return Ok(Next::After(Duration::from_secs(1)));
    }
    set(context.writer(&caches.attributes_classes), &*class, wanted).await?;
    Ok(Next::Wait)
}

/// Asks the API server whether a claim or a volume uses the class.
async fn is_used_now(context: &Context, class: &str) -> Result<bool, Error> {
    let by_volume = |volume: &PersistentVolume| plan::class_of_volume(volume) == Some(class);
    let by_claim = |claim: &Claim| plan::classes_of_claim(claim).any(|name| name == class);
    let client = &context.client;
    Ok(live::any(client, "", by_volume).await? || live::any(client, "", by_claim).await?)
}

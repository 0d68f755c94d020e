//! Removes the objects that an initializer rejected before a crash of the server. Runs once, only with the admission
//! plugin Initializers.

use std::sync::Arc;

use coracle_kinds::initializers::failure;

use crate::{
    cache::Shared,
    state::State,
    write::initialization::{FIELD, remove_rejected},
};

/// Removes rejected objects of all resources.
pub(crate) async fn remove_all_rejected(state: Arc<State>) {
    for collection in state.cache.all() {
        remove_rejected_of(&state, &collection).await;
    }
}

/// Removes rejected objects of one resource.
pub(crate) async fn remove_rejected_of(state: &State, collection: &Shared) {
    let (kind, objects) = {
        let collection = collection.lock();
        (collection.shared_kind(), collection.under("").cloned().collect::<Vec<_>>())
    };
    for object in objects.iter().filter(|object| failure(&object.part(&[FIELD])).is_some()) {
        if let Err(error) = remove_rejected(state, &kind, &object.key).await {
            let key = &*object.key;
            tracing::warn!(key, error = %error, "cannot remove an object that an initializer rejected");
        }
    }
}

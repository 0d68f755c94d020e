//! Reconciles replication controllers with the code of replica sets.

use std::sync::Arc;

use crate::context::Context;
use crate::error::Error;
use crate::object::{Key, ReplicationController};
use crate::queue::{Next, Queue};
use crate::replica_set::run::{listen_to, reconcile_one};

/// Queues changed replication controllers, and the replication controllers of changed pods.
pub(crate) fn listen(context: &Context, queue: &Arc<Queue<Key>>) {
    listen_to::<ReplicationController>(context, queue);
}

/// Reconciles one replication controller.
pub(crate) async fn reconcile(context: &Context, key: Key) -> Result<Next, Error> {
    reconcile_one::<ReplicationController>(context, key).await
}
